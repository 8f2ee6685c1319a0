"""What all tasks that write share: prompts, writers, and decoded tokens as tidy text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from allmask.data import Checker, Record
from allmask.decoding import Decoding, Hypothesis, MaskWriter, PairWriter, Writer
from allmask.errors import UsageError
from allmask.inference.frozen import PRECISIONS, freeze
from allmask.mask import Mask
from allmask.model import Model
from allmask.tasks.common.evaluation import Evaluation
from allmask.text import Tokenizer

Written = list[tuple[str, Hypothesis]]  # n-best texts of one source; none if the source is blank


class Prompts(NamedTuple):
    ids: list[list[int]]
    cut: int  # sources that were longer than the task reads


@runtime_checkable
class Writes(Protocol):
    """A task that writes: how a source becomes a prompt, which writer reads it, how a search ends, what it is worth."""

    @property
    def max_source(self) -> int: ...  # tokens

    def sized(self, max_new: int | None) -> Self:
        """The same task with room for so many new tokens; None: as many as it has."""
        ...

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> Prompts: ...

    def mask_of(self, is_target: Tensor) -> Mask: ...

    def decoding(self, model: Model, **changes: Any) -> Decoding: ...

    def writer(self, model: Model, precision: str | None = None) -> Writer: ...

    def fields(self, targets: bool) -> dict[str, Checker]:
        """The required fields of a record, to predict or to evaluate."""
        ...

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int) -> Evaluation: ...

    def predictor(self, model: Model, precision: str = "auto") -> Any: ...


def tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UsageError("this model has no tokenizer", "put its vocab.txt or tokenizer.json into the folder")
    return model.tokenizer


def end_of(tokenizer: Tokenizer) -> int | None:
    """The token that a pretrained text ends with: [SEP] or what stands for it."""
    return tokenizer.end_id


def expect_frequencies(model: Model, counts: Tensor) -> None:
    """Start a fresh output bias, if there is any, at the logarithm of each token's frequency."""
    bias = getattr(model.lm_head, "bias", None)
    if bias is not None:
        shares = (counts + 1.0) / (counts + 1.0).sum()
        bias.data.copy_(shares.log())


# ---- writers: by the model itself, or, with a precision, by a copy of its weights laid out for speed -----------


def writer_for(
    model: Model, precision: str | None, mask: Callable[[Tensor], Mask] | None = None,
    segments: tuple[int, int] | None = None,
) -> Writer:  # fmt: skip
    if precision is None:
        return MaskWriter(model, mask, segments)
    from allmask.decoding.fast import engines

    return engines.writer_for(model, precision, mask, segments)


def pair_writer(model: Model, precision: str | None) -> Writer:
    """The writer of an encoder–decoder."""
    start = tokenizer_of(model).start_id if model.config.start_token is None else model.config.start_token
    begin = None if start is None else [start]
    if precision is None:
        return PairWriter(model, begin)
    from allmask.decoding.fast import engines

    return engines.pair_writer_for(model, precision, begin)


def frozen_for(model: Model, precision: str | None) -> Model:
    """For writers without int8 steps, which take the best other precision."""
    return model if precision is None else freeze(model, precision if precision in PRECISIONS else "auto")


# ---- text ------------------------------------------------------------------------------------------------------


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decoded tokens; pieces that know where spaces were need no tidying."""
    text = tokenizer.decode(tokens)
    return tidy(text) if tokenizer.kind == "wordpiece" else text


@dataclass
class Steady:
    """The part of a growing text that will not change any more: a late piece may still join the word before it."""

    versions: tuple[str, ...] = ()
    shown: int = 0

    def more(self, text: str, held_back: int = 3) -> str:
        self.versions = (*self.versions, text)[-held_back:]
        return self._take(_common(self.versions)) if len(self.versions) == held_back else ""

    def rest(self, text: str) -> str:
        return self._take(text)

    def _take(self, text: str) -> str:
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new


def _common(texts: Sequence[str]) -> str:
    """The beginning that all of them share."""
    first, last = min(texts), max(texts)  # whatever lies between two texts shares what they share
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


# WordPiece forgets where spaces were.
_CHINESE = "\u2e80-\u303f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff“”‘’…—·"
_RULES = [
    (re.compile(rf"(?<=[{_CHINESE}]) (?=\S)|(?<=\S) (?=[{_CHINESE}])"), ""),  # 北 京 欢 迎 你
    (re.compile(r"(?<=\w) ([-/’']) (?=\w)"), r"\1"),  # state - of - the - art
    (re.compile(r" (?=[,.;:!?%)\]}])|(?<=[(\[{]) "), ""),  # ( x ) , y : z
    (re.compile(r"(?<=\d)\. (?=\d)"), "."),  # 2. 0
    (re.compile(r"(?<=\d), (?=\d{3}\b)"), ","),  # 10, 000
]


def tidy(text: str) -> str:
    """A decoded text with spaces where people write them: 北 京 becomes 北京, `( well - known )` `(well-known)`."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()
