"""The share of the machine's peak: operations are counted as torch counts them, pairs as the mask shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from allmask import presets
from allmask.data import Asked, pack
from allmask.kernels import matrix_product
from allmask.mask import Mask
from allmask.model import Model
from allmask.training import Settings, flops, loss_of, train
from allmask.training.flops import measured_peak, operations, visible_pairs
from allmask.training.log import read_metrics
from tests.training.test_loop import SMALL, Copying, model


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4))
def test_pairs_are_those_that_the_mask_shows(texts):
    order = torch.tensor([[known for text in texts for known in text]])
    group = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    mask = Mask(order, group, torch.zeros_like(order))
    assert visible_pairs(mask) == int(mask.visible().sum())


def test_pairs_of_some_queries():
    mask, wanted = (
        Mask.causal(torch.ones(2, 4, dtype=torch.bool)),
        torch.tensor([[True, False, False, True], [False] * 4]),
    )
    assert visible_pairs(mask, wanted) == int(mask.visible()[wanted].sum()) == 1 + 4


def test_padding_is_not_counted():
    mask = Mask.causal(torch.tensor([[True, True, False], [True, True, True]]))
    assert visible_pairs(mask) == 3 + 6


def test_products_are_those_that_torch_counts(monkeypatch):
    """Attention and the output layer aside: both run in kernels that torch does not count, as other products may."""
    monkeypatch.setattr(matrix_product, "suits", lambda *_: False)
    for family in (presets.bert_base(), presets.gpt2()):
        shape = {**SMALL, "width": 32, "dropout": 0.0, "attention_dropout": 0.0}  # a head width that the kernels take
        made = Model.fresh(replace(family, **shape), ("lm",))
        batch = pack(Copying().examples[:6])
        loss_of(made, batch).backward()  # kernels are compared with torch when they are first used
        with FlopCounterMode(display=False) as counter:
            loss_of(made, batch).backward()
        counted = counter.get_flop_counts()["Global"]
        products = sum(count for name, count in counted.items() if "mm" in str(name) and "bmm" not in str(name))
        pairs = (made.config.layers - 1) * visible_pairs(batch.mask) + visible_pairs(batch.mask, batch.labels >= 0)
        attention = 3 * 4 * made.config.width * pairs
        output = 3 * batch.targets * 2 * made.config.width * made.config.vocab_size
        assert operations(made.config, batch) - attention - output == products


def test_a_second_row_and_what_is_asked_are_counted():
    config, batch = model().config, pack(Copying().examples[:6])
    alone = operations(config, batch)
    assert operations(config, replace(batch, also=batch)) == 2 * alone
    where = torch.zeros_like(batch.ids, dtype=torch.bool)
    where[0, :3] = True
    asked = Asked(where, torch.zeros(3, dtype=torch.long))
    more = visible_pairs(batch.mask, where | (batch.labels >= 0)) - visible_pairs(batch.mask, batch.labels >= 0)
    each = 4 * config.width * config.ffn_width + 4 * config.width**2
    assert operations(config, replace(batch, asked=asked)) == alone + 3 * (3 * each + 4 * config.width * more)


def test_a_run_tells_its_share(tmp_path):
    train(model(), Copying(), Settings(steps=3, batch_tokens=60, precision="fp32"), tmp_path / "run", quiet=True)
    assert all(0.0 < line["mfu"] < 1.0 for line in read_metrics(tmp_path / "run") if "mfu" in line)
    assert measured_peak(torch.float32) > 1e9


@pytest.mark.parametrize(("speed", "sides"), [(1e12, {128, 256, 1024}), (1e9, {128})])
def test_the_peak_is_measured_in_a_short_time(monkeypatch, speed: float, sides: set[int]):
    """Once a run in emulated bf16 began with 40 s of large products."""
    clock, seen = [0.0], set()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        seen.add(len(a))
        clock[0] += 2 * len(a) ** 3 / speed

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(flops.time, "perf_counter", lambda: clock[0])
    assert measured_peak.__wrapped__(torch.float32) == pytest.approx(speed)
    assert seen == sides and clock[0] < 1


def test_the_peak_on_a_busy_machine(monkeypatch):
    """Other programs run after each 3 ms: a large product takes twice as long, and short steps would reach 100 %."""
    clock, speed = [0.0], 1e11

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        takes = 2 * len(a) ** 3 / speed
        clock[0] += takes * (2 if takes > 0.003 else 1)

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(flops.time, "perf_counter", lambda: clock[0])
    assert measured_peak.__wrapped__(torch.float32) == pytest.approx(speed)
