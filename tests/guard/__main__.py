"""python -m tests.guard check, python -m tests.guard record: see the package."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import argparse
import sys
import time

from tests.guard import record
from tests.guard.recipes import GROUPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guard")
    parser.add_argument("what", choices=("check", "record"))
    parser.add_argument("--only", metavar="NAME", help="a group, or group/entry")
    parser.add_argument("--force", action="store_true", help="record: replace what is expected of this machine")
    asked = parser.parse_args()
    group, _, entry = (asked.only or "").partition("/")
    if group and group not in GROUPS:
        parser.error(f"there is no group {group}; there are {', '.join(GROUPS)}")
    groups = [group] if group else list(GROUPS)
    return _record(groups, asked.force) if asked.what == "record" else _check(groups, entry)


def _record(groups: list[str], force: bool) -> int:
    if not force and record.FILE.exists() and record.expected()[1]:
        print(f"this machine has a record, which --force replaces: {record.signature()}", file=sys.stderr)
        return 1
    record.keep({name: record.measured(name) for name in groups})
    print(f"{record.FILE}: recorded {', '.join(groups)} for {record.signature()}")
    return 0


def _check(groups: list[str], entry: str) -> int:
    old, bits = record.expected()
    print(f"{record.signature()}: {'bits' if bits else 'no record of such a machine: numbers, not bits,'} are compared")
    began, wrong = time.monotonic(), 0
    for name in groups:
        new = record.measured(name)
        found = record.differences(name, old.get(name, {}), new, bits)
        for one in dict.fromkeys([*new, *found]):
            if entry in ("", one):
                print(f"{name}/{one}: {found.get(one, 'ok')}")
                wrong += one in found
    print(f"{wrong} differ, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


sys.exit(main())
