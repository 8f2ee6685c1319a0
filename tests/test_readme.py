"""The Python in the README runs, and says what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in found if "import" in block]  # the others go on from a model one has to train first


def test_recipes_run():
    space: dict = {}
    assert len(blocks()) >= 2
    for block in blocks():
        exec(block, space)
    assert tuple(space["out"].hidden.shape) == (1, 10, 384)
    assert tuple(space["vectors"].shape) == (2, 384)


def headings(page: Path) -> set[str]:
    """What a link may name after a #."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_pages_and_files_it_names_exist():
    text = README.read_text(encoding="utf-8")
    for target, part in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text):
        page = README.parent / target
        assert page.exists(), target
        assert not part or part in headings(page), (target, part)
    for name in re.findall(r"^      (\w+\.py|\w+/) ", text, re.MULTILINE):
        assert (README.parent / "allmask" / name).exists(), name
