"""Folders of images: silent without a shift as often as promised, awake with one, and clear about what is no image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from allmask.drift import Pictures, Settings, compare_images, read_images
from allmask.drift.features import MEASURES, SIDE, image_features, table_of
from allmask.errors import DataError


def noise(count: int, seed: int, brighter: float = 0.0, blurred: bool = False) -> Pictures:
    """Images of smooth blobs and grain."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear") * 40.0
    grain = torch.randn(count, 3, SIDE, SIDE, generator=rng) * (4.0 if blurred else 12.0)
    level = 128.0 + brighter + torch.randn(count, 1, 1, 1, generator=rng) * 20.0
    pixels = (level + smooth + grain).clamp(0, 255).to(torch.uint8)
    return Pictures(pixels, torch.full((count, 2), 64), [f"{number}.png" for number in range(count)], count)


def write(folder: Path, pictures: Pictures, ending: str = ".png") -> Path:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(pictures.pixels):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number:03d}{ending}")
    return folder


def test_without_a_shift_alarms_are_as_rare_as_alpha_says():
    alarms = sum(
        compare_images(noise(24, 2 * seed), noise(24, 2 * seed + 1), Settings(seed=seed)).shifted for seed in range(120)
    )
    assert alarms <= stats.binom.ppf(0.999, 120, 0.05)


def test_p_is_no_smaller_than_uniform_without_a_shift():
    found = [
        compare_images(noise(20, 7000 + seed), noise(20, 9000 + seed), Settings(seed=seed)).p for seed in range(60)
    ]
    for level in (0.1, 0.25, 0.5):
        assert sum(p <= level for p in found) <= stats.binom.ppf(0.999, 60, level)


def test_brightness_is_seen_and_named():
    verdict = compare_images(noise(120, 1), noise(120, 2, brighter=25.0))
    assert verdict.shifted and verdict.accuracy > 0.65
    found = next(one for one in verdict.differences if one.name == "brightness")
    assert found.more_in == 1 and found.measure == "median"
    assert found.second - found.first == pytest.approx(25.0, abs=8.0)


def test_a_blur_is_seen_and_named():
    verdict = compare_images(noise(80, 1), noise(80, 2, blurred=True))
    assert verdict.shifted and verdict.accuracy > 0.95
    assert any(one.name == "sharpness" and one.more_in == 0 for one in verdict.differences)
    assert verdict.examples and verdict.examples[0].text == "64 × 64 pixels"


def test_sizes_alone_are_seen():
    first, second = noise(60, 1), noise(60, 2)
    wide = Pictures(second.pixels, torch.tensor([[96, 64]]).repeat(60, 1), second.where, 60)
    verdict = compare_images(first, wide)
    assert verdict.shifted and any(one.name == "width" and one.second == 96 for one in verdict.differences)


def test_the_same_images_in_both_folders_give_nothing_away():
    pictures = noise(40, 1)
    with pytest.raises(DataError, match="distinct images"):
        compare_images(noise(2, 3), noise(2, 4))
    verdict = compare_images(pictures, pictures)
    assert verdict.shared == 40 and verdict.trials == 0 and not verdict.shifted


def test_measures_are_what_they_are_called():
    flat = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    flat[0] = 100
    flat[1, 0], flat[1, :, :, 0] = 255, 0  # red, with a black line on its left
    table, names = table_of(flat, torch.tensor([[10, 20], [30, 40]]))
    found = {name: table[:, names.index(name)].tolist() for name in MEASURES}
    assert found["width"] == [10, 30] and found["height"] == [20, 40]
    assert found["brightness"][0] == pytest.approx(100.0, abs=1e-3) and found["contrast"][0] == pytest.approx(
        0.0, abs=1e-9
    )
    assert found["colourfulness"] == [0.0, 255 * 31 / 32] and found["warmth"] == found["colourfulness"]
    assert found["sharpness"][1] == pytest.approx(0.299 * 255 / 32, rel=1e-5)
    assert table[0, names.index("green in row 8, column 1 of 8")] == 100


def test_rows_are_as_the_discriminator_wants_them():
    pictures = noise(30, 5)
    table, names = table_of(pictures.pixels, pictures.sizes)
    features = image_features(pictures.pixels, table, names, torch.ones(len(table), dtype=torch.bool))
    assert features.rows.shape == (30, len(features.names))
    np.testing.assert_allclose(features.rows.mean(0), 0.0, atol=1e-12)
    assert features.rows.square().sum(1).mean().item() == pytest.approx(1.0)


# ---- files -----------------------------------------------------------------------------------------------------


def test_reads_what_was_written_below_any_subfolder(tmp_path: Path):
    pictures = noise(6, 1)
    write(tmp_path / "a" / "cats", pictures)
    found = read_images(tmp_path / "a", 10, "0")
    assert torch.equal(found.pixels, pictures.pixels) and found.sizes.tolist() == [[SIDE, SIDE]] * 6
    assert found.total == 6 and found.where[0].endswith("cats/000.png")
    assert read_images(tmp_path / "a", 4, "0").pixels.shape[0] == 4


def test_grey_and_coloured_images_of_any_size_stand_beside_each_other(tmp_path: Path):
    Image.new("L", (50, 20), 77).save(tmp_path / "grey.png")
    Image.new("RGBA", (8, 8), (1, 2, 3, 255)).save(tmp_path / "with-alpha.png")
    found = read_images(tmp_path, 10, "0")
    assert found.pixels.shape == (2, 3, SIDE, SIDE) and (found.pixels[0] == 77).all()
    assert found.sizes.tolist() == [[50, 20], [8, 8]]


def test_what_is_no_image_is_named_or_left_out(tmp_path: Path):
    from collections import Counter

    write(tmp_path / "a", noise(3, 1))
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "a" / "empty.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"broken\.png"):
        read_images(tmp_path / "a", 10, "0")
    skipped: Counter[str] = Counter()
    assert len(read_images(tmp_path / "a", 10, "0", "skip", skipped).where) == 3
    assert skipped == {"unreadable image": 2}
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="no images"):
        read_images(tmp_path / "b", 10, "0")


# ---- the command -----------------------------------------------------------------------------------------------


def test_all_of_an_image_is_seen(tmp_path: Path):
    """Wide images whose ends alone differ."""
    rng = np.random.default_rng(0)
    for name, ends in (("a", 128), ("b", 255)):
        (tmp_path / name).mkdir()
        for number in range(40):
            pixels = rng.integers(90, 166, (32, 96, 3), dtype=np.uint8)
            pixels[:, :32] = np.clip(pixels[:, :32].astype(int) + ends - 128, 0, 255)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    first, second = (read_images(tmp_path / name, 100, "0") for name in ("a", "b"))
    assert compare_images(first, second).shifted
    assert len(set(first.keys())) == 40


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from allmask.cli.main import main

    a, b = write(tmp_path / "a", noise(24, 1)), write(tmp_path / "b", noise(24, 2, blurred=True))
    assert main(["drift", str(a), str(b), "--quiet"]) == 7
    told = capsys.readouterr().out
    assert told.startswith("shifted\n") and "sharpness" in told and "b/0" in told
    again = write(tmp_path / "c", noise(24, 3))
    assert main(["drift", str(a), str(again), "--quiet"]) == 0
    (tmp_path / "numbers.csv").write_text("x\n1\n2\n")
    assert main(["drift", str(a), str(tmp_path / "numbers.csv")]) == 3
    assert "is a folder" in capsys.readouterr().err
    assert main(["drift", str(a), str(b), "--columns", "x"]) == 2
    (b / "000.png").write_bytes(b"no image")
    assert main(["drift", str(a), str(b)]) == 3
    assert "000.png" in capsys.readouterr().err
