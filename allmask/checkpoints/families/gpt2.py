"""GPT-2 (Radford et al., 2019) as Hugging Face writes it: `config.json` and names such as `h.0.attn.c_attn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import activation, activation_name, field_names, fields_from, flag, refuse
from allmask.checkpoints.renaming import Family, TaskLayout, split_qkv, transpose
from allmask.config import Config
from allmask.presets import gpt2

TABLE = (
    ("wte.weight",              "body.embedding.tokens.weight"),
    ("wpe.weight",              "body.embedding.positions.weight"),
    ("h.*.ln_1.weight",         "body.layers.*.attention_norm.weight"),
    ("h.*.ln_1.bias",           "body.layers.*.attention_norm.bias"),
    ("h.*.attn.c_attn.weight",  "body.layers.*.attention.qkv.weight"),
    ("h.*.attn.c_attn.bias",    "body.layers.*.attention.qkv.bias"),
    ("h.*.attn.c_proj.weight",  "body.layers.*.attention.output.weight"),
    ("h.*.attn.c_proj.bias",    "body.layers.*.attention.output.bias"),
    ("h.*.ln_2.weight",         "body.layers.*.feed_forward_norm.weight"),
    ("h.*.ln_2.bias",           "body.layers.*.feed_forward_norm.bias"),
    ("h.*.mlp.c_fc.weight",     "body.layers.*.feed_forward.expand.weight"),
    ("h.*.mlp.c_fc.bias",       "body.layers.*.feed_forward.expand.bias"),
    ("h.*.mlp.c_proj.weight",   "body.layers.*.feed_forward.contract.weight"),
    ("h.*.mlp.c_proj.bias",     "body.layers.*.feed_forward.contract.bias"),
    ("ln_f.weight",             "body.norm.weight"),
    ("ln_f.bias",               "body.norm.bias"),
    ("lm_head.weight",          "lm_head.output.weight"),
)  # fmt: skip

# GPT-2 stored Conv1D weights, (in, out), with query, key and value side by side.
STEPS = (
    transpose(
        "*.attention.qkv.weight", "*.attention.output.weight",
        "*.feed_forward.expand.weight", "*.feed_forward.contract.weight",
    ),
    split_qkv(),
)  # fmt: skip

_SCORES = (("score.weight", "task_head.output.weight"),)
TASKS = (TaskLayout("GPT2ForSequenceClassification", ("single", "multi", "number"), _SCORES),)

FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "n_positions": "max_positions",
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "initializer_range": ("init_std", 0.02),
}
NAMES = field_names(FIELDS)
ONLY = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}
_END_OF_TEXT = 50256  # in the original vocabulary; the default of transformers


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    fields = fields_from(settings, FIELDS)
    width, vocab_size = fields["width"], fields["vocab_size"]
    ffn_width, pad = settings.get("n_inner"), settings.get("pad_token_id")
    if ffn_width is None:
        ffn_width = 4 * width if isinstance(width, int) else width  # Config refuses a width that is no number
    if isinstance(pad, int) and isinstance(vocab_size, int) and pad >= vocab_size:
        pad = None  # added to the tokenizer, but never to the model
    return Config(
        family="gpt2",
        **fields,
        **{name: getattr(gpt2(), name) for name in ("norm_place", "embedding_norm", "segments", "own_mask")},
        ffn_width=ffn_width,
        activation=activation(settings, "activation_function", "gelu_new"),
        tied=flag(settings, "tie_word_embeddings", True),
        pad_token=pad,
    )


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    end = _END_OF_TEXT if config.vocab_size == _END_OF_TEXT + 1 else None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel" if "lm" in heads else "GPT2Model"],
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        "embd_pdrop": config.dropout,
        "n_inner": config.ffn_width,
        "activation_function": activation_name(config.activation),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": config.pad_token,
        "tie_word_embeddings": config.tied,
    }


GPT2 = Family(
    name="gpt2",
    table=TABLE,
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"n_inner": "ffn_width"},
    steps=STEPS,
    prefix="transformer.",
    may_lack=("lm",),
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),  # the causal mask and its −10000, buffers of old versions
    task_heads=("score.*", "classifier.*", "qa_outputs.*", "multiple_choice_head.*"),
    tasks=TASKS,
    tokens="wte.weight",
    output="lm_head.weight",
)
