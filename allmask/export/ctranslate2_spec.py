"""A model for CTranslate2: a BERT as an Encoder, a GPT-2 as a Generator, an encoder–decoder as a Translator.

The weights are put into CTranslate2's specifications of these architectures; its own converters read transformers
models, which not all of ours are.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from allmask.errors import CheckpointError
from allmask.export.onnx_graph import table_of
from allmask.model import Model
from allmask.nn.layers import CrossLayer, GatedFeedForward
from allmask.nn.relative_attention import RelativePositionBias

ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELUTanh", "relu": "RELU"}
QUANTIZATION = {"float32": None, "float16": "float16", "bfloat16": "bfloat16"}


@cache
def specs() -> Any:
    """The module of specifications; its package may be missing."""
    return import_module("ctranslate2.specs")


def expect_convertible(model: Model, source: str) -> None:
    """Refuse a model that CTranslate2 does not compute, and say why."""
    config, why, hint = model.config, None, None
    if model.labels is not None:
        why, hint = "CTranslate2 computes no task heads", "--to onnx does"
    elif config.family in ("lstm", "elmo", "xlnet"):
        why = f"CTranslate2 has no {config.family}"
    elif config.norm not in ("layer", "rms"):
        why = f"CTranslate2 has no {config.norm} norm"
    elif config.position_kind not in ("learned", "sinusoidal", "relative"):
        why = f"CTranslate2 has no such positions ({config.position_kind})"
    elif config.embedding_width:
        why, hint = "CTranslate2 has no embedding that is narrower than the model", "--to onnx writes it"
    elif config.is_bert and config.own_mask == "causal":
        why = "CTranslate2 has no BERT that reads from left to right"
    elif not config.is_bert and model.lm_head is None:
        why, hint = "without a language model head it cannot write", "--to onnx writes its body"
    elif model.tokenizer is None:
        why, hint = "CTranslate2 needs the tokens of its vocabulary", "put tokenizer.json in the folder of the weights"
    if why is not None:
        raise CheckpointError(f"{source}: {why}", hint)


def write(model: Model, folder: Path, dtype: str = "float32", int8: bool = False) -> str:
    """Write model.bin, config.json and the vocabulary; return the class of CTranslate2 that loads them."""
    if model.config.is_bert:
        spec, loads = _encoder(model), "Encoder"
    elif model.config.decoder_layers:
        spec, loads = _translator(model), "Translator"
    else:
        spec, loads = _generator(model), "Generator"
    spec.validate()
    spec.optimize("int8" if int8 else QUANTIZATION[dtype])
    spec.save(str(folder))
    return loads


# ---- models ------------------------------------------------------------------------------------------------------


def _encoder(model: Model) -> Any:
    config, embedding = model.config, model.body.embedding
    kinds = 2 if config.segments else 1  # of embeddings: tokens and segments
    merge = {"num_source_embeddings": kinds, "embeddings_merge": specs().common_spec.EmbeddingsMerge.ADD}
    stack = specs().TransformerEncoderSpec(config.layers, config.heads, **_shape(model), **merge)
    spec = specs().TransformerEncoderModelSpec(stack, pooling_layer=model.pooler is not None)
    stack.embeddings[0].weight = _array(embedding.tokens.weight)
    if config.segments:
        stack.embeddings[1].weight = table_of(model, "segments", config.segments)
    _set_stack(stack, model, model.body)
    if model.pooler is not None:
        _set_linear(spec.pooler_dense, model.pooler)
    spec.register_vocabulary(_vocabulary(model))
    _set_config(spec.config, model)
    return spec


def _generator(model: Model) -> Any:
    config = model.config
    stack = specs().TransformerDecoderSpec(config.layers, config.heads, **_shape(model), with_encoder_attention=False)
    spec = specs().TransformerDecoderModelSpec(stack)
    _set_decoder(stack, model, model.body)
    spec.register_vocabulary(_vocabulary(model))
    _set_config(spec.config, model)
    return spec


def _translator(model: Model) -> Any:
    config = model.config
    encoder = specs().TransformerEncoderSpec(config.layers, config.heads, **_shape(model))
    decoder = specs().TransformerDecoderSpec(config.decoder_layers, config.heads, **_shape(model))
    spec = specs().TransformerSpec(encoder, decoder)
    encoder.embeddings[0].weight = _array(model.body.embedding.tokens.weight)
    _set_stack(encoder, model, model.body.encoder)
    _set_decoder(decoder, model, model.body.decoder)
    spec.register_source_vocabulary(_vocabulary(model))
    spec.register_target_vocabulary(_vocabulary(model))
    _set_config(spec.config, model)
    start = getattr(model.tokenizer, "start_id", None) if config.start_token is None else config.start_token
    spec.config.decoder_start_token = _token(model, start)
    return spec


def _shape(model: Model) -> dict[str, Any]:
    """The options that all specifications of a stack have."""
    config = model.config
    return {
        "pre_norm": config.norm_place == "pre", "rms_norm": config.norm == "rms", "ffn_glu": config.gated,
        "activation": getattr(specs().common_spec.Activation, ACTIVATIONS[config.activation]),
        "layernorm_embedding": config.embedding_norm, "relative_attention_bias": config.position_kind == "relative",
    }  # fmt: skip


def _vocabulary(model: Model) -> list[str]:
    assert model.tokenizer is not None
    tokens = (model.tokenizer.id_to_token(id) for id in range(model.config.vocab_size))
    return [f"<unused_{id}>" if token is None else token for id, token in enumerate(tokens)]


def _token(model: Model, id: int | None) -> str | None:
    return None if id is None or model.tokenizer is None else model.tokenizer.id_to_token(id)


def _set_config(config: Any, model: Model) -> None:
    assert model.tokenizer is not None
    specials, ours = model.tokenizer.specials, model.config
    end = model.tokenizer.end_id if ours.end_token is None else ours.end_token
    config.layer_norm_epsilon = ours.norm_eps
    config.unk_token = specials.get("unk") or specials.get("eos") or next(iter(specials.values()))
    if not ours.is_bert:
        config.eos_token = _token(model, end) or config.unk_token
        config.bos_token = specials.get("bos") or config.eos_token


# ---- stacks ------------------------------------------------------------------------------------------------------


def _set_decoder(spec: Any, model: Model, stack: Any) -> None:
    head: Any = model.lm_head
    tokens = model.body.embedding.tokens.weight
    spec.embeddings.weight = _array(tokens)
    spec.projection.weight = _array(tokens if head.output is None else head.output.weight)
    if model.config.output_scaled:
        spec.scale_outputs = np.float32(model.config.width**-0.5)
    _set_stack(spec, model, stack)


def _set_stack(spec: Any, model: Model, stack: Any) -> None:
    embedding = model.body.embedding
    spec.scale_embeddings = model.config.embedding_scaled
    if model.config.position_kind in ("learned", "sinusoidal"):
        spec.position_encodings.encodings = table_of(model, "positions", model.config.max_positions).copy()
    if model.config.embedding_norm:
        _set_norm(spec.layernorm_embedding, embedding.norm)
    if model.config.norm_place == "pre":
        _set_norm(spec.layer_norm, stack.norm)
    for into, layer in zip(spec.layer, stack.layers, strict=True):
        if isinstance(layer, CrossLayer):
            _set_attention(into.attention, layer.cross, layer.cross_norm, model, None)
            layer = layer.layer
        _set_attention(into.self_attention, layer.attention, layer.attention_norm, model, stack.relative)
        _set_norm(into.ffn.layer_norm, layer.feed_forward_norm)
        part = layer.feed_forward
        if isinstance(part, GatedFeedForward):
            _set_linear(into.ffn.linear_0, part.gate)
            _set_linear(into.ffn.linear_0_noact, part.gated)
        else:
            _set_linear(into.ffn.linear_0, part.expand)
        _set_linear(into.ffn.linear_1, part.contract)


def _set_attention(spec: Any, attention: Any, norm: nn.Module, model: Model, relative: nn.Module | None) -> None:
    """Queries, keys and values are one matrix in self-attention; keys and values are one in cross-attention."""
    parts = [attention.query, attention.key, attention.value]
    groups = [parts] if len(spec.linear) == 2 else [parts[:1], parts[1:]]
    for into, group in zip(spec.linear, groups, strict=False):
        _set_linear(into, *group)
    _set_linear(spec.linear[-1], attention.output)
    _set_norm(spec.layer_norm, norm)
    if not model.config.scores_scaled:
        spec.queries_scale = np.float32(1.0)
    if isinstance(relative, RelativePositionBias):
        spec.relative_attention_bias = _array(relative.table.weight)
        spec.relative_attention_max_distance = np.int32(model.config.bucket_distance)


def _set_linear(spec: Any, *linears: Any) -> None:
    spec.weight = np.concatenate([_array(linear.weight) for linear in linears])
    if linears[0].bias is not None:
        spec.bias = np.concatenate([_array(linear.bias) for linear in linears])


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if getattr(norm, "bias", None) is not None:
        spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> np.ndarray:
    """A copy, as quantization changes arrays in place."""
    return tensor.detach().float().cpu().numpy().copy()
