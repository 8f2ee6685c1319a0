"""A new task head on hidden states that are much smaller than usual."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from allmask import Mask
from allmask.data import Record
from allmask.model import Model, load
from allmask.tasks.classify import Classify
from allmask.tasks.common.heads import USUAL_SPREAD, enlarge_states
from allmask.tasks.common.writing import tokenizer_of
from tests import tiny

TEXTS = ["北京 欢迎 你", "the mask decides", "every role"]
RECORDS = [Record({"text": text, "text_b": None, "label": label}, "") for text, label in zip(TEXTS, "abb", strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("tiny") / "bert")


def shrunk(folder: Path, share: float) -> Model:
    """A model whose hidden states have this share of the usual standard deviation over tokens."""
    model = load(folder).with_language_model(torch.Generator().manual_seed(1)).eval()
    norm = model.body.layers[-1].feed_forward_norm
    hidden = torch.cat([states(model, text) for text in TEXTS])
    spread = (hidden - hidden.mean(0)).square().mean().sqrt()
    with torch.no_grad():
        for weight in norm.parameters():
            weight.mul_(share * USUAL_SPREAD / spread)
    return model


def states(model: Model, text: str) -> torch.Tensor:
    ids = torch.tensor([tokenizer_of(model).encode(text).ids])
    return model(ids, Mask.bidirectional(ids >= 0)).hidden[0].detach()


@pytest.mark.parametrize(("share", "factor"), [(0.25, 4), (0.3, 4), (0.6, 2), (0.8, 1), (1, 1), (3, 1)])
def test_small_states_are_enlarged_by_a_power_of_two(folder: Path, share: float, factor: float):
    model = shrunk(folder, share)
    ids = torch.tensor([tokenizer_of(model).encode(TEXTS[1]).ids])
    mask = Mask.bidirectional(ids >= 0)
    before, logits = states(model, TEXTS[1]), model(ids, mask).logits
    assert enlarge_states(model, TEXTS) == factor
    assert torch.equal(states(model, TEXTS[1]), before * factor)
    assert torch.equal(model(ids, mask).logits, logits)  # of a language model head that is kept
    assert enlarge_states(model, TEXTS) == 1


def test_a_new_head_reads_enlarged_states_and_the_log_says_so(folder: Path, caplog: pytest.LogCaptureFixture):
    small = shrunk(folder, 0.25)
    with caplog.at_level(logging.INFO, "allmask"):
        made = Classify().prepare(small, RECORDS, seed=3)
    assert "times 4" in caplog.text
    assert torch.equal(states(made, TEXTS[0]), states(small, TEXTS[0]) * 4)
    caplog.clear()
    with caplog.at_level(logging.INFO, "allmask"):
        again = Classify().prepare(made, RECORDS)  # the head is there already
        usual = Classify().prepare(shrunk(folder, 1), RECORDS)
    assert "times" not in caplog.text
    assert torch.equal(states(again, TEXTS[0]), states(made, TEXTS[0]))
    assert usual.labels is not None


@pytest.mark.parametrize("kind", ["gpt2", "shared layers", "ntk"])
def test_models_without_a_last_norm_of_their_own_stay_as_they_are(folder: Path, tmp_path: Path, kind: str):
    model = load(tiny.gpt2(tmp_path / "gpt2")) if kind == "gpt2" else shrunk(folder, 0.25)
    if kind == "shared layers":
        model.config = replace(model.config, shared_layers=True)
    elif kind == "ntk":
        model.config = replace(model.config, parametrization="ntk")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert enlarge_states(model, TEXTS) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
