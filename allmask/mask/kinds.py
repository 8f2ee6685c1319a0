"""Masks by name, for `allmask mask NAME` and `allmask audit --mask NAME`.

A kind is a function that returns a `Mask` of one row. The names of its parameters say what it needs; all tensors are
(1, T):

    valid        booleans, all True: there is no padding
    is_target    booleans: a source, then a target                      --source, --target
    turns        the same for alternating sources and targets           --source, --target, repeated
    rank         when each token becomes known, a permutation           --order
    order        the same with ties, which are known together           --order
    group        its document, -1 at padding; given with `order`        --order
    document     the index of each token's document                     --text, repeated
    each         the kind of mask inside each document                  --each
    visible      booleans (T, T), True = may read                       --file
    window       read only keys fewer than this many positions away     --window

Another package adds a kind by `MASKS.register("blocks", blocks)`, or by an entry point, see docs/masks.md.

Torch is imported only when a mask is made, so that listing names and parameters is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import allmask.mask as masks
from allmask.errors import UsageError
from allmask.registry import MASKS

if TYPE_CHECKING:
    from torch import Tensor

    from allmask.mask import Mask


def bidirectional(valid: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.bidirectional(valid, window)


def causal(valid: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.causal(valid, window)


def reverse(valid: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.reverse(valid, window)


def permutation(rank: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.permutation(rank, window=window)


def any_order(order: Tensor, group: Tensor | None = None, window: int | None = None) -> Mask:
    return masks.Mask(order, order * 0 if group is None else group, window=window)


def prefix(is_target: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.prefix(is_target, window=window)


def turns_of(turns: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.turns(turns, window=window)


def naive(valid: Tensor, is_target: Tensor | None = None, window: int | None = None) -> Mask:
    """Causal, for source and target alike."""
    return masks.Mask.causal(valid, window)


def packed(document: Tensor, valid: Tensor, each: str = "causal", window: int | None = None) -> Mask:
    return masks.Mask.packed(build(each, {"valid": valid, "window": window}), document)


def matrix(visible: Tensor) -> Mask:
    return masks.Mask.from_matrix(visible)


def encoder_decoder(is_target: Tensor) -> Mask:
    return masks.Mask.encoder_decoder(is_target)


def parameters(name: str) -> dict[str, bool]:
    """The parameters of a kind of mask, and whether each is required."""
    found = signature(MASKS[name]).parameters.values()
    return {parameter.name: parameter.default is Parameter.empty for parameter in found}


def build(name: str, inputs: Mapping[str, Any]) -> Mask:
    """Build a mask of this kind from those of the inputs that it takes."""
    takes = parameters(name)
    missing = [parameter for parameter, required in takes.items() if required and inputs.get(parameter) is None]
    if missing:
        raise UsageError(
            f"a {name} mask is made from {', '.join(missing)}, which cannot be given here",
            f"given: {', '.join(key for key in inputs if inputs[key] is not None)}; see allmask/mask/kinds.py",
        )
    return masks.expect_mask(MASKS[name](**{key: inputs[key] for key in takes if key in inputs}))
