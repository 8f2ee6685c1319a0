"""What a pretrained start saves: the four systems differ in their start alone, and their minutes are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import starts

from allmask.model import load
from tests import tiny


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("tiny") / "bert", ["lm"])


def test_the_systems_are_of_one_size_and_know_different_things(bert: Path):
    model = load(bert)
    made = {name: starts.Start.of(name, model, 1).model for name in starts.SYSTEMS}
    assert made["pretrained"] is model and made["scratch"].config == model.config
    assert not made["scratch"].body.embedding.tokens.weight.equal(model.body.embedding.tokens.weight)
    assert made["pair"].config.decoder_layers and made["lstm"].config.family == "lstm"
    for other in made.values():
        assert other.config.width == model.config.width and other.config.vocab_size == model.config.vocab_size
        assert other.tokenizer is model.tokenizer


def test_all_of_it(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    for part, count in (("train", 30), ("dev", 4)):
        tiny.write_jsonl(tmp_path / f"{part}.jsonl", tiny.english(count))
    words = [str(tmp_path), "--model", str(bert), "--out", str(tmp_path / "out"), "--minutes", "0.001"]
    words += ["--batch-tokens", "64", "--eval-every", "2", "--warmup", "2", "--precision", "fp32"]
    words += ["--max-source", "9", "--max-target", "8"]
    starts.main(words)
    found = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert found.count("\n") == 6 and all(words in found for words in starts.SYSTEMS.values())
    assert (tmp_path / "out" / "starts.png").stat().st_size > 1000
    starts.main(words)  # nothing is left to do
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8") == found


def test_when_a_level_was_reached():
    found = starts.Outcome("pair", 1_000_000, [(50, 1.0, 3.0), (100, 2.0, 12.0), (150, 3.0, 11.0)], ["a | b"])
    assert found.reached(10.0) == (100, 2.0) and found.reached(13.0) is None
    *_, reached = starts.table([found], 10.0).splitlines()
    assert reached == "| encoder–decoder from scratch | 1.0M | 100 | 2.0 | 150 | 11.0 | a / b |"
    assert "not reached" in starts.table([found], 13.0)
