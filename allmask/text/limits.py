"""Limits on files of tokenizers: a small file must not take much memory, when it is read or when it is used."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError

MAX_BYTES = 64 << 20  # of a file; twice as much as the largest vocabularies of published models take
MAX_PIECES = 1_000_000  # of a vocabulary, and merges of a BPE; XLM-V has 901,629 pieces, Gemma 514,906 merges
MAX_NAMES = 1_500_000  # of a tokenizer.json: pieces, and some for each added token
_MAX_ADDED, _MAX_ADDED_TEXT = 100_000, 1_000_000  # added tokens, their characters: 90 bytes each in an automaton
_MAX_PIECE = 1_000  # bytes of one piece; far longer ones overflow the stack of the Rust library
_PIECE, _ENTRY, _MERGE = 300, 150, 250  # bytes that a piece takes, one of a unigram model, and a merge
_NODE = 350  # bytes of a node of the trie that the Rust library makes of a unigram model
_MAX_NODES = 3_000_000  # of a trie
_SMALL = 100 << 20  # bytes that a vocabulary may take, whatever its file
_TIMES, _TIMES_DENSE = 50, 80  # how often its file, for larger ones; without the quotes and spaces of JSON
_MAX_GROWTH = 512.0  # characters that one character may become; ALBERT has 324, others 18 or fewer
_UNICODE = 18.0  # characters that NFKD makes of U+FDFA, the longest
_MAX_FRAME = 64  # special tokens around a text
_MAX_WORD = 1_000  # characters of a word that WordPiece cuts; BERT has 100
_HINT = "no known tokenizer needs that; get the model from a source you trust"


def check_pieces(path: Path, pieces: Collection[str], unigram: bool = False, merges: int = 0) -> None:
    """Refuse a vocabulary that has too many or too long pieces, or would take far more memory than its file."""
    if max(len(pieces), merges) > MAX_PIECES:
        what = f"{merges:,} merges" if merges > MAX_PIECES else f"{len(pieces):,} pieces"
        raise CheckpointError(f"{path}: {what}; at most {MAX_PIECES:,} are read", _HINT)
    longest = max(map(len, pieces), default=0)
    if longest > _MAX_PIECE:
        raise CheckpointError(f"{path}: a piece has {longest:,} characters; at most {_MAX_PIECE:,} are read", _HINT)
    size = path.stat().st_size if path.is_file() else 0
    most = max(_SMALL, (_TIMES if path.suffix == ".json" else _TIMES_DENSE) * size)
    taken = len(pieces) * (_ENTRY if unigram else _PIECE) + merges * _MERGE
    if unigram and taken + _NODE * 4 * sum(map(len, pieces)) > most:
        nodes = _nodes(pieces)
        if nodes > _MAX_NODES:
            what = f"the pieces have {nodes:,} different beginnings; at most {_MAX_NODES:,} are read"
            raise CheckpointError(f"{path}: {what}", _HINT)
        taken += _NODE * nodes
    if taken > most:
        what = f"{len(pieces):,} pieces would take {taken >> 20:,} MB, for a file of {size / 2**20:,.1f} MB"
        raise CheckpointError(f"{path}: {what}", _HINT)


def check_added(path: Path, tokens: Collection[str]) -> None:
    """Refuse very many added tokens, or very long ones: each text is searched for all of them at once."""
    size = sum(map(len, tokens))
    if len(tokens) > _MAX_ADDED or size > _MAX_ADDED_TEXT:
        most = f"at most {_MAX_ADDED:,} with {_MAX_ADDED_TEXT:,} are read"
        raise CheckpointError(f"{path}: {len(tokens):,} added tokens with {size:,} characters; {most}", _HINT)


def check_longest_word(path: Path, characters: Any) -> None:
    """Refuse a WordPiece model that cuts very long words into pieces: the time grows with the cube of their length."""
    if isinstance(characters, int) and characters > _MAX_WORD:
        what = f"max_input_chars_per_word is {characters:,}; at most {_MAX_WORD:,}"
        raise CheckpointError(f"{path}: {what}", _HINT)


def _nodes(pieces: Collection[str]) -> int:
    """Count the nodes of a trie of bytes: of each piece, the bytes that it does not share with the one before it."""
    total, before = 0, b""
    for text in sorted(pieces):  # in the order of their bytes, too
        piece = text.encode("utf-8", "surrogatepass")
        shared = next((at for at, (one, other) in enumerate(zip(before, piece, strict=False)) if one != other), None)
        total += len(piece) - (min(len(before), len(piece)) if shared is None else shared)
        before = piece
    return total


def check_growth(path: Path, name: str, part: Any) -> None:
    """Refuse a normalizer or decoder, as in tokenizer.json, whose steps can multiply a text without end."""
    growth, after_unicode = 1.0, False
    for step in _steps(path, name, part):
        kind = step.get("type")
        if kind == "Replace":
            content = step.get("content")
            growth *= _replacement_growth(step.get("pattern"), len(content) if isinstance(content, str) else 0)
            after_unicode = after_unicode and not content  # what it writes may be decomposed once more
        elif kind == "Precompiled":
            growth *= _charsmap_growth(step.get("precompiled_charsmap"))
        elif kind in ("BertNormalizer", "ByteLevel") and name == "normalizer":
            growth *= 3.0  # spaces around Chinese characters; a character for each byte
        elif kind in ("NFD", "NFC", "NFKD", "NFKC", "Lowercase") and not after_unicode:
            growth, after_unicode = growth * _UNICODE, True
        elif kind == "Prepend":
            growth += len(str(step.get("prepend", "")))
        if growth > _MAX_GROWTH:
            raise CheckpointError(f"{path}: the {name} can make a text {growth:,.0f} times as long", _HINT)


def _steps(path: Path, name: str, part: Any, depth: int = 0) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or decoder, which may be a sequence of sequences."""
    if not isinstance(part, dict):
        return []
    inner = next((part[key] for key in ("normalizers", "decoders") if isinstance(part.get(key), list)), None)
    if inner is None:
        return [part]
    if depth > 8 or len(inner) > 1_000:
        raise CheckpointError(f"{path}: the {name} has too many steps", _HINT)
    return [step for child in inner for step in _steps(path, name, child, depth + 1)]


def _replacement_growth(pattern: Any, written: int) -> float:
    """By how much a text grows at most if every match of a pattern is replaced by `written` characters."""
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        shortest = len(pattern["String"])
    else:
        try:
            shortest = import_module("re._parser").parse(pattern["Regex"]).getwidth()[0]
        except (re.error, ImportError, AttributeError, TypeError, KeyError, RecursionError, OverflowError):
            shortest = 0  # not in Python's syntax, so it may match nothing, which is everywhere
    return max(1.0, written / shortest) if shortest else 1.0 + written


def _charsmap_growth(charsmap: Any) -> float:
    """The longest replacement of a character in a table that sentencepiece has compiled."""
    try:
        content = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap or b"")
    except (binascii.Error, ValueError, TypeError):
        return 1.0  # the library will refuse it
    start = 4 + int.from_bytes(content[:4], "little")  # a trie, then the replacements, each with a zero at its end
    return max((len(text.decode("utf-8", "replace")) for text in content[start:].split(b"\0")), default=1) or 1.0


def check_charsmap(path: Path, charsmap: bytes) -> None:
    """Refuse a table of sentencepiece that replaces a character by a long text."""
    if _charsmap_growth(charsmap) > _MAX_GROWTH / _UNICODE:
        raise CheckpointError(f"{path}: replaces a character by {_charsmap_growth(charsmap):,.0f} others", _HINT)


def check_frame(path: Path, added: Sequence[int]) -> None:
    """Refuse a tokenizer that puts very many special tokens around a text or a pair."""
    if max(added) > _MAX_FRAME:
        raise CheckpointError(f"{path}: puts {max(added):,} special tokens around a text", _HINT)
