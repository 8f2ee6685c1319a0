"""What a discriminator sees of a record: the n-grams of a text, or the ranks of numbers among others.

Which n-grams there are, means, sizes and ranks are those of the records that teach, for all records. So what is seen of
a record that is guessed depends on this record and the teachers alone, as the binomial test wants it. Where all are
guessed in turn, by folds, all teach; nothing looks at which file a record is from.
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
from torch import Tensor

NGRAMS = 2000  # the most frequent ones
PAIRED = 16  # columns up to which products of two are seen, too
LENGTH = "(length)"
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Chinese characters
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+|[^\\w\\s]")


class Made(NamedTuple):
    """Of one column of a table its median or quartile range, or of two their correlation."""

    measure: str
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Features:
    """Rows (n, F), those that teach centred and of mean square length 1, and what each column is."""

    rows: Tensor
    names: list[str]
    made_of: list[Made | None]  # of each column, where it can be told in the unit of the data


def grams(text: str) -> Iterator[str]:
    """Words, marks and Chinese characters, and pairs of neighbours: "我", "爱", "我爱"; "not", "good", "not good"."""
    tokens = _TOKEN.findall(text)
    yield from tokens
    for left, right in pairwise(tokens):
        yield left + right if _is_unspaced(left) and _is_unspaced(right) else f"{left} {right}"


def _is_unspaced(token: str) -> bool:
    return re.match(f"[{_UNSPACED}]", token) is not None


def presence(texts: Sequence[str], teaches: Tensor | None = None) -> tuple[Tensor, list[str]]:
    """How often (n, F) each of the most frequent n-grams, none of them in one text only, stands in each text."""
    counts = [Counter(grams(text)) for text in texts]
    chosen = counts if teaches is None else [counts[number] for number in teaches.nonzero().flatten().tolist()]
    documents = Counter(gram for one in chosen for gram in one)
    names = sorted((gram for gram, count in documents.items() if count > 1), key=lambda gram: (-documents[gram], gram))
    place = {gram: number for number, gram in enumerate(names[:NGRAMS])}
    found = np.zeros((len(texts), len(place)))
    for row, one in enumerate(counts):
        for gram, count in one.items():
            if gram in place:
                found[row, place[gram]] = count
    return torch.from_numpy(found), names[:NGRAMS]


def ngram_features(counts: Tensor, names: Sequence[str], lengths: Tensor, teaches: Tensor) -> Features:
    """Rare n-grams weigh more; a text's row has the same length however long the text, which is a feature itself."""
    documents = (counts[teaches] > 0).sum(0).clamp(min=1)
    rows = counts.log1p() * (teaches.sum() / documents).log()
    rows = torch.nn.functional.normalize(rows, dim=1)
    long = 0.3 * normal_scores(lengths[:, None], teaches)  # about a tenth of a row
    return Features(scaled(torch.cat([rows, long], dim=1), teaches), [*names, LENGTH], [None] * (len(names) + 1))


def number_features(table: Tensor, names: Sequence[str], teaches: Tensor) -> Features:
    """Levels, spreads and, of few columns, products: of ranks, so that no outlier and no unit of measure matters."""
    level = normal_scores(table, teaches)
    columns, called = [level, level.square()], [*names, *(f"{name} (spread)" for name in names)]
    made_of = [Made(measure, (place,)) for measure in ("median", "quartile range") for place in range(len(names))]
    if len(names) <= PAIRED:
        one, other = torch.triu_indices(len(names), len(names), offset=1)
        columns.append(level[:, one] * level[:, other])
        pairs = list(zip(one.tolist(), other.tolist(), strict=True))
        called += [f"{names[a]} × {names[b]}" for a, b in pairs]
        made_of += [Made("correlation", pair) for pair in pairs]
    return Features(scaled(_standard(torch.cat(columns, dim=1), teaches), teaches), called, [*made_of])


def vector_features(vectors: Tensor, teaches: Tensor) -> Features:
    return Features(scaled(_standard(vectors.double(), teaches), teaches), [], [])


def normal_scores(table: Tensor, teaches: Tensor | None = None) -> Tensor:
    """Each column's ranks, ties shared, as the quantiles of a normal distribution; beyond the last teacher, its own."""
    columns = table.T.contiguous()
    ordered = (columns if teaches is None else columns[:, teaches]).sort(dim=1).values
    below = torch.searchsorted(ordered, columns)
    upto = torch.searchsorted(ordered, columns, right=True)
    least = 0.5 / ordered.shape[1]
    return torch.special.ndtri(((below + upto).double() * least).clamp(least, 1.0 - least)).T


def _standard(rows: Tensor, teaches: Tensor) -> Tensor:
    """Columns of mean 0 and deviation 1; 0 everywhere where all teachers are alike, and nothing is learnt from."""
    known = rows[teaches]
    deviation, noise = known.std(0, correction=0), 1e-9 * known.abs().amax(0).clamp(min=1e-3)
    return (rows - known.mean(0)) / torch.where(deviation > noise, deviation, torch.inf)


def scaled(rows: Tensor, teaches: Tensor) -> Tensor:
    """Centred, and of mean square length 1: what the penalty of a discriminator is made for."""
    rows = rows - rows[teaches].mean(0)
    return rows / rows[teaches].square().sum(1).mean().sqrt().clamp(min=1e-12)
