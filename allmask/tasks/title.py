"""Titles: a source text, and a short target to be written for it (UniLM, arXiv 1905.03197). Any seq2seq fits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from allmask.data import NO_LABEL, Batch, Example, Record, pack, packs, read_records, text
from allmask.decoding import Decoding, Writer
from allmask.errors import UsageError
from allmask.masks import Mask
from allmask.model import Model
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.samples import samples
from allmask.tasks.scores import is_chinese, lead_sentence, rouge, score_texts
from allmask.tasks.writing import Written, expect_frequencies, pair_writer, tidy, tokenizer_of, write, writer_for
from allmask.text import Tokenizer, propose_keep_tokens, truncate
from allmask.text.lengths import RULES
from allmask.training import Score, mean_loss

log = logging.getLogger("allmask")
FIELDS = {"source": text, "target": text}
SOURCE_MASKS = {"prefix": Mask.bidirectional, "naive": Mask.causal}  # how the source reads itself
PAIR = "encoder-decoder"  # the prefix mask with two stacks, which a model has or has not
NO_REPEAT = 3  # beams of a young model like to say a thing again: with this rule they gain 3 points of ROUGE-L
WORTH_PRUNING = 0.8  # prune the vocabulary if less than this share of it is used


@dataclass(frozen=True)
class Title:
    """The task as it is saved with a model: how texts become ids, and which mask reads them."""

    max_source: int = 254
    max_target: int = 64
    truncate: str = "head"
    mask: str = "prefix"
    prunes: ClassVar[bool] = True
    suited: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self):
        if self.max_source < 1 or self.max_target < 1:
            raise UsageError("max_source and max_target must be at least 1")
        if self.mask not in (*SOURCE_MASKS, PAIR):
            raise UsageError(f"mask is {self.mask!r}; expected one of {', '.join(SOURCE_MASKS)}")
        if self.truncate not in RULES:
            raise UsageError(f"truncate is {self.truncate!r}; expected one of {', '.join(RULES)}")

    def to_dict(self) -> dict[str, Any]:
        return {"task": "title", **asdict(self)}

    def fitted(self, model: Model) -> Title:
        """The same with a source that leaves room for the target in the model's positions."""
        _specials(tokenizer_of(model))
        if model.config.decoder_layers:
            reach = model.config.reach
            fits = {"max_source": min(self.max_source, reach - 2), "max_target": min(self.max_target, reach - 1)}
            return replace(self, mask=PAIR, **fits)
        room = model.config.max_positions - self.max_target - 3  # [CLS], [SEP], [SEP]
        if room < 1:
            raise UsageError(
                f"a target of {self.max_target} tokens leaves no room in {model.config.max_positions} positions",
                "choose a smaller --max-target",
            )
        mask = "prefix" if self.mask == PAIR else self.mask  # told by the settings of another body
        return replace(self, max_source=min(self.max_source, room), mask=mask)

    # ---- reading -------------------------------------------------------------------------------------------

    def read(self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None) -> list[Record]:
        return list(read_records(path, FIELDS, on_bad_record, skipped))

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Title, list[Record], list[Record]]:
        train = self.read(data, on_bad_record, skipped)
        return self, train, self.read(held_out, on_bad_record, skipped) if held_out else []

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> list[list[int]]:
        """[CLS] source [SEP] of each: what is there before anything is written."""
        return [self._prompt(ids, tokenizer) for ids in _ids(tokenizer, sources)]

    def _prompt(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        begin, end = _specials(tokenizer)
        return [*begin, *truncate(ids, self.max_source, self.truncate), end]

    def examples(self, tokenizer: Tokenizer, records: Sequence[Record], start: int | None = None) -> list[Example]:
        """`start` is what a decoder reads first, if it is not what the tokenizer would say."""
        sources = _ids(tokenizer, [record.fields["source"] for record in records])
        targets = _ids(tokenizer, [record.fields["target"] for record in records])
        self._tell_cuts(sources, targets)
        prompts = (self._prompt(ids, tokenizer) for ids in sources)
        pairs = zip(prompts, targets, strict=True)
        return [self._example(prompt, target, tokenizer, start) for prompt, target in pairs]

    def _tell_cuts(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        for name, rows, limit in (("sources", sources, self.max_source), ("targets", targets, self.max_target)):
            cut = sum(len(ids) > limit for ids in rows)
            if cut:
                log.info("%s of %s %s are cut to %s tokens", f"{cut:,}", f"{len(rows):,}", name, limit)

    def _example(self, prompt: list[int], target: list[int], tokenizer: Tokenizer, start: int | None) -> Example:
        """[CLS] source [SEP] target [SEP], segments 0 and 1; each position before a target token must predict it."""
        if self.mask == PAIR:
            written = [*target[: self.max_target], _specials(tokenizer)[1]]
            first = tokenizer.start_id if start is None else start
            assert first is not None
            return Example.pair(prompt, [first, *written[:-1]], written)
        ids = np.array([*prompt, *target[: self.max_target], _specials(tokenizer)[1]])
        is_target = np.arange(len(ids)) >= len(prompt)
        labels = np.where(np.append(is_target[1:], False), np.roll(ids, -1), NO_LABEL)
        return Example(ids, self.mask_of(torch.from_numpy(is_target)[None]).order[0].numpy(), is_target, labels)

    def mask_of(self, is_target: torch.Tensor) -> Mask:
        return Mask.causal(torch.ones_like(is_target)) if self.mask == "naive" else Mask.prefix(is_target)

    # ---- writing -------------------------------------------------------------------------------------------

    def decoding(self, model: Model, **changes: Any) -> Decoding:
        """Greedy unless told otherwise; no special token but the [SEP] that ends a title, no three tokens twice."""
        tokenizer = tokenizer_of(model)
        sep = _specials(tokenizer)[1]
        nameless = range(tokenizer.size, model.config.vocabulary)
        banned = (*sorted(tokenizer.special_ids - {sep}), *nameless)
        rules = {"end": (sep,), "banned": banned, "max_new": self.max_target + 1, "no_repeat_ngram": NO_REPEAT}
        return Decoding(**{**rules, **changes})

    def writer(self, model: Model, precision: str | None = None) -> Writer:
        if self.mask == PAIR:
            return pair_writer(model, precision)
        return writer_for(model, precision, SOURCE_MASKS[self.mask])

    def write(
        self, model: Model, sources: Sequence[str], settings: Decoding | None = None, batch: int = 32,
        writer: Writer | None = None,
    ) -> Iterator[Written]:  # fmt: skip
        """For each source its n-best titles with their hypotheses, in the order given, a batch at a time."""
        return write(self, model, sources, settings or self.decoding(model), batch, writer)

    def read_back(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
        """Pieces that know where spaces were need no tidying."""
        text = tokenizer.decode(tokens)
        return tidy(text) if tokenizer.kind == "wordpiece" else text

    def score(self, written: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """The scores of what was written, and of each source's first sentence beside them."""
        references = [record.fields["target"] for record in records]
        lead = [lead_sentence(record.fields["source"]) for record in records]
        return {"model": score_texts(written, references), "lead sentence": score_texts(lead, references)}

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits a model and its data: the usual settings do."""
        return {}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = True, language: bool = True
    ) -> Model:
        """A model that can write: with an output layer, and a vocabulary no larger than the data needs.

        So there is a language model in any case, whether or not it is also learnt by itself.
        """
        fresh = model.lm_head is None
        if fresh:
            log.info("the checkpoint has no language model head; one is made from the token embedding")
        model = model.without("task").with_language_model(torch.Generator().manual_seed(seed))
        model = self._pruned(model, records) if prune else model
        if fresh:
            expect_frequencies(model, _counts(model, [record.fields["target"] for record in records]))
        return model

    def _pruned(self, model: Model, records: Sequence[Record]) -> Model:
        if tokenizer_of(model).kind == "unigram":
            log.info("vocabulary: of a unigram all is kept, as words would be cut anew without some of it")
            return model
        texts = (value for record in records for value in record.fields.values())
        kept = propose_keep_tokens(tokenizer_of(model), texts)
        before = model.config.vocabulary
        if len(kept) > WORTH_PRUNING * before:
            return model
        pruned = model.keep_tokens(kept)
        saved = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in pruned.parameters())
        log.info("vocabulary: %s → %s tokens, −%.1fM parameters", f"{before:,}", f"{len(kept):,}", saved / 1e6)
        return pruned

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TitleWork:  # fmt: skip
        """What is held out is written for by the model as it is, whatever the precision of training."""
        tokenizer = tokenizer_of(model)
        start = model.config.start_token
        examples = self.examples(tokenizer, records, start)
        judge = Judge(self, list(held_out), self.examples(tokenizer, held_out, start)) if held_out else None
        return TitleWork(examples, judge, auxiliary)


@dataclass
class TitleWork:
    """What the training loop asks for: examples by number, and a judge."""

    examples: list[Example]
    judge: Callable[[Model], Score] | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(example) for example in self.examples]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        chosen = [self.examples[number] for number in numbers]
        if self.auxiliary is None:
            return pack(chosen)
        return replace(pack(chosen), also=self.auxiliary.batch([_source(one) for one in chosen], numbers, epoch))

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class Judge:
    """Loss on the held-out records, ROUGE of the titles written for the first of them, a few to look at."""

    task: Title
    records: list[Record]
    examples: list[Example]
    written: int = 100
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        loss = mean_loss(model, packs(self.examples))
        chosen = self.records[: self.written]
        titles = [best[0][0] for best in self.task.write(model, [record.fields["source"] for record in chosen])]
        references = [record.fields["target"] for record in chosen]
        scores = rouge(titles, references, is_chinese(references))
        return Score(scores["rouge_l"], {"loss": loss, **scores}, samples(chosen[: self.shown], titles))


def _source(example: Example) -> Example:
    """[CLS] source [SEP] without its target."""
    kept = example.segments == 0
    return Example(example.ids[kept], example.order[kept], example.segments[kept], np.full(kept.sum(), NO_LABEL))


def _counts(model: Model, targets: Sequence[str]) -> torch.Tensor:
    """How often each token is written."""
    tokenizer = tokenizer_of(model)
    written = [id for ids in _ids(tokenizer, targets) for id in (*ids, _specials(tokenizer)[1])]
    return torch.bincount(torch.tensor(written), minlength=model.config.vocabulary)


def _specials(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """What stands before a source, if anything does, and what ends it."""
    if tokenizer.end_id is None or (tokenizer.cls_id is None and tokenizer.pad_id is None):
        raise UsageError("this tokenizer has no [CLS] or [SEP]", "titles need a BERT-like model or an encoder–decoder")
    return [] if tokenizer.begin_id is None else [tokenizer.begin_id], tokenizer.end_id


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoded.ids for encoded in tokenizer.encode_batch(list(texts), special=False)]
