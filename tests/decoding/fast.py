"""What the tests of fast writers share, of one stack and of two: searches and engines."""

from __future__ import annotations

import pytest

from allmask.decoding import Decoding
from allmask.decoding.fast import engines
from allmask.decoding.fast.engines import TorchEngine
from allmask.decoding.fast.rows import CHUNK
from allmask.model import Model

END = (3,)
RULES = {
    "greedy": Decoding(end=END, max_new=10),
    "beams": Decoding(end=END, max_new=10, beams=4, n_best=4, length_penalty=0.6),
    "samples": Decoding(end=END, max_new=10, sample=True, n_best=3, temperature=0.5),
    "longer than a chunk": Decoding(max_new=CHUNK + 5, beams=2),
}
ENGINES = ["torch", "compiled"]
LESS = ["bf16", "int8"]


def with_engine(kind, slow, model: Model, engine: str, precision: str):
    """A fast writer of this kind; the test is skipped if this machine cannot run its engine."""
    if engine == "torch":
        return kind(slow, TorchEngine(model, precision))
    if not engines.fits(model):
        pytest.skip("no compiled step for this model, or on this machine")
    return kind(slow, engines.CompiledEngine(model, precision))
