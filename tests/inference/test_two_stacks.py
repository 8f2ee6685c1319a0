"""int8 of encoder–decoders: both stacks are near the model, and evened out by the norms that they really read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from allmask import config as configs
from allmask.decoding import Decoding, PairWriter, generate
from allmask.inference import bytes as int8
from allmask.inference import freeze
from allmask.masks import Mask
from allmask.model import Model

SMALL = {"vocabulary": 60, "width": 64, "heads": 4, "inner": 112, "layers": 2, "decoder_layers": 2, "max_positions": 24}
CONFIGS = {
    "2017": replace(configs.transformer_base(), **SMALL),
    "pre-norm": replace(configs.transformer_base(), **SMALL, norm_place="pre"),
    "T5": replace(configs.t5_v1_1_small(), **SMALL, head_width=16),
}


def small(name: str) -> Model:
    rng = torch.Generator().manual_seed(0)
    model = Model(CONFIGS[name], heads=["lm"]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_is_near_the_model(name):
    model, ids = small(name), torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(1))
    valid = torch.arange(20) < torch.tensor([[20], [15], [12]])
    mask = Mask.encoder_decoder((torch.arange(20) >= 11) & valid, valid)
    found, exact = freeze(model, "int8")(ids, mask).hidden, model(ids, mask).hidden
    assert torch.cosine_similarity(found[valid], exact[valid], dim=-1).min() > 0.97
    assert (found[~valid] == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_frozen_model_writes(name):
    writer = PairWriter(freeze(small(name), "int8"), start=[2])
    [[best]] = generate(writer, [[5, 6, 7]], Decoding(max_new=5, beams=2))
    assert len(best.tokens) == 5


@pytest.mark.parametrize("name", CONFIGS)
def test_each_linear_layer_is_evened_out_by_the_norm_before_it(name):
    """Hooks see which norm gave the very tensor that a linear layer reads."""
    model, given, read = small(name), {}, {}
    stretches = int8._stretches(model.body, model.config.norm_place)

    def after(norm, inputs, output):
        given[id(output)] = norm, output  # kept, so that no other tensor gets its place

    def before(linear, inputs):
        norm, _ = given.get(id(inputs[0]), (None, None))
        read[linear] = norm

    for module in model.body.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.register_forward_hook(after)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(before)
    model(torch.arange(1, 13)[None], Mask.encoder_decoder(torch.arange(12)[None] >= 7))
    for linear, norm in read.items():
        expected = None if norm is None else int8.stretch_of(norm, linear.weight)
        found = stretches.get(linear)
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found, expected)
    assert sum(norm is not None for norm in read.values()) >= 16
