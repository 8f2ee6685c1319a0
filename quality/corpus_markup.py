"""Markup to a title and plain lines: HTML, Mallard, DocBook, reStructuredText, roff, MediaWiki, Markdown."""

from __future__ import annotations

import email
import html
import html.entities
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser


@dataclass(frozen=True)
class Document:
    title: str
    lines: list[str]


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
        bookinfo articleinfo programlisting screen figure mediaobject screenshot shortcut synopsis
        """.split()  # noqa: SIM905
    )

    JOINED = {"guiseq": " > ", "menuchoice": " > ", "keyseq": "+", "keycombo": "+"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []  # the tag that opened it, its text
        self.tag, self.words, self.skipping = "", [], []
        self.sequences: list[list[str]] = []  # of menus or keys: its tag, its parts so far

    def flush(self, tag: str) -> None:
        if text := " ".join("".join(self.words).split()):
            self.blocks.append((self.tag, text))
        self.tag, self.words = tag, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # LibreOffice hides the variants for other systems and programs; the one without a class is the default
        hidden = tag == "span" and "hidden" in dict(attrs) and "class" in dict(attrs)
        if tag in self.SKIPPED or hidden or (self.skipping and tag == self.skipping[-1]):
            self.skipping.append(tag)
        elif tag in self.JOINED:
            self.sequences.append([tag])
        elif self.sequences:
            if len(self.sequences[-1]) > 1:
                self.words.append(self.JOINED[self.sequences[-1][0]])
            self.sequences[-1].append(tag)
        if tag in self.BLOCKS:
            self.flush(tag if tag != "br" else self.tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipping and tag == self.skipping[-1]:
            self.skipping.pop()
        elif self.sequences and tag == self.sequences[-1][0]:
            self.sequences.pop()
        if tag in self.BLOCKS:
            self.flush("")

    def handle_data(self, data: str) -> None:
        if not self.skipping and not (self.sequences and data.isspace()):
            self.words.append(data)


HEADINGS = ("title", "h1", "h2", "h3", "h4", "h5", "h6")


def paragraphs_of(page: str) -> list[tuple[str, str]]:
    """(tag, text) of the headings and paragraphs of a page in HTML, Mallard or DocBook."""
    parser = _Paragraphs()
    parser.feed(with_entities(page))
    parser.close()
    parser.flush("")
    return parser.blocks


KDE = {  # entities of its DocBook files, which declare them elsewhere
    "LMB": "left mouse button", "MMB": "middle mouse button", "RMB": "right mouse button", "kde": "KDE",
    "kappname": "the application", "appname": "the application", "PgUp": "Page Up", "PgDn": "Page Down",
    "etc": "etc.", "ie": "i.e.", "eg": "e.g.", "systemsettings": "System Settings",
}  # fmt: skip


def with_entities(page: str) -> str:
    """Replace the entities of a DocBook page by what it declares, or by their names."""
    declared = dict(re.findall(r'<!ENTITY +([\w.-]+) +["\']([^"\']*)["\']', page))
    page = re.sub(r"<!DOCTYPE[^\[>]*\[.*?\]\s*>", "", page, flags=re.S)

    def replace(found: re.Match[str]) -> str:
        name = found.group(1)
        return found.group() if name + ";" in html.entities.html5 else declared.get(name) or KDE.get(name, name)

    for _ in range(2):  # an entity may stand for another
        page = re.sub(r"&([A-Za-z][\w.-]*);", replace, page)
    return page


def html_document(page: str) -> Document:
    """Title (the first h1, else h2, else <title>) and paragraphs of a page."""
    blocks = paragraphs_of(page)
    first = {tag: text for tag, text in reversed(blocks)}
    title = first.get("h1") or first.get("h2") or first.get("title") or ""
    return Document(title, [text for tag, text in blocks if tag not in (*HEADINGS, "dt")])


NUMBER = r"^(?:(?:Chapter|Appendix|第) ?[\dA-Z]+(?: ?章)?|\d+(?:\.\d+)*|[A-Z](?:\.\d+)+|[A-Z](?=\.))[.:]?\s+(?=\S)"


def html_sections(page: str) -> Iterator[Document]:
    """Each heading of a page with the paragraphs below it, numbers of sections removed."""
    title, lines = "", []
    for tag, text in [*paragraphs_of(page), ("h1", "")]:
        if tag in HEADINGS:
            if lines:
                yield Document(re.sub(rf"{NUMBER}|[¶#]$", "", title), lines)
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
    text = re.sub(r"\\[*(]?\(?\w\w?|\\\[\w+\]", "", text)
    return re.sub(r"``?([^`']*)''?", r"'\1'", text)


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


def info_sections(text: str) -> Iterator[Document]:
    """Each node of a GNU info manual with its heading; menus and indented examples go."""
    for node in text.split("\x1f")[1:]:
        found = re.search(r"^(\S.*)\n([*=\-.])\2{2,}$", node, flags=re.M)
        if not found or not node.lstrip("\n").startswith("File:"):
            continue
        body = re.split(r"^\* Menu:|^ *-+ Footnotes -+$", node[found.end() :], flags=re.M)[0]
        blocks = re.split(r"\n[ \t]*\n", body.strip("\n"))
        lines = [" ".join(b.split()) for b in blocks if not re.match(r" {5,}| *--? |\*Note", b.split("\n")[-1])]
        lines = [re.sub(r"\*[Nn]ote ([^:]*)::|\*[Nn]ote ([^:]*): [^.,]*(?=[.,])", r"\1\2", line) for line in lines]
        title = re.sub(r"^['‘`][^'’]*['’](?: \([^)]*\))?: ", "", re.sub(NUMBER, "", found.group(1)))
        title = re.sub(r"['‘`](\S[^'’]*)['’]", r"\1", title)
        yield Document(title, [line.replace("‘", "'").replace("’", "'") for line in lines])


def debconf_questions(templates: str, language: str) -> Iterator[Document]:
    """The questions that Debian's packages ask when they are installed: the explanation with the short form."""
    field = "Description" if language == "en" else "Description-zh_CN\\.UTF-8"
    for template in templates.split("\n\n"):
        if found := re.search(rf"^{field}: (.+)\n((?: .*\n?)+)", template, flags=re.M | re.I):
            paragraphs = [" ".join(p.split()) for p in re.split(r"^ \.$", found.group(2), flags=re.M)]
            if "${" not in found.group(1):  # filled in when it is asked
                yield Document(found.group(1), [p for p in paragraphs if "${" not in p])


TRAILER = re.compile(
    r"^[A-Z][\w-]+-by:|^(?:Fixes|Closes|Change-Id|Part-of|Bugzilla|Cc|Files|Link|See-also|Bug|Ref|Refs|References|"
    r"Resolves|Suggested|Reported|Debian-Bug|Gitlab|LP|X-[\w-]+|https?)\b ?[:#]|^\(cherry picked|^\[\w+: ",
    re.I | re.M,
)


def commits(log: str) -> Iterator[Document]:
    """Subject and body of the commits in a change log that was made from a git repository."""
    if re.search(r"^commit [0-9a-f]{40}", log, flags=re.M):
        for entry in re.split(r"^commit [0-9a-f]{40}.*\n", log, flags=re.M)[1:]:
            if document := commit("\n".join(row[4:] for row in entry.split("\n") if row.startswith("    ") or not row)):
                yield document
        return
    for entry in re.split(r"^\d{4}-\d\d-\d\d.*\n", log, flags=re.M)[1:]:
        entry = re.split(r"^[MADR]\t", entry, flags=re.M)[0].expandtabs(8)
        message = re.sub(r"^(?:\s*\* \S+ *\n)+", "", entry)  # the files that it touches
        rows = re.split(r"^ *\* ", re.sub(r"^\s*\* ", "", message), flags=re.M)[0].strip("\n").split("\n")
        rows = [row.strip() for row in rows]
        if len(rows) > 1 and rows[1][:1].isupper() and not rows[0].endswith((",", ";", ":")):
            rows.insert(1, "")  # many leave out the empty line; a first line that goes on is no subject
        if document := commit("\n".join(rows)):
            yield document


def commit(message: str) -> Document | None:
    """The first line of a commit's message, without the part that names the component, and its other paragraphs."""
    subject, _, body = message.strip().partition("\n")
    if body[:1] not in ("\n", "") or re.match(r"Merge|Revert|Release|Bump|Update .*translation", subject, flags=re.I):
        return None
    if len(subject) > 45 and body.strip()[:1].islower():
        return None  # the sentence goes on
    subject = re.sub(r"^(?:\[[^\]]*\] *)?(?:[\w./,{}*+-]+(?: ?[,/&] ?[\w./-]+)*: +){0,3}", "", subject)
    number = r"(?:bug|issue|fixes|closes|see|rhbz|fdo|lp|bgo|gh)?[ :#]*#?\d{3,}"
    subject = re.sub(rf"^{number}[ :,-]+|[ ,]*[(\[]{number}[^)\]]*[)\]]|[ ,-]+#\d+$", "", subject, flags=re.I)
    body = re.split(TRAILER, re.sub(r"^>.*\n", "", body, flags=re.M))[0]
    blocks = [b for b in re.split(r"\n[ \t]*\n", body) if not re.match(r"\s{2,}|>|\$|#\d|diff |@@|\|", b.strip("\n"))]
    lines = [" ".join(re.sub(r"^[-*o] +", "", b.strip()).split()) for b in blocks]
    return Document(subject[:1].upper() + subject[1:], [line for line in lines if line])


# sections of a README that say nothing of what the package does
ASIDE = re.compile(
    r"(?:table of )?contents?$|install|getting started|quick ?start|setup|licen[cs]e|licensing|contribut|change ?log|"
    r"sponsor|backers|support|authors?\b|credits|thanks|acknowledge?ments?|maintainers?|related|security|develop|test|"
    r"build|release|history|badges?|donat|community|links?$|resources|documentation$|docs$|see also|migrat|upgrad|"
    r"browser|compatib|requirements|prerequisites|dependenc|copyright|help|faq|questions|code of conduct|versions?|"
    r"who|users|todo|roadmap|status|目录|安装|许可|贡献|更新|赞助|交流|支持|开源协议|参与|联系|致谢|捐",
    re.I,
)


def readme_lines(text: str, markup: str = "markdown") -> list[str]:
    """The prose of a README, without the sections about installing, licences, contributors and the like."""
    text = text.replace("\r\n", "\n")
    if markup == "rst":
        return [line for s in rst_sections(text) if not ASIDE.match(s.title) for line in s.lines]
    text = re.sub(r"^( *)(```+|~~~+).*?^ *\2 *$", "", text, flags=re.S | re.M)
    text = re.sub(r"^(.+)\n(=+|-{3,}) *$", r"# \1", text, flags=re.M)
    parts = re.split(r"^#{1,6} +(.*?)[ #]*$|<h[1-6][^>]*>(.*?)</h[1-6]>", text, flags=re.M | re.S)
    kept = [parts[0]]
    for hashes, tagged, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if not ASIDE.match(re.sub(r"^\W+", "", inline_markdown(hashes or tagged or ""))):
            kept.append(body)
    lines = markdown_document("\n\n".join(kept)).lines
    lines = [re.sub(r"\[([^\]]*)\]|[`\\]", r"\1", line) for line in lines]
    return [line for line in lines if line and not re.match(r"[\w -]*: *$|table of contents", line, flags=re.I)]


FIRST = r"(?<=[\w)][.!?])\s+(?=[A-Z])|(?<=[。！？])"  # the end of a sentence


def readme_document(name: str, description: str, lines: list[str]) -> Document:
    """The description is the title; a sentence of the README that only repeats it goes."""

    def bare(text: str) -> str:
        text = re.sub(r"^\W*(?:the )?" + re.escape(name) + r"\W+(?:is |: )?", "", text.strip(), flags=re.I)
        return re.sub(r"^(?:an?|the|this is an?) ", "", " ".join(re.findall(r"\w+", text.lower())))

    title = re.sub(r":[a-z_]+:|[\U0001F000-\U0001FAFF\u2600-\u27BF\uFE0F\u200D]", "", inline_markdown(description))
    title = re.sub(
        r"^" + re.escape(name) + r"\s*(?:[-–—:|]\s+|is (?=an? |the ))", "", title.strip(), flags=re.I
    ).strip()
    first = re.split(FIRST, title, maxsplit=1)[0]
    title = first if len(first.split()) > 2 or re.search(r"[\u4e00-\u9fff]{4}", first) else title
    said, kept = bare(title), []
    for line in lines:
        if said and bare(line).startswith(said):  # the rest of the line may say more
            line = "".join(re.split(FIRST, line, maxsplit=1)[1:])
        kept.append(line)
    return Document(title[:1].upper() + title[1:], [line for line in kept if line])


FREE = re.compile(
    r"(?:The )?(?:MIT\b|X11|ISC|0?BSD|(?:new |modified |simplified )?BSD|Apache|CC0|CC[- ]BY[- ][34]\.0$|"
    r"Unlicense|WTFPL|Zlib|MPL|Mozilla Public|BlueOak|PSF|Python|Artistic|Public Domain|HPND|AFL|BSL-1\.0|Boost|OFL)",
    re.I,
)


def is_free(licence: object) -> bool:
    """Whether the field `license` of a package names a permissive licence (or offers one)."""
    if isinstance(licence, dict):
        licence = licence.get("type") or licence.get("name") or ""
    if isinstance(licence, list):
        return any(is_free(one) for one in licence)
    if not isinstance(licence, str) or len(licence) > 60:
        return False
    offers = re.split(r"\s+OR\s+|/", licence.strip(" ()"), flags=re.I)
    return any(all(FREE.match(part.strip(" ()")) for part in re.split(r"\s+AND\s+", offer)) for offer in offers)


def npm_description(package: str) -> tuple[str, str] | None:
    """Name and description in a package.json, if the licence is free."""
    try:
        fields = json.loads(package)
    except ValueError:
        return None
    if not is_free(fields.get("license") or fields.get("licenses")) or not isinstance(fields.get("description"), str):
        return None
    return str(fields.get("name", "")).split("/")[-1], fields["description"]


def wheel_description(metadata: str) -> Document | None:
    """The summary in a wheel's METADATA as the title and the description below, if the licence is free."""
    fields = email.message_from_string(metadata)
    classifiers = [c.split(" :: ")[-1] for c in fields.get_all("Classifier", []) if c.startswith("License ::")]
    if not is_free(fields["License-Expression"] or classifiers or fields["License"]) or not fields["Summary"]:
        return None
    body, kind = fields.get_payload(), fields["Description-Content-Type"] or "rst"
    if not isinstance(body, str):
        return None
    lines = readme_lines(body, "markdown" if "markdown" in kind else "rst")
    return readme_document(fields["Name"] or "", " ".join(fields["Summary"].split()), lines)
