"""A WordPiece tokenizer of real English and Chinese."""

from __future__ import annotations

import pytest

from allmask.data import Texts
from allmask.objectives import Vocabulary
from allmask.text import Tokenizer, train_tokenizer
from tests.objectives.texts import chinese_documents, english_documents, small_vocabulary


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    documents = english_documents() + chinese_documents()
    path.write_text("\n".join(sentence for document in documents for sentence in document), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(corpus) -> Tokenizer:
    return train_tokenizer(Texts([corpus]), "wordpiece", 1200)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return small_vocabulary()
