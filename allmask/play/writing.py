"""Writing under the mask of a board: step by step, with what was nearly chosen, and beams as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from allmask.decoding import Decoding, generate, stream
from allmask.mask.animation import writing_steps
from allmask.model import Model
from allmask.play.board import MAX_TOKENS, Board
from allmask.tasks.common.writing import text_of, tokenizer_of

ALTERNATIVES = 6


@dataclass(frozen=True)
class Rows:
    """What was written so far: the ids (R, T) of prompt and new tokens."""

    ids: Tensor

    def select(self, rows: Tensor) -> Rows:
        return Rows(self.ids[rows])


@dataclass
class BoardWriter:
    """Continues the prompt that a board covers. It has no cache: any mask may be on the board, so all is computed."""

    model: Model
    board: Board
    segments: Tensor  # (1, T) of the prompt
    new_segment: int

    def room(self, prompt: Sequence[int]) -> int:
        return min(self.model.config.max_length, 2 * MAX_TOKENS) - len(prompt)

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows]:
        return self._logits(torch.tensor([list(prompt) for prompt in prompts]))

    def step(self, tokens: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        return self._logits(torch.cat([state.ids, tokens[:, None]], 1))

    def _logits(self, ids: Tensor) -> tuple[Tensor, Rows]:
        rows, new, device = len(ids), ids.shape[1] - len(self.board), self.model.device
        ids, mask = ids.to(device), self.board.longer(new).mask[[0] * rows].to(device)
        segments = torch.cat([self.segments, torch.full((1, new), self.new_segment)], 1).expand(rows, -1).to(device)
        return self.model.logits(self.model(ids, mask, segments).hidden[:, -1]), Rows(ids)


@dataclass(frozen=True)
class Traced:
    """The state of a writer, and what is written in each of its rows."""

    state: Any
    paths: list[tuple[int, ...]]

    def select(self, rows: Tensor) -> Traced:
        return Traced(self.state.select(rows), [self.paths[row] for row in rows.tolist()])


@dataclass
class Recorder:
    """A writer that notes the log-probabilities (V,) of the token after each beginning that it was asked for.

    Tokens that were chosen by hand are written first.
    """

    writer: Any
    chosen: Sequence[int] = ()
    seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def room(self, prompt: Sequence[int]) -> int:
        return self.writer.room(prompt) - len(self.chosen)

    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Traced]:
        logits, state = self.writer.begin(prompts)
        state = self._noted(logits, Traced(state, [()] * len(prompts)))
        for token in self.chosen:
            logits, state = self.step(torch.tensor([token], device=logits.device), state)
        return logits, state

    def step(self, tokens: Tensor, state: Traced) -> tuple[Tensor, Traced]:
        logits, inner = self.writer.step(tokens, state.state)
        paths = [(*path, token) for path, token in zip(state.paths, tokens.tolist(), strict=True)]
        return logits, self._noted(logits, Traced(inner, paths))

    def _noted(self, logits: Tensor, state: Traced) -> Traced:
        scores = logits.float().log_softmax(-1).cpu()  # a copy: a search may change the logits
        self.seen.update(zip(state.paths, scores, strict=True))
        return state


def written_steps(
    model: Model, writer: Any, board: Board, prompt: Sequence[int], chosen: Sequence[int], settings: Decoding
) -> dict[str, Any]:
    """Write greedily, after the tokens that were chosen by hand; return each step with its alternatives.

    `cache` says for each step which rows are new, and which are kept; the first one reads the prompt, under `board`.
    """
    tokenizer, end = tokenizer_of(model), set(settings.end)
    over = bool(chosen) and chosen[-1] in end
    recorder = Recorder(writer, chosen[:-1] if over else chosen)
    rules = replace(settings, max_new=max(1, settings.max_new - len(chosen)))
    tokens = [*chosen, *stream(recorder, prompt, rules)] if not over else [*chosen[:-1]]
    if over:
        with torch.inference_mode():
            recorder.begin([prompt])
    steps = []
    for number in range(len(tokens) + 1):
        scores = recorder.seen.get(tuple(tokens[:number]))
        if scores is None:  # after the last token, if writing stopped because it was long enough
            break
        taken = tokens[number] if number < len(tokens) else max(end, key=scores.tolist().__getitem__)
        best = scores.topk(ALTERNATIVES)
        steps.append(
            {
                "id": taken,
                "token": shown(tokenizer, taken),
                "ends": taken in end,
                "probability": _share(scores[taken]),
                "alternatives": [
                    {"id": id, "token": shown(tokenizer, id), "probability": _share(score), "ends": id in end}
                    for id, score in zip(best.indices.tolist(), best.values, strict=True)
                ],
            }
        )
    whole = board.longer(len(tokens))
    cached = writing_steps(whole.visible, range(len(board)))
    return {
        "text": text_of(tokenizer, tokens),
        "steps": steps,
        "tokens": [*tokenizer.tokens(prompt), *(shown(tokenizer, token) for token in tokens)],
        "source": len(prompt),
        "visible": whole.visible.int().tolist(),
        "cache": [{"new": list(s.new), "again": list(s.again), "kept": list(s.kept)} for s in cached],
    }


def beam_tree(model: Model, writer: Any, prompt: Sequence[int], settings: Decoding) -> dict[str, Any]:
    """Run a beam search, and return all beginnings that it kept for a step, as a tree.

    A node is the last token of a beginning; its fate is "best", "finished", or "dropped" if nothing came of it.
    """
    tokenizer, recorder = tokenizer_of(model), Recorder(writer)
    found = generate(recorder, [list(prompt)], settings)[0]
    end = next(iter(settings.end), None)
    paths = {path for path in recorder.seen if path}
    ends: dict[tuple[int, ...], Any] = {}
    for rank, one in enumerate(found):
        path = (*one.tokens, end) if one.finished and end is not None else one.tokens
        ends[path] = {"rank": rank, "score": one.score, "text": text_of(tokenizer, one.tokens)}
    paths |= ends.keys()
    best = next(iter(ends), ())
    nodes: dict[tuple[int, ...], dict[str, Any]] = {
        (): {"id": 0, "parent": None, "token": "", "depth": 0, "fate": "best"}
    }
    for path in sorted(paths, key=lambda path: (len(path), path)):
        parent = nodes[path[:-1]]["id"]
        finished = any(other[: len(path)] == path for other in ends)
        nodes[path] = {
            "id": len(nodes),
            "parent": parent,
            "token": shown(tokenizer, path[-1]),
            "depth": len(path),
            "probability": _share(recorder.seen[path[:-1]][path[-1]]),
            "log_probability": round(sum(float(recorder.seen[path[:n]][path[n]]) for n in range(len(path))), 3),
            "fate": "best" if best[: len(path)] == path else "finished" if finished else "dropped",
            "end": ends.get(path),
        }
    texts = [{"text": end["text"], "score": round(end["score"], 3)} for end in ends.values()]
    return {"nodes": list(nodes.values()), "texts": texts}


def shown(tokenizer: Any, id: int) -> str:
    """A token for people: decoded where the vocabulary holds bytes, otherwise as it is, such as ##ing."""
    if id < 0:
        return ""
    return tokenizer.decode([id]) if tokenizer.kind == "byte-bpe" else tokenizer.id_to_token(id) or ""


def _share(score: Tensor) -> float:
    return round(float(score.exp()), 4)
