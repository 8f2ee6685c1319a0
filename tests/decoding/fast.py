"""What the tests of fast writers share, of one stack and of two: searches and engines."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from allmask.decoding import Decoding, generate
from allmask.decoding.fast import engines
from allmask.decoding.fast.engines import TorchEngine
from allmask.decoding.fast.rows import CHUNK
from allmask.inference import freeze
from allmask.kernels import build, decode_step
from allmask.model import Model

END = (3,)
RULES = {
    "greedy": Decoding(end=END, max_new=7),
    "beams": Decoding(end=END, max_new=7, beams=4, n_best=4, length_penalty=0.6),
    "samples": Decoding(end=END, max_new=7, sample=True, n_best=3, temperature=0.5),
    "longer than a chunk": Decoding(max_new=CHUNK + 5, beams=2),
}
AT_ONCE = {  # searches that are done in one call
    "plain": Decoding(max_new=9),
    "ends": Decoding(end=(3, 11, 3), max_new=12, min_new=2, end_bias=1.5, banned=(7, 8)),
    "no pair twice": Decoding(end=END, max_new=12, no_repeat_ngram=2, no_repeat_prompt=True),
    "no token twice": Decoding(end=END, max_new=12, no_repeat_ngram=1),
    "nothing allowed": Decoding(end=END, max_new=4, banned=tuple(range(70))),
    "beams": Decoding(end=END, max_new=12, beams=4, n_best=3, length_penalty=0.6),
    "beams without end": Decoding(max_new=7, beams=3, length_penalty=0.0),
    "beams, long preferred": Decoding(end=(3, 11, 3), max_new=12, min_new=2, beams=2, length_penalty=3.0, banned=(7,)),
    "beams, short preferred": Decoding(end=(3, 11), max_new=12, beams=5, n_best=5, length_penalty=-1.0),
    "beams, no pair twice": Decoding(end=END, max_new=12, beams=4, no_repeat_ngram=2, no_repeat_prompt=True),
    "beams that run out": Decoding(max_new=6, beams=3, n_best=3, no_repeat_ngram=1, banned=tuple(range(4, 70))),
    "beams, nothing allowed": Decoding(end=END, max_new=4, beams=2, n_best=2, banned=tuple(range(70))),
}
ENGINES = ["torch", "compiled"]
LESS = ["bf16", "int8"]


def frozen(model: Model) -> Model:
    """A model in fp32 as fast writers read prompts with it, made once."""
    return _frozen(model, build.library, build.has)


@cache
def _frozen(model: Model, *kernels: Any) -> Model:
    """`kernels`: weights are packed for those that are there, and tests replace them by others, or by none."""
    return freeze(model, "fp32")


def with_engine(kind, slow, model: Model, engine: str, precision: str):
    """A fast writer of this kind; the test is skipped if this machine cannot run its engine."""
    if engine == "torch":
        return kind(slow, TorchEngine(model, precision))
    if not engines.fits(model):
        pytest.skip("no compiled step for this model, or on this machine")
    return kind(slow, engines.CompiledEngine(model, precision))


def assert_at_once_equals_step_by_step(writer, rules: Decoding, monkeypatch) -> None:
    """A search in one call gives the tokens and scores of the search in Python, for prompts of any length."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 69) for _ in range(rng.randrange(1, 20))] for _ in range(30)]
    calls, write = [], decode_step.write
    monkeypatch.setattr(decode_step, "write", lambda *args, **kinds: calls.append(1) or write(*args, **kinds))
    found = generate(writer, prompts, rules)
    assert calls == [1]
    monkeypatch.setattr(writer, "search", lambda *_: None)
    assert found == generate(writer, prompts, rules)
    assert calls == [1]
