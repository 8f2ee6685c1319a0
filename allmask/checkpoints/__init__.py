"""Models on disk: read BERT and its relatives, GPT-2, T5, XLNet (Hugging Face layout), TensorFlow BERTs; write folders.

checkpoint = read(resolve("allmask-en"))    # config, tensors under our names, heads, left_out
write("copy", checkpoint.config, checkpoint.tensors)

Names are resolved on first use, so that a missing model is reported without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allmask.checkpoints.reader import Checkpoint, check, read, read_config
    from allmask.checkpoints.sources import default_model, resolve
    from allmask.checkpoints.writer import write

__all__ = ["Checkpoint", "check", "default_model", "read", "read_config", "resolve", "write"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"default_model": "sources", "resolve": "sources", "write": "writer"}.get(name, "reader")
    return getattr(import_module(f"allmask.checkpoints.{home}"), name)
