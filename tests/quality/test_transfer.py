"""The comparison of the shipped weights with what they were trained from: `quality/transfer.py`."""

from __future__ import annotations

import json

import transfer

CURVES = {
    "from minilm, unquoted": [1.0, 2.0, 20.7],
    "from minilm": [3.0, 4.0, 26.4],
    "from allmask-en": [27.0, 30.0, 31.4],
}


def test_differences_name_every_other_start_and_the_first_sentence():
    lines = transfer.differences(CURVES, 22.7)
    assert len(lines) == len(transfer.PAIRS)
    assert lines[-1] == (
        "3,000 pairs, from allmask-en: +10.7 against minilm, unquoted, +5.0 against minilm, "
        "+8.7 against the first sentence"
    )


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    row = {"name": "sst2", "start": "minilm", "seed": 2, "seconds": 1, "scores": {"scores": {"accuracy": 0.5}}}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    monkeypatch.setattr(transfer, "allmask", lambda *words: 1 / 0)
    results = transfer.Results(tmp_path)
    run = transfer.Run("sst2", "folder/minilm", "classify", tmp_path, "train.jsonl", 2)
    assert transfer.found_score(results.run(run)["scores"], "accuracy") == 0.5


def test_runs_differ_in_name_start_and_seed(tmp_path, monkeypatch):
    ran = []

    def allmask(*words):
        ran.append(words)
        return json.dumps({"scores": {"model": {"rouge_l": 30.0}}})

    monkeypatch.setattr(transfer, "allmask", allmask)
    results = transfer.Results(tmp_path)
    for name, options in (("docstrings-200, unquoted", ("--quote", 0)), ("docstrings-200", ())):
        results.run(transfer.Run(name, "minilm", "title", tmp_path, "train-200.jsonl", 1, options))
    assert [("--quote" in words) for words in ran if words[0] == "finetune"] == [True, False]
    assert len(transfer.Results(tmp_path).rows) == 2
