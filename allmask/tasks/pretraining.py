"""Pretraining as a whole: text becomes tokens on disk, rows, batches, and a model; resumed where it stopped.

runs/a/
  corpus/            the tokens of the data, and corpus-eval/ those of --eval; see allmask/data/store.py
  config.yaml        the recipe, every value resolved; checksums of the tokens
  start/             the model before its first step
  checkpoints/, metrics.jsonl      see allmask/training/runs.py
  loss.png           the loss by step
  result.json        what is printed at the end
  final/             the model; allmask.json says how it writes, if it learnt to
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allmask.data.corpus import Corpus, prepare
from allmask.data.documents import find_files
from allmask.data.windows import Windows
from allmask.errors import CheckpointError, DataError, ResourceError, UsageError
from allmask.model import Model, load
from allmask.objectives import Draw, Mixed, Vocabulary
from allmask.tasks.continuation import FRAME, Continuation
from allmask.tasks.folders import (
    CHECKSUMS,
    CONFIG,
    expect_free,
    finished_result,
    outcome,
    save_model,
    saved_values,
    write_result,
)
from allmask.tasks.parts import PartWork
from allmask.tasks.recipe import Recipe
from allmask.tasks.rows import Judge, RowWork
from allmask.tasks.saved import Task
from allmask.tasks.title import Title
from allmask.tasks.values import as_yaml
from allmask.tasks.writing import end_of, expect_frequencies, tokenizer_of
from allmask.text import Tokenizer
from allmask.training import Result, train
from allmask.training.distributed import Alone, Crew
from allmask.training.loop import ALONE
from allmask.training.plots import plot_run
from allmask.training.progress import Progress

log = logging.getLogger("allmask")
DATA, EVAL = "corpus", "corpus-eval"
_BEFORE = frozenset(f(name) for name in (DATA, EVAL) for f in (str, ".{}.lock".format, ".{}.partial".format))
UNBEGUN = _BEFORE | {"start", ".start.partial", f".{CONFIG}"}  # what a run may leave that ended before it began
WORTH_A_BAR = 1 << 25  # bytes of text
COUNTED = 1 << 24  # tokens looked at for how frequent each is


@dataclass(frozen=True)
class Texts:
    """The tokens of a run."""

    data: Corpus
    eval: Corpus | None

    @property
    def checksums(self) -> dict[str, str]:
        named = {"data": self.data, "eval": self.eval}
        return {name: _checksum(corpus) for name, corpus in named.items() if corpus is not None}

    @property
    def skipped(self) -> dict[str, int]:
        counts: dict[str, int] = dict(self.data.meta["skipped"])
        for reason, count in (self.eval.meta["skipped"] if self.eval else {}).items():
            counts[reason] = counts.get(reason, 0) + count
        return counts


def _checksum(corpus: Corpus) -> str:
    parts = sorted((name, entry["sha256"]) for name, entry in corpus.meta["files"].items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


Begun = tuple[Texts, RowWork]


def pretrain(recipe: Recipe, out: Path, quiet: bool = False, crew: Alone | Crew = ALONE) -> dict[str, Any]:
    """Start a run and see it through. Until text and model are checked, nothing is kept but the tokens of the text.

    Of a crew all processes call this; the first one makes the run's folder, which all must be able to read.
    """
    return _go_on(recipe, crew.first(lambda: _prepare(recipe, out, quiet)), out, quiet, crew)


def resume(out: Path, quiet: bool = False, crew: Alone | Crew = ALONE) -> dict[str, Any]:
    """Go on with a run that was interrupted, exactly as if it had not been; a finished one is left as it is."""
    told = crew.shared(finished_result(out))
    if told is not None:
        return told
    recipe = crew.first(lambda: saved_recipe(out)) or saved_recipe(_seen(out, crew))
    return _go_on(recipe, crew.first(lambda: _reopen(recipe, out, quiet)), out, quiet, crew)


def _prepare(recipe: Recipe, out: Path, quiet: bool) -> Begun:
    """All that comes before the first step of a run."""
    expect_free(out, UNBEGUN)
    _ = [find_files(files) for files in (recipe.data, recipe.eval) if files]  # what is not there is said first
    model, new = start_model(recipe)
    tokenizer = tokenizer_of(model)
    objective = recipe.build(tokenizer)
    texts = read_texts(recipe, tokenizer, out, quiet)
    work = work_of(recipe, objective, tokenizer, texts)
    _expect_sentinels(recipe, model)
    if "lm" in new:
        _expect_tokens(model, texts.data)
    begin(recipe, model, texts, out)
    return texts, work


def _reopen(recipe: Recipe, out: Path, quiet: bool) -> Begun:
    tokenizer = Tokenizer.load(out / "start")
    texts = _same_texts(recipe, tokenizer, out, quiet)
    return texts, work_of(recipe, recipe.build(tokenizer), tokenizer, texts)


def _join(recipe: Recipe, out: Path) -> Begun:
    """The same for another process than the first, which has just verified the tokens."""
    tokenizer = Tokenizer.load(out / "start")
    texts = _open_texts(recipe, out, verify=False)
    return texts, work_of(recipe, recipe.build(tokenizer), tokenizer, texts)


def _seen(out: Path, crew: Alone | Crew) -> Path:
    """The run's folder, if it is there for this process, too."""
    if not crew.lead and not (out / CONFIG).is_file():
        hint = "let all hosts share the file system of --out, and name it alike"
        raise ResourceError(f"{out}: process {crew.rank} on {socket.gethostname()} does not see the run there", hint)
    return out


def _go_on(recipe: Recipe, begun: Begun | None, out: Path, quiet: bool, crew: Alone | Crew) -> dict[str, Any]:
    texts, work = begun or _join(recipe, _seen(out, crew))
    model = load(out / "start").to(crew.device)  # also in a run's first session, so that all begin from the same bytes
    if work.judge is None:
        log.info("nothing is held out: the weights of the last step are kept")
    here = _on(work, crew.device)
    mine = here if crew.size == 1 else PartWork(here, crew.rank, crew.size)
    result = train(model, mine, recipe.settings, out, resume=True, quiet=quiet, crew=crew)

    def end() -> dict[str, Any]:
        whole = model
        if crew.sharded:
            whole = load(out / "start")
            whole.load_state_dict(result.weights)
        return finish(recipe, texts, work, whole, result, out)

    return crew.shared(crew.first(end)) or {}


# ---- the model -----------------------------------------------------------------------------------------------


def start_model(recipe: Recipe) -> tuple[Model, frozenset[str]]:
    """The model before its first step, and which of its heads are new."""
    rng = torch.Generator().manual_seed(recipe.settings.seed)
    heads = recipe.mixture.heads
    if recipe.model is None:
        assert recipe.tokenizer is not None
        tokenizer = Tokenizer.load(recipe.tokenizer)
        model = Model.fresh(recipe.fitted(recipe.shape(tokenizer)), heads, rng)
        model.tokenizer = tokenizer
        log.info("a new model of %s parameters", f"{sum(p.numel() for p in model.parameters()):,}")
        return model, heads
    old = load(recipe.model)
    if tokenizer_of(old).size > old.config.vocabulary:
        told = f"{tokenizer_of(old).size:,} tokens, and the model {old.config.vocabulary:,} rows for them"
        raise CheckpointError(f"{recipe.model}: the tokenizer has {told}", "take a model whose tokenizer fits it")
    model = Model.fresh(recipe.fitted(old.config), heads | old.heads, rng)
    model.load_state_dict(old.state_dict(), strict=False)
    model.tokenizer = tokenizer_of(old)
    new = heads - old.heads
    if new:
        log.info("%s has no head for %s; a new one is made", recipe.model, ", ".join(sorted(new)))
    return model, new


def _expect_sentinels(recipe: Recipe, model: Model) -> None:
    """Spans are hidden behind tokens that a model must have rows for."""
    if "span" in recipe.mixture.shares and Vocabulary.of(tokenizer_of(model)).rows > model.config.vocabulary:
        hint = "train a tokenizer that has them: allmask tokenizer train --kind unigram"
        raise UsageError(f"{recipe.model}: the model has no sentinels to hide spans behind", hint)


def _expect_tokens(model: Model, corpus: Corpus) -> None:
    counts = np.bincount(corpus.ids[:COUNTED], minlength=model.config.vocabulary)
    expect_frequencies(model, torch.from_numpy(counts))


# ---- the text ------------------------------------------------------------------------------------------------


def read_texts(recipe: Recipe, tokenizer: Tokenizer, out: Path, quiet: bool = False) -> Texts:
    """The tokens of all files, made or found in the run's folder."""
    data = _tokens(recipe, recipe.data, tokenizer, out / DATA, quiet)
    held_out = _tokens(recipe, recipe.eval, tokenizer, out / EVAL, quiet) if recipe.eval else None
    texts = Texts(data, held_out)
    sizes = (f"{number:,}" for number in (data.documents, data.sentences, data.tokens))
    log.info("text: %s documents, %s sentences, %s tokens", *sizes)
    if texts.skipped:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in texts.skipped.items())
        log.info("skipped records: %s", reasons)
    return texts


def _tokens(recipe: Recipe, files: Sequence[str], tokenizer: Tokenizer, folder: Path, quiet: bool) -> Corpus:
    bar: list[Progress] = []

    def show(done: int, total: int) -> None:
        if not bar:
            bar.append(Progress(total >> 20, "reading", quiet=quiet or total < WORTH_A_BAR))
        bar[0].update(done >> 20, "MB")

    try:
        return prepare(
            files, tokenizer, folder, text_field=recipe.text_field, on_bad_record=recipe.on_bad_record,
            verbatim=recipe.verbatim, progress=show,
        )  # fmt: skip
    finally:
        for shown in bar:
            shown.close()


def _open_texts(recipe: Recipe, out: Path, verify: bool = True) -> Texts:
    return Texts(Corpus.open(out / DATA, verify), Corpus.open(out / EVAL, verify) if recipe.eval else None)


def _same_texts(recipe: Recipe, tokenizer: Tokenizer, out: Path, quiet: bool) -> Texts:
    """The tokens a run was begun with. Stores that are whole will do; what is damaged or gone is made again."""
    try:
        texts = _open_texts(recipe, out)
    except DataError as error:
        log.warning("%s; reading the text again", error.message)
        texts = read_texts(recipe, tokenizer, out, quiet)
    then = saved_values(out).get(CHECKSUMS, {})
    for name, now in texts.checksums.items():
        if then.get(name) != now:
            files = ", ".join(getattr(recipe, name))
            raise DataError(f"{files}: changed since {out} was started", "restore the files, or start a new run")
    return texts


# ---- rows ----------------------------------------------------------------------------------------------------


def work_of(recipe: Recipe, objective: Mixed, tokenizer: Tokenizer, texts: Texts) -> RowWork:
    """Rows to learn from, and a judge where some are held out. The first batches are made here, to fail early."""
    seed, shares = recipe.settings.seed, recipe.mixture.shares
    rows, held_out = _split(recipe, tokenizer, texts)
    judge = None if held_out is None else Judge.of(shares, objective, held_out, seed)
    for one in objective.objectives:
        one.batch(rows, Draw(seed, 0, [0]))
    told = "none" if held_out is None else f"{len(held_out):,}"
    log.info("rows: %s to learn from, %s held out", f"{len(rows):,}", told)
    return RowWork(objective, rows, seed, recipe.frame, judge)


def _on(work: RowWork, device: torch.device) -> RowWork:
    """The held-out batches where the model is."""
    if work.judge is None:
        return work
    moved = {name: [batch.to(device) for batch in made] for name, made in work.judge.batches.items()}
    return replace(work, judge=replace(work.judge, batches=moved))


def _split(recipe: Recipe, tokenizer: Tokenizer, texts: Texts) -> tuple[Windows, Windows | None]:
    rows = _windows(recipe, tokenizer, texts.data)
    if texts.eval is not None:
        return rows, _windows(recipe, tokenizer, texts.eval)
    documents = texts.data.documents
    fewest = 2 if "nsp" in recipe.mixture.shares else 1  # of documents: its strangers come from another one
    if not recipe.held_out or documents < 2 * fewest:
        return rows, None
    return rows.split(max(recipe.held_out, fewest / documents), recipe.settings.seed)


def _windows(recipe: Recipe, tokenizer: Tokenizer, corpus: Corpus) -> Windows:
    length = recipe.length - recipe.frame
    return Windows(corpus, length, across=recipe.across, separator=end_of(tokenizer))


# ---- the run's folder ----------------------------------------------------------------------------------------


def begin(recipe: Recipe, model: Model, texts: Texts, out: Path) -> None:
    """Write the model as it starts, and last the recipe with nothing left open: where it is, a run has begun."""
    shutil.rmtree(out / "start", ignore_errors=True)
    save_model(model, None, out / "start")
    config = recipe.to_dict() | {CHECKSUMS: texts.checksums}
    beside = out / f".{CONFIG}"
    beside.write_text(as_yaml(config), encoding="utf-8")
    os.replace(beside, out / CONFIG)


def saved_recipe(out: Path) -> Recipe:
    """The recipe of a run that was begun."""
    values = saved_values(out)
    values.pop(CHECKSUMS, None)
    if "objective" not in values:
        raise CheckpointError(f"{out}: not a run of pretraining", "go on with it by the command that started it")
    return Recipe.from_dict(values, out / CONFIG)


def finish(recipe: Recipe, texts: Texts, work: RowWork, model: Model, result: Result, out: Path) -> dict[str, Any]:
    """Write the picture, the result and last the model: where there is a final/, the run is complete."""
    plot_run(out)
    told = outcome(result, out) | {
        "objective": str(recipe.mixture),
        "documents": texts.data.documents,
        "tokens": texts.data.tokens,
        "rows": len(work.rows),
        "skipped": texts.skipped,
    }
    write_result(told, out)
    save_model(model, task_of(recipe), out / "final")
    return told


def task_of(recipe: Recipe) -> Task | None:
    """How the model writes: it goes on with a text, with a prefix that it reads both ways, or fills in what is missing.

    None: it does not.
    """
    learnt = recipe.mixture.shares
    if "causal" in learnt:
        return Continuation.within(recipe.length, framed=not recipe.across)
    if "prefix" in learnt:
        target = max(1, min(Title.max_target, recipe.length // 2))
        return Title(max(1, recipe.length - target - recipe.frame), target, truncate="tail")
    if "permutation" in learnt and recipe.length > FRAME + 1:
        target = min(Continuation.max_target, (recipe.length - FRAME) // 2)
        return Continuation.within(recipe.length, target, framed=True, blanks=True)
    return None
