"""How to write: which search, how long, what is forbidden. Plain values, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from allmask.errors import UsageError


@dataclass(frozen=True)
class Decoding:
    """`Decoding()` is greedy; `beams=4` is beam search; `sample=True` draws.

    Filters apply in this order: banned tokens, minimal length, n-grams; then, in sampling, temperature, top_k, top_p.
    """

    end: tuple[int, ...] = ()  # tokens that end a hypothesis
    max_new: int = 64  # new tokens at most, the end token included
    min_new: int = 0  # no end token before this many others
    banned: tuple[int, ...] = ()  # tokens never written
    no_repeat_ngram: int = 0  # no n tokens in a row twice; 0: no such rule
    no_repeat_prompt: bool = False  # the prompt's n-grams count as written, too
    beams: int = 1
    n_best: int = 1  # hypotheses a prompt: the best of a beam search, or that many independent samples
    length_penalty: float = 1.0  # score = log-probability / length ** length_penalty, the end token counted
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # draw from the k likeliest; 0: from all
    top_p: float = 1.0  # draw from the fewest tokens that together have this probability
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "end", tuple(self.end))
        object.__setattr__(self, "banned", tuple(self.banned))
        for name, least in (
            ("max_new", 1), ("min_new", 0), ("no_repeat_ngram", 0), ("beams", 1), ("n_best", 1), ("top_k", 0),
        ):  # fmt: skip
            _check(getattr(self, name) >= least, f"{name} is {getattr(self, name)}; expected at least {least}")
        _check(self.temperature > 0, f"temperature is {self.temperature}; expected more than 0", "0 would be greedy")
        _check(0 < self.top_p <= 1, f"top_p is {self.top_p}; expected 0 < top_p <= 1")
        _check(self.min_new <= self.max_new, f"min_new is {self.min_new}, more than max_new, {self.max_new}")
        _check(not self.sample or self.beams == 1, "beams and sample exclude each other", "choose one of them")
        if not self.sample:
            _check(
                self.n_best <= self.beams,
                f"n_best is {self.n_best} of {self.beams} beams",
                f"pass beams={self.n_best} or more, or sample=True",
            )


def _check(holds: bool, message: str, hint: str | None = None) -> None:
    if not holds:
        raise UsageError(f"decoding: {message}", hint)
