"""Arrays out of a pickle of which nothing is run.

A pickle is a program, so those of others are not given to Python's reader. Here its few instructions that build tuples
are followed by hand; where it says to call something, what and with what is only written down. Arrays of numpy are
recognized in these notes, anything else is an error.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_PUSHED = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES",
     "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL")
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAYS = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_ENCODED = "_codecs encode"  # how Python 3 writes bytes for Python 2
_TYPES = frozenset(("u1", "i1", "i2", "i4", "i8", "f4", "f8"))


@dataclass(eq=False)
class Call:
    """A note that something was to be called. `state` is what its result was to be told, of an array the array."""

    what: Any
    arguments: Any
    state: Any = None


def notes_of(pickled: bytes) -> Any:
    """What a pickle builds: tuples of plain values, and a note for all else."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for instruction, value, _ in pickletools.genops(pickled):
        match instruction.name:
            case "PROTO" | "FRAME":
                pass
            case name if name in _PUSHED:
                stack.append(value)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                _fold(stack, len(stack) - marks.pop())
            case name if name in _TUPLES:
                _fold(stack, _TUPLES[name])
            case "STACK_GLOBAL":
                stack[-2:] = [f"{stack[-2]} {stack[-1]}"]
            case "REDUCE":
                stack[-2:] = [_called(*stack[-2:])]
            case "BUILD":
                _build(stack[-2], stack.pop())
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if value is None else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"a pickle of more than arrays: {name}")


def _fold(stack: list[Any], count: int) -> None:
    at = len(stack) - count
    stack[at:] = [tuple(stack[at:])]


def _called(what: Any, arguments: Any) -> Any:
    if what == _ENCODED and len(arguments) == 2 and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    return Call(what, arguments)


def _build(call: Call, state: Any) -> None:
    """In place, because others may refer to it; an array at once, so that its bytes are not kept twice."""
    call.state = _array(*state) if call.what in _ARRAYS else state


def _array(version: int, shape: Any, kind: Any, by_columns: bool, content: str | bytes) -> np.ndarray:
    content = content.encode("latin1") if isinstance(content, str) else content
    if not isinstance(kind, Call) or kind.what != "numpy dtype" or kind.arguments[0] not in _TYPES:
        raise ValueError("an array of something else than numbers")
    dtype = np.dtype(kind.arguments[0]).newbyteorder(">" if kind.state[1] == ">" else "<")
    if not all(type(size) is int for size in shape) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {shape} that has {len(content):,} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
