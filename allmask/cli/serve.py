"""`allmask serve`: answer requests over HTTP with one or several models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Annotated, Any

from typer import Argument, Option

from allmask.cli import AsJson, Device, Precisions, note, show_log, to_json
from allmask.cli._options import with_fields
from allmask.errors import ResourceError, UsageError
from allmask.files import did_you_mean
from allmask.registry import TASKS, USES
from allmask.serve.settings import KEY_VARIABLE, Settings, Source

EXAMPLES = """
    allmask serve allmask-en
    allmask serve titles=runs/title vectors=allmask-en --port 9000
    allmask serve runs/reviews --tasks classify --workers 2 --queue 1000
    allmask serve runs/title --host 0.0.0.0 --api-key secret
"""
NEEDED = ("starlette", "uvicorn", "prometheus_client")


@with_fields(Settings, *(entry.name for entry in fields(Settings)))
def command(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL", help="A model folder, a run or a bundled name; NAME=MODEL chooses its name in requests."
        ),
    ],
    tasks: Annotated[
        str | None,
        Option(help="Serve only these tasks, separated by commas.", metavar="TASK,…", show_default="all it can do"),
    ] = None,
    precision: Annotated[
        Precisions,
        Option(
            help="Arithmetic; auto is the fastest that this CPU supports: int8 to generate text, and to embed where "
            "vectors stay close to fp32; else bf16."
        ),
    ] = "auto",
    device: Device = "auto",
    page: Annotated[bool, Option("--page", help="Also serve the playground, at /play.")] = False,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Serve models over HTTP: POST /v1/tasks/TASK, and /v1/embeddings and /v1/completions for clients of OpenAI.

    Requests that wait together are computed together, with the same result as alone. GET /docs lists everything.
    SIGTERM lets accepted requests finish; SIGHUP loads the models anew.
    """
    settings = settings_of(given)
    wanted = [name for name in (word.strip() for word in (tasks or "").split(",")) if name]
    for name in wanted:
        if name not in TASKS and name not in USES:
            raise UsageError(f"--tasks: there is no task {name!r}", did_you_mean(name, [*TASKS, *USES]))
    if page and settings.api_key:
        raise UsageError("--page has no key to send", "leave out the key, or --page")
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise ResourceError(
            f"allmask serve needs {', '.join(absent)}", f"pip install {' '.join(absent).replace('_', '-')}"
        )
    show_log()
    from allmask.checkpoints import resolve

    sources = Source.parse_all(models)
    for source in sources:
        resolve(source.model)  # a missing folder is refused before torch is imported
    from allmask.serve.server import address, bind
    from allmask.serve.workers import Plan, run

    listener = bind(settings)

    def say(message: str) -> None:
        if as_json:  # one line, when requests are accepted
            print(to_json({"address": address(listener), "models": [source.name for source in sources]}), flush=True)
        else:
            note(message)

    return run(Plan(models, settings, wanted, precision, device, page), listener, say)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a command line; the key may be in the environment, where other users cannot see it."""
    values = {name: value for name, value in given.items() if value is not None}
    values["cors"] = tuple(values.get("cors") or ())
    if "api_key" not in values and KEY_VARIABLE in os.environ:
        values["api_key"] = os.environ[KEY_VARIABLE]
    return Settings(**values)
