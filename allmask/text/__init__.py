"""Text to ids and back: load, train and prune tokenizers; truncate long text.

tokenizer = Tokenizer.load("bert-folder")        # tokenizer.json, vocab.txt, vocab.json + merges.txt, spiece.model
ids = tokenizer.encode("北京欢迎你").ids
tokenizer, kept = tokenizer.keep(propose_keep_tokens(tokenizer, texts))
"""

from allmask.text.prune import propose_keep_tokens
from allmask.text.tokenizer import Encoded, Tokenizer
from allmask.text.train import train_tokenizer
from allmask.text.truncate import truncate_tokens, windows

__all__ = ["Encoded", "Tokenizer", "propose_keep_tokens", "train_tokenizer", "truncate_tokens", "windows"]
