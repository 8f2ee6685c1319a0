"""Open weight files of any format: the names, shapes and types of their tensors, which are loaded later.

Files are not trusted. Safetensors is checked by its library; a pickle is read with `weights_only`, so no code in it
runs; an index can only name files in its own folder. No tensor is larger than the data of it in the file.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints.formats import Store, Stored
from allmask.checkpoints.formats.tensorflow_bundle import open_bundle
from allmask.errors import AllmaskError, CheckpointError, ResourceError, out_of_memory
from allmask.files import listed, read_json

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = frozenset(_DTYPES.values())
_LFS = b"version https://git-lfs"
MAX_TENSORS = 100_000
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself
_MAX_NAMES = 8  # of the same data: T5 has its embedding under four


def open_weights(path: Path) -> Store:
    """Open a weight file, or all files that an index names."""
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_pickle(path)
    with reading(path):
        return open_bundle(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that a library raises for a broken file into one that names the file."""
    try:
        yield
    except (AllmaskError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        wanted = out_of_memory(error)
        if wanted is not None:
            raise ResourceError(f"{path}: not enough memory to read it{wanted}", "close other programs") from error
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

    def stored(name: str) -> Stored:
        def load() -> Tensor:
            with reading(path):
                return file.get_tensor(name)

        header = file.get_slice(name)
        dtype = str(header.get_dtype())
        return Stored(tuple(header.get_shape()), _DTYPES.get(dtype, dtype), load)

    with reading(path):
        with path.open("rb") as opened:  # before the library makes an object for each
            length = int.from_bytes(opened.read(8), "little")
            _check_count(path, opened.read(min(length, _MAX_HEADER)).count(b'"data_offsets"'))
        file = safe_open(path, framework="pt")
        return {name: stored(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _check_count(path: Path, count: int) -> None:
    if count > MAX_TENSORS:
        raise CheckpointError(f"{path}: {count:,} tensors; at most {MAX_TENSORS:,} are read")


def _open_pickle(path: Path) -> Store:
    with reading(path):
        try:
            content = _load_zip(path) if zipfile.is_zipfile(path) else _load_legacy(path)
        except pickle.UnpicklingError as error:
            asked = re.search(r"GLOBAL (\S+)", str(error))  # the rest of the message says how to disable the protection
            if asked is None:
                raise CheckpointError(f"{path}: cannot be read as a file of tensors", _advice(path)) from error
            raise CheckpointError(
                f"{path}: holds more than tensors: it asks to run {asked[1]}; nothing was run",
                "a file of weights does not need that; get the model as safetensors, from a source you trust",
            ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; expected names with tensors")
    _check_count(path, len(content))
    others = sorted(_shortened(name) for name, value in content.items() if not _is_plain(name, value))
    if others:
        raise CheckpointError(
            f"{path}: not only tensors: {listed(others)}",
            "it looks like a training state; save model.state_dict() alone",
        )
    with reading(path):
        _check_storages(path, content)
    return {name: stored_tensor(tensor) for name, tensor in content.items()}


def _is_plain(name: Any, value: Any) -> bool:
    """Whether this is the name of a tensor with data in the file."""
    plain = isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
    return plain and value.device.type == "cpu"  # on the meta device it has a shape and no data


def _shortened(name: Any) -> str:
    words = repr(name) if isinstance(name, str | int | float | None) else f"a key of type {type(name).__name__}"
    return words if len(words) <= 100 else f"{words[:99]}…"


def _check_storages(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that repeat the data of the file, by a stride of 0 or under many names."""
    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.nbytes > storage.nbytes():
            raise CheckpointError(
                f"{path}: {name} has {tensor.nbytes:,} bytes, and the file {storage.nbytes():,} for it",
                "its elements overlap, as those of an expanded tensor; save a copy (tensor.clone())",
            )
        storages[storage.data_ptr()] = max(storages.get(storage.data_ptr(), 0), storage.nbytes())
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > _MAX_NAMES * sum(storages.values()):
        raise CheckpointError(
            f"{path}: {total:,} bytes of tensors, which share {sum(storages.values()):,} bytes of data",
            "no known model does that; get it from a source you trust",
        )


def stored_tensor(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.detach)


def _load_zip(path: Path) -> Any:
    """Load torch's format since 2020. torch never compresses records; a compressed one may be a decompression bomb."""
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise CheckpointError(f"{path}: holds compressed records, which torch never writes")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _load_legacy(path: Path) -> Any:
    """Load torch's format before 2020. The sizes it announces are checked before anything is allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        announced = torch.load(path, weights_only=True)
    tensors = [t for t in announced.values() if isinstance(t, Tensor)] if isinstance(announced, dict) else []
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    if sum(storages.values()) > path.stat().st_size:
        raise CheckpointError(f"{path}: announces {sum(storages.values()):,} bytes of tensors, more than it has")
    return torch.load(path, map_location="cpu", weights_only=True)


def _open_shards(path: Path) -> Store:
    """Open the files that an index names; it maps each tensor to a file in the same folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: no "weight_map"', "an index names the file of each tensor; fetch it again")
    ending = path.name.removesuffix(".index.json").rpartition(".")[2]
    _check_count(path, len(weight_map))
    shards = {_shard(path, name, f".{ending}") for name in weight_map.values()}
    opened = {shard.name: open_weights(shard) for shard in sorted(shards)}
    store = {name: opened[file][name] for name, file in weight_map.items() if name in opened[file]}
    missing = [f"{name} (in {file})" for name, file in weight_map.items() if name not in store]
    if missing:
        raise CheckpointError(f"{path}: tensors not in the files it names: {listed(missing)}", "fetch the folder again")
    return store


def _shard(index: Path, name: Any, ending: str) -> Path:
    """The path of a file named by an index; it must be a plain name in the same folder, and exist."""
    plain = isinstance(name, str) and name == Path(name).name and not set(name) & set("\\/:") and name.isprintable()
    if not plain or not name.endswith(ending):
        raise CheckpointError(
            f"{index}: names the file {name!r}; expected a plain *{ending} name in the same folder",
            "do not trust an index that points elsewhere; fetch the folder from its source",
        )
    path = index.parent / name
    if not path.is_file():
        raise CheckpointError(f"{index}: {name} does not exist", "the folder is incomplete; fetch the missing file")
    return path
