"""`allmask evaluate` and `allmask predict` with an image classifier, and its pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics  # pyright: ignore[reportMissingImports]
import torch
from PIL import Image

import allmask
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.nn.heads import Labels
from allmask.vision.checkpoints import load, save
from allmask.vision.datasets import read
from allmask.vision.images import Preparation
from allmask.vision.resnet import ResNetConfig, fresh
from allmask.vision.task import Recognizer
from tests import tiny
from tests.vision.test_training import COLOURS, draw

NAMES = tuple(sorted(COLOURS))
TINY = ResNetConfig((1,), (4,), stem="small", classes=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "colours", 5, 1)


@pytest.fixture(scope="module")
def network(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with random weights, whose predictions are mostly wrong."""
    model = fresh(TINY, torch.Generator().manual_seed(3))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(4))
    folder = tmp_path_factory.mktemp("models") / "network"
    save(folder, model, Labels("single", NAMES), Preparation.of(read(data).pixels))
    return folder


def answers(network: Path, data: Path) -> torch.Tensor:
    """By hand."""
    found, images = load(network), read(data)
    pixels = images.pixels / 255.0
    mean = torch.tensor(found.preparation.mean if found.preparation else ())
    deviation = torch.tensor(found.preparation.deviation if found.preparation else ())
    with torch.no_grad():
        return found.model((pixels - mean[:, None, None]) / deviation[:, None, None])


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_images_with_an_opacity(cli, mode: str, tmp_path: Path):
    """What was learnt from can be judged, from files as from arrays."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(3):
            Image.new(mode, (8, 8), (number * 40,) * len(mode)).save(tmp_path / "data" / name / f"{number}.png")
    pixels = read(tmp_path / "data").pixels
    config = ResNetConfig((1,), (4,), stem="small", classes=2, channels=len(mode))
    model = fresh(config, torch.Generator().manual_seed(3))
    save(tmp_path / "network", model, Labels("single", ("a", "b")), Preparation.of(pixels))
    ran = cli("evaluate", tmp_path / "network", tmp_path / "data", "--limit", 4, "--json")
    assert ran.code == 0 and [row["images"] for row in json.loads(ran.out)["classes"].values()] == [2, 2], ran.err
    recognize = allmask.pipeline("image", tmp_path / "network")
    told = recognize([tmp_path / "data" / "a" / "1.png", pixels[1].permute(1, 2, 0).numpy()])
    assert told[0].probabilities == pytest.approx(told[1].probabilities)


def test_evaluate(cli, network: Path, data: Path):
    found, gold = answers(network, data).argmax(1), read(data).labels
    ran = cli("evaluate", network, data, "--precision", "fp32", "--show", 2, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["images"] == 15 and told["scores"]["accuracy"] == pytest.approx((found == gold).double().mean().item())
    assert told["confusion"] == sklearn.metrics.confusion_matrix(gold, found, labels=[0, 1, 2]).tolist()
    report = sklearn.metrics.classification_report(
        gold, found, labels=[0, 1, 2], target_names=NAMES, output_dict=True, zero_division=0
    )
    for name in NAMES:
        assert told["classes"][name]["recall"] == pytest.approx(report[name]["recall"])
        assert told["classes"][name]["precision"] == pytest.approx(report[name]["precision"])
    shares = answers(network, data).softmax(1).max(1).values[found != gold]
    assert [row["probability"] for row in told["errors"]] == pytest.approx(
        shares.sort(descending=True).values[:2].tolist()
    )
    assert all(Path(row["where"]).parent.name == row["label"] != row["prediction"] for row in told["errors"])
    ran = cli("evaluate", network, data, "--precision", "fp32", "--show", 1, "--limit", 7)
    assert ran.out.startswith("| 7 images | accuracy |") and "| 红 | 2 |" in ran.out and ", predicted " in ran.out
    assert "| true class | images | precision | recall | F1 | predicted 红 |" in ran.out


def test_predict(cli, network: Path, data: Path, tmp_path: Path):
    shares = answers(network, data).softmax(1)
    ran = cli("predict", network, data, "-o", tmp_path / "out.jsonl", "--precision", "fp32")
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["file"] for line in lines] == [str(file) for file in sorted(data.rglob("*.png"))]
    by_file = dict(zip(read(data).files, shares.tolist(), strict=True))
    for line in lines:
        assert list(line["probabilities"].values()) == pytest.approx(by_file[line["file"]], abs=1e-5)
        assert line["probabilities"][line["prediction"]] == max(line["probabilities"].values())
    ran = cli("predict", network, data / "红" / "0.png", "-o", "-", "--precision", "fp32")
    assert json.loads(ran.out)["file"].endswith("0.png")


def test_packed_data(cli, network: Path, data: Path, tmp_path: Path):
    images = read(data)
    arrays = {"x_test": images.pixels.permute(0, 2, 3, 1).numpy(), "y_test": images.labels.numpy()}
    np.savez(tmp_path / "some.npz", names=np.array(images.names), allow_pickle=False, **arrays)
    ran = cli("predict", network, tmp_path / "some.npz", "-o", "-", "--precision", "fp32")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["file"] for line in lines[:2]] == ["image 1", "image 2"]
    found = answers(network, data).argmax(1)
    assert [line["prediction"] for line in lines] == [images.names[number] for number in found]


def test_images_of_any_size(network: Path, data: Path, tmp_path: Path):
    recognize = Recognizer.open(network, "fp32")
    file = data / "红" / "0.png"
    Image.open(file).resize((32, 32), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    Image.open(file).convert("L").save(tmp_path / "grey.png")
    small, large, grey = recognize([file, tmp_path / "large.png", tmp_path / "grey.png"])
    assert large.probabilities == pytest.approx(small.probabilities, abs=0.05)
    assert grey.probabilities != small.probabilities
    alone = recognize(file)  # a convolution rounds by the number of images
    assert alone.label == small.label and alone.probabilities == pytest.approx(small.probabilities, rel=1e-5)


def test_what_is_refused(cli, network: Path, data: Path, tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    for words, code, told in [
        (("predict", network, tmp_path / "broken.png", "-o", tmp_path / "o.jsonl"), 3, "broken.png: cannot be read"),
        (("predict", network, tmp_path / "none", "-o", tmp_path / "o.jsonl"), 3, "none: does not exist"),
        (("predict", network, data, "-o", "-", "--beams", 2), 2, "--beams: this model classifies images"),
        (("predict", network, data, "-o", "-", "--columns", "text=id"), 2, "are for records"),
        (("predict", network, "-", "-o", "-"), 2, "a line of stdin is a text"),
        (("evaluate", network, data, "--on-bad-record", "skip"), 2, "--on-bad-record is for records"),
        (("evaluate", network, "digits"), 3, "images of 1 × 8 × 8"),
    ]:
        ran = cli(*words)
        assert ran.code == code and told in ran.err, ran.err
    assert not (tmp_path / "o.jsonl").exists()
    with pytest.raises(UsageError, match="int8"):
        Recognizer.open(network, "int8")
    save(tmp_path / "bare", fresh(TINY))
    with pytest.raises(CheckpointError, match="no class names"):
        Recognizer.open(tmp_path / "bare")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mean": [0.5]}, "expected a number for each channel"),
        ({"mean": 0.5}, "expected lists"),
        ({"deviation": [0.5, 0.5, 0.0]}, "above 0"),
        ({"deviation": [0.5, 0.5, "x"]}, "expected a number for each channel"),
        ({"height": 0}, "expected numbers from 1"),
        ({"depth": 3}, "expected deviation, height, mean, width"),
        ({"mean": [0.5], "deviation": [0.5]}, "images of 1 channels for 3"),
    ],
)
def test_settings_of_images_that_are_none(network: Path, tmp_path: Path, change: dict, told: str):
    settings = json.loads((network / "config.json").read_text(encoding="utf-8"))
    settings["images"] |= change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes((network / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=told) as caught:
        load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


# ---- pipeline("image", …) --------------------------------------------------------------------------------------------


def test_a_pipeline_tells_labels_with_probabilities(network: Path, data: Path):
    recognize, images = allmask.pipeline("image", network, "fp32"), read(data)
    shares = answers(network, data).softmax(1)
    for number, file in enumerate(images.files):
        told = recognize(file)
        assert told.label == NAMES[int(shares[number].argmax())]
        assert told.probabilities == pytest.approx(dict(zip(NAMES, shares[number].tolist(), strict=True)), abs=1e-6)
        assert told.probability == max(told.probabilities.values())
    assert [told.label for told in recognize([Path(file) for file in images.files])] == [
        NAMES[place] for place in shares.argmax(1).tolist()
    ]


def test_arrays_are_told_as_files_are(network: Path, data: Path):
    """Bytes and fractions, channels last and first, of numpy and of torch, one and several."""
    recognize, images = allmask.pipeline("image", network, "fp32"), read(data)
    expected, fifth = recognize(list(images.files)), recognize(images.files[4])
    first, last = images.pixels, images.pixels.permute(0, 2, 3, 1)
    fractions = last.numpy() / 255.0
    for several in (first, last, first.numpy(), last.numpy(), first / 255.0, fractions):
        assert recognize(several) == expected and recognize(several[4]) == fifth
    mixed = recognize([images.files[0], last[1].numpy(), first[2], Path(images.files[3])])
    assert mixed == recognize(list(images.files[:4]))
    assert recognize([]) == []


def test_arrays_of_other_sizes_and_kinds(network: Path, tmp_path: Path):
    rng = np.random.default_rng(5)
    for shape in ((20, 13, 3), (9, 30), (11, 11, 1)):
        array = rng.integers(0, 256, shape, np.uint8)
        Image.fromarray(array.squeeze()).save(tmp_path / "x.png")
        recognize = allmask.pipeline("image", network, "fp32")
        assert recognize(array) == recognize(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((8, 8, 5)), "image 1: an array of shape [1, 8, 8, 5]"),
        (np.zeros(8), "image 1: an array of shape [8]"),
        (np.zeros((0, 8)), "image 1: an array of shape [0, 8]"),
        (np.full((8, 8), np.nan), "NaN"),
        (np.full((8, 8), -1), "pixels from -1"),
        (np.array([["a"]]), "pixels are numbers"),
    ],
)
def test_arrays_that_are_no_images(network: Path, array, words: str):
    recognize = allmask.pipeline("image", network)
    with pytest.raises(DataError) as error:
        recognize(array)
    assert words in str(error.value)


def test_the_number_of_a_bad_array_is_told(network: Path):
    arrays = [np.zeros((8, 8), np.uint8)] * 300 + [np.zeros((8,))]
    with pytest.raises(DataError, match="image 301"):
        allmask.pipeline("image", network)(arrays)


def test_what_is_no_image(network: Path):
    for one in (3, None, Image.new("RGB", (8, 8))):
        with pytest.raises(UsageError, match="a file or an array"):
            allmask.pipeline("image", network)([one])


def test_a_pipeline_of_something_else(tmp_path: Path):
    tiny.bert(tmp_path / "bert")
    with pytest.raises(CheckpointError, match=r'was not trained for "image"(.|\n)*allmask train --task image'):
        allmask.pipeline("image", tmp_path / "bert")
