"""Decoding: greedy, beam search, sampling, streaming and filling in blanks in any order, by one loop.

from allmask.decoding import Decoding, MaskWriter, generate

writer = MaskWriter(model)                                  # reads prompts under the model's own mask
best = generate(writer, prompts, Decoding(end=(sep,), beams=4))   # prompts: lists of token ids; n-best for each
writer = PairWriter(model)                                  # an encoder–decoder: prompts are sources
"""

from allmask.decoding.search import Hypothesis, State, Writer, generate, stream
from allmask.decoding.writers import FillWriter, MaskWriter, PairWriter, blanks, fill
from allmask.options import Decoding

__all__ = [
    "Decoding", "FillWriter", "Hypothesis", "MaskWriter", "PairWriter", "State", "Writer", "blanks", "fill",
    "generate", "stream",
]  # fmt: skip
