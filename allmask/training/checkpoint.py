"""Checkpoints of a run: complete or absent, and verified by their checksums before they are loaded or counted.

runs/title/checkpoints/step-00000400/
  model.safetensors, optimizer.safetensors   the weights and the optimizer's state; with --ema also
                                             average.safetensors, the moving average of the weights
  shard-….safetensors                        with --shard, one file per process instead of these
  state.json                                 the step, the best score so far, the run that it belongs to, …
  manifest.json                              the SHA-256 of every file

optimizer.safetensors is removed from the best checkpoint once there are newer ones to resume from, and from all
checkpoints of a finished run.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from allmask.errors import CheckpointError, ResourceError
from allmask.files import (
    LOCK,
    MANIFEST,
    checksums,
    put_in_place,
    read_manifest,
    remove_all_leftovers,
    remove_folder,
    verify,
    write_manifest,
)
from allmask.training.process_group import Group

STATE = "state.json"
PARTS = ("model", "optimizer", "average")  # of a state; the last only with --ema
RUN, METRICS = "run", "metrics"  # in state.json: the identity of the run, if it has one; the seal of metrics.jsonl
_STEP, _PARTIAL = re.compile(r"step-(\d{8,})"), re.compile(r"\.step-\d+\.partial")  # names of checkpoints; unfinished
Place = Callable[[str, Tensor], Tensor]  # name and whole tensor -> the part of it that this process needs


@dataclass(frozen=True)
class State:
    """Everything that a run needs to continue as if it had not been stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    numbers: dict[str, Any]  # the best score, bad steps, …: plain JSON
    average: dict[str, Tensor] | None = None  # the moving average of the weights, with --ema

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
    """Write a checkpoint under another name, sync it with its checksums, then rename it: the old ones stay intact."""
    folder = folder_of(run, state.step)
    with _writing(folder) as beside:
        _clear(beside)
        for part in PARTS:
            if getattr(state, part) is not None:
                tensors = {name: value.detach().cpu().contiguous() for name, value in getattr(state, part).items()}
                save_file(tensors, _file(beside, part))
        _complete(beside, folder, state, checksums(beside.iterdir()))
    return folder


def save_shards(run: Path, state: State, group: Group) -> Path:
    """The same by all processes: each writes its part and the checksums of it; then the first renames the folder."""
    folder = folder_of(run, state.step)
    with _writing(folder) as beside:
        group.first(lambda: _clear(beside))
        write_shards(beside, state.flat())
        parts = group.gathered(checksums(shards(beside, group.rank)))
        signed = {name: checksum for part in parts for name, checksum in part.items()}
        group.first(lambda: _complete(beside, folder, state, signed))
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this process's parts of tensors; all processes call it. A failure in one is raised in all.

    torch.distributed.checkpoint writes a safetensors file per process, with names, shapes and offsets in the header: no
    pickle, and any number of processes can read the files.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error


def shards(folder: Path, rank: int | None = None) -> list[Path]:
    """List the shard files of one process, or of all; empty for a checkpoint without shards."""
    return sorted(folder.glob("shard-*" if rank is None else f"shard-{rank + 1:05d}-*"))


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Yield the temporary folder of a checkpoint; remove it and explain the reason if writing fails."""
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
    """Add state.json and the manifest to the tensors, whose checksums are `signed`, and rename the folder."""
    (beside / STATE).write_text(json.dumps({"step": state.step, **state.numbers}), encoding="utf-8")
    write_manifest(beside, signed | checksums([beside / STATE]))
    put_in_place(beside, folder)


def sign(folder: Path) -> None:
    """Write the checksums of a folder's files to its manifest, and sync all of them to disk."""
    write_manifest(folder, checksums(folder.iterdir()))


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


# ---- reading -------------------------------------------------------------------------------------------------


def load_state(folder: Path, place: Place = lambda name, whole: whole) -> State:
    """Load a verified checkpoint of either kind. `place` reduces each tensor to the part that is needed."""
    numbers = json.loads((folder / STATE).read_text())
    if shards(folder):
        return State.of(_read_shards(folder, place), numbers)
    listed = read_manifest(folder)
    parts = [part for part in PARTS if _file(folder, part).name in listed]
    flat = {f"{part}.{name}": value for part in parts for name, value in load_file(_file(folder, part)).items()}
    return State.of({name: place(name, value) for name, value in flat.items()}, numbers)


def _read_shards(folder: Path, place: Place) -> dict[str, Tensor]:
    """Read all tensors, each reduced by `place`, however many processes wrote them."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: place(name, torch.zeros(entry.size, dtype=entry.properties.dtype))
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # about reading without the other processes, which is intended
        warnings.simplefilter("ignore", UserWarning)
        load(found, storage_reader=reader, no_dist=True)
    return found


def checkpoints(run: Path) -> list[Path]:
    """List the checkpoints of a run, newest first; incomplete ones have other names."""
    found = [folder for folder in (run / "checkpoints").glob("step-*") if _STEP.fullmatch(folder.name)]
    return sorted(filter(Path.is_dir, found), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True)
class History:
    """The checkpoints of a run that are whole and its own, by step."""

    resumable: tuple[int, ...] = ()  # newest first
    weights: tuple[int, ...] = ()  # without the optimizer's state
    damaged: bool = False  # there are others, which are damaged
    notes: tuple[str, ...] = ()  # why others do not count

    @property
    def steps(self) -> tuple[int, ...]:
        """All of them, newest first."""
        return tuple(sorted({*self.resumable, *self.weights}, reverse=True))

    def with_step(self, step: int) -> History:
        """Return the history after a checkpoint of this step was written."""
        resumable = tuple(sorted({step, *self.resumable}, reverse=True))
        return replace(self, resumable=resumable, weights=tuple(other for other in self.weights if other != step))


def history(run: Path, identity: str = "") -> History:
    """Verify all checkpoints of a run. `identity` is that of the run; a checkpoint of another one does not count."""
    found: dict[bool, list[int]] = {True: [], False: []}
    notes, damaged = [], False
    for folder in checkpoints(run):
        problem = problem_of(folder)
        if problem is not None:
            damaged = True
            notes.append(f"{folder}: {problem}; skipped")
        elif not belongs(folder, identity):
            notes.append(f"{folder}: a checkpoint of another run; ignored")
        else:
            listed = read_manifest(folder)
            found[bool(shards(folder)) or _file(folder, "optimizer").name in listed].append(step_of(folder))
    known = {folder.name for folder in checkpoints(run)}
    others = sorted(item.name for item in (run / "checkpoints").glob("step-*") if item.name not in known)
    notes += [f"{run / 'checkpoints' / name}: not a checkpoint; ignored" for name in others]
    return History(tuple(found[True]), tuple(found[False]), damaged, tuple(notes))


def problem_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is whole."""
    problem = verify(folder)
    if problem is not None:
        return problem
    listed = read_manifest(folder)
    needed = [STATE] if shards(folder) else [STATE, _file(folder, "model").name]
    absent = next((name for name in needed if name not in listed), None)
    if absent is not None:
        return f"{absent} is not in {MANIFEST}"
    step = _numbers(folder).get("step")
    return None if step == step_of(folder) else f"its name is not that of step {step}"


def belongs(folder: Path, identity: str) -> bool:
    """Whether a checkpoint is one of the run with this identity; without one, nobody can tell."""
    return not identity or _numbers(folder).get(RUN, identity) == identity


def _numbers(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- a run's folder ------------------------------------------------------------------------------------------


def prepare(run: Path, resume: bool) -> None:
    """Refuse an occupied or read-only folder before training starts; remove what a killed process left in it."""
    if not resume and run.exists() and any(item.name != LOCK for item in run.iterdir()):
        raise ResourceError(f"{run}: already there", "name another --out, or pass --resume to continue this run")
    if resume:
        remove_unfinished(run)
    if resume and not checkpoints(run) and not (run / "config.yaml").is_file():  # it may have stopped before the first
        raise CheckpointError(f"{run}: no checkpoint to resume from", "leave --resume out to start a new run")
    try:
        run.mkdir(parents=True, exist_ok=True)
        probe = run / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ResourceError(f"{run}: cannot write there: {error.strerror}", "choose another --out") from error


def remove_unfinished(run: Path) -> None:
    """Remove what a killed process left in a run's folder; a checkpoint that it moved aside gets its name again."""
    for folder in (run, run / "checkpoints", *(run / "checkpoints").glob("step-*")):
        remove_all_leftovers(folder)
    for item in (run / "checkpoints").glob(".step-*"):
        if _PARTIAL.fullmatch(item.name):
            shutil.rmtree(item, ignore_errors=True)


def prune(run: Path, known: History, now: int, keep: int, best: int | None) -> History:
    """Remove all but the newest `keep` checkpoints up to step `now`. Of an older best one, keep the weights.

    Only checkpoints in `known` count, or are removed. Returns what is left of them.
    """
    done = [step for step in known.resumable if step <= now]
    spent = set(done[keep:]) | {step for step in known.weights if step <= now}
    for step in sorted(spent - {best}):
        remove_folder(folder_of(run, step))
    if best in spent:
        drop_optimizer(folder_of(run, best))
    left = {step for step in spent if step == best}
    resumable = tuple(step for step in known.resumable if step not in spent)
    weights = tuple(sorted(({*known.weights} - spent) | left, reverse=True))
    return replace(known, resumable=resumable, weights=weights)


def drop_optimizer(folder: Path) -> None:
    """Keep only the weights of a checkpoint. Shards stay as they are: they hold both in one file."""
    file = _file(folder, "optimizer")
    try:
        kept = read_manifest(folder)
    except ValueError:  # damaged since it was written: nothing more is done with it
        return
    if kept.pop(file.name, None) is not None:
        write_manifest(folder, kept)  # first, so that the checkpoint is intact at any moment
    file.unlink(missing_ok=True)


# ---- the optimizer -------------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors, by parameter number: no pickle on disk."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, slots in state.items() for name, value in slots.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
