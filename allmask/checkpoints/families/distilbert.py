"""DistilBERT (arXiv 1910.01108): a BERT without segments and pooler; names such as `transformer.layer.0.ffn.lin1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import activation, activation_name, field_names, fields_from, flag
from allmask.checkpoints.families.bert import pooled_by, task_layouts
from allmask.checkpoints.renaming import Family
from allmask.config import Config

TABLE = (
    ("embeddings.word_embeddings.weight",           "body.embedding.tokens.weight"),
    ("embeddings.position_embeddings.weight",       "body.embedding.positions.weight"),
    ("embeddings.LayerNorm.weight",                 "body.embedding.norm.weight"),
    ("embeddings.LayerNorm.bias",                   "body.embedding.norm.bias"),
    ("transformer.layer.*.attention.q_lin.weight",  "body.layers.*.attention.query.weight"),
    ("transformer.layer.*.attention.q_lin.bias",    "body.layers.*.attention.query.bias"),
    ("transformer.layer.*.attention.k_lin.weight",  "body.layers.*.attention.key.weight"),
    ("transformer.layer.*.attention.k_lin.bias",    "body.layers.*.attention.key.bias"),
    ("transformer.layer.*.attention.v_lin.weight",  "body.layers.*.attention.value.weight"),
    ("transformer.layer.*.attention.v_lin.bias",    "body.layers.*.attention.value.bias"),
    ("transformer.layer.*.attention.out_lin.weight", "body.layers.*.attention.output.weight"),
    ("transformer.layer.*.attention.out_lin.bias",  "body.layers.*.attention.output.bias"),
    ("transformer.layer.*.sa_layer_norm.weight",    "body.layers.*.attention_norm.weight"),
    ("transformer.layer.*.sa_layer_norm.bias",      "body.layers.*.attention_norm.bias"),
    ("transformer.layer.*.ffn.lin1.weight",         "body.layers.*.feed_forward.expand.weight"),
    ("transformer.layer.*.ffn.lin1.bias",           "body.layers.*.feed_forward.expand.bias"),
    ("transformer.layer.*.ffn.lin2.weight",         "body.layers.*.feed_forward.contract.weight"),
    ("transformer.layer.*.ffn.lin2.bias",           "body.layers.*.feed_forward.contract.bias"),
    ("transformer.layer.*.output_layer_norm.weight", "body.layers.*.feed_forward_norm.weight"),
    ("transformer.layer.*.output_layer_norm.bias",  "body.layers.*.feed_forward_norm.bias"),
    ("vocab_transform.weight",                      "lm_head.transform.weight"),
    ("vocab_transform.bias",                        "lm_head.transform.bias"),
    ("vocab_layer_norm.weight",                     "lm_head.norm.weight"),
    ("vocab_layer_norm.bias",                       "lm_head.norm.bias"),
    ("vocab_projector.bias",                        "lm_head.bias"),
    ("vocab_projector.weight",                      "lm_head.output.weight"),
)  # fmt: skip
OF_TEXTS = pooled_by("pre_classifier", "classifier")

FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "width",
    "n_layers": "layers",
    "n_heads": "heads",
    "hidden_dim": "ffn_width",
    "max_position_embeddings": "max_positions",
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "pad_token_id": ("pad_token", 0),
    "initializer_range": ("init_std", 0.02),
}
NAMES = field_names(FIELDS)


def config_from(settings: Mapping[str, Any]) -> Config:
    """Sinusoidal positions (`sinusoidal_pos_embds`) are stored as a table, too."""
    return Config(
        family="distilbert",
        segments=0,
        **fields_from(settings, FIELDS),
        activation=activation(settings, "activation", "gelu"),
        tied=flag(settings, "tie_word_embeddings", True),
    )


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM" if "lm" in heads else "DistilBertModel"],
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        "activation": activation_name(config.activation),
        "seq_classif_dropout": config.dropout,
        "qa_dropout": 0.0,
        "tie_word_embeddings": config.tied,
    }


DISTILBERT = Family(
    name="distilbert",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES,
    prefix="distilbert.",
    may_lack=("lm",),
    ignored=("embeddings.position_ids",),
    task_heads=("pre_classifier.*", "classifier.*", "qa_outputs.*"),
    tasks=task_layouts("DistilBert", OF_TEXTS, OF_TEXTS),
    tokens="embeddings.word_embeddings.weight",
    output="vocab_projector.weight",
    tokenizer={"model_input_names": ["input_ids", "attention_mask"]},  # transformers must not pass segments
)
