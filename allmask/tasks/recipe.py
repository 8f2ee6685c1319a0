"""A recipe: all that a pretraining run is told, flat as it stands in config.yaml and on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from allmask.config import PRESETS, Config
from allmask.errors import UsageError
from allmask.objectives import Mixed, Mixture, Vocabulary
from allmask.tasks import values as flat
from allmask.tasks.shapes import shaped
from allmask.text import Tokenizer
from allmask.training.settings import Settings, as_plain

DEFAULTS = Settings(batch_tokens=8192, schedule="cosine", betas=(0.9, 0.98))
RATES = {"permutation": 2e-4}  # learnt alone; with 7e-4 all hidden states of a bert-small became the same
PRESET, PAIR_PRESET = "bert-small", "transformer-small"
STACKS = tuple(name for name, make in PRESETS.items() if not make().decoder_layers)
TWO_STACKS = tuple(name for name in PRESETS if name not in STACKS)
_STREAMED = {"causal", "reverse"}  # these take rows as they are cut out of a stream of documents
_OPTIONS = {  # of ours: what the objectives call it, and which of them have it
    "mask_share": ("share", ("mlm", "nsp", "unilm")),
    "whole_words": ("whole_words", ("mlm", "nsp")),
    "ngrams": ("ngrams", ("mlm", "nsp", "unilm")),
    "unilm_weights": ("weights", ("unilm",)),
}


@dataclass(frozen=True)
class Recipe:
    """A new model, of a preset's shape with a `tokenizer`, or a `model` to go on with, learns `objective` from `data`.

    Saved, files are named by absolute paths, so that a run can be resumed from anywhere.
    """

    data: tuple[str, ...]
    objective: str = "mlm"  # several with weights: mlm:0.5,causal:0.5
    eval: tuple[str, ...] = ()
    held_out: float = 0.01  # the share of the documents that is, without `eval`
    tokenizer: str | None = None
    model: str | None = None
    preset: str | None = None
    layers: int | None = None  # these five instead of the preset's
    width: int | None = None
    heads: int | None = None
    inner: int | None = None
    max_positions: int | None = None
    length: int = 128  # tokens of a row, its [CLS] and [SEP] among them
    across: bool = False  # rows run across documents, all of them full
    verbatim: bool = False
    text_field: str = "text"
    on_bad_record: str = "stop"
    mask_share: float | None = None
    whole_words: bool = False
    ngrams: tuple[float, ...] = ()
    unilm_weights: tuple[float, ...] = ()
    settings: Settings = field(default=DEFAULTS)

    def __post_init__(self):
        self._check_rows()
        self._check_options()
        self._check_start()

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture.parse(self.objective)

    @cached_property
    def frame(self) -> int:
        """How many tokens at most are put around a row."""
        return 0 if self.across and self.mixture.shares.keys() <= _STREAMED else self.mixture.frame

    # ---- checks --------------------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        if not self.data:
            raise UsageError("no data was named", "name text files or folders of them with --data")
        if not 0.0 <= self.held_out < 1.0:
            raise UsageError(f"held_out is {self.held_out}; expected 0 <= held_out < 1")
        if self.length <= max(1, self.frame):
            raise UsageError(f"length is {self.length}; {self.mixture} needs {max(1, self.frame) + 1} at least")
        if self.on_bad_record not in ("stop", "skip"):
            raise UsageError(f"on_bad_record is {self.on_bad_record!r}; expected stop or skip")
        if self.across and "nsp" in self.mixture.shares:
            raise UsageError("nsp needs rows within documents", "leave --across out")

    def _check_options(self) -> None:
        for name, (_, owners) in _OPTIONS.items():
            if getattr(self, name) and not set(owners) & set(self.mixture.shares):
                raise UsageError(f"{name} is for {', '.join(owners)}, not for {self.mixture}", "leave it out")

    def _check_start(self) -> None:
        if self.model is not None:
            given = [name for name in ("tokenizer", "preset", *_SHAPE) if getattr(self, name) is not None]
            if given:
                told = ", ".join(given)
                raise UsageError(f"{self.model} has a shape and a tokenizer of its own, so no {told} can be given")
            return
        if self.tokenizer is None:
            raise UsageError(
                "no tokenizer was named",
                f"train one: allmask tokenizer train {self.data[0]} --size 8000 --out tok/ and pass --tokenizer tok/\n"
                "or go on with a model that has one: --from MODEL",
            )
        known = TWO_STACKS if self.mixture.pairs else STACKS
        if self.preset is not None and self.preset not in known:
            close = get_close_matches(self.preset, known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"preset is {self.preset!r}", f"{hint}for {self.mixture} there are: {', '.join(known)}")

    # ---- what it makes -------------------------------------------------------------------------------------

    def build(self, tokenizer: Tokenizer) -> Mixed:
        """What makes batches; a tokenizer that lacks what it needs is refused."""
        return self.mixture.build(Vocabulary.of(tokenizer), {name: self._options(name) for name in self.mixture.shares})

    def _options(self, objective: str) -> dict[str, Any]:
        asked = {theirs: getattr(self, ours) for ours, (theirs, owners) in _OPTIONS.items() if objective in owners}
        streamed = {"framed": False} if self.across and objective in _STREAMED else {}
        return {name: value for name, value in asked.items() if value} | streamed

    def shape(self, tokenizer: Tokenizer) -> Config:
        """The preset's, but for what was asked for; heads and inner follow from another width."""
        preset = self.preset or self._preset
        given = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        given = {"max_positions": max(PRESETS[preset]().max_positions, self.length)} | given
        rows = Vocabulary.of(tokenizer).rows if "span" in self.mixture.shares else tokenizer.size
        return shaped(preset, tokenizer, given, rows)

    @property
    def _preset(self) -> str:
        return PAIR_PRESET if self.mixture.pairs else PRESET

    def fitted(self, config: Config) -> Config:
        """The shape with the mask that is its own after this: causal where nothing else is learnt."""
        if config.reach < self.length:
            raise UsageError(f"rows of {self.length} tokens have no room in {config.reach} positions", "lower --length")
        if self.mixture.pairs != bool(config.decoder_layers):
            told = "an encoder–decoder" if self.mixture.pairs else "a single stack"
            raise UsageError(f"{self.mixture} is for {told}", "take another model, or another --objective")
        if config.family == "elmo" and self.mixture.shares.keys() != {"causal", "reverse"}:
            raise UsageError(f"an elmo does not learn {self.mixture}", "its objective is causal,reverse: one each way")
        if "nsp" in self.mixture.heads and config.family != "bert":
            raise UsageError(f"nsp cannot be learnt by a {config.family}", "take a BERT, or leave nsp out")
        if config.segments == 1 and set(self.mixture.shares) & {"nsp", "prefix", "unilm"}:
            raise UsageError(f"{self.mixture} needs two segments; this model has one", "take another model")
        causal = config.family == "gpt2" or set(self.mixture.shares) == {"causal"}
        return replace(config, own_mask="causal" if causal else "bidirectional")

    # ---- in and out ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        named = {name: flat.plain(getattr(self, name)) for name in _OWN}
        if self.model is None:
            named["preset"] = self.preset or self._preset
        for name in ("tokenizer", "model"):
            named[name] = flat.absolute(named[name])
        for name in ("data", "eval"):
            named[name] = [flat.absolute(path) for path in named[name]]
        return {**named, **as_plain(self.settings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> Recipe:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = {name: flat.typed(name, value, _TYPES, where) for name, value in values.items()}
        usual = {"lr": _rate(values["objective"])} if "objective" in values else {}
        settings = replace(DEFAULTS, **usual | flat.part(values, Settings))
        return cls(**{"data": (), **flat.part(values, cls, _OWN)}, settings=settings)

    def differences(self, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict this recipe."""
        return flat.differences(self.to_dict(), given, _TYPES, ("data", "eval", "tokenizer", "model"))


def _rate(objective: str) -> float:
    """The learning rate, where none is given."""
    learnt = [*Mixture.parse(objective).shares]
    return RATES.get(learnt[0], DEFAULTS.lr) if len(learnt) == 1 else DEFAULTS.lr


_SHAPE = ("layers", "width", "heads", "inner", "max_positions")
_OWN = tuple(entry.name for entry in fields(Recipe) if entry.name != "settings")
_TYPES = {
    **{name: kind for name, kind in get_type_hints(Recipe).items() if name in _OWN},
    **get_type_hints(Settings),
}
