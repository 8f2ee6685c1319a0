"""Runs commands in this process, in a folder of their own, and keeps what can be compared of what they leave."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors import safe_open

from tests.guard import inputs

# What a refactoring renames on purpose: old name -> new name. Recipes and the record keep the old ones.
RENAMED_OPTIONS: dict[str, str] = {  # "--old" of all commands, or "finetune --old" of one; "" leaves the word out
    "--inner": "--ffn-width",
    "--optimiser": "--optimizer",
    "--vocabulary": "--vocab-size",
}
RENAMED_METRICS: dict[str, str] = {  # fields of metrics.jsonl (without eval_) and of everything printed as JSON
    "gold": "targets",
    "is": "true",
    "taken_for": "predicted",
    "alike": "mean_cosine",
}
RENAMED_TENSORS: dict[str, str] = {}  # parts of names in final/model.safetensors
VARYING = {"seconds", "speed", "mfu", "bytes", "config"}  # fields that say nothing of behaviour

Kept = dict[str, dict[str, Any]]  # an entry: {"bits": {what: SHA-256}, "numbers": {what: number}, "exact": bool}


class Lab:
    """A folder with all inputs, where commands run with relative paths, and the entries kept so far."""

    def __init__(self, folder: Path):
        self.folder, self.kept = folder, dict[str, dict[str, Any]]()
        inputs.write(folder)

    def run(self, line: str, *texts: str, code: int = 0) -> str:
        """What a command line prints; texts, which may have blanks, are its last words."""
        from allmask.cli.main import main

        command, *words = line.split()
        new = (RENAMED_OPTIONS.get(f"{command} {word}", RENAMED_OPTIONS.get(word, word)) for word in words)
        out, err = io.StringIO(), io.StringIO()
        with _alone(), chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            found = main([command, *(word for word in new if word), *texts])
        if found != code:
            raise AssertionError(f"allmask {line}: exit code {found}, expected {code}\n{err.getvalue()}")
        return out.getvalue()

    def train(self, name: str, line: str) -> None:
        """A run in the folder `name`: its curve, its final weights, those of its last step whatever they are called."""
        self.run(f"{line} --out {name} --quiet")
        self.keep_run(name)

    def train_cut(self, name: str, line: str, step: int) -> None:
        """The same of a run that is killed when its checkpoint of a step would be complete, and then resumed."""
        rename = os.rename

        def killing(old: Any, new: Any, **how: Any) -> None:
            if Path(new).name == f"step-{step:08d}":
                raise _Killed
            rename(old, new, **how)

        with patch("os.rename", killing):
            self.run(f"{line} --out {name} --quiet", code=1)
        self.run(f"{line.split()[0]} --resume --out {name} --quiet")

    def ask(self, entry: str, line: str, *texts: str, code: int = 0, exact: bool = False) -> None:
        """Keep what a command prints."""
        self.keep(self.run(line, *texts, code=code), entry, exact)

    def keep_run(self, name: str, entry: str | None = None) -> None:
        run = self.folder / name
        curve = [_old(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in curve if "loss" in row]
        scores = [row for row in curve if "loss" not in row][-1:]
        bits = {"curve": _hash(_text(curve))}
        numbers = {"steps": len(losses), "first loss": losses[0], "last loss": losses[-1]}
        numbers |= {name: value for row in scores for name, value in row.items() if name != "step"}
        for key, named, folder in (
            ("final", True, run / "final"), ("last step", False, max((run / "checkpoints").iterdir())),
        ):  # fmt: skip
            bits[key], sizes = _weights(folder, named)
            numbers |= {f"{key} {size}": value for size, value in sizes.items()}
        self._keep(entry or name, bits, numbers)

    def keep_weights(self, name: str, entry: str) -> None:
        bits, numbers = _weights(self.folder / name, named=True)
        self._keep(entry, {"weights": bits}, numbers)

    def keep_file(self, name: str, entry: str, exact: bool = False) -> None:
        self.keep((self.folder / name).read_text(encoding="utf-8"), entry, exact)

    def keep(self, printed: str, entry: str, exact: bool = False) -> None:
        """What was printed: JSON, lines of JSON, or plain text. `exact` is the same on every machine."""
        data = _parsed(printed)
        floats = np.array([value for value in _leaves(data) if isinstance(value, float)])
        numbers: dict[str, Any] = {}
        if len(floats):
            numbers |= {
                "numbers": len(floats),
                "mean": float(floats.mean()),
                "size": float(np.sqrt((floats**2).mean())),
            }
        if isinstance(data, dict) and "scores" in data:
            scores = data["scores"].get("model", data["scores"])
            numbers |= {name: value for name, value in scores.items() if isinstance(value, int | float)}
        said = data if isinstance(data, str) else _text(data)
        self._keep(entry, {"output": _hash(said)}, numbers, exact)

    def _keep(self, entry: str, bits: dict[str, str], numbers: dict[str, Any], exact: bool = False) -> None:
        if entry in self.kept:
            raise AssertionError(f"{entry} is kept twice")
        self.kept[entry] = {"bits": bits, "numbers": numbers} | ({"exact": True} if exact else {})


class _Killed(BaseException):
    """What nothing catches."""


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, and logging as it was before; pictures stay empty and nothing waits for the disk, to save time."""
    logger, threads = logging.getLogger("allmask"), torch.get_num_threads()
    before = logger.handlers, logger.level, logger.propagate
    torch.set_num_threads(1)
    empty = {
        "matplotlib.figure.Figure.savefig": lambda figure, path, **_: Path(path).touch(),
        "allmask.runs.plan.plot_run": lambda run: (run / "loss.png").touch(),
        "allmask.tasks.classify.draw_confusion": lambda matrix, names, path: path.touch(),
        "allmask.vision.training.draw_confusion": lambda matrix, names, path: path.touch(),
    }
    try:
        with ExitStack() as stack:
            stack.enter_context(patch("os.fsync"))
            for name, draw in empty.items():
                stack.enter_context(patch(name, draw))
            yield
    finally:
        torch.set_num_threads(threads)
        logger.handlers, logger.level, logger.propagate = before


def _weights(folder: Path, named: bool) -> tuple[str, dict[str, Any]]:
    """Of all tensors of a folder's model.safetensors, by their names; without, in the order of their bytes."""
    found, square, parameters = [], 0.0, 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            for old, new in RENAMED_TENSORS.items():
                name = name.replace(new, old)
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found.append(
                f"{name if named else ''} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"
            )
            square += tensor.double().square().sum().item()
            parameters += tensor.numel()
    return _hash("\n".join(sorted(found))), {"parameters": parameters, "norm": math.sqrt(square)}


def _parsed(printed: str) -> Any:
    try:
        return _old(json.loads(printed))
    except ValueError:
        pass
    try:
        return [_old(json.loads(line)) for line in printed.splitlines()]
    except ValueError:
        return printed


def _old(data: Any) -> Any:
    """The same under the old names, without what varies."""
    if isinstance(data, list):
        return [_old(value) for value in data]
    if not isinstance(data, dict):
        return data
    names = {new: old for old, new in RENAMED_METRICS.items()}
    names |= {f"eval_{new}": f"eval_{old}" for old, new in RENAMED_METRICS.items()}
    return {names.get(name, name): _old(value) for name, value in data.items() if name not in VARYING}


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _leaves(value)
    else:
        yield data


def _text(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, sort_keys=True)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
