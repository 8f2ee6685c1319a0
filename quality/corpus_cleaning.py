"""Prose only, each sentence once, nothing of the test sets; and what makes a pair of a text and its title."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from corpus_markup import Document

TESTS = {  # what the weights are measured on: by language, the records and texts to keep out of the training
    "en": [*(f"{name}/{split}.jsonl" for name in ("acl-titles", "debian-synopses") for split in ("dev", "test")),
           "text/wikitext2-test.txt"],
    "zh": ["csl-titles/test.jsonl"],
}  # fmt: skip
GRAM = {"en": 8, "zh": 13}  # words or characters in a row that count as copied
REPEATED = 6  # a line in so many documents of a source is boilerplate
PAIR_CHARACTERS = {"en": 1600, "zh": 600}  # longer sources of pairs are cut at a sentence's end

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
    line = re.sub("[\x00-\x08\u00ad\u200b\ufeff]", "", line)
    line = re.sub(r"<?\b(?:https?|ftp)://[^\s，。）)>]+>?|\b[\w.+-]+@[\w-]+\.[\w.]+\b|\[\d+\]", "", line)
    line = re.sub(r"<\s*>|\s\(\s*\)|（\s*）", "", line)
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
    if language == "en" and sum(map(str.isalpha, title)) < 0.75 * len(title.replace(" ", "")):
        return None  # a date, a number of a version, code
    if language == "zh" and len(re.findall(r"[\u4e00-\u9fff]", title)) < 0.5 * len(title.replace(" ", "")):
        return None
    return {"source": text, "target": title} if fits and title.lower() != text.lower() else None
