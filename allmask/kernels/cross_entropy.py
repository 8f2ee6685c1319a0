"""Cross-entropy of a linear layer over a vocabulary, chunk by chunk: the logits of all tokens never exist at once.

The output matrix is by far the largest of a small model. In chunks of a thousand tokens of the vocabulary, each product
and its softmax stay in the processor's cache. Only the softmax of each chunk is saved for the backward pass, in bf16 if
products are. For bf16 there is an optional C kernel that makes one pass over a chunk where torch makes five.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allmask.kernels import build, matrix_product
from allmask.kernels.build import pointer

CHUNK = 1024  # tokens of the vocabulary
SOURCE = Path(__file__).with_suffix(".c")
THREADS = 4  # the kernel has one; torch with more than this is as fast


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Return the summed cross-entropy of labels (M,) under the logits `hidden @ weight.T + bias`, in fp32.

    `hidden` is (M, W), `weight` (V, W); `smoothing` is the label smoothing of torch's `cross_entropy`. Under autocast,
    products are in its dtype and sums in fp32.
    """
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(weight):
        raise IndexError(f"labels are from {int(labels.min())} to {int(labels.max())}; there are {len(weight)} tokens")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    options = _Options(smoothing, dtype, torch.is_grad_enabled())
    with torch.autocast(device, enabled=False):
        return _CrossEntropy.apply(hidden, weight, bias, labels, options)  # type: ignore[return-value]


class _Options(NamedTuple):
    smoothing: float
    dtype: torch.dtype  # of products
    needs_grad: bool


class _Chunk(NamedTuple):
    tokens: slice  # of the vocabulary
    rows: Tensor  # whose label is one of these tokens
    columns: Tensor  # of those labels within the chunk


def _chunks(labels: Tensor, vocab_size: int) -> list[_Chunk]:
    number, order = (labels // CHUNK).sort()
    counts = torch.bincount(number, minlength=-(-vocab_size // CHUNK)).tolist()
    starts = range(0, vocab_size, CHUNK)
    return [
        _Chunk(slice(start, min(start + CHUNK, vocab_size)), rows, labels[rows] - start)
        for start, rows in zip(starts, order.split(counts), strict=True)
    ]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: _Options
    ) -> Tensor:
        x, chunks = hidden.to(options.dtype), _chunks(labels, len(weight))
        exact = torch.promote_types(options.dtype, torch.float32)
        log_sums = x.new_empty(len(chunks), len(x), dtype=exact)  # log-sum-exp of each chunk
        label_logits, saved, matrices = log_sums.new_empty(len(x)), [], []
        for number, (tokens, rows, columns) in enumerate(chunks):
            matrix, some_bias = weight[tokens], None if bias is None else bias[tokens]
            if matrix_product.suits(x, matrix):
                logits = matrix_product.forward(x, matrix, some_bias)  # (M, n)
            else:
                matrix = matrix.to(x.dtype)
                logits = x @ matrix.t() if some_bias is None else torch.addmm(some_bias.to(x.dtype), x, matrix.t())
            label_logits[rows] = logits[rows, columns].to(exact)
            probabilities = _softmax(logits, log_sums[number])
            if options.needs_grad:
                saved.append(probabilities)
                matrices.append(matrix)  # converted once for both passes
        total = log_sums.logsumexp(0)
        if options.needs_grad:
            shares = (label_logits - total).exp(), (log_sums - total).exp()
            ctx.save_for_backward(x, weight, bias, *shares, *saved, *matrices)
            ctx.options, ctx.chunks, ctx.dtype = options, chunks, hidden.dtype
        target_logits = (1 - options.smoothing) * label_logits.sum()
        if options.smoothing:  # the mean logit of each row, summed over the rows: sums of the factors are enough
            whole = hidden.sum(0, dtype=weight.dtype) @ weight.sum(0)
            whole = (whole if bias is None else whole + len(hidden) * bias.sum()) / len(weight)
            target_logits += options.smoothing * whole.to(exact)
        return total.sum() - target_logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, label_probabilities, chunk_probabilities, *saved = ctx.saved_tensors
        saved, matrices = saved[: len(ctx.chunks)], saved[len(ctx.chunks) :]
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        x_grad = torch.zeros_like(x, dtype=label_probabilities.dtype) if for_x else None
        weight_grad = torch.empty_like(weight) if for_weight else None
        bias_grad = torch.empty_like(bias) if for_bias else None
        common, certain = ctx.options.smoothing / len(weight), 1 - ctx.options.smoothing  # of the smoothed targets
        steps = zip(ctx.chunks, saved, matrices, chunk_probabilities, strict=True)
        for (tokens, rows, columns), within, matrix, share in steps:
            logits_grad = _scale_and_shift(within, share * grad, common * grad)
            # not from the rounded softmax: where a probability is near 1, nothing would be left of the difference
            exact = (label_probabilities[rows] - certain - common) * grad
            logits_grad[rows, columns] = exact.to(logits_grad.dtype)
            if matrix_product.suits(logits_grad, matrix):
                if x_grad is not None:
                    x_grad += matrix_product.input_grad(logits_grad, matrix)
                if weight_grad is not None or bias_grad is not None:
                    parts = (None if whole is None else whole[tokens] for whole in (weight_grad, bias_grad))
                    matrix_product.weight_grad(logits_grad, x, *parts)
                continue
            matrix = matrix.to(x.dtype)
            if bias_grad is not None:
                bias_grad[tokens] = logits_grad.sum(0, dtype=label_probabilities.dtype)
            if x_grad is not None:
                x_grad += (logits_grad @ matrix).to(x_grad.dtype)
            if weight_grad is not None:
                weight_grad[tokens] = logits_grad.t() @ x
        return None if x_grad is None else x_grad.to(ctx.dtype), weight_grad, bias_grad, None, None


def _softmax(logits: Tensor, log_sums: Tensor) -> Tensor:
    """Return the softmax of logits (M, n), which may be overwritten; write their log-sum-exp to `log_sums` (M,)."""
    kernel = _kernel(logits)
    if kernel is not None:
        failed = kernel.softmax(pointer(logits), *map(ctypes.c_int64, logits.shape), pointer(log_sums))
        assert not failed
        return logits
    probabilities = logits.softmax(-1, dtype=log_sums.dtype)
    log_sums.copy_(logits.amax(-1).to(log_sums.dtype) - probabilities.amax(-1).log())
    return probabilities if logits.dtype == probabilities.dtype else logits.copy_(probabilities)


def _scale_and_shift(x: Tensor, factor: Tensor, common: Tensor) -> Tensor:
    """x · factor - common, where x is (M, n) and each row has a factor (M,)."""
    kernel = _kernel(x)
    if kernel is None:
        return x.to(factor.dtype, copy=True).mul_(factor[:, None]).sub_(common).to(x.dtype)
    out, factor = torch.empty_like(x), factor.contiguous()
    sizes, shift = map(ctypes.c_int64, x.shape), ctypes.c_float(common.item())
    kernel.scale_and_shift(pointer(x), *sizes, pointer(factor), shift, pointer(out))
    return out


def _kernel(x: Tensor) -> Any:
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or torch.get_num_threads() > THREADS:
        return None
    return build.library(SOURCE, build.AVX512_BF16)
