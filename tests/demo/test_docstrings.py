"""Pairs out of docstrings, and splits that share nothing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.demo import docstrings
from allmask.demo.docstrings import Pair, find_pairs, prose, python_folders, split, support, title_and_text

TEXT = "The lines are read one after another, blank ones are passed over, and what remains is handed to the caller."
MORE = "Of the file nothing is kept."


# ---- one docstring ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("docstring", "title"),
    [
        (f"Read all lines of a file.\n\n{TEXT} {MORE}", "Read all lines of a file"),
        (f"Read all ``lines`` of a :class:`~io.File`.\n\n{TEXT} {MORE}", "Read all lines of a io.File"),
        (f"Read all lines\nof a *big* file!\n\n{TEXT} {MORE}", "Read all lines of a big file"),
    ],
)
def test_a_docstring_is_a_title_and_a_text(docstring: str, title: str):
    assert title_and_text(docstring) == (title, f"{TEXT} {MORE}")


@pytest.mark.parametrize(
    "docstring",
    [
        "Read all lines of a file.",  # no text
        f"Read all.\n\n{TEXT} {MORE}",  # too short a title
        f"{TEXT} {MORE}\n\n{TEXT} {MORE}",  # too long a one
        f"Read all lines of a file.\n\n{MORE}",  # too short a text
        f"read(file) -> list of lines\n\n{TEXT} {MORE}",  # a signature
        f"Deprecated: read all lines.\n\n{TEXT} {MORE}",
        f"Blank ones are passed over.\n\n{TEXT} {MORE}",  # the title stands in the text
        f"Read all lines of a file.\n\nArgs:\n    {TEXT} {MORE}",  # nothing but arguments
        f"Draw a bird in a tree.\n\n{TEXT} {MORE}",  # the text speaks of something else
        f"读一个文件的 所有 各行 内容\n\n{TEXT} {MORE}",  # not the language that is learnt here
    ],
)
def test_what_makes_no_pair(docstring: str):
    assert title_and_text(docstring) is None


def test_support_counts_beginnings_of_words_that_matter():
    assert support("Return the lines of a file", "It reads a line, and the file is returned") == 1.0
    assert support("Return all lines of a file", "It reads a line of the file") == 0.5  # not "return", not "all"
    assert support("Of the", "Whatever") == 0.0
    assert support("Read it", "word " * 60 + "read") == 0.0  # too late for a reader of the beginning


def test_only_sentences_are_kept():
    text = """
First ``words`` of a `link <http://a.b>`_, see [1]_.

>>> read(3)
[1, 2]

    indented = code

.. versionadded:: 3.2

Second *words* for :func:`read`::

    more = code

Third words.
:param x: a number

Parameters
----------
x : int
    A number.

Last words.
""".strip("\n")
    assert prose(text) == "First words of a link, see . Second words for read: Third words."


def test_numpy_google_and_sphinx_tables_end_the_text():
    for table in ("Parameters\n---------\nx : int", "Args:\n  x: a number", "Returns:\n  all", ":param x: a number"):
        assert prose(f"Some words.\n\n{table}\n\nOther words.") == "Some words."


# ---- files -----------------------------------------------------------------------------------------------------------

FILE = '''
raise SystemExit("this file must never be run")

class Reader:
    """Read {name} of many kinds.

    Every {name} is opened once, its lines are read in their order, and all of them are closed in the very end.
    """

    if True:
        async def close(self):
            """Close the {name} for good.

            Whatever has been written to a {name} so far is flushed to the disk before the handle is closed here.
            """

def short():
    """Say nothing of {name}."""
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for package in ("apples", "pears", "plums"):
        (tmp_path / package / "tests").mkdir(parents=True)
        (tmp_path / package / "one.py").write_text(FILE.format(name=package))
        (tmp_path / package / "tests" / "two.py").write_text(FILE.format(name=f"tested {package}"))
    (tmp_path / "broken.py").write_text("def f(:\n    '''Broken by hand.\n\n    " + TEXT)
    (tmp_path / "latin.py").write_bytes(b'def f():\n    """Caf\xe9 of the corner.\n\n    ' + TEXT.encode() + b'"""\n')
    (tmp_path / "twin.py").write_text(FILE.format(name="apples"))
    return tmp_path


def test_files_are_parsed_and_never_run(tree: Path):
    found = find_pairs([tree])
    pairs = [pair for part in found.splits.values() for pair in part]
    assert (found.files, found.docstrings) == (4, 12)
    assert {pair.target for pair in pairs} == {
        f"{words} {name} {end}"
        for name in ("apples", "pears", "plums")
        for words, end in (("Read", "of many kinds"), ("Close the", "for good"))
    }
    assert found.dropped["duplicates"] == 2
    assert {pair.where for pair in pairs if pair.package == "pears"} == {"pears/one.py:4", "pears/one.py:11"}


def test_the_same_files_give_the_same_pairs(tree: Path):
    assert find_pairs([tree]) == find_pairs([tree]) == find_pairs([tree], workers=2)


def test_at_most_so_many_files_of_a_package(tree: Path):
    (tree / "pears" / "three.py").write_text(FILE.format(name="wild pears"))
    assert find_pairs([tree], per_package=1).files == find_pairs([tree]).files - 1


# ---- splits ----------------------------------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from("abc"), min_size=3, max_size=12).map(" ".join)
PAIRS = st.lists(
    st.builds(
        Pair, WORDS, WORDS, st.just("package"), st.builds("file{}.py:{}".format, st.integers(0, 11), st.integers(1))
    )
)


def runs_of(pair: Pair, length: int = 8) -> set[str]:
    """Every run of eight words as text, and a shorter text as a whole."""
    result = set()
    for text in (pair.source, pair.target):
        told = re.findall("[a-z0-9]+", text.lower())
        result |= {" ".join(told[i : i + length]) for i in range(len(told)) if i == 0 or i + length <= len(told)}
    return result


def expect_nothing_shared(splits: dict[str, list[Pair]]) -> None:
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert {pair.file for pair in splits[one]}.isdisjoint(pair.file for pair in splits[other])
        seen = {run for pair in splits[one] for run in runs_of(pair)}
        assert all(seen.isdisjoint(runs_of(pair)) for pair in splits[other])


@given(PAIRS)
def test_splits_share_no_file_and_no_run_of_words(pairs: list[Pair]):
    dropped: Counter[str] = Counter()
    splits = split(pairs, dropped)
    expect_nothing_shared(splits)
    assert sum(map(len, splits.values())) + dropped["overlap"] == len(pairs)


def test_a_copy_in_another_file_is_not_held_out():
    """120 files of one pair each, all alike in eight words: what is held out must lose them. Seven may be shared."""
    copied = "one two three four five six seven"
    pairs = [Pair(f"{copied} eight n{n}", f"title number {n}", f"package{n}", f"{n}") for n in range(120)]
    dropped: Counter[str] = Counter()
    splits = split(pairs, dropped)
    assert splits["dev"] == splits["test"] == []
    assert dropped["overlap"] == 120 - len(splits["train"]) > 10
    pairs = [Pair(f"{copied} n{n}", f"title number {n}", f"package{n}", f"{n}") for n in range(120)]
    splits = split(pairs, dropped)
    assert len(splits["dev"]) == 6 and len(splits["test"]) == 9  # 5 and 8 of a hundred


def test_each_title_and_each_text_once():
    pairs = [
        Pair("A text.", "A title", "p", "1"),
        Pair("Other text.", "a  TITLE.", "q", "2"),
        Pair("a text", "T", "r", "3"),
    ]
    assert list(docstrings._without_duplicates(pairs, Counter())) == pairs[:1]


def test_few_titles_of_a_package_begin_alike():
    pairs = [Pair(f"text {n} of many words", f"Return the name of {n}", "package", str(n)) for n in range(30)]
    kept = list(docstrings._without_duplicates(pairs, Counter()))
    assert len(kept) == docstrings.SAME_OPENING


def test_the_standard_library_alone_is_enough():
    found = find_pairs(python_folders(installed=False), per_package=4)
    assert len(found.splits["train"]) > 400
    assert len(found.splits["dev"]) > 15 and len(found.splits["test"]) > 25
    expect_nothing_shared(found.splits)
    for pair in (pair for part in found.splits.values() for pair in part):
        assert 3 <= len(pair.target.split()) <= 16 and len(pair.source.split()) >= 10
        assert support(pair.target, pair.source) >= 0.5
        assert pair.target.lower() not in pair.source.lower()
