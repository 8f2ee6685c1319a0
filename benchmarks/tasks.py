"""Text classification with MiniLM: fine-tuning, prediction, and the memory of prediction.

    python benchmarks/tasks.py [--only training|predicting|memory] [--quick] [--json]

The texts are as long as the sentences of SST-2 (23 tokens on average, 3 to 67): pieces of docstrings, to be classified
by their module. Fine-tuning: our training loop with its defaults (about 32 texts per step), against transformers'
`Trainer` (32 texts per step, bf16, its default collator), dropout, clipping and AdamW on both sides; each has a
process of its own, and blocks of steps take turns. Prediction: from texts to labels, by the model that was fine-tuned
before; each peer has its fastest batch size. One thread, CPU time; means over blocks, medians over rounds. Memory: the
peak resident size of `allmask predict` in another process, with a small random model, by the number of lines.
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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx_int8
import torch
from encode import BATCHES, Ids, by_length, in_batches, padded
from texts import documentation, pieces
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
from allmask.kernels.precision import native_bf16
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.nn.init import initialize
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.common.heads import hidden_all
from allmask.training import Settings
from allmask.training.log import Metrics
from allmask.training.loop import Trainer
from allmask.training.progress import Progress

SHORTEST, LONGEST, SHAPE, SCALE = 1, 65, 3.9, 5.47  # lengths without [CLS] and [SEP]; gamma distribution
LABELS = ("a–i", "j–z")  # first letter of the module
BATCH, BLOCK = 32, 4  # texts per step; steps per turn
TEXTS = 2000  # to predict, and as many for training
PARTS = ("training", "predicting", "memory")
REFERENCE = "transformers pipeline fp32"
HALF = native_bf16("cpu")  # emulated bf16 is slower than fp32
BEST = "bf16" if HALF else "fp32"
OURS = f"allmask {BEST}"


def main() -> None:
    options = timing.arguments(__doc__, PARTS)
    parts = PARTS if options.only is None else (options.only,)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = allmask.load("minilm")
    train, test = labelled_texts(start, 500 if options.quick else TEXTS)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        ours, tables = Ours(start, train, folder), {}
        if "training" in parts:
            tables["Fine-tuning"] = training_rows(ours, train, folder, 2 if options.quick else 8)
        if "predicting" in parts:
            ours.finish(30 if options.quick else 120)
            rows = predicting_rows(ours, test, folder, 1 if options.quick else 5)
            tables[f"Prediction of {len(test):,} texts"] = rows
        if "memory" in parts:
            lines = (2_000, 20_000) if options.quick else (20_000, 200_000, 1_000_000)
            tables["Memory of allmask predict"] = memory_rows(start, folder, lines)
    about = timing.versions("transformers", "ctranslate2", "onnxruntime") | lengths_of(start, test)
    for title, rows in tables.items():
        timing.show(title, rows, about, options.json)
        print()


# ---- texts ---------------------------------------------------------------------------------------------------


def labelled_texts(model: Model, count: int) -> tuple[list[Record], list[Record]]:
    """`count` texts for training, and as many others."""
    rng = random.Random(0)
    lengths = [min(LONGEST, max(SHORTEST, round(rng.gammavariate(SHAPE, SCALE)))) for _ in range(2 * TEXTS)]
    assert model.tokenizer is not None
    found = pieces(model.tokenizer, lengths)
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
    """Complete steps of the training loop, one by one."""

    def __init__(self, start: Model, records: list[Record], folder: Path):
        self.records = records
        self.task = Classify(kind="single").fitted(start)
        self.model = self.task.prepare(start, records)
        self.model.save(folder / "start")
        self.work = self.task.workload(self.model, records)
        self.folder, self.mean = folder, statistics.mean(self.work.lengths)
        self.tokens = 0  # trained on so far

    @cached_property
    def trainer(self) -> Trainer:
        """Made when it is needed, since it changes how the process treats memory, see `timing.medians_apart`."""
        settings = {"steps": 200, "eval_every": 10**6, "save_every": 10**6, "schedule": "constant", "precision": BEST}
        chosen = Settings(**settings, **self.task.suggested_settings(self.model, self.records))
        trainer = Trainer(self.model, self.work, chosen, self.folder, quiet=True)
        self.source = trainer.batches_from(0)
        self.metrics, self.bar = Metrics(self.folder, 0), Progress(0, "", quiet=True)
        return trainer

    def block(self) -> float:
        """Train for a block of steps; return the seconds per text of the mean length, as batches differ in texts."""
        trainer = self.trainer
        before, start = self.tokens, time.process_time()
        for _ in range(BLOCK):
            trainer._one_step(self._counted(), self.metrics, self.bar)
        return (time.process_time() - start) / (self.tokens - before) * self.mean

    def _counted(self) -> Any:
        share = next(self.source)
        self.tokens += share.batch.tokens
        return iter([share])

    def finish(self, steps: int) -> None:
        """Continue training, so that predictions are not random."""
        while self.trainer.step < steps:
            self.block()
        self.source.close()
        self.metrics.close()
        self.model.eval()


@dataclass
class Turns(TrainerCallback):
    """Stops their trainer after each block of steps, until its next turn; the seconds per text go through the pipe."""

    pipe: Connection
    start: float = 0.0

    def on_step_end(self, args, state, control, **_) -> None:
        if state.global_step % BLOCK:
            return
        self.pipe.send((time.process_time() - self.start) / (BLOCK * BATCH))
        control.should_training_stop = not self.pipe.recv()
        self.start = time.process_time()


def training_rows(ours: Ours, records: list[Record], folder: Path, blocks: int) -> list[dict[str, object]]:
    strategies = {"": "random", ", length groups": "group_by_length"}
    with ExitStack() as stack:
        peers = {
            f"transformers Trainer {BEST}{name}": stack.enter_context(
                timing.elsewhere(lambda pipe, chosen=chosen: their_trainer(folder, records, chosen, pipe).train())
            )
            for name, chosen in strategies.items()
        }
        took: dict[str, list[float]] = {name: [] for name in [*peers, OURS]}
        for peer in peers.values():
            peer.recv()  # the first block warms up
        ours.block()
        for _ in range(blocks):
            for name, peer in peers.items():
                peer.send(True)
                took[name].append(peer.recv())
                took[OURS].append(ours.block())
    return [training_row(name, times, statistics.mean(took[OURS])) for name, times in took.items()]


def training_row(who: str, took: list[float], ours: float) -> dict[str, object]:
    one = statistics.mean(took)
    times = "" if who == OURS else f"{one / ours:.2f}"
    return {"system": who, "texts/s": f"{1 / one:.0f}", "ms/text": f"{1000 * one:.1f}", "speed-up of allmask": times}


def their_trainer(folder: Path, records: list[Record], strategy: str, pipe: Connection) -> TheirTrainer:
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    encoded = tokenizer(texts_of(records), truncation=True)
    names = list(encoded)
    rows = [
        {**{name: encoded[name][n] for name in names}, "labels": LABELS.index(one.fields["label"])}
        for n, one in enumerate(records)
    ]
    settings = TrainingArguments(
        str(folder / "theirs"), per_device_train_batch_size=BATCH, num_train_epochs=100, learning_rate=1e-4,
        weight_decay=0.01, bf16=HALF, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, train_sampling_strategy=strategy,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(folder / "start")
    return TheirTrainer(
        model, settings, DataCollatorWithPadding(tokenizer), rows, processing_class=tokenizer, callbacks=[Turns(pipe)]
    )


# ---- prediction ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Computes label indices for texts; `hidden` (n, W) are the states that the classifier reads."""

    labels: Callable[[], Tensor]
    hidden: Callable[[], Tensor]


def predicting_rows(ours: Ours, records: list[Record], folder: Path, rounds: int) -> list[dict[str, object]]:
    ours.model.save(folder / "model")
    texts = texts_of(records)
    targets = torch.tensor([LABELS.index(one.fields["label"]) for one in records])
    with torch.inference_mode():
        cases = pipelines(folder / "model", texts) | our_cases(ours, texts)
        cases |= ctranslate2_cases(ours, folder, texts) | onnx_cases(ours, folder, texts)
        labels = {name: case.labels() for name, case in cases.items()}
        hidden = {name: case.hidden() for name, case in cases.items()}
        times = timing.medians({name: case.labels for name, case in cases.items()}, rounds, warm_up=False)
    base = min(taken for name, taken in times.items() if "pipeline" in name)
    cosines = {name: cosine_similarity(states, hidden[REFERENCE]) for name, states in hidden.items()}
    return [
        {
            "system": name,
            "seconds": f"{times[name]:.2f}",
            "texts/s": f"{len(texts) / times[name]:,.0f}",
            "vs best pipeline": f"{base / times[name]:.2f}",
            "accuracy": f"{(labels[name] == targets).float().mean():.2%}",
            "agreement with fp32": f"{(labels[name] == labels[REFERENCE]).float().mean():.2%}",
            "mean cosine": f"{cosines[name].mean():.4f}",
            "min cosine": f"{cosines[name].min():.4f}",
        }
        for name in sorted(cases, key=lambda name: -times[name])
    ]


def our_cases(ours: Ours, texts: list[str]) -> dict[str, Case]:
    def case(precision: str) -> Case:
        classifier = Classifier(ours.model, ours.task, precision)
        reading = ours.task.rows(ours.model, texts)
        return Case(
            lambda: torch.tensor([LABELS.index(one.label) for one in classifier(texts)]),
            lambda: hidden_all(classifier.frozen, reading.examples),
        )

    return {f"allmask {precision}": case(precision) for precision in dict.fromkeys(("fp32", BEST, "int8"))}


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

    return {REFERENCE: case(torch.float32)} | ({"transformers pipeline bf16": case(torch.bfloat16)} if HALF else {})


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
    """A case from an encoder that returns first hidden states, of texts sorted by length, with our head in torch."""
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
    peaks: dict[str, list[int]] = {"jsonl file": [], "stdin": []}
    for count in lines:
        file, plain = folder / "lines.jsonl", folder / "lines.txt"
        with file.open("w") as records, plain.open("w") as texts:
            for text in short_lines(count):
                texts.write(f"{text}\n")
                records.write(json.dumps({"text": text}) + "\n")
        peaks["jsonl file"].append(peak_of(folder, str(file), None))
        peaks["stdin"].append(peak_of(folder, "-", plain))
    return [
        {
            "input": name,
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
    """Lines of two to eight words and a number, all different."""
    rng, words = random.Random(0), documentation("random")
    for number in range(count):
        yield f"{' '.join(rng.choices(words, k=rng.randint(2, 8)))} {number}"


def peak_of(folder: Path, file: str, stdin: Path | None) -> int:
    """The peak resident size in KB of `allmask predict`."""
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
    """The peak that Linux has recorded; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
