"""What int8 costs: cosines of sentence vectors to fp32, and ROUGE of titles in int8 and fp32.

    python benchmarks/accuracy.py [--titles acl/test.jsonl] [--model allmask-en] [--quick] [--json] [--isa avx2]

Vectors: 2,000 pieces of docstrings of 4 to 128 tokens, MiniLM; the lowest cosine must be 0.99 or more. Titles: greedy,
of the first 500 pairs of a jsonl file with `source` and `target`, with the standard error of the mean difference.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import json
import random
import statistics
from argparse import ArgumentParser
from itertools import islice
from pathlib import Path

import torch
from texts import pieces
from torch.nn.functional import cosine_similarity

import allmask
from allmask.inference import embed, freeze
from allmask.tasks.metrics.text import rouge_of_each
from allmask.text.script import is_chinese

TEXTS, TITLES = 2000, 500


def main() -> None:
    options = timing.arguments(__doc__, add=add_options)
    torch.set_num_threads(1)
    rows = vector_rows(200 if options.quick else TEXTS)
    if options.titles is not None:
        rows += title_rows(options.model, options.titles, 40 if options.quick else TITLES)
    timing.show("Accuracy of int8", rows, timing.versions(), options.json)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--titles", type=Path, help="a jsonl file with sources and targets")
    parser.add_argument("--model", default="allmask-en", help="the model that writes titles")


def vector_rows(count: int) -> list[dict[str, object]]:
    model = allmask.load("minilm")
    assert model.tokenizer is not None
    rng = random.Random(0)
    lengths = (min(128, max(4, round(rng.lognormvariate(3.3, 0.7)))) for _ in range(count))
    texts = [piece.text for piece in pieces(model.tokenizer, lengths)]
    exact, found = (embed(freeze(model, precision), texts) for precision in ("fp32", "int8"))
    cosines = cosine_similarity(found, exact)
    shown = {"lowest cosine": cosines.min(), "1 % are below": cosines.quantile(0.01), "mean cosine": cosines.mean()}
    return [row(f"vectors of {count:,} texts", name, f"{value:.4f}") for name, value in shown.items()]


def title_rows(model: str, path: Path, count: int) -> list[dict[str, object]]:
    with path.open(encoding="utf-8") as file:
        pairs = [json.loads(line) for line in islice(file, count)]
    sources, targets = ([pair[side] for pair in pairs] for side in ("source", "target"))
    chinese = is_chinese(targets)
    scores = []
    for precision in ("fp32", "int8"):
        write = allmask.pipeline("title", model, precision=precision)
        scores.append(rouge_of_each(write(sources), targets, chinese))
    rows = []
    for name in scores[0][0]:
        exact, found = ([100 * one[name] for one in each] for each in scores)
        differences = [b - a for a, b in zip(exact, found, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        means = f"{statistics.mean(exact):.2f} and {statistics.mean(found):.2f}"
        shown = f"{means}: {statistics.mean(differences):+.2f} ± {error:.2f}"
        rows.append(row(f"{len(pairs)} titles, fp32 and int8", name, shown))
    return rows


def row(what: str, measure: str, value: str) -> dict[str, object]:
    return {"what": what, "measure": measure, "value": value}


if __name__ == "__main__":
    main()
