"""transformers' own fine-tuning of the same body: its heads and losses in the usual loop, on the rows that ours reads.

AdamW with decay of matrices only, a linear rate with a warm-up, gradients clipped to 1, bf16 autocast where the
processor has it; batches are the same records in the same order, padded. The best of as many evaluations as ours is
kept.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sheets import Asked, Labelled, Offered, Said, Sheet, Tagged
from torch import Tensor

from allmask.data import plan_epoch
from allmask.training import Settings, resolve_precision
from allmask.training.schedule import SCHEDULES

EVALUATIONS = 10
ROWS = 32  # read at once where nothing is learnt


@dataclass(frozen=True)
class Tuned:
    model: Any  # with the weights of the best evaluation
    dev: float
    minutes: float  # of computing, evaluations included


def tune(folder: Path, learn: Sheet, dev: Sheet, how: Settings, told: str = "") -> Tuned:
    """A body from a folder, with a new head, taught what is on a sheet."""
    began = time.process_time()
    torch.manual_seed(how.seed)
    model = load(folder, learn)
    optimizer = _optimiser(model, how)
    batches = [batch for epoch in range(math.ceil(how.epochs)) for batch in _plan(learn, how, epoch)]
    steps = len(batches)
    best, weights = -math.inf, {}
    for step, units in enumerate(batches, 1):
        rate = how.lr * SCHEDULES[how.schedule](step - 1, steps, how.warmup_steps(steps))
        loss = _learn(model, learn, units, optimizer, rate, how.clip)
        if step % math.ceil(steps / EVALUATIONS) == 0 or step == steps:
            value = dev.score(said_by_peer(model, dev))[dev.metric]
            _note(f"{told} step {step}/{steps} loss {loss:.3f} dev {value:.2f}")
            if value > best:
                best, weights = value, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    return Tuned(model, best, (time.process_time() - began) / 60)


def load(folder: Path, sheet: Sheet) -> Any:
    """The body with the head that transformers has for such a sheet; what is missing in the folder is drawn."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, more = _head(sheet)
    model = getattr(transformers, name).from_pretrained(folder, **more)
    return model.float()  # whatever it was saved as


def _head(sheet: Sheet) -> tuple[str, dict[str, Any]]:
    assert sheet.model.labels is not None
    number = {"num_labels": len(sheet.model.labels)}
    heads: dict[type, tuple[str, dict[str, Any]]] = {
        Labelled: ("AutoModelForSequenceClassification", number),
        Tagged: ("AutoModelForTokenClassification", number),
        Asked: ("AutoModelForQuestionAnswering", {}),
        Offered: ("AutoModelForMultipleChoice", {}),
    }
    return heads[type(sheet)]


def _plan(sheet: Sheet, how: Settings, epoch: int) -> list[list[int]]:
    """The batches that ours sees; of a part of an epoch as many as that part has."""
    made = list(plan_epoch(sheet.lengths, how.batch_tokens, how.seed, epoch))
    return made[: round(min(1.0, how.epochs - epoch) * len(made))]


def _optimiser(model: torch.nn.Module, how: Settings) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.epsilon, fused=True)


def _learn(model, sheet: Sheet, units: Sequence[int], optimizer: torch.optim.Optimizer, rate: float, clip: float):
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.train()
    with _autocast():
        loss = loss_of(model, sheet, units)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@contextmanager
def _autocast() -> Iterator[None]:
    dtype = resolve_precision("auto")
    with torch.autocast("cpu", dtype, dtype != torch.float32):
        yield


# ---- what it learns ------------------------------------------------------------------------------------------


def loss_of(model: Any, sheet: Sheet, units: Sequence[int]) -> Tensor:
    """transformers' own loss; choices, of which a question may have any number, share a softmax."""
    rows = [row for unit in units for row in sheet.rows_of(unit)]
    inputs = padded(sheet, rows)
    if isinstance(sheet, Labelled):
        return model(**inputs, labels=sheet.gold[rows]).loss
    if isinstance(sheet, Tagged):
        return model(**inputs, labels=_tags(sheet, rows, inputs["input_ids"])).loss
    if isinstance(sheet, Asked):
        start, end = torch.from_numpy(sheet.gold[rows]).unbind(1)
        return model(**inputs, start_positions=start, end_positions=end).loss
    scores = _scores(model, inputs).split([len(sheet.rows_of(unit)) for unit in units])
    table = torch.nn.utils.rnn.pad_sequence(list(scores), batch_first=True, padding_value=-math.inf)
    return torch.nn.functional.cross_entropy(table, torch.tensor([sheet.gold[unit] for unit in units]))


def _tags(sheet: Tagged, rows: Sequence[int], like: Tensor) -> Tensor:
    labels = torch.full_like(like, -100)
    for place, row in enumerate(rows):
        labels[place, torch.from_numpy(sheet.places[row])] = torch.from_numpy(sheet.gold[row])
    return labels


def _scores(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(rows,) of choices, each as if it were its question's only one."""
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


# ---- what it says --------------------------------------------------------------------------------------------


@torch.no_grad()
def said_by_peer(model: Any, sheet: Sheet) -> Said:
    model.eval()
    said: list[Tensor] = [torch.empty(0)] * len(sheet.rows)
    order = sorted(range(len(said)), key=lambda row: len(sheet.rows[row]))
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        with _autocast():
            answers = _answers(model, sheet, padded(sheet, rows))
        for row, answer in zip(rows, answers, strict=True):
            said[row] = answer if sheet.places is None else answer[torch.from_numpy(sheet.places[row])]
    return said


def _answers(model: Any, sheet: Sheet, inputs: dict[str, Tensor]) -> Tensor:
    if isinstance(sheet, Offered):
        return _scores(model, inputs)[:, None]
    out = model(**inputs)
    return (torch.stack([out.start_logits, out.end_logits], -1) if isinstance(sheet, Asked) else out.logits).float()


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
