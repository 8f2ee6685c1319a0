"""Text files read as a stream: plain text by lines, or JSON lines with a "text" field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from allmask.errors import DataError

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all files
_JSON_LINES = (".jsonl", ".ndjson")
_REPORT_EVERY = 1 << 20


def check_files(files: Sequence[Path]) -> None:
    """Say at once what would otherwise stop the work in the middle."""
    if not files:
        raise DataError("no text files given", "name at least one .txt or .jsonl file")
    for path in files:
        if path.is_dir():
            raise DataError(f"{path}: is a folder", f"name its files, for example {path}/*.txt")
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty", "remove it from the list")


def texts(files: Sequence[Path], progress: Progress | None = None) -> Iterator[str]:
    """The lines of all files that hold text, one after another; never more than a line in memory."""
    total, done, reported, found = sum(path.stat().st_size for path in files), 0, 0, False
    for path in files:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                done += len(raw)
                if progress and done - reported >= _REPORT_EVERY:
                    progress(done, total)
                    reported = done
                text = _text(path, number, raw)
                if text:
                    found = True
                    yield text
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: nothing but blank lines")
    if progress:
        progress(total, total)


def _text(path: Path, number: int, raw: bytes) -> str:
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason})", "save the file as UTF-8") from None
    return _field(path, number, line) if line and path.suffix in _JSON_LINES else line


def _field(path: Path, number: int, line: str) -> str:
    try:
        record: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not valid JSON ({error})") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f'{path}:{number}: no "text" with a string in it', 'each line is an object such as {"text": "…"}'
        )
    # JSON can spell half of a surrogate pair, which is no character and cannot be encoded
    return text.encode("utf-8", "replace").decode()
