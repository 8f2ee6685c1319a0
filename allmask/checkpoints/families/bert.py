"""BERT (arXiv 1810.04805) as Hugging Face writes it: `config.json` and names such as `encoder.layer.0.output.dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import Table, activation, activation_name, field_names, fields_from, flag, refuse
from allmask.checkpoints.renaming import CLASSIFIER_TABLE, CRF_TABLE, SPAN_TABLE, Family, TaskLayout
from allmask.config import Config
from allmask.errors import CheckpointError

TABLE = (
    ("embeddings.word_embeddings.weight",             "body.embedding.tokens.weight"),
    ("embeddings.position_embeddings.weight",         "body.embedding.positions.weight"),
    ("embeddings.token_type_embeddings.weight",       "body.embedding.segments.weight"),
    ("embeddings.LayerNorm.weight",                   "body.embedding.norm.weight"),
    ("embeddings.LayerNorm.bias",                     "body.embedding.norm.bias"),
    ("encoder.layer.*.attention.self.query.weight",   "body.layers.*.attention.query.weight"),
    ("encoder.layer.*.attention.self.query.bias",     "body.layers.*.attention.query.bias"),
    ("encoder.layer.*.attention.self.key.weight",     "body.layers.*.attention.key.weight"),
    ("encoder.layer.*.attention.self.key.bias",       "body.layers.*.attention.key.bias"),
    ("encoder.layer.*.attention.self.value.weight",   "body.layers.*.attention.value.weight"),
    ("encoder.layer.*.attention.self.value.bias",     "body.layers.*.attention.value.bias"),
    ("encoder.layer.*.attention.output.dense.weight", "body.layers.*.attention.output.weight"),
    ("encoder.layer.*.attention.output.dense.bias",   "body.layers.*.attention.output.bias"),
    ("encoder.layer.*.attention.output.LayerNorm.weight", "body.layers.*.attention_norm.weight"),
    ("encoder.layer.*.attention.output.LayerNorm.bias",   "body.layers.*.attention_norm.bias"),
    ("encoder.layer.*.intermediate.dense.weight",     "body.layers.*.feed_forward.expand.weight"),
    ("encoder.layer.*.intermediate.dense.bias",       "body.layers.*.feed_forward.expand.bias"),
    ("encoder.layer.*.output.dense.weight",           "body.layers.*.feed_forward.contract.weight"),
    ("encoder.layer.*.output.dense.bias",             "body.layers.*.feed_forward.contract.bias"),
    ("encoder.layer.*.output.LayerNorm.weight",       "body.layers.*.feed_forward_norm.weight"),
    ("encoder.layer.*.output.LayerNorm.bias",         "body.layers.*.feed_forward_norm.bias"),
    ("pooler.dense.weight",                           "pooler.weight"),
    ("pooler.dense.bias",                             "pooler.bias"),
    ("cls.predictions.transform.dense.weight",        "lm_head.transform.weight"),
    ("cls.predictions.transform.dense.bias",          "lm_head.transform.bias"),
    ("cls.predictions.transform.LayerNorm.weight",    "lm_head.norm.weight"),
    ("cls.predictions.transform.LayerNorm.bias",      "lm_head.norm.bias"),
    ("cls.predictions.bias",                          "lm_head.bias"),
    ("cls.predictions.decoder.weight",                "lm_head.output.weight"),
    ("cls.seq_relationship.weight",                   "nsp_head.weight"),
    ("cls.seq_relationship.bias",                     "nsp_head.bias"),
)  # fmt: skip

BODY = tuple((theirs, ours) for theirs, ours in TABLE if ours.startswith("body."))


def task_layouts(
    start: str, of_texts: tuple[tuple[str, str], ...] = CLASSIFIER_TABLE,
    choice: tuple[tuple[str, str], ...] = CLASSIFIER_TABLE,
) -> tuple[TaskLayout, ...]:  # fmt: skip
    """The task heads of a family whose classes begin with `start`, such as Bert."""
    tags, of_tokens = f"{start}ForTokenClassification", CLASSIFIER_TABLE
    return (
        TaskLayout(f"{start}ForSequenceClassification", ("single", "multi", "number"), of_texts),
        # transformers ignores the CRF and loads the scores of the tokens
        TaskLayout(tags, ("chain",), of_tokens + CRF_TABLE, marked_by="crf.follows_bias"),
        TaskLayout(tags, ("tag",), of_tokens),
        TaskLayout(f"{start}ForQuestionAnswering", ("span",), SPAN_TABLE),
        TaskLayout(f"{start}ForMultipleChoice", ("choice",), choice),
    )


def pooled_by(dense: str, output: str) -> tuple[tuple[str, str], ...]:
    """Names (theirs, ours) of the weights of a classification head with a dense layer before its output layer."""
    return (
        (f"{output}.weight", "task_head.output.weight"),  # first: its rows are the labels
        (f"{output}.bias", "task_head.output.bias"),
        (f"{dense}.weight", "task_head.before.weight"),
        (f"{dense}.bias", "task_head.before.bias"),
    )


FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_width",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": ("segments", 2),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "pad_token_id": ("pad_token", 0),
    "initializer_range": ("init_std", 0.02),
}
NAMES = field_names(FIELDS)
ONLY = {
    "position_embedding_type": ("absolute",),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}


def config_from(settings: Mapping[str, Any]) -> Config:
    return relative_from(settings, "bert")


def relative_from(
    settings: Mapping[str, Any], family: str, fields: Table = FIELDS, act: str = "gelu", **changes: Any
) -> Config:
    """The Config of a family that has the settings of a BERT; `act` is its default activation."""
    refuse(settings, ONLY)
    given: dict[str, Any] = {
        **fields_from(settings, fields),
        "activation": activation(settings, "hidden_act", act),
        "tied": flag(settings, "tie_word_embeddings", True),
        "own_mask": "causal" if flag(settings, "is_decoder", False) else "bidirectional",
    }
    config = Config(family=family, **given | changes)
    if config.segments == 0:
        raise CheckpointError("type_vocab_size is 0; a BERT has at least one segment")
    return config


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    return relative_to(config, heads, "Bert", "BertLMHeadModel")


def relative_to(
    config: Config, heads: frozenset[str], start: str, causal: str, names: Mapping[str, str] = NAMES
) -> dict[str, Any]:
    """The settings of a family that has those of a BERT; its classes begin with `start`."""
    if "nsp" in heads:
        architecture = f"{start}ForPreTraining" if "lm" in heads else f"{start}ForNextSentencePrediction"
    elif "lm" in heads:
        architecture = causal if config.own_mask == "causal" else f"{start}ForMaskedLM"
    else:
        architecture = f"{start}Model"
    return {
        "model_type": config.family,
        "architectures": [architecture],
        **{theirs: getattr(config, ours) for theirs, ours in names.items()},
        "hidden_act": activation_name(config.activation),
        "position_embedding_type": "absolute",
        "is_decoder": config.own_mask == "causal",
        "tie_word_embeddings": config.tied,
    }


BERT = Family(
    name="bert",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES,
    prefix="bert.",
    old_endings={".gamma": ".weight", ".beta": ".bias"},  # TensorFlow's names, in files from before 2019
    may_lack=("pooler", "lm", "nsp"),
    ignored=("embeddings.position_ids", "embeddings.token_type_ids"),  # buffers, not parameters
    task_heads=("classifier.*", "qa_outputs.*"),
    tasks=task_layouts("Bert"),
    tokens="embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    second_bias=("cls.predictions.decoder.bias", "cls.predictions.bias"),  # transformers uses the first
)
