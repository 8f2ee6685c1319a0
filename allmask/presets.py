"""Configurations of known models; most are small changes of another preset."""

from __future__ import annotations

from dataclasses import replace

from allmask.config import Config


def bert_base() -> Config:
    return Config()


def bert_large() -> Config:
    return replace(bert_base(), width=1024, layers=24, heads=16, ffn_width=4096)


def bert_base_chinese() -> Config:
    return replace(bert_base(), vocab_size=21128)


def bert_small() -> Config:
    return replace(bert_base(), width=512, layers=4, heads=8, ffn_width=2048)


def bert_tiny() -> Config:
    return replace(bert_base(), width=128, layers=2, heads=2, ffn_width=512)


def gpt2() -> Config:
    return Config(
        family="gpt2",
        vocab_size=50257,
        max_positions=1024,
        segments=0,
        norm_place="pre",
        norm_eps=1e-5,
        activation="gelu_tanh",
        embedding_norm=False,
        own_mask="causal",
        pad_token=None,
    )


def gpt2_medium() -> Config:
    return replace(gpt2(), width=1024, layers=24, heads=16, ffn_width=4096)


def gpt2_large() -> Config:
    return replace(gpt2(), width=1280, layers=36, heads=20, ffn_width=5120)


def gpt2_xl() -> Config:
    return replace(gpt2(), width=1600, layers=48, heads=25, ffn_width=6400)


def transformer_base() -> Config:
    """The Transformer of 2017 (arXiv 1706.03762), an encoder–decoder with a shared vocabulary of 37,000 tokens."""
    return Config(
        family="transformer",
        vocab_size=37000,
        width=512,
        layers=6,
        decoder_layers=6,
        heads=8,
        ffn_width=2048,
        max_positions=1024,
        position_kind="sinusoidal",
        segments=0,
        norm_eps=1e-5,
        activation="relu",
        attention_dropout=0.0,
        embedding_norm=False,
        embedding_scaled=True,
        start_token=0,
    )


def transformer_big() -> Config:
    return replace(transformer_base(), width=1024, heads=16, ffn_width=4096, dropout=0.3)


def transformer_small() -> Config:
    return replace(transformer_base(), width=256, layers=3, decoder_layers=3, heads=4, ffn_width=1024, vocab_size=8000)


def t5_small() -> Config:
    """T5 (arXiv 1910.10683): no biases, RMS norm, relative positions; targets begin with token 0."""
    return Config(
        family="t5",
        vocab_size=32128,
        width=512,
        layers=6,
        decoder_layers=6,
        heads=8,
        head_width=64,
        ffn_width=2048,
        position_kind="relative",
        segments=0,
        norm="rms",
        norm_place="pre",
        norm_eps=1e-6,
        activation="relu",
        ffn_dropout=0.1,
        embedding_norm=False,
        bias=False,
        scores_scaled=False,
        output_scaled=True,
        start_token=0,
        end_token=1,
        init_std=1.0,  # a factor of the std of each matrix, see nn/init.py
    )


def t5_base() -> Config:
    return replace(t5_small(), width=768, layers=12, decoder_layers=12, heads=12, ffn_width=3072)


def t5_large() -> Config:
    return replace(t5_small(), width=1024, layers=24, decoder_layers=24, heads=16, ffn_width=4096)


def t5_v1_1_small() -> Config:
    """T5 v1.1: gated feed-forward, untied output layer."""
    gates = {"gated": True, "activation": "gelu_tanh", "tied": False, "output_scaled": False}
    return replace(t5_small(), layers=8, decoder_layers=8, heads=6, ffn_width=1024, **gates)


def t5_v1_1_base() -> Config:
    return replace(t5_v1_1_small(), width=768, layers=12, decoder_layers=12, heads=12, ffn_width=2048)


def t5_v1_1_large() -> Config:
    return replace(t5_v1_1_small(), width=1024, layers=24, decoder_layers=24, heads=16, ffn_width=2816)


def lstm() -> Config:
    """A recurrent encoder–decoder with additive attention (arXiv 1409.0473), about the size of transformer-base."""
    return Config(
        family="lstm",
        vocab_size=37000,
        width=1024,
        layers=2,
        decoder_layers=2,
        heads=1,
        ffn_width=1024,  # of the additive attention
        position_kind="none",
        segments=0,
        dropout=0.2,
        embedding_norm=False,
        embedding_scaled=True,
        start_token=0,
    )


def lstm_small() -> Config:
    return replace(lstm(), width=384, ffn_width=384, vocab_size=8000)


def lstm_plain() -> Config:
    """Without attention: the decoder starts from the last states of the source (arXiv 1409.3215)."""
    return replace(lstm(), source_attention=False)


def lstm_small_plain() -> Config:
    return replace(lstm_small(), source_attention=False)


def elmo_small() -> Config:
    """Two recurrent language models, forward and backward (arXiv 1802.05365)."""
    return replace(lstm(), family="elmo", vocab_size=30522, width=512, ffn_width=512, decoder_layers=0, dropout=0.1)


def elmo_tiny() -> Config:
    return replace(elmo_small(), width=128, ffn_width=128)


def xlnet_base() -> Config:
    """XLNet (arXiv 1906.08237): relative positions and relative segments, two streams."""
    return Config(
        family="xlnet",
        vocab_size=32000,
        position_kind="shifted",
        segments=3,  # first text, second text, <cls>
        ffn_dropout=0.1,
        embedding_norm=False,
        pad_token=5,
    )


def xlnet_large() -> Config:
    return replace(xlnet_base(), width=1024, layers=24, heads=16, ffn_width=4096)


def xlnet_tiny() -> Config:
    return replace(xlnet_base(), width=128, layers=2, heads=2, ffn_width=512)


PRESETS = {
    make.__name__.replace("_", "-").replace("v1-1", "v1.1"): make
    for make in (
        bert_tiny, bert_small, bert_base, bert_large, bert_base_chinese,
        gpt2, gpt2_medium, gpt2_large, gpt2_xl,
        transformer_small, transformer_base, transformer_big,
        t5_small, t5_base, t5_large, t5_v1_1_small, t5_v1_1_base, t5_v1_1_large,
        xlnet_tiny, xlnet_base, xlnet_large,
        lstm_small, lstm, lstm_small_plain, lstm_plain, elmo_tiny, elmo_small,
    )
}  # fmt: skip
