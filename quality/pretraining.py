"""What does each objective teach? One shape, one text, equally many tokens; judged on text and reviews unseen.

    python quality/pretraining.py abstracts.txt --classify sst2/ --out quality-runs/pretraining

The text has a sentence a line and a blank line between documents. Every hundredth document is held out. On the same
rows of it each model is asked for masked tokens (all that mlm asks for, a tenth of which stand there to be copied; and
those that [MASK] hides), for the next token and, where it learnt to tell, whether a part follows another; "alike" is
the mean cosine of two tokens' hidden states, 1.00 where the body tells no token from another. Then it is fine-tuned to
classify, from train.jsonl with dev.jsonl, and judged on test.jsonl. A model that was never pretrained stands beside
them. All is done by allmask's own commands; called again, what is there is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
HELD_OUT = 100  # one document in so many
LENGTH = 128


@dataclass(frozen=True)
class Row:
    objective: str
    minutes: float
    mlm_loss: float
    hidden_loss: float
    causal_perplexity: float
    nsp_accuracy: float | None
    mean_cosine: float
    accuracy: float | None


def main() -> None:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    learn, held = split(args.text, out)
    tokenizer = out / "tokenizer"
    if not tokenizer.exists():
        allmask("tokenizer", "train", learn, "--size", args.vocab_size, "--out", tokenizer)
    rows = []
    for name, objective in {**OBJECTIVES, "none": "mlm"}.items():
        run = out / name.replace(" ", "-")
        told = pretrained(run, objective, learn, held, tokenizer, args, begun_only=name == "none")
        folder = run / ("start" if name == "none" else "final")
        accuracy = classified(folder, run, args) if args.classify else None
        rows.append(Row(name, told, **judged(load(folder), out / "mlm" / "corpus-eval"), accuracy=accuracy))
        print(table(rows), flush=True)
        (out / "table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    plot([out / name.replace(" ", "-") for name in OBJECTIVES], out / "learning.png")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    """The documents to learn from and those held out, as files."""
    documents = text.read_text(encoding="utf-8").strip().split("\n\n")
    parts = {
        out / "learn.txt": [document for number, document in enumerate(documents) if number % HELD_OUT],
        out / "held-out.txt": documents[::HELD_OUT],
    }
    for path, part in parts.items():
        if not path.exists():
            path.write_text("\n\n".join(part) + "\n", encoding="utf-8")
    learn, held = parts
    return learn, held


def allmask(*words: object) -> str:
    """One of our commands: what it says is shown, what it answers is returned."""
    done = subprocess.run([sys.executable, "-m", "allmask", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def pretrained(
    run: Path, objective: str, learn: Path, held: Path, tokenizer: Path, args: argparse.Namespace, begun_only: bool
) -> float:
    """Minutes of a run of pretraining. `begun_only`: of its model only the beginning is wanted, so one step will do."""
    if run.exists():
        told = allmask("pretrain", "--resume", "--out", run, "--json")
    else:
        lr = args.permutation_lr if objective == "permutation" else args.lr
        told = allmask(
            "pretrain", "--objective", objective, "--data", learn, "--eval", held, "--tokenizer", tokenizer,
            "--preset", args.preset, "--length", LENGTH, "--steps", 1 if begun_only else args.steps,
            "--batch-tokens", args.batch_tokens, "--lr", lr, "--dropout", 0, "--keep", 1, "--out", run, "--json",
        )  # fmt: skip
    return 0.0 if begun_only else json.loads(told)["seconds"] / 60


def classified(model: Path, run: Path, args: argparse.Namespace) -> float:
    """The share of test.jsonl that a fine-tuned model labels rightly."""
    tuned = run / "classify"
    if not (tuned / "final").exists():
        shutil.rmtree(tuned, ignore_errors=True)
        files = ("--data", args.classify / "train.jsonl", "--eval", args.classify / "dev.jsonl")
        allmask("finetune", model, "--task", "classify", *files, "--epochs", args.epochs, "--out", tuned)
    told = json.loads(allmask("evaluate", tuned / "final", args.classify / "test.jsonl", "--json"))
    return told["scores"]["accuracy"]


@torch.no_grad()
def judged(model: Model, corpus: Path) -> dict[str, float | None]:
    """The losses of a model on the same rows, whatever it learnt."""
    names = ["mlm", "causal", *(["nsp"] if "nsp" in model.heads else [])]
    vocabulary, tokens = Vocabulary.of(tokenizer_of(model)), Corpus.open(corpus)
    told = {}
    for name in names:
        mixture = Mixture.parse(name)
        rows = Windows(tokens, LENGTH - mixture.frame)
        judge = Evaluator.of({name: 1.0}, mixture.build(vocabulary), rows, seed=1)
        told[name] = judge(model.eval()).metrics
        if name == "mlm":
            told["hidden"] = hidden_only(judge, vocabulary.id_of("mask"))(model).metrics
    return {
        "mlm_loss": told["mlm"]["loss_mlm"],
        "hidden_loss": told["hidden"]["loss_mlm"],
        "causal_perplexity": told["causal"]["perplexity_causal"],
        "nsp_accuracy": told["nsp"]["accuracy_nsp"] if "nsp" in told else None,
        "mean_cosine": told["mlm"]["mean_cosine"],
    }


def hidden_only(judge: Evaluator, mask: int) -> Evaluator:
    """Of the tokens that mlm asks for, those that are not to be seen."""
    batches = [
        replace(batch, labels=batch.labels.masked_fill(batch.ids != mask, NO_LABEL)) for batch in judge.batches["mlm"]
    ]
    return replace(judge, batches={"mlm": batches})


def table(rows: list[Row]) -> str:
    names = (
        "learnt",
        "minutes",
        "mlm's loss",
        "of hidden tokens",
        "perplexity, left to right",
        "nsp right",
        "mean cosine",
        "labels right",
    )
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        perplexity = f"{row.causal_perplexity:,.0f}" if row.causal_perplexity >= 100 else f"{row.causal_perplexity:.1f}"
        nsp = "" if row.nsp_accuracy is None else f"{row.nsp_accuracy:.1%}"
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
        losses = f"{row.mlm_loss:.2f} | {row.hidden_loss:.2f} | {perplexity}"
        lines.append(f"| {row.objective} | {row.minutes:.1f} | {losses} | {nsp} | {row.mean_cosine:.2f} | {accuracy} |")
    return "\n".join(lines)


def plot(runs: list[Path], path: Path) -> None:
    """Each objective's own loss on held-out text, by step: not to be compared, as the tasks are not equally hard."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        steps, losses = points(read_metrics(run), "eval_loss")
        axes.plot(steps, losses, marker="o", label=run.name)
    axes.set(xlabel="step", ylabel="loss, held out", title="Pretraining: each objective's own loss")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
