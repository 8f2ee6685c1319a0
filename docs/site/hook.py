"""What mkdocs.yml needs beyond plugins: pages that live outside of docs/ become pages of the site.

README.md is the home page. A link from one page to another is the same in the repository and on the site; here it is
rewritten to the place where the site has that page. A link to anything else outside of docs/ stays, and is an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {  # in the repository: on the site
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "weights/allmask-en/README.md": "cards/allmask-en.md",
    "weights/allmask-zh/README.md": "cards/allmask-zh.md",
}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config):
    """A page of docs/ that mkdocs.yml does not name is found under "More"."""
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    listed = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    if more := [page for page in pages if page not in listed]:
        config.nav.append({"More": more})
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it tells how it loads its dictionary
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_content(html, page, config, files):
    """In the cell of a table, \\| is a bar, also in code: GitHub reads it so, this Markdown does not."""
    return re.sub(r"(?s)<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html)


def on_post_page(output, page, config):
    """Align drawings, whatever the reader's fonts; and name the language, which decides the shapes of characters."""
    if page.file.src_uri.startswith("zh/"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return re.sub(r"(?s)<pre.*?</pre>", lambda block: aligned(block[0]), output)


def aligned(block: str) -> str:
    """A block of code; in a drawing of a mask, each Chinese character takes two columns and each cell takes one."""
    if "■" not in block:
        return block
    block = re.sub("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]", r'<i class="wide">\g<0></i>', block)
    return block.replace("■", '<i class="seen">■</i>').replace("·", '<i class="unseen">·</i>')


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    source = next((source for source, name in PAGES.items() if name == here), f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        place = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None:
            return match[0]
        return match[1] + posixpath.relpath(place, posixpath.dirname(here) or ".") + match[3]

    return LINK.sub(moved, markdown)
