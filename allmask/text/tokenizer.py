"""The tokenizer: text to ids and back, based on the `tokenizers` library (Rust, parallel over a batch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Encoding, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from allmask.errors import DataError, UsageError
from allmask.text.load import VOCABULARIES, guard, read
from allmask.text.prune import prune
from allmask.text.save import write

T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """An encoded text. Its lists are made on access, so unused ones cost nothing."""

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
        """0 for the first text and its special tokens, 1 for the second text, 2 for XLNet's final <cls>."""
        return self.raw.type_ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, end) of each token in its text, in characters; (0, 0) for special tokens."""
        return self.raw.offsets


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer. `specials` maps roles (pad, unk, cls, sep, mask, bos, eos) to special tokens, where they exist."""

    backend: Backend
    specials: Mapping[str, str]

    @classmethod
    def load(cls, source: str | Path, *, lowercase: bool | None = None) -> Tokenizer:
        """Load a model folder, a tokenizer.json, a vocab.txt, a vocab.json with its merges.txt, or a spiece.model.

        `lowercase` overrides the files. Google's BERT folders do not specify it; then True is assumed.
        """
        return cls(*read(source, lowercase))

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """Load the tokenizer of a model folder; None if the folder has no tokenizer files."""
        return cls.load(folder) if any((Path(folder) / name).is_file() for name in VOCABULARIES) else None

    def save(self, folder: str | Path, **settings: Any) -> None:
        """Write the files of the tokenizer to a folder; transformers' AutoTokenizer can load them.

        `settings` are added to tokenizer_config.json.
        """
        write(self.backend, dict(self.specials), Path(folder), settings)

    def encode(self, text: str, pair: str | None = None, *, special: bool = True) -> Encoded:
        """Encode a text or a pair; with `special`, add the model's special tokens ([CLS] … [SEP] … [SEP] for BERT)."""
        return Encoded(_run([(text, pair)], lambda: self.backend.encode(text, pair, add_special_tokens=special)))

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Encoded]:
        """Encode many texts or pairs at once, on all cores."""
        texts = list(texts)
        encoded = _run(texts, lambda: self.backend.encode_batch(texts, add_special_tokens=special))
        return [Encoded(raw) for raw in encoded]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(self._checked(ids), skip_special_tokens=skip_special)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens of these ids."""
        return [self.backend.id_to_token(id) or "" for id in self._checked(ids)]

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Convert ids to integers and refuse unknown ones, which the library would silently drop."""
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
        """The number of rows of an embedding: the largest id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def kind(self) -> str:
        """wordpiece, byte-bpe, bpe, unigram or wordlevel."""
        model = self.backend.model
        if isinstance(model, models.BPE) and isinstance(self.backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            return "byte-bpe"
        return type(model).__name__.lower()

    def special_id(self, role: str) -> int | None:
        """Return the id of a role (pad, unk, cls, sep, mask, bos, eos); None if there is no such token."""
        piece = self.specials.get(role)
        return None if piece is None else self.backend.token_to_id(piece)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens, with or without a role."""
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
    def mask_swallows_space(self) -> bool:
        """Whether the space before the mask token belongs to it, as in RoBERTa and XLNet."""
        tokens = self.backend.get_added_tokens_decoder().values()
        return any(token.content == self.specials.get("mask") and token.lstrip for token in tokens)

    @property
    def begin_id(self) -> int | None:
        """The token that begins a text: [CLS] or <s>. None for XLNet, where <cls> comes last."""
        if self.closing_id is not None:
            return None
        return self.bos_id if self.cls_id is None else self.cls_id

    @property
    def end_id(self) -> int | None:
        """The token that ends a text: [SEP] or </s>."""
        return self.eos_id if self.sep_id is None else self.sep_id

    @property
    def closing_id(self) -> int | None:
        """The token after the end of a text: XLNet's <cls>, None for others."""
        frame = self.backend.encode("").ids
        return self.cls_id if len(frame) > 1 and frame[-1] == self.cls_id != frame[0] else None

    @property
    def separators(self) -> int:
        """The number of separators between the texts of a pair: 1, or 2 for RoBERTa."""
        pair, single = (self.backend.encode("", second).special_tokens_mask for second in ("", None))
        return max(1, sum(pair) - sum(single))

    @property
    def start_id(self) -> int | None:
        """The first input of a decoder: the token that begins a text or, as in T5, the padding."""
        return self.pad_id if self.begin_id is None else self.begin_id

    def keep(self, ids: Iterable[int]) -> tuple[Tokenizer, list[int]]:
        """Return a tokenizer with only these tokens, and the list `kept`: its id i is id `kept[i]` of this one.

        Special tokens are always kept. A BPE also keeps its bytes and all tokens that the kept ones are merged from.
        Text whose ids (other than unknown words) are all kept is tokenized as before.
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
    """Encode texts; if the library refuses, find the text that is not a string or has half of a surrogate pair."""
    try:
        return guard("tokenizer", encode)
    except ValueError:
        for number, entry in enumerate(texts):
            for text in entry if isinstance(entry, tuple) else (entry,):
                if not isinstance(text, str | None):
                    raise UsageError(f"text {number} is {type(text).__name__}; expected str") from None
                half = re.search("[\ud800-\udfff]", text or "")
                if half:
                    what = f"character {half.start()} is half of a surrogate pair (U+{ord(half[0]):04X})"
                    hint = 'drop such halves: text.encode(errors="replace").decode()'
                    raise DataError(f"text {number}: {what}", hint) from None
        raise
