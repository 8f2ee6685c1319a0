"""`allmask serve`: what it prints once requests are accepted. What it answers is tested in tests/serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
from allmask.serve.workers import Plan
from tests import tiny


def test_the_address_as_a_note_or_as_json(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Plan, "serve", lambda self, listener, ready: (ready(), listener.close()))
    words = ("serve", f"标题={tiny.writer(tmp_path / 'writer')}", "--port", 0)
    ran = cli(*words)
    assert ran.code == 0 and ran.out == "" and "serving 标题 at http://127.0.0.1:" in ran.err
    ran = cli(*words, "--json")
    found = json.loads(ran.out)
    assert ran.err == "" and found["models"] == ["标题"] and found["address"].startswith("http://127.0.0.1:")
