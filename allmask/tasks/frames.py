"""How texts become rows of ids: what stands before, between and behind them, as the makers of a model trained it.

[CLS] a [SEP]                 BERT
[CLS] a [SEP] b [SEP]         of a pair, segments 0 and 1
a <sep> b <sep> <cls>         XLNet, segments 0, 1 and 2
a, or a <|endoftext|> b       GPT-2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allmask.config import Config
from allmask.data import NO_LABEL, Example
from allmask.errors import UsageError
from allmask.text import Tokenizer


@dataclass(frozen=True)
class Frame:
    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    segments: int  # that the model tells apart
    causal: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: Config) -> Frame:
        first, sep, eos = tokenizer.cls_id, tokenizer.sep_id, tokenizer.eos_id
        if first is None or sep is None:
            marks: tuple[tuple[int, ...], ...] = ((), () if eos is None else (eos,), ())
        elif tokenizer.closing_id is not None:
            marks = ((), (sep,), (sep, first))
        else:
            marks = ((first,), (sep,), (sep,))
        return cls(*marks, config.segments, config.own_mask == "causal")

    @property
    def null(self) -> int:
        """Where [CLS] stands in a row: at its beginning, or -1, its end."""
        if not self.before and len(self.behind) < 2:
            raise UsageError("this tokenizer has no [CLS] or [SEP]", "this task needs a BERT-like model")
        return 0 if self.before else -1

    def room(self, size: int, texts: int = 1) -> int:
        """How many tokens of texts a row of `size` holds."""
        return size - len(self.before) - len(self.between) * (texts - 1) - len(self.behind)

    def start(self, before: Sequence[int] | None = None) -> int:
        """Where in a row a text begins; `before` is the one before it, if there is one."""
        return len(self.before) + (0 if before is None else len(before) + len(self.between))

    def row(self, *texts: Sequence[int]) -> Example:
        """One text, or two."""
        ids, segments = [*self.before], [0] * len(self.before)
        for number, text in enumerate(texts):
            part = [*text, *(self.behind if number == len(texts) - 1 else self.between)]
            ids += part
            segments += [number if number < self.segments else 0] * len(part)
        if len(self.behind) == 2:  # <sep> <cls>
            segments[-1] = 2 if self.segments > 2 else 0
        order = np.arange(len(ids)) if self.causal else np.zeros(len(ids))
        return Example(np.array(ids, dtype=np.int32), order, np.array(segments), np.full(len(ids), NO_LABEL))
