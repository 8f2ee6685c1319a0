"""Files that are written whole or not at all, told apart by checksums, and found again by misspelt names.

write_atomically(path, "text or bytes")

with atomic_file(path) as stream:         # a stream to a hidden file beside it, renamed at the end
    stream.write(...)

with new_folder(path) as beside:          # a hidden folder beside it, renamed at the end
    (beside / "config.json").write_text(...)

with replace_folder(path) as beside:      # the same; a folder that is there is replaced, or left as it was

Everything is synced to disk before it is renamed, and the folder around it after that. Until then it has the name
`.name.PID.partial`, with the number of the process that writes it; what a killed process left behind under such a name
is removed by the next one that writes there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Literal

from allmask.errors import ResourceError

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # what systems answer that cannot sync a folder


# ---- one file ------------------------------------------------------------------------------------------------------


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8; whoever reads it meanwhile, or after a crash, finds the old one or the new one."""
    with atomic_file(path, "wb") as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a stream (UTF-8 text, or bytes) to a file that appears under its name when the block ends without an error.

    A link is followed to the file that it names. A pipe or a device is written to, never replaced.
    """
    path, encoding = Path(path).resolve(), None if mode == "wb" else "utf-8"
    with _in_words(path):
        if path.exists() and not path.is_file():
            with path.open(mode, encoding=encoding) as stream:
                yield stream
            return
        beside = _partial(path)
        remove_leftovers(path)
        try:
            with beside.open(mode, encoding=encoding) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, path)
            sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


# ---- a folder ------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name when the block ends without an error, and is removed otherwise.

    A file or a folder with something in it that is already there is refused before any work.
    """
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ResourceError(f"{path}: already there", "name another folder")
    with replace_folder(path) as beside:
        yield beside


@contextmanager
def replace_folder(path: str | Path) -> Iterator[Path]:
    """The same for a folder that may be there already: it is replaced at the end, or stays exactly as it was."""
    path = Path(path).resolve()
    beside = _partial(path)
    with _in_words(path):
        remove_leftovers(path)
        try:
            beside.mkdir(parents=True)
            yield beside
            put_in_place(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def put_in_place(new: Path, path: Path) -> None:
    """Sync a folder that is complete and rename it to `path`.

    One that is already there is moved aside first, moved back if anything fails, and removed at the very end.
    """
    for item in [*new.rglob("*"), new]:
        sync(item)
    old, replacing = _aside(path), path.exists()
    try:
        if replacing:
            os.rename(path, old)
        os.rename(new, path)
        sync(path.parent)
    except BaseException:
        if path.exists() and not new.exists():
            os.rename(path, new)
        if old.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the system write a file or a folder to disk; a folder only where the file system can do that."""
    if path.is_symlink():
        return
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever reads a pipe went away: that is no fault
        raise
    except OSError as error:
        hint = "free some space, or write elsewhere; what was there before is untouched"
        raise ResourceError(f"{path}: cannot be written: {error.strerror or error}", hint) from error


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.old")


def is_leftover(name: str) -> bool:
    """Whether a file name is one that a killed process may leave behind."""
    return re.fullmatch(r"\..+\.\d+\.(partial|old)", name) is not None


def remove_leftovers(path: Path) -> None:
    """Undo what killed processes began at a path: remove what is half written, put back what was moved aside."""
    if not path.parent.is_dir():
        return
    for item in list(path.parent.iterdir()):
        found = re.fullmatch(rf"\.{re.escape(path.name)}\.(\d+)\.(partial|old)", item.name)
        if found is None or _is_alive(int(found[1])):
            continue
        if found[2] == "old" and not path.exists():
            os.rename(item, path)
        elif item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether another process of this number is running."""
    if process == os.getpid():
        return False
    if sys.platform == "win32":  # there the same call would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# ---- what is in them -----------------------------------------------------------------------------------------------


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def same_content(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file, or to files of the same bytes."""
    if os.path.samefile(one, other):
        return True
    return os.path.getsize(one) == os.path.getsize(other) and sha256(one) == sha256(other)


# ---- misspelt names ------------------------------------------------------------------------------------------------


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one, whatever its case; None if none is like it."""
    folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), folded, 1, cutoff)
    return folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'did you mean bert_base? there are: bert_base, gpt2': the hint for a name that is not known."""
    names = list(known)
    close = closest(name, names)
    listed = f"there are: {', '.join(names)}"
    return listed if close is None else f"did you mean {close}? {listed}"
