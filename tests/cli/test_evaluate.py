"""`allmask evaluate`: the scores are those of the titles that are written, beside the lead sentence's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from tests import tiny


def test_the_scores_are_those_of_the_titles(cli, titles: Path, data: Path):
    rows = tiny.read_jsonl(data / "dev.jsonl")
    result = json.loads(cli("evaluate", titles, data / "dev.jsonl", "--beams", 2, "--json").out)
    lines = cli("predict", titles, data / "dev.jsonl", "-o", "-", "--beams", 2).out.splitlines()
    written = [json.loads(line)["prediction"] for line in lines]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for name, texts in (("model", written), ("lead sentence", [row["source"] for row in rows])):
        pairs = zip(texts, rows, strict=True)
        mean = sum(scorer.score(row["target"], text)["rougeL"].fmeasure for text, row in pairs) / len(rows)
        assert result["scores"][name]["rouge_l"] == pytest.approx(100 * mean)
        assert result["scores"][name]["length"] == pytest.approx(sum(len(text.split()) for text in texts) / len(rows))
    assert result["records"] == 8 and result["scores"]["model"]["reference_length"] == 2.0


def test_the_table(cli, titles: Path, data: Path):
    ran = cli("evaluate", titles, data / "dev.jsonl", "--limit", 3, "--show", 1)
    assert ran.code == 0, ran.err
    head, _, model, lead, reference, *rest = ran.out.splitlines()
    assert head == "| 3 records | ROUGE-1 | ROUGE-2 | ROUGE-L | BLEU | exact | length |"
    assert model.startswith("| model |") and lead.startswith("| lead sentence |") and reference.endswith("| 2.0 |")
    assert [line for line in rest if line.endswith(":")] == ["best:", "worst:"]


def test_the_best_and_the_worst(cli, titles: Path, data: Path):
    examples = json.loads(cli("evaluate", titles, data / "dev.jsonl", "--show", 3, "--json").out)["examples"]
    best, worst = ([row["rouge_l"] for row in examples[name]] for name in ("best", "worst"))
    assert len(best) == len(worst) == 3
    assert best == sorted(best, reverse=True) and worst == sorted(worst) and best[-1] >= worst[-1]


def test_the_file_of_training_is_warned_of(cli, titles: Path, data: Path, tmp_path: Path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((data / "train.jsonl").read_bytes())
    warning = f"{copy}: the model was trained on these records"
    assert warning in cli("evaluate", titles, copy, "--limit", 2).err
    assert warning in cli("evaluate", titles / "final", copy, "--limit", 2).err
    assert "trained on" not in cli("evaluate", titles, data / "dev.jsonl", "--limit", 2).err


def test_chinese_counts_characters(cli, titles: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "zh.jsonl", [{"source": "北京欢迎你。白切鸡", "target": "北京欢迎"}])
    lead = json.loads(cli("evaluate", titles, file, "--json").out)["scores"]["lead sentence"]
    assert lead["rouge_1"] == pytest.approx(100 * 2 * (4 / 5) / (4 / 5 + 1)) and lead["length"] == 5


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{gpt2}", "{dev}"], 2, "only titles and labels can be scored"),
        (["{bert}", "{dev}"], 4, "allmask finetune"),
        (["{run}", "nosuch.jsonl"], 3, "nosuch.jsonl: no such file"),
        (["{run}", "{bad}"], 3, 'bad.jsonl:1: "target" is blank'),
    ],
)
def test_refusals(cli, titles, bert, gpt2, data: Path, tmp_path: Path, words: list[str], code: int, says: str):
    bad = tiny.write_jsonl(tmp_path / "bad.jsonl", [{"source": "a", "target": " "}, {"source": "a", "target": "b"}])
    names = {"run": titles, "bert": bert, "gpt2": gpt2, "dev": data / "dev.jsonl", "bad": bad}
    ran = cli("evaluate", *[word.format(**names) for word in words])
    assert ran.code == code and says in ran.err and ran.out == ""


def test_bad_records_can_be_skipped(cli, titles: Path, tmp_path: Path):
    bad = tiny.write_jsonl(tmp_path / "bad.jsonl", [{"source": "a", "target": " "}, {"source": "a", "target": "b"}])
    ran = cli("evaluate", titles, bad, "--on-bad-record", "skip", "--json")
    assert json.loads(ran.out)["records"] == 1 and 'skipped records: 1 × blank "target"' in ran.err
