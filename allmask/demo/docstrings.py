"""Texts with titles that every Python has: docstrings. What follows the summary line is the text, the line the title.

Files are parsed, never imported. The order of files and pairs depends on nothing but their names and contents.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "site-packages", "__pycache__", "_vendor", "vendor", "lib2to3", "idlelib", "ensurepip")
)
SPLITS = ("train", "dev", "test")
SHARES = {"test": 0.08, "dev": 0.05}  # of all pairs; the rest is for training
LARGEST_HELD_OUT = 300  # pairs; a file with more is worth more in training
SAME_OPENING = 12  # summaries that may begin with the same three words in one package
RUN = 8  # words in a row that a held-out text may not share with one for training
LEAST_WORDS = 10  # of a text
SUPPORT = 0.5  # of the words that matter in a title, the share that its text must speak of
LOOKED_AT = 50  # words of a text, from its beginning


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Pair:
    source: str  # the docstring's text after its first line
    target: str  # its first line
    package: str  # "asyncio", "torch"
    where: str  # "asyncio/tasks.py:357"

    @property
    def file(self) -> str:
        """Pairs of one file are never on two sides."""
        return self.where.rpartition(":")[0] or self.where


@dataclass
class Found:
    """What a search brought, with its counts."""

    splits: dict[str, list[Pair]]
    files: int = 0
    docstrings: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def pairs(self) -> int:
        return sum(map(len, self.splits.values()))


def find_pairs(roots: Sequence[Path], per_package: int = 120, workers: int = 1) -> Found:
    """Pairs from the Python files under some folders, split by file; of each package at most so many files."""
    found = Found({})
    pairs: list[Pair] = []
    for some, files, docstrings in _searched(list(_packages(roots).items()), per_package, workers):
        pairs += some
        found.files += files
        found.docstrings += docstrings
    found.splits = split(list(_without_twins(pairs, found.dropped)), found.dropped)
    return found


Package = tuple[str, list[tuple[Path, str]]]  # its name; the path and the name of each file
Searched = tuple[list[Pair], int, int]  # pairs, files, docstrings


def _searched(packages: Sequence[Package], per_package: int, workers: int) -> Iterator[Searched]:
    """The packages one after another, whoever looks through them."""
    look = partial(_pairs_of_package, per_package=per_package)
    if workers < 2:
        yield from map(look, packages)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:  # not fork: torch has threads by now
        yield from pool.map(look, packages)


def _pairs_of_package(package: Package, per_package: int) -> Searched:
    name, files = package
    trees = ((file, tree) for path, file in sorted(files, key=lambda file: _hash(file[1])) if (tree := _parsed(path)))
    pairs: list[Pair] = []
    searched = docstrings = 0
    for file, tree in islice(trees, per_package):
        searched += 1
        for line, docstring in _docstrings(tree):
            docstrings += 1
            pair = title_and_text(docstring)
            if pair is not None:
                pairs.append(Pair(pair[1], pair[0], name, f"{file}:{line}"))
    return pairs, searched, docstrings


# A docstring of several paragraphs: a colon ends the line before it, an empty line follows its first.
_PROMISING = re.compile(rb":[ \t]*\r?\n\s*r?(\"\"\"|''')\s*[^\"\n]{8,}\r?\n[ \t]*\r?\n")

# ---- files -------------------------------------------------------------------------------------------------------


def python_folders(installed: bool = True) -> list[Path]:
    """Where the standard library is, and what is installed."""
    places = sysconfig.get_paths()
    names = ("stdlib", "purelib", "platlib") if installed else ("stdlib",)
    return list(dict.fromkeys(Path(places[name]) for name in names))


def _packages(roots: Iterable[Path]) -> dict[str, list[tuple[Path, str]]]:
    """The Python files under some folders as (path, name), by the package or module at the top that they belong to."""
    packages: dict[str, list[tuple[Path, str]]] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not SKIPPED_FOLDERS.intersection(name.parts) and not name.name.startswith(("test_", "conftest")):
                packages.setdefault(name.parts[0].removesuffix(".py"), []).append((path, name.as_posix()))
    return packages


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _definitions(tree):
        docstring = ast.get_docstring(node)
        if docstring:
            yield node.lineno, docstring


def _definitions(node: ast.AST) -> Iterator[Definition]:
    """Functions, methods and classes, also those under an `if` or `try`; searching expressions would be slow."""
    for name in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, name, []):
            if isinstance(child, Definition):
                yield child
            if isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.ExceptHandler):
                yield from _definitions(child)


def _parsed(path: Path) -> ast.Module | None:
    """The tree of a file that may hold a pair; None also for a template or a file for another Python."""
    try:
        content = path.read_bytes()
        if not _PROMISING.search(content):  # most files; parsing them would take a minute
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the escapes in other people's strings
            return ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# ---- one docstring -----------------------------------------------------------------------------------------------

_SECTION = re.compile(
    r"(args|arguments|parameters?|params|keyword arguments|keyword args|kwargs|returns?|yields?|raises|attributes|"
    r"examples?( usage)?|usage|notes?|references|see also|warns|warnings?|other parameters|inputs?|outputs?|methods)"
    r"(:+.{0,20}|)",
    re.IGNORECASE,
)
_FIELD = re.compile(r"[:@](param|parameter|arg|type|returns?|rtype|raises?|ivar|cvar|keyword|key|yields?|var)\b")
_MARKUP = [  # in this order
    (re.compile(r":[\w:+-]+:`[!~]?([^`<]*?)\s*(<[^`]*>)?`"), r"\1"),  # :class:`~a.B`
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),  # `words <address>`_
    (re.compile(r"\[([^\]]+)\]\([^)\s]+\)"), r"\1"),  # [words](address)
    (re.compile(r"\[[\w-]+\]_"), ""),  # [1]_
    (re.compile(r"`+([^`]+)`+_{0,2}"), r"\1"),  # `code`, ``code``
    (re.compile(r"(?<!\w)\*{1,2}(\w[^*\n]*?)\*{1,2}(?!\w)"), r"\1"),  # *word*
    (re.compile(r"::(?=\s|$)"), ":"),
    (re.compile(r"\s+"), " "),
]
_SMALL_WORDS = re.compile(
    "a|an|the|this|that|its|it|is|are|be|of|to|in|on|for|with|from|by|as|at|into|and|or|not|if|when|than"
)
_UNLIKE_A_TITLE = re.compile(
    r"[<>={}|\\]|->|\w\(.*\)|https?:|^\W|deprecated|todo|fixme|^(see|note|internal|same as)\b", re.I
)


def title_and_text(docstring: str) -> tuple[str, str] | None:
    """(summary, text) of a docstring without markup; None if it has not both, or they are not prose."""
    first, _, rest = docstring.strip().partition("\n\n")
    title = _plain(first).rstrip(" .:;!")
    if first.count("\n") > 1 or not 3 <= len(title.split()) <= 16:
        return None
    if _UNLIKE_A_TITLE.search(title) or _letters(title) < 0.75:
        return None
    text = prose(rest)
    if len(text.split()) < LEAST_WORDS or _letters(text) < 0.65 or words(title) in words(text):
        return None
    return (title, text) if support(title, text) >= SUPPORT else None


def support(title: str, text: str) -> float:
    """The share of a title's words, small ones aside, that begin like a word near the beginning of its text.

    A title that speaks of other things than its text cannot be learnt from it, nor fairly be asked for.
    """
    told = {_beginning(word) for word in words(text).split()[:LOOKED_AT]}
    asked = [_beginning(word) for word in words(title).split() if not _SMALL_WORDS.fullmatch(word)]
    return sum(word in told for word in asked) / max(1, len(asked))


def _beginning(word: str) -> str:
    """Of a word without its plural: lines and line, returned and returns are one."""
    return word.removesuffix("s")[:5]


def prose(text: str) -> str:
    """The sentences of a docstring: no tables of parameters, no examples, no directives, no markup."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip("\n").splitlines()
        if not lines or _is_heading(lines):
            break  # what follows are parameters, results, examples
        told = [line for line in lines if not _is_markup(line)]
        if not lines[0].startswith((" ", "\t", ".. ")) and ">>>" not in paragraph:
            kept += told
    return _plain(" ".join(kept))


def _is_heading(lines: list[str]) -> bool:
    underlined = len(lines) > 1 and re.fullmatch(r"\s*([-=~^])\1{2,}\s*", lines[1])
    return bool(underlined or _SECTION.fullmatch(lines[0].strip().strip("*#")) or _FIELD.match(lines[0].strip()))


def _is_markup(line: str) -> bool:
    return bool(_FIELD.match(line.strip()) or re.match(r"\s*(\.\. |[-=~^+|#*]{3})", line))


def _plain(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def _letters(text: str) -> float:
    """The share of the characters, spaces aside, that are plain letters."""
    solid = text.replace(" ", "")
    return sum(c.isascii() and c.isalpha() for c in solid) / max(1, len(solid))


def words(text: str) -> str:
    """The text as lower-case words alone: equal for texts that differ in case, dots and markup."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


# ---- no twins, and splits that share nothing ---------------------------------------------------------------------


def _without_twins(pairs: Iterable[Pair], dropped: Counter[str]) -> Iterator[Pair]:
    """Each summary once, each text once, and few summaries of one package with the same opening words."""
    seen: set[str] = set()
    openings: Counter[str] = Counter()
    for pair in pairs:
        title, text = words(pair.target), words(pair.source)
        opening = " ".join([pair.package, *title.split()[:3]])
        openings[opening] += 1
        if title in seen or text in seen:
            dropped["twins"] += 1
        elif openings[opening] > SAME_OPENING:
            dropped["boilerplate"] += 1
        else:
            seen |= {title, text}
            yield pair


def split(pairs: Sequence[Pair], dropped: Counter[str]) -> dict[str, list[Pair]]:
    """Whole files to test, dev and training; then held-out texts that resemble one for training are dropped."""
    sizes = Counter(pair.file for pair in pairs)
    room = {name: share * len(pairs) for name, share in SHARES.items()}
    home = dict.fromkeys(sizes, "train")
    for file in sorted(sizes, key=_hash):
        fitting = [name for name in room if sizes[file] <= min(room[name], LARGEST_HELD_OUT)]
        if fitting:
            home[file] = fitting[0]
            room[fitting[0]] -= sizes[file]
    parts = {name: [pair for pair in pairs if home[pair.file] == name] for name in SPLITS}
    known: set[int] = set()
    for name in SPLITS:
        before = len(parts[name])
        parts[name] = [pair for pair in parts[name] if name == "train" or known.isdisjoint(_runs(pair))]
        dropped["like one for training"] += before - len(parts[name])
        known.update(run for pair in parts[name] for run in _runs(pair))
    return {name: sorted(part, key=lambda pair: _hash(pair.where)) for name, part in parts.items()}


def _runs(pair: Pair) -> set[int]:
    """Every run of words of the text and of the title; a short title is one run."""
    return {
        hash(tuple(told[start : start + RUN]))
        for told in (words(pair.source).split(), words(pair.target).split())
        for start in range(max(1, len(told) - RUN + 1))
    }


def _hash(text: str) -> bytes:
    """Scatters names in the same way everywhere."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
