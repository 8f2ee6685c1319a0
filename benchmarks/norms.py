"""RMS norm by our kernel and by torch, and torch's layer norm: inference, and forward and backward in training.

    python benchmarks/norms.py [--quick] [--json]

fp32, tokens × width. One thread, CPU time, interleaved, medians; "vs" columns are speed-ups of our RMS norm.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import torch
from torch import Tensor, nn

from allmask.kernels.memory import keep_freed_memory
from allmask.nn.layers import RMSNorm

SHAPES = (
    (1, 64), (8, 256), (32, 512), (64, 512), (256, 256),
    (1024, 256), (1024, 512), (1024, 768), (4096, 512), (4096, 1024),
)  # fmt: skip
NORMS = {"rms (ours)": RMSNorm, "rms (torch)": nn.RMSNorm, "layer (torch)": nn.LayerNorm}
ELEMENTS, MOST = 1 << 21, 1000  # per timing: small shapes are repeated, at most so often


def main() -> None:
    options = timing.arguments(__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training and in frozen models
    rounds = 7 if options.quick else 41
    rows = [measure(shape, trains, rounds) for trains in (False, True) for shape in SHAPES]
    timing.show("RMS norm and layer norm, fp32", rows, timing.versions(), options.json)


def measure(shape: tuple[int, int], trains: bool, rounds: int) -> dict[str, object]:
    x = torch.randn(shape, requires_grad=trains)
    times = min(MOST, max(1, ELEMENTS // x.numel()))
    cases = {name: case(make(shape[1], eps=1e-6), x, trains, times) for name, make in NORMS.items()}
    taken = timing.medians(cases, rounds)
    ours = taken["rms (ours)"]
    return {
        "pass": "forward + backward" if trains else "forward",
        "tokens × width": f"{shape[0]} × {shape[1]}",
        **{f"{name}, µs": f"{seconds / times * 1e6:,.1f}" for name, seconds in taken.items()},
        **{f"vs {name}": f"{seconds / ours:.2f}" for name, seconds in taken.items() if name != "rms (ours)"},
    }


def case(norm: nn.Module, x: Tensor, trains: bool, times: int) -> timing.Case:
    grad = torch.randn_like(x)

    def train() -> None:
        for _ in range(times):
            torch.autograd.grad(norm(x), (x, *norm.parameters()), grad)

    @torch.inference_mode()
    def infer() -> None:
        for _ in range(times):
            norm(x)

    return train if trains else infer


if __name__ == "__main__":
    main()
