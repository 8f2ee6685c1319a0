"""Verdicts of the tiles D1, D2, … on numbers made by hand, and what tiles share. The rest is in test_claims.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from allmask.claims import made_up
from allmask.claims.claim import Trial, Verdict, all_claims, named
from allmask.claims.report import MARKS, write_docs
from allmask.errors import DataError
from allmask.nn.layers import NORMS

# ---- verdicts, on numbers made by hand -----------------------------------------------------------------------------


def norms(gradient: float, loss: float, batch: float | None = None) -> dict:
    losses = {norm: [loss] for norm in NORMS} | {"batch": [batch or loss]}
    return {"gradients": [[1.0, gradient]], "losses": losses, "1e-3": [0.4]}


HIGH, LOW, EVEN = [90.0, 91.0, 92.0], [80.0, 80.5, 82.0], [90.5, 90.5, 92.0]
TUNED = {"fine-tuned, 80/10/10": HIGH, "fine-tuned, 100/0/0": LOW, "frozen, 80/10/10": HIGH, "frozen, 100/0/0": LOW}
CASES = [
    ("D4", {"post": norms(4.0, 0.9), "pre": norms(1.0, 0.4)}, "holds"),
    ("D4", {"post": norms(4.0, 0.9), "pre": norms(1.0, 0.8)}, "weaker"),
    ("D4", {"post": norms(1.0, 0.9), "pre": norms(1.0, 0.4)}, "weaker"),
    ("D4", {"post": norms(4.0, 0.9), "pre": norms(1.0, 0.4, batch=0.95)}, "weaker"),
    ("D4", {"post": norms(4.0, 0.9), "pre": norms(4.0, 0.9)}, "fails"),
    ("D5", TUNED, "holds"),
    ("D5", TUNED | {"fine-tuned, 100/0/0": EVEN}, "weaker"),
    ("D5", TUNED | {"fine-tuned, 100/0/0": EVEN, "frozen, 100/0/0": EVEN}, "fails"),
    ("D6", {"three": [99.0], "Q = K": [60.0], "K = V": [97.0]}, "holds"),
    ("D6", {"three": [99.0], "Q = K": [60.0], "K = V": [80.0]}, "weaker"),
    ("D6", {"three": [99.0], "Q = K": [90.0], "K = V": [97.0]}, "fails"),
    ("D8", {"1": [60.0], "8": [95.0]}, "holds"),
    ("D8", {"1": [85.0], "8": [95.0]}, "fails"),
    ("D12", {"last": LOW, "last four": HIGH}, "holds"),
    ("D12", {"last": LOW, "last four": [79.0, 85.0, 80.0]}, "weaker"),
    ("D12", {"last": HIGH, "last four": LOW}, "fails"),
    ("D14", {"left to right": [70.0, 70.0, 71.0], "with two LSTMs": LOW, "both ways": HIGH}, "holds"),
    ("D14", {"left to right": LOW, "with two LSTMs": HIGH, "both ways": LOW}, "weaker"),
    ("D14", {"left to right": HIGH, "with two LSTMs": LOW, "both ways": HIGH}, "fails"),
]


@pytest.mark.parametrize(("name", "numbers", "level"), CASES)
def test_verdicts(name: str, numbers: dict, level: str):
    (tile,) = named([name])
    assert tile.module.judge(numbers).level == level


def test_verdicts_of_longer_texts():
    (tile,) = named(["D9"])

    def level(sinusoidal: float, learned: float) -> str:
        beyond = {"learned": learned, "sinusoidal": sinusoidal, "rotary": 1.0}
        return tile.module.judge({kind: {"within": [1.0], "beyond": [loss]} for kind, loss in beyond.items()}).level

    assert [level(1.05, 2.0), level(1.5, 2.0), level(2.5, 2.0), level(1.0, 1.1)] == [
        "holds",
        "weaker",
        "fails",
        "fails",
    ]


# ---- what they share -----------------------------------------------------------------------------------------------


def test_a_look_up_asks_for_the_value_of_the_partner():
    task = made_up.Lookup.of(relations=2, seed=1, kinds=6)
    tokens, values, wanted = task.rows(3, torch.Generator().manual_seed(1))
    for row in range(3):
        own = dict(zip(tokens[row].tolist(), values[row].tolist(), strict=True))
        for place, token in enumerate(tokens[row].tolist()):
            assert wanted[row, place].tolist() == [own[int(partner[token])] for partner in task.partners]
    for partner in task.partners:  # after three steps each token is back, and not before
        assert (partner[partner[partner]] == torch.arange(6)).all() and (partner[partner] != torch.arange(6)).all()


def test_chains_have_the_entropy_that_is_said():
    follows = torch.randperm(made_up.CHAIN_TOKENS)
    ids = made_up.chains(follows, 1, rows=2000, length=20)
    usual = (follows[ids[:, :-1]] == ids[:, 1:]).double().mean().item()
    p, rest = 0.9 + 0.1 / 32, 0.1 * 31 / 32
    assert usual == pytest.approx(p, abs=0.01)
    assert pytest.approx(-p * np.log(p) - rest * np.log(rest / 31)) == made_up.CHAIN_ENTROPY


def test_each_word_belongs_to_two_classes():
    words, classes = made_up.sentences(500, 1)
    pairs = {(int(word), int(one)) for word, one in zip(words.flat, classes.flat, strict=True)}
    counts = [sum(word == made_up.FIRST + number for word, _ in pairs) for number in range(made_up.WORDS)]
    assert set(counts) <= {1, 2} and counts.count(2) > 30
    usual = (3 * classes[:, :-1] + 1) % made_up.CLASSES == classes[:, 1:]
    assert usual.mean() == pytest.approx(0.8 + 0.2 / made_up.CLASSES, abs=0.02)


def test_a_reader_is_not_changed_by_its_fine_tuning():
    body = made_up.reader(1, 2, (0.8, 0.1, 0.1))
    before = copy.deepcopy(body.state_dict())
    made_up.tag_accuracy(body, 1, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())


# ---- the documentation ---------------------------------------------------------------------------------------------


def test_the_page_of_the_documentation_is_written(tmp_path: Path):
    (tmp_path / "figures").mkdir()
    page = tmp_path / "claims.md"
    page.write_text(f"before\n{MARKS[0]}\nstale\n{MARKS[1]}\nafter\n", encoding="utf-8")
    (tile,) = named(["D7"])
    result = replace(tile.run(Trial(brief=True)), verdict=Verdict("weaker", "a | b"))
    for _ in range(2):  # written again, it is the same
        write_docs(tmp_path, [(tile, result)])
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{MARKS[0]}\n1 claim ran in") and text.endswith(f"{MARKS[1]}\nafter\n")
        assert "stale" not in text and f"| D7 | {tile.title} | holds here, but weaker | a \\| b | " in text
        assert all(f"| {claim.name} | {claim.title} | " in text for claim in all_claims())
    assert (tmp_path / "figures" / "claims.html").read_text(encoding="utf-8").count("<article") == 1
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(DataError, match="has no <!-- verdicts -->"):
        write_docs(tmp_path, [(tile, result)])


def test_the_documentation_lists_every_claim():
    text = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    for claim in all_claims():
        assert claim.title in lines[claim.name], "run: python -m allmask.claims.report FOLDER docs"
