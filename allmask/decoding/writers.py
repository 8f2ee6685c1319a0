"""Models as writers: what is remembered, and what each new token may read, follow from the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allmask.decoding.search import Hypothesis, generate
from allmask.decoding.settings import Decoding
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import BeamCache, PairCache


class MaskWriter:
    """Continues a prompt: GPT-2 its text, a BERT under the prefix mask (UniLM) its source.

    The prompt is read once, under the model's own mask or the one given (a function of `valid`, like `Mask.causal`).
    New tokens come one by one, each with a higher order than all before, at the next position, in the second of
    `segments`:

              [CLS] 你 吃 [SEP] | 白 鸡
        order    0   0  0    0    1  2      a BERT
        order    0   1  2    3    4  5      a GPT-2

    Under `Mask.reverse` the prompt is the end of a text, which is written leftwards, so `Hypothesis.tokens` begin with
    the token next to the prompt; `joined` puts prompt and tokens into reading order:

              迎 欢 | 北 京 [SEP]
        order  4  3    2  1   0

    Positions run down then. Embedded positions cannot fall below 0, so the prompt ends at the last of `max_length`
    positions, all that the model has unless given: pass the length of the texts it was trained on.
    """

    def __init__(
        self, model: Model, mask: Callable[[Tensor], Mask] | None = None, segments: tuple[int, int] | None = None,
        max_length: int | None = None,
    ):  # fmt: skip
        if mask is not None and not callable(mask):
            raise UsageError(
                f"mask is {type(mask).__name__}; expected a function of `valid`", "pass Mask.causal itself"
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
        for number, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UsageError(f"prompt {number} is empty", "give at least one token to begin with")
        ids, valid = padded_prompts(prompts, self.model)
        mask = self._placed(self.mask(valid), valid)
        hidden, cache = self.model.body.read(ids, mask, torch.full_like(ids, self.segments[0]))
        newest = hidden[:, 0] if self.leftwards else _last(hidden, valid)
        return self.model.logits(newest), cache

    def step(self, tokens: Tensor, state: BeamCache) -> tuple[Tensor, BeamCache]:
        segments = torch.full_like(tokens, self.segments[1])[:, None]
        before = _before(state.mask) if self.leftwards else None
        hidden, state = self.model.body.step(tokens[:, None], _next(state.mask, before), state, segments=segments)
        return self.model.logits(hidden[:, 0]), state

    def joined(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The whole text in reading order: what was written stands behind the prompt, or before it."""
        return [*reversed(tokens), *prompt] if self.leftwards else [*prompt, *tokens]

    def _placed(self, mask: Mask, valid: Tensor) -> Mask:
        """The mask of prompts at the positions where they stand."""
        falls = (mask.order.diff(dim=1) < 0) | ~valid[:, 1:]
        if not self.leftwards:
            if valid.shape[1] > 1 and bool(falls.all()):
                raise UsageError(
                    "this mask reads from right to left only in rows of this length, so the writer took it for another",
                    "give a function of any `valid`, such as Mask.reverse",
                )
            return mask
        if self.model.config.family == "elmo" and valid.shape[1] == 1:
            raise UsageError("one token does not say in which direction an elmo reads", "give the last two, or more")
        if self.max_length is None:
            return mask
        return replace(mask, position=mask.position + self.max_length - valid.sum(1, keepdim=True))


def _runs_left(mask: Callable[[Tensor], Mask]) -> bool:
    """Whether a mask reads texts from right to left, tried on two tokens."""
    try:
        order = mask(torch.ones(1, 2, dtype=torch.bool)).order[0]
    except (UsageError, RuntimeError):  # made for rows of one shape
        return False
    return bool(order[0] > order[1])


def padded_prompts(prompts: Sequence[Sequence[int]], model: Model) -> tuple[Tensor, Tensor]:
    """Ids (S, K) and which of them are real (S, K)."""
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < model.config.vocab_size:
                raise UsageError(
                    f"prompt {number}: token {token} is not in the vocabulary of {model.config.vocab_size}"
                )
    device = model.body.embedding.tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    valid = torch.arange(max(1, *map(len, prompts)), device=device) < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long, device=device)
    ids[valid] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.long, device=device)
    return ids, valid


def _last(hidden: Tensor, valid: Tensor) -> Tensor:
    """(S, W) of the last token of each row."""
    return hidden[torch.arange(len(hidden), device=hidden.device), valid.sum(1) - 1]


def _before(mask: Mask) -> Tensor:
    """(R, 1) the position before all of a row."""
    return mask.position.masked_fill(~mask.valid, torch.iinfo(torch.long).max).amin(1, keepdim=True) - 1


def _next(mask: Mask, position: Tensor | None = None) -> Mask:
    """The mask (R, 1) of a token that is known after all others of its row, at a given position or the next one."""
    order, here = (x.masked_fill(~mask.valid, -1).amax(1, keepdim=True) + 1 for x in (mask.order, mask.position))
    return replace(mask, order=order, group=torch.zeros_like(order), position=here if position is None else position)


class PairWriter:
    """Writes with an encoder–decoder: a prompt is a source, read once; what is written goes on from `start`.

               你  吃  </s> | <s> | 白  鸡
        order   0   0   0      1     2   3

    `start` is what the decoder reads first: one token, the model's own unless given, or more, which all targets share.
    """

    def __init__(self, model: Model, start: Sequence[int] | None = None):
        self.model = model
        self.start = [_start_token(model)] if start is None else list(start)

    def room(self, prompt: Sequence[int]) -> int:
        reach = self.model.config.max_length
        return 0 if len(prompt) > reach else reach - len(self.start) + 1  # the last token is written, never read

    def sources(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids (S, K) and which of them are real (S, K)."""
        for number, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UsageError(f"prompt {number} is empty", "give at least one token to read")
        return padded_prompts(prompts, self.model)

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, PairCache]:
        lengths = self.sources(prompts)[1].sum(1, keepdim=True)
        ids, valid = padded_prompts([[*prompt, *self.start] for prompt in prompts], self.model)
        is_target = (torch.arange(ids.shape[1], device=ids.device) >= lengths) & valid
        hidden, cache = self.model.body.read(ids, Mask.encoder_decoder(is_target, valid))
        return self.model.logits(_last(hidden, valid)), cache

    def step(self, tokens: Tensor, state: PairCache) -> tuple[Tensor, PairCache]:
        hidden, state = self.model.body.step(tokens[:, None], _next(state.mask), state)
        return self.model.logits(hidden[:, 0]), state


def _start_token(model: Model) -> int:
    token = model.config.start_token
    if token is None:
        raise UsageError("this model does not say what its decoder begins with", "pass start=, a list of token ids")
    return token


# ---- in any order ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filling:
    """A cache of what is known, and the places (R, U) still to be filled in, the next one first."""

    cache: BeamCache
    places: Tensor

    def select(self, rows: Tensor) -> Filling:
        return Filling(self.cache.select(rows), self.places[rows])


class FillWriter:
    """Fills in blanks in any order, for a body trained on permutations (XLNet).

    A prompt is a whole row of tokens; a negative number is a blank, -1 the first to be filled in, then -2 and so on
    (`blanks` makes one). Known tokens read each other. At each step `query`, usually [MASK], stands at the next place
    and reads everything known, never itself; the token chosen there is then read as content:

        prompt  [CLS]  -2  欢  -1  [SEP]
        order      0    2   0   1     0
    """

    def __init__(self, model: Model, query: int | None = None, segment: int = 0):
        self.model = model
        self.query = _mask_token(model) if query is None else query
        self.segment = segment

    def room(self, prompt: Sequence[int]) -> int:
        return sum(token < 0 for token in prompt)

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Filling]:
        for number, prompt in enumerate(prompts):
            _check_row(prompt, number, self.model.config.max_length)
        places = _fit([_places_to_fill(prompt) for prompt in prompts])
        known = [[token for token in prompt if token >= 0] for prompt in prompts]
        ids, valid = padded_prompts(known, self.model)
        where = _fit([[place for place, token in enumerate(prompt) if token >= 0] for prompt in prompts])
        mask = replace(Mask.bidirectional(valid), position=where.to(ids.device))
        _, cache = self.model.body.read(ids, mask, torch.full_like(ids, self.segment))
        return self._guess(Filling(cache, places.to(ids.device)))

    def step(self, tokens: Tensor, state: Filling) -> tuple[Tensor, Filling]:
        mask = _next(state.cache.mask, state.places[:, :1])
        segments = torch.full_like(tokens, self.segment)[:, None]
        _, cache = self.model.body.step(tokens[:, None], mask, state.cache, segments=segments)
        return self._guess(Filling(cache, state.places[:, 1:]))

    def _guess(self, state: Filling) -> tuple[Tensor, Filling]:
        mask = _next(state.cache.mask, state.places[:, :1])
        query = torch.full_like(mask.order, self.query)
        hidden = self.model.body.query_stream(query, mask, state.cache, segments=torch.full_like(query, self.segment))
        return self.model.logits(hidden[:, 0]), state


def fill(
    model: Model, tokens: Sequence[int | None], order: Sequence[int] | None = None, settings: Decoding | None = None,
    query: int | None = None,
) -> list[tuple[list[int], Hypothesis]]:  # fmt: skip
    """The row with its blanks (None) filled in, n-best, and the hypothesis of each: its tokens as they were chosen.

    `order` lists the places of the blanks in the order in which to fill them; without it, from left to right.
    """
    prompt = blanks(tokens, order)
    settings = replace(settings or Decoding(), max_new=-min(prompt), min_new=0, end=())
    found = generate(FillWriter(model, query), [prompt], settings)[0]
    if any(len(hypothesis.tokens) < -min(prompt) for hypothesis in found):
        raise UsageError("fill: a blank was left for which the settings allow no token", "ban or forbid less")
    return [(_filled(prompt, hypothesis.tokens), hypothesis._replace(finished=True)) for hypothesis in found]


def blanks(tokens: Sequence[int | None], order: Sequence[int] | None = None) -> list[int]:
    """A prompt for `FillWriter`: `blanks([7, None, None], order=[2, 1])` is [7, -2, -1]."""
    empty = [place for place, token in enumerate(tokens) if token is None]
    order = empty if order is None else list(order)
    if sorted(order) != empty or not empty:
        raise UsageError(f"fill: the blanks are at {empty}, the order is {order}", "name each blank's place once")
    rank = {place: number for number, place in enumerate(order)}
    return [-1 - rank[place] if token is None else token for place, token in enumerate(tokens)]


def _filled(prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    return [token if token >= 0 else tokens[-1 - token] for token in prompt]


def _places_to_fill(prompt: Sequence[int]) -> list[int]:
    return [place for _, place in sorted((-token, place) for place, token in enumerate(prompt) if token < 0)]


def _check_row(prompt: Sequence[int], number: int, positions: int) -> None:
    if len(prompt) > positions:
        raise UsageError(f"prompt {number} has {len(prompt)} tokens, the model {positions} positions", "shorten it")
    ranks = sorted(-token for token in prompt if token < 0)
    if ranks != list(range(1, len(ranks) + 1)):
        raise UsageError(f"prompt {number}: blanks must be numbered -1, -2, -3 and so on, each once")


def _fit(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of places as one tensor, the shorter ones followed by zeros that no row reaches."""
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long)


def _mask_token(model: Model) -> int:
    if model.body.embedding.question is not None:
        return 0  # the model has a vector for what is unknown, and does not look at the token
    token = None if model.tokenizer is None else model.tokenizer.mask_id
    if token is None:
        raise UsageError("this model's tokenizer has no [MASK] to ask with", "pass query=, a token id")
    return token
