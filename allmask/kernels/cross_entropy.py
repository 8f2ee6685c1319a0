"""Cross-entropy over a vocabulary, piece by piece: the logits of all tokens at once are never there.

The output matrix is by far the largest of a small model. Taken a thousand tokens of the vocabulary at a time, a product
and the softmax after it stay in the processor's cache, both on the way there and on the way back; of all pieces just
the shares (softmax within a piece) are remembered, in bf16 where matrices are multiplied in bf16. For bf16 there is an
optional kernel in C, which needs one trip through a piece where torch needs five.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allmask.kernels import build
from allmask.kernels.build import pointer

PIECE = 1024  # tokens of the vocabulary
SOURCE = Path(__file__).with_suffix(".c")
THREADS = 4  # the kernel has one; torch with more than this is as fast


def token_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The summed cross-entropy of labels (M,) under logits `hidden @ weight.T + bias`, (M, W) and (V, W); in fp32.

    As of torch's `cross_entropy`, `smoothing` is the share of a target that all tokens have in common. Under autocast
    products are in its type; sums are not.
    """
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(weight):
        raise IndexError(f"labels are from {int(labels.min())} to {int(labels.max())}; there are {len(weight)} tokens")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    how = _How(smoothing, dtype, torch.is_grad_enabled())
    with torch.autocast(device, enabled=False):
        return _TokenLoss.apply(hidden, weight, bias, labels, how)  # type: ignore[return-value]


class _How(NamedTuple):
    smoothing: float
    dtype: torch.dtype  # of products
    learns: bool


class _Piece(NamedTuple):
    """Some tokens of the vocabulary, and which of the labels are among them."""

    tokens: slice
    rows: Tensor
    columns: Tensor


def _pieces(labels: Tensor, vocab_size: int) -> list[_Piece]:
    number, order = (labels // PIECE).sort()
    counts = torch.bincount(number, minlength=-(-vocab_size // PIECE)).tolist()
    starts = range(0, vocab_size, PIECE)
    return [
        _Piece(slice(start, min(start + PIECE, vocab_size)), rows, labels[rows] - start)
        for start, rows in zip(starts, order.split(counts), strict=True)
    ]


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> Tensor:
        x, pieces = hidden.to(how.dtype), _pieces(labels, len(weight))
        exact = torch.promote_types(how.dtype, torch.float32)
        sums = x.new_empty(len(pieces), len(x), dtype=exact)  # the logarithm of each piece's sum of exponentials
        said, shares = sums.new_empty(len(x)), []
        for number, (tokens, rows, columns) in enumerate(pieces):
            logits = _logits(x, weight, bias, tokens)
            said[rows] = logits[rows, columns].to(exact)
            share = _to_shares(logits, sums[number])
            if how.learns:
                shares.append(share)
        whole = sums.logsumexp(0)
        if how.learns:
            ctx.save_for_backward(x, weight, bias, (said - whole).exp(), (sums - whole).exp(), *shares)
            ctx.how, ctx.pieces, ctx.dtype = how, pieces, hidden.dtype
        told = (1 - how.smoothing) * said.sum()
        if how.smoothing:
            told += how.smoothing * _mean_logits(hidden, weight, bias).to(exact)
        return whole.sum() - told

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, likely, parts, *shares = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        x_grad = torch.zeros_like(x, dtype=likely.dtype) if for_x else None
        weight_grad = torch.empty_like(weight) if for_weight else None
        bias_grad = torch.empty_like(bias) if for_bias else None
        common, certain = ctx.how.smoothing / len(weight), 1 - ctx.how.smoothing
        for (tokens, rows, columns), share, part in zip(ctx.pieces, shares, parts, strict=True):
            wrong = _slopes(share, part * grad, common * grad)
            # not from what was rounded: where it is near 1, nothing would be left
            wrong[rows, columns] = ((likely[rows] - certain - common) * grad).to(wrong.dtype)
            if bias_grad is not None:
                bias_grad[tokens] = wrong.sum(0, dtype=likely.dtype)
            if x_grad is not None:
                x_grad += (wrong @ weight[tokens].to(x.dtype)).to(x_grad.dtype)
            if weight_grad is not None:
                weight_grad[tokens] = wrong.t() @ x
        return None if x_grad is None else x_grad.to(ctx.dtype), weight_grad, bias_grad, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice) -> Tensor:
    """(M, n) of some tokens."""
    matrix = weight[tokens].to(x.dtype)
    return x @ matrix.t() if bias is None else torch.addmm(bias[tokens].to(x.dtype), x, matrix.t())


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean logit of each row, summed over the rows: sums of the factors will do."""
    whole = hidden.sum(0, dtype=weight.dtype) @ weight.sum(0)
    return (whole if bias is None else whole + len(hidden) * bias.sum()) / len(weight)


# ---- softmax of a piece --------------------------------------------------------------------------------------


def _to_shares(logits: Tensor, sums: Tensor) -> Tensor:
    """Shares in the type of the logits (M, n), whose memory they may take; `sums` (M,) is filled, see above."""
    kernel = _kernel(logits)
    if kernel is not None:
        failed = kernel.shares(pointer(logits), *map(ctypes.c_int64, logits.shape), pointer(sums))
        assert not failed
        return logits
    share = logits.softmax(-1, dtype=sums.dtype)
    sums.copy_(logits.amax(-1).to(sums.dtype) - share.amax(-1).log())
    return share if logits.dtype == share.dtype else logits.copy_(share)


def _slopes(share: Tensor, factor: Tensor, common: Tensor) -> Tensor:
    """share · factor - common, (M, n) with a factor (M,) for each row."""
    kernel = _kernel(share)
    if kernel is None:
        return share.to(factor.dtype, copy=True).mul_(factor[:, None]).sub_(common).to(share.dtype)
    slopes, factor = torch.empty_like(share), factor.contiguous()
    sizes, less = map(ctypes.c_int64, share.shape), ctypes.c_float(common.item())
    kernel.slopes(pointer(share), *sizes, pointer(factor), less, pointer(slopes))
    return slopes


def _kernel(x: Tensor) -> Any:
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or torch.get_num_threads() > THREADS:
        return None
    return build.library(SOURCE, build.AVX512_BF16)
