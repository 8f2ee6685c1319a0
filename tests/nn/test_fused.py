"""Layers in training with compiled kernels: equal to the layers that are their specification, gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from allmask.data import Batch, Example, pack
from allmask.kernels import activation, residual_norm
from allmask.kernels.precision import native_bf16
from allmask.losses import losses_of
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn import fused, layers
from allmask.nn.init import initialize
from allmask.presets import bert_small, transformer_base

SMALL = {"vocab_size": 300, "layers": 2, "width": 64, "heads": 4, "ffn_width": 96, "dropout": 0.0}


@pytest.fixture(autouse=True)
def needed():
    if residual_norm.library() is None or activation.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def model_of(kind: str, **changes) -> Model:
    presets = {"bert": bert_small(), "pair": replace(transformer_base(), decoder_layers=2)}
    config = replace(presets[kind], **{**SMALL, "attention_dropout": 0.0, **changes})
    model = Model.fresh(config, ("lm",), torch.Generator().manual_seed(0))
    initialize(model, 0.2, torch.Generator().manual_seed(1))
    with torch.no_grad():  # biases are zero at first, and norms do nothing
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter += 0.2 * drawn
    return model.train()


def batch_of(kind: str) -> Batch:
    rng = torch.Generator().manual_seed(2)

    def ids(count: int) -> Tensor:
        return torch.randint(2, 300, (count,), generator=rng)

    if kind == "pair":
        pairs = [(ids(source).tolist(), ids(target).tolist()) for source, target in ((10, 12), (31, 20), (3, 5))]
        return pack([Example.pair([*source, 0], [1, *target], [*target, 0]) for source, target in pairs])
    examples = []
    for length, source in ((40, 30), (17, 17), (70, 1), (5, 2)):
        text, is_target = ids(length), torch.arange(length) >= source
        labels = torch.where(torch.rand(length, generator=rng) < 0.3, ids(length), -1)
        order = Mask.prefix(is_target[None]).order[0]
        examples.append(Example(*(x.numpy() for x in (text, order, is_target, labels))))
    return pack(examples)


def trained(model: Model, batch: Batch, half: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = losses_of(model, batch)[batch.name][0]
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), {name: grad.clone() for name, grad in found.items()}


def specified(model: Model, batch: Batch, monkeypatch, half: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    with monkeypatch.context() as patched:
        patched.setattr(fused, "suits", lambda x: False)
        return trained(model, batch, half)


@pytest.mark.parametrize("kind", ["bert", "pair"])
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu"])
def test_losses_and_gradients_are_those_of_the_specification(kind, act, monkeypatch):
    model, batch = model_of(kind, activation=act), batch_of(kind)
    calls = []
    monkeypatch.setattr(fused, "join", lambda *given, join=fused.join: calls.append(1) or join(*given))
    loss, grads = trained(model, batch)
    assert len(calls) == {"bert": 4, "pair": 10}[kind]
    right, expected = specified(model, batch, monkeypatch)
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=0)
    assert grads.keys() == expected.keys()
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in grads.items():
        assert (grad - expected[name]).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("kind", ["bert", "pair"])
def test_in_bf16_they_are_as_near_to_fp32_as_the_specification(kind, monkeypatch):
    if not native_bf16("cpu"):
        pytest.skip("bf16 is emulated on this processor")
    batch, ours, usual = batch_of(kind), 0.0, 0.0
    for seed in range(6):  # a single one may differ by half
        model, rng = model_of(kind), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=rng)
        _, exact = specified(model, batch, monkeypatch)
        ours += distance(trained(model, batch, half=True)[1], exact)
        usual += distance(specified(model, batch, monkeypatch, half=True)[1], exact)
    assert 0 < ours < 1.1 * usual < 1.5


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, as a share of the norm of the exact ones."""
    squares = [((found[name] - grad).square().sum(), grad.square().sum()) for name, grad in exact.items()]
    error, size = map(sum, zip(*squares, strict=True))
    return float(error / size) ** 0.5


@pytest.mark.parametrize("norm_place", ["pre", "post"])
@pytest.mark.parametrize("training", [True, False])
def test_the_last_layer_computes_only_what_is_asked_for(norm_place, training, monkeypatch):
    model, batch = model_of("bert", norm_place=norm_place).train(training), batch_of("bert")
    where, calls = batch.labels >= 0, []
    attend = layers.attend_chosen
    monkeypatch.setattr(layers, "attend_chosen", lambda *given: calls.append(len(given[0])) or attend(*given))
    torch.testing.assert_close(
        model.body.forward_at(where, batch.ids, batch.mask, batch.segments),
        model.body(batch.ids, batch.mask, segments=batch.segments)[where],
        rtol=0, atol=1e-5,
    )  # fmt: skip
    assert calls == [int(where.sum())]
    nothing = model.body.forward_at(torch.zeros_like(where), batch.ids, batch.mask, batch.segments)
    assert nothing.shape == (0, 64)


@pytest.mark.parametrize("kind", ["bert", "pair"])
def test_dropout_is_drawn_from_the_seed_and_recomputed_alike(kind):
    """With `recompute` the forward pass runs again in the backward pass; gradients are the same bits."""
    model, batch = model_of(kind, dropout=0.2, attention_dropout=0.1, ffn_dropout=0.1), batch_of(kind)
    found = []
    for recompute in (False, False, True):
        model.body.recompute = recompute
        torch.manual_seed(7)
        found.append(trained(model, batch))
    torch.manual_seed(8)
    other, _ = trained(model, batch)
    for loss, grads in found[1:]:
        assert torch.equal(loss, found[0][0]) and not torch.equal(loss, other)
        assert all(torch.equal(grad, found[0][1][name]) for name, grad in grads.items())


def test_dropout_keeps_the_mean(monkeypatch):
    """The mean of many losses with dropout is that of the specification, within the noise."""
    model, batch = model_of("bert", dropout=0.1, attention_dropout=0.1), batch_of("bert")
    torch.manual_seed(0)
    with torch.no_grad():
        monkeypatch.setattr(torch, "is_grad_enabled", lambda: True)  # as in training
        ours = torch.stack([losses_of(model, batch)[batch.name][0] for _ in range(300)])
        monkeypatch.setattr(fused, "suits", lambda x: False)
        theirs = torch.stack([losses_of(model, batch)[batch.name][0] for _ in range(300)])
    noise = ((ours.var() + theirs.var()) / 300).sqrt()
    assert (ours.mean() - theirs.mean()).abs() < 4 * noise
    assert 0.8 < ours.std() / theirs.std() < 1.25


def test_what_is_left_to_the_specification():
    layer = model_of("bert").body.layers[0]
    x = torch.randn(1, 5, 64)
    assert layer.is_fused(x, None)
    assert not layer.is_fused(x, torch.zeros(1))  # relative positions
    assert not layer.is_fused(x.double(), None)
    with torch.no_grad():
        assert not layer.is_fused(x, None)
    with torch.autocast("cpu", torch.float16):
        assert not layer.is_fused(x, None)
    hook = layer.feed_forward.expand.register_forward_hook(lambda *_: None)
    assert not layer.is_fused(x, None)
    hook.remove()
    assert layer.is_fused(x, None) and not layer.eval().is_fused(x, None)
    assert not model_of("bert", norm_place="pre").body.layers[0].is_fused(x, None)
    assert not model_of("bert", norm="rms").body.layers[0].is_fused(x, None)
    assert fused.kind_of(nn.GELU(approximate="tanh")) == "gelu_tanh" and fused.kind_of(nn.SiLU()) is None
