"""Slow and plain counterparts: a model that is a table, searches by enumeration, writers without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from allmask import presets
from allmask.config import Config
from allmask.decoding import Decoding
from allmask.mask import Mask
from allmask.model import Model
from tests.relatives import relatives

SMALL = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 32, "layers": 3, "max_positions": 24}
CONFIGS = {"bert": replace(presets.bert_base(), **SMALL), "gpt2": replace(presets.gpt2(), **SMALL), **relatives(SMALL)}


def tiny(family: str = "bert", seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    return scattered(CONFIGS[family], seed).to(dtype)


def scattered(config: Config, seed: int = 0) -> Model:
    """A model with large random weights, so that what it reads shows in what it writes."""
    model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed))
    rng = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=rng)
    return model.eval()


# ---- a model that is a table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Histories:
    rows: tuple[tuple[int, ...], ...]

    def select(self, rows: Tensor) -> Histories:
        return Histories(tuple(self.rows[row] for row in rows.tolist()))


class TableWriter:
    """Random logits, a pure function of everything before: no search can take a short cut through structure."""

    def __init__(self, vocabulary: int, seed: int = 0, spread: float = 2.0, room: int = 100):
        self.vocabulary, self.seed, self.spread, self.space = vocabulary, seed, spread, room
        self.batches: list[int] = []  # how many rows each call had

    def room(self, prompt: Sequence[int]) -> int:
        return self.space

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Histories]:
        return self._logits_of(tuple(tuple(prompt) for prompt in prompts))

    def step(self, tokens: Tensor, state: Histories) -> tuple[Tensor, Histories]:
        return self._logits_of(tuple((*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)))

    def _logits_of(self, rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Histories]:
        self.batches.append(len(rows))
        return torch.stack([self.logits(row) for row in rows]), Histories(rows)

    def logits(self, history: Sequence[int]) -> Tensor:
        number = self.seed
        for token in history:
            number = (number * 1_000_003 + token + 17) % (2**31 - 1)
        return torch.randn(self.vocabulary, generator=torch.Generator().manual_seed(number)) * self.spread


# ---- searches by enumeration ---------------------------------------------------------------------------------


def forbidden(token: int, prompt: Sequence[int], tokens: Sequence[int], settings: Decoding) -> bool:
    """Whether the settings forbid this token after these, by the words of their definition."""
    written = [*(prompt if settings.no_repeat_prompt else ()), *tokens, token]
    n = settings.no_repeat_ngram
    grams = [tuple(written[i : i + n]) for i in range(len(written) - n + 1)] if n else []
    return (
        token in settings.banned
        or (token in settings.end and len(tokens) < settings.min_new)
        or (n > 0 and len(grams) > 0 and grams[-1] in grams[:-1])
    )


def log_probabilities(writer: TableWriter, history: Sequence[int]) -> list[float]:
    return writer.logits(history).log_softmax(0).tolist()


def all_texts(writer: TableWriter, prompt: Sequence[int], settings: Decoding) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens with the end token) of every possible continuation, best first."""
    found = []
    for length in range(1, settings.max_new + 1):
        for tokens in product(range(writer.vocabulary), repeat=length):
            ends = [place for place, token in enumerate(tokens) if token in settings.end]
            whole = ends == [length - 1] or (not ends and length == settings.max_new)
            if whole and not any(forbidden(t, prompt, tokens[:i], settings) for i, t in enumerate(tokens)):
                total = sum(log_probabilities(writer, (*prompt, *tokens[:i]))[t] for i, t in enumerate(tokens))
                found.append((total / length**settings.length_penalty, tokens))
    return sorted(found, reverse=True)


def plain_beam_search(writer: TableWriter, prompt: Sequence[int], settings: Decoding):
    """The same search written down once more, for one prompt, without stopping early."""
    live, ended = [(0.0, ())], []
    for length in range(1, settings.max_new + 1):
        longer = []
        for total, tokens in live:
            table = log_probabilities(writer, (*prompt, *tokens))
            for token in range(writer.vocabulary):
                if not forbidden(token, prompt, tokens, settings):
                    longer.append((total + table[token], (*tokens, token)))
        longer.sort(reverse=True)
        for total, tokens in longer[: settings.beams]:
            if tokens[-1] in settings.end or length == settings.max_new:
                ended.append((total / length**settings.length_penalty, tokens))
        live = [(total, tokens) for total, tokens in longer if tokens[-1] not in settings.end][: settings.beams]
    return sorted(ended, reverse=True)[: settings.n_best]


def with_end(hypothesis, settings: Decoding) -> tuple[int, ...]:
    """The tokens with the end token, where there is only one that it can be."""
    return (*hypothesis.tokens, *settings.end) if hypothesis.finished else hypothesis.tokens


def close(a: float, b: float, tolerance: float = 1e-4) -> bool:
    return math.isclose(a, b, rel_tol=0, abs_tol=tolerance)


def assert_same(found, expected, tolerance=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        assert [one.finished for one in ours] == [one.finished for one in theirs]
        assert all(close(a.score, b.score, tolerance) for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def assert_same_at_any_time(writer, slow, prompts, data, steps, vocabulary=40, atol=1e-9, rtol=0.0):
    """Both writers give the same logits, while rows are repeated, dropped and reordered at will."""
    (logits, state), (expected, histories) = writer.begin(prompts), slow.begin(prompts)
    for _ in range(steps):
        torch.testing.assert_close(logits, expected, atol=atol, rtol=rtol)
        rows = torch.tensor(data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=6)))
        written = st.lists(st.integers(0, vocabulary - 1), min_size=len(rows), max_size=len(rows))
        tokens = torch.tensor(data.draw(written))
        logits, state = writer.step(tokens, state.select(rows))
        expected, histories = slow.step(tokens, histories.select(rows))
    torch.testing.assert_close(logits, expected, atol=atol, rtol=rtol)


# ---- writers that remember nothing ---------------------------------------------------------------------------


class Forgetful:
    """A writer that reads each row again at every step; `logits(prompt, rows)` does it.

    It reads rows of equal length that continue one prompt, so that nothing is padded: (rows, vocabulary).
    """

    begins: Sequence[int] = ()  # what is written before the first step

    @cached_property
    def read(self) -> dict[tuple, Tensor]:
        """Logits by row: searches with different rules ask for the same rows."""
        return {}

    def begin(self, prompts):
        return self._logits_of(tuple((tuple(prompt), tuple(self.begins)) for prompt in prompts))

    def step(self, tokens, state):
        rows = zip(state.rows, tokens.tolist(), strict=True)
        return self._logits_of(tuple((prompt, (*written, token)) for (prompt, written), token in rows))

    def _logits_of(self, rows):
        fresh: dict[tuple, list[tuple[int, ...]]] = {}
        for prompt, written in dict.fromkeys(row for row in rows if row not in self.read):
            fresh.setdefault((prompt, len(written)), []).append(written)
        for (prompt, _), together in fresh.items():
            self.read.update(zip([(prompt, row) for row in together], self.logits(prompt, together), strict=True))
        return torch.stack([self.read[row] for row in rows]), Histories(rows)

    def logits(self, prompt: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        raise NotImplementedError


class RecomputeWriter(Forgetful):
    """No cache: reads the whole row at every step, under the mask of the whole row."""

    def __init__(self, model: Model, mask=None):
        self.model = model
        self.mask = model.own_mask if mask is None else mask

    def room(self, prompt: Sequence[int]) -> int:
        return self.model.config.max_positions - len(prompt) + 1

    def logits(self, prompt, rows):
        ids = torch.tensor([[*prompt, *written] for written in rows])
        source = self.mask(torch.ones(1, len(prompt)).bool())
        order = torch.cat([source.order[0], torch.arange(ids.shape[1] - len(prompt)) + source.order.max() + 1])
        whole = Mask(order.expand_as(ids), torch.zeros_like(ids), window=source.window)
        segments = (torch.arange(ids.shape[1]) >= len(prompt)).long().clamp(max=self.model.config.segments)
        return self.model(ids, whole, segments=segments.expand_as(ids)).logits[:, -1]


def two_streams(model: Model, ids: Tensor, rank: Tensor, query: int) -> Tensor:
    """Two-stream attention over a whole row, written out: hidden states (T, W) of the query stream."""
    body, places = model.body, torch.arange(len(ids))
    zeros = torch.zeros_like(ids)
    h = body.embedding(ids, places, zeros)
    g = body.embedding(torch.full_like(ids, query), places, zeros)
    seen = rank[None, :] <= rank[:, None]  # (query, key)
    before = rank[None, :] < rank[:, None]
    for layer in body.layers:
        g, h = _stream(layer, g, h, before), _stream(layer, h, h, seen)
    return body.norm(g)


def _stream(layer, x: Tensor, content: Tensor, visible: Tensor) -> Tensor:
    part, first = layer.attention, layer.attention_norm
    inside, outside = layer.enter, layer.leave
    q, k, v = part.query(inside(first, x)), part.key(inside(first, content)), part.value(inside(first, content))
    q, k, v = (y.unflatten(-1, (part.heads, -1)).transpose(0, 1) for y in (q, k, v))  # (H, T, D)
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~visible, -1e30).softmax(-1) * visible
    x = outside(first, x + part.output((scores @ v).transpose(0, 1).flatten(1)))
    second = layer.feed_forward_norm
    return outside(second, x + layer.feed_forward(inside(second, x)))


class RefillWriter(Forgetful):
    """Fills in blanks by reading the whole row again, both streams, at every step; blanks to come hold any token."""

    def __init__(self, model: Model, query: int):
        self.model, self.query = model, query

    def room(self, prompt: Sequence[int]) -> int:
        return sum(token < 0 for token in prompt)

    def logits(self, prompt, rows):
        return torch.stack([self._logits_of_row(prompt, filled) for filled in rows])

    def _logits_of_row(self, prompt, filled):
        rank = torch.tensor([max(0, -token) for token in prompt])
        content = [0, *filled, *[5] * len(prompt)]  # by rank
        ids = torch.tensor([token if token >= 0 else content[-token] for token in prompt])
        hidden = two_streams(self.model, ids, rank, self.query)
        return self.model.logits(hidden[prompt.index(-1 - len(filled))])
