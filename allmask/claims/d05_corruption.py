"""D5. Why 80 % [MASK], 10 % random, 10 % unchanged.

Statement: If all chosen tokens become [MASK], a BERT learns to predict only there. But texts of later tasks have no
    [MASK], so that what it computes at ordinary tokens was never trained. With 10 % random and 10 % unchanged tokens
    it must represent every token well.
Source: Devlin et al. 2019, section 3.1 and appendix C.2 (small differences after fine-tuning, larger ones as features).
Criterion: Small BERTs read a made-up language of ambiguous words, with 80/10/10 and with 100/0/0, over five seeds.
    Then they learn the classes of words from 64 sentences. Fine-tuned, the accuracy with 80/10/10 is higher by more
    than two standard errors. Weaker: only that of a head on frozen features is.
"""

from __future__ import annotations

from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import reader, surely_above, tag_accuracy

MIXED, ONLY_MASK = (0.8, 0.1, 0.1), (1.0, 0.0, 0.0)
READING, TUNING = 150, 30  # steps


def measure(trial: Trial, mixed: bool = True) -> Numbers:
    """`mixed`: otherwise both read [MASK] only."""
    found: Numbers = {f"{kind}, {name}": [] for kind in ("fine-tuned", "frozen") for name in ("80/10/10", "100/0/0")}
    for seed in trial.seeds(5):
        for name, corruption in (("80/10/10", MIXED if mixed else ONLY_MASK), ("100/0/0", ONLY_MASK)):
            body = reader(seed, trial.steps(READING), corruption)
            for kind, trained in (("fine-tuned", True), ("frozen", False)):
                found[f"{kind}, {name}"].append(tag_accuracy(body, seed, trial.steps(TUNING), trained=trained))
        trial.say(f"seed {seed} of {len(trial.seeds(5))}")
    return found


def differences(numbers: Numbers, kind: str) -> list[float]:
    pairs = zip(numbers[f"{kind}, 80/10/10"], numbers[f"{kind}, 100/0/0"], strict=True)
    return [mixed - only for mixed, only in pairs]


def judge(numbers: Numbers) -> Verdict:
    means = {name: mean(values) for name, values in numbers.items()}
    return judged(
        surely_above(differences(numbers, "fine-tuned")),
        f"accuracy with 80/10/10 and with [MASK] only: fine-tuned {means['fine-tuned, 80/10/10']:.1f} and "
        f"{means['fine-tuned, 100/0/0']:.1f} %, frozen {means['frozen, 80/10/10']:.1f} and "
        f"{means['frozen, 100/0/0']:.1f} %",
        weaker=surely_above(differences(numbers, "frozen")),
    )


def draw(axes, numbers: Numbers) -> None:
    for place, (name, values) in enumerate(numbers.items()):
        axes.scatter([place] * len(values), values, label=name)
    labels = [name.replace(", ", "\n") for name in numbers]
    axes.set(ylabel="accuracy of tags (%)", xticks=range(len(numbers)), xticklabels=labels, xlim=(-0.5, 3.5))
