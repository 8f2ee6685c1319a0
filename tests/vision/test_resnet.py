"""Residual networks: counts by hand and by the paper, the same numbers as plain code and as other libraries."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from allmask.errors import CheckpointError, UsageError
from allmask.nn.init import signal_report
from allmask.vision.checkpoints import load, to_torchvision
from allmask.vision.resnet import PRESETS, Padded, ResNetConfig, fresh, multiply_adds, plain, shape_of, small
from tests.vision.reference import image, parameters, resnet, vgg19

RESNET18, RESNET34, RESNET50 = (PRESETS[name]() for name in ("resnet18", "resnet34", "resnet50"))
TINY = ResNetConfig((2, 1, 2), (4, 8, 12), classes=5)
VARIANTS = {
    f"{'bottleneck' if deep else 'basic'}-{shortcut}-{stem}{'-early' if early else ''}": replace(
        TINY, bottleneck=deep, shortcut=shortcut, stem=stem, early_stride=early
    )
    for deep in (False, True)
    for shortcut in ("A", "B", "C", "none")
    for stem in ("large", "small")
    for early in ((False, True) if deep else (False,))
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def randomised(model, seed=0):
    """Every number random, running statistics too: fresh ones are 0 and 1 and hide a swap."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim >= 2:
                tensor.copy_(torch.randn(tensor.shape, generator=rng) / math.sqrt(tensor[0].numel()))
            elif tensor.ndim == 1:
                spread = torch.rand(tensor.shape, generator=rng) + 0.5
                tensor.copy_(spread if name.endswith(("var", "weight")) else spread - 1.0)
    return model.eval()


def images(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet20", 269_722), ("resnet56", 853_018), ("resnet110", 1_727_962), ("resnet18", 11_689_512),
        ("resnet34", 21_797_672), ("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808),
        ("plain20", 269_722), ("plain34", 21_797_672 - 173_824),
    ],
)  # fmt: skip
def test_parameters(name, count):
    assert parameters(PRESETS[name]()) == count


def test_parameters_of_the_projections_by_hand():
    """What plain34 lacks: 1×1 kernels from each width to the next, and their norms."""
    assert sum(a * b + 2 * b for a, b in ((64, 128), (128, 256), (256, 512))) == 173_824
    everywhere = sum(n * (w * w + 2 * w) for n, w in ((2, 64), (1, 128), (1, 256), (1, 512)))
    assert parameters(replace(RESNET18, shortcut="C")) - parameters(RESNET18) == everywhere
    assert parameters(replace(RESNET18, shortcut="A")) == parameters(plain(RESNET18))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_layers_they_are_named_by(name):
    depth = int(re.sub(r"\D", "", name))
    config = PRESETS[name]()
    assert config.depth == depth
    assert (config.shortcut == "none") == name.startswith("plain")
    if depth < 1000:
        convolutions = [p for n, p in shape_of(config).named_parameters() if p.ndim == 4 and "shortcut" not in n]
        assert len(convolutions) + 1 == depth


def test_operations_of_vgg_by_hand():
    conv = 9 * sum(
        n * side * side
        for side, n in (
            (224, 3 * 64 + 64 * 64),
            (112, 64 * 128 + 128 * 128),
            (56, 128 * 256 + 3 * 256 * 256),
            (28, 256 * 512 + 3 * 512 * 512),
            (14, 4 * 512 * 512),
        )
    )
    model = vgg19()
    assert multiply_adds(model, image()) == conv + 512 * 49 * 4096 + 4096 * 4096 + 4096 * 1000 == 19_632_062_464
    assert sum(p.numel() for p in model.parameters()) == 143_667_240


def test_resnet34_costs_18_per_cent_of_vgg19_and_bottlenecks_about_the_same():
    vgg, basic, bottleneck = (
        multiply_adds(model, image()) for model in (vgg19(), shape_of(RESNET34), shape_of(RESNET50))
    )
    assert 0.18 < basic / vgg < 0.19
    assert 1.0 < bottleneck / basic < 1.15


@pytest.mark.parametrize(
    "config",
    [RESNET18, RESNET50, replace(RESNET50, early_stride=True), small(20)],
)
def test_operations_are_those_torch_counts(config):
    model, side = shape_of(config), 32 if config.stem == "small" else 224
    with FlopCounterMode(display=False) as counter:
        model(image(side))
    assert model.training
    assert multiply_adds(model, image(side)) == counter.get_total_flops() // 2
    assert model.training and not any(part._forward_hooks for part in model.modules())


# ---- numbers ---------------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("side", [32, 37])
def test_same_as_plain_code(config, side):
    model, x = randomised(fresh(config)), images(2, 3, side, side)
    with torch.no_grad():
        expected = resnet(to_torchvision(model), x, shortcut=config.shortcut != "none", early=config.early_stride)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [RESNET18, RESNET50, small(20), small(56)], ids=lambda c: str(c.depth))
def test_real_sizes_are_the_same_as_plain_code(config):
    model, x = randomised(fresh(config)), images(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), resnet(to_torchvision(model), x), rtol=1e-4, atol=1e-4)


def hugging_face(bottleneck, early):
    from transformers import ResNetConfig as TheirConfig
    from transformers import ResNetForImageClassification

    outputs = [16, 32, 48] if bottleneck else [4, 8, 12]
    config = TheirConfig(
        embedding_size=4, hidden_sizes=outputs, depths=[2, 1, 2], layer_type="bottleneck" if bottleneck else "basic",
        downsample_in_bottleneck=early, num_labels=5,
    )  # fmt: skip
    return randomised(ResNetForImageClassification(config))


def in_torchvision_words(name):
    def block(found):
        stage, layer, rest = int(found[1]) + 1, found[2], found[3]
        rest = re.sub(r"^shortcut\.convolution", "downsample.0", rest)
        rest = re.sub(r"^shortcut\.normalization", "downsample.1", rest)
        rest = re.sub(r"^layer\.(\d)\.convolution", lambda m: f"conv{int(m[1]) + 1}", rest)
        return f"layer{stage}.{layer}." + re.sub(r"^layer\.(\d)\.normalization", lambda m: f"bn{int(m[1]) + 1}", rest)

    name = name.replace("resnet.embedder.embedder.convolution", "conv1").replace("classifier.1", "fc")
    name = name.replace("resnet.embedder.embedder.normalization", "bn1")
    return re.sub(r"^resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.(.*)", block, name)


@pytest.mark.parametrize(("bottleneck", "early"), [(False, False), (True, False), (True, True)])
def test_same_as_transformers(tmp_path, bottleneck, early):
    theirs, x = hugging_face(bottleneck, early), images(2, 3, 48, 48)
    torch.save({in_torchvision_words(n): t for n, t in theirs.state_dict().items()}, tmp_path / "a.pth")
    config = replace(TINY, bottleneck=bottleneck, early_stride=early)
    model = load(tmp_path / "a.pth", config if early else None).model
    assert model.config == config
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_same_as_timm(tmp_path, name):
    timm = pytest.importorskip("timm", exc_type=ImportError)  # it needs torchvision
    theirs, x = randomised(timm.create_model(name)), images(1, 3, 96, 96)
    torch.save(theirs.state_dict(), tmp_path / "a.pth")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "a.pth").model(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_features_are_what_the_head_reads():
    model, x = randomised(fresh(TINY)), images(3, 3, 32, 32)
    with torch.no_grad():
        features = model.features(x)
        assert features.shape == (3, 12)
        torch.testing.assert_close(model(x), F.linear(features, model.head.weight, model.head.bias))


def test_shortcut_a_by_hand():
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert Padded(1, 3, 2)(x).tolist() == [[[[0, 2], [6, 8]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]]


# ---- layouts and precisions --------------------------------------------------------------------------------------


@variants
def test_channels_last(config):
    model, x = randomised(fresh(config)), images(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        model = model.to(memory_format=torch.channels_last)
        shapes = []
        for layer in (layer for stage in model.stages.values() for layer in stage.layers):
            layer.register_forward_hook(lambda _, __, made: shapes.append(made))
        torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-5, atol=1e-5)
    assert all(made.is_contiguous(memory_format=torch.channels_last) for made in shapes)  # no copies on the way


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_bf16(shortcut):
    model, x = randomised(fresh(replace(TINY, shortcut=shortcut))), images(8, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(x)
        whole = model.bfloat16()(x.bfloat16())
    assert mixed.dtype == whole.dtype == torch.bfloat16
    scale = expected.abs().max()
    assert (mixed - expected).abs().max() < 0.03 * scale and (whole - expected).abs().max() < 0.03 * scale


@pytest.mark.parametrize("autocast", [False, True])
def test_learns(autocast):
    rng = torch.Generator().manual_seed(0)
    config = replace(TINY, stem="small", widths=(8, 16, 24))  # with AVX2, torch 2.13 breaks the heap for fewer than 8
    model = fresh(config, rng).to(memory_format=torch.channels_last).train()
    x, y = images(20, 3, 16, 16), torch.arange(20) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(5)) < 0.1 and losses[-1] < 0.2


# ---- how it starts -----------------------------------------------------------------------------------------------


def test_starts_by_he_and_from_the_given_generator():
    state = torch.get_rng_state()
    first, second = (fresh(RESNET18, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        if a.ndim == 4:
            expected = math.sqrt(2.0 / (a.shape[0] * a.shape[2] * a.shape[3]))
            assert a.std().item() == pytest.approx(expected, rel=0.03)
        elif "norm" in name:
            assert (a == (1.0 if name.endswith(("weight", "var")) else 0.0)).all()
    assert first.head.weight.std().item() == pytest.approx(0.01, rel=0.03) and not first.head.bias.any()


def test_gradients_reach_the_first_block_by_the_shortcuts():
    """At the start a gradient comes through 56 layers with shortcuts larger than without."""

    def kept(config):
        model = fresh(config, torch.Generator().manual_seed(0))
        report = signal_report(model, lambda: model.features(images(4, 3, 32, 32)), torch.Generator().manual_seed(1))
        assert len(report) == 3 * (9 + 1)
        return report[0].gradient / report[-1].gradient

    assert kept(small(56)) > kept(plain(small(56)))


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks": (2, 2)}, {"blocks": ()}, {"blocks": (2, 2, 0, 2)}, {"blocks": [2, 2, 2, 2]},
        {"widths": (1, 2, 3, 1e3)},
        {"blocks": (1,) * 9, "widths": (8,) * 9}, {"shortcut": "D"}, {"stem": "tiny"}, {"channels": True},
        {"classes": 0}, {"classes": 10**9}, {"bottleneck": 1}, {"blocks": (2, 2, 2, 10**9)},
    ],
)  # fmt: skip
def test_a_config_that_is_none(fields):
    with pytest.raises(CheckpointError, match="config: "):
        ResNetConfig(**fields)


def test_a_depth_that_is_none():
    with pytest.raises(UsageError, match="6n \\+ 2"):
        small(21)


def test_shortcut_a_only_adds_channels():
    with pytest.raises(UsageError, match="shortcut A cannot turn 8 channels into 4"):
        shape_of(ResNetConfig((1, 1), (8, 4), shortcut="A"))


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32)])
def test_images_of_another_shape(shape):
    with pytest.raises(UsageError, match="expected \\(B, 3, H, W\\)"):
        fresh(TINY)(torch.zeros(shape))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_way_back_through_a_padded_shortcut(layout):
    """As autograd goes through the same slices and zeros."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 8, generator=rng, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    shortcut = Padded(3, 8, 2)
    made, plain = shortcut(x), F.pad(x[..., ::2, ::2], (0, 0, 0, 0, 0, 5))
    assert torch.equal(made, plain)
    upward = torch.randn(made.shape, generator=rng, dtype=torch.float64)
    (ours,), (theirs,) = (torch.autograd.grad(out, x, upward) for out in (made, plain))
    assert torch.equal(ours, theirs) and ours.is_contiguous(memory_format=layout)
    assert torch.autograd.gradgradcheck(shortcut, (x,))
