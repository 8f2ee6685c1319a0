"""`allmask demo`, from the mask to the saved model, each step explained in a line or two.

demo-run/
  data/train.jsonl, dev.jsonl, test.jsonl   source, target and where they come from
  metrics.jsonl      a line per step, a line per evaluation
  demo.png           the run in one picture
  result.json        what is printed with --json
  final/             a model folder
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from allmask.data import Record, plan_epoch
from allmask.demo.docstrings import Found, find_pairs, python_folders
from allmask.demo.picture import LABELS, draw_demo
from allmask.demo.texts import sentences
from allmask.errors import DataError, Interrupted, ResourceError
from allmask.files import replace_folder
from allmask.mask.drawing import draw
from allmask.model import Model, load
from allmask.runs.folder import save_model
from allmask.tasks.common.quoting import quotations
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import lead_sentence, rouge
from allmask.tasks.seq2seq import Seq2SeqWorkload, Title, TitleEvaluator
from allmask.training import Paused, Score, Settings, train
from allmask.training.log import read_metrics

RESULT = "result.json"
USES = {"train": "pairs to learn from", "dev": "to watch", "test": "to evaluate on"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much of everything a demo does."""

    files: int = 240  # parsed, of each package
    layers: int | None = None  # of MiniLM's, the first so many; None is all
    installed: bool = True  # packages besides the standard library
    train: int | None = None  # pairs
    dev: int = 200
    test: int = 400
    written: int = 60  # titles per evaluation during training
    beams: int = 4  # of the final evaluation
    steps: int | None = None  # None: as many as the time allows
    quoting: float = 0.4  # share of the training time; titles take the rest
    most_epochs: int = 4  # of titles; more would overfit
    evaluations: int = 4
    batch_tokens: int = 1024


FULL = Size()
FAST = Size(
    files=1, layers=2, installed=False, train=200, dev=6, test=12, written=3, beams=1, steps=6, evaluations=2,
    batch_tokens=384,
)  # fmt: skip
TASK = Title(max_source=64, max_target=24)
SETTINGS = Settings(
    lr=2e-3, layer_decay=0.7, warmup=30, dropout=0.0, keep=1, seed=1
)  # lower layers keep what BERT knows
TITLES = {"lr": 1.2e-3, "warmup": 0.1, "dropout": 0.1}  # gentler, so as not to overfit
QUOTATIONS = 3  # of each text, so that few are seen twice
ENDING = 10.0  # seconds kept for saving and drawing
BEAMS = 2.0  # cost of a title with beams, relative to one without
LOOK = 10  # steps after which the clock is checked
LATEST = 30  # steps by whose speed the second lesson is planned


def run_demo(
    out: Path, minutes: float = 5.0, size: Size = FULL, say: Say = print, quiet: bool = False
) -> dict[str, Any]:
    """Run the demo; `out` is replaced when the new run is complete, and not touched before."""
    began = time.monotonic()
    expect_replaceable(out)
    try:
        model = load("minilm")  # first: it may be missing
        with replace_folder(out) as folder:
            return Demo(model, size, folder, out, say, quiet, began + 60 * minutes).run()
    except (KeyboardInterrupt, Interrupted) as error:
        raise _stopped(out, error) from None


@dataclass
class Demo:
    """One run of the demo, step by step."""

    model: Model
    size: Size
    folder: Path  # where it is written until it is complete
    out: Path  # where it will be found
    say: Say
    quiet: bool
    deadline: float

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        records = self.read()
        self.show_mask(records["train"])
        steps = self.learn(records)
        scores = self.evaluate(records["test"])
        titles = self.write_titles(sentences())
        result = {
            "pairs": {name: len(part) for name, part in records.items()},
            "steps": steps,
            "seconds": round(time.monotonic() - began, 1),
            "scores": scores,
            "titles": titles,
            "final": str(self.out / "final"),
            "picture": str(self.out / "demo.png"),
        }
        self.save(result)
        return result

    # ---- the text ------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, list[Record]]:
        self.say(
            "Docstrings are texts with titles: a line that sums up, then the details. The model reads the details\n"
            "and learns to write the line. Reading the Python files of this machine (none is run) …"
        )
        workers = min(4, os.cpu_count() or 1) if self.size.installed else 1
        found = find_pairs(python_folders(self.size.installed), self.size.files, workers)
        limits = {"train": self.size.train, "dev": self.size.dev, "test": self.size.test}
        if not all(found.splits.values()):
            raise DataError(
                f"too few docstrings here: {found.docstrings} in {found.files} files",
                "is this Python's standard library installed as .py files?",
            )
        found.splits = {name: found.splits[name][:limit] for name, limit in limits.items()}
        self.say(_counts(found))
        return {name: self._kept(found, name) for name in limits}

    def _kept(self, found: Found, name: str) -> list[Record]:
        """Write a split to a file that `allmask finetune` and `evaluate` read, and return its records."""
        path = self.folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps(asdict(pair), ensure_ascii=False) for pair in found.splits[name]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return TASK.read(path)

    # ---- 1: the mask ---------------------------------------------------------------------------------------------

    def show_mask(self, records: Sequence[Record]) -> None:
        self.say(
            "\n1. The mask. Each row is a token, each ■ a token that it may read. The text, up to the first [SEP],\n"
            "   reads itself in both directions, as always in BERT; the title sees the text and what is written so\n"
            "   far. This mask is all that makes a writer of a reader. (A real pair, cut to fit:)\n"
        )
        self.say(mask_of_a_pair(self.model, records))

    # ---- 2: learning ---------------------------------------------------------------------------------------------

    def learn(self, records: dict[str, list[Record]]) -> int:
        self.say("\n2. Learning. MiniLM is a BERT that has never written a word. Before training it writes:\n")
        body = self.model.keep_layers(self.size.layers) if self.size.layers else self.model
        self.model = TASK.prepare(body, records["train"], SETTINGS.seed)
        tokenizer = tokenizer_of(self.model)
        dev = shortest_first(records["dev"])
        evaluator = TitleEvaluator(TASK, dev, TASK.examples(tokenizer, dev), written=self.size.written)
        titles = Seq2SeqWorkload(TASK.examples(tokenizer, records["train"]), self._by_loss(evaluator))
        before, seconds = self._before(evaluator)
        quoted = self._quote(records["train"], self._most(titles), seconds)
        titling = self._second_lesson(titles, self._seconds_of(evaluator), quoted)
        self.say(
            f"\n   The second lesson is the titles: {titling.steps} steps of {titling.batch_tokens:,} tokens. What it "
            "writes is shown at each evaluation.\n"
        )
        result = train(self.model, titles, titling, self.folder / "training", quiet=self.quiet)
        self._keep_metrics({**before.metrics, "lead_rouge_l": lead_rouge_l(dev[: self.size.written])}, quoted)
        return len(quoted) + result.steps

    def _quote(self, records: Sequence[Record], titling: int, evaluation: float) -> list[dict[str, Any]]:
        """Give the first lesson, for its share of the time but not for too many steps; return its metrics."""
        self.say(
            "   The first lesson is to quote: to write a central sentence of the text. Titles are made of words of\n"
            "   their text, and this BERT has never copied a word from one position to another.\n"
        )
        rng = random.Random(SETTINGS.seed)
        made = [record for _ in range(QUOTATIONS) for record in quotations(records, TASK.max_source, rng)]
        work = Seq2SeqWorkload(TASK.examples(tokenizer_of(self.model), made), Timer(self._quoting_ends(evaluation)))
        share = self.size.quoting
        most = round(share * (self.size.steps or titling / (1 - share)))
        settings = replace(self._settings, steps=most, eval_every=LOOK, save_every=most, schedule="constant")
        folder = self.folder / "quoting"
        with suppress(Paused):
            train(self.model, work, settings, folder, quiet=self.quiet)
        metrics = read_metrics(folder)
        shutil.rmtree(folder)
        losses = f"loss {metrics[0]['loss']:.2f} → {metrics[-1]['loss']:.2f}"
        self.say(f"   It has learnt to quote in {len(metrics)} steps: {losses}")
        return metrics

    def _before(self, evaluator: TitleEvaluator) -> tuple[Score, float]:
        """Show what the untrained model writes; return its score, and how many seconds the evaluation took."""
        began = time.monotonic()
        score = evaluator(self.model)
        for line in score.samples:
            self.say(line)
        return score, time.monotonic() - began

    def _seconds_of(self, evaluator: TitleEvaluator) -> float:
        """The seconds that an evaluation takes when it is not the first one."""
        began = time.monotonic()
        evaluator(self.model.eval())
        return time.monotonic() - began

    def _by_loss(self, evaluator: TitleEvaluator) -> Callable[[Model], Score]:
        """The same evaluator, but it shows its samples every time, and the lowest loss is the best."""

        def evaluate(model: Model) -> Score:
            score = evaluator(model)
            for line in score.samples:
                self.say(line)
            return replace(score, value=-score.metrics["loss"], stderr=None, samples=())

        return evaluate

    def _second_lesson(self, work: Seq2SeqWorkload, evaluation: float, quoted: list[dict[str, Any]]) -> Settings:
        """Plan as many steps as fit into the time that is left, by the speed of the first lesson's last steps."""
        step = mean(line["tokens"] / line["speed"] for line in quoted[-LATEST:])
        fitting = max(LOOK, int((self._learning_ends(evaluation) - time.monotonic()) / step))
        given = self.size.steps
        steps = min(fitting, self._most(work)) if given is None else max(1, given - len(quoted))
        every = -(-steps // self.size.evaluations)
        return replace(self._settings, **TITLES, steps=steps, eval_every=every, save_every=steps)

    def _quoting_ends(self, evaluation: float) -> float:
        """The time at which the first lesson ends; never, if the number of steps is given."""
        now = time.monotonic()
        return (
            now + self.size.quoting * (self._learning_ends(evaluation) - now) if self.size.steps is None else math.inf
        )

    def _learning_ends(self, evaluation: float) -> float:
        """The time at which training must end, if an evaluation takes so many seconds, to meet the deadline.

        At least half of the time that is left is for training: a machine that is slow at first need not stay so.
        """
        evaluating = evaluation * (self.size.evaluations + BEAMS * self.size.test / self.size.written)
        return max(self.deadline - evaluating - ENDING, (time.monotonic() + self.deadline) / 2)

    def _most(self, work: Seq2SeqWorkload) -> int:
        return round(self.size.most_epochs * len(plan_epoch(work.lengths, self.size.batch_tokens, SETTINGS.seed, 0)))

    @property
    def _settings(self) -> Settings:
        return replace(SETTINGS, batch_tokens=self.size.batch_tokens)

    def _keep_metrics(self, before: dict[str, float], quoted: list[dict[str, Any]]) -> None:
        """Write the metrics of both lessons as those of one run that begins with an evaluation at step 0."""
        first = {"step": 0, **{f"eval_{name}": value for name, value in before.items()}}
        then = [{**line, "step": line["step"] + len(quoted)} for line in read_metrics(self.folder / "training")]
        lines = [first, *quoted, *then]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        shutil.rmtree(self.folder / "training")

    # ---- 3, 4, 5 -------------------------------------------------------------------------------------------------

    def evaluate(self, records: Sequence[Record]) -> dict[str, dict[str, float]]:
        self.say(
            f"\n3. Evaluation on {len(records)} docstrings of files that it has not seen, compared with a simple\n"
            "   rule: take the text's first sentence. ROUGE counts words in common with the real line, in percent.\n"
        )
        scores = TASK.score(self._titles([record.fields["source"] for record in records]), records)
        self.say(table(scores))
        return scores

    def write_titles(self, texts: Sequence[str]) -> list[dict[str, str]]:
        self.say("\n4. Writing for other texts: a title for some passages of the README.\n")
        made = [{"text": text, "title": title} for text, title in zip(texts, self._titles(texts), strict=True)]
        for entry in made:
            self.say(f"  text   {_short(entry['text'])}\n  title  {entry['title']}\n")
        return made

    def _titles(self, sources: Sequence[str]) -> list[str]:
        rules = TASK.decoding(self.model, beams=self.size.beams)
        return [best[0][0] for best in TASK.write(self.model, sources, rules)]

    def save(self, result: dict[str, Any]) -> None:
        save_model(self.model, TASK, self.folder / "final")
        draw_demo(self.folder / "demo.png", read_metrics(self.folder), result["scores"])
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        (self.folder / RESULT).write_text(text, encoding="utf-8")
        self.say(
            f"5. Saved in {result['seconds']:.0f} s: the model in {self.out}/final, the pairs in {self.out}/data, "
            f"the run in one picture:\n   {self.out}/demo.png"
        )


# ---- parts that stand alone ----------------------------------------------------------------------------------------


def mask_of_a_pair(model: Model, records: Sequence[Record], source: int = 7, target: int = 6) -> str:
    """Draw the prefix mask of a short pair: a whole title, and the beginning of its text."""
    tokenizer = tokenizer_of(model)
    rows: list[tuple[list[str], list[str]]] = []
    for record in records[:500]:
        text, title = (tokenizer.encode(record.fields[name], special=False).tokens for name in ("source", "target"))
        rows.append((["[CLS]", *text[:source], "[SEP]"], [*title[:target], "[SEP]"]))
    whole = [row for row in rows if len(row[1]) <= target] or rows
    read, written = min(whole, key=lambda row: sum(map(len, row[0] + row[1])))
    is_target = torch.arange(len(read) + len(written))[None] >= len(read)
    return draw(TASK.mask_of(is_target), read + written)


@dataclass(frozen=True)
class Timer:
    """An evaluator that evaluates nothing, and asks for a pause when the time is over."""

    ends: float

    def __call__(self, model: Model) -> Score:
        return Score(-math.inf, {}, pause=time.monotonic() >= self.ends)


def shortest_first(records: Sequence[Record], count: int = 2) -> list[Record]:
    """The same records, with the shortest few, which will be shown, at the front."""
    order = sorted(records, key=lambda record: len(record.fields["source"]))
    return [*order[:count], *(record for record in records if record not in order[:count])]


def lead_rouge_l(records: Sequence[Record]) -> float:
    """ROUGE-L of the first sentences of some records."""
    leads = [lead_sentence(record.fields["source"]) for record in records]
    return rouge(leads, [record.fields["target"] for record in records], chinese=False)["rouge_l"]


def table(scores: dict[str, dict[str, float]]) -> str:
    lines = [" " * 16 + "".join(f"{label:>10}" for label in LABELS.values())]
    for name in reversed(scores):
        lines.append(f"   {name:<13}" + "".join(f"{scores[name][key]:>10.1f}" for key in LABELS))
    return "\n".join(lines)


def _counts(found: Found) -> str:
    parts = ", ".join(f"{len(found.splits[name]):,} {use}" for name, use in USES.items())
    return (
        f"{found.docstrings:,} docstrings in {found.files:,} files gave {parts}.\n"
        f"Duplicates were left out ({found.dropped['twins']:,}); no file is in two splits, and no text to evaluate\n"
        f"on shares eight words in a row with one to learn from ({found.dropped['like one for training']:,} did)."
    )


def _short(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


# ---- the folder ----------------------------------------------------------------------------------------------------


def expect_replaceable(out: Path) -> None:
    """Refuse a folder that is something else, or a place where nothing can be written, before any work."""
    if out.exists() and not (out / RESULT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ResourceError(f"{out}: already there, and not a finished demo", "name another place with --out")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "name another place with --out")


def _stopped(out: Path, error: BaseException) -> Interrupted:
    stopped = Interrupted("the demo was stopped; nothing is left of it", getattr(error, "exit_code", 130))
    kept = f"the earlier one in {out} is as it was; " if out.exists() else ""
    stopped.hint = f"{kept}the same command starts again from the beginning; --minutes 2 or --fast makes it shorter"
    return stopped
