"""BERT as TencentPretrain and UER-py save it: a `.bin` with names such as `encoder.transformer.0.layer_norm_1.gamma`.

Their settings may lack the size of the vocabulary, so the weights tell it. Their segments are numbered from 1; row 0 of
the table, for padding, is dropped. Their layer norm divides by the unbiased standard deviation, but is computed here as
in BERT, which is also what their own conversion for transformers does. `save` writes a BERT as transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from allmask.checkpoints.config_json import activation, field_names, fields_from, refuse
from allmask.checkpoints.families import bert
from allmask.checkpoints.renaming import Family, Step, Tensors
from allmask.config import Config
from allmask.errors import CheckpointError

TABLE = (
    ("embedding.word.embedding.weight",                     "body.embedding.tokens.weight"),
    ("embedding.pos.embedding.weight",                      "body.embedding.positions.weight"),
    ("embedding.seg.embedding.weight",                      "body.embedding.segments.weight"),
    ("embedding.layer_norm.gamma",                          "body.embedding.norm.weight"),
    ("embedding.layer_norm.beta",                           "body.embedding.norm.bias"),
    ("encoder.transformer.*.self_attn.linear_layers.0.weight", "body.layers.*.attention.query.weight"),
    ("encoder.transformer.*.self_attn.linear_layers.0.bias",   "body.layers.*.attention.query.bias"),
    ("encoder.transformer.*.self_attn.linear_layers.1.weight", "body.layers.*.attention.key.weight"),
    ("encoder.transformer.*.self_attn.linear_layers.1.bias",   "body.layers.*.attention.key.bias"),
    ("encoder.transformer.*.self_attn.linear_layers.2.weight", "body.layers.*.attention.value.weight"),
    ("encoder.transformer.*.self_attn.linear_layers.2.bias",   "body.layers.*.attention.value.bias"),
    ("encoder.transformer.*.self_attn.final_linear.weight", "body.layers.*.attention.output.weight"),
    ("encoder.transformer.*.self_attn.final_linear.bias",   "body.layers.*.attention.output.bias"),
    ("encoder.transformer.*.layer_norm_1.gamma",            "body.layers.*.attention_norm.weight"),
    ("encoder.transformer.*.layer_norm_1.beta",             "body.layers.*.attention_norm.bias"),
    ("encoder.transformer.*.feed_forward.linear_1.weight",  "body.layers.*.feed_forward.expand.weight"),
    ("encoder.transformer.*.feed_forward.linear_1.bias",    "body.layers.*.feed_forward.expand.bias"),
    ("encoder.transformer.*.feed_forward.linear_2.weight",  "body.layers.*.feed_forward.contract.weight"),
    ("encoder.transformer.*.feed_forward.linear_2.bias",    "body.layers.*.feed_forward.contract.bias"),
    ("encoder.transformer.*.layer_norm_2.gamma",            "body.layers.*.feed_forward_norm.weight"),
    ("encoder.transformer.*.layer_norm_2.beta",             "body.layers.*.feed_forward_norm.bias"),
    ("target.sp.linear_1.weight",                           "pooler.weight"),
    ("target.sp.linear_1.bias",                             "pooler.bias"),
    ("target.sp.linear_2.weight",                           "nsp_head.weight"),
    ("target.sp.linear_2.bias",                             "nsp_head.bias"),
    ("target.mlm.linear_1.weight",                          "lm_head.transform.weight"),
    ("target.mlm.linear_1.bias",                            "lm_head.transform.bias"),
    ("target.mlm.layer_norm.gamma",                         "lm_head.norm.weight"),
    ("target.mlm.layer_norm.beta",                          "lm_head.norm.bias"),
    ("target.mlm.linear_2.bias",                            "lm_head.bias"),
    ("target.mlm.linear_2.weight",                          "lm_head.output.weight"),
)  # fmt: skip
OLD_NAMES = {  # of UER-py before 2022
    "embedding.word_embedding.weight": "embedding.word.embedding.weight",
    "embedding.position_embedding.weight": "embedding.pos.embedding.weight",
    "embedding.segment_embedding.weight": "embedding.seg.embedding.weight",
    "target.mlm_linear_1.weight": "target.mlm.linear_1.weight",
    "target.mlm_linear_1.bias": "target.mlm.linear_1.bias",
    "target.layer_norm.gamma": "target.mlm.layer_norm.gamma",
    "target.layer_norm.beta": "target.mlm.layer_norm.beta",
    "target.mlm_linear_2.weight": "target.mlm.linear_2.weight",
    "target.mlm_linear_2.bias": "target.mlm.linear_2.bias",
    "target.nsp_linear_1.weight": "target.sp.linear_1.weight",
    "target.nsp_linear_1.bias": "target.sp.linear_1.bias",
    "target.nsp_linear_2.weight": "target.sp.linear_2.weight",
    "target.nsp_linear_2.bias": "target.sp.linear_2.bias",
}

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "layers_num": "layers",
    "heads_num": "heads",
    "feedforward_size": "ffn_width",
    "max_seq_length": "max_positions",
    "dropout": ("dropout", 0.1),
}
NAMES = field_names(FIELDS)
ONLY = {
    "encoder": ("transformer",),
    "embedding": (["word", "pos", "seg"], "word_pos_seg"),
    "layernorm_positioning": ("post",),
    "layernorm": ("normal",),
    "feed_forward": ("dense",),
    "remove_embedding_layernorm": (False,),
    "remove_transformer_bias": (False,),
    "remove_attention_scale": (False,),
    "relative_position_embedding": (False,),
    "rotary_position_embedding": (False,),
    "factorized_embedding_parameterization": (False,),
    "parameter_sharing": (False,),
}
MASKS = {"fully_visible": "bidirectional", "causal": "causal"}


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    if settings.get("emb_size", settings.get("hidden_size")) != settings.get("hidden_size"):
        raise CheckpointError(f"emb_size is {settings['emb_size']!r}; only that of hidden_size is supported")
    mask = settings.get("mask", "fully_visible")
    if mask not in MASKS:
        raise CheckpointError(f"mask is {mask!r}; supported: {', '.join(MASKS)}")
    return Config(
        **fields_from(settings, FIELDS),
        attention_dropout=settings.get("dropout", 0.1),
        activation=activation(settings, "hidden_act", "gelu"),
        own_mask=MASKS[mask],
    )


def _without_padding(tensors: Tensors) -> Tensors:
    return {name: x[1:].clone() if name == _SEGMENTS else x for name, x in tensors.items()}


def _with_padding(tensors: Tensors) -> Tensors:
    return {name: torch.cat([x.new_zeros(1, x.shape[1]), x]) if name == _SEGMENTS else x for name, x in tensors.items()}


_SEGMENTS = "body.embedding.segments.weight"

TENCENTPRETRAIN = Family(
    name="bert",
    table=TABLE,
    config_from=config_from,
    config_to=bert.config_to,
    settings=NAMES,
    steps=(Step(_without_padding, _with_padding),),
    prefix="module.",  # saved by several processes
    old_endings=OLD_NAMES,
    measured={"vocab_size": "embedding.word.embedding.weight", "max_seq_length": "embedding.pos.embedding.weight"},
    may_lack=bert.BERT.may_lack,
    task_heads=("output_layer*",),
    output="target.mlm.linear_2.weight",
    tokens="embedding.word.embedding.weight",
)
