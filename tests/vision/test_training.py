"""`allmask train --task image`: what a run leaves, that it can be interrupted, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics  # pyright: ignore[reportMissingImports]
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from allmask.errors import DivergedError, UsageError
from allmask.objectives.draws import Draw
from allmask.options import IMAGES as DEFAULTS
from allmask.training import Settings, train
from allmask.training.checkpoint import load_state
from allmask.training.progress import Progress
from allmask.vision.checkpoints import load
from allmask.vision.datasets import has_part, read
from allmask.vision.images import Images, Preparation
from allmask.vision.resnet import ResNetConfig, fresh
from allmask.vision.training import (
    ImageBatch,
    ImageEvaluator,
    ImageTraining,
    logits_of,
    losses_of,
    plan_images,
    random_crop,
    random_flip,
)
from tests import tiny

COLOURS = {"红": (200, 60, 60), "绿": (60, 200, 60), "蓝": (60, 60, 200)}
TINY = ResNetConfig((1,), (4,), stem="small", classes=3)
QUICK = ("--steps", 6, "--batch-images", 12, "--precision", "fp32")


def draw(folder: Path, each: int, seed: int) -> Path:
    """So many pictures of each colour, with noise over them."""
    rng = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = np.clip(np.array(colour) + rng.normal(0, 60, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/."""
    folder = tmp_path_factory.mktemp("colours")
    draw(folder / "train", 12, 0)
    draw(folder / "test", 5, 1)
    return folder


def fingerprint(run: Path) -> tuple[bytes, str]:
    lines = tiny.read_jsonl(run / "metrics.jsonl")
    told = [{name: value for name, value in line.items() if name not in ("speed", "mfu")} for line in lines]
    return (run / "final" / "model.safetensors").read_bytes(), json.dumps(told)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_all_it_promises(cli, colours: Path, tmp_path: Path):
    run = tmp_path / "run"
    ran = cli("train", "--task", "image", "--data", colours, *QUICK, "--eval-every", 3, "--out", run, "--json")
    assert ran.code == 0, ran.err
    assert "36 images of 3 classes, 15 held out" in ran.err and "images/s" in ran.err
    result = json.loads(ran.out)
    assert result["steps"] == 6 and result["images"] == 36 and 0.0 <= result["waited"] <= 1.0
    assert {"loss", "accuracy", "macro_f1", "matthews"} == result["metrics"].keys()
    for name in ("loss.png", "confusion.png"):
        assert Image.open(run / name).size > (200, 200)
    told = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    expected = {"task": "image", "data": str(colours), "preset": "resnet20", "crop": 1, "flip": True}
    assert expected.items() <= told.items() and told["batch_images"] == 12 and "dropout" not in told
    lines = tiny.read_jsonl(run / "metrics.jsonl")
    assert [line["images"] for line in lines if "images" in line] == [12] * 6
    assert lines[0]["loss"] == pytest.approx(np.log(3), abs=0.1)  # all classes start alike
    made = load(run / "final")
    assert made.labels is not None and made.labels.names == tuple(sorted(COLOURS))
    assert made.preparation == Preparation.of(read(colours).pixels)
    assert cli("verify", run).code == 0


@pytest.mark.parametrize(("step", "number", "code"), [(1, signal.SIGINT, 130), (5, signal.SIGTERM, 143)])
def test_resumed_is_uninterrupted(cli, colours: Path, tmp_path: Path, monkeypatch, step: int, number: int, code: int):
    words = ("train", "--task", "image", "--data", colours, *QUICK, "--eval-every", 2)
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        kill = lambda bar, done, text="": os.kill(os.getpid(), number) if done == step else None  # noqa: E731
        patched.setattr(Progress, "update", kill)
        assert cli(*words, "--out", tmp_path / "cut").code == code
    ran = cli(*((*words, "--resume") if step == 1 else ("train", "--resume")), "--out", tmp_path / "cut")
    assert ran.code == 0, ran.err
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_resumed_run_keeps_its_settings_and_data(cli, colours: Path, tmp_path: Path, monkeypatch):
    data = draw(tmp_path / "data", 4, 0)
    words = ("train", "--task", "image", "--data", data, *QUICK, "--out", tmp_path / "run")
    with monkeypatch.context() as patched:
        kill = lambda bar, done, text="": os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        patched.setattr(Progress, "update", kill)
        ran = cli(*words)
    assert ran.code == 130 and "none held out" in ran.err
    ran = cli("train", "--resume", "--out", tmp_path / "run", "--batch-images", 9, "--preset", "resnet20")
    assert ran.code == 2 and "batch_images is 12, not 9" in ran.err and "preset" not in ran.err
    ran = cli("train", "--resume", "--out", tmp_path / "run", "--max-source", 9)
    assert ran.code == 2 and "--max-source is for texts, not for image" in ran.err
    Image.new("RGB", (8, 8)).save(data / "红" / "0.png")
    ran = cli("train", "--resume", "--out", tmp_path / "run")
    assert ran.code == 3 and f"{data}: changed since" in ran.err


def test_digits_are_there_without_any_data(cli, tmp_path: Path, monkeypatch):
    ran = cli("train", "--task", "image", "--steps", 1, "--out", tmp_path / "run", "--precision", "fp32")
    assert ran.code == 0 and "1,437 images of 10 classes, 360 held out" in ran.err
    told = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert told["data"] == "digits" and told["flip"] is False  # a digit has no mirror image
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    ran = cli("train", "--task", "image", "--out", tmp_path / "other")
    assert ran.code == 5 and "pip install scikit-learn" in ran.err and not (tmp_path / "other").exists()


def write_set(folder: Path, kind: str) -> Path:
    """Ten images of two classes to learn from and six to be judged by, as one of the usual data sets."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("t10k", 6)):
        grey, labels = rng.integers(0, 256, (count, 8, 8), np.uint8), np.arange(count, dtype=np.uint8) % 2
        if kind == "idx":
            header = b"".join(size.to_bytes(4, "big") for size in grey.shape)
            (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + header + grey.tobytes())
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + header[:4] + labels.tobytes())
        elif kind == "cifar":
            colours = rng.integers(0, 256, (count, 3072), np.uint8)
            name = "data_batch_1.bin" if part == "train" else "test_batch.bin"
            (folder / name).write_bytes(np.hstack([labels[:, None], colours]).tobytes())
        else:
            np.savez(folder / f"{part}.npz", images=grey, labels=labels)
    return folder if kind != "npz" else folder / "train.npz"


@pytest.mark.parametrize(("kind", "classes"), [("idx", 2), ("cifar", 10), ("npz", 2)])
def test_the_usual_data_sets(cli, tmp_path: Path, kind: str, classes: int):
    data = write_set(tmp_path, kind)
    others = ("--eval", tmp_path / "t10k.npz") if kind == "npz" else ()
    ran = cli("train", "--task", "image", "--data", data, *others, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    assert ran.code == 0 and f"10 images of {classes} classes, 6 held out" in ran.err, ran.err
    flipped = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))["flip"]
    assert flipped is (kind == "cifar")


def test_a_loss_that_is_not_finite(cli, colours: Path, tmp_path: Path):
    words = ("--lr", 1e30, "--warmup", 0, "--schedule", "constant", "--weight-decay", 0, "--steps", 40)
    ran = cli(
        "train", "--task", "image", "--data", colours, *QUICK, *words, "--save-every", 1, "--out", tmp_path / "run"
    )
    assert ran.code == 6 and "error[diverged]" in ran.err
    assert not (tmp_path / "run" / "final").exists()
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert load_state(newest).numbers["bad_steps"] == 4
    assert all(tensor.isfinite().all() for tensor in load_state(newest).model.values())


# ---- what is refused -----------------------------------------------------------------------------------------------


def mend(folder: Path, name: str) -> None:
    """Something is wrong with the data."""
    if name == "unreadable":
        (folder / "train" / "红" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    elif name == "mixed":
        Image.new("L", (8, 8)).save(folder / "train" / "红" / "3.png")
    elif name == "sizes":
        Image.new("RGB", (9, 8)).save(folder / "train" / "红" / "3.png")
    elif name == "one":
        for colour in ("绿", "蓝"):
            for file in (folder / "train" / colour).iterdir():
                file.unlink()
            (folder / "train" / colour).rmdir()
    elif name == "strange":
        (folder / "test" / "红").rename(folder / "test" / "黄")
    elif name == "idx":
        (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0\0\x05\0\0\0\x08\0\0\0\x08")
        (folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02\0\1")


@pytest.mark.parametrize(
    ("wrong", "file", "words"),
    [
        ("unreadable", "train/红/3.png", "cannot be read"),
        ("mixed", "train/红/3.png", "1 channels"),
        ("sizes", "train/红/3.png", "9 × 8 pixels"),
        ("one", "train", "one class"),
        ("strange", "", "a class 黄"),
        ("idx", "train-images-idx3-ubyte", "the header announces 5 × 8 × 8 bytes"),
    ],
)
def test_bad_data_is_named(cli, tmp_path: Path, wrong: str, file: str, words: str):
    draw(tmp_path / "data" / "train", 4, 0)
    draw(tmp_path / "data" / "test", 2, 1)
    mend(tmp_path / "data", wrong)
    ran = cli("train", "--task", "image", "--data", tmp_path / "data", *QUICK, "--out", tmp_path / "run")
    assert ran.code == 3 and str(tmp_path / "data" / file) in ran.err and words in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_held_out_images_of_another_size(cli, colours: Path, tmp_path: Path):
    for name in COLOURS:
        (tmp_path / "others" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "others" / name / "0.png")
    words = ("train", "--task", "image", "--data", colours, "--eval", tmp_path / "others", *QUICK)
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 3 and f"{tmp_path / 'others'}: images of 3 × 9 × 9" in ran.err
    ran = cli(*words, "--size", 8, "--steps", 1, "--out", tmp_path / "run")
    assert ran.code == 0 and "3 held out" in ran.err


OF_TEXTS = (
    "tokenizer", "vocab_size", "layers", "width", "heads", "ffn_width", "batch_tokens", "dropout", "ema", "recompute",
    "average", "best", "max_source", "max_target", "truncate", "on_bad_record", "layer_decay",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_TEXTS)
def test_options_of_texts_are_refused(cli, tmp_path: Path, name: str):
    values = {"recompute": [], "best": ["loss"], "truncate": ["head"], "on_bad_record": ["skip"]}
    option = f"--{name.replace('_', '-')}"
    ran = cli("train", "--task", "image", option, *values.get(name, ["1"]), "--out", tmp_path / "run")
    whose = "--task translate" if name == "best" else "texts"
    assert ran.code == 2 and f"{option} is for {whose}, not for image" in ran.err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [("--size", 8), ("--channels", 3), ("--crop", 2), ("--flip",), ("--batch-images", 8)])
def test_options_of_images_are_refused(cli, tmp_path: Path, words):
    for task in ("translate", "title"):
        ran = cli("train", "--task", task, "--data", "x.jsonl", *words, "--out", tmp_path / "run")
        assert ran.code == 2 and f"{words[0]} is for --task image" in ran.err, ran.err


def test_images_that_are_trained_on_are_not_evaluated_on(cli, tmp_path: Path):
    for number, name in enumerate("ab" * 4):
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(tmp_path / "data" / name / f"{number}.png")
    data = tmp_path / "data"
    ran = cli("train", "--task", "image", "--data", data, "--eval", data, "--out", tmp_path / "run")
    assert ran.code == 2 and "the same images are trained on" in ran.err and not (tmp_path / "run").exists(), ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--preset", "resnet21"), "there are: resnet18"),
        (("--batch-images", 3), "expected 4 or more"),
        (("--crop", -1), "--crop is -1; expected at least 0"),
        (("--size", 0), "expected a size from 1"),
        (("--config", "wrong.yaml"), "wrong.yaml: layer_decay is for texts, not for image"),
    ],
)
def test_values_that_are_none(cli, colours: Path, tmp_path: Path, monkeypatch, words, told: str):
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("preset: resnet20\nlayer_decay: 0.9\n")
    ran = cli("train", "--task", "image", "--data", colours, *words, "--out", tmp_path / "run")
    assert ran.code == 2 and told in ran.err and not (tmp_path / "run").exists(), ran.err


# ---- augmentation: the same for an image in any batch, compared with a loop over images ------------------------------

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (400, 3, 6, 5), dtype=np.uint8))


def places(image, made, padding):
    """Where in the padded image this crop is."""
    padded = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)))
    span = range(2 * padding + 1)
    return [(y, x) for y in span for x in span if np.array_equal(padded[:, y : y + 6, x : x + 5], made.numpy())]


def test_every_crop_is_one_and_all_places_occur():
    made = random_crop(PIXELS, Draw(1, 0, range(400)), padding=2)
    assert made.shape == PIXELS.shape and made.dtype == torch.uint8 and made.is_contiguous()
    found = [places(image, crop, 2) for image, crop in zip(PIXELS, made, strict=True)]
    assert all(len(place) == 1 for place in found)
    counts = {place: sum(place == f[0] for f in found) for place in {f[0] for f in found}}
    assert len(counts) == 25 and max(counts.values()) < 40  # 16 of each expected


def test_flips_are_about_half():
    made = random_flip(PIXELS, Draw(1, 0, range(400)))
    flipped = [bool((a == b.flip(2)).all()) for a, b in zip(made, PIXELS, strict=True)]
    same = [bool((a == b).all()) for a, b in zip(made, PIXELS, strict=True)]
    assert all(a != b for a, b in zip(flipped, same, strict=True)) and 160 < sum(flipped) < 240


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 399), min_size=1, max_size=8), st.integers(0, 2**62), st.integers(0, 1000))
def test_batches_do_not_matter(numbers, seed, epoch):
    for change in (random_crop, random_flip):
        together = change(PIXELS[numbers], Draw(seed, epoch, numbers))
        for place, number in enumerate(numbers):
            alone = change(PIXELS[number : number + 1], Draw(seed, epoch, [number]))
            assert torch.equal(together[place], alone[0])


@pytest.mark.parametrize("change", [random_crop, random_flip])
def test_another_seed_or_epoch_is_another_draw(change):
    made = [change(PIXELS, Draw(seed, epoch, range(400))) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert torch.equal(made[0], made[3])
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2]) and not torch.equal(made[1], made[2])


def test_no_padding_is_no_crop():
    assert torch.equal(random_crop(PIXELS, Draw(0, 0, range(400)), padding=0), PIXELS)


@pytest.mark.parametrize("change", [random_crop, random_flip])
def test_a_draw_for_others(change):
    with pytest.raises(UsageError, match="400 images, but a draw for 3"):
        change(PIXELS, Draw(0, 0, range(3)))


# ---- parts ---------------------------------------------------------------------------------------------------------


@given(count=st.integers(2, 500), most=st.integers(4, 64), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_batches_are_about_as_large(count: int, most: int, seed: int, epoch: int):
    plan = list(plan_images(np.ones(count), most, seed, epoch))
    sizes = [len(numbers) for numbers in plan]
    assert sorted(number for numbers in plan for number in numbers) == list(range(count))
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1 and min(sizes) >= 2
    assert plan == list(plan_images(np.ones(count), most, seed, epoch))
    if count > 10:
        assert plan != list(plan_images(np.ones(count), most, seed, epoch + 1))


def test_an_image_is_changed_alike_in_any_batch(colours: Path):
    job = ImageTraining(str(colours)).settled(read(colours))
    work = job.work(job.images(), fresh(TINY), DEFAULTS)
    whole, part = work.batch([3, 1, 4, 9], 2), work.batch([4], 2)
    assert torch.equal(whole.pixels[2], part.pixels[0]) and whole.labels[2] == part.labels[0]
    assert not torch.equal(work.batch([3, 1, 4, 9], 3).pixels, whole.pixels)


def test_a_bad_step_leaves_the_statistics(colours: Path, tmp_path: Path):
    job = ImageTraining(str(colours)).settled(read(colours))
    model = fresh(TINY, torch.Generator().manual_seed(0)).train()
    batch = ImageBatch(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    losses_of(model, batch)["image"][0].backward()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        model.stem.conv.weight.fill_(torch.inf)
    loss, count = losses_of(copy.deepcopy(model), batch)["image"]
    assert not loss.isfinite() and count == 4
    with pytest.raises(DivergedError):
        train(model, job.work(job.images(), model, DEFAULTS), Settings(steps=9, batch_tokens=8), tmp_path, quiet=True)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_confusion_is_that_of_scikit_learn(colours: Path):
    images = read(colours, "test")
    preparation = Preparation.of(images.pixels)
    model = fresh(TINY, torch.Generator().manual_seed(3))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(4))
    evaluator = ImageEvaluator(images, preparation, "fp32")
    loss, marks = evaluator.marks(model)
    scores = logits_of(model.eval(), images.pixels, preparation)
    found = scores.argmax(1)
    assert len(found.unique()) > 1
    assert (marks.confusion == sklearn.metrics.confusion_matrix(images.labels, found, labels=[0, 1, 2])).all()
    assert marks.scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(images.labels, found))
    assert loss == pytest.approx(
        sklearn.metrics.log_loss(images.labels, scores.double().softmax(1), labels=[0, 1, 2]), rel=1e-5
    )
    assert evaluator(model).value == marks.scores["accuracy"]


def test_classes_keep_their_numbers():
    pixels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    images = Images(pixels, torch.tensor([1, 0, 1]), ("b", "c"))
    assert images.with_names(("a", "b", "c"), "x").labels.tolist() == [2, 1, 2]


def test_parts(colours: Path, tmp_path: Path):
    assert has_part(colours, "train") and has_part(colours, "test")
    assert not has_part(colours / "train", "test") and not has_part(tmp_path / "none", "test")
    assert has_part("digits", "test")
    pixels, labels = np.zeros((2, 4, 4), np.uint8), np.arange(2)
    np.savez(tmp_path / "one.npz", images=pixels, labels=labels)
    np.savez(tmp_path / "two.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    assert not has_part(tmp_path / "one.npz", "test") and has_part(tmp_path / "two.npz", "test")
    (tmp_path / "t10k-images-idx3-ubyte").touch()
    assert has_part(tmp_path, "test") and not has_part(tmp_path, "train")
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "test_batch.bin").touch()
    assert has_part(tmp_path / "cifar", "test") and not has_part(tmp_path / "cifar", "train")


# ---- the optimizer of the paper --------------------------------------------------------------------------------------


def test_sgd_has_the_defaults_of_the_paper(cli, colours: Path, tmp_path: Path):
    words = ("train", "--task", "image", "--data", colours, *QUICK, "--steps", 4, "--optimizer", "sgd")
    ran = cli(*words, "--eval-every", 2, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    told = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert (told["lr"], told["momentum"], told["weight_decay"], told["schedule"]) == (0.1, 0.9, 1e-4, "steps")
    rates = [line["lr"] for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "lr" in line]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001])
    ran = cli(*words, "--lr", 0.05, "--momentum", 0.5, "--schedule", "cosine", "--out", tmp_path / "other")
    told = yaml.safe_load((tmp_path / "other" / "config.yaml").read_text(encoding="utf-8"))
    assert (told["lr"], told["momentum"], told["weight_decay"], told["schedule"]) == (0.05, 0.5, 1e-4, "cosine")
    ran = cli("train", "--task", "image", "--data", colours, "--momentum", 0.5, "--out", tmp_path / "none")
    assert ran.code == 2 and "--momentum is for --optimizer sgd" in ran.err


def test_a_resumed_run_of_sgd(cli, colours: Path, tmp_path: Path, monkeypatch):
    words = ("train", "--task", "image", "--data", colours, *QUICK, "--eval-every", 2, "--optimizer", "sgd")
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        kill = lambda bar, done, text="": os.kill(os.getpid(), signal.SIGINT) if done == 3 else None  # noqa: E731
        patched.setattr(Progress, "update", kill)
        assert cli(*words, "--out", tmp_path / "cut").code == 130
    ran = cli("train", "--resume", "--out", tmp_path / "cut", "--optimizer", "adamw")
    assert ran.code == 2 and "optimizer is sgd, not adamw" in ran.err
    assert cli("train", "--resume", "--out", tmp_path / "cut").code == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
