"""From hidden states to answers: what is read off a body."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.errors import CheckpointError
from allmask.kernels.cross_entropy import linear_cross_entropy
from allmask.mask import Mask
from allmask.nn.attention import Scaled
from allmask.nn.crf import CRF
from allmask.nn.dropout import Dropout


class Pooler(nn.Linear):
    """A dense layer and tanh over the hidden states (M, W) of tokens that stand for texts (BERT, XLNet's summary)."""

    def __init__(self, width: int):
        super().__init__(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        assert hidden.ndim == 2, "pass the hidden states of the pooled tokens only, (M, W)"
        return torch.tanh(super().forward(hidden))


# ---- tasks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """What a task head is asked, and the name of each of its answers.

    single  which one of the names?    softmax, cross-entropy
    multi   which of the names?        a sigmoid and a binary cross-entropy each
    number  how much, of each name?    as it is, squared error
    choice  which of several texts?    one score a text, softmax over the texts of a question
    tag     which name has each word?  softmax, cross-entropy, at the first token of a word
    chain   the same, of all words of a text together    a conditional random field
    span    where does it start, where does it end?      two softmaxes over the tokens of a text
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
            raise CheckpointError(f"labels: {twice!r} is the name of more than one")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def of_tokens(self) -> bool:
        """Whether tokens are asked, not the text as a whole."""
        return self.kind in ("tag", "chain", "span")


KINDS = ("single", "multi", "number", "choice", "tag", "chain", "span")
SPAN = Labels("span", ("start", "end"))


class TaskHead(nn.Module):
    """What a body makes of the asked tokens, (M, W), to a score for each label, (M, labels)."""

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
    """Scores (M, labels) of parts of texts become scores (texts, labels): their "mean" or "max".

    `texts` (M,) says of which text each is a part, from 0 on; each has one at least.
    """
    count = int(texts.max()) + 1
    if how == "max":
        empty = answers.new_zeros(count, answers.shape[-1])
        index = texts[:, None].expand_as(answers)
        return empty.scatter_reduce(0, index, answers, "amax", include_self=False)
    sums = answers.new_zeros(count, answers.shape[-1]).index_add(0, texts, answers)
    return sums / texts.bincount(minlength=count)[:, None]


def grouped_log_softmax(scores: Tensor, questions: Tensor) -> Tensor:
    """(texts,) the logarithm of each text's probability among those of its question, from scores (texts,)."""
    count = int(questions.max()) + 1
    top = scores.detach().new_zeros(count).scatter_reduce(0, questions, scores.detach(), "amax", include_self=False)
    total = scores.new_zeros(count).index_add(0, questions, (scores - top[questions]).exp())
    return scores - (top + total.log())[questions]


def pooled_tokens(mask: Mask, speaker: str = "first") -> Tensor:
    """(B, T), True at the tokens that stand for a text: all of it, or the first or the last that sees every other.

    Under a bidirectional mask that is the first, [CLS], or XLNet's last, <cls>; under a causal one the last anyway.
    """
    if speaker == "all":
        return mask.valid
    latest = mask.valid & (mask.order == mask.among(mask.order, "amax"))
    position = -mask.position if speaker == "last" else mask.position
    position = position.masked_fill(~latest, torch.iinfo(torch.long).max)
    return latest & (position == mask.among(position, "amin"))


def first_tokens(mask: Mask) -> Tensor:
    """(B, T), True at the first token of each document, wherever it stands: BERT's [CLS], which its pooler reads."""
    first = mask.valid & (mask.position == mask.among(mask.position, "amin"))
    order = mask.order.masked_fill(~first, torch.iinfo(torch.long).max)  # a decoder counts its positions from 0 again
    return first & (order == mask.among(order, "amin"))


# ---- language models -----------------------------------------------------------------------------------------


FEW = 1 << 22  # logits in fp32 (16 MB): up to here their cross-entropy is faster as a whole


class LanguageModelHead(nn.Module):
    """Hidden states to logits over the vocab_size, through the token embedding unless it has a matrix of its own."""

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
        """Logits (…, V) of hidden states (…, W): pass only the positions that matter."""
        return columnwise_linear(self._ready(hidden), self._matrix(embedding), self.bias)

    def loss(self, hidden: Tensor, embedding: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross-entropy of labels (M,) at hidden states (M, W); where they are many, piece by piece."""
        whole = len(labels) * len(self._matrix(embedding)) <= FEW and hidden.dtype == torch.float32
        if whole and not torch.is_autocast_enabled(hidden.device.type):
            return F.cross_entropy(self(hidden, embedding), labels, reduction="sum", label_smoothing=smoothing)
        return linear_cross_entropy(self._ready(hidden), self._matrix(embedding), self.bias, labels, smoothing)

    def _ready(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(hidden)))

    def _matrix(self, embedding: Tensor) -> Tensor:
        return embedding if self.output is None else self.output.weight


def columnwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in which no output column's rounding depends on the others: a pruned vocab_size keeps its logits' bits.

    In fp32 that is oneDNN's kernel; the default one rounds by how many columns there are (and is no faster).
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() == 0 or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch._C._nn.mkldnn_linear(x.to_mkldnn(), weight, bias).to_dense()  # pyright: ignore


def bert_head(width: int, vocab_size: int, activation: nn.Module, epsilon: float, tied: bool) -> LanguageModelHead:
    norm = nn.LayerNorm(width, eps=epsilon)
    return LanguageModelHead(nn.Linear(width, width), activation, norm, _own(width, vocab_size, tied), vocab_size)


def plain_head(
    width: int, vocab_size: int, tied: bool, scaled: bool = False, biased: bool = False
) -> LanguageModelHead:
    """`scaled`: hidden states are divided by sqrt(width), as an embedding of numbers of size 1 needs it (T5)."""
    before = Scaled(width**-0.5) if scaled else nn.Identity()
    return LanguageModelHead(before, nn.Identity(), nn.Identity(), _own(width, vocab_size, tied), vocab_size * biased)


def _own(width: int, vocab_size: int, tied: bool) -> nn.Linear | None:
    return None if tied else nn.Linear(width, vocab_size, bias=False)
