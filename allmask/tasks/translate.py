"""Translation: a target for each source, by an encoder–decoder, or by any body that writes titles.

What is read, learnt and written is what titles are made of (allmask/tasks/title.py); what is usual differs: no rule
against repetition, smoothed labels, and BLEU as sacrebleu counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from allmask.data import Example, Record, packs
from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.masks import Mask
from allmask.model import Model
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.samples import samples
from allmask.tasks.scores import score_translations
from allmask.tasks.title import Title, TitleWork
from allmask.tasks.writing import Written, tokenizer_of, write
from allmask.text import Tokenizer
from allmask.training import Score, mean_loss

SMOOTHING = 0.1
BEST = ("bleu", "loss")  # what may choose the best weights
TIE = 1e-4  # what a point of chrF weighs beside one of BLEU, which is 0 where no target has four words
JUDGED = 200  # records that are translated at each evaluation; the loss is that of all


@dataclass(frozen=True)
class Translate:
    """`max_source` and `max_target` count tokens; `best` is what is asked of held-out records to choose weights."""

    max_source: int = 254
    max_target: int = 254
    truncate: str = "head"
    mask: str = "prefix"
    best: str = "bleu"
    prunes: ClassVar[bool] = False
    suited: ClassVar[frozenset[str]] = frozenset({"label_smoothing"})

    def __post_init__(self):
        if self.best not in BEST:
            raise UsageError(f"best is {self.best!r}; expected one of {', '.join(BEST)}")
        assert self.rows  # which checks the rest

    @property
    def rows(self) -> Title:
        """How records become rows."""
        return Title(self.max_source, self.max_target, self.truncate, self.mask)

    def to_dict(self) -> dict[str, Any]:
        return {"task": "translate", **asdict(self)}

    def fitted(self, model: Model) -> Translate:
        """The same within the model's positions, under the mask that its body has."""
        rows = self.rows.fitted(model)
        return replace(self, max_source=rows.max_source, max_target=rows.max_target, mask=rows.mask)

    # ---- reading -------------------------------------------------------------------------------------------

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Translate, list[Record], list[Record]]:
        _, train, others = self.rows.read_both(data, held_out, on_bad_record, skipped)
        return self, train, others

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]:
        return self.rows.prompts(tokenizer, sources)

    def examples(self, tokenizer: Tokenizer, records: Sequence[Record], start: int | None = None) -> list[Example]:
        return self.rows.examples(tokenizer, records, start)

    def mask_of(self, is_target: torch.Tensor) -> Mask:
        return self.rows.mask_of(is_target)

    # ---- writing -------------------------------------------------------------------------------------------

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """As for titles, but what a source says twice may be written twice."""
        return self.rows.decoding(model, **{"no_repeat_ngram": 0, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        return self.rows.writer(model, precision)

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        return write(self, model, sources, settings or self.decoding(model), batch, writer)

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
        return self.rows.read_back(tokenizer, tokens)

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        return {"model": score_translations(written, [record.fields["target"] for record in records])}

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        return {"label_smoothing": SMOOTHING}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = True
    ) -> Model:
        return self.rows.prepare(model, records, seed, prune, language)

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TitleWork:  # fmt: skip
        tokenizer = tokenizer_of(model)
        start = model.config.start_token
        examples = self.examples(tokenizer, records, start)
        judge = Judge(self, list(held_out), self.examples(tokenizer, held_out, start)) if held_out else None
        return TitleWork(examples, judge, auxiliary)


@dataclass
class Judge:
    """Loss on the held-out records, BLEU and chrF of what is written, greedily, for the first of them."""

    task: Translate
    records: list[Record]
    examples: list[Example]
    written: int = JUDGED
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        loss = mean_loss(model, packs(self.examples))
        chosen = self.records[: self.written]
        texts = self._translations(model, chosen)
        scores = score_translations(texts, [record.fields["target"] for record in chosen])
        told = {"loss": loss, "bleu": scores["bleu"], "chrf": scores["chrf"]}
        value = -loss if self.task.best == "loss" else scores["bleu"] + TIE * scores["chrf"]
        return Score(value, told, samples(chosen[: self.shown], texts))

    def _translations(self, model: Model, records: Sequence[Record]) -> list[str]:
        """Those of similar length together; a young model that knows no end stops soon after the longest target."""
        lengths = [int((example.labels >= 0).sum()) for example in self.examples[: len(records)]]
        order = sorted(range(len(records)), key=lambda number: len(records[number].fields["source"]))
        settings = self.task.decoding(model, max_new=min(self.task.max_target + 1, 2 * max(lengths)))
        found = self.task.write(model, [records[number].fields["source"] for number in order], settings)
        texts = {number: best[0][0] for number, best in zip(order, found, strict=True)}
        return [texts[number] for number in range(len(records))]
