"""What the tests of fast writers share, of one stack and of two: searches, large random weights, the comparison."""

from __future__ import annotations

import torch

from allmask.config import Config
from allmask.decoding import Decoding
from allmask.decoding.fast.rows import CHUNK
from allmask.model import Model
from tests.decoding.references import close

END = (3,)
RULES = {
    "greedy": Decoding(end=END, max_new=10),
    "beams": Decoding(end=END, max_new=10, beams=4, n_best=4, length_penalty=0.6),
    "samples": Decoding(end=END, max_new=10, sample=True, n_best=3, temperature=0.5),
    "longer than a chunk": Decoding(max_new=CHUNK + 5, beams=2),
}
ENGINES = ["torch", "compiled"]
LESS = ["bf16", "int8"]


def scattered(config: Config, seed: int) -> Model:
    """A model whose weights are large, so that what it reads shows in what it writes."""
    model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed))
    rng = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=rng)
    return model.eval()


def assert_same(found, expected, tolerance=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        assert [one.finished for one in ours] == [one.finished for one in theirs]
        assert all(close(a.score, b.score, tolerance) for a, b in zip(ours, theirs, strict=True))
