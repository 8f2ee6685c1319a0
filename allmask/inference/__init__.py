"""Inference: models with weights packed for the CPU's kernels, and sentence vectors without work on padding.

model = freeze(allmask.load("allmask-en"))
vectors = embed(model, ["北京欢迎你", "Beijing welcomes you"], normalize=True)  # (2, 384)

attention.py has attention maps: which token looks at which.
"""

from allmask.inference.embeddings import POOLS, embed, embed_ids, fit
from allmask.inference.frozen import freeze, precision_of

__all__ = ["POOLS", "embed", "embed_ids", "fit", "freeze", "precision_of"]
