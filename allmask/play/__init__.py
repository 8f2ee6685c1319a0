"""The playground: one page on which masks are drawn, proven, edited, and tried with real weights.

allmask play                       # on this machine, nothing from outside
routes = allmask.play.routes()     # the same page for a Starlette application, under /play

static/        the page: HTML, CSS and plain modules of JavaScript, no build step
board.py       what the page sends: a text, its order, its documents, a window, and cells that were clicked
weights.py     the models, and what they do under the mask of a board
writing.py     writing step by step, and beams as a tree
api.py         the addresses under /play/api, and the limits of what they take
server.py      the routes, their headers, and the server of `allmask play`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def routes(models: Sequence[str] | None = None, device: str = "cpu") -> list[Any]:
    """The Starlette routes of the page and its API, under /play; `models` are names or folders, the default first.

    Without models, the bundled ones are offered. A request can name only these, so no path comes from outside.
    """
    from allmask.play.server import make_routes

    return make_routes(models, device)


__all__ = ["routes"]
