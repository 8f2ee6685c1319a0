"""Cleaning of the corpora on tiny made-up inputs; nothing is downloaded."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import corpora
import pytest
from corpora import Document, Source


def test_html_leaves_out_code_navigation_and_hidden_variants():
    page = (
        "<title>Site</title><nav><p>Home</p></nav><h1>Cats</h1><p>A cat is <b>small</b>.</p><pre>x = 1</pre>"
        '<p>Press <span><span hidden="true" class="MAC">Cmd<i>!</i></span><span hidden="true">Ctrl</span></span>.'
        "</p>"
        "<h2>1.2. Food</h2><table><tr><td>milk</td></tr></table><p>They eat fish.</p>"
    )
    assert corpora.html_document(page) == Document("Cats", ["A cat is small.", "Press Ctrl.", "They eat fish."])
    assert list(corpora.html_sections(page)) == [
        Document("Cats", ["A cat is small.", "Press Ctrl."]), Document("Food", ["They eat fish."]),
    ]  # fmt: skip


def test_mallard_pages_are_read_like_html():
    page = "<page><info><desc>no</desc></info><title>Send files</title><p>Choose a file.</p></page>"
    assert list(corpora.html_sections(page)) == [Document("Send files", ["Choose a file."])]


def test_wikitext():
    text = "{{Box|a={{b}}}}'''Cats''' are [[animal|animals]] <ref>x</ref>of the [[house]].\n* item\n"
    text += "== See also ==\n[[Dog]]"
    assert corpora.wikitext_lines(text) == ["Cats are animals of the house.", ""]


def test_markdown_title_and_paragraphs():
    page = "tar\n===\n\nKeeps *many* files\nin [one](x).\n\n```\ncode\n```\n\n- an item\n\n| a | b |\n"
    assert corpora.markdown_document(page) == Document("tar", ["Keeps many files in one.", "an item"])
    assert corpora.markdown_document('---\ntitle: "Front"\n---\n# Other\n\nText.\n') == Document("Front", ["Text."])


def test_restructured_text_sections():
    page = ".. comment\n\n====\nTop\n====\n\nFirst ``code`` and\n:ref:`a link <target>`.\n\n    literal\n\n"
    page += "Sub\n---\n\nSecond *part*.\n"
    assert list(corpora.rst_sections(page)) == [
        Document("Top", ["First code and a link."]), Document("Sub", ["Second part."]),
    ]  # fmt: skip


def test_man_page():
    page = (
        '.\\" comment\n.TH LS 1\n.SH NAME\nls \\- list directory contents\n'
        ".SH DESCRIPTION\nLists \\fIfiles\\fP of\n.B a folder\n"
        ".PP\nSee\n.BR cp (1).\n.nf\ncode\n.fi\n.SH BUGS\nnone\n"
    )
    assert corpora.man_document(page) == Document("list directory contents", ["Lists files of a folder", "See cp(1)."])
    assert corpora.man_document(".SH NAME\nls\n") is None


def test_gettext_catalogue():
    messages, translations = [b"", b"menu\x04Open"], [b"header", "打开".encode()]
    tables, blob, at = b"", b"", 28 + 32
    for text in [*messages, *translations]:
        tables, blob = tables + struct.pack("<2I", len(text), at + len(blob)), blob + text + b"\0"
    data = struct.pack("<7I", 0x950412DE, 0, 2, 28, 28 + 16, 0, 0) + tables + blob
    assert list(corpora.catalog(data)) == [("", "header"), ("Open", "打开")]


def test_sentences():
    assert corpora.sentences('Mr. Smith came. "He left." Then it rained.', "en") == [
        "Mr. Smith came.",
        '"He left."',
        "Then it rained.",
    ]
    assert corpora.sentences("他来了。“走吧。”她说。", "zh") == ["他来了。", "“走吧。”", "她说。"]


def test_prose():
    assert corpora.is_prose("The cat sat on the mat and slept.", "en")
    assert not corpora.is_prose("int main(void) { return x[0]; }", "en")
    assert not corpora.is_prose("El gato se ha dormido sobre una alfombra roja", "en")
    assert corpora.is_prose("这个函数返回文件的大小。", "zh") and not corpora.is_prose("Click OK 确定 to go on", "zh")


def test_clean_drops_boilerplate_and_duplicates():
    def page(number: int) -> Document:
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        own = f"This is the text of page {words[number]}, which has a sentence that no other page of the set has got."
        return Document(
            "t",
            [
                f"{own} It is free software and you may share it with all. "
                f"The {words[number]} end of it is near, and all of us are glad to see it."
            ],
        )

    cleaned = corpora.clean([*(page(n) for n in range(8)), page(0)], "en")
    assert len(cleaned) == 8
    assert not any("free software" in line for document in cleaned for line in document.lines)


def test_without_overlap_finds_copies_across_lines():
    copied = "one two three four five six seven eight"
    held_out = set(corpora.grams(corpora.units(copied, "en"), 8))
    others = [f"other line {n}" for n in range(40)]
    kept = list(corpora.without_overlap([
        Document("", [*others, "x One, two three", "four five six seven eight y"]),  # two lines of many
        Document("", ["a", copied]),  # half of it
        Document(copied, others),  # the title itself
        Document("", ["one two three four five six seven nine"]),
    ], held_out, "en"))  # fmt: skip
    assert kept == [Document("", others), Document("", ["one two three four five six seven nine"])]


def test_test_sets_are_read(tmp_path: Path):
    for name in corpora.TESTS["zh"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps({"source": "一二三四五六七八九十甲乙丙丁", "target": "题"}) + "\n")
    held_out = corpora.test_grams(tmp_path, "zh")
    assert len(held_out) == 2
    assert not list(corpora.without_overlap([Document("", ["一二三四五六七，八九十甲乙丙。"])], held_out, "zh"))


def test_pairs():
    text = "These are words of a text that is long enough to be given a title by somebody who has read it."
    assert corpora.pair_of(Document("A title.", [text]), "en") == {"source": text, "target": "A title"}
    assert corpora.pair_of(Document("Overview", [text]), "en") is None
    assert corpora.pair_of(Document("A title", ["Too short."]), "en") is None
    cut = corpora.pair_of(Document("A title", [text] * 40), "en")
    assert cut and len(cut["source"]) <= corpora.PAIR_CHARACTERS["en"] and cut["source"].endswith(".")


def test_unpack_stays_in_its_folder(tmp_path: Path):
    wheel = tmp_path / "a-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("../out.txt", "x")
    corpora.unpack(wheel, tmp_path / "wheel")
    assert not (tmp_path / "out.txt").exists()
    ball = tmp_path / "scope-name-0.2.3.tgz"
    with tarfile.open(ball, "w:gz") as file:
        file.addfile(tarfile.TarInfo("../out.txt"), io.BytesIO())
    with pytest.raises(tarfile.FilterError):
        corpora.unpack(ball, tmp_path / "ball")
    assert [corpora.version(p) for p in (wheel, ball, Path("a_1%3a3.0-37_all.deb"))] == ["1.2", "0.2.3", "1:3.0-37"]


def test_command_goes_on_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = "The cat sat on the mat and it slept there for a long time, "
    text += "as on most days, until a dog came in from the garden and woke it."

    def download(package: str, _: Path) -> Path:
        if package == "npm:missing":
            raise corpora.Unavailable(f"{package}: not found")
        wheel = tmp_path / "cats-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("page.html", f"<h1>On cats</h1><p>{text}</p>")
        return wheel

    read = corpora.sections("*.html")
    sources = [
        Source(n, "en", "both", [p], "MIT", read, "sections")
        for n, p in (("none", "npm:missing"), ("cats", "pip:cats"))
    ]
    monkeypatch.setattr(corpora, "SOURCES", sources)
    monkeypatch.setattr(corpora, "download", download)
    out = tmp_path / "out"
    assert corpora.main(["--out", str(out), "--tests", str(tmp_path / "no")]) == 1
    shown = capsys.readouterr()
    assert "none: cannot be had: npm:missing: not found" in shown.err and "overlap is NOT removed" in shown.err
    assert (out / "en/text-cats.txt").read_text() == text + "\n"
    assert json.loads((out / "en/pairs-cats.jsonl").read_text()) == {"source": text, "target": "On cats"}
    assert "| cats | en | pip:cats 1.0 | MIT | 1 |" in (out / "SOURCES.md").read_text()
    (out / "en/text-cats.txt").write_text("kept\n")  # a finished source is skipped
    assert (
        corpora.main(["--out", str(out), "--only", "cats"]) == 0 and (out / "en/text-cats.txt").read_text() == "kept\n"
    )
