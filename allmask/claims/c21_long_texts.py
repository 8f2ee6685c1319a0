"""C21. Of a long text, the beginning and the end are worth most.

Statement: If a text is too long for the model, its head and tail together classify it better than head or tail alone.
Source: Sun et al. 2019, section 5.3.1.
Criterion: Made-up long texts say what they are about in their first and last sentences, as reviews and articles do, not
    always clearly; in between they wander. A small model reads a third of a text. In the mean of five seeds, head+tail
    is better than each of head and tail by at least three points. Weaker: it is better at all.
At length: allmask finetune --task classify --truncate head+tail --data FILE
"""

from __future__ import annotations

from random import Random
from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import TOPICS, finetuned, small_model, stories, story_tokenizer
from allmask.data import Record
from allmask.options import CUTS
from allmask.tasks.classify import Classify

SENTENCES, TELLING, ROOM, STEPS, CLEAR = 12, 2, 24, 60, 0.6


def measure(trial: Trial, at_the_ends: bool = True) -> Numbers:
    """`at_the_ends`: otherwise the sentences that tell are in the middle."""
    found: Numbers = {cut: [] for cut in CUTS}
    for seed in trial.seeds(5):
        trial.say(f"seed {seed}")
        body = small_model(story_tokenizer(), seed)
        train, test = (
            long_texts(trial.examples(600), seed, at_the_ends),
            long_texts(trial.examples(300), 1000, at_the_ends),
        )
        for cut in CUTS:
            task = Classify(kind="single", max_length=ROOM + 2, truncate=cut)
            found[cut].append(finetuned(body, train, test, trial.steps(STEPS), seed, task=task, lr=3e-3)[1])
    return found


def long_texts(count: int, seed: int, at_the_ends: bool) -> list[Record]:
    """Each telling sentence is about the topic with probability 0.6, and like all others about any topic otherwise."""
    rng = Random(seed)
    sentences = {name: [one.sentences[0] for one in stories(200, 7, 1, (name,))] for name in TOPICS}
    found = []
    for _ in range(count):
        topic = rng.choice(list(TOPICS))
        telling = {*range(TELLING), *range(SENTENCES - TELLING, SENTENCES)}
        if not at_the_ends:
            telling = {number + SENTENCES // 2 - TELLING for number in range(2 * TELLING)}
        chosen = [number in telling and rng.random() < CLEAR for number in range(SENTENCES)]
        text = "".join(rng.choice(sentences[topic if one else rng.choice(list(TOPICS))]) for one in chosen)
        found.append(Record({"text": text, "text_b": None, "label": topic}, ""))
    return found


def judge(numbers: Numbers) -> Verdict:
    head, tail, both = (mean(numbers[cut]) for cut in CUTS)
    return judged(
        both >= max(head, tail) + 3,
        f"accuracy {head:.1f} % with the head, {tail:.1f} % with the tail, {both:.1f} % with both",
        weaker=both > max(head, tail) and both > 150 / len(TOPICS),
    )


def draw(axes, numbers: Numbers) -> None:
    for number, cut in enumerate(CUTS):
        axes.scatter([number] * len(numbers[cut]), numbers[cut])
    axes.axhline(100 / len(TOPICS), color="grey", lw=0.8, linestyle="--", label="chance")
    axes.set(ylabel="accuracy (%)", xticks=range(len(CUTS)), xticklabels=CUTS)
    axes.legend(frameon=False)
