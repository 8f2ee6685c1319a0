"""A new model: the shape of a preset, and a vocabulary, given or trained on the data.

The default settings are those of the 2017 Transformer (arXiv 1706.03762): Adam with betas 0.9 and 0.98 and epsilon
1e-9, no weight decay, label smoothing, and a learning rate that rises for 4,000 steps to width^-0.5 · 4000^-0.5 and
then falls with 1/√step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from allmask.checkpoints import resolve
from allmask.config import Config
from allmask.data import Record
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model
from allmask.options import FreshOptions, Settings
from allmask.presets import PRESETS
from allmask.text import Tokenizer, train_tokenizer
from allmask.training.schedule import noam

WARMUP, SHARE = 4000, 0.1  # steps of warm-up; in a short run, a share of its steps
HEAD_WIDTH = 64
SAMPLE = 1000  # records from which the number of tokens is estimated


@dataclass(frozen=True)
class Fresh(FreshOptions):
    """With a `tokenizer`, a folder or file, its vocabulary is used; otherwise one of `vocab_size` tokens is trained."""

    def model(self, records: Sequence[Record], seed: int) -> Model:
        """Create the model; the same for the same records and seed. Sources and targets share one vocabulary."""
        if self.tokenizer is not None:
            tokenizer = Tokenizer.load(resolve(self.tokenizer))
        else:
            texts = [text for record in records for text in record.fields.values() if isinstance(text, str)]
            tokenizer = train_tokenizer(texts, "bpe", self.vocab_size)
        model = Model.fresh(self.shape(tokenizer), ["lm"], torch.Generator().manual_seed(seed))
        model.tokenizer = tokenizer
        return model

    def shape(self, tokenizer: Tokenizer) -> Config:
        sizes = {name: getattr(self, name) for name in ("layers", "width", "heads", "ffn_width")}
        return shaped(self.preset, tokenizer, {name: size for name, size in sizes.items() if size is not None})

    def suggested_settings(self, model: Model, records: Sequence[Record], settings: Settings) -> dict[str, Any]:
        """Return the paper's warm-up and peak learning rate; in a shorter run, a tenth of the steps are warm-up."""
        assert model.tokenizer is not None
        sample = records[:: max(1, len(records) // SAMPLE)]
        texts = [text for record in sample for text in record.fields.values() if isinstance(text, str)]
        lengths = [len(encoded) for encoded in model.tokenizer.encode_batch(texts)]
        tokens = 2 * len(records) * sum(lengths) / max(1, len(lengths))
        steps = settings.steps or settings.epochs * tokens / (settings.batch_tokens * settings.accumulate)
        return {
            "lr": noam(WARMUP - 1, model.config.width, WARMUP),
            "warmup": WARMUP if steps * SHARE > WARMUP else SHARE,
            "batch_tokens": settings.batch_tokens,
            "layer_decay": None,
        }


WIDE_EPS = 1e-5  # of norms over many tokens: a feature that all of them share has no variance
CLIPPED = 64  # largest distance of clipped positions (NEZHA)


def shaped(preset: str, tokenizer: Tokenizer, given: Mapping[str, Any], rows: int | None = None) -> Config:
    """Return the shape of a preset for the vocabulary of a tokenizer, with some fields `given` instead.

    With another width, heads and feed-forward width are scaled as in the preset; both stacks get the same number of
    layers. `rows` is the number of token embeddings, if that is more than the tokenizer has tokens.
    """
    config, follows = PRESETS[preset](), {}
    flags = {name: "--positions" if name == "position_kind" else f"--{name.replace('_', '-')}" for name in given}
    absent = ["heads", "norm", "norm_place", "position_kind", "parametrization"]
    if config.family == "elmo" or not config.source_attention:
        absent.append("ffn_width")
    found = [flags[name] for name in absent if name in given and config.family in ("lstm", "elmo")]
    if found:
        raise UsageError(
            f"{' and '.join(found)}: {preset}, a recurrent model, has no such size or part", "leave it out"
        )
    if given.get("norm") in ("batch", "instance"):
        follows |= {"norm_eps": max(config.norm_eps, WIDE_EPS)}
    if given.get("position_kind") == "clipped":
        follows |= {"clamp": config.clamp or CLIPPED}
    if "width" in given:
        heads = max(1, given["width"] // HEAD_WIDTH) if config.heads > 1 else 1
        follows |= {"heads": heads, "ffn_width": max(1, given["width"] * config.ffn_width // config.width)}
    if config.decoder_layers:
        follows |= {"decoder_layers": given.get("layers", config.decoder_layers)}
        follows |= {"start_token": tokenizer.start_id, "end_token": tokenizer.end_id}
    pad = None if config.pad_token is None else tokenizer.pad_id
    try:
        return replace(config, vocab_size=rows or tokenizer.size, pad_token=pad, **{**follows, **given})
    except CheckpointError as error:
        raise UsageError(error.message, f"check {', '.join(flags.values())}") from None
