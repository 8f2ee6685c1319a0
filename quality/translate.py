"""How good are translators that are trained from scratch? A Transformer, LSTMs, and a Marian of transformers.

    python quality/translate.py DATA --minutes 40 --out quality-runs/translate     # DATA: train, dev and test.jsonl
    python quality/translate.py DATA --systems transformer-small,marian --minutes 5

All systems see the same batches of the same tokens in the same order, with the same label smoothing and dropout, the
default learning rate for their width, and the same minutes of training (evaluations and checkpoints not counted). They
keep the weights with the best BLEU on the first records of dev; the mean of the last checkpoints has its own row if it
is better on dev. Marian has the size and the initial weights of our Transformer. The table is scored on test.jsonl with
5 beams. Finished systems are in results.jsonl and are not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import common
import torch
from common import ENDLESS, Curve, Timed, curve_of, log_to_stderr, timed_parser, train_step, train_timed

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
from allmask.training import Settings, train
from allmask.training.schedule import SCHEDULES, noam

MARIAN = "marian"
SYSTEMS = ("transformer-small", "lstm-small", "lstm-small-plain", MARIAN)
NAMES = {  # of weights: ours and Marian's, replaced in this order
    "body.embedding.tokens": "model.shared", "body.": "model.", ".layer.": ".",
    ".cross_norm": ".encoder_attn_layer_norm", ".cross": ".encoder_attn",
    ".attention_norm": ".self_attn_layer_norm", ".attention": ".self_attn",
    ".feed_forward_norm": ".final_layer_norm", ".feed_forward.expand": ".fc1", ".feed_forward.contract": ".fc2",
    ".query": ".q_proj", ".key": ".k_proj", ".value": ".v_proj", ".output": ".out_proj",
}  # fmt: skip
TIED = ("embed_tokens.weight", "lm_head.weight", "embed_positions.weight", "final_logits_bias")  # or not trained
AVERAGED = 5
METRIC = "bleu"


@dataclass(frozen=True)
class Row:
    """The result of a system."""

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
    """Train; score the best weights, and the mean of the last checkpoints if it is better on dev."""
    run = Path(args.out) / name
    model = Fresh(name, vocab_size=args.vocab_size).model(data.train, args.seed)
    task = Translate().fitted(model)
    timed = Timed(task.workload(model, data.train, data.dev), run, args.minutes, METRIC)
    how = settings(model, args)
    train_timed(model, timed, how)
    *curve, (steps, minutes, _) = curve_of(run, METRIC)
    result = train(model, timed.work, replace(how, steps=steps), run, resume=True, quiet=True)  # loads the best weights
    size = sum(p.numel() for p in model.parameters())
    found = [Row(name, size, steps, minutes, data.scores(_translations(task, model, data.test, args)), curve)]
    if take_mean(model, timed.work, result, run, AVERAGED):
        written = _translations(task, model, data.test, args)
        found.append(Row(f"{name}, mean of {AVERAGED} checkpoints", size, steps, minutes, data.scores(written)))
    save_model(model, task, run / "final")
    return found


def _translations(task: Translate, model: Model, records: Sequence[Record], args: argparse.Namespace) -> list[str]:
    how = task.decoding(model, beams=args.beams, length_penalty=args.length_penalty, max_new=args.max_new)
    return [best[0][0] for best in task.write(model.eval(), [record.fields["source"] for record in records], how)]


def settings(model: Model, args: argparse.Namespace) -> Settings:
    """The defaults of `allmask train`, with the warm-up in steps, as the total is unknown."""
    rate = args.lr or noam(3999, model.config.width)
    return Settings(
        **FROM_SCRATCH, steps=ENDLESS, lr=rate, warmup=args.warmup, batch_tokens=args.batch_tokens,
        eval_every=args.eval_every, seed=args.seed, keep=AVERAGED, precision=args.precision, dropout=args.dropout,
    )  # fmt: skip


# ---- Marian --------------------------------------------------------------------------------------------------


def marian(data: Data, args: argparse.Namespace) -> list[Row]:
    """transformers' encoder–decoder of the same shape, with the same tokenizer."""
    from transformers import GenerationConfig, MarianMTModel

    like = Fresh("transformer-small", vocab_size=args.vocab_size).model(data.train, args.seed)
    task, tokenizer = Translate().fitted(like), tokenizer_of(like)
    model = MarianMTModel(marian_config(like, args.dropout))
    copy_weights(like, model)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    examples = task.examples(tokenizer, data.train)
    peer = Peer(model, task, tokenizer, settings(like, args), args)
    dev, sources = data.dev[:JUDGED], [record.fields["source"] for record in data.test]
    steps, minutes, curve = peer.train(examples, dev)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    written = peer.write(sources, args.beams, args.max_new)
    found = [Row("Marian (transformers)", size, steps, minutes, data.scores(written), curve)]
    if peer.take_mean(dev, max(bleu for _, _, bleu in curve)):
        written = peer.write(sources, args.beams, args.max_new)
        name = f"Marian (transformers), mean of {len(peer.last)} checkpoints"
        found.append(Row(name, size, steps, minutes, data.scores(written)))
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


def copy_weights(ours: Model, marian: Any) -> None:
    """Give Marian the weights of our encoder–decoder, so that both start equal."""
    weights = {}
    for name, value in ours.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        weights[name] = value
    missing, unknown = marian.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.endswith(TIED)]
    assert not left and not unknown, (left, unknown)


@dataclass
class Peer:
    """A standard training loop around a model of transformers."""

    model: Any
    task: Translate
    tokenizer: Tokenizer
    how: Settings
    args: argparse.Namespace
    last: deque[dict[str, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=AVERAGED))  # weights

    def train(self, examples: Sequence[Example], dev: Sequence[Record]) -> tuple[int, float, Curve]:
        """Train until the time is over and keep the best weights; return steps, minutes and the curve."""
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.how.lr, betas=self.how.betas, eps=self.how.adam_eps, weight_decay=0.0,
            fused=True,
        )  # fmt: skip
        seconds, step, best, kept = 0.0, 0, -1.0, {}
        curve: Curve = []
        for numbers in batches_of([len(example) for example in examples], self.how):
            start = time.monotonic()
            loss = self.step([examples[number] for number in numbers], optimizer, step)
            seconds, step = seconds + time.monotonic() - start, step + 1
            if step % self.how.eval_every == 0:
                bleu = self.bleu(dev)
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
        """Load the mean of the last evaluated weights; return whether it is better than the best single ones."""
        mean = {name: torch.stack([one[name] for one in self.last]).mean(0) for name in self.last[0]}
        self.model.load_state_dict(mean)
        bleu = self.bleu(dev)
        print(f"marian: the mean of {len(self.last)} checkpoints: bleu {bleu:.2f}", flush=True)
        return bleu > best

    def step(self, examples: Sequence[Example], optimizer: torch.optim.Optimizer, step: int) -> float:
        torch.manual_seed(step)
        inputs, labels = padded(examples, self.model.config.pad_token_id)

        def loss() -> torch.Tensor:
            logits = self.model(**inputs).logits.float().flatten(0, 1)
            smoothing = self.how.label_smoothing
            return torch.nn.functional.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)

        rate = self.how.lr * SCHEDULES[self.how.schedule](step, ENDLESS, int(self.how.warmup))
        return train_step(self.model, optimizer, rate, self.how.clip, loss, self.how.precision)

    def bleu(self, dev: Sequence[Record]) -> float:
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
    """The batches of our own runs, endlessly."""
    epoch = 0
    while True:
        yield from plan_epoch(lengths, how.batch_tokens, how.seed, epoch)
        epoch += 1


def padded(examples: Sequence[Example], pad: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of encoder and decoder, and labels (-100: none), padded."""
    parts = [(example.ids[example.order == 0], example.order > 0, example) for example in examples]
    ids, seen = rows([source.tolist() for source, _, _ in parts], pad)
    targets, read = rows([example.ids[there].tolist() for _, there, example in parts], pad)
    labels, _ = rows([example.labels[there].tolist() for _, there, example in parts], -100)
    inputs = {"input_ids": ids, "attention_mask": seen, "decoder_input_ids": targets, "decoder_attention_mask": read}
    return inputs, labels


def rows(lists: Sequence[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded tensor (rows, longest), and 1 where it is not padding."""
    longest = max(map(len, lists))
    ids = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in lists])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in lists])


# ---- table and plot ------------------------------------------------------------------------------------------


def table(found: Sequence[Row]) -> str:
    head = ("system", "parameters", "steps", "minutes", "BLEU", "chrF", "length")
    rows = []
    for row in found:
        scores = (f"{row.scores[name]:.1f}" for name in ("bleu", "chrf", "length"))
        rows.append((row.system, f"{row.parameters / 1e6:.1f}M", f"{row.steps:,}", f"{row.minutes:.1f}", *scores))
    return common.table(head, rows)


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
    log_to_stderr()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data, results = Data.read(args.data, args.limit), out / "results.jsonl"
    print(f"pairs: {len(data.train):,} train, {len(data.dev):,} dev, {len(data.test):,} test")
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
    parser = timed_parser(
        __doc__, "train.jsonl, dev.jsonl and test.jsonl", SYSTEMS, minutes=40.0, warmup=1000, eval_every=100
    )
    parser.add_argument("--out", default="quality-runs/translate")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--lr", type=float, help="[default: by width, as in allmask train]")
    parser.add_argument(
        "--dropout", type=float, default=0.3, help="higher than the 0.1 of the presets, which is for more data"
    )
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--max-new", type=int, default=100)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
