"""Masks by name: those of this package, and one of another, registered or found by its entry point."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor

from allmask import presets, registry
from allmask.cli.main import main
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject, probe_mask
from allmask.mask.kinds import build, parameters
from allmask.model import Model
from allmask.registry import MASKS


def blocks(valid: Tensor, window: int | None = None) -> Mask:
    """Blocks of two tokens: each is read both ways, and sees the blocks before it."""
    block = torch.arange(valid.shape[1], device=valid.device) // 2
    return Mask.permutation(block.expand_as(valid), valid, window)


@pytest.fixture
def registered():
    MASKS.register("blocks", blocks)
    yield
    del MASKS.registered["blocks"]


BERT = replace(presets.bert_tiny(), vocab_size=40, width=16, heads=2, ffn_width=32, max_positions=16)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    Model.fresh(BERT, rng=torch.Generator().manual_seed(0)).save(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_a_mask_of_ones_own_is_drawn_proven_and_audited(registered, folder: str, capsys):
    assert main(["mask", "blocks", "--text", "北京欢迎", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["drawing"]["visible"] == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert told["proof"]["is_order"] and told["proof"]["cache"]["blocks"] == [[0, 1], [2, 3]]
    assert main(["audit", folder, "--mask", "blocks", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]
    assert main(["mask", "packed", "--text", "a b c", "--text", "d", "--each", "blocks"]) == 0
    assert main(["mask", "blocks", "--text", "a b c", "--window", "2", "--predict"]) == 0
    capsys.readouterr()
    assert main(["mask", "blocks", "--text", "a", "--order", "a"]) == 2
    assert "--order is not an option of the mask blocks" in capsys.readouterr().err


def test_an_installed_package_adds_one_by_an_entry_point(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "my_masks.py").write_text(
        "from allmask.mask import Mask\n\n\n"
        "def skip(is_target, valid):\n"
        "    return Mask.permutation(is_target.long() * 7, valid)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("skip", "my_masks:skip", "allmask.masks")

    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "allmask.masks" else [])
    MASKS.__dict__.pop("installed", None)  # is looked up once
    assert "skip" in MASKS and "my_masks" not in sys.modules
    try:
        assert main(["mask", "skip", "--source", "a", "--target", "b c", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["proof"]["order"] == [0, 0, 0, 7, 7, 7]
        assert main(["mask", "skipp", "--text", "a"]) == 2
        assert "did you mean skip?" in capsys.readouterr().err
    finally:
        MASKS.registered.pop("skip", None)
        del MASKS.installed
        sys.modules.pop("my_masks", None)


def test_a_kind_may_ask_for_turns_ranks_and_documents():
    for name in MASKS:
        if "visible" in parameters(name):
            continue
        result = audit(our_subject(Model.fresh(BERT)), probe_mask(name, 10, torch.Generator().manual_seed(0)))
        assert result.holds, name
    assert probe_mask("turns", 10) == Mask.turns(torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 0, 0]]).bool())


def test_missing_inputs_are_named():
    assert parameters("packed") == {"document": True, "valid": True, "each": False, "window": False}
    with pytest.raises(UsageError, match="a permutation mask is made from rank"):
        build("permutation", {"valid": torch.ones(1, 3, dtype=torch.bool)})
    with pytest.raises(UsageError, match=r"there is no mask 'casual'.*\n.*did you mean causal"):
        build("casual", {})


def test_a_kind_that_makes_no_mask_is_refused(folder: str, capsys):
    for name, made, says in (
        ("wrong", lambda valid: valid, "expected a Mask"),
        ("wide", lambda valid: Mask.causal(torch.ones(2, 3, dtype=torch.bool)), r"is (2, 3); expected (1, 4)"),
        ("strange", lambda phase: phase, "a strange mask is made from phase"),
    ):
        MASKS.register(name, made)
        try:
            assert main(["audit", folder, "--mask", name, "--tokens", "4"]) == 2
            assert says in capsys.readouterr().err
        finally:
            del MASKS.registered[name]


def test_the_names_of_this_package_stay_its_own():
    with pytest.raises(UsageError, match="allmask has one of this name"):
        MASKS.register("causal", blocks)


def test_a_mask_from_a_file_is_not_audited(folder: str, capsys):
    assert main(["audit", folder, "--mask", "matrix"]) == 2
    assert "an audit makes its masks itself" in capsys.readouterr().err
