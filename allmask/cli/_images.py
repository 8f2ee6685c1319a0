"""What `allmask evaluate` and `allmask predict` do with a network of images."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allmask.cli import many
from allmask.errors import UsageError

WIDEST = 12  # classes, up to which the table says what each was taken for


def reads(model: str) -> bool:
    """Whether a model folder or run is one of images."""
    from allmask.checkpoints import resolve
    from allmask.vision.files import is_network

    return is_network(resolve(model))


def evaluated(
    model: str, file: Path, precision: str, limit: int | None, show: int, on_bad_record: str
) -> dict[str, Any]:
    from allmask.checkpoints import resolve
    from allmask.tasks.recogniser import Recogniser

    _expect_stop(on_bad_record)
    recogniser = Recogniser.open(resolve(model), precision)
    began = time.monotonic()
    data = recogniser.read(file).some(limit)
    judged = recogniser.judged(data, show)
    return {
        "model": model,
        "file": str(file),
        "images": len(data),
        "seconds": round(time.monotonic() - began, 2),
        **judged,
    }


def predict(
    model: str, file: Path, precision: str, keep: Sequence[str], on_bad_record: str, put: Callable[[str], None],
    quiet: bool,
) -> None:  # fmt: skip
    """A JSON line for each image."""
    from allmask.checkpoints import resolve
    from allmask.tasks.recogniser import Recogniser
    from allmask.training.progress import Progress

    _expect_stop(on_bad_record)
    if keep:
        raise UsageError("--keep is for records; an image has no other fields", "leave it out")
    if str(file) == "-":
        raise UsageError("this model sees images; a line of stdin is a text", "name an image or a folder")
    recogniser = Recogniser.open(resolve(model), precision)
    total, found = recogniser.stream(file)
    bar = Progress(total, "classified", quiet=quiet)
    for number, (where, told) in enumerate(found, 1):
        put(json.dumps({"file": where, **told.to_dict()}, ensure_ascii=False))
        bar.update(number)
    bar.close()


def _expect_stop(on_bad_record: str) -> None:
    if on_bad_record != "stop":
        raise UsageError("--on-bad-record is for records", "remove images that cannot be read")


def in_words(result: dict[str, Any]) -> str:
    """Markdown tables, as for texts."""
    scores = result["scores"]
    lines = [f"| {many(result['images'], 'image')} | " + " | ".join(name.replace("_", " ") for name in scores) + " |"]
    lines += ["|---" * (1 + len(scores)) + "|", "| model | " + " | ".join(f"{v:.3f}" for v in scores.values()) + " |"]
    lines += ["", *_class_table(result["classes"], result["confusion"])]
    for row in result.get("errors", ()):
        taken = f"taken for {row['prediction']} ({row['probability']:.0%})"
        lines += ["", f"{row['where']}: is {row['label']}, {taken}"]
    return "\n".join(lines)


def _class_table(classes: dict[str, dict[str, float]], confusion: list[list[int]]) -> list[str]:
    """Of each class how well it is told, and what its images were taken for."""
    taken = [f"→ {name}" for name in classes] if len(classes) <= WIDEST else []
    header = ["class", "images", "precision", "recall", "F1", *taken]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for (name, row), counts in zip(classes.items(), confusion, strict=True):
        cells = [name, f"{row['images']:,}", *(f"{row[one]:.3f}" for one in ("precision", "recall", "f1"))]
        lines.append(f"| {' | '.join([*cells, *(f'{count:,}' for count in counts if taken)])} |")
    return lines
