"""The tokenizer: text to ids and back, based on the `tokenizers` library (Rust, parallel over a batch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


class TokenDict(dict[str, Any]):
    """`input_ids`, `token_type_ids` and `attention_mask`, by key or as attributes, as transformers returns them."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer. `specials` maps roles (pad, unk, cls, sep, mask, bos, eos) to special tokens, where they exist."""

    backend: Backend
    specials: Mapping[str, str]
    max_length: int | None = None  # of the texts that its model reads; used by `tokenizer(texts, truncation=True)`

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

    def __call__(
        self, text: str | Sequence[str | tuple[str, str]], text_pair: str | Sequence[str] | None = None, *,
        padding: bool | str = False, truncation: bool | str = False, max_length: int | None = None,
        add_special_tokens: bool = True, return_tensors: str | None = None,
    ) -> TokenDict:  # fmt: skip
        """Encode a text, a list of texts, or pairs, with the arguments and the result of a tokenizer of transformers.

        tokens = tokenizer(["a", "b"], padding=True, truncation=True, return_tensors="pt")
        model(tokens.input_ids, Mask.bidirectional(tokens.attention_mask.bool()), segments=tokens.token_type_ids)

        `padding` is True ("longest") or "max_length"; `truncation` is True ("longest_first"), "only_first" or
        "only_second"; `max_length` is by default that of the model; tensors are "pt" or "np".
        """
        one = isinstance(text, str)
        texts: list[Any] = [text] if one else list(text)
        if text_pair is not None:
            pairs = [text_pair] if isinstance(text_pair, str) else list(text_pair)
            if len(pairs) != len(texts):
                raise UsageError(f"{len(texts)} texts, but {len(pairs)} to pair with them")
            texts = list(zip(texts, pairs, strict=True))
        limit = self.max_length if max_length is None else max_length
        if limit is None and (truncation or padding == "max_length"):
            raise UsageError("this tokenizer belongs to no model, so it has no longest text", "pass max_length=")
        if truncation:
            rows = [self._truncated(entry, limit or 0, truncation, add_special_tokens) for entry in texts]
        else:
            rows = [encoded.raw for encoded in self.encode_batch(texts, special=add_special_tokens)]
        if padding:
            self._pad(rows, limit if padding == "max_length" else max(map(len, rows), default=0), padding)
        found = {
            "input_ids": [row.ids for row in rows],
            "token_type_ids": [row.type_ids for row in rows],
            "attention_mask": [row.attention_mask for row in rows],
        }
        if return_tensors is None:
            return TokenDict({name: values[0] for name, values in found.items()} if one else found)
        return TokenDict({name: _as_tensor(values, return_tensors) for name, values in found.items()})

    def _truncated(self, entry: Any, limit: int, how: bool | str, special: bool) -> Encoding:
        """Encode a text or a pair in at most `limit` tokens. Of a pair the longer text loses tokens first."""
        parts = [
            encoded.raw for encoded in self.encode_batch(entry if isinstance(entry, tuple) else [entry], special=False)
        ]
        room = limit - (self.backend.num_special_tokens_to_add(len(parts) == 2) if special else 0)
        sizes = [len(part) for part in parts]
        if sum(sizes) > room:
            if how in (True, "longest_first"):
                short = sizes.index(min(sizes))
                least = min(sizes[short], room // 2) if len(sizes) == 2 else room
                sizes = [least if number == short else room - least for number in range(len(sizes))]
            elif how in ("only_first", "only_second") and (number := int(how == "only_second")) < len(sizes):
                sizes[number] += room - sum(sizes)
            else:
                raise UsageError(f"truncation is {how!r}; expected True, longest_first, only_first or only_second")
            if min(sizes) < 0:
                raise UsageError(f"max_length is {limit}; no text is left of a row that short", "raise max_length")
            for part, size in zip(parts, sizes, strict=True):
                part.truncate(size)
        return self.backend.post_process(*parts, add_special_tokens=special)

    def _pad(self, rows: list[Encoding], length: int | None, how: bool | str) -> None:
        if how not in (True, "longest", "max_length"):
            raise UsageError(f"padding is {how!r}; expected True, longest or max_length")
        if self.pad_id is None:
            raise UsageError("this tokenizer has no padding token", "encode one text at a time, or pass packed rows")
        side = "right" if self.closing_id is None else "left"  # XLNet's last token represents the text
        for row in rows:
            row.pad(length or 0, direction=side, pad_id=self.pad_id, pad_token=self.specials["pad"])

    def encode(self, text: str, pair: str | None = None, *, special: bool = True) -> Encoded:
        """Encode a text or a pair; with `special`, add the model's special tokens ([CLS] … [SEP] … [SEP] for BERT)."""
        return Encoded(_run([(text, pair)], lambda: self.backend.encode(text, pair, add_special_tokens=special)))

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Encoded]:
        """Encode many texts or pairs at once, on all cores."""
        texts = list(texts)
        if len(texts) == 1:  # without the threads of the library, which cost more than a short text
            text, pair = texts[0] if isinstance(texts[0], tuple) else (texts[0], None)
            return [self.encode(text, pair, special=special)]
        encoded = _run(texts, lambda: self.backend.encode_batch(texts, add_special_tokens=special))
        return [Encoded(raw) for raw in encoded]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        checked = self._checked(ids)
        return guard("tokenizer", lambda: self.backend.decode(checked, skip_special_tokens=skip_special))

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

    @cached_property
    def size(self) -> int:
        """The number of rows of an embedding: the largest id plus one. It is kept: a whole vocabulary takes 10 ms."""
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
        return replace(self, backend=backend), kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return dict(self.specials) == dict(other.specials) and self.backend.to_str() == other.backend.to_str()

    def __hash__(self) -> int:
        return hash((self.kind, self.size))

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.size:,} tokens, {', '.join(dict.fromkeys(self.specials.values()))})"


def _as_tensor(rows: list[list[int]], kind: str) -> Any:
    if kind not in ("pt", "np"):
        raise UsageError(f"return_tensors is {kind!r}; expected pt or np")
    if len({len(row) for row in rows}) > 1:
        raise UsageError("texts of different lengths are no tensor", "pass padding=True")
    if kind == "np":
        import numpy as np

        return np.array(rows, dtype=np.int64)
    import torch

    return torch.tensor(rows, dtype=torch.long)


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
