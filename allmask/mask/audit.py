"""Measure whether a model obeys its mask: an output depends on an input iff its gradient there is not zero.

All tokens of the probe are different, so each row of the token embedding receives the gradient of one position alone.
That works for any model with a token embedding, however it takes its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmask.errors import ResourceError, UsageError
from allmask.mask import Mask, expect_mask
from allmask.mask.kinds import build, parameters
from allmask.mask.prover import influence
from allmask.registry import MASKS


@dataclass(frozen=True)
class Subject:
    """A model to audit: how to run it, its token embedding, its depth."""

    hidden: Callable[[Tensor, Mask], Tensor]  # ids (1, T) and a mask -> hidden states (1, T, W)
    embedding: Tensor  # (V, W)
    layers: int


@dataclass(frozen=True, eq=False)
class Audit:
    """The measured dependence and the one that the mask allows: (T, T), row = output, column = input."""

    depends: Tensor
    promised: Tensor

    @property
    def leaks(self) -> list[tuple[int, int]]:
        """(output, input) where an output depends on an input that it must not see."""
        return _pairs(self.depends & ~self.promised)

    @property
    def blind(self) -> list[tuple[int, int]]:
        """(output, input) where an output should depend on an input and does not."""
        return _pairs(~self.depends & self.promised)

    @property
    def holds(self) -> bool:
        return not self.leaks and not self.blind


def audit(subject: Subject, mask: Mask, rng: torch.Generator | None = None) -> Audit:
    """Audit a model in evaluation mode with one row of a mask: T backward passes over T different random tokens."""
    if len(expect_mask(mask)) != 1 or not bool(mask.valid.all()):
        raise UsageError(f"an audit takes one row without padding, not {mask}")
    tokens, vocab_size = mask.shape[1], subject.embedding.shape[0]
    if tokens > vocab_size:
        raise UsageError(f"an audit of {tokens} tokens needs as many different ones; the vocabulary has {vocab_size}")
    device = subject.embedding.device
    ids = torch.randperm(vocab_size, generator=rng)[None, :tokens].to(device)
    hidden = subject.hidden(ids, mask.to(device))[0]  # (T, W)
    direction = torch.randn(hidden.shape[-1], generator=rng).to(hidden)  # a plain sum is 0 after a layer norm
    depends = []
    for output in hidden @ direction:
        (gradient,) = torch.autograd.grad(output, subject.embedding, retain_graph=True)
        depends.append((gradient[ids[0]] != 0).any(-1).cpu())
    return Audit(torch.stack(depends), influence(mask.visible()[0], subject.layers))


def audit_tokens(model: nn.Module, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Audit:
    """Audit an allmask `Model` with the tokens (1, T) of a real text, which may repeat: T backward passes.

    The model runs with an embedding that has a row for each position instead of each token, so equal tokens stay apart.
    """
    ours: Any = model.eval()
    rows = ours.body.embedding.tokens.weight.detach()[ids[0].to(ours.device)].requires_grad_()  # (T, W)
    inputs = [x if x is None else x.to(ours.device) for x in (torch.arange(len(rows))[None], mask, segments)]
    with torch.enable_grad():
        hidden = torch.func.functional_call(ours, {"body.embedding.tokens.weight": rows}, tuple(inputs)).hidden[0]
    direction = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0)).to(hidden)
    gradients = [torch.autograd.grad(output, rows, retain_graph=True)[0] for output in hidden @ direction]
    return Audit(torch.stack(gradients).ne(0).any(-1).cpu(), influence(mask.visible()[0], ours.config.layers))


def _pairs(cells: Tensor) -> list[tuple[int, int]]:
    return [(row, column) for row, column in cells.nonzero().tolist()]


# ---- subjects ----------------------------------------------------------------------------------------------


def our_subject(model: nn.Module) -> Subject:
    """An allmask `Model`."""
    ours: Any = model.eval()
    return Subject(lambda ids, mask: ours(ids, mask).hidden, ours.body.embedding.tokens.weight, ours.config.layers)


WAYS: Mapping[str, Callable[[Mask], dict[str, Any]]] = {
    "4D boolean": lambda mask: {"attention_mask": mask.visible()[:, None]},
    "4D additive, 0 or -inf": lambda mask: {"attention_mask": torch.where(mask.visible()[:, None], 0.0, -torch.inf)},
    "4D float, 1 or 0": lambda mask: {"attention_mask": mask.visible()[:, None].float()},
    "3D boolean": lambda mask: {"attention_mask": mask.visible()},
    "3D float, 1 or 0": lambda mask: {"attention_mask": mask.visible().float()},
    "positions that restart": lambda mask: {"position_ids": mask.position},
}  # the ways to pass a mask to a transformers model


def transformers_subject(model: nn.Module, way: str) -> Subject:
    """A transformers body (BertModel, GPT2Model, …) that gets its mask in one of the WAYS."""
    body: Any = model.eval()
    embedding, layers = body.get_input_embeddings().weight, body.config.num_hidden_layers
    return Subject(lambda ids, mask: body(ids, **WAYS[way](mask)).last_hidden_state, embedding, layers)


# ---- side by side ------------------------------------------------------------------------------------------


def probe_mask(kind: str, tokens: int, rng: torch.Generator | None = None) -> Mask:
    """One row of this kind of mask: three fifths source, five turns, two documents, pairs, a random permutation."""
    index = torch.arange(tokens)[None]
    inputs: dict[str, Any] = {
        "valid": torch.ones(1, tokens, dtype=torch.bool),
        "is_target": index >= max(1, tokens * 3 // 5),
        "turns": index * 5 // tokens % 2 == 1,
        "document": (index >= tokens // 2).long(),
        "each": "bidirectional",
        "order": index // 2,
    }
    if "rank" in parameters(kind):
        inputs["rank"] = torch.randperm(tokens, generator=rng)[None]
    mask = build(kind, inputs)
    if mask.shape != (1, tokens):
        raise UsageError(f"a {kind} mask of {tokens} tokens is {mask.shape}; expected (1, {tokens})")
    return mask


def probed() -> list[str]:
    """The kinds of masks that `probe_mask` can make: all but those read from a file."""
    return [name for name in MASKS if "visible" not in parameters(name)]


@dataclass(frozen=True)
class Finding:
    """One row of the comparison: the library, the mask, how it was passed, and the result."""

    library: str
    mask: str
    way: str
    leaks: int | None  # None if the mask was refused
    blind: int | None
    refused: str = ""  # the error


def compare(model: nn.Module, folder: str | Path, tokens: int = 10, seed: int = 0) -> list[Finding]:
    """Audit our model with every mask, and the same weights in transformers with each way to pass a mask."""
    rows = [_find("allmask", kind, "Mask", our_subject(model), tokens, seed) for kind in probed()]
    for attention in ("sdpa", "eager"):
        body = _transformers_body(folder, attention)
        for way in WAYS:
            kind = "packed" if way == "positions that restart" else "prefix"
            rows.append(_find(f"transformers, {attention}", kind, way, transformers_subject(body, way), tokens, seed))
    return [*rows, _try_generate(folder, tokens)]


def _find(library: str, kind: str, way: str, subject: Subject, tokens: int, seed: int) -> Finding:
    def run() -> tuple[int, int]:
        rng = torch.Generator().manual_seed(seed)
        result = audit(subject, probe_mask(kind, tokens, rng), rng)
        return len(result.leaks), len(result.blind)

    return _attempt(library, kind, way, run)


def _attempt(library: str, kind: str, way: str, run: Callable[[], tuple[int, int]]) -> Finding:
    """Count leaks and blind spots by `run`, or report the error with which the mask is refused."""
    try:
        return Finding(library, kind, way, *run())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Finding(library, kind, way, None, None, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _transformers_body(folder: str | Path, attention: str) -> nn.Module:
    try:
        from transformers import AutoModel, logging
    except ImportError as error:
        raise ResourceError("transformers is not installed", "pip install transformers, to compare with it") from error
    logging.set_verbosity_error()  # no warnings about heads that are missing in the file
    logging.disable_progress_bar()
    return AutoModel.from_pretrained(folder, attn_implementation=attention, local_files_only=True)


def _try_generate(folder: str | Path, tokens: int) -> Finding:
    """Try to generate under the prefix mask, for which transformers needs a 4D mask."""
    from transformers import AutoModelForCausalLM

    writer: Any = AutoModelForCausalLM.from_pretrained(folder, is_decoder=True, local_files_only=True).eval()
    visible = probe_mask("prefix", tokens).visible()[:, None]

    def run() -> tuple[int, int]:
        writer.generate(torch.arange(tokens)[None], attention_mask=visible, max_new_tokens=2, pad_token_id=0)
        return 0, 0

    return _attempt("transformers", "prefix", "generate() with a 4D boolean", run)
