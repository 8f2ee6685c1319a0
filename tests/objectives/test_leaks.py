"""No objective lets a position see its own label: by changing the label, by gradients, and by the prover."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from allmask.data import Batch
from allmask.mask import Mask
from allmask.mask.prover import next_tokens, prove
from allmask.objectives import losses_of
from tests.objectives.texts import ALL, MASK, SIZE, UNK, Texts, draw, small_model, small_texts, small_vocabulary

MASKED = ("mlm", "words", "nsp", "unilm", "unilm-0", "unilm-1", "unilm-2", "unilm-3")
NUMBERS = range(10)


def logits_of(model, batch) -> torch.Tensor:
    """What the loss is taken of, (M, V), in the order of the batch's labels."""
    seen, plain = [], model.token_loss
    model.token_loss = lambda hidden, *others: seen.append(hidden) or plain(hidden, *others)
    losses_of(model, batch)
    del model.token_loss
    return model.logits(seen[0])


def changed(texts: Texts, number: int, place: int) -> Texts:
    """The same texts with another word of the same kind at one place."""
    other = small_texts()
    row = texts[number].copy()
    low, high = (30, SIZE) if row[place] >= 30 else (5, 30)
    row[place] = low + (row[place] - low + 1) % (high - low)
    other[number] = row
    return other


def flat(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample and the label of each target, in the order of logits."""
    where = batch.labels >= 0
    return batch.mask.group[where], batch.labels[where]


@pytest.mark.parametrize("name", ALL)
def test_another_label_changes_nothing_where_it_is_predicted(name: str):
    assert check_changed_labels(name, ALL[name](small_vocabulary())) >= 4


def check_changed_labels(name: str, objective) -> int:
    """Each token in turn becomes another one, with the same draw: only its own target changes, not what predicts it."""
    texts, model, checked = small_texts(), small_model(name), 0
    with torch.no_grad():
        for number in NUMBERS:
            chance = draw([number], epoch=3)
            before = objective.batch(texts, chance)
            old = logits_of(model, before)
            for place in np.flatnonzero(texts[number] != UNK):
                after = objective.batch(changed(texts, number, place), chance)
                new_targets = (flat(before)[1] != flat(after)[1]).nonzero()[:, 0]
                assert len(new_targets) <= 1
                if not len(new_targets) or (name in MASKED and is_kept(before, after, new_targets)):
                    continue
                torch.testing.assert_close(logits_of(model, after)[new_targets], old[new_targets], rtol=0, atol=1e-12)
                checked += len(new_targets)
    return checked


def is_kept(before: Batch, after: Batch, targets: torch.Tensor) -> bool:
    """Whether this target is one of the 10 % that are shown as they are; otherwise nothing of it is in the input."""
    where = (before.labels[0] >= 0).nonzero()[:, 0][targets]
    kept = bool((before.ids[0, where] == before.labels[0, where]).any())
    if not kept:
        assert torch.equal(before.ids, after.ids)
    return kept


CARRIER = {"causal": 1, "reverse": -1, "prefix": 1, "permutation": 0, "all-permuted": 0}


@pytest.mark.parametrize("name", [*CARRIER, "shuffled"])
def test_no_gradient_reaches_the_token_that_is_the_label(name: str):
    objective, texts, model = ALL[name](small_vocabulary()), small_texts(), small_model(name)
    batch = objective.batch(texts, draw([1, 3, 6]))
    embedded: list[torch.Tensor] = []
    model.body.embedding.tokens.register_forward_hook(lambda module, given, out: embedded.append(out))
    logits = logits_of(model, batch)
    direction = torch.randn(logits.shape[1], dtype=torch.float64)
    group, place = batch.mask.group[0], batch.mask.position[0]
    reached = 0
    for target, at in enumerate((batch.labels[0] >= 0).nonzero()[:, 0].tolist()):
        gradient = torch.autograd.grad(logits[target] @ direction, embedded[0], retain_graph=True)[0][0].abs().amax(-1)
        if name == "shuffled":
            carrier = at + 1  # a batch stands in its order
        else:
            carrier = int(((group == group[at]) & (place == place[at] + CARRIER[name])).nonzero())
        assert batch.ids[0, carrier] == batch.labels[0, at]
        assert gradient[carrier] == 0
        younger = (group == group[at]) & (batch.mask.order[0] > batch.mask.order[0, carrier])
        assert not gradient[younger | (group != group[at])].any()
        older = (group == group[at]) & (batch.mask.order[0] < batch.mask.order[0, carrier])
        assert (gradient[older] > 1e-9).all()  # and all that is known is used
        reached += int(older.sum())
    assert reached > 20


@pytest.mark.parametrize("name", ["mass", "span"])
def test_no_gradient_reaches_later_tokens_of_the_decoder(name: str):
    objective, texts, model = ALL[name](small_vocabulary()), small_texts(), small_model(name)
    batch = objective.batch(texts, draw([1, 3, 6]))
    embedded: list[torch.Tensor] = []
    model.body.embedding.tokens.register_forward_hook(lambda module, given, out: embedded.append(out))
    logits = logits_of(model, batch)
    direction = torch.randn(logits.shape[1], dtype=torch.float64)
    group, order = batch.mask.group[0], batch.mask.order[0]
    for number, at in enumerate((batch.labels[0] >= 0).nonzero()[:, 0].tolist()):
        gradient = torch.autograd.grad(logits[number] @ direction, embedded[0], retain_graph=True)[0][0].abs().amax(-1)
        assert torch.equal(gradient > 1e-9, (group == group[at]) & (order <= order[at]))
        if at + 1 < len(group) and group[at + 1] == group[at]:
            assert batch.ids[0, at + 1] == batch.labels[0, at]  # the label itself comes next, unseen


# ---- the prover --------------------------------------------------------------------------------------------


def documents(batch: Batch):
    """The mask, the labels and the ids of each document alone."""
    for number in batch.mask.group.unique().tolist():
        mine = batch.mask.group[0] == number
        yield batch.mask[:, mine], batch.labels[0, mine], batch.ids[0, mine]


@pytest.mark.parametrize("name", ["causal", "reverse", "prefix", "shuffled"])
def test_the_prover_finds_no_shifted_leak(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS))
    for mask, labels, ids in documents(batch):
        proof = prove(mask, scored=labels >= 0)
        assert proof.is_order and not proof.empty_rows and proof.shifted_leaks == ()
        following = dict(next_tokens(proof.order, proof.group, mask.position[0]))
        targets = (labels >= 0).nonzero()[:, 0].tolist()
        if name != "shuffled":  # where the last of several special tokens stands is a matter of taste
            assert [ids[following[at]] for at in targets] == labels[targets].tolist()


@pytest.mark.parametrize("name", ["permutation", "all-permuted"])
def test_the_prover_finds_no_leak_of_two_streams(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS))
    assert batch.query == MASK
    for mask, labels, ids in documents(batch):
        scored = labels >= 0
        assert torch.equal(ids[scored], labels[scored])
        assert prove(mask, scored=scored).two_stream_leaks == ()
        assert mask.visible(strict=True)[0][scored].any(-1).all()  # no query reads nothing


@pytest.mark.parametrize("name", MASKED)
def test_the_prover_finds_only_the_masked_tokens_that_were_kept(name: str):
    objective, leaks, targets = ALL[name](small_vocabulary()), 0, 0
    for epoch in range(20):
        for mask, labels, ids in documents(objective.batch(small_texts(), draw(NUMBERS, epoch))):
            scored, hidden = labels >= 0, labels != ids
            proof = prove(mask, scored=scored, hidden=hidden)
            kept = (scored & (labels == ids)).nonzero()[:, 0].tolist()
            assert proof.masked_leaks == tuple((at, at) for at in kept)
            leaks, targets = leaks + len(kept), targets + int(scored.sum())
    assert 0.05 < leaks / targets < 0.16  # BERT's 10 %


@pytest.mark.parametrize("name", ["mass", "span"])
def test_the_prover_on_encoder_and_decoder_as_one_order(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS))
    for mask, labels, _ in documents(batch):
        source, target = mask[:, mask.order[0] == 0], mask[:, mask.order[0] > 0]
        joined = Mask.cat([source, Mask(target.order, target.group, target.position + source.shape[1])])
        proof = prove(joined, scored=labels >= 0)
        assert proof.is_order and proof.shifted_leaks == ()
        assert torch.equal(target.visible(source), torch.ones(1, target.shape[1], source.shape[1], dtype=torch.bool))


class Leaky:
    """An objective whose batches are read by a mask that shows the answer."""

    def __init__(self, objective, **change):
        self.objective, self.change = objective, change

    def batch(self, texts: Texts, chance) -> Batch:
        batch = self.objective.batch(texts, chance)
        mask = Mask(torch.zeros_like(batch.mask.order), batch.mask.group, batch.mask.position)
        return replace(batch, mask=mask, **self.change)


@pytest.mark.parametrize(("name", "change"), [("causal", {}), ("prefix", {}), ("permutation", {"query": None})])
def test_a_leak_would_be_found(name: str, change: dict):
    leaky = Leaky(ALL[name](small_vocabulary()), **change)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_changed_labels(name, leaky)
    for mask, labels, _ in documents(leaky.batch(small_texts(), draw([3]))):
        assert prove(mask).influence.all() and not prove(mask, scored=labels >= 0).cacheable
