"""Crops and flips: the same for an image whatever batch it is in, against a loop over images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.vision.augment import random_crop, random_flip

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (400, 3, 6, 5), dtype=np.uint8))


def places(image, made, padding):
    """Where in the padded image this crop is."""
    padded = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)))
    span = range(2 * padding + 1)
    return [(y, x) for y in span for x in span if np.array_equal(padded[:, y : y + 6, x : x + 5], made.numpy())]


def test_every_crop_is_one_and_all_places_occur():
    made = random_crop(PIXELS, Draw(1, 0, range(400)), padding=2)
    assert made.shape == PIXELS.shape and made.dtype == torch.uint8 and made.is_contiguous()
    found = [places(image, crop, 2) for image, crop in zip(PIXELS, made, strict=True)]
    assert all(len(place) == 1 for place in found)
    counts = {place: sum(place == f[0] for f in found) for place in {f[0] for f in found}}
    assert len(counts) == 25 and max(counts.values()) < 40  # 16 of each expected


def test_flips_are_about_half():
    made = random_flip(PIXELS, Draw(1, 0, range(400)))
    flipped = [bool((a == b.flip(2)).all()) for a, b in zip(made, PIXELS, strict=True)]
    same = [bool((a == b).all()) for a, b in zip(made, PIXELS, strict=True)]
    assert all(a != b for a, b in zip(flipped, same, strict=True)) and 160 < sum(flipped) < 240


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 399), min_size=1, max_size=8), st.integers(0, 2**62), st.integers(0, 1000))
def test_batches_do_not_matter(numbers, seed, epoch):
    for change in (random_crop, random_flip):
        together = change(PIXELS[numbers], Draw(seed, epoch, numbers))
        for place, number in enumerate(numbers):
            alone = change(PIXELS[number : number + 1], Draw(seed, epoch, [number]))
            assert torch.equal(together[place], alone[0])


@pytest.mark.parametrize("change", [random_crop, random_flip])
def test_another_seed_or_epoch_is_another_draw(change):
    made = [change(PIXELS, Draw(seed, epoch, range(400))) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert torch.equal(made[0], made[3])
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2]) and not torch.equal(made[1], made[2])


def test_no_padding_is_no_crop():
    assert torch.equal(random_crop(PIXELS, Draw(0, 0, range(400)), padding=0), PIXELS)


@pytest.mark.parametrize("change", [random_crop, random_flip])
def test_a_draw_for_others(change):
    with pytest.raises(UsageError, match="400 images, but a draw for 3"):
        change(PIXELS, Draw(0, 0, range(3)))
