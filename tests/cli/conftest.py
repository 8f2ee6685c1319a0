"""Tiny models on disk, and one finished run, for all commands that train or write."""

from __future__ import annotations

from pathlib import Path

import pytest

from allmask.runs.driver import start
from allmask.runs.finetuning import FineTuning
from allmask.runs.plan import Plan
from allmask.tasks.seq2seq import Title
from allmask.training import Settings
from tests import tiny


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with a body only, as a sentence encoder is shipped."""
    return tiny.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and dev.jsonl."""
    folder = tmp_path_factory.mktemp("data")
    tiny.write_jsonl(folder / "train.jsonl", tiny.english(64))
    tiny.write_jsonl(folder / "dev.jsonl", tiny.english(8, seed=1))
    return folder


@pytest.fixture(scope="session")
def titles(bert: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: it has learnt that titles are short and made of such words."""
    job = FineTuning(str(data / "train.jsonl"), str(bert), str(data / "dev.jsonl"), task=Title(max_target=8))
    settings = Settings(steps=80, lr=1e-2, batch_tokens=256, eval_every=40, precision="fp32")
    run = tmp_path_factory.mktemp("runs") / "titles"
    start(Plan(job, settings), run, quiet=True)
    return run
