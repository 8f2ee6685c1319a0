"""Fast writers: they write what `MaskWriter` and `PairWriter` write, from packed weights, with little work per step.

writer = writer_for(model)                      # in the fastest precision of this processor: int8, bf16 or fp32
best = generate(writer, prompts, Decoding(end=(sep,), beams=4))
writer = pair_writer_for(model)                 # for an encoder–decoder

A step is computed by an engine: by one call of kernels/decode_step.c if that can be compiled and agrees with torch on
small models, otherwise by torch. New tokens must read everything before them. That is checked once, by the mask of the
prompt; if it has a window or a matrix, `MaskWriter` writes. rows.py explains the shapes.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from allmask.config import Config
from allmask.decoding.fast.rows import Rows, Texts
from allmask.decoding.search import Writer, nan_logits
from allmask.decoding.writers import MaskWriter, PairWriter, padded_prompts
from allmask.errors import UsageError
from allmask.inference.compiled_layers import TorchInt8Linear, smoothing_scales
from allmask.inference.frozen import CHOICES, FUSED, NOT_ON_CPU, Packed, can_pack, freeze
from allmask.kernels import decode_step
from allmask.kernels.build import pointer
from allmask.kernels.int8 import ACTIVATION, LANES, Linear, PackedLinear, norm_structure, smoothing_scale
from allmask.kernels.memory import to_huge_pages
from allmask.kernels.precision import PRECISIONS, native_bf16
from allmask.kernels.top_tokens import MAX_COUNT
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.attention import Attention, Route, Scaled
from allmask.nn.beam_cache import BeamKeyValue
from allmask.nn.cache import BeamCache
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.layers import ACTIVATIONS, NORM_PLACES, CrossLayer, GatedFeedForward
from allmask.nn.relative_attention import RelativePositionBias
from allmask.options import Decoding
from allmask.presets import bert_tiny, t5_v1_1_small

log = logging.getLogger("allmask")

MAX_POSITIONS = 1 << 14  # in the table of a compiled embedding


def writer_for(
    model: Model, precision: str = "auto", mask: Callable[[Tensor], Mask] | None = None,
    segments: tuple[int, int] | None = None,
) -> Writer:  # fmt: skip
    """A writer for this processor, with a copy of the model's current weights.

    fp32 writes what `MaskWriter` writes; bf16 and int8 round differently, but equally for every batch. `auto` is int8
    where the compiled step runs, else bf16 where it is native, else fp32. With int8, attention stays in bf16 or fp32.
    """
    precision = _resolved(model, precision)
    slow = MaskWriter(freeze(model, precision), mask, segments)
    relative = model.config.position_kind in ("relative", "shifted", "rotary", "clipped")
    if not _on_cpu(model) or relative or slow.leftwards or not model.body.tokenwise:
        return slow
    return FastWriter(slow, _engine(model, precision))


def pair_writer_for(model: Model, precision: str = "auto", start: Sequence[int] | None = None) -> Writer:
    """A fast writer for an encoder–decoder. Targets begin with the tokens `start`, by default the model's start token.

    fp32 writes what `PairWriter` writes. With int8 the encoder is quantized, too; attention is not.
    """
    if isinstance(model.body, EncoderDecoder):  # not a recurrent one
        precision = _resolved(model, precision)
    slow = PairWriter(freeze(model, precision), start)
    if not _on_cpu(model) or not isinstance(model.body, EncoderDecoder) or not model.body.tokenwise:
        return slow
    return FastPairWriter(slow, _engine(model, precision))


def _resolved(model: Model, precision: str) -> str:
    """Check the precision, and choose one for "auto"."""
    if precision not in CHOICES:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(CHOICES)}")
    model.head("lm_head")  # raises an error if there is none
    if precision == "int8" and not _on_cpu(model):
        log.warning(NOT_ON_CPU, model.device.type)
    elif precision != "auto":
        return precision
    bf16 = native_bf16(model.device)
    return "int8" if _on_cpu(model) and _has_compiled(model, "int8") else "bf16" if bf16 else "fp32"


def _on_cpu(model: Model) -> bool:
    return model.device.type == "cpu"


class Engine(Protocol):
    """Computes decoding steps. `dtype` is that of hidden states, `text_dtype` that of the keys and values of texts."""

    dtype: torch.dtype
    text_dtype: torch.dtype

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        """The logits (R, V) after one more embedded token (R, W) per row; its keys and values are written to `rows`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, V) of hidden states (R, W)."""
        ...

    def embedding(self, module: Any, segment: int, config: Config) -> CompiledEmbedding | None:
        """The embedding of new tokens in C, if the engine has one: then it also has greedy and beam search in C."""
        ...


def _engine(model: Model, precision: str) -> Engine:
    return (CompiledEngine if _has_compiled(model, precision) else TorchEngine)(model, precision)


def _has_compiled(model: Model, precision: str) -> bool:
    return fits(model) and _compiled_is_right(precision, isinstance(model.body, EncoderDecoder))


@cache
def _compiled_is_right(precision: str, pair: bool) -> bool:
    """Self-check: whether the compiled step gives the logits of torch for a small model on this machine.

    Its weights are large enough for attention to matter: with a tenth of T5's own size, logits without any queries
    would differ by less than the tolerance.
    """
    sizes: Any = {"vocab_size": 70, "width": 32, "heads": 2, "ffn_width": 48, "layers": 2, "max_positions": 8}
    rng, make_slow, make_fast = torch.Generator().manual_seed(0), MaskWriter, FastWriter
    config = replace(bert_tiny(), **sizes, init_std=0.2)
    if pair:
        make_slow, make_fast = PairWriter, FastPairWriter
        config = replace(t5_v1_1_small(), **sizes, decoder_layers=2, head_width=16)
    model = Model.fresh(config, ["lm"], rng)
    slow = make_slow(model.eval())
    engines = CompiledEngine(model, precision), TorchEngine(model, precision)
    found, expected = (_some_logits(make_fast(slow, engine)) for engine in engines)
    if torch.allclose(found, expected, atol=0.03 * float(expected.abs().max())):
        return True
    log.warning("the compiled step in %s differs from torch's on this machine; it is not used", precision)
    return False


def _some_logits(writer: Writer) -> Tensor:
    """Logits of two texts, and of three rows that continue them."""
    first, state = writer.begin([[1, 2, 3], [4]])
    second, state = writer.step(torch.tensor([5, 6, 7]), state.select(torch.tensor([1, 0, 0])))
    third, _ = writer.step(torch.tensor([9, 8]), state.select(torch.tensor([2, 1])))
    return torch.cat([first, second, third]).float()


class _EngineWriter:
    """What the two fast writers share: the writer whose prompts they read, and steps by an engine."""

    def __init__(self, slow: Any, engine: Engine):
        self.slow, self.engine = slow, engine
        self.model, self.body = slow.model, slow.model.body
        self.room = slow.room

        self.embedding = engine.embedding(self.body.embedding, self._segment(), slow.model.config)

    def _segment(self) -> int:
        """The segment of new tokens."""
        return 0

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        rows = state.longer()
        if self.embedding is not None and self.embedding.has(rows.position):
            x = self.embedding(tokens, rows.position)
        else:
            x = self.body.embedding(tokens, rows.position, torch.full_like(tokens, self._segment()))
        return self.engine.step(x.to(self.engine.dtype), rows), rows

    def search(
        self, logits: Tensor, state: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: Decoding
    ) -> list[list[tuple[list[int], float]]] | None:
        """Greedy or beam search in one call, from the result of `begin`: the tokens and log-probabilities of the best.

        None if it cannot.
        """
        if self.embedding is None or not isinstance(state, Rows) or settings.sample:
            return None
        if settings.beams * (1 + len(settings.end)) > MAX_COUNT:
            return None
        rows = state.with_room(max(limits), settings.beams)
        if rows is None or not self.embedding.has(rows.position + max(limits)):
            return None
        found = self.embedding.write(logits, rows, prompts, limits, settings)
        if found is None:
            raise nan_logits()
        return found


class FastWriter(_EngineWriter):
    """Reads prompts with a frozen model, computing only the last token of the last layer; steps with an engine."""

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows | BeamCache]:
        ids, valid = padded_prompts(prompts, self.slow.model)
        mask = self.slow.mask(valid)
        if self.slow.leftwards or not _new_tokens_see_all(mask, valid):
            return self.slow.begin(prompts)
        hidden, texts = self._read(ids, mask, valid.sum(1))
        position = mask.position.masked_fill(~valid, -1).amax(1)
        return self.engine.logits(hidden.to(self.engine.dtype)), Rows.begin(texts, position, self.engine.dtype)

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Rows | BeamCache) -> tuple[Tensor, Rows | BeamCache]:
        return self.slow.step(tokens, state) if isinstance(state, BeamCache) else super().step(tokens, state)

    def _segment(self) -> int:
        return self.slow.segments[1]

    def _read(self, ids: Tensor, mask: Mask, lengths: Tensor) -> tuple[Tensor, Texts]:
        """The hidden state (S, W) of each text's last token, and the keys and values of all tokens in each layer."""
        flat, index = mask.flatten()
        flat_ids, route, layers = ids.flatten()[index][None], Route.find(flat), []
        x = self.body.embed(flat_ids, flat, None, torch.full_like(flat_ids, self.slow.segments[0]))
        if self.body.whole is not None and self.engine.text_dtype == torch.bfloat16:
            found = self.body.whole.read(x, route, index // mask.shape[1])
            if found is not None:
                hidden, keys, values = found
                return self.body.norm(hidden), Texts.padded(keys, values, lengths)
        for layer in self.body.layers[:-1]:
            x, read = layer(x, route)
            layers.append(BeamKeyValue.begin(read, mask.shape, index))
        top, last = self.body.layers[-1], lengths[:, None] - 1
        read = top.attention.keys_values(top.enter(top.attention_norm, x))
        layers.append(BeamKeyValue.begin(read, mask.shape, index))
        where = torch.empty(ids.numel(), dtype=torch.long).index_copy(0, index, torch.arange(len(index)))
        x = x[0, where.view(ids.shape).gather(1, last)]  # (S, 1, W)
        hidden = self.body.norm(top.query_stream(x, Route.find(mask.gather(last), mask), layers[-1]))[:, 0]
        return hidden, Texts.of(layers, lengths, self.engine.text_dtype)


class FastPairWriter(_EngineWriter):
    """Reads sources with a frozen encoder; steps with an engine, given the cross-attention's keys and values."""

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows]:
        ids, valid = padded_prompts(prompts, self.slow.model)
        mask = Mask.bidirectional(valid)
        flat, index = mask.flatten()
        memory = self.body.keys_values(self.body(ids.flatten()[index][None], flat), flat)
        layers = [BeamKeyValue.begin(layer, mask.shape, index) for layer in memory.layers]
        texts = Texts.of(layers, valid.sum(1), self.engine.text_dtype)
        rows = Rows.begin(texts, torch.full((len(ids),), -1), self.engine.dtype)
        logits = torch.empty(0)
        for token in self.slow.start:
            logits, rows = self.step(torch.full_like(rows.position, token), rows)
        return logits, rows


def _new_tokens_see_all(mask: Mask, valid: Tensor) -> bool:
    """Whether a token after all others reads its whole prompt."""
    return mask.window is None and mask.matrix is None and torch.equal(mask.group, valid.long() - 1)


# ---- the weights of a step ----------------------------------------------------------------------------------

Map = Callable[[Tensor], Tensor]
# (weight (out, in), bias, activation after it, smoothing scale (in,) for int8) -> the layer
MakeLinear = Callable[[Tensor, Tensor | None, str, Tensor | None], Map]


@dataclass(frozen=True)
class CrossParts:
    """Cross-attention of a decoder's layer; keys and values of the source are computed beforehand."""

    query: Map  # with the 1 / sqrt(D) of the scores
    output: Map
    norm: nn.Module


@dataclass(frozen=True)
class LayerParts:
    """The linear layers and norms of a layer, for the step of an engine."""

    qkv: Map  # queries, with the 1 / sqrt(D) of the scores, keys and values: (…, W) -> (…, 3·H·D)
    output: Map
    cross: CrossParts | None
    expand: Map
    up: Map | None  # of a gated feed-forward: multiplied with the output of `expand`
    contract: Map
    norms: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Parts:
    """The weights of a step, from a model without its embeddings; of an encoder–decoder, those of the decoder."""

    layers: tuple[LayerParts, ...]
    distance_bias: Tensor | None  # (H, distances), added to scores (T5); the last one is for all larger distances
    last_norm: nn.Module  # of the stack; may be Identity
    transform: Map | None  # BERT's linear layer before the output
    head_norm: nn.Module
    head: Map

    @classmethod
    def of(cls, model: Model, make: MakeLinear, dtype: torch.dtype) -> Parts:
        """Copy the weights, so that the model may be trained further."""
        kind, stack = model.config.activation, model.body.decoder if model.config.decoder_layers else model.body
        head: Any = model.head("lm_head")
        weight = model.body.embedding.tokens.weight if head.output is None else head.output.weight
        if isinstance(head.transform, Scaled):  # the factor of the hidden states, moved into the matrix
            weight = weight.detach() * head.transform.factor
        before = head.transform if isinstance(head.transform, nn.Linear) else None
        scales = smoothing_scales(model.body, model.config.norm_place)
        top = stack.layers[-1]
        last = stack.norm if model.config.norm_place == "pre" else getattr(top, "layer", top).feed_forward_norm
        relative, bias = stack.relative, None
        if isinstance(relative, RelativePositionBias):
            bias = relative.table.weight.detach()[relative.bucket].T.to(dtype).contiguous()
        return cls(
            tuple(_layer_parts(layer, kind, make, dtype, scales) for layer in stack.layers),
            bias,
            _copied(stack.norm, dtype),
            None if before is None else make(before.weight, before.bias, kind, smoothing_scale(last, before.weight)),
            _copied(head.norm, dtype),
            make(weight, head.bias, "none", smoothing_scale(last if before is None else head.norm, weight)),
        )


def _layer_parts(
    whole: Any, activation: str, make: MakeLinear, dtype: torch.dtype, scales: Mapping[nn.Module, Tensor | None]
) -> LayerParts:
    def plain(linear: nn.Linear, kind: str = "none") -> Map:
        return make(linear.weight, linear.bias, kind, scales.get(linear))

    cross, layer = None, whole
    if isinstance(whole, CrossLayer):
        layer = whole.layer
        query = make(*_queries(whole.cross), "none", scales.get(whole.cross.query))
        cross = CrossParts(query, plain(whole.cross.output), _copied(whole.cross_norm, dtype))
    feed: Any = layer.feed_forward
    gated = isinstance(feed, GatedFeedForward)
    return LayerParts(
        make(*_fused(layer.attention), "none", scales.get(layer.attention.value)), plain(layer.attention.output), cross,
        plain(feed.gate if gated else feed.expand, activation), plain(feed.gated) if gated else None,
        plain(feed.contract), (_copied(layer.attention_norm, dtype), _copied(layer.feed_forward_norm, dtype)),
    )  # fmt: skip


def _copied(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(norm).to(dtype).requires_grad_(False)


def _queries(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the query projection, times the scale of the scores."""
    linear = attention.query
    scale = (linear.weight.shape[0] // attention.heads) ** -0.5
    if isinstance(attention.query_scale, Scaled):
        scale *= attention.query_scale.factor
    return linear.weight.detach().float() * scale, None if linear.bias is None else linear.bias.detach().float() * scale


def _fused(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one projection to queries, keys and values."""
    others = (attention.key, attention.value)
    weight, bias = _queries(attention)
    weight = torch.cat([weight, *(x.weight.detach().float() for x in others)])
    return weight, None if bias is None else torch.cat([bias, *(x.bias.detach().float() for x in others)])


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """With its activation in one oneDNN call and with a packed weight, if torch supports that; else as usual."""

    def make(weight: Tensor, bias: Tensor | None, activation: str, _: Tensor | None) -> Map:
        linear = nn.Linear(1, 1, bias=bias is not None)
        linear.weight = nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)
        if can_pack(dtype) and activation in FUSED:
            return Packed(linear, activation)
        return linear if activation == "none" else nn.Sequential(linear, ACTIVATIONS[activation]())

    return make


# ---- engines --------------------------------------------------------------------------------------------------


class TorchEngine:
    """A step in a few torch calls per layer, in fp32, bf16 or int8: the specification of the compiled step."""

    def __init__(self, model: Model, precision: str):
        self.dtype = PRECISIONS.get(precision, torch.float32)
        self.text_dtype = self.dtype
        self.heads = model.config.heads
        make = TorchInt8Linear if precision == "int8" else packed_linear(self.dtype)
        self.parts = Parts.of(model, make, self.dtype)
        self.enter, self.leave = NORM_PLACES[model.config.norm_place]

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        for number, part in enumerate(self.parts.layers):
            q = self._store(part.qkv(self.enter(part.norms[0], x)), number, rows)
            read = self._attend(q, number, rows, over_text=part.cross is None)
            x = self.leave(part.norms[0], x + part.output(read))
            x = x if part.cross is None else self._read_source(part.cross, x, number, rows)
            x = self.leave(part.norms[1], x + self._feed(part, self.enter(part.norms[1], x)))
        return self.logits(self.parts.last_norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        transform = self.parts.transform
        x = hidden if transform is None else self.parts.head_norm(transform(hidden))
        return self.parts.head(x)

    def embedding(self, module: Any, segment: int, config: Config) -> None:
        return None

    def _feed(self, part: LayerParts, h: Tensor) -> Tensor:
        wide = part.expand(h)
        return part.contract(wide if part.up is None else wide * part.up(h))

    def _read_source(self, cross: CrossParts, x: Tensor, layer: int, rows: Rows) -> Tensor:
        q = cross.query(self.enter(cross.norm, x)).unflatten(1, (1, self.heads, -1))
        return self.leave(cross.norm, x + cross.output(self._attend(q, layer, rows, over_own=False)))

    def _store(self, h: Tensor, layer: int, rows: Rows) -> Tensor:
        """Write keys and values into the rows' slots and return the queries (R, 1, H, D)."""
        q, new = h.tensor_split([h.shape[1] // 3], dim=1)
        rows.own.buffer[layer, :, rows.time, : len(h)] = new.unflatten(1, (2, -1)).transpose(0, 1)
        return q.unflatten(1, (1, self.heads, -1))

    def _attend(self, q: Tensor, layer: int, rows: Rows, over_text: bool = True, over_own: bool = True) -> Tensor:
        """Attention of q over a row's text, over its own tokens, or over both: (R, W)."""
        texts, fan, scores, own = rows.texts, rows.fan, [], []
        if over_text:
            grid = fan.spread(q[:, 0]).transpose(1, 2) @ texts.keys[layer]  # (S, H, width, K)
            grid = grid if texts.padding is None else grid.masked_fill_(texts.padding, -torch.inf)
            scores.append(fan.gather(grid.transpose(1, 2))[:, :, None])  # (R, H, 1, K)
        if over_own:
            own = [x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in rows.written(layer)]  # (R, H, T, D) each
            new, bias = q.transpose(1, 2) @ own[0].transpose(2, 3), self.parts.distance_bias
            if bias is not None:
                new = new + bias[:, None, torch.arange(rows.time, -1, -1).clamp(max=bias.shape[1] - 1)]
            scores.append(new)
        weights = torch.cat(scores, dim=-1).softmax(-1)
        read = weights[..., -own[1].shape[2] :] @ own[1] if own else 0.0
        if over_text:
            on_text = fan.spread(weights[:, :, 0, : texts.keys.shape[-1]]).transpose(1, 2) @ texts.values[layer]
            read = read + fan.gather(on_text.transpose(1, 2))[:, :, None]
        assert isinstance(read, Tensor)
        return read[:, :, 0].flatten(1)


def fits(model: Model) -> bool:
    """Whether the compiled step supports this model on this machine."""
    config = model.config
    widths = (config.width, config.attention_width // config.heads, config.ffn_width)
    supported = config.norm in ("layer", "rms") and not any(width % LANES for width in widths)
    supported = supported and not config.embedding_width  # its head reads vectors of the model's width
    return _on_cpu(model) and supported and decode_step.library() is not None


class CompiledEngine:
    """A step in one call of decode_step.c."""

    dtype = torch.float32

    def __init__(self, model: Model, precision: str):
        weights = PRECISIONS.get(precision, torch.uint8)
        packed_weights: list[Tensor] = []

        def packed(weight: Tensor, bias: Tensor | None, _: str, smoothing: Tensor | None) -> Any:
            linear = PackedLinear.of(weight, bias, weights, smoothing if weights == torch.uint8 else None)
            packed_weights.append(linear.weight)
            return linear

        self.text_dtype = torch.float32 if weights == torch.float32 else torch.bfloat16
        self.parts: Any = Parts.of(model, packed, torch.float32)  # the network points into their memory
        to_huge_pages(packed_weights)
        self.network = self._network(model.config)
        self.vocab_size = model.config.vocab_size
        self.int8 = weights == torch.uint8  # in fp32 and bf16, torch embeds: each precision keeps its own rounding

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        texts = rows.texts
        return decode_step.step(
            self.network, x, self.vocab_size, keys=texts.keys, values=texts.values, lengths=texts.lengths,
            owner=rows.fan.owner, path=rows.path, own=rows.own.buffer,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        return decode_step.output_logits(self.network, hidden, self.vocab_size)

    def embedding(self, module: Any, segment: int, config: Config) -> CompiledEmbedding | None:
        return CompiledEmbedding(module, segment, config, self.network) if self.int8 else None

    def _network(self, config: Config) -> ctypes.Structure:
        parts, bias = self.parts, self.parts.distance_bias
        self.layers = (decode_step.Layer * len(parts.layers))(*map(_layer_structure, parts.layers))
        return decode_step.Network(
            len(parts.layers), config.width, config.heads, config.attention_width // config.heads, config.ffn_width,
            config.norm_place == "pre", ACTIVATION[config.activation], 0 if bias is None else bias.shape[1],
            config.norm_eps, getattr(parts.head_norm, "eps", 0.0), None if bias is None else bias.data_ptr(),
            ctypes.cast(self.layers, ctypes.c_void_p), norm_structure(parts.last_norm),
            _linear_structure(parts.transform), norm_structure(parts.head_norm), _linear_structure(parts.head),
        )  # fmt: skip


class CompiledEmbedding:
    """The embedding of new tokens by decode_step.c, and with it greedy and beam search in one call."""

    def __init__(self, module: Any, segment: int, config: Config, network: ctypes.Structure):
        self.network = network
        self.count = min(config.max_length, MAX_POSITIONS)
        with torch.inference_mode():
            positions = module.positions(torch.arange(self.count))
            added = module.segments(torch.tensor([segment]))
            width = module.tokens.weight.shape[1]
            self.tensors = [
                module.tokens.weight.detach().float(), positions.float() if isinstance(positions, Tensor) else None,
                added.float() if isinstance(added, Tensor) else torch.zeros(1, width),
            ]  # fmt: skip
        self.norm = _copied(module.norm, torch.float32)
        self.structure = decode_step.Embedding(
            *map(pointer, self.tensors), norm_structure(self.norm), getattr(self.norm, "eps", None) or 0.0, module.scale
        )

    def has(self, positions: Tensor) -> bool:
        return self.tensors[1] is None or int(positions.max()) < self.count

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return decode_step.embed_tokens(self.network, self.structure, tokens, positions)

    def write(
        self, logits: Tensor, rows: Rows, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: Decoding
    ) -> list[list[tuple[list[int], float]]] | None:
        texts, before = rows.texts, prompts if settings.no_repeat_prompt else [()] * len(prompts)
        return decode_step.write(
            self.network, self.structure, logits.float().contiguous(), keys=texts.keys, values=texts.values,
            lengths=texts.lengths, owner=rows.fan.owner, path=rows.path, own=rows.own.buffer, time=rows.own.filled - 1,
            positions=rows.position.clone(), prompts=before, limits=limits, end=tuple(dict.fromkeys(settings.end)),
            banned=settings.banned, min_new=settings.min_new, ngram=settings.no_repeat_ngram,
            end_bias=settings.end_bias, beams=settings.beams, n_best=settings.n_best,
            length_penalty=settings.length_penalty,
        )  # fmt: skip


def _layer_structure(part: Any) -> ctypes.Structure:
    cross = part.cross
    query, output, norm = (None, None, None) if cross is None else (cross.query, cross.output, cross.norm)
    linears = (part.qkv, part.output, query, output, part.expand, part.up, part.contract)
    norms = (part.norms[0], norm, part.norms[1])
    return decode_step.Layer(*map(_linear_structure, linears), *map(norm_structure, norms))


def _linear_structure(linear: PackedLinear | None) -> ctypes.Structure:
    return Linear() if linear is None else linear.structure
