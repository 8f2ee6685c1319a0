"""Chains of labels against brute force over all of them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allmask.nn.crf import CRF


def drawn(labels: int, seed: int) -> CRF:
    chain = CRF(labels)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / 100)
    return chain.double()


def score(chain: CRF, row: Tensor, path: tuple[int, ...]) -> Tensor:
    total = chain.first[path[0]] + chain.last[path[-1]] + row[range(len(path)), path].sum()
    return total + sum((chain.follows[a, b] for a, b in pairwise(path)), torch.zeros(()))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 99))
def test_loss_and_gradient_are_those_of_all_chains_written_out(lengths: list[int], labels: int, seed: int):
    chain, rng = drawn(labels, seed), torch.Generator().manual_seed(seed + 1)
    scores = torch.randn(sum(lengths), labels, generator=rng, dtype=torch.float64, requires_grad=True)
    gold = torch.randint(labels, (sum(lengths),), generator=rng)
    expected = torch.zeros((), dtype=torch.float64)
    for row, right in zip(scores.split(lengths), gold.split(lengths), strict=True):
        every = torch.stack([score(chain, row, path) for path in product(range(labels), repeat=len(row))])
        expected = expected + every.logsumexp(0) - score(chain, row, tuple(right.tolist()))
    found = chain.loss(scores, gold, torch.tensor(lengths))
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
    wanted = [*chain.parameters(), scores]
    grads = [torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-8, rtol=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(2, 3), st.integers(0, 99))
def test_the_best_chain_is_the_best_of_all_that_are_allowed(lengths: list[int], labels: int, seed: int):
    chain, rng = drawn(labels, seed), torch.Generator().manual_seed(seed + 1)
    rows = [torch.randn(length, labels, generator=rng) for length in lengths]
    allowed = torch.rand(labels, labels, generator=rng) < 0.6
    allowed[:, 0] = True  # there is always a way
    starts = torch.tensor([True] + [False] * (labels - 1))
    for row, found in zip(rows, chain.best(rows, starts, allowed), strict=True):
        paths = [
            path
            for path in product(range(labels), repeat=len(row))
            if path and starts[path[0]] and all(allowed[a, b] for a, b in pairwise(path))
        ]
        best = max(paths, key=lambda path: score(chain, row, path).item()) if paths else ()
        assert tuple(found) == best


def test_neighbours_change_nothing():
    chain, rows = (
        drawn(3, 0),
        [torch.randn(length, 3, generator=torch.Generator().manual_seed(length)) for length in (5, 1, 3)],
    )
    ones = torch.ones(3, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)
    assert chain.best(rows, *ones) == [chain.best([row], *ones)[0] for row in rows]
    gold = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    together = chain.loss(torch.cat(rows), gold, torch.tensor([5, 1, 3]))
    alone = [
        chain.loss(row, right, torch.tensor([len(row)])) for row, right in zip(rows, gold.split([5, 1, 3]), strict=True)
    ]
    assert together.item() == pytest.approx(sum(loss.item() for loss in alone), rel=1e-5)
