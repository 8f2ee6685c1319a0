"""The job of pretraining: plain text becomes tokens on disk, rows, and batches for an objective.

runs/a/
  corpus/            the tokens of --data; corpus-eval/ has those of --eval; see allmask/data/corpus.py
  …                  and the files that every run has
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from allmask.checkpoints import resolve
from allmask.config import Config
from allmask.data import Batch, expect_held_out, plan_epoch
from allmask.data.corpus import Corpus, prepare
from allmask.data.records import reasons
from allmask.data.sentences import find_files
from allmask.data.windows import Windows
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model, load
from allmask.objectives import Draw, Mixed, Mixture, Vocabulary, losses_of
from allmask.options import CORPORA, OBJECTIVE_OPTIONS, SHAPE, STREAMED, PretrainOptions
from allmask.presets import PRESETS
from allmask.registry import OBJECTIVES, TASKS
from allmask.runs.folder import START, save_model
from allmask.runs.fresh import shaped
from allmask.runs.plan import Job, Plan
from allmask.tasks.common.writing import expect_frequencies, tokenizer_of
from allmask.tasks.continuation import FRAME, Continuation
from allmask.text import Tokenizer
from allmask.training import Result, Score, Workload
from allmask.training.progress import Progress

log = logging.getLogger("allmask")
DATA, EVAL = CORPORA
WORTH_A_BAR = 1 << 25  # bytes of text
COUNTED = 1 << 24  # tokens from which token frequencies are estimated
EVALUATED_ROWS = 256
EVALUATED_TOKENS = 2048  # per batch: small, so that an objective that draws once per batch is drawn often
COLLAPSED = 0.99  # mean cosine of hidden states at which the representation counts as collapsed
PRESET, PAIR_PRESET = "bert-small", "transformer-small"


@dataclass(frozen=True)
class Pretraining(PretrainOptions, Job):
    """Train a given `model`, or a new one with the shape of a preset and a `tokenizer`, on `data` with `objective`."""

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture.parse(self.objective)

    @cached_property
    def frame(self) -> int:
        """The number of special tokens around a row, at most."""
        return 0 if self.across and self.mixture.shares.keys() <= set(STREAMED) else self.mixture.frame

    # ---- options -------------------------------------------------------------------------------------------

    def frames(self) -> dict[str, tuple[int, bool]]:
        return {name: (OBJECTIVES[name].frame, OBJECTIVES[name].pairs) for name in self.mixture.shares}

    def options(self) -> dict[str, Any]:
        preset = self.preset or (PAIR_PRESET if self.mixture.pairs else PRESET)
        return super().options() | ({"preset": preset} if self.model is None else {})

    def build(self, tokenizer: Tokenizer) -> Mixed:
        """Create the objective, which makes batches; refuse a tokenizer without the special tokens that it needs."""
        options: dict[str, dict[str, Any]] = {name: {} for name in self.mixture.shares}
        for option, (parameter, owners) in OBJECTIVE_OPTIONS.items():
            for name in options.keys() & set(owners) if getattr(self, option) else ():
                options[name][parameter] = getattr(self, option)
        for name in options.keys() & set(STREAMED) if self.across else ():
            options[name]["framed"] = False
        return self.mixture.build(Vocabulary.of(tokenizer), options)

    # ---- the model -----------------------------------------------------------------------------------------

    def shape(self, tokenizer: Tokenizer) -> Config:
        """Return the shape of the preset with the sizes that are given."""
        preset = self.options()["preset"]
        given = {field: value for name, field in SHAPE.items() if (value := getattr(self, name)) is not None}
        given = {"max_positions": max(PRESETS[preset]().max_positions, self.length)} | given
        rows = Vocabulary.of(tokenizer).rows if "span" in self.mixture.shares else tokenizer.size
        return shaped(preset, tokenizer, given, rows)

    def fitted_shape(self, config: Config) -> Config:
        """Return the shape with the mask of the trained model, causal if that is the only objective; or refuse it."""
        if config.max_length < self.length:
            raise UsageError(
                f"rows of {self.length} tokens do not fit into {config.max_length} positions", "lower --length"
            )
        if self.mixture.pairs != bool(config.decoder_layers):
            needed = "an encoder–decoder" if self.mixture.pairs else "a single stack"
            raise UsageError(f"{self.mixture} is for {needed}", "take another model, or another --objective")
        if config.family == "elmo" and self.mixture.shares.keys() != {"causal", "reverse"}:
            raise UsageError(f"an elmo does not learn {self.mixture}", "its objective is causal,reverse")
        if "nsp" in self.mixture.heads and config.family not in ("bert", "ernie"):
            raise UsageError(f"nsp cannot be learnt by a {config.family}", "take a BERT, or leave nsp out")
        if config.segments == 1 and "nsp" in self.mixture.shares:
            raise UsageError("nsp needs two segments; this model has one", "take another model")
        causal = config.family == "gpt2" or set(self.mixture.shares) == {"causal"}
        return replace(config, own_mask="causal" if causal else "bidirectional")

    def _first_model(self, seed: int) -> tuple[Model, frozenset[str]]:
        """Return the model before its first step, and the names of its new heads."""
        rng = torch.Generator().manual_seed(seed)
        heads = self.mixture.heads
        if self.model is None:
            assert self.tokenizer is not None
            tokenizer = Tokenizer.load(resolve(self.tokenizer))
            model = Model.fresh(self.fitted_shape(self.shape(tokenizer)), heads, rng)
            model.tokenizer = tokenizer
            log.info("a new model of %s parameters", f"{sum(p.numel() for p in model.parameters()):,}")
            return model, heads
        old = load(self.model)
        tokens, rows = tokenizer_of(old).size, old.config.vocab_size
        if tokens > rows:
            raise CheckpointError(
                f"{self.model}: the tokenizer has {tokens:,} tokens, but the model has {rows:,} embeddings",
                "take a model whose tokenizer fits it",
            )
        model = Model.fresh(self.fitted_shape(old.config), heads | old.heads, rng)
        model.load_state_dict(old.state_dict(), strict=False)
        model.tokenizer = tokenizer_of(old)
        new = heads - old.heads
        if new:
            log.info("%s has no head for %s; a new one is created", self.model, ", ".join(sorted(new)))
        return model, new

    # ---- a run ---------------------------------------------------------------------------------------------

    def read(self, plan: Plan, out: Path, quiet: bool) -> TokenData:
        """Create the model, whose tokenizer is needed, and read the text. Only the tokens are written."""
        expect_held_out(*(find_files(files) if files else [] for files in (self.data, self.eval)))
        model, new = self._first_model(plan.settings.seed)
        tokenizer = tokenizer_of(model)
        self.build(tokenizer)
        corpora = read_corpora(self, tokenizer, out, quiet)
        texts = TokenData(*corpora, rows_of(self, plan.settings.seed, tokenizer, *corpora), model)
        if "span" in self.mixture.shares and Vocabulary.of(tokenizer).rows > model.config.vocab_size:
            hint = "train a tokenizer that has them: allmask tokenizer train --kind unigram"
            raise UsageError(f"{self.model}: the model has no embeddings for the sentinels that replace spans", hint)
        if "lm" in new:
            counts = np.bincount(texts.data.ids[:COUNTED], minlength=model.config.vocab_size)
            expect_frequencies(model, torch.from_numpy(counts))
        return texts

    def reopen(self, plan: Plan, out: Path, quiet: bool, trusted: bool) -> TokenData:
        """Open the stored tokens; tokenize the text again if they are damaged or gone."""
        tokenizer = Tokenizer.load(out / START)
        names = (DATA, EVAL) if self.eval else (DATA,)
        try:
            found = [Corpus.open(out / name, verify=not trusted) for name in names]
            corpora = found[0], found[1] if self.eval else None
        except DataError as error:
            log.warning("%s; reading the text again", error.message)
            corpora = read_corpora(self, tokenizer, out, quiet)
        return TokenData(*corpora, rows_of(self, plan.settings.seed, tokenizer, *corpora))

    def checksums(self, data: TokenData) -> dict[str, str]:
        found = {}
        for name, corpus in data.named.items():
            parts = sorted((file, entry["sha256"]) for file, entry in corpus.meta["files"].items())
            found[name] = hashlib.sha256(repr(parts).encode()).hexdigest()
        return found

    def begin(self, plan: Plan, data: TokenData) -> tuple[Plan, Model]:
        model, data.model = data.model, None
        assert model is not None
        return plan, model

    def save(self, model: Model, data: TokenData, folder: Path) -> None:
        save_model(model, self.task(), folder)

    def load(self, folder: Path, device: torch.device) -> Model:
        return load(folder).to(device)

    def workload(self, plan: Plan, data: TokenData, model: Model, out: Path, quiet: bool) -> RowWorkload:
        """Return the rows, with the held-out batches on the model's device."""
        work, device = data.work, next(model.parameters()).device
        if work.evaluator is None:
            log.info("nothing is held out: the weights of the last step are kept")
            return work
        moved = {name: [batch.to(device) for batch in made] for name, made in work.evaluator.batches.items()}
        return replace(work, evaluator=replace(work.evaluator, batches=moved))

    def evaluation_size(self, data: TokenData, work: Workload) -> int:
        batches = {} if data.work.evaluator is None else data.work.evaluator.batches
        return sum(batch.tokens for made in batches.values() for batch in made)

    def finish(
        self, plan: Plan, data: TokenData, work: Workload, model: Model, result: Result, out: Path
    ) -> tuple[Pretraining, dict[str, Any]]:
        corpus = data.data
        return self, {
            "objective": str(self.mixture),
            "documents": corpus.documents,
            "tokens": corpus.tokens,
            "rows": len(data.work.rows),
            "skipped": dict(_skipped(data.named.values())),
        }

    def task(self) -> Any | None:
        """Return the generation task that the objectives make possible; None if there is none."""
        learnt = self.mixture.shares
        if "causal" in learnt:
            return Continuation.within(self.length, framed=not self.across)
        if "prefix" in learnt:
            title = TASKS["title"]
            target = max(1, min(title.max_target, self.length // 2))
            return title(max(1, self.length - target - self.frame), target, truncate="tail")
        if "permutation" in learnt and self.length > FRAME + 1:
            target = min(Continuation.max_target, (self.length - FRAME) // 2)
            return Continuation.within(self.length, target, framed=True, blanks=True)
        if "reverse" in learnt:
            return Continuation.within(self.length, framed=not self.across, leftwards=True)
        return None

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        learnt, final = set(self.mixture.shares), result["final"]
        filling = [f'fill gaps with it: allmask fill {final} "… [MASK] …"'] if learnt & {"mlm", "nsp", "unilm"} else []
        writing = [f'write with it: allmask generate {final} --text "…"'] if learnt & {"causal", "prefix"} else []
        return filling + writing


# ---- text ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenData:
    """The tokens and rows of a run. `model` is only there until a new run has begun."""

    data: Corpus
    eval: Corpus | None
    work: RowWorkload
    model: Model | None = None

    @property
    def named(self) -> dict[str, Corpus]:
        """The corpora by the option that names their files."""
        return {"data": self.data} | ({} if self.eval is None else {"eval": self.eval})


def _skipped(corpora: Iterable[Corpus]) -> Counter[str]:
    """Count the records that were left out, by reason."""
    return sum((Counter(corpus.meta["skipped"]) for corpus in corpora), Counter())


def read_corpora(job: Pretraining, tokenizer: Tokenizer, out: Path, quiet: bool) -> tuple[Corpus, Corpus | None]:
    """Tokenize all files, or open the tokens that are already in the run's folder."""
    data = _tokens(job, job.data, tokenizer, out / DATA, quiet)
    held_out = _tokens(job, job.eval, tokenizer, out / EVAL, quiet) if job.eval else None
    sizes = (f"{number:,}" for number in (data.documents, data.sentences, data.tokens))
    log.info("text: %s documents, %s sentences, %s tokens", *sizes)
    skipped = _skipped(filter(None, [data, held_out]))
    if skipped:
        log.info("skipped records: %s", reasons(skipped))
    return data, held_out


def _tokens(job: Pretraining, files: Sequence[str], tokenizer: Tokenizer, folder: Path, quiet: bool) -> Corpus:
    bar = Progress(0, "reading", quiet=True)

    def show(done: int, total: int) -> None:
        bar.total, bar.quiet = total >> 20, quiet or total < WORTH_A_BAR
        bar.update(done >> 20, "MB")

    try:
        return prepare(
            files, tokenizer, folder, text_field=job.text_field, on_bad_record=job.on_bad_record,
            verbatim=job.verbatim, encoding=job.encoding, progress=show,
        )  # fmt: skip
    finally:
        bar.close()


# ---- rows ----------------------------------------------------------------------------------------------------


def rows_of(job: Pretraining, seed: int, tokenizer: Tokenizer, data: Corpus, held_out: Corpus | None) -> RowWorkload:
    """Return the training rows, with an evaluator if some are held out. Makes a batch of each objective as a check."""
    objective = job.build(tokenizer)
    rows, others = split_rows(job, seed, tokenizer, data, held_out)
    evaluator = None if others is None else Evaluator.of(job.mixture.shares, objective, others, seed)
    for one in objective.objectives:
        one.batch(rows, Draw(seed, 0, [0]))
    log.info("rows: %s to learn from, %s held out", f"{len(rows):,}", "none" if others is None else f"{len(others):,}")
    return RowWorkload(objective, rows, seed, job.frame, evaluator)


def split_rows(
    job: Pretraining, seed: int, tokenizer: Tokenizer, data: Corpus, held_out: Corpus | None
) -> tuple[Windows, Windows | None]:
    """Return the training rows, and those of --eval or of a share of the documents."""

    def windows(corpus: Corpus) -> Windows:
        return Windows(corpus, job.length - job.frame, across=job.across, separator=tokenizer.end_id)

    rows = windows(data)
    if held_out is not None:
        return rows, windows(held_out)
    fewest = 2 if "nsp" in job.mixture.shares else 1  # documents: nsp takes half of its second sentences from another
    if not job.held_out or data.documents < 2 * fewest:
        return rows, None
    return rows.split(max(job.held_out, fewest / data.documents), seed)


@dataclass(frozen=True, eq=False)
class RowWorkload:
    """Rows of a corpus as a workload. A batch depends only on the seed, the epoch and the numbers of its rows."""

    objective: Mixed
    rows: Windows
    seed: int
    frame: int  # special tokens around a row
    evaluator: Evaluator | None = None
    evaluates_shards: ClassVar[bool] = True

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths + self.frame

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return self.objective.batch(self.rows, Draw(self.seed, epoch, numbers))

    def part(self, numbers: Sequence[int], whole: Sequence[int], epoch: int) -> Batch:
        """Return the batch of some rows of a whole batch, identical to those rows in it."""
        draw = PartDraw(self.seed, epoch, numbers, Draw(self.seed, epoch, whole))
        return self.objective.batch(self.rows, draw)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)


@dataclass(frozen=True, eq=False)
class PartDraw(Draw):
    """Random draws for a part of a batch: those per sample are its own, those per batch are those of `whole`."""

    whole: Draw

    def batch(self, name: str) -> float:
        return self.whole.batch(name)


# ---- evaluation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Computes the losses of each objective on the same held-out rows, corrupted in the same way every time."""

    shares: Mapping[str, float]
    batches: Mapping[str, Sequence[Batch]]  # of each objective

    @classmethod
    def of(cls, shares: Mapping[str, float], objective: Mixed, rows: Windows, seed: int) -> Evaluator:
        chosen = np.unique(np.linspace(0, len(rows) - 1, EVALUATED_ROWS).astype(np.int64))
        plan = [chosen[numbers] for numbers in plan_epoch(rows.lengths[chosen], EVALUATED_TOKENS, seed, 0)]
        draws = [Draw(seed, 0, numbers) for numbers in plan]
        return cls(shares, {one.name: [one.batch(rows, draw) for draw in draws] for one in objective.objectives})

    def __call__(self, model: Model) -> Score:
        """Evaluate. `loss`, the sum of the objectives' losses by their shares, chooses the best checkpoint."""
        sums: dict[str, float] = {}
        counts: Counter[str] = Counter()
        whole = 0.0
        for name, share in self.shares.items():
            found, targets = _summed_losses(model, self.batches[name])
            whole += share * sum(found[loss] / max(1, targets[loss]) for loss in found)
            sums |= {loss: sums.get(loss, 0.0) + value for loss, value in found.items()}
            counts.update(targets)
        means = {name: sums[name] / max(1, counts[name]) for name in sums}
        cosine = mean_cosine(model, next(iter(self.batches.values()))[0])
        metrics = {"loss": whole, **{f"loss_{name}": mean for name, mean in means.items()}, "mean_cosine": cosine}
        if "causal" in means:
            metrics["perplexity_causal"] = math.exp(min(means["causal"], 700.0))
        if "nsp" in self.batches:
            metrics["accuracy_nsp"] = nsp_accuracy(model, self.batches["nsp"])
        warnings = [
            f"warning: the representation has collapsed: the mean cosine of the tokens' hidden states is {cosine:.3f}",
            "  if it stays so, start again with a smaller --lr or a longer --warmup",
        ]
        return Score(-whole, metrics, loss=whole, warnings=warnings if cosine >= COLLAPSED else ())


def mean_cosine(model: Model, batch: Batch) -> float:
    """Mean pairwise cosine of the hidden states of tokens; 1.0 means the representation collapsed."""
    hidden = model.body.forward_at(batch.mask.valid, batch.ids, batch.mask, batch.segments)
    return float(F.normalize(hidden.float(), dim=-1).mean(0).square().sum())


def _summed_losses(model: Model, batches: Sequence[Batch]) -> tuple[dict[str, float], Counter[str]]:
    """Return the summed losses by name, and the number of their targets."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for batch in batches:
        for name, (loss, targets) in losses_of(model, batch).items():
            sums[name] = sums.get(name, 0.0) + loss.item()
            counts[name] += targets
    return sums, counts


def nsp_accuracy(model: Model, batches: Sequence[Batch]) -> float:
    """Return the share of correct next-sentence predictions."""
    right = total = 0
    for batch in batches:
        assert batch.relations is not None
        first = batch.mask.position == 0
        hidden = model.body.forward_at(first, batch.ids, batch.mask, batch.segments)
        predicted = model.head("nsp_head")(model.head("pooler")(hidden)).argmax(-1)
        right += int((predicted == batch.relations[batch.mask.group[first]]).sum())
        total += len(batch.relations)
    return right / total
