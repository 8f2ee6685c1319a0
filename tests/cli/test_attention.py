"""`allmask attention`: text, JSON, pictures, and what a word looks at."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest


def test_json_has_weights_that_sum_to_one(cli, bert: Path):
    data = json.loads(cli("attention", bert, "--text", "red cat", "--target", "cat", "--json").out)
    assert data["rows"] == data["columns"] == ["[CLS]", "red", "cat", "[SEP]", "cat", "[SEP]"]
    assert [sum(row) for row in data["weights"]] == pytest.approx([1] * 6)
    assert data["visible"][0] == [1, 1, 1, 1, 0, 0] and data["weights"][0][4:] == [0, 0]
    assert data["layer"] is None and data["head"] is None


def test_a_map_in_text_and_pictures(cli, bert: Path, tmp_path: Path):
    words = ["--text", "北京欢迎你", "--mask", "causal", "--layer", 1, "--head", 0]
    ran = cli("attention", bert, *words, "--png", tmp_path / "a.png", "--svg", tmp_path / "a.svg")
    assert ran.out.startswith(f"{bert}: layer 1, head 0\n") and "  1 北" in ran.out and "·" in ran.out
    assert ran.err == f"wrote {tmp_path / 'a.svg'}\nwrote {tmp_path / 'a.png'}\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "京" in (tmp_path / "a.svg").read_text()


def test_what_a_word_looks_at(cli, bert: Path):
    ran = cli("attention", bert, "--text", "red cat runs", "--token", "cat", "--top", 2, "--no-special")
    head, *looks = ran.out.split("\n\n")[0:2]
    assert head == "cat (2) looks at, mean of 2 layers, mean of 2 heads:" and len(looks[0].splitlines()) == 2
    assert "[CLS]" not in ran.out and "head 1" in ran.out and "layer 1" in ran.out
    data = json.loads(cli("attention", bert, "--text", "red cat runs", "--token", "2", "--top", 3, "--json").out)
    assert [(row["layer"], row["head"]) for row in data["looks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    best = [token["weight"] for token in data["looks"][0]["tokens"]]
    assert len(best) == 3 and best == sorted(best, reverse=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", "a", "--mask", "casual"], "did you mean causal?"),
        ([], "no text was given"),
        (["--text", "red", "--layer", "9"], "there is no layer 9; the model has layers 0 to 1"),
        (["--text", "red", "--token", "blue"], "'blue' is not among the tokens"),
        (["--text", "red", "--order", "0,1|2"], "no documents and no padding"),
        (["--text", "red", "--order", "0,1"], "the order has 2 numbers"),
        (["--text", "red", "--png", "a.svg"], "ends in .png"),
        (["--text", "red", "--mask", "prefix"], "needs a target"),
    ],
)
def test_refusals(cli, bert: Path, words, says):
    ran = cli("attention", bert, *words)
    assert (ran.code, ran.out) == (2, "") and says in ran.err


def test_the_documentation_shows_what_is_printed(cli):
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ allmask (.*?)\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    for words, shown in blocks:
        assert cli(*shlex.split(words)).out == shown
    assert "Look(token='law', position=2, weight=0.673" in page


def test_one_head_looks_at_what_words_belong_to(cli):
    """The example of the documentation."""
    for text, word, meant, least in (
        ("The Law will never be perfect, but its application should be just", "its", "law", 0.6),
        ("The animal didn't cross the street because it was too tired", "it", "animal", 0.2),
    ):
        words = ["--text", text, "--token", word, "--layer", 3, "--head", 1, "--top", 1, "--no-special", "--json"]
        (look,) = json.loads(cli("attention", "allmask-en", *words).out)["looks"][0]["tokens"]
        assert look["token"] == meant and look["weight"] > least
