"""Sentence vectors of 256 texts with MiniLM: allmask, transformers, CTranslate2, ONNX Runtime and others.

    python benchmarks/encode.py [--quick] [--json] [--isa avx2]

All get the same token ids and compute mean-pooled vectors; rows "with tokenization" start from texts. Each peer has its
fastest batch size. One thread, CPU time, interleaved, medians.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import random
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx_int8
import torch
from texts import pieces
from torch import Tensor
from torch.nn.functional import cosine_similarity

import allmask
from allmask.checkpoints import resolve
from allmask.inference import embed, embed_ids, freeze
from allmask.kernels.precision import native_bf16
from allmask.text import Tokenizer

SHORTEST, LONGEST = 8, 128
BATCHES = (8, 16, 32, 64)
HALF = native_bf16("cpu")  # emulated bf16 is slower than fp32

Ids = list[list[int]]
Encode = Callable[[], Tensor]


def main() -> None:
    options = timing.arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = str(resolve("minilm"))
    model = allmask.load(folder)
    texts = corpus(model.tokenizer, 64 if options.quick else 256)
    ids = [text.ids for text in model.tokenizer.encode_batch(texts)]
    cases = ours(model, ids, texts) | transformers_cases(folder, ids)
    cases |= sentence_transformers_cases(folder, texts) | ctranslate2_cases(folder, ids) | onnx_cases(folder, ids)
    with torch.inference_mode():
        reference = cases["transformers fp32, padded"]()
        cosines = {name: cosine_similarity(case(), reference).min().item() for name, case in cases.items()}
        times = timing.medians(cases, 3 if options.quick else 5, warm_up=False)
    peers = ("transformers", "sentence-transformers", "ctranslate2", "onnxruntime")
    about = timing.versions(*peers) | describe(model, ids, texts)
    base = times["transformers fp32, padded"]
    rows = [
        {
            "encoder": name,
            "seconds": f"{times[name]:.2f}",
            "tokens/s": f"{sum(map(len, ids)) / times[name]:,.0f}",
            "speed-up": f"{base / times[name]:.2f}",
            "min cosine": f"{cosines[name]:.5f}",
        }
        for name in sorted(cases, key=lambda name: -times[name])
    ]
    timing.show(f"Encoding {len(texts)} texts with MiniLM", rows, about, options.json)


def corpus(tokenizer: Tokenizer, number: int) -> list[str]:
    """Pieces of docstrings of 8 to 128 tokens, 48 on average; the same in every run."""
    rng = random.Random(0)
    lengths = (min(LONGEST, max(SHORTEST, round(rng.lognormvariate(3.73, 0.6)))) for _ in range(number))
    return [piece.text for piece in pieces(tokenizer, (length - 2 for length in lengths))]  # [CLS] and [SEP]


def describe(model: allmask.Model, ids: Ids, texts: list[str]) -> dict[str, str]:
    lengths = sorted(map(len, ids))
    tokenizing = timing.medians({"": lambda: model.tokenizer.encode_batch(texts)}, rounds=3)[""]
    return {
        "tokens": f"{sum(lengths):,} (mean {sum(lengths) / len(lengths):.0f}, {lengths[0]}–{lengths[-1]})",
        "tokenizing": f"{tokenizing:.3f} s",
    }


# ---- the cases ---------------------------------------------------------------------------------------------


def ours(model: allmask.Model, ids: Ids, texts: list[str]) -> dict[str, Encode]:
    best = "bf16" if HALF else "fp32"
    frozen = {precision: freeze(model, precision) for precision in dict.fromkeys(("fp32", best, "int8"))}
    cases: dict[str, Encode] = {
        f"allmask {precision}": lambda one=one: embed_ids(one, ids) for precision, one in frozen.items()
    }
    return cases | {f"allmask {best}, with tokenization": lambda: embed(frozen[best], texts)}


def transformers_cases(folder: str, ids: Ids) -> dict[str, Encode]:
    from transformers import AutoModel

    def case(model, order: list[int]) -> Encode:
        def make(size: int) -> Encode:
            return lambda: in_batches(lambda batch: padded_mean(model, batch), ids, order, size)

        with torch.inference_mode():
            return make(timing.fastest(make, BATCHES))

    def load(dtype: torch.dtype):
        return AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()

    cases = {
        "transformers fp32, padded": case(load(torch.float32), list(range(len(ids)))),
        "transformers fp32, sorted": case(load(torch.float32), by_length(ids)),
    }
    return cases | ({"transformers bf16, sorted": case(load(torch.bfloat16), by_length(ids))} if HALF else {})


def sentence_transformers_cases(folder: str, texts: list[str]) -> dict[str, Encode]:
    if find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")

    def make(size: int) -> Encode:
        return lambda: torch.from_numpy(model.encode(texts, batch_size=size, show_progress_bar=False))

    return {"sentence-transformers fp32, with tokenization": make(timing.fastest(make, BATCHES))}


def ctranslate2_cases(folder: str, ids: Ids) -> dict[str, Encode]:
    if find_spec("ctranslate2") is None:
        return {}
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    def case(kind: str, converted: str) -> Encode:
        encoder = ctranslate2.Encoder(converted, compute_type=kind, inter_threads=1, intra_threads=1)

        def mean(batch: Ids) -> Tensor:
            hidden = torch.from_numpy(np.array(encoder.forward_batch(batch).last_hidden_state))
            return pool(hidden.float(), valid_of(batch))

        def make(size: int) -> Encode:
            return lambda: in_batches(mean, ids, by_length(ids), size)

        return make(timing.fastest(make, BATCHES))

    with tempfile.TemporaryDirectory() as parent:
        converted = TransformersConverter(folder).convert(f"{parent}/minilm")
        return {f"CTranslate2 {name}, sorted": case(kind, converted) for name, kind in CTRANSLATE2_KINDS.items()}


def onnx_cases(folder: str, ids: Ids) -> dict[str, Encode]:
    if not onnx_int8.INSTALLED:
        return {}
    with tempfile.TemporaryDirectory() as parent:
        encode = onnx_int8.encoder(folder, Path(parent, "minilm"))

    def mean(batch: Ids) -> Tensor:
        return pool(encode(*padded(batch)), valid_of(batch))

    def make(size: int) -> Encode:
        return lambda: in_batches(mean, ids, by_length(ids), size)

    return {"ONNX Runtime int8, sorted": make(timing.fastest(make, BATCHES))}


CTRANSLATE2_KINDS = {"fp32": "float32", "int8": "int8"}


# ---- batches with padding, as the peers need them ----------------------------------------------------------


def by_length(ids: Ids) -> list[int]:
    return sorted(range(len(ids)), key=lambda number: len(ids[number]))


def in_batches(encode: Callable[[Ids], Tensor], ids: Ids, order: list[int], size: int) -> Tensor:
    parts = [encode([ids[number] for number in order[start : start + size]]) for start in range(0, len(order), size)]
    vectors = torch.cat(parts)
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)


def padded_mean(model, batch: Ids) -> Tensor:
    ids, mask = padded(batch)
    return pool(model(input_ids=ids, attention_mask=mask).last_hidden_state.float(), valid_of(batch))


def padded(batch: Ids) -> tuple[Tensor, Tensor]:
    """Padded ids and attention mask."""
    longest = max(map(len, batch))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in batch]), valid_of(batch).long()


def valid_of(batch: Ids) -> Tensor:
    return torch.arange(max(map(len, batch))) < torch.tensor([len(text) for text in batch])[:, None]


def pool(hidden: Tensor, valid: Tensor) -> Tensor:
    return (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)


if __name__ == "__main__":
    main()
