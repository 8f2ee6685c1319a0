"""The models of the playground, and what one does under the mask of a board: fill, write, attend, depend."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from allmask.checkpoints import default_model
from allmask.checkpoints.sources import BUNDLED
from allmask.decoding import Decoding, MaskWriter
from allmask.errors import AllmaskError, CheckpointError, UsageError
from allmask.inference.attention import attention_map, lay_out
from allmask.mask.audit import audit_tokens
from allmask.mask.labels import split
from allmask.mask.prover import influence
from allmask.model import Model
from allmask.nn.transformer import Transformer
from allmask.play.board import MAX_TOKENS, Board
from allmask.play.writing import BoardWriter, beam_tree, written_steps
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.fill import likeliest
from allmask.tasks.seq2seq import SOURCE_MASKS
from allmask.tasks.task import ModelFolder

NEW = 24  # tokens that are written at most
GUESSES = 5


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a source and a target, laid out as for a title: [CLS] source [SEP] target [SEP]; on the CPU."""

    ids: Tensor  # (1, T)
    is_target: Tensor  # (1, T)
    segments: Tensor | None  # (1, T)

    @property
    def source(self) -> int:
        """The number of tokens of the source, special ones included."""
        return int((~self.is_target).sum())


@dataclass(frozen=True)
class Weights:
    """A model with a single stack, opened when it is first used."""

    opened: ModelFolder

    @property
    def name(self) -> str:
        return self.opened.source

    @cached_property
    def model(self) -> Model:
        model = self.opened.model.eval()
        if not isinstance(model.body, Transformer) or model.lm_head is None:
            raise CheckpointError(
                f"{self.name}: the playground takes a model with one stack and a language model head",
                "take allmask-en, allmask-zh, or a BERT or GPT-2",
            )
        return model

    @cached_property
    def titles(self) -> Any:
        """The task of titles, with the fast engines."""
        return self.opened.predictor("title", "auto")

    def facts(self) -> dict[str, Any]:
        config = self.opened.outline.config
        return {"name": self.name, "layers": config.layers, "heads": config.heads, "width": config.width}

    def text(self, source: str, target: str) -> Text:
        ids, is_target, segments = lay_out(self.model, source, target or None)
        found = Text(ids.cpu(), is_target.cpu(), None if segments is None else segments.cpu())
        if found.ids.shape[1] > MAX_TOKENS:
            raise UsageError(
                f"the text has {found.ids.shape[1]} tokens", f"a board has at most {MAX_TOKENS}, so shorten it"
            )
        return found

    def tokens(self, source: str, target: str) -> dict[str, Any]:
        text, tokenizer = self.text(source, target), tokenizer_of(self.model)
        special = [id in tokenizer.special_ids and id != tokenizer.mask_id for id in text.ids[0].tolist()]
        return {
            "tokens": tokenizer.tokens(text.ids[0].tolist()),
            "is_target": text.is_target[0].int().tolist(),
            "special": [int(one) for one in special],
        }

    # ---- under the mask of a board ---------------------------------------------------------------------------

    def fill(self, text: Text, board: Board, hidden: Sequence[int]) -> dict[str, Any]:
        """The likeliest tokens at each [MASK], and at each position that is hidden by one."""
        tokenizer = tokenizer_of(self.model)
        if tokenizer.mask_id is None:
            raise CheckpointError(f"{self.name}: its tokenizer has no [MASK]", "take a BERT-like model")
        mask, ids = _fitting(board, text).mask, text.ids.clone()
        ids[0, list(hidden)] = tokenizer.mask_id
        asked = (ids[0] == tokenizer.mask_id).nonzero()[:, 0].tolist()
        if not asked:
            raise UsageError("there is no [MASK] in the text", "write [MASK], or hide a token")
        with torch.inference_mode():
            inputs = (x if x is None else x.to(self.model.device) for x in (ids, mask, text.segments))
            states = self.model(*inputs).hidden[0, asked]
            answers = likeliest(self.model.logits(states), tokenizer, GUESSES)
        was = tokenizer.tokens(text.ids[0, asked].tolist())
        gaps = [
            {
                "position": position,
                "was": token if position in hidden else None,
                "guesses": [{"token": one.token, "probability": round(one.probability, 4)} for one in guesses],
            }
            for position, token, guesses in zip(asked, was, answers, strict=True)
        ]
        return {"gaps": gaps}

    def attention(self, source: str, target: str, board: Board) -> dict[str, Any]:
        """All weights, as bytes (layers, heads, T, T): 255 times the square root, so that small ones tell."""
        found = attention_map(self.model, source, target or None, mask=board.mask)
        weights = (found.weights.sqrt() * 255).round().to(torch.uint8)
        layers, heads, tokens, _ = weights.shape
        packed = base64.b64encode(weights.contiguous().numpy().tobytes()).decode()
        return {"layers": layers, "heads": heads, "tokens": tokens, "weights": packed}

    def audit(self, text: Text, board: Board) -> dict[str, Any]:
        """The measured influence, and the promised one: that of the order without the clicked cells."""
        found = audit_tokens(self.model, text.ids, _fitting(board, text).mask, text.segments)
        layers = self.model.config.layers
        promised = influence(board.promised.visible()[0], layers)
        return {
            "layers": layers,
            "depends": found.depends.int().tolist(),
            "promised": promised.int().tolist(),
            "proven": found.promised.int().tolist(),
            "holds": found.holds,
        }

    def continued(self, text: Text, board: Board) -> dict[str, Any]:
        """Write on after the last token; the [SEP] that ends the text is taken away first."""
        tokenizer = tokenizer_of(self.model)
        count = text.ids.shape[1]
        while count > 1 and text.ids[0, count - 1].item() in tokenizer.special_ids - {tokenizer.mask_id}:
            count -= 1
        last = 0 if text.segments is None else int(text.segments[0, count - 1])
        return self._written(text, _fitting(board, text).first(count), last, "continue")

    def titled(self, text: Text, board: Board) -> dict[str, Any]:
        """Write a title for the source, under the part of the mask that covers it."""
        return self._written(text, _fitting(board, text).first(text.source), 1, "title")

    def _written(self, text: Text, board: Board, segment: int, task: str) -> dict[str, Any]:
        segments = torch.zeros_like(text.ids) if text.segments is None else text.segments
        segment = min(segment, max(0, self.model.config.segments - 1))
        writer = BoardWriter(self.model, board, segments[:, : len(board)], segment)
        settings = replace(self._settings(task), beams=1, no_repeat_ngram=2)
        found = written_steps(self.model, writer, board, text.ids[0, : len(board)].tolist(), (), settings)
        kept = ("token", "probability", "ends")
        return {"text": found["text"], "steps": [{name: step[name] for name in kept} for step in found["steps"]]}

    # ---- watching --------------------------------------------------------------------------------------------

    def steps(self, source: str, kind: str, forced: Sequence[int]) -> dict[str, Any]:
        """Write a title step by step, under the prefix mask or the naive one; `forced` are its first tokens."""
        text = self.text(source, "")
        if any(not 0 <= id < self.model.config.vocab_size for id in forced):
            raise UsageError("forced holds a token that is not in the vocabulary")
        prompt, board = text.ids[0].tolist(), _source_board(text, kind)
        return written_steps(self.model, self._writer(kind), board, prompt, forced, self._settings("title"))

    def beams(self, source: str, kind: str, beams: int) -> dict[str, Any]:
        prompt = self.text(source, "").ids[0].tolist()
        settings = replace(self._settings("title"), beams=beams, n_best=beams)
        return beam_tree(self.model, self._writer(kind), prompt, settings)

    def write_titles(self, source: str, beams: int, count: int) -> list[dict[str, Any]]:
        if not source.strip():
            raise UsageError("no text was given", "paste a text to write titles for")
        (found,) = self.titles.write([source], beams=beams, n_best=count)
        return [{"text": text, "score": round(one.score, 3)} for text, one in found]

    def _writer(self, kind: str) -> MaskWriter:
        return MaskWriter(self.model, SOURCE_MASKS[kind])

    def _settings(self, task: str) -> Decoding:
        """The decoding settings of a task, of the model's own or by default, with at most `NEW` tokens."""
        found = self.opened.task(task).fitted(self.model).decoding(self.model)
        return replace(found, max_new=min(found.max_new, NEW), min_new=1)


def _fitting(board: Board, text: Text) -> Board:
    if len(board) != text.ids.shape[1]:
        raise UsageError(f"the order has {len(board)} numbers, the text {text.ids.shape[1]} tokens")
    return board


def _source_board(text: Text, kind: str) -> Board:
    index = torch.arange(text.ids.shape[1])[None]
    return Board(index if kind == "naive" else torch.zeros_like(index), torch.zeros_like(index))


class Shelf:
    """The models that a request can name."""

    def __init__(self, names: Sequence[str] | None = None, device: str = "cpu"):
        self.weights: dict[str, Weights] = {}
        for name in BUNDLED_WRITERS if names is None else names:
            try:
                opened = ModelFolder.open(name, device)
            except AllmaskError:
                if names is not None:
                    raise
                continue  # a bundled model that is not installed
            self.weights[name] = Weights(opened)
        self.chosen = None if names is None else next(iter(names), None)

    def _usual(self, text: str) -> str:
        return self.chosen or default_model([text])

    def has(self, text: str) -> bool:
        """Whether the model for this text is installed."""
        return self._usual(text) in self.weights

    def find(self, name: str, text: str) -> Weights:
        """The model of this name; for "auto", the one for the script of the text."""
        if name == "auto":
            name = self._usual(text)
        if name not in self.weights:
            hint = f"there are: {', '.join(self.weights)}" if self.weights else BUNDLED["allmask-en"][1]
            raise UsageError(f"{name}: there is no such model here", hint)
        return self.weights[name]


BUNDLED_WRITERS = ("allmask-en", "allmask-zh")


def words_of(source: str, target: str) -> dict[str, Any]:
    """The tokens of a board without a model: words and Chinese characters."""
    first = ["[CLS]", *split(source), "[SEP]"]
    second = [*split(target), "[SEP]"] if target.strip() else []
    tokens = [*first, *second]
    if len(tokens) > MAX_TOKENS:
        raise UsageError(f"the text has {len(tokens)} tokens", f"a board has at most {MAX_TOKENS}, so shorten it")
    special = [int(token in ("[CLS]", "[SEP]")) for token in tokens]
    return {"tokens": tokens, "is_target": [0] * len(first) + [1] * len(second), "special": special}
