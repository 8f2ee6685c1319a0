"""Residual networks on disk: files with torchvision's names, and a folder of our own.

A file of weights alone shows its network: how many blocks, how wide, which shortcuts. Two things it cannot show, the
place of the stride in a bottleneck and, where no shortcut has parameters, whether there are any; they are taken as
torchvision has them (in the 3×3) and as A. Whoever knows better gives the config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.config_json import placed, read_json
from allmask.checkpoints.formats.weights import Store, open_weights
from allmask.checkpoints.labels import own_labels_from, own_labels_to
from allmask.checkpoints.reader import compare
from allmask.checkpoints.writer import fill
from allmask.errors import CheckpointError
from allmask.files import new_folder
from allmask.nn.heads import Labels
from allmask.vision.labelled import Preparation
from allmask.vision.resnet import ResNet, ResNetConfig, shape_of

MODEL_TYPE = "allmask-resnet"
WEIGHTS, SETTINGS = "model.safetensors", "config.json"
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")

# Theirs and ours; a star is one word, the same on both sides.
TORCHVISION = (
    ("conv1.weight",                 "stem.conv.weight"),
    ("bn1.*",                        "stem.norm.*"),
    ("layer*.*.conv1.weight",        "stages.*.layers.*.branch.0.conv.weight"),
    ("layer*.*.bn1.*",               "stages.*.layers.*.branch.0.norm.*"),
    ("layer*.*.conv2.weight",        "stages.*.layers.*.branch.1.conv.weight"),
    ("layer*.*.bn2.*",               "stages.*.layers.*.branch.1.norm.*"),
    ("layer*.*.conv3.weight",        "stages.*.layers.*.branch.2.conv.weight"),
    ("layer*.*.bn3.*",               "stages.*.layers.*.branch.2.norm.*"),
    ("layer*.*.downsample.0.weight", "stages.*.layers.*.shortcut.conv.weight"),
    ("layer*.*.downsample.1.*",      "stages.*.layers.*.shortcut.norm.*"),
    ("fc.*",                         "head.*"),
)  # fmt: skip
_PARALLEL = "module."  # before every name that DataParallel has saved
_COUNTER = "num_batches_tracked"  # of a norm; files older than it lack it, and nothing here depends on it


@dataclass(frozen=True, eq=False)
class Loaded:
    """A network from a file, and the names of its classes and what it expects of images, where the file has them."""

    model: ResNet
    labels: Labels | None = None
    preparation: Preparation | None = None


def load(path: str | Path, config: ResNetConfig | None = None) -> Loaded:
    """From our own folder, or from a file of weights with torchvision's names; in eval mode, in the types stored."""
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file() or path.suffix not in ENDINGS:
        what = "not a file of weights" if path.exists() else "not there"
        raise CheckpointError(f"{path}: {what}", f"give a folder, or a file that ends in {', '.join(ENDINGS)}")
    store = _theirs_to_ours(path, open_weights(path))
    return Loaded(_filled(path, config or _config_of(path, store), store))


def _filled(path: Path, config: ResNetConfig, store: Store) -> ResNet:
    """All or nothing: what does not fit is listed, by our names, before anything is allocated."""
    model = shape_of(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not _counts(name)}
    try:
        compare(path, expected, {name: stored for name, stored in store.items() if not _counts(name)})
    except CheckpointError as error:
        message = error.message.replace("the settings beside it", f"a ResNet of {config.depth} layers")  # may be alone
        raise CheckpointError(message, "the file is incomplete, or of another kind of network") from error
    tensors = {name: store[name].load() for name in expected}
    counters = {name: _counter(store, name) for name in model.state_dict() if _counts(name)}
    model.load_state_dict(tensors | counters, assign=True)
    return model.requires_grad_().eval()


def _counts(name: str) -> bool:
    return name.endswith(_COUNTER)


def _counter(store: Store, name: str) -> Tensor:
    found = store.get(name)
    usable = found is not None and found.shape == () and found.dtype in ("I64", "int64")
    return found.load() if usable and found else torch.tensor(0)


# ---- torchvision's names -----------------------------------------------------------------------------------------


def renamed(name: str, table: tuple[tuple[str, str], ...] = TORCHVISION) -> str | None:
    """The name in the second column; None if there is none."""
    for pattern, answer in table:
        found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\w+?)"), name)
        if found:
            words = iter(found.groups())
            return re.sub(r"\*", lambda _, words=words: next(words), answer)
    return None


def to_torchvision(model: ResNet) -> dict[str, Tensor]:
    """The numbers of a network under torchvision's names."""
    table = tuple((ours, theirs) for theirs, ours in TORCHVISION)
    return {str(renamed(name, table)): tensor for name, tensor in model.state_dict().items()}


def _theirs_to_ours(path: Path, store: Store) -> Store:
    if all(name.startswith(_PARALLEL) for name in store):
        store = {name.removeprefix(_PARALLEL): stored for name, stored in store.items()}
    names = {name: renamed(name) for name in store}
    unknown = sorted(name for name, ours in names.items() if ours is None)
    if unknown:
        shown = ", ".join(unknown[:8]) + (" …" if len(unknown) > 8 else "")
        raise CheckpointError(
            f"{path}: {len(unknown)} of {len(store)} tensors have names no ResNet of torchvision has: {shown}",
            "expected names such as conv1.weight, layer1.0.bn1.running_mean and fc.bias",
        )
    return {ours: store[name] for name, ours in names.items() if ours is not None}


def _config_of(path: Path, store: Store) -> ResNetConfig:
    """The network that has these tensors."""
    try:
        stem, head = store["stem.conv.weight"].shape, store["head.weight"].shape
        blocks = _blocks(store)
        bottleneck = "stages.1.layers.0.branch.2.conv.weight" in store
        first = [store[f"stages.{stage}.layers.0.branch.0.conv.weight"].shape for stage in blocks]
        return ResNetConfig(
            blocks=tuple(blocks.values()),
            widths=tuple(shape[0] for shape in first),
            bottleneck=bottleneck,
            shortcut=_shortcut_of(store, sum(blocks.values())),
            stem="large" if stem[2] == 7 else "small",
            channels=stem[1],
            classes=head[0],
        )
    except CheckpointError as error:
        raise placed(error, path, {}) from error
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path}: no ResNet: {error} is missing or has too few dimensions", "the file is incomplete; fetch it again"
        ) from error


def _blocks(store: Store) -> dict[int, int]:
    """How many blocks each stage has. A gap in the numbers shows later, as tensors that are missing."""
    found: dict[int, set[str]] = {}
    for name in store:
        numbers = re.match(r"stages\.([0-9]{1,4})\.layers\.([0-9]{1,4})\.", name)
        if numbers:
            found.setdefault(int(numbers[1]), set()).add(numbers[2])
    return {stage: len(found[stage]) for stage in sorted(found)}


def _shortcut_of(store: Store, blocks: int) -> str:
    """By how many shortcuts have a convolution: none, all, or some."""
    count = sum(name.endswith("shortcut.conv.weight") for name in store)
    return "A" if count == 0 else "C" if count == blocks else "B"


# ---- our own folder ----------------------------------------------------------------------------------------------


def save(
    folder: str | Path, model: ResNet, labels: Labels | None = None, preparation: Preparation | None = None
) -> None:
    """Write a new folder, whole or not at all: config.json and model.safetensors under our names."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: already there", "name a new folder, or empty this one")
    settings = _settings(folder, model.config, labels, preparation)
    with new_folder(folder) as beside:
        fill(beside, settings, model.state_dict())


def _settings(
    where: Path, config: ResNetConfig, labels: Labels | None, preparation: Preparation | None
) -> dict[str, Any]:
    _check_beside(where, config, labels, preparation)
    asked = {} if labels is None else {"labels": own_labels_to(labels)}
    read = {} if preparation is None else {"images": asdict(preparation)}
    return {"model_type": MODEL_TYPE, **asked, **read, **asdict(config)}


def _check_beside(where: Path, config: ResNetConfig, labels: Labels | None, preparation: Preparation | None) -> None:
    """What stands beside a network must fit it."""
    if labels is not None and len(labels) != config.classes:
        raise CheckpointError(f"{where}: {len(labels)} labels for {config.classes} classes")
    if preparation is not None and preparation.channels != config.channels:
        raise CheckpointError(f"{where}: images of {preparation.channels} channels for {config.channels}")


def _load_folder(folder: Path) -> Loaded:
    for name in (SETTINGS, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}", "give the folder that holds the weights and config.json")
    settings = read_json(folder / SETTINGS)
    try:
        config, labels, preparation = _config_from(settings)
    except CheckpointError as error:
        raise placed(error, folder / SETTINGS, {}) from error
    _check_beside(folder / SETTINGS, config, labels, preparation)
    return Loaded(_filled(folder / WEIGHTS, config, open_weights(folder / WEIGHTS)), labels, preparation)


def _config_from(settings: Mapping[str, Any]) -> tuple[ResNetConfig, Labels | None, Preparation | None]:
    if settings.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"model_type is {settings.get('model_type')!r}; expected {MODEL_TYPE}")
    given = {name: value for name, value in settings.items() if name not in ("model_type", "labels", "images")}
    known = {field.name for field in fields(ResNetConfig)}
    unknown, missing = sorted(given.keys() - known), sorted(known - given.keys())
    if unknown or missing:
        trouble = f"unknown settings: {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise CheckpointError(trouble, "written by another version of allmask? fetch the file again")
    labels = own_labels_from(settings["labels"]) if "labels" in settings else None
    preparation = _preparation(settings["images"]) if "images" in settings else None
    return ResNetConfig(**_tuples(given)), labels, preparation


def _preparation(given: Any) -> Preparation:
    known = {field.name for field in fields(Preparation)}
    if not isinstance(given, Mapping) or given.keys() != known:
        raise CheckpointError(f"images is {given!r}; expected {', '.join(sorted(known))}")
    found = _tuples(given)
    if not all(isinstance(found[name], tuple) for name in ("mean", "deviation")):
        raise CheckpointError(f"images is {given!r}; expected lists of a mean and a deviation")
    return Preparation(**found)


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
