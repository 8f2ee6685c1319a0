"""Vectors of texts, and the texts nearest to a query by cosine."""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from allmask.data import DataFile, Record, read_records
from allmask.data import text as text_field
from allmask.errors import CheckpointError, UsageError
from allmask.inference import POOLS, embed_ids, fit, freeze, precision_of
from allmask.kernels import int8
from allmask.model import Model
from allmask.options import EmbedOptions
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder, Predictor
from allmask.text import Encoded

log = logging.getLogger("allmask")
T = TypeVar("T")
WINDOW = 1024  # texts in memory at a time; they are sorted by length
POOLING = Path("1_Pooling") / "config.json"  # pooling settings of sentence-transformers


CLOSE = 0.99  # lowest cosine to fp32 with which vectors are served in int8
# Short texts, and texts of marks above all, are those that int8 changes most.
SAMPLES = (
    "...", "---", "!!!", "?", "***", "=====", "#", "____", "。。。", "——", "1. 2. 3.", "2024-05-01", "(a)", "{}", "OK",
    "the", "Beijing", "北京", "好", "https://example.org/a?b=1", "def f(x): return x + 1", "Price: $12.99 (was $19.99)",
    "Error: cannot open file 'data.csv'", "How do I reset my password?", "The cat sat on the mat, and the dog slept.",
    "We show that the attention mask decides every role of a Transformer.", "北京欢迎你，为你开天辟地。",
    "今天天气很好，我们去公园散步吧。", "这家餐厅的白切鸡很好吃，服务也不错。",
    "Das Haus am See war den ganzen Winter leer.", "¿Dónde está la biblioteca?", "これは本です。",
)  # fmt: skip


class Found(NamedTuple, Generic[T]):
    score: float  # the cosine, from -1 to 1
    number: int  # index of the text, from 0
    what: T  # the text itself


def open_embedder(
    opened: ModelFolder, precision: str = "auto", pool: str | None = None, normalize: bool = False
) -> Embedder:
    """The default pooling is that of the folder's sentence-transformers settings, or mean."""
    return Embedder(opened.model, pool or pool_of(opened.folder), normalize, precision)


def open_served_embedder(opened: ModelFolder, precision: str = "auto") -> Embedder:
    """Return an embedder for a server: `auto` is int8 where that is fast and close to fp32.

    It is fast where one call of the kernels computes all layers. It is close if the lowest cosine of the vectors of
    SAMPLES to those of fp32 is at least CLOSE; that is tried here and takes a small part of a second.
    """
    has_int8 = opened.model.device.type == "cpu" and opened.model.config.family not in ("lstm", "elmo")
    if precision == "auto" and has_int8 and int8.library():
        embedder = open_embedder(opened, "int8")
        if getattr(embedder.frozen.body, "whole", None) is not None:
            cosine = embedder.lowest_cosine(SAMPLES)
            is_close = cosine >= CLOSE
            found = f"the lowest cosine of {len(SAMPLES)} vectors in int8 to fp32 is {cosine:.4f}"
            log.info("%s: %s, so int8 is%s used to embed", opened.source, found, "" if is_close else " not")
            if is_close:
                return embedder
    return open_embedder(opened, precision)


@dataclass
class Embedder(Predictor):
    """A model frozen for speed, and how its hidden states are pooled to one vector per text."""

    model: Model
    pool: str = "mean"  # or cls, the first token
    normalize: bool = False
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where the CPU computes in it
    cut: int = field(default=0, init=False)  # how many texts were truncated so far

    does: ClassVar[str] = "embeds texts"
    done: ClassVar[str] = "embedded"
    options: ClassVar[frozenset[str]] = frozenset({"pool", "normalize"})
    declared: ClassVar[type] = EmbedOptions

    def __post_init__(self):
        tokenizer_of(self.model)
        self.check({})
        self.frozen = freeze(self.model, self.precision)

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return the vector (W,) of a text, or (n, W) of a list of texts, in fp32."""
        if isinstance(texts, str):
            return self.vectors([texts])[0]
        rows = list(self.stream(texts))
        return np.concatenate(rows) if rows else np.zeros((0, self.model.config.features), dtype=np.float32)

    def stream(self, texts: Iterable[str], window: int = WINDOW) -> Iterator[np.ndarray]:
        """Yield arrays (n, W) for `window` texts at a time, in order; only these are in memory."""
        source = iter(texts)
        while some := list(islice(source, window)):
            yield self.vectors(some)

    def search(self, query: str, texts: Iterable[str], top: int = 5) -> list[Found[str]]:
        """Return the texts nearest to a query, nearest first; of equally near ones the earlier is first."""
        source = iter(texts)
        windows = iter(lambda: list(islice(source, WINDOW)), [])
        return nearest(self(query), ((some, self.vectors(some)) for some in windows), top)

    def computes_in(self) -> str:
        return precision_of(self.frozen)

    def check(self, options: dict[str, Any]) -> None:
        pool = options.get("pool") or self.pool
        if pool not in POOLS:
            raise UsageError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}")
        if pool == "cls" and self.model.config.own_mask == "causal":
            raise UsageError("pool cls: this model reads from left to right, its first token sees nothing else")

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_records(path, {"text": text_field}, **how)

    def expect_lines(self) -> None:
        """A line is a text."""

    def predict(
        self, records: Sequence[Record], pool: str | None = None, normalize: bool | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the vector of each text, with the digits of fp32."""
        for vector in self.vectors([record.fields["text"] for record in records], pool, normalize).tolist():
            yield {"vector": as_digits(vector)}

    def vectors(self, texts: Sequence[str], pool: str | None = None, normalize: bool | None = None) -> np.ndarray:
        """Return the vectors (n, W) of texts, pooled and scaled in another way than this embedder's own if asked."""
        return self.vectors_of(tokenizer_of(self.model).encode_batch(texts), pool, normalize)

    def vectors_of(
        self, encoded: Sequence[Encoded], pool: str | None = None, normalize: bool | None = None
    ) -> np.ndarray:
        """`vectors` of texts that the tokenizer of the model has encoded."""
        limit = self.model.config.max_positions
        self.cut += sum(len(one) > limit for one in encoded)
        ids = [fit(one, limit) for one in encoded]
        normalize = self.normalize if normalize is None else normalize
        return embed_ids(self.frozen, ids, pool or self.pool, normalize).cpu().numpy()

    def lowest_cosine(self, texts: Sequence[str]) -> float:
        """Return the lowest cosine between the vector of a text here and in fp32."""
        limit = self.model.config.max_positions
        ids = [fit(one, limit) for one in tokenizer_of(self.model).encode_batch(texts) if len(one)]
        found, exact = (embed_ids(model, ids, self.pool, normalize=True) for model in (self.frozen, self.model))
        return float((found * exact).sum(-1).min())


def as_digits(vector: Iterable[float]) -> list[float]:
    """Return the numbers of a vector with the digits of fp32, for JSON."""
    return [float(f"{number:.7g}") for number in vector]


def vector_as_json(vector: np.ndarray) -> str:
    """Return a vector (W,) as the text that JSON has for `as_digits`, in a quarter of the time."""
    return f"[{', '.join(['%.7g'] * len(vector)) % tuple(vector.tolist())}]"


def nearest(query: np.ndarray, windows: Iterable[tuple[Sequence[T], np.ndarray]], top: int) -> list[Found[T]]:
    """Return the things whose vectors are nearest to `query` (W,); a window is things and their vectors (n, W)."""

    def compared() -> Iterator[Found[T]]:
        number, unit = 0, _unit(query)
        for things, vectors in windows:
            for thing, score in zip(things, (_unit(vectors) @ unit).tolist(), strict=True):
                yield Found(score, number, thing)
                number += 1

    return heapq.nlargest(top, compared(), key=lambda found: (found.score, -found.number))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def pool_of(folder: Path) -> str:
    """Return the pooling of a folder's sentence-transformers settings; mean if there are none."""
    file = folder / POOLING
    if not file.is_file():
        return "mean"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        chosen = {name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", "pass --pool mean or --pool cls") from None
    known = {"mean_tokens": "mean", "cls_token": "cls"}
    others = {"max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"}
    asked = chosen & (known.keys() | others)
    if len(asked) != 1 or not asked <= known.keys():
        words = ", ".join(sorted(asked)) or "nothing"
        raise CheckpointError(f"{file}: pools by {words}; supported: mean, cls", "pass --pool mean or --pool cls")
    return known[asked.pop()]
