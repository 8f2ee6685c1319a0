"""What the tests of encoder–decoders share: ids and masks of pairs, and the promises that every body keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from allmask.mask import Mask
from allmask.nn.cache import Cache

LENGTHS = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=4)  # of sources and targets


def draw_ids(rows, tokens, seed=0):
    return torch.randint(1, 50, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def pairs(sources, targets, extra=0):
    """Sources and targets of these lengths, row by row, padded."""
    lengths = torch.tensor([s + t for s, t in zip(sources, targets, strict=True)])[:, None]
    places = torch.arange(int(lengths.max()) + extra)
    valid = places < lengths
    return Mask.encoder_decoder((places >= torch.tensor(sources)[:, None]) & valid, valid)


def assert_packed_equals_padded_equals_one_by_one(model, lengths, extra):
    """Return the packed ids, their mask, and the hidden states of each pair alone."""
    sources, targets = zip(*lengths, strict=True)
    mask = pairs(sources, targets, extra)
    ids = draw_ids(*mask.shape)
    padded = model(ids, mask).hidden
    cut = [(slice(row, row + 1), slice(0, s + t)) for row, (s, t) in enumerate(lengths)]
    alone = [model(ids[where], mask[where]).hidden[0] for where in cut]
    for (row, tokens), states in zip(cut, alone, strict=True):
        torch.testing.assert_close(padded[row, tokens][0], states, atol=1e-10, rtol=0)
        assert padded[row, tokens.stop :].abs().sum() == 0
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([s + t for s, t in lengths]))[None]
    joined = replace(Mask.cat([mask[where] for where in cut]), group=document)
    row = torch.cat([ids[where] for where in cut], dim=1)
    torch.testing.assert_close(model(row, joined).hidden[0], torch.cat(alone), atol=1e-10, rtol=0)
    return row, joined, torch.cat(alone)


def assert_cached_equals_full(model, lengths, data):
    """Also where targets of a batch have different lengths, and where the first call has some of the target."""
    sources, targets = zip(*lengths, strict=True)
    source = max(sources)
    places = torch.arange(source + max(targets))
    valid = (places < torch.tensor(sources)[:, None]) | (
        (places >= source) & (places < source + torch.tensor(targets)[:, None])
    )
    mask = Mask.encoder_decoder((places >= source).expand_as(valid), valid)
    ids = draw_ids(*mask.shape)
    full = model(ids, mask).hidden
    cuts = sorted({source, *data.draw(st.lists(st.integers(source, len(places)), max_size=4)), len(places)})
    cuts = cuts[1:] if len(cuts) > 1 and data.draw(st.booleans()) else cuts
    cache, parts = Cache(), []
    for start, stop in pairwise([0, *cuts]):
        out = model(ids[:, start:stop], mask[:, start:stop], cache=cache)
        cache = out.cache
        parts.append(out.hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1)[valid], full[valid], atol=1e-10, rtol=0)


def assert_gradients_equal_differences(model):
    mask = pairs([3, 2], [2, 3])
    ids, chosen = draw_ids(*mask.shape), list(model.body.parameters())
    weights = torch.randn(model(ids, mask).hidden.shape, generator=torch.Generator().manual_seed(1)).double()

    def loss():
        return (model(ids, mask).hidden * weights).sum()

    loss().backward()
    rng = torch.Generator().manual_seed(2)
    directions = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in chosen]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(chosen, directions, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for p, d in zip(chosen, directions, strict=True):
                p += step * d
            values.append(float(loss()))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in chosen)
