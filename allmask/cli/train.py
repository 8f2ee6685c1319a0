"""`allmask train`: a translator, or another writer of targets for sources, from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from allmask.cli import emit, listen, plan_values
from allmask.cli.finetune import (
    Accumulate,
    AsJson,
    Best,
    Clip,
    ConfigFile,
    Ema,
    EvalEvery,
    MaxSource,
    MaxTarget,
    OnBadRecord,
    Out,
    Patience,
    Recompute,
    Resume,
    SaveEvery,
    Steps,
    TensorBoard,
    TrainingPrecision,
    go_on,
    in_words,
    start,
)  # fmt: skip
from allmask.errors import UsageError

EXAMPLES = """
    allmask train --task translate --data train.jsonl --eval dev.jsonl --out runs/de-en
    allmask train --data train.csv --eval dev.csv --preset transformer-base --vocabulary 16000 --average 5 --out runs/b
    allmask train --data 中英.jsonl --tokenizer tok/ --layers 2 --width 256 --steps 4000 --out runs/zh
    allmask train --resume --out runs/de-en
"""
PRESET = "transformer-small"


def command(
    out: Out = None,
    data: Annotated[Path | None, typer.Option(help="jsonl, csv or parquet with source and target.")] = None,
    eval_file: Annotated[
        Path | None, typer.Option("--eval", help="Held-out records: the best weights on them are kept.")
    ] = None,
    task: Annotated[
        Literal["translate", "title"] | None, typer.Option(help="What to learn. [default: translate]")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="The shape: transformer-small, -base, -big, t5-small, … [default: transformer-small]"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder with a vocabulary, instead of one learnt from the data.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Pieces (BPE) that sources and targets share. [default: 8000]")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of each stack, instead of the preset's; so are the next three.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Heads and --inner follow unless given.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    inner: Annotated[int | None, typer.Option(help="Width of the feed-forward layers.")] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data. [default: 20]")] = None,
    steps: Steps = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a batch, of sources and targets. [default: 4096]")
    ] = None,
    accumulate: Accumulate = None,
    lr: Annotated[
        float | None, typer.Option(help="The highest learning rate. [default: by the width, 7e-4 at 512]")
    ] = None,
    schedule: Annotated[
        Literal["linear", "cosine", "constant", "inverse-root"] | None,
        typer.Option(help="The learning rate after the warm-up. [default: inverse-root]"),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="A share of the steps, or above 1 a number of them. [default: 4000, of short runs a tenth]"),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's. [default: 0]")] = None,
    clip: Clip = None,
    label_smoothing: Annotated[float | None, typer.Option(help="[default: 0.1]")] = None,
    dropout: Annotated[float | None, typer.Option(help="[default: the preset's]")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights, data order, dropout. [default: 1]")] = None,
    precision: TrainingPrecision = None,
    ema: Ema = None,
    recompute: Recompute = None,
    tensorboard: TensorBoard = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    keep: Annotated[
        int | None, typer.Option(help="Checkpoints kept, and the best besides. [default: 2, or as --average]")
    ] = None,
    average: Annotated[
        int | None, typer.Option(help="At the end, take the mean of the last N checkpoints if it is better.")
    ] = None,
    patience: Patience = None,
    best: Best = None,
    max_source: MaxSource = None,
    max_target: MaxTarget = None,
    truncate: Annotated[
        Literal["head", "tail", "head+tail"] | None,
        typer.Option(help="What is kept of longer sources. [default: head]"),
    ] = None,
    on_bad_record: OnBadRecord = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no samples; warnings and errors only.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a new model to write a target for each source, as the 2017 Transformer was trained.

    One vocabulary for both is learnt from the data. The run's folder gets config.yaml, metrics.jsonl, loss.png,
    checkpoints and final, a model folder. Ctrl-C saves; the same command with --resume goes on, bit for bit as if it
    had not been stopped.
    """
    flags = dict(locals())
    listen(quiet)
    given = plan_values(flags, {"eval_file": "eval"})
    if out is None:
        raise UsageError("no place for the run was named", "name a new folder with --out")
    result = go_on(out, given, quiet) if resume else start(out, {"task": "translate", "preset": PRESET, **given}, quiet)
    emit(as_json, result, in_words(result))
