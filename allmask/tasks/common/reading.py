"""From texts and pairs of texts to rows of token ids, and from rows to batches with questions for a task head.

A text that is too long for a row is truncated, or split into windows, each with its own special tokens.
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
Text = str | tuple[str, str]  # a text, or a pair of texts
MOST_WINDOWS = 16  # of a text with more windows, this many are read, evenly spaced
OVERLAP = 4  # neighbouring windows share 1/4 of their length


# ---- rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The special tokens around texts, as in the pretraining of the model.

    [CLS] a [SEP]                 BERT
    [CLS] a [SEP] b [SEP]         a pair: segments 0 and 1
    a <sep> b <sep> <cls>         XLNet: segments 0, 1 and 2
    a, or a <|endoftext|> b       GPT-2
    <s> a </s></s> b </s>         RoBERTa
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    segments: int  # number of segment embeddings of the model
    causal: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: Config) -> Frame:
        first, sep, eos = tokenizer.cls_id, tokenizer.sep_id, tokenizer.eos_id
        if first is None or sep is None:
            specials: tuple[tuple[int, ...], ...] = ((), () if eos is None else (eos,), ())
        elif tokenizer.closing_id is not None:
            specials = ((), (sep,), (sep, first))
        else:
            specials = ((first,), (sep,) * tokenizer.separators, (sep,))
        return cls(*specials, config.segments, config.own_mask == "causal")

    @property
    def null(self) -> int:
        """The index of [CLS] in a row: 0, or -1 if it is at the end."""
        if not self.before and len(self.behind) < 2:
            raise UsageError("this tokenizer has no [CLS] or [SEP]", "this task needs a BERT-like model")
        return 0 if self.before else -1

    def room(self, size: int, texts: int = 1) -> int:
        """How many tokens of text fit into a row of `size` tokens."""
        return size - len(self.before) - len(self.between) * (texts - 1) - len(self.behind)

    def start(self, before: Sequence[int] | None = None) -> int:
        """The index at which a text starts in its row; `before` is the other text of a pair, if it comes first."""
        return len(self.before) + (0 if before is None else len(before) + len(self.between))

    def row(self, *texts: Sequence[int]) -> Example:
        """Return a row of one text or two."""
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
    """The rows of a list of texts; a text has one row, or several in sequence (windows)."""

    examples: list[Example]
    starts: np.ndarray  # (texts + 1,) the first row of each text, and the number of rows
    cut: int = 0  # texts that were truncated
    features: Tensor | None = None  # (rows, W) output of a frozen body, see `cache_features`
    pooled_token: str = "first"  # see `Config.pooled_token`

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each text."""
        ends = np.cumsum([0, *(len(example) for example in self.examples)])[self.starts]
        return np.diff(ends).tolist()

    def rows(self, texts: Sequence[int]) -> tuple[np.ndarray, Tensor]:
        """Return the row numbers of these texts, and for each row the index of its text in `texts`."""
        counts = (self.starts[1:] - self.starts[:-1])[list(texts)]
        numbers = [np.arange(self.starts[text], self.starts[text + 1]) for text in texts]
        return np.concatenate(numbers), torch.arange(len(texts)).repeat_interleave(torch.from_numpy(counts))

    def pooled(self, answers: Tensor, how: str) -> Tensor:
        """Reduce scores (rows, labels) to (texts, labels)."""
        if len(self) == len(self.examples):
            return answers
        return pool_answers(answers, self.rows(range(len(self)))[1], how)


def read(tokenizer: Tokenizer, config: Config, texts: Sequence[Text], max_length: int, rule: str) -> Reading:
    """Tokenize texts or pairs into rows of at most `max_length` tokens; `rule` is the option --truncate."""
    pairs = [(entry, None) if isinstance(entry, str) else entry for entry in texts]
    unique = list(dict.fromkeys(text for pair in pairs for text in pair if text is not None))
    ids = dict(zip(unique, (encoded.ids for encoded in tokenizer.encode_batch(unique, special=False)), strict=True))
    frame = Frame.of(tokenizer, config)
    examples, starts, cut = [], [0], 0
    for first, second in pairs:
        parts = [ids[first]] if second is None else [ids[first], ids[second]]
        rows, complete = _fitted(parts, frame.room(max_length, len(parts)), rule)
        cut += not complete
        examples += [frame.row(*kept) for kept in rows]
        starts.append(len(examples))
    return Reading(examples, np.array(starts), cut, pooled_token=config.pooled_token)


# ---- lengths ---------------------------------------------------------------------------------------------------


def _fitted(parts: list[list[int]], room: int, rule: str) -> tuple[list[list[list[int]]], bool]:
    """Return the parts of each row, and whether no token was left out."""
    if sum(map(len, parts)) <= room:
        return [parts], True
    if rule != WINDOWS:
        return [cut_to(parts, room, rule)], False
    if len(parts) == 1:
        pieces, complete = _slide(parts[0], room)
        return [[window] for window in pieces], complete
    long = int(len(parts[1]) > len(parts[0]))
    limits = _limits(parts, room)
    other = parts[1 - long][: limits[1 - long]]
    pieces, complete = _slide(parts[long], limits[long])
    rows = [[window, other] if long == 0 else [other, window] for window in pieces]
    return rows, complete and len(other) == len(parts[1 - long])


def _slide(ids: list[int], size: int) -> tuple[list[list[int]], bool]:
    """Split ids into windows; return at most MOST_WINDOWS of them, and whether these are all."""
    spans = windows(ids, size, max(1, size - size // OVERLAP))
    if len(spans) <= MOST_WINDOWS:
        return [ids[start:end] for start, end in spans], True
    chosen = np.linspace(0, len(spans) - 1, MOST_WINDOWS).round().astype(int)
    return [ids[slice(*spans[number])] for number in chosen], False


def cut_to(parts: list[list[int]], room: int, rule: str) -> list[list[int]]:
    """Truncate one text or a pair to `room` tokens in all; of a pair the longer text loses tokens first."""
    limits = _limits(parts, room)
    return [truncate_tokens(part, limit, rule) for part, limit in zip(parts, limits, strict=True)]


def _limits(parts: list[list[int]], room: int) -> list[int]:
    if len(parts) == 1:
        return [room]
    half, sizes = room // 2, [len(part) for part in parts]
    first = room - sizes[1] if sizes[1] <= half else min(sizes[0], room - half)
    return [max(first, 1), max(room - first, 1)]


def most_context(positions: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return for each position the number of the window in which it is farthest from an edge; of equals the first.

    Windows are in order and of equal length, so that is the window whose middle is nearest.
    """
    middles = np.array(spans).sum(1) - 1  # times 2
    return np.searchsorted(middles[:-1] + middles[1:], 4 * positions, side="left")


def with_marks(text: str, end: int) -> int:
    """Move the end of a span past combining characters: accents, emoji modifiers, characters joined by U+200D.

    Some tokenizers drop them, and their spans end too early.
    """
    while 0 < end < len(text) and (
        unicodedata.category(text[end]) in ("Mn", "Me")
        or "\u200d" in text[end - 1 : end + 1]
        or "\U0001f3fb" <= text[end] <= "\U0001f3ff"  # skin tones
    ):
        end += 1
    return end


# ---- batches ---------------------------------------------------------------------------------------------------


def row_batch(
    reading: Reading, rows: np.ndarray, ask: Callable[[Tensor, Tensor], Asked], auxiliary: Auxiliary | None, epoch: int
) -> Batch:  # fmt: skip
    """Return rows as a batch for a head that answers once per text.

    `ask` gets the mask of pooled tokens, (1, N), and the row of each of them, (M,).
    """
    examples = [reading.examples[row] for row in rows]
    one_pass = auxiliary is not None and auxiliary.one_pass  # no token sees its successor
    if one_pass:
        batch = pack([replace(each, labels=np.append(each.ids[1:], NO_LABEL)) for each in examples])
    elif reading.features is None:
        batch = pack(examples)
    else:  # the body is not run: one token per row is enough
        batch = pack([Example(each.ids[:1], each.order[:1], each.segments[:1], each.labels[:1]) for each in examples])
    where = pooled_tokens(batch.mask, reading.pooled_token)
    row = batch.mask.group[where]
    hidden = None if reading.features is None else reading.features[torch.from_numpy(rows[row.numpy()])]
    batch = replace(batch, asked=ask(where, row), hidden=hidden)
    if auxiliary is None:
        return batch
    if one_pass:
        return replace(batch, name=LEFT_TO_RIGHT, weight=auxiliary.weight)
    return replace(batch, also=auxiliary.batch(examples, rows.tolist(), epoch))


def tokens_at(batch: Batch, positions: Sequence[np.ndarray]) -> Tensor:
    """Return a mask (1, N), True at these positions of each example; examples are numbered as in the batch."""
    mask = batch.mask
    lengths = mask.group[0].bincount(minlength=len(positions))
    starts = lengths.cumsum(0) - lengths
    chosen = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    for start, indices in zip(starts.tolist(), positions, strict=True):
        chosen[torch.from_numpy(indices) + start] = True
    return chosen[starts[mask.group] + mask.position]
