"""C9. The prefix mask beats the naive one.

Statement: To write a target for a source, the source need not be predicted, so it may be read in both directions
    (prefix mask). Reading it from left to right (naive mask) is a restriction that gains nothing.
Source: Dong et al. 2019 (UniLM); 苏剑林, Transformer如戏，全靠Mask.
Criterion: A small model learns a made-up translation in which the last character of a source decides how each of the
    others is translated, as the verb at the end of a sentence may. In each of five seeds it has learnt it (a held-out
    loss below 0.5) in fewer steps with the prefix mask, and in the mean in at least 5 % fewer. Weaker: fewer in the
    mean. (First, losses after 160 steps of a decaying rate were compared, 1.297 and 1.302, before either had
    learnt it. Then there were three seeds.)
At length: python quality/titles.py DATA
"""

from __future__ import annotations

from random import Random
from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import PEOPLE, TOPICS, loss_on, small_model, story_tokenizer, train_on
from allmask.data import Record
from allmask.tasks.seq2seq import Title

STEPS, EVERY, LENGTH, LEARNT = 600, 5, 5, 0.5  # at most 600 steps
SHIFTS = dict(zip(TOPICS, (1, 3, 5, 7), strict=False))  # by the last character


def measure(trial: Trial, both_ways: bool = True) -> Numbers:
    """`both_ways`: otherwise the source is read from left to right under either name."""
    found: Numbers = {"prefix": [], "naive": []}
    for seed in trial.seeds(5):
        for name in found:
            trial.say(f"{name}, seed {seed}")
            found[name].append(curve(name if both_ways else "naive", seed, trial))
    return found


def curve(mask: str, seed: int, trial: Trial) -> list[float]:
    """The held-out loss after every few steps, until the translation is learnt."""
    model, losses = small_model(story_tokenizer(), seed), []
    task = Title(max_source=16, max_target=8, quote=0, mask=mask).fitted(model)
    train, test = (task.workload(model, pairs(*which)) for which in ((trial.examples(4000), seed), (100, 1000)))

    def look(step: int) -> bool:
        if step % EVERY == 0 or trial.brief:
            losses.append(loss_on(model, test))
        return bool(losses) and losses[-1] < LEARNT

    train_on(model, train, trial.steps(STEPS), seed, look, warmup=20.0)
    return losses


def pairs(count: int, seed: int) -> list[Record]:
    rng = Random(seed)
    found = []
    for _ in range(count):
        numbers, last = [rng.randrange(len(PEOPLE)) for _ in range(LENGTH)], rng.choice(list(SHIFTS))
        source = "".join(PEOPLE[number] for number in numbers) + last
        target = "".join(PEOPLE[(number + SHIFTS[last]) % len(PEOPLE)] for number in numbers)
        found.append(Record({"source": source, "target": target}, ""))
    return found


def judge(numbers: Numbers) -> Verdict:
    prefix, naive = ([EVERY * len(run) for run in numbers[name]] for name in ("prefix", "naive"))
    learnt = all(run and run[-1] < LEARNT for run in numbers["prefix"])
    always = all(a < b for a, b in zip(prefix, naive, strict=True))
    return judged(
        learnt and always and mean(prefix) <= 0.95 * mean(naive),
        f"learnt after {mean(prefix):.0f} steps with the prefix mask, {mean(naive):.0f} with the naive one "
        f"({', '.join(f'{a}/{b}' for a, b in zip(prefix, naive, strict=True))})",
        weaker=learnt and mean(prefix) < mean(naive),
    )


def draw(axes, numbers: Numbers) -> None:
    for number, (name, runs) in enumerate(numbers.items()):
        for seed, run in enumerate(runs):
            steps = [EVERY * (look + 1) for look in range(len(run))]
            axes.plot(steps, run, color=f"C{number}", label=None if seed else name)
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.legend(frameon=False)
