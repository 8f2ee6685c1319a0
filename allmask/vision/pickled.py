"""Read numpy arrays from a pickle without executing any of it.

A pickle is a program, so a foreign one is never given to Python's `pickle`. Here the few instructions that build tuples
are interpreted; a function call is only recorded, with its arguments. Recorded calls that build numpy arrays are
recognized; anything else is an error.
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
_ENCODE = "_codecs encode"  # how Python 3 writes bytes for Python 2
_TYPES = frozenset(("u1", "i1", "i2", "i4", "i8", "f4", "f8"))


@dataclass(eq=False)
class Call:
    """A function call that was recorded, not executed."""

    function: Any
    arguments: Any
    state: Any = None  # what BUILD would have passed to the result; for an array, the array itself


def parse_pickle(pickled: bytes) -> Any:
    """The object that a pickle would build: tuples of plain values, and a `Call` for everything else."""
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
                stack[-2:] = [_record_call(*stack[-2:])]
            case "BUILD":
                state, call = stack.pop(), stack[-1]
                # an array is made at once, so that its bytes are not in memory twice
                call.state = _array(*state) if call.function in _ARRAYS else state
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


def _record_call(function: Any, arguments: Any) -> Any:
    if function == _ENCODE and len(arguments) == 2 and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    return Call(function, arguments)


def _array(version: int, shape: Any, kind: Any, fortran_order: bool, content: str | bytes) -> np.ndarray:
    content = content.encode("latin1") if isinstance(content, str) else content
    if not isinstance(kind, Call) or kind.function != "numpy dtype" or kind.arguments[0] not in _TYPES:
        raise ValueError("an array that does not hold numbers")
    dtype = np.dtype(kind.arguments[0]).newbyteorder(">" if kind.state[1] == ">" else "<")
    if not all(type(size) is int for size in shape) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {shape} that has {len(content):,} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran_order else "C")
