"""How this program was called: commands that it prints can be typed as they are printed, in any environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

NAME = "allmask"


def program() -> list[str]:
    """Return the words that call this command line here.

    This is `allmask` if that name leads to the running program, else its path, such as `.venv/bin/allmask`; or
    `python -m allmask`, if it was started so.
    """
    started = Path(sys.argv[0])
    if started.parts[-2:] == (NAME, "__main__.py"):
        return [_shortest(sys.executable, "python"), "-m", NAME]
    path = shutil.which(sys.argv[0]) if started.stem == NAME else None  # Windows leaves its .exe out
    return [NAME] if path is None else [_shortest(path, NAME)]


def as_called(text: str) -> str:
    """Return a text in which every command, such as `allmask mask prefix`, begins with the words of `program`."""
    words = program()
    if words == [NAME]:
        return text
    if os.name == "nt":
        from subprocess import list2cmdline as join
    else:
        from shlex import join
    line = join(words)
    commands = "|".join(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return re.sub(rf"(?<![\w./-])(?<!-m ){NAME}(?= (--|COMMAND\b|({commands})\b))", lambda _: line, text)


def _shortest(path: str, name: str) -> str:
    """Return the name of a program if the shell finds this very file by it, else its path, relative if it is below."""
    try:
        found, path = shutil.which(name), os.path.abspath(path)
        # In one folder, python and python3.11 are the same. The python of another environment is not, though it is a
        # link to the same file.
        folder = os.path.dirname
        if found is not None and folder(os.path.abspath(found)) == folder(path) and os.path.samefile(found, path):
            return name
        below = os.path.relpath(path)
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return path
    return path if below.startswith(os.pardir) else below if os.path.dirname(below) else os.path.join(os.curdir, below)
