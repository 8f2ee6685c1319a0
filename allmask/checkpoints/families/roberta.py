"""RoBERTa (arXiv 1907.11692) and XLM-R (1911.02116): BERTs whose positions begin after the id of the padding token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from allmask.checkpoints.config_json import refuse
from allmask.checkpoints.families import bert
from allmask.checkpoints.families.bert import BERT, BODY, FIELDS, pooled_by, relative_from, relative_to, task_layouts
from allmask.checkpoints.renaming import Family
from allmask.config import Config
from allmask.errors import CheckpointError

TABLE = (
    *BODY,
    ("pooler.dense.weight",       "pooler.weight"),
    ("pooler.dense.bias",         "pooler.bias"),
    ("lm_head.dense.weight",      "lm_head.transform.weight"),
    ("lm_head.dense.bias",        "lm_head.transform.bias"),
    ("lm_head.layer_norm.weight", "lm_head.norm.weight"),
    ("lm_head.layer_norm.bias",   "lm_head.norm.bias"),
    ("lm_head.bias",              "lm_head.bias"),
    ("lm_head.decoder.weight",    "lm_head.output.weight"),
)  # fmt: skip
OF_TEXTS = pooled_by("classifier.dense", "classifier.out_proj")
PADDING = 1  # the usual id of the padding token
ROWS = "max_position_embeddings"


def config_from(settings: Mapping[str, Any], family: str) -> Config:
    refuse(settings, {"hidden_act": ("gelu",)})  # the language model head has GELU, whatever this says
    fields: Any = {**FIELDS, "pad_token_id": ("pad_token", PADDING)}
    pad, rows = (settings.get(name, default) for name, default in (("pad_token_id", PADDING), (ROWS, None)))
    if not isinstance(pad, int) or not isinstance(rows, int) or rows <= pad + 1:
        raise CheckpointError(
            f"{ROWS} is {rows!r} and pad_token_id is {pad!r}; expected whole numbers, the first larger"
        )
    return relative_from(settings, family, fields, position_offset=pad + 1, max_positions=rows - pad - 1)


def config_to(config: Config, heads: frozenset[str], start: str) -> dict[str, Any]:
    settings = relative_to(config, heads, start, f"{start}ForCausalLM")
    return settings | {ROWS: config.max_positions + config.position_offset}


def _family(name: str, start: str) -> Family:
    return replace(
        BERT,
        name=name,
        table=TABLE,
        config_from=partial(config_from, family=name),
        config_to=partial(config_to, start=start),
        settings=bert.NAMES,
        prefix="roberta.",
        may_lack=("pooler", "lm"),
        tasks=task_layouts(start, OF_TEXTS),
        output="lm_head.decoder.weight",
        second_bias=("lm_head.decoder.bias", "lm_head.bias"),
    )


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
