"""RoFormer (arXiv 2104.09864): a BERT with rotary positions. No pooler; the embedding may be narrower than the body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from allmask.checkpoints.config_json import refuse
from allmask.checkpoints.families.bert import BERT, NAMES, TABLE, pooled_by, relative_from, relative_to, task_layouts
from allmask.checkpoints.families.electra import PROJECTION, embedding_width
from allmask.checkpoints.renaming import Tensors
from allmask.config import Config
from allmask.nn.relative_attention import sinusoids

_ABSENT = ("body.embedding.positions.weight", "pooler.weight", "pooler.bias", "nsp_head.weight", "nsp_head.bias")
POSITIONS = "encoder.embed_positions.weight"
OF_TEXTS = pooled_by("classifier.dense", "classifier.out_proj")


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, {"rotary_value": (False,)})
    width = settings.get("hidden_size", 0)
    return relative_from(settings, "roformer", position_kind="rotary", **embedding_width(settings, width))


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    settings = relative_to(config, heads, "RoFormer", "RoFormerForCausalLM")
    return settings | {"embedding_size": config.embedding_width or config.width, "rotary_value": False}


def _positions(config: Config) -> Tensors:
    """Sines, then cosines, of the angles by which heads are rotated."""
    waves = sinusoids(config.max_positions, config.attention_width // config.heads)
    return {POSITIONS: torch.cat([waves[:, 0::2], waves[:, 1::2]], dim=1)}


ROFORMER = replace(
    BERT,
    name="roformer",
    table=(*((theirs, ours) for theirs, ours in TABLE if ours not in _ABSENT), *PROJECTION),
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"embedding_size": "embedding_width"},
    prefix="roformer.",
    may_lack=("lm",),
    ignored=(POSITIONS,),
    constants=_positions,
    task_heads=("classifier.*", "qa_outputs.*", "sequence_summary.*"),
    # without RoFormerForMultipleChoice, which reads the last token of a row, even if it is padding
    tasks=tuple(layout for layout in task_layouts("RoFormer", OF_TEXTS) if layout.kinds != ("choice",)),
)
