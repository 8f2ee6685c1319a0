"""Masks by name, as `allmask mask NAME` and `allmask audit --mask NAME` know them.

A kind is a function that returns a `Mask` of one row. The names of its parameters say what it is made from; all tensors
are (1, T):

    valid        booleans, all True: there is no padding
    is_target    booleans: a source, then a target                      --source, --target
    turns        the same, of several sources and targets in turn       --source, --target, repeated
    rank         when each token becomes known, a permutation           --order
    document     which document each token is of                        --text, repeated
    each         the kind of mask inside each document                  --each
    visible      booleans (T, T), True = may read                       --file
    window       read only keys fewer than this many positions away     --window

Another package adds a kind by `MASKS.register("blocks", blocks)`, or by an entry point:

    [project.entry-points."allmask.masks"]
    blocks = "my_package.masks:blocks"

Torch is imported when a mask is made, so that names and parameters can be listed at once.
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


def prefix(is_target: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.prefix(is_target, window=window)


def turns_of(turns: Tensor, window: int | None = None) -> Mask:
    return masks.Mask.turns(turns, window=window)


def naive(valid: Tensor, is_target: Tensor | None = None, window: int | None = None) -> Mask:
    """Source and target from left to right, whichever a token is of."""
    return masks.Mask.causal(valid, window)


def packed(document: Tensor, valid: Tensor, each: str = "causal", window: int | None = None) -> Mask:
    return masks.Mask.packed(build(each, {"valid": valid, "window": window}), document)


def matrix(visible: Tensor) -> Mask:
    return masks.Mask.from_matrix(visible)


def encoder_decoder(is_target: Tensor) -> Mask:
    return masks.Mask.encoder_decoder(is_target)


def parameters(name: str) -> dict[str, bool]:
    """What a kind of mask is made from, and whether it cannot do without."""
    given = signature(MASKS[name]).parameters.values()
    return {one.name: one.default is Parameter.empty for one in given}


def build(name: str, given: Mapping[str, Any]) -> Mask:
    """A mask of this kind, from those of the values given that it takes."""
    takes = parameters(name)
    lacking = [one for one, needed in takes.items() if needed and given.get(one) is None]
    if lacking:
        raise UsageError(
            f"a {name} mask is made from {', '.join(lacking)}, which cannot be given here",
            f"given: {', '.join(one for one in given if given[one] is not None)}; see allmask/mask/kinds.py",
        )
    mask = MASKS[name](**{one: given[one] for one in takes if one in given})
    return masks.expect_mask(mask)
