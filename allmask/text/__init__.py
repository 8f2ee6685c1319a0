"""Text to ids and back: load, train and prune tokenizers; truncate long text.

tokenizer = Tokenizer.load("bert-folder")        # tokenizer.json, vocab.txt, vocab.json + merges.txt, spiece.model
ids = tokenizer.encode("北京欢迎你").ids
tokenizer, kept = tokenizer.keep(propose_keep_tokens(tokenizer, texts))

Names are resolved on first use, so that `allmask.text.script` does not import tokenizers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allmask.text.prune import propose_keep_tokens
    from allmask.text.tokenizer import Encoded, Tokenizer
    from allmask.text.train import train_tokenizer
    from allmask.text.truncate import truncate_tokens, windows

__all__ = ["Encoded", "Tokenizer", "propose_keep_tokens", "train_tokenizer", "truncate_tokens", "windows"]
_HOME = {
    "propose_keep_tokens": "prune", "Encoded": "tokenizer", "Tokenizer": "tokenizer", "train_tokenizer": "train",
    "truncate_tokens": "truncate", "windows": "truncate",
}  # fmt: skip


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"allmask.text.{_HOME[name]}"), name)
