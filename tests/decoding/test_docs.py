"""The page on decoding runs, and a BERT there learns to write by its mask alone."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"


def test_the_examples_run(capsys):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "greedy  你迎欢京北 True" in out
    assert "beams   鸡切白吃你" in out
    assert "[1, 3] 5 2" in out
