"""A BERT folder for ONNX Runtime in int8: exported by torch, layers fused, matrix products quantized dynamically."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INSTALLED = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
NAMES = ["input_ids", "attention_mask"]


class Reader(nn.Module):
    """Ids and attention mask to hidden states (B, T, W)."""

    def __init__(self, folder: str):
        from transformers import AutoModel

        super().__init__()
        self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def encoder(folder: str, made: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """An encoder from ids and mask (B, T) to hidden states (B, T, W); its files are written to `made`."""
    import onnxruntime

    reader = Reader(folder)
    made.mkdir()
    export(reader, made / "plain.onnx")
    quantize(made / "plain.onnx", made / "int8.onnx", reader.model.config)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(made / "int8.onnx", options, providers=["CPUExecutionProvider"])

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        given = dict(zip(NAMES, (ids.numpy(), mask.numpy()), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return encode


def export(reader: Reader, file: Path) -> None:
    ids = torch.ones(2, 7, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in (*NAMES, "hidden")}
    with warnings.catch_warnings():  # deprecation and tracing warnings of the exporter
        warnings.simplefilter("ignore")
        torch.onnx.export(
            reader, (ids, ids), str(file), input_names=NAMES, output_names=["hidden"], dynamic_axes=axes,
            opset_version=17, dynamo=False,
        )  # fmt: skip


def quantize(plain: Path, file: Path, config: Any) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    logging.disable(logging.WARNING)  # both are verbose
    try:
        sizes = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
        optimizer.optimize_model(str(plain), model_type="bert", **sizes).save_model_to_file(str(plain))
        floats = {"DefaultTensorType": 1}  # types cannot be inferred behind fused layers
        quantize_dynamic(str(plain), str(file), weight_type=QuantType.QInt8, per_channel=True, extra_options=floats)
    finally:
        logging.disable(logging.NOTSET)
