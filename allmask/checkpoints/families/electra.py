"""ELECTRA (arXiv 2003.10555): a BERT whose embedding may be narrower than the body. No pooler.

The discriminator's own head, which tells replaced tokens from others, is left out; the generator's fills gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import refuse
from allmask.checkpoints.families.bert import BODY, NAMES, pooled_by, relative_from, relative_to, task_layouts
from allmask.checkpoints.renaming import Family
from allmask.config import Config

PROJECTION = (
    ("embeddings_project.weight", "body.embedding.project.weight"),
    ("embeddings_project.bias",   "body.embedding.project.bias"),
)  # fmt: skip
TABLE = (
    *BODY,
    *PROJECTION,
    ("generator_predictions.dense.weight",     "lm_head.transform.weight"),
    ("generator_predictions.dense.bias",       "lm_head.transform.bias"),
    ("generator_predictions.LayerNorm.weight", "lm_head.norm.weight"),
    ("generator_predictions.LayerNorm.bias",   "lm_head.norm.bias"),
    ("generator_lm_head.bias",                 "lm_head.bias"),
    ("generator_lm_head.weight",               "lm_head.output.weight"),
)  # fmt: skip
SUMMARY = {"summary_type": ("first",), "summary_use_proj": (True,), "summary_activation": ("gelu",)}
CHOICE = "ElectraForMultipleChoice"


def embedding_width(settings: Mapping[str, Any], default: int) -> dict[str, Any]:
    """The field of a Config for `embedding_size`; 0 if the embedding is as wide as the body."""
    size = settings.get("embedding_size", default)
    return {"embedding_width": 0 if size == settings.get("hidden_size") else size}


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, {"hidden_act": ("gelu",)})  # the heads have GELU, whatever this says
    if settings.get("architectures") == [CHOICE]:
        refuse(settings, SUMMARY)
    return relative_from(settings, "electra", **embedding_width(settings, 128))


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    settings = relative_to(config, heads, "Electra", "ElectraForCausalLM")
    summary = {name: values[0] for name, values in SUMMARY.items()}
    return settings | summary | {"embedding_size": config.embedding_width or config.width}


ELECTRA = Family(
    name="electra",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"embedding_size": "embedding_width"},
    prefix="electra.",
    may_lack=("lm",),
    ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
    task_heads=("discriminator_predictions.*", "classifier.*", "qa_outputs.*", "sequence_summary.*"),
    tasks=task_layouts(
        "Electra",
        pooled_by("classifier.dense", "classifier.out_proj"),
        pooled_by("sequence_summary.summary", "classifier"),
    ),
    tokens="embeddings.word_embeddings.weight",
    output="generator_lm_head.weight",
)
