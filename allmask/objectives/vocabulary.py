"""What an objective needs from a tokenizer: the special tokens, and which tokens continue a word."""

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
    """Special tokens and properties of ids. Sentinels, for masked spans, may have ids beyond the tokenizer's own."""

    size: int  # of the tokenizer
    begin: int | None  # [CLS], <s>
    end: int | None  # [SEP], </s>
    mask: int | None
    special: np.ndarray  # (rows,) by id: never masked, never drawn at random
    continues: np.ndarray  # (rows,) by id: continues a word
    sentinels: np.ndarray
    pad: int | None = None
    closing: int | None = None  # after the end: XLNet's <cls>

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Sentinels are T5's <extra_id_0> … or BERT's [unused1] … if they exist, otherwise new ids at the end.

        Without a [MASK], T5's first sentinel also masks tokens.
        """
        size, ids = tokenizer.size, tokenizer.backend.get_vocab(with_added_tokens=True)
        sentinels = _named(ids, "<extra_id_{}>", 0) or _named(ids, "[unused{}]", 1) or range(size, size + SENTINELS)
        rows = max(size, max(sentinels) + 1)
        special, continues = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
        special[list(ids.values())] = False  # unused ids between others are never drawn
        special[[*tokenizer.special_ids, *sentinels]] = True
        continues_word = _RULES.get(tokenizer.kind, _never)
        for piece, id in ids.items():
            continues[id] = not special[id] and continues_word(piece)
        mask = ids.get("<extra_id_0>") if tokenizer.mask_id is None else tokenizer.mask_id
        marks = tokenizer.begin_id, tokenizer.end_id, mask
        return cls(size, *marks, special, continues, np.array(sentinels), tokenizer.pad_id, tokenizer.closing_id)

    @property
    def start(self) -> int | None:
        """The first input of a decoder: the token that begins a text or, as in T5, the padding."""
        return self.pad if self.begin is None else self.begin

    @property
    def rows(self) -> int:
        """The number of rows of an embedding, with sentinels."""
        return len(self.special)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids that a random token is drawn from."""
        return np.flatnonzero(~self.special)

    def framed(self, *parts: Ragged) -> Ragged:
        """Add the special tokens that exist: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]; for XLNet a <sep> <cls>."""
        rows = len(parts[0].lengths)
        closing = [] if self.closing is None else [Ragged.constant(self.closing, rows)]
        begin = [] if self.begin is None else [Ragged.constant(self.begin, rows)]
        ends = [] if self.end is None else [Ragged.constant(self.end, rows)]
        return Ragged.join(*begin, *(piece for part in parts for piece in (part, *ends)), *closing)

    def id_of(self, role: str) -> int:
        """Return the id of a role that `need` has checked."""
        id = getattr(self, role)
        assert id is not None, role
        return id

    def need(self, objective: str, *roles: str) -> None:
        """Refuse a tokenizer without a special token that the objective needs."""
        for role in roles:
            if getattr(self, role) is None:
                raise UsageError(
                    f"{objective}: this tokenizer has no {_SPOKEN[role]}",
                    "use one that has, for example: allmask tokenizer train --kind wordpiece",
                )


_FIRST = "[CLS] or other first token"
_SPOKEN = {"mask": "[MASK]", "begin": _FIRST, "start": _FIRST, "end": "[SEP] or other last token"}


def _named(ids: dict[str, int], pattern: str, first: int) -> list[int]:
    """Return the ids of the pieces pattern(first), pattern(first + 1), … up to the first that is missing."""
    found: list[int] = []
    while len(found) < SENTINELS and (id := ids.get(pattern.format(first + len(found)))) is not None:
        found.append(id)
    return found


def _never(piece: str) -> bool:
    return False


def _marked(piece: str) -> bool:
    return piece.startswith("##")


def _letter(piece: str) -> bool:
    """A piece that begins with a letter or digit, not a space (▁), continues a word; a Chinese character does not."""
    return piece[0].isalnum() and not _is_cjk(piece[0])


def _byte(piece: str) -> bool:
    """The same for byte-level pieces, by their first byte: 80–BF are inside a character, E2 and up begin CJK.

    Spaces and other unprintable bytes are written as U+0100 and up, 80–A0 as U+0122 and up.
    """
    code = ord(piece[0])
    return piece[0].isalnum() if code < 0x80 else 0xA1 <= code < 0xE2 or code >= 0x122


def _is_cjk(character: str) -> bool:
    return "\u3040" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7af" or "\uf900" <= character <= "\ufaff"


_RULES = {"wordpiece": _marked, "byte-bpe": _byte, "bpe": _letter, "unigram": _letter}
