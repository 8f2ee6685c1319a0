"""How texts and pairs of texts become rows of ids that a model can hold: one row a text, or several.

A text that is too long is cut by a rule, or read in windows, each framed as a text of its own.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import NO_LABEL, Asked, Batch, Example, pack
from allmask.errors import UsageError
from allmask.nn.heads import pool_answers, pooled_tokens
from allmask.options import WINDOWS
from allmask.tasks.common.auxiliary import LEFT_TO_RIGHT, Auxiliary
from allmask.text import Tokenizer, truncate_tokens, windows

log = logging.getLogger("allmask")
Text = str | tuple[str, str]  # one, or a pair of them
MOST_WINDOWS = 16  # of a longer text so many are read, evenly spread
OVERLAP = 4  # neighbours share this part of a window: a fourth


@dataclass(frozen=True)
class Frame:
    """The special tokens around texts, as the makers of a model trained it.

    [CLS] a [SEP]                 BERT
    [CLS] a [SEP] b [SEP]         of a pair, segments 0 and 1
    a <sep> b <sep> <cls>         XLNet, segments 0, 1 and 2
    a, or a <|endoftext|> b       GPT-2
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    segments: int  # how many segment embeddings the model has
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


@dataclass(eq=False)
class Reading:
    """The rows of a number of texts; those of a text stand one after another."""

    examples: list[Example]
    starts: np.ndarray  # where the rows of each text begin, and the end
    cut: int = 0  # texts that are not read as a whole
    features: Tensor | None = None  # (rows, W): what a frozen body makes of each, see `cache_features`
    speaker: str = "first"  # the token that stands for a row, see `Config.pooled_token`

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        ends = np.cumsum([0, *(len(example) for example in self.examples)])[self.starts]
        return np.diff(ends).tolist()

    def rows(self, texts: Sequence[int]) -> tuple[np.ndarray, Tensor]:
        """The numbers of the rows of some texts, and for each row the index of its text among these."""
        counts = (self.starts[1:] - self.starts[:-1])[list(texts)]
        numbers = [np.arange(self.starts[text], self.starts[text + 1]) for text in texts]
        return np.concatenate(numbers), torch.arange(len(texts)).repeat_interleave(torch.from_numpy(counts))

    def batch(self, examples: list[Example]) -> Batch:
        """Some of the rows; where their features are cached, a token of each stands for it."""
        return pack(examples if self.features is None else [_first(example) for example in examples])

    def hidden(self, rows: np.ndarray) -> Tensor | None:
        return None if self.features is None else self.features[torch.from_numpy(rows)]

    def pooled(self, answers: Tensor, how: str) -> Tensor:
        """Scores (rows, labels) become scores (texts, labels)."""
        if len(self) == len(self.examples):
            return answers
        return pool_answers(answers, self.rows(range(len(self)))[1], how)


def read(tokenizer: Tokenizer, config: Config, texts: Sequence[Text], max_length: int, rule: str) -> Reading:
    """The rows of each text or pair, of at most `max_length` tokens."""
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
    return Reading(examples, np.array(starts), cut, speaker=config.pooled_token)


def asking(
    reading: Reading, rows: np.ndarray, ask: Callable[[Tensor, Tensor], Asked], auxiliary: Auxiliary | None, epoch: int
) -> Batch:  # fmt: skip
    """These rows as a batch. `ask` gets the tokens that rows are pooled from, (1, N), and the row of each, (M,)."""
    examples = [reading.examples[row] for row in rows]
    same = auxiliary is not None and auxiliary.hide is None  # one reading serves both: no token sees its successor
    batch = pack([_predicting(example) for example in examples]) if same else reading.batch(examples)
    where = pooled_tokens(batch.mask, reading.speaker)
    row = batch.mask.group[where]
    batch = replace(batch, asked=ask(where, row), hidden=reading.hidden(rows[row.numpy()]))
    if auxiliary is None:
        return batch
    if same:
        return replace(batch, name=LEFT_TO_RIGHT, weight=auxiliary.weight)
    return replace(batch, also=auxiliary.batch(examples, rows.tolist(), epoch))


def log_lengths(reading: Reading, max_length: int) -> None:
    if reading.cut:
        log.info("%s of %s texts are cut to %s tokens", f"{reading.cut:,}", f"{len(reading):,}", max_length)
    several = int((np.diff(reading.starts) > 1).sum())
    if several:
        rows = f"{len(reading.examples) - len(reading) + several:,}"
        log.info("%s of %s texts are read in windows, %s in all", f"{several:,}", f"{len(reading):,}", rows)


# ---- lengths -------------------------------------------------------------------------------------------------


def _fitted(parts: list[list[int]], room: int, rule: str) -> tuple[list[list[list[int]]], bool]:
    """The texts of each row, and whether they are read as a whole."""
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
    return [truncate_tokens(part, limit, rule) for part, limit in zip(parts, limits, strict=True)]


def _limits(parts: list[list[int]], room: int) -> list[int]:
    if len(parts) == 1:
        return [room]
    half, sizes = room // 2, [len(part) for part in parts]
    first = room - sizes[1] if sizes[1] <= half else min(sizes[0], room - half)
    return [max(first, 1), max(room - first, 1)]


# ---- windows of tokens -----------------------------------------------------------------------------------------


def most_context(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """For each place, the number of the window in which it stands farthest from an edge; of several the first.

    Windows are in order and of one length, so that is the one whose middle is nearest.
    """
    middles = np.array(spans).sum(1) - 1  # twice
    return np.searchsorted(middles[:-1] + middles[1:], 4 * places, side="left")


def with_marks(text: str, end: int) -> int:
    """Move the end of a piece of text past the marks that belong to its last letter: accents, variants of emoji.

    Tokenizers drop some of them, and so would end the piece too early.
    """
    while end < len(text) and end > 0 and (unicodedata.category(text[end]) in ("Mn", "Me") or _joins(text, end)):
        end += 1
    return end


def _joins(text: str, place: int) -> bool:
    """Whether a character is part of the sign before it: a colour of skin, or joined to it."""
    return text[place] == "\u200d" or text[place - 1] == "\u200d" or "\U0001f3fb" <= text[place] <= "\U0001f3ff"


# ---- rows of ids ---------------------------------------------------------------------------------------------


def _predicting(example: Example) -> Example:
    """Each token but the last is to predict the next one."""
    return replace(example, labels=np.append(example.ids[1:], NO_LABEL))


def _first(example: Example) -> Example:
    return Example(example.ids[:1], example.order[:1], example.segments[:1], example.labels[:1])
