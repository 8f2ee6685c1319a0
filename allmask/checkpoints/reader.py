"""Reading a checkpoint: find the files, judge them by their headers, then load and rename, all or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.config_json import placed, read_json
from allmask.checkpoints.families import own
from allmask.checkpoints.families.google_bert import GOOGLE_BERT
from allmask.checkpoints.formats.weights import FLOATS, Store, open_weights, stored_tensor
from allmask.checkpoints.labels import labels_from, layouts_named
from allmask.checkpoints.names import expected_shapes, heads_in
from allmask.checkpoints.renaming import Family, matches, without_data
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.nn.heads import Labels
from allmask.registry import FAMILIES

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SETTINGS = ("config.json", "bert_config.json")
_FOREIGN = {".h5": "Keras", ".msgpack": "Flax", ".onnx": "ONNX", ".gguf": "GGUF", ".ot": "Rust"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds, under our names and in the types it was stored with."""

    config: Config
    tensors: dict[str, Tensor]
    heads: frozenset[str]  # some of "pooler", "lm", "nsp", "task"
    folder: Path  # where its tokenizer is
    left_out: list[str]  # tensors of task heads that we do not know, by the names in the file
    labels: Labels | None = None  # of the task head


def read(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder or a file on disk."""
    weights = find_weights(Path(path))
    settings_file = _find_settings(weights)
    settings = read_json(settings_file)
    if settings.get("model_type") == own.MODEL_TYPE:
        return _read_own(weights, settings_file, settings)
    family = _family(weights, settings_file, settings)
    try:
        config = family.config_from(settings)
    except CheckpointError as error:
        raise placed(error, settings_file, family.settings) from error
    store = open_weights(weights)
    try:
        family, labels = _task(family, settings, store)
    except CheckpointError as error:
        raise placed(error, settings_file, {}) from error
    return _convert(weights, family, config, store, labels)


def kinds_asked(folder: Path) -> tuple[str, ...]:
    """What the task head that the settings in a folder tell of may be asked, see Labels; its weights are not opened."""
    if not (folder / "config.json").is_file():
        return ()
    settings = read_json(folder / "config.json")
    if isinstance(settings.get("labels"), dict):
        return (str(settings["labels"].get("kind")),)
    family = FAMILIES.get(_model_type(settings))
    layouts = [] if family is None else layouts_named(family, settings)
    return tuple(kind for layout in layouts for kind in layout.kinds)


def classifies(folder: Path) -> bool:
    return bool({"single", "multi", "number"} & set(kinds_asked(folder)))


# ---- finding the files -------------------------------------------------------------------------------------------


def find_weights(path: Path) -> Path:
    """The file to open: the path itself, or the first kind of weights that a folder has."""
    if path.is_dir():
        return _weights_in(path)
    if path.name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index", ".index.json")) and path.is_file():
        return path
    bundle = re.sub(r"\.data-\d{5}-of-\d{5}$", "", path.name) + ".index"
    if path.with_name(bundle).is_file():  # TensorFlow people name a checkpoint by what its files have in common
        return path.with_name(bundle)
    if not path.exists():
        raise CheckpointError(f"{path}: not there", "give a model folder, or a file of weights in one")
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
    old = [file for file in sorted(folder.glob("*.ckpt*")) if file.is_file()]
    if old:
        raise _old_tensorflow(old[0])
    raise CheckpointError(
        f"{folder}: no weights; looked for {', '.join(WEIGHTS)} and *.ckpt.index; {_contents(folder)}",
        "give the folder that holds the weights and config.json",
    )


def _contents(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    if not names:
        return "the folder is empty"
    foreign = {kind for name in names for ending, kind in _FOREIGN.items() if name.endswith(ending)}
    shown = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
    return f"it has {shown}" + (f" ({' and '.join(sorted(foreign))} weights are not supported)" if foreign else "")


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
    raise CheckpointError(
        f"{weights.parent}: no {names[0]} beside {weights.name}", "weights alone do not tell the model's shape; add it"
    )


def _family(weights: Path, file: Path, settings: Mapping[str, Any]) -> Family:
    """The family that the settings name; of TensorFlow's files there is but one."""
    word, google = _model_type(settings), weights.suffix == ".index"
    if word not in ({"bert"} if google else FAMILIES):
        known = "bert" if google else " or ".join(FAMILIES)
        raise CheckpointError(f"{file}: model_type is {settings.get('model_type')!r}; supported here: {known}")
    return GOOGLE_BERT if google else FAMILIES[word]


def _model_type(settings: Mapping[str, Any]) -> str:
    """The word for the family; files older than that word are told apart by the names of their sizes."""
    guess = "bert" if "hidden_size" in settings else "gpt2" if "n_embd" in settings else ""
    return str(settings.get("model_type", guess))


# ---- judging and converting ----------------------------------------------------------------------------------------


def _read_own(weights: Path, file: Path, settings: Mapping[str, Any]) -> Checkpoint:
    try:
        config, heads, labels = own.config_from(settings)
    except CheckpointError as error:
        raise placed(error, file, {}) from error
    tensors = {name: stored.load() for name, stored in open_weights(weights).items()}
    return Checkpoint(config, tensors, heads, weights.parent, [], labels)


def _task(family: Family, settings: Mapping[str, Any], store: Store) -> tuple[Family, Labels | None]:
    """The family with the task head its settings name, if that is in the file, and its labels."""
    for layout in layouts_named(family, settings):
        outputs = next((store[theirs].shape[:1] for theirs, _ in layout.table if theirs in store), ())
        if outputs and (layout.marked_by is None or layout.marked_by in store):
            return family.with_task(layout), labels_from(layout, settings, outputs[0])
    return family, None


def _convert(weights: Path, family: Family, config: Config, store: Store, labels: Labels | None) -> Checkpoint:
    known = {theirs for theirs, _ in family.table}
    spare = (name for name in store if family.tidy(name) not in known)
    left_out = sorted(name for name in spare if matches(family.tidy(name), family.task_heads))
    store = _tidy(weights, family, {name: stored for name, stored in store.items() if name not in left_out})
    store = _without_copies(weights, family, store)
    config, store = _settle_output(family, config, store)
    depths = config.layers, config.decoder_layers
    names = family.pairs(*depths)
    ours = {names[name] for name in store if name in names}
    heads = heads_in(ours, config) & frozenset(family.may_lack)
    shapes = expected_shapes(config, heads, labels)
    expected = family.to_theirs(without_data(shapes), *depths)
    compare(weights, {name: tuple(tensor.shape) for name, tensor in expected.items()}, store)
    tensors = family.to_ours({name: stored.load() for name, stored in store.items()}, *depths)
    return Checkpoint(config, tensors, heads, weights.parent, left_out, labels)


def _tidy(weights: Path, family: Family, store: Store) -> Store:
    """Names as the table writes them, without what carries nothing."""
    result: Store = {}
    for name, stored in store.items():
        tidy = family.tidy(name)
        if matches(tidy, family.ignored):
            continue
        if tidy in result:
            raise CheckpointError(
                f"{weights}: {tidy} is there twice, under an old and a new name", "remove one of them"
            )
        result[tidy] = stored
    return result


def _without_copies(weights: Path, family: Family, store: Store) -> Store:
    """One token embedding, whatever it is called; two that differ are no model of ours."""
    store = dict(store)
    for name in family.copies:
        if name in store:
            copy = store.pop(name)
            tokens = store.setdefault(family.tokens, copy)
            if tokens is not copy and (tokens.shape != copy.shape or not torch.equal(tokens.load(), copy.load())):
                raise CheckpointError(
                    f"{weights}: {name} differs from {family.tokens}", "source and target must share their embedding"
                )
    return store


def _settle_output(family: Family, config: Config, store: Store) -> tuple[Config, Store]:
    """An output layer saved along with the embedding it is tied to is a copy; one that differs is its own."""
    store = dict(store)
    if family.second_bias and family.second_bias[0] in store:
        store[family.second_bias[1]] = store.pop(family.second_bias[0])
    if config.tied and family.output in store:
        output = store.pop(family.output)
        tokens = store.setdefault(family.tokens, output)  # only one of the two names may have been saved
        if tokens.shape != output.shape or not torch.equal(tokens.load(), output.load()):
            return replace(config, tied=False), store | {family.output: output}
    return config, store


def compare(path: Path, expected: Mapping[str, tuple[int, ...]], store: Store) -> None:
    """Raise an error that lists every tensor which is missing, unknown, misshapen or not of a float type."""
    lines = [("missing", name, f"expected {list(expected[name])}") for name in expected if name not in store]
    for name, stored in store.items():
        if name not in expected:
            lines.append(("unknown", name, f"found {list(stored.shape)}"))
        elif stored.shape != expected[name]:
            lines.append(("misshapen", name, f"expected {list(expected[name])}, found {list(stored.shape)}"))
        elif stored.dtype not in FLOATS:
            lines.append(("wrong type", name, f"expected floating point, found {stored.dtype}"))
    if lines:
        raise CheckpointError(
            f"{path}: {len(lines)} tensors do not fit the settings beside it:\n" + "\n".join(_grouped(lines)),
            "the settings and the weights belong to different models, or the file is incomplete",
        )


def check(where: str | Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """The same judgement over tensors in memory: all that do not fit are listed."""
    compare(Path(where), expected, {name: stored_tensor(tensor) for name, tensor in tensors.items()})


def _grouped(lines: list[tuple[str, str, str]]) -> list[str]:
    """One line for the same trouble in several layers: `encoder.layer.{0,1}.output.dense.bias`."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for problem, name, shapes in lines:
        number = re.search(r"(?<=[._])\d+(?=[./])", name)
        pattern = name if number is None else f"{name[: number.start()]}\0{name[number.end() :]}"
        groups.setdefault((problem, pattern, shapes), []).append("" if number is None else number[0])
    return [
        f"  {problem:10}  {pattern.replace(chr(0), numbers[0] if len(numbers) == 1 else '{' + ','.join(numbers) + '}')}"
        f"  {shapes}"
        for (problem, pattern, shapes), numbers in groups.items()
    ]
