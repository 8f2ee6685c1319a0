"""`allmask demo` from beginning to end, with a line or two of explanation for each part.

demo-run/
  data/train.jsonl, dev.jsonl, test.jsonl   source, target and where they come from
  texts.txt          some of the test texts, to try `allmask demo --text` on
  metrics.jsonl      one line per step and per evaluation
  demo.png           the learning in one picture
  result.json        what is printed with --json
  final/             a model folder
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allmask.checkpoints import default_model
from allmask.data import Record
from allmask.demo import RESULT, expect_replaceable
from allmask.demo.docstrings import Found, find_pairs, python_folders
from allmask.demo.learning import SETTINGS, TASK, draw_learning, learn, samples, score, table, titles, verdict
from allmask.demo.masks import BEAMS, FourMasks
from allmask.demo.texts import EXAMPLE, LEAST, OTHERS, count_words, opening
from allmask.devices import usable_cores
from allmask.errors import DataError, Interrupted
from allmask.files import replace_folder
from allmask.model import Model
from allmask.runs.folder import save_model
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.task import ModelFolder
from allmask.terminal import shortened
from allmask.text.script import is_chinese
from allmask.training.log import read_metrics

Say = Callable[[str], None]
ENDING = 6.0  # seconds kept for saving and drawing
TITLED = 4  # paragraphs of a user's text that get a title
LEARNT = "after the demo"  # the name of its model
COMPARED = 60  # paragraphs among which the nearest are found


@dataclass(frozen=True)
class Size:
    """How much of everything a demo does."""

    files: int = 240  # parsed, of each package
    layers: int | None = None  # use only the first layers of the model; None: all
    installed: bool = True  # use installed packages, not only the standard library
    train: int | None = None  # pairs
    dev: int = 120
    test: int = 300
    written: int = 48  # titles per evaluation while learning
    beams: int = BEAMS  # in the evaluation on test texts
    steps: int | None = None  # None: as the held-out texts and the clock say
    most_epochs: float = 4  # over the pairs
    batch_tokens: int = 1024


FULL = Size()
FAST = Size(
    files=1, layers=2, installed=False, train=200, dev=6, test=12, written=3, beams=1, steps=4, most_epochs=0.5,
    batch_tokens=384,
)  # fmt: skip


def run_demo(
    out: Path,
    minutes: float = 3.5,
    size: Size = FULL,
    say: Say = print,
    precision: str = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Run the demo in a hidden folder, which replaces `out` when the run is complete."""
    start = time.monotonic()
    expect_replaceable(out)
    try:
        opened = ModelFolder.open(default_model([EXAMPLE]), device)  # first, as its package may be missing
        with replace_folder(out) as folder:
            return Demo(opened, size, folder, out, say, precision, start, start + 60 * minutes).run()
    except (KeyboardInterrupt, Interrupted) as error:
        stopped = Interrupted("the demo was stopped; nothing is left of it", getattr(error, "exit_code", 130))
        kept = f"the earlier one in {out} is unchanged; " if out.exists() else ""
        stopped.hint = f"{kept}the same command starts again from the beginning; --minutes 2 or --fast is shorter"
        raise stopped from None


@dataclass
class Demo:
    """One run of the demo, part by part."""

    opened: ModelFolder
    size: Size
    folder: Path  # the hidden folder
    out: Path  # the name that it gets
    say: Say
    precision: str
    start: float  # on the clock of time.monotonic
    deadline: float

    def run(self) -> dict[str, Any]:
        model = self.opened.model
        if self.size.layers:
            model = model.keep_layers(self.size.layers)
            self.say(f"--fast uses {self.size.layers} of {self.opened.model.config.layers} layers: expect nonsense.\n")
        masks = self.show_masks(model)
        records = self.read()
        model = TASK.prepare(model, records["train"], SETTINGS.seed).eval()
        scores, learnt = self.learn(model, records)
        result = {
            "masks": masks,
            "pairs": {name: len(part) for name, part in records.items()},
            "steps": learnt["steps"],
            "ended_because": learnt["why"],
            "scores": scores,
            "final": str(self.out / "final"),
            "picture": str(self.out / "demo.png"),
        }
        save_model(model, TASK, self.folder / "final")
        draw_learning(self.folder / "demo.png", read_metrics(self.folder), scores)
        result["seconds"] = round(time.monotonic() - self.start, 1)
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        (self.folder / RESULT).write_text(text, encoding="utf-8")
        self.say(
            f"Done in {result['seconds']:.0f} s. {self.out} has the model (final), the pairs (data) and a picture "
            "(demo.png)."
        )
        return result

    # ---- 1: four masks -------------------------------------------------------------------------------------------

    def show_masks(self, model: Model) -> list[dict[str, Any]]:
        size = sum(weight.numel() for weight in model.parameters()) / 1e6
        self.say(
            f"1. One file, four masks. {self.opened.source} has {size:.1f}M weights. What it does with a text is\n"
            "   decided by the mask alone: which token may read which (■). Nothing is trained here. The text:\n\n"
            f"{wrapped(EXAMPLE)}\n"
        )
        return show_views(FourMasks(self.opened, model), EXAMPLE, OTHERS, self.say)

    # ---- 2: learning ---------------------------------------------------------------------------------------------

    def read(self) -> dict[str, list[Record]]:
        """Find pairs, write them to files that `allmask finetune` and `evaluate` read, and return them by split."""
        self.say(
            "2. Learning from this machine. Docstrings are texts with titles: a line that sums up, then the details.\n"
            "   The model reads the details and is to write the line. Reading Python files (none is run) …"
        )
        workers = min(4, usable_cores()) if self.size.installed else 1
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
        texts = "\n\n".join(record.fields["source"] for record in records["test"][:12])
        (self.folder / "texts.txt").write_text(texts + "\n", encoding="utf-8")
        return records

    def learn(self, model: Model, records: dict[str, list[Record]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train the model between two evaluations on the test texts; return the scores, and how it went."""
        size, test = self.size, records["test"]
        start = time.monotonic()
        before = titles(model, test, size.beams, self.precision)
        again = time.monotonic() - start  # the second evaluation will take as long
        ends = max(self.deadline - again - ENDING, (time.monotonic() + self.deadline) / 2)
        self.say(
            "\n   It learns until held-out texts show no more progress, at most until the time is over. ROUGE-L\n"
            "   counts the words in common with the real line, in per cent, here of some held-out texts.\n"
        )
        learnt = learn(
            model, records["train"], records["dev"], self.folder, ends, size.batch_tokens, size.most_epochs, size.steps,
            size.written, self.precision, self.say,
        )  # fmt: skip
        self.say(f"\n   {learnt.steps} steps in {learnt.seconds:.0f} s; it ended because {learnt.why}.\n")
        after = titles(model, test, size.beams, self.precision)
        scores = score(before, after, test)
        self.say("   Titles for texts of files that it has not seen, before and after:\n")
        self.say(samples(test, before, after, 3))
        self.say(
            f"3. The result, on {len(test)} texts of files that it has not seen and on which nothing was chosen. The\n"
            "   simple rule to beat: take the text's first sentence.\n"
        )
        self.say(f"{table(scores)}\n\n   {verdict(scores)}\n")
        return scores, asdict(learnt)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 96, initial_indent="   ", subsequent_indent="   ")


def show_views(four: FourMasks, text: str, others: Sequence[str], say: Say) -> list[dict[str, Any]]:
    """Show a text under four masks, each as soon as it is ready; return the same as plain data."""
    made = []
    for make in four.views(text, others):
        view = make()
        say(view.text())
        made.append(view.to_dict())
    return made


def _counts(found: Found) -> str:
    train, dev, test = (f"{len(found.splits[name]):,}" for name in ("train", "dev", "test"))
    duplicates, overlap = (f"{found.dropped[reason]:,}" for reason in ("duplicates", "overlap"))
    return (
        f"   {found.docstrings:,} docstrings in {found.files:,} files gave {train} pairs to learn from, {dev} to\n"
        f"   watch and {test} to be judged by. Duplicates were dropped ({duplicates}). No file is in two of these\n"
        f"   sets, and no held-out text shares eight words in a row with a text to learn from ({overlap} did)."
    )


# ---- a text of the user's ------------------------------------------------------------------------------------------


def show_text(parts: Sequence[str], out: Path, say: Say = print, device: str = "auto") -> dict[str, Any]:
    """Show the paragraphs of a text under the four masks, then their titles, also those of a finished demo's model."""
    name = default_model(parts)
    opened = ModelFolder.open(name, device)
    first = next((part for part in parts if count_words(part) >= LEAST), parts[0])
    say(f"{name} under four masks: which token may read which (■). The text:\n\n{wrapped(opening(first))}\n")
    four = FourMasks(opened)
    masks = show_views(four, first, [part for part in parts[:COMPARED] if part != first], say)
    chosen = list(parts[:TITLED])
    made = {name: four.titles(chosen, beams=BEAMS)}
    if (learnt := _learnt_writer(out, device)) and not is_chinese(parts):
        made[LEARNT] = learnt(chosen, beams=BEAMS)
    say(f"  titles of {len(chosen)} paragraphs\n")
    for number, part in enumerate(chosen):
        rows = (
            f"    {writer:<{max(map(len, made))}}  {shortened(found[number], 80)}" for writer, found in made.items()
        )
        say("\n".join([f"    {shortened(part, 92)}", *rows, ""]))
    say(f"  {name} has learnt to write titles of abstracts and of software. For other texts, such as letters and\n"
        "  news, fine-tune it with titles of your own (docs/titles.md).")  # fmt: skip
    return {"model": name, "text": opening(first), "masks": masks, "paragraphs": chosen, "titles": made}


def _learnt_writer(out: Path, device: str) -> TextGenerator | None:
    """Return the model of a finished demo, if there is one in `out`."""
    if not (out / RESULT).is_file() or not (out / "final").is_dir():
        return None
    return TextGenerator(ModelFolder.open(out / "final", device).model.eval(), TASK, None)
