"""allmask: one Transformer, every mask. The attention mask is the program.

    import allmask
    from allmask import Mask

    model = allmask.load("allmask-en")
    out = model(ids, mask=Mask.prefix(is_target))

Names are resolved on first use, so that `import allmask` does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Torch caches a prepared kernel for each shape, up to 1024 per kind: gigabytes if every row has another length.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "64")

_HOME = {
    "Config": "config",
    "Mask": "mask",
    "Tokenizer": "text",
    "attend": "nn.attention",
    "attention_map": "inference.attention",
    "draw": "mask.drawing",
    "load": "model",
    "Model": "model",
    "pipeline": "pipelines",
    "prove": "mask.prover",
    "TransformerDecoder": "nn.torch_transformer",
    "TransformerDecoderLayer": "nn.torch_transformer",
    "TransformerEncoder": "nn.torch_transformer",
    "TransformerEncoderLayer": "nn.torch_transformer",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'allmask' has no attribute {name!r}")
    return getattr(import_module(f"allmask.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from allmask.config import Config as Config
    from allmask.inference.attention import attention_map as attention_map
    from allmask.mask.drawing import draw as draw
    from allmask.mask.mask import Mask as Mask
    from allmask.mask.prover import prove as prove
    from allmask.model import Model as Model
    from allmask.model import load as load
    from allmask.nn.attention import attend as attend
    from allmask.nn.torch_transformer import TransformerDecoder as TransformerDecoder
    from allmask.nn.torch_transformer import TransformerDecoderLayer as TransformerDecoderLayer
    from allmask.nn.torch_transformer import TransformerEncoder as TransformerEncoder
    from allmask.nn.torch_transformer import TransformerEncoderLayer as TransformerEncoderLayer
    from allmask.pipelines import pipeline as pipeline
    from allmask.text import Tokenizer as Tokenizer
