"""The package that docs/extend.md writes is installed, offline, and used by the commands and by `allmask.pipeline`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from allmask import presets
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary
from allmask.text import train_tokenizer
from tests import tiny

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
# Commands in one process, since each would import torch; then a last piece of code, which sets `result`.
RUNNER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from allmask.cli.main import main
from allmask.runs import plan

plan.plot_run = lambda run: run / "loss.png"  # drawing takes longer than these runs
ran, result, given = [], None, json.load(sys.stdin)
for words in given["commands"]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    ran.append([code, out.getvalue(), err.getvalue()])
exec(given["code"])
print(json.dumps([ran, result]))
"""


def write_page(folder: Path) -> None:
    """The files whose names are in the first lines of the page's blocks of code."""
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "reviewer" / "__init__.py").touch()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, installed beside the environment, which stays as it is; its source is removed."""
    folder = tmp_path_factory.mktemp("installed")
    source, site = folder / "reviews", folder / "site"
    write_page(source)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "-q"]
    words = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    (source / "make_reviews.py").rename(folder / "make_reviews.py")
    shutil.rmtree(source)
    return folder


def started(python: str, cwd: Path, paths: list[Path], *words: str, given: Any = None) -> str:
    """What a new process prints that has these paths."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, *words], input=json.dumps(given), cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run(
    python: str, cwd: Path, paths: list[Path], commands: dict[str, str], code: str
) -> tuple[dict[str, list[Any]], Any]:
    """Exit code, stdout and stderr of each command, and what the code leaves in `result`."""
    given = {"commands": [words.split() for words in commands.values()], "code": code}
    ran, result = json.loads(started(python, cwd, paths, "-c", RUNNER, given=given).splitlines()[-1])
    return dict(zip(commands, ran, strict=True)), result


def shown(command: str) -> str:
    """What the page says that a command prints."""
    return PAGE.split(f"$ {command}\n")[1].split("```")[0]


def small_bert(folder: Path, texts: list[str]) -> None:
    tokenizer = train_tokenizer(texts, "wordpiece", 80)
    config = replace(presets.bert_base(), vocab_size=tokenizer.size, **tiny.SMALL)
    model = Model.fresh(config, rng=torch.Generator().manual_seed(0))
    model.tokenizer = tokenizer
    model.save(folder)


def other_names(bert: Path, folder: Path) -> None:
    """The same BERT with the names of the page's family."""
    folder.mkdir()
    tensors = load_file(bert / "model.safetensors")
    renamed = {name.replace("embeddings.word_embeddings", "lexicon"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors")
    settings = json.loads((bert / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "lexicon-bert"}))


def test_the_package_of_the_page_is_used_like_what_is_built_in(python: str, tmp_path: Path, installed: Path):
    site = installed / "site"
    started(python, tmp_path, [], str(installed / "make_reviews.py"))
    train, dev = (tiny.read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "dev"))
    assert len(train) == 400 and len(dev) == 50 and {row["stars"] for row in dev} == {1, 2, 3, 4, 5}
    tiny.write_jsonl(tmp_path / "bad.jsonl", [{"text": "The food was good.", "stars": 7}])
    small_bert(tmp_path / "bert", [row["text"] for row in train])
    other_names(tmp_path / "bert", tmp_path / "lexicon")

    small = "--steps 4 --precision fp32 --eval-every 4 --quiet"
    pretrain = f"pretrain --from bert --data train.jsonl --length 32 --batch-tokens 256 --held-out 0.1 {small}"
    commands = {
        "finetune": f"finetune bert --task stars --data train.jsonl --eval dev.jsonl --out stars --json {small}",
        "resume": "finetune --resume --task stars --out stars --json",
        "mean": f"finetune bert --task stars --data train.jsonl --mean --max-length 16 --freeze --out mean {small}",
        "predict": "predict stars dev.jsonl -o predictions.jsonl --quiet",
        "predict mean": "predict mean dev.jsonl -o means.jsonl --quiet",
        "evaluate": "evaluate stars dev.jsonl --json --show 1",
        "evaluate bad": "evaluate stars bad.jsonl",
        "beams": "predict stars dev.jsonl -o - --beams 2",
        "alone": f"{pretrain} --objective ending --out alone",
        "mixed": f"{pretrain} --objective ending:0.5,mlm:0.5 --out mixed",
        "mask": "mask blocks --text 北京欢迎你",
        "mask json": "mask blocks --text 北京欢迎你 --json",
        "audit": "audit bert --mask blocks --tokens 4",
        "audit json": "audit bert --mask blocks --tokens 5 --json",
    }
    code = """
import allmask
rate = allmask.pipeline("stars", "stars", precision="fp32")
texts = [json.loads(line)["text"] for line in open("dev.jsonl")][:3]
same = {name: allmask.load(name).state_dict() for name in ("bert", "lexicon")}
try:
    refused = rate(3)
except allmask.errors.UsageError as error:
    refused = str(error)
result = {
    "one": rate(texts[0]), "many": rate(texts), "fields": rate({"text": texts[1]}), "refused": refused,
    "same": all(tensor.equal(same["lexicon"][name]) for name, tensor in same["bert"].items()),
}
"""
    ran, found = run(python, tmp_path, [site], commands, code)
    assert {name: code for name, (code, _, _) in ran.items() if code} == {"evaluate bad": 3, "beams": 2}, ran

    expect_task(tmp_path, dev, ran, found)
    expect_objective(tmp_path)
    expect_mask(ran)
    assert found["same"], "the family reads the same tensors"


def expect_task(folder: Path, dev: list[dict], ran: dict[str, list[Any]], found: dict) -> None:
    trained = json.loads(ran["finetune"][1])
    assert trained["task"] == "stars" and trained["examples"] == 400 and trained["final"] == "stars/final"
    assert set(trained["metrics"]) == {"loss", "accuracy", "within_one"}
    assert json.loads(ran["resume"][1]) == trained, "a finished run is found again"
    saved = json.loads((folder / "stars/final/allmask.json").read_text())
    own = {"task": "stars", "max_length": 48, "truncate": "head", "pool_windows": "mean", "mean": False}
    assert saved == own, "max_length is lowered to the positions of the model"
    assert json.loads((folder / "mean/final/allmask.json").read_text()) == own | {"max_length": 16, "mean": True}
    assert "loss_stars" in tiny.read_jsonl(folder / "stars/metrics.jsonl")[0]

    rows = tiny.read_jsonl(folder / "predictions.jsonl")
    assert [{name: row[name] for name in ("text", "stars")} for row in rows] == dev
    assert all(set(row) == {"text", "stars", "prediction", "probability"} for row in rows)
    assert all(row["prediction"] in (1, 2, 3, 4, 5) and 0.2 <= row["probability"] <= 1 for row in rows)
    means = [row["prediction"] for row in tiny.read_jsonl(folder / "means.jsonl")]
    assert all(1 < mean < 5 and mean % 1 for mean in means), "--mean is saved with the model"

    evaluated = json.loads(ran["evaluate"][1])
    errors = [abs(row["prediction"] - row["stars"]) for row in rows]
    by_hand = {"accuracy": errors.count(0) / 50, "within_one": sum(error <= 1 for error in errors) / 50}
    assert evaluated["records"] == 50 and evaluated["scores"] == pytest.approx(by_hand)
    (first,) = evaluated["errors"]
    number = next(number for number, error in enumerate(errors) if error)
    assert (first["where"], first["text"]) == (f"dev.jsonl:{number + 1}", dev[number]["text"])
    assert ran["evaluate bad"][2].startswith(
        'error[data]: bad.jsonl:1: "stars" is 7; expected 1, 2, 3, 4 or 5\n  fix the line, or pass --on-bad-record skip'
    )
    assert "--beams: this model predicts, it does not generate text" in ran["beams"][2]

    expected = [{name: row[name] for name in ("prediction", "probability")} for row in rows[:3]]
    assert [one["prediction"] for one in found["many"]] == [one["prediction"] for one in expected]
    assert found["one"] == pytest.approx(found["many"][0]) and found["fields"] == pytest.approx(found["many"][1])
    assert found["refused"].startswith('stars: "text" is 3 (a number); expected text')


def expect_objective(folder: Path) -> None:
    for name, losses in (("alone", {"loss_ending"}), ("mixed", {"loss_ending", "loss_mlm"})):
        result = json.loads((folder / name / "result.json").read_text())
        assert losses == {metric for metric in result["metrics"] if metric.startswith("loss_")}
        steps = [line for line in tiny.read_jsonl(folder / name / "metrics.jsonl") if "loss" in line]
        assert losses >= {metric for line in steps for metric in line if metric.startswith("loss_")} != set()
        assert (folder / name / "final" / "model.safetensors").is_file()


def expect_mask(ran: dict[str, list[Any]]) -> None:
    assert ran["mask"][1] == shown("allmask mask blocks --text 北京欢迎你")
    assert json.loads(ran["mask json"][1])["drawing"]["visible"] == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert ran["audit"][1] == shown("allmask audit allmask-en --mask blocks --tokens 4")
    audited = json.loads(ran["audit json"][1])
    assert audited["holds"] and audited["depends"] == json.loads(ran["mask json"][1])["drawing"]["visible"]


def test_the_objective_of_the_page_makes_the_batch_that_its_drawing_shows(tmp_path: Path, monkeypatch):
    write_page(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from reviewer.ending import Ending  # type: ignore[import-not-found]

    tokenizer = train_tokenizer(["北京欢迎"] * 4, "wordpiece", 20)
    ids = tokenizer.encode("北京欢迎", special=False).ids
    begin, end = tokenizer.cls_id, tokenizer.sep_id
    batch = Ending(Vocabulary.of(tokenizer)).batch([np.array(ids)], Draw(seed=1, epoch=0, numbers=[0]))
    assert batch.ids.tolist() == [[begin, *ids, end]]
    assert batch.mask.order.tolist() == [[0, 0, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [[-1, -1, ids[2], ids[3], end, -1]]
    for name in [name for name in sys.modules if name.split(".")[0] == "reviewer"]:
        del sys.modules[name]


# ---- names and errors ----------------------------------------------------------------------------------------------


def add_package(site: Path, package: str, points: dict[str, str], code: str) -> None:
    """A package as an installer leaves it: a module, and metadata with its entry points by group."""
    (site / f"{package}.py").write_text(code)
    metadata = site / f"{package}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    groups = [f"[allmask.{group}]\n{point}\n" for group, point in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


NOT_TASKS = """
from dataclasses import dataclass
from allmask.tasks.text_task import TextTask

class Plain: name = "plain"

@dataclass(frozen=True)
class Seeded(TextTask):
    name = "seeded"
    seed: int = 0

@dataclass(frozen=True)
class Misnamed(TextTask):
    name = "another"
"""


def test_names_are_listed_and_what_is_wrong_with_a_package_is_said(python: str, tmp_path: Path, installed: Path):
    site = shutil.copytree(installed / "site", tmp_path / "site")
    add_package(site, "broken", {"tasks": "gone = broken:Task", "objectives": "lost = broken:Lost"}, "import no_such")
    add_package(site, "copycat", {"masks": "blocks = copycat:blocks"}, "blocks = print")
    points = "plain = wrong:Plain\nseeded = wrong:Seeded\nmisnamed = wrong:Misnamed"
    add_package(site, "wrong", {"tasks": points}, NOT_TASKS)
    (tmp_path / "train.jsonl").write_text("{}")
    tuned = "finetune minilm --data train.jsonl --out x --task"
    commands = {
        "finetune": "finetune --help",
        "one task": "finetune --task stars --help",
        "pretrain": "pretrain --help",
        "mask": "mask --help",
        "audit": "audit --help",
        "mistyped": f"{tuned} star",
        "gone": f"{tuned} gone",
        "lost": "pretrain --objective lost --data train.jsonl --from minilm --out x",
        "copied": "mask blocks --text 北京",
        "plain": f"{tuned} plain",
        "seeded": f"{tuned} seeded",
        "misnamed": f"{tuned} misnamed",
    }
    code = """
from allmask.registry import MASKS
result = []
for name in ("causal", "mine", "mine"):
    try:
        result.append(MASKS.register(name, [name]))
    except Exception as error:
        result.append(error.message)
"""
    ran, found = run(python, tmp_path, [site], commands, code)
    helps = {name: " ".join(ran[name][1].split()) for name in ("finetune", "one task", "pretrain", "mask", "audit")}
    assert all(ran[name][0] == 0 for name in helps), ran
    assert "answer, or one of an installed package: gone, misnamed, plain, seeded, stars." in helps["finetune"]
    assert "--[no-]mean Predict the mean, such as 3.7, instead of the most probable number." in helps["one task"]
    assert "Training records, jsonl, json, csv, tsv, xlsx or parquet: text, stars." in helps["one task"]
    assert "Also one of an installed package: ending, lost." in helps["pretrain"]
    assert all("or one of an installed package: blocks." in helps[name] for name in ("mask", "audit"))

    wrong = {name: " ".join(err.split()) for name, (_, _, err) in ran.items() if name not in helps}
    assert all(ran[name][0] == 2 for name in wrong), ran
    tasks = "title, translate, classify, choose, tag, answer, gone, misnamed, plain, seeded, stars"
    cannot = "cannot be imported: No module named 'no_such' mend, update or uninstall broken"
    assert wrong == {
        "mistyped": f"error[usage]: unknown task star did you mean stars? there are: {tasks}",
        "gone": f"error[usage]: task 'gone' of the package broken: broken:Task {cannot}",
        "lost": f"error[usage]: objective 'lost' of the package broken: broken:Lost {cannot}",
        "copied": "error[usage]: mask 'blocks': of several packages: copycat, reviewer uninstall all but one",
        "plain": "error[usage]: task plain: <class 'wrong.Plain'> is not a dataclass"
        " write @dataclass(frozen=True) above the class",
        "seeded": "error[usage]: task seeded: seed is an option of every run rename the field",
        "misnamed": "error[usage]: task misnamed: the name of <class 'wrong.Misnamed'> is 'another'"
        ' write name = "misnamed" in it',
    }
    taken = "mask 'causal': allmask has one of this name", ["mine"], "mask 'mine': there is already one of this name"
    assert tuple(found) == taken
