"""Normalization of images."""

from __future__ import annotations

import numpy as np
import torch

from allmask.vision.images import normalize, statistics
from tests.vision.test_datasets import noise


def test_normalized_images_have_mean_0_and_deviation_1():
    pixels = torch.from_numpy(noise(50, 3, 7, 5) // np.array([1, 2, 4], np.uint8)[:, None, None])
    mean, deviation = statistics(pixels, chunk=7)
    exact = pixels.double() / 255
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)).float())
    torch.testing.assert_close(deviation, exact.std((0, 2, 3), correction=0).float())
    made = normalize(pixels, mean, deviation)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.std((0, 2, 3), correction=0), torch.ones(3))


def test_a_constant_channel_becomes_0():
    pixels = torch.full((3, 1, 2, 2), 9, dtype=torch.uint8)
    torch.testing.assert_close(normalize(pixels, *statistics(pixels)), torch.zeros(3, 1, 2, 2), atol=1e-4, rtol=0)
