"""What several tiles share: a short training, a made-up language with tags, and small models that have read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import log
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.config import Config
from allmask.losses import losses_of
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.objectives import Draw, Mlm, Vocabulary
from allmask.training.schedule import constant, linear


def fit(
    parameters: Any, loss_of_step: Callable[[int], Tensor], steps: int, lr: float = 3e-3, warmup: float = 0.1,
    decay: bool = True,
) -> list[float]:  # fmt: skip
    """Train with Adam and clipped gradients; return the losses."""
    parameters = list(parameters)
    optimizer, losses = torch.optim.Adam(parameters, lr, betas=(0.9, 0.98)), []
    schedule = linear if decay else constant
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps, round(warmup * steps))
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def surely_above(differences: list[float]) -> bool:
    """Whether the mean is above 0 by more than two standard errors."""
    return mean(differences) > 2 * stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else False


# ---- chains: each token usually has the same successor ------------------------------------------------------------

CHAIN_TOKENS, USUAL = 32, 0.9
_RARE = (1 - USUAL) / CHAIN_TOKENS  # probability of each token, if the successor is drawn from all
CHAIN_ENTROPY = -((USUAL + _RARE) * log(USUAL + _RARE) + (CHAIN_TOKENS - 1) * _RARE * log(_RARE))


def chains(follows: Tensor, step: int, rows: int = 16, length: int = 16) -> Tensor:
    """Tokens (rows, length); the next one is `follows` of the last with probability 0.9, else any."""
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(CHAIN_TOKENS, (rows, length), generator=rng)
    usual = torch.rand(rows, length, generator=rng) < USUAL
    for column in range(1, length):
        ids[:, column] = torch.where(usual[:, column], follows[ids[:, column - 1]], ids[:, column])
    return ids


# ---- a look-up: each token asks for the value of another ----------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """Rows that hold all `kinds` tokens in random order, each with a random value.

    Relation r asks token a for the value of the token `partners[r][a]`. It consists of cycles of three tokens or more,
    so that it is never mutual.
    """

    partners: Tensor  # (relations, kinds)
    values: int = 8

    @classmethod
    def of(cls, relations: int, seed: int, kinds: int = 15, cycle: int = 3) -> Lookup:
        rng = torch.Generator().manual_seed(seed)
        partners = torch.empty(relations, kinds, dtype=torch.long)
        for relation in partners:
            cycles = torch.randperm(kinds, generator=rng).view(-1, cycle)
            relation[cycles] = cycles.roll(-1, 1)
        return cls(partners)

    def rows(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, T), their values (B, T), and the values that the relations ask for, (B, T, relations)."""
        kinds = self.partners.shape[1]
        tokens = torch.rand(count, kinds, generator=rng).argsort(1)
        values = torch.randint(self.values, (count, kinds), generator=rng)
        of_token = torch.empty_like(values).scatter_(1, tokens, values)  # (B, kinds)
        wanted = torch.stack([of_token.gather(1, partner[tokens]) for partner in self.partners], -1)
        return tokens, values, wanted


# ---- a language whose words are ambiguous --------------------------------------------------------------------------

CLASSES, WORDS, LENGTH = 8, 40, 24
CLS, SEP, MASK, FIRST = 0, 1, 2, 3  # special tokens; words follow
VOCABULARY = Vocabulary(
    size=FIRST + WORDS, begin=CLS, end=SEP, mask=MASK, special=np.arange(FIRST + WORDS) < FIRST,
    continues=np.zeros(FIRST + WORDS, dtype=bool), sentinels=np.empty(0, dtype=np.int64),
)  # fmt: skip


def sentences(count: int, seed: int, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Words (count, length) as ids, and the class of each.

    Classes follow each other in a cycle, with exceptions. A word belongs to two classes, so that its own class is known
    only from the words around it.
    """
    rng = np.random.default_rng(seed)
    classes = np.empty((count, length), dtype=np.int64)
    classes[:, 0] = rng.integers(CLASSES, size=count)
    for column in range(1, length):
        usual = (3 * classes[:, column - 1] + 1) % CLASSES
        other = rng.integers(CLASSES, size=count)
        classes[:, column] = np.where(rng.random(count) < 0.8, usual, other)
    words = np.arange(WORDS)
    members = [np.flatnonzero((words % CLASSES == one) | ((words // 5 + 3) % CLASSES == one)) for one in range(CLASSES)]
    pick = rng.random((count, length))
    table = np.array([np.resize(each, 60) for each in members])
    return FIRST + table[classes, (pick * 60).astype(np.int64)], classes


def small_config(**changes: Any) -> Config:
    sizes = {"width": 64, "layers": 2, "heads": 4, "ffn_width": 128, "max_positions": LENGTH + 2, "segments": 0}
    return Config(**{"vocab_size": FIRST + WORDS, "dropout": 0.0, "attention_dropout": 0.0, **sizes, **changes})


@cache
def reader(seed: int, steps: int, corruption: tuple[float, ...] | None) -> Model:
    """A small model that has read the language: masked, with this corruption; or from left to right, if it is None.

    Take a copy to train it further.
    """
    own_mask = "causal" if corruption is None else "bidirectional"
    model = Model.fresh(small_config(own_mask=own_mask), ["lm"], torch.Generator().manual_seed(seed))
    texts, _ = sentences(2000, seed)
    objective = None if corruption is None else Mlm(VOCABULARY, corruption=corruption)

    def loss(step: int) -> Tensor:
        numbers = [(16 * step + row) % len(texts) for row in range(16)]
        if objective is not None:
            summed, count = losses_of(model, objective.batch(list(texts), Draw(seed, step, numbers)))["mlm"]
            return summed / count
        return next_token_loss(model, framed(texts[numbers]))

    fit(model.parameters(), loss, steps)
    return model.eval()


def framed(words: np.ndarray) -> Tensor:
    """[CLS] words [SEP]"""
    sides = [np.full((len(words), 1), token) for token in (CLS, SEP)]
    return torch.from_numpy(np.concatenate([sides[0], words, sides[1]], 1))


def tag_accuracy(
    body: Model, seed: int, steps: int, above: nn.Module | None = None, trained: bool = True, examples: int = 64
) -> float:
    """Train a copy of a reader to tell the classes of the words in a few sentences; its accuracy on others, in percent.

    `above` is a network between the body and the tag head; without `trained`, only that and the head are trained.
    """
    labels = Labels("tag", tuple(map(str, range(CLASSES))))
    model = body.without("lm").with_labels(labels, torch.Generator().manual_seed(seed))
    above = nn.Identity() if above is None else above
    texts, classes = sentences(examples, 1000 + seed)
    ids, gold = framed(texts), torch.from_numpy(classes)

    def scores(ids: Tensor) -> Tensor:
        hidden = model(ids).hidden
        return model.answers(above(hidden if trained else hidden.detach())[:, 1:-1].flatten(0, 1))

    def loss(step: int) -> Tensor:
        rows = [(16 * step + row) % examples for row in range(16)]
        return F.cross_entropy(scores(ids[rows]), gold[rows].flatten())

    parts = [model if trained else model.head("task_head"), above]
    fit([weight for part in parts for weight in part.parameters()], loss, steps, lr=2e-3 if trained else 1e-2)
    texts, classes = sentences(300, 2000 + seed)
    with torch.inference_mode():
        right = scores(framed(texts)).argmax(-1) == torch.from_numpy(classes).flatten()
    return 100 * right.double().mean().item()


def next_token_loss(model: Model, ids: Tensor, start: int = 0) -> Tensor:
    """The mean loss of predicting each token from those before it, from the position `start` on."""
    logits = model(ids, Mask.causal(torch.ones_like(ids, dtype=torch.bool))).logits
    return F.cross_entropy(logits[:, start:-1].flatten(0, 1), ids[:, start + 1 :].flatten())
