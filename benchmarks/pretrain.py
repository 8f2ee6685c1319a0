"""A step of masked-language-model pretraining, and its data: allmask, transformers and tokenizers.

    python benchmarks/pretrain.py [--only step] [--quick] [--json] [--isa avx2]

BERT-small (4 layers, 512 wide, 30,522 tokens), batches of 32 texts, dropout 0.1: forward, backward, clipping, fused
AdamW on all sides, through our own training loop on ours. Texts have 50 tokens on average and 128 at most, or 128 each.
"Length buckets" is the best case of padding: all texts of a batch have the mean length, so nothing is padded. Each
system has a process of its own. One thread, CPU time, interleaved, medians; padding is not counted as tokens. bf16 is
left out where it is emulated.

Below: writing a token store on all cores, against one `encode_batch` of all lines, in wall time, and the share of a
training run in which the step waits for data.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import allmask
from allmask.data import Batch
from allmask.data.corpus import prepare
from allmask.kernels.precision import native_bf16
from allmask.model import Model
from allmask.objectives import Draw
from allmask.objectives.mlm import Mlm
from allmask.objectives.vocabulary import Vocabulary
from allmask.presets import bert_small
from allmask.text import Tokenizer
from allmask.training import Settings, train
from allmask.training.loop import Trainer

ROWS, MEAN, FULL, SHARE = 32, 50, 128, 0.15
WIDTH, BATCHES = 512, 2
MEGABYTES = 12  # of text for the store
PRECISIONS = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if native_bf16("cpu") else {})
Texts = list[np.ndarray]


def main() -> None:
    options = timing.arguments(__doc__, ("step", "data"))
    torch.set_num_threads(1)
    about = timing.versions("transformers", "tokenizers")
    if options.only != "data":
        rows = step_rows(options.quick)
        timing.show("A training step of BERT-small, masked language model", rows, about, options.json)
        print()
    if options.only != "step":
        timing.show("Data", [*store_rows(options.quick), *waiting_rows()], about, options.json)


# ---- a step --------------------------------------------------------------------------------------------------


def step_rows(quick: bool) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    count = 1 if quick else BATCHES
    mixed = [draw_texts(rng, mixed_lengths(rng)) for _ in range(count)]
    even = [draw_texts(rng, [MEAN] * ROWS) for _ in range(count)]
    full = [draw_texts(rng, [FULL] * ROWS) for _ in range(count)]
    cases = {}
    for precision, dtype in PRECISIONS.items():
        cases[f"transformers {precision}, padded"] = partial(Theirs, dtype), mixed
        cases[f"transformers {precision}, length buckets"] = partial(Theirs, dtype), even
        cases[f"allmask {precision}"] = partial(Ours, precision), mixed
    cases[f"transformers {precision}, full rows"] = partial(Theirs, dtype), full
    cases[f"allmask {precision}, full rows"] = partial(Ours, precision), full
    makers = {name: partial(steps_of, make, data) for name, (make, data) in cases.items()}
    times = timing.medians_apart(makers, rounds=1 if quick else 3)
    tokens = {name: sum(len(text) for texts in data for text in texts) for name, (_, data) in cases.items()}
    speeds = {name: tokens[name] / taken for name, taken in times.items()}
    return table(speeds)


def mixed_lengths(rng: np.random.Generator) -> list[int]:
    """32 lengths from 8 to 128 with a mean of 50: many short ones, and one of 128."""
    lengths = np.clip(rng.exponential(MEAN - 8, ROWS) + 8, 8, FULL).round().astype(int)
    lengths[0] = FULL
    while lengths.sum() != MEAN * ROWS:
        chosen, change = rng.integers(1, ROWS), np.sign(MEAN * ROWS - lengths.sum())
        if 8 <= lengths[chosen] + change <= FULL:
            lengths[chosen] += change
    return lengths.tolist()


def draw_texts(rng: np.random.Generator, lengths: Sequence[int]) -> Texts:
    """[CLS] random ids [SEP]."""
    return [np.array([101, *rng.integers(1000, 30522, length - 2), 102]) for length in lengths]


class Ours:
    """A step of the training loop, on batches of the objective."""

    def __init__(self, precision: str):
        rng = torch.Generator().manual_seed(0)
        config = replace(bert_small(), vocab_size=30522, dropout=0.1, attention_dropout=0.1)
        model = Model.fresh(config, ("lm",), rng)
        settings = Settings(steps=10**6, precision=precision, lr=1e-4)
        self.trainer = Trainer(model, Rows(ROWS), settings, Path(), quiet=True)

    def batch(self, texts: Texts) -> Batch:
        return masked(texts)

    def step(self, batch: Batch) -> None:
        self.trainer._learn([batch])


def masked(texts: Texts) -> Batch:
    return Mlm(bundled_vocabulary(), SHARE).batch([text[1:-1] for text in texts], Draw(0, 0, range(len(texts))))


@cache
def bundled_vocabulary() -> Vocabulary:
    tokenizer = allmask.load("minilm").tokenizer
    assert tokenizer is not None
    return Vocabulary.of(tokenizer)


class Theirs:
    """A usual loop with transformers: padding, attention mask, loss from labels."""

    def __init__(self, dtype: torch.dtype):
        torch.manual_seed(0)
        config = BertConfig(hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=8, intermediate_size=4 * WIDTH)
        self.model = BertForMaskedLM(config).train()
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def batch(self, texts: Texts) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)
        valid = ids != 0
        inner = valid & (ids != 101) & (ids != 102)
        chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < SHARE) & inner
        labels = torch.where(chosen, ids, -100)
        return {"input_ids": ids.masked_fill(chosen, 103), "attention_mask": valid.long(), "labels": labels}

    def step(self, batch: dict[str, Tensor]) -> None:
        low = self.dtype != torch.float32
        with torch.autocast("cpu", self.dtype) if low else contextlib.nullcontext():
            loss = self.model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def steps_of(make: Callable[[], Ours | Theirs], data: Sequence[Texts]) -> timing.Case:
    """A step on each of some batches."""
    side = make()
    batches = [side.batch(texts) for texts in data]

    def run() -> None:
        for batch in batches:
            side.step(batch)  # type: ignore[arg-type]

    return run


def table(speeds: dict[str, float]) -> list[dict[str, object]]:
    padded = speeds["transformers fp32, padded"]
    buckets = {precision: speeds[f"transformers {precision}, length buckets"] for precision in PRECISIONS}
    return [
        {
            "system": name,
            "non-padding tokens/s": f"{speed:,.0f}",
            "vs transformers fp32, padded": f"{speed / padded:.2f}",
            "vs length buckets, same precision": f"{speed / buckets[name.split()[1].strip(',')]:.2f}",
        }
        for name, speed in speeds.items()
    ]


# ---- data ----------------------------------------------------------------------------------------------------


def store_rows(quick: bool) -> list[dict[str, object]]:
    """Write tokens to disk, against one call of tokenizers that leaves them in memory."""
    lines = list(words(2 if quick else MEGABYTES))
    size = sum(len(line) + 1 for line in lines) / 1e6
    tokenizer = allmask.load("minilm").tokenizer
    assert tokenizer is not None
    with tempfile.TemporaryDirectory() as folder, all_cores():
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(lines))
        cases = {
            "tokenizers: encode_batch in memory": partial(tokenizer.backend.encode_batch, lines),
            "allmask: token store on disk": partial(fresh_store, text, tokenizer),
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(1 if quick else 3):
            for name, case in cases.items():
                before = time.perf_counter()
                case()
                taken[name].append(time.perf_counter() - before)
    best = {name: min(times) for name, times in taken.items()}
    peer = next(iter(best.values()))
    return [
        {"data": name, "MB/s": f"{size / one:.1f}", "vs tokenizers": f"{peer / one:.2f}"} for name, one in best.items()
    ]


def fresh_store(text: Path, tokenizer: Tokenizer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare([text], tokenizer, Path(folder) / "store")


def words(megabytes: int) -> Iterator[str]:
    """Lines of words from docstrings of the standard library, in random order."""
    found = [word for file in sorted(Path(os.__file__).parent.glob("*.py")) for word in prose(file)]
    rng, written = random.Random(0), 0
    while written < megabytes * 1e6:
        start = rng.randrange(len(found) - 20)
        line = " ".join(found[start : start + rng.randint(5, 20)])
        written += len(line) + 1
        yield line


def prose(file: Path) -> list[str]:
    parts = file.read_text(encoding="utf-8").split('"""')
    return [word for part in parts[1::2] for word in part.split()]


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Let tokenizers run in parallel, which is off elsewhere."""
    before = os.environ["TOKENIZERS_PARALLELISM"]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


class Rows:
    """A workload of random texts, masked when a batch is made."""

    def __init__(self, count: int):
        rng = np.random.default_rng(1)
        self.texts = [text for _ in range(count // ROWS) for text in draw_texts(rng, mixed_lengths(rng))]
        self.lengths = [len(text) for text in self.texts]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return masked([self.texts[number] for number in numbers])

    def evaluate(self, model: Model, step: int = 0) -> None:
        return None


def waiting_rows() -> list[dict[str, object]]:
    side = Ours(next(reversed(PRECISIONS)))
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(steps=20, batch_tokens=ROWS * MEAN, save_every=10**6)
        result = train(side.trainer.model, Rows(2000), settings, Path(folder) / "run", quiet=True)
    share = result.waited / result.seconds
    return [{"data": "waiting for data", "MB/s": "", "vs tokenizers": f"{share:.2%} of the time"}]


if __name__ == "__main__":
    main()
