"""Data: files to records, examples to batches.

records = list(read_records("train.jsonl", {"source": text, "target": text}))
plan = plan_epoch(lengths, batch_tokens=8192, seed=1, epoch=0)
with batches(lambda numbers: pack([examples[n] for n in numbers]), plan) as loader:
    for batch in loader: …
"""

from allmask.data.examples import NO_LABEL, Asked, Batch, Example, pack, pack_flat, packs
from allmask.data.fields import Bad, Checker, Maybe, label, list_of, number, text
from allmask.data.loading import Loader, batches
from allmask.data.planning import plan_epoch
from allmask.data.records import MAX_LINE, Record, read_records, usable

__all__ = [
    "MAX_LINE", "NO_LABEL", "Asked", "Bad", "Batch", "Checker", "Example", "Loader", "Maybe", "Record", "batches",
    "label", "list_of", "number", "pack", "pack_flat", "packs", "plan_epoch", "read_records", "text", "usable",
]  # fmt: skip
