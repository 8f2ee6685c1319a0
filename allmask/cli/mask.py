"""`allmask mask`: draw an attention mask and prove what it lets through."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import AsJson, emit, note
from allmask.errors import DataError, UsageError
from allmask.mask.kinds import build, parameters
from allmask.mask.labels import split
from allmask.registry import MASKS
from allmask.terminal import paint, paint_words

if TYPE_CHECKING:
    from torch import Tensor

    from allmask.mask import Mask

EXAMPLES = """
    allmask mask causal --text 北京欢迎你
    allmask mask prefix --source 你想吃啥 --target 白切鸡
    allmask mask turns --source 你想吃啥 --target 白切鸡 --source 几个 --target 两个
    allmask mask permutation --text 北京欢迎你 --order 迎京你欢北 --predict --png shuffled.png
    allmask mask --order 0,0,1,1 --text 北京欢迎
    allmask mask prefix --source 你想吃啥 --target 白切鸡 --animate prefix.gif
    allmask mask packed --text 北京欢迎你 --text "hello world" --each bidirectional
    allmask mask matrix --file visible.csv --layers 3 --json
"""

_MAX_TOKENS = 1024


@dataclass(frozen=True)
class Options:
    """The options that a mask is made from."""

    text: Sequence[str] = ()
    source: Sequence[str] = ()
    target: Sequence[str] = ()
    order: str | None = None
    each: str | None = None
    file: Path | None = None
    window: int | None = None
    predict: bool = False

    def given(self) -> set[str]:
        return {name for name, value in vars(self).items() if value not in (None, False) and value != ()}


@dataclass(frozen=True)
class Scene:
    """A mask with its tokens, and what to draw of it."""

    mask: Mask
    tokens: list[str]
    scored: Tensor | None = None  # positions whose next token is predicted
    first: int = 0  # the first row to draw
    tints: Tensor | None = None
    given: Sequence[int] = ()  # positions that are there before writing begins: the source


def command(
    kind: Annotated[
        str | None,
        Argument(
            metavar="KIND",
            help=f"The mask: {', '.join(MASKS.builtin)}, or {MASKS.of_packages()}.",
            show_default="order, if there is an --order",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        Option(help="The text: a token is a word, or a Chinese character. packed: repeat it for each document."),
    ] = None,
    source: Annotated[
        list[str] | None,
        Option(help="prefix, naive, encoder-decoder: the text to read. turns: repeat it for each turn."),
    ] = None,
    target: Annotated[list[str] | None, Option(help="The text to write after --source.")] = None,
    order: Annotated[
        str | None,
        Option(
            help="When each token becomes known, such as 0,0,1,1; | begins a document, · is padding. "
            "permutation: the tokens, or their positions (3,1,4,2,0), in the order they become known."
        ),
    ] = None,
    each: Annotated[str | None, Option(help="packed: the mask inside each document.", show_default="causal")] = None,
    file: Annotated[
        Path | None, Option(help="matrix: rows of 0 and 1, as csv, plain text or json.", metavar="FILE")
    ] = None,
    window: Annotated[
        int | None, Option(min=1, help="Read only tokens fewer than N positions away.", metavar="N")
    ] = None,
    layers: Annotated[int | None, Option(min=1, help="Prove for this number of layers.", show_default="any")] = None,
    predict: Annotated[
        bool, Option("--predict", help="Label each row with the token that it predicts, not with its own.")
    ] = False,
    title: Annotated[str | None, Option(help="Title of the picture.", show_default="the kind and its options")] = None,
    svg: Annotated[Path | None, Option(help="Write the picture to this .svg file.", metavar="FILE")] = None,
    png: Annotated[Path | None, Option(help="Write the picture to this .png file.", metavar="FILE")] = None,
    animate: Annotated[
        Path | None,
        Option(help="Show writing step by step, with the cache, in this .gif or .svg file.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw an attention mask and prove what it lets through.

    A row is a token that reads, a column a token that is read; ■ means that the row may read the column.
    """
    texts, sources, targets = (tuple(given or ()) for given in (text, source, target))
    options = Options(texts, sources, targets, order, each, file, window, predict)
    if kind is None:
        if order is None:
            raise UsageError("no mask was named", f"name one of {', '.join(MASKS)}, or give an --order")
        kind = "order"
    _check_options(kind, options)
    if animate is not None and predict:
        raise UsageError("--animate shows each token in its own row", "leave --predict out")
    for path, option, suffixes in (
        (svg, "svg", [".svg"]), (png, "png", [".png"]), (animate, "animate", [".gif", ".svg"]),
    ):  # fmt: skip
        if path is not None and path.suffix not in suffixes:
            raise UsageError(f"--{option} {path}: expected a name that ends in {' or '.join(suffixes)}")
    layouts = {"file": _matrix, "order": _any_order, "source": _sources_and_targets, "text": _texts}
    scene = (LAYOUTS.get(kind) or layouts[min(_inputs(kind))])(kind, options)
    from allmask.mask.animation import MAX_TOKENS, steps_text
    from allmask.mask.animation import animate as write_animation
    from allmask.mask.drawing import draw, save
    from allmask.mask.prover import prediction_rows, prove

    if animate is not None and len(scene.tokens) > MAX_TOKENS:
        raise UsageError(f"--animate: {len(scene.tokens)} tokens", f"at most {MAX_TOKENS} can be shown step by step")
    proof = prove(scene.mask, layers=layers, scored=scene.scored)
    if predict:  # nothing predicts the first token, and the last predicts nothing
        visible, columns, rows = prediction_rows(scene.mask)[1:, :-1], scene.tokens[:-1], scene.tokens[1:]
    else:
        visible, columns, rows = scene.mask.visible()[0, scene.first :], scene.tokens, scene.tokens[scene.first :]
    padded = scene.mask.group[0] < 0
    padding = (padded[:, None] | padded)[len(padded) - len(rows) :, : len(columns)]
    data = {
        "kind": kind,
        "tokens": scene.tokens,
        "drawing": {"rows": rows, "columns": columns, "visible": visible.int().tolist()},
        "proof": proof.to_dict(),
    }
    drawing = draw(visible, columns, rows, paint=_painter(scene))
    verdicts = {r"\bLEAK\b": "red", r"\bno leak\b": "green", r"(?m)^\w+( \w+)?(?=  )": "bold"}
    emit(as_json, data, f"{drawing}\n\n{paint_words(proof.text(scene.tokens), verdicts, sys.stdout)}")
    for path in filter(None, (svg, png)):
        looks = "what is predicted" if predict else "who looks"
        words = title or _title(kind, options)
        save(visible, path, columns, rows, title=words, looks=looks, tints=scene.tints, padding=padding)
        note(f"wrote {path}")
    if animate is not None:
        words = title or _title(kind, options)
        steps = write_animation(scene.mask, animate, scene.tokens, given=scene.given, first=scene.first, title=words)
        note(f"wrote {animate}: {steps_text(steps)}")


def _painter(scene: Scene) -> Callable[[str, int], str]:
    """Return how a terminal shows a cell: in the colour of its column, as in pictures, or dim if it is hidden."""
    from allmask.mask.canvas import TINTS
    from allmask.mask.grid import Row, token_tints

    mask = scene.mask
    visible, order, group = (x[0].cpu().numpy() for x in (mask.visible(), mask.order, mask.group))
    tints = token_tints(Row(visible, order, group, has_order=True))
    styles = [f"tint {TINTS.index(tint)}" if tint in TINTS else "dim" for tint in tints]
    return lambda cell, column: paint(cell, styles[column] if "■" in cell else "dim", sys.stdout)


def _check_options(kind: str, options: Options) -> None:
    """Refuse options that this kind of mask does not take, and missing ones."""
    made_from = parameters(kind).keys()
    needed = _inputs(kind)
    takes = needed | {one for one in ("each", "window") if one in made_from}
    takes |= ({"order"} if "rank" in made_from else set()) | ({"text"} if made_from & {"visible", "order"} else set())
    takes |= (
        set() if made_from & {"document", "visible", "order"} or kind in ("bidirectional", *LAYOUTS) else {"predict"}
    )
    foreign = sorted(options.given() - takes)
    if foreign:
        listed = ", ".join(f"--{name}" for name in sorted(takes))
        raise UsageError(f"--{foreign[0]} is not an option of the mask {kind}", f"{kind} takes {listed}")
    for name in sorted(needed - options.given()):
        raise UsageError(f"a {kind} mask needs --{name}", "see the examples of allmask mask --help")
    if "document" not in made_from and len(options.text) > 1:
        raise UsageError(f"--text is given {len(options.text)} times", "several documents make a packed mask")
    for name in ("source", "target"):
        if "turns" not in made_from and len(getattr(options, name)) > 1:
            times = len(getattr(options, name))
            raise UsageError(f"--{name} is given {times} times", "several sources and targets make a turns mask")
    if len(options.source) - len(options.target) not in (0, 1):
        counts = f"{len(options.source)} × --source, {len(options.target)} × --target"
        raise UsageError(f"{counts}: they alternate, beginning with a source", "give as many of both")
    if options.each is not None:
        parameters(options.each)  # refuses an unknown name


def _inputs(kind: str) -> set[str]:
    """Return the options that give the tokens of a kind of mask."""
    made_from = parameters(kind).keys()
    if "visible" in made_from:
        return {"file"}
    if "order" in made_from:
        return {"order"}
    return {"source", "target"} if made_from & {"is_target", "turns"} else {"text"}


# ---- scenes -------------------------------------------------------------------------------------------------


def _texts(kind: str, options: Options) -> Scene:
    """Make the mask of one text, or of several documents in one row.

    With --predict, the text stands between <s>, which is known first, and <e>, which is known last.
    """
    documents = [_tokens(text, "--text") for text in options.text]
    tokens = [token for document in documents for token in document]
    ranks = _ranks(tokens, options.order) if "rank" in parameters(kind) else None
    import torch

    from allmask.mask import Mask

    number = torch.tensor([[n for n, document in enumerate(documents) for _ in document]])
    given: dict[str, Any] = {"valid": torch.ones_like(number, dtype=torch.bool), "window": options.window}
    given |= {"each": options.each} if options.each else {}
    given |= {"rank": torch.tensor([ranks])} if ranks else {}
    mask = build(kind, {**given, "document": number})
    if not options.predict:
        return Scene(mask, tokens, tints=number[0] if "document" in parameters(kind) else None)
    rank = mask.order[0] - mask.order.min() + 1
    rank = torch.cat([rank.new_zeros(1), rank, rank.max()[None] + 1])
    return Scene(Mask.permutation(rank[None], window=mask.window), ["<s>", *tokens, "<e>"])


def _sources_and_targets(kind: str, options: Options) -> Scene:
    """Make the mask of sources and targets in one row, as BERT reads them: [CLS] source [SEP] target [SEP]."""
    tokens, flags = ["[CLS]"], [False]
    for turn in range(len(options.source) + len(options.target)):
        is_target = turn % 2 == 1
        text = (options.target if is_target else options.source)[turn // 2]
        part = [*_tokens(text, "--target" if is_target else "--source"), "[SEP]"]
        tokens, flags = tokens + part, flags + [is_target] * len(part)
    import torch

    targets = torch.tensor([flags])
    mask = build(
        kind,
        {"valid": torch.ones_like(targets), "is_target": targets, "turns": targets, "window": options.window},
    )
    asks_for_targets = any(parameters(kind).get(name) for name in ("is_target", "turns"))
    scored = targets[0].roll(-1) if asks_for_targets else None  # whose next token is a target
    given = [] if "turns" in parameters(kind) else range(flags.index(True))
    return Scene(mask, tokens, scored, given=given)


def _encoder_decoder(kind: str, options: Options) -> Scene:
    """Make the mask of a decoder: each row reads the source, and the target so far."""
    source, target = _tokens(options.source[0], "--source"), _tokens(options.target[0], "--target")
    import torch

    is_target = torch.arange(len(source) + len(target) + 1)[None] >= len(source)
    mask, tokens = build(kind, {"is_target": is_target}), [*source, "<s>", *target]
    sides = {"scored": is_target[0], "tints": is_target[0].long()}
    return Scene(mask, tokens, first=len(source), given=range(len(source)), **sides)


def _any_order(kind: str, options: Options) -> Scene:
    """Make the mask of an order as it was typed: `0,0,1,1`, or `0 0 1 | 0 1 ·` with documents and padding."""
    assert options.order is not None
    order, group = parse_order(options.order)
    tokens = _tokens(options.text[0], "--text") if options.text else [str(position) for position in range(len(order))]
    real = [position for position, document in enumerate(group) if document >= 0]
    if len(tokens) == len(real) < len(order):
        named = dict(zip(real, tokens, strict=True))
        tokens = [named.get(position, "[PAD]") for position in range(len(order))]
    if len(tokens) != len(order):
        raise UsageError(f"--text has {len(tokens)} tokens, --order {len(order)} numbers", f"text: {' '.join(tokens)}")
    import torch

    inputs = {"order": torch.tensor([order]), "group": torch.tensor([group]), "window": options.window}
    return Scene(build(kind, inputs), tokens, tints=torch.tensor(group).clamp(min=0))


def parse_order(text: str) -> tuple[list[int], list[int]]:
    """Return the order and the document of each token; -1 is padding."""
    order: list[int] = []
    group: list[int] = []
    document = 0
    for word in re.findall(r"\||[^\s,|]+", text):
        if word == "|":
            document += 1
        elif word in ("·", "."):
            order, group = [*order, 0], [*group, -1]
        elif re.fullmatch(r"-?\d{1,9}", word):
            order, group = [*order, int(word)], [*group, document]
        else:
            raise UsageError(f"--order {text}: {word!r} is not a whole number", "for example --order 0,0,1,1")
    if not order:
        raise UsageError("--order is empty", "for example --order 0,0,1,1")
    if len(order) > _MAX_TOKENS:
        raise UsageError(f"--order has {len(order):,} numbers", f"a mask is drawn up to {_MAX_TOKENS:,} tokens")
    return order, group


def _matrix(kind: str, options: Options) -> Scene:
    assert options.file is not None
    rows = read_matrix(options.file)
    tokens = _tokens(options.text[0], "--text") if options.text else [str(position) for position in range(len(rows))]
    if len(tokens) != len(rows):
        raise UsageError(f"--text has {len(tokens)} tokens, {options.file} {len(rows)} rows")
    import torch

    return Scene(build(kind, {"visible": torch.tensor(rows, dtype=torch.bool)}), tokens)


# kinds with their own layout
LAYOUTS: dict[str, Callable[[str, Options], Scene]] = {"encoder-decoder": _encoder_decoder}


def _title(kind: str, options: Options) -> str:
    words = [kind.replace("-", "–")]
    if options.order and kind == "order":
        words = ["order " + " ".join(options.order.replace(",", " ").replace("|", " | ").split())]
    elif options.order:
        words.append(" → ".join(re.split(",", options.order) if "," in options.order else split(options.order)))
    if options.window:
        words.append(f"window {options.window}")
    return ", ".join(words)


# ---- input --------------------------------------------------------------------------------------------------


def _tokens(text: str, option: str) -> list[str]:
    tokens = split(text)
    if not tokens:
        raise UsageError(f"{option} is empty")
    if len(tokens) > _MAX_TOKENS:
        raise UsageError(
            f"{option} has {len(tokens):,} tokens", f"a mask is drawn and proven up to {_MAX_TOKENS:,} tokens"
        )
    return tokens


def _ranks(tokens: list[str], order: str | None) -> list[int]:
    """Return when each token becomes known; `order` lists tokens or positions, the first to become known first."""
    if order is None:
        example = ",".join(map(str, [*range(1, len(tokens)), 0]))
        raise UsageError("a permutation mask needs --order", f"for example --order {example}")
    positions = _positions(tokens, order)
    if sorted(positions) != list(range(len(tokens))):
        raise UsageError(f"--order {order}: expected each of 0 to {len(tokens) - 1} once")
    return [positions.index(position) for position in range(len(tokens))]


def _positions(tokens: list[str], order: str) -> list[int]:
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", order) and order not in tokens:
        return [int(position) for position in order.split(",")]
    waiting: dict[str, list[int]] = {}
    for position, token in enumerate(tokens):
        waiting.setdefault(token, []).append(position)
    positions = []
    for token in split(order.replace(",", " ")):
        if not waiting.get(token):
            raise UsageError(
                f"--order {order}: {token} is not in the text, or not that often", f"text: {' '.join(tokens)}"
            )
        positions.append(waiting[token].pop(0))
    for token, left in waiting.items():
        if left:
            raise UsageError(f"--order {order}: {token} is missing", f"text: {' '.join(tokens)}")
    return positions


def read_matrix(path: Path) -> list[list[int]]:
    """Read a square matrix of 0 and 1: json, or one row per line with commas, spaces or nothing between the cells."""
    if path.is_file() and path.stat().st_size > 64 * _MAX_TOKENS**2:
        raise DataError(f"{path}: too large for a mask", f"at most {_MAX_TOKENS:,} tokens can be drawn and proven")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file ({error.reason} at byte {error.start})") from None
    rows = _json_rows(path, text) if path.suffix == ".json" else _text_rows(text)
    if not rows:
        raise DataError(f"{path}: no rows", "write one row per line, such as 1,0,0")
    return [_row(path, number, cells, len(rows)) for number, cells in rows]


def _json_rows(path: Path, text: str) -> list[tuple[int, list]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise DataError(f"{path}: expected a list of lists, such as [[1, 0], [1, 1]]")
    return list(enumerate(rows, 1))


def _text_rows(text: str) -> list[tuple[int, list]]:
    rows = [(number, re.split(r"[\s,;]+", line.strip(" \t,;"))) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, list(cells[0]) if len(cells) == 1 else cells) for number, cells in rows if cells != [""]]


def _row(path: Path, number: int, cells: list, expected: int) -> list[int]:
    values = [1 if cell in (1, "1") else 0 if cell in (0, "0") else None for cell in cells]
    if None in values:
        cell = cells[values.index(None)]
        raise DataError(f"{path}:{number}: cell {values.index(None) + 1} is {str(cell)!r:.40}; expected 0 or 1")
    if len(cells) != expected:
        raise DataError(f"{path}:{number}: {len(cells)} cells; expected {expected}, as many as rows")
    if expected > _MAX_TOKENS:
        raise DataError(f"{path}: {expected:,} rows", f"at most {_MAX_TOKENS:,} tokens can be drawn and proven")
    return [int(value or 0) for value in values]
