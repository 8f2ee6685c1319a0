"""BERT as Google published it: a TensorFlow checkpoint, `bert_config.json` and names such as `bert/encoder/layer_0`."""

from __future__ import annotations

from allmask.checkpoints.families import bert
from allmask.checkpoints.renaming import Family, transpose

TABLE = (
    ("bert/embeddings/word_embeddings",                     "body.embedding.tokens.weight"),
    ("bert/embeddings/position_embeddings",                 "body.embedding.positions.weight"),
    ("bert/embeddings/token_type_embeddings",               "body.embedding.segments.weight"),
    ("bert/embeddings/LayerNorm/gamma",                     "body.embedding.norm.weight"),
    ("bert/embeddings/LayerNorm/beta",                      "body.embedding.norm.bias"),
    ("bert/encoder/layer_*/attention/self/query/kernel",    "body.layers.*.attention.query.weight"),
    ("bert/encoder/layer_*/attention/self/query/bias",      "body.layers.*.attention.query.bias"),
    ("bert/encoder/layer_*/attention/self/key/kernel",      "body.layers.*.attention.key.weight"),
    ("bert/encoder/layer_*/attention/self/key/bias",        "body.layers.*.attention.key.bias"),
    ("bert/encoder/layer_*/attention/self/value/kernel",    "body.layers.*.attention.value.weight"),
    ("bert/encoder/layer_*/attention/self/value/bias",      "body.layers.*.attention.value.bias"),
    ("bert/encoder/layer_*/attention/output/dense/kernel",  "body.layers.*.attention.output.weight"),
    ("bert/encoder/layer_*/attention/output/dense/bias",    "body.layers.*.attention.output.bias"),
    ("bert/encoder/layer_*/attention/output/LayerNorm/gamma", "body.layers.*.attention_norm.weight"),
    ("bert/encoder/layer_*/attention/output/LayerNorm/beta",  "body.layers.*.attention_norm.bias"),
    ("bert/encoder/layer_*/intermediate/dense/kernel",      "body.layers.*.feed_forward.expand.weight"),
    ("bert/encoder/layer_*/intermediate/dense/bias",        "body.layers.*.feed_forward.expand.bias"),
    ("bert/encoder/layer_*/output/dense/kernel",            "body.layers.*.feed_forward.contract.weight"),
    ("bert/encoder/layer_*/output/dense/bias",              "body.layers.*.feed_forward.contract.bias"),
    ("bert/encoder/layer_*/output/LayerNorm/gamma",         "body.layers.*.feed_forward_norm.weight"),
    ("bert/encoder/layer_*/output/LayerNorm/beta",          "body.layers.*.feed_forward_norm.bias"),
    ("bert/pooler/dense/kernel",                            "pooler.weight"),
    ("bert/pooler/dense/bias",                              "pooler.bias"),
    ("cls/predictions/transform/dense/kernel",              "lm_head.transform.weight"),
    ("cls/predictions/transform/dense/bias",                "lm_head.transform.bias"),
    ("cls/predictions/transform/LayerNorm/gamma",           "lm_head.norm.weight"),
    ("cls/predictions/transform/LayerNorm/beta",            "lm_head.norm.bias"),
    ("cls/predictions/output_bias",                         "lm_head.bias"),
    ("cls/seq_relationship/output_weights",                 "nsp_head.weight"),
    ("cls/seq_relationship/output_bias",                    "nsp_head.bias"),
)  # fmt: skip

# TensorFlow stores kernels as (in, out). The embeddings and the NSP matrix are stored as we use them.
KERNELS = tuple(ours for theirs, ours in TABLE if theirs.endswith("/kernel"))

GOOGLE_BERT = Family(
    name="bert",
    table=TABLE,
    config_from=bert.config_from,
    config_to=bert.config_to,
    settings=bert.BERT.settings,
    steps=(transpose(*KERNELS),),
    may_lack=bert.BERT.may_lack,
    ignored=("*/adam_m", "*/adam_v", "*/lamb_m", "*/lamb_v", "global_step", "good_steps", "bad_steps", "loss_scale"),
    task_heads=("output_weights", "output_bias", "cls/squad/output_weights", "cls/squad/output_bias"),
)
