"""Models on disk: read BERT, GPT-2 and T5 in the Hugging Face layout and Google's TensorFlow BERT, write the former.

checkpoint = read(resolve("minilm"))        # config, tensors under our names, heads, left_out
write("copy", checkpoint.config, checkpoint.tensors)
"""

from allmask.checkpoints.reader import Checkpoint, check, classifies, kinds_asked, read
from allmask.checkpoints.sources import resolve
from allmask.checkpoints.writer import write

__all__ = ["Checkpoint", "check", "classifies", "kinds_asked", "read", "resolve", "write"]
