"""Inference only: weights laid out once for the CPU's kernels, and sentence vectors without work on padding.

model = freeze(allmask.load("minilm"))
vectors = embed(model, ["北京欢迎你", "Beijing welcomes you"], normalize=True)  # (2, 384)
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.attention import Attention
from allmask.dropout import Dropout
from allmask.errors import UsageError
from allmask.layers import FeedForward
from allmask.masks import Mask
from allmask.model import Model
from allmask.text import Encoded, truncate

log = logging.getLogger("allmask")

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH_TOKENS = 1024  # a row's activations stay in the cache; weights are read from it often enough
FUSED = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


class Packed(nn.Module):
    """A linear layer and the activation after it in one oneDNN call, its weight laid out beforehand for the kernel."""

    def __init__(self, linear: nn.Linear, activation: str = "none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), BATCH_TOKENS)
        self.bias = linear.bias
        self.after, self.formula = FUSED[activation]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.after, [], self.formula)


def freeze(model: Model, precision: str = "auto") -> Model:
    """A copy for inference, called like the model itself: no gradients, no dropout, weights packed for this CPU.

    `auto` is bf16 where the processor computes in it, otherwise fp32. Where weights cannot be packed they stay as they
    are. The copy cannot be trained or saved.
    """
    if any(isinstance(module, Packed) for module in model.modules()):
        raise UsageError("this model is frozen already", "freeze the model it was made from")
    device = model.body.embedding.tokens.weight.device
    dtype = _dtype(precision, device)
    frozen = copy.deepcopy(model).to(dtype).requires_grad_(False).eval()
    _drop_dropout(frozen)
    if device.type == "cpu" and _can_pack(dtype):
        _pack(frozen.body, model.config.activation)
        _keep_freed_memory()
    frozen.register_state_dict_pre_hook(_refuse_saving)
    return frozen


def embed(
    model: Model, texts: Sequence[str], pool: str = "mean", normalize: bool = False,
    batch_tokens: int = BATCH_TOKENS, progress: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """One vector a text, (n, W) in fp32: the mean of its hidden states, or the first one ("cls").

    Texts longer than the model's positions keep their beginning. `progress` is told how many texts are done.
    """
    if isinstance(texts, str):
        raise UsageError("embed takes a list of texts, not one", 'pass ["…"]')
    if model.tokenizer is None:
        raise UsageError("this model has no tokenizer", "pass ids to embed_ids, or load a folder with one")
    encoded = model.tokenizer.encode_batch(texts)
    ids = [_fit(text, model.config.max_positions, number) for number, text in enumerate(encoded)]
    return embed_ids(model, ids, pool, normalize, batch_tokens, progress)


def embed_ids(
    model: Model, ids: Sequence[Sequence[int]], pool: str = "mean", normalize: bool = False,
    batch_tokens: int = BATCH_TOKENS, progress: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """The same for texts already cut into ids. A text without tokens has a vector of zeros."""
    if pool not in POOLS:
        raise UsageError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}")
    device = model.body.embedding.tokens.weight.device
    vectors = torch.zeros(len(ids), model.config.width, device=device)
    done = sum(len(text) == 0 for text in ids)
    with torch.inference_mode():
        for numbers in _rows(ids, batch_tokens):
            vectors[numbers] = _embed_row(model, [ids[number] for number in numbers], POOLS[pool], device)
            done += len(numbers)
            if progress is not None:
                progress(done)
        return F.normalize(vectors, dim=-1) if normalize else vectors


# ---- rows of whole texts -----------------------------------------------------------------------------------


def _rows(ids: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of texts that share a row: sorted by length, so that equal ones are neighbours, within the budget."""
    row, tokens = [], 0
    for number in sorted(range(len(ids)), key=lambda number: len(ids[number])):
        if row and tokens + len(ids[number]) > batch_tokens:
            yield row
            row, tokens = [], 0
        if len(ids[number]) > 0:
            row.append(number)
            tokens += len(ids[number])
    if row:
        yield row


def _embed_row(model: Model, texts: list[Sequence[int]], pool: Callable, device: torch.device) -> Tensor:
    flat = torch.tensor([id for text in texts for id in text], device=device)[None]
    lengths = torch.tensor([len(text) for text in texts], device=device)
    document = torch.arange(len(texts), device=device).repeat_interleave(lengths)[None]
    mask = Mask.packed(model.own_mask(torch.ones_like(flat, dtype=torch.bool)), document)
    return pool(model(flat, mask).hidden[0], lengths)


def _mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    sums = hidden.new_zeros(len(lengths), hidden.shape[-1], dtype=torch.float32)
    return sums.index_add_(0, document, hidden.float()) / lengths[:, None]


def _first(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[lengths.cumsum(0) - lengths].float()


POOLS = {"mean": _mean, "cls": _first}


def _fit(text: Encoded, limit: int, number: int) -> list[int]:
    """Ids with their frame of special tokens, the text between cut to what the model can hold."""
    if len(text) <= limit:
        return text.ids
    log.warning("text %d has %d tokens; only the first %d are read", number, len(text), limit)
    special = text.raw.special_tokens_mask
    before, after = special.index(0), special[::-1].index(0)
    kept = truncate(text.ids[before : len(text) - after], limit - before - after, "head")
    return [*text.ids[:before], *kept, *text.ids[len(text) - after :]]


# ---- packing -----------------------------------------------------------------------------------------------


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.bfloat16 if _computes_bf16(device) else torch.float32
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; expected one of auto, {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def _computes_bf16(device: torch.device) -> bool:
    """Whether bf16 is native there: emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return device.type == "cpu" and bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Tried, not looked up: builds of torch differ in which of these operators they have."""
    linear = nn.Linear(32, 32, dtype=dtype).requires_grad_(False)
    x = torch.ones(8, 32, dtype=dtype)
    try:
        return torch.allclose(Packed(linear)(x), linear(x), atol=1e-2)
    except (AttributeError, RuntimeError):
        return False


def _pack(body: nn.Module, activation: str) -> None:
    for module in list(body.modules()):
        if isinstance(module, FeedForward):
            module.expand, module.activation = Packed(module.expand, activation), nn.Identity()
    _replace(body, nn.Linear, Packed)


def _drop_dropout(model: Model) -> None:
    """Taken out, so that not even `train()` brings it back."""
    _replace(model, Dropout, lambda _: nn.Identity())
    for module in model.modules():
        if isinstance(module, Attention):
            module.dropout = 0.0


def _replace(root: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> None:
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))


def _keep_freed_memory() -> None:
    """Let the C allocator reuse activations instead of handing them back and having them zeroed again, page by page.

    glibc gives memory back when more than twice its largest freed block is unused; this block is the largest it counts.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)


def _refuse_saving(model: nn.Module, *_) -> None:
    raise UsageError("a frozen model cannot be saved: its weights are laid out for this CPU", "save the one it is from")
