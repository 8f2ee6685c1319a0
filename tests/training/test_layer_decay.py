"""Rates by layer: what lies deeper learns more slowly, in one stack and in two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allmask import presets
from allmask.errors import UsageError
from allmask.model import Model
from allmask.training import Settings
from allmask.training.optimizer import optimizer_for

SMALL = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 32, "layers": 3}
TWO = {**SMALL, "decoder_layers": 2}
ENCODER = {f"body.encoder.layers.{n}.": 0.5 ** (3 - n) for n in range(3)}
DECODER = {f"body.decoder.layers.{n}.": 0.5 ** (2 - n) for n in range(2)}
KINDS = {
    "transformer": (replace(presets.transformer_base(), **TWO), {**ENCODER, **DECODER}),
    "t5": (
        replace(presets.t5_small(), **TWO, head_width=8, buckets=8),
        {**ENCODER, **DECODER, "body.encoder.relative.": 0.0625, "body.decoder.relative.": 0.0625},
    ),
    "lstm": (
        replace(presets.lstm_small(), **{**TWO, "heads": 1}),
        {**ENCODER, **DECODER, "body.decoder.bridges.0.": 0.25, "body.decoder.bridges.1.": 0.5},
    ),
    "xlnet": (replace(presets.xlnet_tiny(), **SMALL), {f"body.layers.{n}.": 0.5 ** (3 - n) for n in range(3)}),
    "gpt2": (replace(presets.gpt2(), **SMALL), {f"body.layers.{n}.": 0.5 ** (3 - n) for n in range(3)}),
}


def moved(model: Model, settings: Settings) -> dict[str, float]:
    """How far a step with gradients of 1 moves each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_for(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: (before[name] - p.detach()).mean().item() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_stack_counts_from_its_last_layer(kind, optimizer):
    config, shares = KINDS[kind]
    settings = Settings(lr=0.1, layer_decay=0.5, weight_decay=0.0, optimizer=optimizer)
    found = moved(Model.fresh(config, ["lm"], torch.Generator().manual_seed(0)), settings)
    met = set()
    for name, distance in found.items():
        start = next((start for start in {"body.embedding.": 0, **shares} if name.startswith(start)), "")
        share = {"body.embedding.": 0.0625, "": 1.0, **shares}[start]
        assert distance == pytest.approx(0.1 * share, rel=1e-3), name
        met.add(start)
    assert met >= {"body.embedding.", *shares}


def test_it_makes_no_sense_where_no_layer_learns():
    model = Model.fresh(KINDS["transformer"][0], ["lm"], torch.Generator().manual_seed(0))
    model.body.requires_grad_(False)
    with pytest.raises(UsageError, match="no layer of this model is trained"):
        optimizer_for(model, Settings(layer_decay=0.5))
