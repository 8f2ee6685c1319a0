"""Continuation: a prompt goes on until the token that ends a text, as causal pretraining taught it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.masks import Mask
from allmask.model import Model
from allmask.tasks.writing import Written, begin_of, end_of, tidy, tokenizer_of, write, writer_for
from allmask.text import Tokenizer, truncate


@dataclass(frozen=True)
class Continuation:
    """`max_source` is what the new tokens leave of the positions; of longer prompts the end is kept.

    With `framed`, texts begin with [CLS] and end with [SEP] (or what stands for them), as `allmask pretrain` frames
    them; without, a prompt stands alone, as GPT-2 reads it.
    """

    max_source: int
    max_target: int = 64
    framed: bool = False

    def __post_init__(self):
        if self.max_source < 1 or self.max_target < 1:
            raise UsageError("max_source and max_target must be at least 1")

    @classmethod
    def within(cls, positions: int, max_target: int | None = None, framed: bool = False) -> Continuation:
        max_target = max_target or max(1, min(cls.max_target, positions // 2))
        room = positions - max_target + 1 - framed  # the last token is written, never read
        if room < 1:
            raise UsageError(f"{max_target} new tokens leave no room in {positions} positions")
        return cls(room, max_target, framed)

    @property
    def positions(self) -> int:
        """How many of them a model learnt."""
        return self.max_source + self.max_target - 1 + self.framed

    def to_dict(self) -> dict[str, Any]:
        return {"task": "continue", **asdict(self)}

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch(list(sources), special=False)
        begin = [id for id in (begin_of(tokenizer),) if self.framed and id is not None]
        return [[*begin, *truncate(text.ids, self.max_source, "tail")] for text in encoded]

    def mask_of(self, is_target: Tensor) -> Mask:
        return Mask.causal(torch.ones_like(is_target))

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """No special token is written but the one that ends a text."""
        tokenizer = tokenizer_of(model)
        end = end_of(tokenizer)
        banned = tuple(sorted(tokenizer.special_ids - {end}))
        rules = {"end": () if end is None else (end,), "banned": banned, "max_new": self.max_target}
        return Decoding(**{**rules, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        return writer_for(model, precision, Mask.causal, segments=(0, 0))

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        return write(self, model, sources, settings or self.decoding(model), batch, writer)

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
        text = tokenizer.decode(tokens)
        return tidy(text) if tokenizer.kind == "wordpiece" else text
