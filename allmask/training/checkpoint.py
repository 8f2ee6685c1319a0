"""Checkpoints of a run: whole or absent, and verified by their checksums before they are loaded.

runs/title/checkpoints/step-00000400/
  model.safetensors, optimizer.safetensors   the weights, the optimizer's state; with --ema the running mean of the
                                             weights, too: average.safetensors
  shard-….safetensors                        of a run with --shard, one file per process instead of these
  state.json                                 the step, the best score so far, …
  manifest.json                              the SHA-256 of every file

The best checkpoint, once newer ones are there to resume from, and all those of a finished run are kept for their
weights alone: their optimizer.safetensors is removed.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from allmask.errors import CheckpointError, ResourceError
from allmask.files import put_in_place, sha256, sync, write_atomically
from allmask.training.process_group import ProcessGroup, SingleProcess

MANIFEST, STATE = "manifest.json", "state.json"
PARTS = ("model", "optimizer", "average")  # of a state; the last only where a running mean is kept
Place = Callable[[str, Tensor], Tensor]  # a tensor's name and a whole tensor: the part of it that is wanted here


@dataclass(frozen=True)
class State:
    """Everything a run needs to go on as if it had never stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    numbers: dict[str, Any]  # the best score, bad steps, …: plain JSON
    average: dict[str, Tensor] | None = None  # the running mean of the weights, where one is kept

    def flat(self) -> dict[str, Tensor]:
        """All tensors in one dictionary, named model.…, optimizer.…, average.…"""
        parts = {part: getattr(self, part) or {} for part in PARTS}
        return {f"{part}.{name}": value for part, named in parts.items() for name, value in named.items()}

    @classmethod
    def of(cls, flat: dict[str, Tensor], numbers: dict[str, Any]) -> State:
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
        for name, value in flat.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        others = {name: value for name, value in numbers.items() if name != "step"}
        return cls(numbers["step"], parts["model"], parts["optimizer"], others, parts["average"] or None)


# ---- writing -------------------------------------------------------------------------------------------------


def save_state(run: Path, state: State) -> Path:
    """Write a checkpoint beside its place, sync and sign it, then rename it: the old ones stay whole throughout."""
    folder = _place(run, state.step)
    with _writing(folder) as beside:
        _clear(beside)
        for part in PARTS:
            if getattr(state, part) is not None:
                save_file(_contiguous(getattr(state, part)), _file(beside, part))
        _complete(beside, folder, state, _signed(beside.iterdir()))
    return folder


def save_shards(run: Path, state: State, group: SingleProcess | ProcessGroup) -> Path:
    """The same by all processes: each writes and signs its part; when all are there, the first renames the folder."""
    folder = _place(run, state.step)
    with _writing(folder) as beside:
        group.first(lambda: _clear(beside))
        write_shards(beside, state.flat())
        parts = group.gathered(_signed(shards(beside, group.rank)))
        signed = {name: checksum for part in parts for name, checksum in part.items()}
        group.first(lambda: _complete(beside, folder, state, signed))
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the parts of tensors that this process has; all processes call it. A failure of one is raised in all.

    torch.distributed.checkpoint writes a safetensors file per process, with names, shapes and offsets in the header,
    so nothing is pickled, and any other number of processes can read the files.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error


def shards(folder: Path, rank: int | None = None) -> list[Path]:
    """The files that one process wrote, or that all did; none in a checkpoint of the other kind."""
    return sorted(folder.glob("shard-*" if rank is None else f"shard-{rank + 1:05d}-*"))


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Yield the folder to write a checkpoint in until it is complete; explain a full or read-only disk."""
    beside = folder.with_name(f".{folder.name}.partial")  # one name for all processes
    try:
        yield beside
    except (OSError, SafetensorError, ResourceError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(beside, ignore_errors=True)
        hint = "earlier checkpoints are untouched; free some space and run again with --resume"
        reason = getattr(error, "strerror", None) or str(error)
        raise ResourceError(f"{folder}: could not be written: {reason}", hint) from error


def _clear(beside: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)


def _complete(beside: Path, folder: Path, state: State, signed: dict[str, str]) -> None:
    """Add state.json and the manifest to tensors that are signed, and give the folder its name."""
    (beside / STATE).write_text(json.dumps({"step": state.step, **state.numbers}))
    _write_manifest(beside, signed | _signed([beside / STATE]))
    put_in_place(beside, folder)


def sign(folder: Path) -> None:
    """Write the checksums of a folder's files to its manifest, and sync all of them to disk."""
    _write_manifest(folder, _signed(folder.iterdir()))


def _signed(files: Iterable[Path]) -> dict[str, str]:
    """Sync files to disk, and return their checksums."""
    signed = {}
    for file in sorted(files):
        sync(file)
        signed[file.name] = sha256(file)
    return signed


def _write_manifest(folder: Path, signed: dict[str, str]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(dict(sorted(signed.items())), indent=1))


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _place(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


# ---- reading -------------------------------------------------------------------------------------------------


def load_state(folder: Path, place: Place = lambda name, whole: whole) -> State:
    """Load a verified checkpoint of either kind. `place` says how much of each tensor is wanted."""
    numbers = json.loads((folder / STATE).read_text())
    if shards(folder):
        return State.of(_read_shards(folder, place), numbers)
    parts = [part for part in PARTS if _file(folder, part).exists()]
    flat = {f"{part}.{name}": value for part in parts for name, value in load_file(_file(folder, part)).items()}
    return State.of({name: place(name, value) for name, value in flat.items()}, numbers)


def _read_shards(folder: Path, place: Place) -> dict[str, Tensor]:
    """All tensors, each as large as `place` makes it, however many processes wrote them."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: place(name, torch.zeros(entry.size, dtype=entry.properties.dtype))
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that it reads without asking the other processes, which is intended
        warnings.simplefilter("ignore", UserWarning)
        load(found, storage_reader=reader, no_dist=True)
    return found


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first; unfinished ones have other names."""
    return sorted((run / "checkpoints").glob("step-*"), reverse=True)


def verify(folder: Path) -> str | None:
    """None if every byte is as it was written; otherwise what is wrong."""
    try:
        promised = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"no readable {MANIFEST}: {error}"
    for name, checksum in promised.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256(file) != checksum:
            return f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}"
    stray = next((file.name for file in shards(folder) if file.name not in promised), None)
    return None if stray is None else f"{stray} is not in {MANIFEST}: it is of another checkpoint"


def newest_resumable(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint that has the optimizer's state; damaged ones are reported and passed over."""
    for folder in checkpoints(run):
        problem = verify(folder)
        if problem is not None:
            warn(f"{folder}: {problem}; passed over")
        elif shards(folder) or _file(folder, "optimizer").exists():
            return folder
    return None


# ---- a run's folder ------------------------------------------------------------------------------------------


def prepare(run: Path, resume: bool) -> None:
    """Refuse an occupied or read-only folder before training starts."""
    if not resume and run.exists() and any(run.iterdir()):
        raise ResourceError(f"{run}: already there", "name another --out, or pass --resume to go on with this run")
    if resume and not checkpoints(run) and not (run / "config.yaml").is_file():  # begun, but stopped before the first
        raise CheckpointError(f"{run}: no checkpoint to resume from", "leave --resume out to start a new run")
    try:
        run.mkdir(parents=True, exist_ok=True)
        probe = run / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ResourceError(f"{run}: cannot write there: {error.strerror}", "choose another --out") from error


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, and of the best one, if it is older, all but its weights."""
    for folder in checkpoints(run)[keep:]:
        if best is not None and folder == _place(run, best):
            drop_optimizer(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def drop_optimizer(folder: Path) -> None:
    """Keep only the weights of a checkpoint. Shards hold both in one file, so they stay as they are."""
    file = _file(folder, "optimizer")
    if file.exists():
        promised = json.loads((folder / MANIFEST).read_text())
        promised.pop(file.name, None)
        _write_manifest(folder, promised)  # first, so that the checkpoint is intact at any moment
        file.unlink()


# ---- the optimizer -------------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors, by parameter number: no pickle on disk."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, slots in state.items() for name, value in slots.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
