"""What a discriminator sees of a record: the n-grams of a text, or the ranks of numbers among all others.

Features are made of all records at once and without a look at which file each is from, so they give nothing away.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

NGRAMS = 2000  # the most frequent ones
PAIRED = 16  # columns up to which products of two are seen, too
LENGTH = "(length)"
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Chinese characters
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+|[^\\w\\s]")


@dataclass(frozen=True)
class Features:
    """Centred rows (n, F) of mean square length 1, and what each column is."""

    rows: Tensor
    names: list[str]


def grams(text: str) -> Iterator[str]:
    """Words, marks and Chinese characters, and pairs of neighbours: "我", "爱", "我爱"; "not", "good", "not good"."""
    tokens = _TOKEN.findall(text)
    yield from tokens
    for left, right in pairwise(tokens):
        yield left + right if _is_unspaced(left) and _is_unspaced(right) else f"{left} {right}"


def _is_unspaced(token: str) -> bool:
    return re.match(f"[{_UNSPACED}]", token) is not None


def presence(texts: Sequence[str]) -> tuple[Tensor, list[str]]:
    """How often (n, F) each of the most frequent n-grams, none of them in one text only, stands in each text."""
    counts = [Counter(grams(text)) for text in texts]
    documents = Counter(gram for one in counts for gram in one)
    names = sorted((gram for gram, count in documents.items() if count > 1), key=lambda gram: (-documents[gram], gram))
    place = {gram: number for number, gram in enumerate(names[:NGRAMS])}
    found = np.zeros((len(texts), len(place)))
    for row, one in enumerate(counts):
        for gram, count in one.items():
            if gram in place:
                found[row, place[gram]] = count
    return torch.from_numpy(found), names[:NGRAMS]


def ngram_features(counts: Tensor, names: Sequence[str], lengths: Tensor) -> Features:
    """Rare n-grams weigh more; a text's row has the same length however long the text, which is a feature itself."""
    documents = (counts > 0).sum(0).clamp(min=1)
    rows = counts.log1p() * (len(counts) / documents).log()
    rows = torch.nn.functional.normalize(rows, dim=1)
    long = 0.3 * normal_scores(lengths[:, None])  # about a tenth of a row
    return Features(scaled(torch.cat([rows, long], dim=1)), [*names, LENGTH])


def number_features(table: Tensor, names: Sequence[str]) -> Features:
    """Levels, spreads and, of few columns, products: of ranks, so that no outlier and no unit of measure matters."""
    level = normal_scores(table)
    columns, called = [level, level.square()], [*names, *(f"{name} (spread)" for name in names)]
    if len(names) <= PAIRED:
        one, other = torch.triu_indices(len(names), len(names), offset=1)
        columns.append(level[:, one] * level[:, other])
        called += [f"{names[a]} × {names[b]}" for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    rows = torch.cat(columns, dim=1)
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0).clamp(min=1e-12)
    return Features(scaled(rows), called)


def vector_features(vectors: Tensor) -> Features:
    rows = vectors.double()
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0).clamp(min=1e-12)
    return Features(scaled(rows), [])


def normal_scores(table: Tensor) -> Tensor:
    """Each column's ranks, ties shared, as the quantiles of a normal distribution."""
    columns = table.T.contiguous()
    ordered = columns.sort(dim=1).values
    below = torch.searchsorted(ordered, columns)
    upto = torch.searchsorted(ordered, columns, right=True)
    return torch.special.ndtri((below + upto).double() / (2 * len(table))).T


def scaled(rows: Tensor) -> Tensor:
    """Centred, and of mean square length 1: what the penalty of a discriminator is made for."""
    rows = rows - rows.mean(0)
    return rows / rows.square().sum(1).mean().sqrt().clamp(min=1e-12)
