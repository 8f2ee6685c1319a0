"""expected.json: what commands gave, by machine. Bits are compared on a machine that is in it, elsewhere numbers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from tests.guard.lab import Lab
from tests.guard.recipes import COARSE, GROUPS

FILE = Path(__file__).with_name("expected.json")
NEAR = 1e-3  # how far numbers of other machines may be off, relative or absolute
COARSELY = 0.1  # the same where a few bits are all there is

Group = dict[str, dict[str, Any]]  # entries by name


def signature() -> str:
    """All that bits are known to depend on: the processor, torch's kernels for it, libraries, the C compiler."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        said = ""
    fields = (re.search(rf"^{name}\s*: (.*)$", said, re.MULTILINE) for name in ("vendor_id", "cpu family", "model"))
    processor = "-".join(found[1] if found else "unknown" for found in fields)
    libraries = (f"{library.__name__} {library.__version__}" for library in (torch, np, tokenizers))
    return ", ".join([processor, torch.backends.cpu.get_cpu_capability(), *libraries, f"cc {_compiler()}"])


def _compiler() -> str:
    try:
        return subprocess.run(["cc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def measured(group: str) -> Group:
    """Run the commands of a group."""
    with tempfile.TemporaryDirectory(prefix="guard-") as folder:
        lab = Lab(Path(folder))
        GROUPS[group](lab)
    return lab.kept


def expected() -> tuple[dict[str, Group], bool]:
    """Groups by name, and whether they were recorded on such a machine."""
    machines = json.loads(FILE.read_text(encoding="utf-8"))
    own = machines.get(signature())
    return (own, True) if own is not None else (next(iter(machines.values())), False)


def keep(groups: dict[str, Group]) -> None:
    """Write down what this machine gives."""
    machines = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    machines.setdefault(signature(), {}).update(groups)
    FILE.write_text(json.dumps(machines, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def differences(name: str, old: Group, new: Group, bits: bool) -> dict[str, str]:
    """Of a group: which entries differ, and by what."""
    found = {entry: "there is nothing to compare it with" for entry in new.keys() - old.keys()}
    found |= {entry: "is gone" for entry in old.keys() - new.keys()}
    near = COARSELY if name in COARSE else NEAR
    for entry in old.keys() & new.keys():
        before, after = old[entry], new[entry]
        wrong = []
        if bits or before.get("exact"):
            wrong += [what for what, value in before["bits"].items() if after["bits"].get(what) != value]
        numbers = _far(before["numbers"], after["numbers"], 0.0 if bits else near)
        if wrong or numbers:
            found[entry] = (
                f"{', '.join(wrong) or 'only numbers'} differ: {'; '.join(numbers) or 'numbers are the same'}"
            )
    return found


def _far(old: dict[str, Any], new: dict[str, Any], near: float) -> list[str]:
    """Numbers that differ by more than `near`, old and new; whole ones must be the same."""
    told = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=near, abs_tol=near):
            continue
        if a != b:
            told.append(f"{name} {a} → {b}")
    return told
