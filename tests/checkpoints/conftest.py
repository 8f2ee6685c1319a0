"""Tiny random models of transformers, and what their tensors are by walking their modules (not by our tables)."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import BertConfig, GPT2Config

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def bert_config(**changes):
    sizes = dict(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, type_vocab_size=2,
    )  # fmt: skip
    return BertConfig(**{**sizes, **changes})


def gpt2_config(**changes):
    sizes = dict(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, bos_token_id=1, eos_token_id=1)
    return GPT2Config(**{**sizes, **changes})


def randomised(model, seed=0):
    """Every parameter random: freshly made models have zeros and ones, which hide a swap."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return model.eval()


def _linear(name, module):
    return {f"{name}.weight": module.weight.detach(), f"{name}.bias": module.bias.detach()}


def _conv(name, module):
    return {f"{name}.weight": module.weight.detach().T, f"{name}.bias": module.bias.detach()}


def bert_truth(model):
    """Our names for the tensors of a transformers BERT, found by attribute."""
    body = getattr(model, "bert", model)
    truth = {
        "body.embedding.tokens.weight": body.embeddings.word_embeddings.weight.detach(),
        "body.embedding.positions.weight": body.embeddings.position_embeddings.weight.detach(),
        "body.embedding.segments.weight": body.embeddings.token_type_embeddings.weight.detach(),
        **_linear("body.embedding.norm", body.embeddings.LayerNorm),
    }
    for n, layer in enumerate(body.encoder.layer):
        for ours, module in (
            ("attention.query", layer.attention.self.query),
            ("attention.key", layer.attention.self.key),
            ("attention.value", layer.attention.self.value),
            ("attention.output", layer.attention.output.dense),
            ("attention_norm", layer.attention.output.LayerNorm),
            ("feed_forward.expand", layer.intermediate.dense),
            ("feed_forward.contract", layer.output.dense),
            ("feed_forward_norm", layer.output.LayerNorm),
        ):
            truth |= _linear(f"body.layers.{n}.{ours}", module)
    if body.pooler is not None:
        truth |= _linear("pooler", body.pooler.dense)
    if hasattr(getattr(model, "cls", None), "predictions"):
        head = model.cls.predictions
        truth |= _linear("lm_head.transform", head.transform.dense) | _linear("lm_head.norm", head.transform.LayerNorm)
        truth["lm_head.bias"] = head.decoder.bias.detach()
        if not model.config.tie_word_embeddings:
            truth["lm_head.output.weight"] = head.decoder.weight.detach()
    if hasattr(getattr(model, "cls", None), "seq_relationship"):
        truth |= _linear("nsp_head", model.cls.seq_relationship)
    return truth


def gpt2_truth(model):
    body = getattr(model, "transformer", model)
    truth = {
        "body.embedding.tokens.weight": body.wte.weight.detach(),
        "body.embedding.positions.weight": body.wpe.weight.detach(),
        **_linear("body.norm", body.ln_f),
    }
    width = model.config.n_embd
    for n, layer in enumerate(body.h):
        start = f"body.layers.{n}"
        for third, name in enumerate(("query", "key", "value")):
            columns = slice(third * width, (third + 1) * width)
            truth[f"{start}.attention.{name}.weight"] = layer.attn.c_attn.weight.detach()[:, columns].T
            truth[f"{start}.attention.{name}.bias"] = layer.attn.c_attn.bias.detach()[columns]
        truth |= _conv(f"{start}.attention.output", layer.attn.c_proj)
        truth |= _conv(f"{start}.feed_forward.expand", layer.mlp.c_fc)
        truth |= _conv(f"{start}.feed_forward.contract", layer.mlp.c_proj)
        truth |= _linear(f"{start}.attention_norm", layer.ln_1) | _linear(f"{start}.feed_forward_norm", layer.ln_2)
    if hasattr(model, "lm_head") and not model.config.tie_word_embeddings:
        truth["lm_head.output.weight"] = model.lm_head.weight.detach()
    return truth


def same(found, expected):
    """Equal names, types and values, to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture
def tools():
    """The helpers above, for test modules that are imported one by one."""
    from types import SimpleNamespace

    return SimpleNamespace(
        bert_config=bert_config, gpt2_config=gpt2_config, randomised=randomised, bert_truth=bert_truth,
        gpt2_truth=gpt2_truth, same=same,
    )  # fmt: skip


@pytest.fixture
def bert_folder(tmp_path):
    """A complete BERT with all heads, saved by transformers."""
    model = randomised(transformers.BertForPreTraining(bert_config()))
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"
