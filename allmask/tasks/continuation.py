"""Continuation: a prompt goes on until the end-of-text token, as GPT-2 was pretrained to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.masks import Mask
from allmask.model import Model
from allmask.tasks.writing import Written, tokenizer_of, write, writer_for
from allmask.text import Tokenizer, truncate


@dataclass(frozen=True)
class Continuation:
    """`max_source` is what the new tokens leave of the model's positions; of longer prompts the end is kept."""

    max_source: int
    max_target: int = 64

    @classmethod
    def fitted(cls, model: Model, max_target: int | None = None) -> Continuation:
        max_target = max_target or min(cls.max_target, model.config.max_positions // 2)
        room = model.config.max_positions - max_target + 1  # the last token is written, never read
        if room < 1:
            raise UsageError(f"{max_target} new tokens leave no room in {model.config.max_positions} positions")
        return cls(room, max_target)

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch(list(sources), special=False)
        return [truncate(text.ids, self.max_source, "tail") for text in encoded]

    def mask_of(self, is_target: Tensor) -> Mask:
        return Mask.causal(torch.ones_like(is_target))

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        end = tokenizer_of(model).eos_id
        return Decoding(**{"end": () if end is None else (end,), "max_new": self.max_target, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        return writer_for(model, precision)

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        return write(self, model, sources, settings or self.decoding(model), batch, writer)

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens)
