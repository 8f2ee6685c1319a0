"""Each claim holds here, and its criterion fails when the effect is taken away."""

from __future__ import annotations

import html
import inspect
import json
import re
from pathlib import Path

import pytest

from allmask.claims import claim as claims
from allmask.claims.claim import Claim, Result, Trial, Verdict, all_claims, named
from allmask.claims.report import plot, summary, write_report

CLAIMS = [claim for claim in all_claims() if claim.name.startswith("C")]  # the others: test_tiles.py
LEARNING = {"C6", "C9", "C10", "C12", "C13", "C20", "C21", "C22", "C23", "C24", "C28"}  # they train many small models
SLOW = {"C7", "C25", *LEARNING}  # `allmask claims --all` runs them
names = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


def effect(claim: Claim) -> str:
    """The keyword of `measure` that takes the effect away if it is false."""
    _, keyword = inspect.signature(claim.module.measure).parameters.values()
    assert keyword.default is True
    return keyword.name


@names
def test_a_claim_says_what_it_is(claim: Claim):
    assert claim.title and claim.statement and claim.source and claim.criterion
    assert len(claim.path.read_text(encoding="utf-8").splitlines()) <= 120


@names
def test_it_fails_when_the_effect_is_taken_away(claim: Claim):
    numbers = claim.module.measure(Trial(brief=claim.name in LEARNING), **{effect(claim): False})
    assert claim.module.judge(numbers).level == "fails"


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.name not in SLOW], ids=lambda claim: claim.name)
def test_it_holds_here(claim: Claim):
    result = claim.run(Trial())
    assert result.held, result.verdict
    again = Result.of(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result  # numbers survive a file
    assert plot(claim, again) == plot(claim, result)


@pytest.mark.parametrize("name", sorted(LEARNING))
def test_a_long_one_runs_when_it_is_short(name: str):
    """Whatever it says after a few steps; `allmask claims` says whether it holds."""
    (claim,) = named([name])
    result = claim.run(Trial(brief=True))
    assert result.verdict.level != "error", result.verdict
    again = Result.of(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result and plot(claim, again) == plot(claim, result)


def test_two_at_a_time(cli, tmp_path: Path):
    ran = cli("claims", "C29", "C27", "--jobs", 2, "--json", "--report", tmp_path)
    assert ran.code == 0, ran.err
    assert [row["name"] for row in json.loads(ran.out)] == ["C27", "C29"]
    assert {file.name for file in (tmp_path / "results").iterdir()} == {"C27.json", "C29.json"}


def test_names_are_found_in_any_case_and_order():
    assert [claim.name for claim in named(["c14", "C5"])] == ["C5", "C14"]


def test_an_experiment_that_breaks_off_is_a_result(monkeypatch):
    claim = named(["C27"])[0]
    monkeypatch.setattr(claim.module, "judge", lambda numbers: 1 / 0)
    result = claim.run(Trial())
    assert result.verdict == Verdict("error", "ZeroDivisionError: division by zero") and not result.held


def test_the_page_needs_nothing_from_outside(tmp_path: Path):
    claim = named(["C29"])[0]
    result = claim.run(Trial())
    failed = Result("C27", Verdict("fails", "1 < 2 & so on"), {}, 1.0, False)
    write_report(tmp_path, [(claim, result)])
    page = (tmp_path / "claims.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!#)""", page) and "<script" not in page
    assert "url(" not in page.replace("url(#", "")
    assert page.count("<article") == 1 and page.count("<svg") == 1 and html.escape(claim.title) in page
    assert "| C29 |" in (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert summary([result, failed]).endswith("1 holds, 1 does not hold here")
    assert summary([failed, failed]).endswith(": 2 do not hold here")


def test_the_list_takes_no_time_and_no_torch(cli):
    ran = cli("claims", "--json")
    assert ran.code == 0 and [row["name"] for row in json.loads(ran.out)] == [claim.name for claim in all_claims()]


def test_a_report_is_continued(cli, tmp_path: Path, monkeypatch):
    assert cli("claims", "C27", "--report", tmp_path).code == 0
    monkeypatch.setattr(
        claims.Claim, "run", lambda self, trial: Result(self.name, Verdict("fails", "no"), {}, 0, False)
    )
    assert cli("claims", "C27", "--report", tmp_path).code == 0  # not run again
    assert cli("claims", "C27", "--report", tmp_path, "--again").code == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["C5", "--all"], "leave out the names"),
        (["--report", "out"], "no claim is named"),
        (["C99"], "C99: no such claim"),
    ],
)
def test_misuse(cli, words: list[str], says: str):
    ran = cli("claims", *words)
    assert ran.code == 2 and says in ran.err
