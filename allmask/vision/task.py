"""The image task: predict and evaluate with a trained network on image files, arrays and data sets.

recognize = allmask.pipeline("image", "runs/digits")
recognize("seven.png").label             # or an array; or a list of them
recognize.answers(pixels)                # logits for bytes (N, C, H, W)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.data import DataFile, Record
from allmask.errors import CheckpointError, UsageError
from allmask.nn.heads import Labels
from allmask.tasks.common.evaluation import Evaluation, Worst, label_table, score_table
from allmask.tasks.common.marks import Prediction, mark, predictions
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.training import resolve_precision
from allmask.vision import checkpoints
from allmask.vision.datasets import has_part, kind_of, read
from allmask.vision.images import Images, Preparation, find_images, read_all
from allmask.vision.resnet import ResNet
from allmask.vision.training import device_of, logits_of

# a file, or an array: height × width, with channels last or first, bytes or fractions from 0 to 1
Image = str | Path | np.ndarray | Tensor


@dataclass(frozen=True)
class ImageTask(Task):
    """Classify images. Classes and image size come from the network's config."""

    name: ClassVar[str] = "image"

    @classmethod
    def default_for(cls, opened: ModelFolder) -> ImageTask | None:
        return cls() if opened.settings.get("model_type") == checkpoints.MODEL_TYPE else None

    @classmethod
    def how_to_train(cls, source: str) -> str:
        return "train a network: allmask train --task image --data images/ --out runs/images"

    def load(self, opened: ModelFolder) -> checkpoints.Loaded:
        loaded = checkpoints.load(opened.folder)
        return replace(loaded, model=opened.placed(loaded.model))

    def predictor(self, model: checkpoints.Loaded, precision: str = "auto") -> Recognizer:
        if model.labels is None or model.preparation is None:
            raise CheckpointError(
                "this network has no class names or no input normalization",
                "train one that has: allmask train --task image",
            )
        return Recognizer(model.model, model.labels, model.preparation, precision)


@dataclass(frozen=True, eq=False)
class Recognizer(Predictor):
    """A trained network with its class names and input normalization."""

    model: ResNet
    labels: Labels
    preparation: Preparation
    precision: str = "auto"  # fp32 or bf16; auto: the fastest on this machine
    _read: dict[Path, Images] = field(default_factory=dict, init=False, repr=False)  # cache: the last data set

    does: ClassVar[str] = "classifies images"
    done: ClassVar[str] = "classified"
    served: ClassVar[bool] = False  # its inputs are files
    hidden: ClassVar[frozenset[str]] = frozenset({"image"})

    def __post_init__(self):
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"precision is {self.precision}", "for images it is auto, fp32 or bf16")

    @classmethod
    def open(cls, folder: str | Path, precision: str = "auto") -> Recognizer:
        return ImageTask().predictor(checkpoints.load(folder), precision)

    @overload
    def __call__(self, images: str | Path) -> Prediction: ...
    @overload
    def __call__(self, images: Sequence[Image]) -> list[Prediction]: ...
    @overload
    def __call__(self, images: np.ndarray | Tensor) -> Prediction | list[Prediction]: ...

    def __call__(self, images: Image | Sequence[Image]) -> Prediction | list[Prediction]:
        """Classify a file or an array of any size, or several; an array with four dimensions is several images."""
        if isinstance(images, str | Path) or (isinstance(images, np.ndarray | Tensor) and images.ndim < 4):
            return next(self._predictions([_path_or_array(images)]))
        return list(self._predictions([_path_or_array(image) for image in images]))

    def _predictions(self, images: Sequence[Path | np.ndarray]) -> Iterator[Prediction]:
        shape = self.preparation
        for start in range(0, len(images), self.window):
            window = images[start : start + self.window]
            pixels = read_all(window, shape.height, shape.width, shape.channels, first=start + 1)
            yield from predictions(self.labels, self.answers(pixels))

    def answers(self, pixels: Tensor) -> Tensor:
        """Logits (N, classes) for bytes (N, C, H, W) of the network's image size."""
        self.preparation.expect("pixels", pixels)
        return logits_of(self.model, pixels, self.preparation, resolve_precision(self.precision, device_of(self.model)))

    # ---- files ---------------------------------------------------------------------------------------------

    def read(
        self, path: Path | DataFile, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        """Records of an image file, a folder of images or a data set; with targets it must be a data set.

        The field `image` is a path, or the pixels. A limit takes images evenly spaced over a data set, which may be
        ordered by class.
        """
        if on_bad_record != "stop":
            raise UsageError("--on-bad-record is for records", "remove images that cannot be read")
        if isinstance(path, DataFile):
            if path.columns or path.encoding or path.label_names:
                raise UsageError("--columns, --encoding and --label-names are for records", "leave them out")
            path = path.path
        if not targets and kind_of(path) in ("folder", None):
            files = find_images(path)
            return islice((Record({"file": str(file), "image": file}, str(file)) for file in files), limit)
        return self._rows(self.data_set(path).subset(limit), targets)

    def _rows(self, data: Images, targets: bool) -> Iterator[Record]:
        for number in range(len(data)):
            where = data.files[number] if data.files else f"image {number + 1:,}"
            other = {"label": data.names[int(data.labels[number])]} if targets else {"file": where}
            yield Record({**other, "image": data.pixels[number]}, where)

    def data_set(self, path: Path) -> Images:
        """The test part of a data set, or all of it; images of a folder are converted to the network's input."""
        if path in self._read:
            return self._read[path]
        shape, size, channels = self.preparation, None, None
        if kind_of(path) == "folder":
            size, channels = shape.height if shape.height == shape.width else None, shape.channels
        images = read(path, "test" if has_part(path, "test") else "train", size, channels)
        shape.expect(path, images.pixels)
        self._read.clear()
        return self._read.setdefault(path, images.with_names(self.labels.names, path))

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        images = [record.fields["image"] for record in records]
        if isinstance(images[0], Path):
            found = self._predictions(images)
        else:
            found = predictions(self.labels, self.answers(torch.stack(images)))
        return (prediction.to_dict() for prediction in found)

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        """All metrics; `show` errors, those with the highest probability first."""
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


def _path_or_array(image: Any) -> Path | np.ndarray:
    if isinstance(image, str | Path):
        return Path(image)
    if isinstance(image, np.ndarray | Tensor):
        return np.asarray(image)
    raise UsageError(f"an image is a file or an array, not {type(image).__name__}", "give np.asarray(image)")
