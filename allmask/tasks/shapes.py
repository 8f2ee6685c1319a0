"""The shape of a new model: a preset's, but for what was asked for, with the vocabulary of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from allmask.config import PRESETS, Config
from allmask.errors import CheckpointError, UsageError
from allmask.text import Tokenizer

HEAD_WIDTH = 64


def shaped(preset: str, tokenizer: Tokenizer, given: Mapping[str, int], rows: int | None = None) -> Config:
    """Heads and inner follow from another width, as they do in the preset; both stacks have as many layers.

    `rows` is how many tokens are embedded, where that is more than the tokenizer has.
    """
    config, follows = PRESETS[preset](), {}
    _expect_known(preset, config, given)
    if "width" in given:
        heads = max(1, given["width"] // HEAD_WIDTH) if config.heads > 1 else 1
        follows |= {"heads": heads, "inner": max(1, given["width"] * config.inner // config.width)}
    if config.decoder_layers:
        follows |= {"decoder_layers": given.get("layers", config.decoder_layers)}
        follows |= {"start_token": tokenizer.start_id, "end_token": tokenizer.end_id}
    pad = None if config.pad_token is None else tokenizer.pad_id
    try:
        return replace(config, vocabulary=rows or tokenizer.size, pad_token=pad, **{**follows, **given})
    except CheckpointError as error:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(error.message, f"check {flags}") from None


def _expect_known(preset: str, config: Config, given: Mapping[str, int]) -> None:
    """A recurrent body has no heads, and an inner width only where it scores what it looks at."""
    strange = ("heads", "inner") if config.family == "elmo" or not config.source_attention else ("heads",)
    found = [f"--{name}" for name in strange if name in given and config.family in ("lstm", "elmo")]
    if found:
        raise UsageError(f"{' and '.join(found)}: {preset} has nothing of that kind", "leave it out")
