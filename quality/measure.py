"""What one set of weights can do under each mask, beside the model it was trained from.

    python quality/measure.py allmask-en --data FOLDER [--limit 200]
    python quality/measure.py allmask-zh --data FOLDER --titles csl-titles/test.jsonl --text cmrc2018/test.json \
        --beside models/bge-small-zh
    python quality/measure.py runs/gpt --data FOLDER --only causal

FOLDER holds the files of --titles and --text. Nothing is trained here.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
import torch.nn.functional as F

import allmask
from allmask.data import plan_epoch
from allmask.data.corpus import prepare
from allmask.data.windows import Windows
from allmask.inference import embed, freeze
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary
from allmask.registry import OBJECTIVES
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import lead_sentence, score_texts
from allmask.tasks.seq2seq import Title
from weights import mean_reciprocal_rank

MEASURED = ("hidden", "causal", "vectors", "titles")
BATCH_TOKENS = 4096
FRAME = 2


def titles(folder: str, file: Path, limit: int | None) -> dict[str, Any]:
    """Prefix mask: ROUGE-L of titles that the model writes without further training."""
    records = Title().read(file)[:limit]
    sources = [record.fields["source"] for record in records]
    references = [record.fields["target"] for record in records]
    writer = allmask.pipeline("title", folder)
    scores = {"first sentence": score_texts([lead_sentence(source) for source in sources], references)}
    for label, options in (("greedy", {}), ("4 beams", {"beams": 4})):
        scores[label] = score_texts(writer(sources, **options), references)
    return {name: {key: round(found[key], 2) for key in ("rouge_l", "length")} for name, found in scores.items()}


def plain_text(file: Path) -> str:
    """The text of a file; of SQuAD's json, the contexts."""
    found = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return found
    articles = json.loads(found)["data"]
    return "\n\n".join(paragraph["context"] for article in articles for paragraph in article["paragraphs"])


def rows_of(model: Model, text: str, folder: str, length: int = 128) -> Windows:
    file = Path(folder) / "text.txt"
    file.write_text(text, encoding="utf-8")
    return Windows(prepare([file], tokenizer_of(model), Path(folder) / "corpus"), length - FRAME)


@torch.inference_mode()
def masked(model: Model, rows: Windows, seed: int = 1) -> dict[str, float]:
    """Bidirectional mask: the share of hidden tokens that are guessed, at the first try and within five."""
    objective = OBJECTIVES["mlm"](Vocabulary.of(tokenizer_of(model)))
    mask_id, found, total = tokenizer_of(model).mask_id, [0, 0], 0
    for numbers in plan_epoch(rows.lengths, BATCH_TOKENS, seed, 0):
        batch = objective.batch(rows, Draw(seed, 0, numbers))
        hidden_tokens = (batch.labels >= 0) & (batch.ids == mask_id)
        states = model.body.forward_at(hidden_tokens, batch.ids, batch.mask, batch.segments)
        best = model.logits(states).topk(5).indices == batch.labels[hidden_tokens][:, None]
        found = [found[0] + int(best[:, 0].sum()), found[1] + int(best.any(1).sum())]
        total += len(best)
    return {"top 1": round(100 * found[0] / total, 2), "top 5": round(100 * found[1] / total, 2), "tokens": total}


@torch.inference_mode()
def causal(model: Model, rows: Windows, characters: int, seed: int = 1) -> dict[str, float]:
    """Causal mask: bits for each character of the text, summed over all its tokens and the end of each row."""
    objective = OBJECTIVES["causal"](Vocabulary.of(tokenizer_of(model)))
    nats = 0.0
    for numbers in plan_epoch(rows.lengths, BATCH_TOKENS, seed, 0):
        batch = objective.batch(rows, Draw(seed, 0, numbers))
        predicted = batch.labels >= 0
        states = model.body.forward_at(predicted, batch.ids, batch.mask, batch.segments)
        nats += F.cross_entropy(model.logits(states), batch.labels[predicted], reduction="sum").item()
    return {"bits a character": round(nats / math.log(2) / characters, 4)}


def found_by_vector(model: Model, file: Path, limit: int | None) -> float:
    """Mean pooling: mean reciprocal rank of a text's own title among all titles of the test set."""
    records = Title().read(file)[:limit]
    fast = freeze(model)
    sides = [embed(fast, [record.fields[name] for record in records], normalize=True) for name in ("source", "target")]
    return round(mean_reciprocal_rank(*sides), 4)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--titles", default="acl-titles/test.jsonl", help="pairs of a text and its title")
    parser.add_argument("--text", default="text/wikitext2-test.txt", help="running text, or SQuAD's json")
    parser.add_argument("--beside", default="minilm", help="the model to compare vectors with")
    parser.add_argument("--limit", type=int, help="test records")
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=MEASURED, help="for a model that cannot do all")
    args = parser.parse_args()
    started = time.monotonic()
    result: dict[str, Any] = dict(measured(args))
    result["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(result, indent=1, ensure_ascii=False))


def measured(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    model, text, pairs = allmask.load(args.model), plain_text(args.data / args.text), args.data / args.titles
    with TemporaryDirectory() as folder:
        rows = rows_of(model, text, folder)
        if "hidden" in args.only:
            yield "bidirectional: hidden tokens guessed (%)", masked(model, rows)
        if "causal" in args.only:
            yield "causal", causal(model, rows, len(text))
    if "vectors" in args.only:
        beside = str(args.data / args.beside) if (args.data / args.beside).is_dir() else args.beside
        found = {name: found_by_vector(allmask.load(name), pairs, args.limit) for name in (args.model, beside)}
        yield "vectors: mean reciprocal rank", found
    if "titles" in args.only:
        yield "prefix: titles", titles(args.model, pairs, args.limit)


if __name__ == "__main__":
    main()
