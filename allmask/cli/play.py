"""`allmask play`: a page on which masks are drawn, proven, edited, and tried with real weights."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Argument, Option

from allmask.cli import AsJson, Device, note

EXAMPLES = """
    allmask play
    allmask play --port 8080 --no-open
    allmask play runs/title
"""


def command(
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A model with one stack: a folder, a run, or a bundled name.",
            show_default="allmask-en and allmask-zh, by the script of the text",
        ),
    ] = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port on 127.0.0.1; 0 is any free one.")] = 8765,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser, or not.")] = True,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Open a page where masks come alive: draw one, prove it, break it, and let a model write under it.

    Everything runs on this machine; the page loads nothing from outside. It ends with Ctrl+C.
    """
    if model is not None:
        from allmask.checkpoints import resolve

        resolve(model)  # a missing folder is refused before torch is imported
    from allmask.play.server import run

    note("the playground; end it with Ctrl+C")

    def say(address: str) -> None:
        print(json.dumps({"address": address}) if as_json else address, flush=True)

    run(None if model is None else [model], port, open_browser, say, device)
