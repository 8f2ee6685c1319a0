"""Vectors of texts, a window of texts at a time, and those nearest to a query by the cosine of their angle."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from allmask.errors import CheckpointError, UsageError
from allmask.inference import POOLS, embed_ids, fit, freeze
from allmask.model import Model, load_folder
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder

T = TypeVar("T")
WINDOW = 1024  # texts in memory, sorted by length
POOLING = Path("1_Pooling") / "config.json"  # where sentence-transformers says how


class Found(NamedTuple, Generic[T]):
    score: float  # the cosine, from -1 to 1
    number: int  # from 0 on
    what: T  # the text


def open_embedder(opened: ModelFolder, precision: str = "auto") -> Embedder:
    return Embedder(opened.model, pool_of(opened.folder), precision=precision)


@dataclass
class Embedder:
    """A model laid out for speed, and how its hidden states become one vector a text."""

    model: Model
    pool: str = "mean"  # or cls, the first token
    normalize: bool = False
    precision: str = "auto"  # fp32, bf16; auto is the fastest here
    cut: int = field(default=0, init=False)  # texts so far that were longer than the model reads

    def __post_init__(self):
        tokenizer_of(self.model)
        if self.pool not in POOLS:
            raise UsageError(f"pool is {self.pool!r}; expected one of {', '.join(POOLS)}")
        if self.pool == "cls" and self.model.config.own_mask == "causal":
            raise UsageError("pool cls: this model reads from left to right, its first token sees nothing else")
        self.frozen = freeze(self.model, self.precision)

    @classmethod
    def open(cls, folder: Path, pool: str | None = None, normalize: bool = False, precision: str = "auto") -> Embedder:
        """From a model folder, pooled as its settings for sentence-transformers say, or by mean."""
        return cls(load_folder(folder, str(folder)), pool or pool_of(folder), normalize, precision)

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """A vector (W,) of a text, or (n, W) of a list of them, in fp32."""
        if isinstance(texts, str):
            return self._window([texts])[0]
        rows = list(self.stream(texts))
        return np.concatenate(rows) if rows else np.zeros((0, self.model.config.features), dtype=np.float32)

    def stream(self, texts: Iterable[str], window: int = WINDOW) -> Iterator[np.ndarray]:
        """(up to `window`, W) at a time, in the order of the texts, with no more than these in memory."""
        source = iter(texts)
        while some := list(islice(source, window)):
            yield self._window(some)

    def search(self, query: str, texts: Iterable[str], top: int = 5) -> list[Found[str]]:
        """The texts nearest to a query, nearest first; of equal ones the earlier."""
        wanted, source = self(query), iter(texts)
        windows = iter(lambda: list(islice(source, WINDOW)), [])
        return nearest(wanted, ((some, self._window(some)) for some in windows), top)

    def _window(self, texts: Sequence[str]) -> np.ndarray:
        limit = self.model.config.max_positions
        encoded = tokenizer_of(self.model).encode_batch(texts)
        self.cut += sum(len(one) > limit for one in encoded)
        ids = [fit(one, limit) for one in encoded]
        return embed_ids(self.frozen, ids, self.pool, self.normalize).cpu().numpy()


def nearest(wanted: np.ndarray, windows: Iterable[tuple[Sequence[T], np.ndarray]], top: int) -> list[Found[T]]:
    """The things whose vectors (n, W), given a window at a time, are nearest to the vector `wanted` (W,)."""
    return heapq.nlargest(top, _compared(_unit(wanted), windows), key=lambda found: (found.score, -found.number))


def _compared(wanted: np.ndarray, windows: Iterable[tuple[Sequence[T], np.ndarray]]) -> Iterator[Found[T]]:
    number = 0
    for things, vectors in windows:
        for thing, score in zip(things, (_unit(vectors) @ wanted).tolist(), strict=True):
            yield Found(score, number, thing)
            number += 1


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def pool_of(folder: Path) -> str:
    """How sentence-transformers' settings in a model folder pool; mean where there are none."""
    file = folder / POOLING
    if not file.is_file():
        return "mean"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        chosen = {name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", "pass --pool mean or --pool cls") from None
    known = {"mean_tokens": "mean", "cls_token": "cls"}
    asked = chosen & {
        "mean_tokens",
        "cls_token",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    }
    if len(asked) != 1 or not asked <= known.keys():
        words = ", ".join(sorted(asked)) or "nothing"
        raise CheckpointError(f"{file}: pools by {words}; supported: mean, cls", "pass --pool mean or --pool cls")
    return known[asked.pop()]
