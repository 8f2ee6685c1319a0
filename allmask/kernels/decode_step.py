"""Structures and calls of decode_step.c: one decoding step, or a whole greedy or beam search, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.kernels import build
from allmask.kernels.build import int64s, pointer, pointers, structure
from allmask.kernels.int8 import KIND, Linear, Norm

SOURCE = Path(__file__).with_suffix(".c")
Layer = structure(
    **dict.fromkeys(("qkv", "output", "cross_query", "cross_output", "expand", "up", "contract"), Linear),
    **dict.fromkeys(("attention_norm", "cross_norm", "feed_forward_norm"), Norm),
)
Network = structure(
    **int64s("depth width heads head_width ffn_width pre activation distances"),
    epsilon=ctypes.c_double, head_epsilon=ctypes.c_double, distance_bias=ctypes.c_void_p,
    layers=ctypes.c_void_p, last_norm=Norm, transform=Linear, head_norm=Norm, head=Linear,
)  # fmt: skip
Memory = structure(
    **pointers("keys values lengths owner path own"), **int64s("kind texts padded rows slots room time path_row")
)
Embedding = structure(**pointers("tokens positions segment"), norm=Norm, epsilon=ctypes.c_double, scale=ctypes.c_float)
Rules = structure(
    **pointers("end banned prompts prompt_start limits"),
    **int64s("ends banneds min_new ngram"),
    end_bias=ctypes.c_double,
)
Search = structure(**int64s("beams n_best"), length_penalty=ctypes.c_double)
Written = structure(**pointers("tokens counts log_probability"), **int64s("written_row"))


def library() -> Any:
    """The compiled decode_step.c; None if it cannot be compiled."""
    return build.library(
        SOURCE, build.AVX512_VNNI, build.AVX_VNNI, build.AVX2, build.NEON_I8MM, build.NEON_DOT, build.NEON
    )


def step(
    network: ctypes.Structure, x: Tensor, vocab_size: int, *, keys: Tensor, values: Tensor, lengths: Tensor,
    owner: Tensor, path: Tensor, own: Tensor,
) -> Tensor:  # fmt: skip
    """Return logits (R, V) after one more embedded token x (R, W) per row; x is overwritten.

    `keys` (L, S, H, D, K) and `values` (L, S, H, K, D) are those of S texts of `lengths` (S,). Row r continues text
    owner[r]; its generated token t is in slot path[r, t] of `own` (L, 2, room, slots, H·D), which receives the new keys
    and values.
    """
    owner, path = owner.int(), path.contiguous()
    memory = _memory(keys, values, lengths, owner, path, own, path.shape[1] - 1)
    x, logits = x.contiguous(), torch.empty(len(x), vocab_size)
    if not library().step(ctypes.byref(network), ctypes.byref(memory), pointer(x), pointer(logits)):
        raise MemoryError("no memory for a decoding step")
    return logits


def _memory(
    keys: Tensor, values: Tensor, lengths: Tensor, owner: Tensor, path: Tensor, own: Tensor, time: int
) -> ctypes.Structure:
    sizes = (keys.shape[1], keys.shape[-1], len(path), own.shape[3], own.shape[2], time, path.shape[1])
    return Memory(*map(pointer, (keys, values, lengths, owner, path, own)), KIND[keys.dtype], *sizes)


def embed_tokens(network: ctypes.Structure, embedding: ctypes.Structure, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the embedded tokens (R, W) at these positions, (R,) int64 each."""
    x = torch.empty(len(tokens), network.width)
    count, tokens, positions = ctypes.c_int64(len(tokens)), tokens.contiguous(), positions.contiguous()
    library().embed_tokens(
        ctypes.byref(network), ctypes.byref(embedding), count, *map(pointer, (tokens, positions, x))
    )  # fmt: skip
    return x


def write(
    network: ctypes.Structure, embedding: ctypes.Structure, logits: Tensor, *, keys: Tensor, values: Tensor,
    lengths: Tensor, owner: Tensor, path: Tensor, own: Tensor, time: int, positions: Tensor,
    prompts: Sequence[Sequence[int]], limits: Sequence[int], end: Sequence[int], banned: Sequence[int], min_new: int,
    ngram: int, end_bias: float, beams: int, n_best: int, length_penalty: float,
) -> list[list[tuple[list[int], float]]] | None:  # fmt: skip
    """Continue each text until its limit or an end token, by greedy search, or by beam search with several beams.

    Return the new tokens and the log-probability of the `n_best` best hypotheses of each text; None if a logit is NaN.
    Arguments are those of `step`; `logits` (S, V) of the first new tokens, `path` (S, longest) and `own` with room for
    all steps and beams, and `positions` (S,) are overwritten; `time` is that of the newest token. No n-gram of `ngram`
    tokens is repeated, prompts included.
    """
    owner, tokens = owner.int().clone(), torch.zeros(len(limits), n_best, max(limits), dtype=torch.long)
    counts, gains = torch.full(tokens.shape[:2], 0 if beams == 1 else -1), torch.zeros(tokens.shape[:2]).double()
    flat = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.long)
    starts = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    lists = [torch.tensor(list(x), dtype=torch.long) for x in (end, banned, limits)]
    rules = Rules(
        *map(pointer, (lists[0], lists[1], flat, starts, lists[2])), len(end), len(banned), min_new, ngram, end_bias
    )
    written = ctypes.byref(Written(*map(pointer, (tokens, counts, gains)), tokens.shape[2]))
    memory = _memory(keys, values, lengths, owner, path, own, time)
    structures = [*map(ctypes.byref, (network, embedding, memory, rules))]
    if beams == 1:
        done = library().write_greedy(*structures, *map(pointer, (logits, owner, path, positions)), written)
    else:
        search = Search(beams, n_best, length_penalty)
        done = library().write_beams(*structures, ctypes.byref(search), pointer(logits), pointer(positions), written)
    if done == 0:
        raise MemoryError("no memory for a decoding step")
    if done < 0:
        return None
    texts = zip(tokens.tolist(), counts.tolist(), gains.tolist(), strict=True)
    return [[(row[:count], gain) for row, count, gain in zip(*text, strict=True) if count >= 0] for text in texts]


def output_logits(network: ctypes.Structure, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the logits (R, V) of hidden states (R, W)."""
    x, logits = hidden.clone(memory_format=torch.contiguous_format), torch.empty(len(hidden), vocab_size)
    if not library().output_logits(ctypes.byref(network), ctypes.c_int64(len(x)), pointer(x), pointer(logits)):
        raise MemoryError("no memory for the logits")
    return logits
