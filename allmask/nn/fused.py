"""The parts of a post-norm layer in training, with compiled kernels and fewer passes over memory.

Between the matrix products torch makes a dozen passes over the hidden states: bias, activation, dropout, residual,
norm, and, under autocast, conversions between fp32 and bf16 at every product. Here there is one after each product.
Products are those of matrix_product.py where it has them, else torch's. There are two copies of hidden states: in fp32
for the residual, and in the dtype of products.
`Layer` in layers.py is the specification; it is used wherever this cannot be.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allmask.kernels import activation, matrix_product, residual_norm

log = logging.getLogger("allmask")
ACTIVATIONS: dict[Any, str] = {(nn.GELU, "none"): "gelu", (nn.GELU, "tanh"): "gelu_tanh", (nn.ReLU, ""): "relu"}


def product_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products of x: that of autocast, or fp32; None if the kernels do not support it."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return dtype if dtype in (torch.float32, torch.bfloat16) else None


def suits(x: Tensor) -> bool:
    """Whether hidden states (…, W) can be computed here."""
    suited = torch.is_grad_enabled() and residual_norm.suits(x, x.shape[-1]) and product_dtype(x) is not None
    return suited and activation.library() is not None and _kernels_are_right()


@cache
def _kernels_are_right() -> bool:
    """Self-check: whether the kernels give the results and gradients of torch for a few numbers on this machine."""
    x, step, grad = (torch.linspace(-3, 3, 96).mul(factor).sin().view(3, 32) for factor in (5.0, 7.0, 11.0))
    bias, weight, shift = (torch.linspace(-1, 1, 32).mul(factor).cos() for factor in (1.0, 2.0, 3.0))
    matrix = torch.linspace(-9, 9, 1024).sin().view(32, 32)
    given = [tensor.requires_grad_() for tensor in (x, step, bias, weight, shift, matrix)]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        normed = F.layer_norm(x + step + bias, (32,), weight, shift)
        pairs = [(residual_norm.residual_norm(x, step, bias, weight, shift, 1e-5)[0], normed)]
        for act in (nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()):
            pairs.append((activation.activate(x, bias, kind_of(act) or ""), act(x + bias)))
        if matrix_product.library(x.dtype) is not None:
            pairs.append((matrix_product.linear(x, matrix, bias), F.linear(x, matrix, bias)))
            inner = F.gelu(F.linear(x, matrix, bias))
            pairs.append((_FeedForward.apply(x, bias, matrix, matrix, "gelu"), F.linear(inner, matrix)))  # type: ignore
        for ours, torchs in pairs:
            found, expected = (torch.autograd.grad(y, given, grad, allow_unused=True) for y in (ours, torchs))
            both = [(ours, torchs), *((a, b) for a, b in zip(found, expected, strict=True) if b is not None)]
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in both):
                log.warning("compiled kernels for training differ from torch on this machine; they are not used")
                return False
    return True


def suits_modules(*modules: nn.Module) -> bool:
    """Whether these are plain linear layers, norms and activations, in fp32, with biases and without hooks."""
    return all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    if type(module) is nn.Linear or type(module) is nn.LayerNorm:
        weight, bias = module.weight, module.bias
        return type(weight) is type(bias) is nn.Parameter and weight.dtype == bias.dtype == torch.float32
    return kind_of(module) is not None


def kind_of(activation: nn.Module) -> str | None:
    """The name of an activation that there is a kernel for."""
    return ACTIVATIONS.get((type(activation), getattr(activation, "approximate", "")))


def join(x: Tensor, step: Tensor, bias: Tensor, norm: nn.LayerNorm, p: float) -> tuple[Tensor, Tensor]:
    """norm(x + dropout(step + bias)), in fp32 and in the dtype of `step`."""
    return residual_norm.residual_norm(
        x, step, bias, norm.weight, norm.bias, norm.eps, p, low=step.dtype == torch.bfloat16
    )


def feed_forward(h: Tensor, expand: nn.Linear, act: nn.Module, contract: nn.Linear, p: float) -> Tensor:
    """Position-wise feed-forward, without the bias of its result."""
    kind = kind_of(act)
    assert kind is not None
    weights = expand.weight, contract.weight
    if not p and h.dtype == product_dtype(h) and matrix_product.suits(h, *weights):
        found = _FeedForward.apply(h.flatten(0, -2), expand.bias, *weights, kind)
        return found.unflatten(0, h.shape[:-1])  # type: ignore[union-attr]
    inner = linear(h, expand.weight)
    return linear(activation.activate(inner, expand.bias, kind, p), contract.weight)


class _FeedForward(torch.autograd.Function):
    """f(h @ expand.T + bias) @ contract.T with an activation f, of rows h (N, W)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor, expand: Tensor, contract: Tensor, kind: str) -> Tensor:
        inner, slope = matrix_product.activated(h, expand, bias, kind)
        ctx.save_for_backward(h, inner, slope, expand, contract)
        return matrix_product.forward(inner, contract)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (h, inner, slope, expand, contract) = ctx.saved_tensors
        for_h, for_bias, for_expand, for_contract, _ = ctx.needs_input_grad
        contract_grad = matrix_product.weight_grad(grad, inner) if for_contract else None
        inner_grad = matrix_product.input_grad(grad, contract, slope)
        bias_grad = expand.new_empty(len(expand)) if for_bias else None
        expand_grad = matrix_product.weight_grad(inner_grad, h, bias_grad=bias_grad) if for_bias or for_expand else None
        h_grad = matrix_product.input_grad(inner_grad, expand) if for_h else None
        return h_grad, bias_grad, expand_grad if for_expand else None, contract_grad, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, in the dtype of products."""
    if x.dtype != product_dtype(x) or not matrix_product.suits(x, weight):
        return F.linear(x, weight)
    return matrix_product.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def project(h: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Several linear layers of the same h (…, W), as one product."""
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    with torch.autocast(h.device.type, enabled=False):
        found = _Projection.apply(h.reshape(-1, h.shape[-1]), len(linears), *weights, *biases)
    return tuple(x.unflatten(0, h.shape[:-1]) for x in found)  # type: ignore[union-attr]


class _Projection(torch.autograd.Function):
    """The results are columns of one matrix. So are the gradients, if attention makes them so (packed_attention.py)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.sizes, ctx.ours = [len(weight) for weight in weights], matrix_product.suits(h, *weights)
        weight = h.new_empty(sum(ctx.sizes), h.shape[1], dtype=torch.float32 if ctx.ours else h.dtype)
        for rows, part in zip(weight.split(ctx.sizes), weights, strict=True):
            rows.copy_(part)
        ctx.save_for_backward(h, weight)
        if ctx.ours:
            out = matrix_product.forward(h, weight, torch.cat(biases))
        else:
            out = torch.addmm(torch.cat(biases).to(h.dtype), h, weight.t())
        return out.split(ctx.sizes, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        grad, for_h = _as_one(grads, ctx.sizes), ctx.needs_input_grad[0]
        if ctx.ours:
            h_grad = matrix_product.input_grad(grad, weight) if for_h else None
            bias_grad = weight.new_empty(len(weight))
            weight_grad = matrix_product.weight_grad(grad, h, bias_grad=bias_grad)
        else:
            h_grad = grad @ weight if for_h else None
            weight_grad = (grad.t() @ h).float()
            bias_grad = grad.sum(0).float()  # torch adds in fp32; asked for fp32, it is slower
        return h_grad, None, *weight_grad.split(ctx.sizes), *bias_grad.split(ctx.sizes)


def _as_one(columns: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    """Columns of a matrix, side by side; without copying if they are."""
    first, total = columns[0], sum(sizes)
    place = first.data_ptr()
    for part, size in zip(columns, sizes, strict=True):
        if part.stride() != (total, 1) or part.data_ptr() != place:
            return torch.cat(columns, dim=1)
        place += size * part.element_size()
    return first.as_strided((len(first), total), (total, 1))
