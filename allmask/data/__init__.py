"""Data: files to records, examples to batches.

records = list(read_records("train.jsonl", {"source": text, "target": text}))
plan = plan_epoch(lengths, batch_tokens=8192, seed=1, epoch=0)
with batches(lambda numbers: pack([examples[n] for n in numbers]), plan) as loader:
    for batch in loader: …
"""

from allmask.data.examples import NO_LABEL, Batch, Example, pack
from allmask.data.planning import plan_epoch

__all__ = ["NO_LABEL", "Batch", "Example", "pack", "plan_epoch"]
