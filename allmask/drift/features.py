"""Features for the discriminator: n-grams of a text, ranks of numbers, or measures of an image.

The vocabulary of n-grams, means, scales and ranks are computed from the training records alone (`is_train`). The
features of a held-out record therefore depend on itself and the training records only, which the binomial test
requires. The permutation test uses all records for this. Features never depend on which file a record is from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NGRAMS = 2000  # the most frequent ones are used
PAIRED = 16  # tables of at most so many columns also have products of two columns as features
LENGTH = "(length)"
SIDE, COARSE = 32, 8  # images: pixels of a side; of the small copy
CELLS = 4  # of a side, in which edges are averaged
MEASURES = ("width", "height", "brightness", "contrast", "colourfulness", "warmth", "sharpness", "symmetry")
_LUMA = torch.tensor([0.299, 0.587, 0.114])  # weights of red, green and blue in the brightness
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Chinese characters
_UNSPACED_TOKEN = re.compile(f"[{_UNSPACED}]")
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+|[^\\w\\s]")


class Origin(NamedTuple):
    """What a feature measures in the columns of a table."""

    measure: str  # median or quartile range of one column, correlation of two
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Features:
    """The features of all records; training rows are centred and have a mean squared norm of 1."""

    rows: Tensor  # (n, F)
    names: list[str]
    origins: list[Origin | None]  # for features that can be reported in the units of the data


def grams(text: str) -> Iterator[str]:
    """Yield words, punctuation and Chinese characters, then pairs of neighbours: "我", "爱", "我爱"; "not good"."""
    tokens = _TOKEN.findall(text)
    yield from tokens
    for left, right in pairwise(tokens):
        unspaced = _UNSPACED_TOKEN.match(left) and _UNSPACED_TOKEN.match(right)
        yield left + right if unspaced else f"{left} {right}"


def count_grams(texts: Sequence[str], is_train: Tensor | None = None) -> tuple[Tensor, list[str]]:
    """Counts (n, F) of the most frequent n-grams in each text, and the n-grams. Each occurs in two texts at least."""
    counts = [Counter(grams(text)) for text in texts]
    chosen = counts if is_train is None else [counts[number] for number in is_train.nonzero().flatten().tolist()]
    documents = Counter(gram for count in chosen for gram in count)
    names = sorted((gram for gram, count in documents.items() if count > 1), key=lambda gram: (-documents[gram], gram))
    columns = {gram: column for column, gram in enumerate(names[:NGRAMS])}
    table = np.zeros((len(texts), len(columns)))
    for row, count in enumerate(counts):
        for gram, times in count.items():
            if gram in columns:
                table[row, columns[gram]] = times
    return torch.from_numpy(table), names[:NGRAMS]


def ngram_features(counts: Tensor, names: Sequence[str], lengths: Tensor, is_train: Tensor) -> Features:
    """TF-IDF of n-grams, with rows of norm 1, and the length of the text."""
    documents = (counts[is_train] > 0).sum(0).clamp(min=1)
    rows = counts.log1p() * (is_train.sum() / documents).log()
    rows = F.normalize(rows, dim=1)
    length = 0.3 * normal_scores(lengths[:, None], is_train)  # about a tenth of a row's squared norm
    return Features(_scaled(torch.cat([rows, length], dim=1), is_train), [*names, LENGTH], [None] * (len(names) + 1))


def number_features(table: Tensor, names: Sequence[str], is_train: Tensor) -> Features:
    """Level and spread of each column and, for few columns, products of two.

    All are computed from ranks, so outliers and units of measure do not matter.
    """
    level = normal_scores(table, is_train)
    columns, titles = [level, level.square()], [*names, *(f"{name} (spread)" for name in names)]
    origins = [Origin(measure, (column,)) for measure in ("median", "quartile range") for column in range(len(names))]
    if len(names) <= PAIRED:
        one, other = torch.triu_indices(len(names), len(names), offset=1)
        columns.append(level[:, one] * level[:, other])
        pairs = list(zip(one.tolist(), other.tolist(), strict=True))
        titles += [f"{names[a]} × {names[b]}" for a, b in pairs]
        origins += [Origin("correlation", pair) for pair in pairs]
    return Features(_scaled(_standardized(torch.cat(columns, dim=1), is_train), is_train), titles, [*origins])


def vector_features(vectors: Tensor, is_train: Tensor) -> Features:
    return Features(_scaled(_standardized(vectors.double(), is_train), is_train), [], [])


def table_of(pixels: Tensor, sizes: Tensor) -> tuple[Tensor, list[str]]:
    """A table (n, columns) of numbers in familiar units, and its column names: MEASURES, then a small copy's pixels."""
    image = pixels.double()
    light = _brightness(pixels)
    down, right = _edges(light)
    measures = [
        *sizes.double().T,
        light.mean((1, 2)),
        light.std((1, 2)),
        (image.amax(1) - image.amin(1)).mean((1, 2)),
        (image[:, 0] - image[:, 2]).mean((1, 2)),
        down.mean((1, 2)) + right.mean((1, 2)),
        (light - light.flip(2)).abs().mean((1, 2)).neg(),
    ]
    small = F.avg_pool2d(image, SIDE // COARSE)  # (n, 3, COARSE, COARSE)
    names = [
        f"{colour} in row {row}, column {column} of {COARSE}"
        for colour in ("red", "green", "blue")
        for row in range(1, COARSE + 1)
        for column in range(1, COARSE + 1)
    ]
    return torch.cat([torch.stack(measures, dim=1), small.flatten(1)], dim=1), [*MEASURES, *names]


def image_features(pixels: Tensor, table: Tensor, names: list[str], is_train: Tensor) -> Features:
    """Ranks of the measures with spreads and products, the small copy, and edges; each a third of a row's norm."""
    edges = [F.avg_pool2d(part[:, None], SIDE // CELLS).flatten(1) for part in _edges(_brightness(pixels))]
    count = len(MEASURES)
    measured = number_features(table[:, :count], names[:count], is_train)
    small = vector_features(table[:, count:], is_train)
    edged = vector_features(torch.cat(edges, dim=1).sqrt(), is_train)
    rows = torch.cat([measured.rows, small.rows, edged.rows], dim=1)
    titles = [f"edges {way} in cell {cell}" for way in ("down", "across") for cell in range(1, CELLS**2 + 1)]
    origins = [*measured.origins, *(Origin("median", (column,)) for column in range(count, len(names)))]
    return Features(_scaled(rows, is_train), [*measured.names, *names[count:], *titles], origins + [None] * len(titles))


def _brightness(pixels: Tensor) -> Tensor:
    """(n, SIDE, SIDE)."""
    return (pixels.double() * _LUMA.double()[:, None, None]).sum(1)


def _edges(light: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute differences in brightness to the pixel below, and to the one on the right; (n, SIDE, SIDE) each."""
    padded = F.pad(light[:, None], (0, 1, 0, 1), mode="replicate")[:, 0]
    return (padded[:, 1:, :-1] - light).abs(), (padded[:, :-1, 1:] - light).abs()


def normal_scores(table: Tensor, is_train: Tensor | None = None) -> Tensor:
    """Replace values by normal quantiles of their ranks in the column among training rows; ties share a rank."""
    columns = table.T.contiguous()
    ordered = (columns if is_train is None else columns[:, is_train]).sort(dim=1).values
    below = torch.searchsorted(ordered, columns)
    upto = torch.searchsorted(ordered, columns, right=True)
    least = 0.5 / ordered.shape[1]
    return torch.special.ndtri(((below + upto).double() * least).clamp(least, 1.0 - least)).T


def _standardized(rows: Tensor, is_train: Tensor) -> Tensor:
    """Columns of mean 0 and standard deviation 1; columns that are constant in training become 0."""
    known = rows[is_train]
    deviation, noise = known.std(0, correction=0), 1e-9 * known.abs().amax(0).clamp(min=1e-3)
    return (rows - known.mean(0)) / torch.where(deviation > noise, deviation, torch.inf)


def _scaled(rows: Tensor, is_train: Tensor) -> Tensor:
    """Centred rows with a mean squared norm of 1, as the discriminator's L2 penalty assumes."""
    rows = rows - rows[is_train].mean(0)
    return rows / rows[is_train].square().sum(1).mean().sqrt().clamp(min=1e-12)
