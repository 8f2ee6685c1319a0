"""ALBERT (arXiv 1909.11942): a BERT whose layers share their weights and whose embedding is narrower than the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import Table, field_names, refuse
from allmask.checkpoints.families.bert import FIELDS as OF_BERT
from allmask.checkpoints.families.bert import relative_from, relative_to, task_layouts
from allmask.checkpoints.renaming import Family
from allmask.config import Config

_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
TABLE = (
    ("embeddings.word_embeddings.weight",       "body.embedding.tokens.weight"),
    ("embeddings.position_embeddings.weight",   "body.embedding.positions.weight"),
    ("embeddings.token_type_embeddings.weight", "body.embedding.segments.weight"),
    ("embeddings.LayerNorm.weight",             "body.embedding.norm.weight"),
    ("embeddings.LayerNorm.bias",               "body.embedding.norm.bias"),
    ("encoder.embedding_hidden_mapping_in.weight", "body.embedding.project.weight"),
    ("encoder.embedding_hidden_mapping_in.bias",   "body.embedding.project.bias"),
    (f"{_LAYER}.attention.query.weight",        "body.layers.0.attention.query.weight"),
    (f"{_LAYER}.attention.query.bias",          "body.layers.0.attention.query.bias"),
    (f"{_LAYER}.attention.key.weight",          "body.layers.0.attention.key.weight"),
    (f"{_LAYER}.attention.key.bias",            "body.layers.0.attention.key.bias"),
    (f"{_LAYER}.attention.value.weight",        "body.layers.0.attention.value.weight"),
    (f"{_LAYER}.attention.value.bias",          "body.layers.0.attention.value.bias"),
    (f"{_LAYER}.attention.dense.weight",        "body.layers.0.attention.output.weight"),
    (f"{_LAYER}.attention.dense.bias",          "body.layers.0.attention.output.bias"),
    (f"{_LAYER}.attention.LayerNorm.weight",    "body.layers.0.attention_norm.weight"),
    (f"{_LAYER}.attention.LayerNorm.bias",      "body.layers.0.attention_norm.bias"),
    (f"{_LAYER}.ffn.weight",                    "body.layers.0.feed_forward.expand.weight"),
    (f"{_LAYER}.ffn.bias",                      "body.layers.0.feed_forward.expand.bias"),
    (f"{_LAYER}.ffn_output.weight",             "body.layers.0.feed_forward.contract.weight"),
    (f"{_LAYER}.ffn_output.bias",               "body.layers.0.feed_forward.contract.bias"),
    (f"{_LAYER}.full_layer_layer_norm.weight",  "body.layers.0.feed_forward_norm.weight"),
    (f"{_LAYER}.full_layer_layer_norm.bias",    "body.layers.0.feed_forward_norm.bias"),
    ("pooler.weight",                           "pooler.weight"),
    ("pooler.bias",                             "pooler.bias"),
    ("predictions.dense.weight",                "lm_head.transform.weight"),
    ("predictions.dense.bias",                  "lm_head.transform.bias"),
    ("predictions.LayerNorm.weight",            "lm_head.norm.weight"),
    ("predictions.LayerNorm.bias",              "lm_head.norm.bias"),
    ("predictions.bias",                        "lm_head.bias"),
    ("predictions.decoder.weight",              "lm_head.output.weight"),
)  # fmt: skip

FIELDS: Table = {
    **OF_BERT,
    "embedding_size": ("embedding_width", 128),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}
NAMES = field_names(FIELDS)
ONLY = {"num_hidden_groups": (1,), "inner_group_num": (1,)}  # one layer for all, as in the published models


def config_from(settings: Mapping[str, Any]) -> Config:
    """transformers has no causal ALBERT, so `is_decoder` means nothing."""
    refuse(settings, ONLY)
    return relative_from(settings, "albert", FIELDS, "gelu_new", shared_layers=True, own_mask="bidirectional")


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    groups = {name: values[0] for name, values in ONLY.items()}
    return relative_to(config, heads, "Albert", "AlbertForMaskedLM", NAMES) | groups


ALBERT = Family(
    name="albert",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES,
    prefix="albert.",
    may_lack=("pooler", "lm"),
    ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
    task_heads=("sop_classifier.*", "classifier.*", "qa_outputs.*"),
    tasks=task_layouts("Albert"),
    tokens="embeddings.word_embeddings.weight",
    output="predictions.decoder.weight",
    second_bias=("predictions.decoder.bias", "predictions.bias"),
)
