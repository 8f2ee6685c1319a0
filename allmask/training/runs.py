"""A run on disk: checkpoints that are whole or absent, proven by their checksums.

runs/title/
  config.yaml        what was asked for, resolved
  metrics.jsonl      a line a logged step, a line an evaluation
  checkpoints/step-00000400/   model.safetensors, optimiser.safetensors, state.json, manifest.json; with --ema, the
                               running mean of the weights, average.safetensors
  final/             a model folder
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allmask.errors import CheckpointError, ResourceError
from allmask.training.board import Board

MANIFEST = "manifest.json"
AVERAGE = "average.safetensors"


@dataclass(frozen=True)
class State:
    """Everything a run needs to go on as if it had never stopped."""

    step: int
    model: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    numbers: dict[str, Any]  # best score, bad steps, …: plain JSON
    average: dict[str, Tensor] | None = None  # the running mean of the weights, where one is kept


def save_state(run: Path, state: State) -> Path:
    """Write a checkpoint beside its place, flush it, sign it, then rename it: the old ones stay whole throughout."""
    folder = run / "checkpoints" / _name(state.step)
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        save_file(_contiguous(state.model), beside / "model.safetensors")
        save_file(_contiguous(state.optimiser), beside / "optimiser.safetensors")
        if state.average is not None:
            save_file(_contiguous(state.average), beside / AVERAGE)
        (beside / "state.json").write_text(json.dumps({"step": state.step, **state.numbers}))
        sign(beside)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)
        _flush(folder.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        hint = "earlier checkpoints are untouched; free some space and run again with --resume"
        raise ResourceError(f"{folder}: could not be written: {error.strerror or error}", hint) from error
    except Exception as error:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(beside, ignore_errors=True)
        raise ResourceError(f"{folder}: could not be written: {error}", "earlier checkpoints are untouched") from error
    return folder


def sign(folder: Path) -> None:
    """Write down the checksums of a folder's files, and see all of them to the disk."""
    (folder / MANIFEST).write_text(json.dumps(_checksums(folder), indent=1))
    for file in folder.iterdir():
        _flush(file)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def load_state(folder: Path) -> State:
    numbers = json.loads((folder / "state.json").read_text())
    step = numbers.pop("step")
    average = load_file(folder / AVERAGE) if (folder / AVERAGE).exists() else None
    model, optimiser = (load_file(folder / f"{name}.safetensors") for name in ("model", "optimiser"))
    return State(step, model, optimiser, numbers, average)


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
    return None


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

    def __init__(self, run: Path, step: int = 0, board: Board | None = None):
        self.path, self.board = run / "metrics.jsonl", board
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def add(self, **values: Any) -> None:
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


def _checksums(folder: Path) -> dict[str, str]:
    return {file.name: _checksum(file) for file in sorted(folder.iterdir())}


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
