"""`allmask.pipeline(task, model)`: a model folder in, a function out.

write = allmask.pipeline("title", "runs/title/final")
write("北京欢迎你，…")                       # one text in, one title out
write(texts, beams=4, length_penalty=0.8)   # many in, as many out
translate = allmask.pipeline("translate", "runs/de-en")
translate("Ein Hund läuft.", beams=5)
fill = allmask.pipeline("fill", "runs/a/final")
fill("北京欢[MASK]你").text
classify = allmask.pipeline("classify", "runs/reviews")
classify("白切鸡很好吃").label               # also (text, other), or a list
embed = allmask.pipeline("embed", "allmask-en")
embed(["北京欢迎你", "Beijing welcomes you"])  # vectors, (2, 384)
choose = allmask.pipeline("choose", "runs/c3")
choose("他饿了。", ["他吃白切鸡。", "他睡觉。"]).text
recognize = allmask.pipeline("image", "runs/digits")
recognize("seven.png").label                # also an array, or a list
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from allmask.errors import UsageError
from allmask.registry import TASKS, USES
from allmask.tasks.task import ModelFolder

if TYPE_CHECKING:
    from allmask.tasks.answer import Answerer
    from allmask.tasks.choose import Chooser
    from allmask.tasks.classify import Classifier
    from allmask.tasks.common.generator import TextGenerator
    from allmask.tasks.embed import Embedder
    from allmask.tasks.fill import Filler
    from allmask.tasks.tag import Tagger
    from allmask.vision.task import Recognizer


@overload
def pipeline(task: Literal["fill"], model: str | Path, *, device: str = "auto") -> Filler: ...
@overload
def pipeline(
    task: Literal["classify"], model: str | Path, precision: str = "auto", device: str = "auto"
) -> Classifier: ...
@overload
def pipeline(task: Literal["choose"], model: str | Path, precision: str = "auto", device: str = "auto") -> Chooser: ...
@overload
def pipeline(task: Literal["tag"], model: str | Path, precision: str = "auto", device: str = "auto") -> Tagger: ...
@overload
def pipeline(task: Literal["answer"], model: str | Path, precision: str = "auto", device: str = "auto") -> Answerer: ...
@overload
def pipeline(task: Literal["embed"], model: str | Path, precision: str = "auto", device: str = "auto") -> Embedder: ...
@overload
def pipeline(
    task: Literal["image"], model: str | Path, precision: str = "auto", device: str = "auto"
) -> Recognizer: ...
@overload
def pipeline(
    task: Literal["title", "translate", "continue", "generate"],
    model: str | Path,
    precision: str = "auto",
    device: str = "auto",
) -> TextGenerator: ...
@overload
def pipeline(task: str, model: str | Path, precision: str = "auto", device: str = "auto") -> Any: ...


def pipeline(task: str, model: str | Path, precision: str = "auto", device: str = "auto") -> Any:
    """Return a model ready for `task`, the one it was trained for: "title", "classify" or another name of `TASKS`.

    Three tasks (`USES`) need no fine-tuning: "generate" writes with any model that can, such as GPT-2; "fill" predicts
    the tokens behind [MASK]; "embed" returns a vector for each text. `device` is cpu, cuda or mps; auto: a CUDA GPU if
    there is one, else the CPU.
    """
    if task not in TASKS and task not in USES:
        raise UsageError(f"there is no task {task!r}", f"there are: {', '.join([*TASKS, *USES])}")
    opened = ModelFolder.open(model, device)
    return USES[task](opened, precision) if task in USES else opened.predictor(task, precision)
