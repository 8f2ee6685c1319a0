"""Writers: models that continue prompts token by token, with a cache that follows from the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allmask.decoding.search import Hypothesis, generate
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import BeamCache, PairCache
from allmask.options import Decoding


class MaskWriter:
    """Continues prompts with one stack: a GPT-2, or a BERT under the prefix mask (UniLM), whose prompt is the source.

    The prompt is read once, under the model's own mask or the given one (a function of `valid`, like `Mask.causal`).
    Each new token has a higher order than all before it, the next position, and the second of `segments`:

              [CLS] 你 吃 [SEP] | 白 鸡
        order    0   0  0    0    1  2      a BERT
        order    0   1  2    3    4  5      a GPT-2

    Under `Mask.reverse` the prompt is the end of a text, and writing goes leftwards: the first of `Hypothesis.tokens`
    stands next to the prompt. `joined` puts prompt and tokens into reading order:

              迎 欢 | 北 京 [SEP]
        order  4  3    2  1   0

    Positions decrease then. Embedded positions cannot be below 0, so the prompt ends at position `max_length` - 1. By
    default `max_length` is the number of positions of the model; pass the length of the texts it was trained on.
    """

    def __init__(
        self, model: Model, mask: Callable[[Tensor], Mask] | None = None, segments: tuple[int, int] | None = None,
        max_length: int | None = None,
    ):  # fmt: skip
        if mask is not None and not callable(mask):
            raise UsageError(
                f"mask is a {type(mask).__name__}; expected a function of `valid`", "pass Mask.causal itself"
            )
        self.model = model
        self.mask = model.own_mask if mask is None else mask
        self.segments = ((0, 1) if model.config.segments > 1 else (0, 0)) if segments is None else segments
        self.leftwards = _runs_left(self.mask)
        embedded = model.config.position_kind in ("learned", "sinusoidal")
        self.max_length = (model.config.max_positions if embedded else None) if max_length is None else max_length

    def room(self, prompt: Sequence[int]) -> int:
        length = self.model.config.max_length
        if self.leftwards and self.max_length is not None:
            length = min(length, self.max_length)
        return length - len(prompt) + 1  # the last token is written, never read

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, BeamCache]:
        ids, valid = padded_prompts(prompts, self.model)
        mask = self.mask(valid)
        self._check_direction(mask, valid)
        if self.leftwards and self.max_length is not None:
            mask = replace(mask, position=mask.position + self.max_length - valid.sum(1, keepdim=True))
        hidden, cache = self.model.body.read(ids, mask, torch.full_like(ids, self.segments[0]))
        newest = hidden[:, 0] if self.leftwards else _last(hidden, valid)
        return self.model.logits(newest), cache

    def _check_direction(self, mask: Mask, valid: Tensor) -> None:
        falls = (mask.order.diff(dim=1) < 0) | ~valid[:, 1:]
        if not self.leftwards and valid.shape[1] > 1 and bool(falls.all()):
            raise UsageError(
                "the mask of these prompts runs from right to left, but that of two tokens does not",
                "pass a function that works for any `valid`, such as Mask.reverse",
            )
        if self.leftwards and self.model.config.family == "elmo" and valid.shape[1] == 1:
            raise UsageError("an elmo cannot know its direction from one token", "give the last two tokens, or more")

    def step(self, tokens: Tensor, state: BeamCache) -> tuple[Tensor, BeamCache]:
        segments, position = torch.full_like(tokens, self.segments[1])[:, None], None
        if self.leftwards:
            largest = torch.iinfo(torch.long).max
            position = state.mask.position.masked_fill(~state.mask.valid, largest).amin(1, keepdim=True) - 1
        hidden, state = self.model.body.step(tokens[:, None], _next(state.mask, position), state, segments=segments)
        return self.model.logits(hidden[:, 0]), state

    def joined(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Prompt and new tokens in reading order."""
        return [*reversed(tokens), *prompt] if self.leftwards else [*prompt, *tokens]


def _runs_left(mask: Callable[[Tensor], Mask]) -> bool:
    """Whether a mask reads from right to left, tried on two tokens."""
    try:
        order = mask(torch.ones(1, 2, dtype=torch.bool)).order[0]
    except (UsageError, RuntimeError):  # a function for rows of one shape only
        return False
    return bool(order[0] > order[1])


def padded_prompts(prompts: Sequence[Sequence[int]], model: Model, allow_empty: bool = False) -> tuple[Tensor, Tensor]:
    """Right-padded ids (S, K), and which of them are valid (S, K)."""
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0 and not allow_empty:
            raise UsageError(f"prompt {number} is empty", "give at least one token")
        for token in prompt:
            if not 0 <= token < model.config.vocab_size:
                raise UsageError(
                    f"prompt {number}: token {token} is not in the vocabulary of {model.config.vocab_size}"
                )
    device = model.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    valid = torch.arange(max(1, *map(len, prompts)), device=device) < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long, device=device)
    ids[valid] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.long, device=device)
    return ids, valid


def _last(hidden: Tensor, valid: Tensor) -> Tensor:
    """The hidden state (S, W) of the last token of each row."""
    return hidden[torch.arange(len(hidden), device=hidden.device), valid.sum(1) - 1]


def _next(mask: Mask, position: Tensor | None = None) -> Mask:
    """The mask (R, 1) of a token of higher order than all others of its row, at `position` or the next one."""
    order, here = (x.masked_fill(~mask.valid, -1).amax(1, keepdim=True) + 1 for x in (mask.order, mask.position))
    return replace(mask, order=order, group=torch.zeros_like(order), position=here if position is None else position)


class PairWriter:
    """Writes with an encoder–decoder: a prompt is a source, which is read once; the target begins with `start`.

               你  吃  </s> | <s> | 白  鸡
        order   0   0   0      1     2   3

    `start` are the first tokens that the decoder reads, the same for all targets; by default the model's start token.
    """

    def __init__(self, model: Model, start: Sequence[int] | None = None):
        if start is None:
            if model.config.start_token is None:
                raise UsageError("the config of this model has no start_token", "pass start=, a list of token ids")
            start = [model.config.start_token]
        self.model, self.start = model, list(start)

    def room(self, prompt: Sequence[int]) -> int:
        length = self.model.config.max_length
        return 0 if len(prompt) > length else length - len(self.start) + 1  # the last token is written, never read

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, PairCache]:
        lengths = padded_prompts(prompts, self.model)[1].sum(1, keepdim=True)
        ids, valid = padded_prompts([[*prompt, *self.start] for prompt in prompts], self.model)
        is_target = (torch.arange(ids.shape[1], device=ids.device) >= lengths) & valid
        hidden, cache = self.model.body.read(ids, Mask.encoder_decoder(is_target, valid))
        return self.model.logits(_last(hidden, valid)), cache

    def step(self, tokens: Tensor, state: PairCache) -> tuple[Tensor, PairCache]:
        hidden, state = self.model.body.step(tokens[:, None], _next(state.mask), state)
        return self.model.logits(hidden[:, 0]), state


# ---- in any order ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filling:
    """A cache of the known tokens, and the positions (R, U) of the blanks, in the order in which they are filled."""

    cache: BeamCache
    positions: Tensor

    def select(self, rows: Tensor) -> Filling:
        return Filling(self.cache.select(rows), self.positions[rows])


class FillWriter:
    """Fills in blanks in any order, for a body trained on permutations (XLNet).

    A prompt is a whole row of tokens. Negative numbers are blanks: -1 is filled first, then -2 and so on (`blanks`
    makes such a prompt). Known tokens read each other. At each step the token `query`, usually [MASK], is put at the
    next blank and reads all known tokens, but not itself; the token chosen there is then known:

        prompt  [CLS]  -2  欢  -1  [SEP]
        order      0    2   0   1     0
    """

    def __init__(self, model: Model, query: int | None = None, segment: int = 0):
        if query is None and model.body.embedding.question is not None:
            query = 0  # not read: the model has a learned query vector
        if query is None and model.tokenizer is not None:
            query = model.tokenizer.mask_id
        if query is None:
            raise UsageError("this model's tokenizer has no [MASK]", "pass query=, a token id")
        self.model, self.query, self.segment = model, query, segment

    def room(self, prompt: Sequence[int]) -> int:
        return sum(token < 0 for token in prompt)

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Filling]:
        limit = self.model.config.max_length
        for number, prompt in enumerate(prompts):
            if len(prompt) > limit:
                raise UsageError(f"prompt {number} has {len(prompt)} tokens, the model {limit} positions", "shorten it")
            if sorted(-token for token in prompt if token < 0) != list(range(1, self.room(prompt) + 1)):
                raise UsageError(f"prompt {number}: blanks must be numbered -1, -2, -3 and so on, each once")
        ids, valid = padded_prompts([[token for token in row if token >= 0] for row in prompts], self.model, True)
        known = _padded([[position for position, token in enumerate(row) if token >= 0] for row in prompts])
        mask = replace(Mask.bidirectional(valid), position=known.to(ids.device))
        _, cache = self.model.body.read(ids, mask, torch.full_like(ids, self.segment))
        to_fill = _padded([[row.index(-1 - n) for n in range(self.room(row))] for row in map(list, prompts)])
        return self._guess(Filling(cache, to_fill.to(ids.device)))

    def step(self, tokens: Tensor, state: Filling) -> tuple[Tensor, Filling]:
        mask = _next(state.cache.mask, state.positions[:, :1])
        segments = torch.full_like(tokens, self.segment)[:, None]
        _, cache = self.model.body.step(tokens[:, None], mask, state.cache, segments=segments)
        return self._guess(Filling(cache, state.positions[:, 1:]))

    def _guess(self, state: Filling) -> tuple[Tensor, Filling]:
        mask = _next(state.cache.mask, state.positions[:, :1])
        query = torch.full_like(mask.order, self.query)
        hidden = self.model.body.query_stream(query, mask, state.cache, segments=torch.full_like(query, self.segment))
        return self.model.logits(hidden[:, 0]), state


def fill(
    model: Model, tokens: Sequence[int | None], order: Sequence[int] | None = None, settings: Decoding | None = None,
    query: int | None = None,
) -> list[tuple[list[int], Hypothesis]]:  # fmt: skip
    """The n best ways to fill in the blanks (None) of a row, each with its hypothesis.

    `order` lists the positions of the blanks in the order in which to fill them; by default from left to right.
    """
    prompt = blanks(tokens, order)
    settings = replace(settings or Decoding(), max_new=-min(prompt), min_new=0, end=())
    found = generate(FillWriter(model, query), [prompt], settings)[0]
    if any(len(hypothesis.tokens) < -min(prompt) for hypothesis in found):
        raise UsageError("fill: the settings allow no token for one of the blanks", "ban or forbid less")
    return [
        ([x if x >= 0 else hypothesis.tokens[-1 - x] for x in prompt], hypothesis._replace(finished=True))
        for hypothesis in found
    ]


def blanks(tokens: Sequence[int | None], order: Sequence[int] | None = None) -> list[int]:
    """A prompt for `FillWriter`: `blanks([7, None, None], order=[2, 1])` is [7, -2, -1]."""
    empty = [position for position, token in enumerate(tokens) if token is None]
    order = empty if order is None else list(order)
    if sorted(order) != empty or not empty:
        raise UsageError(f"fill: the blanks are at {empty}, the order is {order}", "name each blank's position once")
    rank = {position: number for number, position in enumerate(order)}
    return [-1 - rank[position] if token is None else token for position, token in enumerate(tokens)]


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of positions as one tensor, padded with zeros, which are never used."""
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long)
