"""How a model is spread over processes: one has it, each has a copy (DDP), or each has a part of it (FSDP2).

All three compute the same: a batch is divided between the processes, and their gradients are added up. So a run is
described by its batches alone, and may be stopped with one number of processes and resumed with another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.model import Model
from allmask.training import checkpoint
from allmask.training.process_group import ProcessGroup, SingleProcess

T = TypeVar("T")
Call = Callable[[Any], T]


class Strategy(Protocol):
    """How a model is run, evaluated, saved and loaded."""

    def __call__(self, call: Call[T]) -> T:
        """`call(model)`, which may run the forward pass of the model."""
        ...

    def evaluate(self, call: Call[T]) -> T | None:
        """`call(model)`, with all weights in place; None in processes other than the first where only that one has."""
        ...

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch; with the last one of a step gradients are averaged over processes."""
        ...

    def save(self, run: Path, state: checkpoint.State) -> None: ...

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> checkpoint.State:
        """Load a checkpoint of any strategy, with tensors such as model and optimizer have here."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The weights of the whole model."""
        ...


def strategy_for(
    model: nn.Module, group: SingleProcess | ProcessGroup, evaluates_shards: bool = False
) -> Strategy:  # fmt: skip
    """`evaluates_shards`: evaluations call nothing but the forward pass, so a sharded model will do."""
    if not isinstance(model, Model):
        if group.size > 1 or group.sharded:
            raise UsageError("only a Transformer or an LSTM is trained by several processes", "take one process")
        return Single(model, group)
    if group.sharded and model.config.family in ("lstm", "elmo"):  # an LSTM holds on to the weights it was made with
        raise UsageError("a recurrent model cannot be sharded", "leave --shard out: each process then has all of it")
    if group.sharded:
        return FSDP(model, group, evaluates_shards)
    return Single(model, group) if group.size == 1 else DDP(model, group)


class _Inside(nn.Module):
    """The module that DDP and FSDP wrap: they prepare the weights around its `forward`, whatever is called inside."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, call: Call[T]) -> T:
        return call(self.model)


class Single:
    """One process has the model."""

    def __init__(self, model: nn.Module, group: SingleProcess | ProcessGroup):
        self.model, self.group = model, group

    def __call__(self, call: Call[T]) -> T:
        return call(self.model)

    def evaluate(self, call: Call[T]) -> T | None:
        return call(self.model)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def save(self, run: Path, state: checkpoint.State) -> None:
        self.group.first(lambda: checkpoint.save_state(run, state))

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> checkpoint.State:
        return checkpoint.load_state(folder)

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class DDP:
    """Each process has a copy of the model: gradients are averaged while the backward pass is still under way."""

    def __init__(self, model: Model, group: SingleProcess | ProcessGroup):
        from torch.nn.parallel import DistributedDataParallel

        whole = Single(model, group)
        self.evaluate, self.save, self.load, self.weights = whole.evaluate, whole.save, whole.load, whole.weights
        # A head that a batch does not use has no gradient, and must have none, so that AdamW leaves it alone; the same
        # holds for an XLNet's segments, where there is only one, its query vector, and an elmo's other direction
        idle = bool(model.heads - {"lm"}) or model.config.family in ("xlnet", "elmo")
        self.inner = DistributedDataParallel(
            _Inside(model), forward_sync_buffers=False, find_unused_parameters=idle, gradient_as_bucket_view=True
        )

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.inner.no_sync()


class FSDP:
    """Each process has a part of every weight: those of a layer are gathered when it is computed.

    Layers that are not called as one, such as the last, of which only some positions are fed forward, are gathered
    together with the embeddings and the heads, at the beginning. To evaluate what needs more than the forward pass,
    such as writing texts, the first process has a whole copy besides.
    """

    def __init__(self, model: Model, group: SingleProcess | ProcessGroup, evaluates_shards: bool):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # It warns that keys and values are views, which must not be changed in place; nothing is, here
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self.model, self.group, self.evaluates_shards = model, group, evaluates_shards
        self.copy = copy.deepcopy(model).eval() if group.lead and not evaluates_shards else None
        mesh = init_device_mesh(group.device.type, (group.size,))
        for layer in model.body.whole_layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            register_fsdp_forward_method(layer, "query_stream")
        # Not kept after the forward pass: weights that an evaluation gathered would be old after the next step
        self.inner: Any = fully_shard(_Inside(model), mesh=mesh, reshard_after_forward=True)

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def evaluate(self, call: Call[T]) -> T | None:
        if self.evaluates_shards:
            return self(call)
        weights = self.weights()
        return self.group.first(lambda: self._evaluate_copy(weights, call))

    def _evaluate_copy(self, weights: dict[str, Tensor], call: Call[T]) -> T:
        assert self.copy is not None
        self.copy.load_state_dict(weights)
        return call(self.copy)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # with every batch: gradients that wait would be those of the whole model

    def save(self, run: Path, state: checkpoint.State) -> None:
        checkpoint.save_shards(run, state, self.group)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> checkpoint.State:
        numbered = (p for group in optimizer.param_groups for p in group["params"])
        likes = {f"optimizer.{number}": weight for number, weight in enumerate(numbered)}
        for name, weight in self.model.named_parameters():
            likes |= {f"model.{name}": weight, f"average.{name}": weight}

        def place(name: str, whole: Tensor) -> Tensor:
            like = likes.get(name.rsplit(".", 1)[0] if name.startswith("optimizer.") else name)
            return whole if like is None or like.shape != whole.shape else _cut(whole, like)

        return checkpoint.load_state(folder, place)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole_of(tensor).cpu() for name, tensor in self.model.state_dict().items()}


def _cut(whole: Tensor, like: Any) -> Tensor:
    """The part of a tensor that this process has of another one of its shape."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def whole_of(tensor: Any) -> Tensor:
    """The whole of a tensor of which each process may have a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
