"""What is wrong is said in our words, whatever a caller or a file gives; nothing of a file is printed as a command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import allmask
from allmask.checkpoints import resolve
from allmask.errors import AllmaskError, CheckpointError, UsageError
from allmask.files import read_json, verify
from allmask.model import Model
from allmask.tasks.task import load_tasks
from allmask.terminal import printable, printable_json
from tests import tiny

IDS = torch.tensor([[2, 7, 3]])
CHECKED = shutil.ignore_patterns("__pycache__", "manifest.json")  # its checksums would notice what is changed here
WHOLE = r"expected whole numbers \(B, T\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return allmask.load(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"segments": torch.tensor([[0, 1, 2]])}, "segment 2: this model has segments 0 to 1"),
        ({"segments": torch.tensor([[0, -1, 0]])}, "segment -1: this model has segments 0 to 1"),
        ({"segments": torch.zeros(1, 3)}, WHOLE),
        ({"segments": [[0, 0, 0]]}, r"segments are a list; expected a tensor \(B, T\)"),
        ({"segments": torch.zeros(1, 5, dtype=torch.long)}, r"segments are \(1, 5\) and ids \(1, 3\)"),
        ({"positions": torch.tensor([[0, 1, -1]])}, "position -1 is negative"),
        ({"positions": torch.tensor([[0.0, 1.0, 2.0]])}, WHOLE),
        ({"positions": torch.arange(5)[None]}, r"positions are \(1, 5\) and ids \(1, 3\)"),
        ({"ids": IDS.float()}, WHOLE),
        ({"ids": IDS.bool()}, WHOLE),
        ({"ids": IDS[0]}, WHOLE),
        ({"ids": None}, r"ids are a NoneType; expected a tensor \(B, T\)"),
        ({"ids": torch.tensor([[3, -5]])}, "token id -5 is not in the vocabulary"),
        ({"ids": torch.tensor([[3, 10**6]])}, "token id 1000000 is not in the vocabulary"),
    ],
)  # fmt: skip
def test_arguments_of_a_model(model: Model, arguments: dict, words: str):
    with pytest.raises(UsageError, match=words):
        model(**{"ids": IDS, **arguments})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected a JSON object, found list"),
        ('"title"', "expected a JSON object, found str"),
        ('{"task": ["title"]}', r"the task is \['title'\]"),
        ('{"task": {}}', "the task is {}"),
        ('{"task": "title", "max_source": "x"}', "max_source is 'x'; expected int"),
        ('{"task": "title", "max_source": [1]}', r"max_source is \[1\]; expected int"),
        ('{"task": "title", "max_source": null}', "max_source is None; expected int"),
        ('{"task": "title", "max_source": -5}', "max_source is -5; expected at least 1"),
        ('{"task": "title", "length_penalty": true}', "length_penalty is True; expected float"),
        ('{"task": "title", "other": 1}', "other"),
        ('{"task": "title", "also": {}}', '"also" must be a list of tasks'),
        ('{"task": "title", "also": [{"task": []}]}', r"the task is \[\]"),
    ],
)  # fmt: skip
def test_a_task_in_allmask_json(tmp_path: Path, content: str, words: str):
    (tmp_path / "allmask.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tasks(tmp_path)
    assert "allmask.json" in str(caught.value)


def test_the_tasks_that_we_ship_are_read(tmp_path: Path):
    for name in ("allmask-en", "allmask-zh"):
        assert load_tasks(resolve(name))[0].name == "title"


@pytest.mark.parametrize("content", ["[]", '["model.safetensors"]', '"x"', "5", "null", '{"model.safetensors": 5}'])
def test_a_manifest_that_is_none(tmp_path: Path, cli, content: str):
    (tmp_path / "manifest.json").write_text(content)
    assert "manifest.json" in (verify(tmp_path) or "")
    ran = cli("verify", tmp_path)
    assert ran.code == 4 and "manifest.json" in ran.out


def test_weights_that_are_not_numbers(folder: Path, tmp_path: Path, cli):
    shutil.copytree(resolve("allmask-en"), tmp_path / "model", ignore=CHECKED)
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}, file)
    ran = cli("fill", tmp_path / "model", "A [MASK] day.")
    assert ran.code == 4 and ran.out == "" and "the logits of the model are NaN" in ran.err


# ---- control characters ----------------------------------------------------------------------------------------------

EVIL = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def test_escapes_keep_their_meaning():
    assert printable("北京\t\n😀 é") == "北京\t\n😀 é"
    assert printable(EVIL) == r"\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e"
    for text in (EVIL, "a\x7fb\x85"):
        written = printable_json(json.dumps({text: text}, ensure_ascii=False))
        assert not RAW.search(written) and json.loads(written) == {text: text}


def test_messages_of_errors_and_names_of_tensors(folder: Path, tmp_path: Path, cli):
    error = AllmaskError(f"{EVIL} is wrong", f"remove {EVIL}")
    assert not RAW.search(str(error)) and "\\x1b[2J" in str(error)
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {f"x{EVIL}": torch.zeros(1), f"classifier.{EVIL}": torch.zeros(1)}, file)
    ran = cli("inspect", tmp_path / "model")
    assert ran.code == 4 and "\\x1b[2J" in ran.err and not RAW.search(ran.err + ran.out)


def test_warnings_of_the_library(folder: Path, tmp_path: Path, cli):
    """`inspect` shows what is logged, too: here of a token that the model has no embedding for."""
    shutil.copytree(folder, tmp_path / "model", ignore=CHECKED)
    file = tmp_path / "model" / "tokenizer.json"
    made = json.loads(file.read_text())
    number = max(made["model"]["vocab"].values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made["added_tokens"].append({"id": number, "content": EVIL, "special": True, **flags})
    file.write_text(json.dumps(made))
    ran = cli("inspect", tmp_path / "model")
    assert ran.code == 0 and "no embedding for \\x1b[2J" in ran.err and not RAW.search(ran.err + ran.out)


def test_tokens_of_a_vocabulary(folder: Path, tmp_path: Path, cli):
    """A hostile vocabulary cannot speak to the terminal through predictions."""
    shutil.copytree(resolve("allmask-en"), tmp_path / "model", ignore=CHECKED)
    (tmp_path / "model" / "tokenizer.json").unlink()
    file = tmp_path / "model" / "vocab.txt"
    file.write_text(re.sub(r"(?m)^([^\[\n].*)$", r"\1" + EVIL.replace("\r", ""), file.read_text()))
    for words in (("fill", "A [MASK] day."), ("fill", "A [MASK] day.", "--json"), ("generate", "--text", "A tool.")):
        command, *rest = words
        ran = cli(command, tmp_path / "model", *rest)
        assert ran.code == 0 and not RAW.search(ran.out + ran.err), ran
        assert "1b[2J" in ran.out


def test_a_message_has_an_end(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"' + "x" * 10**6 + '": 1, "' + "x" * 10**6 + '": 2}')
    with pytest.raises(CheckpointError) as caught:
        read_json(tmp_path / "config.json", unique=True)
    assert len(str(caught.value)) < 11_000 and "more characters)" in str(caught.value)
