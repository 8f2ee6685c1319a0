"""`allmask pretrain`: one body learns to fill gaps, to go on with texts, or both, from plain text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, expect_same, listen, note, plan_values
from allmask.cli.finetune import (
    Accumulate,
    AsJson,
    Clip,
    ConfigFile,
    Ema,
    Epochs,
    EvalEvery,
    Keep,
    LabelSmoothing,
    OnBadRecord,
    Out,
    Patience,
    Recompute,
    Resume,
    SaveEvery,
    Steps,
    TensorBoard,
    TrainingPrecision,
    Warmup,
    WeightDecay,
)  # fmt: skip
from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.training.distributed import Alone, Crew

EXAMPLES = """
    allmask tokenizer train corpus/*.txt --size 8000 --out tok/
    allmask pretrain --objective mlm --data corpus/ --tokenizer tok/ --preset bert-small --out runs/a
    allmask pretrain --objective mlm:0.5,causal:0.5 --data a.txt b.jsonl.gz --tokenizer tok/ --out runs/both
    allmask pretrain --objective causal,reverse --data corpus/ --tokenizer tok/ --preset elmo-tiny --out runs/elmo
    allmask pretrain --objective causal --data 文集/ --tokenizer tok/ --preset gpt2 --layers 6 --out runs/zh
    allmask pretrain --objective mlm,nsp --data corpus/ --from minilm --steps 2000 --out runs/more
    allmask pretrain --resume --out runs/a
"""


def command(
    files: Annotated[list[Path] | None, typer.Argument(help="More of --data, as in --data corpus/*.txt")] = None,
    out: Out = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="What to learn: mlm, nsp, causal, reverse, permutation, prefix, unilm, or several with their weights, "
            "such as mlm:0.5,causal:0.5. [default: mlm]"
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text: a sentence a line, a blank line between documents; or jsonl, parquet, csv; also as .gz; or "
            "folders of these. More may follow."
        ),
    ] = None,
    eval_files: Annotated[
        list[Path] | None, typer.Option("--eval", help="Held-out text, instead of a share of the data.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder that allmask tokenizer train made, or a model's.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="The shape of a new model: bert-tiny, gpt2, … [default: bert-small]; for mass and span t5-small, …"
            " [default: transformer-small]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--from", help="Go on with this model, instead of a new one: a folder, or minilm.")
    ] = None,
    config: ConfigFile = None,
    resume: Resume = False,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in a batch. [default: 8192]")] = None,
    accumulate: Accumulate = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a row, [CLS] and [SEP] too. [default: 128]")] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of the preset's; so are the next four.")] = None,
    width: Annotated[int | None, typer.Option(help="Heads and --inner follow unless given.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    inner: Annotated[int | None, typer.Option(help="Width of the feed-forward layers.")] = None,
    max_positions: Annotated[int | None, typer.Option(help="The longest text the model can read.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="The highest learning rate. [default: 5e-4; of permutation alone 2e-4]")
    ] = None,
    schedule: Annotated[
        Literal["linear", "cosine", "constant", "inverse-root"] | None,
        typer.Option(help="The learning rate after the warm-up. [default: cosine]"),
    ] = None,
    warmup: Warmup = None,
    weight_decay: WeightDecay = None,
    clip: Clip = None,
    label_smoothing: LabelSmoothing = None,
    dropout: Annotated[
        float | None, typer.Option(help="0 learns faster where no text is seen twice. [default: the model's own]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of weights, data order, corruption, dropout. [default: 1]")
    ] = None,
    precision: TrainingPrecision = None,
    ema: Ema = None,
    recompute: Recompute = None,
    tensorboard: TensorBoard = None,
    held_out: Annotated[
        float | None, typer.Option(help="The share of documents that is only judged on. [default: 0.01]")
    ] = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    keep: Keep = None,
    patience: Patience = None,
    across: Annotated[
        bool | None, typer.Option("--across", help="Rows run across documents, and are all full.")
    ] = None,
    verbatim: Annotated[
        bool | None, typer.Option("--verbatim", help="Keep line ends and blank lines; a file is one document.")
    ] = None,
    text_field: Annotated[str | None, typer.Option(help="Where the text of a record is. [default: text]")] = None,
    on_bad_record: OnBadRecord = None,
    mask_share: Annotated[
        float | None, typer.Option(help="Of mlm, nsp, unilm: how many tokens are hidden. [default: 0.15]")
    ] = None,
    whole_words: Annotated[
        bool | None, typer.Option("--whole-words", help="Of mlm, nsp: hide words, not pieces of them.")
    ] = None,
    ngrams: Annotated[
        list[float] | None, typer.Option(help="Of mlm, nsp, unilm: the weight of hiding 1 token, then 2, then 3, …")
    ] = None,
    unilm_weights: Annotated[
        list[float] | None,
        typer.Option(help="Of unilm: bidirectional, then left-to-right, right-to-left, seq2seq."),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="With torchrun: each process keeps a part of the model (FSDP2), not all.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; warnings and errors only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on plain text: the objective decides by its masks who may look at whom.

    The run's folder gets the tokens of the text, config.yaml, metrics.jsonl, loss.png, checkpoints and final, a model
    folder. Ctrl-C saves; the same command with --resume goes on, bit for bit as if it had not been stopped.
    With "torchrun --nproc-per-node 8 -m allmask pretrain …" eight processes share the work of one; the run is the same.
    """
    flags = {**locals(), "data": [*(data or ()), *(files or ())]}
    del flags["files"], flags["shard"]
    with _crew(shard, quiet) as crew:
        given = plan_values(flags, {"eval_files": "eval"})
        if out is None:
            raise UsageError("no place for the run was named", "name a new folder with --out")
        again = resume or crew.shared(crew.restarts > 0 and (out / "config.yaml").is_file())
        result = _resume(out, given, quiet, crew) if again else _start(out, given, quiet, crew)
    if crew.lead:
        emit(as_json, result, _in_words(result))


@contextmanager
def _crew(shard: bool, quiet: bool) -> Iterator[Alone | Crew]:
    """The processes that run this command; the first one speaks for all, and so does the first one to fail."""
    from allmask.training.distributed import Echo, company

    try:
        with company(shard) as crew:
            listen(quiet)
            if not crew.lead:
                logging.getLogger("allmask").setLevel(logging.CRITICAL)
            yield crew
    except Echo as error:
        raise typer.Exit(error.exit_code) from None


def _start(out: Path, given: dict[str, Any], quiet: bool, crew: Alone | Crew) -> dict[str, Any]:
    from allmask.tasks.pretraining import pretrain
    from allmask.tasks.recipe import Recipe

    return pretrain(Recipe.from_dict(given), out, quiet, crew)


def _resume(out: Path, given: dict[str, Any], quiet: bool, crew: Alone | Crew) -> dict[str, Any]:
    from allmask.tasks.folders import is_finished
    from allmask.tasks.pretraining import resume, saved_recipe

    def check() -> None:
        expect_same(out, saved_recipe(out).differences(given))
        if is_finished(out):
            note(f"{out}: this run is finished")

    crew.first(check)
    return resume(out, quiet, crew)


def _in_words(result: dict[str, Any]) -> str:
    early = ", stopped early" if result["stopped_early"] else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    return "\n".join([
        f"{result['final']}: {result['steps']} steps in {result['seconds']} s{early}",
        f"step {result['best_step']}: {metrics}",
        *_uses(result),
    ])  # fmt: skip


def _uses(result: dict[str, Any]) -> list[str]:
    """What the model can do now, as commands."""
    learnt = {entry.split(":")[0] for entry in result["objective"].split(",")}
    fills, writes = learnt & {"mlm", "nsp", "unilm"}, learnt & {"causal", "prefix"}
    filling = [f'fill gaps with it: allmask fill {result["final"]} "… [MASK] …"'] if fills else []
    return filling + ([f'write with it: allmask generate {result["final"]} --text "…"'] if writes else [])
