"""Titles and translations: a source text, and a target to be written for it (UniLM, arXiv 1905.03197).

Any pair of texts fits, by a BERT under the prefix mask or by an encoder–decoder. The two tasks differ in what is usual:
a translation may repeat itself, is trained with smoothed labels, and is scored by BLEU as sacrebleu counts it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from allmask.data import NO_LABEL, Batch, Checker, Example, Record, pack, packs, read_records, text
from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.options import ENCODER_DECODER as PAIR
from allmask.options import TitleOptions, TranslateOptions
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.evaluation import Evaluation, Table, shortened
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.common.writing import Prompts, Written, expect_frequencies, pair_writer, tokenizer_of, writer_for
from allmask.tasks.metrics.text import (
    bleu_stderr,
    is_chinese,
    lead_sentence,
    mean_rouge,
    rouge,
    rouge_of_each,
    score_texts,
    score_translations,
    signatures,
)
from allmask.tasks.task import ModelFolder, Task
from allmask.text import Tokenizer, propose_keep_tokens, truncate_tokens
from allmask.training import Score, mean_loss, standard_error

log = logging.getLogger("allmask")
FIELDS = {"source": text, "target": text}
SOURCE_MASKS = {"prefix": Mask.bidirectional, "naive": Mask.causal}  # how the source reads itself
NO_REPEAT = 3  # beams of a young model like to say a thing again: with this rule they gain 3 points of ROUGE-L
WORTH_PRUNING = 0.8  # prune the vocabulary if less than this share of it is used
SMOOTHING = 0.1
BEST = ("bleu", "loss")  # what may choose the best weights
TIE = 1e-4  # what a point of chrF weighs beside one of BLEU, which is 0 where no target has four words
JUDGED = 200  # records that are translated at each evaluation; the loss is that of all
COLUMNS = {
    "rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "chrf": "chrF", "exact": "exact", "length": "length",
}  # fmt: skip


class Seq2Seq(Task):
    """What both tasks share: how records become rows, how a model learns from them and writes."""

    max_source: int
    max_target: int
    truncate: str
    mask: str
    no_repeat_ngram: ClassVar[int] = 0

    def fitted(self, model: Model) -> Self:
        """The same with a source that leaves room for the target in the model's positions."""
        _specials(tokenizer_of(model))
        made: Any = self
        if model.config.decoder_layers:
            reach = model.config.max_length
            fits = {"max_source": min(self.max_source, reach - 2), "max_target": min(self.max_target, reach - 1)}
            return replace(made, mask=PAIR, **fits)
        room = model.config.max_positions - self.max_target - 3  # [CLS], [SEP], [SEP]
        if room < 1:
            raise UsageError(
                f"a target of {self.max_target} tokens leaves no room in {model.config.max_positions} positions",
                "choose a smaller --max-target",
            )
        mask = "prefix" if self.mask == PAIR else self.mask  # it was saved for a model of two stacks
        return replace(made, max_source=min(self.max_source, room), mask=mask)

    # ---- reading -------------------------------------------------------------------------------------------

    def read(self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None) -> list[Record]:
        return list(read_records(path, FIELDS, on_bad_record, skipped))

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Self, list[Record], list[Record]]:
        train = self.read(data, on_bad_record, skipped)
        return self, train, self.read(held_out, on_bad_record, skipped) if held_out else []

    def fields(self, targets: bool) -> dict[str, Checker]:
        return dict(FIELDS) if targets else {"source": text}

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> Prompts:
        """[CLS] source [SEP] of each: what is there before anything is written."""
        encoded = _ids(tokenizer, sources)
        cut = sum(len(ids) > self.max_source for ids in encoded)
        return Prompts([self._prompt(ids, tokenizer) for ids in encoded], cut)

    def _prompt(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        begin, end = _specials(tokenizer)
        return [*begin, *truncate_tokens(ids, self.max_source, self.truncate), end]

    def examples(self, tokenizer: Tokenizer, records: Sequence[Record], start: int | None = None) -> list[Example]:
        """`start` is what a decoder reads first, if it is not what the tokenizer would say."""
        sources = _ids(tokenizer, [record.fields["source"] for record in records])
        targets = _ids(tokenizer, [record.fields["target"] for record in records])
        for name, rows, limit in (("sources", sources, self.max_source), ("targets", targets, self.max_target)):
            cut = sum(len(ids) > limit for ids in rows)
            if cut:
                log.info("%s of %s %s are cut to %s tokens", f"{cut:,}", f"{len(rows):,}", name, limit)
        prompts = (self._prompt(ids, tokenizer) for ids in sources)
        pairs = zip(prompts, targets, strict=True)
        return [self._example(prompt, target, tokenizer, start) for prompt, target in pairs]

    def _example(self, prompt: list[int], target: list[int], tokenizer: Tokenizer, start: int | None) -> Example:
        """[CLS] source [SEP] target [SEP], segments 0 and 1; each position before a target token must predict it."""
        if self.mask == PAIR:
            written = [*target[: self.max_target], _specials(tokenizer)[1]]
            first = tokenizer.start_id if start is None else start
            assert first is not None
            return Example.pair(prompt, [first, *written[:-1]], written)
        ids = np.array([*prompt, *target[: self.max_target], _specials(tokenizer)[1]])
        is_target = np.arange(len(ids)) >= len(prompt)
        labels = np.where(np.append(is_target[1:], False), np.roll(ids, -1), NO_LABEL)
        return Example(ids, self.mask_of(torch.from_numpy(is_target)[None]).order[0].numpy(), is_target, labels)

    def mask_of(self, is_target: torch.Tensor) -> Mask:
        return Mask.causal(torch.ones_like(is_target)) if self.mask == "naive" else Mask.prefix(is_target)

    # ---- writing -------------------------------------------------------------------------------------------

    def sized(self, max_new: int | None) -> Self:
        """The source keeps its room, however much is written."""
        return self

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """Greedy unless `changes` say otherwise; no special token is written but the [SEP] that ends a target."""
        tokenizer = tokenizer_of(model)
        sep = _specials(tokenizer)[1]
        nameless = range(tokenizer.size, model.config.vocab_size)
        banned = (*sorted(tokenizer.special_ids - {sep}), *nameless)
        rules = {"end": (sep,), "banned": banned, "max_new": self.max_target + 1}
        return Decoding(**{**rules, "no_repeat_ngram": self.no_repeat_ngram, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        if self.mask == PAIR:
            return pair_writer(model, precision)
        return writer_for(model, precision, SOURCE_MASKS[self.mask])

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        """For each source its n-best targets with their hypotheses, in the order given, by the model as it is now."""
        generator = TextGenerator(model, self, None, writer)
        return generator.search(sources, settings or self.decoding(model), batch)

    def predictor(self, model: Model, precision: str = "auto") -> TextGenerator:
        return TextGenerator(model, self.fitted(model), precision)

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """The scores of what was written and of what it is compared with, by name."""
        raise NotImplementedError

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int = 0) -> Evaluation:
        scores = self.score(written, records)
        columns = {name: label for name, label in COLUMNS.items() if name in scores["model"]}
        rows = [[name, *(f"{some[column]:.1f}" for column in columns)] for name, some in scores.items()]
        rows.append(["reference", *[""] * (len(columns) - 1), f"{scores['model']['reference_length']:.1f}"])
        table = Table(["", *columns.values()], rows)
        if not show:
            return Evaluation(len(records), {"scores": scores}, [table])
        examples = _extremes(records, written, show)
        lines = [[f"{name}:", *(line for row in some for line in _lines(row))] for name, some in examples.items()]
        return Evaluation(len(records), {"scores": scores, "examples": examples}, [table], examples=lines)

    # ---- learning ------------------------------------------------------------------------------------------

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = True, language: bool = True
    ) -> Model:
        """A model that can write: with a language model head in any case, and a vocabulary as large as needed."""
        fresh = model.lm_head is None
        if fresh:
            log.info("the checkpoint has no language model head; one is made from the token embedding")
        model = model.without("task").with_language_model(torch.Generator().manual_seed(seed))
        model = _pruned(model, records) if prune else model
        if fresh:
            expect_frequencies(model, _counts(model, [record.fields["target"] for record in records]))
        return model

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> Seq2SeqWorkload:  # fmt: skip
        """Targets of held-out records are written by the model as it is, whatever the precision of training."""
        tokenizer, start = tokenizer_of(model), model.config.start_token
        examples = self.examples(tokenizer, records, start)
        others = self.examples(tokenizer, held_out, start)
        return Seq2SeqWorkload(examples, self.evaluator(list(held_out), others) if held_out else None, auxiliary)

    def evaluator(self, records: list[Record], examples: list[Example]) -> Callable[[Model], Score]:
        """Evaluates a model during training, on held-out records and their rows."""
        raise NotImplementedError


@dataclass
class Seq2SeqWorkload:
    """What the training loop asks for: examples by number, and an evaluator."""

    examples: list[Example]
    evaluator: Callable[[Model], Score] | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(example) for example in self.examples]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        chosen = [self.examples[number] for number in numbers]
        if self.auxiliary is None:
            return pack(chosen)
        return replace(pack(chosen), also=self.auxiliary.batch([_source(one) for one in chosen], numbers, epoch))

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)

    def cache_features(self, model: Model, precision: str) -> None:
        """Nothing can be reused: each target token reads its source again."""


# ---- titles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Title(TitleOptions, Seq2Seq):
    """The task as it is saved with a model: how texts become ids, and which mask reads them."""

    no_repeat_ngram: ClassVar[int] = NO_REPEAT

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Title | None:
        """Any model that reads both ways and has a language model head can be asked to write, with a warning."""
        model = opened.model if opened.saved_task is None else None
        if model is None or model.lm_head is None or model.labels is not None:
            return None
        if model.config.own_mask == "causal" or model.config.family == "xlnet":
            return None
        log.warning("%s: was not fine-tuned to write; expect nonsense", opened.source)
        return cls(max_target=min(cls.max_target, model.config.max_positions // 4))

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """The first sentence of each source is what a title must beat."""
        references = [record.fields["target"] for record in records]
        lead = [lead_sentence(record.fields["source"]) for record in records]
        return {"model": score_texts(written, references), "lead sentence": score_texts(lead, references)}

    def evaluator(self, records: list[Record], examples: list[Example]) -> TitleEvaluator:
        return TitleEvaluator(self, records, examples)


@dataclass
class TitleEvaluator:
    """Loss on the held-out records, ROUGE of the titles written for the first of them, a few to look at."""

    task: Title
    records: list[Record]
    examples: list[Example]
    written: int = 100
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        loss = mean_loss(model, packs(self.examples))
        chosen = self.records[: self.written]
        titles = [best[0][0] for best in self.task.write(model, [record.fields["source"] for record in chosen])]
        references = [record.fields["target"] for record in chosen]
        each = rouge_of_each(titles, references, is_chinese(references))
        scores, stderr = mean_rouge(each), standard_error(100 * one["rouge_l"] for one in each)
        lines = _samples(chosen[: self.shown], titles)
        return Score(scores["rouge_l"], {"loss": loss, **scores}, lines, loss=loss, stderr=stderr, metric="rouge_l")


# ---- translations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translate(TranslateOptions, Seq2Seq):
    """`max_source` and `max_target` count tokens; `best` is the metric of held-out records that chooses the weights."""

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        return {"label_smoothing": SMOOTHING}

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        return {"model": score_translations(written, [record.fields["target"] for record in records])}

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int = 0) -> Evaluation:
        """With sacrebleu's signatures: its numbers mean little without."""
        made = super().evaluation(written, records, show)
        counted = signatures([record.fields["target"] for record in records])
        notes = [f"{COLUMNS[name]}: {signature}" for name, signature in counted.items()]
        return replace(made, values={**made.values, "signatures": counted}, notes=notes)

    def evaluator(self, records: list[Record], examples: list[Example]) -> TranslateEvaluator:
        return TranslateEvaluator(self, records, examples)


@dataclass
class TranslateEvaluator:
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
        references = [record.fields["target"] for record in chosen]
        scores = score_translations(texts, references)
        metrics = {"loss": loss, "bleu": scores["bleu"], "chrf": scores["chrf"]}
        lines = _samples(chosen[: self.shown], texts)
        if self.task.best == "loss":
            return Score(-loss, metrics, lines, loss=loss)
        value, stderr = scores["bleu"] + TIE * scores["chrf"], bleu_stderr(texts, references)
        return Score(value, metrics, lines, loss=loss, stderr=stderr, metric="bleu")

    def _translations(self, model: Model, records: Sequence[Record]) -> list[str]:
        """Those of similar length together; a young model that knows no end stops soon after the longest target."""
        lengths = [int((example.labels >= 0).sum()) for example in self.examples[: len(records)]]
        order = sorted(range(len(records)), key=lambda number: len(records[number].fields["source"]))
        settings = self.task.decoding(model, max_new=min(self.task.max_target + 1, 2 * max(lengths)))
        found = self.task.write(model, [records[number].fields["source"] for number in order], settings)
        texts = {number: best[0][0] for number, best in zip(order, found, strict=True)}
        return [texts[number] for number in range(len(records))]


# ---- tokens ----------------------------------------------------------------------------------------------------


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoded.ids for encoded in tokenizer.encode_batch(list(texts), special=False)]


def _specials(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """What stands before a source, if anything does, and what ends it."""
    if tokenizer.end_id is None or (tokenizer.cls_id is None and tokenizer.pad_id is None):
        raise UsageError("this tokenizer has no [CLS] or [SEP]", "titles need a BERT-like model or an encoder–decoder")
    return [] if tokenizer.begin_id is None else [tokenizer.begin_id], tokenizer.end_id


def _source(example: Example) -> Example:
    """[CLS] source [SEP] without its target."""
    kept = example.segments == 0
    return Example(example.ids[kept], example.order[kept], example.segments[kept], np.full(kept.sum(), NO_LABEL))


def _counts(model: Model, targets: Sequence[str]) -> torch.Tensor:
    """How often each token is written."""
    tokenizer = tokenizer_of(model)
    written = [id for ids in _ids(tokenizer, targets) for id in (*ids, _specials(tokenizer)[1])]
    return torch.bincount(torch.tensor(written), minlength=model.config.vocab_size)


def _pruned(model: Model, records: Sequence[Record]) -> Model:
    if tokenizer_of(model).kind == "unigram":
        log.info("vocabulary: of a unigram all is kept, as words would be cut anew without some of it")
        return model
    texts = (value for record in records for value in record.fields.values())
    kept = propose_keep_tokens(tokenizer_of(model), texts)
    before = model.config.vocab_size
    if len(kept) > WORTH_PRUNING * before:
        return model
    pruned = model.keep_tokens(kept)
    saved = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in pruned.parameters())
    log.info("vocabulary: %s → %s tokens, −%.1fM parameters", f"{before:,}", f"{len(kept):,}", saved / 1e6)
    return pruned


# ---- examples to look at ---------------------------------------------------------------------------------------


def _samples(records: Sequence[Record], written: Sequence[str]) -> list[str]:
    """Source, reference and what was written, of as many records as there are."""
    lines = []
    for record, found in zip(records, written, strict=False):
        rows = {"source": record.fields["source"], "reference": record.fields["target"], "written": found}
        lines += [*(f"  {name:9}  {shortened(value)}" for name, value in rows.items()), ""]
    return lines


def _extremes(records: Sequence[Record], written: Sequence[str], count: int) -> dict[str, list[dict[str, Any]]]:
    """The best and the worst by ROUGE-L, each with its reference."""
    chinese = is_chinese([record.fields["target"] for record in records])
    rows = []
    for record, found in zip(records, written, strict=True):
        score = rouge([found], [record.fields["target"]], chinese)["rouge_l"]
        rows.append({"where": record.where, "rouge_l": score, "written": found, "reference": record.fields["target"]})
    rows.sort(key=lambda row: -row["rouge_l"])
    return {"best": rows[:count], "worst": rows[: -count - 1 : -1]}


def _lines(row: dict[str, Any]) -> list[str]:
    return [
        f"  {row['rouge_l']:5.1f}  {row['where']}",
        f"         {row['written']}",
        f"       = {row['reference']}",
    ]
