"""Read a checkpoint: find its files, check their headers, then load and rename all tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.config_json import errors_in
from allmask.checkpoints.families import own
from allmask.checkpoints.families.google_bert import GOOGLE_BERT
from allmask.checkpoints.formats import Store, Stored
from allmask.checkpoints.formats.weights import FLOATS, open_weights, stored_tensor
from allmask.checkpoints.labels import labels_from, layouts_named
from allmask.checkpoints.renaming import Family, matches
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.files import read_json
from allmask.nn.build import empty_parameters, heads_in
from allmask.nn.heads import Labels
from allmask.registry import FAMILIES

WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
SETTINGS = ("config.json", "bert_config.json")
_OLD = {"heads_num": "tencentpretrain", "hidden_size": "bert", "n_embd": "gpt2"}  # files without `model_type` have this
_NOT_SETTINGS = ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_MAX_LINES = 40  # of an error
_FOREIGN = {".h5": "Keras", ".msgpack": "Flax", ".onnx": "ONNX", ".gguf": "GGUF", ".ot": "Rust"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint, under our names and in the stored types."""

    config: Config
    tensors: dict[str, Tensor]
    heads: frozenset[str]  # some of "pooler", "lm", "nsp", "task"
    folder: Path  # of the weights and the tokenizer
    left_out: list[str]  # tensors of unsupported task heads, by their names in the file
    labels: Labels | None = None  # of the task head


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint from a folder or a file on disk."""
    weights = find_weights(Path(path))
    settings_file = _find_settings(weights)
    settings = read_json(settings_file)
    if settings.get("model_type") == own.MODEL_TYPE:
        with errors_in(settings_file):
            config, heads, labels = own.config_from(settings)
        tensors = {name: stored.load() for name, stored in open_weights(weights).items()}
        return Checkpoint(config, tensors, heads, weights.parent, [], labels)
    family = _family(weights, settings_file, settings)
    store = open_weights(weights) if family.measured else None
    settings = {**settings, **_measured(family, store)} if store else settings
    with errors_in(settings_file, family.settings):
        config = family.config_from(settings)
    store = open_weights(weights) if store is None else store
    with errors_in(settings_file):
        family, labels = _task(family, settings, store)
    return _convert(weights, family, config, store, labels)


def read_config(path: str | Path) -> tuple[Config, Path]:
    """Read the config of a checkpoint, and return its folder; the weights are not opened."""
    weights = find_weights(Path(path))
    settings_file = _find_settings(weights)
    settings = read_json(settings_file)
    if settings.get("model_type") == own.MODEL_TYPE:
        with errors_in(settings_file):
            return own.config_from(settings)[0], weights.parent
    family = _family(weights, settings_file, settings)
    with errors_in(settings_file, family.settings):
        return family.config_from(settings), weights.parent


# ---- finding the files -------------------------------------------------------------------------------------------


def find_weights(path: Path) -> Path:
    """The file to open: the path itself, or the first of `WEIGHTS` or a TensorFlow index in a folder."""
    if path.is_dir():
        return _weights_in(path)
    if path.name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index", ".index.json")) and path.is_file():
        return path
    bundle = re.sub(r"\.data-\d{5}-of-\d{5}$", "", path.name) + ".index"
    if path.with_name(bundle).is_file():  # a TensorFlow checkpoint is named by the common start of its files
        return path.with_name(bundle)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder or file", "give a model folder, or a file of weights in one")
    if ".ckpt" in path.name:
        raise _old_tensorflow(path)
    raise CheckpointError(
        f"{path}: not a weight file", "give a model folder, or a *.safetensors, *.bin or *.index file"
    )


def _weights_in(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    bundles = sorted(folder.glob("*.index"))
    bundles = [b for b in bundles if b.name == "bert_model.ckpt.index"] or bundles
    if len(bundles) > 1:
        names = ", ".join(bundle.name for bundle in bundles)
        raise CheckpointError(f"{folder}: several TensorFlow checkpoints: {names}", "give the path of one of them")
    if bundles:
        return bundles[0]
    others = [file for file in folder.glob("*.bin") if file.name not in _NOT_WEIGHTS and file.is_file()]
    if len(others) == 1:  # as TencentPretrain calls it
        return others[0]
    old = [file for file in sorted(folder.glob("*.ckpt*")) if file.is_file()]
    if old:
        raise _old_tensorflow(old[0])
    names = sorted(file.name for file in folder.iterdir())
    contents = f"it has {', '.join(names[:12])}{' …' if len(names) > 12 else ''}" if names else "the folder is empty"
    foreign = sorted({kind for name in names for ending, kind in _FOREIGN.items() if name.endswith(ending)})
    unsupported = f" ({' and '.join(foreign)} weights are not supported)" if foreign else ""
    raise CheckpointError(
        f"{folder}: no weights; looked for {', '.join(WEIGHTS)} and *.ckpt.index; {contents}{unsupported}",
        "give the folder that holds the weights and config.json",
    )


def _old_tensorflow(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a TensorFlow checkpoint without its .index file: incomplete, or of the format before 2017",
        "all three parts are needed (.index, .data-…, bert_config.json); an old one must be saved again by TensorFlow",
    )


def _find_settings(weights: Path) -> Path:
    names = SETTINGS[::-1] if weights.suffix == ".index" else SETTINGS
    for name in names:
        if (weights.parent / name).is_file():
            return weights.parent / name
    found = (file for file in weights.parent.glob("*config.json") if file.is_file())
    others = [file for file in found if file.name not in _NOT_SETTINGS]
    if len(others) == 1:
        return others[0]
    raise CheckpointError(
        f"{weights.parent}: no {names[0]} beside {weights.name}",
        "the weights alone do not define the model; add this file",
    )


def _family(weights: Path, file: Path, settings: Mapping[str, Any]) -> Family:
    """The family that the settings name. TensorFlow checkpoints are always BERTs."""
    guess = next((name for setting, name in _OLD.items() if setting in settings), "")
    model_type = str(settings.get("model_type", guess))  # old files have none
    google = weights.suffix == ".index"
    if model_type not in ({"bert"} if google else FAMILIES):
        known = "bert" if google else " or ".join(FAMILIES)
        raise CheckpointError(f"{file}: model_type is {settings.get('model_type')!r}; supported here: {known}")
    return GOOGLE_BERT if google else FAMILIES[model_type]


def _measured(family: Family, store: Store) -> dict[str, int]:
    """The settings that follow from the number of rows of a tensor."""
    rows = {family.tidy(name): stored.shape[0] for name, stored in store.items() if stored.shape}
    return {name: rows[tensor] for name, tensor in family.measured.items() if tensor in rows}


# ---- checking and converting ---------------------------------------------------------------------------------------


def _task(family: Family, settings: Mapping[str, Any], store: Store) -> tuple[Family, Labels | None]:
    """The family extended by the task head that the settings name, if the file has it, and the labels."""
    for layout in layouts_named(family, settings):
        shape = next((store[theirs].shape for theirs, _ in layout.table if theirs in store), ())
        outputs = () if 0 in shape else shape[:1]  # an empty tensor may announce any number of labels
        if outputs and (layout.marked_by is None or layout.marked_by in store):
            return family.with_task(layout), labels_from(layout, settings, outputs[0])
    return family, None


def _convert(weights: Path, family: Family, config: Config, store: Store, labels: Labels | None) -> Checkpoint:
    """Check all tensors by their headers, then load them under our names."""
    known = {theirs for theirs, _ in family.table}
    left_out, tidied = [], Store()
    for name, stored in store.items():
        tidy = family.tidy(name)
        if tidy not in known and matches(tidy, family.task_heads):
            left_out.append(name)
        elif tidy in tidied:
            raise CheckpointError(f"{weights}: {tidy} exists twice, under an old and a new name", "remove one of them")
        elif not matches(tidy, family.ignored):
            tidied[tidy] = stored
    config = _remove_copies(weights, family, config, tidied)
    depths = config.layers, config.decoder_layers
    names = family.pairs(*depths)
    heads = heads_in({names[name] for name in tidied if name in names}, config) & frozenset(family.may_lack)
    expected = family.to_theirs(empty_parameters(config, heads, labels), *depths)
    compare(weights, expected, tidied)
    tensors = family.to_ours({name: stored.load() for name, stored in tidied.items()}, *depths)
    return Checkpoint(config, tensors, heads, weights.parent, sorted(left_out), labels)


def _remove_copies(weights: Path, family: Family, config: Config, store: Store) -> Config:
    """Remove copies of the token embedding and of the output bias from `store`.

    An output matrix that differs from the embedding it should be tied to is kept, and the Config returned is not tied.
    """
    for name in (name for name in family.copies if name in store):
        copy = store.pop(name)
        tokens = store.setdefault(family.tokens, copy)
        if not _are_equal(tokens, copy):
            raise CheckpointError(
                f"{weights}: {name} differs from {family.tokens}", "source and target must share their embedding"
            )
    if family.second_bias and family.second_bias[0] in store:
        store[family.second_bias[1]] = store.pop(family.second_bias[0])
    if config.tied and family.output in store:
        output = store.pop(family.output)
        tokens = store.setdefault(family.tokens, output)  # only one of the two names may have been saved
        if not _are_equal(tokens, output):
            store[family.output] = output
            return replace(config, tied=False)
    return config


def _are_equal(first: Stored, second: Stored) -> bool:
    return first is second or (first.shape == second.shape and torch.equal(first.load(), second.load()))


def compare(path: Path, expected: Mapping[str, Tensor], store: Store) -> None:
    """Raise an error that lists all tensors that are missing, unknown, misshapen or not floating point.

    `expected` may be on the meta device.
    """
    shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
    lines = [("missing", name, f"expected {shape}") for name, shape in shapes.items() if name not in store]
    for name, stored in store.items():
        if name not in shapes:
            lines.append(("unknown", name, f"found {list(stored.shape)}"))
        elif list(stored.shape) != shapes[name]:
            lines.append(("misshapen", name, f"expected {shapes[name]}, found {list(stored.shape)}"))
        elif stored.dtype not in FLOATS:
            lines.append(("wrong type", name, f"expected floating point, found {stored.dtype}"))
    if lines:
        raise CheckpointError(
            f"{path}: {len(lines):,} tensors do not fit the settings beside it:\n" + "\n".join(_grouped(lines)),
            "the settings and the weights belong to different models, or the file is incomplete",
        )


def check(where: str | Path, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """The same as `compare`, for tensors in memory."""
    compare(Path(where), expected, {name: stored_tensor(tensor) for name, tensor in tensors.items()})


def _grouped(lines: list[tuple[str, str, str]]) -> list[str]:
    """Merge lines that differ only in the layer: `encoder.layer.{0,1}.output.dense.bias`."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for problem, name, shapes in lines:
        number = re.search(r"(?<=[._])\d+(?=[./])", name)
        pattern = name if number is None else f"{name[: number.start()]}\0{name[number.end() :]}"
        groups.setdefault((problem, pattern, shapes), []).append("" if number is None else number[0])
    grouped = [
        f"  {problem:10}  {pattern.replace(chr(0), numbers[0] if len(numbers) == 1 else '{' + _joined(numbers) + '}')}"
        f"  {shapes}"
        for (problem, pattern, shapes), numbers in islice(groups.items(), _MAX_LINES)
    ]
    more = sum(len(numbers) for numbers in list(groups.values())[_MAX_LINES:])
    return [*grouped, f"  and {more:,} more"] if more else grouped


def _joined(numbers: list[str]) -> str:
    return ",".join(numbers) if len(numbers) <= _MAX_LINES else f"{','.join(numbers[:_MAX_LINES])},…"
