"""Configurations of known models, as functions; most are small changes of another preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allmask.config import Config


def _variant(of: Callable[[], Config], **changes: Any) -> Callable[[], Config]:
    """A preset that differs from another in these fields."""
    return lambda: replace(of(), **changes)


bert_base = Config
bert_large = _variant(bert_base, width=1024, layers=24, heads=16, ffn_width=4096)
bert_base_chinese = _variant(bert_base, vocab_size=21128)
bert_small = _variant(bert_base, width=512, layers=4, heads=8, ffn_width=2048)
bert_tiny = _variant(bert_base, width=128, layers=2, heads=2, ffn_width=512)


def gpt2() -> Config:
    return Config(
        family="gpt2", vocab_size=50257, pad_token=None, own_mask="causal",
        max_positions=1024, segments=0, embedding_norm=False,
        norm_place="pre", norm_eps=1e-5, activation="gelu_tanh",
    )  # fmt: skip


gpt2_medium = _variant(gpt2, width=1024, layers=24, heads=16, ffn_width=4096)
gpt2_large = _variant(gpt2, width=1280, layers=36, heads=20, ffn_width=5120)
gpt2_xl = _variant(gpt2, width=1600, layers=48, heads=25, ffn_width=6400)


def transformer_base() -> Config:
    """The Transformer of 2017 (arXiv 1706.03762), an encoder–decoder with a shared vocabulary of 37,000 tokens."""
    return Config(
        family="transformer", vocab_size=37000, start_token=0,
        width=512, layers=6, decoder_layers=6, heads=8, ffn_width=2048,
        max_positions=1024, position_kind="sinusoidal", segments=0, embedding_norm=False, embedding_scaled=True,
        norm_eps=1e-5, activation="relu", attention_dropout=0.0,
    )  # fmt: skip


transformer_big = _variant(transformer_base, width=1024, heads=16, ffn_width=4096, dropout=0.3)
transformer_small = _variant(
    transformer_base, width=256, layers=3, decoder_layers=3, heads=4, ffn_width=1024, vocab_size=8000
)


def t5_small() -> Config:
    """T5 (arXiv 1910.10683): no biases, RMS norm, relative positions; targets begin with token 0."""
    return Config(
        family="t5", vocab_size=32128, start_token=0, end_token=1,
        width=512, layers=6, decoder_layers=6, heads=8, head_width=64, ffn_width=2048,
        position_kind="relative", segments=0, embedding_norm=False, bias=False,
        norm="rms", norm_place="pre", norm_eps=1e-6, activation="relu", ffn_dropout=0.1,
        scores_scaled=False, output_scaled=True,
        init_std=1.0,  # a factor of the std of each matrix, see nn/init.py
    )  # fmt: skip


t5_base = _variant(t5_small, width=768, layers=12, decoder_layers=12, heads=12, ffn_width=3072)
t5_large = _variant(t5_small, width=1024, layers=24, decoder_layers=24, heads=16, ffn_width=4096)
t5_v1_1_small = _variant(  # gated feed-forward, untied output layer
    t5_small, layers=8, decoder_layers=8, heads=6, ffn_width=1024,
    gated=True, activation="gelu_tanh", tied=False, output_scaled=False,
)  # fmt: skip
t5_v1_1_base = _variant(t5_v1_1_small, width=768, layers=12, decoder_layers=12, heads=12, ffn_width=2048)
t5_v1_1_large = _variant(t5_v1_1_small, width=1024, layers=24, decoder_layers=24, heads=16, ffn_width=2816)


def lstm() -> Config:
    """A recurrent encoder–decoder with additive attention (arXiv 1409.0473), about the size of transformer-base."""
    return Config(
        family="lstm", vocab_size=37000, start_token=0,
        width=1024, layers=2, decoder_layers=2, heads=1, dropout=0.2,
        ffn_width=1024,  # of the additive attention
        position_kind="none", segments=0, embedding_norm=False, embedding_scaled=True,
    )  # fmt: skip


lstm_small = _variant(lstm, width=384, ffn_width=384, vocab_size=8000)
# without attention: the decoder starts from the last states of the source (arXiv 1409.3215)
lstm_plain = _variant(lstm, source_attention=False)
lstm_small_plain = _variant(lstm_small, source_attention=False)
# two recurrent language models, forward and backward (arXiv 1802.05365)
elmo_small = _variant(lstm, family="elmo", vocab_size=30522, width=512, ffn_width=512, decoder_layers=0, dropout=0.1)
elmo_tiny = _variant(elmo_small, width=128, ffn_width=128)


def xlnet_base() -> Config:
    """XLNet (arXiv 1906.08237): relative positions and relative segments, two streams."""
    return Config(
        family="xlnet", vocab_size=32000, pad_token=5, position_kind="shifted", ffn_dropout=0.1, embedding_norm=False,
        segments=3,  # first text, second text, <cls>
    )  # fmt: skip


xlnet_large = _variant(xlnet_base, width=1024, layers=24, heads=16, ffn_width=4096)
xlnet_tiny = _variant(xlnet_base, width=128, layers=2, heads=2, ffn_width=512)


PRESETS: dict[str, Callable[[], Config]] = {
    "bert-tiny": bert_tiny, "bert-small": bert_small, "bert-base": bert_base, "bert-large": bert_large,
    "bert-base-chinese": bert_base_chinese,
    "gpt2": gpt2, "gpt2-medium": gpt2_medium, "gpt2-large": gpt2_large, "gpt2-xl": gpt2_xl,
    "transformer-small": transformer_small, "transformer-base": transformer_base, "transformer-big": transformer_big,
    "t5-small": t5_small, "t5-base": t5_base, "t5-large": t5_large,
    "t5-v1.1-small": t5_v1_1_small, "t5-v1.1-base": t5_v1_1_base, "t5-v1.1-large": t5_v1_1_large,
    "xlnet-tiny": xlnet_tiny, "xlnet-base": xlnet_base, "xlnet-large": xlnet_large,
    "lstm-small": lstm_small, "lstm": lstm, "lstm-small-plain": lstm_small_plain, "lstm-plain": lstm_plain,
    "elmo-tiny": elmo_tiny, "elmo-small": elmo_small,
}  # fmt: skip
