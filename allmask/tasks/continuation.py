"""Continuation: a prompt goes on until the token that ends a text, as causal pretraining taught it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from allmask.decoding import Decoding, FillWriter, Writer
from allmask.errors import UsageError
from allmask.masks import Mask
from allmask.model import Model
from allmask.tasks.writing import Written, begin_of, end_of, frozen_for, tidy, tokenizer_of, write, writer_for
from allmask.text import Tokenizer, truncate

FRAME = 2  # [CLS] and [SEP], or what stands for them


@dataclass(frozen=True)
class Continuation:
    """`max_source` is what the new tokens leave of the positions; of longer prompts the end is kept.

    With `framed`, texts begin with [CLS] and end with [SEP] (or what stands for them), as `allmask pretrain` frames
    them; without, a prompt stands alone, as GPT-2 reads it. With `blanks`, for a model that learnt permutations, the
    places of all new tokens are known, and what stands behind them; they are filled in from left to right:

        [CLS] 北 京 · · · [SEP]
    """

    max_source: int
    max_target: int = 64
    framed: bool = False
    blanks: bool = False

    def __post_init__(self):
        if self.max_source < 1 or self.max_target < 1:
            raise UsageError("max_source and max_target must be at least 1")

    @classmethod
    def within(
        cls, positions: int, max_target: int | None = None, framed: bool = False, blanks: bool = False
    ) -> Continuation:
        max_target = max_target or max(1, min(cls.max_target, positions // 2))
        room = positions - max_target - cls(1, 1, framed, blanks)._around
        if room < 1:
            raise UsageError(f"{max_target} new tokens leave no room in {positions} positions")
        return cls(room, max_target, framed, blanks)

    def refitted(self, positions: int, max_target: int | None = None) -> Continuation:
        """The same for so many new tokens, in as many positions as were learnt and there are."""
        return self.within(min(self.positions, positions), max_target, self.framed, self.blanks)

    @property
    def positions(self) -> int:
        """How many of them a model learnt."""
        return self.max_source + self.max_target + self._around

    @property
    def _around(self) -> int:
        """Positions of what is neither source nor target; the last token that is written is not read."""
        return FRAME if self.blanks else self.framed - 1

    def to_dict(self) -> dict[str, Any]:
        return {"task": "continue", **asdict(self)}

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch(list(sources), special=False)
        begin = [id for id in (begin_of(tokenizer),) if self.framed and id is not None]
        rows = [[*begin, *truncate(text.ids, self.max_source, "tail")] for text in encoded]
        if not self.blanks:
            return rows
        behind = [id for id in (end_of(tokenizer), tokenizer.closing_id) if id is not None]
        return [[*row, *range(-1, -self.max_target - 1, -1), *behind] for row in rows]

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
        if self.blanks:
            return FillWriter(frozen_for(model, precision))
        return writer_for(model, precision, Mask.causal, segments=(0, 0))

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        return write(self, model, sources, settings or self.decoding(model), batch, writer)

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
        text = tokenizer.decode(tokens)
        return tidy(text) if tokenizer.kind == "wordpiece" else text
