"""Greedy, beam search and sampling: one loop over a writer, the only interface to a model."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from allmask.decoding import filters
from allmask.errors import CheckpointError, UsageError
from allmask.kernels import top_tokens as shortlist
from allmask.options import Decoding


class State(Protocol):
    """The state of a writer for R rows."""

    def select(self, rows: Tensor) -> State:
        """Select rows in any order, repeated or dropped. What the rows of a prompt share is not copied."""
        ...


class Writer(Protocol):
    """A model that continues prompts token by token."""

    def room(self, prompt: Sequence[int]) -> int:
        """The number of tokens by which this prompt can be continued."""
        ...

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
        """The logits (S, V) of the first new token of each prompt, which may be modified, and a state of S rows."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Append a token to each row, (R,); return the logits (R, V) of the next tokens and the next state."""
        ...


class Hypothesis(NamedTuple):
    """A finished continuation, without its end token."""

    tokens: tuple[int, ...]
    score: float  # log_probability / length ** length_penalty; the end token counts
    log_probability: float  # the model's own, before any filter
    finished: bool  # by an end token, not by the limit of its length

    @property
    def per_token(self) -> float:
        """The mean log-probability of a token, the end token included: the score with a length penalty of 1."""
        return self.log_probability / max(1, len(self.tokens) + self.finished)


def generate(
    writer: Writer, prompts: Sequence[Sequence[int]], settings: Decoding,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """The n best continuations of each prompt, best first (fewer if the rules allow no more); samples in drawn order.

    The result for a prompt does not depend on the others in the batch: a sample depends on the seed, the tokens of its
    prompt and its number. `on_token(number of the prompt, token)` is called for each token as it is written.
    """
    if on_token is not None:
        expect_one_hypothesis(settings)
    if not prompts:
        return []
    search = _search(writer, prompts, settings)
    for written in _run(writer, prompts, search, at_once=on_token is None):
        if on_token is not None:
            for prompt, token in written:
                on_token(prompt, token)
    return search.results()


def stream(writer: Writer, prompt: Sequence[int], settings: Decoding) -> Iterator[int]:
    """Yield the tokens of one continuation, greedy or sampled, as they are written, without the end token."""
    expect_one_hypothesis(settings)
    search = _search(writer, [prompt], settings)
    return (token for written in _run(writer, [prompt], search) for _, token in written)


def expect_one_hypothesis(settings: Decoding) -> None:
    """Refuse to stream what a beam search or several samples write."""
    if settings.beams > 1 or settings.n_best > 1:
        raise UsageError(
            "decoding: tokens can be streamed only for a single hypothesis",
            "pass beams=1 and n_best=1: a beam search knows its first token only at the end",
        )


def _search(writer: Writer, prompts: Sequence[Sequence[int]], settings: Decoding) -> _Walks | _Beams:
    limits = [min(settings.max_new, writer.room(prompt)) for prompt in prompts]
    for number, limit in enumerate(limits):
        if limit < 1:
            raise UsageError(
                f"prompt {number} has {len(prompts[number])} tokens: the model has no room for more", "shorten it"
            )
    return (_Walks if settings.beams == 1 else _Beams)(prompts, limits, settings)


def _check_tokens(settings: Decoding, vocab_size: int) -> None:
    for token in (*settings.end, *settings.banned):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"decoding: token {token} of `end` or `banned` is not in the vocabulary of {vocab_size}",
                "ids change when a vocabulary is pruned: take them from the model's own tokenizer",
            )


@torch.inference_mode()
def _run(
    writer: Writer, prompts: Sequence[Sequence[int]], search: _Walks | _Beams, at_once: bool = False
) -> Iterator[list[tuple[int, int]]]:
    """Run the search; yield the final tokens of each step as (prompt, token). Ended rows leave the batch.

    With `at_once`, a writer that can do the whole search itself may do so; nothing is yielded then.
    """
    logits, state = writer.begin(prompts)
    _check_tokens(search.settings, logits.shape[1])
    if at_once and (found := _at_once(writer, logits, state, prompts, search)) is not None:
        search.finish(found)
        return
    while True:
        rows, tokens, written = search.advance(logits)
        yield written
        if not rows:
            return
        if rows != list(range(len(logits))):
            state = state.select(torch.tensor(rows, device=logits.device))
        logits, state = writer.step(torch.tensor(tokens, device=logits.device), state)


def _at_once(
    writer: Writer, logits: Tensor, state: Any, prompts: Sequence[Sequence[int]], search: _Walks | _Beams
) -> list[list[Hypothesis]] | None:
    """Let a writer with a method `search` do the whole search, if it can."""
    whole = getattr(writer, "search", None)
    found = None if whole is None else whole(logits, state, prompts, search.limits, search.settings)
    if found is None:
        return None
    return [
        [_hypothesis(_Path(number, number, tuple(tokens), gain), search.settings) for tokens, gain in text]
        for number, text in enumerate(found)
    ]


# ---- paths -------------------------------------------------------------------------------------------------


class _Path(NamedTuple):
    """An unfinished hypothesis; `row` is its row in the latest logits of the writer."""

    prompt: int
    row: int
    tokens: tuple[int, ...] = ()
    log_probability: float = 0.0
    sample: int = 0
    rng: torch.Generator | None = None

    def grow(self, token: int, gain: float, row: int) -> _Path:
        return self._replace(row=row, tokens=(*self.tokens, token), log_probability=self.log_probability + gain)


def _hypothesis(path: _Path, settings: Decoding) -> Hypothesis:
    score = path.log_probability / max(1, len(path.tokens)) ** settings.length_penalty
    finished = bool(path.tokens) and path.tokens[-1] in settings.end
    tokens = path.tokens[:-1] if finished else path.tokens
    return Hypothesis(tokens, score, path.log_probability, finished)


def nan_logits() -> CheckpointError:
    return CheckpointError("the logits of the model are NaN", "its weights are damaged, or overflow in bf16")


def _of_paths(logits: Tensor, paths: Sequence[_Path]) -> tuple[Tensor, Tensor]:
    """The logits (paths, V) of the next token of each path, and their logsumexp (paths, 1)."""
    rows = [path.row for path in paths]
    logits = (logits if rows == list(range(len(logits))) else logits[rows]).float()
    totals = shortlist.log_totals(logits)
    if totals.isnan().any():
        raise nan_logits()
    return logits, totals[:, None]


def _allowed(scores: Tensor, paths: Sequence[_Path], prompts: Sequence[Sequence[int]], settings: Decoding) -> Tensor:
    """Exclude the tokens that the settings forbid, in place. All paths have the same length."""
    banned = settings.banned + (settings.end if len(paths[0].tokens) < settings.min_new else ())
    if banned:
        scores.index_fill_(1, torch.tensor(banned, device=scores.device), -torch.inf)
    if settings.end_bias:
        scores[:, settings.end] += settings.end_bias
    if settings.no_repeat_ngram:
        before = prompts if settings.no_repeat_prompt else [()] * len(prompts)
        histories = [(*before[path.prompt], *path.tokens) for path in paths]
        scores = filters.no_repeat(scores, histories, settings.no_repeat_ngram)
    return scores


# ---- one path per row: greedy and sampling -------------------------------------------------------------------


class _Walks:
    """Every path is extended by one token a step: the likeliest (greedy) or a random one (sampling)."""

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: Decoding):
        self.prompts, self.limits, self.settings = prompts, limits, settings
        self.live = [
            _Path(number, number, sample=sample, rng=_rng(settings.seed, prompt, sample))
            for number, prompt in enumerate(prompts)
            for sample in range(settings.n_best)
        ]
        self.ended: dict[tuple[int, int], Hypothesis] = {}
        self.choose = _draw if settings.sample else _likeliest

    def advance(self, logits: Tensor) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Return the rows that continue, the token of each, and the tokens written as (prompt, token)."""
        scores, totals = _of_paths(logits, self.live)
        tokens, chosen = self.choose(_allowed(scores, self.live, self.prompts, self.settings), self.live, self.settings)
        gains = (chosen - totals)[:, 0].tolist()
        rows, going, written = [], [], []
        for path, token, gain in zip(self.live, tokens[:, 0].tolist(), gains, strict=True):
            can = gain > -torch.inf
            gain -= self.settings.end_bias if token in self.settings.end else 0.0
            longer = path.grow(token, gain, len(going)) if can else path
            if can and token not in self.settings.end:
                written.append((path.prompt, token))
            if can and token not in self.settings.end and len(longer.tokens) < self.limits[path.prompt]:
                rows.append(path.row)
                going.append(longer)
            else:
                self.ended[path.prompt, path.sample] = _hypothesis(longer, self.settings)
        self.live = going
        return rows, [path.tokens[-1] for path in going], written

    def finish(self, found: list[list[Hypothesis]]) -> None:
        """Take the results of a search that was done elsewhere."""
        self.ended = {(prompt, 0): best for prompt, [best] in enumerate(found)}

    def results(self) -> list[list[Hypothesis]]:
        samples = range(self.settings.n_best)
        return [[self.ended[prompt, sample] for sample in samples] for prompt in range(len(self.prompts))]


def _likeliest(allowed: Tensor, paths: Sequence[_Path], settings: Decoding) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row (R, 1), and its score."""
    scores, tokens = shortlist.best(allowed, 1)
    return tokens, scores


def _draw(allowed: Tensor, paths: Sequence[_Path], settings: Decoding) -> tuple[Tensor, Tensor]:
    """A random token for each row (R, 1), and its score. Each path has its own generator, independent of the others."""
    scores = filters.temperature(allowed, settings.temperature)
    scores = filters.top_p(filters.top_k(scores, settings.top_k), settings.top_p)
    cumulative = scores.softmax(1).double().nan_to_num().cumsum(1)
    drawn = torch.stack([torch.rand((), generator=path.rng) for path in paths])  # 24 bits, so always below 1
    chosen = torch.searchsorted(cumulative, drawn.to(cumulative)[:, None] * cumulative[:, -1:], right=True)
    chosen = chosen.clamp(max=scores.shape[1] - 1)  # in a row where nothing is allowed
    return chosen, allowed.gather(1, chosen)


def _rng(seed: int, prompt: Sequence[int], sample: int) -> torch.Generator:
    words = " ".join(map(str, (seed, sample, *map(int, prompt))))
    return torch.Generator().manual_seed(int.from_bytes(blake2b(words.encode(), digest_size=7).digest()))


# ---- beam search ---------------------------------------------------------------------------------------------


_Candidate = tuple[float, float, int, _Path]  # log-probability with the token, that of the token, the token, its path


class _Beams:
    """The best `beams` paths of each prompt are continued; the best `n_best` finished ones are kept."""

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: Decoding):
        self.prompts, self.limits, self.settings = prompts, limits, settings
        self.live = [_Path(number, number) for number in range(len(prompts))]
        self.kept: list[list[Hypothesis]] = [[] for _ in prompts]
        self.reserve = settings.beams * (1 + len(settings.end))  # enough even if all end tokens are candidates

    def advance(self, logits: Tensor) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Return the rows that continue and the token of each. No token is final before the end, so none is written."""
        scores, totals = _of_paths(logits, self.live)
        best, tokens = shortlist.best(_allowed(scores, self.live, self.prompts, self.settings), self.reserve)
        rows, going = [], []
        for prompt, candidates in self._by_prompt((best - totals).tolist(), tokens.tolist()).items():
            beams = self._extend(prompt, candidates)
            if beams and not self._is_settled(prompt, beams[0]):
                rows += [path.row for path in beams]
                going += beams
        self.live = [path._replace(row=row) for row, path in enumerate(going)]
        return rows, [path.tokens[-1] for path in self.live], []

    def _by_prompt(self, gains: list[list[float]], tokens: list[list[int]]) -> dict[int, list[_Candidate]]:
        """The candidates of each prompt. A path for which no token is allowed ends as it is."""
        found: dict[int, list[_Candidate]] = {}
        for path, row_gains, row_tokens in zip(self.live, gains, tokens, strict=True):
            if row_gains[0] == -torch.inf:
                self._keep(path)
            candidates = found.setdefault(path.prompt, [])
            for gain, token in zip(row_gains, row_tokens, strict=True):
                if gain > -torch.inf:
                    candidates.append((path.log_probability + gain, gain, token, path))
        return found

    def _extend(self, prompt: int, candidates: list[_Candidate]) -> list[_Path]:
        """The beams that continue, best first. A path that ends is kept only if it is among the best `beams`."""
        going = []
        for rank, (_, gain, token, path) in enumerate(heapq.nlargest(self.reserve, candidates, key=itemgetter(0))):
            if token not in self.settings.end and len(path.tokens) + 1 < self.limits[prompt]:
                going.append(path.grow(token, gain, path.row))
            elif rank < self.settings.beams:
                self._keep(path.grow(token, gain, path.row))
            if len(going) == self.settings.beams:
                break
        return going

    def _keep(self, path: _Path) -> None:
        kept = [*self.kept[path.prompt], _hypothesis(path, self.settings)]
        kept.sort(key=lambda hypothesis: -hypothesis.score)
        self.kept[path.prompt] = kept[: self.settings.n_best]

    def _is_settled(self, prompt: int, best: _Path) -> bool:
        """Whether no live path can still beat the worst kept hypothesis, so that stopping changes nothing.

        Further tokens only lower the log-probability. The length that divides it is best at its maximum if the penalty
        is positive, and at its minimum otherwise.
        """
        if len(self.kept[prompt]) < self.settings.n_best:
            return False
        penalty = self.settings.length_penalty
        length = self.limits[prompt] if penalty > 0 else len(best.tokens) + 1
        return best.log_probability / length**penalty <= self.kept[prompt][-1].score

    def finish(self, found: list[list[Hypothesis]]) -> None:
        self.kept = found

    def results(self) -> list[list[Hypothesis]]:
        return self.kept
