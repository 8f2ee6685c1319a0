"""`allmask audit`: measure which outputs of a model depend on which inputs, and compare with its mask."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Option

from allmask.cli import AsJson, Device, ModelName, emit, markdown_table, note
from allmask.errors import UsageError
from allmask.mask.kinds import parameters
from allmask.registry import MASKS

if TYPE_CHECKING:
    from allmask.mask.audit import Audit, Finding

EXAMPLES = """
    allmask audit allmask-en --mask prefix
    allmask audit ./my-model --mask causal --tokens 16 --json
    allmask audit allmask-en --compare
"""
MISMATCH = 7  # the exit code if dependence and mask differ, so that an audit can guard a pipeline


def command(
    model: ModelName,
    mask: Annotated[
        str, Option(help=f"The mask to audit: {', '.join(MASKS.builtin)}, or {MASKS.of_packages()}.")
    ] = "prefix",
    tokens: Annotated[int, Option(min=2, max=256, help="Number of random tokens.")] = 10,
    seed: Annotated[int, Option(help="Random seed: of the tokens and of permutations.")] = 0,
    compare: Annotated[
        bool, Option("--compare", help="Table of all masks, here and in each way that transformers accepts one.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> int:
    """Measure with gradients which outputs of MODEL depend on which inputs, and compare with what the mask allows.

    The exit code is 0 if they agree and 7 if they do not; with --compare it is always 0.
    """
    if "visible" in parameters(mask):  # refuses an unknown name, too
        raise UsageError(
            f"--mask {mask}: an audit makes its masks itself", "to draw and prove a matrix: allmask mask matrix"
        )
    from allmask.tasks.task import ModelFolder

    opened = ModelFolder.open(model, device)
    limit = min(opened.model.config.max_length, opened.model.config.vocab_size)
    if tokens > limit:
        raise UsageError(f"--tokens {tokens}: this model takes at most {limit}")
    import torch

    from allmask.mask import audit as auditing

    if compare:
        note(f"{model}: all masks, and each way to pass one to transformers (about a minute)")
        findings = auditing.compare(opened.model, opened.folder, tokens, seed)
        emit(as_json, [asdict(finding) for finding in findings], _table(findings))
        return 0
    rng = torch.Generator().manual_seed(seed)
    probe = auditing.probe_mask(mask, tokens, rng)
    note(f"{model} under {probe}: {tokens} backward passes through {opened.model.config.layers} layers")
    result = auditing.audit(auditing.our_subject(opened.model), probe, rng)
    data = {
        "model": model,
        "mask": mask,
        "holds": result.holds,
        "leaks": result.leaks,
        "blind": result.blind,
        "depends": result.depends.int().tolist(),
        "promised": result.promised.int().tolist(),
    }
    emit(as_json, data, _report(result))
    return 0 if result.holds else MISMATCH


def _report(result: Audit) -> str:
    from allmask.mask.drawing import draw

    names = [str(position) for position in range(len(result.depends))]
    verdict = "every output depends on exactly what the mask lets it see"
    lines = [draw(result.depends, names), "", verdict if result.holds else "the model does not follow the mask"]
    lines += [f"leak: output {q} depends on input {k}, which it must not see" for q, k in result.leaks]
    lines += [f"blind: output {q} does not depend on input {k}, which it should see" for q, k in result.blind]
    return "\n".join(lines)


def _table(findings: list[Finding]) -> str:
    rows = []
    for row in findings:
        verdict = f"refused: {row.refused[:72]}" if row.refused else ("leaks" if row.leaks else "holds")
        counts = ["–" if count is None else str(count) for count in (row.leaks, row.blind)]
        rows.append([row.library, row.mask, row.way, *counts, verdict])
    return "\n".join(markdown_table(["library", "mask", "handed over as", "leaks", "blind", ""], rows))
