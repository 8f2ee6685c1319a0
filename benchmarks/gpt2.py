"""Continuing a text with a model of GPT-2's size, against transformers and CTranslate2.

    python benchmarks/gpt2.py [--quick] [--json] [--isa avx2]

GPT-2 (124M: 12 layers, 768 wide, 12 heads, 50,257 tokens) with the same random weights on all sides: 64 tokens of a
prompt, 32 new ones, greedy, one text and eight. One thread, CPU time, interleaved, medians.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import allmask
from allmask.decoding import Decoding, Writer, generate
from allmask.decoding.fast.engines import writer_for
from allmask.kernels.precision import native_bf16

PROMPT, NEW = 64, 32
CASES = {"batch 1": 1, "batch 8": 8}
PRECISIONS = ("fp32", "bf16", "int8") if native_bf16("cpu") else ("fp32", "int8")
PEERS = ("transformers fp32", "CTranslate2 int8")

Write = Callable[[Tensor], list[list[int]]]  # prompts (n, PROMPT) to new tokens


def main() -> None:
    options = timing.arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model = allmask.load(folder)
        own = {precision: writer_for(model, precision) for precision in PRECISIONS}
        writers: dict[str, Write] = {"transformers fp32": partial(peer_writes, theirs)}
        if find_spec("ctranslate2"):
            writers["CTranslate2 int8"] = ctranslate2_writes(folder)
    writers |= {f"allmask {precision}": partial(write, writer) for precision, writer in own.items()}
    rows = []
    for name, count in CASES.items():
        prompts = torch.randint(0, 50_000, (count, PROMPT), generator=rng)
        written = {who: case(prompts) for who, case in writers.items()}
        assert all(len(tokens) == NEW for found in written.values() for tokens in found)
        if written["allmask fp32"] != written["transformers fp32"]:
            raise SystemExit("the two sides do not write the same tokens in fp32")
        cases = {who: partial(case, prompts) for who, case in writers.items()}
        times = timing.medians(cases, rounds=1 if options.quick else 5, warm_up=False)
        rows += [timing.writing_row(name, who, times, count * NEW, PEERS) for who in cases]
    prompts = torch.randint(0, 50_000, (4, PROMPT), generator=rng).tolist()
    tokens = torch.randint(0, 50_000, (8, 4), generator=rng)
    about = timing.versions("transformers", "ctranslate2")
    about |= {"min cosine of logits to fp32": timing.agreement(own, prompts, tokens)}
    timing.show(f"GPT-2: {PROMPT} + {NEW} tokens", rows, about, options.json)


def write(writer: Writer, prompts: Tensor) -> list[list[int]]:
    return [list(best.tokens) for [best] in generate(writer, prompts.tolist(), Decoding(max_new=NEW))]


@torch.inference_mode()
def peer_writes(model: GPT2LMHeadModel, prompts: Tensor) -> list[list[int]]:
    seen = torch.ones_like(prompts)
    written = model.generate(prompts, attention_mask=seen, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return written[:, PROMPT:].tolist()


def ctranslate2_writes(folder: str) -> Write:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """For a model without a tokenizer: tokens have made-up names."""

        def load_tokenizer(self, *_: object, **__: object) -> SimpleNamespace:
            tokens = {str(id): id for id in range(50_256)} | {"<end>": 50_256}
            return SimpleNamespace(get_vocab=lambda: tokens, bos_token="<end>", eos_token="<end>", unk_token="<end>")

    converted = Converter(folder).convert(os.path.join(folder, "ctranslate2"), quantization="int8")
    generator = ctranslate2.Generator(converted, compute_type="int8", inter_threads=1, intra_threads=1)

    def write(prompts: Tensor) -> list[list[int]]:
        length = {"max_length": NEW, "min_length": NEW, "include_prompt_in_result": False}
        found = generator.generate_batch([list(map(str, prompt)) for prompt in prompts.tolist()], **length)
        return [one.sequences_ids[0] for one in found]

    return write


if __name__ == "__main__":
    main()
