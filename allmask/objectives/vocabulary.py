"""What an objective must know of a tokenizer: which ids frame a text, hide a token, go on with a word, are special."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from allmask.errors import UsageError
from allmask.objectives.ragged import Ragged
from allmask.text import Tokenizer

SENTINELS = 100


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Arrays are indexed by id. Sentinels, which stand for hidden spans, may lie beyond the tokenizer's own ids."""

    size: int  # ids of the tokenizer
    begin: int | None  # [CLS], <s>
    end: int | None  # [SEP], </s>
    mask: int | None
    special: np.ndarray  # (rows,) never hidden, never drawn at random
    continues: np.ndarray  # (rows,) goes on with the word before it
    sentinels: np.ndarray
    pad: int | None = None
    closing: int | None = None  # behind the end: XLNet's <cls>

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Sentinels are T5's <extra_id_0> … or BERT's [unused1] … if there are such, otherwise new ids at the end.

        Where there is no [MASK], the first of T5's hides tokens, too.
        """
        size, ids = tokenizer.size, tokenizer.backend.get_vocab(with_added_tokens=True)
        sentinels = _named(ids, "<extra_id_{}>", 0) or _named(ids, "[unused{}]", 1) or range(size, size + SENTINELS)
        rows = max(size, max(sentinels) + 1)
        special, continues = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
        special[list(ids.values())] = False  # a gap between ids is no token to draw
        special[[*tokenizer.special_ids, *sentinels]] = True
        goes_on = _RULES.get(tokenizer.kind, _never)
        for piece, id in ids.items():
            continues[id] = not special[id] and goes_on(piece)
        hides = ids.get("<extra_id_0>") if tokenizer.mask_id is None else tokenizer.mask_id
        marks = tokenizer.begin_id, tokenizer.end_id, hides
        return cls(size, *marks, special, continues, np.array(sentinels), tokenizer.pad_id, tokenizer.closing_id)

    @property
    def start(self) -> int | None:
        """What a decoder reads first: what texts begin with, or, as T5 has it, the padding."""
        return self.pad if self.begin is None else self.begin

    @property
    def rows(self) -> int:
        """How many rows an embedding needs, sentinels included."""
        return len(self.special)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids that a random token is drawn from."""
        return np.flatnonzero(~self.special)

    def framed(self, *parts: Ragged) -> Ragged:
        """[CLS] a [SEP], or [CLS] a [SEP] b [SEP], with the special tokens that there are; a <sep> <cls> for XLNet."""
        rows = len(parts[0].lengths)
        closing = [] if self.closing is None else [Ragged.constant(self.closing, rows)]
        begin = [] if self.begin is None else [Ragged.constant(self.begin, rows)]
        ends = [] if self.end is None else [Ragged.constant(self.end, rows)]
        return Ragged.join(*begin, *(piece for part in parts for piece in (part, *ends)), *closing)

    def id_of(self, role: str) -> int:
        """The id of a role that was needed, and so is there."""
        id = getattr(self, role)
        assert id is not None, role
        return id

    def need(self, objective: str, *roles: str) -> None:
        """Refuse a tokenizer that lacks what an objective cannot do without."""
        for role in roles:
            if getattr(self, role) is None:
                raise UsageError(
                    f"{objective}: this tokenizer has no {_SPOKEN[role]}",
                    "take one that has, for example: allmask tokenizer train --kind wordpiece",
                )


_SPOKEN = {"mask": "[MASK]", "start": "[CLS] or other token to begin with", "end": "[SEP] or other token to end with"}


def _named(ids: dict[str, int], pattern: str, first: int) -> list[int]:
    """The ids of pattern 0, 1, 2, … as far as they go."""
    found: list[int] = []
    while len(found) < SENTINELS and (id := ids.get(pattern.format(first + len(found)))) is not None:
        found.append(id)
    return found


def _never(piece: str) -> bool:
    return False


def _marked(piece: str) -> bool:
    return piece.startswith("##")


def _letter(piece: str) -> bool:
    """Without a space (▁) before it, a letter or digit goes on with a word; a Chinese character is a word."""
    return piece[0].isalnum() and not _is_cjk(piece[0])


def _byte(piece: str) -> bool:
    """The same for pieces of bytes, of which the first tells: 80–BF stand inside a character, E2 and up begin CJK.

    Blanks and other bytes that do not print are written as U+0100 and up, 80–A0 among them as U+0122 and up.
    """
    code = ord(piece[0])
    return piece[0].isalnum() if code < 0x80 else 0xA1 <= code < 0xE2 or code >= 0x122


def _is_cjk(character: str) -> bool:
    return "\u3040" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7af" or "\uf900" <= character <= "\ufaff"


_RULES = {"wordpiece": _marked, "byte-bpe": _byte, "bpe": _letter, "unigram": _letter}
