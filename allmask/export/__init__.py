"""Models for other runtimes: ONNX (onnx_graph.py) and CTranslate2 (ctranslate2_spec.py)."""

from __future__ import annotations

from importlib.util import find_spec

from allmask.errors import UsageError

PACKAGES = {"hf": (), "onnx": ("onnx",), "ctranslate2": ("ctranslate2",)}  # what writing each format needs


def expect_packages(to: str, int8: bool = False) -> None:
    """Raise UsageError if a package is missing; torch is not imported."""
    needed = (*PACKAGES[to], *(("onnxruntime",) if to == "onnx" and int8 else ()))  # it quantizes
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UsageError(f"--to {to} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")
