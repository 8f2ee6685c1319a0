"""The steps of `allmask demo`, from the mask to the saved model, each with a line or two of explanation.

demo-run/
  data/train.jsonl, dev.jsonl, test.jsonl   source, target and where they come from
  metrics.jsonl      one line per step and per evaluation
  demo.png           the run in one picture
  result.json        what is printed with --json
  final/             a model folder
"""

from __future__ import annotations

import json
import math
import os
import random
import re
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
from allmask.demo import RESULT, expect_replaceable
from allmask.demo.docstrings import Found, find_pairs, python_folders
from allmask.errors import DataError, Interrupted
from allmask.files import replace_folder
from allmask.mask.drawing import draw
from allmask.model import Model, load
from allmask.runs.folder import save_model
from allmask.tasks.common.quoting import quotations
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import lead_sentence, rouge
from allmask.tasks.seq2seq import Seq2SeqWorkload, Title, TitleEvaluator
from allmask.training import Paused, Score, Settings, train
from allmask.training.log import points, read_metrics, smoothed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much of everything a demo does."""

    files: int = 240  # parsed, of each package
    layers: int | None = None  # keep only the first layers of MiniLM; None keeps all
    installed: bool = True  # use installed packages, not only the standard library
    train: int | None = None  # pairs
    dev: int = 200
    test: int = 400
    written: int = 60  # titles per evaluation during training
    beams: int = 4  # in the final evaluation
    steps: int | None = None  # None: as many as the time allows
    quoting: float = 0.4  # share of the training time; titles take the rest
    most_epochs: int = 4  # over the titles; more would overfit
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
)  # layer decay: lower layers keep what BERT has learnt
TITLES = {"lr": 1.2e-3, "warmup": 0.1, "dropout": 0.1}  # against overfitting
QUOTATIONS = 3  # per text
ENDING = 10.0  # seconds kept for saving and drawing
BEAMS = 2.0  # cost of a title with beams, relative to one without
LOOK = 10  # steps between two looks at the clock
BLUE, ORANGE, GREY = "#5B84D7", "#E39A57", "#8B93A1"
LABELS = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}
LATEST = 30  # steps whose speed decides the number of steps for titles


def run_demo(
    out: Path, minutes: float = 5.0, size: Size = FULL, say: Say = print, quiet: bool = False
) -> dict[str, Any]:
    """Run the demo in a hidden folder, which replaces `out` when the run is complete."""
    start = time.monotonic()
    expect_replaceable(out)
    try:
        model = load("minilm")  # first, as its package may be missing
        with replace_folder(out) as folder:
            return Demo(model, size, folder, out, say, quiet, start + 60 * minutes).run()
    except (KeyboardInterrupt, Interrupted) as error:
        stopped = Interrupted("the demo was stopped; nothing is left of it", getattr(error, "exit_code", 130))
        kept = f"the earlier one in {out} is unchanged; " if out.exists() else ""
        stopped.hint = f"{kept}the same command starts again from the beginning; --minutes 2 or --fast is shorter"
        raise stopped from None


@dataclass
class Demo:
    """One run of the demo, step by step."""

    model: Model
    size: Size
    folder: Path  # the hidden folder
    out: Path  # the name that it gets
    say: Say
    quiet: bool
    deadline: float

    def run(self) -> dict[str, Any]:
        start = time.monotonic()
        records = self.read()
        self.say(
            "\n1. The mask. Each row is a token, each ■ a token that it may read. The text, up to the first [SEP],\n"
            "   reads itself in both directions, as always in BERT; the title sees the text and what is written so\n"
            "   far. This mask is all that makes a writer of a reader. (A real pair, cut to fit:)\n"
        )
        self.say(mask_of_a_pair(self.model, records["train"]))
        steps = self.learn(records)
        scores = self.evaluate(records["test"])
        titles = self.write_titles(passages())
        result = {
            "pairs": {name: len(part) for name, part in records.items()},
            "steps": steps,
            "seconds": round(time.monotonic() - start, 1),
            "scores": scores,
            "titles": titles,
            "final": str(self.out / "final"),
            "picture": str(self.out / "demo.png"),
        }
        save_model(self.model, TASK, self.folder / "final")
        draw_demo(self.folder / "demo.png", read_metrics(self.folder), scores)
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        (self.folder / RESULT).write_text(text, encoding="utf-8")
        self.say(
            f"5. Saved in {result['seconds']:.0f} s: the model in {self.out}/final, the pairs in {self.out}/data, "
            f"the run in one picture:\n   {self.out}/demo.png"
        )
        return result

    def read(self) -> dict[str, list[Record]]:
        """Find pairs, write them to files that `allmask finetune` and `evaluate` read, and return them by split."""
        self.say(
            "Docstrings are texts with titles: a line that sums up, then the details. The model reads the details\n"
            "and learns to write the line. Reading the Python files of this machine (none is run) …"
        )
        workers = min(4, os.cpu_count() or 1) if self.size.installed else 1
        found = find_pairs(python_folders(self.size.installed), self.size.files, workers)
        if not all(found.splits.values()):
            raise DataError(
                f"too few docstrings here: {found.docstrings} in {found.files} files",
                "is this Python's standard library installed as .py files?",
            )
        limits = {"train": self.size.train, "dev": self.size.dev, "test": self.size.test}
        found.splits = {name: found.splits[name][:limit] for name, limit in limits.items()}
        self.say(_counts(found))
        (self.folder / "data").mkdir()
        records = {}
        for name, pairs in found.splits.items():
            path = self.folder / "data" / f"{name}.jsonl"
            lines = [json.dumps(asdict(pair), ensure_ascii=False) for pair in pairs]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            records[name] = TASK.read(path)
        return records

    # ---- 2: learning ---------------------------------------------------------------------------------------------

    def learn(self, records: dict[str, list[Record]]) -> int:
        """Train on quotations, then on titles; return the number of steps."""
        self.say("\n2. Learning. MiniLM is a BERT that has never written a word. Before training it writes:\n")
        body = self.model.keep_layers(self.size.layers) if self.size.layers else self.model
        self.model = TASK.prepare(body, records["train"], SETTINGS.seed)
        tokenizer = tokenizer_of(self.model)
        dev = shortest_first(records["dev"])
        evaluator = TitleEvaluator(TASK, dev, TASK.examples(tokenizer, dev), written=self.size.written)
        titles = Seq2SeqWorkload(TASK.examples(tokenizer, records["train"]), self._by_loss(evaluator))
        before, seconds = self._evaluate(evaluator)
        for line in before.samples:
            self.say(line)
        quoted = self._quote(records["train"], self._most(titles), seconds)
        self.model.eval()
        _, seconds = self._evaluate(evaluator)  # the first one was slower: kernels were prepared
        settings = self._second_lesson(titles, seconds, quoted)
        self.say(
            f"\n   The second lesson is the titles: {settings.steps} steps of {settings.batch_tokens:,} tokens. "
            "What it writes is shown at each evaluation.\n"
        )
        result = train(self.model, titles, settings, self.folder / "training", quiet=self.quiet)
        self._write_metrics({**before.metrics, "lead_rouge_l": lead_rouge_l(dev[: self.size.written])}, quoted)
        return len(quoted) + result.steps

    def _quote(self, records: Sequence[Record], titling: int, evaluation: float) -> list[dict[str, Any]]:
        """Train on quotations, for their share of the time and at most their share of the steps; return the metrics."""
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

    def _evaluate(self, evaluator: TitleEvaluator) -> tuple[Score, float]:
        """Return the score of the model, and the seconds that the evaluation took."""
        start = time.monotonic()
        score = evaluator(self.model)
        return score, time.monotonic() - start

    def _by_loss(self, evaluator: TitleEvaluator) -> Callable[[Model], Score]:
        """Return an evaluator that also prints its samples, and for which the lowest loss is the best."""

        def evaluate(model: Model) -> Score:
            score = evaluator(model)
            for line in score.samples:
                self.say(line)
            return replace(score, value=-score.metrics["loss"], stderr=None, samples=())

        return evaluate

    def _second_lesson(self, work: Seq2SeqWorkload, evaluation: float, quoted: list[dict[str, Any]]) -> Settings:
        """Return settings with as many steps as fit into the time left, at the speed of the latest steps."""
        step = mean(line["tokens"] / line["speed"] for line in quoted[-LATEST:])
        fitting = max(LOOK, int((self._learning_ends(evaluation) - time.monotonic()) / step))
        given = self.size.steps
        steps = min(fitting, self._most(work)) if given is None else max(1, given - len(quoted))
        every = -(-steps // self.size.evaluations)
        return replace(self._settings, **TITLES, steps=steps, eval_every=every, save_every=steps)

    def _quoting_ends(self, evaluation: float) -> float:
        """Return the time at which the first lesson ends; infinity if the number of steps is given."""
        now = time.monotonic()
        return (
            now + self.size.quoting * (self._learning_ends(evaluation) - now) if self.size.steps is None else math.inf
        )

    def _learning_ends(self, evaluation: float) -> float:
        """Return the time at which training must end to meet the deadline; `evaluation` is the seconds of one.

        At least half of the time left is for training: a machine that is slow at first may become faster.
        """
        evaluating = evaluation * (self.size.evaluations + BEAMS * self.size.test / self.size.written)
        return max(self.deadline - evaluating - ENDING, (time.monotonic() + self.deadline) / 2)

    def _most(self, work: Seq2SeqWorkload) -> int:
        return round(self.size.most_epochs * len(plan_epoch(work.lengths, self.size.batch_tokens, SETTINGS.seed, 0)))

    @property
    def _settings(self) -> Settings:
        return replace(SETTINGS, batch_tokens=self.size.batch_tokens)

    def _write_metrics(self, before: dict[str, float], quoted: list[dict[str, Any]]) -> None:
        """Write the metrics of both lessons as one run that begins with an evaluation at step 0."""
        first = {"step": 0, **{f"eval_{name}": value for name, value in before.items()}}
        then = [{**line, "step": line["step"] + len(quoted)} for line in read_metrics(self.folder / "training")]
        text = "".join(json.dumps(line) + "\n" for line in [first, *quoted, *then])
        (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        shutil.rmtree(self.folder / "training")

    # ---- 3 and 4: evaluation, other texts ------------------------------------------------------------------------

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
            text = entry["text"]
            self.say(f"  text   {text if len(text) <= 100 else text[:99] + '…'}\n  title  {entry['title']}\n")
        return made

    def _titles(self, sources: Sequence[str]) -> list[str]:
        rules = TASK.decoding(self.model, beams=self.size.beams)
        return [best[0][0] for best in TASK.write(self.model, sources, rules)]


@dataclass(frozen=True)
class Timer:
    """An evaluator that only asks for a pause when the time is over."""

    ends: float

    def __call__(self, model: Model) -> Score:
        return Score(-math.inf, {}, pause=time.monotonic() >= self.ends)


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


def shortest_first(records: Sequence[Record], count: int = 2) -> list[Record]:
    """Return the records with the `count` shortest, which are printed as samples, at the front."""
    order = sorted(records, key=lambda record: len(record.fields["source"]))
    return [*order[:count], *(record for record in records if record not in order[:count])]


def lead_rouge_l(records: Sequence[Record]) -> float:
    """Return ROUGE-L of the first sentences as titles."""
    leads = [lead_sentence(record.fields["source"]) for record in records]
    return rouge(leads, [record.fields["target"] for record in records], chinese=False)["rouge_l"]


def table(scores: dict[str, dict[str, float]]) -> str:
    lines = [" " * 16 + "".join(f"{label:>10}" for label in LABELS.values())]
    for name in reversed(scores):
        lines.append(f"   {name:<13}" + "".join(f"{scores[name][key]:>10.1f}" for key in LABELS))
    return "\n".join(lines)


def _counts(found: Found) -> str:
    train, dev, test = (f"{len(found.splits[name]):,}" for name in ("train", "dev", "test"))
    duplicates, overlap = (f"{found.dropped[reason]:,}" for reason in ("duplicates", "overlap"))
    return (
        f"{found.docstrings:,} docstrings in {found.files:,} files gave {train} pairs to train on, {dev} to watch,\n"
        f"{test} to evaluate on. Duplicates were dropped ({duplicates}); no file is in two splits, and no\n"
        f"held-out text shares eight words in a row with a training text ({overlap} did)."
    )


# ---- the picture ---------------------------------------------------------------------------------------------------


def draw_demo(path: Path, metrics: list[dict[str, Any]], scores: dict[str, dict[str, float]]) -> None:
    """Draw loss and ROUGE-L by step (`metrics` are the lines of metrics.jsonl), and the final scores, as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY}):
        figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
        loss, rouge, final = figure.subplots(1, 3)
        steps, losses = points(metrics, "loss")
        loss.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1)
        loss.plot(steps, smoothed(losses), color=BLUE, label="training")
        loss.plot(*points(metrics, "eval_loss"), color=ORANGE, marker="o", markersize=4, label="held out")
        loss.set(title="loss (nats per token)", xlabel="step")
        loss.legend(frameon=False)
        rouge.plot(*points(metrics, "eval_rouge_l"), color=BLUE, marker="o", markersize=4, label="model")
        for height in points(metrics, "eval_lead_rouge_l")[1]:
            rouge.axhline(height, color=ORANGE, linestyle="--", label="lead sentence")
        rouge.set(title="ROUGE-L on held-out texts during training", xlabel="step")
        rouge.set_ylim(bottom=0)
        rouge.legend(frameon=False, loc="lower right")
        for number, (name, colour) in enumerate(zip(scores, (BLUE, ORANGE), strict=True)):
            values = [scores[name][key] for key in LABELS]
            bars = final.bar([0.4 * number + row for row in range(len(LABELS))], values, 0.38, color=colour, label=name)
            final.bar_label(bars, fmt="%.1f", fontsize=9)
        final.set_xticks([0.2 + row for row in range(len(LABELS))], list(LABELS.values()))
        final.set_title("final scores on held-out files")
        final.margins(y=0.2)
        final.legend(frameon=False)
        figure.savefig(path)


# ---- passages of the README ----------------------------------------------------------------------------------------

OTHER_PASSAGES = [  # if there is no README
    "The same weights read both ways, write left to right, guess in any order or rewrite one text as another. The only "
    "thing that changes is the mask, a small value that says which token may look at which.",
    "A token that is younger than all tokens before it never changes what they see. Exactly then their keys and values "
    "can be kept, so that each new token costs one step instead of reading everything again.",
    "Documents of different length are put one after another into one row without padding. Each belongs to a group of "
    "its own, and no token reads one of another group.",
]


def passages(readme: Path | None = None, count: int = 3) -> list[str]:
    """Return paragraphs of prose with at least 20 words; no headings, lists, tables, code or pictures."""
    path = Path(__file__).parents[2] / "README.md" if readme is None else readme
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return OTHER_PASSAGES[:count]
    content = re.sub(r"```.*?```", "", content, flags=re.DOTALL)
    prose = "\n\n".join(part for part in re.split(r"\n\s*\n", content) if re.match(r"[A-Z*\"(]", part))
    prose = re.sub(r"[*`]+", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose))  # links, emphasis, code
    found = [" ".join(part.split()) for part in prose.split("\n\n") if len(part.split()) >= 20]
    return found[:count] if len(found) >= count else OTHER_PASSAGES[:count]
