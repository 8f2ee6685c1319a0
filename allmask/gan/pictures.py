"""Images beside each other in one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

SIDE = 640  # pixels of a grid, about


def as_pixels(made: Tensor) -> Tensor:
    """Bytes of what lies between −1 and 1."""
    return ((made.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


def as_examples(pixels: Tensor) -> Tensor:
    """The other way: bytes to what a generator makes."""
    return pixels.float().div_(127.5).sub_(1.0)


def write_grid(pixels: Tensor, columns: int, path: Path) -> None:
    """A PNG of images (N, C, H, W), each as large as a whole factor makes it, a line of grey between them."""
    from PIL import Image

    count, channels, height, width = pixels.shape
    rows = -(-count // columns)
    factor = max(1, SIDE // (columns * (width + 1)))
    large = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    tall, wide = height * factor + 1, width * factor + 1
    sheet = torch.full((channels, rows * tall + 1, columns * wide + 1), 128, dtype=torch.uint8)
    for number, one in enumerate(large):
        top, left = (number // columns) * tall + 1, (number % columns) * wide + 1
        sheet[:, top : top + tall - 1, left : left + wide - 1] = one
    array = sheet.permute(1, 2, 0).numpy()
    Image.fromarray(array[:, :, 0] if channels == 1 else array).save(path)
