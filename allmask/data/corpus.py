"""A tokenized corpus on disk: made once, in parallel, from files of any size, and read through a memory map.

corpus = prepare([Path("wiki/")], tokenizer, Path("runs/a/corpus"))   # reused if it exists and nothing changed
ids, sentence_starts = corpus.document(7)
windows = Windows(corpus, length=510)

Special tokens are not stored: each objective adds its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from allmask.data import store
from allmask.data.loader import Loader
from allmask.data.sentences import Progress, Reading, Sentence, find_files, sentences, text_size
from allmask.data.store import DOCUMENTS, FILES, META, SENTENCES, TOKENS, Piece, Writer
from allmask.errors import DataError, UsageError
from allmask.files import sha256
from allmask.text import Tokenizer
from allmask.text.load import guard

FORMAT = 1
CHUNK = (1 << 15) * (os.cpu_count() or 1)  # characters per call of the tokenizer, which splits them among its threads
WORKERS = 2  # concurrent calls: while one returns its ids, the other encodes
_AGAIN = "remove the folder and prepare the corpus again"

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
    meta = store.unsealed(store.read(file))
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
    text_field: str = "text", on_bad_record: str = "stop", verbatim: bool = False,
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
    def options(self) -> dict[str, Any]:
        """The options of reading that the tokens depend on."""
        return {"text_field": self.reading.text_field, "verbatim": self.reading.verbatim}

    def reuse(self) -> Corpus | None:
        """Open an existing store if it is what would be made now."""
        if not self.folder.exists():
            return None
        ours = {*FILES, META, store.JOURNAL, store.ASKED}
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
        writer = Writer(self.folder, asked, dtype)
        try:
            self._fill(writer, workers, progress)
            self._finish(writer, asked)
        finally:
            writer.close()
        return Corpus.open(self.folder, verify=False)

    def _fill(self, writer: Writer, workers: int, progress: Progress | None) -> None:
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

    def _finish(self, writer: Writer, asked: dict[str, Any]) -> None:
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


def _encode(tokenizer: Tokenizer, chunk: list[Sentence]) -> Piece:
    texts = [text for _, text in chunk]
    # The fast version does not compute the offsets of tokens, which are not needed here
    encoded = guard("tokenizer", lambda: tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))
    ids, sizes = array("I"), np.empty(len(encoded), np.int64)
    for number, encoding in enumerate(encoded):
        sizes[number] = len(encoding)
        ids.extend(encoding.ids)
    documents = np.fromiter((document for document, _ in chunk), np.int64, len(chunk))
    return Piece(np.asarray(ids), sizes, documents, sum(len(text.encode()) + 1 for text in texts))
