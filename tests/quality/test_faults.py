"""The short form of `make faults`: runs are killed and models damaged, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, signals and limits of Linux")
def test_what_happens_is_survived_or_said(python: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table of quality/faults.py -->old<!-- table of quality/faults.py -->\nafter\n")
    words = [
        "quality/faults.py",
        "--quick",
        "--only",
        "kills",
        "model-flips",
        "--out",
        str(tmp_path),
        "--write",
        str(page),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([python, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["kills"]["good"] == results["kills"]["all"] == 2
    assert results["model-flips"]["good"] == results["model-flips"]["all"] >= 6
    assert "| `kills` | SIGKILL at a random moment, then the same command with --resume | 2/2 |" in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("\nafter\n")
