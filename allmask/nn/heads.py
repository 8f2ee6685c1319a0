"""Heads: from the hidden states of a body to labels of a task or logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.errors import CheckpointError
from allmask.kernels.cross_entropy import linear_cross_entropy
from allmask.mask import Mask
from allmask.nn.crf import CRF
from allmask.nn.dropout import Dropout


class Pooler(nn.Linear):
    """A linear layer and tanh, or another activation, over the hidden states (M, W) of pooled tokens.

    It is BERT's pooler, and the first layer of the task head of several other families.
    """

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__(width, width)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        assert hidden.ndim == 2, "pass the hidden states of the pooled tokens only, (M, W)"
        return self.activation(super().forward(hidden))


# ---- tasks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """The kind of labels that a task head predicts, and their names.

    single  one label per text             softmax, cross-entropy
    multi   any number of labels per text  sigmoid, binary cross-entropy for each
    number  regression                     one number per name, squared error
    choice  one of several texts           one score per text, softmax over the texts of a question
    tag     one label per word             softmax, cross-entropy, at the first token of the word
    chain   one label per word, jointly    conditional random field
    span    start and end in a text        two softmaxes over the tokens of the text
    """

    kind: str
    names: tuple[str, ...]

    def __post_init__(self):
        if self.kind not in KINDS:
            raise CheckpointError(f"labels: the kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise CheckpointError(f"labels: the names are {self.names!r}; expected at least one, as text")
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise CheckpointError(f"labels: the name {twice!r} occurs more than once")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def of_tokens(self) -> bool:
        """Whether tokens are labelled, not whole texts."""
        return self.kind in ("tag", "chain", "span")


KINDS = ("single", "multi", "number", "choice", "tag", "chain", "span")
SPAN = Labels("span", ("start", "end"))


class TaskHead(nn.Module):
    """From hidden states (M, W) to a score for each label, (M, labels)."""

    def __init__(
        self, width: int, labels: int, dropout: float, bias: bool, chain: bool = False, before: nn.Module | None = None
    ):
        super().__init__()
        self.before = nn.Identity() if before is None else before
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(width, labels, bias=bias)
        self.chain = CRF(labels) if chain else None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.dropout(self.before(hidden)))


def pool_answers(answers: Tensor, texts: Tensor, how: str) -> Tensor:
    """Pool scores (M, labels) of parts of texts by "mean" or "max" to scores (texts, labels).

    `texts` (M,) is the index of each part's text; each text has at least one part.
    """
    count = int(texts.max()) + 1
    if how == "max":
        empty = answers.new_zeros(count, answers.shape[-1])
        index = texts[:, None].expand_as(answers)
        return empty.scatter_reduce(0, index, answers, "amax", include_self=False)
    sums = answers.new_zeros(count, answers.shape[-1]).index_add(0, texts, answers)
    return sums / texts.bincount(minlength=count)[:, None]


def grouped_log_softmax(scores: Tensor, questions: Tensor) -> Tensor:
    """Log-softmax of scores (texts,) over the texts of each question; `questions` (texts,) are their indices."""
    count = int(questions.max()) + 1
    top = scores.detach().new_zeros(count).scatter_reduce(0, questions, scores.detach(), "amax", include_self=False)
    total = scores.new_zeros(count).index_add(0, questions, (scores - top[questions]).exp())
    return scores - (top + total.log())[questions]


def pooled_tokens(mask: Mask, which: str = "first") -> Tensor:
    """(B, T), True at the tokens that represent their text: "all", or the "first" or "last" that sees all others.

    Under a bidirectional mask that is [CLS], the first, or XLNet's <cls>, the last; under a causal mask the last.
    """
    if which == "all":
        return mask.valid
    latest = mask.valid & (mask.order == mask.per_document(mask.order, "amax"))
    position = -mask.position if which == "last" else mask.position
    position = position.masked_fill(~latest, torch.iinfo(torch.long).max)
    return latest & (position == mask.per_document(position, "amin"))


def first_tokens(mask: Mask) -> Tensor:
    """(B, T), True at the first token of each document by position: BERT's [CLS], which its pooler reads."""
    first = mask.valid & (mask.position == mask.per_document(mask.position, "amin"))
    order = mask.order.masked_fill(~first, torch.iinfo(torch.long).max)  # a decoder counts its positions from 0 again
    return first & (order == mask.per_document(order, "amin"))


# ---- language models -----------------------------------------------------------------------------------------


FEW = 1 << 22  # logits in fp32 (16 MB): up to here, cross-entropy is faster without chunks


class LanguageModelHead(nn.Module):
    """From hidden states to logits over the vocabulary, by the token embedding unless it has its own output matrix."""

    output: nn.Linear | None

    def __init__(
        self, transform: nn.Module, activation: nn.Module, norm: nn.Module, output: nn.Linear | None, bias: int
    ):
        super().__init__()
        self.transform = transform
        self.activation = activation
        self.norm = norm
        self.output = output
        self.bias = nn.Parameter(torch.zeros(bias)) if bias else None

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the logits (…, V) of hidden states (…, W): pass only the positions that matter."""
        return columnwise_linear(self._ready(hidden), self._matrix(embedding), self.bias)

    def loss(self, hidden: Tensor, embedding: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropy of labels (M,) at hidden states (M, W), in chunks if logits are many."""
        whole = len(labels) * len(self._matrix(embedding)) <= FEW and hidden.dtype == torch.float32
        if whole and not torch.is_autocast_enabled(hidden.device.type):
            return F.cross_entropy(self(hidden, embedding), labels, reduction="sum", label_smoothing=smoothing)
        return linear_cross_entropy(self._ready(hidden), self._matrix(embedding), self.bias, labels, smoothing)

    def _ready(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(hidden)))

    def _matrix(self, embedding: Tensor) -> Tensor:
        return embedding if self.output is None else self.output.weight


def columnwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear where the rounding of a column does not depend on the others: pruning a vocabulary keeps logits' bits.

    In fp32 that is oneDNN's kernel; the default kernel rounds by the number of columns, and is no faster.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() == 0 or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch._C._nn.mkldnn_linear(x.to_mkldnn(), weight, bias).to_dense()  # pyright: ignore
