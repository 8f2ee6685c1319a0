"""Every option of the commands that train, declared once: a field with its default, its limits and its help text.

The command line, config.yaml and docs/options.md are made from these dataclasses, and a value that cannot be is refused
when one of them is made, before torch is imported. A task inherits from its options (`class Title(TitleOptions)`); a
task of another package may declare its fields in the same way:

    @dataclass(frozen=True)
    class Sentiment:
        max_length: int = option(128, "Longest text, in tokens.", "data", minimum=4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from allmask.errors import UsageError
from allmask.files import did_you_mean
from allmask.presets import PRESETS
from allmask.registry import OBJECTIVES

GROUPS = ("data", "model", "training", "output", "advanced")  # the sections of --help, in this order
_KEY = "allmask.option"  # in the metadata of a field


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name, its type and its default.

    `shown_default` is shown instead of the default, where that is None or is chosen later. `other_names` are accepted
    in files, not offered. An option with `commands` is on the command line of these only; one with `flag` "" of none,
    unless it is an `argument`: a positional one, which has this name in the usage line.
    """

    help: str = ""
    group: str = "training"
    choices: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    flag: str | None = None  # instead of the field's name with dashes; several are separated by spaces
    argument: str = ""
    metavar: str | None = None
    shown_default: str | None = None
    commands: tuple[str, ...] = ()

    def check(self, name: str, value: Any, where: str = "") -> None:
        """Refuse a value that cannot be; `where` it stands is said before its name."""
        if value is None:
            return
        if self.choices and value not in (*self.choices, *self.other_names):
            raise UsageError(f"{where}{name} is {value!r}; expected {_listed(self.choices)}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        above = (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
        below = (self.maximum is None or value <= self.maximum) and (self.below is None or value < self.below)
        if not (above and below):
            raise UsageError(f"{where}{name} is {value}; {self._limits(name)}")

    def _limits(self, name: str) -> str:
        if self.maximum is None and self.below in (None, float("inf")):
            return "it must be positive" if self.minimum is None else f"expected at least {self.minimum:g}"
        low = f"{self.above:g} <" if self.minimum is None else f"{self.minimum:g} <="
        return f"expected {low} {name} " + (f"<= {self.maximum:g}" if self.below is None else f"< {self.below:g}")


def option(
    default: Any = MISSING, help: str = "", group: str = "training", *, choices: Iterable[str] = (), **declared: Any
) -> Any:
    """A field of a dataclass that is an option of the command line and of config.yaml; see `Option`."""
    described = Option(help, group, tuple(choices), **declared)
    return field(default=default, metadata={_KEY: described})


def another_default(kind: type, name: str, default: Any, **changes: Any) -> Any:
    """A field as another class declares it, but for its default and what else is named."""
    (found,) = (entry for entry in fields(kind) if entry.name == name)
    return field(default=default, metadata={_KEY: replace(described(found), **changes)})


def described(entry: Field[Any]) -> Option:
    """What a field declares; a field without `option()` is an option of its task all the same."""
    return entry.metadata.get(_KEY) or Option(group="advanced")


class Options:
    """A base for dataclasses whose fields are options: each value is checked when one is made."""

    def __post_init__(self):
        for entry in fields(self):  # type: ignore[arg-type]
            described(entry).check(entry.name, getattr(self, entry.name))


def check_preset(preset: str, known: Iterable[str], what: str = "") -> None:
    if preset not in known:
        expected = f"; expected one for {what}" if what else ""
        raise UsageError(f"preset is {preset!r}{expected}", did_you_mean(preset, known))


def _listed(choices: tuple[str, ...]) -> str:
    """a or b; a, b or c; one of a, b, c, d."""
    if len(choices) > 3:
        return f"one of {', '.join(choices)}"
    return " or ".join(filter(None, [", ".join(choices[:-1]), *choices[-1:]]))


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
        "linear",
        "Learning rate after the warm-up; steps: a tenth after half of the steps, a hundredth after three quarters.",
        choices=SCHEDULES,
    )
    warmup: float = option(0.1, "Share of the steps for linear warm-up; above 1, a number of steps.", minimum=0)
    optimizer: str = option("adamw", "Optimizer; sgd has --momentum.", choices=("adamw", "sgd"))
    weight_decay: float = option(0.01, "Weight decay.", minimum=0)
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW: decay of the running mean and variance.", "advanced")
    adam_eps: float = option(1e-8, "AdamW: added to the denominator.", "advanced", above=0)
    momentum: float = option(0.9, "SGD: momentum.", "advanced", minimum=0, below=1)
    clip: float = option(1.0, "Clip gradients to this norm.", "advanced", above=0)
    label_smoothing: float = option(0.0, "Label smoothing.", minimum=0, below=1)
    dropout: float | None = option(
        None,
        "Dropout; 0 learns faster where no example is seen twice.",
        minimum=0,
        below=1,
        shown_default="the model's",
    )
    seed: int = option(1, "Random seed.", minimum=0, below=2**63)
    precision: str = option(
        "auto", "Arithmetic; auto is bf16 where the CPU supports it.", choices=("auto", "fp32", "bf16")
    )
    eval_every: int | None = option(None, "Steps between evaluations.", "output", above=0, shown_default="ten in all")
    save_every: int | None = option(
        None, "Steps between checkpoints.", "output", above=0, shown_default="as --eval-every"
    )
    keep: int = option(2, "Checkpoints to keep, besides the best one.", "output", above=0)
    patience: int | None = option(
        None, "Stop early after this many evaluations without progress.", above=0, shown_default="never"
    )
    max_bad_steps: int = option(
        5, "Give up after this many steps in a row whose loss or gradient is not finite.", "advanced", above=0
    )
    ema: float | None = option(
        None, "Evaluate and keep a moving average of the weights with this decay, such as 0.999.", "advanced",
        above=0, below=1, shown_default="none",
    )  # fmt: skip
    recompute: bool = option(False, "Recompute layers in the backward pass: less memory, a third slower.", "advanced")
    tensorboard: bool = option(False, "Also write curves for TensorBoard; needs the package.", "output")
    layer_decay: float | None = option(
        None, "Each layer's learning rate as a share of that of the layer above, such as 0.9.", "advanced",
        above=0, maximum=1, shown_default="none",
    )  # fmt: skip

    def warmup_steps(self, steps: int) -> int:
        return int(self.warmup) if self.warmup > 1 else round(self.warmup * steps)


def as_plain(options: Any) -> dict[str, Any]:
    """The values of a dataclass as YAML has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}


def as_text(value: Any) -> str:
    """A default as --help shows it; nothing where there is none."""
    if value is MISSING or value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(as_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


PRETRAINING = Settings(batch_tokens=8192, schedule="cosine", betas=(0.9, 0.98))
FROM_SCRATCH = {  # of a new model for texts, as arXiv 1706.03762 has them
    "epochs": 20.0,
    "schedule": "inverse-root",
    "weight_decay": 0.0,
    "betas": (0.9, 0.98),
    "adam_eps": 1e-9,
    "label_smoothing": 0.1,
}
IMAGES = Settings(epochs=30.0, batch_tokens=128, lr=2e-3, schedule="cosine", warmup=0.05, weight_decay=0.05, keep=2)
IMAGES_BY_SGD = replace(  # as arXiv 1512.03385 has it for CIFAR-10
    IMAGES, optimizer="sgd", lr=0.1, schedule="steps", warmup=0.0, weight_decay=1e-4, clip=1e9
)
GAMES = Settings(
    epochs=100.0, batch_tokens=64, lr=2e-4, schedule="constant", warmup=0.0, weight_decay=0.0, betas=(0.5, 0.999),
    clip=1e9, precision="fp32",
)  # fmt: skip
TOY_GAMES = replace(GAMES, epochs=70.0, batch_tokens=256, lr=5e-3, schedule="linear")


# ---- tasks ---------------------------------------------------------------------------------------------------
# `reads` are the fields of a record; `suggests` are settings that suit the model and the data unless given, and how.

CUTS = ("head", "tail", "head+tail")
WINDOWS = "windows"
BY_WIDTH = "by the model's width"
ENCODER_DECODER = "encoder-decoder"  # the prefix mask with two stacks, which a model has or has not
TAG_SCHEMES = ("bio", "iob1", "bioes", "plain")


@dataclass(frozen=True)
class TitleOptions(Options):
    name: ClassVar[str] = "title"
    prunes: ClassVar[bool] = True
    reads: ClassVar[str] = "source, target"
    suggests: ClassVar[dict[str, str]] = {}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_source: int = option(254, "Longest source, in tokens.", "data", minimum=1)
    max_target: int = option(64, "Longest target, in tokens.", "data", minimum=1)
    truncate: str = option("head", "What is kept of longer texts.", "data", choices=CUTS)
    mask: str = option(
        "prefix", "How the source reads itself: in both directions (prefix), or left to right (naive).", "model",
        choices=("prefix", "naive"), other_names=(ENCODER_DECODER,),
    )  # fmt: skip


@dataclass(frozen=True)
class TranslateOptions(Options):
    name: ClassVar[str] = "translate"
    prunes: ClassVar[bool] = False
    reads: ClassVar[str] = "source, target"
    suggests: ClassVar[dict[str, str]] = {"label_smoothing": "0.1"}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_source: int = another_default(TitleOptions, "max_source", 254)
    max_target: int = another_default(TitleOptions, "max_target", 254)
    truncate: str = another_default(TitleOptions, "truncate", "head")
    mask: str = another_default(TitleOptions, "mask", "prefix")
    best: str = option("bleu", "Held-out metric that chooses the best weights.", "output", choices=("bleu", "loss"))


@dataclass(frozen=True)
class ContinuationOptions(Options):
    name: ClassVar[str] = "continue"

    max_source: int = another_default(TitleOptions, "max_source", MISSING)
    max_target: int = another_default(TitleOptions, "max_target", 64)
    framed: bool = option(False, "Texts begin with [CLS] and end with [SEP], or what stands for them.", "advanced")
    blanks: bool = option(False, "Fill in positions that are known beforehand (permutations).", "advanced")
    leftwards: bool = option(False, "The prompt ends a text; what stands before it is written.", "advanced")


@dataclass(frozen=True)
class ClassifyOptions(Options):
    name: ClassVar[str] = "classify"
    prunes: ClassVar[bool] = False  # texts to come have words that the data has not
    reads: ClassVar[str] = "text, label, perhaps text_b"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 32 texts"}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_length: int = option(512, "Longest input, in tokens, special tokens included.", "data", minimum=5)
    truncate: str = another_default(TitleOptions, "truncate", "head", choices=(*CUTS, WINDOWS))
    pool_windows: str = option(
        "mean", "How answers for windows of a text (--truncate windows) are combined.", "data", choices=("mean", "max")
    )
    pair: bool | None = option(None, "Compare two texts, text and text_b.", "data", shown_default="as the data is")
    kind: str | None = option(
        None, "One label per text, several, or a number.", "data",
        choices=("single", "multi", "number"), shown_default="as the labels look",
    )  # fmt: skip
    class_weights: str = option(
        "none", "balanced: rare labels weigh as much as frequent ones.", choices=("none", "balanced")
    )


@dataclass(frozen=True)
class ChooseOptions(Options):
    name: ClassVar[str] = "choose"
    prunes: ClassVar[bool] = False
    reads: ClassVar[str] = "context, choices, label"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 16 questions"}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_length: int = another_default(ClassifyOptions, "max_length", 512)
    truncate: str = another_default(ClassifyOptions, "truncate", "head+tail")  # a question often ends its context
    pool_windows: str = another_default(ClassifyOptions, "pool_windows", "mean")


@dataclass(frozen=True)
class TagOptions(Options):
    name: ClassVar[str] = "tag"
    prunes: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens, tags, or CoNLL columns"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 32 sentences"}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_length: int = another_default(ClassifyOptions, "max_length", 512, minimum=4)  # [CLS], two pieces, [SEP]
    crf: bool = option(False, "Score the tags of a text together (conditional random field).", "model")
    scheme: str | None = option(
        None, "How tags mark entities.", "data", choices=TAG_SCHEMES, shown_default="as the tags look"
    )


@dataclass(frozen=True)
class AnswerOptions(Options):
    name: ClassVar[str] = "answer"
    prunes: ClassVar[bool] = False
    reads: ClassVar[str] = "SQuAD's json"
    suggests: ClassVar[dict[str, str]] = {"lr": BY_WIDTH, "batch_tokens": "about 16 windows"}
    open_settings: ClassVar[frozenset[str]] = frozenset(suggests)

    max_length: int = another_default(ClassifyOptions, "max_length", 384, minimum=8)
    max_question: int = option(64, "Longest question, in tokens.", "data", minimum=1)
    stride: int = option(128, "Tokens that neighbouring windows of a long context share.", "data", minimum=0)
    max_answer: int | None = option(
        None, "Longest answer, in tokens.", "data", minimum=1, shown_default="as the data has them, 30 at least"
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


# ---- runs ----------------------------------------------------------------------------------------------------

STACKS = tuple(name for name, make in PRESETS.items() if not make().decoder_layers)
TWO_STACKS = tuple(name for name in PRESETS if name not in STACKS)
WRITERS = tuple(name for name, make in PRESETS.items() if make().decoder_layers or make().family == "bert")
_DEPTHS = (18, 34, 50, 101, 152, 20, 32, 44, 56, 110, 1202)
IMAGE_PRESETS = tuple(f"{kind}{depth}" for kind in ("resnet", "plain") for depth in _DEPTHS)
GAN_PRESETS = ("toy", "mlp", "dcgan")
GAN_LOSSES = ("non-saturating", "saturating")
FEWEST_IMAGES = 4  # of a batch: any division of more than that leaves two, which a norm needs
BATCH_IMAGES = "batch_images"  # what batch_tokens is called where no texts are read
_OF_TEXTS = ("dropout", "ema", "recompute", "layer_decay")  # a mean of weights would need statistics of its own


@dataclass(frozen=True)
class CommandOptions(Options):
    """How a command that trains goes about it; these are not in config.yaml."""

    out: str | None = option(None, "Folder of the run: a new one.", "output", flag="--out -o", metavar="FOLDER")
    config: str | None = option(
        None, "YAML file of these options, such as lr: 0.0003; flags override it.", "training", metavar="FILE"
    )
    resume: bool = option(False, "Continue the run in --out where it stopped.", "output", flag="--resume")
    quiet: bool = option(False, "No progress, no samples; warnings and errors only.", "output", flag="--quiet -q")
    json: bool = option(False, "Print the result as JSON.", "output", flag="--json")
    shard: bool = option(
        False,
        "With torchrun: each process keeps a part of the model (FSDP2).",
        "advanced",
        flag="--shard",
    )


class RunOptions(Options):
    """A base for the options of a kind of run, which has `Settings` besides."""

    paths: ClassVar[tuple[str, ...]] = ("data", "eval")  # options that name files or folders
    fitted: ClassVar[tuple[str, ...]] = ()  # options that are lowered to what the model can hold
    unused: ClassVar[tuple[str, ...]] = ()  # settings that mean nothing to it
    renamed: ClassVar[dict[str, str]] = {}  # settings that have another name in config.yaml
    suggests: ClassVar[dict[str, str]] = {}  # how defaults that depend on other values are shown
    details: ClassVar[dict[str, str]] = {}  # what is to be said of settings besides their help

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that are not those of the fields and of `Settings`, for typed values."""
        return {}

    def check(self, settings: Settings) -> None:
        """Refuse settings that contradict the options."""


def setting_names(kind: type[RunOptions]) -> dict[str, str]:
    """The names of settings in the config.yaml of a kind of run, and those of the fields of `Settings`."""
    used = [entry.name for entry in fields(Settings) if entry.name not in kind.unused]
    return {kind.renamed.get(name, name): name for name in used}


def flat_settings(kind: type[RunOptions], settings: Settings) -> dict[str, Any]:
    """Settings by the names that they have in the config.yaml of a kind of run."""
    return {name: getattr(settings, theirs) for name, theirs in setting_names(kind).items()}


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """A run that learns a task from records."""

    paths: ClassVar[tuple[str, ...]] = ("model", "data", "eval", "tokenizer")
    fitted: ClassVar[tuple[str, ...]] = ("max_source", "max_target", "max_length")

    model: str | None = option(
        MISSING, "A model folder or file, the bundled name minilm, or org/name.", "model", flag="", argument="MODEL",
        commands=("finetune",),
    )  # fmt: skip
    data: str = option(MISSING, "Training records, jsonl, csv or parquet:", "data", metavar="FILE")
    eval: str | None = option(
        None, "Held-out records: the best weights on them are kept.", "data", metavar="FILE", shown_default="none"
    )
    prune: bool | None = option(
        None, "Keep only the tokens that the data uses.", "model",
        shown_default="the task's", commands=("finetune",),
    )  # fmt: skip
    lm_weight: float = option(
        0.0, "Weight of a language model's loss added to the task's, such as 0.5.", "advanced",
        minimum=0, below=float("inf"), commands=("finetune",),
    )  # fmt: skip
    freeze: bool = option(
        False, "Train only the head, on features of the unchanged body: fast.", commands=("finetune",)
    )
    seeds: int = option(
        1, "Repeat the run with this many seeds: mean ± deviation; the best is kept.", "advanced",
        minimum=1, commands=("finetune",),
    )  # fmt: skip
    search: bool = option(
        False, "Try 12 settings around these (batch, lr, epochs); bad runs are stopped early.", "advanced",
        commands=("finetune",),
    )  # fmt: skip
    average: int = option(
        0, "Keep the mean of the last N checkpoints, if it is better.", "output", metavar="N", shown_default="none"
    )
    on_bad_record: str = option(
        "stop", "What to do with a record that cannot be used.", "data", choices=("stop", "skip")
    )

    def __post_init__(self):
        super().__post_init__()
        if self.freeze and self.lm_weight:
            raise UsageError("--lm-weight cannot be combined with --freeze", "leave one of them out")
        if self.seeds > 1 and self.search:
            raise UsageError("--seeds and --search exclude each other", "search first, then repeat what was found")
        if (self.seeds > 1 or self.search) and self.eval is None:
            raise UsageError("several runs are compared by held-out records", "name them with --eval")
        if self.average < 0 or self.average == 1:
            raise UsageError(f"average is {self.average}; expected a number of checkpoints, such as 5")

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {"model": None, "keep": max(Settings.keep, values.get("average", 0))}
        return kept | (FROM_SCRATCH if values.get("preset") is not None else {})

    def check(self, settings: Settings) -> None:
        if self.search and settings.steps is not None:
            raise UsageError("--search tries numbers of epochs", "leave --steps out")
        if self.average > settings.keep:
            kept = f"the mean of {self.average} checkpoints cannot be taken of {settings.keep}"
            raise UsageError(kept, "raise --keep")


_TRAIN = {"commands": ("train",)}


@dataclass(frozen=True)
class FreshOptions(Options):
    """A new model for texts: the shape of a preset, and a vocabulary, given or learnt from the data."""

    preset: str = option(
        "transformer-small", "Shape of the new model: transformer-base, t5-small, …", "model", **_TRAIN
    )
    tokenizer: str | None = option(
        None, "Folder or file with a vocabulary.", "model", metavar="FOLDER", shown_default="learnt from the data",
        **_TRAIN,
    )  # fmt: skip
    vocab_size: int = option(8000, "Tokens (BPE) of the vocabulary that is learnt.", "model", minimum=1, **_TRAIN)
    layers: int | None = option(None, "Layers of each stack.", "model", shown_default="the preset's", **_TRAIN)
    width: int | None = option(
        None, "Width; heads and --ffn-width follow unless given.", "model", shown_default="the preset's", **_TRAIN
    )
    heads: int | None = option(None, "Attention heads.", "model", shown_default="the preset's", **_TRAIN)
    ffn_width: int | None = option(
        None, "Width of the feed-forward layers.", "model", shown_default="the preset's", **_TRAIN
    )

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, WRITERS)
        if self.tokenizer is not None and self.vocab_size != FreshOptions.vocab_size:
            raise UsageError("a tokenizer has its own vocabulary", "leave out --vocab-size or --tokenizer")


FRAMES = {  # of our objectives: special tokens that are put around a row; here, since importing them takes a second
    "mlm": 2, "nsp": 3, "causal": 2, "reverse": 2, "permutation": 2, "prefix": 3, "unilm": 3, "mass": 2, "span": 1,
}  # fmt: skip
OF_PAIRS = ("mass", "span")  # objectives of an encoder–decoder
STREAMED = ("causal", "reverse")  # these take rows as they are cut out of a stream of documents
RATES = {"permutation": 2e-4}  # learnt alone; with 7e-4 all hidden states of a bert-small became the same
OBJECTIVE_OPTIONS = {  # of ours: what the objectives call it, and which of them have it
    "mask_share": ("share", ("mlm", "nsp", "unilm")),
    "whole_words": ("whole_words", ("mlm", "nsp")),
    "ngrams": ("ngrams", ("mlm", "nsp", "unilm")),
    "unilm_weights": ("weights", ("unilm",)),
}
SHAPE = ("layers", "width", "heads", "ffn_width", "max_positions")


def objective_weights(text: str) -> dict[str, float]:
    """Parse names with weights, separated by commas (`mlm:0.5,causal:0.5`); a weight left out is 1."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, weight = (part.strip() for part in entry.partition(":"))
        if name not in OBJECTIVES:
            raise UsageError(f'objective "{text}": there is no "{name}"', did_you_mean(name, OBJECTIVES))
        if name in weights:
            raise UsageError(f'objective "{text}": {name} is there twice', "name each once, with one weight")
        try:
            weights[name] = float(weight) if colon else 1.0
        except ValueError:
            weights[name] = float("nan")
        if not 0.0 < weights[name] < float("inf"):
            hint = f"write a positive number, such as {name}:0.5"
            raise UsageError(f'objective "{text}": the weight of {name} is "{weight}"', hint)
    return weights


@dataclass(frozen=True)
class PretrainOptions(RunOptions):
    """A run that learns objectives from plain text."""

    paths: ClassVar[tuple[str, ...]] = ("data", "eval", "tokenizer", "model")
    suggests: ClassVar[dict[str, str]] = {"lr": "0.0005; permutation alone: 0.0002"}

    data: tuple[str, ...] = option(
        MISSING,
        "Text: a sentence per line, a blank line between documents; or jsonl, parquet, csv; also .gz; or folders.",
        "data", metavar="FILE", argument="FILES",
    )  # fmt: skip
    objective: str = option("mlm", f"What to learn: {', '.join(FRAMES)}; or several, such as mlm:0.5,causal:0.5.")
    eval: tuple[str, ...] = option((), "Held-out text.", "data", metavar="FILE", shown_default="see --held-out")
    held_out: float = option(0.01, "Share of the documents held out, without --eval.", "data", minimum=0, below=1)
    tokenizer: str | None = option(
        None, "Folder that allmask tokenizer train made, or a model's.", "model", metavar="FOLDER"
    )
    model: str | None = option(
        None, "Continue from this model, instead of a new one: a folder, or minilm.", "model", flag="--from",
        metavar="MODEL",
    )  # fmt: skip
    preset: str | None = option(
        None, "Shape of the new model: bert-tiny, gpt2, …; for mass and span t5-small, …", "model",
        shown_default="bert-small; mass, span: transformer-small",
    )  # fmt: skip
    layers: int | None = another_default(FreshOptions, "layers", None, commands=())
    width: int | None = another_default(FreshOptions, "width", None, commands=())
    heads: int | None = another_default(FreshOptions, "heads", None, commands=())
    ffn_width: int | None = another_default(FreshOptions, "ffn_width", None, commands=())
    max_positions: int | None = option(
        None, "Longest text the model can read, in tokens.", "model", shown_default="the preset's"
    )
    length: int = option(128, "Tokens of a row, [CLS] and [SEP] included.", "data")
    across: bool = option(False, "Let rows run across documents, so that all are full.", "data")
    verbatim: bool = option(False, "Keep line ends and blank lines; a file is one document.", "data")
    text_field: str = option("text", "Field of a record that holds the text.", "data")
    on_bad_record: str = another_default(FinetuneOptions, "on_bad_record", "stop")
    mask_share: float | None = option(
        None, "mlm, nsp, unilm: share of the tokens that is hidden.", "advanced", shown_default="0.15"
    )
    whole_words: bool = option(False, "mlm, nsp: hide whole words, not pieces of them.", "advanced")
    ngrams: tuple[float, ...] = option(
        (), "mlm, nsp, unilm: weights of hiding 1 token in a row, then 2, then 3, …", "advanced"
    )
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
                named = ", ".join(given)
                raise UsageError(f"{self.model} has a shape and a tokenizer of its own, so no {named} can be given")
        elif self.tokenizer is None:
            raise UsageError(
                "no tokenizer was named",
                f"train one: allmask tokenizer train {self.data[0]} --size 8000 --out tok/ and pass --tokenizer tok/\n"
                "or go on with a model that has one: --from MODEL",
            )

    def frames(self) -> dict[str, tuple[int, bool]] | None:
        """Special tokens around a row, and whether it takes an encoder–decoder, of each objective.

        None if one of them is of another package, which must be imported to know.
        """
        names = objective_weights(self.objective)
        return {name: (FRAMES[name], name in OF_PAIRS) for name in names} if names.keys() <= FRAMES.keys() else None

    def _check_objectives(self, frames: Mapping[str, tuple[int, bool]]) -> None:
        pairs = [name for name, (_, pair) in frames.items() if pair]
        others = [name for name in frames if name not in pairs]
        names = ", ".join(frames)
        if pairs and others:
            hint = "mass and span are for an encoder–decoder, the others for a single stack"
            raise UsageError(f"{', '.join(pairs)} and {', '.join(others)} cannot be trained in one model", hint)
        streamed = self.across and frames.keys() <= set(STREAMED)
        least = max(1, 0 if streamed else max(frame for frame, _ in frames.values())) + 1
        if self.length < least:
            raise UsageError(f"length is {self.length}; {names} needs {least} at least")
        if self.across and "nsp" in frames:
            raise UsageError("nsp needs rows within documents", "leave --across out")
        for name, (_, owners) in OBJECTIVE_OPTIONS.items():
            if getattr(self, name) and not set(owners) & frames.keys():
                raise UsageError(f"{name} is for {', '.join(owners)}, not for {names}", "leave it out")
        if self.preset is not None:
            check_preset(self.preset, TWO_STACKS if pairs else STACKS, names)

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        names = str(values.get("objective", cls.objective)).split(",")
        rate = RATES.get(names[0].partition(":")[0].strip(), PRETRAINING.lr) if len(names) == 1 else PRETRAINING.lr
        return {"data": (), **flat_settings(cls, PRETRAINING), "lr": rate}


@dataclass(frozen=True)
class ImageOptions(RunOptions):
    """A run that learns to classify images."""

    name: ClassVar[str] = "image"
    unused: ClassVar[tuple[str, ...]] = _OF_TEXTS
    renamed: ClassVar[dict[str, str]] = {"batch_tokens": BATCH_IMAGES}
    details: ClassVar[dict[str, str]] = {
        "optimizer": "sgd has the defaults of the ResNet paper: --lr 0.1 --weight-decay 1e-4 --schedule steps, no "
        "warm-up, no clipping"
    }

    data: str = option("digits", "Folder of images, a folder per class; or MNIST, CIFAR-10, an .npz.", "data")
    eval: str | None = option(
        None, "Held-out images: the best weights on them are kept.", "data", metavar="FILE",
        shown_default="the test part, if there is one",
    )  # fmt: skip
    preset: str = option("resnet20", "Shape of the new model: resnet18, resnet56, …, plain20, …", "model")
    size: int | None = option(
        None, "Scale a folder's images to this many pixels per side, cropped to the middle.", "data",
        shown_default="as they are",
    )  # fmt: skip
    channels: int | None = option(
        None, "Convert a folder's images to 1 channel (grey) or 3.", "data", shown_default="as they are"
    )
    crop: int | None = option(
        None, "Shift each image at random by up to this many pixels.", minimum=0, shown_default="an eighth of a side"
    )
    flip: bool | None = option(None, "Mirror every second image, at random.", shown_default="if it has colours")

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, IMAGE_PRESETS)

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return flat_settings(cls, IMAGES_BY_SGD if values.get("optimizer") == "sgd" else IMAGES)

    def check(self, settings: Settings) -> None:
        if settings.batch_tokens < FEWEST_IMAGES:
            raise UsageError(f"{BATCH_IMAGES} is {settings.batch_tokens}; expected {FEWEST_IMAGES} or more")


@dataclass(frozen=True)
class GanOptions(RunOptions):
    """A run in which a generator and a discriminator play against each other."""

    name: ClassVar[str] = "gan"
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
        None, "Image classifier (--task image) to evaluate with.", "output", metavar="FOLDER",
        shown_default="one is trained",
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_preset(self.preset, GAN_PRESETS, "--task gan")
        strange = [name for name in ("data", "size", "channels", "judge") if getattr(self, name) is not None]
        if self.is_toy and strange:
            raise UsageError(f"{', '.join(strange)}: for images, not for a toy", "leave it out, or --preset dcgan")

    @property
    def is_toy(self) -> bool:
        return self.preset == "toy"

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if values.get("preset") == "toy":
            return {"k": 3} | flat_settings(cls, TOY_GAMES)
        return flat_settings(cls, GAMES)

    check = ImageOptions.check


# ---- writing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding(Options):
    """How to write. `Decoding()` is greedy; `beams=4` is beam search; `sample=True` draws.

    Filters apply in this order: banned tokens, minimal length, n-grams; then, in sampling, temperature, top_k, top_p.
    """

    end: tuple[int, ...] = option((), "Tokens that end a hypothesis.", flag="")
    max_new: int = option(64, "At most this many new tokens, the end token included.", "writing", minimum=1)
    min_new: int = option(0, "No end before this many tokens.", "writing", minimum=0)
    banned: tuple[int, ...] = option((), "Tokens that are never written.", flag="")
    no_repeat_ngram: int = option(0, "Never repeat N tokens in a row; 0: no such rule.", "writing", minimum=0)
    no_repeat_prompt: bool = option(False, "The n-grams of the prompt count as written, too.", flag="")
    beams: int = option(1, "Beams of the search; 1 is greedy.", "writing", minimum=1)
    n_best: int = option(1, "Texts per source: the best beams, or independent samples.", "writing", minimum=1)
    length_penalty: float = option(  # the end token is counted
        1.0, "Scores are log-probability / length ** PENALTY: more favours longer texts.", "writing"
    )
    sample: bool = option(False, "Draw tokens by their probability.", "sampling")
    temperature: float = option(1.0, "Flatter above 1, sharper below.", "sampling")
    top_k: int = option(0, "Draw from the K likeliest tokens; 0: from all.", "sampling", minimum=0)
    top_p: float = option(
        1.0, "Draw from the fewest tokens that together have this probability.", "sampling", above=0, maximum=1
    )
    seed: int = option(0, "Random seed.", "sampling")

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
        if not self.sample and self.n_best > self.beams:
            hint = f"pass beams={self.n_best} or more, or sample=True"
            raise UsageError(f"n_best is {self.n_best} of {self.beams} beams", hint)
