"""`allmask demo`: the main job from end to end, offline, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allmask.cli import emit, listen, note

EXAMPLES = """
    allmask demo
    allmask demo --minutes 2 --out demo-short
    allmask demo --fast --json
"""


def command(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run's folder; an earlier demo there is replaced.")
    ] = Path("demo-run"),
    minutes: Annotated[float, typer.Option(min=0.5, max=600, help="How long it may take, about.")] = 5.0,
    fast: Annotated[
        bool, typer.Option("--fast", help="All the steps with very little of each: under a minute.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; the story goes to stderr.")
    ] = False,
) -> None:
    """Turn a BERT into a writer while you watch: the mask, the learning, the judging, a model of your own.

    The texts are docstrings of this machine's Python files; the BERT is the bundled MiniLM. Nothing is downloaded.
    """
    from allmask.demo.run import FAST, FULL, run_demo

    listen()
    result = run_demo(out, minutes, FAST if fast else FULL, note if as_json else _tell)
    emit(as_json, result, _next(result, out))


def _tell(text: str) -> None:
    print(text, flush=True)  # at once: progress goes to stderr in between


def _next(result: dict[str, Any], out: Path) -> str:
    final = result["final"]
    return "\n".join([
        "",
        "Go on with:",
        f'  allmask generate {final} --text "The file is read line by line, and bad lines are skipped." --beams 4',
        f"  allmask evaluate {final} {out}/data/test.jsonl",
        f"  allmask finetune minilm --data {out}/data/train.jsonl --eval {out}/data/dev.jsonl --out runs/docstrings",
        f"  allmask inspect {final}",
    ])  # fmt: skip
