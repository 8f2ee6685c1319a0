"""The `--help` of every command: grouped, with defaults, and with examples that can be typed as they are printed."""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from allmask.cli import tokenizer
from allmask.cli._options import SECTIONS, sections
from allmask.cli.main import COMMANDS, GROUPS, built
from allmask.registry import OBJECTIVES

NAMES = [*(name for name in COMMANDS if name != "tokenizer"), "tokenizer train", "tokenizer show"]


@cache
def app_of(command: str, *task: str) -> Any:
    return built([command, *task])


def command_of(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The command that a line calls, the context around it, and the words that it is given."""
    at = words.index("--task") if "--task" in words else len(words)
    app = app_of(words[0], *words[at : at + 2])
    command, context, rest = app.commands[words[0]], app.make_context("allmask", [], resilient_parsing=True), words[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[words[1]], words[2:]
    return command, context, rest


def examples() -> list[str]:
    texts = [import_module(module).EXAMPLES for module, _ in COMMANDS.values()]
    lines = "\n".join([*texts, tokenizer._TRAIN, tokenizer._SHOW]).splitlines()
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_options_are_in_sections_and_show_their_defaults(name: str):
    command, parent, _ = command_of(name.split())
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    found = sections(command, context)
    assert "options" not in found and set(found) <= {"arguments", *SECTIONS}
    assert {"output"} <= set(found)
    for row in (row for rows in found.values() for row in rows):
        assert row.help.endswith((".", "…")), row
        assert not set(re.findall(r"\[.*?\]|[\[\]]", row.help)) - {"[MASK]", "[CLS]", "[SEP]"}, row
    for param in command.params:
        if param.param_type_name == "option" and param.default not in (None, False, ""):
            (row,) = (row for rows in found.values() for row in rows if row.words.split()[0] in words_of(param))
            assert row.default, row


def words_of(param: Any) -> set[str]:
    return {*param.opts, *(f"{flag}," for flag in param.opts), f"--[no-]{param.opts[0].removeprefix('--')}"}


@pytest.mark.parametrize("line", examples(), ids=str)
def test_examples_can_be_typed(line: str):
    """The parser takes them as they are printed; the files that they name are the reader's."""
    words = shlex.split(line.split(" | allmask ")[-1].split(" | ")[0].split(" || ")[0])
    words = words[words[0] == "allmask" :]
    words = words[: words.index("<")] if "<" in words else words
    words = [word for word in words if not any(sign in word for sign in "*")]  # the shell expands it
    command, context, rest = command_of([*words, "a.txt"] if "train" in words and "tokenizer" in words else words)
    command.make_context(words[0], rest, parent=context)


@pytest.mark.parametrize("line", [line for line in examples() if "allmask mask" in line], ids=str)
def test_examples_of_masks_run(cli, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("visible.csv").write_text("1,0\n1,1\n")
    ran = cli(*shlex.split(line)[1:])
    assert ran.code == 0 and ran.out, ran.err


def text_of(cli, *words: str) -> str:
    return " ".join(cli(*words, "--help").out.split())


def test_pretrain_names_all_objectives(cli):
    text = text_of(cli, "pretrain")
    assert len(OBJECTIVES.builtin) == 9 and all(f" {name} " in text for name in OBJECTIVES.builtin)


def test_usage_lines_and_flags_are_those_one_types(cli):
    assert text_of(cli, "embed").startswith("Usage: allmask embed [OPTIONS] MODEL [FILE] Write")
    assert text_of(cli, "drift").startswith("Usage: allmask drift [OPTIONS] A B Test")
    assert "--lowercase / --cased" in text_of(cli, "tokenizer", "train")
    assert "the first N texts, or N images of all classes. [default: all]" in text_of(cli, "evaluate")
    assert "--text <str>... A text" in text_of(cli, "embed") and "[required]" in text_of(cli, "convert")


def test_commands_are_in_groups_of_one_line_each(cli, monkeypatch: pytest.MonkeyPatch):
    """Each command once, with its whole help text, in 80 columns."""
    assert sorted(name for names in GROUPS.values() for name in names.split()) == sorted(COMMANDS)
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("--help").out.splitlines()
    for name, (_, help) in COMMANDS.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.split(maxsplit=1)[1] == help and len(line) <= 80
    heads = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Options", *GROUPS]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_can_be_quiet_and_print_json(name: str):
    command, _, _ = command_of(name.split())
    words = {word for param in command.params for word in param.opts}
    assert {"--quiet", "-q", "--json"} <= words


@pytest.mark.parametrize(
    "words", ["mask causal --text a --png a.png", "tokenizer show {bert} --text red", "audit {bert} --tokens 3"]
)
def test_quiet_prints_the_result_only(cli, bert: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    line = words.format(bert=bert).split()
    loud, quiet = cli(*line), cli(*line, "--quiet")
    assert quiet.code == loud.code == 0 and quiet.out == loud.out and quiet.err == ""
    assert cli(*line).err == loud.err  # not for ever


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("allmask att", "attention"),
        ("allmask mask pre", "prefix"),
        ("allmask mask prefix --sou", "--source"),
        ("allmask audit mini", "minilm"),
        ("allmask finetune minilm --task cla", "classify"),
        ("allmask finetune minilm --schedule co", "cosine constant"),
        ("allmask pretrain --objective mlm:0.5,ca", "mlm:0.5,causal"),
        ("allmask tokenizer train --kind wordp", "wordpiece"),
        ("allmask tokenizer tr", "train"),
        ('allmask generate --text "open', ""),
    ],
)
def test_a_shell_completes_names(cli, monkeypatch: pytest.MonkeyPatch, line: str, expected: str):
    monkeypatch.setenv("_ALLMASK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert cli().out.split() == expected.split()


def test_completion_can_be_installed(cli):
    text = text_of(cli)
    assert "--install-completion" in text and "--show-completion" in text
