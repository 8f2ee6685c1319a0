"""Drawings: alignment in the terminal, and pictures that hold the right cells and glyphs."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.errors import ResourceError, UsageError
from allmask.mask import Mask, drawing, fonts
from allmask.mask.drawing import beside, draw, save
from tests.strategies import booleans

CHINESE = list("北京欢迎你")


def causal(tokens: int) -> Mask:
    return Mask.causal(torch.ones(1, tokens, dtype=torch.bool))


def columns_of(line: str) -> list[str]:
    """What stands in each terminal column; a wide character fills two."""
    return [
        c for character in line for c in [character, ""][: 2 if unicodedata.east_asian_width(character) in "WF" else 1]
    ]


def test_chinese_is_aligned():
    assert draw(causal(3), CHINESE[:3]).splitlines() == ["   北 京 欢", "北  ■  ·  ·", "京  ■  ■  ·", "欢  ■  ■  ■"]


def test_words_and_chinese_in_one_drawing():
    assert draw(causal(3), ["[CLS]", "你", "ok"]).splitlines() == [
        "      [CLS] 你 ok",
        "[CLS]   ■    ·  ·",
        "你      ■    ■  ·",
        "ok      ■    ■  ■",
    ]


def test_text_beside_a_drawing_is_aligned():
    assert beside("北 ■\n京 ■ ■", ["one", "", "three"], gap=1) == "北 ■   one\n京 ■ ■\n       three"


def test_rows_and_columns_of_a_rectangle():
    visible = torch.tensor([[True, False, True]])
    assert draw(visible, ["a", "b", "c"], ["鸡"]).splitlines() == ["   a b c", "鸡 ■ · ■"]


def test_awkward_tokens_stay_on_their_line():
    text = draw(causal(6), ["a b", "\n", "\x1b[31m", "", "antidisestablishment", "一个非常非常长的词"])
    assert len(text.splitlines()) == 7
    assert "\x1b" not in text
    assert "a␣b ⏎ �[31m ∅ antidis… 一个非…" in text.splitlines()[0]


@given(st.lists(st.text(alphabet="ab北京é，🙂 \n", max_size=9), min_size=1, max_size=6), st.data())
def test_every_cell_stands_under_its_token(tokens, data):
    visible = data.draw(booleans(len(tokens), len(tokens)))
    head, *rows = (columns_of(line) for line in draw(visible, tokens).splitlines())
    starts = [i for i, c in enumerate(head) if c not in (" ", "") and (i == 0 or head[i - 1] == " ")]
    ends = [*starts[1:], len(head) + 2]
    for row, cells in zip(rows, visible.tolist(), strict=True):
        margin = starts[0]
        drawn = [(i, c) for i, c in enumerate(row) if i >= margin and c in "■·" and c]
        assert [c == "■" for _, c in drawn] == cells
        assert all(start <= i < end for (i, _), start, end in zip(drawn, starts, ends, strict=True))


def test_a_long_mask_is_cut_and_says_so():
    lines = draw(causal(100), ["x"] * 100, limit=10).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "(10 of 100 rows, 10 of 100 columns)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw(causal(3), ["a"]), "for these tokens it must be"),
        (lambda: draw(torch.ones(1, 1), ["a"]), "booleans"),
        (lambda: draw(Mask.causal(torch.ones(2, 1, dtype=torch.bool)), ["a"]), "2 rows"),
        (lambda: draw(torch.ones(0, 0, dtype=torch.bool), []), "for these tokens it must be"),
        (lambda: save(causal(1), "a.gif", ["a"]), "suffix"),
    ],
)
def test_invalid_calls_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# ---- pictures -----------------------------------------------------------------------------------------------


def filled(path) -> list[str]:
    """The fill colours of the cells of an SVG, row by row."""
    cells = re.search(r'<g id="PatchCollection_1">(.*?)</g>', path.read_text(), re.S)
    assert cells is not None
    return re.findall(r"fill: (#\w+)", cells[1])


def test_svg_cells_are_the_matrix(tmp_path):
    visible = torch.rand(7, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    save(visible, tmp_path / "a.svg", list("abcde"), list("tuvwxyz"))
    colours = filled(tmp_path / "a.svg")
    assert [c != drawing.EMPTY.lower() for c in colours] == visible.flatten().tolist()


def test_documents_have_their_own_tints(tmp_path):
    mask = Mask.packed(causal(4), torch.tensor([[0, 0, 1, 1]]))
    save(mask, tmp_path / "a.svg", list("abcd"))
    assert len(set(filled(tmp_path / "a.svg"))) == 3


def test_png_pixels_are_the_matrix(tmp_path):
    from matplotlib.image import imread

    save(causal(3), tmp_path / "a.png", list("abc"))
    image = torch.from_numpy(imread(tmp_path / "a.png"))[..., :3]
    blue = (image - torch.tensor([0x5B, 0x84, 0xD7]) / 255).abs().amax(-1) < 0.01
    (top, left), (bottom, right) = blue.nonzero().amin(0).tolist(), blue.nonzero().amax(0).tolist()
    middle = [(2 * cell + 1) / 6 for cell in range(3)]  # the filled cells of a causal mask touch all four sides
    centres = [
        [bool(blue[int(top + y * (bottom - top)), int(left + x * (right - left))]) for x in middle] for y in middle
    ]
    assert centres == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_same_mask_gives_the_same_file(tmp_path):
    for suffix in ("svg", "png"):
        for name in "ab":
            save(causal(3), tmp_path / f"{name}.{suffix}", list("xyz"), title="causal")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def has_chinese_font() -> bool:
    return any(set(CHINESE) <= fonts.characters(path) for _, path in fonts.candidates())


def test_a_font_of_another_weight_is_taken_without_a_word(monkeypatch, caplog):
    """As WenQuanYi Zen Hei, of which there is only a medium weight."""
    from matplotlib.font_manager import fontManager

    entries = [replace(entry, name="SimHei", weight=500) for entry in fontManager.ttflist if entry.name == fonts.LATIN]
    monkeypatch.setattr(fontManager, "ttflist", [*fontManager.ttflist, *entries])
    assert "SimHei" in dict(fonts.candidates())
    assert not caplog.records


@pytest.mark.skipif(not has_chinese_font(), reason="no Chinese font here; pip install zhplot")
def test_chinese_glyphs_are_in_the_picture(tmp_path, recwarn):
    """Outlines in the SVG, one a character, and in the PNG other pixels for other characters."""
    save(causal(5), tmp_path / "a.svg", CHINESE, title="鸡")
    text = (tmp_path / "a.svg").read_text()
    assert "<text" not in text
    used = [re.search(rf'<!-- {c} -->.*?xlink:href="#([^"]+)"', text, re.S) for c in [*CHINESE, "鸡"]]
    outlines = [re.search(rf'<path id="{glyph[1]}" d="([^"]+)"', text)[1] for glyph in used]  # type: ignore[index]
    assert len(set(outlines)) == 6
    assert min(map(len, outlines)) > 300
    save(causal(1), tmp_path / "a.png", ["欢"])
    save(causal(1), tmp_path / "b.png", ["迎"])
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    assert not [w for w in recwarn if "lyph" in str(w.message)]


def test_without_a_font_png_says_what_to_install_and_svg_leaves_it_to_the_viewer(tmp_path, monkeypatch):
    candidates = [(family, path) for family, path in fonts.candidates() if family == "DejaVu Sans"]
    monkeypatch.setattr(fonts, "candidates", lambda: iter(candidates))
    with pytest.raises(ResourceError, match="no font here has 京 北") as error:
        save(causal(2), tmp_path / "a.png", ["北", "京"])
    assert "pip install zhplot" in str(error.value) and "fonts-noto-cjk" in str(error.value)
    save(causal(2), tmp_path / "a.svg", ["北", "京"])
    assert ">北</text>" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_anything_can_be_a_token(tmp_path, suffix, recwarn):
    awkward = ["👨‍👩‍👧", "$x^$", "<b>&", "\x00\ud800", "␣ \n", "a" * 200, "é", "∅"]
    save(causal(len(awkward)), tmp_path / f"a.{suffix}", awkward, title="$\\frac$ 🙂")
    assert (tmp_path / f"a.{suffix}").stat().st_size > 1000
    assert not [w for w in recwarn if "lyph" in str(w.message)]


def test_a_large_mask_is_one_image(tmp_path):
    save(causal(400), tmp_path / "a.svg", ["北"] * 400, title="causal")
    text = (tmp_path / "a.svg").read_text()
    assert "<image" in text and "PatchCollection" not in text
