"""The models that a server holds in memory: what each can do, and its queue.

A model is read once. What happens to its folder afterwards changes nothing until `Models.reload`, which loads all
folders anew and then exchanges the models at once; if one cannot be loaded, the old ones stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from allmask.errors import AllmaskError, CheckpointError
from allmask.files import did_you_mean
from allmask.registry import SERVED, TASKS, USES
from allmask.serve.batching import Batcher
from allmask.serve.metrics import Metrics
from allmask.serve.problems import Problem
from allmask.serve.settings import Settings, Source
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.task import ModelFolder, Predictor

log = logging.getLogger("allmask")


class Watched:
    """A writer that asks before each step whether anybody still waits, and counts steps."""

    def __init__(self, writer: Any, check: Callable[[], None], count: Callable[[int], None]):
        self.writer, self.check, self.count = writer, check, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def begin(self, prompts: Sequence[Sequence[int]]) -> Any:
        self.check()
        self.count(len(prompts))
        return self.writer.begin(prompts)

    def step(self, tokens: Any, state: Any) -> Any:
        self.check()
        self.count(len(tokens))
        return self.writer.step(tokens, state)


class ServedModel:
    """A loaded model: a predictor for each of its tasks, a queue, and a thread that computes."""

    def __init__(
        self, source: Source, settings: Settings, metrics: Metrics, tasks: Sequence[str] = (), precision: str = "auto",
        device: str = "auto",
    ):  # fmt: skip
        self.name, self.source, self.created = source.name, source, int(time.time())
        self.folder = ModelFolder.open(source.model, device)
        self.predictors = dict(_predictors(self.folder, precision, tasks))
        if not self.predictors:
            wanted = f"none of {', '.join(tasks)}" if tasks else "nothing"
            raise CheckpointError(f"{source.model}: can do {wanted} that is served", "see allmask inspect")
        found = {name: predictor.computes_in() for name, predictor in self.predictors.items()}
        self.precisions = {name: precision for name, precision in found.items() if precision}  # of each task
        log.info("%s: %s", self.name, ", ".join(f"{name} {precision}" for name, precision in self.precisions.items()))
        self.tokenizer = self.folder.model.tokenizer
        self.options: dict[Hashable, tuple[dict[str, Any], int]] = {}  # of earlier requests, see `known_options`
        metrics.limit.labels(self.name).set(settings.queue)
        self.read, self.written = (metrics.tokens.labels(self.name, way) for way in ("read", "written"))
        sizes, times = metrics.batch.labels(self.name), metrics.compute.labels(self.name)

        def observe(inputs: int, seconds: float) -> None:
            sizes.observe(inputs)
            times.observe(seconds)

        limits = settings.queue, settings.batch, settings.batch_tokens
        self.batcher = Batcher(self.name, *limits, observe, metrics.queue.labels(self.name).set)
        for predictor in {id(one): one for one in self.predictors.values()}.values():
            if isinstance(predictor, TextGenerator):
                predictor.writer = Watched(predictor.writer, self.batcher.check, self.written.inc)  # type: ignore

    def predictor(self, task: str) -> Predictor:
        if task not in self.predictors:
            does = ", ".join(self.predictors)
            raise Problem(404, f'the model "{self.name}" was not trained for "{task}"', f"it can do: {does}")
        return self.predictors[task]

    def encode(self, records: Sequence[Any]) -> list[list[Any]]:
        """Return the encoded texts of each record, by field; a list of them where a field is a list."""
        fields = [[value for value in one.fields.values() if isinstance(value, str | list)] for one in records]
        texts: list[str] = []
        for values in fields:
            texts += [text for value in values for text in (value if isinstance(value, list) else [value])]
        encoded = iter(self.tokenizer.encode_batch(texts)) if self.tokenizer else repeat(())
        return [
            [[next(encoded) for _ in value] if isinstance(value, list) else next(encoded) for value in values]
            for values in fields
        ]


def count_tokens(encoded: Sequence[Any]) -> int:
    """Return how many tokens are read for a record, encoded by `ServedModel.encode`.

    A text that goes with each item of a list, as a context does with each of its choices, is read as often.
    """
    listed = [value for value in encoded if isinstance(value, list)]
    single = sum(len(value) for value in encoded if not isinstance(value, list))
    return single * max([1, *map(len, listed)]) + sum(len(text) for value in listed for text in value)


def _predictors(opened: ModelFolder, precision: str, wanted: Sequence[str]) -> Iterator[tuple[str, Predictor]]:
    """Yield the tasks that a model was trained for, and what it can do besides; `wanted` is a choice of them."""

    def asked(name: str | None) -> bool:
        return not wanted or name in wanted

    own: dict[str, Predictor] = {}  # `generate` is the model's own way of writing, if it has one
    for name in [task.name for task in opened.saved_tasks] or list(TASKS):
        if not asked(name) and not asked(TASKS[name].use):
            continue
        try:
            predictor = opened.predictor(name, precision)
        except CheckpointError:
            if opened.saved_tasks:
                raise
            continue
        if TASKS[name].use:
            own.setdefault(TASKS[name].use, predictor)
        if predictor.served and asked(name):
            yield name, predictor
    for name in filter(asked, USES):
        try:
            yield name, own.get(name) or (SERVED.get(name) or USES[name])(opened, precision)
        except CheckpointError:
            continue


class Models(Mapping[str, ServedModel]):
    """All models by name, in the order of the command line. `load` makes one, for the first time and for a reload."""

    def __init__(self, sources: Sequence[Source], load: Callable[[Source], ServedModel], metrics: Metrics):
        self.sources, self.load, self.metrics = sources, load, metrics
        self.loaded = {source.name: load(source) for source in sources}
        self.reloading = threading.Lock()

    def __getitem__(self, name: str) -> ServedModel:
        return self.loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.loaded)

    def __len__(self) -> int:
        return len(self.loaded)

    def find(self, task: str, name: str | None) -> tuple[ServedModel, Predictor]:
        """Return the model of this name, or the first that can do the task."""
        if name is not None:
            if name not in self.loaded:
                raise Problem(404, f"there is no model {name!r}", did_you_mean(name, self.loaded))
            return self.loaded[name], self.loaded[name].predictor(task)
        if task not in TASKS and task not in USES:
            raise Problem(404, f"there is no task {task!r}", did_you_mean(task, [*TASKS, *USES]))
        for model in self.loaded.values():
            if task in model.predictors:
                return model, model.predictors[task]
        does = ", ".join(dict.fromkeys(name for model in self.loaded.values() for name in model.predictors))
        raise Problem(404, f'no model here was trained for "{task}"', f"there are: {does}")

    def reload(self) -> bool:
        """Load all models anew; whether that succeeded. Requests that the old ones have accepted are answered."""
        with self.reloading:
            try:
                fresh = {source.name: self.load(source) for source in self.sources}
            except (AllmaskError, OSError, RuntimeError) as error:
                log.error("reload: %s; the old models stay", error)
                self.metrics.reloads.labels("failed").inc()
                return False
            old, self.loaded = self.loaded, fresh
            for model in old.values():
                model.batcher.close()
            self.metrics.reloads.labels("done").inc()
            log.info("reloaded %s", ", ".join(fresh))
            return True

    def close(self) -> None:
        for model in self.loaded.values():
            model.batcher.close()


def load_models(
    given: Sequence[str], settings: Settings, tasks: Sequence[str] = (), precision: str = "auto", device: str = "auto"
) -> Models:
    """Load the models that a command line names."""
    metrics = Metrics()

    def load(source: Source) -> ServedModel:
        return ServedModel(source, settings, metrics, tasks, precision, device)

    return Models(Source.parse_all(given), load, metrics)
