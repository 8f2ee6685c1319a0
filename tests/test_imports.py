"""The package is built in layers: imports point downwards, and no modules import each other in a circle.

Imports inside functions and those for the type checker count, too.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import allmask

LAYERS = (  # lowest first; the parts of a layer may import each other
    "errors files devices terminal protobuf registry options mask kernels text config presets",
    "nn",
    "checkpoints model data losses",
    "objectives inference decoding training export",
    "tasks",
    "runs",
    "vision gan drift",
    "pipelines demo claims play serve cli __main__",
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer.split()}
ROOT = Path(allmask.__file__).parent
MODULES = {  # dotted name -> file; a package stands for its __init__.py
    ".".join(("allmask", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imported(source: str, package: str) -> set[str]:
    """The modules of allmask that a source in `package` imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], node.module or ""]) if node.level else node.module
            base = (base or "").rstrip(".")
            found |= {
                name if (name := f"{base}.{alias.name}") in MODULES else _home(base, alias) for alias in node.names
            }
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            found |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return {name for name in found if name.split(".")[0] == "allmask"}


def _home(base: str, alias: ast.alias) -> str:
    """`from allmask import Mask` imports what defines Mask."""
    return f"allmask.{allmask._HOME[alias.name]}" if base == "allmask" and alias.name in allmask._HOME else base


@cache
def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return imported(path.read_text(encoding="utf-8"), package) - {module}


def height(module: str) -> int:
    """The layer of a module; the package itself, which imports late, is above all."""
    parts = module.split(".")
    return HEIGHT[parts[1]] if len(parts) > 1 else len(LAYERS)


def test_imports_point_downwards():
    modules = sorted(MODULES.keys() - {"allmask"})
    assert [module for module in modules if module.split(".")[1] not in HEIGHT] == [], "give them a place in LAYERS"
    others = {module: sorted(imports_of(module) - {"allmask"}) for module in modules}
    assert [(one, name) for one in modules for name in others[one] if height(name) > height(one)] == []


def test_no_modules_import_each_other_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module in MODULES and module not in done and module != "allmask":
            for name in sorted(imports_of(module)):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import allmask.cli.main", "allmask.cli.main"),
        ("from allmask import model", "allmask.model"),
        ("from allmask import load", "allmask.model"),
        ("from allmask.mask.audit import audit", "allmask.mask.audit"),
        ("from . import transformer", "allmask.nn.transformer"),
        ("from .heads import TaskHead", "allmask.nn.heads"),
        ("from ..model import load", "allmask.model"),
        ("def late():\n    from allmask.model import load", "allmask.model"),
        ("if TYPE_CHECKING:\n    from allmask.model import Model", "allmask.model"),
        ("import_module('allmask.cli.mask')", "allmask.cli.mask"),
        ("from allmask.mask import Mask", "allmask.mask"),
    ],
)
def test_an_import_is_seen(source: str, module: str):
    assert imported(source, "allmask.nn") == {module}


def test_other_packages_do_not_count():
    assert imported("import torch\nfrom numpy import array", "allmask.nn") == set()
