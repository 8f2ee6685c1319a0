"""Gradients by rows and clipping: the same numbers as torch's own ways, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from allmask import presets
from allmask.data import Asked, Example, pack
from allmask.losses import losses_of
from allmask.model import Model
from allmask.nn.heads import Labels, pooled_tokens
from allmask.training import Settings, loop, train
from allmask.training.optimizer import RowGradient, TiedGradient, WholeGradient, clip, embedding_gradient
from allmask.training.process_group import SingleProcess

SMALL = {"vocab_size": 50, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 16}
FAST = Settings(steps=6, batch_tokens=40, lr=3e-3, precision="fp32", weight_decay=0.1)


class Sorting:
    """Which of two halves of the vocabulary is a text from? Tokens come several times, also within a text."""

    def __init__(self):
        rng = torch.Generator().manual_seed(0)
        self.gold = torch.randint(0, 2, (30,), generator=rng)
        self.examples = [self._example(int(half), rng) for half in self.gold]
        self.lengths = [len(example) for example in self.examples]

    def _example(self, half: int, rng: torch.Generator) -> Example:
        length = int(torch.randint(2, 9, (), generator=rng))
        ids = torch.randint(25 * half, 25 * half + 5, (length,), generator=rng)
        return Example(ids, torch.zeros(length), torch.zeros(length), torch.full((length,), -1))

    def batch(self, numbers, epoch):
        made = pack([self.examples[number] for number in numbers])
        where = pooled_tokens(made.mask)
        gold = self.gold[torch.tensor(numbers)[made.mask.group[where]]]
        return replace(made, asked=Asked(where, gold))

    def evaluate(self, model, step):
        return None


def classifier(heads=()) -> Model:
    config = replace(presets.bert_base(), **SMALL)
    rng = torch.Generator().manual_seed(0)
    return Model.fresh(config, heads, rng).with_labels(Labels("single", ("a", "b")), rng)


@pytest.mark.parametrize("limit", [1e-3, 1e3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_are_trained_as_the_whole_table_is(tmp_path, monkeypatch, limit, accumulate):
    settings = replace(FAST, clip=limit, accumulate=accumulate)
    ours, plain = classifier(), classifier()
    train(ours, Sorting(), settings, tmp_path / "rows", quiet=True)
    monkeypatch.setattr(loop, "embedding_gradient", lambda *_: WholeGradient())
    train(plain, Sorting(), settings, tmp_path / "whole", quiet=True)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    unread = ours.body.embedding.tokens.weight[40:]
    assert not torch.equal(unread, classifier().body.embedding.tokens.weight[40:])  # decayed, as AdamW does


def test_a_bad_step_leaves_nothing_behind(tmp_path):
    model, work = classifier(), Sorting()
    trainer = loop.Trainer(model, work, FAST, tmp_path, quiet=True)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.task_head.output.bias.fill_(torch.nan)
    trainer._learn([work.batch([0, 1, 2], 0)])
    assert trainer.skipped == 1
    model.load_state_dict(before)
    other = loop.Trainer(classifier(), work, FAST, tmp_path, quiet=True)
    for one in (trainer, other):
        one._learn([work.batch([3, 4, 5], 0)])
    assert all(torch.equal(other.model.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_afterwards_the_embedding_is_as_anybody_expects_it(tmp_path):
    model, work = classifier(), Sorting()
    train(model, work, FAST, tmp_path / "run", quiet=True)
    model(work.batch([0], 0).ids).hidden.sum().backward()
    gradient = model.body.embedding.tokens.weight.grad
    assert gradient is not None and not gradient.is_sparse


def test_only_tables_that_are_looked_up_and_learn_go_by_rows():
    frozen = classifier().requires_grad_(False)
    assert isinstance(embedding_gradient(classifier(), SingleProcess()), RowGradient)
    assert isinstance(embedding_gradient(classifier(["lm"]), SingleProcess()), TiedGradient)
    assert isinstance(embedding_gradient(frozen, SingleProcess()), WholeGradient)
    assert isinstance(embedding_gradient(classifier(), SingleProcess(size=2)), WholeGradient)


@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_clipping_is_torchs_own(limit):
    rng = torch.Generator().manual_seed(1)
    ours = torch.nn.ModuleList([torch.nn.Linear(5, 7), torch.nn.Linear(3, 2)])  # the second has no gradient
    for weight in ours[0].parameters():
        weight.grad = torch.randn(weight.shape, generator=rng)
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        b.grad = a.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit).item()
    assert clip(ours, limit) == expected
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("predicts", [True, False])
def test_a_tied_table_gets_the_sum_of_both_gradients(predicts):
    """Two batches, with and without a loss of the language model: as autograd adds them up, up to rounding."""
    model, work = classifier(["lm"]), Sorting()
    grads = []
    for gradient in (TiedGradient(model.body.embedding.tokens), WholeGradient()):
        model.zero_grad(set_to_none=True)
        for numbers in ([0, 1, 2, 3], [4, 5, 0]):
            batch = work.batch(numbers, 0)
            if predicts:
                batch = replace(batch, labels=torch.where(batch.ids % 3 == 0, batch.ids, -1))
            with gradient.collecting():
                torch.manual_seed(0)
                sum(loss for loss, _ in losses_of(model, batch).values()).backward()
        gradient.clear()
        grads.append(model.body.embedding.tokens.weight.grad)
    assert grads[0].layout == torch.strided and not model.body.embedding.tokens.sparse
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
