"""Our names for parameters, and the shape each must have: what every family's table is written against.

A `*` stands for the number of a layer. A head is a part that a file may lack as a whole, never by half.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from allmask.config import Config
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.heads import Labels
from allmask.nn.transformer import Transformer

Shape = tuple[int, ...]

HEADS = {"pooler": "pooler.", "lm": "lm_head.", "nsp": "nsp_head.", "task": "task_head."}

_EMBEDDING = (
    ("body.embedding.tokens.weight",             "vocab_size width"),
    ("body.embedding.positions.weight",          "max_positions width"),
    ("body.embedding.segments.weight",           "segments width"),
    ("body.embedding.norm.weight",               "width"),
    ("body.embedding.norm.bias",                 "width"),
)  # fmt: skip
_LAYER = (
    ("body.layers.*.attention.query.weight",     "width width"),
    ("body.layers.*.attention.query.bias",       "width"),
    ("body.layers.*.attention.key.weight",       "width width"),
    ("body.layers.*.attention.key.bias",         "width"),
    ("body.layers.*.attention.value.weight",     "width width"),
    ("body.layers.*.attention.value.bias",       "width"),
    ("body.layers.*.attention.output.weight",    "width width"),
    ("body.layers.*.attention.output.bias",      "width"),
    ("body.layers.*.attention_norm.weight",      "width"),
    ("body.layers.*.attention_norm.bias",        "width"),
    ("body.layers.*.feed_forward.expand.weight",   "ffn_width width"),
    ("body.layers.*.feed_forward.expand.bias",     "ffn_width"),
    ("body.layers.*.feed_forward.contract.weight", "width ffn_width"),
    ("body.layers.*.feed_forward.contract.bias",   "width"),
    ("body.layers.*.feed_forward_norm.weight",   "width"),
    ("body.layers.*.feed_forward_norm.bias",     "width"),
)  # fmt: skip
_FINAL_NORM = (
    ("body.norm.weight",                         "width"),
    ("body.norm.bias",                           "width"),
)  # fmt: skip
_POOLER = (
    ("pooler.weight",                            "width width"),
    ("pooler.bias",                              "width"),
)  # fmt: skip
_BERT_LM_HEAD = (
    ("lm_head.transform.weight",                 "width width"),
    ("lm_head.transform.bias",                   "width"),
    ("lm_head.norm.weight",                      "width"),
    ("lm_head.norm.bias",                        "width"),
    ("lm_head.bias",                             "vocab_size"),
)  # fmt: skip
_OWN_OUTPUT = (
    ("lm_head.output.weight",                    "vocab_size width"),
)  # fmt: skip
_OUTPUT_BIAS = (
    ("lm_head.bias",                             "vocab_size"),
)  # fmt: skip
_NSP_HEAD = (
    ("nsp_head.weight",                          "2 width"),
    ("nsp_head.bias",                            "2"),
)  # fmt: skip


def expected_shapes(config: Config, heads: Collection[str], labels: Labels | None = None) -> dict[str, Shape]:
    """Every parameter a model of this shape has, with these heads, and a task head for these labels."""
    if config.decoder_layers or config.family == "xlnet":
        return _built(config) | {name: _numbers(shape, config) for name, shape in _around(config, heads, labels)}
    rows = list(_EMBEDDING if config.family == "bert" else _EMBEDDING[:2])
    rows += [(name.replace("*", str(n)), shape) for n in range(config.layers) for name, shape in _LAYER]
    rows += _FINAL_NORM if config.norm_place == "pre" else ()
    of_texts = config.family == "bert" and labels is not None and not labels.of_tokens
    read_off = {"pooler", "nsp"} | ({"task"} if of_texts else set())
    rows += _POOLER if read_off & set(heads) else ()  # from it BERT also says whether a sentence follows, and labels
    rows += _BERT_LM_HEAD if "lm" in heads and config.family == "bert" else ()
    rows += _around(config, heads, labels)
    return {name: _numbers(shape, config) for name, shape in rows}


def _around(config: Config, heads: Collection[str], labels: Labels | None) -> list[tuple[str, str]]:
    """The heads that all families have in common."""
    rows = list(_OWN_OUTPUT if "lm" in heads and not config.tied else ())
    rows += _OUTPUT_BIAS if "lm" in heads and config.family == "xlnet" else ()
    rows += _NSP_HEAD if "nsp" in heads else ()
    return rows + (_task_head(config, labels) if "task" in heads and labels is not None else [])


def _built(config: Config) -> dict[str, Shape]:
    """What is in the body of a younger family is said where it is built."""
    with torch.device("meta"):
        body = EncoderDecoder(config) if config.decoder_layers else Transformer(config)
    return {f"body.{name}": tuple(tensor.shape) for name, tensor in body.state_dict().items()}


def _task_head(config: Config, labels: Labels) -> list[tuple[str, str]]:
    many = str(len(labels))
    rows = [("task_head.output.weight", f"{many} width")]
    rows += [("task_head.output.bias", many)] if config.family in ("bert", "xlnet") else []
    if config.family == "xlnet" and not labels.of_tokens:
        rows += [("task_head.before.weight", "width width"), ("task_head.before.bias", "width")]
    if labels.kind == "chain":
        rows += [("task_head.chain.follows_bias", str(len(labels) ** 2))]
        rows += [(f"task_head.chain.{end}_bias", many) for end in ("first", "last")]
    return rows


def _numbers(words: str, config: Config) -> Shape:
    return tuple(int(word) if word.isdigit() else getattr(config, word) for word in words.split())


def heads_in(names: Collection[str], config: Config) -> frozenset[str]:
    """Which heads these parameters hold. A tied output layer without a bias has no parameter of its own."""
    found = {head for head, start in HEADS.items() if any(name.startswith(start) for name in names)}
    return frozenset(found | ({"lm"} if config.tied and config.family not in ("bert", "xlnet") else set()))
