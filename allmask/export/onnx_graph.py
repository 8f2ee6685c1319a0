"""A model as an ONNX graph: an encoder of texts, with its task head if it has one.

The graph is built node by node from the weights, so that it holds what the model computes and nothing of a trace:

    input_ids, attention_mask, token_type_ids   (texts, tokens), int64; the last one only if the model has segments
    last_hidden_state, sentence_embedding       (texts, tokens, W) and (texts, W), without a task head
    logits                                      (texts, labels), or (texts, tokens, labels) of a tagger
    start_logits, end_logits                    (texts, tokens) of a model that answers questions

Names are those of transformers and its ONNX exporter.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from allmask.errors import CheckpointError
from allmask.model import Model
from allmask.nn.build import reads_pooler
from allmask.nn.heads import Pooler
from allmask.nn.layers import GatedFeedForward, Layer, RMSNorm

OPSET = 20  # the first with Gelu
FILE = "model.onnx"
LARGE = 1_800_000_000  # bytes; a file of 2 GiB or more cannot be parsed, so weights are then beside it
HIDDEN = float(np.finfo(np.float32).min)  # a score that no softmax shows; -inf would make NaN of a row of padding


def expect_convertible(model: Model, source: str) -> None:
    """Refuse a model that has no such graph, and say why."""
    config = model.config
    family = {"lstm": "a recurrent encoder–decoder", "elmo": "an ELMo"}.get(config.family)
    if family is None and config.decoder_layers:
        family = "an encoder–decoder, which writes step by step with a cache,"
    if family is not None:
        hint = "encoder–decoders: --to ctranslate2" if config.decoder_layers and config.family != "lstm" else None
        raise CheckpointError(f"{source}: {family} has no ONNX graph here; encoders have", hint)
    if config.position_kind not in ("learned", "sinusoidal", "none") or config.norm not in ("layer", "rms"):
        kind = f"{config.position_kind} positions" if config.norm in ("layer", "rms") else f"{config.norm} norm"
        raise CheckpointError(f"{source}: a model with {kind} ({config.family}) has no ONNX graph here")
    if model.labels is not None and model.labels.kind == "chain":
        raise CheckpointError(
            f"{source}: a CRF searches for the best tags together, which is no ONNX graph",
            "train the tagger without --crf",
        )


def write(model: Model, folder: Path, pool: str = "mean", int8: bool = False) -> None:
    """Write model.onnx; `pool` makes the sentence embedding, "mean" or "cls". With `int8`, weights are quantized."""
    import onnx

    made = graph(model, pool)
    large = sum(p.numel() * 4 for p in model.parameters()) > LARGE
    file = folder / ("whole.onnx" if int8 else FILE)
    data = folder / f"{file.name}.data"
    onnx.save(made, file, save_as_external_data=large, location=data.name)
    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        how = {"weight_type": QuantType.QInt8, "per_channel": True, "use_external_data_format": large}
        logging.disable(logging.WARNING)  # it advises to fuse layers first, which changes nothing here
        try:
            quantize_dynamic(file, folder / FILE, **how)
        finally:
            logging.disable(logging.NOTSET)
        file.unlink()
        data.unlink(missing_ok=True)


def graph(model: Model, pool: str = "mean") -> Any:
    """The model as an `onnx.ModelProto`."""
    return _Builder(model).build(pool)


def table_of(model: Model, name: str, rows: int) -> np.ndarray:
    """What the embedding of "positions" or "segments" adds for the first `rows` of them, (rows, width)."""
    with torch.no_grad():
        return getattr(model.body.embedding, name)(torch.arange(rows, device=model.device)).float().cpu().numpy()


class _Builder:
    """Nodes and weights of a graph; each method adds nodes and returns the name of their result."""

    def __init__(self, model: Model):
        from onnx import helper, numpy_helper

        self.model, self.config, self.helper = model, model.config, helper
        self.from_array = numpy_helper.from_array
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.names = {id(module): name for name, module in model.named_modules()}

    def build(self, pool: str) -> Any:
        helper, kind = self.helper, self.helper.np_dtype_to_tensor_dtype
        given = ["input_ids", "attention_mask", *(["token_type_ids"] if self.config.segments > 1 else [])]
        outputs = self._outputs(self._body(), pool)
        axes = ["texts", "tokens"]
        inputs = [helper.make_tensor_value_info(name, kind(np.dtype("int64")), axes) for name in given]
        results = [
            helper.make_tensor_value_info(name, kind(np.dtype("float32")), shape) for name, shape in outputs.items()
        ]
        made = helper.make_graph(self.nodes, "allmask", inputs, results, list(self.weights.values()))
        return helper.make_model(
            made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="allmask", ir_version=9
        )

    # ---- parts -----------------------------------------------------------------------------------------------

    def _add(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def _constant(self, value: Any, dtype: str = "int64", name: str | None = None) -> str:
        name = name or f"constant_{len(self.weights)}"
        if name not in self.weights:
            self.weights[name] = self.from_array(np.asarray(value, dtype, order="C"), name)
        return name

    def _weight(self, module: nn.Module, which: str = "weight", transposed: bool = False) -> str:
        tensor = getattr(module, which).detach().float().cpu()
        name = f"{self.names[id(module)]}.{which}"
        return self._constant(tensor.T.numpy() if transposed else tensor.numpy(), "float32", name)

    def _linear(self, linear: Any, x: str) -> str:
        x = self._add("MatMul", x, self._weight(linear, transposed=True))
        return x if linear.bias is None else self._add("Add", x, self._weight(linear, "bias"))

    def _norm(self, norm: Any, x: str) -> str:
        if isinstance(norm, nn.LayerNorm):
            weights = self._weight(norm), self._weight(norm, "bias")
            return self._add("LayerNormalization", x, *weights, axis=-1, epsilon=norm.eps)
        if not isinstance(norm, RMSNorm):
            return x  # there is none
        square = self._add("ReduceMean", self._add("Mul", x, x), self._constant([-1]), keepdims=1)
        size = self._add("Sqrt", self._add("Add", square, self._constant(norm.eps, "float32")))
        return self._add("Mul", self._add("Div", x, size), self._weight(norm))

    def _activation(self, x: str) -> str:
        if self.config.activation == "relu":
            return self._add("Relu", x)
        return self._add("Gelu", x, approximate="tanh" if self.config.activation == "gelu_tanh" else "none")

    def _pooler_activation(self, pooler: Pooler, x: str) -> str:
        if isinstance(pooler.activation, nn.Module):  # that of the body
            return self._activation(x)
        return self._add({torch.tanh: "Tanh", F.relu: "Relu", F.gelu: "Gelu"}[pooler.activation], x)

    # ---- the body --------------------------------------------------------------------------------------------

    def _body(self) -> str:
        x, bias = self._embedding(), self._mask()
        for layer in self.model.body.layers:
            x = self._layer(layer, x, bias)
        return self._norm(self.model.body.norm, x)

    def _embedding(self) -> str:
        embedding, one = self.model.body.embedding, self._constant(1)
        x = self._add("Gather", self._weight(embedding.tokens), "input_ids")
        if embedding.scale != 1.0:
            x = self._add("Mul", x, self._constant(embedding.scale, "float32"))
        if self.config.position_kind != "none":  # the index of each token among those that are not padding
            count = self._add("CumSum", "attention_mask", one)
            position = self._add("Max", self._add("Sub", count, one), self._constant(0))
            x = self._add("Add", x, self._add("Gather", self._table("positions", self.config.max_positions), position))
        if self.config.segments > 1:
            table = self._table("segments", self.config.segments)
            x = self._add("Add", x, self._add("Gather", table, "token_type_ids"))
        elif self.config.segments:
            x = self._add("Add", x, self._table("segments", 1))
        x = self._norm(embedding.norm, x)
        return self._linear(embedding.project, x) if self.config.embedding_width else x

    def _table(self, name: str, rows: int) -> str:
        return self._constant(table_of(self.model, name, rows), "float32", f"body.embedding.{name}.weight")

    def _mask(self) -> str:
        """What is added to the scores (texts, heads, tokens, tokens): 0 where a token may read another."""
        visible = self._add("Cast", "attention_mask", to=self.helper.np_dtype_to_tensor_dtype(np.dtype("bool")))
        visible = self._add("Unsqueeze", visible, self._constant([1, 2]))
        if self.config.own_mask == "causal":
            size = self._add("Gather", self._add("Shape", "input_ids"), self._constant(1))
            index = self._add("Range", self._constant(0), size, self._constant(1))
            rows = self._add("Unsqueeze", index, self._constant([1]))
            visible = self._add("And", visible, self._add("GreaterOrEqual", rows, index))
        return self._add("Where", visible, self._constant(0, "float32"), self._constant(HIDDEN, "float32"))

    def _layer(self, layer: Layer, x: str, bias: str) -> str:
        before = self.config.norm_place == "pre"
        step = self._attention(layer.attention, self._norm(layer.attention_norm, x) if before else x, bias)
        x = self._add("Add", x, step)
        x = x if before else self._norm(layer.attention_norm, x)
        step = self._feed_forward(layer.feed_forward, self._norm(layer.feed_forward_norm, x) if before else x)
        x = self._add("Add", x, step)
        return x if before else self._norm(layer.feed_forward_norm, x)

    def _attention(self, attention: Any, x: str, bias: str) -> str:
        heads, inner = self.config.heads, self.config.attention_width

        def split(linear: nn.Linear, order: tuple[int, ...]) -> str:
            parts = self._add("Reshape", self._linear(linear, x), self._constant([0, 0, heads, inner // heads]))
            return self._add("Transpose", parts, perm=order)

        q, v = split(attention.query, (0, 2, 1, 3)), split(attention.value, (0, 2, 1, 3))
        scores = self._add("MatMul", q, split(attention.key, (0, 2, 3, 1)))
        if self.config.scores_scaled:
            scores = self._add("Mul", scores, self._constant(1 / math.sqrt(inner // heads), "float32"))
        weights = self._add("Softmax", self._add("Add", scores, bias), axis=-1)
        read = self._add("Transpose", self._add("MatMul", weights, v), perm=(0, 2, 1, 3))
        return self._linear(attention.output, self._add("Reshape", read, self._constant([0, 0, inner])))

    def _feed_forward(self, part: Any, x: str) -> str:
        if isinstance(part, GatedFeedForward):
            wide = self._add("Mul", self._activation(self._linear(part.gate, x)), self._linear(part.gated, x))
        else:
            wide = self._activation(self._linear(part.expand, x))
        return self._linear(part.contract, wide)

    # ---- what comes out --------------------------------------------------------------------------------------

    def _outputs(self, hidden: str, pool: str) -> dict[str, list[Any]]:
        """Add the last nodes; return the shapes of the outputs by name."""
        labels, width = self.model.labels, self.config.width
        if labels is None:
            valid = self._add("Cast", "attention_mask", to=self.helper.np_dtype_to_tensor_dtype(np.dtype("float32")))
            valid = self._add("Unsqueeze", valid, self._constant([2]))
            hidden = self._add("Mul", hidden, valid, name="last_hidden_state")
            if pool == "mean":
                axis = self._constant([1])
                sums, counts = (self._add("ReduceSum", x, axis, keepdims=0) for x in (hidden, valid))
                self._add("Div", sums, counts, name="sentence_embedding")
            else:
                self._add("Identity", self._pooled(hidden), name="sentence_embedding")
            return {"last_hidden_state": ["texts", "tokens", width], "sentence_embedding": ["texts", width]}
        head: Any = self.model.task_head
        if not labels.of_tokens:
            hidden = self._pooled(hidden)
            pooler = self.model.pooler if reads_pooler(self.config, labels) else head.before
            if isinstance(pooler, Pooler):
                hidden = self._pooler_activation(pooler, self._linear(pooler, hidden))
        scores = self._linear(head.output, hidden)
        if labels.kind != "span":
            self._add("Identity", scores, name="logits")
            return {"logits": ["texts", *(["tokens"] if labels.of_tokens else []), len(labels)]}
        for place, name in enumerate(("start_logits", "end_logits")):
            self._add("Gather", scores, self._constant(place), axis=2, name=name)
        return {name: ["texts", "tokens"] for name in ("start_logits", "end_logits")}

    def _pooled(self, hidden: str) -> str:
        """(texts, W): the first token of each text, or the last if the mask is causal."""
        last = int(self.config.own_mask == "causal")
        where = self._add("ArgMax", "attention_mask", axis=1, keepdims=1, select_last_index=last)
        return self._add("GatherND", hidden, where, batch_dims=1)
