"""Pairs of text and title from docstrings, which every Python installation has: the summary line is the title.

Files are parsed, never imported. The order of files and pairs depends only on their names and contents.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
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
LARGEST_HELD_OUT = 300  # pairs; a larger file is used for training
SAME_OPENING = 12  # titles of one package that may begin with the same three words
NGRAM = 8  # a held-out text shares no n-gram of this many words with a training text
LEAST_WORDS = 10  # of a text
SUPPORT = 0.5  # share of the content words of a title that its text must contain
SUPPORT_WORDS = 50  # words of a text, from its beginning, in which they are looked for


@dataclass(frozen=True)
class Pair:
    source: str  # the docstring's text after its first line
    target: str  # its first line
    package: str  # "asyncio", "torch"
    where: str  # "asyncio/tasks.py:357"

    @property
    def file(self) -> str:
        """The file; all pairs of a file are in one split."""
        return self.where.rpartition(":")[0] or self.where


@dataclass
class Found:
    """The pairs that were found, by split, and counts."""

    splits: dict[str, list[Pair]]
    files: int = 0
    docstrings: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def find_pairs(roots: Sequence[Path], per_package: int = 120, workers: int = 1) -> Found:
    """Return the pairs of the Python files under `roots`, split by file, from at most `per_package` files of each."""
    found = Found({})
    pairs: list[Pair] = []
    packages, search = list(_packages(roots).items()), partial(_search, per_package=per_package)
    with ExitStack() as stack:
        # spawn, not fork: torch has threads by now
        pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn"))) if workers > 1 else None
        for of_package, files, docstrings in (pool.map if pool else map)(search, packages):
            pairs += of_package
            found.files += files
            found.docstrings += docstrings
    found.splits = split(list(_without_duplicates(pairs, found.dropped)), found.dropped)
    return found


Package = tuple[str, list[tuple[Path, str]]]  # its name; the path and the name of each file


def _search(package: Package, per_package: int) -> tuple[list[Pair], int, int]:
    """Return the pairs of a package, and the numbers of files and docstrings searched."""
    name, files = package
    trees = ((file, tree) for path, file in sorted(files, key=lambda file: _hash(file[1])) if (tree := _parsed(path)))
    pairs: list[Pair] = []
    searched = docstrings = 0
    with _without_collection():
        for file, tree in islice(trees, per_package):
            searched += 1
            for line, docstring in _docstrings(tree):
                docstrings += 1
                pair = title_and_text(docstring)
                if pair is not None:
                    pairs.append(Pair(pair[1], pair[0], name, f"{file}:{line}"))
    return pairs, searched, docstrings


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector: a syntax tree has no cycles, and looking for them takes as long as parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A docstring of several paragraphs: a colon ends the line before it, an empty line follows its first line.
_PROMISING = re.compile(rb":[ \t]*\r?\n\s*r?(\"\"\"|''')\s*[^\"\n]{8,}\r?\n[ \t]*\r?\n")

# ---- files -------------------------------------------------------------------------------------------------------


def python_folders(installed: bool = True) -> list[Path]:
    """Return the folder of the standard library and those of installed packages."""
    names = ("stdlib", "purelib", "platlib") if installed else ("stdlib",)
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in names))


def _packages(roots: Iterable[Path]) -> dict[str, list[tuple[Path, str]]]:
    """Return the Python files under some folders, as (path, name), by top-level package or module."""
    packages: dict[str, list[tuple[Path, str]]] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not SKIPPED_FOLDERS.intersection(name.parts) and not name.name.startswith(("test_", "conftest")):
                packages.setdefault(name.parts[0].removesuffix(".py"), []).append((path, name.as_posix()))
    return packages


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of functions, methods and classes, also under `if` and `try`.

    Walking through all expressions would be slow.
    """
    for name in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, name, []):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(child)
                if docstring:
                    yield child.lineno, docstring
            if isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.ExceptHandler):
                yield from _docstrings(child)


def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file that may hold a pair; None for others, and for files that cannot be parsed."""
    try:
        content = path.read_bytes()
        if not _PROMISING.search(content):  # most files; parsing them would take a minute
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in strings
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
_DIRECTIVE = re.compile(r"\.\. |[-=~^+|#*]{3}")
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
    """Return (title, text) of a docstring, without markup; None if it lacks one of them, or they are not prose."""
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
    """Return the share of a title's content words whose stem is in the first words of its text.

    A title without such support can neither be learnt nor predicted from its text.
    """
    stems = {_stem(word) for word in words(text).split()[:SUPPORT_WORDS]}
    wanted = [_stem(word) for word in words(title).split() if not _SMALL_WORDS.fullmatch(word)]
    return sum(stem in stems for stem in wanted) / max(1, len(wanted))


def _stem(word: str) -> str:
    """Return the first letters of a word without a plural s: the same for line and lines, returned and returns."""
    return word.removesuffix("s")[:5]


def prose(text: str) -> str:
    """Return the sentences of a docstring, without parameters, examples, directives and markup."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip("\n").splitlines()
        if not lines or _is_heading(lines):
            break  # what follows are parameters, results, examples
        if not lines[0].startswith((" ", "\t", ".. ")) and ">>>" not in paragraph:
            kept += [line for line in map(str.strip, lines) if not (_FIELD.match(line) or _DIRECTIVE.match(line))]
    return _plain(" ".join(kept))


def _is_heading(lines: list[str]) -> bool:
    underlined = len(lines) > 1 and re.fullmatch(r"\s*([-=~^])\1{2,}\s*", lines[1])
    return bool(underlined or _SECTION.fullmatch(lines[0].strip().strip("*#")) or _FIELD.match(lines[0].strip()))


def _plain(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def _letters(text: str) -> float:
    """Return the share of ASCII letters among all characters except spaces."""
    solid = text.replace(" ", "")
    return sum(c.isascii() and c.isalpha() for c in solid) / max(1, len(solid))


def words(text: str) -> str:
    """Return the words of a text in lower case: the same for texts that differ in case, punctuation and markup."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


# ---- duplicates and splits ---------------------------------------------------------------------------------------


def _without_duplicates(pairs: Iterable[Pair], dropped: Counter[str]) -> Iterator[Pair]:
    """Yield each title and each text once, and few titles of a package with the same first words."""
    seen: set[str] = set()
    openings: Counter[str] = Counter()
    for pair in pairs:
        title, text = words(pair.target), words(pair.source)
        opening = " ".join([pair.package, *title.split()[:3]])
        openings[opening] += 1
        if title in seen or text in seen:
            dropped["duplicates"] += 1
        elif openings[opening] > SAME_OPENING:
            dropped["boilerplate"] += 1
        else:
            seen |= {title, text}
            yield pair


def split(pairs: Sequence[Pair], dropped: Counter[str]) -> dict[str, list[Pair]]:
    """Assign whole files to test, dev and train; then drop held-out texts that overlap with training texts."""
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
        parts[name] = [pair for pair in parts[name] if name == "train" or known.isdisjoint(_ngrams(pair))]
        dropped["overlap"] += before - len(parts[name])
        known.update(ngram for pair in parts[name] for ngram in _ngrams(pair))
    return {name: sorted(part, key=lambda pair: _hash(pair.where)) for name, part in parts.items()}


def _ngrams(pair: Pair) -> set[int]:
    """Return hashes of all n-grams of text and title; a shorter title is one n-gram."""
    return {
        hash(tuple(tokens[start : start + NGRAM]))
        for tokens in (words(pair.source).split(), words(pair.target).split())
        for start in range(max(1, len(tokens) - NGRAM + 1))
    }


def _hash(text: str) -> bytes:
    """Return a key that sorts names in a random but fixed order."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
