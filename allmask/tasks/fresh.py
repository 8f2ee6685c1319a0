"""A model that is to be trained from nothing: the shape of a preset, and a vocabulary, given or learnt from the data.

What suits such a training are the settings of the 2017 Transformer (arXiv 1706.03762): Adam with 0.9, 0.98 and 1e-9, no
decay, smoothed labels, and a rate that rises for 4,000 steps to width^-0.5 · 4000^-0.5 and falls with 1/√step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import torch

from allmask.config import PRESETS, Config
from allmask.data import Record
from allmask.errors import UsageError
from allmask.model import Model
from allmask.tasks import values as flat
from allmask.tasks.shapes import shaped
from allmask.text import Tokenizer, train_on
from allmask.training.schedule import noam
from allmask.training.settings import Settings

WARMUP, SHARE = 4000, 0.1  # steps of the warm-up; in a short run, this share of it
KNOWN = tuple(name for name, make in PRESETS.items() if make().decoder_layers or make().family == "bert")
USUAL = {  # settings, where none are given
    "epochs": 20.0,
    "schedule": "inverse-root",
    "weight_decay": 0.0,
    "betas": (0.9, 0.98),
    "epsilon": 1e-9,
    "label_smoothing": 0.1,
}
SAMPLE = 1000  # records, by which the tokens of all are estimated
_SHAPE = ("layers", "width", "heads", "inner")


@dataclass(frozen=True)
class Fresh:
    """With a `tokenizer`, a folder or file, its vocabulary is taken; otherwise one of `vocabulary` pieces is made."""

    preset: str = "transformer-small"
    tokenizer: str | None = None
    vocabulary: int = 8000
    layers: int | None = None  # of each stack; like the others, instead of the preset's
    width: int | None = None
    heads: int | None = None
    inner: int | None = None
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "warmup"})

    def __post_init__(self):
        if self.preset not in KNOWN:
            close = get_close_matches(self.preset, KNOWN, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"preset is {self.preset!r}", f"{hint}there are: {', '.join(KNOWN)}")
        if self.tokenizer is not None and self.vocabulary != Fresh.vocabulary:
            raise UsageError("a tokenizer has its own vocabulary", "leave out --vocabulary or --tokenizer")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokenizer": flat.absolute(self.tokenizer)}

    def model(self, records: Sequence[Record], seed: int) -> Model:
        """The model before its first step; the same for the same records and seed."""
        tokenizer = self._tokenizer(records)
        model = Model.fresh(self.shape(tokenizer), ["lm"], torch.Generator().manual_seed(seed))
        model.tokenizer = tokenizer
        return model

    def _tokenizer(self, records: Sequence[Record]) -> Tokenizer:
        """One vocabulary for sources and targets."""
        if self.tokenizer is not None:
            return Tokenizer.load(Path(self.tokenizer).expanduser())
        return train_on([text for record in records for text in record.fields.values()], "bpe", self.vocabulary)

    def shape(self, tokenizer: Tokenizer) -> Config:
        given = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        return shaped(self.preset, tokenizer, given)

    def settings(self, model: Model, records: Sequence[Record], told: Settings) -> dict[str, Any]:
        """The paper's warm-up and the rate at its end; in a run that is too short for it, a tenth of the steps."""
        steps = told.steps or told.epochs * _tokens(model, records) / (told.batch_tokens * told.accumulate)
        return {
            "lr": noam(WARMUP - 1, model.config.width, WARMUP),
            "warmup": WARMUP if steps * SHARE > WARMUP else SHARE,
        }


def _tokens(model: Model, records: Sequence[Record]) -> float:
    """About how many tokens all records have."""
    assert model.tokenizer is not None
    texts = [text for record in records[:: max(1, len(records) // SAMPLE)] for text in record.fields.values()]
    lengths = [len(encoded) for encoded in model.tokenizer.encode_batch(texts)]
    return 2 * len(records) * sum(lengths) / max(1, len(lengths))
