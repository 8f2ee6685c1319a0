"""Translation with transformer-base: decoding and a training step, against transformers and CTranslate2.

    python benchmarks/translate.py [--only writing] [--quick] [--json] [--isa avx2]

Decoding: 64 source tokens, exactly 32 new ones, one text and sixteen, greedy and five beams. Weights are random, the
same for both peers: a Marian of the same shape (post-norm, 6 + 6 layers, 512 wide, ReLU, 37,000 tokens), decoded by
transformers' `generate` and, converted, by CTranslate2 in int8. Training: pairs of 6 to 64 tokens, 20 on average, as
sentences are, dropout, label smoothing, forward, backward and Adam in bf16, on our side in our training loop, with
clipping. The peer pads these pairs or, in "length groups", as many pairs of about the mean length; each system
trains in a process of its own. One thread, CPU time, interleaved, medians. On processors without bf16 both train in
fp32.
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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from allmask.data import Example, pack
from allmask.decoding import Decoding, Writer, generate
from allmask.decoding.fast.engines import pair_writer_for
from allmask.kernels.precision import native_bf16
from allmask.model import Model
from allmask.presets import transformer_base

SOURCE, NEW = 64, 32
PAIRS, QUICK_PAIRS, SMOOTHING = 96, 24, 0.1
HALF = native_bf16("cpu")
TRAINING = {"bf16 autocast": torch.float32, "bf16 weights": torch.bfloat16} if HALF else {"fp32": torch.float32}
OURS = f"allmask {next(iter(TRAINING))}"
CASES = {"1 text, greedy": (1, 1), "1 text, beam 5": (1, 5), "16 texts, greedy": (16, 1), "16 texts, beam 5": (16, 5)}
PRECISIONS = ("fp32", "bf16", "int8") if HALF else ("fp32", "int8")
PEERS = ("transformers fp32", "CTranslate2 int8")
CONFIG = transformer_base()
PAD = CONFIG.vocab_size - 1  # of Marian, and its start token


def main() -> None:
    options = timing.arguments(__doc__, ("writing", "training"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    model, marian = Model.fresh(CONFIG, ["lm"], rng), MarianMTModel(marian_config()).eval()
    about = timing.versions("transformers", "ctranslate2")
    if options.only != "writing":
        rows = training_rows(model, marian, rng, options.quick)
        timing.show("Training transformer-base", rows, about, options.json)
        print()
    if options.only != "training":
        writers = {precision: pair_writer_for(model.eval(), precision) for precision in PRECISIONS}
        rows = writing_rows(marian, writers, rng, options.quick)
        sources = torch.randint(2, PAD, (4, SOURCE), generator=rng).tolist()
        tokens = torch.randint(2, PAD, (8, 4), generator=rng)
        cosines = {"min cosine of logits to fp32": timing.agreement(writers, sources, tokens)}
        timing.show(f"Translation: {SOURCE} + {NEW} tokens, transformer-base", rows, about | cosines, options.json)


def marian_config() -> MarianConfig:
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    return MarianConfig(
        vocab_size=CONFIG.vocab_size, d_model=CONFIG.width, activation_function="relu", scale_embedding=True,
        pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=0, forced_eos_token_id=None, **sides,
    )  # fmt: skip


SIZES = {"layers": CONFIG.layers, "attention_heads": CONFIG.heads, "ffn_dim": CONFIG.ffn_width}


# ---- decoding ----------------------------------------------------------------------------------------------


Write = Callable[[Tensor, int], None]  # sources (n, SOURCE), beams


def writing_rows(
    marian: MarianMTModel, own: dict[str, Writer], rng: torch.Generator, quick: bool
) -> list[dict[str, object]]:
    writers = peers(marian) | {f"allmask {precision}": ours(writer) for precision, writer in own.items()}
    rows = []
    for name, (count, beams) in CASES.items():
        sources = torch.randint(2, PAD, (count, SOURCE), generator=rng)
        cases = {who: lambda write=write: write(sources, beams) for who, write in writers.items()}  # noqa: B023
        times = timing.medians(cases, rounds=1 if quick else 3 if count > 1 else 7)
        rows += [timing.writing_row(name, who, times, count * NEW, PEERS) for who in cases]
    return rows


def ours(writer: Writer) -> Write:
    def write(sources: Tensor, beams: int) -> None:
        found = generate(writer, sources.tolist(), Decoding(end=(0,), max_new=NEW, min_new=NEW, beams=beams))
        assert all(len(best.tokens) == NEW for [best] in found)

    return write


def peers(marian: MarianMTModel) -> dict[str, Write]:
    with tempfile.TemporaryDirectory() as folder:
        marian.save_pretrained(folder)
        found = {"transformers fp32": theirs(marian)}
        if HALF:
            found["transformers bf16"] = theirs(MarianMTModel.from_pretrained(folder, dtype=torch.bfloat16).eval())
        return found | ({"CTranslate2 int8": ctranslate2_writes(folder)} if find_spec("ctranslate2") else {})


def theirs(model: MarianMTModel) -> Write:
    @torch.inference_mode()
    def write(sources: Tensor, beams: int) -> None:
        length = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        seen = torch.ones_like(sources)
        written = model.generate(sources, attention_mask=seen, do_sample=False, num_beams=beams, **length)
        assert written.shape[1] == 1 + NEW

    return write


def ctranslate2_writes(folder: str) -> Write:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """For a model without a tokenizer: tokens have made-up names."""

        def load_tokenizer(self, *_: object, **__: object) -> SimpleNamespace:
            tokens = {"</s>": 0, "<unk>": 1, "<pad>": PAD} | {str(id): id for id in range(2, PAD)}
            return SimpleNamespace(get_vocab=lambda: tokens, eos_token="</s>", unk_token="<unk>")

    converted = Converter(folder).convert(os.path.join(folder, "ctranslate2"), quantization="int8")
    translator = ctranslate2.Translator(converted, compute_type="int8", inter_threads=1, intra_threads=1)

    def write(sources: Tensor, beams: int) -> None:
        length = {"max_decoding_length": NEW, "min_decoding_length": NEW}
        found = translator.translate_batch([list(map(str, row)) for row in sources.tolist()], beam_size=beams, **length)
        assert all(len(one.hypotheses[0]) == NEW for one in found)

    return write


# ---- training ----------------------------------------------------------------------------------------------


Pairs = list[tuple[list[int], list[int]]]


def training_rows(model: Model, marian: MarianMTModel, rng: torch.Generator, quick: bool) -> list[dict[str, object]]:
    pairs = draw_pairs(QUICK_PAIRS if quick else PAIRS, rng)
    grouped = like_lengths(pairs, rng)
    batch = pack([example(*pair) for pair in pairs])
    sides = {kind: MarianMTModel(marian.config).to(dtype) for kind, dtype in TRAINING.items()}
    makers, real = {}, {}
    for name, group in (("", pairs), (", length groups", grouped)):
        for kind, side in sides.items():
            who = f"transformers {kind}{name}"
            makers[who] = partial(peer_step, side, group)
            real[who] = tokens_of(group)
    chosen = {"lr": 1e-5, "weight_decay": 0.0, "label_smoothing": SMOOTHING, "precision": "bf16" if HALF else "fp32"}
    makers[OURS] = partial(timing.own_step, model, batch, **chosen)
    real[OURS] = tokens_of(pairs)
    times = timing.medians_apart(makers, rounds=1 if quick else 3)
    return [training_row(who, real[who] / taken, real[OURS] / times[OURS]) for who, taken in times.items()]


def training_row(who: str, rate: float, ours: float) -> dict[str, object]:
    return {"system": who, "non-padding tokens/s": f"{rate:,.0f}", "speed-up of allmask": f"{ours / rate:.2f}"}


def draw_pairs(count: int, rng: torch.Generator) -> Pairs:
    """Random pairs; targets are about as long as their sources."""
    sources = (torch.randn(count, generator=rng) * 0.5 + 2.9).exp().round().clamp(6, 64)
    targets = (sources * (1 + 0.15 * torch.randn(count, generator=rng))).round().clamp(6, 64)
    return [(random_ids(int(a), rng), random_ids(int(b), rng)) for a, b in zip(sources, targets, strict=True)]


def like_lengths(pairs: Pairs, rng: torch.Generator) -> Pairs:
    """As many pairs of the mean length, plus or minus one token."""
    mean = round(tokens_of(pairs) / 2 / len(pairs)) - 1
    around = torch.randint(mean - 1, mean + 2, (len(pairs), 2), generator=rng).tolist()
    return [(random_ids(a, rng), random_ids(b, rng)) for a, b in around]


def random_ids(length: int, rng: torch.Generator) -> list[int]:
    return torch.randint(2, PAD, (length,), generator=rng).tolist()


def tokens_of(pairs: Pairs) -> int:
    """Tokens of both sides, with an end and a start token."""
    return sum(len(source) + len(target) + 2 for source, target in pairs)


def example(source: list[int], target: list[int]) -> Example:
    return Example.pair([*source, 0], [1, *target], [*target, 0])


def pad(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources, their attention mask, the decoder's inputs, and labels (-100: none)."""

    def rows(lists: list[list[int]], filler: int) -> Tensor:
        longest = max(map(len, lists))
        return torch.tensor([row + [filler] * (longest - len(row)) for row in lists])

    sources = rows([[*source, 0] for source, _ in pairs], PAD)
    return (
        sources,
        (sources != PAD).long(),
        rows([[PAD, *target] for _, target in pairs], PAD),
        rows([[*target, 0] for _, target in pairs], -100),
    )


def peer_loss(model: nn.Module, sources: Tensor, real: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=sources, attention_mask=real, decoder_input_ids=targets).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING)


def peer_step(model: nn.Module, pairs: Pairs) -> timing.Case:
    adam = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    autocast = HALF and next(model.parameters()).dtype == torch.float32
    return partial(timing.train_step, model, adam, partial(peer_loss, model, *pad(pairs)), autocast)


if __name__ == "__main__":
    main()
