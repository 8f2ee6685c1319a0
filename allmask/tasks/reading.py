"""What a model reads of texts and pairs of texts: rows of ids of a length it can hold, one of each or several.

A text that is too long is cut by a rule, or read in windows, each framed as a text of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import NO_LABEL, Asked, Batch, Example, pack
from allmask.errors import UsageError
from allmask.heads import pool_answers, speaking_tokens
from allmask.tasks.auxiliary import LEFT_TO_RIGHT, Auxiliary
from allmask.tasks.frames import Frame
from allmask.text import Tokenizer, truncate, windows
from allmask.text.lengths import RULES

log = logging.getLogger("allmask")
Text = str | tuple[str, str]  # one, or a pair of them
WINDOWS = "windows"
POOLS = ("mean", "max")  # what is said of its windows becomes what is said of a text
MOST_WINDOWS = 16  # of a longer text so many are read, evenly spread
OVERLAP = 4  # neighbours share this part of a window: a fourth


def check_lengths(max_length: int, rule: str, pool: str) -> None:
    if max_length < 5:  # [CLS] a [SEP] b [SEP]
        raise UsageError(f"max_length is {max_length}; expected 5 at least")
    if rule not in (*RULES, WINDOWS):
        raise UsageError(f"truncate is {rule!r}; expected one of {', '.join((*RULES, WINDOWS))}")
    if pool not in POOLS:
        raise UsageError(f"pool_windows is {pool!r}; expected one of {', '.join(POOLS)}")


@dataclass(eq=False)
class Reading:
    """The rows of a number of texts; those of a text stand one after another."""

    examples: list[Example]
    starts: np.ndarray  # where the rows of each text begin, and the end
    cut: int = 0  # texts that are not read as a whole
    features: Tensor | None = None  # (rows, W): what a body that does not learn makes of each
    speaker: str = "first"  # the token that stands for a row, see `Config.speaker`

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        ends = np.cumsum([0, *(len(example) for example in self.examples)])[self.starts]
        return np.diff(ends).tolist()

    def rows(self, texts: Sequence[int]) -> tuple[np.ndarray, Tensor]:
        """The numbers of the rows of some texts, and which of these texts, from 0 on, each is of."""
        counts = (self.starts[1:] - self.starts[:-1])[list(texts)]
        numbers = [np.arange(self.starts[text], self.starts[text + 1]) for text in texts]
        return np.concatenate(numbers), torch.arange(len(texts)).repeat_interleave(torch.from_numpy(counts))

    def batch(self, examples: list[Example]) -> Batch:
        """Some of the rows; where all that is needed of them is known, just a token of each."""
        return pack(examples if self.features is None else [_first(example) for example in examples])

    def hidden(self, rows: np.ndarray) -> Tensor | None:
        return None if self.features is None else self.features[torch.from_numpy(rows)]

    def pooled(self, answers: Tensor, how: str) -> Tensor:
        """Scores (rows, labels) become scores (texts, labels)."""
        if len(self) == len(self.examples):
            return answers
        return pool_answers(answers, self.rows(range(len(self)))[1], how)


def read(tokenizer: Tokenizer, config: Config, texts: Sequence[Text], max_length: int, rule: str) -> Reading:
    """What a model reads of each text or pair within `max_length` tokens."""
    sides = [(entry, None) if isinstance(entry, str) else entry for entry in texts]
    once = list(dict.fromkeys(side for pair in sides for side in pair if side is not None))
    ids = dict(zip(once, (encoded.ids for encoded in tokenizer.encode_batch(once, special=False)), strict=True))
    frame = Frame.of(tokenizer, config)
    examples, starts, cut = [], [0], 0
    for first, second in sides:
        parts = [ids[first]] if second is None else [ids[first], ids[second]]
        made, whole = _fitted(parts, frame.room(max_length, len(parts)), rule)
        cut += not whole
        examples += [frame.row(*kept) for kept in made]
        starts.append(len(examples))
    return Reading(examples, np.array(starts), cut, speaker=config.speaker)


def asking(
    reading: Reading, rows: np.ndarray, ask: Callable[[Tensor, Tensor], Asked], auxiliary: Auxiliary | None, epoch: int
) -> Batch:  # fmt: skip
    """These rows as a batch. `ask` is told which tokens stand for a row, (1, N), and which row each is of, (M,)."""
    examples = [reading.examples[row] for row in rows]
    same = auxiliary is not None and auxiliary.hide is None  # one reading serves both: no token sees its successor
    batch = pack([_predicting(example) for example in examples]) if same else reading.batch(examples)
    where = speaking_tokens(batch.mask, reading.speaker)
    row = batch.mask.group[where]
    batch = replace(batch, asked=ask(where, row), hidden=reading.hidden(rows[row]))
    if auxiliary is None:
        return batch
    if same:
        return replace(batch, name=LEFT_TO_RIGHT, weight=auxiliary.weight)
    return replace(batch, also=auxiliary.batch(examples, rows.tolist(), epoch))


def tell_lengths(reading: Reading, max_length: int) -> None:
    if reading.cut:
        log.info("%s of %s texts are cut to %s tokens", f"{reading.cut:,}", f"{len(reading):,}", max_length)
    several = int((np.diff(reading.starts) > 1).sum())
    if several:
        rows = f"{len(reading.examples) - len(reading) + several:,}"
        log.info("%s of %s texts are read in windows, %s in all", f"{several:,}", f"{len(reading):,}", rows)


# ---- lengths -------------------------------------------------------------------------------------------------


def _fitted(parts: list[list[int]], room: int, rule: str) -> tuple[list[list[list[int]]], bool]:
    """The texts of each row, and whether all of them is read."""
    if sum(map(len, parts)) <= room:
        return [parts], True
    if rule != WINDOWS:
        return [cut_to(parts, room, rule)], False
    if len(parts) == 1:
        made, whole = _slide(parts[0], room)
        return [[window] for window in made], whole
    long = int(len(parts[1]) > len(parts[0]))
    limits = _limits(parts, room)
    other = parts[1 - long][: limits[1 - long]]
    made, whole = _slide(parts[long], limits[long])
    rows = [[window, other] if long == 0 else [other, window] for window in made]
    return rows, whole and len(other) == len(parts[1 - long])


def _slide(ids: list[int], size: int) -> tuple[list[list[int]], bool]:
    spans = windows(ids, size, max(1, size - size // OVERLAP))
    if len(spans) <= MOST_WINDOWS:
        return [ids[start:end] for start, end in spans], True
    chosen = np.linspace(0, len(spans) - 1, MOST_WINDOWS).round().astype(int)
    return [ids[slice(*spans[number])] for number in chosen], False


def cut_to(parts: list[list[int]], room: int, rule: str) -> list[list[int]]:
    """At most `room` tokens by a rule of `truncate`: the longer of two texts gives way first."""
    limits = _limits(parts, room)
    return [truncate(part, limit, rule) for part, limit in zip(parts, limits, strict=True)]


def _limits(parts: list[list[int]], room: int) -> list[int]:
    if len(parts) == 1:
        return [room]
    half, sizes = room // 2, [len(part) for part in parts]
    first = room - sizes[1] if sizes[1] <= half else min(sizes[0], room - half)
    return [max(first, 1), max(room - first, 1)]


# ---- rows of ids ---------------------------------------------------------------------------------------------


def _predicting(example: Example) -> Example:
    """Each token but the last is to predict the next one."""
    return replace(example, labels=np.append(example.ids[1:], NO_LABEL))


def _first(example: Example) -> Example:
    return Example(example.ids[:1], example.order[:1], example.segments[:1], example.labels[:1])
