"""Docstrings as Markdown: drawings of masks and lines of code, which need no sign there, become code blocks."""

from __future__ import annotations

import ast

from griffe import Docstring, Extension, Object


class Blocks(Extension):
    def on_object(self, *, obj: Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring = Docstring(fenced(obj.docstring.value), parent=obj)


def fenced(text: str) -> str:
    """Put each paragraph that is a drawing or code between fences; indented paragraphs are code already."""
    first, *rest = text.split("\n\n")
    return "\n\n".join([first, *(f"```{kind}\n{part}\n```" if (kind := _kind(part)) else part for part in rest)])


def _kind(paragraph: str) -> str | None:
    if paragraph.startswith("    ") and not paragraph.strip().startswith(("■", "·")):
        return None
    if "■" in paragraph:
        return "text"
    try:
        body = ast.parse(paragraph.replace("…", "...")).body
    except SyntaxError:
        return None
    return "python" if body and any(sign in paragraph for sign in "(=") else None
