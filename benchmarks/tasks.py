"""Understanding tasks with MiniLM: fine-tuning a classifier, predicting with it, and the memory that takes.

    python benchmarks/tasks.py [--only training|predicting|memory] [--quick] [--json]

The texts are as long as the sentences of SST-2 (23 tokens on average, 3 to 67): stretches of docstrings, to be told
apart by the module they are from. Fine-tuning: our training loop itself, with its defaults (about 32 texts a step),
against transformers' `Trainer` (32 texts a step, bf16, its default collator), dropout, clipping and AdamW on both
sides; blocks of steps take turns. Predicting: from texts to labels, by the model that was fine-tuned just before; each
peer has the batch size with which it is fastest. One thread, CPU time; means over blocks, medians over rounds. Memory:
the highest resident size of `allmask predict`, as another process, with a small random model, for files of more and
more lines.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_int8
import torch
from encode import BATCHES, Ids, by_length, in_batches, padded
from texts import documentation, stretches
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)
from transformers import Trainer as TheirTrainer

import allmask
from allmask.data import Record
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.nn.init import initialize
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.common.heads import hidden_all
from allmask.training import Settings
from allmask.training.log import Metrics
from allmask.training.loop import Trainer
from allmask.training.progress import Progress

SHORTEST, LONGEST, SHAPE, SCALE = 1, 65, 3.9, 5.47  # of texts without [CLS] and [SEP]; of the gamma distribution
LABELS = ("a–i", "j–z")  # the first letter of the module that a text is from
BATCH, BLOCK = 32, 4  # texts a step; steps until it is the other's turn
TEXTS = 2000  # to predict, and as many to learn from
PARTS = ("training", "predicting", "memory")
REFERENCE = "transformers pipeline fp32"


def main() -> None:
    options = timing.arguments(__doc__, PARTS)
    parts = PARTS if options.only is None else (options.only,)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = allmask.load("minilm")
    learnt, asked = labelled_texts(start, 500 if options.quick else TEXTS)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        ours, tables = Ours(start, learnt, folder), {}
        if "training" in parts:
            tables["Fine-tuning"] = training_rows(ours, learnt, folder, 2 if options.quick else 8)
        if "predicting" in parts:
            ours.finish(30 if options.quick else 120)
            rows = predicting_rows(ours, asked, folder, 1 if options.quick else 5)
            tables[f"Predicting {len(asked):,} texts"] = rows
        if "memory" in parts:
            lines = (2_000, 20_000) if options.quick else (20_000, 200_000, 1_000_000)
            tables["Memory of allmask predict"] = memory_rows(start, folder, lines)
    about = timing.versions("transformers", "ctranslate2", "onnxruntime") | lengths_of(start, asked)
    for title, rows in tables.items():
        timing.show(title, rows, about, options.json)
        print()


# ---- texts ---------------------------------------------------------------------------------------------------


def labelled_texts(model: Model, count: int) -> tuple[list[Record], list[Record]]:
    """So many to learn from, and as many others."""
    rng = random.Random(0)
    rooms = [min(LONGEST, max(SHORTEST, round(rng.gammavariate(SHAPE, SCALE)))) for _ in range(2 * TEXTS)]
    assert model.tokenizer is not None
    found = stretches(model.tokenizer, rooms)
    records = [record(one.text, LABELS[one.module[0] > "i"]) for one in found]
    rng.shuffle(records)
    return records[:count], records[TEXTS : TEXTS + count]


def record(text: str, label: str) -> Record:
    return Record({"text": text, "text_b": None, "label": label}, "docstrings")


def texts_of(records: list[Record]) -> list[str]:
    return [one.fields["text"] for one in records]


def lengths_of(model: Model, records: list[Record]) -> dict[str, str]:
    assert model.tokenizer is not None
    sizes = sorted(map(len, model.tokenizer.encode_batch(texts_of(records))))
    return {"tokens": f"{sum(sizes):,} (mean {sum(sizes) / len(sizes):.0f}, {sizes[0]}–{sizes[-1]})"}


# ---- fine-tuning ---------------------------------------------------------------------------------------------


class Ours:
    """The training loop, step by step, with all it does in a step."""

    def __init__(self, start: Model, records: list[Record], folder: Path):
        self.task = Classify(kind="single").fitted(start)
        self.model = self.task.prepare(start, records)
        self.model.save(folder / "start")
        work = self.task.workload(self.model, records)
        settings = {"steps": 200, "eval_every": 10**6, "save_every": 10**6, "schedule": "constant", "precision": "bf16"}
        chosen = Settings(**settings, **self.task.settings(self.model, records))
        self.trainer = Trainer(self.model, work, chosen, folder, quiet=True)
        self.source = self.trainer.batches_from(0)
        self.metrics, self.bar = Metrics(folder, 0), Progress(0, "", quiet=True)
        self.tokens = 0  # learnt from so far
        self.mean = statistics.mean(work.lengths)

    def block(self) -> float:
        """Seconds of a text of the mean length: batches of short texts have more of them than those of long ones."""
        before, begin = self.tokens, time.process_time()
        for _ in range(BLOCK):
            self.trainer._one_step(self._counted(), self.metrics, self.bar)
        return (time.process_time() - begin) / (self.tokens - before) * self.mean

    def _counted(self) -> Any:
        share = next(self.source)
        self.tokens += share.batch.tokens
        return iter([share])

    def finish(self, steps: int) -> None:
        """Learn on until it knows something."""
        while self.trainer.step < steps:
            self.block()
        self.source.close()
        self.metrics.close()
        self.model.eval()


@dataclass
class Turns(TrainerCallback):
    """Between two blocks of their steps comes one of ours, and their clock stands still."""

    ours: Ours
    blocks: int
    theirs_took: list[float] = field(default_factory=list)  # seconds of a text, block by block
    ours_took: list[float] = field(default_factory=list)
    begun: float = 0.0

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step % BLOCK:
            return
        if state.global_step > BLOCK:  # the first one warms up
            self.theirs_took.append((time.process_time() - self.begun) / (BLOCK * BATCH))
            self.ours_took.append(self.ours.block())
        control.should_training_stop = len(self.theirs_took) == self.blocks
        self.begun = time.process_time()


def training_rows(ours: Ours, records: list[Record], folder: Path, blocks: int) -> list[dict[str, object]]:
    ours.block()  # warm up
    rows, mine = [], []
    for name, strategy in {"": "random", ", length groups": "group_by_length"}.items():
        turns = Turns(ours, blocks)
        their_trainer(folder, records, strategy, turns).train()
        times = statistics.mean(turns.theirs_took) / statistics.mean(turns.ours_took)
        rows.append(training_row(f"transformers Trainer bf16{name}", turns.theirs_took, f"{times:.2f}"))
        mine += turns.ours_took
    return [*rows, training_row("allmask bf16", mine, "")]


def training_row(who: str, took: list[float], times: str) -> dict[str, object]:
    one = statistics.mean(took)
    return {"who": who, "texts/s": f"{1 / one:.0f}", "ms a text": f"{1000 * one:.1f}", "allmask is faster": times}


def their_trainer(folder: Path, records: list[Record], strategy: str, turns: Turns) -> TheirTrainer:
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    encoded = tokenizer(texts_of(records), truncation=True)
    names = list(encoded)
    rows = [
        {**{name: encoded[name][n] for name in names}, "labels": LABELS.index(one.fields["label"])}
        for n, one in enumerate(records)
    ]
    settings = TrainingArguments(
        str(folder / "theirs"), per_device_train_batch_size=BATCH, num_train_epochs=100, learning_rate=1e-4,
        weight_decay=0.01, bf16=True, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, train_sampling_strategy=strategy,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(folder / "start")
    return TheirTrainer(
        model, settings, DataCollatorWithPadding(tokenizer), rows, processing_class=tokenizer, callbacks=[turns]
    )


# ---- predicting ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Texts in, the number of a label for each out; `hidden` (n, W) is what is read off the body for it."""

    labels: Callable[[], Tensor]
    hidden: Callable[[], Tensor]


def predicting_rows(ours: Ours, records: list[Record], folder: Path, rounds: int) -> list[dict[str, object]]:
    ours.model.save(folder / "model")
    texts = texts_of(records)
    gold = torch.tensor([LABELS.index(one.fields["label"]) for one in records])
    with torch.inference_mode():
        cases = pipelines(folder / "model", texts) | our_cases(ours, texts)
        cases |= ctranslate2_cases(ours, folder, texts) | onnx_cases(ours, folder, texts)
        labels = {name: case.labels() for name, case in cases.items()}
        hidden = {name: case.hidden() for name, case in cases.items()}
        times = timing.medians({name: case.labels for name, case in cases.items()}, rounds)
    base = min(taken for name, taken in times.items() if "pipeline" in name)
    alike = {name: cosine_similarity(states, hidden[REFERENCE]) for name, states in hidden.items()}
    return [
        {
            "who": name,
            "seconds": f"{times[name]:.2f}",
            "texts/s": f"{len(texts) / times[name]:,.0f}",
            "to the best pipeline": f"{base / times[name]:.2f}",
            "accuracy": f"{(labels[name] == gold).float().mean():.2%}",
            "same as fp32": f"{(labels[name] == labels[REFERENCE]).float().mean():.2%}",
            "mean cosine": f"{alike[name].mean():.4f}",
            "lowest": f"{alike[name].min():.4f}",
        }
        for name in sorted(cases, key=lambda name: -times[name])
    ]


def our_cases(ours: Ours, texts: list[str]) -> dict[str, Case]:
    def case(precision: str) -> Case:
        classifier = Classifier(ours.model, ours.task, precision)
        reading = ours.task.read(ours.model.tokenizer, ours.model.config, texts)
        return Case(
            lambda: torch.tensor([LABELS.index(one.label) for one in classifier(texts)]),
            lambda: hidden_all(classifier.frozen, reading.examples),
        )

    return {f"allmask {precision}": case(precision) for precision in ("fp32", "bf16", "int8")}


def pipelines(folder: Path, texts: list[str]) -> dict[str, Case]:
    def case(dtype: torch.dtype) -> Case:
        pipe = pipeline("text-classification", model=str(folder), device="cpu", dtype=dtype)

        def make(size: int) -> Callable[[], Tensor]:
            return lambda: torch.tensor([LABELS.index(one["label"]) for one in pipe(texts, batch_size=size)])

        def first(batch: Ids) -> Tensor:
            ids, mask = padded(batch)
            return pipe.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float()

        def hidden() -> Tensor:
            ids = pipe.tokenizer(texts)["input_ids"]
            return in_batches(first, ids, by_length(ids), BATCH)

        return Case(make(timing.fastest(make, BATCHES)), hidden)

    return {REFERENCE: case(torch.float32), "transformers pipeline bf16": case(torch.bfloat16)}


def ctranslate2_cases(ours: Ours, folder: Path, texts: list[str]) -> dict[str, Case]:
    if find_spec("ctranslate2") is None:
        return {}
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    converted = TransformersConverter(str(folder / "model")).convert(str(folder / "ctranslate2"))
    encoder = ctranslate2.Encoder(converted, compute_type="int8", inter_threads=1, intra_threads=1)

    def first(batch: Ids) -> Tensor:
        return torch.from_numpy(np.array(encoder.forward_batch(batch).last_hidden_state)[:, 0]).float()

    return {"CTranslate2 int8, sorted": sorted_case(ours, texts, first)}


def onnx_cases(ours: Ours, folder: Path, texts: list[str]) -> dict[str, Case]:
    if not onnx_int8.INSTALLED:
        return {}
    encode = onnx_int8.encoder(str(folder / "model"), folder / "onnx")

    def first(batch: Ids) -> Tensor:
        return encode(*padded(batch))[:, 0]

    return {"ONNX Runtime int8, sorted": sorted_case(ours, texts, first)}


def sorted_case(ours: Ours, texts: list[str], first: Callable[[Ids], Tensor]) -> Case:
    """Of an encoder that gives the first hidden state of texts of about one length; our head reads it, in torch."""
    tokenizer = ours.model.tokenizer
    assert tokenizer is not None

    def make(size: int) -> Callable[[], Tensor]:
        def hidden() -> Tensor:
            ids = [text.ids for text in tokenizer.encode_batch(texts)]
            return in_batches(first, ids, by_length(ids), size)

        return hidden

    hidden = make(timing.fastest(make, BATCHES))
    return Case(lambda: ours.model.answers(hidden()).argmax(-1), hidden)


# ---- memory --------------------------------------------------------------------------------------------------


def memory_rows(start: Model, folder: Path, lines: tuple[int, ...]) -> list[dict[str, object]]:
    small_model(start).save(folder / "small")
    peaks: dict[str, list[int]] = {"a jsonl file": [], "stdin": []}
    for count in lines:
        file, plain = folder / "lines.jsonl", folder / "lines.txt"
        with file.open("w") as records, plain.open("w") as texts:
            for text in short_lines(count):
                texts.write(f"{text}\n")
                records.write(json.dumps({"text": text}) + "\n")
        peaks["a jsonl file"].append(peak_of(folder, str(file), None))
        peaks["stdin"].append(peak_of(folder, "-", plain))
    return [
        {
            "from": name,
            **{f"{count:,} lines": f"{size / 1024:.0f} MB" for count, size in zip(lines, sizes, strict=True)},
            "growth": f"{(sizes[-1] - sizes[0]) / 1024:.0f} MB",
        }
        for name, sizes in peaks.items()
    ]


def small_model(start: Model) -> Model:
    config = replace(start.config, layers=2, width=64, heads=2, ffn_width=128)
    rng = torch.Generator().manual_seed(0)
    return initialize(Model(config, (), start.tokenizer), config.init_std, rng).with_labels(
        Labels("single", LABELS), rng
    )


def short_lines(count: int) -> Iterator[str]:
    """Two to eight words and a number: no two are alike."""
    rng, words = random.Random(0), documentation("random")
    for number in range(count):
        yield f"{' '.join(rng.choices(words, k=rng.randint(2, 8)))} {number}"


def peak_of(folder: Path, file: str, stdin: Path | None) -> int:
    """The largest resident size, in KB, of a process that predicts."""
    command = [sys.executable, "-m", "allmask", "predict", str(folder / "small"), file, "-q"]
    with (stdin or Path("/dev/null")).open("rb") as stream:
        process = subprocess.Popen([*command, "-o", str(folder / "predicted.jsonl")], stdin=stream)
        peak = 0
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"allmask predict failed with {process.returncode}")
    return peak


def high_water(pid: int) -> int:
    """As Linux remembers it; 0 when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
