"""T5 (arXiv 1910.10683) and T5 v1.1 as Hugging Face writes them: names such as `encoder.block.0.layer.0`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import ACTIVATIONS, field_names, fields_from, flag, refuse
from allmask.checkpoints.renaming import Family
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.presets import t5_small

TABLE = (
    ("shared.weight",                                       "body.embedding.tokens.weight"),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "body.encoder.relative.table.weight"),
    ("encoder.block.*.layer.0.layer_norm.weight",           "body.encoder.layers.*.attention_norm.weight"),
    ("encoder.block.*.layer.0.SelfAttention.q.weight",      "body.encoder.layers.*.attention.query.weight"),
    ("encoder.block.*.layer.0.SelfAttention.k.weight",      "body.encoder.layers.*.attention.key.weight"),
    ("encoder.block.*.layer.0.SelfAttention.v.weight",      "body.encoder.layers.*.attention.value.weight"),
    ("encoder.block.*.layer.0.SelfAttention.o.weight",      "body.encoder.layers.*.attention.output.weight"),
    ("encoder.block.*.layer.1.layer_norm.weight",           "body.encoder.layers.*.feed_forward_norm.weight"),
    ("encoder.block.*.layer.1.DenseReluDense.wi.weight",    "body.encoder.layers.*.feed_forward.expand.weight"),
    ("encoder.block.*.layer.1.DenseReluDense.wi_0.weight",  "body.encoder.layers.*.feed_forward.gate.weight"),
    ("encoder.block.*.layer.1.DenseReluDense.wi_1.weight",  "body.encoder.layers.*.feed_forward.gated.weight"),
    ("encoder.block.*.layer.1.DenseReluDense.wo.weight",    "body.encoder.layers.*.feed_forward.contract.weight"),
    ("encoder.final_layer_norm.weight",                     "body.encoder.norm.weight"),
    ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "body.decoder.relative.table.weight"),
    ("decoder.block.*.layer.0.layer_norm.weight",           "body.decoder.layers.*.layer.attention_norm.weight"),
    ("decoder.block.*.layer.0.SelfAttention.q.weight",      "body.decoder.layers.*.layer.attention.query.weight"),
    ("decoder.block.*.layer.0.SelfAttention.k.weight",      "body.decoder.layers.*.layer.attention.key.weight"),
    ("decoder.block.*.layer.0.SelfAttention.v.weight",      "body.decoder.layers.*.layer.attention.value.weight"),
    ("decoder.block.*.layer.0.SelfAttention.o.weight",      "body.decoder.layers.*.layer.attention.output.weight"),
    ("decoder.block.*.layer.1.layer_norm.weight",           "body.decoder.layers.*.cross_norm.weight"),
    ("decoder.block.*.layer.1.EncDecAttention.q.weight",    "body.decoder.layers.*.cross.query.weight"),
    ("decoder.block.*.layer.1.EncDecAttention.k.weight",    "body.decoder.layers.*.cross.key.weight"),
    ("decoder.block.*.layer.1.EncDecAttention.v.weight",    "body.decoder.layers.*.cross.value.weight"),
    ("decoder.block.*.layer.1.EncDecAttention.o.weight",    "body.decoder.layers.*.cross.output.weight"),
    ("decoder.block.*.layer.2.layer_norm.weight",           "body.decoder.layers.*.layer.feed_forward_norm.weight"),
    ("decoder.block.*.layer.2.DenseReluDense.wi.weight",    "body.decoder.layers.*.layer.feed_forward.expand.weight"),
    ("decoder.block.*.layer.2.DenseReluDense.wi_0.weight",  "body.decoder.layers.*.layer.feed_forward.gate.weight"),
    ("decoder.block.*.layer.2.DenseReluDense.wi_1.weight",  "body.decoder.layers.*.layer.feed_forward.gated.weight"),
    ("decoder.block.*.layer.2.DenseReluDense.wo.weight",    "body.decoder.layers.*.layer.feed_forward.contract.weight"),
    ("decoder.final_layer_norm.weight",                     "body.decoder.norm.weight"),
    ("lm_head.weight",                                      "lm_head.output.weight"),
)  # fmt: skip

FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "width",
    "d_kv": "head_width",
    "d_ff": "ffn_width",
    "num_layers": "layers",
    "num_heads": "heads",
    "relative_attention_num_buckets": ("buckets", 32),
    "relative_attention_max_distance": ("bucket_distance", 128),
    "layer_norm_epsilon": ("norm_eps", 1e-6),
    "pad_token_id": ("pad_token", 0),
    "initializer_factor": ("init_std", 1.0),
    "n_positions": ("max_positions", 512),  # length in training; not a limit
}
NAMES = field_names(FIELDS)
ONLY = {"is_encoder_decoder": (True,), "is_decoder": (False,)}
_GATED = "gated-"


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    dropout, layers = settings.get("dropout_rate", 0.1), settings.get("num_decoder_layers")
    variant = (
        "family", "position_kind", "segments", "norm", "norm_place", "embedding_norm", "bias", "scores_scaled",
    )  # fmt: skip
    tied = flag(settings, "tie_word_embeddings", True)
    end = settings.get("eos_token_id", 1)
    ends: list[Any] = end if isinstance(end, list) and end else [end]
    return Config(
        **{name: getattr(t5_small(), name) for name in variant},
        **fields_from(settings, FIELDS),
        **_feed_forward(settings),
        decoder_layers=settings["num_layers"] if layers is None else layers,
        dropout=dropout,
        attention_dropout=dropout,
        ffn_dropout=dropout,
        start_token=settings.get("decoder_start_token_id", settings.get("pad_token_id", 0)),
        end_token=ends[0],  # of several, the one learned in training
        tied=tied,
        # transformers 5 always writes that the output is tied; this setting distinguishes the variants
        output_scaled=flag(settings, "scale_decoder_outputs", tied),
    )


def _feed_forward(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Config for `relu`, `gated-relu` or `gated-gelu`, whose GELU is the tanh formula."""
    kind = settings.get("feed_forward_proj", "relu")
    name = "gelu_new" if kind == "gated-gelu" else str(kind).removeprefix(_GATED)
    if name not in ACTIVATIONS:
        raise CheckpointError(f"feed_forward_proj is {kind!r}; supported: relu, gated-gelu, gated-relu")
    return {"gated": str(kind).startswith(_GATED), "activation": ACTIVATIONS[name]}


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    kind = {"gelu_tanh": "gelu" if config.gated else "gelu_new"}.get(config.activation, config.activation)
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration" if "lm" in heads else "T5Model"],
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": f"{_GATED}{kind}" if config.gated else kind,
        "dropout_rate": config.dropout,
        "decoder_start_token_id": config.start_token,
        "eos_token_id": config.end_token,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.output_scaled,
    }


T5 = Family(
    name="t5",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"num_decoder_layers": "decoder_layers"},
    may_lack=("lm",),
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),  # saved once, never used
    tokens="shared.weight",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),  # in older files
    output="lm_head.weight",
)
