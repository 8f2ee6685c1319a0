"""Options are declared once: the command line, config.yaml, --help and a page of the docs come from the declaration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import allmask
from allmask import options
from allmask.cli import _docs
from allmask.cli._options import merged
from allmask.cli._run import Request
from allmask.cli.main import main
from allmask.errors import UsageError
from allmask.options import Option, Settings, another_default, described, option
from allmask.registry import TASKS
from allmask.runs.options import TASKS_OF, check_values, run_of

RUNS = [(command, task) for command, tasks in TASKS_OF.items() for task in tasks]
CLASSES = [
    kind for kind in vars(options).values() if isinstance(kind, type) and is_dataclass(kind) and kind is not Option
]


# ---- declarations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_option_has_a_help_text(kind: type):
    for entry in fields(kind):
        declared = described(entry)
        assert declared.help, f"{kind.__name__}.{entry.name}"
        assert len(declared.help) <= 125 and declared.help[-1] in ".…:", declared.help
        declared.check(entry.name, entry.default if isinstance(entry.default, int | float | str) else None)


@pytest.mark.parametrize(
    ("declared", "value", "says"),
    [
        (Option(choices=("a", "b")), "c", "x is 'c'; expected a or b"),
        (Option(choices=("a", "b", "c", "d")), "e", "expected one of a, b, c, d"),
        (Option(minimum=2), 1, "x is 1; expected at least 2"),
        (Option(above=0), 0.0, "x is 0.0; it must be positive"),
        (Option(above=0), float("nan"), "x is nan"),
        (Option(minimum=0, below=1), 1.0, "expected 0 <= x < 1"),
        (Option(above=0, maximum=1), 1.5, "expected 0 < x <= 1"),
        (Option(minimum=0, below=float("inf")), float("inf"), "expected at least 0"),
    ],
)
def test_limits(declared: Option, value, says: str):
    with pytest.raises(UsageError, match=re.escape(says)):
        declared.check("x", value)
    with pytest.raises(UsageError, match=r"^run.yaml: x is "):
        declared.check("x", value, "run.yaml: ")
    declared.check("x", None)


def test_what_a_file_may_say_besides():
    declared = Option(choices=("a",), other_names=("b",))
    declared.check("x", "b")
    with pytest.raises(UsageError, match=r"expected a$"):
        declared.check("x", "c")


def test_another_default_keeps_the_rest():
    @dataclass(frozen=True)
    class Shorter:
        epochs: float = another_default(Settings, "epochs", 1.0)

    (entry,) = fields(Shorter)
    assert Shorter().epochs == 1.0 and described(entry).help == "Passes over the data." and described(entry).above == 0


def test_the_choices_are_those_that_there_are():
    from allmask.gan.networks import PRESETS as GANS
    from allmask.registry import OBJECTIVES
    from allmask.tasks.metrics.entities import SCHEMES
    from allmask.text.truncate import RULES
    from allmask.training.schedule import SCHEDULES
    from allmask.vision.resnet import PRESETS

    assert tuple(SCHEDULES) == options.SCHEDULES and tuple(RULES) == options.CUTS
    assert set(options.TAG_SCHEMES) == set(SCHEMES)
    assert set(options.IMAGE_PRESETS) == set(PRESETS) and set(options.GAN_PRESETS) == set(GANS)
    assert {name: OBJECTIVES[name].frame for name in OBJECTIVES} == options.FRAMES
    assert set(options.OF_PAIRS) == {name for name in OBJECTIVES if OBJECTIVES[name].pairs}
    for name, kind in options.TASK_OPTIONS.items():
        assert kind.name == name and issubclass(TASKS[name], kind) and fields(TASKS[name]) == fields(kind)


@pytest.mark.parametrize("name", ["finetune", "train", "pretrain"])
def test_no_option_is_declared_a_second_time(name: str):
    """A command that trains has no parameters of its own; its options are fields."""
    tree = ast.parse((Path(allmask.__file__).parent / "cli" / f"{name}.py").read_text(encoding="utf-8"))
    called = {getattr(node.func, "attr", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"Option", "Argument"}


@pytest.mark.parametrize(("command", "task"), RUNS)
def test_the_fields_of_a_run_have_different_names(command: str, task: str):
    names = [entry.name for entry in run_of(command, task).entries()]
    assert len(names) == len(set(names))


# ---- --help ----------------------------------------------------------------------------------------------------


def sections(text: str) -> dict[str, list[str]]:
    """The lines of --help by section, those of an option joined."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.fullmatch(r"\w+:", line):
            lines = found.setdefault(line[:-1], [])
        elif found and re.match(r"  \S", line):
            lines.append(" ".join(line.split()))
        elif found and line.strip():
            lines[-1] += " " + line.strip()
    return found


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    assert main([*words, "--help"]) == 0
    return sections(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["finetune", "train", "pretrain"])
def test_help_has_sections(name: str, capsys):
    found = shown(capsys, name)
    found.pop("Arguments", None)
    assert [*found] == ["Data", "Model", "Training", "Output", "Advanced"]
    lines = [line for section in found.values() for line in section if line.startswith("-")]
    flags = [re.findall(r"--(?:\[no-\])?([\w-]+)", line)[0] for line in lines]
    assert len(flags) == len(set(flags))
    without = {flag for flag, line in zip(flags, lines, strict=True) if "[default: " not in line}
    controls = {"config", "out", "resume", "quiet", "json", "shard", "help"}
    assert without - controls == {"steps"} | ({"data"} if name != "train" else set()) | (
        {"tokenizer", "from", "ngrams", "unilm-weights"} if name == "pretrain" else set()
    )


def test_help_says_which_tasks_have_an_option_and_what_each_has_as_its_default(capsys):
    found = shown(capsys, "finetune")
    (source,) = (line for line in found["Data"] if line.startswith("--max-source"))
    assert source == "--max-source <int> title, translate: longest source, in tokens. [default: 254]"
    (target,) = (line for line in found["Data"] if line.startswith("--max-target"))
    assert target.endswith("[default: 64; translate: 254]")
    (cut,) = (line for line in found["Data"] if line.startswith("--truncate"))
    assert cut.startswith("--truncate head|tail|head+tail|windows") and cut.endswith(
        "[default: head; choose: head+tail]"
    )
    found = shown(capsys, "train")
    (epochs,) = (line for line in found["Training"] if line.startswith("--epochs"))
    assert epochs == "--epochs <float> Passes over the data. [default: 20; image: 30; gan: 100]"
    (layers,) = (line for line in found["Model"] if line.startswith("--layers"))
    assert "texts: layers of each stack." in layers


def test_help_for_one_task(capsys):
    found = [line for section in shown(capsys, "finetune", "--task", "classify").values() for line in section]
    flags = {line.split()[0] for line in found if line.startswith("-")}
    assert {"--max-length", "--class-weights", "--lr"} <= flags
    assert not flags & {"--max-source", "--stride", "--[no-]crf", "--best"}
    assert not any("classify:" in line for line in found)
    image = " ".join(line for section in shown(capsys, "train", "--task", "image").values() for line in section)
    assert "--batch-images" in image and "--batch-tokens" not in image and "--loss" not in image


def test_every_command_has_sections(capsys):
    assert [*shown(capsys, "generate")][:5] == ["Arguments", "Data", "Model", "Writing", "Sampling"]
    assert "Output" in shown(capsys, "mask") and "Output" in shown(capsys, "tokenizer", "train")


def test_the_page_is_up_to_date():
    page = Path(__file__).parent.parent / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == _docs.markdown(), "python -m allmask.cli._docs > docs/options.md"


# ---- a task of another package ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sentiment:
    """As a package of somebody else declares it: one option described, one not."""

    name: ClassVar[str] = "sentiment"
    prunes: ClassVar[bool] = False
    open_settings: ClassVar[frozenset[str]] = frozenset()
    shades: int = option(3, "Shades of opinion to tell apart.", "model", minimum=2)
    tone: str = "kind"

    def workload(self, *asked: object) -> None:
        """It can be trained; here it never is."""


@pytest.fixture
def sentiment() -> Iterator[None]:
    TASKS.register("sentiment", Sentiment)
    yield
    del TASKS.registered["sentiment"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What `allmask finetune` would start."""
    found: list[Request] = []
    monkeypatch.setattr("allmask.cli._run.drive", lambda command, request: found.append(request))
    return found


def test_a_new_task_brings_its_options(sentiment, asked: list[Request], tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").touch()
    words = ["finetune", "minilm", "--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run")]
    assert main([*words, "--task", "sentiment", "--shades", "5", "--tone", "sharp"]) == 0, capsys.readouterr().err
    assert (asked[0].given["shades"], asked[0].given["tone"]) == (5, "sharp")
    assert main([*words, "--task=sentiment", "--shades", "1"]) == 2
    assert "--shades is 1; expected at least 2" in capsys.readouterr().err
    assert main([*words, "--shades", "5"]) == 2  # no task has it
    assert "No such option: --shades" in capsys.readouterr().err
    assert main([*words, "--task", "sentiment", "--stride", "5"]) == 2
    assert "--stride is for --task answer, not for sentiment" in capsys.readouterr().err


def test_a_new_task_in_a_file(sentiment, asked: list[Request], tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").touch()
    file = tmp_path / "run.yaml"
    file.write_text(f"model: minilm\ntask: sentiment\ndata: {tmp_path / 'a.jsonl'}\nshades: 4\n")
    words = ["finetune", "--config", str(file), "--out", str(tmp_path / "run")]
    assert main([*words, "--tone", "dry"]) == 0, capsys.readouterr().err
    assert (asked[0].given["shades"], asked[0].given["tone"]) == (4, "dry")
    for line, says in {
        "shades: many": f"{file}: shades is 'many'; expected a whole number",
        "shades: 1": f"{file}: shades is 1; expected at least 2",
        "shade: 1": f"{file}: unknown setting shade\n  did you mean shades?",
        "max_source: 9": f"{file}: max_source is for --task title or translate, not for sentiment",
    }.items():
        file.write_text(f"model: minilm\ntask: sentiment\ndata: {tmp_path / 'a.jsonl'}\n{line}\n")
        assert main(words) == 2
        assert says in capsys.readouterr().err


def test_help_of_a_new_task(sentiment, capsys):
    found = shown(capsys, "finetune", "--task", "sentiment")
    assert "--shades <int> Shades of opinion to tell apart. [default: 3]" in found["Model"]
    assert "--tone <str> [default: kind]" in found["Advanced"]


# ---- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "values", "says"),
    [
        ("finetune", {"task": "titel"}, "unknown task titel\n  did you mean title?"),
        ("finetune", {"task": "image"}, "unknown task image\n  allmask train has it"),
        ("train", {"task": "classify"}, "unknown task classify\n  allmask finetune has it"),
        ("finetune", {"model": "m", "data": "d", "width": 8}, "width: for a new model"),
        ("finetune", {"model": "m", "data": "d", "preset": "t5-small"}, "with a model or with a preset"),
        ("finetune", {"model": "m", "data": "d", "objective": "mlm"}, "objective is for allmask pretrain"),
        ("pretrain", {"data": ["d"], "tokenizer": "t", "seeds": 3}, "seeds is for allmask finetune"),
        ("train", {"data": "d", "average": 5, "keep": 2}, "raise --keep"),
    ],
)
def test_contradictions(command: str, values: dict, says: str):
    with pytest.raises(UsageError) as refused:
        check_values(command, values)
    assert says in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(allmask.errors.DataError, match=r"nothing.csv: no such file"):
        check_values("finetune", {"model": "m", "data": str(tmp_path / "nothing.csv")})


def test_merged_options_of_all_tasks_are_shown_once():
    names = [entry.name for entry in merged([run_of("train", task) for task in TASKS_OF["train"]])]
    assert len(names) == len(set(names)) and {"batch_tokens", "batch_images", "crop", "k"} <= set(names)
