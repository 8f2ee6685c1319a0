"""Fonts for pictures: found on this machine or in Python packages until a text is covered, Chinese included."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allmask.errors import ResourceError

LATIN = "DejaVu Sans"  # comes with matplotlib
_CJK_FAMILIES = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "PingFang SC", "Hiragino Sans GB",
    "Heiti SC", "Microsoft YaHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "SimHei", "Droid Sans Fallback",
    "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC", "Noto Serif CJK SC", "Source Han Serif SC", "SimSun",
    "AR PL UMing CN", "AR PL UKai CN", "Arial Unicode MS",
)  # fmt: skip
_FONT_PACKAGES = ("zhplot", "mplfonts")  # Python packages that contain Noto Sans for Chinese


@dataclass(frozen=True)
class Fonts:
    """Font families that together cover a text, and the characters that none of them has."""

    families: list[str]
    missing: frozenset[str]
    as_text: bool  # write text, not outlines: the viewer of the file chooses the glyphs

    @classmethod
    def find(cls, text: str, as_text: bool) -> Fonts:
        """Add fonts until the text is covered. Missing letters are an error unless the file may contain text."""
        missing = {character for character in text if not character.isspace()}
        families = [LATIN]  # also for the □ of what is missing
        for family, path in candidates():
            covered = missing & characters(path)
            if covered and family not in families:
                families.append(family)
            missing -= covered
            if not missing:
                break
        letters = sorted(character for character in missing if unicodedata.category(character)[0] == "L")
        if letters and not as_text:
            raise ResourceError(
                f"no font here has {' '.join(letters[:8])}{' …' if len(letters) > 8 else ''}",
                "for Chinese, pip install zhplot or a system package such as fonts-noto-cjk;"
                "\nor write .svg, which is shown with the viewer's fonts",
            )
        return cls(families, frozenset(missing), as_text=bool(letters))

    def show(self, text: str) -> str:
        """Return the text with □ for characters that cannot be drawn, such as emoji."""
        if self.as_text:
            return text
        kept = (c for c in text if unicodedata.category(c) not in ("Cf", "Mn") or c not in self.missing)
        return "".join("□" if c in self.missing else c for c in kept)


def candidates() -> Iterator[tuple[str, str]]:
    """Family and file of each font to try: matplotlib's own, those in Python packages, installed Chinese ones."""
    from importlib.util import find_spec

    from matplotlib.font_manager import fontManager

    logging.getLogger("matplotlib.font_manager").addFilter(_is_news)
    yield LATIN, str(fontManager.findfont(LATIN))
    specs = [spec for package in _FONT_PACKAGES if (spec := find_spec(package))]
    for folder in (folder for spec in specs for folder in spec.submodule_search_locations or []):
        for path in map(str, sorted(Path(folder, "fonts").glob("NotoSans[SC]*-Regular.[ot]tf"))):
            if all(entry.fname != path for entry in fontManager.ttflist):
                fontManager.addfont(path)
            yield next(entry.name for entry in fontManager.ttflist if entry.fname == path), path
    installed = {entry.name for entry in fontManager.ttflist}
    for family in _CJK_FAMILIES:
        if family in installed:
            yield family, str(fontManager.findfont(family))


def _is_news(record: logging.LogRecord) -> bool:
    """False for what nobody can act on: that a font such as WenQuanYi Zen Hei exists in another weight only."""
    return "Failed to find font weight" not in record.msg


@cache
def characters(path: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    return frozenset(chr(code) for code in FT2Font(path).get_charmap())
