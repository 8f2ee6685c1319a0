"""An objective of another package: registered or found by its entry point, mixed with others, and pretrained."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from allmask import registry
from allmask.cli.main import main
from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.errors import UsageError
from allmask.model import load
from allmask.objectives import Draw, Mixture, Samples, Vocabulary
from allmask.objectives.objective import next_in_row, read
from allmask.registry import OBJECTIVES
from allmask.text import train_tokenizer
from tests import tiny
from tests.objectives.texts import draw, small_texts


@dataclass(frozen=True, eq=False)
class Tail:
    """The second half of a text is written from left to right, the first half is read both ways."""

    vocabulary: Vocabulary
    name: ClassVar[str] = "tail"
    frame: ClassVar[int] = 2
    heads: ClassVar[tuple[str, ...]] = ("lm",)
    pairs: ClassVar[bool] = False

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = self.vocabulary.framed(read(samples, draw))
        order = np.maximum(0, text.position - text.lengths[text.row] // 2)
        labels = np.where(np.append(order[1:], 0) > 0, next_in_row(text), NO_LABEL)
        return pack_flat(text.lengths, text.values, order, np.zeros_like(order), labels, self.name)


@pytest.fixture
def tail():
    OBJECTIVES.register("tail", Tail)
    yield
    del OBJECTIVES.registered["tail"]


def test_a_registered_objective_is_part_of_a_mixture(tail, vocabulary: Vocabulary):
    mixture = Mixture.parse("tail:3,nsp:1")
    assert mixture.shares == {"tail": 0.75, "nsp": 0.25} and mixture.heads == {"lm", "nsp"} and mixture.frame == 3
    batch = Mixture.parse("tail").build(vocabulary).batch(small_texts(), draw([2]))
    order, labels = batch.mask.order[0].tolist(), batch.labels[0].tolist()
    assert order == [0] * (len(order) // 2 + 1) + list(range(1, len(order) - len(order) // 2))
    assert [label >= 0 for label in labels] == [later > 0 for later in (*order[1:], 0)]
    with pytest.raises(UsageError, match="cannot be trained in one model"):
        Mixture.parse("tail,span")
    with pytest.raises(UsageError, match="did you mean tail"):
        Mixture.parse("tial")


def test_a_registered_objective_is_pretrained(tail, tmp_path: Path, capsys):
    rng = random.Random(0)
    lines = [" ".join(rng.choices(tiny.WORDS, k=8)) for _ in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines), encoding="utf-8")
    train_tokenizer(lines, "wordpiece", 120).save(tmp_path / "tok")
    words = (
        f"pretrain --objective tail:0.5,mlm:0.5 --data {tmp_path / 'text.txt'} --tokenizer {tmp_path / 'tok'}"
        " --preset bert-tiny --layers 1 --width 16 --heads 2 --ffn-width 32 --max-positions 32 --length 16 --steps 4"
        f" --batch-tokens 128 --precision fp32 --eval-every 4 --quiet --out {tmp_path / 'run'}"
    )
    assert main(words.split()) == 0, capsys.readouterr().err
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["objective"] == "tail:0.5,mlm:0.5" and "loss_tail" in told["metrics"]
    assert load(tmp_path / "run" / "final").heads == {"lm"}


def test_an_installed_package_adds_one_by_an_entry_point(tmp_path: Path, monkeypatch, vocabulary: Vocabulary):
    (tmp_path / "my_objectives.py").write_text(
        "from allmask.objectives import Causal\n\n\nclass Again(Causal):\n    name = 'again'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("again", "my_objectives:Again", "allmask.objectives")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "allmask.objectives" else [])
    OBJECTIVES.__dict__.pop("installed", None)  # is looked up once
    try:
        assert list(OBJECTIVES)[-1] == "again" and "my_objectives" not in sys.modules
        assert Mixture.parse("again").build(vocabulary).batch(small_texts(), draw([2])).name == "again"
    finally:
        OBJECTIVES.registered.pop("again", None)
        del OBJECTIVES.installed
        sys.modules.pop("my_objectives", None)


def test_a_class_that_is_no_objective_is_refused():
    OBJECTIVES.register("half", type("Half", (), {"frame": 2, "heads": ("lm",)}))
    try:
        with pytest.raises(UsageError, match="objective half: its class has no pairs, batch"):
            Mixture.parse("half")
    finally:
        del OBJECTIVES.registered["half"]
