"""A few passages to write titles for: the README's, or others where there is none."""

from __future__ import annotations

import re
from pathlib import Path

OTHERS = [
    "The same weights read both ways, write left to right, guess in any order or rewrite one text as another. The only "
    "thing that changes is the mask, a small value that says which token may look at which.",
    "A token that is younger than all tokens before it never changes what they see. Exactly then their keys and values "
    "can be kept, so that each new token costs one step instead of reading everything again.",
    "Documents of different length are put one after another into one row without padding. Each belongs to a group of "
    "its own, and no token reads one of another group.",
]


def sentences(readme: Path | None = None, count: int = 3) -> list[str]:
    """Passages of prose with at least 20 words; no headings, lists, tables, code or pictures."""
    path = Path(__file__).parents[2] / "README.md" if readme is None else readme
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return OTHERS[:count]
    content = re.sub(r"```.*?```", "", content, flags=re.DOTALL)
    passages = [_plain(part) for part in re.split(r"\n\s*\n", content) if re.match(r"[A-Z*\"(]", part)]
    found = [passage for passage in passages if len(passage.split()) >= 20]
    return found[:count] if len(found) >= count else OTHERS[:count]


def _plain(markdown: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[*`]+", "", text).split())
