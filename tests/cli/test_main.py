"""The shell around the commands: what is printed where, and with which exit code it ends."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from types import ModuleType
from typing import Annotated, Literal

import pytest
import typer

from allmask import __version__, errors
from allmask.cli import emit, examples, main, note

RAISES: dict[str, BaseException] = {
    "usage": errors.UsageError("--a and --b exclude each other"),
    "data": errors.DataError('dev.jsonl:214: "label" is "neutrl"', 'did you mean "neutral"?\nor pass --skip'),
    "model": errors.CheckpointError("模型/config.json: not JSON"),
    "resources": errors.ResourceError("no CJK font"),
    "bug": ZeroDivisionError("division\nby zero"),
    "memory": MemoryError(),
    "missing": FileNotFoundError(errno.ENOENT, "No such file or directory", "corpus.txt"),
    "temporary": FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/data']"),
    "pictures": OSError("Matplotlib requires access to … a temporary directory could not be created; set MPLCONFIGDIR"),
    "denied": PermissionError(errno.EACCES, "Permission denied", "/root/x"),
    "panic": BaseException("a panic in Rust"),
    "interrupt": KeyboardInterrupt(),
    "exit": typer.Exit(7),
}
NOWHERE = (
    "error[resources]: there is no folder to which temporary files can be written\n"
    "  name a folder: TMPDIR=FOLDER; in a container that is read-only, add --tmpfs /tmp\n"
)
REPORT_IT = "  run with --debug for the traceback; please report\n"


def fail(
    how: Annotated[str, typer.Argument(help="What goes wrong.")] = "",
    source: Annotated[str, typer.Option(help="Some text.")] = "",
    layers: Annotated[int, typer.Option(help="How many.")] = 1,
    tone: Annotated[Literal["soft", "sharp"], typer.Option(help="In which tone.")] = "soft",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Fail in the way asked for, or print what was given."""
    if how:
        raise RAISES[how]
    note("about to print")
    emit(as_json, {"source": source, "layers": layers}, f"{source} × {layers}")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up commands in the place of the real ones: `fail`, and `group` with its subcommand `fail`."""
    group = typer.Typer(no_args_is_help=True)
    group.command("fail", epilog=examples("allmask group fail"))(fail)
    group.callback()(lambda: None)
    for name, command in {"fail": fail, "group": group}.items():
        module = ModuleType(f"made_up_{name}", f"All about {name}.")
        module.command, module.EXAMPLES = command, f"allmask {name} --source 北京欢迎你\n\n  allmask {name} usage"  # type: ignore
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(main, "COMMANDS", {name: (f"made_up_{name}", f"Short {name}.") for name in ("fail", "group")})
    monkeypatch.delenv("ALLMASK_DEBUG", raising=False)


def test_results_go_to_stdout_and_the_rest_to_stderr(cli):
    assert cli("fail", "--source", "白切鸡", "--layers", 2) == (0, "白切鸡 × 2\n", "about to print\n")


def test_json_is_json_with_chinese_as_it_is(cli):
    ran = cli("fail", "--source", "白切鸡", "--json")
    assert json.loads(ran.out) == {"source": "白切鸡", "layers": 1}
    assert "白切鸡" in ran.out


def test_json_refuses_what_json_cannot_say():
    with pytest.raises(ValueError):
        emit(True, {"loss": float("nan")}, "")


@pytest.mark.parametrize(
    ("how", "code", "err"),
    [
        ("usage", 2, "error[usage]: --a and --b exclude each other\n"),
        ("data", 3, 'error[data]: dev.jsonl:214: "label" is "neutrl"\n  did you mean "neutral"?\n  or pass --skip\n'),
        ("model", 4, "error[model]: 模型/config.json: not JSON\n"),
        ("resources", 5, "error[resources]: no CJK font\n"),
        ("memory", 5, "error[resources]: out of memory\n  close other programs, or ask for less at a time\n"),
        ("missing", 3, "error[data]: corpus.txt: no such file or folder\n"),
        ("temporary", 5, NOWHERE),
        ("pictures", 5, NOWHERE),
        ("denied", 5, "error[resources]: /root/x: Permission denied\n"),
        ("bug", 1, "error[internal]: ZeroDivisionError: division by zero\n" + REPORT_IT),
        ("panic", 1, "error[internal]: BaseException: a panic in Rust\n" + REPORT_IT),
        ("interrupt", 130, ""),
        ("exit", 7, ""),
    ],
)
def test_each_failure_has_its_words_and_its_code(cli, how: str, code: int, err: str):
    assert cli("fail", how) == (code, "", err)
    assert cli("group", "fail", how) == (code, "", err)


@pytest.mark.parametrize(
    "words", [("--debug", "fail", "data"), ("fail", "data", "--debug"), ("fail", "--debug", "data")]
)
def test_debug_anywhere_shows_the_traceback(cli, words: tuple[str, ...]):
    ran = cli(*words)
    assert ran.code == 3
    assert ran.err.startswith("Traceback") and "error[data]: dev.jsonl:214" in ran.err


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_from_the_environment(cli, monkeypatch: pytest.MonkeyPatch, value: str, shown: bool):
    monkeypatch.setenv("ALLMASK_DEBUG", value)
    assert ("Traceback" in cli("fail", "bug").err) == shown


def test_after_two_dashes_a_word_is_a_word(cli):
    ran = cli("fail", "--", "--debug")
    assert ran.code == 1 and "KeyError: '--debug'" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("words", "says", "see"),
    [
        (["fial"], "Did you mean 'fail'?", "see allmask --help"),
        (["fail", "--sorce", "x"], "Did you mean --source?", "see allmask fail --help"),
        (["--versoin"], "Did you mean --version?", "see allmask --help"),
        (["group", "fial"], "Did you mean 'fail'?", "see allmask group --help"),
        (["fail", "--layers", "two"], "'--layers'", "see allmask fail --help"),
        (["fail", "--tone", "loud"], "'--tone': 'loud' is not one of 'soft'", "see allmask fail --help"),
        (["fail", "--layers"], "'--layers' requires an argument", "add --help to see what is expected"),
        (["fail", "data", "more"], "more", "see allmask fail --help"),
        (["group"], "Missing command", "see allmask group --help"),
    ],
)
def test_mistyped(cli, words: list[str], says: str, see: str):
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("error[usage]: ") and says in first
    assert second.strip() == see


def test_an_option_that_only_has_its_dashes_in_common_is_no_guess(cli):
    assert cli("fail", "--text").err.splitlines()[0] == "error[usage]: No such option: --text"  # not --tone


def test_version(cli):
    assert cli("--version") == (0, f"allmask {__version__}\n", "")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands_without_importing_them(cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]):
    monkeypatch.delitem(sys.modules, "made_up_fail")
    ran = cli(*words)
    assert ran.code == 0 and "fail   Short fail." in ran.out and "group  Short group." in ran.out
    assert ran.out.splitlines()[-1] == "    allmask COMMAND --help"


@pytest.mark.parametrize("name", ["fail", "group"])
def test_help_of_a_command_ends_with_its_examples(cli, name: str):
    ran = cli(name, "--help")
    assert ran.code == 0
    assert ran.out.splitlines()[-3:] == [
        "  Examples:",
        f"    allmask {name} --source 北京欢迎你",
        f"    allmask {name} usage",
    ]


def test_help_of_a_subcommand(cli):
    ran = cli("group", "fail", "--help")
    assert ran.code == 0 and "Fail in the way asked for" in ran.out
    assert ran.out.splitlines()[-1] == "    allmask group fail"


def test_a_terminal_without_chinese_gets_escapes(monkeypatch: pytest.MonkeyPatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main.main(["fail", "--source", "白"]) == 0
    assert narrow.buffer.getvalue() == b"\\u767d \\xd7 1\n"  # type: ignore


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["noticed when flushing", "noticed when printing"])
def test_a_closed_pipe_prints_no_error(size: int):
    script = (
        "import sys, types; from allmask.cli import main\n"
        f"def command(): sys.stdin.read(); print('x' * {size}); print('y')\n"
        "sys.modules['made_up'] = types.SimpleNamespace(command=command, EXAMPLES='allmask it')\n"
        "main.COMMANDS['it'] = ('made_up', 'It.')\n"
        "sys.exit(main.main(['it']))\n"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()  # only now does the command print
    assert (process.stderr.read(), process.wait(60)) == ("", 1)
    process.stderr.close()
