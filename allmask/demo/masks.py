"""One file of weights under four masks: what it does with a text, which token reads which, and the proof of that.

fill      bidirectional   every token reads every token
continue  causal          each token reads the tokens before it
title     prefix          the text is read in both directions, the title is written from left to right
compare   packed          several texts in one row, and no token reads another text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from allmask.demo.texts import count_words, cut, hideable, opening
from allmask.inference import embed
from allmask.mask import Mask
from allmask.mask.audit import Audit, audit_tokens
from allmask.mask.drawing import beside, draw
from allmask.model import Model
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.fill import GAP, Filler
from allmask.tasks.metrics.text import lead_sentence
from allmask.tasks.task import ModelFolder

GUESSES = 5  # for each hidden word
SHOWN = 3  # hidden words that are shown
NEW = 24  # tokens of a continuation, which is shown up to the end of its first sentence
BEAMS = 4
LONG = 4  # letters of a word worth showing
TAIL = 50  # letters of a prompt that are shown
DRAWN = 9  # tokens of a drawing
WIDTH = 100  # columns of the terminal
PACKED = 14  # tokens of each text in the row of several texts that is audited


@dataclass(frozen=True, eq=False)
class View:
    """A text under one mask."""

    name: str
    rule: str  # the mask in words
    meaning: str  # what follows if the mask holds
    tokens: list[str]
    mask: Mask
    audit: Audit
    drawn: list[int]  # positions
    lines: list[str]  # what the model did
    result: Any  # the same as plain data

    def text(self) -> str:
        """Return the drawing with the result beside it, and what was proven."""
        visible, names = self.mask.visible()[0], [self.tokens[position] for position in self.drawn]
        cells = visible[self.drawn][:, self.drawn]
        drawing = draw(cells, ["·"] * len(names), names).partition("\n")[2]  # the rows have names, so columns need none
        room = WIDTH - 8 - max(map(len, drawing.splitlines()))
        shown = beside(drawing, [_fitted(line, room) for line in self.lines])
        return "\n".join([f"  {self.name}: {self.rule}", "", indented(shown), "", f"  {self.proof}", ""])

    @property
    def proof(self) -> str:
        return statement(self.audit, self.tokens, self.meaning)

    def to_dict(self) -> dict[str, Any]:
        counts = {"tokens": len(self.tokens), "visible": int(self.audit.promised.sum())}
        found = {"leaks": len(self.audit.leaks), "blind": len(self.audit.blind)}
        return {"name": self.name, "mask": self.rule, **counts, **found, "result": self.result}


def _fitted(line: str, room: int) -> str:
    """Return a line of at most `room` characters, cut between two words; its indentation is kept."""
    if len(line) <= room:
        return line
    kept = line[: room - 1]
    return (kept.rpartition(" ")[0] if " " in kept.strip() else kept[:-1]) + " …"


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def statement(audit: Audit, tokens: Sequence[str], meaning: str) -> str:
    """Say what an audit found; `meaning` is what follows if the model obeys the mask."""
    visible, hidden = int(audit.promised.sum()), int((~audit.promised).sum())
    if audit.holds:
        none = f", none of {hidden:,} hidden ones does" if hidden else ""
        return f"proven on these {len(tokens)} tokens: all {visible:,} visible pairs count{none}.\n  {meaning}"
    found = []
    for pairs, total, fault in ((audit.leaks, hidden, "hidden pairs leak"), (audit.blind, visible, "are not used")):
        if pairs:
            output, source = pairs[0]
            where = f"{tokens[output]} ({output}) and {tokens[source]} ({source})"
            found.append(f"{len(pairs):,} of {total:,} {fault}, such as {where}")
    return f"NOT PROVEN on these {len(tokens)} tokens: {'; '.join(found)}."


class FourMasks:
    """A model that fills, continues, writes titles and compares; it computes in fp32, as its audit does."""

    def __init__(self, opened: ModelFolder, model: Model | None = None):
        """`model` is used instead of the one in the folder, for example with fewer layers."""
        self.model = (model or opened.model).eval()
        self.tokenizer = tokenizer_of(self.model)
        self.filler = Filler(self.model)
        tasks = [opened.task(name).fitted(self.model) for name in ("title", "continue")]
        self.titles, self.continuations = (TextGenerator(self.model, task, None) for task in tasks)

    def views(self, text: str, others: Sequence[str]) -> list[Callable[[], View]]:
        """Return the four views of a text, each to be made when it is to be shown; `others` are compared with it."""
        start = opening(text)
        return [
            lambda: self.fill(start),
            lambda: self.carry_on(start),
            lambda: self.title(start),
            lambda: self.compare(text, others),
        ]

    def fill(self, text: str) -> View:
        """Hide the words of a text, one at a time, and guess them from both sides."""
        places = self._single_tokens(text)
        filled = self.filler([text[:start] + GAP + text[end:] for start, end in places], GUESSES)
        result = []
        for (start, end), one in zip(places, filled, strict=True):
            guesses = {answer.token: round(answer.probability, 4) for answer in one.gaps[0]}
            result.append({"text": one.source, "hidden": text[start:end].lower(), "guesses": guesses})
        right = sum(row["hidden"] == next(iter(row["guesses"])) for row in result)
        near = sum(row["hidden"] in row["guesses"] for row in result)
        lines = [
            f"{len(result)} words were hidden, one at a time: {right} guessed,",
            f"{near} among its first {GUESSES} guesses. Of the longer words, the surest:",
            "",
        ]
        for row in sorted(result, key=_by_sureness)[:SHOWN]:
            guesses = ", ".join(f"{token} {share:.0%}" for token, share in list(row["guesses"].items())[:3])
            lines += [_around_gap(row["text"]), f"    {guesses}   (it was: {row['hidden']})"]
        shown = min(result, key=_by_sureness)["text"].replace(GAP, self.tokenizer.specials["mask"])
        ids = self.tokenizer.encode(shown).ids
        first = max(0, min(ids.index(self.tokenizer.mask_id) - DRAWN // 2, len(ids) - DRAWN))
        return self._view(
            ("fill", "every token reads every token", "A guess uses both sides of its gap."),
            ids, Mask.bidirectional(torch.ones(1, len(ids), dtype=torch.bool)),
            list(range(first, min(len(ids), first + DRAWN))), lines, result,
        )  # fmt: skip

    def _single_tokens(self, text: str) -> list[tuple[int, int]]:
        """Return the places of words that are one token: no other word can be guessed in one gap."""
        words = hideable(text)
        encoded = self.tokenizer.encode_batch([text[start:end] for start, end in words], special=False)
        return [place for place, one in zip(words, encoded, strict=True) if len(one) == 1] or words[:1]

    def carry_on(self, text: str) -> View:
        """Continue the first half of a text."""
        prompt, rest = cut(text, max(1, count_words(text) // 2))
        ((written, best),) = next(self.continuations.write([prompt], beams=BEAMS, max_new=NEW, no_repeat_ngram=2))
        task = self.continuations.task.sized(NEW)
        ids = task.prompts(self.tokenizer, [prompt]).ids[0]
        middle, ids = len(ids), [*ids, *best.tokens]
        first = max(0, middle - DRAWN // 2)
        written = lead_sentence(written)
        tail = prompt if len(prompt) <= TAIL else "… " + prompt[-TAIL:].partition(" ")[2]
        lines = ["it reads", f"    {tail}", "and writes", f"    {written}", "where the text has", f"    {rest}"]
        return self._view(
            ("continue", "each token reads the tokens before it", "No word was written with a look ahead."),
            ids, task.mask_of(torch.arange(len(ids))[None] >= middle),
            list(range(first, min(len(ids), first + DRAWN))), lines,
            {"prompt": prompt, "written": written},
        )  # fmt: skip

    def title(self, text: str) -> View:
        ((written, best),) = next(self.titles.write([text], beams=BEAMS))
        prompt = self.titles.task.prompts(self.tokenizer, [text]).ids[0]
        ids = [*prompt, *best.tokens]
        is_target = torch.arange(len(ids))[None] >= len(prompt)
        some = min(len(best.tokens), DRAWN // 2)
        drawn = [*range(DRAWN - some - 1), len(prompt) - 1, *range(len(prompt), len(prompt) + some)]
        return self._view(
            ("title", "the title reads the text and itself so far", "The text never reads its title."),
            ids, self.titles.task.mask_of(is_target), drawn, ["the title that it writes", f"    {written}"],
            {"title": written}, segments=is_target.long(),
        )  # fmt: skip

    def compare(self, text: str, others: Sequence[str], top: int = 4) -> View:
        """Compare a text with others by the cosine of their vectors, which are made in one row of all texts."""
        vectors = F.normalize(embed(self.model, [text, *others]), dim=-1)
        near = (vectors[1:] @ vectors[0]).tolist()
        ranked = sorted(zip(near, others, strict=True), key=lambda pair: -pair[0])[:top]
        rows = [one.ids[:PACKED] for one in self.tokenizer.encode_batch([text, *(other for _, other in ranked)])]
        ids = [id for row in rows for id in row]
        document = torch.tensor([[number for number, row in enumerate(rows) for _ in row]])
        starts = [document[0].tolist().index(number) for number in range(min(3, len(rows)))]
        lines = ["cosine with other texts", *(f"    {cosine:5.2f}  {other}" for cosine, other in ranked)]
        return self._view(
            ("compare", "each text reads itself only, though all are in one row", "No text touched another's vector."),
            ids, Mask.packed(Mask.bidirectional(torch.ones_like(document, dtype=torch.bool)), document),
            [start + offset for start in starts for offset in range(3)], lines,
            [{"text": other, "cosine": round(cosine, 4)} for cosine, other in ranked],
        )  # fmt: skip

    def _view(
        self, words: tuple[str, str, str], ids: list[int], mask: Mask, drawn: list[int], lines: list[str], result: Any,
        segments: torch.Tensor | None = None,
    ) -> View:  # fmt: skip
        audit = audit_tokens(self.model, torch.tensor([ids]), mask, segments)
        return View(*words, self.tokenizer.tokens(ids), mask, audit, drawn, lines, result)


def _by_sureness(row: dict[str, Any]) -> tuple[bool, float]:
    """Sort short words last, and sure guesses first; Chinese words are short, too."""
    return len(row["hidden"]) < LONG and row["hidden"].isascii(), -max(row["guesses"].values())


def _around_gap(text: str, letters: int = 24) -> str:
    """Return the gap with some words on both sides."""
    before, _, after = text.partition(GAP)
    left = before if len(before) <= letters else "…" + before[-letters:].partition(" ")[2]
    right = after if len(after) <= letters else after[:letters].rpartition(" ")[0] + "…"
    return f"{left}{GAP}{right}"
