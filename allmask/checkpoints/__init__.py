"""Models on disk: read BERT, GPT-2, T5, XLNet (Hugging Face layout) and Google's TensorFlow BERT; write folders.

checkpoint = read(resolve("minilm"))        # config, tensors under our names, heads, left_out
write("copy", checkpoint.config, checkpoint.tensors)
"""

from allmask.checkpoints.reader import Checkpoint, check, read
from allmask.checkpoints.sources import resolve
from allmask.checkpoints.writer import write

__all__ = ["Checkpoint", "check", "read", "resolve", "write"]
