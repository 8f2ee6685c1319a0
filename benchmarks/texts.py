"""Text that every machine has: docstrings of Python's own modules, cut into stretches of the lengths that are asked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import NamedTuple

from allmask.text import Tokenizer

MODULES = "argparse ast asyncio collections concurrent.futures configparser csv datetime decimal difflib email.message"
MODULES += " functools heapq inspect itertools json logging optparse os pathlib pickle random re shutil socket sqlite3"
MODULES += " statistics string subprocess tarfile tempfile textwrap threading typing unittest urllib.request zipfile"


class Stretch(NamedTuple):
    text: str
    module: str  # the one where it begins


def stretches(tokenizer: Tokenizer, rooms: Iterable[int]) -> list[Stretch]:
    """One after another, each of as many whole words as have room for their tokens, or of one word."""
    found = [(word, name) for name in MODULES.split() for word in documentation(name)]
    words, modules = zip(*found, strict=True)
    sizes = [len(encoded) for encoded in tokenizer.encode_batch(words, special=False)]
    made, at = [], 0
    for room in rooms:
        begin = at
        while room >= sizes[at] or begin == at:
            room, at = room - sizes[at], at + 1
        made.append(Stretch(" ".join(words[begin:at]), modules[begin]))
    return made


def documentation(name: str) -> list[str]:
    """The words of a module's docstrings."""
    module = importlib.import_module(name)
    members = sorted(vars(module).items())
    chosen = [value for _, value in members if inspect.isclass(value) or inspect.isfunction(value)]
    return " ".join(inspect.getdoc(value) or "" for value in [module, *chosen]).split()
