"""`allmask generate`: write a title or a translation of a text, or of each line of stdin, or continue it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import listen, note, ready_lines, tell_cut
from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.mask import Mask
    from allmask.tasks.common.generator import TextGenerator
    from allmask.tasks.common.writing import Written
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask generate runs/title/final --text "We show that masks decide every role …" --beams 4
    allmask generate runs/title/final < abstracts.txt > titles.txt
    allmask generate runs/de-en --beams 5 --length-penalty 0.6 < german.txt > english.txt
    allmask generate gpt2-folder --text "The mask" --sample --top-p 0.9 --seed 3 --stream
    allmask generate runs/zh/final --text 北京欢迎你 --show-mask
"""
_MODEL = "A model folder or a run, the bundled name minilm, or org/name."

Folder = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
Beams = Annotated[int, typer.Option("--beams", min=1, help="Beams of the search; 1 is greedy.")]
NBest = Annotated[int, typer.Option("--n-best", min=1, help="How many texts for each source.")]
LengthPenalty = Annotated[
    float, typer.Option("--length-penalty", help="Scores are divided by length to this power: more is longer.")
]
NoRepeat = Annotated[
    int | None,
    typer.Option(
        "--no-repeat-ngram", min=0, help="Write no N tokens in a row twice; 0: no such rule. [default: the task's]"
    ),
]
MinNew = Annotated[int, typer.Option("--min-new", min=0, help="No end before this many tokens.")]
MaxNew = Annotated[
    int | None, typer.Option("--max-new", min=1, help="At most this many new tokens. [default: the task's]")
]

Precision = Annotated[
    Literal["auto", "fp32", "bf16", "int8"],
    typer.Option(help="Precision of the arithmetic; auto: int8 to write, bf16 otherwise, where the CPU has them."),
]


def command(
    model: Folder,
    text: Annotated[str | None, typer.Option(help="The source. Without it, each line of stdin is one.")] = None,
    beams: Beams = 1,
    n_best: NBest = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens by their probability.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample: flatter above 1, sharper below.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="With --sample: draw from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="With --sample: from the fewest of this total probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --sample: random seed. [default: 0]")] = None,
    precision: Precision = "auto",
    stream: Annotated[bool, typer.Option("--stream", help="Print token by token, as they are written.")] = False,
    show_mask: Annotated[bool, typer.Option("--show-mask", help="Draw the mask of this very text, on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line, with scores.")] = False,
) -> None:
    """Write with MODEL: a title or a translation of each source, if it was trained for that, or a continuation.

    Each line of stdin gives a line of stdout (with --n-best N, N lines); an empty line gives an empty line.
    """
    _check(text, stream, show_mask, as_json)
    listen()
    from allmask.pipelines import pipeline

    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options = search_options(beams, n_best, length_penalty, no_repeat_ngram, min_new, max_new)
    options |= _sampling(sample, drawn)
    generator = pipeline("generate", model, precision)
    generator.check(options)  # what is wrong with them is said before the first line is read
    for batch in [[text]] if text is not None else ready_lines():
        if stream:
            _stream(generator, batch, options)
        else:
            _write(generator, batch, options, show_mask, as_json)
    tell_cut(generator.cut, generator.max_tokens)


def _check(text: str | None, stream: bool, show_mask: bool, as_json: bool) -> None:
    if stream and as_json:
        raise UsageError("--stream and --json exclude each other", "scores are known only at the end")
    if show_mask and (stream or text is None):
        raise UsageError("--show-mask draws the mask of one text", "pass it with --text, without --stream")


def search_options(
    beams: int, n_best: int, length_penalty: float, no_repeat_ngram: int | None, min_new: int, max_new: int | None
) -> dict[str, Any]:
    """The options that all writing commands share, as `Decoding` calls them."""
    options = {name: value for name, value in locals().items() if value is not None}
    return options


def accepted(predictor: Predictor, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a predictor takes; others are refused, unless they have their usual values."""
    usual = search_options(1, 1, 1.0, None, 0, None)
    refused = sorted(name for name, value in options.items() if usual.get(name) != value)
    refused = [f"--{name.replace('_', '-')}" for name in refused if name not in predictor.options]
    if refused:
        raise UsageError(f"{', '.join(refused)}: this model {predictor.does}, it does not write", "leave it out")
    taken = {name: value for name, value in options.items() if name in predictor.options}
    predictor.check(taken)
    return taken


def _sampling(sample: bool, drawn: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in drawn.items() if value is not None}
    if given and not sample:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: nothing is drawn without --sample", "add --sample")
    return {"sample": sample, **given}


# ---- texts out -----------------------------------------------------------------------------------------------


def _write(generator: TextGenerator, texts: list[str], options: dict[str, Any], show_mask: bool, as_json: bool) -> None:
    for text, found in zip(texts, generator.write(texts, **options), strict=True):
        if show_mask and found:
            note(_picture(generator, text, found[0][1].tokens, options.get("max_new")) + "\n")
        print(_as_json(text, found) if as_json else _as_lines(found), flush=True)


def _as_lines(found: Written) -> str:
    return "\n".join(" ".join(text.splitlines()) for text, _ in found)


def _as_json(source: str, found: Written) -> str:
    best = [{"text": text, **one._asdict(), "tokens": len(one.tokens)} for text, one in found]
    return json.dumps({"source": source, "written": best}, ensure_ascii=False)


def _stream(generator: TextGenerator, texts: list[str], options: dict[str, Any]) -> None:
    for text in texts:
        for piece in generator.stream(text, **options):
            print(piece, end="", flush=True)
        print(flush=True)


def _picture(
    generator: TextGenerator, text: str, written: tuple[int, ...], max_new: int | None = None, limit: int = 24
) -> str:
    """The mask under which this text was read and written; the middle of a long source is left out."""
    from allmask.mask.drawing import draw

    assert generator.model.tokenizer is not None
    prompt = generator.task.sized(max_new).prompts(generator.model.tokenizer, [text]).ids[0]
    ids, mask, source = _read_and_written(generator, prompt, written)
    names, visible = generator.model.tokenizer.tokens(ids), mask.visible()[0]
    left_out = range(limit // 2, source - limit // 2)
    kept = [place for place in range(len(names)) if place not in left_out]
    shown = draw(visible[kept][:, kept], [names[place] for place in kept], limit=limit + 40)
    return f"{shown}\n({len(left_out)} tokens in the middle of the source are left out)" if left_out else shown


def _read_and_written(
    generator: TextGenerator, prompt: list[int], written: tuple[int, ...]
) -> tuple[list[int], Mask, int]:
    """The whole row, its mask, and where the source ends: what is written stands behind it, or where blanks were."""
    import torch

    from allmask.mask import Mask

    row = [token for token in prompt if token >= -len(written)]
    if min(row) < 0:
        order = torch.tensor([[max(0, -token) for token in row]])
        return [written[-1 - token] if token < 0 else token for token in row], Mask.permutation(order), row.index(-1)
    ids = [*prompt, *written]
    is_target = torch.arange(len(ids)) >= len(prompt)
    return ids, generator.task.mask_of(is_target[None]), len(prompt)
