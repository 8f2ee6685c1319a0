"""Each claim holds here, and its criterion fails when the effect is taken away."""

from __future__ import annotations

import copy
import html
import inspect
import json
import re
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allmask.claims import claim as claims
from allmask.claims.c21_long_texts import ROOM, TOPICS, long_texts
from allmask.claims.claim import SHARING, Claim, Result, Trial, Verdict, all_claims, named, together
from allmask.claims.report import plot, summary, write_report
from allmask.nn.layers import NORMS
from allmask.options import CUTS

TRAINS = {  # many small models: here briefly, `allmask claims` does it well
    "C6", "C9", "C10", "C12", "C13", "C20", "C21", "C22", "C23", "C24", "C28",
    "D4", "D5", "D6", "D8", "D9", "D12", "D13", "D14",
}  # fmt: skip
NOT_HERE = {
    "C7",
    "C25",
    "D10",
    "D11",
    *TRAINS,
}  # these take long, or measure time: only `allmask claims` says if they hold
WHOLE = {"C19", "C26"}  # what these say shows in many texts and many samples only
TIMES = {"C16", "C17"}  # they measure processor time, which a busy machine disturbs: one of three tries has to hold
CLAIMS = all_claims()
names = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


def effect(claim: Claim) -> str:
    """The keyword of `measure` that takes the effect away if it is false."""
    _, keyword = inspect.signature(claim.module.measure).parameters.values()
    assert keyword.default is True
    return keyword.name


@cache
def briefly(name: str, with_effect: bool) -> dict[str, Any]:
    (claim,) = named([name])
    return claim.module.measure(Trial(brief=True), **{effect(claim): with_effect})


# ---- each claim ----------------------------------------------------------------------------------------------------


def test_all_are_there():
    assert [claim.name for claim in CLAIMS] == [f"C{n}" for n in range(1, 31)] + [f"D{n}" for n in range(1, 16)]


@names
def test_a_claim_says_what_it_is(claim: Claim):
    assert claim.title and claim.statement and claim.source and claim.criterion
    assert 30 <= len(claim.path.read_text(encoding="utf-8").splitlines()) <= 120


@names
def test_it_fails_when_the_effect_is_taken_away(claim: Claim):
    assert claim.module.judge(briefly(claim.name, False)).level == "fails"


@pytest.fixture
def plain_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots as they are drawn, but with margins that are not fitted to their labels: that draws them three times."""
    import matplotlib.pyplot as plt

    subplots = plt.subplots
    monkeypatch.setattr(plt, "subplots", lambda layout, **how: subplots(**how))


@names
def test_it_holds_or_runs(claim: Claim, plain_margins: None):
    """What trains says nothing after a few steps; all others hold."""
    if claim.name in NOT_HERE:
        numbers = briefly(claim.name, True)
        result = Result(claim.name, claim.module.judge(numbers), numbers, 1.0, False)
    else:
        trial = Trial(brief=claim.name not in WHOLE)
        result = claim.run(trial)
        for _ in range(2):
            result = claim.run(trial) if claim.name in TIMES and not result.held else result
        assert result.held, result.verdict
    again = Result.of(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result  # numbers survive a file
    assert plot(claim, again).startswith("<svg")


# ---- what trains: a few steps show that arms are the same without the effect, and numbers that arms alike then fail --

ARMS = {  # without the effect, the others of a group are trained as the first
    "C9": [["naive", "prefix"]],
    "C10": [["lstm", "pretrained"]],
    "C13": [["causal", "mlm"]],
    "C20": [["loss/none", "loss/general"], ["accuracy/none", "accuracy/general"]],
    "C22": [["frozen", "64"]],
    "C23": [["mlm", "nsp", "causal"]],
    "C24": [[f"runs/plain {depth}", f"runs/residual {depth}"] for depth in (8, 26)],
    "C28": [["plain", "smoothed"]],
    "D4": [["post", "pre"]],
    "D5": [[f"{kind}, 100/0/0", f"{kind}, 80/10/10"] for kind in ("fine-tuned", "frozen")],
    "D6": [["Q = K", "three", "K = V"]],
    "D8": [["1", "8"]],
    "D9": [["learned", "sinusoidal"]],
    "D12": [["last", "last four"]],
    "D14": [["left to right", "with two LSTMs", "both ways"]],
}


def _depth(loss: float, error: float) -> list[dict[str, float]]:
    return [{"loss": loss, "error": error}]


def _norms(gradient: float, loss: float) -> dict[str, Any]:
    return {"gradients": [[1.0, gradient]], "losses": {norm: [loss] for norm in NORMS}, "1e-3": [0.4]}


LEARNT = {  # numbers of trainings in which the claim shows
    "C9": {"prefix": [[1.0, 0.4]], "naive": [[1.0, 0.8, 0.4]]},
    "C10": {"pretrained": [[60.0, 80.0]], "lstm": [[9.0] * 59 + [80.0]]},
    "C13": {"causal": [[10.0, 20.0]], "mlm": [[5.0, 10.0]]},
    "C20": {
        "before": 1.0,
        "loss": {"none": [2.0], "task": [3.0], "general": [1.2]},
        "accuracy": {"none": [80.0], "task": [70.0], "general": [80.0]},
    },
    "C22": {"frozen": [70.0], "16": [75.0], "32": [80.0], "64": [97.0, 98.0], "uncorrected, 3 epochs": [60.0, 90.0]},
    "C23": {name: {"pairs": [score], "topics": [score]} for name, score in (("nsp", 90), ("mlm", 80), ("causal", 70))},
    "C24": {
        "operations": {"vgg19": 19.6, "resnet34": 3.66, "resnet50": 4.09},
        "runs": {
            "plain 8": _depth(0.3, 9), "plain 26": _depth(1.4, 60), "residual 8": _depth(0.1, 2),
            "residual 26": _depth(0.1, 2), "shortcut A": _depth(0.1, 4), "shortcut C": _depth(0.1, 2),
        },
    },
    "C28": {"plain": {"perplexity": [1.5], "accuracy": [92.0]}, "smoothed": {"perplexity": [1.6], "accuracy": [93.0]}},
    "D4": {"post": _norms(4.0, 0.9), "pre": _norms(1.0, 0.3)},
    "D5": {
        "fine-tuned, 80/10/10": [90.0, 91.0], "fine-tuned, 100/0/0": [80.0, 82.0],
        "frozen, 80/10/10": [80.0, 81.0], "frozen, 100/0/0": [70.0, 72.0],
    },
    "D6": {"three": [99.0], "Q = K": [60.0], "K = V": [97.0]},
    "D8": {"1": [60.0], "8": [95.0]},
    "D9": {kind: {"within": [1], "beyond": [far]} for kind, far in (("learned", 2), ("sinusoidal", 1), ("rotary", 1))},
    "D12": {"last": [80.0, 81.0], "last four": [90.0, 92.0]},
    "D14": {"left to right": [70.0, 71.0], "with two LSTMs": [80.0, 82.0], "both ways": [90.0, 91.0]},
}  # fmt: skip


def arm(numbers: dict[str, Any], path: str) -> Any:
    for key in path.split("/") if path.count("/") == 1 else [path]:
        numbers = numbers[key]
    return numbers


@pytest.mark.parametrize("name", ARMS)
def test_without_its_effect_arms_are_the_same_however_long_they_are_trained(name: str):
    (claim,) = named([name])
    without, with_effect = briefly(name, False), briefly(name, True)
    for first, *others in ARMS[name]:
        assert all(arm(without, other) == arm(without, first) for other in others)
    differ = any(arm(with_effect, other) != arm(with_effect, group[0]) for group in ARMS[name] for other in group[1:])
    assert differ or name == "C22"  # after three steps, thirty answers are as right with either
    learnt = copy.deepcopy(LEARNT[name])
    assert claim.module.judge(learnt).level == "holds"
    for first, *others in ARMS[name]:
        for other in others:
            *above, last = other.split("/") if other.count("/") == 1 else [other]
            (learnt[above[0]] if above else learnt)[last] = arm(learnt, first)
    assert claim.module.judge(learnt).level == "fails"


def test_without_the_effect_no_end_of_a_long_text_says_what_it_is_about():
    (claim,) = named(["C21"])

    for at_the_ends, low, high in ((True, 0.3, 0.6), (False, 0.12, 0.22)):  # a sixth by chance
        for end in (slice(None, ROOM), slice(-ROOM, None)):
            own = things = 0
            for record in long_texts(500, 1, at_the_ends):
                topics = [
                    topic for topic, words in TOPICS.items() for one in record.fields["text"][end] if one in words
                ]
                own, things = own + topics.count(record.fields["label"]), things + len(topics)
            assert low < own / things < high
    assert claim.module.judge(dict(zip(CUTS, ([35.0], [35.0], [60.0]), strict=True))).level == "holds"
    assert claim.module.judge({cut: [100 / len(TOPICS)] for cut in CUTS}).level == "fails"


def test_untrained_models_find_no_next_sentences_though_the_shares_are_right():
    (claim,) = named(["C12"])
    found = briefly("C12", False)
    assert claim.module.judge(found | {"accuracy": [95.0]}).level == "holds"
    assert claim.module.judge(found).level == "fails"


# ---- the command ---------------------------------------------------------------------------------------------------


def test_two_at_a_time(cli, tmp_path: Path, warm_spawn: None):
    ran = cli("claims", "C29", "C27", "--jobs", 2, "--json", "--report", tmp_path)
    assert ran.code == 0, ran.err
    assert [row["name"] for row in json.loads(ran.out)] == ["C27", "C29"]
    assert {file.name for file in (tmp_path / "results").iterdir()} == {"C27.json", "C29.json"}


def test_names_are_found_in_any_case_and_order():
    assert [claim.name for claim in named(["c14", "C5"])] == ["C5", "C14"]


def test_claims_that_share_models_run_in_one_process():
    groups = [[claim.name for claim in group] for group in together(CLAIMS)]
    assert groups[: len(SHARING)] == [list(names) for names in SHARING]
    assert sorted(name for group in groups for name in group) == sorted(claim.name for claim in CLAIMS)
    assert [[claim.name for claim in group] for group in together(named(["C13", "C12", "C5"]))] == [
        ["C5"],
        ["C12"],
        ["C13"],
    ]


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
    assert plot(claim, result) == plot(claim, result)  # the same bytes each time
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


@pytest.mark.parametrize("kind", ["--quick", "--full", "--all"])
def test_all_run_without_a_name(cli, monkeypatch, kind: str):
    def run(self: Claim, trial: Trial) -> Result:
        assert trial.full == (kind == "--full")
        return Result(self.name, Verdict("holds", ""), {}, 0, trial.full, {})

    monkeypatch.setattr(claims.Claim, "run", run)
    ran = cli("claims", kind, "--jobs", 1, "--json")
    assert ran.code == 0 and [row["name"] for row in json.loads(ran.out)] == [claim.name for claim in CLAIMS]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_goes_on(cli, tmp_path: Path, monkeypatch, number: signal.Signals, code: int):
    """The finished claim is not repeated, nor is the finished part of the other."""
    computed: list[str] = []

    def measure(trial: Trial) -> dict[str, Any]:
        parts = [trial.part("first", lambda: computed.append("first") or 1)]
        if computed == ["first"]:
            computed.append("stopped")
            signal.raise_signal(number)
        return {"parts": [*parts, trial.part("second", lambda: computed.append("second") or 2)]}

    (claim,) = named(["C29"])
    monkeypatch.setattr(claim.module, "measure", measure)
    monkeypatch.setattr(claim.module, "judge", lambda numbers: Verdict("holds", str(numbers["parts"])))
    monkeypatch.setattr(claim.module, "draw", lambda axes, numbers: None)
    words = ["claims", "C27", "C29", "--full", "--jobs", "1", "--report", tmp_path]
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    ran = cli(*words)
    assert ran.code == code and f"stopped by {number.name}" in ran.err and "the same command goes on" in ran.err
    assert {file.name for file in (tmp_path / "results").iterdir()} == {"C27.json"}
    ran = cli(*words)
    assert ran.code == 0 and "holds: [1, 2]" in ran.out and computed == ["first", "stopped", "second"]
    assert not list((tmp_path / "parts").iterdir())
    assert before == {each: signal.getsignal(each) for each in before}


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
