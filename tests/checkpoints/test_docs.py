"""The page on checkpoints names every family and task head that is read, and quotes errors as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from allmask.checkpoints import read
from allmask.errors import CheckpointError
from allmask.registry import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def row_of(name: str) -> str:
    return next((line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")), "")


@pytest.mark.parametrize("name", FAMILIES.builtin)
def test_every_family_and_its_task_heads_have_a_row(name: str):
    layouts = FAMILIES[name].tasks
    assert row_of(name) and all(f"`{layout.architecture}`" in row_of(name) for layout in layouts)


def test_no_family_that_is_read_is_listed_as_not_read():
    not_read = PAGE[PAGE.index("Not read:") :]
    assert not any(name in not_read for name in ("BERT", "GPT-2", "T5", "XLNet"))
    assert "heads of other libraries are left out" not in PAGE


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"hidden_size": 16', '"hidden_size": 1000000000000', ": width is 1000000000000; expected a whole number from"),
        ('"hidden_size": 16,', '"hidden_size": 16', ": not valid JSON: Expecting ',' delimiter (column 3)"),
    ],
)
def test_errors_are_quoted_as_they_are_printed(bert_folder: Path, old: str, new: str, words: str):
    file = bert_folder / "config.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(CheckpointError) as caught:
        read(bert_folder)
    assert words in caught.value.message and words in PAGE
    assert caught.value.hint is not None and caught.value.hint in PAGE
