"""The job of training a model for a task: fine-tuning a pretrained one, or training a new one."""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from allmask.checkpoints import default_model
from allmask.data import DataFile, Record, expect_held_out
from allmask.data.columns import read_options
from allmask.data.records import reasons
from allmask.errors import UsageError
from allmask.files import sha256
from allmask.model import Model, Outline, load
from allmask.nn.attention import Attention
from allmask.nn.dropout import Dropout
from allmask.options import FinetuneOptions, TaskOptions
from allmask.registry import TASKS
from allmask.runs.average import take_mean
from allmask.runs.folder import save_model
from allmask.runs.fresh import Fresh
from allmask.runs.options import part_of
from allmask.runs.plan import Job, Plan
from allmask.tasks.common.auxiliary import Auxiliary, general_texts
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder, to_dict
from allmask.training import Result, Workload

log = logging.getLogger("allmask")
FEWEST = 100  # records of which some are held out
UNKNOWN = 0.1  # share of unknown tokens that is worth a warning
SCRIPT = 100  # records that show the script of the texts
FROZEN_RATE = 1e-3  # heads alone take a higher learning rate than the body would


@dataclass(frozen=True)
class Records:
    """The records of a run, and the task with everything that depends on the data."""

    train: list[Record]
    held_out: list[Record]
    skipped: Counter[str]
    task: Any
    checksums: dict[str, str]
    general: Sequence[str] = ()  # the documents of --lm-text


@dataclass(frozen=True)
class FineTuning(FinetuneOptions, Job):
    """Starts from a pretrained `model`, by default a bundled one, or from a `fresh` one."""

    task: Any = field(default_factory=lambda: TASKS["title"]())
    fresh: Fresh | None = None

    def __post_init__(self):
        if self.prune is None and (self.task.prunes_from is None or self.lm_text is not None):
            object.__setattr__(self, "prune", False)
        super().__post_init__()
        if self.model is not None and self.fresh is not None:
            raise UsageError("a run begins with a model or with a preset", "name one of them")
        if self.model is None and self.fresh is None and not self.task.has_default_model:
            hint = f"name one, or train a new one: allmask train --task {self.task.name}"
            raise UsageError(f"--task {self.task.name} has no default model", hint)

    @property
    def several(self) -> bool:
        return self.seeds > 1 or self.search

    @property
    def open_settings(self) -> frozenset[str]:
        return self.task.open_settings | (self.fresh.open_settings if self.fresh else frozenset())

    # ---- options -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        kind = TASKS[values.get("task", "title")]
        fresh = None if values.get("preset") is None else Fresh(**part_of(values, Fresh))
        return cls(**part_of(values, FinetuneOptions), task=kind(**part_of(values, kind)), fresh=fresh)

    def options(self) -> dict[str, Any]:
        own = {name: value for name, value in super().options().items() if name not in ("task", "fresh")}
        new = {} if self.fresh is None else asdict(self.fresh)
        return own | new | to_dict(self.task)

    # ---- data and model ------------------------------------------------------------------------------------

    def read(self, plan: Plan, out: Path, quiet: bool) -> Records:
        return self.records()

    def records(self) -> Records:
        skipped: Counter[str] = Counter()
        expect_held_out([self.data], [self.eval] if self.eval else [])
        data, held_out = self.files()
        task, train, others = self.task.read_data(data, held_out, self.on_bad_record, skipped)
        how = ""
        if held_out is None and len(train) < FEWEST:
            how = f" (fewer than {FEWEST} records; name others with --eval)"
        elif held_out is None and self.held_out:
            train, others = divided(train, self.held_out, task.unit)
            how = f" ({self.held_out:.0%} of the inputs, by their hash: --held-out, or name a file with --eval)"
        log.info("data: %s to learn from, %s held out%s", f"{len(train):,}", f"{len(others):,}", how)
        if skipped:
            log.info("skipped records: %s", reasons(skipped))
        files = {"data": self.data, "eval": self.eval, "lm_text": self.lm_text}
        checksums = {name: sha256(file) for name, file in files.items() if file}
        general = general_texts(self.lm_text, self.encoding, self.on_bad_record) if self.lm_text else ()
        return Records(train, others, skipped, task, checksums, general)

    def files(self) -> tuple[DataFile, DataFile | None]:
        """Return the files of --data and --eval."""
        data = read_options(self.data, self.columns, self.encoding, self.label_names)
        return data, replace(data, path=Path(self.eval)) if self.eval else None

    def checksums(self, data: Records) -> dict[str, str]:
        return data.checksums

    def begin(self, plan: Plan, data: Records) -> tuple[Plan, Model]:
        seed = plan.settings.seed
        task = data.task
        if self.fresh is None:
            start = ModelFolder.open(self.model or self._default_model(data))
            plan = replace(plan, job=replace(self, model=start.source))
            task, model = task.from_start(start, data.train, plan.settings), start.model
            texts = sample_texts(task, data.train)
            if (share := unknown_share(model, texts)) > UNKNOWN:
                usual = default_model(texts)
                other = "" if usual == start.source else f"; {usual} may know them"
                log.warning("%.0f%% of the tokens are unknown to %s%s", 100 * share, start.source, other)
        else:
            model = self.fresh.model(data.train, seed)
            tokens, size = f"{model.config.vocab_size:,}", sum(weight.numel() for weight in model.parameters())
            log.info("a new %s: %s tokens, %.1fM parameters", self.fresh.preset, tokens, size / 1e6)
        plan = plan.job.settled(plan, task, model, data.train)  # type: ignore[attr-defined]
        if self.several:  # each run has a head of its own
            return plan, model
        job: Self = plan.job  # type: ignore[assignment]
        model = job.task.prepare(model, data.train, seed, bool(job.prune), self.lm_weight > 0)
        Auxiliary.of(model, self.lm_weight, seed)  # refuses a tokenizer that it cannot use
        return plan, model

    def _default_model(self, data: Records) -> str:
        name = default_model(sample_texts(data.task, data.train))
        log.info("model: %s, by the script of the texts", name)
        return name

    def settled(self, plan: Plan, task: Any, model: Model, records: Sequence[Record]) -> Plan:
        """Return the plan with all settings chosen, for a task that is fitted to the model."""
        task = task.fitted(model)
        chosen = task.suggested_settings(model, records) if plan.open else {}
        chosen |= {"lr": FROZEN_RATE, "layer_decay": None} if self.freeze else {}
        chosen |= self.fresh.suggested_settings(model, records, plan.settings) if self.fresh and plan.open else {}
        taken = {name: chosen[name] for name in plan.open}
        settings = replace(plan.settings, **taken)
        why = getattr(task, "suggests", {}) | (self.fresh.suggests if self.fresh else {})
        shown = []
        for name, value in sorted((name, f"{value:g}") for name, value in taken.items() if value is not None):
            reason = why.get(name, "").removeprefix(f"{value}, ")
            shown.append(f"{name} {value} ({reason})" if reason else f"{name} {value}")
        if shown:
            log.info("chosen for %s records: %s", f"{len(records):,}", ", ".join(shown))
        prune = len(records) >= task.prunes_from if self.prune is None else self.prune
        return Plan(replace(self, task=task, prune=prune), settings)

    def save(self, model: Model, data: Records, folder: Path) -> None:
        save_model(model, self.task, folder)

    def load(self, folder: Path, device: torch.device) -> Model:
        return load(folder).to(device)

    # ---- training ------------------------------------------------------------------------------------------

    def workload(self, plan: Plan, data: Records, model: Model, out: Path, quiet: bool) -> Workload:
        settings = plan.settings
        auxiliary = Auxiliary.of(model, self.lm_weight, settings.seed, data.general)
        work = self.task.workload(model, data.train, data.held_out, auxiliary, settings.precision)
        if not data.held_out:
            log.info("nothing is held out: the weights of the last step are kept")
        if self.freeze:
            _freeze_body(model)
            cache_features = getattr(work, "cache_features", None)
            if cache_features is not None:
                cache_features(model, settings.precision)
        return work

    def evaluation_size(self, data: Records, work: Workload) -> int:
        """Estimate it from the training records, which are encoded in the same way."""
        return round(sum(work.lengths) / len(data.train) * len(data.held_out))

    def finish(
        self, plan: Plan, data: Records, work: Workload, model: Model, result: Result, out: Path
    ) -> tuple[FineTuning, dict[str, Any]]:
        averaged = take_mean(model, work, result, out, self.average) if self.average else ()
        task = self.task.finish(model.eval(), data.held_out, out, plan.settings.precision)
        more = {"task": self.task.name, "examples": len(data.train), "skipped": dict(data.skipped)}
        return replace(self, task=task), more | ({"averaged": list(averaged)} if averaged else {})

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        words = getattr(self.task, "next_step", TaskOptions.next_step)
        return [words.format(result["final"], data=shlex.quote(str(self.eval or self.data)))]


def sample_texts(task: Any, records: Sequence[Record]) -> list[str]:
    """Return some texts of records, without their labels, to find out the script."""
    pairs = ((task.input_text(record), record.fields.get("target")) for record in records[:SCRIPT])
    return [text for pair in pairs for text in pair if isinstance(text, str)]


def unknown_share(model: Model | Outline, texts: Sequence[str]) -> float:
    """Return the share of tokens that the vocabulary lacks: a BERT for English reads little of a Chinese text."""
    tokenizer = tokenizer_of(model)
    ids = [id for text in tokenizer.encode_batch(list(texts), special=False) for id in text.ids]
    return ids.count(tokenizer.unk_id) / max(1, len(ids))


def divided(
    records: Sequence[Record], share: float, unit: Callable[[Record], str]
) -> tuple[list[Record], list[Record]]:
    """Divide records by a hash of what `unit` returns: the same on every machine, and equal units stay together."""
    parts: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        digest = hashlib.blake2b(unit(record).encode(), digest_size=8).digest()
        parts[int.from_bytes(digest) < share * 2**64].append(record)
    return parts if parts[0] else (list(records), [])


def _freeze_body(model: Model) -> None:
    """Let only the heads train. Without dropout the body's output for a text is always the same and can be cached."""
    model.body.requires_grad_(False)
    for module in model.body.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        elif isinstance(module, Attention):
            module.dropout = 0.0
