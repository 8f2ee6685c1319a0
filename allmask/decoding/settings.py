"""How to write; declared in allmask/options.py."""

from allmask.options import Decoding

__all__ = ["Decoding"]
