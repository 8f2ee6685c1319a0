"""Data: files to records, text to tokens on disk, examples to batches.

records = list(read_records("train.jsonl", {"source": text, "target": text}))
plan = plan_epoch(lengths, batch_tokens=8192, seed=1, epoch=0)
with Loader(lambda numbers: pack([examples[n] for n in numbers]), plan) as loader:
    for batch in loader: …

Names are resolved on first use, so that reading files does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allmask.data.batch import NO_LABEL, Asked, Batch, Example, pack, pack_flat, packs, rows_by_length
    from allmask.data.fields import Bad, Checker, Maybe, label, list_of, number, text
    from allmask.data.loader import Loader
    from allmask.data.plan import plan_epoch
    from allmask.data.records import Record, expect_held_out, read_records, usable
    from allmask.data.sentences import Texts
    from allmask.data.source import MAX_LINE, DataFile

_HOME = {
    "batch": ("NO_LABEL", "Asked", "Batch", "Example", "pack", "pack_flat", "packs", "rows_by_length"),
    "fields": ("Bad", "Checker", "Maybe", "label", "list_of", "number", "text"),
    "loader": ("Loader",),
    "plan": ("plan_epoch",),
    "records": ("Record", "expect_held_out", "read_records", "usable"),
    "sentences": ("Texts",),
    "source": ("MAX_LINE", "DataFile"),
}

__all__ = [
    "MAX_LINE", "NO_LABEL", "Asked", "Bad", "Batch", "Checker", "DataFile", "Example", "Loader", "Maybe", "Record",
    "Texts", "expect_held_out", "label", "list_of", "number", "pack", "pack_flat", "packs", "plan_epoch",
    "read_records", "rows_by_length", "text", "usable",
]  # fmt: skip


def __getattr__(name: str):
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"allmask.data.{module}"), name)
    raise AttributeError(f"module 'allmask.data' has no attribute {name!r}")
