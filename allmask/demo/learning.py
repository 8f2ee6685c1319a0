"""Learning the docstrings of this machine: from the shipped weights, as long as it helps and time allows.

The learning rate is constant and a moving average of the weights is evaluated, so training can end at any step. It
ends when held-out texts say so (no progress in several evaluations) or when its time is over.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allmask.data import Record, plan_epoch
from allmask.model import Model
from allmask.tasks.common.evaluation import sample_lines
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.text import lead_sentence, rouge, score_texts
from allmask.tasks.seq2seq import Seq2SeqWorkload, Title, TitleEvaluator
from allmask.training import Score, Settings, train
from allmask.training.log import points, read_metrics, smoothed

TASK = Title(
    max_source=64, max_target=24, quote=0, end_bias=0.0, length_penalty=1.1, no_repeat_ngram=2
)  # the search was chosen on dev: titles as long as people's
SETTINGS = Settings(
    lr=1e-3, layer_decay=0.85, schedule="constant", warmup=10, dropout=0.0, ema=0.95, patience=3, keep=1, seed=1
)
LOOK = 5  # steps between two looks at the clock
APART = 8.0  # seconds between two evaluations, at least
COSTLY = 4.0  # they are also this many times as far apart as the last one took
GOAL = 5.0  # points of ROUGE-L by which the model is to beat the first sentence
LABELS = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}
LEAD, BEFORE, MODEL = "first sentence", "before", "model"
BLUE, ORANGE, GREY = "#5B84D7", "#E39A57", "#8B93A1"

Scores = dict[str, dict[str, float]]


@dataclass
class Lesson(Seq2SeqWorkload):
    """A workload that is evaluated by the clock, says what was found, and stops when `ends` is reached."""

    ends: float = math.inf  # on the clock of time.monotonic
    last: int = 0  # step that is always evaluated
    say: Callable[[str], None] = print
    next: float = field(default=0.0, init=False)  # when to evaluate again

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        start = time.monotonic()
        over = start >= self.ends
        if self.evaluator is None or not (over or step == self.last or start >= self.next):
            return None
        score = self.evaluator(model)
        now = time.monotonic()
        self.next = now + max(APART, COSTLY * (now - start))
        left = "" if self.ends == math.inf else f"   at most {max(0.0, self.ends - now):.0f} s left"
        self.say(f"   step {step:>4}   {in_words(score.metrics)}{left}")
        return replace(score, stop=over, samples=())


def in_words(metrics: dict[str, float]) -> str:
    return f"loss {metrics['loss']:.2f}   ROUGE-L {metrics['rouge_l']:.1f}"


@dataclass(frozen=True)
class Learnt:
    steps: int
    seconds: float
    why: str  # it ended


def learn(
    model: Model, train_on: Sequence[Record], dev: list[Record], folder: Path, ends: float, batch_tokens: int,
    most_epochs: float, steps: int | None = None, written: int = 48, precision: str = "auto",
    say: Callable[[str], None] = print,
) -> Learnt:  # fmt: skip
    """Train a model in place until `ends` at the latest, and write metrics.jsonl into `folder`."""
    tokenizer = tokenizer_of(model)
    evaluator = TitleEvaluator(TASK, dev, TASK.examples(tokenizer, dev), written=written)
    lesson = Lesson(TASK.examples(tokenizer, train_on), evaluator, ends=ends, say=say)
    epoch = len(plan_epoch(lesson.lengths, batch_tokens, SETTINGS.seed, 0))
    lesson.last = steps or max(1, round(most_epochs * epoch))
    before = evaluator(model.eval()).metrics | {"lead_rouge_l": lead_rouge_l(dev[:written])}
    say(f"   step    0   {in_words(before)}   (first sentences: {before['lead_rouge_l']:.1f})")
    lesson.next = time.monotonic() + APART
    settings = replace(
        SETTINGS, steps=lesson.last, batch_tokens=batch_tokens, precision=precision, eval_every=min(LOOK, lesson.last),
        save_every=lesson.last,
    )  # fmt: skip
    result = train(model, lesson, settings, folder / "training", quiet=True)
    model.eval()
    lines = [{"step": 0, **{f"eval_{name}": value for name, value in before.items()}}]
    lines += read_metrics(folder / "training")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    shutil.rmtree(folder / "training")
    return Learnt(result.steps, result.seconds, _why(result.stopped_early, time.monotonic() >= ends, most_epochs))


def _why(early: bool, over: bool, most_epochs: float) -> str:
    if not early:
        return "all its steps were made" if most_epochs < 1 else f"it had seen every text {most_epochs:g} times"
    return "the time was over" if over else "the held-out texts showed no more progress"


def lead_rouge_l(records: Sequence[Record]) -> float:
    """Return ROUGE-L of the first sentences as titles."""
    leads = [lead_sentence(record.fields["source"]) for record in records]
    return rouge(leads, [record.fields["target"] for record in records], chinese=False)["rouge_l"]


# ---- scores ------------------------------------------------------------------------------------------------------


def titles(model: Model, records: Sequence[Record], beams: int, precision: str = "auto") -> list[str]:
    """Write a title for each record, as `allmask generate` does with these options."""
    return TextGenerator(model, TASK, precision)([record.fields["source"] for record in records], beams=beams)


def score(before: Sequence[str], after: Sequence[str], records: Sequence[Record]) -> Scores:
    references = [record.fields["target"] for record in records]
    leads = [lead_sentence(record.fields["source"]) for record in records]
    return {name: score_texts(texts, references) for name, texts in ((LEAD, leads), (BEFORE, before), (MODEL, after))}


def table(scores: Scores) -> str:
    """Return the scores as lines of text, with the mean number of words of a title."""
    lines = [" " * 18 + "".join(f"{label:>10}" for label in (*LABELS.values(), "words"))]
    for name, values in scores.items():
        cells = [values[key] for key in (*LABELS, "length")]
        lines.append(f"   {name:<15}" + "".join(f"{cell:>10.1f}" for cell in cells))
    lines.append(f"   {'people':<15}" + " " * 30 + f"{scores[MODEL]['reference_length']:>10.1f}")
    return "\n".join(lines)


def verdict(scores: Scores) -> str:
    """Say what the scores show, and no more."""
    ahead = scores[MODEL]["rouge_l"] - scores[LEAD]["rouge_l"]
    learnt = scores[MODEL]["rouge_l"] - scores[BEFORE]["rouge_l"]
    gain = f"Learning changed its ROUGE-L by {learnt:+.1f}."
    if ahead >= GOAL:
        return f"The model beats the first sentence by {ahead:.1f} ROUGE-L. {gain}"
    if ahead > 0:
        result = f"The model beats the first sentence by {ahead:.1f} ROUGE-L only; the goal is {GOAL:.0f}."
    else:
        result = f"The model does NOT beat the first sentence: {ahead:+.1f} ROUGE-L."
    return f"{result} {gain}\n   A longer run may do better: --minutes 10."


def samples(records: Sequence[Record], before: Sequence[str], after: Sequence[str], count: int, words: int = 32) -> str:
    """Return the titles for the first records with a short text, before and after learning."""
    short = [number for number, record in enumerate(records) if len(record.fields["source"].split()) <= words]
    chosen = [*short, *(number for number in range(len(records)) if number not in short)][:count]
    lines = []
    for number in chosen:
        fields = records[number].fields
        rows = {"text": fields["source"], "people": fields["target"], "before": before[number], "after": after[number]}
        lines += sample_lines(**rows)
    return "\n".join(lines)


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_learning(path: Path, metrics: list[dict[str, Any]], scores: Scores) -> None:
    """Draw loss and ROUGE-L by step (`metrics` are the lines of metrics.jsonl), and the final scores, as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY}):
        figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
        loss, held_out, final = figure.subplots(1, 3)
        steps, losses = points(metrics, "loss")
        loss.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1)
        loss.plot(steps, smoothed(losses), color=BLUE, label="training")
        loss.plot(*points(metrics, "eval_loss"), color=ORANGE, marker="o", markersize=4, label="held out")
        loss.set(title="loss (nats per token)", xlabel="step")
        loss.legend(frameon=False)
        held_out.plot(*points(metrics, "eval_rouge_l"), color=BLUE, marker="o", markersize=4, label=MODEL)
        for height in points(metrics, "eval_lead_rouge_l")[1]:
            held_out.axhline(height, color=ORANGE, linestyle="--", label=LEAD)
        held_out.set(title="ROUGE-L of held-out texts (greedy)", xlabel="step")
        held_out.set_ylim(bottom=0)
        held_out.legend(frameon=False, loc="lower right")
        for number, (name, colour) in enumerate(zip(scores, (ORANGE, GREY, BLUE), strict=True)):
            values = [scores[name][key] for key in LABELS]
            places = [0.28 * number + row for row in range(len(LABELS))]
            final.bar_label(final.bar(places, values, 0.26, color=colour, label=name), fmt="%.1f", fontsize=9)
        final.set_xticks([0.28 + row for row in range(len(LABELS))], list(LABELS.values()))
        final.set_title("files that it has not seen")
        final.margins(y=0.25)
        final.legend(frameon=False, ncols=3, fontsize=9)
        figure.savefig(path)
