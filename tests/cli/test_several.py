"""Several seeds, a search over settings, a frozen body, rates by layer: `allmask finetune` beyond a single run."""

from __future__ import annotations

import json
import os
import signal
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import allmask
from allmask.model import load
from allmask.runs import sweep as several
from allmask.runs.driver import start
from allmask.runs.finetuning import FineTuning
from allmask.runs.plan import Plan
from allmask.tasks.classify import Classify
from allmask.training import Settings
from allmask.training.progress import Progress
from tests import tiny

QUICK = ("--batch-tokens", 128, "--precision", "fp32", "--lr", "5e-3", "--quiet")


def labelled(count: int, seed: int = 0) -> list[dict]:
    rows = [(row["source"], "english") for row in tiny.english(count // 2, seed)]
    rows += [(row["source"], "中文") for row in tiny.chinese(count // 2, seed)]
    return [{"text": text, "label": label} for text, label in rows]


def questions(count: int, seed: int = 0) -> list[dict]:
    """The right choice is the Chinese one."""
    made = []
    for number, (a, b) in enumerate(zip(tiny.english(count, seed), tiny.chinese(count, seed), strict=True)):
        choices = [a["target"], b["target"]][:: 1 if number % 3 else -1]
        made.append({"id": number, "context": a["source"], "choices": choices, "answer": b["target"]})
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    tiny.write_jsonl(folder / "train.jsonl", labelled(48))
    tiny.write_jsonl(folder / "dev.jsonl", labelled(16, seed=1))
    tiny.write_jsonl(folder / "ask.jsonl", questions(48))
    tiny.write_jsonl(folder / "ask-dev.jsonl", questions(16, seed=1))
    return folder


@pytest.fixture(scope="module")
def rich(bert: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A body whose features tell English from Chinese: those of a fresh one are almost the same for all texts."""
    out = tmp_path_factory.mktemp("rich") / "run"
    settings = Settings(steps=60, lr=5e-3, batch_tokens=128, eval_every=60, precision="fp32")
    start(Plan(FineTuning(str(files / "train.jsonl"), str(bert), task=Classify()), settings), out, quiet=True)
    load(out / "final").without("task", "pooler").save(out.with_name("bert"))
    return out.with_name("bert")


def words(bert: Path, files: Path, out: Path) -> tuple:
    data = ("--data", files / "train.jsonl", "--eval", files / "dev.jsonl")
    return ("finetune", bert, "--task", "classify", *data, "--out", out, *QUICK)


def stop_at(patch: pytest.MonkeyPatch, updates: int) -> None:
    """The run is asked to stop after so many steps, whichever run they are of."""
    seen = iter(range(1, 10**6))
    patch.setattr(
        Progress, "update",
        lambda bar, done, text="": os.kill(os.getpid(), signal.SIGTERM) if next(seen) == updates else None,
    )  # fmt: skip


# ---- seeds -------------------------------------------------------------------------------------------------------


def test_seeds(cli, bert: Path, files: Path, tmp_path: Path, monkeypatch):
    more = ("--steps", 6, "--seeds", 3, "--eval-every", 3)
    ran = cli(*words(bert, files, tmp_path / "a"), *more, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    rows = told["seeds"]
    assert [row["seed"] for row in rows] == [1, 2, 3] and json.loads((tmp_path / "a/result.json").read_text()) == told
    for name in told["metrics"]:
        values = [row["metrics"][name] for row in rows]
        assert told["metrics"][name] == pytest.approx(statistics.mean(values))
        assert told["deviation"][name] == pytest.approx(statistics.stdev(values))
    assert len({row["metrics"]["loss"] for row in rows}) == 3
    best = max(rows, key=lambda row: row["score"])
    assert told["best_seed"] == best["seed"]
    weights = (tmp_path / f"a/seed-{best['seed']}/final/model.safetensors").read_bytes()
    assert (tmp_path / "a/final/model.safetensors").read_bytes() == weights
    assert not list((tmp_path / "a").glob("seed-*/checkpoints"))
    assert allmask.pipeline("classify", tmp_path / "a")("red").label in ("english", "中文")
    assert cli("verify", tmp_path / "a").code == 0
    alone = cli(*words(bert, files, tmp_path / "alone"), "--steps", 6, "--seed", 2, "--eval-every", 3)
    assert alone.code == 0, alone.err
    one = (tmp_path / "alone/final/model.safetensors").read_bytes()
    assert one == (tmp_path / "a/seed-2/final/model.safetensors").read_bytes()

    with monkeypatch.context() as patch:
        stop_at(patch, 8)  # in the middle of the second
        assert cli(*words(bert, files, tmp_path / "b"), *more).code == 143
    assert not (tmp_path / "b/final").exists() and (tmp_path / "b/seed-1/final").exists()
    ran = cli(*words(bert, files, tmp_path / "b"), *more, "--resume")
    assert ran.code == 0 and f"seed {best['seed']}, the best of 3" in ran.out and "mean ± deviation" in ran.out, ran.err
    assert (tmp_path / "b/final/model.safetensors").read_bytes() == weights
    assert cli("finetune", "--resume", "--out", tmp_path / "b", "--seeds", 4).code == 2


# ---- searching ---------------------------------------------------------------------------------------------------


def test_the_grid_is_the_suggested_one(tmp_path: Path):
    plan = Plan(FineTuning("d", "m", eval="e"), Settings(lr=3e-5, batch_tokens=32 * 100))
    tried = [trial.plan for trial in several.grid(plan, tmp_path)]
    assert len(tried) == 12
    assert {one.settings.batch_tokens for one in tried} == {1600, 3200}
    assert sorted({one.settings.lr for one in tried}) == pytest.approx([2e-5, 3e-5, 5e-5])
    assert {one.settings.epochs for one in tried} == {3.0, 4.0}
    assert len({(one.settings.batch_tokens, one.settings.lr, one.settings.epochs) for one in tried}) == 12


def test_search(cli, bert: Path, files: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(several, "RATES", (1, 1e-4))  # the second learns nothing
    more = ("--search", "--epochs", 3)
    ran = cli(*words(bert, files, tmp_path / "a"), *more, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    rows = {row["run"]: row for row in told["tried"]}
    assert len(rows) == 8
    ended = [name for name, row in rows.items() if row["how"] == "to the end"]
    assert len(ended) == 2 and told["best_run"] in ended
    assert sum("after 3 of 10" in row["how"] for row in rows.values()) == 4
    assert sum("after 6 of 10" in row["how"] for row in rows.values()) == 2
    scores = {name: several.scores_in(tmp_path / "a" / name) for name in rows}
    best_of = {name: several.best_of(some[:3]).value for name, some in scores.items()}
    dropped = [best_of[name] for name, row in rows.items() if "after 3" in row["how"]]
    kept = [best_of[name] for name, row in rows.items() if "after 3" not in row["how"]]
    assert max(dropped) <= min(kept)
    assert told["score"] == max(rows[name]["score"] for name in ended)
    best = (tmp_path / "a" / told["best_run"] / "final/model.safetensors").read_bytes()
    assert (tmp_path / "a/final/model.safetensors").read_bytes() == best
    given_up = next(name for name, row in rows.items() if "after 3" in row["how"])
    assert {path.name for path in (tmp_path / "a" / given_up).iterdir()} == {
        "config.yaml", "metrics.jsonl", "scores.json",
    }  # fmt: skip

    with monkeypatch.context() as patch:
        stop_at(patch, 30)  # the very step of a pause
        assert cli(*words(bert, files, tmp_path / "b"), *more).code == 143
    ran = cli(*words(bert, files, tmp_path / "b"), *more, "--resume")
    assert ran.code == 0 and f"{told['best_run']}, the best of 8" in ran.out, ran.err
    assert (tmp_path / "b/final/model.safetensors").read_bytes() == best


def test_a_run_that_diverges_is_no_end_of_a_search(cli, bert: Path, files: Path, tmp_path: Path, monkeypatch):
    for name, values in {"BATCHES": (1,), "EPOCHS": (1,), "RATES": (1e30, 1)}.items():
        monkeypatch.setattr(several, name, values)
    ran = cli(*words(bert, files, tmp_path / "a"), "--search", "--epochs", 3, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["best_run"] == "run-02" and [row["how"] for row in told["tried"]] == ["to the end", "diverged"]
    monkeypatch.setattr(several, "RATES", (1e30, 1e31))
    ran = cli(*words(bert, files, tmp_path / "b"), "--search", "--epochs", 3)
    assert ran.code != 0 and "all runs diverged" in ran.err and not (tmp_path / "b/final").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--seeds", 0], "seeds is 0"),
        (["--seeds", 2, "--search"], "exclude each other"),
        (["--search", "--steps", 9], "leave --steps out"),
        (["--freeze", "--lm-weight", 0.5], "--lm-weight cannot be combined with --freeze"),
        (["--layer-decay", 1.5], "--layer-decay is 1.5"),
    ],
)
def test_refusals(cli, bert: Path, files: Path, tmp_path: Path, more: list, says: str):
    ran = cli(*words(bert, files, tmp_path / "run"), *more)
    assert ran.code == 2 and says in ran.err and not (tmp_path / "run").exists(), ran.err


def test_runs_are_compared_by_held_out_records(cli, bert: Path, files: Path, tmp_path: Path):
    data = ("--data", files / "train.jsonl", "--out", tmp_path / "run", "--seeds", 2)
    ran = cli("finetune", bert, "--task", "classify", *data)
    assert ran.code == 2 and "name them with --eval" in ran.err


# ---- a frozen body -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classify", "choose", "title"])
def test_a_frozen_body_does_not_change(cli, rich: Path, files: Path, data: Path, tmp_path: Path, task: str):
    names = {"classify": "train dev", "choose": "ask ask-dev", "title": "train dev"}[task].split()
    train, dev = ((data if task == "title" else files) / f"{name}.jsonl" for name in names)
    files_of = ("--data", train, "--eval", dev, "--out", tmp_path / "run")
    out = (*files_of, "--steps", 30, *QUICK, "--lr", 0.02, "--freeze", "--json")
    ran = cli("finetune", rich, "--task", task, *out, *(("--max-target", 8, "--no-prune") if task == "title" else ()))
    assert ran.code == 0, ran.err
    before, after = load(rich).state_dict(), load(tmp_path / "run" / "final").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("body."))
    losses = [line["loss"] for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert sum(losses[-5:]) < sum(losses[:5])
    if task == "classify":  # what is judged from cached features is what the model says
        assert json.loads(ran.out)["metrics"]["accuracy"] == 1.0
        told = json.loads(cli("evaluate", tmp_path / "run", dev, "--json", "--precision", "fp32").out)
        assert told["scores"]["accuracy"] == json.loads(ran.out)["metrics"]["accuracy"]


@pytest.mark.parametrize("task", ["tag", "answer"])
def test_where_tokens_are_asked_too(cli, bert: Path, tmp_path: Path, task: str):
    """Several seeds of a frozen body: the body is read at each step, and learns nothing."""
    made = {
        "tag": [{"tokens": ["red", *"北京", "cat"], "tags": ["O", "B-X", "I-X", "O"]}] * 8,
        "answer": [{"question": "here", "context": f"red {row['target']} cat", "answer": row["target"]}
                   for row in tiny.chinese(8)],
    }  # fmt: skip
    file, dev = (tiny.write_jsonl(tmp_path / f"{n}.jsonl", made[task][:n]) for n in (8, 7))
    more = ("--freeze", "--seeds", 2, "--steps", 4, "--precision", "fp32", "--lr", 0.01, "--json")
    ran = cli("finetune", bert, "--task", task, "--data", file, "--eval", dev, "--out", tmp_path / "run", *more)
    assert ran.code == 0, ran.err
    assert len(json.loads(ran.out)["seeds"]) == 2
    before, after = load(bert).state_dict(), load(tmp_path / "run" / "final").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("body."))


def test_features_give_the_loss_of_the_body(rich: Path, files: Path):
    from collections import Counter

    from allmask.objectives import losses_of
    from allmask.tasks.choose import Choose

    for task, name, kind in ((Classify(max_length=9, truncate="windows"), "train", "classify"),
                             (Choose(max_length=9, truncate="windows"), "ask", "choose")):  # fmt: skip
        task, records, _ = task.read_data(files / f"{name}.jsonl", None, "stop", Counter())
        model = task.prepare(load(rich), records, seed=1).eval()
        work = task.workload(model, records)
        expected = losses_of(model, work.batch([3, 1, 30, 8], 0))[kind]
        work.cache_features(model, "fp32")
        batch = work.batch([3, 1, 30, 8], 0)
        loss, count = losses_of(model, batch)[kind]
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5) and count == expected[1]
        assert batch.hidden is not None and batch.ids.numel() == len(batch.hidden)


# ---- rates by layer ----------------------------------------------------------------------------------------------


def test_rates_by_layer(bert: Path):
    from allmask.nn.heads import Labels
    from allmask.training.optimizer import optimizer_for

    settings = Settings(lr=1.0, layer_decay=0.5, weight_decay=0.0)
    steps = {}
    for decay in (0.5, None):
        model = load(bert).with_labels(Labels("single", ("a", "b")), torch.Generator().manual_seed(0))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = optimizer_for(model, replace(settings, layer_decay=decay))
        for _ in range(2):
            for group in optimizer.param_groups:
                group["lr"] = 0.1
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        steps[decay] = {name: (before[name] - p.detach()).mean().item() for name, p in model.named_parameters()}
    for name, whole in steps[None].items():
        shares = {"body.embedding.": 0.125, "body.layers.0.": 0.25, "body.layers.1.": 0.5}
        share = next((share for start, share in shares.items() if name.startswith(start)), 1.0)
        assert steps[0.5][name] == pytest.approx(share * whole, rel=1e-4), name


def test_layer_decay_is_resumed_exactly(cli, bert: Path, files: Path, tmp_path: Path, monkeypatch):
    more = ("--steps", 6, "--layer-decay", 0.8, "--save-every", 2)
    assert cli(*words(bert, files, tmp_path / "whole"), *more).code == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert cli(*words(bert, files, tmp_path / "parts"), *more).code == 143
    assert cli(*words(bert, files, tmp_path / "parts"), *more, "--resume").code == 0
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


# ---- choose, from end to end -------------------------------------------------------------------------------------


def test_choosing_is_learnt_predicted_and_scored(cli, bert: Path, files: Path, tmp_path: Path):
    run = tmp_path / "run"
    data = ("--data", files / "ask.jsonl", "--eval", files / "ask-dev.jsonl", "--out", run)
    ran = cli("finetune", bert, "--task", "choose", *data, "--steps", 80, *QUICK, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["metrics"]["accuracy"] == 1.0 and told["metrics"]["chance"] == 0.5
    ran = cli("predict", run, files / "ask-dev.jsonl", "-o", tmp_path / "out.jsonl")
    assert ran.code == 0, ran.err
    rows = tiny.read_jsonl(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(16)) and all(row["choice"] == row["answer"] for row in rows)
    assert rows[0]["choices"][rows[0]["prediction"]] == rows[0]["choice"]
    wrong = [{**row, "answer": next(one for one in row["choices"] if one != row["answer"])} for row in questions(2)]
    file = tiny.write_jsonl(tmp_path / "test.jsonl", [*questions(6, seed=3), *wrong])
    told = json.loads(cli("evaluate", run, file, "--json", "--show", 5).out)
    assert told["records"] == 8 and told["scores"] == {"accuracy": 0.75, "chance": 0.5}
    assert {row["where"] for row in told["errors"]} == {f"{file}:7", f"{file}:8"}
    out = cli("evaluate", run, file, "--show", 1).out
    assert out.startswith("| 8 records | accuracy | chance |")
    assert [f"true {row['answer']}, predicted" in out for row in wrong].count(True) == 1
    assert allmask.pipeline("choose", run)("red cat sings here", ["北京", "dog runs"]).text == "北京"
    assert cli("predict", run, file, "-o", "-", "--beams", 2).code == 2
    assert cli("predict", run, "-", "-o", "-").code == 2
    assert "choose" in cli("finetune", "--help").out
    bad = tiny.write_jsonl(tmp_path / "bad.jsonl", [{**questions(1)[0], "answer": "nothing"}])
    ran = cli("evaluate", run, bad)
    assert ran.code == 3 and f'{bad}:1: "answer" is "nothing", which is none of the choices' in ran.err
