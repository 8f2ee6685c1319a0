"""NEZHA (arXiv 1909.00204): a BERT with sinusoidal encodings of distances in every layer instead of positions.

transformers had it up to version 4; what is written is its layout, with its names of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allmask.checkpoints.config_json import Table, field_names
from allmask.checkpoints.families.bert import BERT, TABLE, relative_from, relative_to, task_layouts
from allmask.checkpoints.families.bert import FIELDS as OF_BERT
from allmask.config import Config

FIELDS: Table = {**OF_BERT, "max_relative_position": ("clamp", 64)}
NAMES = field_names(FIELDS)


def config_from(settings: Mapping[str, Any]) -> Config:
    return relative_from(settings, "nezha", FIELDS, position_kind="clipped", own_mask="bidirectional")


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    return relative_to(config, heads, "Nezha", "NezhaForMaskedLM", NAMES)


NEZHA = replace(
    BERT,
    name="nezha",
    table=tuple((theirs, ours) for theirs, ours in TABLE if ours != "body.embedding.positions.weight"),
    config_from=config_from,
    config_to=config_to,
    settings=NAMES,
    prefix="nezha.",
    # the encodings of distances; some files have them
    ignored=(*BERT.ignored, "encoder.layer.*.attention.self.relative_positions_encoding.positions_encoding"),
    tasks=task_layouts("Nezha"),
)
