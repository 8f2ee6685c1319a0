"""The files of a token store. At any moment the store is complete, or absent and its preparation can be resumed.

corpus/
  tokens.bin      all tokens one after another, uint16 or uint32
  sentences.bin   int64: index of the first token of each sentence, and the number of tokens
  documents.bin   int64: index of the first sentence of each document, and the number of sentences
  meta.json       its sources and options, counts, and the SHA-256 of each file above

Until it is complete the folder is called .corpus.partial and has a journal.jsonl: a line for each finished part, with
the sizes and checksums of the files at that point. Little-endian, like every machine that torch runs on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allmask.errors import ResourceError
from allmask.files import put_in_place, remove_leftovers, sync

TOKENS, SENTENCES, DOCUMENTS = FILES = ("tokens.bin", "sentences.bin", "documents.bin")
META, JOURNAL, ASKED = "meta.json", "journal.jsonl", "asked.json"
PART_TOKENS = 1 << 22  # between two lines of the journal: the most that is lost when the process is killed
_READ = 1 << 20  # bytes


class Piece(NamedTuple):
    """Consecutive sentences, encoded."""

    ids: np.ndarray  # of all sentences
    sizes: np.ndarray  # tokens of each sentence; empty sentences are not stored
    documents: np.ndarray  # document number of each sentence, never decreasing
    text_bytes: int


@dataclass(frozen=True)
class Counts:
    tokens: int = 0
    sentences: int = 0
    documents: int = 0
    read: int = 0  # sentences taken from the source, including empty ones
    last: int = -1  # number of the document written last
    text_bytes: int = 0


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Explain a full or read-only disk."""
    try:
        yield
    except OSError as error:
        hint = "free some space and run again, finished parts are kept; or name another folder"
        raise ResourceError(f"{folder}: could not be written: {error.strerror or error}", hint) from error


@contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time prepare a store; others wait. The system frees the lock of a killed process."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = folder.with_name(f".{folder.name}.lock").open("a")
    except OSError:  # a finished store may be in a read-only folder
        yield
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: another process is preparing it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            say(f"{folder}: cannot be locked ({error.strerror}): make sure that only one process prepares it")
        yield


class Writer:
    """Appends pieces to the partial store next to `folder`; `counts` is its progress, also after an interruption."""

    def __init__(self, folder: Path, asked: dict[str, Any], dtype: np.dtype):
        self.folder, self.beside, self.dtype = folder, folder.with_name(f".{folder.name}.partial"), dtype
        self.counts = self.written = Counts()
        self.hashes = {name: hashlib.sha256() for name in FILES}
        with writing(folder):
            remove_leftovers(folder)
            self._begin(asked)
            self.files = {name: (self.beside / name).open("ab") for name in FILES}

    def _begin(self, asked: dict[str, Any]) -> None:
        """Resume a partial store if it was made for the same sources and options; otherwise start a new one."""
        if unsealed(read(self.beside / ASKED)) == asked:
            self._recover()
            return
        shutil.rmtree(self.beside, ignore_errors=True)
        self.beside.mkdir(parents=True)
        (self.beside / ASKED).write_text(sealed(asked), encoding="utf-8")
        self._truncate({})

    def _recover(self) -> None:
        """Compute the checksums from one line of the journal to the next, as long as they match it."""
        sizes: dict[str, int] = {}
        kept = []
        for line in list(_read_journal(self.beside / JOURNAL)):
            if not self._follows(sizes, line):
                break
            sizes, self.counts = line["sizes"], Counts(**line["counts"])
            kept.append(sealed(line) + "\n")
        (self.beside / JOURNAL).write_text("".join(kept), encoding="utf-8")
        self._truncate(sizes)

    def _follows(self, sizes: dict[str, int], line: dict[str, Any]) -> bool:
        """Add the bytes up to this line of the journal to the checksums; return whether they match."""
        hashes = {name: self.hashes[name].copy() for name in FILES}
        for name in FILES:
            start, end = sizes.get(name, 0), line["sizes"][name]
            try:
                missing = _feed(hashes[name], self.beside / name, start, end)
            except FileNotFoundError:
                return False
            if missing or hashes[name].hexdigest() != line["sha256"][name]:
                return False
        self.hashes = hashes
        return True

    def _truncate(self, sizes: dict[str, int]) -> None:
        """Remove everything after the last finished part."""
        for name in FILES:
            with (self.beside / name).open("ab") as file:
                file.truncate(sizes.get(name, 0))
        self.written = self.counts

    def add(self, piece: Piece) -> None:
        """Append a piece; every PART_TOKENS tokens, sync the files and add a line to the journal."""
        filled = piece.sizes > 0
        sizes, numbers = piece.sizes[filled], piece.documents[filled]
        begins = self.counts.tokens + np.cumsum(sizes) - sizes
        fresh = np.flatnonzero(np.diff(numbers, prepend=self.counts.last))  # sentences that begin a document
        self._append(TOKENS, piece.ids, self.dtype)
        self._append(SENTENCES, begins, np.int64)
        self._append(DOCUMENTS, self.counts.sentences + fresh, np.int64)
        self.counts = Counts(
            self.counts.tokens + len(piece.ids),
            self.counts.sentences + len(sizes),
            self.counts.documents + len(fresh),
            self.counts.read + len(filled),
            int(numbers[-1]) if len(numbers) else self.counts.last,
            self.counts.text_bytes + piece.text_bytes,
        )
        if self.counts.tokens - self.written.tokens >= PART_TOKENS:
            self._note()

    def _append(self, name: str, numbers: np.ndarray, dtype: Any) -> None:
        raw = np.ascontiguousarray(numbers, dtype).data.cast("B") if len(numbers) else b""
        with writing(self.folder):
            self.files[name].write(raw)
        self.hashes[name].update(raw)

    def _note(self) -> None:
        with writing(self.folder):
            self._sync()
            line = {"counts": asdict(self.counts), "sizes": self._sizes(), "sha256": self._checksums()}
            with (self.beside / JOURNAL).open("a", encoding="utf-8") as journal:
                journal.write(sealed(line) + "\n")
            sync(self.beside / JOURNAL)
        self.written = self.counts

    def _sync(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def _sizes(self) -> dict[str, int]:
        return {name: file.tell() for name, file in self.files.items()}

    def _checksums(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self.hashes.items()}

    def finish(self, meta: dict[str, Any]) -> None:
        """Append the final offsets, write meta.json with the checksums, and rename the folder."""
        if self.counts != self.written:
            self._note()
        self._append(SENTENCES, np.array([self.counts.tokens]), np.int64)
        self._append(DOCUMENTS, np.array([self.counts.sentences]), np.int64)
        with writing(self.folder):
            self._sync()
            meta = meta | {"files": {name: {"bytes": size} for name, size in self._sizes().items()}}
            for name, digest in self._checksums().items():
                meta["files"][name]["sha256"] = digest
            (self.beside / META).write_text(sealed(meta, indent=1) + "\n", encoding="utf-8")
            put_in_place(self.beside, self.folder)
            for name in (JOURNAL, ASKED):
                (self.folder / name).unlink(missing_ok=True)
            sync(self.folder)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _feed(digest: Any, file: Path, start: int, end: int) -> int:
    """Add bytes `start` to `end` of a file to a digest; return how many of them are missing."""
    with file.open("rb") as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(_READ, end - start))):
            digest.update(block)
            start += len(block)
    return end - start


def sealed(values: dict[str, Any], indent: int | None = None) -> str:
    """Return values as JSON with a checksum, so that a flipped bit in a number does not go unnoticed."""
    return json.dumps({**values, "seal": _seal(values)}, indent=indent)


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def unsealed(text: str) -> dict[str, Any] | None:
    """Return the values of `sealed`; None if the text is damaged."""
    try:
        values = json.loads(text)
        seal = values.pop("seal")
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    return values if seal == _seal(values) else None


def read(file: Path) -> str:
    """Return the text of a small file, or "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read_journal(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal up to the first that is damaged, as a crash may have cut it off."""
    for line in map(unsealed, read(file).splitlines()):
        if line is None:
            return
        yield line
