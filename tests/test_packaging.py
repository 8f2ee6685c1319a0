"""A bare install has what the code imports: dependencies are declared, their tested versions pinned."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import allmask

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = {"transformers"}  # imported only when the user hands us a model of it


def plain(name: str) -> str:
    """A distribution's name as pip compares it, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def third_party(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"allmask"}


def imports() -> dict[str, set[str]]:
    """Third-party module -> the files that import it."""
    found: dict[str, set[str]] = {}
    for path in Path(allmask.__file__).parent.rglob("*.py"):
        for name in third_party(path):
            found.setdefault(name, set()).add(path.name)
    return found


def test_what_is_imported_is_declared():
    declared = {plain(line) for line in PROJECT["dependencies"]}
    owners = packages_distributions()
    missing = {
        name: sorted(files)
        for name, files in imports().items()
        if name not in REFERENCE and not {plain(owner) for owner in owners.get(name, [])} & declared
    }
    assert missing == {}, "declare these in pyproject.toml"


@pytest.mark.parametrize("group", ["core", *PROJECT["optional-dependencies"]])
def test_what_is_declared_is_pinned(group: str):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line) for line in lines if "==" in line}
    wanted = PROJECT["dependencies"] if group == "core" else PROJECT["optional-dependencies"][group]
    assert {plain(line) for line in wanted} - pinned == set()
