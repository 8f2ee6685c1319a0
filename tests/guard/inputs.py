"""What the commands read: records in English and Chinese, texts, images and a BERT, the same bytes on every machine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

WORDS = ["red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "here", "there"]
CHARACTERS = "北京欢迎你白切鸡想吃啥"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS[:6], *CHARACTERS, *".。?"]
PIECES += ["run", "sleep", "sing", "##s", "he", "##re", "t", "##he", "unused"]
FREQUENT = (12, 6, 4, *[1] * 8)  # so that a model soon writes something
WIDTH, INNER, LAYERS, POSITIONS = 16, 32, 2, 64


def write(folder: Path) -> None:
    """All of it into a folder: what is called name-dev is held out."""
    for part, count, seed in (("", 24, 0), ("-dev", 6, 1)):
        rng = random.Random(seed)
        rows = [_row(rng, number) for number in range(count)]
        for name, records in _records(rows).items():
            _jsonl(folder / f"{name}{part}.jsonl", records)
        sentences = ["\n".join(map(" ".join, zip(row["tokens"], row["tags"], strict=True))) for row in rows]
        (folder / f"tags{part}.conll").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
        questions = {"version": "2.0", "data": [{"paragraphs": [_question(row) for row in rows]}]}
        (folder / f"answer{part}.json").write_text(json.dumps(questions, ensure_ascii=False), encoding="utf-8")
        documents = ["\n".join(_row(rng, number)["source"] for _ in range(4)) for number in range(2 * count)]
        (folder / f"corpus{part}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    (folder / "visible.csv").write_text("1,0,0\n1,1,0\n0,1,1\n", encoding="utf-8")
    _images(folder / "images.npz")
    _bert(folder / "bert")


def _row(rng: random.Random, number: int) -> dict[str, Any]:
    """A sentence, every second one Chinese; its title is its beginning, and some of its tokens have a name."""
    chinese = number % 2 == 1
    tokens = rng.choices(CHARACTERS if chinese else WORDS, FREQUENT, k=rng.randint(4, 9))
    join, stop = ("".join, "。") if chinese else (" ".join, ".")
    named = ["O" if token not in ("red", "cat", "北", "迎") else "B-鸡" for token in tokens]
    tags = ["I-鸡" if (a, b) == ("B-鸡", "B-鸡") else b for a, b in zip(["O", *named], named, strict=False)]
    return {
        "id": number, "source": join(tokens) + stop, "target": join(tokens[:3]), "tokens": tokens, "tags": tags,
        "language": "zh" if chinese else "en", "start": 1 if chinese else len(tokens[0]) + 1, "span": join(tokens[1:3]),
    }  # fmt: skip


def _records(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each task, by the name of its file."""
    titles = [{"source": row["source"], "target": row["target"]} for row in rows]
    texts = [{"id": row["id"], "text": row["source"]} for row in rows]
    other = [row["target"] for row in rows[2:] + rows[:2]]
    among = {"red", "blue", "北", "欢"}
    labels = {
        "single": [{"label": row["language"]} for row in rows],
        "multi": [{"label": sorted(among & set(row["tokens"]))} for row in rows],
        "number": [{"label": len(row["tokens"]) / 8} for row in rows],
        "pairs": [
            {
                "text_b": row["target"] if row["id"] % 3 else other[row["id"]],
                "label": "其他" if row["id"] % 3 else "same",
            }
            for row in rows
        ],
    }
    choices = [[row["target"], other[row["id"]]][:: 1 if row["id"] % 3 else -1] for row in rows]
    return {
        **{name: [text | label for text, label in zip(texts, each, strict=True)] for name, each in labels.items()},
        "write": titles,
        "en": titles[::2],
        "zh": titles[1::2],
        "tags": [{"tokens": row["tokens"], "tags": row["tags"]} for row in rows],
        "choose": [
            {"context": row["source"], "choices": both, "label": both.index(row["target"])}
            for row, both in zip(rows, choices, strict=True)
        ],
    }


def _question(row: dict[str, Any]) -> dict[str, Any]:
    """As SQuAD 2 has it: every fifth has no answer."""
    none = row["id"] % 5 == 4
    answers = [] if none else [{"text": row["span"], "answer_start": row["start"]}]
    entry = {"id": f"q{row['id']}", "question": row["target"] + "?", "answers": answers, "is_impossible": none}
    return {"context": row["source"], "qas": [entry]}


def _jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _images(path: Path) -> None:
    """Three classes that differ in brightness; the same in two folders beside the file, without their classes."""
    rng = np.random.default_rng(0)
    found = {}
    for part, count in (("train", 36), ("test", 9)):
        labels = np.arange(count) % 3
        found[f"x_{part}"] = (rng.integers(0, 100, (count, 8, 8)) + 70 * labels[:, None, None]).astype(np.uint8)
        found[f"y_{part}"] = labels.astype(np.uint8)
    np.savez(path, **found)
    for number, pixels in enumerate(found["x_train"]):
        image = path.parent / "photos" / ("en", "zh")[number % 2] / f"{number:02}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(image)


def _bert(folder: Path) -> None:
    """A body with a masked language model's head, as transformers writes it; uniform, so the same everywhere."""
    rng = np.random.default_rng(0)
    shapes = {"bert.embeddings.word_embeddings.weight": (len(PIECES), WIDTH)}
    shapes |= {"bert.embeddings.position_embeddings.weight": (POSITIONS, WIDTH)}
    shapes |= {"bert.embeddings.token_type_embeddings.weight": (2, WIDTH)}
    dense = {"cls.predictions.transform.dense": (WIDTH, WIDTH)}
    for layer in range(LAYERS):
        start = f"bert.encoder.layer.{layer}"
        dense |= {f"{start}.attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
        dense |= {f"{start}.attention.output.dense": (WIDTH, WIDTH), f"{start}.intermediate.dense": (INNER, WIDTH)}
        dense |= {f"{start}.output.dense": (WIDTH, INNER)}
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes["cls.predictions.bias"] = (len(PIECES),)
    weights = {name: (rng.random(shape, np.float32) - np.float32(0.5)) for name, shape in shapes.items()}
    norms = [f"bert.encoder.layer.{layer}.{name}" for layer in range(LAYERS) for name in ("attention.output", "output")]
    for name in ("bert.embeddings", *norms, "cls.predictions.transform"):
        weights |= {f"{name}.LayerNorm.weight": np.ones(WIDTH, np.float32)}
        weights |= {f"{name}.LayerNorm.bias": np.zeros(WIDTH, np.float32)}
    config = {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": len(PIECES), "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
    }  # fmt: skip
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
