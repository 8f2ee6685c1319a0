"""Filling: the likeliest tokens for each [MASK] of a text, by a masked language model or an XLNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from allmask.data import DataFile, Record, read_records
from allmask.data import text as text_field
from allmask.errors import CheckpointError, UsageError
from allmask.inference import precision_of
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import Cache
from allmask.options import FillOptions
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder, Predictor
from allmask.terminal import shortened
from allmask.text import Tokenizer

GAP = "[MASK]"  # in texts, whatever the tokenizer calls it; its own word, such as <mask>, is understood, too


@dataclass(frozen=True)
class Answer:
    token: str
    probability: float


@dataclass(frozen=True)
class Filled:
    """`text` has the best answer in each gap of `source`; `gaps` has the answers for each gap, best first.

    The gaps are filled independently of each other.
    """

    source: str
    text: str
    gaps: list[list[Answer]]


def open_filler(opened: ModelFolder, precision: str = "auto") -> Filler:
    """Return a filler; it computes in fp32, whatever the precision."""
    return Filler(opened.model)


@dataclass
class Filler(Predictor):
    """A model that fills gaps; a model that cannot is refused."""

    model: Model

    does: ClassVar[str] = "fills gaps"
    done: ClassVar[str] = "filled"
    options: ClassVar[frozenset[str]] = frozenset({"top"})
    declared: ClassVar[type] = FillOptions

    def __post_init__(self):
        if self.model.lm_head is None:
            raise CheckpointError("this model has no language model head, so it cannot fill gaps", _TEACH)
        if tokenizer_of(self.model).mask_id is None:
            raise CheckpointError("this model's tokenizer has no [MASK]", "take a BERT-like model")
        if self.model.config.own_mask == "causal":
            raise CheckpointError("this model reads from left to right only, so it cannot fill gaps", _TEACH)

    def computes_in(self) -> str:
        return precision_of(self.model)

    @overload
    def __call__(self, texts: str, top: int = 5) -> Filled: ...
    @overload
    def __call__(self, texts: Sequence[str], top: int = 5) -> list[Filled]: ...

    def __call__(self, texts: str | Sequence[str], top: int = 5) -> Filled | list[Filled]:
        if isinstance(texts, str):
            return self._fill([texts], top)[0]
        return [filled for start in range(0, len(texts), 32) for filled in self._fill(texts[start : start + 32], top)]

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_records(path, {"text": text_field}, **how)

    def expect_lines(self) -> None:
        """A line is a text."""

    def predict(
        self, records: Sequence[Record], top: int = FillOptions.top, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield what `allmask fill --json` prints. Texts are computed one by one: padding changes the last bits."""
        for record in records:
            yield asdict(self(record.fields["text"], top))

    @torch.no_grad()
    def _fill(self, texts: Sequence[str], top: int) -> list[Filled]:
        tokenizer = tokenizer_of(self.model)
        if not 1 <= top <= tokenizer.size - len(tokenizer.special_ids):
            raise UsageError(f"top is {top}; expected 1 or more, and no more than there are tokens")
        marked = [text.replace(tokenizer.specials["mask"], GAP) for text in texts]
        rows = [self._encode(text, tokenizer) for text in marked]
        valid = torch.arange(max(map(len, rows))) < torch.tensor([len(row) for row in rows])[:, None]
        ids = torch.zeros(valid.shape, dtype=torch.long)
        ids[valid] = torch.tensor([id for row in rows for id in row])
        asked = (ids == tokenizer.mask_id) & valid
        moved = (x.to(self.model.device) for x in (ids, valid, asked))
        answers = iter(likeliest(self.model.logits(self._hidden(*moved)).cpu(), tokenizer, top))
        found = [[next(answers) for _ in range(int(count))] for count in asked.sum(1)]
        swallows = tokenizer.mask_swallows_space
        return [
            Filled(text, _filled(with_gaps, gaps, swallows), gaps)
            for text, with_gaps, gaps in zip(texts, marked, found, strict=True)
        ]

    def _hidden(self, ids: Tensor, valid: Tensor, asked: Tensor) -> Tensor:
        """Return the hidden states (M, W) of the gaps; for an XLNet those of its query stream."""
        whole = Mask.bidirectional(valid)
        if self.model.config.family != "xlnet":
            return self.model(ids, whole).hidden[asked]
        known = replace(Mask.bidirectional(valid & ~asked), position=whole.position)
        _, cache = self.model.body.step(ids, known, Cache())
        return self.model.body.query_stream(ids, replace(whole, order=whole.order + 1), cache)[asked]

    def _encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Tokenize a text, with the special tokens of pretraining."""
        if GAP not in text:
            raise UsageError(f"there is no {GAP} in {shortened(text, 60)!r}", f"write {GAP} where a token is missing")
        ids = tokenizer.encode(text.replace(GAP, tokenizer.specials["mask"]), special=False).ids
        around = tokenizer.begin_id, *ids, tokenizer.end_id, tokenizer.closing_id
        framed = [id for id in around if id is not None]
        if len(framed) > self.model.config.max_positions:
            raise UsageError(
                f"a text of {len(framed)} tokens; this model reads {self.model.config.max_positions}", "shorten it"
            )
        return framed


_TEACH = (
    "allmask-en and allmask-zh can; or teach it: "
    "allmask pretrain --objective mlm --from MODEL --data corpus/ --out runs/a"
)


def likeliest(logits: Tensor, tokenizer: Tokenizer, top: int) -> list[list[Answer]]:
    """Return the likeliest tokens for each row of logits, without special tokens and ids that have no token."""
    shares = logits.float().softmax(-1)
    if shares.isnan().any():
        raise CheckpointError("the logits of the model are NaN", "its weights are damaged, or overflow in bf16")
    shares[:, list(tokenizer.special_ids)] = -1.0
    shares[:, tokenizer.size :] = -1.0
    best = shares.topk(top)

    def shown(id: int) -> str:  # bytes are decoded; other pieces are shown as they are, such as ##ing
        return tokenizer.decode([id]) if tokenizer.kind == "byte-bpe" else tokenizer.id_to_token(id) or ""

    return [
        [Answer(shown(id), share) for id, share in zip(ids, row, strict=True)]
        for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _filled(text: str, gaps: Sequence[Sequence[Answer]], swallows: bool) -> str:
    """Put the best answer into each gap; a piece such as ##ing joins the word before it.

    If the mask token `swallows` the space before it, an answer that begins a word has a space of its own.
    """
    first, *parts = text.split(GAP)
    for part, answers in zip(parts, gaps, strict=True):
        token = answers[0].token.replace("▁", " ") if swallows else answers[0].token
        before = first.rstrip() if swallows or token.startswith("##") else first
        first = before + (token.removeprefix("##") if before else token.removeprefix("##").lstrip()) + part
    return first
