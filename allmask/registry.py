"""Names that a user can ask for, and what they stand for: tasks, objectives, masks, families of checkpoints.

TASKS["classify"], list(TASKS), "tag" in TASKS      # an entry is imported when it is first asked for

Another package adds its own under a new name, by `TASKS.register("sentiment", Sentiment)` or, without being imported
first, by an entry point of the registry's group (docs/extend.md shows all of it):

    [project.entry-points."allmask.tasks"]
    sentiment = "my_package.sentiment:Sentiment"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from allmask.errors import UsageError
from allmask.files import did_you_mean


class Registry(Mapping[str, Any]):
    """A dictionary of this package's own entries, those registered, and those of installed packages, in this order.

    Iterating, `in` and `len` import nothing; `registry[name]` imports that one entry.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], group: str | None = None):
        self.kind = kind  # what an entry is, in a word: "task"
        self.builtin = dict(builtin)  # name: "module:attribute"
        self.group = group or f"allmask.{kind}s"  # of entry points
        self.registered: dict[str, Any] = {}

    def register(self, name: str, entry: Any) -> Any:
        """Add an entry under a name that is still free, and return it; it goes before an entry point of that name."""
        if name in self.builtin or self.registered.get(name, entry) is not entry:
            whose = "allmask has" if name in self.builtin else "there is already"
            raise UsageError(f"{self.kind} {name!r}: {whose} one of this name", "choose another name")
        self.registered[name] = entry
        return entry

    @cached_property
    def installed(self) -> dict[str, list[EntryPoint]]:
        """The entry points of installed packages by name."""
        found: dict[str, list[EntryPoint]] = {}
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            found.setdefault(point.name, []).append(point)
        return found

    def __getitem__(self, name: str) -> Any:
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(import_module(module), attribute)
        if name in self.registered:
            return self.registered[name]
        if name in self.installed:
            return self._loaded(name, self.installed[name])
        raise UnknownName(f"there is no {self.kind} {name!r}", did_you_mean(name, self))

    def _loaded(self, name: str, points: list[EntryPoint]) -> Any:
        packages = sorted(point.dist.name if point.dist else point.module for point in points)
        if len({point.value for point in points}) > 1:
            raise UsageError(
                f"{self.kind} {name!r}: of several packages: {', '.join(packages)}", "uninstall all but one"
            )
        point, package = points[0], packages[0]
        try:
            return point.load()
        except Exception as error:  # whatever the code of another package raises
            raise UsageError(
                f"{self.kind} {name!r} of the package {package}: {point.value} cannot be imported: {error}",
                f"mend, update or uninstall {package}",
            ) from error

    @property
    def others(self) -> list[str]:
        """The names that other packages added."""
        return [name for name in self if name not in self.builtin]

    def of_packages(self) -> str:
        """What a help text says besides the names of this package: "one of an installed package: stars"."""
        return "one of an installed package" + (f": {', '.join(self.others)}" if self.others else "")

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.registered or name in self.installed

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.builtin, *self.registered, *self.installed]))

    def __len__(self) -> int:
        return len(list(iter(self)))


class UnknownName(UsageError, KeyError):
    """A name that a registry does not have; a KeyError too, so that `registry.get(name)` is None."""


# Each in the order in which --help lists them.
TASKS = Registry(
    "task",
    {  # also the order in which they are asked whether they are the task of a model without allmask.json
        "image": "allmask.vision.task:ImageTask",  # first: the others load the folder as a model of texts
        "title": "allmask.tasks.seq2seq:Title",
        "translate": "allmask.tasks.seq2seq:Translate",
        "continue": "allmask.tasks.continuation:Continuation",
        "classify": "allmask.tasks.classify:Classify",
        "choose": "allmask.tasks.choose:Choose",
        "tag": "allmask.tasks.tag:Tag",
        "answer": "allmask.tasks.answer:Answer",
    },
)
USES = Registry(
    "use",
    {  # what a pretrained model can do without being trained for it: functions of a ModelFolder and a precision
        "generate": "allmask.tasks.continuation:open_generator",
        "fill": "allmask.tasks.fill:open_filler",
        "embed": "allmask.tasks.embed:open_embedder",
    },
)
SERVED = Registry(
    "served use",
    {  # how a server opens a use, where that differs from USES: functions of a ModelFolder and a precision
        "embed": "allmask.tasks.embed:open_served_embedder",
    },
    group="allmask.served",
)
OBJECTIVES = Registry(
    "objective",
    {
        "mlm": "allmask.objectives.mlm:Mlm",
        "nsp": "allmask.objectives.nsp:Nsp",
        "causal": "allmask.objectives.causal:Causal",
        "reverse": "allmask.objectives.reverse:Reverse",
        "permutation": "allmask.objectives.permutation:Permutation",
        "prefix": "allmask.objectives.prefix:Prefix",
        "unilm": "allmask.objectives.unilm:Unilm",
        "mass": "allmask.objectives.mass:Mass",
        "span": "allmask.objectives.span:Span",
    },
)
MASKS = Registry(
    "mask",
    {  # functions that return a `Mask`; mask/kinds.py says what the names of their parameters mean
        "bidirectional": "allmask.mask.kinds:bidirectional",
        "causal": "allmask.mask.kinds:causal",
        "reverse": "allmask.mask.kinds:reverse",
        "permutation": "allmask.mask.kinds:permutation",
        "order": "allmask.mask.kinds:any_order",
        "prefix": "allmask.mask.kinds:prefix",
        "turns": "allmask.mask.kinds:turns_of",
        "naive": "allmask.mask.kinds:naive",
        "packed": "allmask.mask.kinds:packed",
        "matrix": "allmask.mask.kinds:matrix",
        "encoder-decoder": "allmask.mask.kinds:encoder_decoder",
    },
)
FAMILIES = Registry(
    "family",
    {  # found by `model_type` in config.json
        "bert": "allmask.checkpoints.families.bert:BERT",
        "gpt2": "allmask.checkpoints.families.gpt2:GPT2",
        "t5": "allmask.checkpoints.families.t5:T5",
        "xlnet": "allmask.checkpoints.families.xlnet:XLNET",
        "roberta": "allmask.checkpoints.families.roberta:ROBERTA",
        "xlm-roberta": "allmask.checkpoints.families.roberta:XLM_ROBERTA",
        "distilbert": "allmask.checkpoints.families.distilbert:DISTILBERT",
        "electra": "allmask.checkpoints.families.electra:ELECTRA",
        "ernie": "allmask.checkpoints.families.ernie:ERNIE",
        "albert": "allmask.checkpoints.families.albert:ALBERT",
        "roformer": "allmask.checkpoints.families.roformer:ROFORMER",
        "nezha": "allmask.checkpoints.families.nezha:NEZHA",
        "tencentpretrain": "allmask.checkpoints.families.tencentpretrain:TENCENTPRETRAIN",
    },
    group="allmask.families",
)
JOBS = Registry(
    "job",
    {  # what a run does; all tasks that are not named here are fine-tuned
        "finetune": "allmask.runs.finetuning:FineTuning",
        "pretrain": "allmask.runs.pretraining:Pretraining",
        "image": "allmask.vision.training:ImageTraining",
        "gan": "allmask.gan.training:GanTraining",
    },
)
