"""What a claim is, and how one is run.

Claim     a file of this folder: its statement, source and criterion, read without importing it
Trial     the settings of an experiment: its seeds, and where to report progress
Verdict   holds, weaker or fails, with the figure that decided
Result    a claim that was run
"""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from allmask import __version__
from allmask.errors import UsageError
from allmask.files import atomic_file, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = dict[str, Any]  # what an experiment finds; JSON holds it
WORDS = {"holds": "holds", "weaker": "holds here, but weaker", "fails": "does not hold here", "error": "did not run"}
_FILE = re.compile(r"([cd])(\d\d)_\w+")
_FIELD = re.compile(r"^(Statement|Source|Criterion|Full|At length): ", re.MULTILINE)
SHARING = (  # claims that train the same small models: one process runs them, and trains each model once
    ("C10", "C12", "C20", "C22", "C23"),
    ("C6", "C13"),
    ("D5", "D14"),
)


@dataclass(frozen=True)
class Trial:
    """The settings of an experiment. With `full`, it is repeated three times as often.

    `brief` is for tests: it runs in a second or two, and its numbers mean nothing.
    """

    full: bool = False
    say: Callable[[str], None] = lambda message: None
    brief: bool = False
    folder: Path | None = None  # for the parts of a long experiment

    def seeds(self, count: int) -> range:
        return range(1, 2 if self.brief else 1 + count * (3 if self.full else 1))

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The numbers of a part of a long experiment. If it is stopped and started again, finished parts are read."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            json.dump(found, file)
        return found

    def steps(self, count: int) -> int:
        """How many steps a training has that usually has `count`."""
        return min(count, 3) if self.brief else count

    def examples(self, count: int) -> int:
        """How many examples to make where `count` are usual."""
        return min(count, 30) if self.brief else count


@dataclass(frozen=True)
class Verdict:
    level: Literal["holds", "weaker", "fails", "error"]
    figure: str  # the numbers that decided, in a line

    @property
    def words(self) -> str:
        return WORDS[self.level]


def judged(holds: bool, figure: str, weaker: bool = False) -> Verdict:
    """The usual verdict: the criterion is met, or a weaker form of it, or not."""
    return Verdict("holds" if holds else "weaker" if weaker else "fails", figure)


@dataclass(frozen=True)
class Claim:
    """A file of this folder. Its docstring is read without importing it, so that a list takes no time."""

    path: Path

    @property
    def name(self) -> str:
        """C5 of c05_scaled_products.py."""
        found = _FILE.fullmatch(self.path.stem)
        assert found, self.path
        return f"{found[1].upper()}{int(found[2])}"

    @cached_property
    def _docstring(self) -> str:
        return ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""

    @property
    def title(self) -> str:
        return self._docstring.partition("\n")[0].partition(". ")[2].rstrip(".")

    @cached_property
    def _fields(self) -> dict[str, str]:
        parts = _FIELD.split(self._docstring.partition("\n")[2])[1:]
        return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}

    @property
    def statement(self) -> str:
        return self._fields["Statement"]

    @property
    def source(self) -> str:
        return self._fields["Source"]

    @property
    def criterion(self) -> str:
        return self._fields["Criterion"]

    @property
    def at_length(self) -> str | None:
        """The command that shows the same in a longer run, if there is one."""
        return self._fields.get("At length")

    @property
    def in_full(self) -> str | None:
        """What --full does beyond more repetitions, if anything."""
        return self._fields.get("Full")

    @cached_property
    def module(self) -> ModuleType:
        return importlib.import_module(f"allmask.claims.{self.path.stem}")

    def draw(self, axes: Axes, numbers: Numbers) -> None:
        self.module.draw(axes, numbers)

    def run(self, trial: Trial) -> Result:
        """Measure and judge. An experiment that breaks off is a result, too: the others still run."""
        started = time.process_time()
        numbers: Numbers = {}
        try:
            numbers = self.module.measure(trial)
            verdict = self.module.judge(numbers)
        except Exception as error:
            verdict = Verdict("error", textwrap.shorten(f"{type(error).__name__}: {error}", 200))
        return Result(self.name, verdict, numbers, round(time.process_time() - started, 1), trial.full)


@dataclass(frozen=True)
class Result:
    name: str
    verdict: Verdict
    numbers: Numbers
    seconds: float  # of processor time: a busy machine does not count
    full: bool
    setting: dict[str, str] = field(default_factory=lambda: _setting())

    @property
    def held(self) -> bool:
        return self.verdict.level in ("holds", "weaker")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Result:
        return cls(**{**values, "verdict": Verdict(**values["verdict"])})


def _setting() -> dict[str, str]:
    """Versions and processor: a figure means little without them."""
    import torch

    cpu = f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}"  # the instructions that torch uses
    return {"allmask": __version__, "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu}


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", info)
    return name[1] if name else platform.machine()


def all_claims() -> list[Claim]:
    files = (path for path in Path(__file__).parent.glob("*.py") if _FILE.fullmatch(path.stem))
    return [Claim(path) for path in sorted(files)]


def result_file(report: Path, claim: Claim) -> Path:
    return report / "results" / f"{claim.name}.json"


def saved_result(report: Path, claim: Claim) -> Result | None:
    """The result in the folder of a report; None if there is none, or it cannot be read."""
    try:
        return Result.of(json.loads(result_file(report, claim).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def saved_results(report: Path) -> list[tuple[Claim, Result]]:
    found = ((claim, saved_result(report, claim)) for claim in all_claims())
    return [(claim, result) for claim, result in found if result]


def together(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Put claims that share models into one list, the longest lists first: none of them is left for the end."""
    shared = {name: number for number, names in enumerate(SHARING) for name in names}
    found: dict[Any, list[Claim]] = {}
    for claim in claims:
        found.setdefault(shared.get(claim.name, claim.name), []).append(claim)
    return sorted(found.values(), key=len, reverse=True)


def named(names: Sequence[str]) -> list[Claim]:
    """The claims of these names, in the order of the list."""
    known = {claim.name: claim for claim in all_claims()}
    wanted = [name.upper() for name in names]
    for name in wanted:
        if name not in known:
            raise UsageError(f"{name}: no such claim", did_you_mean(name, known))
    return [claim for name, claim in known.items() if name in wanted]
