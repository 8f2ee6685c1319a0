"""The settings of the training loop; declared in allmask/options.py."""

from allmask.options import Settings, as_plain

__all__ = ["Settings", "as_plain"]
