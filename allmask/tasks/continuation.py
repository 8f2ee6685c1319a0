"""Continuation: write on from a prompt until the token that ends a text, as in causal pretraining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allmask.data import Checker, text
from allmask.decoding import Decoding, FillWriter, MaskWriter, Writer
from allmask.errors import CheckpointError, UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.options import ContinuationOptions
from allmask.tasks.common.generator import TextGenerator, WritingTask
from allmask.tasks.common.writing import Prompts, frozen_for, tokenizer_of, writer_for
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import ModelFolder
from allmask.text import Tokenizer, truncate_tokens

FRAME = 2  # [CLS] and [SEP], or their counterparts


@dataclass(frozen=True)
class Continuation(ContinuationOptions, WritingTask):
    """`max_source` is the room that new tokens leave in the positions; of a longer prompt the end is kept.

    With `framed`, texts begin with [CLS] and end with [SEP] (or their counterparts), as in `allmask pretrain`; without,
    a prompt has no special tokens, as for GPT-2.

    With `blanks`, for models trained on permutations, the positions of all new tokens and the tokens after them are
    known from the start; the blanks are filled from left to right:

        [CLS] 北 京 · · · [SEP]

    With `leftwards`, for models trained to read from right to left, the prompt is the end of a text, and the text
    before it is written.
    """

    @classmethod
    def within(
        cls, positions: int, max_target: int | None = None, framed: bool = False, blanks: bool = False,
        leftwards: bool = False,
    ) -> Continuation:  # fmt: skip
        max_target = max_target or max(1, min(cls.max_target, positions // 2))
        room = positions - max_target - cls(1, 1, framed, blanks)._around
        if room < 1:
            raise UsageError(f"{max_target} new tokens leave no room in {positions} positions")
        return cls(room, max_target, framed, blanks, leftwards)

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Continuation | None:
        """The task for GPT-2 and other models that read from left to right, and for XLNet."""
        model = opened.model if opened.saved_task is None else None
        if model is None or model.lm_head is None or model.labels is not None:
            return None
        if model.config.own_mask == "causal":
            return cls.within(model.config.max_positions)
        if model.config.family == "xlnet":
            return cls.within(model.config.max_positions, framed=True, blanks=True)
        return None

    def fitted(self, model: Model) -> Continuation:
        """Return the task for the positions of the model, and no more than in its training."""
        return self._within(min(self.positions, model.config.max_positions))

    def sized(self, max_new: int | None) -> Continuation:
        """Return the task with a shorter source for more new tokens."""
        return self if max_new is None else self._within(self.positions, max_new)

    def _within(self, positions: int, max_target: int | None = None) -> Continuation:
        return self.within(positions, max_target, self.framed, self.blanks, self.leftwards)

    @property
    def positions(self) -> int:
        """The number of positions that the model was trained with."""
        return self.max_source + self.max_target + self._around

    @property
    def _around(self) -> int:
        """Positions used by neither source nor target; without blanks, the last new token needs no position."""
        return FRAME if self.blanks else self.framed - 1

    def fields(self, targets: bool) -> dict[str, Checker]:
        if targets:
            raise UsageError("this model continues prompts; only titles and labels can be scored", "fine-tune it first")
        return {"source": text}

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> Prompts:
        encoded = tokenizer.encode_batch(list(sources), special=False)
        cut = sum(len(one) > self.max_source for one in encoded)
        if self.leftwards:
            end = [id for id in (tokenizer.end_id,) if self.framed and id is not None]
            return Prompts([[*truncate_tokens(one.ids, self.max_source, "head"), *end] for one in encoded], cut)
        begin = [id for id in (tokenizer.begin_id,) if self.framed and id is not None]
        rows = [[*begin, *truncate_tokens(one.ids, self.max_source, "tail")] for one in encoded]
        if not self.blanks:
            return Prompts(rows, cut)
        behind = [id for id in (tokenizer.end_id, tokenizer.closing_id) if id is not None]
        return Prompts([[*row, *range(-1, -self.max_target - 1, -1), *behind] for row in rows], cut)

    def mask_of(self, is_target: Tensor) -> Mask:
        causal = Mask.causal(torch.ones_like(is_target))
        if not self.leftwards:
            return causal
        prompt = (~is_target).sum(-1, keepdim=True)  # new tokens come after it in the row, in the order of writing
        return Mask.permutation(torch.where(is_target, causal.order, prompt - 1 - causal.order))

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """Return greedy decoding, with `changes`; texts end with [SEP], those written leftwards with [CLS]."""
        tokenizer = tokenizer_of(model)
        end = tokenizer.begin_id if self.leftwards and self.framed else tokenizer.end_id
        banned = tuple(sorted(tokenizer.special_ids - {end}))
        rules = {"end": () if end is None else (end,), "banned": banned, "max_new": self.max_target}
        return Decoding(**{**rules, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        if self.blanks:
            return FillWriter(frozen_for(model, precision))
        if self.leftwards:
            return MaskWriter(frozen_for(model, precision), Mask.reverse, (0, 0), max_length=self.positions)
        return writer_for(model, precision, Mask.causal, segments=(0, 0))


def open_generator(opened: ModelFolder, precision: str = "auto", name: str | None = None) -> TextGenerator:
    """Return a generator for a model's own task if it writes; a model that was only pretrained continues prompts.

    With a `name`, return one for that task of the model.
    """
    task = opened.saved_task if name is None else opened.task(name)
    if task is not None and not isinstance(task, WritingTask):
        raise CheckpointError(f'{opened.source}: was fine-tuned for "{task.name}", not to write', "use allmask predict")
    if opened.model.lm_head is None:
        raise CheckpointError(
            f"{opened.source}: has no language model head, so it cannot write yet",
            Title.how_to_train(opened.source),
        )
    task = task or Continuation.default_for(opened) or Title.default_for(opened)
    if task is None:
        raise CheckpointError(f"{opened.source}: has a task head, so it does not write", "use allmask predict")
    return task.predictor(opened.model, precision)
