"""GPT-2 (Radford et al., 2019) as Hugging Face writes it: `config.json` and names such as `h.0.attn.c_attn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.config_json import activation, flag, refuse, required
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

MAY_LACK = ("lm",)
IGNORED = ("h.*.attn.bias", "h.*.attn.masked_bias")  # the causal mask and its −10000, once saved as buffers
TASK_HEADS = ("score.*", "classifier.*", "qa_outputs.*", "multiple_choice_head.*")
TASKS = (
    TaskLayout(
        "GPT2ForSequenceClassification",
        ("single", "multi", "number"),
        (("score.weight", "task_head.output.weight"),),
    ),
)

SIZES = {
    "vocab_size": "vocab_size",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "n_positions": "max_positions",
}
OTHERS = {
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "initializer_range": ("init_std", 0.02),
}
ONLY = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_END_OF_TEXT = 50256  # in the original vocabulary; transformers assumes it unless told otherwise


def config_from(settings: Mapping[str, Any]) -> Config:
    refuse(settings, ONLY)
    sizes = required(settings, SIZES)
    inner = settings.get("n_inner")
    variant = {name: getattr(gpt2(), name) for name in ("norm_place", "embedding_norm", "segments", "own_mask")}
    return Config(
        family="gpt2",
        **sizes,
        **variant,
        **{ours: settings.get(theirs, default) for theirs, (ours, default) in OTHERS.items()},
        ffn_width=_four_times(sizes["width"]) if inner is None else inner,
        activation=activation(settings, "activation_function", "gelu_new"),
        tied=flag(settings, "tie_word_embeddings", True),
        pad_token=_padding(settings.get("pad_token_id"), sizes["vocab_size"]),
    )


def _four_times(width: Any) -> Any:
    """Config says what is wrong with a width that is no number."""
    return 4 * width if isinstance(width, int) else width


def _padding(token: Any, vocabulary: Any) -> Any:
    """Some files name a padding token added to the tokenizer but never to the model: there is none, then."""
    whole = isinstance(token, int) and isinstance(vocabulary, int)
    return None if whole and token >= vocabulary else token


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    names = SIZES | {theirs: ours for theirs, (ours, _) in OTHERS.items()}
    end = _END_OF_TEXT if config.vocab_size == _END_OF_TEXT + 1 else None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel" if "lm" in heads else "GPT2Model"],
        **{theirs: getattr(config, ours) for theirs, ours in names.items()},
        "embd_pdrop": config.dropout,
        "n_inner": config.ffn_width,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
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
    settings=SIZES | {theirs: ours for theirs, (ours, _) in OTHERS.items()} | {"n_inner": "ffn_width"},
    steps=STEPS,
    prefix="transformer.",
    may_lack=MAY_LACK,
    ignored=IGNORED,
    task_heads=TASK_HEADS,
    tasks=TASKS,
    tokens="wte.weight",
    output="lm_head.weight",
)
