"""The task of images: what a trained network predicts for files, arrays and data sets of images.

recognize = allmask.pipeline("image", "runs/digits")
recognize("seven.png").label             # or an array; or a list of them
recognize.answers(pixels)                # scores of bytes (N, C, H, W)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.data import Record
from allmask.errors import CheckpointError, UsageError
from allmask.nn.heads import Labels
from allmask.tasks.common.evaluation import Evaluation, Worst, label_table, score_table
from allmask.tasks.common.marks import Prediction, mark, predictions
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.training import resolve_precision
from allmask.vision import files
from allmask.vision.images import decoded, has_part, images_below, kind_of, read
from allmask.vision.labelled import Images, Preparation
from allmask.vision.learning import scores_of
from allmask.vision.resnet import ResNet

Image = (
    str | Path | np.ndarray | Tensor
)  # a file; or height × width, with channels last or first, in bytes or fractions


@dataclass(frozen=True)
class ImageTask(Task):
    """Which class an image is of. The classes and the size of images are the network's own."""

    name: ClassVar[str] = "image"

    @classmethod
    def default_for(cls, opened: ModelFolder) -> ImageTask | None:
        return cls() if opened.settings.get("model_type") == files.MODEL_TYPE else None

    @classmethod
    def how_to_train(cls, source: str) -> str:
        return "train a network: allmask train --task image --data images/ --out runs/images"

    def load(self, opened: ModelFolder) -> files.Loaded:
        return files.load(opened.folder)

    def predictor(self, model: files.Loaded, precision: str = "auto") -> Recognizer:
        if model.labels is None or model.preparation is None:
            raise CheckpointError(
                "this network does not say what its classes are called and what images it learnt from",
                "train one that does: allmask train --task image",
            )
        return Recognizer(model.model, model.labels, model.preparation, precision)


@dataclass(frozen=True, eq=False)
class Recognizer(Predictor):
    """A network, the names of its classes, and what it expects of images."""

    model: ResNet
    labels: Labels
    preparation: Preparation
    precision: str = "auto"  # fp32, bf16; auto is the fastest here
    _read: dict[Path, Images] = field(default_factory=dict, init=False, repr=False)  # the last data set

    does: ClassVar[str] = "sees images"
    done: ClassVar[str] = "classified"
    hidden: ClassVar[frozenset[str]] = frozenset({"image"})

    def __post_init__(self):
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"images are not read in {self.precision}", "expected auto, fp32 or bf16")

    @classmethod
    def open(cls, folder: str | Path, precision: str = "auto") -> Recognizer:
        return ImageTask().predictor(files.load(folder), precision)

    @overload
    def __call__(self, images: str | Path) -> Prediction: ...
    @overload
    def __call__(self, images: Sequence[Image]) -> list[Prediction]: ...
    @overload
    def __call__(self, images: np.ndarray | Tensor) -> Prediction | list[Prediction]: ...

    def __call__(self, images: Image | Sequence[Image]) -> Prediction | list[Prediction]:
        """A file or an array, of any size and kind, or several; an array of four dimensions is several."""
        if isinstance(images, str | Path) or (isinstance(images, np.ndarray | Tensor) and images.ndim < 4):
            return next(self._predictions([_taken(images)]))
        return list(self._predictions([_taken(image) for image in images]))

    def _predictions(self, images: Sequence[Path | np.ndarray]) -> Iterator[Prediction]:
        expected = self.preparation
        for at in range(0, len(images), self.window):
            some = images[at : at + self.window]
            pixels = decoded(some, expected.height, expected.width, expected.channels, at)
            yield from predictions(self.labels, self.answers(pixels))

    def answers(self, pixels: Tensor) -> Tensor:
        """Scores (N, classes) of bytes (N, C, H, W), which have the size that is expected."""
        self.preparation.expect("pixels", pixels)
        return scores_of(self.model, pixels, self.preparation, resolve_precision(self.precision))

    # ---- files ---------------------------------------------------------------------------------------------

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        """An image file, the images below a folder, or a data set; with targets, a data set. The field `image` is a
        path or pixels; a limit chooses from all over the data, whose classes may stand one after another."""
        if on_bad_record != "stop":
            raise UsageError("--on-bad-record is for records", "remove images that cannot be read")
        if keep:
            raise UsageError("--keep is for records; an image has no other fields", "leave it out")
        if not targets and kind_of(path) in ("folder", None):
            found = images_below(path)
            return islice((Record({"file": str(file), "image": file}, str(file)) for file in found), limit)
        return self._rows(self.data_set(path).some(limit), targets)

    def _rows(self, data: Images, targets: bool) -> Iterator[Record]:
        for number in range(len(data)):
            where = data.place(number)
            named = {"label": data.names[int(data.labels[number])]} if targets else {"file": where}
            yield Record({**named, "image": data.pixels[number]}, where)

    def data_set(self, path: Path) -> Images:
        """A data set, or its part for tests if it has one; images of a folder are made as they are expected."""
        if path in self._read:
            return self._read[path]
        expected = self.preparation
        square = expected.height == expected.width
        made = (expected.height if square else None, expected.channels) if kind_of(path) == "folder" else (None, None)
        images = read(path, "test" if has_part(path, "test") else "train", *made)
        expected.expect(path, images.pixels)
        self._read.clear()
        return self._read.setdefault(path, images.renumbered(self.labels.names, path))

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        images = [record.fields["image"] for record in records]
        in_files = isinstance(images[0], Path)
        found = self._predictions(images) if in_files else predictions(self.labels, self.answers(torch.stack(images)))
        return (one.to_dict() for one in found)

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        """The errors shown are those of which the network was surest."""
        source, answers, targets, worst = iter(records), [], [], Worst(show)
        while window := list(islice(source, self.window)):
            answers.append(self.answers(torch.stack([record.fields["image"] for record in window])))
            for record, found in zip(window, predictions(self.labels, answers[-1]), strict=True):
                label = record.fields["label"]
                targets.append(self.labels.names.index(label))
                size = 0.0 if found.label == label else found.probability or 0.0
                worst.add(size, lambda record=record, found=found: {
                    "where": record.where, "label": record.fields["label"], "prediction": found.label,
                    "probability": found.probability,
                })  # fmt: skip
        marks = mark(self.labels, torch.cat(answers), torch.tensor(targets))
        classes = {
            name: {"images" if key == "texts" else key: value for key, value in row.items()}
            for name, row in marks.labels.items()
        }
        errors, confusion = worst.rows(), marks.confusion.tolist()
        values = {"scores": marks.scores, "classes": classes, "confusion": confusion}
        values |= {"errors": errors} if show else {}
        tables = [score_table(marks.scores), label_table(classes, confusion, "true class", "images", "images")]
        lines = [
            [f"{row['where']}: true {row['label']}, predicted {row['prediction']} ({row['probability']:.0%})"]
            for row in errors
        ]
        return Evaluation(len(targets), values, tables, examples=lines, unit="image")


def _taken(image: Any) -> Path | np.ndarray:
    if isinstance(image, str | Path):
        return Path(image)
    if isinstance(image, np.ndarray | Tensor):
        return np.asarray(image)
    raise UsageError(f"an image is a file or an array, not {type(image).__name__}", "give np.asarray(image)")
