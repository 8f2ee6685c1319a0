"""C13. A masked language model learns less from each step.

Statement: A masked language model predicts 15 % of the tokens of a pass, one that reads from left to right all of
    them. So it needs more steps to learn as much, at first.
Source: Devlin et al. 2019, appendix C.1; Clark et al. 2020 (ELECTRA).
Criterion: Two small models learn from the same rows of text. Each loss is compared with the unigram entropy of the
    text, which either would reach without reading: in each of five seeds, after each sixth of the steps, the model
    that reads from left to right has gained more, and in the end, in the mean, at least a quarter more. (First
    three seeds.)
At length: make quality TEXT=file.txt
"""

from __future__ import annotations

from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import STEPS, language_model

NAMES = {"causal": "left to right", "mlm": "masked"}


def measure(trial: Trial, few: bool = True) -> Numbers:
    """`few`: otherwise the masked model is replaced by the other one, which learns from all tokens."""
    found: Numbers = {name: [] for name in NAMES}
    for seed in trial.seeds(5):
        for name in NAMES:
            trial.say(f"{NAMES[name]}, seed {seed}")
            found[name].append(list(language_model(seed, trial.steps(STEPS), name if few else "causal").gained))
    return found


def judge(numbers: Numbers) -> Verdict:
    pairs = zip(numbers["causal"], numbers["mlm"], strict=True)
    always = all(causal > mlm for runs in pairs for causal, mlm in zip(*runs, strict=True))
    causal, mlm = (mean(run[-1] for run in numbers[name]) for name in NAMES)
    return judged(
        always and causal > 1.25 * mlm and causal > 0,
        f"from left to right {causal:.0f} % of the unigram entropy are gained, masked {mlm:.0f} %",
    )


def draw(axes, numbers: Numbers) -> None:
    for number, (name, label) in enumerate(NAMES.items()):
        for seed, run in enumerate(numbers[name]):
            axes.plot(range(1, len(run) + 1), run, "o-", color=f"C{number}", label=None if seed else label)
    axes.set(xlabel=f"sixths of the {STEPS} steps", ylabel="gained of the unigram entropy (%)")
    axes.legend(frameon=False)
