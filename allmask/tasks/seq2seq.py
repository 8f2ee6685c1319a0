"""Titles and translations: write a target text for a source text (UniLM, arXiv 1905.03197).

Any pair of texts fits, with a BERT under the prefix mask or with an encoder–decoder. The two tasks differ in their
defaults: a translation may repeat itself, is trained with label smoothing, and is scored by sacrebleu's BLEU.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from allmask.checkpoints import default_model
from allmask.data import (
    NO_LABEL,
    Batch,
    Checker,
    DataFile,
    Example,
    Record,
    pack,
    packs,
    plan_epoch,
    read_records,
    text,
)
from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model, Outline
from allmask.options import ENCODER_DECODER as PAIR
from allmask.options import Settings, TitleOptions, TranslateOptions
from allmask.tasks.common import writing
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.calibration import calibrated
from allmask.tasks.common.evaluation import Evaluation, Table, sample_lines
from allmask.tasks.common.generator import TextGenerator, WritingTask
from allmask.tasks.common.quoting import quotations
from allmask.tasks.common.writing import Prompts, Written, tokenizer_of
from allmask.tasks.metrics import text as metrics
from allmask.tasks.task import Lengths, ModelFolder, TaskWorkload
from allmask.text import Tokenizer, propose_keep_tokens, truncate_tokens
from allmask.text.script import is_chinese
from allmask.training import Score, StepSpec, mean_loss, standard_error

log = logging.getLogger("allmask")
FIELDS = {"source": text, "target": text}
SOURCE_MASKS = {"prefix": Mask.bidirectional, "naive": Mask.causal}  # the mask among source tokens
NO_REPEAT = 3  # beams of a model with little training repeat themselves: this rule gains 3 points of ROUGE-L
WORTH_PRUNING = 0.8  # prune the vocabulary if less than this share of it is used
SMOOTHING = 0.1
TIE = 1e-4  # weight of chrF beside BLEU, which is 0 if no target has four words
JUDGED = 200  # records that are translated at each evaluation; the loss is computed on all
QUOTED = 2  # quotations per text
FEWEST_QUOTED, MANY = 100, 20_000  # pairs, for which a model that has never written quotes first
FEW = 3_000  # pairs: with fewer, such a model writes badly; bundled ones write well already (docs/weights.md, Transfer)
SAMPLE = 1000  # pairs from which the number of tokens is estimated
STEPS, LEAST_BATCH = 50, 1024  # steps of an epoch: with fewer, batches are smaller, down to this many tokens
RATES, LARGE_RATE = ((512, 5e-4), (768, 2e-4)), 1e-4  # up to this width
LAYER_DECAY = 0.85
COLUMNS = {
    "rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "chrf": "chrF", "exact": "exact", "length": "length",
}  # fmt: skip


class Seq2Seq(WritingTask):
    """What both tasks share: how records become rows, and how a model is trained on them and writes."""

    max_source: int
    max_target: int
    truncate: str
    mask: str
    quote: int | None
    end_bias: float | None
    length_penalty: float | None
    no_repeat_ngram: int | None
    usual_score: float | None
    usual_no_repeat: ClassVar[int] = 0  # if `no_repeat_ngram` is None

    def fitted(self, model: Model | Outline) -> Self:
        """Return the task with a source that leaves room for the target in the model's positions."""
        _specials(tokenizer_of(model))
        task: Any = self
        if model.config.decoder_layers:
            longest = model.config.max_length
            limits = {"max_source": min(self.max_source, longest - 2), "max_target": min(self.max_target, longest - 1)}
            return replace(task, mask=PAIR, **limits)
        room = model.config.max_positions - self.max_target - 3  # [CLS], [SEP], [SEP]
        if room < 1:
            raise UsageError(
                f"a target of {self.max_target} tokens leaves no room in {model.config.max_positions} positions",
                "choose a smaller --max-target",
            )
        mask = "prefix" if self.mask == PAIR else self.mask  # PAIR: the task was saved with an encoder–decoder
        return replace(task, max_source=min(self.max_source, room), mask=mask)

    # ---- reading -------------------------------------------------------------------------------------------

    def read(
        self, path: Path | DataFile, on_bad_record: str = "stop", skipped: Counter[str] | None = None
    ) -> list[Record]:
        return list(read_records(path, FIELDS, on_bad_record, skipped))

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Self, list[Record], list[Record]]:
        train = self.read(data, on_bad_record, skipped)
        return self, train, self.read(held_out, on_bad_record, skipped) if held_out else []

    def fields(self, targets: bool) -> dict[str, Checker]:
        return dict(FIELDS) if targets else {"source": text}

    def lengths(self, model: Model | Outline, records: Sequence[Record]) -> list[Lengths]:
        limits = (("source", self.max_source), ("target", self.max_target))
        ids = {name: _ids(tokenizer_of(model), [record.fields[name] for record in records]) for name, _ in limits}
        return [Lengths(name, [*map(len, ids[name])], limit) for name, limit in limits]

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> Prompts:
        """Return [CLS] source [SEP] for each source."""
        encoded = _ids(tokenizer, sources)
        cut = sum(len(ids) > self.max_source for ids in encoded)
        return Prompts([self._prompt(ids, tokenizer) for ids in encoded], cut)

    def _prompt(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        begin, end = _specials(tokenizer)
        return [*begin, *truncate_tokens(ids, self.max_source, self.truncate), end]

    def examples(self, tokenizer: Tokenizer, records: Sequence[Record], start: int | None = None) -> list[Example]:
        """Tokenize records; `start` is the first token of a decoder, if it is not the tokenizer's."""
        sources = _ids(tokenizer, [record.fields["source"] for record in records])
        targets = _ids(tokenizer, [record.fields["target"] for record in records])
        for name, rows, limit in (("sources", sources, self.max_source), ("targets", targets, self.max_target)):
            cut = sum(len(ids) > limit for ids in rows)
            if cut:
                log.info("%s of %s %s are cut to %s tokens", f"{cut:,}", f"{len(rows):,}", name, limit)
        pairs = zip(sources, targets, strict=True)
        return [self._example(self._prompt(ids, tokenizer), target, tokenizer, start) for ids, target in pairs]

    def _example(self, prompt: list[int], target: list[int], tokenizer: Tokenizer, start: int | None) -> Example:
        """Return [CLS] source [SEP] target [SEP], segments 0 and 1; the label is the next target token."""
        written = [*target[: self.max_target], _specials(tokenizer)[1]]
        if self.mask == PAIR:
            first = tokenizer.start_id if start is None else start
            assert first is not None
            return Example.pair(prompt, [first, *written[:-1]], written)
        ids = np.array([*prompt, *written])
        is_target = np.arange(len(ids)) >= len(prompt)
        labels = np.where(np.append(is_target[1:], False), np.roll(ids, -1), NO_LABEL)
        return Example(ids, self.mask_of(torch.from_numpy(is_target)[None]).order[0].numpy(), is_target, labels)

    def mask_of(self, is_target: torch.Tensor) -> Mask:
        return Mask.causal(torch.ones_like(is_target)) if self.mask == "naive" else Mask.prefix(is_target)

    # ---- writing -------------------------------------------------------------------------------------------

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """Return greedy decoding, with `changes`, for the length and repetition that the task was calibrated to.

        The only special token that is written is the final [SEP].
        """
        tokenizer = tokenizer_of(model)
        sep = _specials(tokenizer)[1]
        unused = range(tokenizer.size, model.config.vocab_size)  # ids without a token
        rules = {"end": (sep,), "banned": (*sorted(tokenizer.special_ids - {sep}), *unused)}
        repeats = self.usual_no_repeat if self.no_repeat_ngram is None else self.no_repeat_ngram
        rules |= {"max_new": self.max_target + 1, "no_repeat_ngram": repeats}
        own = "length_penalty" if changes.get("beams", 1) > 1 else "end_bias"
        if getattr(self, own) is not None:
            rules[own] = getattr(self, own)
        return Decoding(**{**rules, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        if self.mask == PAIR:
            return writing.pair_writer(model, precision)
        return writing.writer_for(model, precision, SOURCE_MASKS[self.mask])

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        """Yield the n-best targets of each source with their hypotheses; the model is used as it is, not frozen."""
        return TextGenerator(model, self, None, writer).search(sources, settings or self.decoding(model), batch)

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """Return the scores of the model and of its baselines, by name."""
        raise NotImplementedError

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int = 0) -> Evaluation:
        scores = self.score(written, records)
        columns = {name: label for name, label in COLUMNS.items() if name in scores["model"]}
        rows = [[name, *(f"{values[column]:.1f}" for column in columns)] for name, values in scores.items()]
        rows.append(["reference", *[""] * (len(columns) - 1), f"{scores['model']['reference_length']:.1f}"])
        table = Table(["", *columns.values()], rows)
        if not show:
            return Evaluation(len(records), {"scores": scores}, [table])
        examples = _extremes(records, written, show)
        lines = []
        for name, found in examples.items():
            lines.append([f"{name}:"])
            for row in found:
                lines[-1] += [f"  {row['rouge_l']:5.1f}  {row['where']}", f"         {row['written']}"]
                lines[-1] += [f"       = {row['reference']}"]
        return Evaluation(len(records), {"scores": scores, "examples": examples}, [table], examples=lines)

    # ---- training ------------------------------------------------------------------------------------------

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = True, language: bool = True
    ) -> Model:
        """Return the model with a language model head and, with `prune`, a smaller vocabulary."""
        fresh = model.lm_head is None
        if fresh:
            log.info("the checkpoint has no language model head; one is made from the token embedding")
        model = model.without("task").with_language_model(torch.Generator().manual_seed(seed))
        model = _pruned(model, records) if prune else model
        if fresh:
            tokenizer = tokenizer_of(model)
            targets = _ids(tokenizer, [record.fields["target"] for record in records])
            written = torch.tensor([id for ids in targets for id in (*ids, _specials(tokenizer)[1])])
            writing.expect_frequencies(model, torch.bincount(written, minlength=model.config.vocab_size))
        return model

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> Seq2SeqWorkload:  # fmt: skip
        """Evaluations write with the model as it is; `precision` is not used."""
        tokenizer, start = tokenizer_of(model), model.config.start_token
        examples = self.examples(tokenizer, records, start)
        others = self.examples(tokenizer, held_out, start)
        evaluator = self.evaluator(list(held_out), others) if held_out else None
        rng = random.Random(0)
        quoted = [one for _ in range(self.quote or 0) for one in quotations(records, self.max_source, rng)]
        return Seq2SeqWorkload(examples, evaluator, auxiliary, self.examples(tokenizer, quoted, start))

    def evaluator(self, records: list[Record], examples: list[Example]) -> Callable[[Model], Score]:
        """Return the evaluator for held-out records and their rows."""
        raise NotImplementedError


@dataclass
class Seq2SeqWorkload(TaskWorkload):
    """The examples, in every epoch; before them, in the first epoch, `quoted`, whose numbers follow theirs."""

    examples: list[Example]
    evaluator: Callable[[Model], Score] | None = None
    auxiliary: Auxiliary | None = None
    quoted: Sequence[Example] = ()

    def __post_init__(self):
        self.lengths = [len(example) for example in self.examples]
        self.step_spec = StepSpec(plan=self._quotations_first) if self.quoted else StepSpec()

    def _quotations_first(
        self, lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
    ) -> Sequence[list[int]]:
        titles = plan_epoch(lengths, batch_tokens, seed, epoch)
        if epoch:
            return titles
        quotations = plan_epoch([len(example) for example in self.quoted], batch_tokens, seed, epoch)
        return [*([len(lengths) + number for number in numbers] for numbers in quotations), *titles]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        every = len(self.examples)
        chosen = [self.examples[number] if number < every else self.quoted[number - every] for number in numbers]
        if self.auxiliary is None:
            return pack(chosen)
        sources = []
        for one in chosen:
            source = one.segments == 0  # [CLS] source [SEP]
            labels = np.full(source.sum(), NO_LABEL)
            sources.append(Example(one.ids[source], one.order[source], one.segments[source], labels))
        return replace(pack(chosen), also=self.auxiliary.batch(sources, numbers, epoch))


# ---- titles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Title(TitleOptions, Seq2Seq):
    usual_no_repeat: ClassVar[int] = NO_REPEAT
    shortest: ClassVar[int] = 20  # tokens of a text; bundled models rarely write a good title for fewer

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Title | None:
        """Any model with a language model head that reads both ways can write, with a warning."""
        model = opened.model if opened.saved_task is None else None
        if model is None or model.lm_head is None or model.labels is not None:
            return None
        if model.config.own_mask == "causal" or model.config.family == "xlnet":
            return None
        log.warning("%s: was not fine-tuned to write; expect nonsense", opened.source)
        return cls(max_target=min(cls.max_target, model.config.max_positions // 4))

    def from_start(self, start: ModelFolder, records: Sequence[Record], settings: Settings) -> Title:
        """Choose whether to quote first: a model that has never written cannot copy words yet."""
        if self.quote is not None:
            return self
        few = FEWEST_QUOTED <= len(records) < MANY and settings.steps is None and settings.epochs >= 1
        if any(isinstance(task, WritingTask) for task in start.saved_tasks):
            log.info("%s has learnt to write, so titles come at once", start.source)
        elif few:
            log.info("%s has never written, so it quotes its texts before it learns titles (--quote)", start.source)
            if len(records) < FEW:
                better = default_model([record.fields["source"] for record in records[:SAMPLE]])
                words = "with %s pairs, %s, which has learnt to write, is probably better: leave out the model's name"
                log.info(words, f"{len(records):,}", better)
            return replace(self, quote=QUOTED)
        return replace(self, quote=0)

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """Few pairs come in smaller batches, so that there are enough steps to learn from; labels are smoothed."""
        width, pairs, tokenizer = model.config.width, len(records), tokenizer_of(model)
        sample = records[:: max(1, pairs // SAMPLE)]
        tokens = 0.0
        for name, limit in (("source", self.max_source), ("target", self.max_target)):
            lengths = (min(limit, len(ids)) for ids in _ids(tokenizer, [record.fields[name] for record in sample]))
            tokens += pairs * sum(lengths) / len(sample)
        batch = round(min(Settings.batch_tokens, max(LEAST_BATCH, tokens / STEPS)))
        return {
            "lr": next((rate for largest, rate in RATES if width <= largest), LARGE_RATE),
            "layer_decay": LAYER_DECAY if model.config.is_bert and not model.config.shared_layers else None,
            "batch_tokens": batch,
            "label_smoothing": SMOOTHING,
        }

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """The baseline is the first sentence of each source."""
        references = [record.fields["target"] for record in records]
        lead = [metrics.lead_sentence(record.fields["source"]) for record in records]
        return {
            "model": metrics.score_texts(written, references),
            "lead sentence": metrics.score_texts(lead, references),
        }

    def evaluator(self, records: list[Record], examples: list[Example]) -> TitleEvaluator:
        return TitleEvaluator(self, records, examples)

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Title:
        """Calibrate length and repetition on held-out records, and say whether the first sentence is better."""
        return calibrated(self, model, held_out)


@dataclass
class TitleEvaluator:
    """The loss on the held-out records, ROUGE of titles for the first `written` of them, and samples."""

    task: Any
    records: list[Record]
    examples: list[Example]
    written: int = 100
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        loss = mean_loss(model, packs(self.examples))
        chosen = self.records[: self.written]
        texts = self.texts(model, chosen)
        lines = _samples(chosen[: self.shown], texts)
        return self.score(texts, [record.fields["target"] for record in chosen], loss, lines)

    def texts(self, model: Model, records: Sequence[Record]) -> list[str]:
        """Write a text for each record."""
        return [best[0][0] for best in self.task.write(model, [record.fields["source"] for record in records])]

    def score(self, texts: Sequence[str], references: Sequence[str], loss: float, samples: Sequence[str]) -> Score:
        each = metrics.rouge_of_each(texts, references, is_chinese(references))
        scores, stderr = metrics.mean_rouge(each), standard_error(100 * one["rouge_l"] for one in each)
        return Score(scores["rouge_l"], {"loss": loss, **scores}, samples, loss=loss, stderr=stderr, metric="rouge_l")


# ---- translations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translate(TranslateOptions, Seq2Seq):
    has_default_model: ClassVar[bool] = False  # each of them knows one language

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        return {"label_smoothing": SMOOTHING}

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        return {"model": metrics.score_translations(written, [record.fields["target"] for record in records])}

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int = 0) -> Evaluation:
        """Add sacrebleu's signatures, without which its scores cannot be compared."""
        made = super().evaluation(written, records, show)
        counted = metrics.signatures([record.fields["target"] for record in records])
        notes = [f"{COLUMNS[name]}: {signature}" for name, signature in counted.items()]
        return replace(made, values={**made.values, "signatures": counted}, notes=notes)

    def evaluator(self, records: list[Record], examples: list[Example]) -> TranslateEvaluator:
        return TranslateEvaluator(self, records, examples)


@dataclass
class TranslateEvaluator(TitleEvaluator):
    """The loss on the held-out records, BLEU and chrF of greedy translations of the first `written` of them."""

    task: Translate
    written: int = JUDGED

    def score(self, texts: Sequence[str], references: Sequence[str], loss: float, samples: Sequence[str]) -> Score:
        scores = metrics.score_translations(texts, references)
        values = {"loss": loss, "bleu": scores["bleu"], "chrf": scores["chrf"]}
        if self.task.best == "loss":
            return Score(-loss, values, samples, loss=loss)
        value, stderr = scores["bleu"] + TIE * scores["chrf"], metrics.bleu_stderr(texts, references)
        return Score(value, values, samples, loss=loss, stderr=stderr, metric="bleu")

    def texts(self, model: Model, records: Sequence[Record]) -> list[str]:
        """Translate records; stop at twice the longest target, as a model with little training does not end."""
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
    """Return the tokens before a source, at most one, and the token that ends it."""
    if tokenizer.end_id is None or (tokenizer.cls_id is None and tokenizer.pad_id is None):
        raise UsageError("this tokenizer has no [CLS] or [SEP]", "titles need a BERT-like model or an encoder–decoder")
    return [] if tokenizer.begin_id is None else [tokenizer.begin_id], tokenizer.end_id


def _pruned(model: Model, records: Sequence[Record]) -> Model:
    if tokenizer_of(model).kind == "unigram":
        log.info("vocabulary: not pruned, as a unigram tokenizer would split words differently")
        return model
    texts = (value for record in records for value in record.fields.values())
    kept = propose_keep_tokens(tokenizer_of(model), texts, characters=True)
    before = model.config.vocab_size
    if len(kept) > WORTH_PRUNING * before:
        return model
    pruned = model.keep_tokens(kept)
    saved = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in pruned.parameters())
    log.info("vocabulary: %s → %s tokens, −%.1fM parameters", f"{before:,}", f"{len(kept):,}", saved / 1e6)
    return pruned


# ---- examples to look at ---------------------------------------------------------------------------------------


def _samples(records: Sequence[Record], written: Sequence[str]) -> list[str]:
    """Return lines with the source, the reference and the written text of each record."""
    lines = []
    for record, found in zip(records, written, strict=False):
        lines += sample_lines(source=record.fields["source"], reference=record.fields["target"], written=found)
    return lines


def _extremes(records: Sequence[Record], written: Sequence[str], count: int) -> dict[str, list[dict[str, Any]]]:
    """Return the best and the worst texts by ROUGE-L, with their references."""
    references = [record.fields["target"] for record in records]
    scores = metrics.rouge_of_each(written, references, is_chinese(references))
    rows = [
        {"where": record.where, "rouge_l": 100 * score["rouge_l"], "written": text, "reference": reference}
        for record, score, text, reference in zip(records, scores, written, references, strict=True)
    ]
    rows.sort(key=lambda row: -row["rouge_l"])
    return {"best": rows[:count], "worst": rows[: -count - 1 : -1]}
