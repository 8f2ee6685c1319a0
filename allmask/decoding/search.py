"""Greedy, beam search and sampling: one loop over a writer, which is all that a search sees of a model."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from allmask.decoding import filters
from allmask.decoding.settings import Decoding
from allmask.errors import CheckpointError, UsageError
from allmask.kernels import top_tokens as shortlist


class State(Protocol):
    """What a writer remembers of R rows."""

    def select(self, rows: Tensor) -> State:
        """Some of the rows, in any order, repeated or dropped. What rows of a prompt share is not copied."""
        ...


class Writer(Protocol):
    """A model that continues prompts token by token."""

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens this prompt can be continued with."""
        ...

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
        """The logits (S, V) of the first new token of each prompt, the caller's to change, and a state with S rows."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The tokens (R,) chosen for the rows in, the logits (R, V) of the next ones and the next state out."""
        ...


class Hypothesis(NamedTuple):
    """What was written, without the token that ended it."""

    tokens: tuple[int, ...]
    score: float  # log_probability / length ** length_penalty; the end token counts
    log_probability: float  # the model's own, before any filter
    finished: bool  # ended by an end token, not by running out of room


def generate(
    writer: Writer, prompts: Sequence[Sequence[int]], settings: Decoding,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """The n best continuations of each prompt, best first (fewer if the rules allow no more); samples as drawn.

    A prompt's result does not depend on the others in the batch: samples are drawn by the seed, the prompt's own
    tokens and the sample's number. `on_token(prompt's number, token)` hears of each token as it is written.
    """
    if on_token is not None:
        _check_one_at_a_time(settings)
    if not prompts:
        return []
    search = _search(writer, prompts, settings)
    for written in _run(writer, prompts, search):
        if on_token is not None:
            for prompt, token in written:
                on_token(prompt, token)
    return search.results()


def stream(writer: Writer, prompt: Sequence[int], settings: Decoding) -> Iterator[int]:
    """The tokens of one continuation, greedy or sampled, as they come; the end token is not among them."""
    _check_one_at_a_time(settings)
    search = _search(writer, [prompt], settings)
    return (token for written in _run(writer, [prompt], search) for _, token in written)


def _check_one_at_a_time(settings: Decoding) -> None:
    if settings.beams > 1 or settings.n_best > 1:
        raise UsageError(
            "decoding: tokens can be given out as they come only where there is one hypothesis",
            "pass beams=1 and n_best=1: a beam search does not know its first token before its last",
        )


def _search(writer: Writer, prompts: Sequence[Sequence[int]], settings: Decoding) -> _Walks | _Beams:
    limits = [min(settings.max_new, writer.room(prompt)) for prompt in prompts]
    for number, limit in enumerate(limits):
        if limit < 1:
            raise UsageError(
                f"prompt {number} has {len(prompts[number])} tokens: the model has no room to go on", "shorten it"
            )
    return (_Walks if settings.beams == 1 else _Beams)(prompts, limits, settings)


def _check_tokens(settings: Decoding, vocab_size: int) -> None:
    for token in (*settings.end, *settings.banned):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"decoding: token {token} of `end` or `banned` is not in the vocabulary of {vocab_size}",
                "ids change when a vocabulary is pruned: ask the model's own tokenizer",
            )


@torch.inference_mode()
def _run(writer: Writer, prompts: Sequence[Sequence[int]], search: _Walks | _Beams) -> Iterator[list[tuple[int, int]]]:
    """The loop. Rows that ended leave the batch; yields what was written for sure, (prompt, token) each."""
    logits, state = writer.begin(prompts)
    _check_tokens(search.settings, logits.shape[1])
    while True:
        rows, tokens, written = search.advance(logits)
        yield written
        if not rows:
            return
        if rows != list(range(len(logits))):
            state = state.select(torch.tensor(rows, device=logits.device))
        logits, state = writer.step(torch.tensor(tokens, device=logits.device), state)


# ---- paths -------------------------------------------------------------------------------------------------


class _Path(NamedTuple):
    """A hypothesis on its way: `row` is where the writer's last logits speak of it."""

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


def _of_paths(logits: Tensor, paths: Sequence[_Path]) -> tuple[Tensor, Tensor]:
    """The logits (paths, V) of the next token of each path, and (paths, 1) what makes them the model's own
    log-probabilities when it is subtracted."""
    rows = [path.row for path in paths]
    logits = (logits if rows == list(range(len(logits))) else logits[rows]).float()
    totals = shortlist.log_totals(logits)
    if totals.isnan().any():
        raise CheckpointError(
            "the model's scores are not numbers (NaN)", "its weights are damaged, or overflow in bf16"
        )
    return logits, totals[:, None]


def _allowed(scores: Tensor, paths: Sequence[_Path], prompts: Sequence[Sequence[int]], settings: Decoding) -> Tensor:
    """Logits without what the settings forbid, in place. All paths are of one length: they began together."""
    banned = settings.banned + (settings.end if len(paths[0].tokens) < settings.min_new else ())
    if banned:
        scores.index_fill_(1, torch.tensor(banned, device=scores.device), -torch.inf)
    if settings.no_repeat_ngram:
        before = prompts if settings.no_repeat_prompt else [()] * len(prompts)
        histories = [(*before[path.prompt], *path.tokens) for path in paths]
        scores = filters.no_repeat(scores, histories, settings.no_repeat_ngram)
    return scores


# ---- one way for each row: greedy and sampling ---------------------------------------------------------------


class _Walks:
    """Every path takes one token a step: the likeliest (greedy) or a drawn one (sampling)."""

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
        """The rows that go on, the token each goes on with, and what was written."""
        scores, totals = _of_paths(logits, self.live)
        tokens, chosen = self.choose(_allowed(scores, self.live, self.prompts, self.settings), self.live, self.settings)
        gains = (chosen - totals)[:, 0].tolist()
        rows, going, written = [], [], []
        for path, token, gain in zip(self.live, tokens[:, 0].tolist(), gains, strict=True):
            can = gain > -torch.inf
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

    def results(self) -> list[list[Hypothesis]]:
        samples = range(self.settings.n_best)
        return [[self.ended[prompt, sample] for sample in samples] for prompt in range(len(self.prompts))]


def _likeliest(allowed: Tensor, paths: Sequence[_Path], settings: Decoding) -> tuple[Tensor, Tensor]:
    """One token a row (R, 1), and its score."""
    scores, tokens = shortlist.best(allowed, 1)
    return tokens, scores


def _draw(allowed: Tensor, paths: Sequence[_Path], settings: Decoding) -> tuple[Tensor, Tensor]:
    """The same by chance, each by its own generator, so that no row's luck depends on the others'."""
    scores = filters.temperature(allowed, settings.temperature)
    scores = filters.top_p(filters.top_k(scores, settings.top_k), settings.top_p)
    reached = scores.softmax(1).double().nan_to_num().cumsum(1)
    luck = torch.stack([torch.rand((), generator=path.rng) for path in paths])  # in 24 bits, so always below 1
    chosen = torch.searchsorted(reached, luck.to(reached)[:, None] * reached[:, -1:], right=True)
    chosen = chosen.clamp(max=scores.shape[1] - 1)  # a row where nothing is allowed
    return chosen, allowed.gather(1, chosen)


def _rng(seed: int, prompt: Sequence[int], sample: int) -> torch.Generator:
    words = " ".join(map(str, (seed, sample, *map(int, prompt))))
    return torch.Generator().manual_seed(int.from_bytes(blake2b(words.encode(), digest_size=7).digest()))


# ---- beam search ---------------------------------------------------------------------------------------------


_Candidate = tuple[float, float, int, _Path]  # the log-probability with it, what it adds, the token, what it follows


class _Beams:
    """The best `beams` paths of each prompt go on; the best `n_best` that ended are kept."""

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: Decoding):
        self.prompts, self.limits, self.settings = prompts, limits, settings
        self.live = [_Path(number, number) for number in range(len(prompts))]
        self.kept: list[list[Hypothesis]] = [[] for _ in prompts]
        self.reserve = settings.beams * (1 + len(settings.end))  # enough, should every end token be among them

    def advance(self, logits: Tensor) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """The rows that go on and the token each goes on with; nothing is written for sure before the end."""
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
        """What each prompt's paths can go on with; where nothing is allowed, a path ends as it is."""
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
        """The beams that go on, best first. A path ends only if it is itself among the best `beams`."""
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
        """Whether no live path can still beat the worst kept one: stopping then changes nothing.

        Further tokens only lower the log-probability; the length by which it is divided is best at its longest if the
        penalty is positive, at its shortest otherwise.
        """
        if len(self.kept[prompt]) < self.settings.n_best:
            return False
        penalty = self.settings.length_penalty
        length = self.limits[prompt] if penalty > 0 else len(best.tokens) + 1
        return best.log_probability / length**penalty <= self.kept[prompt][-1].score

    def results(self) -> list[list[Hypothesis]]:
        return self.kept
