"""Text in and out of ids: tokenizers read, trained and pruned; long text cut to what a model can hold.

tokenizer = Tokenizer.load("bert-folder")        # tokenizer.json, vocab.txt, vocab.json + merges.txt, spiece.model
ids = tokenizer.encode("北京欢迎你").ids
tokenizer, kept = tokenizer.keep(propose_keep_tokens(tokenizer, texts))
"""

from allmask.text.lengths import truncate, windows
from allmask.text.pruning import propose_keep_tokens
from allmask.text.tokenizer import Encoded, Tokenizer
from allmask.text.training import train, train_on

__all__ = ["Encoded", "Tokenizer", "propose_keep_tokens", "train", "train_on", "truncate", "windows"]
