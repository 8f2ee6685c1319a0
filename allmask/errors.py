"""Errors for the user: what is wrong, where, and what to do. Each kind has its own exit code.

error[data]: dev.jsonl:214: "label" is "neutrl"; expected one of neg, neutral, pos
  did you mean "neutral"? fix the line, or pass --on-bad-record skip

Exit code 7 is not an error: `allmask audit` found a model that violates its mask, or `allmask drift` found a shift.
"""

from __future__ import annotations

import re

from allmask.terminal import printable

_LONGEST = 10_000  # characters of a message: what it quotes from a file may be of any length


class AllmaskError(Exception):
    """An error that the user can fix. `hint` is the second line of the message: what to do about it."""

    kind = "internal"
    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        message = printable(message)
        cut = len(message) - _LONGEST
        self.message = message if cut <= 0 else f"{message[:_LONGEST]}… ({cut:,} more characters)"
        self.hint = None if hint is None else printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UsageError(AllmaskError, ValueError):
    """A wrong option, argument, or combination of them."""

    kind, exit_code = "usage", 2


class DataError(AllmaskError, ValueError):
    """A text or data file is missing, damaged or has the wrong content."""

    kind, exit_code = "data", 3


class CheckpointError(AllmaskError, ValueError):
    """A model folder, weight file, config or tokenizer file is missing, damaged or has the wrong content."""

    kind, exit_code = "model", 4


class ResourceError(AllmaskError, RuntimeError):
    """The machine lacks something: memory, disk space, a font, an optional package."""

    kind, exit_code = "resources", 5


class DivergedError(AllmaskError, RuntimeError):
    """The loss became infinite or NaN and did not recover."""

    kind, exit_code = "diverged", 6


class Interrupted(AllmaskError):
    """Stopped by a signal, after saving; `exit_code` is 128 + the number of the signal."""

    kind = "interrupted"

    def __init__(self, message: str, exit_code: int, hint: str = "continue with the same command and --resume"):
        super().__init__(message, hint)
        self.exit_code = exit_code


def out_of_memory(error: BaseException) -> str | None:
    """Return how much could not be allocated ("" if unknown), if an error of Python, torch or CUDA is about that."""
    text = " ".join(str(error).split())
    words = (
        "can't allocate memory", "annot allocate memory", "not enough memory", "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED", "bad_alloc",
    )  # fmt: skip
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    ):
        return None
    if isinstance(error, AllmaskError):
        return None
    found = re.search(r"(?:allocate|mmap) ([\d.,]+) ?(\w*)", text)
    if found is None:
        return ""
    size = f"{found[1]} {found[2]}"
    if found[2] == "bytes":
        size = f"{int(found[1]) / 2**30:.2f} GiB" if int(found[1]) >= 1 << 27 else f"{int(found[1]) / 2**20:.1f} MiB"
    return f": {size} more were needed"
