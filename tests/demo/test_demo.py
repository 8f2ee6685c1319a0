"""The demo's parts: pairs out of docstrings, splits that share nothing, a folder replaced only when all is well."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.demo import docstrings, run
from allmask.demo.docstrings import Pair, find_pairs, prose, python_folders, split, support, title_and_text
from allmask.demo.run import OTHER_PASSAGES, draw_demo, passages
from allmask.errors import DataError, Interrupted, ResourceError

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


# ---- texts of the README ---------------------------------------------------------------------------------------------


def test_passages_of_a_readme(tmp_path: Path):
    long = "The **same** [weights](docs/a.md) read both ways, " + "and on " * 10 + "to the end."
    prose = f"{TEXT} {MORE}"
    parts = [f"# Title {prose}", long, f"- {prose}", f"    {prose}", f"```\n{prose}\n```", "Short.", prose]
    (tmp_path / "README.md").write_text("\n\n".join(parts))
    assert passages(tmp_path / "README.md", 2) == [
        "The same weights read both ways, " + "and on " * 10 + "to the end.",
        f"{TEXT} {MORE}",
    ]


def test_without_a_readme_there_are_other_texts(tmp_path: Path):
    (tmp_path / "README.md").write_text("Short.")
    assert passages(tmp_path / "nowhere.md") == passages(tmp_path / "README.md") == OTHER_PASSAGES


# ---- time ------------------------------------------------------------------------------------------------------------


class Lengths:
    def __init__(self, count: int):
        self.lengths = [100] * count


SMALL = replace(run.FULL, batch_tokens=1000, evaluations=4, test=400, written=100, quoting=0.4)
JUDGING = 5 * 4 + run.BEAMS * 5 * 4  # four evaluations of 5 s, and four times as many titles with beams


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    return now


def demo_of(size: run.Size) -> run.Demo:
    return run.Demo(torch.nn.Identity(), size, Path(), Path(), print, True, deadline=1200.0)  # type: ignore[arg-type]


def second_lesson(demo: run.Demo, examples: int, step: float, quoted: int = 60) -> int | None:
    work: Any = Lengths(examples)
    slow = [{"tokens": 1000, "speed": 10.0}] * 30  # long ago
    lines = slow + [{"tokens": 1000, "speed": 1000 / step}] * run.LATEST
    return demo._second_lesson(work, 5.0, lines[-quoted:]).steps


def test_quoting_has_its_share_of_the_time(clock: list[float]):
    ends = demo_of(SMALL)._quoting_ends(5.0)
    assert ends == 1000 + 0.4 * (200 - JUDGING - run.ENDING)
    timer: Any = run.Timer(ends)
    assert not timer(None).pause
    clock[0] = ends
    assert timer(None).pause
    assert timer(None).value == -math.inf  # never the best: the last weights are kept
    assert demo_of(run.FAST)._quoting_ends(5.0) == math.inf


def test_titles_take_the_time_that_is_left_by_the_latest_speed(clock: list[float]):
    left = 200 - JUDGING - run.ENDING
    assert second_lesson(demo_of(SMALL), 100_000, step=0.5) == int(left / 0.5)
    clock[0] += 50.0
    assert second_lesson(demo_of(SMALL), 100_000, step=0.5) == int((left - 50) / 0.5)
    assert second_lesson(demo_of(replace(SMALL, most_epochs=3)), 100, step=0.5) == 10 * 3  # ten batches an epoch
    assert second_lesson(demo_of(run.FAST), 100_000, 0.5, quoted=2) == 4  # of six steps in all


def test_a_slow_machine_still_learns(clock: list[float]):
    assert demo_of(SMALL)._learning_ends(evaluation=60.0) == 1100.0  # half of the time


# ---- the folder ------------------------------------------------------------------------------------------------------


def finished(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / run.RESULT).write_text(word)
    return folder


def test_a_demo_is_replaced_when_the_new_one_is_complete(tmp_path: Path):
    out = finished(tmp_path / "demo", "old")
    left = tmp_path / f".demo.{2**22 + 1}.partial"  # by a killed run: no process has such a number
    left.mkdir()
    (left / "half").write_text("")
    with run.replace_folder(out) as folder:
        (folder / run.RESULT).write_text("new")
        assert (out / run.RESULT).read_text() == "old"
    assert (out / run.RESULT).read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["demo", run.RESULT]


def test_a_failed_demo_leaves_the_old_one(tmp_path: Path):
    out = finished(tmp_path / "demo", "old")
    with pytest.raises(ZeroDivisionError), run.replace_folder(out) as folder:
        (folder / run.RESULT).write_text("new")
        raise ZeroDivisionError
    assert (out / run.RESULT).read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_that_is_no_demo_is_refused(tmp_path: Path):
    run.expect_replaceable(tmp_path / "new" / "deep")
    run.expect_replaceable(finished(tmp_path / "demo", "old"))
    (tmp_path / "empty").mkdir()
    run.expect_replaceable(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for out in (tmp_path / "other", tmp_path / "other" / "thesis.tex"):
        with pytest.raises(ResourceError, match="not a finished demo"):
            run.expect_replaceable(out)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted("stopped", 143), 143)])
def test_an_interruption_says_how_to_go_on(monkeypatch, tmp_path: Path, error: BaseException, code: int):
    def stop(self: run.Demo):
        (self.folder / "half").write_text("")
        raise error

    monkeypatch.setattr(run, "load", lambda _: None)
    monkeypatch.setattr(run.Demo, "run", stop)
    with pytest.raises(Interrupted, match=r"stopped") as caught:
        run.run_demo(finished(tmp_path / "demo", "old"))
    assert caught.value.exit_code == code
    assert "is unchanged" in str(caught.value) and "same command" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(run, "load", lambda _: None)
    monkeypatch.setattr(run, "python_folders", lambda _: [tmp_path])
    with pytest.raises(DataError, match="too few docstrings"):
        run.run_demo(tmp_path / "demo", say=lambda _: None)


# ---- words and pictures ----------------------------------------------------------------------------------------------


def test_the_first_sentence_as_a_title():
    records = [Record({"source": "Read a file. Then stop.", "target": "Read a file"}, "a:1")]
    records += [Record({"source": "Nothing alike. Then stop.", "target": "Read a file"}, "a:2")]
    assert run.lead_rouge_l(records) == pytest.approx(50.0)


def test_the_shortest_records_come_first():
    records = [Record({"source": "x" * length, "target": "y"}, "") for length in (5, 3, 9, 1, 7)]
    assert [len(record.fields["source"]) for record in run.shortest_first(records)] == [1, 3, 5, 9, 7]


def test_the_picture_is_a_png(tmp_path: Path):
    metrics = [{"step": 0, "eval_loss": 9.0, "eval_rouge_l": 0.0, "eval_lead_rouge_l": 11.0}, {"step": 1, "loss": 8.0}]
    scores = {name: {"rouge_1": 1.0, "rouge_2": 2.0, "rouge_l": 3.0} for name in ("model", "lead sentence")}
    draw_demo(tmp_path / "a.png", metrics, scores)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run.table(scores).splitlines()[1].split() == ["lead", "sentence", "1.0", "2.0", "3.0"]
