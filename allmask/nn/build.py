"""From a `Config` to modules: the body of a model, its heads, and all parameters without data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from allmask.config import Config
from allmask.nn.attention import Scaled
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.heads import Labels, LanguageModelHead, Pooler, TaskHead
from allmask.nn.init import ntk
from allmask.nn.layers import ACTIVATIONS
from allmask.nn.recurrent import Elmo, ScalarMix, Seq2Seq
from allmask.nn.transformer import Transformer

M = TypeVar("M", bound=nn.Module)
HEADS = {"pooler": "pooler", "lm": "lm_head", "nsp": "nsp_head", "task": "task_head"}  # name of a head: its module


def build_body(config: Config) -> nn.Module:
    if config.family == "elmo":
        return Elmo(config)
    if config.family == "lstm":
        return Seq2Seq(config)
    return parametrized(config, EncoderDecoder(config) if config.decoder_layers else Transformer(config))


def parametrized(config: Config, module: M) -> M:
    """The module with the weights in the form that the config says."""
    return ntk(module) if config.parametrization == "ntk" else module


class Heads(NamedTuple):
    pooler: Pooler | None
    lm_head: nn.Module | None
    nsp_head: nn.Linear | None
    task_head: TaskHead | None


def build_heads(config: Config, heads: Collection[str], labels: Labels | None) -> Heads:
    """Build the named heads, a task head for `labels`, and the pooler that NSP and a BERT's labels of texts need."""
    pooled = "pooler" in heads or "nsp" in heads or (labels is not None and reads_pooler(config, labels))
    made = Heads(
        Pooler(config.width) if pooled else None,
        build_lm_head(config) if "lm" in heads else None,
        nn.Linear(config.width, 2) if "nsp" in heads else None,
        None if labels is None else build_task_head(config, labels),
    )
    for head in made:
        if head is not None:
            parametrized(config, head)
    return made


def build_lm_head(config: Config) -> LanguageModelHead:
    """BERT's head has a hidden layer, others have none; T5 divides hidden states by sqrt(width) instead."""
    transform = activation = norm = nn.Identity()
    width = config.embedding_width or config.width
    if config.is_bert:
        transform, activation = nn.Linear(config.width, width), ACTIVATIONS[config.activation]()
        norm = nn.LayerNorm(width, eps=config.norm_eps)
    elif config.output_scaled:
        transform = Scaled(config.width**-0.5)
    output = None if config.tied else nn.Linear(width, config.vocab_size, bias=False)
    bias = config.vocab_size if config.is_bert or config.family == "xlnet" else 0
    return LanguageModelHead(transform, activation, norm, output, bias)


def build_task_head(config: Config, labels: Labels) -> TaskHead:
    """The task head as transformers builds it.

    BERT has a bias, and dropout except for spans; GPT-2 a plain matrix. For whole texts XLNet has a pooler of its own
    in front, and dropout only there; so have BERT's relatives in `_POOLERS`. ELMo is like BERT, with a learned mix of
    its layers in front.
    """
    width, count, chain = config.width, len(labels), labels.kind == "chain"
    if config.family == "elmo":
        return TaskHead(2 * width, count, config.dropout, bias=True, chain=chain, before=ScalarMix(config.layers + 1))
    if config.family == "xlnet":
        before, dropout = (None, 0.0) if labels.of_tokens else (Pooler(width), config.dropout)
        return TaskHead(width, count, dropout, bias=True, chain=chain, before=before)
    bert, before = config.is_bert, None
    if bert and not labels.of_tokens and not reads_pooler(config, labels):
        before = Pooler(width, ACTIVATIONS[config.activation]() if (kind := _POOLERS[config.family]) is None else kind)
    dropout = config.dropout if bert and labels.kind != "span" else 0.0
    return TaskHead(width, count, dropout, bias=bert, chain=chain, before=before)


# Families whose task head for texts has a layer of its own instead of the pooler; its activation, None: the body's.
_POOLERS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "roberta": torch.tanh,
    "xlm-roberta": torch.tanh,
    "distilbert": F.relu,
    "electra": F.gelu,
    "roformer": None,
}


def reads_pooler(config: Config, labels: Labels) -> bool:
    """Whether the task head reads the pooler's output instead of hidden states."""
    if not config.is_bert or labels.of_tokens:
        return False
    return config.family not in _POOLERS or (config.family in ("roberta", "xlm-roberta") and labels.kind == "choice")


def empty_parameters(config: Config, heads: Collection[str], labels: Labels | None = None) -> dict[str, Tensor]:
    """All parameters of a model by name, on the meta device: they have a shape, but take no memory."""
    return dict(_empty_parameters(config, frozenset(heads), labels))


@lru_cache(maxsize=32)  # a folder of the same shape is read, written and checked again and again
def _empty_parameters(config: Config, heads: frozenset[str], labels: Labels | None) -> dict[str, Tensor]:
    with without_memory():
        parts = {"body": build_body(config), **build_heads(config, heads, labels)._asdict()}
    built = {part: module.state_dict() for part, module in parts.items() if module is not None}
    return {f"{part}.{name}": tensor for part, tensors in built.items() for name, tensor in tensors.items()}


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules on the meta device: their parameters have shapes, but neither memory nor values."""
    with torch.device("meta"), _Uninitialized():
        yield


class _Uninitialized(TorchFunctionMode):
    """Leaves out initial values: on the meta device there are none, but torch imports its compiler to draw them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def heads_in(names: Collection[str], config: Config) -> frozenset[str]:
    """The heads with a parameter among these names. A tied output layer without a bias has none, but counts."""
    has_bias = config.is_bert or config.family == "xlnet"
    found = {head for head, module in HEADS.items() if any(name.startswith(f"{module}.") for name in names)}
    return frozenset(found | ({"lm"} if config.tied and not has_bias else set()))
