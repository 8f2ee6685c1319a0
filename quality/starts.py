"""What does pretraining save? Titles by a BERT, by the same body from scratch, an encoder–decoder, an LSTM (C10).

    python quality/starts.py acl-titles --minutes 30 --out quality-runs/starts    # DATA: train.jsonl and dev.jsonl
    python quality/starts.py acl-titles --systems pretrained,scratch --minutes 5

| system | |
|---|---|
| pretrained | a BERT (--model) with the prefix mask |
| scratch | the same body with new weights |
| pair | an encoder–decoder from scratch, half of the layers in each stack, the same width |
| lstm | an LSTM encoder–decoder with attention, from scratch |

All have the same tokenizer, the same pairs in batches of the same number of tokens, and the same minutes of training
(evaluations and checkpoints not counted), at the default learning rate of `allmask finetune` or `allmask train` for
such a model. Every --eval-every steps titles are generated for 100 held-out texts, greedily. The baseline is the
ROUGE-L of the text's first sentence. The same command resumes what was interrupted, also with more --minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from common import ENDLESS, Curve, Timed, curve_of, log_to_stderr, timed_parser, train_timed

import allmask
from allmask.data import Record
from allmask.model import Model
from allmask.options import FROM_SCRATCH
from allmask.runs.fresh import Fresh
from allmask.tasks.metrics.text import lead_sentence, rouge
from allmask.tasks.seq2seq import Title
from allmask.text.script import is_chinese
from allmask.training import Settings
from allmask.training.schedule import noam

SYSTEMS = {
    "pretrained": "UniLM from a BERT",
    "scratch": "UniLM from scratch",
    "pair": "encoder–decoder from scratch",
    "lstm": "LSTM with attention from scratch",
}
COLOURS = dict(zip(SYSTEMS, ("#5BA886", "#5B84D7", "#E39A57", "#B5609E"), strict=True))
METRIC = "rouge_l"
PRETRAINED_RATE = 5e-4  # of `allmask finetune --task title`


@dataclass(frozen=True)
class Start:
    name: str
    model: Model
    rate: float

    @classmethod
    def of(cls, name: str, bert: Model, seed: int) -> Start:
        """`bert` is the pretrained model, prepared for titles; the others have its tokenizer, size and new weights."""
        if name == "pretrained":
            return cls(name, bert, PRETRAINED_RATE)
        shape = bert.config
        if name != "scratch":
            assert bert.tokenizer is not None
            stacks = {"layers": max(1, shape.layers // 2), "heads": shape.heads, "ffn_width": shape.ffn_width}
            preset, given = ("lstm-small", {}) if name == "lstm" else ("transformer-small", stacks)
            shape = Fresh(preset, width=shape.width, **given).shape(bert.tokenizer)
        model = Model.fresh(shape, ["lm"], torch.Generator().manual_seed(seed))
        model.tokenizer = bert.tokenizer
        if name == "scratch":  # both know the token frequencies
            model.head("lm_head").load_state_dict({"bias": bert.head("lm_head").state_dict()["bias"]}, strict=False)
        return cls(name, model, noam(3999, shape.width))


@dataclass(frozen=True)
class Outcome:
    """The curve of a system."""

    name: str
    parameters: int
    curve: Curve
    samples: list[str]

    def reached(self, level: float) -> tuple[int, float] | None:
        """Steps and minutes of the first evaluation with at least this score."""
        return next(((step, minutes) for step, minutes, score in self.curve if score >= level), None)


def run(start: Start, task: Title, train: Sequence[Record], dev: Sequence[Record], args: argparse.Namespace) -> Outcome:
    folder = Path(args.out) / start.name
    task = task.fitted(start.model)
    work = task.workload(start.model, train, dev)
    settings = Settings(**{
        **FROM_SCRATCH, "steps": ENDLESS, "lr": start.rate, "warmup": args.warmup, "batch_tokens": args.batch_tokens,
        "eval_every": args.eval_every, "seed": args.seed, "keep": 1, "precision": args.precision,
    })  # fmt: skip
    spent = curve_of(folder, METRIC)[-1][1] if (folder / "metrics.jsonl").exists() else 0.0
    if spent < args.minutes:
        train_timed(start.model, Timed(work, folder, args.minutes, METRIC), settings)
        (folder / "titles.json").write_text(json.dumps(_titles(task, start.model, dev), ensure_ascii=False))
    size = sum(parameter.numel() for parameter in start.model.parameters())
    return Outcome(start.name, size, curve_of(folder, METRIC)[:-1], json.loads((folder / "titles.json").read_text()))


def _titles(task: Title, model: Model, dev: Sequence[Record]) -> list[str]:
    return [best[0][0] for best in task.write(model.eval(), [record.fields["source"] for record in dev[:2]])]


# ---- table and plot ------------------------------------------------------------------------------------------


def table(found: Sequence[Outcome], level: float) -> str:
    head = ("system", "parameters", f"steps to {level:.1f}", "minutes", "total steps", "final ROUGE-L", "example title")
    rows = []
    for outcome in found:
        steps, _, score = outcome.curve[-1]
        step, minutes = outcome.reached(level) or (None, None)
        when = (f"{step:,}", f"{minutes:.1f}") if minutes is not None else ("not reached", "–")
        size = f"{outcome.parameters / 1e6:.1f}M"
        title = outcome.samples[0].replace("|", "/")
        rows.append((SYSTEMS[outcome.name], size, *when, f"{steps:,}", f"{score:.1f}", title))
    return common.table(head, rows)


def plot(found: Sequence[Outcome], level: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), dpi=120, layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    for outcome in found:
        steps, minutes, scores = zip(*outcome.curve, strict=True)
        for panel, values in zip(axes, (steps, minutes), strict=True):
            panel.plot(values, scores, marker=".", color=COLOURS[outcome.name], label=SYSTEMS[outcome.name])
    for panel, name in zip(axes, ("step", "minutes of training"), strict=True):
        panel.axhline(level, color="#7A7A7A", linestyle=":", label="first sentence of the text")
        panel.set_xlabel(name)
        panel.grid(alpha=0.2)
    axes[0].set_ylabel("ROUGE-L, 100 held-out texts")
    axes[0].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def main(words: Sequence[str] | None = None) -> None:
    args = _arguments(words)
    log_to_stderr()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    task = Title(args.max_source, args.max_target)
    train, dev = (task.read(args.data / f"{part}.jsonl")[: args.limit] for part in ("train", "dev"))
    dev = dev[:100]
    references = [record.fields["target"] for record in dev]
    lead = [lead_sentence(record.fields["source"]) for record in dev]
    level = rouge(lead, references, is_chinese(references))[METRIC]
    found = []
    for name in args.systems.split(","):
        bert = task.prepare(allmask.load(args.model), train, args.seed)
        found.append(run(Start.of(name, bert, args.seed), task, train, dev, args))
        print(table(found, level), flush=True)
    (out / "table.md").write_text(table(found, level) + "\n", encoding="utf-8")
    plot(found, level, out / "starts.png")


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = timed_parser(__doc__, "train.jsonl and dev.jsonl", list(SYSTEMS), minutes=30.0, warmup=200, eval_every=50)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--out", default="quality-runs/starts")
    parser.add_argument("--max-source", type=int, default=128)
    parser.add_argument("--max-target", type=int, default=64)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
