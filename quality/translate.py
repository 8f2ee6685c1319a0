"""How good are translators that are trained from nothing? A Transformer, LSTMs, and transformers' Marian of that size.

    python quality/translate.py DATA --minutes 40 --out quality-runs/translate     # DATA: train, dev and test.jsonl
    python quality/translate.py DATA --systems transformer-small,marian --minutes 5

All systems see the same batches of the same pieces in the same order, with the same smoothing and dropout, the rate
that goes with their width, and as many minutes of training (evaluations and checkpoints not counted), and keep the
weights with the best BLEU on the first records of dev; the mean of the last checkpoints is a row of its own where dev
says that it is better. Marian begins with our Transformer's own weights. The table is scored on test.jsonl with 5
beams. What is finished stands in results.jsonl and is not computed again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from timed import ENDLESS, Curve, Timed, curve_of, learn, options

from allmask.data import Example, Record, plan_epoch
from allmask.model import Model
from allmask.options import FROM_SCRATCH
from allmask.runs.average import take_mean
from allmask.runs.folder import save_model
from allmask.runs.fresh import Fresh
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import score_translations, signatures
from allmask.tasks.seq2seq import JUDGED, Translate
from allmask.text import Tokenizer
from allmask.training import Settings, resolve_precision, train
from allmask.training.schedule import SCHEDULES, noam

MARIAN = "marian"
SYSTEMS = ("transformer-small", "lstm-small", "lstm-small-plain", MARIAN)
NAMES = {  # of weights, ours and Marian's, replaced in this order
    "body.embedding.tokens": "model.shared", "body.": "model.", ".layer.": ".",
    ".cross_norm": ".encoder_attn_layer_norm", ".cross": ".encoder_attn",
    ".attention_norm": ".self_attn_layer_norm", ".attention": ".self_attn",
    ".feed_forward_norm": ".final_layer_norm", ".feed_forward.expand": ".fc1", ".feed_forward.contract": ".fc2",
    ".query": ".q_proj", ".key": ".k_proj", ".value": ".v_proj", ".output": ".out_proj",
}  # fmt: skip
TIED = ("embed_tokens.weight", "lm_head.weight", "embed_positions.weight", "final_logits_bias")  # or without weights
AVERAGED = 5
METRIC = "bleu"


@dataclass(frozen=True)
class Row:
    """What a system reached, and how."""

    system: str
    parameters: int
    steps: int
    minutes: float
    scores: dict[str, float]
    curve: Curve = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    train: list[Record]
    dev: list[Record]
    test: list[Record]

    @classmethod
    def read(cls, folder: Path, limit: int | None) -> Data:
        task = Translate()
        parts = [task.read(folder / f"{name}.jsonl")[:limit] for name in ("train", "dev", "test")]
        return cls(*parts)

    def scores(self, written: Sequence[str]) -> dict[str, float]:
        return score_translations(written, [record.fields["target"] for record in self.test])


# ---- ours ----------------------------------------------------------------------------------------------------


def ours(name: str, data: Data, args: argparse.Namespace) -> list[Row]:
    """Train for the minutes; then the best weights, and the mean of the last checkpoints if it is better."""
    run = Path(args.out) / name
    model = Fresh(name, vocab_size=args.vocab_size).model(data.train, args.seed)
    task = Translate().fitted(model)
    timed = Timed(task.workload(model, data.train, data.dev), run, args.minutes, METRIC)
    how = settings(model, args)
    learn(model, timed, how)
    *curve, (done, spent, _) = curve_of(run, METRIC)
    result = train(model, timed.work, replace(how, steps=done), run, resume=True, quiet=True)  # takes the best weights
    size = sum(p.numel() for p in model.parameters())
    found = [Row(name, size, done, spent, data.scores(_translations(task, model, data.test, args)), curve)]
    if take_mean(model, timed.work, result, run, AVERAGED):
        written = _translations(task, model, data.test, args)
        found.append(Row(f"{name}, mean of {AVERAGED} checkpoints", size, done, spent, data.scores(written)))
    save_model(model, task, run / "final")
    return found


def _translations(task: Translate, model: Model, records: Sequence[Record], args: argparse.Namespace) -> list[str]:
    how = task.decoding(model, beams=args.beams, length_penalty=args.length_penalty, max_new=args.max_new)
    return [best[0][0] for best in task.write(model.eval(), [record.fields["source"] for record in records], how)]


def settings(model: Model, args: argparse.Namespace) -> Settings:
    """Those of `allmask train`, with a warm-up in steps, as nobody knows how many there will be."""
    rate = args.lr or noam(3999, model.config.width)
    return Settings(
        **FROM_SCRATCH, steps=ENDLESS, lr=rate, warmup=args.warmup, batch_tokens=args.batch_tokens,
        eval_every=args.eval_every, seed=args.seed, keep=AVERAGED, precision=args.precision, dropout=args.dropout,
    )  # fmt: skip


# ---- Marian --------------------------------------------------------------------------------------------------


def marian(data: Data, args: argparse.Namespace) -> list[Row]:
    """transformers' encoder–decoder of the same shape, over the same pieces."""
    from transformers import GenerationConfig, MarianMTModel

    like = Fresh("transformer-small", vocab_size=args.vocab_size).model(data.train, args.seed)
    task, tokenizer = Translate().fitted(like), tokenizer_of(like)
    model = MarianMTModel(marian_config(like, args.dropout))
    begin_alike(model, like)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    examples = task.examples(tokenizer, data.train)
    peer = Peer(model, task, tokenizer, settings(like, args), args)
    dev, sources = data.dev[:JUDGED], [record.fields["source"] for record in data.test]
    steps, spent, curve = peer.learn(examples, dev)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    written = peer.write(sources, args.beams, args.max_new)
    found = [Row("Marian (transformers)", size, steps, spent, data.scores(written), curve)]
    if peer.take_mean(dev, max(bleu for _, _, bleu in curve)):
        written = peer.write(sources, args.beams, args.max_new)
        name = f"Marian (transformers), mean of {len(peer.last)} checkpoints"
        found.append(Row(name, size, steps, spent, data.scores(written)))
    return found


def marian_config(like: Model, dropout: float) -> Any:
    from transformers import MarianConfig

    shape, tokenizer = like.config, tokenizer_of(like)
    stacks = {
        f"{stack}_{name}": value
        for stack, layers in (("encoder", shape.layers), ("decoder", shape.decoder_layers))
        for name, value in (("layers", layers), ("attention_heads", shape.heads), ("ffn_dim", shape.ffn_width))
    }
    tokens = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.end_id, "bos_token_id": tokenizer.begin_id}
    return MarianConfig(
        vocab_size=shape.vocab_size, d_model=shape.width, dropout=dropout, attention_dropout=0.0,
        activation_dropout=0.0, activation_function="relu", scale_embedding=True, max_position_embeddings=512,
        decoder_start_token_id=tokenizer.start_id, forced_eos_token_id=None, **stacks, **tokens,
    )  # fmt: skip


def begin_alike(marian: Any, like: Model) -> None:
    """The weights of an encoder–decoder of ours, so that neither starts better."""
    weights = {}
    for name, value in like.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        weights[name] = value
    missing, unknown = marian.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.endswith(TIED)]
    assert not left and not unknown, (left, unknown)


@dataclass
class Peer:
    """The usual loop around a model of transformers."""

    model: Any
    task: Translate
    tokenizer: Tokenizer
    how: Settings
    args: argparse.Namespace
    last: deque[dict[str, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=AVERAGED))  # weights

    def learn(self, examples: Sequence[Example], dev: Sequence[Record]) -> tuple[int, float, Curve]:
        """Steps, minutes and the curve; the best weights are left in the model."""
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.how.lr, betas=self.how.betas, eps=self.how.adam_eps, weight_decay=0.0,
            fused=True,
        )  # fmt: skip
        seconds, step, best, kept = 0.0, 0, -1.0, {}
        curve: Curve = []
        for numbers in batches_of([len(example) for example in examples], self.how):
            began = time.monotonic()
            loss = self.step([examples[number] for number in numbers], optimizer, step)
            seconds, step = seconds + time.monotonic() - began, step + 1
            if step % self.how.eval_every == 0:
                bleu = self.judge(dev)
                curve.append((step, seconds / 60, bleu))
                print(f"marian: step {step} loss {loss:.3f} bleu {bleu:.2f} {seconds / 60:.1f} min", flush=True)
                self.last.append({name: value.clone() for name, value in self.model.state_dict().items()})
                if bleu > best:
                    best, kept = bleu, self.last[-1]
                if seconds >= 60 * self.args.minutes:
                    break
        self.model.load_state_dict(kept)
        return step, seconds / 60, curve

    def take_mean(self, dev: Sequence[Record], best: float) -> bool:
        """The mean of the last weights that were judged, if it is better than the best of them."""
        mean = {name: torch.stack([one[name] for one in self.last]).mean(0) for name in self.last[0]}
        self.model.load_state_dict(mean)
        bleu = self.judge(dev)
        print(f"marian: the mean of {len(self.last)} checkpoints: bleu {bleu:.2f}", flush=True)
        return bleu > best

    def step(self, examples: Sequence[Example], optimizer: torch.optim.Optimizer, step: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = self.how.lr * SCHEDULES[self.how.schedule](step, ENDLESS, int(self.how.warmup))
        self.model.train()
        torch.manual_seed(step)
        inputs, labels = padded(examples, self.model.config.pad_token_id)
        with autocast(self.how.precision):
            logits = self.model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), label_smoothing=self.how.label_smoothing
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.how.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def judge(self, dev: Sequence[Record]) -> float:
        written = self.write([record.fields["source"] for record in dev], 1, self.args.max_new)
        return score_translations(written, [record.fields["target"] for record in dev])["bleu"]

    @torch.no_grad()
    def write(self, sources: Sequence[str], beams: int, max_new: int) -> list[str]:
        self.model.eval()
        written = []
        prompts = self.task.prompts(self.tokenizer, sources).ids
        for start in range(0, len(prompts), 32):
            ids, seen = rows(prompts[start : start + 32], self.model.config.pad_token_id)
            found = self.model.generate(
                input_ids=ids, attention_mask=seen, num_beams=beams, do_sample=False, max_new_tokens=max_new,
                length_penalty=self.args.length_penalty,
            )  # fmt: skip
            written += [self.tokenizer.decode(row) for row in found.tolist()]
        return written


def batches_of(lengths: Sequence[int], how: Settings) -> Iterator[list[int]]:
    """The batches that our own runs see, for ever."""
    epoch = 0
    while True:
        yield from plan_epoch(lengths, how.batch_tokens, how.seed, epoch)
        epoch += 1


def padded(examples: Sequence[Example], pad: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What encoder and decoder read, and what is to be predicted, -100 where nothing is."""
    parts = [(example.ids[example.order == 0], example.order > 0, example) for example in examples]
    ids, seen = rows([source.tolist() for source, _, _ in parts], pad)
    targets, read = rows([example.ids[there].tolist() for _, there, example in parts], pad)
    labels, _ = rows([example.labels[there].tolist() for _, there, example in parts], -100)
    inputs = {"input_ids": ids, "attention_mask": seen, "decoder_input_ids": targets, "decoder_attention_mask": read}
    return inputs, labels


def rows(lists: Sequence[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, K) numbers, and 1 where they are real."""
    longest = max(map(len, lists))
    ids = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in lists])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in lists])


@contextmanager
def autocast(precision: str) -> Iterator[None]:
    dtype = resolve_precision(precision)
    with torch.autocast("cpu", dtype, dtype != torch.float32):
        yield


# ---- what is told --------------------------------------------------------------------------------------------


def table(found: Sequence[Row]) -> str:
    names = ("system", "parameters", "steps", "minutes", "BLEU", "chrF", "length")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in found:
        scores = (f"{row.scores[name]:.1f}" for name in ("bleu", "chrf", "length"))
        told = (row.system, f"{row.parameters / 1e6:.1f}M", f"{row.steps:,}", f"{row.minutes:.1f}", *scores)
        lines.append("| " + " | ".join(told) + " |")
    return "\n".join(lines)


def plot(found: Sequence[Row], path: Path) -> None:
    """BLEU on dev by step, and by minute of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for row in (row for row in found if row.curve):
        steps, minutes, bleu = zip(*row.curve, strict=True)
        axes[0].plot(steps, bleu, label=row.system)
        axes[1].plot(minutes, bleu, label=row.system)
    axes[0].set(xlabel="step", ylabel=f"BLEU, greedy, {JUDGED} held-out records")
    axes[1].set(xlabel="minutes of training")
    axes[1].legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def load_rows(file: Path) -> list[Row]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Row(**{**json.loads(line), "curve": [tuple(p) for p in json.loads(line)["curve"]]}) for line in lines]


def main(words: Sequence[str] | None = None) -> None:
    args = _arguments(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data, results = Data.read(args.data, args.limit), out / "results.jsonl"
    print(f"{len(data.train):,} to learn from, {len(data.dev):,} held out, {len(data.test):,} to judge by")
    done = Counter(row.system.split(",")[0].split(" ")[0].lower() for row in load_rows(results))
    for name in args.systems.split(","):
        if done[name]:
            continue
        made = marian(data, args) if name == MARIAN else ours(name, data, args)
        with results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in made)
    found = load_rows(results)
    text = table(found) + "\n" + "\n".join(signatures([record.fields["target"] for record in data.test]).values())
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    plot(found, out / "learning.png")
    print(text)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = options(
        __doc__, "train.jsonl, dev.jsonl and test.jsonl", SYSTEMS, minutes=40.0, warmup=1000, eval_every=100
    )
    parser.add_argument("--out", default="quality-runs/translate")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--lr", type=float, help="[default: by the width, as allmask train has it]")
    parser.add_argument("--dropout", type=float, default=0.3, help="the 0.1 of the presets is for more data")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--max-new", type=int, default=100)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
