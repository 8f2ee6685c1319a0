"""A device for tests that has no hardware: its tensors compute on the CPU, but cannot be mixed with those of the CPU.

Its name is `meta`, the only device besides the CPU that every build of torch has. While `simulated()` is active,
tensors made there have values; an operation on tensors of both devices is an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
COPY = torch.ops.aten.copy_.default
BY_INDEX = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)  # a GPU takes indices from the CPU


class Elsewhere(torch.Tensor):
    """A tensor on the simulated device; `values` are on the CPU."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=DEVICE, requires_grad=values.requires_grad,
        )  # fmt: skip

    def __init__(self, values: torch.Tensor):
        self.values_here = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.values_here})"

    def tolist(self) -> Any:
        return self.values_here.tolist()

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a tensor on a simulated device to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """Lists become tensors without being dispatched: `torch.tensor([0, 2], device=…)`, `x[[0, 2]]`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return args[0].values_here.new_tensor(*args[1:], **kwargs).to(DEVICE)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Elsewhere):
            args = (args[0], _index(args[1]), *args[2:])
        return func(*args, **kwargs)


def _index(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(torch.tensor(one) if isinstance(one, list | tuple) else one for one in given)
    return torch.tensor(given) if isinstance(given, list) else given


@contextmanager
def simulated() -> Iterator[None]:
    with _Lists(), _Operations():
        yield


def _here(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.values_here if isinstance(x, Elsewhere) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    there = [x for x in leaves if isinstance(x, Elsewhere)]
    here = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Elsewhere) and x.ndim]
    by_index = func in BY_INDEX and isinstance(args[0], Elsewhere)
    if there and here and func is not COPY and not by_index:
        raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU")
    targets = [x for x in leaves if isinstance(x, torch.device)]
    to_there = targets[0].type == DEVICE.type if targets else bool(there)
    values = tree_map(_here, (args, kwargs))
    found = func(*values[0], **values[1])
    if func is COPY:
        return args[0]
    changed = {id(x.values_here): x for x in there}  # in place

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not to_there:
            return x
        return changed.get(id(x)) if id(x) in changed else Elsewhere(x)

    return tree_map(wrap, found)
