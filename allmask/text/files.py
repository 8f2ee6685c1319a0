"""The vocabulary files, read strictly: a line that is wrong is named, never skipped, so that no id ever shifts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError
from allmask.text.pipelines import Merges

_MAX_VOCABULARY = 10_000_000
_BOM = b"\xef\xbb\xbf"


def read_text(path: Path) -> str:
    """The file as text, without a byte-order mark; a byte that is not UTF-8 is an error that names its line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.removeprefix(_BOM).count(b"\n", 0, error.start) + 1
        raise CheckpointError(f"{path}:{line}: not UTF-8 text ({error.reason})", "save the file as UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a name that occurs twice in one object is an error, as one of the two would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise CheckpointError(f"{path}: {twice!r} occurs twice in one object", "remove one of the two")
        return made

    try:
        data = json.loads(read_text(path), object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(
            f"{path}{where}: not valid JSON ({error})", "the file may be cut off: copy it again"
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def read_vocab_txt(path: Path) -> dict[str, int]:
    """One piece a line, its id the line's number from 0. Windows line ends and blank lines at the end do no harm."""
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    ids: dict[str, int] = {}
    for id, piece in enumerate(lines):
        if not piece.strip(" \t"):  # other white space is a piece: the Chinese BERT has a line separator, U+2028
            raise CheckpointError(f"{path}:{id + 1}: the line is blank", _placeholder(id))
        if piece in ids:
            first = ids[piece] + 1
            raise CheckpointError(f"{path}:{id + 1}: {piece!r} is already on line {first}", _placeholder(id))
        ids[piece] = id
    if not ids:
        raise CheckpointError(f"{path}: no pieces in it", "the file may be cut off: copy it again")
    return ids


def _placeholder(id: int) -> str:
    return f"removing the line would shift all ids after it; write a placeholder such as [unused-{id}] there"


def read_vocab_json(path: Path) -> dict[str, int]:
    """The pieces and ids of a byte-level BPE."""
    vocabulary = read_json(path)
    check_ids(path, vocabulary)
    return vocabulary


def check_ids(path: Path, vocabulary: dict[str, Any]) -> None:
    """Every id a whole number of sensible size, and no two pieces with the same."""
    owner: dict[int, str] = {}
    for piece, id in vocabulary.items():
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < _MAX_VOCABULARY:
            raise CheckpointError(f"{path}: the id of {piece!r} is {id!r}; expected 0 to {_MAX_VOCABULARY - 1:,}")
        if id in owner:
            raise CheckpointError(f"{path}: {owner[id]!r} and {piece!r} both have the id {id}")
        owner[id] = piece
    if not owner:
        raise CheckpointError(f"{path}: no pieces in it", "the file may be cut off: copy it again")


def read_merges(path: Path, vocabulary: dict[str, int]) -> Merges:
    """Two pieces a line, in the order in which they are merged; the first line may be a #version comment."""
    merges: Merges = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise CheckpointError(f"{path}:{number}: expected two pieces and one space between, found {line!r}")
        for piece in (*parts, "".join(parts)):
            if piece not in vocabulary:
                raise CheckpointError(
                    f"{path}:{number}: {piece!r} is not in vocab.json", "the two files must belong together"
                )
        merges.append((parts[0], parts[1]))
    return merges
