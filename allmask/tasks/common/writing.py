"""What tasks that write share: prompts, writers, and decoded tokens as readable text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from allmask.decoding import Hypothesis, MaskWriter, PairWriter, Writer
from allmask.errors import UsageError
from allmask.inference.frozen import PRECISIONS, freeze
from allmask.mask import Mask
from allmask.model import Model, Outline
from allmask.text import Tokenizer

Written = list[tuple[str, Hypothesis]]  # the n-best texts for one source, best first; empty for a blank source


class Prompts(NamedTuple):
    ids: list[list[int]]
    cut: int  # how many sources were truncated


def tokenizer_of(model: Model | Outline) -> Tokenizer:
    if model.tokenizer is None:
        raise UsageError("this model has no tokenizer", "put its vocab.txt or tokenizer.json into the folder")
    return model.tokenizer


def expect_frequencies(model: Model, counts: Tensor) -> None:
    """Set the output bias of a new language model head, if it has one, to the log-frequency of each token."""
    bias = getattr(model.lm_head, "bias", None)
    if bias is not None:
        bias.data.copy_(log_frequencies(counts))


def log_frequencies(counts: Tensor) -> Tensor:
    """Return the bias with which an output layer begins by predicting each token or label as often as it occurs."""
    return ((counts + 1.0) / (counts + 1.0).sum()).log()


# ---- writers: with a precision they use a copy of the weights that is packed for speed ---------------------------


def writer_for(
    model: Model, precision: str | None, mask: Callable[[Tensor], Mask] | None = None,
    segments: tuple[int, int] | None = None,
) -> Writer:  # fmt: skip
    if precision is None:
        return MaskWriter(model, mask, segments)
    from allmask.decoding.fast import engines

    return engines.writer_for(model, precision, mask, segments)


def pair_writer(model: Model, precision: str | None) -> Writer:
    """Return the writer of an encoder–decoder."""
    start = tokenizer_of(model).start_id if model.config.start_token is None else model.config.start_token
    begin = None if start is None else [start]
    if precision is None:
        return PairWriter(model, begin)
    from allmask.decoding.fast import engines

    return engines.pair_writer_for(model, precision, begin)


def frozen_for(model: Model, precision: str | None) -> Model:
    """Freeze the model for a writer that has no int8 kernels: int8 becomes auto."""
    return model if precision is None else freeze(model, precision if precision in PRECISIONS else "auto")


# ---- text ------------------------------------------------------------------------------------------------------


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decode tokens; only WordPiece, which drops spaces, needs `tidy`."""
    text = tokenizer.decode(tokens)
    return tidy(text) if tokenizer.kind == "wordpiece" else text


@dataclass
class Steady:
    """Yields the part of a growing text that is final. A later piece may still join the last word."""

    versions: tuple[str, ...] = ()
    shown: int = 0

    def more(self, text: str, held_back: int = 3) -> str:
        """Take the next version of the text and return what is new in the beginning that the last versions share."""
        self.versions = (*self.versions, text)[-held_back:]
        if len(self.versions) < held_back:
            return ""
        columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*self.versions, strict=False))
        return self.rest("".join(letters[0] for letters in columns))

    def rest(self, text: str) -> str:
        """Return what was not shown yet of the text."""
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new


_CHINESE = "\u2e80-\u303f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff“”‘’…—·"
_RULES = [
    (re.compile(rf"(?<=[{_CHINESE}]) (?=\S)|(?<=\S) (?=[{_CHINESE}])"), ""),  # 北 京 欢 迎 你
    (re.compile(r"(?<=\w) ([-/’']) (?=\w)"), r"\1"),  # state - of - the - art
    (re.compile(r" (?=[,.;:!?%)\]}])|(?<=[(\[{]) "), ""),  # ( x ) , y : z
    (re.compile(r"(?<=\d)\. (?=\d)"), "."),  # 2. 0
    (re.compile(r"(?<=\d), (?=\d{3}\b)"), ","),  # 10, 000
]


def tidy(text: str) -> str:
    """Put spaces where people write them: 北 京 becomes 北京, `( well - known )` becomes `(well-known)`."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()
