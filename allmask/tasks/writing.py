"""Texts in, texts out: what all tasks that write share, from prompts to tidy lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from allmask.decoding import Decoding, Hypothesis, MaskWriter, PairWriter, Writer, generate, stream
from allmask.errors import UsageError
from allmask.inference.frozen import PRECISIONS, freeze
from allmask.masks import Mask
from allmask.model import Model
from allmask.text import Tokenizer

Written = list[tuple[str, Hypothesis]]  # n-best texts of one source; none if the source is blank


class Writes(Protocol):
    """A task that writes: how a source becomes a prompt, which writer reads it, and how a search ends."""

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]: ...

    def decoding(self, model: Model, **changes: Any) -> Decoding: ...

    def writer(self, model: Model, precision: str | None = None) -> Writer: ...

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str: ...


def tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UsageError("this model has no tokenizer", "put its vocab.txt or tokenizer.json into the folder")
    return model.tokenizer


def begin_of(tokenizer: Tokenizer) -> int | None:
    """The token a pretrained text begins with: [CLS] or what stands for it."""
    return tokenizer.begin_id


def end_of(tokenizer: Tokenizer) -> int | None:
    """The token it ends with: [SEP] or what stands for it."""
    return tokenizer.end_id


def pair_writer(model: Model, precision: str | None) -> Writer:
    """The same of an encoder–decoder."""
    start = tokenizer_of(model).start_id if model.config.start_token is None else model.config.start_token
    begin = None if start is None else [start]
    if precision is None:
        return PairWriter(model, begin)
    from allmask.decoding import engines

    return engines.pair_writer_for(model, precision, begin)


def frozen_for(model: Model, precision: str | None) -> Model:
    """The model itself, or, with a precision, a copy laid out for speed; bytes are for steps of their own."""
    return model if precision is None else freeze(model, precision if precision in PRECISIONS else "auto")


def writer_for(
    model: Model, precision: str | None, mask: Callable[[Tensor], Mask] | None = None,
    segments: tuple[int, int] | None = None,
) -> Writer:  # fmt: skip
    """By the model itself, or, with a precision, by a copy of its weights as they are now, laid out for speed."""
    if precision is None:
        return MaskWriter(model, mask, segments)
    from allmask.decoding import engines  # here: what only trains needs no compiled step

    return engines.writer_for(model, precision, mask, segments)


def expect_frequencies(model: Model, counts: Tensor) -> None:
    """Start a fresh output bias, if there is any, at how often each token is written, as steps would find out."""
    bias = getattr(model.lm_head, "bias", None)
    if bias is not None:
        shares = (counts + 1.0) / (counts + 1.0).sum()
        bias.data.copy_(shares.log())


def write(
    task: Writes, model: Model, sources: Sequence[str], settings: Decoding, batch: int, writer: Writer | None = None
) -> Iterator[Written]:
    """For each source its n-best texts, in the order given, a batch at a time. A blank source gets none."""
    writer = task.writer(model) if writer is None else writer
    for start in range(0, len(sources), batch):
        yield from _write_batch(task, tokenizer_of(model), sources[start : start + batch], settings, writer)


def _write_batch(
    task: Writes, tokenizer: Tokenizer, sources: Sequence[str], settings: Decoding, writer: Writer
) -> list[Written]:
    there = [number for number, source in enumerate(sources) if source.strip()]
    prompts = task.prompts(tokenizer, [sources[number] for number in there])
    result: list[Written] = [[] for _ in sources]
    for number, found in zip(there, generate(writer, prompts, settings), strict=True):
        result[number] = [(task.read_back(tokenizer, one.tokens), one) for one in found]
    return result


def stream_text(
    task: Writes, model: Model, source: str, settings: Decoding, writer: Writer | None = None
) -> Iterator[str]:
    """The text of one source in pieces, as it is written. Joined, they are what `write` gives."""
    tokenizer = tokenizer_of(model)
    if not source.strip():
        return
    steady = Steady()
    prompt = task.prompts(tokenizer, [source])[0]
    tokens: list[int] = []
    for token in stream(task.writer(model) if writer is None else writer, prompt, settings):
        tokens.append(token)
        yield steady.more(task.read_back(tokenizer, tokens))
    yield steady.rest(task.read_back(tokenizer, tokens))


@dataclass
class Steady:
    """What of a growing text will not change any more: a late piece may still join the word or sign before it."""

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


# ---- WordPiece forgets where spaces were ---------------------------------------------------------------------

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
