"""Text that is on every machine: docstrings of the standard library, cut into pieces of given lengths."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import NamedTuple

from allmask.text import Tokenizer

MODULES = "argparse ast asyncio collections concurrent.futures configparser csv datetime decimal difflib email.message"
MODULES += " functools heapq inspect itertools json logging optparse os pathlib pickle random re shutil socket sqlite3"
MODULES += " statistics string subprocess tarfile tempfile textwrap threading typing unittest urllib.request zipfile"


class Piece(NamedTuple):
    text: str
    module: str  # in which it begins


def pieces(tokenizer: Tokenizer, lengths: Iterable[int]) -> list[Piece]:
    """Consecutive pieces of whole words with at most the given numbers of tokens, but at least one word."""
    found = [(word, name) for name in MODULES.split() for word in documentation(name)]
    words, modules = zip(*found, strict=True)
    sizes = [len(encoded) for encoded in tokenizer.encode_batch(words, special=False)]
    made, at = [], 0
    for length in lengths:
        start = at
        while length >= sizes[at] or start == at:
            length, at = length - sizes[at], at + 1
        made.append(Piece(" ".join(words[start:at]), modules[start]))
    return made


def documentation(name: str) -> list[str]:
    """The words of a module's docstrings."""
    module = importlib.import_module(name)
    members = sorted(vars(module).items())
    chosen = [value for _, value in members if inspect.isclass(value) or inspect.isfunction(value)]
    return " ".join(inspect.getdoc(value) or "" for value in [module, *chosen]).split()
