"""`allmask mask`: what it prints, what it writes, and what it says when it cannot."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from allmask.cli.mask import read_matrix, split
from allmask.errors import DataError
from allmask.mask import Mask
from allmask.registry import MASKS

ROOT = Path(__file__).parents[2]

# Rows are what is predicted, columns what is read, as figures of language models are usually drawn.
FIGURES = {
    "forward": (
        ["causal", "--text", "北京欢迎你"],
        """
            <s> 北 京 欢 迎 你
        北   ■   ·  ·  ·  ·  ·
        京   ■   ■  ·  ·  ·  ·
        欢   ■   ■  ■  ·  ·  ·
        迎   ■   ■  ■  ■  ·  ·
        你   ■   ■  ■  ■  ■  ·
        <e>  ■   ■  ■  ■  ■  ■
        """,
    ),
    "shuffled": (
        ["permutation", "--text", "北京欢迎你", "--order", "迎京你欢北"],
        """
            <s> 北 京 欢 迎 你
        北   ■   ·  ■  ■  ■  ■
        京   ■   ·  ·  ·  ■  ·
        欢   ■   ·  ■  ·  ■  ■
        迎   ■   ·  ·  ·  ·  ·
        你   ■   ·  ■  ·  ■  ·
        <e>  ■   ■  ■  ■  ■  ■
        """,
    ),
    "reversed": (
        ["reverse", "--text", "北京欢迎你"],
        """
            <s> 北 京 欢 迎 你
        北   ■   ·  ■  ■  ■  ■
        京   ■   ·  ·  ■  ■  ■
        欢   ■   ·  ·  ·  ■  ■
        迎   ■   ·  ·  ·  ·  ■
        你   ■   ·  ·  ·  ·  ·
        <e>  ■   ■  ■  ■  ■  ■
        """,
    ),
    "naive": (
        ["naive", "--source", "你想吃啥", "--target", "白切鸡"],
        """
              [CLS] 你 想 吃 啥 [SEP] 白 切 鸡
        你      ■    ·  ·  ·  ·   ·    ·  ·  ·
        想      ■    ■  ·  ·  ·   ·    ·  ·  ·
        吃      ■    ■  ■  ·  ·   ·    ·  ·  ·
        啥      ■    ■  ■  ■  ·   ·    ·  ·  ·
        [SEP]   ■    ■  ■  ■  ■   ·    ·  ·  ·
        白      ■    ■  ■  ■  ■   ■    ·  ·  ·
        切      ■    ■  ■  ■  ■   ■    ■  ·  ·
        鸡      ■    ■  ■  ■  ■   ■    ■  ■  ·
        [SEP]   ■    ■  ■  ■  ■   ■    ■  ■  ■
        """,
    ),
    "prefix": (
        ["prefix", "--source", "你想吃啥", "--target", "白切鸡"],
        """
              [CLS] 你 想 吃 啥 [SEP] 白 切 鸡
        你      ■    ■  ■  ■  ■   ■    ·  ·  ·
        想      ■    ■  ■  ■  ■   ■    ·  ·  ·
        吃      ■    ■  ■  ■  ■   ■    ·  ·  ·
        啥      ■    ■  ■  ■  ■   ■    ·  ·  ·
        [SEP]   ■    ■  ■  ■  ■   ■    ·  ·  ·
        白      ■    ■  ■  ■  ■   ■    ·  ·  ·
        切      ■    ■  ■  ■  ■   ■    ■  ·  ·
        鸡      ■    ■  ■  ■  ■   ■    ■  ■  ·
        [SEP]   ■    ■  ■  ■  ■   ■    ■  ■  ■
        """,
    ),
}


def cells(picture: str) -> tuple[list[str], list[str], list[list[int]]]:
    """Columns, rows and cells of a hand-drawn matrix."""
    head, *lines = picture.strip().splitlines()
    rows = [line.split() for line in lines]
    return head.split(), [row[0] for row in rows], [[int(cell == "■") for cell in row[1:]] for row in rows]


@pytest.mark.parametrize("name", FIGURES)
def test_the_five_figures_cell_by_cell(cli, name):
    words, picture = FIGURES[name]
    ran = cli("mask", *words, "--predict", "--json")
    assert ran.code == 0, ran.err
    drawing = json.loads(ran.out)["drawing"]
    assert (drawing["columns"], drawing["rows"], drawing["visible"]) == cells(picture)


@pytest.mark.parametrize("name", FIGURES)
def test_the_five_figures_line_by_line(cli, name):
    words, picture = FIGURES[name]
    lines = [line.removeprefix("        ") for line in picture.strip("\n").splitlines()[:-1]]
    assert cli("mask", *words, "--predict").out.splitlines()[: len(lines)] == lines


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_the_documentation_show_them(name):
    text = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    fills = re.findall(r"fill: (#\w+)", text[text.index("PatchCollection_1") :].split("</g>")[0])
    expected = [cell for row in cells(FIGURES[name][1])[2] for cell in row]
    assert [int(fill == min(fills, key=brightness)) for fill in fills] == expected  # the darker ones are seen


def brightness(colour: str) -> int:
    return sum(bytes.fromhex(colour[1:]))


def test_the_documentation_shows_what_is_printed(cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```console\n\$ allmask (.*?)\n(.*?)```", (ROOT / "docs" / "masks.md").read_text(), re.S)
    assert len(blocks) >= 3
    for words, shown in blocks:
        assert cli(*shlex.split(words)).out == shown


def test_a_drawing_then_a_proof(cli):
    ran = cli("mask", "prefix", "--source", "你 吃", "--target", "白鸡", "--layers", 3)
    drawing, proof = ran.out.split("\n\n")
    assert len(drawing.splitlines()) == 1 + 7
    assert "order            yes: 0 0 0 0 1 2 3" in proof
    assert "none of 3 positions sees the next token" in proof
    assert "through 3 layers" in proof
    assert "prefill 4 tokens (0–3), then one by one: 4:白, 5:鸡, 6:[SEP]" in proof
    assert ran.err == ""


def test_positions_before_a_target_bear_the_loss_of_a_prefix(cli):
    data = json.loads(cli("mask", "prefix", "--source", "你", "--target", "白鸡", "--json").out)
    assert data["tokens"] == ["[CLS]", "你", "[SEP]", "白", "鸡", "[SEP]"]
    assert data["proof"]["scored"] == [2, 3, 4]


def test_turns_see_what_came_before(cli):
    words = ["--source", "吃啥", "--target", "鸡", "--source", "几个", "--target", "两"]
    ran = cli("mask", "turns", *words)
    assert "order            yes: 0 0 0 0 1 2 3 3 3 4 5" in ran.out
    assert "no leak: none of 4 positions sees the next token" in ran.out
    data = json.loads(cli("mask", "turns", *words, "--json").out)
    assert data["tokens"] == ["[CLS]", "吃", "啥", "[SEP]", "鸡", "[SEP]", "几", "个", "[SEP]", "两", "[SEP]"]
    assert data["proof"]["scored"] == [3, 4, 8, 9]
    assert data["proof"]["cache"]["blocks"] == [[0, 1, 2, 3], [4], [5], [6, 7, 8], [9], [10]]
    asked = json.loads(cli("mask", "turns", *words[:-2], "--json").out)  # the last question has no answer yet
    assert asked["drawing"]["visible"][-1] == [1] * 9


def test_encoder_decoder_is_cross_attention_next_to_a_causal_mask(cli):
    data = json.loads(cli("mask", "encoder-decoder", "--source", "你想", "--target", "吃鸡", "--json").out)
    encoder = Mask.bidirectional(torch.ones(1, 2, dtype=torch.bool))
    decoder = Mask(torch.tensor([[1, 2, 3]]), torch.zeros(1, 3, dtype=torch.long))
    both = torch.cat([decoder.visible(encoder), decoder.visible()], -1)
    assert data["drawing"]["visible"] == both[0].int().tolist()
    assert data["drawing"]["rows"] == ["<s>", "吃", "鸡"]
    assert data["proof"]["leaks"]["shifted"] == []
    assert data["proof"]["cache"]["blocks"] == [[0, 1], [2], [3], [4]]


def test_packed_documents_see_only_themselves(cli):
    words = ["mask", "packed", "--text", "你好", "--text", "big cat", "--each", "bidirectional", "--json"]
    data = json.loads(cli(*words).out)
    assert data["tokens"] == ["你", "好", "big", "cat"]
    assert data["drawing"]["visible"] == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert data["proof"]["group"] == [0, 0, 1, 1]


def test_a_window_is_part_of_an_order(cli):
    ran = cli("mask", "causal", "--text", "a b c d", "--window", 2, "--layers", 2)
    assert "no, only part of 0 1 2 3: 2:c reads 1:b, 1:b reads 0:a, but 2:c does not read 0:a" in ran.out
    assert "2 layers carry 2 pairs beyond what one layer reads: 2:c from 0:a, 3:d from 1:b" in ran.out


@pytest.mark.parametrize("words", [["--order", "0,0,1,1"], ["order", "--order", "0 0 1 1"], ["--order", " 0, 0,1 ,1"]])
def test_an_order_with_ties(cli, words):
    data = json.loads(cli("mask", *words, "--text", "北京欢迎", "--json").out)
    assert data["kind"] == "order" and data["proof"]["is_order"] and data["proof"]["order"] == [0, 0, 1, 1]
    assert data["drawing"]["visible"] == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert data["proof"]["cache"]["blocks"] == [[0, 1], [2, 3]]
    assert data["proof"]["leaks"]["shifted"] == [[0, 1], [2, 3]]


def test_an_order_with_documents_and_padding_is_what_a_mask_prints(cli):
    mask = Mask(torch.tensor([[0, 0, 1, 0, 5, 0]]), torch.tensor([[0, 0, 0, 1, 1, -1]]))
    order = repr(mask).removeprefix("Mask(").removesuffix(")")
    data = json.loads(cli("mask", "--order", order, "--text", "a b c d e", "--json").out)
    assert data["drawing"]["visible"] == mask.visible()[0].int().tolist()
    assert data["tokens"] == ["a", "b", "c", "d", "e", "[PAD]"]
    assert json.loads(cli("mask", "--order", "2,-1", "--json").out)["tokens"] == ["0", "1"]


def test_an_animation_says_what_is_computed(cli, tmp_path):
    path = tmp_path / "a.gif"
    ran = cli("mask", "naive", "--source", "你想", "--target", "鸡", "--animate", path)
    assert ran.err == f"wrote {path}: 3 steps compute 6 rows; without a cache, 15\n"
    assert path.read_bytes().startswith(b"GIF89a")
    ran = cli("mask", "bidirectional", "--text", "a b c", "--animate", tmp_path / "a.svg")
    assert "3 of them again: this mask cannot be cached" in ran.err and "<animate" in (tmp_path / "a.svg").read_text()
    ran = cli("mask", "encoder-decoder", "--source", "你想", "--target", "鸡", "--animate", tmp_path / "b.svg")
    assert "3 steps compute 4 rows; without a cache, 9" in ran.err


@pytest.mark.parametrize("order", ["迎京你欢北", "迎 京 你 欢 北", "迎,京,你,欢,北", "3,1,4,2,0"])
def test_an_order_in_tokens_or_positions(cli, order):
    data = json.loads(cli("mask", "permutation", "--text", "北京欢迎你", "--order", order, "--json").out)
    assert data["proof"]["order"] == [4, 1, 3, 0, 2]


def test_a_repeated_token_is_taken_from_the_left(cli):
    data = json.loads(cli("mask", "permutation", "--text", "看一看", "--order", "看看一", "--json").out)
    assert data["proof"]["order"] == [0, 2, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.csv", "1,0,0\n1,1,0\n0,1,1\n"),
        ("m.txt", "100\n110\n\n011\n"),
        ("m.tsv", "1 0\t0\r\n1 1 0\r\n0; 1; 1"),
        ("m.json", "[[1, 0, 0], [true, true, false], [0, 1, 1]]"),
        ("bom.csv", "\ufeff1,0,0\n1,1,0\n0,1,1\n"),
    ],
)
def test_a_matrix_from_a_file(cli, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    ran = cli("mask", "matrix", "--file", path)
    assert ran.out.startswith("  0 1 2\n0 ■ · ·\n1 ■ ■ ·\n2 · ■ ■\n")
    assert "2 reads 1, 1 reads 0, but 2 does not read 0: after two layers it does" in ran.out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", b"1,0\n1,2\n", "m.csv:2: cell 2 is '2'; expected 0 or 1"),
        ("m.csv", b"1,0\n1\n", "m.csv:2: 1 cells; expected 2"),
        ("m.csv", b"1,0,1\n1,1,1\n", "m.csv:1: 3 cells; expected 2"),
        ("m.csv", b"\n\n", "m.csv: no rows"),
        ("m.csv", b"\xff\xfe\x00", "m.csv: not a text file"),
        ("m.json", b"[[1, 0], [1", "m.json: not JSON"),
        ("m.json", b"[" * 100_000, "m.json: not JSON"),
        ("m.json", b'{"a": 1}', "m.json: expected a list of lists"),
        ("m.json", b"[[1, null], [1, 1]]", "m.json:1: cell 2 is 'None'"),
        ("m.json", b"[]", "m.json: no rows"),
    ],
)
def test_files_that_are_no_matrix(cli, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    ran = cli("mask", "matrix", "--file", tmp_path / name)
    assert (ran.code, ran.out) == (3, "")
    assert message in ran.err
    assert ran.err.startswith("error[data]: ")


def test_a_matrix_too_large_to_prove_is_refused(tmp_path):
    path = tmp_path / "m.txt"
    path.write_text("\n".join(["0" * 1025] * 1025))
    with pytest.raises(DataError, match="1,025 rows"):
        read_matrix(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["causal"], "needs --text"),
        (["causal", "--text", "  "], "--text is empty"),
        (["causal", "--text", "a", "--text", "b"], "--text is given 2 times"),
        (["causal", "--text", "a " * 1025], "--text has 1,025 tokens"),
        (["causal", "--text", "a", "--source", "b"], "--source is not an option of the mask causal"),
        (["bidirectional", "--text", "a", "--predict"], "--predict is not an option of the mask bidirectional"),
        (["prefix", "--source", "a"], "needs --target"),
        (["matrix"], "needs --file"),
        (["permutation", "--text", "北京"], "needs --order"),
        (["permutation", "--text", "北京", "--order", "北北"], "北 is not in the text, or not that often"),
        (["permutation", "--text", "北京", "--order", "北"], "京 is missing"),
        (["permutation", "--text", "北京", "--order", "0,2"], "expected each of 0 to 1 once"),
        (["causal", "--text", "a", "--window", "0"], "window"),
        (["causal", "--text", "a", "--svg", "x.png"], "ends in .svg"),
        (["sideways", "--text", "a"], "there is no mask 'sideways'"),
        (["casual", "--text", "a"], "did you mean causal?"),
        (["packed", "--text", "a", "--each", "casual"], "did you mean causal?"),
        (["packed", "--text", "a", "--each", "prefix"], "a prefix mask is made from is_target"),
        (["prefix", "--source", "a", "--target", "b", "--source", "c"], "make a turns mask"),
        (
            ["turns", "--source", "a", "--source", "b", "--target", "c", "--target", "d", "--target", "e"],
            "they alternate",
        ),
        (["turns", "--source", "a"], "needs --target"),
        ([], "no mask was named"),
        (["--order", " "], "--order is empty"),
        (["--order", "0,1,a"], "'a' is not a whole number"),
        (["--order", "0,1", "--text", "a"], "--text has 1 tokens, --order 2 numbers"),
        (["--order", "0,1", "--predict"], "--predict is not an option of the mask order"),
        (["causal", "--text", "a", "--predict", "--animate", "a.gif"], "leave --predict out"),
        (["causal", "--text", "a", "--animate", "a.png"], "ends in .gif or .svg"),
        (["causal", "--text", "a " * 41, "--animate", "a.gif"], "at most 40"),
    ],
)
def test_refusals(cli, words, message):
    ran = cli("mask", *words)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_names_for_a_matrix_must_fit(cli, tmp_path):
    (tmp_path / "m.csv").write_text("1,0\n1,1\n")
    assert "0:你" in cli("mask", "matrix", "--file", tmp_path / "m.csv", "--text", "你好").out
    ran = cli("mask", "matrix", "--file", tmp_path / "m.csv", "--text", "你好吗")
    assert (ran.code, "--text has 3 tokens" in ran.err) == (2, True)


def test_pictures_are_written_and_said_so(cli, tmp_path):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    ran = cli("mask", "causal", "--text", "to be or not", "--svg", svg, "--png", png)
    assert ran.code == 0
    assert ran.err == f"wrote {svg}\nwrote {png}\n"
    assert svg.read_text().startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_padding_is_hatched(cli, tmp_path):
    for name, order in (("plain", "0,0,1"), ("padded", "0,0,·")):
        assert cli("mask", "--order", order, "--svg", tmp_path / f"{name}.svg").code == 0
    assert "<pattern" in (tmp_path / "padded.svg").read_text(encoding="utf-8")
    assert "<pattern" not in (tmp_path / "plain.svg").read_text(encoding="utf-8")


def test_a_folder_that_does_not_exist(cli, tmp_path):
    ran = cli("mask", "causal", "--text", "a b", "--png", tmp_path / "no" / "a.png")
    assert ran.code == 3
    assert "a.png: no such file or folder" in ran.err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("北京欢迎你", list("北京欢迎你")),
        ("to be, or not", ["to", "be,", "or", "not"]),
        ("GPT写诗 v2", ["GPT", "写", "诗", "v2"]),
        ("你好，世界。", list("你好，世界。")),
        ("[CLS]你\u3000好", ["[CLS]", "你", "好"]),
        ("かな 👍🏽", ["か", "な", "👍🏽"]),
    ],
)
def test_characters_for_chinese_words_otherwise(text, tokens):
    assert split(text) == tokens


@pytest.mark.parametrize("kind", MASKS)
def test_every_kind_is_drawn_and_proven(cli, tmp_path, kind):
    (tmp_path / "m.csv").write_text("1")
    sources = {"prefix": "s", "turns": "s", "naive": "s", "encoder-decoder": "s", "matrix": "f"}
    given = {
        "s": ["--source", "a", "--target", "b"],
        "f": ["--file", tmp_path / "m.csv"],
    }.get(sources.get(kind, ""), ["--text", "a"])
    order = {"permutation": ["--order", "a"], "order": ["--order", "0"]}.get(kind, [])
    ran = cli("mask", kind, *given, *order)
    assert ran.code == 0, ran.err
    assert "■" in ran.out and "\norder " in ran.out
