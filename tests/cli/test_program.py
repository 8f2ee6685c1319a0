"""Commands that are printed can be typed as they are printed, whether or not `allmask` is found by that name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from allmask.cli import examples
from allmask.cli._program import as_called, program

ROOT = Path(__file__).parents[2]


def script(folder: Path) -> Path:
    """An `allmask` as pip installs it."""
    folder.mkdir(parents=True)
    path = folder / "allmask"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom allmask.cli.main import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that pretends that a file was started in `tmp_path`, with these folders in PATH."""
    monkeypatch.chdir(tmp_path)

    def start(argv0: object, *path: Path) -> str:
        monkeypatch.setattr(sys, "argv", [str(argv0), "demo"])
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
        return " ".join(program())

    return start


def test_the_name_only_where_it_leads_here(started, tmp_path: Path):
    ours, other = script(tmp_path / ".venv" / "bin"), script(tmp_path / "other")
    assert started(".venv/bin/allmask") == ".venv/bin/allmask"
    assert started(ours) == ".venv/bin/allmask"
    assert started(ours, ours.parent, other.parent) == "allmask"  # an active environment
    assert started(ours, other.parent, ours.parent) == ".venv/bin/allmask"  # the name leads elsewhere
    os.chdir(ours.parent)
    assert started("./allmask") == "./allmask"
    os.chdir(other.parent)
    assert started(ours) == str(ours)


def test_as_a_module(started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(sys.executable)
    (tmp_path / "python").symlink_to(sys.executable)  # another environment with the same interpreter
    monkeypatch.setattr(sys, "executable", str(bin / "python"))
    main = ROOT / "allmask" / "__main__.py"
    assert started(main) == started(main, tmp_path) == ".venv/bin/python -m allmask"
    assert started(main, bin, tmp_path) == "python -m allmask"
    (bin / "python3.11").symlink_to(bin / "python")  # as torchrun calls it
    monkeypatch.setattr(sys, "executable", str(bin / "python3.11"))
    assert started(main, bin, tmp_path) == "python -m allmask"
    assert started(main, tmp_path) == ".venv/bin/python3.11 -m allmask"


def test_from_another_program(started):
    assert started("-c") == started("/usr/bin/pytest") == started("site-packages/pytest/__main__.py") == "allmask"


def test_a_folder_that_is_gone(started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = script(tmp_path / "bin")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert started(path) == str(path)


def test_only_commands_are_changed(started, tmp_path: Path):
    script(tmp_path / "my env" / "bin")
    started("my env/bin/allmask")
    for text, told in {
        "use allmask predict": "use 'my env/bin/allmask' predict",
        "`allmask finetune --help`": "`'my env/bin/allmask' finetune --help`",
        "allmask --version": "'my env/bin/allmask' --version",
        "allmask COMMAND --help": "'my env/bin/allmask' COMMAND --help",
        "cat 文 | allmask drift a -": "cat 文 | 'my env/bin/allmask' drift a -",
    }.items():
        assert as_called(text) == told
    for text in (
        "a head that allmask does not support",
        "torchrun -m allmask pretrain",
        "pip install ./weights/allmask-en",
        "./allmask mask",
        "allmask masks",
        "allmask: one Transformer",
    ):
        assert as_called(text) == text
    assert examples("allmask mask prefix\nallmask inspect a").count("'my env/bin/allmask' ") == 2


def test_what_help_and_errors_print_can_be_typed(tmp_path: Path):
    """With no `allmask` in PATH, as after `make setup`."""
    script(tmp_path / ".venv" / "bin")
    environment = os.environ | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert shell("allmask --version").returncode == 127
    (shown,) = re.findall(r"^ +(\S+ tokenizer show .*)$", shell(".venv/bin/allmask tokenizer --help").stdout, re.M)
    failed = shell(shown)  # there is no tok/ here: an error of ours, with its hint
    assert failed.returncode == 4 and failed.stderr.startswith("error[model]: tok/: no such"), failed.stderr
    hint = shell(".venv/bin/allmask mask --orders").stderr.splitlines()[-1]
    ran = shell(hint.removeprefix("  see "))
    assert ran.returncode == 0 and ran.stdout.startswith("Usage: allmask mask")
