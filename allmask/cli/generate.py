"""`allmask generate`: write a title or a translation of a text, or of each line of stdin, or continue it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from allmask.cli import (
    Device,
    ModelOrDefault,
    Precision,
    note,
    note_cut,
    note_default,
    note_doubtful,
    show_log,
    start_up,
    stdin_batches,
    to_json,
)
from allmask.cli._options import with_fields
from allmask.errors import DataError, UsageError
from allmask.options import SAMPLING, Decoding, described
from allmask.registry import TASKS, USES
from allmask.terminal import printable, shortened

if TYPE_CHECKING:
    from allmask.mask import Mask
    from allmask.tasks.common.generator import TextGenerator
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask generate --text "A library to read and write zip, tar, gz and xz files. It is fast, small and easy to use."
    allmask generate runs/title --text "We show that masks decide every role …" --beams 4
    allmask generate runs/title < abstracts.txt > titles.txt
    allmask generate runs/de-en --beams 5 --length-penalty 0.6 < german.txt > english.txt
    allmask generate gpt2-folder --text "The mask" --sample --top-p 0.9 --seed 3 --stream
    allmask generate runs/zh --text 北京欢迎你 --show-mask
    allmask generate runs/mixed --task continue --text "In the beginning" --sample --top-k 40
"""
SEARCH = ("beams", "n_best", "length_penalty", "end_bias", "no_repeat_ngram", "min_new", "max_new")


@with_fields(Decoding, *SEARCH, "sample", *SAMPLING)
def command(
    model: ModelOrDefault = None,
    text: Annotated[str | None, Option(help="The input.", show_default="each line of stdin")] = None,
    task: Annotated[
        str | None,
        Option(help="For a model that writes in several ways: title, continue, …", show_default="the model's own"),
    ] = None,
    precision: Precision = "auto",
    device: Device = "auto",
    stream: Annotated[bool, Option("--stream", help="Print each token as soon as it is generated.")] = False,
    show_mask: Annotated[bool, Option("--show-mask", help="Draw the attention mask of this text on stderr.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per text, with scores.")] = False,
    **search: Any,
) -> None:
    """Generate text with MODEL: a title or a translation of the input, if it was trained for that, or a continuation.

    allmask-en and allmask-zh write titles for abstracts and descriptions; for letters, news and other texts, fine-tune
    one of them first.

    Each line of stdin gives a line of stdout (with --n-best N, N lines); an empty line gives an empty line.
    """
    if stream and as_json:
        raise UsageError("--stream and --json exclude each other", "scores are known only at the end")
    if show_mask and (stream or text is None):
        raise UsageError("--show-mask draws the mask of one text", "pass it with --text, without --stream")
    options = given_options(search)
    drawn = [name for name in SAMPLING if name in options]
    if drawn and not options.get("sample"):
        raise UsageError(f"{_flags(drawn)}: no effect without --sample", "add --sample")
    Decoding(**{"max_new": max(1, options.get("min_new", 1)), **options})  # refuses contradictions without torch
    if task is not None and task not in TASKS:
        raise UsageError(f"--task: there is no task {task!r}", f"there are: {', '.join(TASKS)}")
    if model is not None and text is None and re.search(r"\s|[，。；：！？]", model) and not Path(model).exists():
        raise UsageError(f"{shortened(printable(model), 60)}: no such model", 'pass a text with --text "…"')
    show_log()
    from allmask.checkpoints.sources import BUNDLED
    from allmask.tasks.task import ModelFolder

    lines = ([record.fields["text"] for record in batch] for batch in stdin_batches())
    batches = iter([[text]]) if text is not None else lines
    if model is None:
        first = next(batches, [])
        if not any(line.strip() for line in first):
            raise UsageError("no text was given", 'pass it with --text "…", or one per line on stdin')
        model, batches = note_default(first), chain([first], batches)
    opened = ModelFolder.open(model, device)  # a missing folder is refused before torch is imported
    with start_up():
        generator = USES["generate"](opened, precision, task)
    generator.check(options)
    if text is not None and model in BUNDLED:
        from allmask.tasks.common.writing import tokenizer_of

        if len(tokenizer_of(generator.model).encode(text).ids) < getattr(generator.task, "shortest", 0):
            note(f"a short text: {model} writes titles for abstracts and descriptions of a few sentences")
    written = 0
    for batch in batches:
        written += len(batch)
        if stream:
            _stream(generator, batch, options)
        else:
            _write(generator, batch, options, show_mask, as_json)
    note_cut(generator.cut, generator.max_tokens)
    note_doubtful(generator.doubtful, 1 if text is not None else written)


# ---- options of predict and evaluate, too --------------------------------------------------------------------


def given_options(search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a search that were given, as `Decoding` calls them; refuse a value out of range."""
    options = {name: value for name, value in search.items() if value is not None}
    for entry in fields(Decoding):
        described(entry).check(_flags([entry.name]), options.get(entry.name))
    return options


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def open_predictor(
    model: str, file: Path, precision: str, device: str, search: Mapping[str, Any]
) -> tuple[Predictor, dict[str, Any]]:
    """Return the predictor of a model and those of the options of a search that it takes.

    Others are refused, unless they have their default values.
    """
    from allmask.tasks.task import FILE, ModelFolder

    options, opened = given_options(search), ModelFolder.open(model, device)
    names_task, is_path = (opened.folder / FILE).is_file(), bool(file.suffix)  # digits is a data set, not a path
    if names_task and is_path and not file.exists():  # known before torch is imported
        raise DataError(f"{file}: no such file", "check the path")
    with start_up():
        predictor: Predictor = opened.predictor(precision=precision)
    others = sorted(options.keys() - predictor.options)
    if refused := [name for name in others if options[name] != getattr(Decoding, name)]:
        raise UsageError(f"{_flags(refused)}: this model {predictor.does}, it does not generate text", "leave it out")
    taken = {name: value for name, value in options.items() if name in predictor.options}
    predictor.check(taken)
    return predictor, taken


# ---- output --------------------------------------------------------------------------------------------------


def _write(generator: TextGenerator, texts: list[str], options: dict[str, Any], show_mask: bool, as_json: bool) -> None:
    for text, found in zip(texts, generator.write(texts, **options), strict=True):
        if show_mask and found:
            note(_picture(generator, text, found[0][1].tokens, options.get("max_new")) + "\n", important=True)
        if as_json:
            best = [{"text": written, **one._asdict(), "tokens": len(one.tokens)} for written, one in found]
            print(to_json({"source": text, "written": best}), flush=True)
        else:
            print("\n".join(printable(" ".join(written.splitlines())) for written, _ in found), flush=True)


def _stream(generator: TextGenerator, texts: list[str], options: dict[str, Any]) -> None:
    for text in texts:
        for piece in generator.stream(text, **options):
            print(printable(piece), end="", flush=True)
        print(flush=True)


def _picture(
    generator: TextGenerator, text: str, written: tuple[int, ...], max_new: int | None = None, limit: int = 24
) -> str:
    """Draw the mask of a source and the text generated for it, without the middle of a long source."""
    from allmask.mask.drawing import draw

    assert generator.model.tokenizer is not None
    prompt = generator.task.sized(max_new).prompts(generator.model.tokenizer, [text]).ids[0]
    ids, mask, source = _whole_row(generator, prompt, written)
    names, visible = generator.model.tokenizer.tokens(ids), mask.visible()[0]
    left_out = range(limit // 2, source - limit // 2)
    kept = [position for position in range(len(names)) if position not in left_out]
    shown = draw(visible[kept][:, kept], [names[position] for position in kept], limit=limit + 40)
    return f"{shown}\n({len(left_out)} tokens in the middle of the source are left out)" if left_out else shown


def _whole_row(generator: TextGenerator, prompt: list[int], written: tuple[int, ...]) -> tuple[list[int], Mask, int]:
    """Return the tokens of prompt and generated text, their mask, and the length of the source.

    Generated tokens follow the prompt, or replace its blanks (negative ids).
    """
    import torch

    from allmask.mask import Mask

    row = [token for token in prompt if token >= -len(written)]
    if min(row) < 0:
        order = torch.tensor([[max(0, -token) for token in row]])
        return [written[-1 - token] if token < 0 else token for token in row], Mask.permutation(order), row.index(-1)
    ids = [*prompt, *written]
    is_target = torch.arange(len(ids)) >= len(prompt)
    return ids, generator.task.mask_of(is_target[None]), len(prompt)
