"""From a model folder to written or filled text, or to labels, in one line.

write = allmask.pipeline("title", "runs/title/final")
write("北京欢迎你，…")                       # one text in, one title out
write(texts, beams=4, length_penalty=0.8)   # many in, as many out
translate = allmask.pipeline("translate", "runs/de-en")
translate("Ein Hund läuft.", beams=5)
fill = allmask.pipeline("fill", "runs/a/final")
fill("北京欢[MASK]你").text
classify = allmask.pipeline("classify", "runs/reviews")
classify("白切鸡很好吃").label               # also (text, other), or a list
embed = allmask.pipeline("embed", "minilm")
embed(["北京欢迎你", "Beijing welcomes you"])  # vectors, (2, 384)
choose = allmask.pipeline("choose", "runs/c3")
choose("他饿了。", ["他吃白切鸡。", "他睡觉。"]).text
recognise = allmask.pipeline("image", "runs/digits")
recognise("seven.png").label                # also an array, or a list
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from allmask.checkpoints import classifies, kinds_asked, resolve
from allmask.decoding import Decoding, Writer
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model, load
from allmask.tasks.answer import Answer
from allmask.tasks.answerer import Answerer
from allmask.tasks.choose import Choose
from allmask.tasks.choosing import Chooser
from allmask.tasks.classifier import Classifier
from allmask.tasks.classify import Classify
from allmask.tasks.continuation import Continuation
from allmask.tasks.embedding import Embedder
from allmask.tasks.filling import Filler
from allmask.tasks.recogniser import Recogniser
from allmask.tasks.saved import load_task
from allmask.tasks.tag import Tag
from allmask.tasks.tagger import Tagger
from allmask.tasks.title import Title
from allmask.tasks.translate import Translate
from allmask.tasks.writing import Written, stream_text, tokenizer_of, write

log = logging.getLogger("allmask")
TASKS = {"title": Title, "translate": Translate, "generate": (Title, Translate, Continuation)}
OTHERS = ("fill", "classify", "choose", "tag", "answer", "embed", "image")


@dataclass
class Pipeline:
    """A model, the task it writes for, and the writer that keeps its weights ready."""

    model: Model
    task: Title | Translate | Continuation
    precision: str = "auto"  # fp32, bf16, int8; auto is the fastest here
    writer: Writer = field(init=False, repr=False)
    cut: int = field(default=0, init=False)  # texts so far that were longer than the model reads

    def __post_init__(self):
        self.writer = self.task.writer(self.model, self.precision)

    @overload
    def __call__(self, texts: str, **options: Any) -> str: ...
    @overload
    def __call__(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def __call__(self, texts: str | Sequence[str], **options: Any) -> Any:
        """The best text for each; with n_best=N, a list of N. Options are those of `Decoding`. Blank in, blank out."""
        single = isinstance(texts, str)
        several = options.get("n_best", 1) > 1
        found = [[text for text, _ in best] for best in self.write([texts] if single else list(texts), **options)]
        result = found if several else [best[0] if best else "" for best in found]
        return result[0] if single else result

    def write(self, texts: Sequence[str], batch: int = 32, **options: Any) -> Iterator[Written]:
        """The n-best texts of each with their hypotheses, which carry the scores, a batch at a time."""
        settings = self.settings(**options)
        self._count_cut(texts)
        return write(self.task, self.model, texts, settings, batch, self.writer)

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """One text in pieces, as it is written; greedy or sampled."""
        settings = self.settings(**options)
        self._count_cut([text])
        return stream_text(self.task, self.model, text, settings, self.writer)

    def _count_cut(self, texts: Sequence[str]) -> None:
        encoded = tokenizer_of(self.model).encode_batch(list(texts), special=False)
        self.cut += sum(len(one) > self.task.max_source for one in encoded)

    def settings(self, **options: Any) -> Decoding:
        unknown = sorted(set(options) - set(Decoding.__dataclass_fields__))
        if unknown:
            known = ", ".join(Decoding.__dataclass_fields__)
            raise UsageError(f"decoding: there is no option {', '.join(unknown)}", f"known: {known}")
        return self.task.decoding(self.model, **options)


@overload
def pipeline(task: Literal["fill"], model: str | Path) -> Filler: ...
@overload
def pipeline(task: Literal["classify"], model: str | Path, precision: str = "auto") -> Classifier: ...
@overload
def pipeline(task: Literal["choose"], model: str | Path, precision: str = "auto") -> Chooser: ...
@overload
def pipeline(task: Literal["tag"], model: str | Path, precision: str = "auto") -> Tagger: ...
@overload
def pipeline(task: Literal["answer"], model: str | Path, precision: str = "auto") -> Answerer: ...
@overload
def pipeline(task: Literal["embed"], model: str | Path, precision: str = "auto") -> Embedder: ...
@overload
def pipeline(task: Literal["image"], model: str | Path, precision: str = "auto") -> Recogniser: ...
@overload
def pipeline(task: str, model: str | Path, precision: str = "auto") -> Pipeline: ...


def pipeline(
    task: str, model: str | Path, precision: str = "auto"
) -> Pipeline | Filler | Classifier | Chooser | Tagger | Answerer | Embedder | Recogniser:
    """`task` is "title", "translate", "classify", "tag", "answer" or "choose", for a model that was trained for it,
    "generate", for any that writes, such as GPT-2, "fill", for one that guesses what stands where a text says
    [MASK], "embed", for a vector of each text, or "image", for a network that tells what images show."""
    if task == "fill":
        return Filler(load(resolve(model)))
    if task == "classify":
        return open_classifier(model, precision)
    if task == "choose":
        return open_chooser(model, precision)
    if task == "tag":
        return open_tagger(model, precision)
    if task == "answer":
        return open_answerer(model, precision)
    if task == "embed":
        return Embedder.open(resolve(model), precision=precision)
    if task == "image":
        return Recogniser.open(resolve(model), precision)
    if task not in TASKS:
        raise UsageError(f"task is {task!r}; expected one of {', '.join([*TASKS, *OTHERS])}")
    made = open_pipeline(model, precision)
    if not isinstance(made.task, TASKS[task]):
        raise CheckpointError(f'{model}: was not fine-tuned for "{task}"', 'ask for "generate" to continue prompts')
    return made


def open_pipeline(source: str | Path, precision: str = "auto", max_new: int | None = None) -> Pipeline:
    """A writer from a model folder, or from a run: its task is the one it was fine-tuned for."""
    folder = resolve(source)
    model = load(folder)
    return Pipeline(model, _task(model, folder, source, max_new), precision)


def is_classifier(source: str | Path) -> bool:
    """Whether a model folder or run is one that classifies, by what its files say."""
    folder = resolve(source)
    task = load_task(folder)
    return isinstance(task, Classify) or (task is None and classifies(folder))


def open_classifier(source: str | Path, precision: str = "auto") -> Classifier:
    """A classifier from a model folder or a run, of transformers' making, too."""
    folder = resolve(source)
    model = load(folder)
    if model.labels is None or model.labels.kind == "choice" or model.labels.of_tokens:
        raise CheckpointError(
            f"{source}: has no task head, so it cannot classify",
            f"teach it: allmask finetune {source} --task classify --data train.jsonl --out runs/classify",
        )
    task = load_task(folder)
    return Classifier(model, task if isinstance(task, Classify) else Classify(), precision)


def is_chooser(source: str | Path) -> bool:
    """Whether a model folder or run is one that chooses, by what its files say."""
    folder = resolve(source)
    return isinstance(load_task(folder), Choose) or "choice" in kinds_asked(folder)


def open_chooser(source: str | Path, precision: str = "auto") -> Chooser:
    """A chooser from a model folder or a run, of transformers' making, too."""
    folder = resolve(source)
    model = load(folder)
    if model.labels is None or model.labels.kind != "choice":
        raise CheckpointError(
            f"{source}: has no head for choices, so it cannot choose",
            f"teach it: allmask finetune {source} --task choose --data train.jsonl --out runs/choose",
        )
    task = load_task(folder)
    return Chooser(model, task if isinstance(task, Choose) else Choose(), precision)


def token_task(source: str | Path) -> str | None:
    """ "tag" or "answer", if a model folder or run is one that is asked at tokens, by what its files say."""
    folder = resolve(source)
    task, kinds = load_task(folder), kinds_asked(folder)
    if isinstance(task, Tag | Answer):
        return task.to_dict()["task"]
    return None if task is not None else "tag" if "tag" in kinds else "answer" if "span" in kinds else None


def open_tagger(source: str | Path, precision: str = "auto") -> Tagger:
    """A tagger from a model folder or a run, of transformers' making, too."""
    folder = resolve(source)
    task = load_task(folder)
    return Tagger(_asked_at_tokens(source, folder, "tag"), task if isinstance(task, Tag) else Tag(), precision)


def open_answerer(source: str | Path, precision: str = "auto") -> Answerer:
    """One that answers questions, from a model folder or a run, of transformers' making, too."""
    folder = resolve(source)
    task = load_task(folder)
    return Answerer(
        _asked_at_tokens(source, folder, "answer"), task if isinstance(task, Answer) else Answer(), precision
    )


def _asked_at_tokens(source: str | Path, folder: Path, task: str) -> Model:
    model = load(folder)
    kinds = {"tag": ("tag", "chain"), "answer": ("span",)}[task]
    if model.labels is None or model.labels.kind not in kinds:
        raise CheckpointError(
            f"{source}: has no head for it, so it cannot {task}",
            f"teach it: allmask finetune {source} --task {task} --data train.json --out runs/{task}",
        )
    return model


def _task(model: Model, folder: Path, source: str | Path, max_new: int | None) -> Title | Translate | Continuation:
    task = load_task(folder)
    if isinstance(task, Classify | Choose | Tag | Answer):
        told = task.to_dict()["task"]
        raise CheckpointError(f"{source}: was fine-tuned to {told}, not to write", "use allmask predict")
    if model.lm_head is None:
        raise CheckpointError(
            f"{source}: has no language model head, so it cannot write yet",
            f"teach it: allmask finetune {source} --task title --data train.jsonl --out runs/title",
        )
    if isinstance(task, Continuation):
        return task.refitted(model.config.max_positions, max_new)
    if task is None and model.config.family == "xlnet" and model.config.own_mask == "bidirectional":
        return Continuation.within(model.config.max_positions, max_new, framed=True, blanks=True)
    if task is None and model.config.own_mask == "causal":
        return Continuation.within(model.config.max_positions, max_new)
    if task is None:
        log.warning("%s: was not fine-tuned to write; expect nonsense", source)
        task = Title(max_target=min(Title.max_target, model.config.max_positions // 4))
    return task.fitted(model)
