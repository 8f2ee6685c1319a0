"""Chunked cross-entropy equals torch's over all logits, in value and gradient, in every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allmask.config import Config
from allmask.kernels import cross_entropy
from allmask.kernels.cross_entropy import CHUNK, linear_cross_entropy
from allmask.nn import heads
from allmask.nn.build import build_lm_head

SIZES = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300)


def drawn(rows: int, vocabulary: int, biased: bool, seed: int = 0, size: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a matrix and maybe a bias in fp64; and labels."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(rows, 16), (vocabulary, 16), *([(vocabulary,)] if biased else [])]
    made = [torch.randn(shape, generator=rng, dtype=torch.float64) * size for shape in shapes]
    return made, torch.randint(0, vocabulary, (rows,), generator=rng)


def ours(tensors: list[Tensor], labels: Tensor, smoothing: float) -> Tensor:
    return linear_cross_entropy(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None, labels, smoothing)


def theirs(tensors: list[Tensor], labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(F.linear(*tensors), labels, reduction="sum", label_smoothing=smoothing)


def learnt(loss, tensors: list[Tensor], labels: Tensor, smoothing: float) -> list[Tensor]:
    """The loss and the gradients of a third of it."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    value = loss(leaves, labels, smoothing)
    (value / 3).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), vocabulary=st.sampled_from(SIZES), biased=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 0.6]), size=st.sampled_from([0.1, 1.0, 10.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_torchs_cross_entropy(rows, vocabulary, biased, smoothing, size, seed):
    tensors, labels = drawn(rows, vocabulary, biased, seed, size)
    found, exact = (learnt(loss, tensors, labels, smoothing) for loss in (ours, theirs))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fp32(smoothing):
    tensors, labels = drawn(50, SIZES[-1], True)
    found = learnt(ours, [x.float() for x in tensors], labels, smoothing)
    for a, b in zip(found, learnt(theirs, tensors, labels, smoothing), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["kernel", "torch"])
def either(request, monkeypatch):
    """With the kernel in C, and without."""
    if request.param == "torch":
        monkeypatch.setattr(cross_entropy, "_kernel", lambda x: None)
    elif cross_entropy._kernel(torch.zeros(1, dtype=torch.bfloat16)) is None:
        pytest.skip("no compiler, or a processor without the instructions")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_is_as_near_to_the_truth_as_torchs(smoothing, either):
    tensors, labels = drawn(200, SIZES[-1], True, size=0.3)
    low = [x.float() for x in tensors]
    exact = learnt(theirs, tensors, labels, smoothing)
    with torch.autocast("cpu", torch.bfloat16):
        found = learnt(ours, low, labels, smoothing)
        usual = learnt(lambda *some: theirs(*some), low, labels, smoothing)
    assert [x.dtype for x in found] == [torch.float32] * 4  # as the weights are
    for a, b, c in zip(found, usual, exact, strict=True):
        assert (a.double() - c).norm() <= 1.1 * (b.double() - c).norm() + 1e-4 * c.norm()


def test_a_sure_guess_keeps_its_small_gradient_in_bf16(either):
    """1 - p is far below what bf16 tells from 1."""
    hidden, matrix, labels = torch.eye(16)[:1] * 12.0, torch.eye(16), torch.tensor([0])
    with torch.autocast("cpu", torch.bfloat16):
        found = learnt(ours, [hidden, matrix], labels, 0.0)
    exact = learnt(theirs, [hidden.double(), matrix.double()], labels, 0.0)
    assert 0 < exact[1][0, 1] < 1e-4
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=0)


def test_weights_in_bf16_have_gradients_in_bf16(either):
    tensors, labels = drawn(30, SIZES[-1], True, size=0.3)
    loss, *gradients = learnt(ours, [x.bfloat16() for x in tensors], labels, 0.1)
    assert loss.dtype == torch.float32 and {x.dtype for x in gradients} == {torch.bfloat16}
    for a, b in zip(gradients, learnt(theirs, tensors, labels, 0.1)[1:], strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()


def test_tensors_without_requires_grad_get_no_gradient():
    (hidden, matrix, bias), labels = drawn(5, CHUNK + 5, True)
    hidden.requires_grad_()
    linear_cross_entropy(hidden, matrix, bias, labels).backward()
    assert hidden.grad is not None and matrix.grad is None and bias.grad is None
    matrix.requires_grad_()
    linear_cross_entropy(hidden.detach(), matrix, bias, labels).backward()
    expected = learnt(theirs, [hidden.detach(), matrix.detach(), bias], labels, 0.0)[2] * 3
    torch.testing.assert_close(matrix.grad, expected)


def test_nothing_is_saved_without_gradients():
    (hidden, matrix), labels = drawn(5, CHUNK + 5, False)
    matrix.requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, matrix, None, labels, 0.1)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, theirs([hidden, matrix.detach()], labels, 0.1))


def test_no_targets_are_no_loss():
    (hidden, matrix), labels = drawn(0, 30, False)
    loss, *gradients = learnt(ours, [hidden, matrix], labels, 0.1)
    assert loss == 0 and all((x == 0).all() for x in gradients)


@pytest.mark.parametrize("bad", [-1, 30])
def test_a_label_outside_the_vocabulary_is_an_error(bad):
    (hidden, matrix), labels = drawn(4, 30, False)
    labels[2] = bad
    with pytest.raises(IndexError, match="30 tokens"):
        linear_cross_entropy(hidden, matrix, None, labels)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_infinity_are_not_hidden(number, either):
    (hidden, matrix), labels = drawn(4, CHUNK + 30, False)
    hidden[1, 3] = number
    assert not linear_cross_entropy(hidden, matrix, None, labels, 0.1).isfinite()
    assert not linear_cross_entropy(hidden.bfloat16(), matrix.bfloat16(), None, labels, 0.1).isfinite()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), columns=st.integers(1, 70), size=st.sampled_from([0.1, 5.0, 300.0]), seed=st.integers())
def test_the_kernel_rounds_what_torch_computes(rows, columns, size, seed):
    rng = torch.Generator().manual_seed(seed % 1000)
    logits = (torch.randn(rows, columns, generator=rng) * size).bfloat16()
    if cross_entropy._kernel(logits) is None:
        pytest.skip("no compiler, or a processor without the instructions")
    exact, sums = logits.double(), torch.empty(rows)
    probabilities = cross_entropy._softmax(logits.clone(), sums)
    torch.testing.assert_close(sums.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(probabilities.double(), exact.softmax(-1), rtol=2**-8, atol=1e-37)
    factor = torch.rand(rows, generator=rng)
    found = cross_entropy._scale_and_shift(probabilities, factor, torch.tensor(0.25))
    torch.testing.assert_close(
        found, (probabilities.float() * factor[:, None] - 0.25).bfloat16(), rtol=2**-7, atol=1e-9
    )


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("few", [0, heads.FEW])
def test_a_head_takes_either_way_to_the_same_loss(few, low, monkeypatch):
    monkeypatch.setattr(heads, "FEW", few)
    torch.manual_seed(0)
    head, (hidden, matrix), labels = build_lm_head(Config(width=16, heads=1, vocab_size=90)), *drawn(30, 90, False)
    leaves = [x.float().requires_grad_() for x in (hidden, matrix)]
    taken = []
    monkeypatch.setattr(
        heads, "linear_cross_entropy", lambda *given: taken.append(linear_cross_entropy(*given)) or taken[0]
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = head.loss(*leaves, labels, 0.1)
    assert bool(taken) == (low or few == 0)
    loss.backward()
    found = [loss.detach(), *(leaf.grad for leaf in leaves), head.bias.grad, head.transform.weight.grad]
    head, leaves = head.double(), [x.clone().requires_grad_() for x in (hidden, matrix)]
    head.zero_grad()
    exact = F.cross_entropy(head(*leaves), labels, reduction="sum", label_smoothing=0.1)
    exact.backward()
    expected = [exact.detach(), *(leaf.grad for leaf in leaves), head.bias.grad, head.transform.weight.grad]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= (0.03 if low else 1e-5) * b.norm()
