"""How a model is distributed: one process has it, each has a copy (DDP), or each has a part of it (FSDP2).

All three compute the same: a batch is divided between the processes, and their gradients are added. So a run depends
only on its batches; it can be stopped with one number of processes and resumed with another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.model import Model
from allmask.training import checkpoint
from allmask.training.process_group import Group

T = TypeVar("T")
Call = Callable[[Any], T]


class _Inside(nn.Module):
    """The module that DDP and FSDP wrap: they prepare the weights around its `forward`, whatever it calls."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, call: Call[T]) -> T:
        return call(self.model)


class Single:
    """One process has the model. `DDP` and `FSDP` have the same methods."""

    def __init__(self, model: nn.Module, group: Group):
        self.model, self.group = model, group

    def __call__(self, call: Call[T]) -> T:
        """Return `call(model)`, which may run the forward pass of the model."""
        return call(self.model)

    def evaluate(self, call: Call[T]) -> T | None:
        """Return `call(model)` of a model that can be evaluated; None in processes that do not evaluate."""
        return call(self.model)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        """Use this around forward and backward of a batch. After the `last` of a step gradients are averaged."""
        return nullcontext()

    def save(self, run: Path, state: checkpoint.State) -> None:
        self.group.first(lambda: checkpoint.save_state(run, state))

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> checkpoint.State:
        """Load a checkpoint of any strategy, as this strategy's model and optimizer need it."""
        return checkpoint.load_state(folder)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the whole model."""
        return self.model.state_dict()


class DDP:
    """Each process has a copy of the model: gradients are averaged during the backward pass."""

    def __init__(self, model: Model, group: Group):
        from torch.nn.parallel import DistributedDataParallel

        whole = Single(model, group)
        self.evaluate, self.save, self.load, self.weights = whole.evaluate, whole.save, whole.load, whole.weights
        # A head that a batch does not use must get no gradient, so that AdamW leaves it alone; likewise the segments of
        # an XLNet if there is only one, its query vector, and the other direction of an ELMo
        unused = bool(model.heads - {"lm"}) or model.config.family in ("xlnet", "elmo")
        self.inner = DistributedDataParallel(
            _Inside(model), forward_sync_buffers=False, find_unused_parameters=unused, gradient_as_bucket_view=True
        )

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.inner.no_sync()


class FSDP:
    """Each process has a part of every weight: the weights of a layer are gathered when it is computed.

    Layers that are not called as a whole, such as the last one, whose feed-forward runs only at some positions, are
    gathered at the beginning, with the embeddings and the heads. For evaluations that need more than the forward pass,
    such as generating texts, the first process has a copy of the whole model.
    """

    def __init__(self, model: Model, group: Group, evaluates_shards: bool):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        kept = model.config.parametrization == "ntk" or model.config.norm == "batch"
        if kept:  # beside its parameters, such a model has buffers
            raise UsageError(
                "--shard: a model with NTK parametrization or batch norm cannot be divided", "leave it out"
            )
        # It warns that keys and values are views and must not be changed in place; we never do that
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self.model, self.group, self.evaluates_shards = model, group, evaluates_shards
        self.copy = copy.deepcopy(model).eval() if group.lead and not evaluates_shards else None
        mesh = init_device_mesh(group.device.type, (group.size,))
        for layer in model.body.whole_layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            register_fsdp_forward_method(layer, "query_stream")
        # Reshard after the forward pass: weights gathered by an evaluation would be outdated after the next step
        self.inner: Any = fully_shard(_Inside(model), mesh=mesh, reshard_after_forward=True)

    def __call__(self, call: Call[T]) -> T:
        return self.inner(call)

    def evaluate(self, call: Call[T]) -> T | None:
        if self.evaluates_shards:
            return self(call)
        weights = self.weights()

        def evaluate_copy() -> T:
            assert self.copy is not None
            self.copy.load_state_dict(weights)
            return call(self.copy)

        return self.group.first(evaluate_copy, alone=True)

    def summing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # averaged after every batch: to collect them would take gradients of the whole model

    def save(self, run: Path, state: checkpoint.State) -> None:
        checkpoint.save_shards(run, state, self.group)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> checkpoint.State:
        from torch.distributed.tensor import distribute_tensor

        numbered = (p for group in optimizer.param_groups for p in group["params"])
        likes: dict[str, Any] = {f"optimizer.{number}": weight for number, weight in enumerate(numbered)}
        for name, weight in self.model.named_parameters():
            likes |= {f"model.{name}": weight, f"average.{name}": weight}

        def place(name: str, whole: Tensor) -> Tensor:
            like = likes.get(name.rsplit(".", 1)[0] if name.startswith("optimizer.") else name)
            if like is None or like.shape != whole.shape:
                return whole
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

        return checkpoint.load_state(folder, place)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole_of(tensor).cpu() for name, tensor in self.model.state_dict().items()}


def strategy_for(model: nn.Module, group: Group, evaluates_shards: bool = False) -> Single | DDP | FSDP:
    """Choose a strategy. `evaluates_shards`: evaluations call only the forward pass, so a sharded model will do."""
    if not isinstance(model, Model):
        if group.size > 1 or group.sharded:
            raise UsageError("several processes can train only a Transformer or an LSTM", "use one process")
        return Single(model, group)
    if group.sharded and model.config.family in ("lstm", "elmo"):  # an LSTM keeps references to its weights
        raise UsageError("a recurrent model cannot be sharded", "leave --shard out: each process then has a copy")
    if group.sharded:
        return FSDP(model, group, evaluates_shards)
    return Single(model, group) if group.size == 1 else DDP(model, group)


def whole_of(tensor: Any) -> Tensor:
    """Gather a tensor that may be sharded over processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
