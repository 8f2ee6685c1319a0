"""A text under four masks: what is shown is what the library does, and the proof fails where a mask leaks."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from allmask.demo import masks
from allmask.demo.masks import FourMasks, View
from allmask.demo.texts import EXAMPLE
from allmask.demo.texts import OTHERS as COMPARED
from allmask.inference import embed
from allmask.mask import Mask
from allmask.tasks.task import ModelFolder

TEXT = "red cat runs here, blue dog sleeps there. green bird sings."
OTHERS = ["red cat runs here.", "北京欢迎你", "blue bird"]


@pytest.fixture(scope="module")
def views(writer: ModelFolder) -> dict[str, View]:
    made = [make() for make in FourMasks(writer).views(TEXT, OTHERS)]
    return {view.name: view for view in made}


def test_each_mask_is_the_one_that_it_is_called(views: dict[str, View]):
    visible = {name: view.mask.visible()[0] for name, view in views.items()}
    assert visible["fill"].all()
    assert torch.equal(visible["continue"], torch.ones_like(visible["continue"]).tril())
    source = views["title"].tokens.index("[SEP]") + 1
    assert visible["title"][:, :source].all() and not visible["title"][:source, source:].any()
    assert torch.equal(visible["title"][source:, source:], torch.ones_like(visible["title"][source:, source:]).tril())
    starts = [number for number, token in enumerate(views["compare"].tokens) if token == "[CLS]"]
    assert len(starts) == 1 + len(OTHERS)
    assert [int(row.sum()) for row in visible["compare"][starts]] == [
        end - start for start, end in zip(starts, [*starts[1:], len(visible["compare"])], strict=True)
    ]


def test_the_proof_counts_what_was_measured(views: dict[str, View]):
    for view in views.values():
        tokens, visible, *hidden = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", view.proof))
        assert view.audit.holds and view.proof.startswith("proven") and view.meaning in view.proof
        assert tokens == len(view.tokens) and visible == int(view.mask.visible().sum())
        assert sum(hidden) == tokens**2 - visible
        assert view.to_dict()["leaks"] == view.to_dict()["blind"] == 0


@pytest.mark.parametrize("name", ["continue", "title", "compare"])
def test_the_proof_fails_for_a_mask_that_leaks(monkeypatch: pytest.MonkeyPatch, writer: ModelFolder, name: str):
    """The model is run with a mask that hides nothing, whatever it is given."""
    four = FourMasks(writer)
    forward = four.model.forward
    seen = {view.name: view for view in (make() for make in four.views(TEXT, OTHERS))}[name]

    def leaky(ids, mask=None, *rest, **named):
        return forward(ids, Mask.bidirectional(torch.ones_like(ids, dtype=torch.bool)), *rest, **named)

    monkeypatch.setattr(four.model, "forward", leaky)
    ids = torch.tensor([[four.tokenizer.backend.token_to_id(token) for token in seen.tokens]])
    found = masks.audit_tokens(four.model, ids, seen.mask)
    said = masks.statement(found, seen.tokens, seen.meaning)
    hidden = len(seen.tokens) ** 2 - int(seen.mask.visible().sum())
    assert len(found.leaks) == hidden and f"{hidden:,} of {hidden:,} hidden pairs leak" in said
    assert said.startswith("NOT PROVEN") and seen.meaning not in said


def test_the_proof_fails_for_a_mask_that_hides_too_much(writer: ModelFolder):
    tokens = torch.ones(1, 4, dtype=torch.bool)
    found = masks.audit_tokens(writer.model, torch.tensor([[5, 6, 5, 6]]), Mask.causal(tokens))
    found = masks.Audit(found.depends, Mask.bidirectional(tokens).visible()[0])
    said = masks.statement(found, list("abcd"), "All is well.")
    assert "6 of 16 are not used, such as a (0) and b (1)" in said and "All is well." not in said


def test_the_results_are_those_of_the_library(writer: ModelFolder, views: dict[str, View]):
    four = FourMasks(writer)
    vectors = F.normalize(embed(writer.model, [TEXT, *OTHERS]), dim=-1)
    cosines = {other: float(vectors[0] @ vector) for other, vector in zip(OTHERS, vectors[1:], strict=True)}
    ranked = views["compare"].result
    assert [row["text"] for row in ranked] == sorted(OTHERS, key=lambda other: -cosines[other])
    assert all(row["cosine"] == pytest.approx(cosines[row["text"]], abs=1e-3) for row in ranked)
    assert views["title"].result["title"] == four.titles(TEXT, beams=masks.BEAMS)
    for row in views["fill"].result:
        assert row["text"].replace("[MASK]", row["hidden"]) == TEXT
        assert list(row["guesses"]) == [answer.token for answer in four.filler(row["text"], 5).gaps[0]]
    assert TEXT.startswith(views["continue"].result["prompt"])


def test_the_drawing_is_a_part_of_the_mask_and_fits(views: dict[str, View]):
    for view in views.values():
        shown = view.text()
        assert max(map(len, shown.splitlines())) <= masks.WIDTH
        cells = view.mask.visible()[0][view.drawn][:, view.drawn]
        assert shown.count("■") == int(cells.sum()) and shown.count("·") == int((~cells).sum())
        assert len(view.drawn) == len(set(view.drawn)) <= masks.DRAWN


@pytest.mark.skipif(find_spec("allmask_en") is None, reason="the weights are not installed (make setup installs them)")
def test_the_example_shows_what_the_shipped_weights_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "audit_tokens", lambda *_: None)  # slow, and shown above
    four = FourMasks(ModelFolder.open("allmask-en"))
    views = {view.name: view for view in (make() for make in four.views(EXAMPLE, COMPARED))}
    hidden = views["fill"].result
    assert sum(row["hidden"] in row["guesses"] for row in hidden) > len(hidden) / 3
    words = views["title"].result["title"].split()
    assert 3 <= len(words) <= 12 and sum(word in EXAMPLE.lower() for word in words) > len(words) / 2
    assert views["compare"].result[0]["text"] == "A program that edits photos."
    assert 0 < len(views["continue"].result["written"]) < len(EXAMPLE)


@pytest.mark.parametrize(
    "text", ["red", "白切鸡", "zebra zebra", "quartz-violin 123 !!", "1 2 3", "Привет, мир", "x" * 3000]
)
def test_short_and_strange_texts(writer: ModelFolder, text: str):
    for make in FourMasks(writer).views(text, []):
        view = make()
        assert view.audit.holds and view.text()
