"""Imports point only downwards, also those inside functions and those for the type checker."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import allmask

LAYERS = [  # lowest first: a module imports only from its own line or from lines above
    "errors",
    "native",
    "config",
    "masks",
    "text",
    "prover",
    "drawing",
    "dropout",
    "documents",
    "attention",
    "branches",
    "distances",
    "layers",
    "initialise",
    "transformer",
    "recurrent",
    "elmo",
    "torch_like",
    "chains",
    "token_loss",
    "heads",
    "checkpoints",
    "model",
    "inference",
    "data",
    "objectives",
    "vision",
    "decoding",
    "training",
    "tasks",
    "pipelines",
    "gan",
    "drift",
    "audit",
    "demo",
    "cli",
    "__main__",
]
ROOT = Path(allmask.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_names(source: str, package: list[str]) -> list[str]:
    """Every dotted name that a module of `package` imports, relative imports written out."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names += [word.value for word in node.args if isinstance(word, ast.Constant)]
    return names


def layer_of(dotted: str) -> str | None:
    """The layer a name belongs to; None if it is not of this package. `allmask.Mask` belongs to its home, masks."""
    root, _, rest = dotted.partition(".")
    first = rest.split(".")[0]
    if root != "allmask" or first == "__version__":
        return None
    return allmask._HOME.get(first, first)


def climbs(module: str, source: str, package: list[str]) -> list[str]:
    """The imports of this source that point upwards from the layer `module`."""
    height = LAYERS.index(module)
    names = [name for name in imported_names(source, package) if layer_of(name) is not None]
    return [name for name in names if layer_of(name) not in LAYERS[: height + 1]]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_downwards(path: Path):
    module = path.parts[0].removesuffix(".py")
    assert module in LAYERS, f"{path}: give {module} its place in LAYERS"
    source = (ROOT / path).read_text(encoding="utf-8")
    assert climbs(module, source, ["allmask", *path.parts[:-1]]) == []


@pytest.mark.parametrize(
    "source",
    [
        "import allmask.cli",
        "from allmask import model",
        "from allmask import load",
        "from allmask.audit import audit",
        "from . import transformer",
        "from .heads import head",
        "def late():\n    from allmask.model import load",
        "if TYPE_CHECKING:\n    from allmask.model import Model",
        "import_module('allmask.cli.mask')",
        "from allmask import *",
        "import allmask",
    ],
)
def test_a_climbing_import_is_seen(source: str):
    assert climbs("attention", source, ["allmask"]) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from allmask import __version__",
        "from allmask.masks import Mask",
        "from allmask import Mask",
        "from .errors import DataError",
        "from allmask.attention import attend",
    ],
)
def test_a_downward_import_is_fine(source: str):
    assert climbs("attention", source, ["allmask"]) == []


def test_relative_imports_inside_a_package():
    assert imported_names("from ..model import load", ["allmask", "checkpoints"]) == ["allmask.model.load"]
    assert imported_names("from . import files", ["allmask", "checkpoints"]) == ["allmask.checkpoints.files"]
