"""Colours where a terminal is, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess

import pytest

from allmask.terminal import has_colours, paint, paint_words, shortened, text_width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_has_colours_and_a_file_has_none():
    assert has_colours(Terminal()) and not has_colours(io.StringIO())
    assert paint("x", "red", Terminal()) == "\x1b[1;31mx\x1b[0m" and paint("x", "red", io.StringIO()) == "x"
    assert paint("", "red", Terminal()) == ""
    assert paint_words("a LEAK", {"LEAK": "red"}, Terminal()) == "a \x1b[1;31mLEAK\x1b[0m"
    assert paint_words("a LEAK", {"LEAK": "red"}, io.StringIO()) == "a LEAK"


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


def on_a_terminal(python: str, *words: str, **environment: str) -> str:
    """What a command prints on a real terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [python, "-m", "allmask", *words], stdin=follower, stdout=follower, stderr=follower, close_fds=True,
        env={**os.environ, "TERM": "xterm", **environment},
    )  # fmt: skip
    os.close(follower)
    seen = b""
    while True:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # closed by the other side
            break
        if not chunk:
            break
        seen += chunk
    os.close(leader)
    process.wait(120)
    return seen.decode().replace("\r\n", "\n")


def test_a_command_on_a_terminal(python: str):
    words = [python, "mask", "--order", "0,0,1", "--text", "北京 a"]
    coloured, plain = on_a_terminal(*words), on_a_terminal(*words, NO_COLOR="1")
    assert "\x1b[38;5;68m" in coloured and "\x1b[38;5;173m" in coloured and "\x1b[1;31mLEAK\x1b[0m" in coloured
    assert "\x1b" not in plain and re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert "\x1b[1;31merror[usage]:\x1b[0m there is no mask" in on_a_terminal(python, "mask", "casual")


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("two\n words", 9, "two words"),
        ("two words", 8, "two wor…"),
        ("北京欢迎你", 10, "北京欢迎你"),  # two columns each
        ("北京欢迎你", 9, "北京欢迎…"),
        ("a北京欢迎你", 9, "a北京欢…"),
        ("e\u0301" * 9, 9, "e\u0301" * 9),
        ("", 9, ""),
    ],
)
def test_a_text_on_one_line_of_the_terminal(text: str, limit: int, shown: str):
    assert shortened(text, limit) == shown and text_width(shown) <= limit
