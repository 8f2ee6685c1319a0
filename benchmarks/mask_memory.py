"""Memory of a long mask: attention over 16,384 tokens, forward and backward, without any T×T tensor.

    python benchmarks/mask_memory.py [--quick] [--json]

Each mask runs in its own process. "largest tensor" is the largest output of any operation; memory inside kernels shows
in the growth of the peak resident memory.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import multiprocessing
import resource

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmask import Mask, attend

HEADS, HEAD_WIDTH = 2, 16


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that was allocated."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.bytes = max([self.bytes, *made])
        return out


def make(kind: str, tokens: int) -> Mask:
    valid = torch.ones(1, tokens, dtype=torch.bool)
    if kind == "prefix":
        return Mask.prefix(torch.arange(tokens)[None] >= tokens // 2)
    if kind == "packed":
        return Mask.packed(Mask.causal(valid), torch.arange(tokens)[None] // 512)
    return Mask.causal(valid, window=256 if kind == "window" else None)


def measure(kind: str, tokens: int) -> dict[str, object]:
    torch.set_num_threads(1)
    with Largest():
        attend_once(make(kind, 64))  # first use loads libraries
    before, largest = peak(), Largest()
    with largest:
        mask = make(kind, tokens)
        attend_once(mask)
    held = [mask.order, mask.group, mask.position]
    return {
        "mask": kind,
        "tokens": f"{tokens:,}",
        "mask size": megabytes(sum(tensor.untyped_storage().nbytes() for tensor in held)),
        "largest tensor": megabytes(largest.bytes),
        "peak memory growth": megabytes(peak() - before),
        "T×T boolean matrix": megabytes(tokens * tokens),
    }


def attend_once(mask: Mask) -> None:
    q, k, v = (torch.randn(1, mask.shape[1], HEADS, HEAD_WIDTH, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask).sum().backward()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def main() -> None:
    options = timing.arguments(__doc__)
    tokens = 4096 if options.quick else 16384
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.starmap(measure, [(kind, tokens) for kind in ("causal", "prefix", "packed", "window")], chunksize=1)
    timing.show(f"Attention under a mask of {tokens:,} tokens", rows, timing.versions(), options.json)


if __name__ == "__main__":
    main()
