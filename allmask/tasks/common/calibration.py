"""After training: give titles the length that people write, and say whether they beat the first sentence.

A model with little training ends its titles too early or too late. Greedy decoding is corrected by a bias on the score
of the end token, beam search by its length penalty. Both are found by bisection on held-out records and saved with the
task, as is the score that almost all titles reach: texts of another kind than those in training have lower ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from allmask.data import Record
from allmask.model import Model
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.metrics.text import lead_sentence, score_texts

log = logging.getLogger("allmask")
FEWEST, MOST = 20, 100  # held-out records
NEAR = 0.1  # a mean length this close to people's is right; that of 100 people's titles is known to 3 %
COST = 0.5  # ROUGE-L that the right length may cost
TRIES = 4  # of a bisection
BEAMS = 4
BIASES = (-2.0, 2.0)  # on the end token; a larger one makes a model go on where it has nothing to say
PENALTIES = (0.0, 2.0)  # on the length, in beam search
REPEATS = (2, 0)  # tried beside the usual rule
DOUBTFUL = 0.05  # share of held-out titles with less than the usual score
GAIN = 1.0  # ROUGE-L by which another rule against repetition must be better


class Measured(NamedTuple):
    """Titles that were written with some value of an option: their mean length, in words, their ROUGE-L, and the score
    that almost all of them reach."""

    value: float
    length: float
    rouge_l: float
    usual: float = 0.0


def calibrated(task: Any, model: Model, held_out: Sequence[Record]) -> Any:
    """Return the task with values for end_bias, no_repeat_ngram, length_penalty and usual_score if they are None."""
    if not held_out:
        return task
    if len(held_out) < FEWEST:
        log.info("length and repetition are not calibrated: that takes %d held-out records", FEWEST)
        few = _Calibration(task, model, held_out)
        few.compare(few.measure(0.0).rouge_l)
        return task
    log.info("calibrating length and repetition on %d held-out records …", len(held_out[:MOST]))
    return _Calibration(task, model, held_out[:MOST]).run()


class _Calibration:
    def __init__(self, task: Any, model: Model, records: Sequence[Record]):
        self.task, self.generator = task, TextGenerator(model, task.fitted(model))
        self.sources = [record.fields["source"] for record in records]
        self.references = [record.fields["target"] for record in records]
        self.lead = score_texts([lead_sentence(source) for source in self.sources], self.references)
        self.wanted = self.lead["reference_length"]

    def measure(self, value: float, **options: Any) -> Measured:
        written = [best[0] for best in self.generator.write(self.sources, **options)]
        scores = score_texts([text for text, _ in written], self.references)
        confidence = sorted(one.per_token for _, one in written)
        return Measured(value, scores["length"], scores["rouge_l"], confidence[int(DOUBTFUL * len(confidence))])

    def run(self) -> Any:
        bias, greedy = self.end_bias()
        repeat, greedy = self.no_repeat_ngram(bias, greedy)
        penalty = self.length_penalty(repeat)
        self.compare(greedy.rouge_l)
        usual = greedy.usual if self.task.usual_score is None else self.task.usual_score
        return replace(self.task, end_bias=bias, no_repeat_ngram=repeat, length_penalty=penalty, usual_score=usual)

    def end_bias(self) -> tuple[float, Measured]:
        given = self.task.end_bias
        first = self.measure(given or 0.0, end_bias=given or 0.0)
        if given is not None:
            return given, first
        found = nearest(lambda bias: self.measure(bias, end_bias=bias), first, BIASES, self.wanted, rising=False)
        self.say("greedy", "end bias", first, found)
        return found.value, found

    def no_repeat_ngram(self, bias: float, usual: Measured) -> tuple[int, Measured]:
        if self.task.no_repeat_ngram is not None:
            return self.task.no_repeat_ngram, usual
        tried = [self.measure(size, end_bias=bias, no_repeat_ngram=size) for size in REPEATS]
        best = max(tried, key=lambda one: one.rouge_l)
        if best.rouge_l <= usual.rouge_l + GAIN:
            return self.task.usual_no_repeat, usual
        rule = f"never the same {best.value} tokens in a row twice" if best.value else "allowed"
        log.info("repetition: %s, ROUGE-L %.1f → %.1f", rule, usual.rouge_l, best.rouge_l)
        return int(best.value), best

    def length_penalty(self, repeat: int) -> float:
        if self.task.length_penalty is not None:
            return self.task.length_penalty

        def with_beams(penalty: float) -> Measured:
            return self.measure(penalty, beams=BEAMS, length_penalty=penalty, no_repeat_ngram=repeat)

        first = with_beams(1.0)
        found = nearest(with_beams, first, PENALTIES, self.wanted, rising=True)
        self.say(f"{BEAMS} beams", "length penalty", first, found)
        return found.value

    def say(self, how: str, name: str, first: Measured, found: Measured) -> None:
        written = f"length of titles, {how}: {first.length:.1f}, people write {self.wanted:.1f}"
        if found is first:
            log.info("%s; not changed", written)
        else:
            changed = f"{found.length:.1f}, ROUGE-L {first.rouge_l:.1f} → {found.rouge_l:.1f}"
            log.info("%s; with %s %.3g it is %s", written, name, found.value, changed)

    def compare(self, ours: float) -> None:
        count, lead = len(self.sources), self.lead["rouge_l"]
        found = f"ROUGE-L of {count} held-out titles: {ours:.1f}; of the first sentence of each text: {lead:.1f}"
        if ours > lead:
            log.info("%s", found)
        else:
            hint = "more pairs help most, then more epochs, or a start from allmask-en or allmask-zh"
            log.warning("%s. This model is NOT better than the first sentence; %s", found, hint)


def nearest(
    measure: Callable[[float], Measured], first: Measured, limits: tuple[float, float], wanted: float, rising: bool
) -> Measured:
    """Return the value whose mean length is nearest to `wanted`, by bisection between `first` and a limit.

    `rising`: whether a larger value gives longer texts. Values that cost more than `COST` of ROUGE-L are left out.
    """
    low, high = limits
    tried, last = [first], first
    while True:
        low, high = (last.value, high) if (last.length < wanted) == rising else (low, last.value)
        if abs(last.length - wanted) <= NEAR * wanted or len(tried) > TRIES:
            break
        last = measure((low + high) / 2)
        tried.append(last)
    good = [one for one in tried if one.rouge_l >= first.rouge_l - COST]
    return min(good, key=lambda one: abs(one.length - wanted))
