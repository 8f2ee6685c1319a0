"""`allmask mask`: draw a mask and prove what it lets through."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmask.cli import emit, note
from allmask.errors import DataError, UsageError
from allmask.mask.kinds import build, parameters
from allmask.registry import MASKS

if TYPE_CHECKING:
    from torch import Tensor

    from allmask.mask import Mask
    from allmask.mask.prover import Proof

EXAMPLES = """
    allmask mask causal --text 北京欢迎你
    allmask mask prefix --source 你想吃啥 --target 白切鸡
    allmask mask turns --source 你想吃啥 --target 白切鸡 --source 几个 --target 两个
    allmask mask permutation --text 北京欢迎你 --order 迎京你欢北 --predict --png shuffled.png
    allmask mask packed --text 北京欢迎你 --text "hello world" --each bidirectional
    allmask mask matrix --file visible.csv --layers 3 --json
"""

_MAX_TOKENS = 1024
# Chinese, kana and full-width punctuation stand alone; everything else is cut at spaces.
_ALONE = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"


@dataclass(frozen=True)
class Options:
    """What was asked for, as typed."""

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
    """A mask with its tokens, and what to show of it."""

    mask: Mask
    tokens: list[str]
    scored: Tensor | None = None  # positions that bear loss
    first: int = 0  # only the rows from this token on are shown
    tints: Tensor | None = None


def command(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"Who may look at whom: {', '.join(MASKS.builtin)}, or {MASKS.of_packages()}.",
            show_default=False,
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(help="The tokens: characters for Chinese, words otherwise. Repeat it for packed."),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="What is read (prefix, naive, encoder-decoder). Repeat it for turns.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="What is written. Repeat it for turns.")] = None,
    order: Annotated[
        str | None, typer.Option(help="For permutation: the tokens as they become known, or positions: 3,1,4,2,0.")
    ] = None,
    each: Annotated[str | None, typer.Option(help="For packed: the mask inside each document [causal].")] = None,
    file: Annotated[Path | None, typer.Option(help="For matrix: rows of 0 and 1, as csv, plain text or json.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Read only keys fewer than this many positions away.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Prove for this many layers [any depth].")] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Rows are the tokens predicted, not those reading.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="The title of the picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the drawing and the proof.")] = False,
) -> None:
    """Draw a mask and prove what it lets through: rows look, columns are seen, ■ may be read."""
    texts, sources, targets = (tuple(given or ()) for given in (text, source, target))
    options = Options(texts, sources, targets, order, each, file, window, predict)
    _check_options(kind, options)
    _check_suffixes(svg, png)
    from allmask.mask.drawing import draw, save
    from allmask.mask.prover import prove

    scene = _scene(kind, options)
    proof = prove(scene.mask, layers=layers, scored=scene.scored)
    visible, columns, rows = _shown(scene, predict)
    drawing = f"{draw(visible, columns, rows)}\n\n{proof.text(scene.tokens)}"
    emit(as_json, _data(kind, scene, proof, visible, columns, rows), drawing)
    for path in filter(None, (svg, png)):
        looks = "what is predicted" if predict else "who looks"
        save(visible, path, columns, rows, title=title or _title(kind, options), looks=looks, tints=scene.tints)
        note(f"wrote {path}")


def _check_options(kind: str, options: Options) -> None:
    """Refuse options that say nothing about a kind of mask; --layers, --json and the pictures always do."""
    made_from = parameters(kind).keys()
    needed = _inputs(kind)
    takes = needed | {one for one in ("each", "window") if one in made_from}
    takes |= ({"order"} if "rank" in made_from else set()) | ({"text"} if "visible" in made_from else set())
    takes |= set() if made_from & {"document", "visible"} or kind in ("bidirectional", *LAYOUTS) else {"predict"}
    foreign = sorted(options.given() - takes)
    if foreign:
        listed = ", ".join(f"--{name}" for name in sorted(takes))
        raise UsageError(f"--{foreign[0]} says nothing about a {kind} mask", f"{kind} takes {listed}")
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
        raise UsageError(f"{counts}: they take turns, the first is a source", "give as many of both")


def _inputs(kind: str) -> set[str]:
    """The options that the tokens of a kind of mask come from."""
    made_from = parameters(kind).keys()
    if "visible" in made_from:
        return {"file"}
    return {"source", "target"} if made_from & {"is_target", "turns"} else {"text"}


def _check_suffixes(svg: Path | None, png: Path | None) -> None:
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path is not None and path.suffix != suffix:
            raise UsageError(f"--{suffix[1:]} {path}: expected a name that ends in {suffix}")


# ---- scenes -------------------------------------------------------------------------------------------------


def _scene(kind: str, options: Options) -> Scene:
    layouts = {"file": _matrix, "source": _sources_and_targets, "text": _texts}
    make = LAYOUTS.get(kind) or layouts[min(_inputs(kind))]
    return make(kind, options)


def _texts(kind: str, options: Options) -> Scene:
    """One text, or several documents in one row. `--predict` puts a text between a start and an end token."""
    import torch

    documents = [_tokens(text, "--text") for text in options.text]
    tokens = [token for document in documents for token in document]
    number = torch.tensor([[n for n, document in enumerate(documents) for _ in document]])
    given: dict[str, Any] = {"valid": torch.ones_like(number, dtype=torch.bool), "window": options.window}
    given |= {"each": options.each} if options.each else {}
    if "rank" in parameters(kind):
        given["rank"] = torch.tensor([_ranks(tokens, options.order)])
    mask = build(kind, {**given, "document": number})
    if options.predict:
        return _between_start_and_end(mask, tokens)
    return Scene(mask, tokens, tints=number[0] if "document" in parameters(kind) else None)


def _between_start_and_end(mask: Mask, tokens: list[str]) -> Scene:
    """The same text between <s>, which is known first, and <e>, which is known last."""
    import torch

    from allmask.mask import Mask

    rank = mask.order[0] - mask.order.min() + 1
    rank = torch.cat([rank.new_zeros(1), rank, rank.max()[None] + 1])
    return Scene(Mask.permutation(rank[None], window=mask.window), ["<s>", *tokens, "<e>"])


def _sources_and_targets(kind: str, options: Options) -> Scene:
    """Sources and targets in one row, as BERT is given them: [CLS] source [SEP] target [SEP]."""
    import torch

    tokens, flags = ["[CLS]"], [False]
    for turn in range(len(options.source) + len(options.target)):
        is_target = turn % 2 == 1
        text = (options.target if is_target else options.source)[turn // 2]
        part = [*_tokens(text, "--target" if is_target else "--source"), "[SEP]"]
        tokens, flags = tokens + part, flags + [is_target] * len(part)
    targets = torch.tensor([flags])
    mask = build(
        kind,
        {"valid": torch.ones_like(targets), "is_target": targets, "turns": targets, "window": options.window},
    )
    asks_for_targets = any(parameters(kind).get(name) for name in ("is_target", "turns"))
    return Scene(mask, tokens, targets[0].roll(-1) if asks_for_targets else None)  # whose next token is a target


def _encoder_decoder(kind: str, options: Options) -> Scene:
    """The rows of the decoder: what it sees of the source, then of the target."""
    import torch

    source, target = _tokens(options.source[0], "--source"), _tokens(options.target[0], "--target")
    is_target = torch.arange(len(source) + len(target) + 1)[None] >= len(source)
    mask, tokens = build(kind, {"is_target": is_target}), [*source, "<s>", *target]
    return Scene(mask, tokens, scored=is_target[0], first=len(source), tints=is_target[0].long())


def _matrix(kind: str, options: Options) -> Scene:
    import torch

    assert options.file is not None
    rows = read_matrix(options.file)
    tokens = _tokens(options.text[0], "--text") if options.text else [str(place) for place in range(len(rows))]
    if len(tokens) != len(rows):
        raise UsageError(f"--text has {len(tokens)} tokens, {options.file} {len(rows)} rows")
    return Scene(build(kind, {"visible": torch.tensor(rows, dtype=torch.bool)}), tokens)


LAYOUTS: dict[str, Callable[[str, Options], Scene]] = {"encoder-decoder": _encoder_decoder}  # drawn in their own way


def _shown(scene: Scene, predict: bool) -> tuple[Tensor, list[str], list[str]]:
    """The matrix to draw with the names of its columns and rows."""
    from allmask.mask.prover import prediction_rows

    if predict:  # nothing predicts the first token, and the last predicts nothing
        return prediction_rows(scene.mask)[1:, :-1], scene.tokens[:-1], scene.tokens[1:]
    return scene.mask.visible()[0, scene.first :], scene.tokens, scene.tokens[scene.first :]


def _title(kind: str, options: Options) -> str:
    words = [kind.replace("-", "–")]
    if options.order:
        words.append(" → ".join(re.split(",", options.order) if "," in options.order else split(options.order)))
    if options.window:
        words.append(f"window {options.window}")
    return ", ".join(words)


def _data(
    kind: str, scene: Scene, proof: Proof, visible: Tensor, columns: list[str], rows: list[str]
) -> dict[str, object]:
    return {
        "kind": kind,
        "tokens": scene.tokens,
        "drawing": {"rows": rows, "columns": columns, "visible": visible.int().tolist()},
        "proof": proof.to_dict(),
    }


# ---- input --------------------------------------------------------------------------------------------------


def split(text: str) -> list[str]:
    """Characters for Chinese, words otherwise: `GPT 写诗` is GPT, 写, 诗."""
    return [token for token in re.findall(rf"[{_ALONE}]|[^\s{_ALONE}]+", text) if not token.isspace()]


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
    """When each token becomes known, from a list of tokens or of positions in the order of their appearance."""
    if order is None:
        raise UsageError("a permutation mask needs --order", f"for example --order {','.join(_reordered(tokens))}")
    line = _positions(tokens, order)
    if sorted(line) != list(range(len(tokens))):
        raise UsageError(f"--order {order}: expected each of 0 to {len(tokens) - 1} once")
    return [line.index(place) for place in range(len(tokens))]


def _reordered(tokens: list[str]) -> list[str]:
    return [str(place) for place in (*range(1, len(tokens)), 0)]


def _positions(tokens: list[str], order: str) -> list[int]:
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", order) and order not in tokens:
        return [int(place) for place in order.split(",")]
    waiting: dict[str, list[int]] = {}
    for place, token in enumerate(tokens):
        waiting.setdefault(token, []).append(place)
    line = []
    for token in split(order.replace(",", " ")):
        if not waiting.get(token):
            raise UsageError(
                f"--order {order}: {token} is not in the text, or not that often", f"text: {' '.join(tokens)}"
            )
        line.append(waiting[token].pop(0))
    for token, places in waiting.items():
        if places:
            raise UsageError(f"--order {order}: {token} is missing", f"text: {' '.join(tokens)}")
    return line


def read_matrix(path: Path) -> list[list[int]]:
    """A square matrix of 0 and 1: json, or one row a line with commas, blanks or nothing between the cells."""
    if path.is_file() and path.stat().st_size > 64 * _MAX_TOKENS**2:
        raise DataError(f"{path}: too large for a mask", f"at most {_MAX_TOKENS:,} tokens can be drawn and proven")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file ({error.reason} at byte {error.start})") from None
    rows = _json_rows(path, text) if path.suffix == ".json" else _text_rows(text)
    if not rows:
        raise DataError(f"{path}: no rows", "write one row a line, such as 1,0,0")
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
        raise DataError(f"{path}:{number}: {len(cells)} cells; expected {expected}, one a row of the file")
    if expected > _MAX_TOKENS:
        raise DataError(f"{path}: {expected:,} rows", f"at most {_MAX_TOKENS:,} tokens can be drawn and proven")
    return [int(value or 0) for value in values]
