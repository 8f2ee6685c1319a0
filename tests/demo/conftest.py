"""A tiny model folder that can do all that the shipped weights can."""

from __future__ import annotations

import pytest

from allmask.tasks.task import ModelFolder
from tests import tiny


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(tiny.writer(tmp_path_factory.mktemp("demo") / "writer"))
