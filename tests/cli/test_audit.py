"""`allmask audit`: what is printed, and the exit code that guards a pipeline."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from allmask import presets
from allmask.cli.main import main
from allmask.mask import audit as auditing
from allmask.model import Model

SMALL = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 16}


@pytest.fixture
def folder(tmp_path):
    Model.fresh(replace(presets.bert_base(), **SMALL), rng=torch.Generator().manual_seed(0)).save(tmp_path / "m")
    return str(tmp_path / "m")


def test_a_kept_promise(folder, capsys):
    assert main(["audit", folder, "--mask", "causal", "--tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "0 ■ · · ·" in out and "3 ■ ■ ■ ■" in out and "exactly what the mask lets it see" in out


def test_json(folder, capsys):
    assert main(["audit", folder, "--mask", "packed", "--tokens", "4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["holds"] and data["leaks"] == []
    assert data["depends"] == data["promised"] == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_a_broken_promise_is_named_and_exits_7(folder, capsys, monkeypatch):
    monkeypatch.setattr(auditing, "influence", lambda visible, layers: torch.eye(len(visible), dtype=torch.bool))
    assert main(["audit", folder, "--mask", "causal", "--tokens", "3"]) == 7
    assert "leak: output 1 depends on input 0" in capsys.readouterr().out


def test_too_many_tokens_and_a_missing_model(folder, tmp_path, capsys):
    assert main(["audit", folder, "--tokens", "17"]) == 2
    assert main(["audit", str(tmp_path / "nowhere")]) == 4
    assert "error[model]" in capsys.readouterr().err


def test_the_comparison_is_a_table_or_json_with_a_row_for_each_way(folder, capsys):
    assert main(["audit", folder, "--compare", "--tokens", "5"]) == 0
    captured = capsys.readouterr()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in captured.out.splitlines()]
    assert "about a minute" in captured.err and all(len(row) == 6 for row in table)
    ours, theirs = ([row for row in table[2:] if (row[0] == "allmask") is same] for same in (True, False))
    assert ours and all(row[3:] == ["0", "0", "holds"] for row in ours)
    assert any(row[5] == "leaks" for row in theirs) and any(row[5].startswith("refused: ") for row in theirs)
    assert main(["audit", folder, "--compare", "--tokens", "5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [[row["library"], row["mask"], row["way"]] for row in rows] == [row[:3] for row in table[2:]]
