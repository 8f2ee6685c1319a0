"""BERT (arXiv 1810.04805) as Hugging Face writes it: `config.json` and names such as `encoder.layer.0.output.dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import activation, flag, refuse, required
from allmask.checkpoints.renaming import Family, TaskLayout
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

MAY_LACK = ("pooler", "lm", "nsp")
IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids")  # counted, not learnt
TASK_HEADS = ("classifier.*", "qa_outputs.*")
TASKS = (
    TaskLayout(
        "BertForSequenceClassification",
        ("single", "multi", "number"),
        (
            ("classifier.weight", "task_head.output.weight"),
            ("classifier.bias", "task_head.output.bias"),
        ),
    ),
    TaskLayout(  # transformers loads what it knows of it, the scores of each token
        "BertForTokenClassification",
        ("chain",),
        (
            ("classifier.weight", "task_head.output.weight"),
            ("classifier.bias", "task_head.output.bias"),
            ("crf.follows_bias", "task_head.chain.follows_bias"),
            ("crf.first_bias", "task_head.chain.first_bias"),
            ("crf.last_bias", "task_head.chain.last_bias"),
        ),
        marked_by="crf.follows_bias",
    ),
    TaskLayout(
        "BertForTokenClassification",
        ("tag",),
        (
            ("classifier.weight", "task_head.output.weight"),
            ("classifier.bias", "task_head.output.bias"),
        ),
    ),
    TaskLayout(
        "BertForQuestionAnswering",
        ("span",),
        (
            ("qa_outputs.weight", "task_head.output.weight"),
            ("qa_outputs.bias", "task_head.output.bias"),
        ),
    ),
    TaskLayout(
        "BertForMultipleChoice",
        ("choice",),
        (
            ("classifier.weight", "task_head.output.weight"),
            ("classifier.bias", "task_head.output.bias"),
        ),
    ),
)

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_width",
    "max_position_embeddings": "max_positions",
}
OTHERS = {
    "type_vocab_size": ("segments", 2),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "pad_token_id": ("pad_token", 0),
    "initializer_range": ("init_std", 0.02),
}
ONLY = {
    "position_embedding_type": ("absolute",),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    config = Config(
        family="bert",
        **required(settings, SIZES),
        **{ours: settings.get(theirs, default) for theirs, (ours, default) in OTHERS.items()},
        activation=activation(settings, "hidden_act", "gelu"),
        tied=flag(settings, "tie_word_embeddings", True),
        own_mask="causal" if flag(settings, "is_decoder", False) else "bidirectional",
    )
    if config.segments == 0:
        raise CheckpointError("type_vocab_size is 0; a BERT has at least one segment")
    return config


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    names = SIZES | {theirs: ours for theirs, (ours, _) in OTHERS.items()}
    return {
        "model_type": "bert",
        "architectures": [_architecture(config, heads)],
        **{theirs: getattr(config, ours) for theirs, ours in names.items()},
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
        "position_embedding_type": "absolute",
        "is_decoder": config.own_mask == "causal",
        "tie_word_embeddings": config.tied,
    }


def _architecture(config: Config, heads: frozenset[str]) -> str:
    """The transformers class that has these heads."""
    if "nsp" in heads:
        return "BertForPreTraining" if "lm" in heads else "BertForNextSentencePrediction"
    if "lm" in heads:
        return "BertLMHeadModel" if config.own_mask == "causal" else "BertForMaskedLM"
    return "BertModel"


BERT = Family(
    name="bert",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=SIZES | {theirs: ours for theirs, (ours, _) in OTHERS.items()},
    prefix="bert.",
    old_endings={".gamma": ".weight", ".beta": ".bias"},  # the names TensorFlow used, kept until 2019
    may_lack=MAY_LACK,
    ignored=IGNORED,
    task_heads=TASK_HEADS,
    tasks=TASKS,
    tokens="embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    second_bias=("cls.predictions.decoder.bias", "cls.predictions.bias"),  # transformers adds the first of them
)
