"""Training a GAN: losses, turns against Algorithm 1 written out, runs by the command, resuming, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.cli.main import main
from allmask.errors import CheckpointError, UsageError
from allmask.gan import networks
from allmask.gan.networks import PRESETS, GanConfig, fresh
from allmask.gan.training import (
    GanTraining,
    GanWorkload,
    ImageEvaluator,
    Turn,
    as_examples,
    as_pixels,
    discriminator_loss,
    generator_loss,
    write_grid,
)
from allmask.runs.driver import resume, start
from allmask.runs.plan import Plan
from allmask.training import Paused, Score, Settings, train
from allmask.training.log import read_metrics
from allmask.vision import checkpoints, resnet
from allmask.vision.images import Preparation
from allmask.vision.resnet import ResNetConfig, multiply_adds

SHAPES = {"toy": (1,), "mlp": (1, 8, 8), "dcgan": (3, 8, 12)}
SMALL = {"epochs": 2, "batch_images": 10, "seed": 3}


def gan(kind: str = "toy", seed: int = 0, **other):
    values = {**PRESETS[kind], "width": 8, "noise": 3, **other}
    return fresh(GanConfig(kind, SHAPES[kind], **values), torch.Generator().manual_seed(seed))


def data(kind: str = "toy", count: int = 40) -> torch.Tensor:
    return torch.rand(count, *SHAPES[kind], generator=torch.Generator().manual_seed(5)) * 2.0 - 1.0


# ---- the losses ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=5))
def test_losses_are_the_logarithms_of_the_paper(numbers: list[float]):
    odds = torch.tensor(numbers, dtype=torch.float64)
    told = [1.0 / (1.0 + math.exp(-number)) for number in numbers]
    refused = [1.0 / (1.0 + math.exp(number)) for number in numbers]
    assert generator_loss(odds, "saturating").item() == pytest.approx(sum(map(math.log, refused)), rel=1e-9)
    assert generator_loss(odds, "non-saturating").item() == pytest.approx(-sum(map(math.log, told)), rel=1e-9)
    both = -sum(map(math.log, told)) - sum(map(math.log, refused))
    assert discriminator_loss(odds, odds).item() == pytest.approx(both, rel=1e-9)


def test_a_sure_discriminator_starves_the_saturating_loss_only():
    pulls = {}
    for kind in ("saturating", "non-saturating"):
        odds = torch.tensor([-12.0], requires_grad=True)
        generator_loss(odds, kind).backward()
        pulls[kind] = odds.grad.item()
    assert -1e-5 < pulls["saturating"] < 0.0 and pulls["non-saturating"] == pytest.approx(-1.0, abs=1e-4)


def test_at_a_half_both_pull_alike():
    for kind in ("saturating", "non-saturating"):
        odds = torch.zeros(1, requires_grad=True)
        generator_loss(odds, kind).backward()
        assert odds.grad.item() == -0.5


# ---- turns ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(4, 50), st.integers(4, 20))
def test_after_each_k_batches_comes_a_generator_step_also_across_epochs(k: int, count: int, size: int):
    work = GanWorkload(torch.zeros(count, 1), k=k, batch=size)
    epochs = [work.plan(work.lengths, size, 1, epoch) for epoch in range(2 * k)]
    turns = [bool(numbers) for epoch in epochs for numbers in epoch]
    whole = len(turns) // (k + 1)
    assert turns == ([True] * k + [False]) * whole and len(turns) == whole * (k + 1)
    for epoch in epochs:
        assert sorted(number for numbers in epoch for number in numbers) == list(range(count))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("loss", ["saturating", "non-saturating"])
def test_a_turn_leaves_gradients_in_one_network_only(kind: str, loss: str):
    model, work = gan(kind), GanWorkload(data(kind), loss=loss, batch=6)
    for turn, learns, rests in (
        (work.batch([0, 1, 2, 3], 0), model.discriminator, model.generator),
        (work.batch([], 0), model.generator, model.discriminator),
    ):
        ((total, count),) = work.losses(model, turn).values()
        total.backward()
        assert count == turn.count == (6 if turn.real is None else 4)
        assert all(weight.grad is not None for weight in learns.parameters())
        assert all(weight.grad is None and weight.requires_grad for weight in rests.parameters())
        model.zero_grad(set_to_none=True)


def test_training_is_algorithm_1_written_out(tmp_path):
    """k = 2, six steps: the loop's weights are those of two optimizers of torch, each for its own network."""
    settings = Settings(
        steps=6, batch_tokens=10, lr=1e-2, schedule="constant", warmup=0, weight_decay=0.0, betas=(0.5, 0.9),
        clip=1e9, precision="fp32", seed=4, eval_every=6,
    )  # fmt: skip
    model, work = gan(), GanWorkload(data(), k=2, batch=10)
    train(model, work, settings, tmp_path / "run", quiet=True)

    other, step = gan(), 0
    ours, theirs = (
        torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.5, 0.9))
        for network in (other.discriminator, other.generator)
    )
    batches = [numbers for numbers in work.plan(work.lengths, 10, 4, 0) if numbers]

    def seeded():
        nonlocal step
        torch.manual_seed((4 << 32) + step)
        step += 1

    for turn in range(2):
        for numbers in batches[2 * turn : 2 * turn + 2]:
            seeded()
            real, made = data()[numbers], other.generator(torch.randn(10, 3)).detach()
            right, wrong = other.discriminator(real).sigmoid(), other.discriminator(made).sigmoid()
            ours.zero_grad()
            (-(right.log() + (1 - wrong).log()).mean()).backward()
            ours.step()
        seeded()
        theirs.zero_grad()
        (-other.discriminator(other.generator(torch.randn(10, 3))).sigmoid().log().mean()).backward()
        theirs.step()
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4, msg=name)


def test_with_steps_of_the_discriminator_alone_the_generator_stays(tmp_path):
    model, work = gan(), GanWorkload(data(), k=8, batch=10)
    before = [weight.clone() for weight in model.generator.parameters()]
    settings = Settings(steps=8, batch_tokens=10, lr=1e-2, clip=1e9, precision="fp32", eval_every=8)
    train(model, work, settings, tmp_path / "run", quiet=True)
    assert all(torch.equal(one, two) for one, two in zip(before, model.generator.parameters(), strict=True))


def test_a_loss_that_is_not_finite_leaves_norms_and_weights(tmp_path):
    model = gan("dcgan")
    examples = data("dcgan", 8)
    examples[:] = float("nan")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    work = GanWorkload(examples, k=2, batch=4)
    settings = Settings(steps=2, batch_tokens=4, precision="fp32", eval_every=2)
    train(model, work, settings, tmp_path / "run", quiet=True)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


# ---- networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_made_has_the_shape_of_the_data(kind: str):
    model = gan(kind).eval()
    made = model.sample(5, torch.Generator().manual_seed(1))
    assert made.shape == (5, *SHAPES[kind]) and model.log_odds(made).shape == (5,)
    assert torch.equal(made, model.sample(5, torch.Generator().manual_seed(1)))
    assert kind == "toy" or made.abs().max() <= 1.0


def test_operations_are_counted_by_hand():
    model = gan("dcgan", noise=3, width=8)  # 3 × 8 × 12 pixels: maps of 2 × 3, then 4 × 6
    generator = 3 * 16 * 6 + 6 * 16 * 8 * 16 + 24 * 8 * 3 * 16
    discriminator = 24 * 3 * 8 * 16 + 6 * 8 * 16 * 16 + 16 * 6
    assert multiply_adds(model.generator, torch.zeros(1, 3)) == generator
    assert multiply_adds(model.discriminator, torch.zeros(1, 3, 8, 12)) == discriminator
    work = GanWorkload(data("dcgan"), batch=4)
    assert work.operations(model, Turn(None, 4)) == 8 * (3 * generator + 2 * discriminator)
    assert work.operations(model, Turn(data("dcgan", 5), 5)) == 10 * (generator + 6 * discriminator)


# ---- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Forty images of 8 × 8 in an archive."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(40) % 2)
    return tmp_path / "images.npz"


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    config = ResNetConfig((1,), (4,), stem="small", channels=1, classes=2)
    model = resnet.fresh(config, torch.Generator().manual_seed(0))
    checkpoints.save(tmp_path / "judge", model, None, Preparation(8, 8, (0.5,), (0.3,)))
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
    made = networks.load(out / "final").sample(3, torch.Generator().manual_seed(0))
    assert made.shape == (3, 1, 8, 8)
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0  # a finished one is left as it is
    assert main(["verify", str(out / "final")]) == 0


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, images: Path, judge: Path, monkeypatch):
    plan = Plan.from_dict(
        {"task": "gan", "data": str(images), "judge": str(judge), "k": 3, "loss": "saturating", **SMALL}
    )
    start(plan, tmp_path / "whole", quiet=True)
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


def test_a_toy_run_draws_frames_and_a_strip(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("allmask.gan.training.FRAMES", 6)  # of 30, which take a while to draw
    out = tmp_path / "line"
    assert main(["train", "--task", "gan", "--preset", "toy", "--steps", "12", "--out", str(out), "--quiet"]) == 0
    assert "divergence" in capsys.readouterr().out
    assert len(list((out / "frames").glob("*.png"))) == 7 and (out / "strip.png").stat().st_size > 10_000
    plan = Plan.from_dict({"task": "gan", "preset": "toy"})
    assert isinstance(plan.job, GanTraining) and plan.job.k == 3 and plan.settings.lr == 5e-3


def test_bytes_and_examples_convert_both_ways():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(as_pixels(as_examples(every)), every)
    assert as_examples(every).min() == -1.0 and as_examples(every).max() == 1.0
    assert as_pixels(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_has_each_image_in_its_place(tmp_path, channels: int):
    from PIL import Image

    pixels = torch.arange(5 * channels, dtype=torch.uint8).view(5, channels, 1, 1).expand(5, channels, 2, 3) * 10
    write_grid(pixels, 3, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        found = np.asarray(image).reshape(image.height, image.width, channels)
    step = (found.shape[0] - 1) // 2, (found.shape[1] - 1) // 3
    for number in range(5):
        at = found[(number // 3) * step[0] + step[0] // 2, (number % 3) * step[1] + step[1] // 2]
        assert at.tolist() == pixels[number, :, 0, 0].tolist()


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"preset": "toy", "data": "digits"}, 2, "data: for images, not for a toy"),
        ({"preset": "resnet20"}, 2, "expected one for --task gan\n  there are: toy, mlp, dcgan"),
        ({"crop": 4}, 2, "--crop is for --task image"),
        ({"label_smoothing": 0.1}, 2, "--label-smoothing is for --task translate, title or image, not for gan"),
        ({"layers": 4}, 2, "--layers is for texts"),
        ({"data": "nowhere"}, 3, "nowhere: does not exist"),
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
    with pytest.raises(UsageError, match="multiples of 4"):
        GanConfig("dcgan", (1, 10, 10)) or None


def test_damaged_data_is_named(tmp_path: Path, capsys):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    assert main(["train", "--task", "gan", "--data", str(tmp_path / "broken.npz"), "--out", str(tmp_path / "run")]) == 3
    assert "broken.npz" in capsys.readouterr().err


def test_saved_is_loaded_and_damage_is_told(tmp_path: Path):
    model = fresh(GanConfig("mlp", (1, 4, 4), 5, 6), torch.Generator().manual_seed(0)).eval()
    networks.save(tmp_path / "model", model)
    again = networks.load(tmp_path / "model")
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
            networks.load(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        networks.load(tmp_path)
