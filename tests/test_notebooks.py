"""The notebooks run from beginning to end, without an error in any cell, and are kept without their outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    kernel = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.create_kernel_manager().kernel_spec.argv = kernel
    client.execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(pictures) >= 2 and not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"], "warnings"


def test_there_are_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
