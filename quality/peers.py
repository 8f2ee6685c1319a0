"""Fine-tuning by transformers: its heads and losses on the same body, in a standard loop, on the same token rows.

AdamW with weight decay of matrices only, linear warm-up and decay of the learning rate, gradients clipped to 1, bf16
autocast where the processor has it. Batches are the same records in the same order, padded. The best of ten evaluations
is kept, as in our runs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import autocast, train_step
from sheets import Asked, Labelled, Logits, Offered, Sheet, Tagged
from torch import Tensor

from allmask.data import plan_epoch
from allmask.training import Settings
from allmask.training.schedule import SCHEDULES

EVALUATIONS = 10
ROWS = 32  # of an evaluation batch


@dataclass(frozen=True)
class Tuned:
    model: Any  # with the weights of the best evaluation
    dev: float
    minutes: float  # of CPU time, evaluations included


def tune(folder: Path, train: Sheet, dev: Sheet, settings: Settings, title: str = "") -> Tuned:
    """Fine-tune the body in a folder with a new head. `title` begins each line of progress."""
    start = time.process_time()
    torch.manual_seed(settings.seed)
    model = load(folder, train)
    optimizer = _optimizer(model, settings)
    batches = [batch for epoch in range(math.ceil(settings.epochs)) for batch in _plan(train, settings, epoch)]
    steps = len(batches)
    best, weights = -math.inf, {}
    for step, units in enumerate(batches, 1):
        rate = settings.lr * SCHEDULES[settings.schedule](step - 1, steps, settings.warmup_steps(steps))
        loss = train_step(model, optimizer, rate, settings.clip, lambda units=units: loss_of(model, train, units))
        if step % math.ceil(steps / EVALUATIONS) == 0 or step == steps:
            value = dev.score(peer_logits(model, dev))[dev.metric]
            print(f"{title} step {step}/{steps} loss {loss:.3f} dev {value:.2f}", file=sys.stderr, flush=True)
            if value > best:
                best, weights = value, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    return Tuned(model, best, (time.process_time() - start) / 60)


def load(folder: Path, sheet: Sheet) -> Any:
    """The body with transformers' head for this kind of sheet; weights that the folder lacks are random."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, more = _head(sheet)
    model = getattr(transformers, name).from_pretrained(folder, **more)
    return model.float()  # whatever it was saved as


def _head(sheet: Sheet) -> tuple[str, dict[str, Any]]:
    assert sheet.model.labels is not None
    count = {"num_labels": len(sheet.model.labels)}
    heads: dict[type, tuple[str, dict[str, Any]]] = {
        Labelled: ("AutoModelForSequenceClassification", count),
        Tagged: ("AutoModelForTokenClassification", count),
        Asked: ("AutoModelForQuestionAnswering", {}),
        Offered: ("AutoModelForMultipleChoice", {}),
    }
    return heads[type(sheet)]


def _plan(sheet: Sheet, settings: Settings, epoch: int) -> list[list[int]]:
    """The batches of our own runs; for a fraction of an epoch, that fraction of them."""
    batches = list(plan_epoch(sheet.lengths, settings.batch_tokens, settings.seed, epoch))
    return batches[: round(min(1.0, settings.epochs - epoch) * len(batches))]


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.adam_eps, fused=True)


# ---- losses --------------------------------------------------------------------------------------------------


def loss_of(model: Any, sheet: Sheet, units: Sequence[int]) -> Tensor:
    """transformers' own loss; for choices, a softmax over those of a question, however many there are."""
    rows = [row for unit in units for row in sheet.rows_of(unit)]
    inputs = padded(sheet, rows)
    if isinstance(sheet, Labelled):
        return model(**inputs, labels=sheet.targets[rows]).loss
    if isinstance(sheet, Tagged):
        return model(**inputs, labels=_tags(sheet, rows, inputs["input_ids"])).loss
    if isinstance(sheet, Asked):
        start, end = torch.from_numpy(sheet.targets[rows]).unbind(1)
        return model(**inputs, start_positions=start, end_positions=end).loss
    scores = _scores(model, inputs).split([len(sheet.rows_of(unit)) for unit in units])
    table = torch.nn.utils.rnn.pad_sequence(list(scores), batch_first=True, padding_value=-math.inf)
    return torch.nn.functional.cross_entropy(table, torch.tensor([sheet.targets[unit] for unit in units]))


def _tags(sheet: Tagged, rows: Sequence[int], like: Tensor) -> Tensor:
    labels = torch.full_like(like, -100)
    for place, row in enumerate(rows):
        labels[place, torch.from_numpy(sheet.positions[row])] = torch.from_numpy(sheet.targets[row])
    return labels


def _scores(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Scores (rows,) of choices, each given to the model as the only choice of its question."""
    return model(**{name: tensor[:, None] for name, tensor in inputs.items()}).logits[:, 0].float()


def padded(sheet: Sheet, rows: Sequence[int]) -> dict[str, Tensor]:
    examples = [sheet.rows[row] for row in rows]
    shape = (len(rows), max(map(len, examples)))
    ids, segments, seen = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    ids += sheet.model.config.pad_token or 0
    for place, example in enumerate(examples):
        ids[place, : len(example)], segments[place, : len(example)] = example.ids, example.segments
        seen[place, : len(example)] = 1
    made = {"input_ids": ids, "token_type_ids": segments, "attention_mask": seen}
    return {name: torch.from_numpy(array) for name, array in made.items()}


# ---- logits --------------------------------------------------------------------------------------------------


@torch.no_grad()
def peer_logits(model: Any, sheet: Sheet) -> Logits:
    model.eval()
    logits: list[Tensor] = [torch.empty(0)] * len(sheet.rows)
    order = sorted(range(len(logits)), key=lambda row: len(sheet.rows[row]))
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        with autocast():
            answers = _answers(model, sheet, padded(sheet, rows))
        for row, answer in zip(rows, answers, strict=True):
            logits[row] = answer if sheet.positions is None else answer[torch.from_numpy(sheet.positions[row])]
    return logits


def _answers(model: Any, sheet: Sheet, inputs: dict[str, Tensor]) -> Tensor:
    if isinstance(sheet, Offered):
        return _scores(model, inputs)[:, None]
    out = model(**inputs)
    return (torch.stack([out.start_logits, out.end_logits], -1) if isinstance(sheet, Asked) else out.logits).float()
