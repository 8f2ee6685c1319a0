"""`allmask attention`: how strongly each token of a text looks at each other one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from allmask.cli import AsJson, Device, ModelOrDefault, emit, note, note_default
from allmask.cli.mask import parse_order
from allmask.errors import UsageError
from allmask.mask.kinds import parameters
from allmask.mask.labels import pad, printable, shorten, text_width
from allmask.registry import MASKS
from allmask.terminal import paint_words

if TYPE_CHECKING:
    from allmask.inference.attention import AttentionMap

EXAMPLES = """
    allmask attention --text "The animal didn't cross the street because it was too tired" --layer 5 --head 10
    allmask attention allmask-en --text "The Law will never be perfect, but its application should be just" --token its
    allmask attention --text 小猫没有过马路，因为它太累了 --token 它 --png attention.png
    allmask attention --text "We show that masks decide every role." --target "Masks decide roles" --no-special
    allmask attention allmask-en --text "a b c" --mask causal --json
"""


def command(
    model: ModelOrDefault = None,
    text: Annotated[str | None, Option(help="The text to read.", show_default="required")] = None,
    target: Annotated[str | None, Option(help="A text that is written after it, such as a title.")] = None,
    mask: Annotated[
        str | None,
        Option(
            help=f"The mask: {', '.join(MASKS.builtin)}, or {MASKS.of_packages()}.",
            show_default="prefix with --target, else the model's own",
        ),
    ] = None,
    order: Annotated[
        str | None, Option(help="When each token becomes known, such as 0,0,1,1; special tokens count, too.")
    ] = None,
    window: Annotated[
        int | None, Option(min=1, help="Read only tokens fewer than N positions away.", metavar="N")
    ] = None,
    layer: Annotated[int | None, Option(min=0, help="The layer, from 0.", show_default="the mean of all")] = None,
    head: Annotated[int | None, Option(min=0, help="The head, from 0.", show_default="the mean of all")] = None,
    part: Annotated[
        Literal["encoder", "decoder", "cross"] | None,
        Option(help="encoder–decoder: whose attention.", show_default="cross, or encoder without --target"),
    ] = None,
    device: Device = "auto",
    token: Annotated[
        str | None, Option(help="Print what this word looks at most, in each layer and head; a word or a position.")
    ] = None,
    top: Annotated[int, Option(min=1, help="With --token: how many tokens to print.")] = 5,
    no_special: Annotated[
        bool, Option("--no-special", help="Leave out [CLS], [SEP] and other special tokens among those looked at.")
    ] = False,
    title: Annotated[str | None, Option(help="Title of the picture.", show_default="the layer and head")] = None,
    svg: Annotated[Path | None, Option(help="Write the picture to this .svg file.", metavar="FILE")] = None,
    png: Annotated[Path | None, Option(help="Write the picture to this .png file.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how strongly each token of a text looks at each other one: the attention weights under a mask.

    A row is a token that looks, a column one that is looked at. What the mask forbids is hatched in a picture, and · in
    text.
    """
    if text is None or not text.strip():
        raise UsageError("no text was given", "give one with --text")
    if mask is not None:
        parameters(mask)  # refuses an unknown name
    numbers = None if order is None else _order(order)
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path is not None and path.suffix != suffix:
            raise UsageError(f"--{suffix[1:]} {path}: expected a name that ends in {suffix}")
    from allmask.tasks.task import ModelFolder

    model = model or note_default([text])
    opened = ModelFolder.open(model, device)
    from allmask.inference.attention import attention_map

    found = attention_map(opened.model, text, target, mask=mask, order=numbers, window=window, part=part)
    shown = found.without_special() if no_special else found
    data: dict[str, Any] = {"model": model, "layer": layer, "head": head, "rows": found.rows, "columns": shown.columns}
    data |= {"visible": shown.visible.int().tolist(), "weights": shown.mean(layer, head).tolist()}
    if token is None:
        shades = {"[░▒▓█]+": "tint 0", "·": "dim"}
        words = f"{model}: {found.name(layer, head)}\n\n{paint_words(shown.text(layer, head), shades, sys.stdout)}"
    else:
        word = int(token) if token.isdecimal() and token not in found.rows else token
        data["looks"], words = _looks(found, word, layer, head, top, not no_special)
    emit(as_json, data, words)
    for path in filter(None, (svg, png)):
        shown.drawing(layer, head, title).save(path)
        note(f"wrote {path}")


def _order(text: str) -> list[int]:
    order, group = parse_order(text)
    if any(group):
        raise UsageError(f"--order {text}: one text has no documents and no padding", "for example --order 0,0,1,1")
    return order


def _looks(
    found: AttentionMap, word: str | int, layer: int | None, head: int | None, top: int, special: bool
) -> tuple[list[dict[str, Any]], str]:
    """What a word looks at, as data and as text: on the whole, and in each layer and head that was not chosen."""
    places = found.find(word)
    name = " ".join(found.rows[place] for place in places)
    where = "–".join(str(place) for place in dict.fromkeys((places[0], places[-1])))
    lines = [f"{name} ({where}) looks at, {found.name(layer, head)}:", ""]
    whole = found.looks_at(word, layer, head, top, special)
    lines += [f"  {look.weight:6.1%}  {look.token} ({look.position})" for look in whole]
    layers = range(len(found.weights)) if layer is None else [layer]
    heads = range(found.weights.shape[1]) if head is None else [head]
    looks = {(one, other): found.looks_at(word, one, other, top, special) for one in layers for other in heads}
    if len(looks) > 1:
        best = [[looks[one, other][0] for one in layers] for other in heads]
        cells = [[f"{shorten(printable(look.token), 9)} {look.weight:.0%}" for look in row] for row in best]
        lines += ["", "most of all, by head and layer:", ""]
        rows = [[f"head {other}", *row] for other, row in zip(heads, cells, strict=True)]
        lines += _aligned([["", *(f"layer {one}" for one in layers)], *rows])
    data = [
        {"layer": one, "head": other, "tokens": [look._asdict() for look in ranked]}
        for (one, other), ranked in looks.items()
    ]
    return data, "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
