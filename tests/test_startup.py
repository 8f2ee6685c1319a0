"""Starting up is quick because torch is imported late: `import allmask` and every `--help` do without it."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import typer

from allmask import cli
from allmask.cli.main import COMMANDS

HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "transformers",
    "rich",
    "pydantic",
)
REPORT = f"import sys; print('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
HELP = "import sys\nfrom allmask.cli.main import main\ncode = main(sys.argv[1:])\n" + REPORT + "\nsys.exit(code)"


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)


def test_import_is_light():
    ran = python("import allmask; allmask.__version__; dir(allmask)\n" + REPORT)
    assert (ran.returncode, ran.stdout.strip()) == (0, "HEAVY"), ran.stderr


def test_names_resolve_on_first_use():
    ran = python("import allmask; print(allmask.Mask.__name__, 'torch' in __import__('sys').modules)")
    assert ran.stdout.split() == ["Mask", "True"], ran.stderr


def check_help(*words: str) -> None:
    """`allmask WORDS --help` succeeds, imports nothing heavy and closes with examples."""
    ran = python(HELP, *words, "--help")
    assert ran.returncode == 0, ran.stderr
    *text, last = ran.stdout.strip().splitlines()
    assert last == "HEAVY", f"{last} was imported for --help"
    assert "Examples:" in ran.stdout
    assert text[-1].strip().startswith("allmask ")


def test_help():
    check_help()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str):
    check_help(name)
    command = import_module(COMMANDS[name][0]).command
    for subcommand in command.registered_commands if isinstance(command, typer.Typer) else []:
        check_help(name, subcommand.name or subcommand.callback.__name__)


def test_every_command_file_is_in_the_table():
    files = {path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")} - {"main"}
    assert files == set(COMMANDS)


def test_help_answers_soon():
    """Aimed at 0.3 s on an idle machine; ten times that is a bug on any."""
    start = time.perf_counter()
    python(HELP, "--help")
    assert time.perf_counter() - start < 3


def test_python_dash_m_is_the_same_command():
    ran = subprocess.run([sys.executable, "-m", "allmask", "--version"], capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith("allmask ") and ran.returncode == 0
