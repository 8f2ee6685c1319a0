"""Errors that speak to the user: what is wrong, where, and what to do; each kind has its exit code.

error[data]: dev.jsonl:214: "label" is "neutrl"; expected one of neg, neutral, pos
  did you mean "neutral"? fix the line, or pass --on-bad-record skip

Exit code 7 is no error: `allmask audit` found a broken promise, `allmask drift` a shift.
"""

from __future__ import annotations


class AllmaskError(Exception):
    """Anything the user can mend. `hint` is the second line: what to do about it."""

    kind = "internal"
    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UsageError(AllmaskError, ValueError):
    """The call itself is off: a flag, an argument, a combination of them."""

    kind, exit_code = "usage", 2


class DataError(AllmaskError, ValueError):
    """A text or data file is not what it should be."""

    kind, exit_code = "data", 3


class CheckpointError(AllmaskError, ValueError):
    """A model folder, a weight file, a config or a tokenizer file is not what it should be."""

    kind, exit_code = "model", 4


class ResourceError(AllmaskError, RuntimeError):
    """The machine lacks something: memory, disk, a font, an optional package."""

    kind, exit_code = "resources", 5


class DivergedError(AllmaskError, RuntimeError):
    """Training went to infinity or NaN and would not come back."""

    kind, exit_code = "diverged", 6


class Interrupted(AllmaskError):
    """Stopped on request, after saving; `exit_code` tells by what."""

    kind = "interrupted"

    def __init__(self, message: str, exit_code: int):
        super().__init__(message, "go on with the same command and --resume")
        self.exit_code = exit_code
