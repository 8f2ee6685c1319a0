"""A BERT and a GPT-2 of a few kilobytes with real tokenizers, and records to fine-tune on, in English and Chinese."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from allmask import presets
from allmask.config import Config
from allmask.data import Texts
from allmask.model import Model
from allmask.tasks.continuation import Continuation
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import save_task
from allmask.text import train_tokenizer

WORDS = ["red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "here", "there"]
CHARACTERS = "北京欢迎你白切鸡想吃啥"
SMALL = {"width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 48}
UNUSED = "zebra quartz violin"  # in the vocabulary and in no record: what pruning drops


def english(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Sources of a few words; the target is the first two."""
    rng = random.Random(seed)
    rows = [[rng.choice(WORDS) for _ in range(rng.randint(3, 9))] for _ in range(count)]
    return [{"source": f"{' '.join(row)}.", "target": " ".join(row[:2])} for row in rows]


def chinese(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    rows = ["".join(rng.choice(CHARACTERS) for _ in range(rng.randint(4, 12))) for _ in range(count)]
    return [{"source": f"{row}。", "target": row[:3]} for row in rows]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bert(folder: Path, heads: Sequence[str] = (), **sizes: int) -> Path:
    return _model(folder, replace(presets.bert_base(), **{**SMALL, **sizes}), heads, "wordpiece", 200)


def writer(folder: Path) -> Path:
    """A BERT that, like the shipped weights, fills gaps, writes titles and continues texts."""
    _model(folder, replace(presets.bert_base(), **{**SMALL, "max_positions": 128}), ["lm"], "wordpiece", 200)
    save_task(Title(max_source=64, max_target=24), folder, [Continuation.within(96, 32, framed=True)])
    return folder


def gpt2(folder: Path) -> Path:
    return _model(folder, replace(presets.gpt2(), **SMALL), ["lm"], "byte-bpe", 300)


def _model(folder: Path, config: Config, heads: Sequence[str], kind: str, size: int) -> Path:
    corpus = folder.with_name(f"{folder.name}-corpus.txt")
    lines = [*(row["source"] for row in [*english(40), *chinese(40)]), *[UNUSED] * 4]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer(Texts([corpus]), kind, size)
    corpus.unlink()
    made = replace(config, vocab_size=tokenizer.size)
    model = Model.fresh(made, heads, torch.Generator().manual_seed(0))
    model.tokenizer = tokenizer
    model.save(folder)
    return folder
