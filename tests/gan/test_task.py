"""Runs by the command: pictures, resumed == uninterrupted, saved == loaded, the toy's end, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from allmask.cli.main import main
from allmask.errors import CheckpointError, UsageError
from allmask.gan import files, toy
from allmask.gan.learning import GanWorkload
from allmask.gan.networks import PRESETS, GanConfig, fresh
from allmask.gan.task import GanTraining
from allmask.runs.driver import resume, start
from allmask.runs.plan import Plan
from allmask.training import Paused, Score, Settings, train
from allmask.training.log import read_metrics
from allmask.vision import files as networks
from allmask.vision.labelled import Preparation
from allmask.vision.resnet import ResNetConfig
from allmask.vision.resnet import fresh as network

SMALL = {"epochs": 2, "batch_images": 10, "seed": 3}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Forty images of 8 × 8 in an archive."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(40) % 2)
    return tmp_path / "images.npz"


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    model = network(ResNetConfig((1,), (4,), stem="small", channels=1, classes=2), torch.Generator().manual_seed(0))
    networks.save(tmp_path / "judge", model, None, Preparation(8, 8, (0.5,), (0.3,)))
    return tmp_path / "judge"


def words(values: dict) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("preset", ["mlp", "dcgan"])
def test_the_command_makes_a_grid_an_epoch(tmp_path: Path, images: Path, judge: Path, preset: str, capsys):
    out = tmp_path / "run"
    asked = {"task": "gan", "preset": preset, "data": images, "judge": judge, "out": out, **SMALL}
    assert main(["train", *words(asked), "--quiet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["task"] == "gan" and told["steps"] == 16 and set(told["metrics"]) == {"frechet", "classes", "covered"}
    assert sorted(path.name for path in (out / "grids").iterdir()) == [f"step-{n:08d}.png" for n in (0, 8, 16)]
    lines = read_metrics(out)
    assert sum("loss_discriminator" in line for line in lines) == sum("loss_generator" in line for line in lines) == 8
    assert (out / "loss.png").is_file() and Path(told["picture"]).is_file() and not (out / "judge").exists()
    made = files.load(out / "final").sample(3, torch.Generator().manual_seed(0))
    assert made.shape == (3, 1, 8, 8)
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0  # a finished one is left as it is
    assert main(["verify", str(out / "final")]) == 0


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, images: Path, judge: Path, monkeypatch):
    plan = Plan.from_dict(
        {"task": "gan", "data": str(images), "judge": str(judge), "k": 3, "loss": "saturating", **SMALL}
    )
    start(plan, tmp_path / "whole", quiet=True)
    from allmask.gan.task import ImageEvaluator

    look = ImageEvaluator.__call__

    def pauses(self, model, step):
        found = look(self, model, step)
        return Score(found.value, found.metrics, pause=step == 5)

    monkeypatch.setattr(ImageEvaluator, "__call__", pauses)
    with pytest.raises(Paused):
        start(plan, tmp_path / "twice", quiet=True)
    monkeypatch.undo()
    resume(tmp_path / "twice", quiet=True)
    for name in ("final/model.safetensors", "grids/step-00000010.png"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    losses = [
        [{name: line[name] for name in line if name not in ("speed", "mfu")} for line in read_metrics(tmp_path / run)]
        for run in ("whole", "twice")
    ]
    assert losses[0] == losses[1]


def test_a_judge_is_trained_where_none_is_named(tmp_path: Path, images: Path):
    plan = Plan.from_dict({"task": "gan", "data": str(images), "preset": "mlp", **SMALL, "epochs": 1})
    told = start(plan, tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "judge" / "final" / "model.safetensors").is_file() and told["metrics"]["frechet"] >= 0.0


# ---- the toy ---------------------------------------------------------------------------------------------------


def test_the_discriminator_of_a_fixed_generator_becomes_p_over_p_plus_q(tmp_path: Path):
    """Steps of the discriminator alone: C25 without an integral in the training."""
    model = fresh(GanConfig("toy", (1,), 1, 32), torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.generator.get_parameter("straight.bias"), 2.0)  # N(2, 1): some doubt is left
    work = GanWorkload(toy.examples(torch.Generator().manual_seed(1)), k=500, batch=512)
    settings = Settings(
        steps=500, batch_tokens=512, lr=1e-2, schedule="linear", warmup=0, weight_decay=0.0, clip=1e9, precision="fp32",
        eval_every=500,
    )  # fmt: skip
    train(model, work, settings, tmp_path / "run", quiet=True)
    frame = toy.frame_of(model.eval())
    weight = (frame.data + frame.made) / 2.0
    off = np.trapezoid(weight * np.abs(frame.told - frame.best), frame.x)
    assert off < 0.03 < np.trapezoid(weight * np.abs(frame.best - 0.5), frame.x)
    found = frame.metrics()
    assert (
        found["value"] == pytest.approx(found["best_value"], abs=0.03) and found["value"] <= found["best_value"] + 1e-3
    )


def test_a_toy_run_draws_frames_and_a_strip(tmp_path: Path, capsys):
    out = tmp_path / "line"
    assert main(["train", "--task", "gan", "--preset", "toy", "--steps", "60", "--out", str(out), "--quiet"]) == 0
    assert "divergence" in capsys.readouterr().out
    assert len(list((out / "frames").glob("*.png"))) == 31 and (out / "strip.png").stat().st_size > 10_000
    plan = Plan.from_dict({"task": "gan", "preset": "toy"})
    assert isinstance(plan.job, GanTraining) and plan.job.k == 3 and plan.settings.lr == 5e-3


def test_a_strip_is_the_start_two_between_and_the_end():
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0))
    frame = toy.frame_of(model)
    chosen = toy.strip({step: frame for step in (0, 10, 20, 30, 40)}, last=30)
    assert [title.split()[0] for title, _ in chosen] == ["a", "b", "c", "d"]
    assert chosen[0][0] == "a  step 0" and chosen[-1][0] == "d  step 30"


def test_a_frame_is_a_pair_of_densities(tmp_path: Path):
    frame = toy.frame_of(fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0)))
    assert np.trapezoid(frame.data, frame.x) == pytest.approx(1.0, abs=1e-6)
    assert np.trapezoid(frame.made, frame.x) <= 1.0 + 1e-9
    frame.save(tmp_path / "frame.npz")
    again = toy.Frame.load(tmp_path / "frame.npz")
    assert all(np.array_equal(getattr(frame, name), getattr(again, name)) for name in ("x", "data", "made", "odds"))


def test_what_is_made_outside_the_picture_counts():
    """By hand: a generator far away shares nothing with the data, so the divergence is log 2 and the best value 0."""
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0))
    start = toy.frame_of(model).metrics()
    assert start["mean"] == pytest.approx(0.0, abs=1e-3)
    torch.nn.init.constant_(model.generator.get_parameter("straight.bias"), -20.0)
    found = toy.frame_of(model).metrics()
    assert found["divergence"] == pytest.approx(math.log(2.0), abs=1e-6) and found["divergence"] > start["divergence"]
    assert found["best_value"] == pytest.approx(0.0, abs=1e-6) and found["mean"] == pytest.approx(-20.0, abs=1e-2)
    assert found["value"] <= found["best_value"]


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"preset": "toy", "data": "digits"}, 2, "data: for images, not for a toy"),
        ({"preset": "resnet20"}, 2, "expected one for --task gan\n  there are: toy, mlp, dcgan"),
        ({"crop": 4}, 2, "--crop is for --task image"),
        ({"label_smoothing": 0.1}, 2, "--label-smoothing is for --task translate, title or image, not for gan"),
        ({"layers": 4}, 2, "--layers is for texts"),
        ({"data": "nowhere"}, 3, "nowhere: not there"),
        ({"judge": "nowhere"}, 4, "nowhere"),
        ({"preset": "toy", "batch_images": 2}, 2, "batch_images is 2"),
        ({"seed": 10**20}, 2, "seed is"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, asked: dict, code: int, says: str, capsys):
    assert main(["train", "--task", "gan", "--out", str(tmp_path / "run"), *words(asked)]) == code
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_options_of_a_gan_are_refused_elsewhere(tmp_path: Path, capsys):
    assert main(["train", "--task", "image", "--k", "2", "--out", str(tmp_path / "run")]) == 2
    assert "--k is for --task gan" in capsys.readouterr().err
    assert main(["train", "--size", "32", "--out", str(tmp_path / "run")]) == 2
    assert "--size is for --task image or gan, not for translate" in capsys.readouterr().err


def test_sides_that_cannot_be_halved_twice_are_refused():
    with pytest.raises(UsageError, match="4 divides"):
        GanConfig("dcgan", (1, 10, 10)) or None


def test_damaged_data_is_named(tmp_path: Path, capsys):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    assert main(["train", "--task", "gan", "--data", str(tmp_path / "broken.npz"), "--out", str(tmp_path / "run")]) == 3
    assert "broken.npz" in capsys.readouterr().err


def test_saved_is_loaded_and_damage_is_told(tmp_path: Path):
    model = fresh(GanConfig("mlp", (1, 4, 4), 5, 6), torch.Generator().manual_seed(0)).eval()
    files.save(tmp_path / "model", model)
    again = files.load(tmp_path / "model")
    assert again.config == model.config
    rng = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(again.sample(4, rng[0]), model.sample(4, rng[1]))
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    for change, says in (
        ({"noise": 6}, "generator.0.weight"),
        ({"kind": "vae"}, "kind is 'vae'"),
        ({"model_type": "bert"}, "model_type"),
        ({"shape": 3}, "shape"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(CheckpointError, match=says):
            files.load(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        files.load(tmp_path)
