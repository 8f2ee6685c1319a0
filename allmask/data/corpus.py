"""A tokenized corpus on disk: made once, in parallel, from files of any size, and read through a memory map.

corpus = prepare([Path("wiki/")], tokenizer, Path("runs/a/corpus"))   # reused if it exists and nothing changed
ids, sentence_starts = corpus.document(7)
windows = Windows(corpus, length=510)

corpus/
  tokens.bin      all tokens one after another, uint16 or uint32, without special tokens: objectives add their own
  sentences.bin   int64: index of the first token of each sentence, and the number of tokens
  documents.bin   int64: index of the first sentence of each document, and the number of sentences
  meta.json       its sources and options, counts, and the SHA-256 of each file above

At any moment the store is complete, or absent and its preparation can be resumed. Until it is complete the folder is
called .corpus.partial and has a journal.jsonl: a line for each finished part, with the sizes and checksums of the files
at that point. Little-endian, like every machine that torch runs on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allmask.data.loader import Loader
from allmask.data.sentences import Progress, Reading, Sentence, find_files, sentences, text_size
from allmask.devices import usable_cores
from allmask.errors import DataError, UsageError
from allmask.files import META, explain_os_errors, put_in_place, remove_leftovers, sealed, sha256, sync, unsealed
from allmask.text import Tokenizer
from allmask.text.load import guard

FORMAT = 1
TOKENS, SENTENCES, DOCUMENTS = FILES = ("tokens.bin", "sentences.bin", "documents.bin")
JOURNAL, ASKED = "journal.jsonl", "asked.json"
CHUNK = (1 << 15) * usable_cores()  # characters per call of the tokenizer, which splits them among its threads
WORKERS = 2  # concurrent calls: while one returns its ids, the other encodes
PART_TOKENS = 1 << 22  # between two lines of the journal: the most that is lost when the process is killed
_READ = 1 << 20  # bytes
_AGAIN = "remove the folder and prepare the corpus again"
_KEPT = "free some space and run again, finished parts are kept; or name another folder"

Say = Callable[[str], None]
log = logging.getLogger("allmask")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, made of sentences, made of tokens. The arrays are memory maps: only the parts in use are loaded."""

    folder: Path
    meta: dict[str, Any]
    ids: np.ndarray  # all tokens
    sentence_starts: np.ndarray  # index of the first token of each sentence, and the number of tokens
    document_starts: np.ndarray  # index of the first sentence of each document, and the number of sentences

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Corpus:
        """Open the store in a folder; `verify` reads all of it to compare the checksums."""
        folder = Path(folder)
        meta = _read_meta(folder)
        for name in FILES:
            file, promised = folder / name, meta["files"][name]
            if not file.is_file():
                raise DataError(f"{file}: missing", _AGAIN)
            size = file.stat().st_size
            if size != promised["bytes"]:
                raise DataError(f"{file}: damaged: {size:,} bytes instead of {promised['bytes']:,}", _AGAIN)
            if verify and sha256(file) != promised["sha256"]:
                raise DataError(f"{file}: damaged: its SHA-256 is not the one in {META}", _AGAIN)
        dtypes = {TOKENS: meta["dtype"], SENTENCES: "int64", DOCUMENTS: "int64"}
        # As plain arrays: slices of np.memmap itself are ten times slower to make
        maps = (np.memmap(folder / name, dtype, "r").view(np.ndarray) for name, dtype in dtypes.items())
        return cls(folder, meta, *maps)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def sentences(self) -> int:
        return len(self.sentence_starts) - 1

    @property
    def documents(self) -> int:
        return len(self.document_starts) - 1

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a document and where its sentences begin in them: (ids, [0, 12, 30])."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        first, last = self.document_starts[number : number + 2]
        starts = self.sentence_starts[first : last + 1]
        return self.ids[starts[0] : starts[-1]], starts[:-1] - starts[0]

    def bounds(self, first: int, last: int) -> np.ndarray:
        """Return the index of the first token of each document from `first` to `last - 1`, and of their end."""
        return self.sentence_starts[self.document_starts[first : last + 1]]

    def __repr__(self) -> str:
        counts = f"{self.documents:,} documents, {self.sentences:,} sentences, {self.tokens:,} tokens"
        return f"Corpus({self.folder}, {counts})"


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    if not file.is_file():
        raise DataError(f"{folder}: not a token store: there is no {META} in it", "prepare the corpus first")
    meta = unsealed(_read(file))
    if meta is None:
        raise DataError(f"{file}: damaged: its checksum is wrong", _AGAIN)
    if meta["format"] != FORMAT:
        raise DataError(f"{file}: a store of format {meta['format']}; this version reads {FORMAT}", _AGAIN)
    return meta


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash that is equal for tokenizers that give the same ids."""
    parts = json.dumps([tokenizer.backend.to_str(), dict(tokenizer.specials)], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


# ---- preparing -----------------------------------------------------------------------------------------------------


def prepare(
    files: Sequence[str | Path], tokenizer: Tokenizer, folder: str | Path, workers: int | None = None, *,
    text_field: str = "text", on_bad_record: str = "stop", verbatim: bool = False, encoding: str | None = None,
    say: Say = log.info, progress: Progress | None = None,
) -> Corpus:  # fmt: skip
    """Open the token store of these files (or folders of files) in `folder`; make it first if needed.

    It is made again if a file, the tokenizer or the way of reading changed; `say` gets the reason. If several processes
    call this at once, one works and the others wait. An interrupted preparation is resumed. `workers` is the number of
    batches encoded at a time, each on all cores; 0 uses no threads of ours. `verbatim` keeps every character of the
    text, also line ends and blank lines; otherwise lines are trimmed and blank lines end documents.
    """
    folder = Path(folder).resolve() if Path(folder).is_symlink() else Path(folder)
    if workers is not None and workers < 0:
        raise UsageError(f"workers is {workers}; expected 0 or more")
    job = _Job(find_files(files), tokenizer, folder, Reading(text_field, on_bad_record, verbatim, encoding), say)
    with _alone(folder, say):
        return job.reuse() or job.make(WORKERS if workers is None else workers, progress)


@dataclass(frozen=True)
class _Job:
    files: Sequence[Path]
    tokenizer: Tokenizer
    folder: Path
    reading: Reading
    say: Say

    @property
    def options(self) -> dict[str, Any]:
        """The options of reading that the tokens depend on."""
        encoding = {} if self.reading.encoding is None else {"encoding": self.reading.encoding}
        return {"text_field": self.reading.text_field, "verbatim": self.reading.verbatim, **encoding}

    def reuse(self) -> Corpus | None:
        """Open an existing store if it is what would be made now."""
        if not self.folder.exists():
            return None
        ours = {*FILES, META, JOURNAL, ASKED}
        names = [file.name for file in self.folder.iterdir()] if self.folder.is_dir() else [self.folder.name]
        other = next((name for name in names if name not in ours), None)
        if other is not None:  # a folder that is not a store is never replaced
            hint = "name a folder of its own for the corpus"
            raise UsageError(f"{self.folder}: not a token store: it contains {other}", hint)
        try:
            reason = self._changed(_read_meta(self.folder))
            if reason is None:
                return Corpus.open(self.folder)
        except DataError as error:
            reason = error.message
        self.say(f"{reason}; preparing {self.folder} again")
        return None

    def _changed(self, meta: dict[str, Any]) -> str | None:
        """Return why an existing store differs from the one to be made; None if it does not."""
        if meta["tokenizer"] != fingerprint(self.tokenizer):
            return "the tokenizer has changed"
        if meta["reading"] != self.options:
            return "the options of reading have changed"
        if meta["skipped"] and not self.reading.skip:
            return "bad records were skipped, which is no longer allowed"
        if len(meta["sources"]) != len(self.files):
            return f"there are {len(self.files)} files instead of {len(meta['sources'])}"
        for file, known in zip(self.files, meta["sources"], strict=True):
            now = _stamp(file)
            # A file with another path or date, copied or moved, is compared by its content
            if {**known, **now} != known and (known["bytes"] != now["bytes"] or known["sha256"] != sha256(file)):
                return f"{file} has changed"
        return None

    def make(self, workers: int, progress: Progress | None) -> Corpus:
        dtype = np.dtype("uint16" if self.tokenizer.size <= 1 << 16 else "uint32")
        asked = {
            "format": FORMAT, "dtype": dtype.name, "tokenizer": fingerprint(self.tokenizer),
            "reading": self.options, "sources": [_stamp(file) for file in self.files],
        }  # fmt: skip
        writer = _Writer(self.folder, asked, dtype)
        try:
            self._fill(writer, workers, progress)
            self._finish(writer, asked)
        finally:
            writer.close()
        return Corpus.open(self.folder, verify=False)

    def _fill(self, writer: _Writer, workers: int, progress: Progress | None) -> None:
        """Read and write in this thread, encode in the background, a few chunks at a time."""
        total = sum(text_size(file, self.reading.text_field) for file in self.files) if progress else 0
        if writer.counts.read:
            self.say(f"{self.folder}: resuming after {writer.counts.tokens:,} tokens")
        source = islice(sentences(self.files, self.reading), writer.counts.read, None)
        with Loader(partial(_encode, self.tokenizer), _chunks(source), workers=workers) as pieces:
            for piece in pieces:
                writer.add(piece)
                if progress:
                    progress(min(writer.counts.text_bytes, total), total)
        if progress:
            progress(total, total)

    def _finish(self, writer: _Writer, asked: dict[str, Any]) -> None:
        if not writer.counts.tokens:
            hint = "check the text and the tokenizer"
            raise DataError(f"{self.files[0]}: the tokenizer produces no tokens for this text", hint)
        sources = []
        for file, stamp in zip(self.files, asked["sources"], strict=True):
            if _stamp(file) != stamp:
                raise DataError(f"{file}: changed while it was read", "run again when it is complete")
            sources.append({**stamp, "sha256": sha256(file)})
        counts = {name: getattr(writer.counts, name) for name in ("tokens", "sentences", "documents")}
        writer.finish({**asked, "sources": sources, **counts, "skipped": dict(self.reading.skipped)})


def _stamp(file: Path) -> dict[str, Any]:
    found = file.stat()
    return {"path": str(file.absolute()), "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _chunks(source: Iterator[Sentence]) -> Iterator[list[Sentence]]:
    """Yield lists of sentences with about CHUNK characters each."""
    chunk, size = [], 0
    for sentence in source:
        chunk.append(sentence)
        size += len(sentence[1]) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, chunk: list[Sentence]) -> _Piece:
    texts = [text for _, text in chunk]
    # The fast version does not compute the offsets of tokens, which are not needed here
    encoded = guard("tokenizer", lambda: tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))
    ids, sizes = array("I"), np.empty(len(encoded), np.int64)
    for number, encoding in enumerate(encoded):
        sizes[number] = len(encoding)
        ids.extend(encoding.ids)
    documents = np.fromiter((document for document, _ in chunk), np.int64, len(chunk))
    return _Piece(np.asarray(ids), sizes, documents, sum(len(text.encode()) + 1 for text in texts))


# ---- writing -------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
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


class _Piece(NamedTuple):
    """Consecutive sentences, encoded."""

    ids: np.ndarray  # of all sentences
    sizes: np.ndarray  # tokens of each sentence; empty sentences are not stored
    documents: np.ndarray  # document number of each sentence, never decreasing
    text_bytes: int


@dataclass(frozen=True)
class _Counts:
    tokens: int = 0
    sentences: int = 0
    documents: int = 0
    read: int = 0  # sentences taken from the source, including empty ones
    last: int = -1  # number of the document written last
    text_bytes: int = 0


class _Writer:
    """Appends pieces to the partial store next to `folder`; `counts` is its progress, also after an interruption."""

    def __init__(self, folder: Path, asked: dict[str, Any], dtype: np.dtype):
        self.folder, self.beside, self.dtype = folder, folder.with_name(f".{folder.name}.partial"), dtype
        self.counts = self.written = _Counts()
        self.hashes = {name: hashlib.sha256() for name in FILES}
        with explain_os_errors(folder, _KEPT):
            remove_leftovers(folder)
            self._begin(asked)
            self.files = {name: (self.beside / name).open("ab") for name in FILES}

    def _begin(self, asked: dict[str, Any]) -> None:
        """Resume a partial store if it was made for the same sources and options; otherwise start a new one."""
        if unsealed(_read(self.beside / ASKED)) == asked:
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
        for line in map(unsealed, _read(self.beside / JOURNAL).splitlines()):
            if line is None or not self._follows(sizes, line):  # None: a crash may have cut it off
                break
            sizes, self.counts = line["sizes"], _Counts(**line["counts"])
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

    def add(self, piece: _Piece) -> None:
        """Append a piece; every PART_TOKENS tokens, sync the files and add a line to the journal."""
        filled = piece.sizes > 0
        sizes, numbers = piece.sizes[filled], piece.documents[filled]
        begins = self.counts.tokens + np.cumsum(sizes) - sizes
        fresh = np.flatnonzero(np.diff(numbers, prepend=self.counts.last))  # sentences that begin a document
        self._append(TOKENS, piece.ids, self.dtype)
        self._append(SENTENCES, begins, np.int64)
        self._append(DOCUMENTS, self.counts.sentences + fresh, np.int64)
        self.counts = _Counts(
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
        with explain_os_errors(self.folder, _KEPT):
            self.files[name].write(raw)
        self.hashes[name].update(raw)

    def _note(self) -> None:
        with explain_os_errors(self.folder, _KEPT):
            self._sync()
            sizes = {name: file.tell() for name, file in self.files.items()}
            checksums = {name: digest.hexdigest() for name, digest in self.hashes.items()}
            line = {"counts": asdict(self.counts), "sizes": sizes, "sha256": checksums}
            with (self.beside / JOURNAL).open("a", encoding="utf-8") as journal:
                journal.write(sealed(line) + "\n")
            sync(self.beside / JOURNAL)
        self.written = self.counts

    def _sync(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self, meta: dict[str, Any]) -> None:
        """Append the final offsets, write meta.json with the checksums, and rename the folder."""
        if self.counts != self.written:
            self._note()
        self._append(SENTENCES, np.array([self.counts.tokens]), np.int64)
        self._append(DOCUMENTS, np.array([self.counts.sentences]), np.int64)
        with explain_os_errors(self.folder, _KEPT):
            self._sync()
            signed = {
                name: {"bytes": file.tell(), "sha256": self.hashes[name].hexdigest()}
                for name, file in self.files.items()
            }
            (self.beside / META).write_text(sealed({**meta, "files": signed}, indent=1) + "\n", encoding="utf-8")
            put_in_place(self.beside, self.folder)
            for name in (JOURNAL, ASKED):
                (self.folder / name).unlink(missing_ok=True)
            sync(self.folder)

    def close(self) -> None:
        """Close the files. After a full disk this fails again, with nothing new to say."""
        for file in self.files.values():
            with suppress(OSError):
                file.close()


def _feed(digest: Any, file: Path, start: int, end: int) -> int:
    """Add bytes `start` to `end` of a file to a digest; return how many of them are missing."""
    with file.open("rb") as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(_READ, end - start))):
            digest.update(block)
            start += len(block)
    return end - start


def _read(file: Path) -> str:
    """Return the text of a small file, or "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
