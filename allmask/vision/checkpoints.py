"""Load and save residual networks: files with torchvision's names, and model folders of our own.

The config of a network is inferred from the shapes of its tensors. Two things cannot be inferred: the position of the
stride in a bottleneck, assumed to be in the 3×3 as in torchvision, and whether a network without shortcut parameters
has shortcuts, assumed to be A. Pass a config if this is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.config_json import errors_in
from allmask.checkpoints.formats.weights import Store, open_weights
from allmask.checkpoints.labels import own_labels_from
from allmask.checkpoints.reader import compare
from allmask.checkpoints.writer import fill
from allmask.errors import CheckpointError
from allmask.files import new_folder, read_json
from allmask.nn.heads import Labels
from allmask.vision.images import Preparation
from allmask.vision.resnet import ResNet, ResNetConfig, shape_of

MODEL_TYPE = "allmask-resnet"
WEIGHTS, SETTINGS = "model.safetensors", "config.json"
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")

# Torchvision's name and ours; a star is one word, the same on both sides.
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
_PARALLEL = "module."  # prefix of all names saved by DataParallel
_COUNTER = "num_batches_tracked"  # of batch norm; old files lack it, and no result depends on it


@dataclass(frozen=True, eq=False)
class Loaded:
    """A network; its class names and input normalization are None if the file does not have them."""

    model: ResNet
    labels: Labels | None = None
    preparation: Preparation | None = None


def load(path: str | Path, config: ResNetConfig | None = None) -> Loaded:
    """Load one of our folders, or a file of weights with torchvision's names; in eval mode, in the stored types."""
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file() or path.suffix not in ENDINGS:
        what = "not a file of weights" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {what}", f"give a folder, or a file that ends in {', '.join(ENDINGS)}")
    store = _from_torchvision(path, open_weights(path))
    return Loaded(_fill(path, config or _infer_config(path, store), store))


def _fill(path: Path, config: ResNetConfig, store: Store) -> ResNet:
    """A network with the stored weights. Tensors that do not fit are listed before any memory is allocated."""
    model = shape_of(config)
    counters = [name for name in model.state_dict() if name.endswith(_COUNTER)]
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in counters}
    try:
        compare(path, expected, {name: stored for name, stored in store.items() if not name.endswith(_COUNTER)})
    except CheckpointError as error:
        # a file of weights may have no settings beside it
        message = error.message.replace("the settings beside it", f"a ResNet of {config.depth} layers")
        raise CheckpointError(message, "the file is incomplete, or of another kind of network") from error
    tensors = {name: store[name].load() for name in expected}
    for name in counters:
        counter = store.get(name)
        usable = counter is not None and counter.shape == () and counter.dtype in ("I64", "int64")
        tensors[name] = counter.load() if usable and counter else torch.tensor(0)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_().eval()


# ---- torchvision's names -----------------------------------------------------------------------------------------


def renamed(name: str, table: tuple[tuple[str, str], ...] = TORCHVISION) -> str | None:
    """Look a name up in the first column and return the second; None if it is not in the table."""
    for pattern, answer in table:
        found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\w+?)"), name)
        if found:
            words = iter(found.groups())
            return re.sub(r"\*", lambda _, words=words: next(words), answer)
    return None


def to_torchvision(model: ResNet) -> dict[str, Tensor]:
    """The weights of a network under torchvision's names."""
    table = tuple((ours, theirs) for theirs, ours in TORCHVISION)
    return {str(renamed(name, table)): tensor for name, tensor in model.state_dict().items()}


def _from_torchvision(path: Path, store: Store) -> Store:
    if all(name.startswith(_PARALLEL) for name in store):
        store = {name.removeprefix(_PARALLEL): stored for name, stored in store.items()}
    names = {name: renamed(name) for name in store}
    unknown = sorted(name for name, ours in names.items() if ours is None)
    if unknown:
        shown = ", ".join(unknown[:8]) + (" …" if len(unknown) > 8 else "")
        raise CheckpointError(
            f"{path}: {len(unknown)} of {len(store)} tensors have names that no ResNet of torchvision has: {shown}",
            "expected names such as conv1.weight, layer1.0.bn1.running_mean and fc.bias",
        )
    return {ours: store[name] for name, ours in names.items() if ours is not None}


def _infer_config(path: Path, store: Store) -> ResNetConfig:
    try:
        stem, head = store["stem.conv.weight"].shape, store["head.weight"].shape
        blocks = _count_blocks(store)
        first = [store[f"stages.{stage}.layers.0.branch.0.conv.weight"].shape for stage in blocks]
        shortcuts = sum(name.endswith("shortcut.conv.weight") for name in store)
        with errors_in(path):
            return ResNetConfig(
                blocks=tuple(blocks.values()),
                widths=tuple(shape[0] for shape in first),
                bottleneck="stages.1.layers.0.branch.2.conv.weight" in store,
                shortcut="A" if shortcuts == 0 else "C" if shortcuts == sum(blocks.values()) else "B",
                stem="large" if stem[2] == 7 else "small",
                channels=stem[1],
                classes=head[0],
            )
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path}: no ResNet: {error} is missing or has too few dimensions",
            "the file is incomplete; download it again",
        ) from error


def _count_blocks(store: Store) -> dict[int, int]:
    """Number of blocks in each stage. A gap in the numbers shows later as missing tensors."""
    found: dict[int, set[str]] = {}
    for name in store:
        numbers = re.match(r"stages\.([0-9]{1,4})\.layers\.([0-9]{1,4})\.", name)
        if numbers:
            found.setdefault(int(numbers[1]), set()).add(numbers[2])
    return {stage: len(found[stage]) for stage in sorted(found)}


# ---- our own folder ----------------------------------------------------------------------------------------------


def save(
    folder: str | Path, model: ResNet, labels: Labels | None = None, preparation: Preparation | None = None
) -> None:
    """Write config.json and model.safetensors to a new folder, which appears only when it is complete."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already", "name a new folder, or empty this one")
    _check_fit(folder, model.config, labels, preparation)
    settings: dict[str, Any] = {"model_type": MODEL_TYPE}
    settings |= {} if labels is None else {"labels": asdict(labels)}
    settings |= {} if preparation is None else {"images": asdict(preparation)}
    with new_folder(folder) as unfinished:
        fill(unfinished, settings | asdict(model.config), model.state_dict())


def _check_fit(where: Path, config: ResNetConfig, labels: Labels | None, preparation: Preparation | None) -> None:
    if labels is not None and len(labels) != config.classes:
        raise CheckpointError(f"{where}: {len(labels)} labels for {config.classes} classes")
    if preparation is not None and preparation.channels != config.channels:
        raise CheckpointError(f"{where}: images of {preparation.channels} channels for {config.channels}")


def _load_folder(folder: Path) -> Loaded:
    settings = read_settings(folder, "give the folder that holds the weights and config.json")
    with errors_in(folder / SETTINGS):
        config = ResNetConfig(**config_fields(ResNetConfig, settings, MODEL_TYPE, ("labels", "images")))
        labels = own_labels_from(settings["labels"]) if "labels" in settings else None
        preparation = _preparation(settings["images"]) if "images" in settings else None
    _check_fit(folder / SETTINGS, config, labels, preparation)
    return Loaded(_fill(folder / WEIGHTS, config, open_weights(folder / WEIGHTS)), labels, preparation)


def read_settings(folder: Path, hint: str) -> dict[str, Any]:
    """The content of config.json in a model folder, which must have weights as well."""
    for name in (SETTINGS, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}", hint)
    return read_json(folder / SETTINGS)


def config_fields(
    cls: type, settings: Mapping[str, Any], model_type: str, others: Sequence[str] = ()
) -> dict[str, Any]:
    """Values for a config dataclass from a config.json, which may have `others` besides; lists become tuples."""
    if settings.get("model_type") != model_type:
        raise CheckpointError(f"model_type is {settings.get('model_type')!r}; expected {model_type}")
    given = {name: value for name, value in settings.items() if name not in ("model_type", *others)}
    known = {field.name for field in fields(cls)}
    unknown, missing = sorted(given.keys() - known), sorted(known - given.keys())
    if unknown or missing:
        what = f"unknown settings: {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise CheckpointError(what, "written by another version of allmask? download the file again")
    return _tuples(given)


def _preparation(given: Any) -> Preparation:
    known = {field.name for field in fields(Preparation)}
    if not isinstance(given, Mapping) or given.keys() != known:
        raise CheckpointError(f"images is {given!r}; expected {', '.join(sorted(known))}")
    values = _tuples(given)
    if not all(isinstance(values[name], tuple) for name in ("mean", "deviation")):
        raise CheckpointError(f"images is {given!r}; expected lists of a mean and a deviation")
    return Preparation(**values)


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
