"""What does each pretraining objective teach? The same shape, text and number of tokens for each.

    python quality/pretraining.py abstracts.txt --classify sst2/ --out quality-runs/pretraining

The text has one sentence per line and a blank line between documents. Every hundredth document is held out. On the same
rows of these, each model is evaluated by the MLM loss (of all targets, a tenth of which are unchanged in the input; and
of those replaced by [MASK]), by causal perplexity and, if it has the head, by the accuracy of next-sentence prediction.
"mean cosine" is that of the hidden states of two tokens; 1.00 means the representation collapsed. Then it is fine-tuned
to classify train.jsonl, with dev.jsonl, and scored on test.jsonl. "none" is a model that was not pretrained. All is
done by allmask's own commands; finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch

from allmask.data import NO_LABEL
from allmask.data.corpus import Corpus
from allmask.data.windows import Windows
from allmask.model import Model, load
from allmask.objectives import Mixture, Vocabulary
from allmask.runs.pretraining import Evaluator
from allmask.tasks.common.writing import tokenizer_of
from allmask.training.log import points, read_metrics

OBJECTIVES = {"mlm": "mlm", "mlm and nsp": "nsp", "causal": "causal", "permutation": "permutation", "unilm": "unilm"}
HELD_OUT = 100  # one document in 100
LENGTH = 128


@dataclass(frozen=True)
class Row:
    objective: str
    minutes: float
    mlm_loss: float
    masked_loss: float
    causal_perplexity: float
    nsp_accuracy: float | None
    mean_cosine: float
    accuracy: float | None


def main() -> None:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = split(args.text, out)
    tokenizer = out / "tokenizer"
    if not tokenizer.exists():
        allmask("tokenizer", "train", train, "--size", args.vocab_size, "--out", tokenizer)
    rows = []
    for name, objective in {**OBJECTIVES, "none": "mlm"}.items():
        run = out / name.replace(" ", "-")
        minutes = pretrain(run, objective, train, held_out, tokenizer, args, start_only=name == "none")
        folder = run / ("start" if name == "none" else "final")
        accuracy = classify(folder, run, args) if args.classify else None
        rows.append(Row(name, minutes, **evaluate(load(folder), out / "mlm" / "corpus-eval"), accuracy=accuracy))
        print(table(rows), flush=True)
        (out / "table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    plot([out / name.replace(" ", "-") for name in OBJECTIVES], out / "learning.png")


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--classify", type=Path, help="a folder with train.jsonl, dev.jsonl and test.jsonl")
    parser.add_argument("--out", default="quality-runs/pretraining")
    parser.add_argument("--preset", default="bert-small")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--permutation-lr", type=float, default=2e-4, help="with 7e-4 the representation collapses")
    parser.add_argument("--epochs", type=float, default=3, help="of fine-tuning")
    return parser.parse_args()


def split(text: Path, out: Path) -> tuple[Path, Path]:
    """Write the training documents and the held-out ones to files."""
    documents = text.read_text(encoding="utf-8").strip().split("\n\n")
    parts = {
        out / "learn.txt": [document for number, document in enumerate(documents) if number % HELD_OUT],
        out / "held-out.txt": documents[::HELD_OUT],
    }
    for path, part in parts.items():
        if not path.exists():
            path.write_text("\n\n".join(part) + "\n", encoding="utf-8")
    train, held_out = parts
    return train, held_out


def allmask(*words: object) -> str:
    """Run one of our commands; stderr is shown, stdout is returned."""
    done = subprocess.run([sys.executable, "-m", "allmask", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def pretrain(
    run: Path, objective: str, train: Path, held_out: Path, tokenizer: Path, args: argparse.Namespace, start_only: bool
) -> float:
    """Pretrain and return the minutes. `start_only`: a single step, as only the initial weights are needed."""
    if run.exists():
        result = allmask("pretrain", "--resume", "--out", run, "--json")
    else:
        lr = args.permutation_lr if objective == "permutation" else args.lr
        result = allmask(
            "pretrain", "--objective", objective, "--data", train, "--eval", held_out, "--tokenizer", tokenizer,
            "--preset", args.preset, "--length", LENGTH, "--steps", 1 if start_only else args.steps,
            "--batch-tokens", args.batch_tokens, "--lr", lr, "--dropout", 0, "--keep", 1, "--out", run, "--json",
        )  # fmt: skip
    return 0.0 if start_only else json.loads(result)["seconds"] / 60


def classify(model: Path, run: Path, args: argparse.Namespace) -> float:
    """Fine-tune a classifier and return its accuracy on test.jsonl."""
    tuned = run / "classify"
    if not (tuned / "final").exists():
        shutil.rmtree(tuned, ignore_errors=True)
        files = ("--data", args.classify / "train.jsonl", "--eval", args.classify / "dev.jsonl")
        allmask("finetune", model, "--task", "classify", *files, "--epochs", args.epochs, "--out", tuned)
    result = json.loads(allmask("evaluate", tuned / "final", args.classify / "test.jsonl", "--json"))
    return result["scores"]["accuracy"]


@torch.no_grad()
def evaluate(model: Model, corpus: Path) -> dict[str, Any]:
    """Losses of a model on the same rows, whatever its objective was."""
    names = ["mlm", "causal", *(["nsp"] if "nsp" in model.heads else [])]
    vocabulary, tokens = Vocabulary.of(tokenizer_of(model)), Corpus.open(corpus)
    metrics = {}
    for name in names:
        mixture = Mixture.parse(name)
        rows = Windows(tokens, LENGTH - mixture.frame)
        evaluator = Evaluator.of({name: 1.0}, mixture.build(vocabulary), rows, seed=1)
        metrics[name] = evaluator(model.eval()).metrics
        if name == "mlm":
            metrics["masked"] = masked_only(evaluator, vocabulary.id_of("mask"))(model).metrics
    return {
        "mlm_loss": metrics["mlm"]["loss_mlm"],
        "masked_loss": metrics["masked"]["loss_mlm"],
        "causal_perplexity": metrics["causal"]["perplexity_causal"],
        "nsp_accuracy": metrics["nsp"]["accuracy_nsp"] if "nsp" in metrics else None,
        "mean_cosine": metrics["mlm"]["mean_cosine"],
    }


def masked_only(evaluator: Evaluator, mask: int) -> Evaluator:
    """The same evaluator with only those targets that [MASK] replaces in the input."""
    batches = [
        replace(batch, labels=batch.labels.masked_fill(batch.ids != mask, NO_LABEL))
        for batch in evaluator.batches["mlm"]
    ]
    return replace(evaluator, batches={"mlm": batches})


def table(rows: list[Row]) -> str:
    losses = ("MLM loss", "MLM loss, [MASK] only", "causal perplexity", "NSP accuracy", "mean cosine")
    cells = []
    for row in rows:
        perplexity = f"{row.causal_perplexity:,.0f}" if row.causal_perplexity >= 100 else f"{row.causal_perplexity:.1f}"
        nsp, accuracy = ("" if share is None else f"{share:.1%}" for share in (row.nsp_accuracy, row.accuracy))
        numbers = (f"{row.minutes:.1f}", f"{row.mlm_loss:.2f}", f"{row.masked_loss:.2f}", perplexity)
        cells.append((row.objective, *numbers, nsp, f"{row.mean_cosine:.2f}", accuracy))
    return common.table(("objective", "minutes", *losses, "classification accuracy"), cells)


def plot(runs: list[Path], path: Path) -> None:
    """Plot each objective's own loss on held-out text by step; these cannot be compared with each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        steps, losses = points(read_metrics(run), "eval_loss")
        axes.plot(steps, losses, marker="o", label=run.name)
    axes.set(xlabel="step", ylabel="loss on held-out text", title="Pretraining: each objective's own loss")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
