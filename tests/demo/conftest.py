"""A tiny model folder that, like the shipped weights, writes titles and continues texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allmask.model import Model, load
from allmask.tasks.continuation import Continuation
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import ModelFolder, save_task
from tests import tiny


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tmp_path_factory.mktemp("demo")
    tokenizer = load(tiny.bert(folder / "small")).tokenizer
    assert tokenizer is not None
    config = replace(load(folder / "small").config, max_positions=128, vocab_size=tokenizer.size)
    model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(0))
    model.tokenizer = tokenizer
    model.save(folder / "model")
    save_task(Title(max_source=64, max_target=8), folder / "model", [Continuation.within(96, 32, framed=True)])
    return ModelFolder.open(folder / "model")
