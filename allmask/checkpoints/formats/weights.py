"""Weight files opened but not yet loaded: what each tensor is called, its shape and type, and how to get it.

Files from others are not trusted. Safetensors is checked by its library; a pickle is read with `weights_only`, so
nothing in it runs; names in an index file never leave the folder.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.config_json import read_json
from allmask.checkpoints.formats.tensorflow_bundle import open_bundle
from allmask.errors import AllmaskError, CheckpointError, ResourceError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = frozenset(_DTYPES.values())
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it
    load: Callable[[], Tensor]


Store = dict[str, Stored]


def open_weights(path: Path) -> Store:
    """What a weight file, or the index of several, holds."""
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_pickle(path)
    with reading(path):
        return {name: Stored(shape, dtype, load) for name, (shape, dtype, load) in open_bundle(path).items()}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a library says about a broken file becomes an error that names the file."""
    try:
        yield
    except (AllmaskError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except MemoryError as error:
        raise ResourceError(f"{path}: not enough memory to read it") from error
    except BaseException as error:  # a panic in Rust is no Exception
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {words}", _advice(path)) from error


def _advice(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS))
    except OSError:
        return "check the path and the permissions"
    if start == _LFS:
        return "it is a Git LFS pointer, not the weights: run `git lfs pull` in that folder"
    return "the file is damaged or not what its name says; fetch it again"


def _open_safetensors(path: Path) -> Store:
    from safetensors import safe_open

    with reading(path):
        file = safe_open(path, framework="pt")
        return {name: _stored_slice(path, file, name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _stored_slice(path: Path, file: Any, name: str) -> Stored:
    def load() -> Tensor:
        with reading(path):
            return file.get_tensor(name)

    header = file.get_slice(name)
    dtype = str(header.get_dtype())
    return Stored(tuple(header.get_shape()), _DTYPES.get(dtype, dtype), load)


def _open_pickle(path: Path) -> Store:
    with reading(path):
        try:
            content = _load_zip(path) if zipfile.is_zipfile(path) else _load_legacy(path)
        except pickle.UnpicklingError as error:
            raise _not_only_tensors(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; expected names with tensors")
    strange = sorted(repr(name) for name, value in content.items() if not _is_plain(name, value))
    if strange:
        raise CheckpointError(
            f"{path}: not only tensors: {', '.join(strange)}",
            "it looks like a training state; save model.state_dict() alone",
        )
    return {name: stored_tensor(tensor) for name, tensor in content.items()}


def _not_only_tensors(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    """In our words; torch's own say how to switch its guard off."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked is None:
        return CheckpointError(f"{path}: cannot be read as a file of tensors", _advice(path))
    return CheckpointError(
        f"{path}: holds more than tensors: it asks to run {asked[1]}; nothing was run",
        "a file of weights has no need of that; get the model as safetensors, from a source you trust",
    )


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided


def stored_tensor(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.detach)


def _load_zip(path: Path) -> Any:
    """torch's format since 2020. Its records are never compressed: one that is would be a decompression bomb."""
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise CheckpointError(f"{path}: holds compressed records, which torch never writes")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _load_legacy(path: Path) -> Any:
    """torch's format before 2020: it announces sizes, so they are weighed without allocating them first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        announced = torch.load(path, weights_only=True)
    tensors = [t for t in announced.values() if isinstance(t, Tensor)] if isinstance(announced, dict) else []
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    if sum(storages.values()) > path.stat().st_size:
        raise CheckpointError(f"{path}: announces {sum(storages.values()):,} bytes of tensors, more than it has")
    return torch.load(path, map_location="cpu", weights_only=True)


def _open_shards(path: Path) -> Store:
    """An index file: which tensor lies in which file of the same folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: no "weight_map"', "an index names the file of each tensor; fetch it again")
    ending = path.name.removesuffix(".index.json").rpartition(".")[2]
    shards = {_shard(path, name, f".{ending}") for name in weight_map.values()}
    opened = {shard.name: open_weights(shard) for shard in sorted(shards)}
    store = {name: opened[file][name] for name, file in weight_map.items() if name in opened[file]}
    lost = [f"{name} (in {weight_map[name]})" for name in weight_map if name not in store]
    if lost:
        raise CheckpointError(f"{path}: tensors not in the files it names: {', '.join(lost)}", "fetch the folder again")
    return store


def _shard(index: Path, name: Any, ending: str) -> Path:
    """A file name from an index: a plain name of the right kind, in this folder, that is there."""
    plain = isinstance(name, str) and name == Path(name).name and not set(name) & set("\\/:") and name.isprintable()
    if not plain or not name.endswith(ending):
        raise CheckpointError(
            f"{index}: names the file {name!r}; expected a plain *{ending} name in the same folder",
            "an index that points elsewhere is not to be trusted; fetch the folder from its source",
        )
    path = index.parent / name
    if not path.is_file():
        raise CheckpointError(f"{index}: {name} is not there", "the folder is incomplete; fetch the missing file")
    return path
