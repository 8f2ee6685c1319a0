"""C14. A shift of sinusoidal positions is a rotation.

Statement: PE(pos + k) is a linear map of PE(pos), the same for every pos: a rotation of each pair of sine and cosine.
Source: Vaswani et al. 2017, section 3.5.
Criterion: For k = 1, 7 and 100, the rotations by k·ω map the encodings of 512 positions, 512 wide, to those k further
    with an error below 1e-5; the best linear map of learned (random) positions misses by more than 0.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.layers import sinusoids

WIDTH, POSITIONS, SHIFTS = 512, 1024, (1, 7, 100)


def measure(trial: Trial, sinusoidal: bool = True) -> Numbers:
    """`sinusoidal`: otherwise positions are random vectors, for which no such map exists."""
    table = torch.randn(POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    encodings = sinusoids(POSITIONS, WIDTH) if sinusoidal else table
    found: Numbers = {"error": {str(k): missed(encodings, rotation(k), k) for k in SHIFTS}}
    found["learned"] = missed(table, best_map(table, 1), 1)
    found["similarity"] = (encodings[:128] @ encodings[64]).tolist()
    return found


def rotation(k: int) -> Tensor:
    """(W, W) the map: one rotation for each frequency."""
    frequencies = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    turns = [
        torch.tensor([[c, s], [-s, c]]) for c, s in zip((k * frequencies).cos(), (k * frequencies).sin(), strict=True)
    ]
    return torch.block_diag(*turns)


def best_map(encodings: Tensor, k: int) -> Tensor:
    """The least-squares map of each vector to that k further."""
    return torch.linalg.lstsq(encodings[:-k].double(), encodings[k:].double()).solution.T


def missed(encodings: Tensor, linear: Tensor, k: int) -> float:
    return (encodings[:-k].double() @ linear.T - encodings[k:]).abs().max().item()


def judge(numbers: Numbers) -> Verdict:
    worst = max(numbers["error"].values())
    return judged(
        worst < 1e-5 and numbers["learned"] > 0.1,
        f"largest error {worst:.1e}; of random positions {numbers['learned']:.1f}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(range(-64, 64), numbers["similarity"])
    axes.set(xlabel="distance k", ylabel="PE(pos) · PE(pos + k)")
