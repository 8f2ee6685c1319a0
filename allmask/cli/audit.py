"""`allmask audit`: which outputs of a model really depend on which inputs, against what the mask promises."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from allmask.cli import emit, note
from allmask.errors import UsageError
from allmask.mask.kinds import parameters
from allmask.registry import MASKS

if TYPE_CHECKING:
    from allmask.mask.audit import Audit, Finding
    from allmask.model import Model

EXAMPLES = """
    allmask audit minilm --mask prefix
    allmask audit ./my-model --mask causal --tokens 16 --json
    allmask audit minilm --compare
"""
BROKEN = 7  # the exit code when a promise does not hold, so that an audit can guard a pipeline


def command(
    model: Annotated[str, typer.Argument(help="A model folder or file, the bundled name minilm, or org/name.")],
    mask: Annotated[
        str, typer.Option(help=f"The mask to give it: {', '.join(MASKS.builtin)}, or {MASKS.of_packages()}.")
    ] = "prefix",
    tokens: Annotated[int, typer.Option(min=2, max=256, help="How many tokens to probe with.")] = 10,
    seed: Annotated[int, typer.Option(help="Draws the tokens and the permutation.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Every mask, and transformers in each way it takes one: a table.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure, by gradients, which outputs of MODEL depend on which inputs, and compare with the mask's promise.

    The exit code is 0 when they agree and 7 when they do not; a table from --compare is always 0.
    """
    if "visible" in parameters(mask):  # an unknown name is refused here, too
        raise UsageError(
            f"--mask {mask}: an audit makes its masks itself", "to draw and prove one: allmask mask matrix"
        )
    loaded = _load(model, tokens)
    if compare:
        findings = _compare(loaded, model, tokens, seed)
        emit(as_json, [asdict(finding) for finding in findings], _table(findings))
        return 0
    result = _audit(loaded, model, mask, tokens, seed)
    emit(as_json, _data(model, mask, result), _report(result))
    return 0 if result.holds else BROKEN


def _load(source: str, tokens: int) -> Model:
    from allmask.model import load

    model = load(source)
    limit = min(model.config.max_length, model.config.vocab_size)
    if tokens > limit:
        raise UsageError(f"--tokens {tokens}: this model takes at most {limit}")
    return model


def _audit(model: Model, source: str, kind: str, tokens: int, seed: int) -> Audit:
    import torch

    from allmask.mask.audit import audit, our_subject, probe_mask

    rng = torch.Generator().manual_seed(seed)
    mask = probe_mask(kind, tokens, rng)
    note(f"{source} under {mask}: {tokens} backward passes through {model.config.layers} layers")
    return audit(our_subject(model), mask, rng)


def _data(source: str, kind: str, result: Audit) -> dict:
    return {
        "model": source,
        "mask": kind,
        "holds": result.holds,
        "leaks": result.leaks,
        "blind": result.blind,
        "depends": result.depends.int().tolist(),
        "promised": result.promised.int().tolist(),
    }


def _report(result: Audit) -> str:
    from allmask.mask.drawing import draw

    names = [str(place) for place in range(len(result.depends))]
    verdict = "every output depends on exactly what the mask lets it see" if result.holds else "the promise is broken"
    lines = [draw(result.depends, names), "", verdict]
    lines += [f"leak: output {q} depends on input {k}, which it must not see" for q, k in result.leaks]
    lines += [f"blind: output {q} does not depend on input {k}, which it should see" for q, k in result.blind]
    return "\n".join(lines)


def _compare(model: Model, source: str, tokens: int, seed: int) -> list[Finding]:
    from allmask.checkpoints import resolve
    from allmask.mask.audit import compare

    note(f"{source}: every mask here, and each way to hand one to transformers (about a minute)")
    return compare(model, resolve(source), tokens, seed)


def _table(findings: list[Finding]) -> str:
    """A Markdown table: it reads well in a terminal and goes into a page as it is."""
    lines = ["| library | mask | handed over as | leaks | blind | |", "|---|---|---|---|---|---|"]
    for row in findings:
        verdict = f"refused: {row.refused[:72]}" if row.refused else ("leaks" if row.leaks else "holds")
        counts = ["–" if count is None else str(count) for count in (row.leaks, row.blind)]
        lines.append("| " + " | ".join([row.library, row.mask, row.way, *counts, verdict]) + " |")
    return "\n".join(lines)
