"""C23. Without next sentences BERT is worse, from left to right worse still.

Statement: Pretraining with masked tokens and next sentences is better than without next sentences, and that is better
    than a language model from left to right.
Source: Devlin et al. 2019, section 5.1, table 5.
Criterion: Small models are pretrained on made-up stories with each objective for the same number of steps, then
    fine-tuned for two tasks: are two texts about the same topic, and which topic is a text about? In the mean of both
    tasks and five seeds the accuracies are in this order. Weaker: the first is best. (First three seeds. In stories it
    does not hold: the next sentence is known by the person, who recurs, and learning this teaches nothing about topics;
    half of the time a masked token has only half of a story to be guessed from.)
Full: Stories in which no person or thing recurs. There, as in real texts, sentences that follow each other share no
    more than their topic. About 5 minutes. (15 seeds: it does not hold there either. Of the two tasks, "same topic?"
    comes closer to BERT's table: masked tokens 68.8 %, with next sentences 65.0 %, left to right 63.4 %. Liu et al.
    2019, RoBERTa, found next sentences to be of no use as well.)
At length: make quality TEXT=file.txt CLASSIFY=DATA
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import FEW, PRETRAINING, TOPICS, Words, finetuned, pretrained_story_model, stories
from allmask.data import Record

STEPS, PAIRS, SINGLE = 40, 200, 60
OBJECTIVES = {"nsp": "with next sentences", "mlm": "without", "causal": "left to right"}


def measure(trial: Trial, ablated: bool = True) -> Numbers:
    """`ablated`: otherwise all three are pretrained in the same way."""
    found: Numbers = {name: {"pairs": [], "topics": []} for name in OBJECTIVES}
    for seed in trial.seeds(5):
        for name, values in found.items():
            trial.say(f"{OBJECTIVES[name]}, seed {seed}")
            scores = trial.part(f"{name}-{seed}", partial(tuned, name if ablated else "mlm", seed, trial))
            for task, score in scores.items():
                values[task].append(score)
    return found


def tuned(objective: str, seed: int, trial: Trial) -> dict[str, float]:
    """Pretrain, then fine-tune for each task; the accuracies."""
    words = replace(FEW, recurring=not trial.full)
    shape = {"own_mask": "causal"} if objective == "causal" else {}
    body = pretrained_story_model(seed, trial.steps(PRETRAINING), objective, words, **shape)
    many, test = trial.examples(PAIRS), trial.examples(200)
    tasks = {
        "pairs": (pairs(many, seed, words), pairs(test, 1000, words)),
        "topics": (topics(SINGLE, seed), topics(test, 1000)),
    }
    return {task: finetuned(body, *texts, trial.steps(STEPS), seed)[1] for task, texts in tasks.items()}


def pairs(count: int, seed: int, words: Words) -> list[Record]:
    """Two texts of two sentences about different people."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        first = rng.choice(list(TOPICS))
        second = first if rng.random() < 0.5 else rng.choice([name for name in TOPICS if name != first])
        a, b = (stories(1, rng.randrange(1 << 30), 2, (name,), words)[0].text for name in (first, second))
        found.append(Record({"text": a, "text_b": b, "label": "same" if first == second else "other"}, ""))
    return found


def topics(count: int, seed: int) -> list[Record]:
    found = stories(count, 50 + seed, 1)
    return [Record({"text": story.text, "text_b": None, "label": story.topic}, "") for story in found]


def judge(numbers: Numbers) -> Verdict:
    scores = {name: mean(mean(values) for values in numbers[name].values()) for name in OBJECTIVES}
    shown = ", ".join(f"{OBJECTIVES[name]} {score:.1f} %" for name, score in scores.items())
    nsp, mlm, causal = scores.values()
    return judged(nsp > mlm > causal, f"accuracy {shown}", weaker=nsp > max(mlm, causal))


def draw(axes, numbers: Numbers) -> None:
    for number, name in enumerate(OBJECTIVES):
        for task, marker in (("pairs", "o"), ("topics", "s")):
            values = numbers[name][task]
            axes.scatter([number] * len(values), values, marker=marker, label=task if number == 0 else None, color="C0")
    axes.set(ylabel="accuracy (%)", xticks=range(3), xticklabels=list(OBJECTIVES.values()))
    axes.legend(frameon=False)
