"""`allmask finetune`: a pretrained BERT becomes a writer by its mask alone, or learns to answer by a small head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from allmask.cli import emit, expect_same, listen, note, plan_values
from allmask.errors import UsageError

EXAMPLES = """
    allmask finetune minilm --task title --data train.jsonl --eval dev.jsonl --out runs/title
    allmask finetune minilm --task classify --data reviews.csv --eval dev.csv --out runs/reviews
    allmask finetune bge-small-zh --task choose --data questions.jsonl --eval dev.jsonl --out runs/c3
    allmask finetune bert-base-chinese --data 标题.csv --epochs 2 --batch-tokens 8192 --out runs/zh
    allmask finetune t5-folder --task translate --data de-en.jsonl --eval dev.jsonl --lr 3e-4 --out runs/de-en
    allmask finetune minilm --config run.yaml --lr 2e-4 --out runs/again
    allmask finetune minilm --task classify --data few.csv --eval dev.csv --seeds 5 --out runs/five
    allmask finetune minilm --task classify --data few.csv --eval dev.csv --search --out runs/search
    allmask finetune --resume --out runs/title
"""

# Options that `allmask pretrain` and `allmask train` have, too
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder: a new one.")]
ConfigFile = Annotated[
    Path | None, typer.Option(help="A YAML file of these options, such as lr: 0.0003; flags go before it.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out where it stopped.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data. [default: 3]")]
Steps = Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")]
Accumulate = Annotated[int | None, typer.Option(help="Batches in a step. [default: 1]")]
Warmup = Annotated[float | None, typer.Option(help="A share of the steps, or above 1 a number of them. [default: 0.1]")]
WeightDecay = Annotated[float | None, typer.Option(help="AdamW's. [default: 0.01]")]
Clip = Annotated[float | None, typer.Option(help="The largest norm of a gradient. [default: 1]")]
LabelSmoothing = Annotated[float | None, typer.Option(help="[default: 0]")]
TrainingPrecision = Annotated[
    Literal["auto", "fp32", "bf16"] | None, typer.Option(help="auto is bf16 where the CPU computes in it.")
]
Ema = Annotated[
    float | None, typer.Option(help="Judge and keep a running mean of the weights, with this decay, such as 0.999.")
]
Recompute = Annotated[
    bool | None, typer.Option("--recompute", help="Compute layers again on the way back: less memory, a third slower.")
]
TensorBoard = Annotated[
    bool | None, typer.Option("--tensorboard", help="Curves in the run's folder, too; needs the package.")
]
EvalEvery = Annotated[int | None, typer.Option(help="Steps between evaluations. [default: ten in all]")]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints. [default: as --eval-every]")]
Keep = Annotated[int | None, typer.Option(help="Checkpoints kept, and the best besides. [default: 2]")]
Patience = Annotated[
    int | None, typer.Option(help="Stop after this many evaluations without progress. [default: never]")
]
OnBadRecord = Annotated[
    Literal["stop", "skip"] | None, typer.Option(help="What to do with one that cannot be used. [default: stop]")
]
MaxSource = Annotated[int | None, typer.Option(help="title, translate: tokens of a source. [default: 254]")]
MaxTarget = Annotated[
    int | None, typer.Option(help="title, translate: tokens of a target. [default: 64; translate: 254]")
]
Best = Annotated[
    Literal["bleu", "loss"] | None,
    typer.Option(help="translate: what chooses the best weights, of held-out records. [default: bleu]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def command(
    model: Annotated[
        str | None, typer.Argument(help="A model folder or file, the bundled name minilm, or org/name.")
    ] = None,
    out: Out = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="jsonl, csv or parquet; title, translate: source, target; classify: text, label, perhaps text_b; "
            "choose: context, choices, label; tag: words and tags, or CoNLL columns; answer: SQuAD's json."
        ),
    ] = None,
    eval_file: Annotated[
        Path | None, typer.Option("--eval", help="Held-out records: the best weights on them are kept.")
    ] = None,
    task: Annotated[
        Literal["title", "translate", "classify", "tag", "answer", "choose"] | None,
        typer.Option(help="What to learn. [default: title]"),
    ] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens in a batch. [default: 4096; classify: 32 texts' worth; choose: 16 questions']"),
    ] = None,
    accumulate: Accumulate = None,
    lr: Annotated[
        float | None,
        typer.Option(help="The highest learning rate. [default: 5e-4; classify, choose: by the model's width]"),
    ] = None,
    schedule: Annotated[
        Literal["linear", "cosine", "constant", "inverse-root"] | None,
        typer.Option(help="The learning rate after the warm-up. [default: linear]"),
    ] = None,
    warmup: Warmup = None,
    weight_decay: WeightDecay = None,
    clip: Clip = None,
    label_smoothing: LabelSmoothing = None,
    lm_weight: Annotated[
        float | None, typer.Option(help="λ of a language model's loss beside the task's, such as 0.5. [default: 0]")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="0 learns faster where no record is seen twice. [default: the model's own]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of data order, dropout, a new head. [default: 1]")] = None,
    precision: TrainingPrecision = None,
    ema: Ema = None,
    recompute: Recompute = None,
    tensorboard: TensorBoard = None,
    layer_decay: Annotated[
        float | None, typer.Option(help="Each layer learns at this share of the rate above it, such as 0.9.")
    ] = None,
    freeze: Annotated[
        bool | None, typer.Option("--freeze", help="Only the head learns, the body gives it features: fast.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Repeat the run with so many seeds: mean ± deviation, the best is kept.")
    ] = None,
    search: Annotated[
        bool | None,
        typer.Option("--search", help="Try 12 settings around these (batch, lr, epochs); bad runs are stopped early."),
    ] = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    keep: Keep = None,
    patience: Patience = None,
    max_source: MaxSource = None,
    max_target: MaxTarget = None,
    best: Best = None,
    max_length: Annotated[
        int | None, typer.Option(help="classify, choose: tokens of a text or pair. [default: 512]")
    ] = None,
    truncate: Annotated[
        Literal["head", "tail", "head+tail", "windows"] | None,
        typer.Option(
            help="What is kept of longer texts; windows: all of it (not for titles). [default: head; choose: head+tail]"
        ),
    ] = None,
    pool_windows: Annotated[
        Literal["mean", "max"] | None,
        typer.Option(help="How what is said of windows becomes what is said of a text. [default: mean]"),
    ] = None,
    crf: Annotated[
        bool | None, typer.Option("--crf/--no-crf", help="tag: score the tags of a text together. [default: no]")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="answer: tokens that windows of a long context share. [default: 128]")
    ] = None,
    max_answer: Annotated[
        int | None, typer.Option(help="answer: tokens of an answer. [default: as the data has them, 30 at least]")
    ] = None,
    mask: Annotated[
        Literal["prefix", "naive"] | None,
        typer.Option(help="title: the source reads both ways (prefix), or left to right (naive), to compare with."),
    ] = None,
    kind: Annotated[
        Literal["single", "multi", "number"] | None,
        typer.Option(help="classify: one label a text, a list of them, a number. [default: as the labels look]"),
    ] = None,
    class_weights: Annotated[
        Literal["none", "balanced"] | None,
        typer.Option(help="classify: balanced makes rare labels count as much as frequent ones. [default: none]"),
    ] = None,
    prune: Annotated[
        bool | None,
        typer.Option("--prune/--no-prune", help="Keep only tokens that the data uses. [default: title only]"),
    ] = None,
    on_bad_record: OnBadRecord = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no samples; warnings and errors only.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune MODEL to write a target for each source, or to tell a label, several or a number of a text or a pair,
    or which of several choices is right.

    The run's folder gets config.yaml, metrics.jsonl, loss.png, checkpoints and final, a model folder.
    Ctrl-C saves; the same command with --resume goes on, bit for bit as if it had not been stopped.
    """
    flags = dict(locals())
    listen(quiet)
    given = plan_values(flags, {"eval_file": "eval"})
    if out is None:
        raise UsageError("no place for the run was named", "name a new folder with --out")
    result = go_on(out, given, quiet) if resume else start(out, given, quiet)
    emit(as_json, result, in_words(result))


def start(out: Path, given: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from allmask.tasks.finetuning import finetune
    from allmask.tasks.plan import Plan

    return finetune(Plan.from_dict(given), out, quiet)


def go_on(out: Path, given: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from allmask.tasks.finetuning import resume, saved_plan
    from allmask.tasks.folders import is_finished

    expect_same(out, saved_plan(out).differences(given))
    if is_finished(out):
        note(f"{out}: this run is finished")
    return resume(out, quiet)


def in_words(result: dict[str, Any]) -> str:
    if "seeds" in result or "tried" in result:
        told = _seeds_in_words(result) if "seeds" in result else _search_in_words(result)
        return "\n".join([*told, _USE[result["task"]].format(result["final"])])
    early = ", stopped early" if result["stopped_early"] else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    steps = result.get("averaged", ())
    kept = f"mean of steps {', '.join(map(str, steps))}" if steps else f"step {result['best_step']}"
    return "\n".join([
        f"{result['final']}: {result['steps']} steps in {result['seconds']} s{early}",
        f"{kept}: {metrics}",
        _USE[result["task"]].format(result["final"]),
    ])  # fmt: skip


def _seeds_in_words(result: dict[str, Any]) -> list[str]:
    names = list(result["metrics"])
    lines = ["| seed | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in result["seeds"]:
        lines.append(f"| {row['seed']} | " + " | ".join(f"{row['metrics'][name]:.4g}" for name in names) + " |")
    spread = (f"{result['metrics'][name]:.4g} ± {result['deviation'][name]:.2g}" for name in names)
    lines.append("| mean ± deviation | " + " | ".join(spread) + " |")
    return [*lines, "", f"{result['final']}: seed {result['best_seed']}, the best of {len(result['seeds'])}"]


def _search_in_words(result: dict[str, Any]) -> list[str]:
    lines = ["| run | batch tokens | lr | epochs | score | |", "|---|---|---|---|---|---|"]
    for row in result["tried"]:
        score = "–" if row["score"] is None else f"{row['score']:.4g}"
        values = (row["run"], f"{row['batch_tokens']:,}", f"{row['lr']:.3g}", f"{row['epochs']:g}", score, row["how"])
        lines.append("| " + " | ".join(values) + " |")
    return [*lines, "", f"{result['final']}: {result['best_run']}, the best of {len(result['tried'])}"]


_USE = {
    "title": 'write with it: allmask generate {} --text "…"',
    "translate": 'translate with it: allmask generate {} --beams 5 --text "…"',
    "classify": "classify with it: allmask predict {} texts.jsonl -o labels.jsonl",
    "tag": "tag with it: allmask predict {} texts.jsonl -o tags.jsonl",
    "answer": "ask it: allmask predict {} questions.json -o answers.jsonl",
    "choose": "choose with it: allmask predict {} questions.jsonl -o choices.jsonl",
}
