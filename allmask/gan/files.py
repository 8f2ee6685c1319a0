"""A generator and its discriminator on disk: a folder of config.json and model.safetensors."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from torch import Tensor

from allmask.checkpoints.config_json import placed, read_json
from allmask.checkpoints.formats.weights import open_weights
from allmask.checkpoints.reader import compare
from allmask.checkpoints.writer import fill
from allmask.errors import CheckpointError
from allmask.files import new_folder
from allmask.gan.networks import Gan, GanConfig
from allmask.training import checkpoint

MODEL_TYPE = "allmask-gan"
WEIGHTS, SETTINGS = "model.safetensors", "config.json"


def save(folder: Path, model: Gan) -> None:
    """Write a new folder, signed for `allmask verify`; whole or not at all."""
    with new_folder(folder) as beside:
        fill(beside, {"model_type": MODEL_TYPE, **asdict(model.config)}, _kept(model))
        checkpoint.sign(beside)


def load(folder: str | Path) -> Gan:
    """Load both networks, in eval mode. What does not fit is listed before anything is filled."""
    folder = Path(folder)
    for name in (SETTINGS, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}", "give the final folder of a run of --task gan")
    model = Gan(_config(folder / SETTINGS))
    store = open_weights(folder / WEIGHTS)
    compare(folder / WEIGHTS, {name: tuple(tensor.shape) for name, tensor in _kept(model).items()}, store)
    model.load_state_dict({name: stored.load() for name, stored in store.items()}, strict=False)  # compared above
    return model.eval()


def _kept(model: Gan) -> dict[str, Tensor]:
    """All but how many batches a norm has seen, on which nothing depends."""
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def _config(path: Path) -> GanConfig:
    settings = read_json(path)
    if settings.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"{path}: model_type is {settings.get('model_type')!r}; expected {MODEL_TYPE}")
    given = {name: value for name, value in settings.items() if name != "model_type"}
    known = {field.name for field in fields(GanConfig)}
    if given.keys() != known or not isinstance(given["shape"], list):
        strange = ", ".join(sorted(given.keys() ^ known)) or "shape"
        raise CheckpointError(f"{path}: missing, unknown or strange: {strange}", "fetch the file again")
    try:
        return GanConfig(**{**given, "shape": tuple(given["shape"])})
    except CheckpointError as error:
        raise placed(error, path, {}) from error
