"""A run on disk: checkpoints that are whole or absent, proven by their checksums.

runs/title/
  config.yaml        what was asked for, resolved
  metrics.jsonl      a line a logged step, a line an evaluation
  checkpoints/step-00000400/   model.safetensors, optimiser.safetensors, state.json, manifest.json; with --ema, the
                               running mean of the weights, average.safetensors. Of a run with --shard: a file
                               shard-….safetensors of each process, instead of these tensors
  final/             a model folder
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from allmask.errors import CheckpointError, ResourceError
from allmask.training import sharding
from allmask.training.board import Board
from allmask.training.distributed import Alone, Crew

MANIFEST, STATE = "manifest.json", "state.json"
PARTS = ("model", "optimiser", "average")  # of a state; the last only where a running mean is kept


@dataclass(frozen=True)
class State:
    """Everything a run needs to go on as if it had never stopped."""

    step: int
    model: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    numbers: dict[str, Any]  # best score, bad steps, …: plain JSON
    average: dict[str, Tensor] | None = None  # the running mean of the weights, where one is kept

    def flat(self) -> dict[str, Tensor]:
        """All tensors by one name each: model.…, optimiser.…, average.…"""
        parts = {part: getattr(self, part) or {} for part in PARTS}
        return {f"{part}.{name}": value for part, named in parts.items() for name, value in named.items()}

    @classmethod
    def of(cls, flat: dict[str, Tensor], numbers: dict[str, Any]) -> State:
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
        for name, value in flat.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        others = {name: value for name, value in numbers.items() if name != "step"}
        return cls(numbers["step"], parts["model"], parts["optimiser"], others, parts["average"] or None)


def save_state(run: Path, state: State) -> Path:
    """Write a checkpoint beside its place, flush it, sign it, then rename it: the old ones stay whole throughout."""
    folder = _place(run, state.step)
    with _writing(folder) as beside:
        _clear(beside)
        for part in PARTS:
            if getattr(state, part) is not None:
                save_file(_contiguous(getattr(state, part)), _file(beside, part))
        _complete(beside, folder, state, _signed(beside.iterdir()))
    return folder


def save_shards(run: Path, state: State, crew: Alone | Crew) -> Path:
    """The same by all processes: each writes and signs its part; when all are there, the first renames the folder."""
    folder = _place(run, state.step)
    with _writing(folder) as beside:
        crew.first(lambda: _clear(beside))
        sharding.write(beside, state.flat())
        parts = crew.gathered(_signed(sharding.files_of(beside, crew.rank)))
        signed = {name: checksum for part in parts for name, checksum in part.items()}
        crew.first(lambda: _complete(beside, folder, state, signed))
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Where to write a checkpoint until it is whole; a full or read-only disk, in words."""
    beside = folder.with_name(f".{folder.name}.partial")
    try:
        yield beside
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(beside, ignore_errors=True)
        hint = "earlier checkpoints are untouched; free some space and run again with --resume"
        raise ResourceError(f"{folder}: could not be written: {_reason(error)}", hint) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _clear(beside: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)


def _complete(beside: Path, folder: Path, state: State, signed: dict[str, str]) -> None:
    """Add the numbers and the manifest to tensors that are signed, and give the folder its name."""
    (beside / STATE).write_text(json.dumps({"step": state.step, **state.numbers}))
    signed = signed | _signed([beside / STATE])
    (beside / MANIFEST).write_text(json.dumps(dict(sorted(signed.items())), indent=1))
    _flush(beside / MANIFEST)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)
    _flush(folder.parent)


def _signed(files: Iterable[Path]) -> dict[str, str]:
    """The checksums of files, which are seen to the disk."""
    signed = {}
    for file in sorted(files):
        _flush(file)
        signed[file.name] = _checksum(file)
    return signed


def sign(folder: Path) -> None:
    """Write down the checksums of a folder's files, and see all of them to the disk."""
    (folder / MANIFEST).write_text(json.dumps(_signed(folder.iterdir()), indent=1))
    _flush(folder / MANIFEST)


def _place(run: Path, step: int) -> Path:
    return run / "checkpoints" / _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def load_state(folder: Path, place: sharding.Place = lambda name, whole: whole) -> State:
    """A checkpoint of either kind, of one that was verified. `place` says how much of each tensor is wanted."""
    numbers = json.loads((folder / STATE).read_text())
    if sharding.files_of(folder):
        return State.of(sharding.read(folder, place), numbers)
    parts = [part for part in PARTS if _file(folder, part).exists()]
    flat = {f"{part}.{name}": value for part in parts for name, value in load_file(_file(folder, part)).items()}
    return State.of({name: place(name, value) for name, value in flat.items()}, numbers)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first; half-written ones have other names."""
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
        if _checksum(file) != checksum:
            return f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}"
    stray = next((file.name for file in sharding.files_of(folder) if file.name not in promised), None)
    return None if stray is None else f"{stray} is not in {MANIFEST}: it is of another checkpoint"


def newest_verified(run: Path, warn) -> Path | None:
    """The newest checkpoint whose bytes are right; damaged ones are named and passed over."""
    for folder in checkpoints(run):
        problem = verify(folder)
        if problem is None:
            return folder
        warn(f"{folder}: {problem}; passed over")
    return None


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best."""
    for folder in checkpoints(run)[keep:]:
        if best is None or folder.name != _name(best):
            shutil.rmtree(folder, ignore_errors=True)


def prepare(run: Path, resume: bool) -> None:
    """Said before training starts: an occupied or read-only folder."""
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


class Metrics:
    """metrics.jsonl: one JSON object a line; on resuming, lines after the checkpoint are dropped."""

    def __init__(self, run: Path, step: int = 0, board: Board | None = None, write: bool = True):
        self.path, self.board, self.write = run / "metrics.jsonl", board, write
        if write:
            kept = [line for line in read_metrics(run) if line["step"] <= step]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def add(self, **values: Any) -> None:
        if not self.write:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")
        if self.board is not None:
            self.board.add(values["step"], {name: value for name, value in values.items() if name != "step"})

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the line a crash cut off
            break
    return lines


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as flat tensors, by parameter number: no pickle on disk."""
    state = optimiser.state_dict()["state"]
    return {f"{number}.{name}": value for number, slots in state.items() for name, value in slots.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
