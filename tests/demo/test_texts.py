"""Reading a user's file: paragraphs of plain text and Markdown, in English and Chinese, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.demo import texts
from allmask.demo.texts import (
    EXAMPLE,
    OTHERS,
    count_words,
    cut,
    hideable,
    opening,
    paragraphs,
    read_paragraphs,
)
from allmask.errors import DataError

LONG = "A small program reads the files of a folder and prints the names of all that have changed since yesterday."
ZH = "北京欢迎你。我们想吃白切鸡，也想喝茶，还想看看长城和故宫。"

# ---- paragraphs ------------------------------------------------------------------------------------------------------


def test_paragraphs_of_plain_text():
    text = f"{LONG[:40]}\n{LONG[40:]}\n\n    {LONG}\r\n\r\n{LONG}\n \nIt ends * here.\n"
    assert paragraphs(text) == [LONG[:40].strip() + " " + LONG[40:].strip(), LONG, LONG, "It ends * here."]


def test_lines_that_end_sentences_are_paragraphs():
    assert paragraphs(f"{LONG}\n{LONG}\n{LONG[:30]}") == [f"{LONG} {LONG} {LONG[:30]}"]
    assert paragraphs(f"{LONG}\n{LONG}") == [LONG, LONG]
    assert paragraphs(f"　　{ZH}\n　　{ZH}\n") == [ZH, ZH]
    assert paragraphs("北京\n欢迎你") == ["北京欢迎你"]


def test_of_markdown_only_prose_is_kept():
    parts = [
        "---\ntitle: x\n---\n# Heading\nThe **same** [weights](docs/a.md) write `code`, _too_, in snake_case.",
        f"- {LONG}", f"1. {LONG}", f"> {LONG}", f"| {LONG} |", f"    {LONG}", f"```\n{LONG}\n\n{LONG}\n```",
        "![a picture](a.png)", f"<div>\n{LONG}", f"<!-- {LONG} -->{LONG}",
    ]  # fmt: skip
    assert paragraphs("\n\n".join(parts), markdown=True) == ["The same weights write code, too, in snake_case.", LONG]


# ---- files that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b" \n\t\n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\r", "not a text file"),
        (LONG.encode() + b"\n\xb1\xb1\xbe\xa9", r":2: not UTF-8"),  # 北京 in GB 18030
        (b"Too short.", "too little text"),
        (("# " + LONG).encode(), "too little text"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes | None, said: str):
    path = tmp_path / "a.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_paragraphs(path)
    assert caught.value.hint
    with pytest.raises(DataError, match="is a folder"):
        read_paragraphs(tmp_path)


def test_files_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.txt"
    path.write_text(f"\ufeffHeading\n\n{LONG}\n\n{ZH}", encoding="utf-8")
    assert read_paragraphs(path) == [LONG, ZH]
    monkeypatch.setattr(texts, "LARGEST", len(path.read_bytes()) - 4)  # in the middle of a character
    assert read_paragraphs(path) == [LONG]
    monkeypatch.setattr(texts, "LARGEST", 60)
    path.write_text(ZH * 9, encoding="utf-8")  # one line that is cut
    assert ZH.startswith(read_paragraphs(path)[0][:-1])


# ---- parts of a text -------------------------------------------------------------------------------------------------

PROSE = st.lists(st.sampled_from(["one", "two.", "three!", "四", "五。", ",", "six"]), min_size=1, max_size=60).map(
    " ".join
)


@given(PROSE, st.integers(1, 20))
def test_parts_of_a_text_lose_nothing(text: str, words: int):
    head, rest = cut(text, words)
    assert (head + rest).replace(" ", "") == text.replace(" ", "")
    assert count_words(head) == min(words, count_words(text)) or not rest
    assert text.startswith(opening(text, words)) and count_words(opening(text, words)) <= max(words, 1)
    assert all(text[start:end].isalpha() for start, end in hideable(text)) and len(hideable(text)) == count_words(text)


def test_the_opening_is_whole_sentences():
    assert opening("One two. Three four. Five six seven.", 5) == "One two. Three four."
    assert opening("One two three. Four.", 2) == "One two"
    assert opening("北京欢迎你。我们吃白切鸡。", 6) == "北京欢迎你。"
    assert len(opening("x" * 10_000)) == 400
    assert opening(EXAMPLE) == EXAMPLE and EXAMPLE not in OTHERS
