"""XLNet (arXiv 1906.08237) as Hugging Face writes it: names such as `layer.0.rel_attn.r_w_bias`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import activation, activation_name, field_names, fields_from, flag, refuse
from allmask.checkpoints.renaming import CLASSIFIER_TABLE, CRF_TABLE, SPAN_TABLE, Family, Step, TaskLayout, Tensors
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.presets import xlnet_base

TABLE = (
    ("word_embedding.weight",            "body.embedding.tokens.weight"),
    ("mask_emb",                         "body.embedding.question"),
    ("layer.*.rel_attn.q",               "body.layers.*.attention.query.weight"),
    ("layer.*.rel_attn.k",               "body.layers.*.attention.key.weight"),
    ("layer.*.rel_attn.v",               "body.layers.*.attention.value.weight"),
    ("layer.*.rel_attn.o",               "body.layers.*.attention.output.weight"),
    ("layer.*.rel_attn.r",               "body.layers.*.attention.relate.position"),
    ("layer.*.rel_attn.seg_embed",       "body.layers.*.attention.relate.segment"),
    ("layer.*.rel_attn.r_w_bias",        "body.layers.*.attention.relate.content_bias"),
    ("layer.*.rel_attn.r_r_bias",        "body.layers.*.attention.relate.position_bias"),
    ("layer.*.rel_attn.r_s_bias",        "body.layers.*.attention.relate.segment_bias"),
    ("layer.*.rel_attn.layer_norm.weight", "body.layers.*.attention_norm.weight"),
    ("layer.*.rel_attn.layer_norm.bias", "body.layers.*.attention_norm.bias"),
    ("layer.*.ff.layer_1.weight",        "body.layers.*.feed_forward.expand.weight"),
    ("layer.*.ff.layer_1.bias",          "body.layers.*.feed_forward.expand.bias"),
    ("layer.*.ff.layer_2.weight",        "body.layers.*.feed_forward.contract.weight"),
    ("layer.*.ff.layer_2.bias",          "body.layers.*.feed_forward.contract.bias"),
    ("layer.*.ff.layer_norm.weight",     "body.layers.*.feed_forward_norm.weight"),
    ("layer.*.ff.layer_norm.bias",       "body.layers.*.feed_forward_norm.bias"),
    ("lm_loss.weight",                   "lm_head.output.weight"),
    ("lm_loss.bias",                     "lm_head.bias"),
)  # fmt: skip

_OF_TEXTS = (
    ("logits_proj.weight", "task_head.output.weight"),  # first: its rows are the labels
    ("logits_proj.bias", "task_head.output.bias"),
    ("sequence_summary.summary.weight", "task_head.before.weight"),
    ("sequence_summary.summary.bias", "task_head.before.bias"),
)
TASKS = (
    TaskLayout("XLNetForSequenceClassification", ("single", "multi", "number"), _OF_TEXTS),
    # transformers ignores the CRF and loads the scores of the tokens
    TaskLayout("XLNetForTokenClassification", ("chain",), CLASSIFIER_TABLE + CRF_TABLE, marked_by="crf.follows_bias"),
    TaskLayout("XLNetForTokenClassification", ("tag",), CLASSIFIER_TABLE),
    TaskLayout("XLNetForQuestionAnsweringSimple", ("span",), SPAN_TABLE),
    TaskLayout("XLNetForMultipleChoice", ("choice",), _OF_TEXTS),
)

FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "d_inner": "ffn_width",
    "layer_norm_eps": ("norm_eps", 1e-12),
    "pad_token_id": ("pad_token", 5),
    "initializer_range": ("init_std", 0.02),
    "n_positions": ("max_positions", 512),  # a setting of ours: length in training, not a limit
}
NAMES = field_names(FIELDS)
ONLY = {
    "bi_data": (False,),  # half of each batch is read backwards; here that is done by decreasing positions
    "untie_r": (True,),
}
SUMMARY = {  # how the classification head reads the last token
    "summary_type": ("last",),
    "summary_use_proj": (True,),
    "summary_activation": ("tanh",),
}
OWN_MASKS = {"bi": "bidirectional", "uni": "causal"}


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    if any(layout.table == _OF_TEXTS and [layout.architecture] == settings.get("architectures") for layout in TASKS):
        refuse(settings, SUMMARY)
    kind = settings.get("attn_type", "bi")
    if kind not in OWN_MASKS:
        raise CheckpointError(f"attn_type is {kind!r}; expected bi or uni")
    if kind == "uni":  # has no effect in the other kind
        refuse(settings, {"same_length": (False,)})
    dropout, clamp = settings.get("dropout", 0.1), settings.get("clamp_len", -1)
    names = ("family", "position_kind", "segments", "embedding_norm")
    return Config(
        **{name: getattr(xlnet_base(), name) for name in names},
        **fields_from(settings, FIELDS),
        activation=activation(settings, "ff_activation", "gelu"),
        dropout=dropout,
        attention_dropout=dropout,
        ffn_dropout=dropout,
        own_mask=OWN_MASKS[kind],
        clamp=0 if isinstance(clamp, int) and clamp <= 0 else clamp,
        tied=flag(settings, "tie_word_embeddings", True),
    )


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    return {
        "model_type": "xlnet",
        "architectures": ["XLNetLMHeadModel" if "lm" in heads else "XLNetModel"],
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        "d_head": config.attention_width // config.heads,
        "ff_activation": activation_name(config.activation),
        "dropout": config.dropout,
        "attn_type": {ours: theirs for theirs, ours in OWN_MASKS.items()}[config.own_mask],
        "clamp_len": config.clamp or -1,
        "untie_r": True,
        "mem_len": None,
        "tie_word_embeddings": config.tied,
        **{name: values[0] for name, values in SUMMARY.items()},
        "summary_last_dropout": config.dropout,
    }


# ---- heads as a dimension of their own ----------------------------------------------------------------------------


# Ends of names; from their (width, heads, head width) to our (out, in); back, with the shape of the heads.
_STEPS = (
    (("attention.query.weight", "attention.key.weight", "attention.value.weight"),
     lambda x: x.flatten(1).t().contiguous(),   lambda x, heads: x.t().unflatten(1, heads).contiguous()),
    ("attention.output.weight",
     lambda x: x.flatten(1),                    lambda x, heads: x.unflatten(1, heads)),
    ("attention.relate.position",
     lambda x: x.permute(1, 2, 0).contiguous(), lambda x, heads: x.permute(2, 0, 1).contiguous()),
    ("body.embedding.question",
     lambda x: x.flatten(0, 1),                 lambda x, heads: x[None]),
)  # fmt: skip


def _flatten_heads(tensors: Tensors) -> Tensors:
    for ends, flat, _ in _STEPS:
        tensors = {name: flat(x) if name.endswith(ends) else x for name, x in tensors.items()}
    return tensors


def _split_heads(tensors: Tensors) -> Tensors:
    heads = next(x for name, x in tensors.items() if name.endswith("relate.content_bias")).shape
    for ends, _, split in _STEPS:
        tensors = {name: split(x, heads) if name.endswith(ends) else x for name, x in tensors.items()}
    return tensors


XLNET = Family(
    name="xlnet",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"clamp_len": "clamp"},
    steps=(Step(_flatten_heads, _split_heads),),
    prefix="transformer.",
    may_lack=("lm",),
    task_heads=(
        "sequence_summary.*", "logits_proj.*", "classifier.*", "qa_outputs.*", "start_logits.*", "end_logits.*",
        "answer_class.*",
    ),
    tasks=TASKS,
    tokens="word_embedding.weight",
    output="lm_loss.weight",
)  # fmt: skip
