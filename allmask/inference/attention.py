"""Attention maps: how strongly each token of a text looks at each other one, per layer and head.

    found = attention_map(model, "The Law will never be perfect, but its application should be just")
    found                                   # in a notebook: a picture, the mean of all layers and heads
    found.drawing(layer=3, head=7).save("its.png")
    found.looks_at("its", layer=3, top=5)   # [Look("law", 2, 0.31), …]

The weights are those that the model computes with: the softmax of the masked scores. A forbidden cell is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.canvas import QUIET, Box, Canvas, Words, words_width
from allmask.mask.drawing import UNSEEN
from allmask.mask.grid import HATCHED, MAX_NAMED, Drawing, Grid, image_part, legend_shapes, striped
from allmask.mask.kinds import build, parameters
from allmask.mask.labels import pad, printable, shorten, text_width
from allmask.model import Model
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.transformer import Transformer

SHADES = (("░", 0.0), ("▒", 0.05), ("▓", 0.15), ("█", 0.4))  # from this weight on
PARTS = ("encoder", "decoder", "cross")  # of an encoder–decoder
_RAMP = np.array([[0xEE, 0xF3, 0xFD], [0xA9, 0xC1, 0xF0], [0x5B, 0x84, 0xD7], [0x2F, 0x4F, 0x9E], [0x16, 0x23, 0x4F]])
_BAR = 160  # width of the scale below a picture


class Look(NamedTuple):
    token: str
    position: int
    weight: float


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of one text; rows look at columns, which are the same tokens except in cross-attention."""

    rows: list[str]
    columns: list[str]
    visible: Tensor  # (Q, K) what the mask allows
    weights: Tensor  # (layers, heads, Q, K); a row sums to 1, or to 0 if it may see nothing
    special: frozenset[int] = frozenset()  # the columns that are special tokens, such as [CLS]

    def mean(self, layer: int | None = None, head: int | None = None) -> Tensor:
        """The weights (Q, K) of a layer and head, counted from 0; the mean over all layers or heads if not named."""
        for name, number, count in (("layer", layer, len(self.weights)), ("head", head, self.weights.shape[1])):
            if number is not None and not 0 <= number < count:
                raise UsageError(f"there is no {name} {number}; the model has {name}s 0 to {count - 1}")
        weights = self.weights if layer is None else self.weights[layer : layer + 1]
        weights = weights if head is None else weights[:, head : head + 1]
        return weights.mean((0, 1))

    def find(self, word: str | int) -> list[int]:
        """The positions of a word among the rows: its first occurrence, which may have several tokens, or a number."""
        if isinstance(word, int):
            if not 0 <= word < len(self.rows):
                raise UsageError(f"there is no token {word}; the text has tokens 0 to {len(self.rows) - 1}")
            return [word]
        plain = [_plain(token) for token in self.rows]
        wanted = _plain(word)
        for start in range(len(plain)):
            joined = ""
            for end in range(start, len(plain)):
                joined += plain[end]
                if wanted and joined == wanted and plain[start]:
                    return list(range(start, end + 1))
                if not wanted.startswith(joined):
                    break
        raise UsageError(f"{word!r} is not among the tokens", f"tokens: {' '.join(map(printable, self.rows))}")

    def looks_at(
        self, word: str | int, layer: int | None = None, head: int | None = None, top: int | None = None,
        special: bool = True,
    ) -> list[Look]:  # fmt: skip
        """What a word looks at, the most first; of a word of several tokens, the mean. Maybe without special tokens."""
        weights = self.mean(layer, head)[self.find(word)].mean(0).tolist()
        kept = [position for position in range(len(weights)) if special or position not in self.special]
        ranked = sorted(kept, key=lambda position: -weights[position])
        return [Look(self.columns[position], position, weights[position]) for position in ranked][:top]

    def without_special(self) -> AttentionMap:
        """The map without the columns of special tokens, which often take most of the weight; rows then sum to less."""
        kept = [position for position in range(len(self.columns)) if position not in self.special]
        columns = [self.columns[position] for position in kept]
        return AttentionMap(self.rows, columns, self.visible[:, kept], self.weights[..., kept])

    # ---- pictures ----------------------------------------------------------------------------------------------

    def text(self, layer: int | None = None, head: int | None = None, limit: int = MAX_NAMED) -> str:
        """The map as text: a shade for a weight, `·` for a cell that the mask forbids; columns are numbered."""
        weights, visible = self.mean(layer, head)[:limit, :limit].tolist(), self.visible[:limit, :limit].tolist()
        same = self.rows == self.columns
        names = [shorten(printable(token), 14) for token in self.rows[:limit]]
        names = [f"{number:>3} {name}" if same else name for number, name in enumerate(names)]
        margin = max(map(text_width, names))
        lines = [" " * margin + "".join(f"{column % 100:>3}" for column in range(min(limit, len(self.columns))))]
        for name, row, allowed in zip(names, weights, visible, strict=True):
            cells = (f" {_shade(w) * 2}" if may else f"  {UNSEEN}" for w, may in zip(row, allowed, strict=True))
            lines.append(pad(name, margin) + "".join(cells))
        if not same:
            lines += ["", "columns: " + " ".join(f"{n}:{printable(name)}" for n, name in enumerate(self.columns))]
        if max(len(self.rows), len(self.columns)) > limit:
            lines.append(f"(the first {limit} tokens of {max(len(self.rows), len(self.columns))})")
        shades = "  ".join(f"{shade} from {least:.0%}" if least else f"{shade} less" for shade, least in SHADES)
        return "\n".join([*lines, "", f"{shades}  {UNSEEN} forbidden"])

    def drawing(self, layer: int | None = None, head: int | None = None, title: str | None = None) -> Drawing:
        """A picture: the darker, the larger the weight; what the mask forbids is hatched."""
        weights, visible = self.mean(layer, head).numpy(), self.visible.numpy()
        most = float(weights.max()) if weights.size and weights.max() > 0 else 1.0
        colours = _colours(weights / most)
        title = self.name(layer, head) if title is None else title
        if max(weights.shape) <= MAX_NAMED:
            fills = [
                [HATCHED if not visible[q, k] else "#" + bytes(colours[q, k]).hex() for k in range(len(self.columns))]
                for q in range(len(self.rows))
            ]
            grid = Grid(self.rows, self.columns, fills, (), (), title, "who looks", "what is looked at")
            (width, height), shapes = grid.size, [*grid.frame(), *grid.cells()]
        else:
            (width, height), shapes = image_part(striped(colours, ~visible), title)
        width = max(width, _BAR + 200.0, words_width(title, 14) + 24)
        below = height + 8
        steps = 40
        for step, colour in enumerate(_colours(np.linspace(0, 1, steps)[None])[0]):
            place = (12 + step * _BAR / steps, below - 6, _BAR / steps + 0.5, 12)
            shapes.append(Box(*place, "#" + bytes(colour).hex(), 0))
        shapes.append(Words(12, below + 16, "0", 10, QUIET))
        for share in (0.25, 0.5, 1.0):
            shapes.append(Words(12 + _BAR * share, below + 16, f"{share * most:.2g}", 10, QUIET, "middle"))
        legend, _ = legend_shapes([(HATCHED, "forbidden by the mask")], 12 + _BAR + 24, below, 10**6)
        return Drawing(Canvas(width, below + 32, [*shapes, *(legend if not visible.all() else [])]))

    def name(self, layer: int | None = None, head: int | None = None) -> str:
        """Which weights these are, in words."""
        layers = f"mean of {len(self.weights)} layers" if layer is None else f"layer {layer}"
        return layers + (f", mean of {self.weights.shape[1]} heads" if head is None else f", head {head}")

    def _repr_svg_(self) -> str:
        return self.drawing()._repr_svg_()

    def __repr__(self) -> str:
        layers, heads, rows, columns = self.weights.shape
        return f"AttentionMap({layers} layers, {heads} heads, {rows}×{columns} tokens)"


def _plain(token: str) -> str:
    """A token without the marks of its tokenizer, in lower case."""
    return token.removeprefix("##").replace("Ġ", "").replace("▁", "").replace("</w>", "").replace(" ", "").lower()


def _shade(weight: float) -> str:
    return next(shade for shade, least in reversed(SHADES) if weight >= least)


def _colours(share: np.ndarray) -> np.ndarray:
    """(…, 3) bytes for shares from 0 to 1; the square root makes small weights tell."""
    place = np.sqrt(share.clip(0, 1)) * (len(_RAMP) - 1)
    low = np.floor(place).astype(int).clip(max=len(_RAMP) - 2)
    rest = (place - low)[..., None]
    return (_RAMP[low] * (1 - rest) + _RAMP[low + 1] * rest).round().astype(np.uint8)


# ---- computing -------------------------------------------------------------------------------------------------


def attention_map(
    model: Model, text: str, target: str | None = None, *, mask: Mask | str | None = None,
    order: Sequence[int] | None = None, window: int | None = None, part: str | None = None,
) -> AttentionMap:  # fmt: skip
    """Compute the attention weights of a text, or of a text and a target that follows it, under a mask.

    `mask` is one of shape (1, tokens), or the name of a kind; by default it is `order`, if that is given, prefix with a
    target, and otherwise the model's own. An encoder–decoder has three maps; `part` is one of encoder, decoder, cross.
    """
    body: Any = model.body
    if not isinstance(body, Transformer | EncoderDecoder):
        raise UsageError(f"a model of the family {model.config.family} has no attention among its tokens")
    paired = isinstance(body, EncoderDecoder)
    ids, is_target, segments = lay_out(model, text, target, paired)
    made = _mask(model, is_target, mask, order, window, paired)
    model._checked_mask(ids, made, segments, None)  # the length, above all
    tokenizer = model.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.tokens(ids[0].tolist())
    found: Any
    was_training = model.training
    model.eval()  # without dropout
    try:
        with torch.no_grad():
            found = body.weights(ids, made, segments=segments)
    finally:
        model.train(was_training)
    visible, source, ids = made.visible()[0].cpu(), made.first_known[0].cpu(), ids.cpu()
    if not paired:
        if part is not None:
            raise UsageError(f"part is {part!r}; only an encoder–decoder has parts")
        return AttentionMap(tokens, tokens, visible, _stacked(found), _special(model, ids[0]))
    part = part or ("encoder" if target is None else "cross")
    if part not in found:
        expected = ", ".join(found) + ("; decoder and cross need a target" if target is None else "")
        raise UsageError(f"part is {part!r}; expected one of {expected}")
    rows, columns = {"encoder": (source, source), "decoder": (~source, ~source), "cross": (~source, source)}[part]
    names, heads = ([tokens[place] for place in side.nonzero()[:, 0].tolist()] for side in (rows, columns))
    special = _special(model, ids[0][columns])
    return AttentionMap(names, heads, visible[rows][:, columns], _stacked(found[part]), special)


def _special(model: Model, ids: Tensor) -> frozenset[int]:
    assert model.tokenizer is not None
    known = model.tokenizer.special_ids
    return frozenset(position for position, id in enumerate(ids.tolist()) if id in known)


def _stacked(layers: Sequence[Tensor]) -> Tensor:
    return torch.stack([layer[0] for layer in layers]).float().cpu()


def lay_out(model: Model, text: str, target: str | None, paired: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, which of them belong to the target, and segments, (1, T) each, as tasks that write lay them out."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UsageError("this model has no tokenizer", "load a folder with vocab.txt or tokenizer.json")
    encoded = tokenizer.encode(text)
    ids, flags = encoded.ids, [0] * len(encoded)
    if target is not None and tokenizer.closing_id is not None:  # XLNet frames both texts together
        encoded = tokenizer.encode(text, target)
        ids, segments = encoded.ids, encoded.segments
        flags = [int(segment > 0) for segment in segments]
    elif target is not None:
        end = [] if tokenizer.end_id is None else [tokenizer.end_id]
        start = tokenizer.start_id if model.config.start_token is None else model.config.start_token
        written = tokenizer.encode(target, special=False).ids
        written = [*([start] if start is not None else []), *written] if paired else [*written, *end]
        ids, flags = [*ids, *written], [*flags, *[1] * len(written)]
    if not ids:
        raise UsageError("the text is empty", "give at least one token")
    is_target = torch.tensor([flags], device=model.device).bool()
    shown = encoded.segments if len(encoded) == len(ids) else flags
    segments = torch.tensor([shown], device=model.device) if model.config.segments else None
    return torch.tensor([ids], device=model.device), is_target, segments


def _mask(
    model: Model, is_target: Tensor, mask: Mask | str | None, order: Sequence[int] | None, window: int | None,
    paired: bool,
) -> Mask:  # fmt: skip
    if isinstance(mask, Mask):
        if mask.shape != tuple(is_target.shape):
            raise UsageError(f"the mask is {mask.shape}; the text has {is_target.shape[1]} tokens, so (1, tokens)")
        return mask.to(model.device)
    if order is not None and len(order) != is_target.shape[1]:
        count = is_target.shape[1]
        raise UsageError(f"the order has {len(order)} numbers, the text {count} tokens", "count special tokens, too")
    if mask is None:
        has_target = bool(is_target.any())
        own = "encoder-decoder" if paired else "prefix" if has_target else model.config.own_mask
        mask = "order" if order is not None else own
    if paired and mask != "encoder-decoder":
        raise UsageError(f"mask is {mask!r}; an encoder–decoder has its own", "leave it out")
    if order is not None and mask != "order":
        raise UsageError(f"an order is for the mask order, not for {mask}", "leave one of both out")
    if not paired and not bool(is_target.any()) and any(parameters(mask).get(name) for name in ("is_target", "turns")):
        raise UsageError(f"a {mask} mask needs a target", "give the text that is written, --target")
    return build(
        mask,
        {
            "valid": torch.ones_like(is_target),
            "is_target": is_target if bool(is_target.any()) or paired else None,
            "turns": is_target if bool(is_target.any()) else None,
            "order": None if order is None else torch.tensor([list(order)], device=model.device),
            "window": window,
        },
    )
