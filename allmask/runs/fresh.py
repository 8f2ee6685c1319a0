"""A new model: the shape of a preset, and a vocabulary, given or learnt from the data.

The default settings are those of the 2017 Transformer (arXiv 1706.03762): Adam with 0.9, 0.98 and 1e-9, no decay,
smoothed labels, and a rate that rises for 4,000 steps to width^-0.5 · 4000^-0.5 and falls with 1/√step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from allmask.config import Config
from allmask.data import Record
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model
from allmask.options import FreshOptions, Settings
from allmask.presets import PRESETS
from allmask.text import Tokenizer, train_tokenizer
from allmask.training.schedule import noam

WARMUP, SHARE = 4000, 0.1  # steps of the warm-up; in a short run, this share of it
HEAD_WIDTH = 64
SAMPLE = 1000  # records, by which the number of tokens of all is estimated
_SHAPE = ("layers", "width", "heads", "ffn_width")


@dataclass(frozen=True)
class Fresh(FreshOptions):
    """With a `tokenizer`, a folder or file, its vocabulary is used; otherwise one of `vocab_size` tokens is trained."""

    open_settings: ClassVar[frozenset[str]] = frozenset({"lr", "warmup"})

    def model(self, records: Sequence[Record], seed: int) -> Model:
        """The model before its first step; the same for the same records and seed."""
        tokenizer = self._tokenizer(records)
        model = Model.fresh(self.shape(tokenizer), ["lm"], torch.Generator().manual_seed(seed))
        model.tokenizer = tokenizer
        return model

    def shape(self, tokenizer: Tokenizer) -> Config:
        given = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        return shaped(self.preset, tokenizer, given)

    def _tokenizer(self, records: Sequence[Record]) -> Tokenizer:
        """One vocabulary for sources and targets."""
        if self.tokenizer is not None:
            return Tokenizer.load(Path(self.tokenizer).expanduser())
        texts = [text for record in records for text in record.fields.values() if isinstance(text, str)]
        return train_tokenizer(texts, "bpe", self.vocab_size)

    def suggested_settings(self, model: Model, records: Sequence[Record], settings: Settings) -> dict[str, Any]:
        """The paper's warm-up and peak rate; in a run that is too short for it, a tenth of the steps warm up."""
        tokens = settings.batch_tokens * settings.accumulate
        steps = settings.steps or settings.epochs * _tokens(model, records) / tokens
        return {
            "lr": noam(WARMUP - 1, model.config.width, WARMUP),
            "warmup": WARMUP if steps * SHARE > WARMUP else SHARE,
        }


def _tokens(model: Model, records: Sequence[Record]) -> float:
    """Estimate how many tokens all records have."""
    assert model.tokenizer is not None
    some = records[:: max(1, len(records) // SAMPLE)]
    texts = [text for record in some for text in record.fields.values() if isinstance(text, str)]
    lengths = [len(encoded) for encoded in model.tokenizer.encode_batch(texts)]
    return 2 * len(records) * sum(lengths) / max(1, len(lengths))


def shaped(preset: str, tokenizer: Tokenizer, given: Mapping[str, int], rows: int | None = None) -> Config:
    """The shape of a preset with some sizes given otherwise, for the vocabulary of a tokenizer.

    Heads and feed-forward width follow from another width, as they do in the preset; both stacks get as many layers.
    `rows` is the number of token embeddings, if that is more than the tokenizer has tokens.
    """
    config, follows = PRESETS[preset](), {}
    _expect_known(preset, config, given)
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
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(error.message, f"check {flags}") from None


def _expect_known(preset: str, config: Config, given: Mapping[str, int]) -> None:
    """Refuse heads for a recurrent body, and a feed-forward width for one without attention to the source."""
    strange = ("heads", "ffn_width") if config.family == "elmo" or not config.source_attention else ("heads",)
    found = [f"--{name.replace('_', '-')}" for name in strange if name in given and config.family in ("lstm", "elmo")]
    if found:
        raise UsageError(f"{' and '.join(found)}: {preset} has nothing of that kind", "leave it out")
