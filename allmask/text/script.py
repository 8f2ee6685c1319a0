"""The script that texts are written in."""

from __future__ import annotations

import re
from collections.abc import Sequence

CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # for a class of characters in a pattern


def is_chinese(texts: Sequence[str]) -> bool:
    """Return whether many letters of these texts (more than 30 %) are Chinese characters."""
    joined = "".join(texts[:1000])
    chinese = len(re.findall(f"[{CHINESE}]", joined))
    return chinese > 0.3 * max(1, sum(character.isalpha() for character in joined))
