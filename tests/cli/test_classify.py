"""Classifiers on the command line: learnt, resumed, asked and scored; what bad input is told."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import allmask
from allmask.errors import CheckpointError
from allmask.model import load
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.task import load_task
from allmask.training.progress import Progress
from tests import tiny

QUICK = ("--steps", 6, "--lr", 0.01, "--precision", "fp32")


def labelled(count: int, seed: int = 0) -> list[dict]:
    """Half English, half Chinese: which it is, is the label."""
    rows = [({"text": row["source"]}, "english") for row in tiny.english(count // 2, seed)]
    rows += [({"text": row["source"]}, "中文") for row in tiny.chinese(count // 2, seed)]
    return [{**row, "label": label, "id": number} for number, (row, label) in enumerate(rows)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labelled")
    tiny.write_jsonl(folder / "train.jsonl", labelled(64))
    tiny.write_jsonl(folder / "dev.jsonl", labelled(16, seed=1))
    return folder


@pytest.fixture(scope="module")
def run(bert: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that tells English from Chinese."""
    from allmask.runs.driver import start
    from allmask.runs.finetuning import FineTuning
    from allmask.runs.plan import Plan
    from allmask.training import Settings

    job = FineTuning(str(files / "train.jsonl"), str(bert), str(files / "dev.jsonl"), task=Classify())
    settings = Settings(steps=60, lr=1e-2, batch_tokens=256, eval_every=30, precision="fp32")
    out = tmp_path_factory.mktemp("runs") / "languages"
    start(Plan(job, settings), out, quiet=True)
    return out


def finetune_words(model: Path, files: Path, out: Path) -> tuple:
    return (
        "finetune", model, "--task", "classify", "--data", files / "train.jsonl", "--eval", files / "dev.jsonl",
        "--out", out,
    )  # fmt: skip


# ---- learning ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_all_it_promises(cli, bert: Path, files: Path, tmp_path: Path):
    out = tmp_path / "run"
    ran = cli(*finetune_words(bert, files, out), *QUICK, "--eval-every", 3)
    assert ran.code == 0, ran.err
    assert {path.name for path in out.iterdir()} == {
        "config.yaml", "checkpoints", "metrics.jsonl", "loss.png", "confusion.png", "result.json", "final",
    }  # fmt: skip
    assert ran.out.endswith(f"classify with it: allmask predict {out}/final {files / 'dev.jsonl'}\n")
    printed = ran.out.splitlines()[-1].partition("allmask ")[2].split()
    assert cli(*printed).code == 0  # it runs as it is printed
    for words in (
        "labels: english 32, 中文 32",
        "no pooler; a new one is made",
        "step 3: loss",
        "accuracy",
        "loss classify",
    ):
        assert words in ran.err, words
    config = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    lengths = [len(example) for example in Classify().rows(load(bert), texts_of(64)).examples]
    assert config["lr"] == 0.01 and config["batch_tokens"] == pytest.approx(32 * sum(lengths) / 64, abs=1)
    assert config["pair"] is False and config["kind"] == "single" and config["prune"] is False
    assert load_task(out / "final") == Classify(max_length=48, pair=False, kind="single")
    metrics = json.loads((out / "result.json").read_text())["metrics"]
    assert set(metrics) == {"loss", "accuracy", "macro_f1", "matthews"}


def texts_of(count: int) -> list[str]:
    return [row["text"] for row in labelled(count)]


def test_it_learns_and_transformers_agrees(run: Path):
    assert json.loads((run / "result.json").read_text())["metrics"]["accuracy"] == 1.0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    assert theirs.config.id2label == {0: "english", 1: "中文"}
    texts = texts_of(16)
    with torch.no_grad():
        shares = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(-1)
    found = allmask.pipeline("classify", run, precision="fp32")(texts)
    mine = torch.tensor([list(one.probabilities.values()) for one in found])
    torch.testing.assert_close(mine, shares, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight", [0, 0.5])
def test_stopped_and_resumed_is_never_stopped(cli, bert: Path, files: Path, tmp_path: Path, monkeypatch, weight: float):
    words = (*QUICK, "--save-every", 2, "--lm-weight", weight)
    assert cli(*finetune_words(bert, files, tmp_path / "whole"), *words).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(
            Progress, "update", lambda bar, done, text="": os.kill(os.getpid(), signal.SIGTERM) if done == 3 else None
        )
        assert cli(*finetune_words(bert, files, tmp_path / "parts"), *words).code == 143
    ran = cli(*finetune_words(bert, files, tmp_path / "parts"), *words, "--resume")
    assert ran.code == 0, ran.err
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    losses = [line for line in tiny.read_jsonl(tmp_path / "whole" / "metrics.jsonl") if "loss" in line]
    assert all(("loss_mlm" in line) == bool(weight) and "loss_classify" in line for line in losses)
    assert ("lm" in load(tmp_path / "whole" / "final").heads) == bool(weight)


def test_gpt2_learns_too_and_keeps_its_language(cli, gpt2: Path, files: Path, tmp_path: Path):
    ran = cli(*finetune_words(gpt2, files, tmp_path / "run"), *QUICK, "--steps", 40, "--lm-weight", 0.5)
    assert ran.code == 0, ran.err
    losses = [line["loss_causal"] for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final").num_labels == 2
    found = allmask.pipeline("classify", tmp_path / "run")(texts_of(8))
    assert [one.label for one in found] == [row["label"] for row in labelled(8)]
    with pytest.raises(CheckpointError, match='fine-tuned for "classify", not to write'):
        allmask.pipeline("generate", tmp_path / "run")


def test_titles_have_the_loss_beside_them_too(cli, bert: Path, data: Path, tmp_path: Path):
    words = ("finetune", bert, "--data", data / "train.jsonl", "--steps", 3, "--max-target", 8, "--lm-weight", 0.5)
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    lines = [line for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert all(line["loss"] == pytest.approx(line["loss_lm"] + line["loss_mlm"]) for line in lines)


def test_text_that_is_not_to_be_forgotten(cli, bert: Path, files: Path, tmp_path: Path):
    text = tmp_path / "general.txt"
    text.write_text("a bird sings here\n\n北京欢迎你\n", encoding="utf-8")
    words = (*finetune_words(bert, files, tmp_path / "run"), *QUICK, "--lm-weight", 0.5, "--lm-text", text)
    assert (ran := cli(*words)).code == 0, ran.err
    lines = [line for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert all(line["loss"] == pytest.approx(line["loss_classify"] + line["loss_mlm"]) for line in lines)
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert f"lm_text: {text}" in saved and saved.count("lm_text:") == 2  # the option, and a checksum


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--lm-text", "{train}"], 2, "--lm-text needs a --lm-weight"),
        (["--lm-weight", "0.5", "--lm-text", "{train}", "--prune"], 2, "--prune would remove tokens"),
        (["--lm-weight", "0.5", "--lm-text", "nowhere.txt"], 3, "nowhere.txt: no such file"),
    ],
)
def test_misuse_of_general_text(cli, bert: Path, files: Path, tmp_path: Path, words: list[str], code: int, says: str):
    given = [word.format(train=files / "train.jsonl") for word in words]
    ran = cli(*finetune_words(bert, files, tmp_path / "run"), *QUICK, *given)
    assert ran.code == code and says in ran.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["multi", "number", "pair"])
def test_other_questions(cli, bert: Path, tmp_path: Path, kind: str):
    change = {
        "multi": lambda row: {"label": [row["label"]] if row["id"] % 3 else []},
        "number": lambda row: {"label": len(row["text"]) / 4},
        "pair": lambda row: {"pair": row["text"][:3]},
    }[kind]
    rows = [{**row, **change(row)} for row in labelled(48)]
    for name, some in (("train.jsonl", rows), ("dev.jsonl", rows[::-1])):
        tiny.write_jsonl(tmp_path / name, some)
    ran = cli(*finetune_words(bert, tmp_path, tmp_path / "run"), *QUICK, "--json")
    assert ran.code == 0, ran.err
    main = {"multi": "macro_f1", "number": "pearson", "pair": "accuracy"}[kind]
    assert main in json.loads(ran.out)["metrics"]
    assert (tmp_path / "run" / "confusion.png").exists() == (kind == "pair")
    told = json.loads(cli("evaluate", tmp_path / "run", tmp_path / "dev.jsonl", "--show", 2, "--json").out)
    assert main in told["scores"] and len(told["errors"]) <= 2
    lines = cli("predict", tmp_path / "run", tmp_path / "dev.jsonl", "-o", "-").out.splitlines()
    kinds = {"multi": list, "number": float, "pair": str}
    assert len(lines) == 48 and all(isinstance(json.loads(line)["prediction"], kinds[kind]) for line in lines)
    assert cli("evaluate", tmp_path / "run", tmp_path / "dev.jsonl", "--show", 2).code == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--max-source", 9], 2, "--max-source is for --task title or translate, not for classify"),
        (["--kind", "multi"], 3, 'no "label" is a list of names'),
        (["--max-length", 2], 2, "--max-length is 2"),
        (["--lm-weight", "-1"], 2, "--lm-weight is -1"),
        (
            ["--eval", "{odd}"],
            3,
            'odd.jsonl:1: "label" is "englsh"; expected one of english, 中文\n  did you mean "english"?',
        ),
        (["--data", "{one}"], 3, 'one.jsonl: all labels are "english"'),
        (["--data", "{empty}"], 3, "empty.jsonl: the file is empty"),
    ],
)
def test_refusals_before_anything_is_written(cli, bert, files: Path, tmp_path: Path, words: list, code: int, says: str):
    odd = tiny.write_jsonl(tmp_path / "odd.jsonl", [{"text": "a", "label": "englsh"}])
    one = tiny.write_jsonl(tmp_path / "one.jsonl", labelled(8)[:4])
    (tmp_path / "empty.jsonl").write_text("")
    names = {"odd": odd, "one": one, "empty": tmp_path / "empty.jsonl"}
    given = [str(word).format(**names) for word in words]
    ran = cli(*finetune_words(bert, files, tmp_path / "run"), *given)
    assert ran.code == code and says in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_options_of_classify_are_not_for_titles(cli, bert: Path, data: Path, tmp_path: Path):
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "run", "--kind", "single")
    assert ran.code == 2 and "--kind is for --task classify, not for title" in ran.err


def test_a_resumed_run_keeps_its_settings(cli, run: Path):
    ran = cli("finetune", "--resume", "--out", run, "--max-length", 512)  # it was fitted to the model
    assert ran.code == 0 and "this run is finished" in ran.err
    ran = cli("finetune", "--resume", "--out", run, "--max-target", 8)
    assert ran.code == 2 and "--max-target is for --task title or translate, not for classify" in ran.err


def test_bad_records_are_skipped(cli, bert: Path, files: Path, tmp_path: Path):
    dev = tiny.write_jsonl(tmp_path / "dev.jsonl", [{"text": "a", "label": "englsh"}, *labelled(4)])
    words = (*finetune_words(bert, files, tmp_path / "run"), *QUICK, "--eval", dev, "--on-bad-record", "skip")
    ran = cli(*words, "--json")
    assert ran.code == 0 and json.loads(ran.out)["skipped"] == {"unknown label": 1}


# ---- asking ------------------------------------------------------------------------------------------------------


def test_every_record_in_its_order_in_any_format(cli, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Classifier, "window", 7)
    rows = labelled(40, seed=2)
    tiny.write_jsonl(tmp_path / "in.jsonl", rows)
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "label", "id"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "in.txt").write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    found = {}
    for kind in ("jsonl", "csv", "txt"):
        out = tmp_path / f"out-{kind}.jsonl"
        ran = cli("predict", run, tmp_path / f"in.{kind}", "-o", out, "--precision", "fp32")
        assert ran.code == 0 and ran.out == "", ran.err
        found[kind] = tiny.read_jsonl(out)
    assert [row["id"] for row in found["jsonl"]] == list(range(40))
    assert set(found["jsonl"][0]) == {"id", "label", "text", "prediction", "probability", "probabilities"}
    classify = allmask.pipeline("classify", run, precision="fp32")
    for number, row in enumerate(rows):
        alone = classify(row["text"])
        for told in (one[number] for one in found.values()):
            assert told["text"] == row["text"] and told["prediction"] == alone.label
            assert told["probability"] == pytest.approx(alone.probability, abs=1e-5)


def test_lines_of_stdin(cli, run: Path, monkeypatch):
    read, write = os.pipe()
    os.write(write, "red cat runs\n\n北京欢迎你\n".encode())
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        ran = cli("predict", run, "-", "-o", "-")
    first, blank, second = ran.out.split("\n")[:3]
    assert json.loads(first)["prediction"] == "english" and blank == "" and json.loads(second)["prediction"] == "中文"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{run}", "{dev}", "-o", "-", "--beams", 4], 2, "--beams: this model classifies"),
        (["{run}", "{bad}", "-o", "-"], 3, 'bad.jsonl:1: no "text"; found "txt"'),
        (
            ["{run}", "{dev}", "-o", "-", "--precision", "int4"],
            2,
            "'int4' is not one of 'auto', 'fp32', 'bf16', 'int8'",
        ),
        (["{titles}", "-", "-o", "-"], 2, "allmask generate"),
    ],
)
def test_refusals_of_predict(cli, run, titles, files: Path, tmp_path: Path, words: list, code: int, says: str):
    bad = tiny.write_jsonl(tmp_path / "bad.jsonl", [{"txt": "a"}])
    names = {"run": run, "titles": titles, "dev": files / "dev.jsonl", "bad": bad}
    ran = cli("predict", *[str(word).format(**names) for word in words])
    assert ran.code == code and says in ran.err and ran.out == "", ran.err


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_less_precision_gives_the_same_labels(cli, run: Path, files: Path, precision: str):
    exact, other = (
        [
            json.loads(line)["prediction"]
            for line in cli("predict", run, files / "dev.jsonl", "-o", "-", *more).out.splitlines()
        ]
        for more in (("--precision", "fp32"), ("--precision", precision))
    )
    assert exact == other and len(set(exact)) == 2


def test_long_texts_are_counted(cli, run: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": "red cat " * 100}, {"text": "red"}])
    ran = cli("predict", run, file, "-o", "-")
    assert ran.code == 0 and "1 text cut to 48 tokens" in ran.err and len(ran.out.splitlines()) == 2


# ---- scoring -----------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_predictions(cli, run: Path, tmp_path: Path):
    rows = labelled(20, seed=3)
    rows[0]["label"], rows[15]["label"] = "中文", "english"  # two that it must get wrong
    file = tiny.write_jsonl(tmp_path / "test.jsonl", rows)
    told = json.loads(cli("evaluate", run, file, "--json", "--show", 3).out)
    assert told["records"] == 20 and told["scores"]["accuracy"] == pytest.approx(0.9)
    assert told["confusion"] == [[9, 1], [1, 9]] and told["labels"]["english"]["precision"] == pytest.approx(0.9)
    assert {error["where"] for error in told["errors"]} == {f"{file}:1", f"{file}:16"}
    shares = [error["probability"] for error in told["errors"]]
    assert shares == sorted(shares, reverse=True) and told["errors"][0]["text"] in texts(rows)
    ran = cli("evaluate", run, file, "--show", 1)
    head, _, model, blank, labels, *rest = ran.out.splitlines()
    assert head == "| 20 records | accuracy | macro f1 | matthews |" and model.startswith("| model | 0.900 |")
    assert (
        labels == "| true label | texts | precision | recall | F1 | predicted english | predicted 中文 |"
        and blank == ""
    )
    assert rest[1] == "| english | 10 | 0.900 | 0.900 | 0.900 | 9 | 1 |"
    assert json.loads(cli("evaluate", run, file, "--json", "--limit", 5).out)["records"] == 5


def texts(rows: list[dict]) -> list[str]:
    return [row["text"] for row in rows]


def test_unknown_labels_are_named_or_skipped(cli, run: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "test.jsonl", [*labelled(4), {"text": "a", "label": "german"}])
    ran = cli("evaluate", run, file)
    assert ran.code == 3 and f'{file}:5: "label" is "german"; expected one of english, 中文' in ran.err
    ran = cli("evaluate", run, file, "--on-bad-record", "skip", "--json")
    assert json.loads(ran.out)["records"] == 4 and "skipped records: 1 × unknown label" in ran.err
    assert cli("evaluate", run, file, "--beams", 2).code == 2


def test_a_folder_of_transformers_is_asked_and_scored(cli, run: Path, tmp_path: Path):
    """With no file of ours beside it, and labels that nobody named: whole numbers in the data are theirs."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final")
    model.config.id2label, model.config.label2id = {0: "LABEL_0", 1: "LABEL_1"}, {"LABEL_0": 0, "LABEL_1": 1}
    model.save_pretrained(tmp_path / "theirs")
    transformers.AutoTokenizer.from_pretrained(run / "final").save_pretrained(tmp_path / "theirs")
    rows = [{**row, "label": int(row["label"] == "中文")} for row in labelled(10)]
    file = tiny.write_jsonl(tmp_path / "test.jsonl", rows)
    ran = cli("evaluate", tmp_path / "theirs", file, "--json")
    assert ran.code == 0 and json.loads(ran.out)["scores"]["accuracy"] == 1.0, ran.err
    assert allmask.pipeline("classify", tmp_path / "theirs")("北京").label == "LABEL_1"


def test_a_model_without_a_head_is_refused(bert: Path):
    with pytest.raises(CheckpointError, match='was not trained for "classify", and has no head'):
        allmask.pipeline("classify", bert)


def test_help_tells_of_it(cli):
    for command in ("finetune", "predict", "evaluate"):
        assert "classif" in cli(command, "--help").out
