"""What one set of weights can do under each mask, beside the model it was trained from.

    python quality/measure.py quality-runs/allmask-en/final --data FOLDER [--beside minilm] [--limit 200]

FOLDER holds acl-titles/test.jsonl and text/wikitext2-test.txt. Nothing is trained here.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
import torch.nn.functional as F
from weights import mean_reciprocal_rank

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
from allmask.tasks.task import load_task

BATCH_TOKENS = 4096
FRAME = 2


def titles(folder: str, data: Path, limit: int | None) -> dict[str, Any]:
    """Prefix mask: ROUGE-L of titles that the model writes without further training."""
    task = load_task(Path(folder)) or Title()
    records = task.read(data / "acl-titles" / "test.jsonl")[:limit]
    sources = [record.fields["source"] for record in records]
    references = [record.fields["target"] for record in records]
    writer = allmask.pipeline("title", folder)
    scores = {"first sentence": score_texts([lead_sentence(source) for source in sources], references)}
    for label, options in (("greedy", {}), ("4 beams", {"beams": 4})):
        scores[label] = score_texts(writer(sources, **options), references)
    return {name: {key: round(found[key], 2) for key in ("rouge_l", "length")} for name, found in scores.items()}


def rows_of(model: Model, data: Path, folder: str, length: int = 128) -> Windows:
    corpus = prepare([data / "text" / "wikitext2-test.txt"], tokenizer_of(model), Path(folder) / "corpus")
    return Windows(corpus, length - FRAME)


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


def found_by_vector(model: Model, data: Path, limit: int | None) -> float:
    """Mean pooling: mean reciprocal rank of an abstract's own title among all titles of the test set."""
    records = Title().read(data / "acl-titles" / "test.jsonl")[:limit]
    fast = freeze(model)
    sides = [embed(fast, [record.fields[name] for record in records], normalize=True) for name in ("source", "target")]
    return round(mean_reciprocal_rank(*sides), 4)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--beside", default="minilm", help="the model to compare vectors with")
    parser.add_argument("--limit", type=int, help="test records")
    args = parser.parse_args()
    started = time.monotonic()
    model = allmask.load(args.model)
    characters = len((args.data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8"))
    with TemporaryDirectory() as folder:
        rows = rows_of(model, args.data, folder)
        result: dict[str, Any] = {"bidirectional: hidden tokens guessed (%)": masked(model, rows)}
        result["causal"] = causal(model, rows, characters)
    result["vectors: mean reciprocal rank"] = {
        args.model: found_by_vector(model, args.data, args.limit),
        args.beside: found_by_vector(allmask.load(args.beside), args.data, args.limit),
    }
    result["prefix: titles"] = titles(args.model, args.data, args.limit)
    result["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
