"""Tensors of which each process has a part, in safetensors files: a file for each, by torch.distributed.checkpoint.

What is written by any number of processes is read by any other number, also by one: each reads the parts it needs.
Names, shapes and places stand in the headers of the files, so nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Place = Callable[[str, Tensor], Tensor]  # a tensor's name and a whole tensor: the part of it that is wanted here


def files_of(folder: Path, rank: int | None = None) -> list[Path]:
    """The files that a process wrote, or all did; none in a checkpoint of another kind."""
    return sorted(folder.glob("shard-*" if rank is None else f"shard-{rank + 1:05d}-*"))


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """To be called by all processes alike. A failure of one is raised in all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error


def read(folder: Path, place: Place) -> dict[str, Tensor]:
    """All tensors, each as large as `place` makes it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: place(name, torch.zeros(entry.size, dtype=entry.properties.dtype))
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that it reads without asking the other processes, as it is told to
        warnings.simplefilter("ignore", UserWarning)
        load(found, storage_reader=reader, no_dist=True)
    return found
