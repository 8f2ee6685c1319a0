"""`allmask play`: it serves the page on this machine, and says where."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
from tests import tiny


def test_it_serves_a_model_and_prints_the_address(python: str, tmp_path: Path):
    folder = tiny.writer(tmp_path / "writer")
    command = [python, "-m", "allmask", "play", str(folder), "--port", "0", "--no-open", "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert running.stdout is not None
        address = json.loads(running.stdout.readline())["address"]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"<main" in page.read()
        with urllib.request.urlopen(f"{address}api/models", timeout=60) as found:
            assert str(folder) in found.read().decode()
    finally:
        running.terminate()
        running.communicate(timeout=60)


def test_a_port_in_use_is_said(cli: Callable, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = cli("play", str(tiny.writer(tmp_path / "writer")), "--port", str(taken.getsockname()[1]), "--no-open")
    assert ran.code == 5 and "cannot be used" in ran.err and "--port" in ran.err


def test_a_model_that_cannot_write_is_said(cli: Callable, tmp_path: Path):
    ran = cli("play", str(tmp_path / "nothing"), "--no-open")
    assert ran.code == 4 and "no such folder or file" in ran.err
