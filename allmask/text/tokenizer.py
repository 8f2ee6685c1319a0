"""The tokenizer as a value: text to ids and back, on the `tokenizers` library (Rust, parallel over a batch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from allmask.errors import DataError, UsageError
from allmask.text.load import VOCABULARIES, guard, read
from allmask.text.prune import prune
from allmask.text.save import write

T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """An encoded text. Lists are made when asked for: a batch of which only the ids are used costs only the ids."""

    raw: Encoding

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def ids(self) -> list[int]:
        return self.raw.ids

    @property
    def tokens(self) -> list[str]:
        return self.raw.tokens

    @property
    def segments(self) -> list[int]:
        """0 for the first text and its special tokens, 1 for the second; 2 for the <cls> that closes XLNet's."""
        return self.raw.type_ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Where in its text (in characters) each token comes from; (0, 0) for special tokens."""
        return self.raw.offsets


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """`specials` names the piece of each role there is: pad, unk, cls, sep, mask, bos, eos."""

    backend: Backend
    specials: Mapping[str, str]

    @classmethod
    def load(cls, source: str | Path, *, lowercase: bool | None = None) -> Tokenizer:
        """Read a model folder, a tokenizer.json, a vocab.txt, a vocab.json with its merges.txt, or a spiece.model.

        `lowercase` overrides the files: Google's BERT folders do not say whether they are cased, and `True` is assumed.
        """
        return cls(*read(source, lowercase))

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, None if no file of one is in it."""
        return cls.load(folder) if any((Path(folder) / name).is_file() for name in VOCABULARIES) else None

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into a folder, as transformers' AutoTokenizer reads them."""
        write(self.backend, dict(self.specials), Path(folder))

    def encode(self, text: str, pair: str | None = None, *, special: bool = True) -> Encoded:
        """Ids of a text, or of two; with `special` framed as the model expects ([CLS] … [SEP] … [SEP] for BERT)."""
        return Encoded(_run([(text, pair)], lambda: self.backend.encode(text, pair, add_special_tokens=special)))

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Encoded]:
        """The same for many texts or pairs at once, on all cores."""
        texts = list(texts)
        return [
            Encoded(raw) for raw in _run(texts, lambda: self.backend.encode_batch(texts, add_special_tokens=special))
        ]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        ids = self._checked(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The pieces these ids stand for."""
        return [self.backend.id_to_token(id) or "" for id in self._checked(ids)]

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Plain whole numbers that exist here (the library drops the others without a word)."""
        ids = [int(id) for id in ids]
        for id in ids:
            if not 0 <= id < 2**32 or self.backend.id_to_token(id) is None:
                raise UsageError(f"there is no token with id {id}; this tokenizer has {self.size:,}")
        return ids

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self.backend.id_to_token(id)

    @property
    def size(self) -> int:
        """How many rows an embedding needs: one more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def kind(self) -> str:
        """wordpiece, byte-bpe, bpe, unigram or wordlevel."""
        model, cut = self.backend.model, self.backend.pre_tokenizer
        if isinstance(model, models.BPE) and isinstance(cut, pre_tokenizers.ByteLevel):
            return "byte-bpe"
        return type(model).__name__.lower()

    def special_id(self, role: str) -> int | None:
        """The id of a role (pad, unk, cls, sep, mask, bos, eos), None where there is no such token."""
        piece = self.specials.get(role)
        return None if piece is None else self.backend.token_to_id(piece)

    @property
    def special_ids(self) -> frozenset[int]:
        """All special tokens: those with a role and any others the files declare."""
        declared = {id for id, token in self.backend.get_added_tokens_decoder().items() if token.special}
        roles = {self.special_id(role) for role in self.specials}
        return frozenset(declared | {id for id in roles if id is not None})

    pad_id = property(lambda self: self.special_id("pad"))
    unk_id = property(lambda self: self.special_id("unk"))
    cls_id = property(lambda self: self.special_id("cls"))
    sep_id = property(lambda self: self.special_id("sep"))
    mask_id = property(lambda self: self.special_id("mask"))
    bos_id = property(lambda self: self.special_id("bos"))
    eos_id = property(lambda self: self.special_id("eos"))

    @property
    def begin_id(self) -> int | None:
        """What a text begins with: [CLS], or what stands for it. Nothing, where [CLS] closes a text instead."""
        if self.closing_id is not None:
            return None
        return self.bos_id if self.cls_id is None else self.cls_id

    @property
    def end_id(self) -> int | None:
        """What a text ends with: [SEP], or what stands for it."""
        return self.eos_id if self.sep_id is None else self.sep_id

    @property
    def closing_id(self) -> int | None:
        """What stands behind the end of a text: XLNet's <cls>, nothing elsewhere."""
        frame = self.backend.encode("").ids
        return self.cls_id if len(frame) > 1 and frame[-1] == self.cls_id != frame[0] else None

    @property
    def start_id(self) -> int | None:
        """What the decoder of an encoder–decoder reads first: what texts begin with, or, as T5 has it, the padding."""
        return self.pad_id if self.begin_id is None else self.begin_id

    def keep(self, ids: Iterable[int]) -> tuple[Tokenizer, list[int]]:
        """The tokenizer with only these tokens, and the final list: id i of the new one is `kept[i]` of this one.

        Special tokens are always kept; a BPE also keeps its bytes and whatever its kept tokens are merged from. Text
        whose ids (other than unknown words) are all kept is cut into the same pieces as before.
        """
        backend, kept = prune(self.backend, self._checked(ids), self.special_ids)
        return Tokenizer(backend, self.specials), kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return dict(self.specials) == dict(other.specials) and self.backend.to_str() == other.backend.to_str()

    def __hash__(self) -> int:
        return hash((self.kind, self.size))

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.size:,} tokens, {', '.join(dict.fromkeys(self.specials.values()))})"


def _run(texts: Sequence[str | tuple[str, str | None]], encode: Callable[[], T]) -> T:
    try:
        return guard("tokenizer", encode)
    except ValueError:
        _expect_text(texts)
        raise


def _expect_text(texts: Sequence[str | tuple[str, str | None]]) -> None:
    """Say which text it is that the library refused; half of a surrogate pair looks like text and is not."""
    for number, entry in enumerate(texts):
        for text in entry if isinstance(entry, tuple) else (entry,):
            if not isinstance(text, str | None):
                raise UsageError(f"text {number} is {type(text).__name__}; expected str")
            half = re.search("[\ud800-\udfff]", text or "")
            if half:
                raise DataError(
                    f"text {number}: character {half.start()} is half of a surrogate pair (U+{ord(half[0]):04X})",
                    'drop such halves: text.encode(errors="replace").decode()',
                )
