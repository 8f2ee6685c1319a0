"""Writing step by step: what is kept is what a model computes alike, and the files have a frame per step."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from allmask import presets
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.animation import Step, animate, steps_text, writing_steps
from allmask.model import Model
from tests.strategies import matrices

PREFIX = Mask.prefix(torch.tensor([[False, False, True, True]]))
TINY = replace(presets.bert_tiny(), vocab_size=40, width=16, heads=2, ffn_width=32, max_positions=16)


def ones(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.bool)


def test_a_prefix_is_read_at_once_and_then_kept():
    assert writing_steps(PREFIX.visible()[0]) == [
        Step(new=(0, 1), again=(), kept=()),
        Step(new=(2,), again=(), kept=(0, 1)),
        Step(new=(3,), again=(), kept=(0, 1, 2)),
    ]


def test_blocks_and_other_orders():
    blocks = writing_steps(Mask.permutation(torch.tensor([[0, 0, 1, 1]])).visible()[0])
    assert [step.new for step in blocks] == [(0, 1), (2, 3)] and blocks[1].kept == (0, 1)
    assert [step.new for step in writing_steps(Mask.reverse(ones(3)).visible()[0])] == [(2,), (1,), (0,)]


def test_without_a_cache_everything_is_computed_again():
    steps = writing_steps(Mask.bidirectional(ones(3)).visible()[0])
    assert steps == [Step((0,), (), ()), Step((1,), (0,), ()), Step((2,), (0, 1), ())]
    assert steps_text(steps) == "3 steps compute 6 rows, 3 of them again: this mask cannot be cached"


def test_a_source_is_given_at_the_start():
    steps = writing_steps(Mask.causal(ones(4)).visible()[0], given=range(2))
    assert [step.new for step in steps] == [(0, 1), (2,), (3,)]
    assert steps_text(steps) == "3 steps compute 4 rows; without a cache, 9"


@settings(max_examples=60)
@given(matrices(max_tokens=6))
def test_every_token_is_added_once(visible):
    steps, before = writing_steps(visible), set()
    for step in steps:
        assert set(step.again) | set(step.kept) == before and not set(step.again) & set(step.kept)
        assert not set(step.new) & before
        before |= set(step.new)
    read = visible.any(0) | visible.any(1)
    assert before == set(read.nonzero()[:, 0].tolist())


@settings(max_examples=15)
@given(matrices(max_tokens=5))
def test_rows_that_are_kept_stay_the_same_in_a_model_and_the_others_change(visible):
    """A deep enough model computes each step from scratch, under the part of the mask that is there."""
    torch.manual_seed(0)
    config = replace(TINY, layers=5)
    model = Model.fresh(config, rng=torch.Generator().manual_seed(0)).double().eval()
    ids = torch.arange(5, 5 + len(visible))

    def hidden(tokens: list[int]) -> dict[int, torch.Tensor]:
        part, where = visible[tokens][:, tokens], torch.tensor(tokens)
        with torch.no_grad():
            states = model(ids[where][None], Mask.from_matrix(part), positions=where[None]).hidden[0]
        return dict(zip(tokens, states, strict=True))

    before: dict[int, torch.Tensor] = {}
    for step in writing_steps(visible):
        now = hidden(sorted([*before, *step.new]))
        changed = {
            token for token, state in before.items() if not torch.allclose(state, now[token], rtol=0, atol=1e-13)
        }
        assert changed == set(step.again)
        before = now


def test_a_gif_has_a_frame_per_step(tmp_path):
    steps = animate(PREFIX, tmp_path / "a.gif", ["who", "is", "it", "me"], title="prefix")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == len(steps) == 3 and image.info["loop"] == 0  # type: ignore[attr-defined]
        times, pictures = [], []
        for frame in range(3):
            image.seek(frame)
            times.append(image.info["duration"])
            pictures.append(image.convert("RGB").tobytes())
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert times == [1300, 1300, 3000] and len(set(pictures)) == 3


def test_an_svg_shows_one_step_at_a_time(tmp_path):
    animate(PREFIX, tmp_path / "a.svg", list("你吃白鸡"))
    page = ElementTree.parse(tmp_path / "a.svg").getroot()
    groups = [element for element in page if element.tag.endswith("}g")]
    assert [group.get("opacity") for group in groups] == ["0", "0", "1"]  # the last one, where nothing moves
    seen = []
    for group in groups:
        times = [float(time) for time in group[0].get("keyTimes", "").split(";")]
        values = group[0].get("values", "").split(";")
        assert times == sorted(times) and times[0] == 0 and len(times) == len(values)
        seen.append([values[max(place for place, time in enumerate(times) if time <= now)] for now in (0.1, 0.3, 0.7)])
    assert seen == [["1", "0", "0"], ["0", "1", "0"], ["0", "0", "1"]]
    assert {group[0].get("dur") for group in groups} == {"5.6s"}
    texts = [element.text for element in groups[1].iter() if element.tag.endswith("text")]
    assert texts[-3:] == [
        "step 2 of 3: 白 is added", "1 row computed; keys and values of 2 are in the cache",
        "3 so far; 5 without a cache",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "name", "tokens", "says"),
    [
        (PREFIX, "a.png", 4, "something.gif or something.svg"),
        (PREFIX, "a.gif", 3, "3 tokens for a mask of shape"),
        (Mask.causal(ones(41)), "a.gif", 41, "at most 40"),
        (Mask.causal(~ones(2)), "a.gif", 2, "nothing but padding"),
    ],
)
def test_refusals(tmp_path, mask, name, tokens, says):
    with pytest.raises(UsageError, match=says):
        animate(mask, tmp_path / name, ["a"] * tokens)
    assert not list(tmp_path.iterdir())
