"""A corpus as tokens on disk: made once, in parallel, from files of any size, and read through the memory map.

corpus = prepare([Path("wiki/")], tokenizer, Path("runs/a/corpus"))   # at once if it is there and nothing changed
ids, sentence_starts = corpus.document(7)
windows = Windows(corpus, length=510)

No special tokens are stored: each objective frames its rows itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from allmask.data import store
from allmask.data.loader import batches
from allmask.data.sentences import Progress, Reading, Sentence, find_files, sentences, text_size
from allmask.data.store import DOCUMENTS, FILES, META, SENTENCES, TOKENS, Piece, Writer
from allmask.errors import DataError, UsageError
from allmask.files import sha256
from allmask.text import Tokenizer
from allmask.text.load import guard

FORMAT = 1
CHUNK = (1 << 15) * (os.cpu_count() or 1)  # characters a call of the tokenizer gets: some for each of its threads
WORKERS = 2  # calls at a time: while one hands over its ids, the other encodes
_AGAIN = "remove the folder and prepare the corpus again"
_OURS = {*FILES, META, store.JOURNAL, store.ASKED}

Say = Callable[[str], None]
log = logging.getLogger("allmask")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of sentences of tokens. The arrays are maps of the files: only what is looked at is in memory."""

    folder: Path
    meta: dict[str, Any]
    ids: np.ndarray  # of all tokens
    sentence_starts: np.ndarray  # among the tokens; one more than there are sentences
    document_starts: np.ndarray  # among the sentences; one more than there are documents

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Corpus:
        """The store in a folder; `verify` reads all of it to compare the checksums."""
        folder = Path(folder)
        meta = _read_meta(folder)
        for name in FILES:
            _check_file(folder / name, meta["files"][name], verify)
        offsets = (_map(folder / name, "int64") for name in (SENTENCES, DOCUMENTS))
        return cls(folder, meta, _map(folder / TOKENS, meta["dtype"]), *offsets)

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
        """The ids of a document, and where its sentences begin among them: (ids, [0, 12, 30])."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        first, last = self.document_starts[number : number + 2]
        starts = self.sentence_starts[first : last + 1]
        return self.ids[starts[0] : starts[-1]], starts[:-1] - starts[0]

    def bounds(self, first: int, last: int) -> np.ndarray:
        """Where the documents from `first` up to `last` begin among the tokens, and where the last of them ends."""
        return self.sentence_starts[self.document_starts[first : last + 1]]

    def __repr__(self) -> str:
        return (
            f"Corpus({self.folder}, {self.documents:,} documents, {self.sentences:,} sentences, {self.tokens:,} tokens)"
        )


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    if not file.is_file():
        raise DataError(f"{folder}: not a token store: there is no {META} in it", "prepare the corpus first")
    meta = store.unsealed(store.read(file))
    if meta is None:
        raise DataError(f"{file}: damaged: its checksum is wrong", _AGAIN)
    if meta["format"] != FORMAT:
        raise DataError(f"{file}: a store of format {meta['format']}; this version reads {FORMAT}", _AGAIN)
    return meta


def _check_file(file: Path, promised: dict[str, Any], verify: bool) -> None:
    if not file.is_file():
        raise DataError(f"{file}: missing", _AGAIN)
    size = file.stat().st_size
    if size != promised["bytes"]:
        raise DataError(f"{file}: damaged: {size:,} bytes instead of {promised['bytes']:,}", _AGAIN)
    if verify and sha256(file) != promised["sha256"]:
        raise DataError(f"{file}: damaged: its SHA-256 is not the one in {META}", _AGAIN)


def _map(file: Path, dtype: str) -> np.ndarray:
    """A plain array over the map: slices of np.memmap itself are ten times slower to make."""
    return np.memmap(file, dtype, "r").view(np.ndarray)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that give the same ids."""
    parts = json.dumps([tokenizer.backend.to_str(), dict(tokenizer.specials)], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


# ---- making one --------------------------------------------------------------------------------------------


def prepare(
    files: Sequence[str | Path], tokenizer: Tokenizer, folder: str | Path, workers: int | None = None, *,
    text_field: str = "text", on_bad_record: str = "stop", verbatim: bool = False,
    say: Say = log.info, progress: Progress | None = None,
) -> Corpus:  # fmt: skip
    """The token store of these files (or folders of files) in `folder`: opened if it is there, made if it is not.

    It is made again, and `say` told why, if a file, the tokenizer or the way of reading changed. Of several processes
    that ask at once, one works and the others wait. One that was interrupted is gone on with. `workers` is how many
    batches are encoded at a time, each on all cores; 0 does without threads of ours. `verbatim` keeps every character
    of the text, line ends and blank lines too; without it lines are trimmed and blank lines end documents.
    """
    folder = Path(folder).resolve() if Path(folder).is_symlink() else Path(folder)
    if workers is not None and workers < 0:
        raise UsageError(f"workers is {workers}; expected 0 or more")
    job = _Job(find_files(files), tokenizer, folder, Reading(text_field, on_bad_record, verbatim), say)
    with store.alone(folder, say):
        return job.reuse() or job.make(WORKERS if workers is None else workers, progress)


@dataclass(frozen=True)
class _Job:
    files: Sequence[Path]
    tokenizer: Tokenizer
    folder: Path
    reading: Reading
    say: Say

    @property
    def how(self) -> dict[str, Any]:
        """What else the tokens depend on."""
        return {"text_field": self.reading.text_field, "verbatim": self.reading.verbatim}

    def reuse(self) -> Corpus | None:
        """The store that is there, if it is what would be made now."""
        if not self.folder.exists():
            return None
        _refuse_others(self.folder)
        try:
            reason = self._changed(_read_meta(self.folder))
            if reason is None:
                return Corpus.open(self.folder)
        except DataError as error:
            reason = error.message
        self.say(f"{reason}; preparing {self.folder} again")
        return None

    def _changed(self, meta: dict[str, Any]) -> str | None:
        """Why a store is not the one that is asked for."""
        if meta["tokenizer"] != fingerprint(self.tokenizer):
            return "the tokenizer is another one"
        if meta["reading"] != self.how:
            return "the text is to be read in another way"
        if meta["skipped"] and not self.reading.skip:
            return "records were skipped that now are not to be"
        if len(meta["sources"]) != len(self.files):
            return f"there are {len(self.files)} files now and were {len(meta['sources'])}"
        changed = (file for file, known in zip(self.files, meta["sources"], strict=True) if not _is_same(file, known))
        return next((f"{file} has changed" for file in changed), None)

    def make(self, workers: int, progress: Progress | None) -> Corpus:
        kind = np.dtype("uint16" if self.tokenizer.size <= 1 << 16 else "uint32")
        origin = [_stamp(file) for file in self.files]
        asked = {
            "format": FORMAT, "dtype": kind.name, "tokenizer": fingerprint(self.tokenizer),
            "reading": self.how, "sources": origin,
        }  # fmt: skip
        writer = Writer(self.folder, asked, kind)
        try:
            self._fill(writer, workers, progress)
            self._finish(writer, asked)
        finally:
            writer.close()
        return Corpus.open(self.folder, verify=False)

    def _fill(self, writer: Writer, workers: int, progress: Progress | None) -> None:
        """Read here, encode in the background, write here; a few chunks are under way at any time."""
        total = sum(text_size(file, self.reading.text_field) for file in self.files) if progress else 0
        if writer.counts.read:
            self.say(f"{self.folder}: going on after {writer.counts.tokens:,} tokens")
        source = islice(sentences(self.files, self.reading), writer.counts.read, None)
        with batches(partial(_encode, self.tokenizer), _chunks(source), workers=workers) as pieces:
            for piece in pieces:
                writer.add(piece)
                if progress:
                    progress(min(writer.counts.text_bytes, total), total)
        if progress:
            progress(total, total)

    def _finish(self, writer: Writer, asked: dict[str, Any]) -> None:
        if not writer.counts.tokens:
            raise DataError(f"{self.files[0]}: the tokenizer makes no token of this text", "check the two")
        sources = [{**stamp, "sha256": sha256(file)} for file, stamp in self._stamps(asked)]
        counts = {name: asdict(writer.counts)[name] for name in ("tokens", "sentences", "documents")}
        writer.finish({**asked, "sources": sources, **counts, "skipped": dict(self.reading.skipped)})

    def _stamps(self, asked: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
        for file, stamp in zip(self.files, asked["sources"], strict=True):
            if _stamp(file) != stamp:
                raise DataError(f"{file}: changed while it was read", "run again when it is complete")
            yield file, stamp


def _refuse_others(folder: Path) -> None:
    """A folder that is not a store is never replaced by one."""
    other = next((file for file in folder.iterdir() if file.name not in _OURS), None) if folder.is_dir() else folder
    if other is not None:
        raise UsageError(f"{folder}: there is something else: {other.name}", "name a folder of its own for the corpus")


def _stamp(file: Path) -> dict[str, Any]:
    found = file.stat()
    return {"path": str(file.absolute()), "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _is_same(file: Path, known: dict[str, Any]) -> bool:
    """By its date if that is the same; a file that was copied or moved, by its content."""
    now = _stamp(file)
    if all(known[name] == value for name, value in now.items()):
        return True
    return known["bytes"] == now["bytes"] and known["sha256"] == sha256(file)


def _chunks(source: Iterator[Sentence]) -> Iterator[list[Sentence]]:
    """Sentences in lists of about CHUNK characters."""
    chunk, size = [], 0
    for sentence in source:
        chunk.append(sentence)
        size += len(sentence[1]) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, chunk: list[Sentence]) -> Piece:
    texts = [text for _, text in chunk]
    # without the offsets of each token, which nobody asks for here
    made = guard("tokenizer", lambda: tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))
    ids, sizes = array("I"), np.empty(len(made), np.int64)
    for number, encoding in enumerate(made):
        sizes[number] = len(encoding)
        ids.extend(encoding.ids)
    documents = np.fromiter((document for document, _ in chunk), np.int64, len(chunk))
    return Piece(np.asarray(ids), sizes, documents, sum(len(text.encode()) + 1 for text in texts))
