"""Generating titles with MiniLM: decoding and a fine-tuning step, against transformers, and without a cache.

    python benchmarks/titles.py [--only writing] [--quick] [--json] [--isa avx2]

Decoding: 256 source tokens, 32 new ones, greedy or four beams. The peer is `generate` of a GPT-2 of the size of our
model (6 layers, 384 wide, 12 heads, the same vocabulary), with its cache; "no cache" computes the whole sequence for
each token, as libraries without a cache for the prefix mask do. Fine-tuning: 32 texts of 128–256 source and 16–32
target tokens, also attention dropout, forward, backward and fused AdamW, on our side in our training loop, with
clipping; the peer pads to the longest and has a 4D mask and the same weights. Each system trains in a process of its
own. One thread, CPU time, interleaved, medians.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import allmask
from allmask import Mask
from allmask.data import Example, pack
from allmask.decoding import Decoding, Writer, generate
from allmask.decoding.fast.engines import writer_for
from allmask.kernels.precision import native_bf16
from allmask.training import loss_of

VOCABULARY, SOURCE, NEW = 12_000, 256, 32
TEXTS = 32  # of a fine-tuning step
CASES = {"batch 1": (1, 1), "batch 16": (16, 1), "beam 4": (1, 4)}  # rows, beams
PEER = "transformers GPT-2 fp32"
HALF = native_bf16("cpu")  # emulated bf16 is slower than fp32


def main() -> None:
    options = timing.arguments(__doc__, ("writing", "training"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    model = allmask.load("minilm").keep_tokens(range(VOCABULARY)).with_language_model(rng)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        theirs = BertForMaskedLM.from_pretrained(folder)
        theirs_bf16 = BertForMaskedLM.from_pretrained(folder, dtype=torch.bfloat16) if HALF else None
    training = training_rows(model, theirs, theirs_bf16, rng, options.quick) if options.only != "writing" else []
    precisions = ("fp32", "bf16", "int8") if HALF else ("fp32", "int8")
    writers = {f"allmask {name}": writer_for(model, name) for name in precisions}
    rows = []
    if options.only != "training":
        rows += decoding_rows(gpt2(model.config), theirs.eval(), writers, rng, options.quick)
    rows += training
    prompts = torch.randint(1000, VOCABULARY, (8, SOURCE), generator=rng).tolist()
    tokens = torch.randint(1000, VOCABULARY, (16, 8), generator=rng)
    cosines = timing.agreement({name.split()[-1]: writer for name, writer in writers.items()}, prompts, tokens)
    about = timing.versions("transformers") | {"min cosine of logits to fp32": cosines}
    timing.show(f"Titles: {SOURCE} + {NEW} tokens", rows, about, options.json)


# ---- decoding ----------------------------------------------------------------------------------------------


def decoding_rows(
    peer: GPT2LMHeadModel, bert: nn.Module, writers: dict[str, Writer], rng: torch.Generator, quick: bool
) -> list[dict[str, object]]:
    rows = []
    for name, (count, beams) in CASES.items():
        prompts = torch.randint(1000, VOCABULARY, (count, SOURCE), generator=rng)
        cases = {PEER: lambda prompts=prompts, beams=beams: peer_writes(peer, prompts, beams)}
        cases |= {who: writing(writer, prompts.tolist(), beams) for who, writer in writers.items()}
        if name == "batch 1":
            cases["no cache, fp32"] = lambda prompts=prompts: write_without_cache(bert, prompts)
        times = timing.medians(cases, rounds=1 if quick else 3 if count > 1 else 7)
        rows += [decoding_row(name, who, times, count) for who in cases]
    return rows


def gpt2(config: allmask.Config) -> GPT2LMHeadModel:
    """A GPT-2 of the size of our model, without an end-of-text token."""
    sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads, "n_inner": config.ffn_width}
    settings = GPT2Config(vocab_size=VOCABULARY, n_positions=512, bos_token_id=None, eos_token_id=None, **sizes)
    return GPT2LMHeadModel(settings).eval()


@torch.inference_mode()
def peer_writes(model: GPT2LMHeadModel, prompts: Tensor, beams: int) -> None:
    seen = torch.ones_like(prompts)
    written = model.generate(
        prompts, attention_mask=seen, max_new_tokens=NEW, do_sample=False, num_beams=beams, pad_token_id=0
    )
    assert written.shape[1] == SOURCE + NEW


def writing(writer: Writer, prompts: list[list[int]], beams: int) -> Callable[[], None]:
    settings = Decoding(max_new=NEW, beams=beams)

    def case() -> None:
        found = generate(writer, prompts, settings)
        assert all(len(best.tokens) == NEW for [best] in found)

    return case


@torch.inference_mode()
def write_without_cache(model: nn.Module, prompts: Tensor) -> None:
    ids = prompts
    for _ in range(NEW):
        is_target = torch.arange(ids.shape[1]) >= SOURCE
        mask = Mask.prefix(is_target[None]).visible()[:, None]
        logits = model(input_ids=ids, attention_mask=mask, token_type_ids=is_target.long()[None]).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)


def decoding_row(name: str, who: str, times: dict[str, float], count: int) -> dict[str, object]:
    uncached = times.get("no cache, fp32")
    return {
        "task": f"generate, {name}",
        "system": who,
        "seconds": f"{times[who]:.3f}",
        "tokens/s": f"{count * NEW / times[who]:,.0f}",
        "vs transformers": f"{times[PEER] / times[who]:.2f}",
        "vs no cache": "" if uncached is None else f"{uncached / times[who]:.1f}",
    }


# ---- fine-tuning -------------------------------------------------------------------------------------------


def training_rows(
    model: allmask.Model, theirs: nn.Module, theirs_bf16: nn.Module | None, rng: torch.Generator, quick: bool
) -> list[dict[str, object]]:
    examples = draw_examples(rng)
    batch, padded = pack(examples), pad(examples)
    plain = [peer_loss(theirs.eval(), *padded).item(), loss_of(model.eval(), batch).item() / batch.targets]
    if abs(plain[0] - plain[1]) > 1e-4:
        raise SystemExit(f"the two sides do not compute the same loss: {plain}")

    def peer_step(side: nn.Module, autocast: bool) -> timing.Case:
        fused = torch.optim.AdamW(side.parameters(), lr=1e-5, fused=True)
        return lambda: timing.train_step(side, fused, lambda: peer_loss(side, *padded), autocast)

    kind = "bf16 autocast" if HALF else "fp32"
    makers = {f"transformers, {kind}": partial(peer_step, theirs, HALF)}
    if theirs_bf16 is not None:
        makers["transformers, bf16 weights"] = partial(peer_step, theirs_bf16, False)
    precision = "bf16" if HALF else "fp32"
    makers[f"allmask, {kind}"] = partial(timing.own_step, model, batch, lr=1e-5, precision=precision)
    times = timing.medians_apart(makers, rounds=1 if quick else 3)
    best = min(taken for who, taken in times.items() if who.startswith("transformers"))
    return [
        {
            "task": "fine-tuning step",
            "system": who,
            "seconds": f"{taken:.3f}",
            "tokens/s": f"{batch.tokens / taken:,.0f}",
            "vs transformers": f"{best / taken:.2f}",
            "vs no cache": "",
        }
        for who, taken in times.items()
    ]


def draw_examples(rng: torch.Generator) -> list[Example]:
    """Random tokens; from the last source token on, each position predicts the next token."""
    examples = []
    for _ in range(TEXTS):
        source = int(torch.randint(128, 257, (), generator=rng))
        length = source + int(torch.randint(16, 33, (), generator=rng))
        ids = torch.randint(1000, VOCABULARY, (length,), generator=rng)
        is_target = torch.arange(length) >= source
        labels = torch.where(is_target, ids, -1).roll(-1)
        examples.append(Example(ids, Mask.prefix(is_target[None]).order[0], is_target, labels))
    return examples


def pad(examples: list[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, 4D mask, segments and labels (-100: none), padded to the longest."""
    longest = max(map(len, examples))

    def rows(name: str, filler: int) -> Tensor:
        values = (torch.from_numpy(getattr(example, name)).long() for example in examples)
        return torch.stack([F.pad(row, (0, longest - len(row)), value=filler) for row in values])

    segments, labels = rows("segments", 0), rows("labels", -1)
    valid = torch.arange(longest) < torch.tensor([len(example) for example in examples])[:, None]
    mask = Mask.prefix(segments.bool(), valid).visible()[:, None]
    mask = mask | torch.eye(longest, dtype=torch.bool)  # padding attends to itself: no row may be empty
    return rows("ids", 0), mask, segments, labels.masked_fill(labels < 0, -100)


def peer_loss(model: nn.Module, ids: Tensor, mask: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, token_type_ids=segments, labels=labels).loss


if __name__ == "__main__":
    main()
