"""A model in the hands of one process or of many: whole, a copy for each (DDP), or a part of it for each (FSDP2).

All three compute the same: a batch is divided between the processes, and their gradients are added up. So a run is
described by its batches alone, and may be stopped with one number of processes and resumed with another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.model import Model
from allmask.training import runs
from allmask.training.distributed import Alone, Crew

T = TypeVar("T")
Call = Callable[[Any], T]


class Stage(Protocol):
    """How a model is run, saved and brought back."""

    def __call__(self, call: Call[T]) -> T:
        """`call(model)`, with all its weights there."""
        ...

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch. With the last one of a step gradients are averaged over processes."""
        ...

    def save(self, run: Path, state: runs.State) -> None: ...

    def load(self, folder: Path, optimiser: torch.optim.Optimizer) -> runs.State:
        """A checkpoint, whoever wrote it; its tensors are such as model and optimiser have here."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Those of the whole model."""
        ...


def stage_of(model: nn.Module, crew: Alone | Crew) -> Stage:
    if not isinstance(model, Model):
        if crew.size > 1 or crew.sharded:
            raise UsageError("only a Transformer or an LSTM is trained by several processes", "take one process")
        return Whole(model, crew)
    if crew.sharded and model.config.family in ("lstm", "elmo"):  # an LSTM holds on to the weights it was made with
        raise UsageError("a recurrent model cannot be sharded", "leave --shard out: each process then has all of it")
    if crew.sharded:
        return Sharded(model, crew)
    return Whole(model, crew) if crew.size == 1 else Copied(model, crew)


class _Inside(nn.Module):
    """What DDP and FSDP wrap: they prepare the weights around a `forward`, whatever is called inside it."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, call: Call[T]) -> T:
        return call(self.model)


class Whole:
    """One process has the model."""

    def __init__(self, model: nn.Module, crew: Alone | Crew):
        self.model, self.crew = model, crew

    def __call__(self, call: Call[T]) -> T:
        return call(self.model)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def save(self, run: Path, state: runs.State) -> None:
        self.crew.first(lambda: runs.save_state(run, state))

    def load(self, folder: Path, optimiser: torch.optim.Optimizer) -> runs.State:
        return runs.load_state(folder)

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class Copied:
    """Each process has the model (DDP): gradients are averaged while the backward pass is still under way."""

    def __init__(self, model: Model, crew: Alone | Crew):
        from torch.nn.parallel import DistributedDataParallel

        whole = Whole(model, crew)
        self.save, self.load, self.weights = whole.save, whole.load, whole.weights
        # A head that a batch does not ask for has no gradient, and must have none: AdamW then leaves it alone
        # the same of an XLNet's segments, where there is one only, and of its vector for what is unknown
        # and of an elmo's other direction
        idle = bool(model.heads - {"lm"}) or model.config.family in ("xlnet", "elmo")
        self.inner = DistributedDataParallel(
            _Inside(model), forward_sync_buffers=False, find_unused_parameters=idle, gradient_as_bucket_view=True
        )

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.inner.no_sync()


class Sharded:
    """Each process has a part of every weight (FSDP2): those of a layer are gathered when it is their turn.

    Layers that are not called as one, such as the last, of which only some positions are fed forward, are gathered
    together with the embeddings and the heads, at the beginning.
    """

    def __init__(self, model: Model, crew: Alone | Crew):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # It warns that keys and values are views, which must not be changed in place; nothing is, here
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self.model, self.crew = model, crew
        mesh = init_device_mesh(crew.device.type, (crew.size,))
        for layer in model.body.whole_layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            register_fsdp_forward_method(layer, "peek")
        # Not kept after the forward pass: weights that an evaluation gathered would be old after the next step
        self.inner: Any = fully_shard(_Inside(model), mesh=mesh, reshard_after_forward=True)

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # with every batch: gradients that wait would be those of the whole model

    def save(self, run: Path, state: runs.State) -> None:
        runs.save_shards(run, state, self.crew)

    def load(self, folder: Path, optimiser: torch.optim.Optimizer) -> runs.State:
        numbered = (p for group in optimiser.param_groups for p in group["params"])
        likes = {f"optimiser.{number}": weight for number, weight in enumerate(numbered)}
        for name, weight in self.model.named_parameters():
            likes |= {f"model.{name}": weight, f"average.{name}": weight}

        def place(name: str, whole: Tensor) -> Tensor:
            like = likes.get(name.rsplit(".", 1)[0] if name.startswith("optimiser.") else name)
            return whole if like is None or like.shape != whole.shape else _cut(whole, like)

        return runs.load_state(folder, place)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole_of(tensor).cpu() for name, tensor in self.model.state_dict().items()}


def _cut(whole: Tensor, like: Any) -> Tensor:
    """The part of a tensor that this process has of one like it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def whole_of(tensor: Any) -> Tensor:
    """All of a tensor, of which each process may have a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
