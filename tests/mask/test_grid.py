"""Masks that draw themselves: cells, colours, order, padding, many tokens and many rows, read back from the picture."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from allmask.errors import ResourceError, UsageError
from allmask.mask import Mask, fonts
from allmask.mask.canvas import EMPTY, HATCH, TINTS
from allmask.mask.grid import Drawing
from tests.strategies import masks

CHINESE = list("北京欢迎你")
PREFIX = Mask.prefix(torch.tensor([[False, False, True, True, True]]))


def causal(tokens: int, rows: int = 1) -> Mask:
    return Mask.causal(torch.ones(rows, tokens, dtype=torch.bool))


def cells(svg: str) -> dict[tuple[float, float], str]:
    """The colour of each cell by its place; "hatched" for a hatched one. The swatches of the legend are smaller."""
    found = {}
    for element in ElementTree.fromstring(svg):
        name, get = element.tag.rpartition("}")[2], element.get
        if name == "path":
            half = float(get("stroke-width", "0")) / 2
            for x, y, width in re.findall(r"M([\d.-]+) ([\d.-]+)h([\d.-]+)", get("d", "")):
                if float(width) + 2 * half > 13:
                    found[round(float(y) - half), round(float(x) - half)] = get("fill", "")
        elif name == "rect" and "hatch" in get("fill", "") and float(get("width", "0")) > 13:
            found[round(float(get("y", "0"))), round(float(get("x", "0")))] = "hatched"
    return found


def matrix(svg: str) -> list[list[str]]:
    """The colours of the cells, row by row."""
    found = cells(svg)
    rows, columns = sorted({y for y, _ in found}), sorted({x for _, x in found})
    return [[found[y, x] for x in columns] for y in rows]


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg) if element.tag.endswith("text")]


def test_cells_have_the_colour_of_what_is_read():
    blue, orange = TINTS[:2]
    assert matrix(PREFIX._repr_svg_() or "") == [
        [blue, blue, EMPTY, EMPTY, EMPTY],
        [blue, blue, EMPTY, EMPTY, EMPTY],
        [blue, blue, orange, EMPTY, EMPTY],
        [blue, blue, orange, orange, EMPTY],
        [blue, blue, orange, orange, orange],
    ]


def test_names_order_and_legend():
    shown = words(PREFIX.show(CHINESE)._repr_svg_())
    assert shown == words(PREFIX.show("".join(CHINESE))._repr_svg_())
    assert [word for word in shown if word in CHINESE] == CHINESE * 2  # above and on the left
    assert [word for word in shown if word.isdigit()] == ["0", "0", "1", "2", "3"]
    assert shown[-3:] == ["source", "target", "hidden"]
    assert words(causal(3)._repr_svg_() or "")[-2:] == ["may be read", "hidden"]


@settings(max_examples=40)
@given(masks(max_rows=1))
def test_any_mask_is_drawn_as_it_is(mask: Mask):
    """Where both tokens are real, a cell is empty iff it is hidden; padding is hatched."""
    colours = matrix(mask._repr_svg_() or "")
    visible, valid = mask.visible()[0], mask.valid[0]
    for query, row in enumerate(colours):
        for key, colour in enumerate(row):
            expected = "hatched" if not (valid[query] and valid[key]) else visible[query, key]
            assert (colour == "hatched") if expected == "hatched" else (colour in TINTS) == bool(expected)


def test_documents_have_colours_of_their_own():
    document = torch.tensor([[0, 0, 1, 1, 1]])
    colours = matrix(Mask.packed(causal(5), document)._repr_svg_() or "")
    assert colours[1][0] == TINTS[0] and colours[4][2] == TINTS[1]
    both = Mask.prefix(torch.tensor([[0, 0, 1, 0, 0, 1]]).bool(), document=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    assert [matrix(both._repr_svg_() or "")[place][place] for place in (0, 2, 3, 5)] == list(TINTS[:4])


def test_a_batch_draws_its_first_rows_and_says_so():
    shown = words(causal(3, rows=9)._repr_svg_() or "")
    assert [word for word in shown if word.startswith("row ")] == ["row 0", "row 1", "row 2", "row 3"]
    assert shown[-1] == "4 of 9 rows"
    assert "4 of" not in " ".join(words(causal(3, rows=4)._repr_svg_() or ""))


def pixels(svg: str) -> np.ndarray:
    data = re.search(r'href="data:image/png;base64,([^"]+)"', svg)
    assert data is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGB"))


def test_many_tokens_are_an_image_of_the_matrix_without_names():
    mask = Mask.prefix(torch.arange(100)[None] >= 60, torch.arange(100)[None] < 90)
    svg = mask.show(["long-name"] * 100)._repr_svg_()
    assert "long-name" not in svg and "100 tokens" in svg and len(svg) < 20_000
    image, visible = pixels(svg), mask.visible()[0].numpy()
    assert image.shape == (100, 100, 3)
    empty = (image == list(bytes.fromhex(EMPTY[1:]))).all(-1)
    stripes = (image == list(bytes.fromhex(HATCH[1:]))).all(-1)
    assert np.array_equal(~empty[:90, :90], visible[:90, :90])
    assert stripes[90:].any(-1).all() and not stripes[:90, :90].any()


def test_very_many_tokens_still_fit_on_the_page():
    svg = Mask.causal(torch.ones(1, 5000).bool(), window=600)._repr_svg_() or ""
    assert "one of every 3 drawn; window 600" in svg and max(pixels(svg).shape) <= 600


def test_png_has_the_cells_of_the_svg(tmp_path):
    drawing = PREFIX.show(list("abcde"))
    drawing.save(tmp_path / "a.png")
    image = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    for (y, x), colour in cells(drawing._repr_svg_()).items():
        assert "#" + bytes(image[2 * (y + 12), 2 * (x + 12)]).hex().upper() == colour


def test_anything_can_be_a_token(tmp_path):
    awkward = ["👨‍👩‍👧", "$x^$", "<b>&\"'", "\x00\ud800", "␣ \n", "a" * 200, "é", ""]
    drawing = causal(len(awkward)).show(awkward, title="<&>")
    ElementTree.fromstring(drawing._repr_svg_())
    drawing.save(tmp_path / "a.png")
    drawing.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == drawing._repr_svg_()


def test_a_matrix_has_no_order_beside_it():
    shown = words(Mask.from_matrix(torch.tensor([[True, False], [True, True]]))._repr_svg_() or "")
    assert "order" not in shown and "order" in words(causal(2)._repr_svg_() or "")


def test_nothing_is_drawn_of_nothing():
    assert causal(0)._repr_svg_() is None
    with pytest.raises(UsageError, match="nothing to draw"):
        causal(0).show()


@pytest.mark.parametrize("tokens", [["a"], [["a", "b", "c"], ["a"]], ["abc"] * 4])
def test_names_must_fit(tokens):
    with pytest.raises(UsageError, match="for a mask of shape"):
        causal(3).show(tokens)


def test_a_drawing_is_saved_as_svg_or_png_only(tmp_path):
    with pytest.raises(UsageError, match="name the picture"):
        causal(2).show().save(tmp_path / "a.jpg")
    assert repr(causal(2).show()).startswith("Drawing(") and isinstance(causal(2).show(), Drawing)


def test_without_a_font_png_is_refused(tmp_path, monkeypatch):
    candidates = [(family, path) for family, path in fonts.candidates() if family == "DejaVu Sans"]
    monkeypatch.setattr(fonts, "candidates", lambda: iter(candidates))
    with pytest.raises(ResourceError, match="no font here has 京 北"):
        causal(2).show(["北", "京"]).save(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
