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
MAX_PIECES = 1_500_000  # of a vocabulary; and merges of a BPE
_MAX_PIECE = 1_000  # bytes of one piece; far longer ones overflow the stack of the Rust library
_NODE = 350  # bytes of a node of the trie that the Rust library makes of a unigram model
_MAX_NODES, _USUAL_NODES = 3_000_000, 5  # of a trie; and per piece: published vocabularies have 1 to 3
_SMALL, _TIMES = 100 << 20, 20  # bytes of a trie that need no explanation; how often the file, for larger ones
_MAX_GROWTH = 512.0  # characters that one character may become; ALBERT has 324, others 18 or fewer
_UNICODE = 18.0  # characters that NFKD makes of U+FDFA, the longest
_MAX_FRAME = 64  # special tokens around a text
_HINT = "no known tokenizer needs that; get the model from a source you trust"


def check_pieces(path: Path, pieces: Collection[str], unigram: bool = False) -> None:
    """Refuse a vocabulary with too many or too long pieces. The trie of a unigram model has a limit of its own."""
    if len(pieces) > MAX_PIECES:
        raise CheckpointError(f"{path}: {len(pieces):,} pieces; at most {MAX_PIECES:,} are read", _HINT)
    longest = max(map(len, pieces), default=0)
    if longest > _MAX_PIECE:
        raise CheckpointError(f"{path}: a piece has {longest:,} characters; at most {_MAX_PIECE:,} are read", _HINT)
    if not unigram:
        return
    size = path.stat().st_size if path.is_file() else 0
    most = min(_MAX_NODES, max(_SMALL // _NODE, _TIMES * size // _NODE, _USUAL_NODES * len(pieces)))
    if 4 * sum(map(len, pieces)) > most and _nodes(pieces) > most:
        what = f"the pieces have more than {most:,} different beginnings, which would take {most * _NODE >> 20:,} MB"
        raise CheckpointError(f"{path}: {what}", _HINT)


def _nodes(pieces: Collection[str]) -> int:
    """Count the nodes of a trie of bytes: of each piece, the bytes that it does not share with the one before it."""
    total, before = 0, b""
    for piece in sorted(piece.encode("utf-8", "surrogatepass") for piece in pieces):
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
