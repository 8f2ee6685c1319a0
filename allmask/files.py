"""Atomic writes of files and folders, checksums, JSON files that may be damaged, and hints for misspelt names.

write_atomically(path, "text or bytes")

with atomic_file(path) as stream:         # a stream to a hidden file next to `path`, renamed at the end
    stream.write(...)

with new_folder(path) as partial:         # a hidden folder next to `path`, renamed at the end
    (partial / "config.json").write_text(...)

with replace_folder(path) as partial:     # the same, but an existing folder is replaced

with locked(folder):                      # one process at a time works in it; others are refused

Data is synced to disk before the rename, and the parent folder after it. If anything fails, `path` stays as it was.
Until the rename the name is `.name.PID.partial`. The next process that writes to the same path removes what a killed
process left under such a name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from allmask.errors import CheckpointError, ResourceError

MANIFEST, META = "manifest.json", "meta.json"  # checksums of a model folder or checkpoint; of a tokenized corpus
_MAX_JSON, _MAX_NAMES = 16 << 20, 300_000  # bytes of settings, or of an index of weights; names and lists in them
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # errors of file systems that cannot sync a folder
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)  # of systems that cannot swap two names
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # errors of a disk, whatever is written to it
LOCK = ".lock"
_SIGNED = ("model*.safetensors", "average.safetensors", "shard-*")  # files that a manifest must list if they are there


Seal = dict[str, Any]  # size in bytes and SHA-256 of the beginning of a file that grows


# ---- files and folders that are complete or absent -----------------------------------------------------------------


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8. A reader, even after a crash, finds the old content or the new one."""
    with atomic_file(path, "wb") as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a stream (UTF-8 text, or bytes) to a file that gets its name when the block ends without an error.

    A symbolic link is followed. A pipe or a device is written to, never replaced.
    """
    path, encoding = Path(path).resolve(), None if mode == "wb" else "utf-8"
    with explain_os_errors(path):
        if path.exists() and not path.is_file():
            with path.open(mode, encoding=encoding) as stream:
                yield stream
            return
        partial = _partial(path)
        remove_leftovers(path)
        try:
            with partial.open(mode, encoding=encoding) as stream:
                yield stream
            put_in_place(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name when the block ends without an error, and is removed otherwise.

    An existing file, or a folder that is not empty, is refused before any work.
    """
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ResourceError(f"{path}: already there", "name another folder")
    with replace_folder(path) as partial:
        yield partial


@contextmanager
def replace_folder(path: str | Path) -> Iterator[Path]:
    """Like `new_folder`, but replace an existing folder at the end. On an error it stays exactly as it was."""
    path = Path(path).resolve()
    partial = _partial(path)
    with explain_os_errors(path):
        remove_leftovers(path)
        try:
            partial.mkdir(parents=True)
            yield partial
            put_in_place(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def put_in_place(new: Path, path: Path) -> None:
    """Sync a complete file or folder to disk and rename it to `path`, on the same file system.

    An existing file is replaced in one step, and its permissions are kept. An existing folder swaps names with the new
    one, in one step, and is then removed. Where the system cannot do that, it is first renamed to a hidden name, and
    renamed back if anything fails; `remove_leftovers` does so if the process is killed in between.
    """
    is_folder = new.is_dir()
    for item in [*(new.rglob("*") if is_folder else ()), new]:
        sync(item)
    if not is_folder:
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
        sync(path.parent)
        return
    if path.exists() and _exchange(new, path):
        try:
            sync(path.parent)
        except BaseException:
            _exchange(new, path)
            raise
        shutil.rmtree(new, ignore_errors=True)
        return
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
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


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there. It loses its name first, so that nobody finds it half removed."""
    if not path.is_dir():
        return
    hidden = _partial(path)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False if the system, or this file system, cannot do that."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def sync(path: Path) -> None:
    """Flush a file or folder to disk (fsync); a folder only where the file system supports it."""
    if path.is_symlink() or special_file(path):  # to open a pipe could wait for ever
        return
    writable = sys.platform == "win32" and path.is_file()  # Windows syncs only what may be written
    try:
        handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise


@contextmanager
def explain_os_errors(
    path: Path, hint: str = "free some space, or write elsewhere; what was there before is untouched"
) -> Iterator[None]:
    """Turn the errors of writing, such as a full or read-only disk, into ResourceErrors that name `path`."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe closed it: not a fault
        raise
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror or error}", hint) from error
    except Exception as error:
        reason = disk_problem(error)
        if reason is None or isinstance(error, ResourceError):
            raise
        raise ResourceError(f"{path}: cannot be written: {reason}", hint) from error


def disk_problem(error: BaseException) -> str | None:
    """Return the reason if an error means that a disk is full, read-only or failing; None for any other error.

    safetensors and tokenizers, which are written in Rust, have errors of their own: "… (os error 28)".
    """
    code = error.errno if isinstance(error, OSError) else None
    found = re.search(r"\(os error (\d+)\)", str(error)) if code is None and isinstance(error, Exception) else None
    code = int(found[1]) if found else code
    return os.strerror(code) if code in _DISK else None


# ---- leftovers of killed processes ---------------------------------------------------------------------------------


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def is_leftover(name: str) -> bool:
    """Whether a killed process may have left a file of this name."""
    return re.fullmatch(r"\..+\.\d+\.(partial|old)", name) is not None


def remove_leftovers(path: Path) -> None:
    """Remove the partial files and folders of killed processes at `path`, and rename an old folder back to it."""
    if not path.parent.is_dir():
        return
    for item in list(path.parent.iterdir()):
        found = re.fullmatch(rf"\.{re.escape(path.name)}\.(\d+)\.(partial|old)", item.name)
        if found is None or _is_alive(int(found[1])):
            continue
        if found[2] == "old" and not path.exists():
            os.rename(item, path)
        else:
            _remove(item)


def remove_all_leftovers(folder: Path) -> None:
    """Call `remove_leftovers` for every file and folder in `folder` that a killed process was writing."""
    if folder.is_dir():
        for item in list(folder.iterdir()):
            found = re.fullmatch(r"\.(.+)\.\d+\.(partial|old)", item.name)
            if found is not None:
                remove_leftovers(folder / found[1])


def _remove(item: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        shutil.rmtree(item, ignore_errors=True)
    else:
        item.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether another process with this id is running."""
    if process == os.getpid():
        return False
    if sys.platform == "win32":  # where os.kill(process, 0) would end the process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# ---- one process at a time -----------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder, which is created if need be, while another process does.

    The lock is one of the system (flock), on the file .lock: that of a killed process is free, and its file is taken
    over. Without such locks, on Windows and some network file systems, nothing is refused.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        folder.mkdir(parents=True, exist_ok=True)
        yield
        return
    path = folder / LOCK
    stream = _take_lock(folder, fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with stream:
        with suppress(OSError):  # on a full disk; the name is only for the message
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            stream.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _take_lock(folder: Path, lock: Callable[[IO[str], int], None], how: int) -> IO[str]:
    """Make the folder if need be, and return its lock file, opened and locked."""
    path = folder / LOCK
    while True:
        with explain_os_errors(path, "choose a folder that can be written"):
            folder.mkdir(parents=True, exist_ok=True)
            # Not through a link: the file that it leads to would be emptied
            stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
        try:
            lock(stream, how)
            # If its owner removed it just now, another may have made a new one
            if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
            stream.close()
        except BlockingIOError:
            with stream:
                stream.seek(0)
                owner = " ".join(stream.read(200).split()) or "another process"
            hint = "wait until it has ended, or end it; or name another folder"
            raise ResourceError(f"{folder}: {owner} is working there", hint) from None
        except OSError:  # a file system without locks
            return stream


# ---- checksums -----------------------------------------------------------------------------------------------------


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def same_content(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file, or to files with the same bytes."""
    if os.path.samefile(one, other):
        return True
    return os.path.getsize(one) == os.path.getsize(other) and sha256(one) == sha256(other)


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """Sync files to disk, and return their checksums by name."""
    found = {}
    for file in sorted(files):
        sync(file)
        found[file.name] = sha256(file)
    return found


def write_manifest(folder: Path, checksums: dict[str, str]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(dict(sorted(checksums.items())), indent=1))


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder by file name; raise ValueError if its manifest cannot be read or is not one."""
    file = folder / MANIFEST
    try:
        if not file.is_file() or file.stat().st_size > _MAX_JSON:
            raise ValueError("there is none" if not file.exists() else "it is not a small file")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"no readable {MANIFEST}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(checksum, str) for checksum in found.values()):
        raise ValueError(f"{MANIFEST} is damaged: expected an object of names and checksums")
    if not found:
        raise ValueError(f"{MANIFEST} is damaged: it lists no files")
    outside = next((name for name in found if name in ("", ".", "..") or Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{MANIFEST} is damaged: {outside!r} is not the name of a file in this folder")
    return found


def verify(folder: Path) -> str | None:
    """Return what is wrong with a folder that has a manifest; None if every byte is as it was written."""
    try:
        expected = read_manifest(folder)
    except ValueError as error:
        return str(error)
    for name, checksum in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            if sha256(file) != checksum:
                return f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    found = sorted(file.name for pattern in _SIGNED for file in folder.glob(pattern))
    stray = next((name for name in found if name not in expected), None)
    return None if stray is None else f"{stray} is not in {MANIFEST}: it belongs to another checkpoint"


def sealed(values: dict[str, Any], indent: int | None = None) -> str:
    """Return values as JSON with a checksum, so that a flipped bit in a number does not go unnoticed."""
    return json.dumps({**values, "seal": seal(values)}, indent=indent)


def unsealed(text: str) -> dict[str, Any] | None:
    """Return the values of `sealed`; None if the text is damaged."""
    try:
        values = json.loads(text)
        found = values.pop("seal")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return values if found == seal(values) else None


def beginning_problem(path: Path, seal: Seal) -> str | None:
    """Return what is wrong with the beginning of a file that grows; None if it is as it was sealed."""
    size, expected = seal.get("bytes"), seal.get("sha256")
    what = special_file(path)
    if what is not None:
        return f"{what}, not a file"
    try:
        with path.open("rb") as stream:
            content = stream.read(size if isinstance(size, int) else 0)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if hashlib.sha256(content).hexdigest() == expected:
        return None
    return "damaged: its beginning does not have the SHA-256 in the checkpoint"


def seal(values: dict[str, Any]) -> str:
    """Return a checksum of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ---- text and JSON of model folders --------------------------------------------------------------------------------


def special_file(path: Path) -> str | None:
    """Return what a path is, if it is neither a file nor a folder: reading it could wait for ever, or never end."""
    try:
        mode = path.stat().st_mode
    except OSError:  # not there: whoever reads it says so
        return None
    kinds = {"a pipe": stat.S_ISFIFO, "a device": stat.S_ISCHR, "a disk": stat.S_ISBLK, "a socket": stat.S_ISSOCK}
    return next((name for name, is_kind in kinds.items() if is_kind(mode)), None)


def read_text(path: Path, limit: int) -> str:
    """Read a file as text, without a byte-order mark. A byte that is not UTF-8 is an error that names its line.

    More bytes than `limit` are refused before they are read.
    """
    try:
        what = special_file(path)
        if what is not None:
            raise CheckpointError(f"{path}: {what}, not a file", "give a regular file")
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size:,} bytes; no such file of a model is that large")
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CheckpointError(f"{path}:{line}: not UTF-8 text ({error.reason})", "save the file as UTF-8") from error


def read_json(path: Path, unique: bool = False, limit: int = _MAX_JSON, names: int = _MAX_NAMES) -> dict[str, Any]:
    """Read the object in a JSON file of at most `limit` bytes; errors name the file and the line.

    With `unique`, a name that occurs twice in an object is an error; otherwise the last value counts. Lists and objects
    take twenty to thirty times the memory of their text, so very many are refused; `names` is the number of names.
    """
    return parse_json(path, read_text(path, limit), unique, names)


def parse_json(path: Path, text: str, unique: bool = False, names: int = _MAX_NAMES) -> dict[str, Any]:
    """Read the object in the text of a JSON file, as `read_json` does."""
    for mark, what, most in (("[", "lists", names), ("{", "objects", _MAX_NAMES), (":", "names", names)):
        if text.count(mark) > most:
            raise CheckpointError(f"{path}: more than {most:,} {what}; no such file of a model has that many")

    def refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{path}: {twice!r} occurs twice in one object", "remove one of the two")
        return made

    try:
        content = json.loads(text, object_pairs_hook=refuse_repeated if unique else None)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # besides bad syntax: thousands of digits, or of brackets
        line, what = "", str(error)
        if isinstance(error, json.JSONDecodeError):
            line, what = f":{error.lineno}", f"{error.msg} (column {error.colno})"
        hint = "the file is damaged or was edited by hand; fetch it again, or correct the line"
        raise CheckpointError(f"{path}{line}: not valid JSON: {what}", hint) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


# ---- names in messages ---------------------------------------------------------------------------------------------


def listed(names: Collection[str], limit: int = 20) -> str:
    """Return names with commas between; of very many only the first, and how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(islice(names, limit)) + more


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if none is similar."""
    folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), folded, 1)
    return folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: 'did you mean bert_base? there are: bert_base, gpt2'."""
    names = list(known)
    close = closest(name, names)
    listed = f"there are: {', '.join(names)}"
    return listed if close is None else f"did you mean {close}? {listed}"
