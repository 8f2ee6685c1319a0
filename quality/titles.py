"""How good are the titles? The prefix mask, the causal (naive) mask, two BERTs as encoder–decoder, the first sentence.

    python quality/titles.py DATA --out quality-runs/acl        # DATA holds train.jsonl, test.jsonl and maybe dev.jsonl
    python quality/titles.py DATA --systems prefix,naive --steps 360

All systems see the same batches of the same examples in the same order; the table is scored on test.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import common
import torch
from common import train_step

import allmask
from allmask.checkpoints import resolve
from allmask.data import Record, plan_epoch
from allmask.runs.folder import save_model
from allmask.tasks.common.quoting import quotations
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import lead_sentence, score_texts
from allmask.tasks.seq2seq import Seq2SeqWorkload, Title
from allmask.training import Settings, train
from allmask.training.log import read_metrics
from allmask.training.schedule import SCHEDULES

MAX_EPOCHS = 30
QUOTED = 8  # quotations drawn from each text with a title
TEXTS = ("source", "text", "context")  # names of the field with the text


@dataclass(frozen=True)
class Row:
    system: str
    steps: int
    minutes: float
    scores: dict[str, float]


def ours(name: str, task: Title, data: Data, args: argparse.Namespace) -> list[Row]:
    """Fine-tune with a mask; generate greedily and with four beams."""
    model = task.prepare(allmask.load(args.model), data.train, args.seed)
    work = task.workload(model, data.train, data.dev)
    run = Path(args.out) / name
    start = time.monotonic()
    if args.quote_steps:
        train(model, Seq2SeqWorkload(task.examples(tokenizer_of(model), data.quotes)), quoting(args), run / "quoting")
    result = train(model, work, settings(args), run / "titles")
    minutes = (time.monotonic() - start) / 60
    save_model(model, task, run / "final")
    rows = []
    for label, beams in ((f"{name}, greedy", 1), (f"{name}, 4 beams", 4)):
        decoding = task.decoding(model, beams=beams)
        written = [best[0][0] for best in task.write(model, data.sources, decoding)]
        steps = args.quote_steps + result.steps
        rows.append(Row(label, steps, minutes, score_texts(written, data.references)))
    return rows


def two_berts(task: Title, data: Data, args: argparse.Namespace) -> list[Row]:
    """transformers: a BERT encoder and a BERT decoder, with new cross-attention."""
    from transformers import BertTokenizerFast, EncoderDecoderModel, logging

    logging.set_verbosity_error()
    folder = resolve(args.model)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder).float()  # whatever it was saved as
    model.config.decoder_start_token_id, model.config.pad_token_id = tokenizer.cls_token_id, tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.sep_token_id
    start = time.monotonic()
    steps = 0
    if args.quote_steps:
        steps += _train(model, tokenizer, task, data.quotes, replace(quoting(args), lr=args.peer_lr or args.quote_lr))
    evaluate = partial(_evaluate, model, tokenizer, task, data.dev[:100], Path(args.out) / "two-berts")
    how = replace(settings(args), lr=args.peer_lr or args.lr)
    steps += _train(model, tokenizer, task, data.train, how, evaluate if data.dev else None)
    minutes = (time.monotonic() - start) / 60  # evaluations included, as for ours
    written = _write(model.eval(), tokenizer, task, data.sources)
    return [Row("two BERTs (transformers), greedy", steps, minutes, score_texts(written, data.references))]


def _train(model, tokenizer, task: Title, records: list[Record], how: Settings, evaluate=None) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay, fused=True)
    plan = our_plan(tokenizer, task, records, how)
    steps = how.steps or round(how.epochs * len(plan) / MAX_EPOCHS)
    for step, numbers in enumerate(plan[:steps]):
        torch.manual_seed(step)
        rate = how.lr * SCHEDULES[how.schedule](step, steps, how.warmup_steps(steps))
        loss_of = partial(_loss, model, tokenizer, task, [records[number] for number in numbers], how.label_smoothing)
        loss = train_step(model, optimizer, rate, how.clip, loss_of)
        if step % 20 == 0:
            print(f"two BERTs: step {step + 1}/{steps} loss {loss:.3f}", flush=True)
        if evaluate and ((step + 1) % (how.eval_every or steps) == 0 or step + 1 == steps):
            evaluate(step + 1)
    return steps


def _loss(model, tokenizer, task: Title, records: list[Record], smoothing: float) -> torch.Tensor:
    source = _encode(tokenizer, [record.fields["source"] for record in records], task.max_source + 2)
    target = _encode(tokenizer, [record.fields["target"] for record in records], task.max_target + 2)
    ids, mask = target["input_ids"], target["attention_mask"]
    logits = model(**source, decoder_input_ids=ids[:, :-1], decoder_attention_mask=mask[:, :-1]).logits
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def _evaluate(model, tokenizer, task: Title, records: list[Record], run: Path, step: int) -> None:
    """Write a line to metrics.jsonl, as our own runs do, for the plot."""
    written = _write(model.eval(), tokenizer, task, [record.fields["source"] for record in records])
    scores = score_texts(written, [record.fields["target"] for record in records])
    print(f"two BERTs: step {step}: ROUGE-L {scores['rouge_l']:.2f} on dev, {written[:2]}", flush=True)
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "eval_rouge_l": scores["rouge_l"]}) + "\n")


def _encode(tokenizer, texts: list[str], limit: int):
    how = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    return tokenizer(texts, **how, return_token_type_ids=False)


@torch.no_grad()
def _write(model, tokenizer, task: Title, sources: list[str]) -> list[str]:
    written = []
    for start in range(0, len(sources), 32):
        batch = _encode(tokenizer, sources[start : start + 32], task.max_source + 2)
        ids = model.generate(
            **batch, max_new_tokens=task.max_target + 1, do_sample=False, num_beams=1,
            decoder_start_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        written += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return written


@dataclass(frozen=True)
class Data:
    quotes: list[Record]  # sentences that say much about their text
    train: list[Record]
    dev: list[Record]
    test: list[Record]

    @property
    def sources(self) -> list[str]:
        return [record.fields["source"] for record in self.test]

    @property
    def references(self) -> list[str]:
        return [record.fields["target"] for record in self.test]


def our_plan(tokenizer, task: Title, records: list[Record], how: Settings) -> list[list[int]]:
    """The batches of our own runs, as example numbers; lengths are those of our rows of source and target."""
    texts = [[record.fields[name] for record in records] for name in ("source", "target")]
    sources, targets = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in texts)
    lengths = [
        min(len(source), task.max_source) + min(len(target), task.max_target) + 3
        for source, target in zip(sources, targets, strict=True)
    ]
    return [batch for epoch in range(MAX_EPOCHS) for batch in plan_epoch(lengths, how.batch_tokens, how.seed, epoch)]


def quoting(args: argparse.Namespace) -> Settings:
    """Settings of the quoting stage before the titles (allmask/tasks/common/quoting.py)."""
    return Settings(
        steps=args.quote_steps, batch_tokens=args.batch_tokens, lr=args.quote_lr, layer_decay=args.layer_decay,
        warmup=0.05, dropout=0.0, seed=args.seed + 1, eval_every=args.quote_steps, save_every=args.quote_steps, keep=1,
    )  # fmt: skip


def settings(args: argparse.Namespace) -> Settings:
    return Settings(
        epochs=args.epochs, steps=args.steps, batch_tokens=args.batch_tokens, lr=args.lr, layer_decay=args.layer_decay,
        seed=args.seed, eval_every=args.eval_every, dropout=args.dropout, label_smoothing=args.label_smoothing, keep=1,
    )  # fmt: skip


def read(folder: Path, task: Title, limit: int, more: list[Record]) -> Data:
    """Read the folder; without dev.jsonl, a twentieth of train.jsonl is held out."""
    train, dev = task.read(folder / "train.jsonl"), folder / "dev.jsonl"
    held = task.read(dev)[:200] if dev.exists() else train[: len(train) // 20]
    train = train if dev.exists() else train[len(train) // 20 :]
    quotes = quotations([*train * QUOTED, *more], task.max_source, random.Random(1))
    return Data(quotes, train, held, task.read(folder / "test.jsonl")[:limit])


def read_texts(file: Path) -> list[Record]:
    """The distinct texts of a jsonl file, in any of the fields TEXTS."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = dict.fromkeys(next(line[name] for name in TEXTS if name in line) for line in lines)
    return [Record({"source": text, "target": ""}, f"{file}:{number}") for number, text in enumerate(texts, 1)]


def table(rows: list[Row]) -> str:
    scores = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L", "bleu": "BLEU", "length": "length"}
    head = ("system", "steps", "minutes", *scores.values())
    cells = [
        (row.system, str(row.steps or ""), f"{row.minutes:.1f}", *(f"{row.scores[name]:.1f}" for name in scores))
        for row in rows
    ]
    return common.table(head, cells)


def plot(runs: list[Path], path: Path) -> None:
    """Plot ROUGE-L on the held-out records by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        lines = read_metrics(run / "titles" if (run / "titles").is_dir() else run)
        points = [(line["step"], line["eval_rouge_l"]) for line in lines if "eval_rouge_l" in line]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=run.name)
    axes.set(xlabel="step", ylabel="ROUGE-L, held out", title="Titles: ROUGE-L by mask")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path, help="a folder with train.jsonl, test.jsonl and maybe dev.jsonl")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--out", default="quality-runs/titles")
    parser.add_argument("--systems", default="prefix,naive,two-berts")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--quote-steps",
        type=int,
        default=0,
        help="steps of a first stage, in which all systems learn to quote key sentences",
    )
    parser.add_argument(
        "--quote-from", type=Path, nargs="*", default=[], help="jsonl files of more texts to quote from, without titles"
    )
    parser.add_argument("--batch-tokens", type=int, default=7200, help="about 32 abstracts")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--peer-lr", type=float, help="of the two BERTs [default: --lr]")
    parser.add_argument("--quote-lr", type=float, default=8e-4)
    parser.add_argument(
        "--layer-decay", type=float, help="of our own runs: learning rate of a layer, relative to the layer above"
    )
    parser.add_argument("--dropout", type=float, help="of our own runs [default: the model's]")
    parser.add_argument("--label-smoothing", type=float, default=0.0, help="of all systems")
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--max-source", type=int, default=254)
    parser.add_argument("--limit", type=int, default=1000, help="test records")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    common.log_to_stderr()
    task = Title(max_source=args.max_source)
    data = read(args.data, task, args.limit, [record for file in args.quote_from for record in read_texts(file)])
    lead = score_texts([lead_sentence(source) for source in data.sources], data.references)
    rows = [Row("lead sentence", 0, 0.0, lead)]
    for name in args.systems.split(","):
        made = Title(max_source=args.max_source, mask=name) if name != "two-berts" else task
        rows += two_berts(made, data, args) if name == "two-berts" else ours(name, made, data, args)
        print(table(rows), flush=True)
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    plot([Path(args.out) / name for name in args.systems.split(",")], Path(args.out) / "learning.png")


if __name__ == "__main__":
    main()
