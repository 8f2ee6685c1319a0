"""C19. Greedy writing falls into loops; sampling from the top k leaves them.

Statement: A language model that always takes the likeliest next token repeats itself. Sampling among the k likeliest
    does not.
Source: Fan et al. 2018 (top-k sampling); Holtzman et al. 2020.
Criterion: allmask-en continues 20 beginnings by 60 tokens. More than 20 % of the trigrams written greedily have
    occurred before in the same text; with top-k 40, less than 5 %, over five seeds. (First one seed: a single text that
    loops in spite of sampling then counts for a twentieth.)
"""

from __future__ import annotations

from allmask import pipeline
from allmask.claims.claim import Numbers, Trial, Verdict, judged

BEGINNINGS = (
    "The history of the city begins", "In the early years of the war", "The program reads a file and",
    "She was born in", "The river flows through",
    "According to the report", "The album was released", "A computer is a machine",
    "The first edition of the book", "The battle took place", "Many people believe that", "The software can be used to",
    "During the nineteenth century", "The president said that", "The species is found in", "The team won the",
    "The language is spoken", "The network consists of", "After the death of the king", "The film was directed by",
)  # fmt: skip
TOKENS, TOP = 60, 40


def measure(trial: Trial, greedy: bool = True) -> Numbers:
    """`greedy`: otherwise both are sampled."""
    write = pipeline("continue", "allmask-en")
    beginnings = list(BEGINNINGS[: 5 if trial.brief else None])
    sampled = [{"sample": True, "top_k": TOP, "seed": seed} for seed in range(1, 6)]
    found: Numbers = {}
    tokens = TOKENS // 3 if trial.brief else TOKENS
    top = [text for options in sampled for text in write(beginnings, max_new=tokens, **options)]
    likeliest = write(beginnings, max_new=tokens) if greedy else top
    for name, texts in (("greedy", likeliest), (f"top-k {TOP}", top)):
        found[name] = [repeated(text) for text in texts]
        found[f"{name}, a sample"] = texts[0]
    return found


def repeated(text: str) -> float:
    """The share of trigrams that have occurred before, in percent."""
    words = text.split()
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return 100 * (1 - len(set(trigrams)) / max(1, len(trigrams)))


def judge(numbers: Numbers) -> Verdict:
    greedy, top = (sum(numbers[name]) / len(numbers[name]) for name in ("greedy", f"top-k {TOP}"))
    return judged(greedy > 20 and top < 5, f"repeated trigrams {greedy:.0f} % greedily, {top:.1f} % with top-k {TOP}")


def draw(axes, numbers: Numbers) -> None:
    for name in ("greedy", f"top-k {TOP}"):
        values = sorted(numbers[name])
        axes.plot([100 * (number + 0.5) / len(values) for number in range(len(values))], values, "o-", label=name)
    axes.set(xlabel="texts, sorted (%)", ylabel="repeated trigrams (%)", ylim=(0, 100))
    axes.legend(frameon=False)
