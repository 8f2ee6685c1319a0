"""The loss of a packed batch equals that of its samples one by one, and that of plain attention with a mask matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from allmask.data import Batch
from allmask.mask import Mask
from allmask.nn.cache import Cache
from allmask.objectives import losses_of
from allmask.registry import OBJECTIVES
from tests.objectives.texts import ALL, draw, small_model, small_texts, small_vocabulary

NUMBERS = [0, 3, 4, 6, 8, 2, 9]


def backward_once(model, batch):
    """Losses and counts of a batch by name, and the gradient of all losses."""
    model.zero_grad()
    losses = losses_of(model, batch)
    sum(loss for loss, _ in losses.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return (
        {n: loss.item() for n, (loss, _) in losses.items()},
        {n: count for n, (_, count) in losses.items()},
        gradients,
    )


@pytest.mark.parametrize("name", [name for name in ALL if name != "unilm"])  # it draws its way for a whole batch
def test_a_batch_is_its_samples_one_by_one(name: str):
    objective, texts, model = ALL[name](small_vocabulary()), small_texts(), small_model(name)
    together = backward_once(model, objective.batch(texts, draw(NUMBERS)))
    alone = [backward_once(model, objective.batch(texts, draw([number]))) for number in NUMBERS]
    for loss in together[0]:
        assert sum(one[1][loss] for one in alone) == together[1][loss]
        assert sum(one[0][loss] for one in alone) == pytest.approx(together[0][loss], abs=1e-10, rel=1e-12)
    for parameter, gradient in together[2].items():
        assert gradient.isfinite().all()
        summed = sum(one[2][parameter] for one in alone if parameter in one[2])
        torch.testing.assert_close(gradient, summed, rtol=1e-10, atol=1e-10, msg=parameter)


def reference(model, batch: Batch) -> torch.Tensor:
    """One stream, document by document, over a boolean matrix in the order of positions, logits everywhere."""
    loss = torch.zeros((), dtype=torch.float64)
    for number in batch.mask.group.unique().tolist():
        mine = (batch.mask.group[0] == number).nonzero()[:, 0]
        mine = mine[batch.mask.position[0, mine].argsort()]
        order = batch.mask.order[0, mine]
        mask = Mask.from_matrix(order[None, :] <= order[:, None])
        logits = model(batch.ids[:, mine], mask, batch.segments[:, mine]).logits[0]
        loss = loss + F.cross_entropy(logits, batch.labels[0, mine], ignore_index=-1, reduction="sum")
    return loss


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("permutation", "all-permuted", "mass", "span")])
def test_one_stream_by_a_matrix(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS))
    model = small_model(name)
    with torch.no_grad():
        loss, count = losses_of(model, batch)[batch.name]
        assert loss.item() == pytest.approx(reference(model, batch).item(), abs=1e-9)
        assert count == batch.targets > 0


def two_streams(model, ids: torch.Tensor, order: torch.Tensor, query: int) -> torch.Tensor:
    """XLNet's two streams written out: h reads h where order <=, g reads h where order <; (T, W) of g."""
    body, places = model.body, torch.arange(len(ids))[None]
    zeros = torch.zeros_like(places)
    h = body.embedding(ids[None], places, zeros)
    g = body.embedding(torch.full_like(places, query), places, zeros)
    for layer in body.layers:
        streams = []
        for x, seen in ((h, order[None, :] <= order[:, None]), (g, order[None, :] < order[:, None])):
            q, k, v = layer.attention.query(x)[0], layer.attention.key(h)[0], layer.attention.value(h)[0]
            heads = []
            for part in range(layer.attention.heads):
                cut = slice(part * 8, part * 8 + 8)
                scores = (q[:, cut] @ k[:, cut].T / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
                heads.append(scores.nan_to_num(0.0) @ v[:, cut])
            a = layer.attention_norm(x + layer.attention.output(torch.cat(heads, -1)[None]))
            streams.append(layer.feed_forward_norm(a + layer.feed_forward(a)))
        h, g = streams
    return g[0]


@pytest.mark.parametrize("name", ["permutation", "all-permuted"])
def test_two_streams_written_out(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS))
    model, expected = small_model(name), 0.0
    with torch.no_grad():
        for number in range(len(NUMBERS)):
            mine = (batch.mask.group[0] == number).nonzero()[:, 0]
            mine = mine[batch.mask.position[0, mine].argsort()]
            hidden = two_streams(model, batch.ids[0, mine], batch.mask.order[0, mine], batch.query)
            logits = model.logits(hidden)
            expected += F.cross_entropy(logits, batch.labels[0, mine], ignore_index=-1, reduction="sum").item()
        assert losses_of(model, batch)["permutation"][0].item() == pytest.approx(expected, abs=1e-9)


def test_the_nsp_head_reads_the_first_token():
    texts, model = small_texts(), small_model("nsp")
    batch = ALL["nsp"](small_vocabulary()).batch(texts, draw(NUMBERS))
    assert batch.relations is not None and set(batch.relations.tolist()) == {0, 1}
    expected = 0.0
    with torch.no_grad():
        for number, relation in enumerate(batch.relations):
            mine = (batch.mask.group[0] == number).nonzero()[:, 0]
            answer = model(batch.ids[:, mine], segments=batch.segments[:, mine]).next_sentence[0]
            expected += F.cross_entropy(answer, relation).item()
        loss, count = losses_of(model, batch)["nsp"]
    assert count == len(NUMBERS) and loss.item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["mass", "span"])
def test_a_pair_at_a_time(name: str):
    batch, model = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS)), small_model(name)
    expected = 0.0
    with torch.no_grad():
        for number in range(len(NUMBERS)):
            mine = batch.mask.group[0] == number
            target = batch.mask.order[0, mine] > 0
            logits = model(batch.ids[:, mine], batch.mask[:, mine]).logits[0, target]
            expected += F.cross_entropy(logits, batch.labels[0, mine][target], reduction="sum").item()
        loss, count = losses_of(model, batch)[name]
    assert count == batch.targets and loss.item() == pytest.approx(expected, abs=1e-9)


def test_smoothing_reaches_the_loss():
    batch, model = ALL["causal"](small_vocabulary()).batch(small_texts(), draw([3])), small_model("causal")
    with torch.no_grad():
        logits = model(batch.ids, batch.mask, batch.segments).logits[batch.labels >= 0]
        labels = batch.labels[batch.labels >= 0]
        expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1).item()
        assert losses_of(model, batch, 0.1)["causal"][0].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["mlm", "permutation"])
def test_a_batch_without_targets_has_a_loss_of_zero(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw([3]))
    batch.labels.fill_(-1)
    loss, count = losses_of(small_model(name), batch)[name]
    assert (loss.item(), count) == (0.0, 0)


@pytest.mark.parametrize("name", ["mlm", "nsp", "permutation", "span"])
def test_batches_move_to_a_device_whole(name: str):
    batch = ALL[name](small_vocabulary()).batch(small_texts(), draw(NUMBERS)).to("meta")
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor | Mask)]
    assert len(tensors) >= 4 and {tensor.device.type for tensor in tensors} == {"meta"}


# ---- a permuted mask and a shuffled input ------------------------------------------------------------------


@pytest.mark.parametrize("epoch", range(3))
def test_moving_tokens_or_permuting_the_mask_is_the_same(epoch: int):
    """The content stream: in place under a permuted order, or moved with its positions under a causal one."""
    objective, model = ALL["permutation"](small_vocabulary()), small_model("permutation")
    for number in (1, 3, 6):
        batch = objective.batch(small_texts(), draw([number], epoch))
        place = batch.mask.position[0]
        by_place = place.argsort()
        rank, ids = batch.mask.order[:, by_place], batch.ids[:, by_place]
        with torch.no_grad():
            permuted = model.body(ids, Mask.from_matrix(Mask.permutation(rank).visible()))
            shuffled, _ = model.body.step(batch.ids, batch.mask, Cache(), segments=batch.segments)
            steps = torch.arange(len(place))[None]
            special = int((rank == 0).sum())
            causal = Mask(torch.where(steps < special, special - 1, steps), torch.zeros_like(steps))
            moved = model.body(batch.ids, causal, positions=place[None])
        torch.testing.assert_close(shuffled[0][by_place], permuted[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(moved[0][by_place], permuted[0], rtol=0, atol=1e-10)


def test_both_forms_of_a_permutation_guess_the_same_tokens_in_the_same_order():
    forms = {two: ALL["permutation"](small_vocabulary(), part=3, two_streams=two) for two in (True, False)}
    made = {two: form.batch(small_texts(), draw(NUMBERS)) for two, form in forms.items()}
    assert made[True].mask == made[False].mask and torch.equal(made[True].ids, made[False].ids)
    guessed = made[True].labels[0]
    assert torch.equal(made[False].labels[0], torch.cat([guessed[1:], guessed.new_tensor([-1])]))


# ---- learning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OBJECTIVES, "shuffled"])  # the others have the same masks
def test_a_few_steps_lower_the_loss(name: str):
    """As in training, with dropout and in bf16: gradients are finite, and the loss falls in 15 steps."""
    objective, model = ALL[name](small_vocabulary()), small_model(name).float().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = objective.batch(small_texts(), draw(NUMBERS))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sums = []
    for _ in range(15):
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(model, batch)
        loss = sum(loss for loss, _ in losses.values())
        assert loss.dtype == torch.float32
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        sums.append(loss.item())
    assert sums[-1] < 0.9 * sums[0]
