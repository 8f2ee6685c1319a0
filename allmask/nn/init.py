"""Initialization of weights: distributions, scales, parametrizations, and a report of the signal through the layers.

Each function fills a tensor in place, from the generator it is given, and returns it. Matrices are (out, in), as in
`nn.Linear`. A layer y = Wx can preserve one of two things:

    the size of each number    E[y²] = E[x²]    variance 1/in    fan="in"
    the norm of the vector     |y|² = |x|²      variance 1/out   fan="out"; possible for all x only if out >= in

Both are the same for square matrices; Xavier's 2/(in + out) is a compromise (fan="mean"). `std` is always the standard
deviation of the result, whatever the distribution: truncating a normal at ±2 shrinks it to 0.8796, so
`truncated_normal` draws from a wider one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.hooks import RemovableHandle

from allmask.errors import UsageError
from allmask.nn.attention import Attention

Activation = Callable[[Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)


# ---- distributions: mean 0 and the given standard deviation ---------------------------------------------------


@torch.no_grad()
def normal(weight: Tensor, std: float, rng: Generator | None = None) -> Tensor:
    """Draw from N(0, std²), without bounds."""
    return weight.normal_(0.0, std, generator=rng)


@torch.no_grad()
def uniform(weight: Tensor, std: float, rng: Generator | None = None) -> Tensor:
    """Draw uniformly between ±√3·std: a uniform distribution on [-a, a] has variance a²/3."""
    bound = math.sqrt(3.0) * std
    return weight.uniform_(-bound, bound, generator=rng)


@torch.no_grad()
def truncated_normal(weight: Tensor, std: float, rng: Generator | None = None, cut: float = 2.0) -> Tensor:
    """Draw from a normal truncated at ±`cut` of its deviations, widened so that the result has deviation `std`.

    The largest value is cut/truncated_std(cut)·std, that is 2.274·std for the usual cut of 2.
    """
    inner = math.erf(cut / math.sqrt(2.0))  # the probability inside the cut, also the range of erf there
    scale = std / truncated_std(cut)
    exact = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    # inverse of the distribution function: one pass in place, where rejection would need several copies
    exact.uniform_(-inner, inner, generator=rng).erfinv_().mul_(math.sqrt(2.0)).clamp_(-cut, cut).mul_(scale)
    return weight if exact is weight else weight.copy_(exact)


def truncated_std(cut: float = 2.0) -> float:
    """The standard deviation of N(0, 1) truncated at ±`cut`: 0.8796 at 2."""
    if not cut > 0:
        raise UsageError(f"cut is {cut}; it must be positive")
    density = math.exp(-cut * cut / 2.0) / math.sqrt(2.0 * math.pi)
    return math.sqrt(1.0 - 2.0 * cut * density / math.erf(cut / math.sqrt(2.0)))


@torch.no_grad()
def orthogonal(weight: Tensor, gain: float = 1.0, rng: Generator | None = None) -> Tensor:
    """Draw a random orthogonal matrix, uniformly: WᵀW = gain²·I if out >= in, else WWᵀ = gain²·I."""
    exact = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    nn.init.orthogonal_(exact, gain, generator=rng)
    return weight if exact is weight else weight.copy_(exact)


DISTRIBUTIONS = {"normal": normal, "uniform": uniform, "truncated_normal": truncated_normal}


# ---- scales: the standard deviation of a matrix ----------------------------------------------------------------


def fan(weight: Tensor, which: str = "in") -> float:
    """The number of inputs of each output ("in"), of outputs of each input ("out"), or their "mean"."""
    if weight.ndim < 2:
        raise UsageError(f"a tensor of shape {tuple(weight.shape)} has no fan", "only matrices and kernels have one")
    per_channel = weight[0, 0].numel()
    inputs, outputs = weight.shape[1] * per_channel, weight.shape[0] * per_channel
    return _choose({"in": inputs, "out": outputs, "mean": (inputs + outputs) / 2}, which, "fan")


def scaled(weight: Tensor, rng: Generator | None = None, *, gain: float = 1.0, by: str = "in", kind: str = "normal"):
    """Draw with standard deviation gain/√fan from the named distribution; the functions below are special cases."""
    return _choose(DISTRIBUTIONS, kind, "kind")(weight, gain / math.sqrt(fan(weight, by)), rng)


def xavier_normal(weight: Tensor, rng: Generator | None = None, gain: float = 1.0) -> Tensor:
    """Glorot and Bengio (2010): variance 2/(in + out), for activations close to x around 0, such as tanh."""
    return scaled(weight, rng, gain=gain, by="mean", kind="normal")


def xavier_uniform(weight: Tensor, rng: Generator | None = None, gain: float = 1.0) -> Tensor:
    """Uniform with the variance of `xavier_normal`; the bound is √(6/(in + out))."""
    return scaled(weight, rng, gain=gain, by="mean", kind="uniform")


def he(weight: Tensor, rng: Generator | None = None, by: str = "in", kind: str = "normal") -> Tensor:
    """He et al. (arXiv 1502.01852): variance 2/fan, because ReLU halves the second moment."""
    return scaled(weight, rng, gain=math.sqrt(2.0), by=by, kind=kind)


def for_activation(
    weight: Tensor, activation: Activation, rng: Generator | None = None, by: str = "in", kind: str = "normal"
) -> Tensor:
    """For a layer after any activation, what `he` is after ReLU: variance 1/(fan·E[f(z)²])."""
    return scaled(weight, rng, gain=activation_gain(activation), by=by, kind=kind)


def t5(weight: Tensor, rng: Generator | None = None, head_width: int | None = None) -> Tensor:
    """T5's normals: variance 1/in; for the query projection 1/(in·head_width), instead of the 1/√d in attention.

    The scores q·k of unit inputs then start with variance 1, as with a 1/√d after the product.
    """
    gain = 1.0 if head_width is None else 1.0 / math.sqrt(head_width)
    return scaled(weight, rng, gain=gain, by="in", kind="normal")


# ---- activations: their effect on mean and variance -----------------------------------------------------------


def activation_moments(activation: Activation, points: int = 24_000, reach: float = 12.0) -> tuple[float, float]:
    """E[f(z)] and E[f(z)²] for z from N(0, 1), by the midpoint rule, which is exact enough with a kink or jump at 0."""
    step = 2.0 * reach / points
    z = torch.arange(points, dtype=torch.float64).add_(0.5).mul_(step).sub_(reach)
    share = torch.exp(-z.square() / 2.0) * (step / math.sqrt(2.0 * math.pi))
    value = activation(z)
    return float((value * share).sum()), float((value.square() * share).sum())


def activation_gain(activation: Activation) -> float:
    """1/√E[f(z)²]: √2 for ReLU, 1.5925 for tanh, 1.5335 for GELU.

    Weights scaled by it keep unit pre-activations at unit size. Whether deviations shrink depends on the activation:
    tanh returns to size 1, ReLU keeps any deviation, GELU and SiLU amplify it and need a norm.
    """
    second = activation_moments(activation)[1]
    if not 0.0 < second < math.inf:
        raise UsageError(f"the second moment of this activation on N(0, 1) is {second}; no gain can correct that")
    return 1.0 / math.sqrt(second)


def standardized(activation: Activation) -> Activation:
    """The activation shifted and scaled to mean 0 and variance 1 on N(0, 1), so that weights need no gain."""
    mean, second = activation_moments(activation)
    variance = second - mean * mean
    if not 0.0 < variance < math.inf:
        raise UsageError(f"the variance of this activation on N(0, 1) is {variance}; it cannot be standardized")
    return lambda x: (activation(x) - mean) / math.sqrt(variance)


# ---- parametrization: the scale in the forward pass instead of the weights --------------------------------------


class NTKLinear(nn.Module):
    """A linear layer with weights of size 1: y = gain/√in · Wx + b, W from N(0, 1).

    At initialization it equals an `nn.Linear` with variance gain²/in. Training differs: all weights have the same size,
    so an adaptive optimizer with learning rate 0.01 changes each of them by about one per cent per step.
    """

    def __init__(self, inputs: int, outputs: int, rng: Generator | None = None, gain: float = 1.0, bias: bool = True):
        super().__init__()
        self.scale = gain / math.sqrt(inputs)
        self.weight = nn.Parameter(normal(torch.empty(outputs, inputs), 1.0, rng))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, gain: float = 1.0) -> NTKLinear:
        """Return a layer that computes the same as `linear`, with the scale moved out of its weights."""
        with torch.device("meta"):  # its weights are replaced at once: nothing to allocate or draw
            layer = cls(linear.in_features, linear.out_features, gain=gain, bias=False)
        layer.weight = nn.Parameter(linear.weight / layer.scale)
        layer.bias = None if linear.bias is None else nn.Parameter(linear.bias.clone())
        return layer

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return a plain layer with the scale in its weights."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight * self.scale)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.clone())
        return linear


class Rescaled(nn.Module):
    """A parametrization of torch.nn.utils: the weight is `scale` times a stored matrix."""

    scale: Tensor

    def __init__(self, scale: float):
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, original: Tensor) -> Tensor:
        return original * self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.scale


def ntk(module: M) -> M:
    """Store all matrices of linear layers and embeddings with root mean square 1; the scale is a buffer.

    The network computes the same as before, but trains differently: see `NTKLinear`. For code that reads it, `weight`
    is still the matrix that is applied.
    """
    for part in list(module.modules()):
        if isinstance(part, nn.Linear | nn.Embedding):
            scale = 1.0 if part.weight.is_meta else rms([part.weight]) or 1.0
            register_parametrization(part, "weight", Rescaled(scale))
    return module


def plain_name(name: str) -> str:
    """The name of a parameter in a model without NTK parametrization."""
    return name.replace(".parametrizations.weight.original", ".weight")


def without_ntk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the same network with the scales in its matrices."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".parametrizations.weight.original"):
            tensor = tensor * tensors[name.removesuffix("original") + "0.scale"]
        if not name.endswith(".parametrizations.weight.0.scale"):
            found[plain_name(name)] = tensor
    return found


# ---- a whole model --------------------------------------------------------------------------------------------


RESIDUAL = ("attention.output", "cross.output", "feed_forward.contract")  # modules that write to the residual stream


def initialize(
    module: M, std: float = 0.02, rng: Generator | None = None, kind: str = "truncated_normal",
    residual_scale: float = 1.0, residual: tuple[str, ...] = RESIDUAL,
) -> M:  # fmt: skip
    """Initialize a model: matrices drawn with `std`, biases 0, gains of norms 1, the padding row 0.

    BERT: `initialize(model, 0.02, rng)`. GPT-2: `initialize(model, 0.02, rng, "normal", (2 * layers) ** -0.5)`. The
    modules whose name ends as in `residual` write to the residual stream, twice per layer; with this `residual_scale`,
    all of them together add as much variance to it as one would without.
    """
    fill = _choose(DISTRIBUTIONS, kind, "kind")

    def draw(matrix: Tensor, _: nn.Module, name: str) -> None:
        fill(matrix, std * residual_scale if name.endswith(residual) else std, rng)

    return _start_all(module, draw)


def initialize_xavier(module: M, rng: Generator | None = None) -> M:
    """Initialize as the encoder–decoder of 2017: matrices by Xavier, embeddings with 1/√width, the rest as above.

    Embeddings are then of size 1 after their multiplication by √width, and so are logits, which are not multiplied.
    """

    return _start_all(module, lambda matrix, owner, _: _draw_xavier(matrix, owner, rng))


def _draw_xavier(matrix: Tensor, owner: nn.Module, rng: Generator | None) -> None:
    if isinstance(owner, nn.Embedding):
        normal(matrix, matrix.shape[1] ** -0.5, rng)
    else:
        xavier_uniform(matrix, rng)


def initialize_t5(module: M, factor: float = 1.0, rng: Generator | None = None) -> M:
    """Initialize as T5: matrices by `t5`, embeddings of size 1, relative position biases of size 1/√width."""
    width = next(part.embedding_dim for part in module.modules() if isinstance(part, nn.Embedding))
    heads = {f"{name}.query": part.heads for name, part in module.named_modules() if isinstance(part, Attention)}

    def draw(matrix: Tensor, owner: nn.Module, name: str) -> None:
        if isinstance(owner, nn.Embedding) or name.endswith("lm_head.output"):
            normal(matrix, factor * (width**-0.5 if name.endswith("relative.table") else 1.0), rng)
        else:
            t5(matrix, rng, matrix.shape[0] // heads[name] if name in heads else None)
            matrix.data.mul_(factor)

    return _start_all(module, draw)


def initialize_recurrent(module: M, rng: Generator | None = None) -> M:
    """Initialize as the 2017 Transformer, each gate of an LSTM as one matrix; recurrent weights are orthogonal.

    Forget gates have bias 1, so that early tokens are not forgotten before training has shown which ones matter.
    """

    def draw(matrix: Tensor, owner: nn.Module, _: str) -> None:
        if not isinstance(owner, nn.LSTM):
            return _draw_xavier(matrix, owner, rng)
        fill = orthogonal if matrix is owner.weight_hh_l0 else xavier_uniform
        for gate in matrix.detach().chunk(4):
            fill(gate, rng=rng)

    _start_all(module, draw)
    for part in module.modules():
        if isinstance(part, nn.LSTM):
            bias: Any = part.bias_ih_l0
            nn.init.ones_(bias[part.hidden_size : 2 * part.hidden_size])
    return module


def _start_all(module: M, draw: Callable[[Tensor, nn.Module, str], None]) -> M:
    """Call `draw(matrix, owner, owner's name)` for each matrix; other parameters become 0 (biases) or 1 (gains)."""
    done: set[int] = set()  # a tied matrix belongs to two modules and is drawn once
    for owner_name, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            if parameter.ndim >= 2:
                draw(parameter, owner, owner_name)
            else:
                nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            owner.weight.detach()[owner.padding_idx].zero_()
    return module


# ---- the signal through the layers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signal:
    """Root mean squares at the input of a stack or after one of its layers."""

    name: str
    signal: float  # of the hidden states
    gradient: float  # of the gradient of the hidden states, for a random gradient of size 1 at the output
    weights: float | None  # of the layer's matrices; None for the input of a stack


def signal_report(model: nn.Module, run: Callable[[], Tensor], rng: Generator | None = None) -> list[Signal]:
    """Measure signal and gradient at the input of each stack `….layers` of a model and after each of its layers.

    `run` is one forward pass that returns the output: `lambda: model(ids).hidden`. Dropout is off meanwhile, and the
    gradients of parameters do not change.
    """
    named = [(name, part) for name, part in model.named_modules() if name.split(".")[-1] == "layers"]
    stacks: list[tuple[str, Any]] = [(name, part) for name, part in named if hasattr(part, "__len__")]
    stacks = [(name, part) for name, part in stacks if len(part)]
    if not stacks:
        raise UsageError(f"{type(model).__name__} has no stack of layers named `layers`")
    seen: dict[str, Tensor] = {}
    modes = [(part, part.training) for part in model.modules()]
    hooks = [hook for name, stack in stacks for hook in _watch(name, stack, seen)]
    model.eval()
    try:
        with torch.enable_grad():
            output = run()
            cotangent = normal(torch.empty(output.shape, dtype=output.dtype), 1.0, rng).to(output.device)
            gradients = torch.autograd.grad(output, list(seen.values()), cotangent)
    finally:
        for hook in hooks:
            hook.remove()
        for part, training in modes:
            part.training = training
    sizes = {
        name: rms(p for p in part.parameters() if p.ndim >= 2) for name, part in model.named_modules() if name in seen
    }
    pairs = zip(seen.items(), gradients, strict=True)
    return [Signal(name, rms([x]), rms([gradient]), sizes.get(name)) for (name, x), gradient in pairs]


def _watch(name: str, stack: Any, seen: dict[str, Tensor]) -> list[RemovableHandle]:
    """Add hooks that record the input of the stack and the output of each of its layers in `seen`.

    If all layers are one module, each call of it is the next layer.
    """
    shared, first, calls = stack[0] is stack[-1] and len(stack) > 1, name.removesuffix("layers") + "input", count()

    def record_input(_: nn.Module, inputs: tuple) -> tuple | None:
        if first in seen:
            return None
        x = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()  # if the model is frozen
        seen[first] = x
        return (x, *inputs[1:])

    def record(layer: str, result: Any) -> None:
        seen[layer] = result[0] if isinstance(result, tuple) else result

    after = [
        layer.register_forward_hook(lambda _, __, result, i=i: record(f"{name}.{next(calls) if shared else i}", result))
        for i, layer in enumerate(stack[:1] if shared else stack)
    ]
    return [stack[0].register_forward_pre_hook(record_input), *after]


@torch.no_grad()
def rms(tensors: Iterable[Tensor]) -> float:
    """The root mean square of all numbers in these tensors."""
    total, count = 0.0, 0
    for tensor in tensors:
        total, count = total + float(tensor.double().square().sum()), count + tensor.numel()
    return math.sqrt(total / count) if count else 0.0


def _choose(table: dict, name: str, what: str):
    if name not in table:
        raise UsageError(f"{what} is {name!r}; expected one of {', '.join(table)}")
    return table[name]
