"""The mask as a value: who may look at whom.

mask.py      Mask: order and group, and everything they imply
kinds.py     masks by name, for the command line; other packages can add theirs
prover.py    what a mask lets through, read off its matrix
drawing.py   masks as text, SVG and PNG files
grid.py      masks that draw themselves in a notebook
animation.py writing under a mask, step by step, as GIF and SVG
canvas.py    boxes and words that become SVG or an image; fonts.py and labels.py serve all pictures
audit.py     whether a model does what its mask says
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allmask.mask.mask import Mask, expect_mask

__all__ = ["Mask", "expect_mask"]


def __getattr__(name: str):
    """Import torch when a mask is first used: the names in kinds.py are listed without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from allmask.mask import mask as module

    return getattr(module, name)
