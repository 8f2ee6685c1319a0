"""The Python in the README runs, and says what its comments say; the files that it and CONTRIBUTING name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


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
    assert f"# {space['title']}\n" in README.read_text(encoding="utf-8")  # the comment beside it
    assert f"*{space['title']}*" in README.read_text(encoding="utf-8")  # the table has the same example


def headings(page: Path) -> set[str]:
    """What a link may name after a #."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_pages_it_names_exist(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target, part in re.findall(r"\]\((?!https:)([^)#]+)(?:#([^)]+))?\)", text):
        page = ROOT / target
        assert page.exists(), target
        assert not part or part in headings(page), (target, part)


def test_every_page_is_in_the_table():
    text = README.read_text(encoding="utf-8")
    assert {page.name for page in ROOT.glob("docs/*.md")} == set(
        re.findall(r"^\| \[.*?\]\(docs/([\w-]+\.md)\)", text, re.M)
    )


def test_the_tree_of_contributing_is_that_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"^    allmask/\n((?:      .*\n)+)", text, re.MULTILINE)
    assert tree is not None
    columns = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in tree[1].splitlines()]
    named = {word for column, _ in columns for word in column.split()}
    named |= {word for _, rest in columns for word in re.findall(r"\b\w+\.py\b", rest)}
    package = ROOT / "allmask"
    shown = {f"{path.name}/" if path.is_dir() else path.name for path in package.iterdir()}
    hidden = {"__init__.py", "__main__.py", "__pycache__/", "py.typed"}
    assert named == shown - hidden
