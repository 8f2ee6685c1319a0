"""Pretraining objectives: corruption + order + targets, one small file each, for one and the same model.

vocabulary = Vocabulary.of(tokenizer)
objective = Mixture.parse("mlm:0.5,causal:0.25,permutation:0.25").build(vocabulary)
batch = objective.batch(samples, Draw(seed=1, epoch=0, numbers=[4, 8, 15]))     # samples[n]: ids without special tokens
losses = losses_of(model, batch)                                                # {"mlm": (summed loss, targets)}
"""

from allmask.losses import Losses, answer_loss, losses_of
from allmask.objectives.causal import Causal
from allmask.objectives.draws import Draw
from allmask.objectives.mass import Mass
from allmask.objectives.mixture import Mixed, Mixture
from allmask.objectives.mlm import Mlm
from allmask.objectives.nsp import Nsp
from allmask.objectives.objective import Objective, Passages, Samples
from allmask.objectives.permutation import Permutation
from allmask.objectives.prefix import Prefix
from allmask.objectives.reverse import Reverse
from allmask.objectives.span import Span
from allmask.objectives.unilm import Unilm
from allmask.objectives.vocabulary import Vocabulary
from allmask.registry import OBJECTIVES

__all__ = [
    "OBJECTIVES", "Causal", "Draw", "Losses", "Mass", "Mixed", "Mixture", "Mlm", "Nsp", "Objective", "Passages",
    "Permutation", "Prefix", "Reverse", "Samples", "Span", "Unilm", "Vocabulary", "answer_loss", "losses_of",
]  # fmt: skip
