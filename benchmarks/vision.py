"""A training step of ResNet-20 on images of 32 × 32: allmask's training loop, and plain PyTorch.

    python benchmarks/vision.py [--quick] [--json]

The peer is a ResNet of the same shape, written with torch.nn independently of ours: in-place ReLUs, zero-padded
shortcuts, channels-last layout, bf16 autocast, clipping and fused AdamW on both sides. Each case has its own process,
because our loop makes the C library keep freed memory, which would help the peer, too; their steps are interleaved. One
thread, CPU time, medians. On processors without bf16 both stay in fp32.

Below: the time to build a batch of 128 (selection, crop, flip, normalization) compared with a step, and the share of a
training run in which the step waits for data, which is prepared in a second thread.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels.precision import native_bf16
from allmask.training import Settings, train
from allmask.training.loop import Trainer
from allmask.vision.images import Images, Preparation
from allmask.vision.resnet import fresh, small
from allmask.vision.training import ImageBatch, ImageWorkload

BATCH, SIDE, CLASSES = 128, 32, 10
BEST = "bf16" if native_bf16("cpu") else "fp32"


def main() -> None:
    options = timing.arguments(__doc__)
    torch.set_num_threads(1)
    makers = {name: partial(step_of, make) for name, make in CASES.items()}
    times = timing.medians_apart(makers, rounds=2 if options.quick else 15)
    about = timing.versions()
    timing.show("A training step of ResNet-20, 128 images", table(times), about, options.json)
    print()
    timing.show("Data", data_rows(times[f"allmask {BEST}"], options.quick), about, options.json)


def step_of(make: Callable[[ImageWorkload], Ours | Theirs]) -> timing.Case:
    data = work(1024)
    return partial(make(data).step, data.batch(range(BATCH), 0))


def work(count: int) -> ImageWorkload:
    """Random images: speed does not depend on their content."""
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=rng)
    images = Images(pixels, labels, tuple(map(str, range(CLASSES))))
    return ImageWorkload(images, Preparation.of(pixels), seed=0, crop=4, flip=True)


class Ours:
    """A step of the training loop."""

    def __init__(self, data: ImageWorkload, precision: str):
        model = fresh(small(20), torch.Generator().manual_seed(0))
        settings = Settings(steps=10**6, precision=precision, lr=1e-3, batch_tokens=BATCH)
        self.trainer = Trainer(model, data, settings, Path(), quiet=True)

    def step(self, batch: ImageBatch) -> None:
        self.trainer._learn([batch])


class Theirs:
    def __init__(self, dtype: torch.dtype, layout: torch.memory_format):
        torch.manual_seed(0)
        self.dtype, self.layout = dtype, layout
        self.model = PlainTorch().to(memory_format=layout).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step(self, batch: ImageBatch) -> None:
        pixels = batch.pixels.contiguous(memory_format=self.layout)
        with torch.autocast("cpu", self.dtype, self.dtype != torch.float32):
            loss = F.cross_entropy(self.model(pixels), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PlainTorch(nn.Module):
    """ResNet-20 in torch.nn."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        blocks, inputs = [], 16
        for width, first in ((16, 1), (32, 2), (64, 2)):
            for stride in (first, 1, 1):
                blocks.append(PlainBlock(inputs, width, stride))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.fc(torch.flatten(self.pool(x), 1))


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        out += x
        return self.relu(out)


CASES = {
    "torch.nn fp32": lambda _: Theirs(torch.float32, torch.contiguous_format),
    "torch.nn fp32, channels-last": lambda _: Theirs(torch.float32, torch.channels_last),
    "torch.nn bf16, channels-last": lambda _: Theirs(torch.bfloat16, torch.channels_last),
    "allmask fp32": lambda data: Ours(data, "fp32"),
    "allmask bf16": lambda data: Ours(data, "bf16"),
}
if BEST == "fp32":
    CASES = {name: case for name, case in CASES.items() if "bf16" not in name}


def table(times: dict[str, float]) -> list[dict[str, object]]:
    peer = times[f"torch.nn {BEST}, channels-last"]
    return [
        {
            "system": name,
            "images/s": f"{BATCH / taken:,.0f}",
            "vs torch.nn fp32": f"{times['torch.nn fp32'] / taken:.2f}",
            f"vs torch.nn {BEST}, channels-last": f"{peer / taken:.2f}",
        }
        for name, taken in times.items()
    ]


def data_rows(step: float, quick: bool) -> list[dict[str, object]]:
    data = work(1024)
    numbers = torch.randperm(len(data.lengths), generator=torch.Generator().manual_seed(1))[:BATCH].tolist()
    taken = timing.medians({"batch": partial(data.batch, numbers, 1)}, rounds=5 if quick else 25)["batch"]
    model = fresh(small(20), torch.Generator().manual_seed(0))
    settings = Settings(steps=4 if quick else 20, batch_tokens=BATCH, save_every=10**6)
    with tempfile.TemporaryDirectory() as folder:
        result = train(model, data, settings, Path(folder) / "run", quiet=True)
    return [
        {"data": "building a batch", "time": f"{taken * 1000:.1f} ms, {taken / step:.2%} of a step"},
        {"data": "waiting for data", "time": f"{result.waited / result.seconds:.2%} of the time"},
    ]


if __name__ == "__main__":
    main()
