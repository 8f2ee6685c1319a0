"""Train the weights that are shipped: one set of weights under every mask.

    python quality/weights.py quality/weights-en.yaml --out quality-runs/allmask-en            # resumed if it exists
    python quality/weights.py quality/weights-en.yaml --out quality-runs/try --steps 300 --set lr=1e-3 layer_decay=0.8

Each step trains one of these objectives, in the shares of the config file:

    mlm      rows of text, bidirectional: guess masked tokens
    causal   rows of text, from left to right: predict the next token
    prefix   rows of text, cut in two: read the first part, write the second
    quote    read a text, write one of its central sentences
    title    read a text, write its title
    embed    bidirectional: the vector of a text is nearest to that of its own title (InfoNCE within the batch)
    keep     sentences and titles, bidirectional: the hidden states stay near those of another model, the teacher
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import allmask
from allmask.data import NO_LABEL, Batch, Example, Record, pack, packs, plan_epoch
from allmask.data.corpus import prepare
from allmask.data.windows import Windows
from allmask.demo.docstrings import support
from allmask.losses import Losses
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary, losses_of
from allmask.registry import OBJECTIVES
from allmask.runs.folder import save_model
from allmask.tasks.common.calibration import calibrated
from allmask.tasks.common.quoting import quotations
from allmask.tasks.common.writing import expect_frequencies, tokenizer_of
from allmask.tasks.continuation import Continuation
from allmask.tasks.metrics.text import rouge, score_texts
from allmask.tasks.seq2seq import Title
from allmask.text import Tokenizer, propose_keep_tokens, truncate_tokens
from allmask.text.script import is_chinese
from allmask.training import Score, Settings, StepSpec, checkpoint, mean_loss, train

FRAMES = 3  # special tokens around a row, at most
QUOTED = 20_000  # quotations
TEMPERATURE = 0.05  # of InfoNCE
EVALUATED = 64  # held-out titles, and rows of held-out text
KEPT = (4, 48)  # tokens of a sentence that `keep` reads
REPLACED = 0.3  # of the tokens of every second sentence, by random words: so all of the vocabulary is read


@dataclass(frozen=True)
class Config:
    """A config file. Files are relative to the folder given by --data, or absolute."""

    name: str
    start: str  # the model that training begins with
    shares: Mapping[str, float]  # of the steps, by objective
    text: Sequence[tuple[str, int | None]]  # files of running text, for mlm, causal and prefix; at most n characters
    pairs: Sequence[
        tuple[str, float | None]
    ]  # files of source and target, for quote, title and embed; see `read_pairs`
    dev_pairs: str  # its first records are for evaluations only
    teacher: str | None = None  # the model whose reading `keep` preserves; of the same layout as the start
    blend: Mapping[str, float] = field(default_factory=dict)  # how much of the teacher the start gets, see `blended`
    keep_start: float = 0.0  # how much of the start, as it was before it was blended, the result gets
    rare: int = 0  # tokens with fewer occurrences in the pairs start as the teacher's
    keep_text: Sequence[tuple[str, int | None]] = ()  # files of sentences, a line each, that only `keep` reads
    keep_weight: float = 1.0  # of the loss
    keep_layers: bool = False  # the hidden states of every layer, not only of the last
    take_last: bool = False  # keep the weights of the last step, not those of the best evaluation: it knows no `keep`
    freeze_tokens: bool = False  # the token embedding, and with it the tied output layer, stays as it is
    quote_until: float = 1.0  # share of the run: a model that quotes to the end quotes where a title is wanted
    steps: int = 3000
    batch_tokens: int = 4096
    embed_tokens: int = 4096  # of a batch of embed: the more titles it has, the harder it is to find one's own
    lr: float = 8e-4
    layer_decay: float = 0.8
    warmup: float = 0.05
    dropout: float = 0.0
    fewest: int = 0  # occurrences in the pairs: rarer tokens leave the vocabulary
    tied: bool = True  # the output layer is the token embedding; untied, it starts as a copy of it
    length: int = 128  # tokens of a row of text
    masked: float = 0.2  # share of the tokens that mlm hides
    held_out: float = 0.01  # share of the documents of running text, for evaluations
    dev_records: int = 300
    max_source: int = 128
    max_target: int = 32
    embed_source: int = 96
    length_penalty: float | None = None  # of beam search, saved with the model
    calibrate: Sequence[str] = ()  # files of pairs on which the length of titles is calibrated in the end
    save_every: int = 100
    evaluations: int = 10
    seed: int = 1

    @classmethod
    def read(cls, path: Path, changes: Sequence[str], data: Path) -> Config:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        for change in changes:
            name, _, value = change.partition("=")
            *outer, last = name.split(".")
            inner = values
            for key in outer:
                inner = inner[key]
            inner[last] = yaml.safe_load(value)
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise SystemExit(f"{path}: unknown: {', '.join(sorted(unknown))}")
        values["lr"] = float(values.get("lr", cls.lr))  # YAML reads 1e-3 as a string
        for name in ("text", "pairs", "keep_text"):
            given = values.get(name, ())
            entries = (next(iter(one.items())) if isinstance(one, dict) else (one, None) for one in given)
            values[name] = [(str(file), limit) for pattern, limit in entries for file in _found(data, pattern)]
        values["dev_pairs"] = str(data / values["dev_pairs"])
        values["calibrate"] = [str(data / file) for file in values.get("calibrate", ())]
        for name in ("start", "teacher"):
            if values.get(name) and (data / values[name]).is_dir():
                values[name] = str(data / values[name])
        return cls(**values)


def _found(data: Path, pattern: str) -> list[Path]:
    found = sorted(data.glob(pattern)) if not Path(pattern).is_absolute() else [Path(pattern)]
    if not found:
        raise SystemExit(f"{data / pattern}: no such file; see the table of sources in docs/weights.md")
    return found


# ---- batches -------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """What a step trains on: some examples of an objective, in a pass over its examples."""

    objective: str
    epoch: int
    numbers: list[int]


class Part:
    """The examples of one objective."""

    lengths: Sequence[int] | np.ndarray

    def batch(self, numbers: Sequence[int], epoch: int) -> Any:
        raise NotImplementedError


@dataclass
class Rows(Part):
    """Rows of text, corrupted and ordered by an objective of the library."""

    objective: Any
    rows: Windows
    seed: int

    @cached_property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        return self.rows.lengths + FRAMES

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return self.objective.batch(self.rows, Draw(self.seed, epoch, numbers))


@dataclass
class Pairs(Part):
    """Source and target under the prefix mask."""

    examples: list[Example]
    name: str

    @cached_property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [len(example) for example in self.examples]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return replace(pack([self.examples[number] for number in numbers]), name=self.name)


@dataclass(frozen=True, eq=False)
class Compared:
    """Texts 0, 1, …, n − 1 and their titles n, n + 1, …, 2n − 1 in one row, each read in both directions."""

    row: Batch

    @property
    def tokens(self) -> int:
        return self.row.tokens

    @property
    def counts(self) -> dict[str, int]:
        return {"embed": 1}

    def to(self, device: torch.device | str) -> Compared:
        return Compared(self.row.to(device))

    def vectors(self, model: Model) -> Tensor:
        """(2n, W) the mean hidden state of each text, of length 1."""
        row = self.row
        hidden = model.body(row.ids, row.mask, None, row.segments)[0].float()
        group = row.mask.group[0]
        sums = hidden.new_zeros(int(group.max()) + 1, hidden.shape[-1]).index_add(0, group, hidden)
        return F.normalize(sums, dim=-1)

    def loss(self, model: Model) -> Tensor:
        texts, titles = self.vectors(model).chunk(2)
        cosines = texts @ titles.T / TEMPERATURE
        own = torch.arange(len(texts), device=cosines.device)
        return (F.cross_entropy(cosines, own) + F.cross_entropy(cosines.T, own)) / 2


@dataclass
class Embeddings(Part):
    """Pairs of a text and its title to compare."""

    pairs: list[tuple[list[int], list[int]]]  # ids with special tokens

    @cached_property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [len(source) + len(target) for source, target in self.pairs]

    def batch(self, numbers: Sequence[int], epoch: int) -> Compared:
        texts = [self.pairs[number][side] for side in (0, 1) for number in numbers]
        return Compared(pack([_read_only(ids) for ids in texts]))


def _read_only(ids: Sequence[int] | np.ndarray) -> Example:
    zeros = np.zeros(len(ids))
    return Example(np.array(ids), zeros, zeros, np.full(len(ids), NO_LABEL))


class Teacher(NamedTuple):
    """A model whose hidden states are to be kept."""

    model: Model
    weight: float  # of the loss
    layers: bool = False  # whether every layer's states are kept


@dataclass(frozen=True, eq=False)
class Kept:
    """Texts in one row, each read in both directions by the model that is trained and by its teacher."""

    row: Batch
    teacher: Teacher

    @property
    def tokens(self) -> int:
        return self.row.tokens

    @property
    def counts(self) -> dict[str, int]:
        return {"keep": 1}

    def to(self, device: torch.device | str) -> Kept:
        return replace(self, row=self.row.to(device))

    def loss(self, model: Model) -> Tensor:
        """The squared distance between hidden states, as a share of the teacher's own square.

        Of all tokens, of the mean of each text, and of its first token, which classifiers read, with and without the
        pooler; perhaps also of all tokens after each earlier layer.
        """
        with torch.no_grad():
            wanted = self.states(self.teacher.model)
        found = self.states(model)
        total = sum(map(_relative_distance, found, wanted), start=torch.zeros(()))
        return self.teacher.weight * total / len(found)

    def states(self, model: Model) -> list[Tensor]:
        row = self.row
        layers: list[Tensor] = []
        watched = model.body.layers[:-1] if self.teacher.layers else []
        hooks = [one.register_forward_hook(lambda _, given, out: layers.append(out[0][0].float())) for one in watched]
        hidden = model.body(row.ids, row.mask, None, row.segments)[0].float()
        for hook in hooks:
            hook.remove()
        group = row.mask.group[0]
        sums = hidden.new_zeros(int(group.max()) + 1, hidden.shape[-1]).index_add(0, group, hidden)
        firsts = hidden[row.mask.position[0] == 0]
        states = [*layers, hidden, F.normalize(sums, dim=-1), firsts]
        return states if model.pooler is None else [*states, model.pooler(firsts)]


def _relative_distance(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum() / wanted.square().sum()


@dataclass
class Sentences(Part):
    """Texts that are read as the teacher reads them; of every second one some tokens are replaced by random words."""

    texts: list[np.ndarray]  # ids with special tokens
    words: np.ndarray  # ids
    teacher: Teacher
    seed: int

    @cached_property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [len(ids) for ids in self.texts]

    def batch(self, numbers: Sequence[int], epoch: int) -> Kept:
        rng = np.random.default_rng([self.seed, epoch, *numbers])
        rows = []
        for number in numbers:
            ids = self.texts[number]
            if rng.random() < 0.5:
                chosen = rng.random(len(ids)) < REPLACED
                chosen[[0, -1]] = False
                ids = np.where(chosen, rng.choice(self.words, len(ids)), ids)
            rows.append(_read_only(ids))
        return Kept(pack(rows), self.teacher)


@dataclass
class Every:
    """The workload: a part for each objective, in turn by their shares."""

    parts: dict[str, Part]
    shares: Mapping[str, float]
    steps: int
    evaluator: Evaluator
    embed_tokens: int
    quote_until: float = 1.0
    take_last: bool = False

    @property
    def lengths(self) -> np.ndarray:
        return np.zeros(0)  # each part has its own

    @property
    def step_spec(self) -> StepSpec:
        return StepSpec(plan=self.plan, losses=_losses, operations=_operations)

    def plan(self, lengths: Any, batch_tokens: int, seed: int, epoch: int) -> list[Any]:
        """All steps of the run. The objective furthest behind its share is next, so any stretch has the mixture.

        After `quote_until` of the run, titles have the share of quotations.
        """
        tokens = {name: self.embed_tokens if name == "embed" else batch_tokens for name in self.parts}
        batches = {name: self._endless(name, tokens[name], seed + epoch) for name in self.parts}
        shares = {name: self.shares[name] for name in self.parts}
        behind = dict.fromkeys(shares, 0.0)
        chosen = []
        for step in range(1, self.steps + 1):
            if step > self.quote_until * self.steps and "quote" in shares:
                shares["title"] += shares.pop("quote")
                behind["title"] += behind.pop("quote")
            total = sum(shares.values())
            behind = {name: behind[name] + share / total for name, share in shares.items()}
            name = max(behind, key=lambda name: behind[name])
            behind[name] -= 1
            chosen.append(next(batches[name]))
        return chosen

    def _endless(self, name: str, batch_tokens: int, seed: int):
        epoch = 0
        while True:
            for numbers in plan_epoch(self.parts[name].lengths, batch_tokens, seed, epoch):
                yield Drawn(name, epoch, numbers)
            epoch += 1

    def batch(self, drawn: Any, epoch: int) -> Any:
        return self.parts[drawn.objective].batch(drawn.numbers, drawn.epoch)

    def evaluate(self, model: Model, step: int) -> Score:
        score = self.evaluator(model)
        return replace(score, value=step) if self.take_last else score


def _losses(model: Model, batch: Any, smoothing: float) -> Losses:
    if isinstance(batch, Compared | Kept):
        return {name: (batch.loss(model), 1) for name in batch.counts}
    return losses_of(model, batch, smoothing)


def _operations(model: Model, batch: Any) -> int:
    return StepSpec().operations(model, batch.row if isinstance(batch, Compared | Kept) else batch)


# ---- reading -------------------------------------------------------------------------------------------------


def read_pairs(files: Sequence[tuple[str, float | None]], task: Title, held_out: Sequence[Record] = ()) -> list[Record]:
    """The records of all files, each source once, without those held out.

    A file may come with the least share of a title's words that its text must support: the titles of commits, for
    example, often have nothing to do with the rest of their message.
    """
    seen: dict[str, Record] = {}
    for file, least in files:
        for record in task.read(Path(file)):
            if least is None or support(record.fields["target"], record.fields["source"]) >= least:
                seen.setdefault(record.fields["source"], record)
    for record in held_out:
        seen.pop(record.fields["source"], None)
    return list(seen.values())


def shortened(file: str, characters: int | None, folder: Path) -> Path:
    """A copy of the documents at the beginning of a file, if it has more characters than asked for."""
    if characters is None:
        return Path(file)
    folder.mkdir(exist_ok=True)
    copy = folder / Path(file).name
    copy.write_text(Path(file).read_text(encoding="utf-8")[:characters].rpartition("\n\n")[0], encoding="utf-8")
    return copy


def parts_of(
    config: Config, tokenizer: Tokenizer, task: Title, rows: Windows, held_out: Sequence[Record]
) -> dict[str, Part]:
    records = read_pairs(config.pairs, task, held_out)
    print(f"{len(records):,} pairs, {len(rows):,} rows of {rows.lengths.sum():,} tokens", flush=True)
    rng = random.Random(config.seed)
    made: dict[str, Callable[[], Part]] = {
        name: partial(row_part, name, config, tokenizer, rows) for name in ("mlm", "causal", "prefix")
    }
    quoted = rng.sample(records * math.ceil(QUOTED / len(records)), QUOTED)  # several sentences of each if need be
    made["quote"] = lambda: Pairs(task.examples(tokenizer, quotations(quoted, task.max_source, rng)), "quote")
    made["title"] = lambda: Pairs(task.examples(tokenizer, records), "title")
    made["embed"] = lambda: Embeddings(_framed_pairs(config, tokenizer, records))
    made["keep"] = lambda: sentences_of(config, tokenizer, rows, records)
    return {name: made[name]() for name, share in config.shares.items() if share > 0}


def row_part(name: str, config: Config, tokenizer: Tokenizer, rows: Windows) -> Rows:
    options = {"share": config.masked} if name == "mlm" else {}
    return Rows(OBJECTIVES[name](Vocabulary.of(tokenizer), **options), rows, config.seed)


def sentences_of(config: Config, tokenizer: Tokenizer, rows: Windows, records: Sequence[Record]) -> Sentences:
    """All sentences of the rows of text, those of other files, and the titles; Chinese rows as a whole, too."""
    if config.teacher is None:
        raise SystemExit("keep: name a teacher")
    model = allmask.load(config.teacher).requires_grad_(False).eval()
    teacher = Teacher(model, config.keep_weight, config.keep_layers)
    begin, end = [tokenizer.begin_id], [tokenizer.end_id]
    inner = (np.split(rows[number], rows.sentences(number)[1:]) for number in range(len(rows)))
    texts = [sentence for parts in inner for sentence in parts if KEPT[0] <= len(sentence) <= KEPT[1]]
    titles = [record.fields["target"] for record in records]
    texts += [np.array(one.ids[: config.max_target]) for one in tokenizer.encode_batch(titles, special=False)]
    others = [line for file, _ in config.keep_text for line in Path(file).read_text(encoding="utf-8").splitlines()]
    found = [np.array(one.ids) for one in tokenizer.encode_batch(others, special=False)]
    texts += [ids for ids in found if KEPT[0] <= len(ids) <= KEPT[1]]
    chinese = is_chinese(titles)
    if chinese:  # reviews are longer than sentences
        texts += [rows[number] for number in range(len(rows))]
    pieces = [(piece.removeprefix("##"), id) for piece, id in tokenizer.backend.get_vocab().items()]
    words = [id for piece, id in pieces if piece.isalpha() and (is_chinese([piece]) if chinese else piece.isascii())]
    framed = [np.concatenate([begin, ids, end]) for ids in texts]
    print(f"keep: {len(texts):,} sentences and titles, {len(words):,} words", flush=True)
    return Sentences(framed, np.array(sorted(words)), teacher, config.seed)


def _framed_pairs(config: Config, tokenizer: Tokenizer, records: Sequence[Record]) -> list[tuple[list[int], list[int]]]:
    begin, end = [tokenizer.begin_id], [tokenizer.end_id]
    sides = []
    for name, limit in (("source", config.embed_source), ("target", config.max_target)):
        encoded = tokenizer.encode_batch([record.fields[name] for record in records], special=False)
        sides.append([[*begin, *truncate_tokens(one.ids, limit, "head"), *end] for one in encoded])
    return list(zip(*sides, strict=True))


# ---- evaluation ----------------------------------------------------------------------------------------------


@dataclass
class Evaluator:
    """Measures what each mask has learnt, on a few held-out records and rows."""

    task: Title
    records: list[Record]
    rows: Mapping[str, Rows]  # mlm and causal

    def __call__(self, model: Model) -> Score:
        chosen = self.records[:EVALUATED]
        titles = [best[0][0] for best in self.task.write(model, [record.fields["source"] for record in chosen])]
        references = [record.fields["target"] for record in chosen]
        metrics = {"rouge_l": rouge(titles, references, is_chinese(references))["rouge_l"]}
        metrics["length"] = score_texts(titles, references)["length"]
        metrics["loss_title"] = mean_loss(model, packs(self.task.examples(tokenizer_of(model), self.records)))
        numbers = np.linspace(0, len(self.rows["mlm"].rows) - 1, EVALUATED).astype(int).tolist()
        with torch.inference_mode():
            for name, part in self.rows.items():
                batch = part.batch(numbers, 0)
                hidden = model.body.forward_at(batch.labels >= 0, batch.ids, batch.mask, batch.segments)
                logits, labels = model.logits(hidden), batch.labels[batch.labels >= 0]
                metrics[f"loss_{name}"] = F.cross_entropy(logits, labels).item()
                if name == "mlm":  # only where the token is hidden
                    hidden_ones = (batch.ids == tokenizer_of(model).mask_id)[batch.labels >= 0]
                    metrics["guessed"] = 100 * (logits.argmax(-1) == labels)[hidden_ones].float().mean().item()
            if model.config.family == "bert":
                metrics["mrr"] = self.reciprocal_rank(model)
        samples = [f"  {r.fields['target'][:80]}\n    {title}" for r, title in zip(chosen[:3], titles, strict=False)]
        return Score(metrics["rouge_l"] - 10 * metrics["loss_mlm"], metrics, samples)

    def reciprocal_rank(self, model: Model) -> float:
        from allmask.inference import embed

        sides = [embed(model, [r.fields[name] for r in self.records], normalize=True) for name in ("source", "target")]
        return 100 * mean_reciprocal_rank(*sides)


def mean_reciprocal_rank(texts: Tensor, titles: Tensor) -> float:
    """Mean of 1 / rank of a text's own title among all titles, by cosine."""
    cosines = texts @ titles.T
    ranks = (cosines > cosines.diagonal()[:, None]).sum(1) + 1
    return (1.0 / ranks).mean().item()


# ---- training ------------------------------------------------------------------------------------------------


def first_model(config: Config, records: Sequence[Record]) -> Model:
    """The start with a language model head, whose bias begins with how often tokens are written."""
    model = allmask.load(config.start)
    if config.fewest:
        texts = (text for record in records for text in record.fields.values())
        model = model.keep_tokens(propose_keep_tokens(tokenizer_of(model), texts, config.fewest))
        print(f"vocabulary: {model.config.vocab_size:,} tokens", flush=True)
    if config.blend:
        sources = [record.fields["source"] for record in records]
        encoded = [one.ids for one in tokenizer_of(model).encode_batch(sources, special=False)]
        counts = torch.bincount(torch.tensor([id for ids in encoded for id in ids]), minlength=model.config.vocab_size)
        texts = [ids[: KEPT[1]] for ids in encoded[:100]]
        blended(model, allmask.load(str(config.teacher)), config.blend, counts < config.rare, texts)
    if config.freeze_tokens:
        model.body.embedding.tokens.weight.requires_grad_(False)
    if model.lm_head is not None:
        return model
    model.config = replace(model.config, tied=config.tied)
    model = model.with_language_model(torch.Generator().manual_seed(config.seed))
    if not config.tied:
        model.lm_head.output.weight.data.copy_(model.body.embedding.tokens.weight.data)
    tokenizer = tokenizer_of(model)
    encoded = tokenizer.encode_batch([record.fields["source"] for record in records[:20000]], special=False)
    counts = torch.bincount(torch.tensor([id for one in encoded for id in one.ids]), minlength=model.config.vocab_size)
    expect_frequencies(model, counts)
    return model


@torch.no_grad()
def blended(
    model: Model, teacher: Model, shares: Mapping[str, float], rare: Tensor, texts: Sequence[Sequence[int]]
) -> None:
    """Interpolate the weights of the `tokens` and of the `layers`, with the other embeddings; 1 is the teacher.

    `rare` tokens (V,) become the teacher's. The bias of the output layer makes up for the new token embedding: each
    token's mean logit where `texts` are continued stays.
    """
    theirs = dict(teacher.named_parameters())
    batch = pack([replace(_read_only(ids), order=np.arange(len(ids))) for ids in texts])
    hidden = model.body(batch.ids, batch.mask, None, batch.segments)[0]
    before = None if model.lm_head is None else model.logits(hidden).mean(0)
    for name, weight in model.named_parameters():
        if name.startswith("body.embedding.tokens."):
            weight.lerp_(theirs[name], shares.get("tokens", 0.0))
            weight[rare] = theirs[name][rare]
        elif name.startswith("body."):
            weight.lerp_(theirs[name], shares.get("layers", 0.0))
    if model.lm_head is not None:
        model.lm_head.bias += before - model.logits(hidden).mean(0)


@torch.no_grad()
def mixed(model: Model, other: Model, share: float) -> None:
    """Interpolate all weights; 1 is the other model."""
    theirs = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        weight.lerp_(theirs[name], share)


def run(config: Config, out: Path, precision: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    task = Title(
        max_source=config.max_source, max_target=config.max_target, length_penalty=config.length_penalty, quote=0
    )
    model = first_model(config, read_pairs(config.pairs, task))
    tokenizer = tokenizer_of(model)
    files = [shortened(file, characters, out / "text") for file, characters in config.text]
    text = Windows(prepare(files, tokenizer, out / "corpus"), config.length - FRAMES)
    rows, others = text.split(config.held_out, config.seed)
    held_out = task.read(Path(config.dev_pairs))[: config.dev_records]
    parts = parts_of(config, tokenizer, task, rows, held_out)
    judged = {name: row_part(name, config, tokenizer, others) for name in ("mlm", "causal")}
    evaluator = Evaluator(task, held_out, judged)
    work = Every(
        parts, config.shares, config.steps, evaluator, config.embed_tokens, config.quote_until, config.take_last
    )
    settings = Settings(
        steps=config.steps, batch_tokens=config.batch_tokens, lr=config.lr, layer_decay=config.layer_decay,
        warmup=config.warmup, dropout=config.dropout, seed=config.seed, precision=precision,
        eval_every=max(1, config.steps // config.evaluations), save_every=config.save_every, keep=2,
    )  # fmt: skip
    training = out / "training"
    result = train(model, work, settings, training, resume=bool(checkpoint.checkpoints(training)))
    print(json.dumps({"seconds": result.seconds, "best": result.best and result.best.metrics}))
    if not config.tied:
        print("not saved: BERT's layout has no untied output layer")
        return
    if config.keep_start:
        mixed(model, allmask.load(config.start), config.keep_start)
    if config.calibrate:
        files = [task.read(Path(file)) for file in config.calibrate]
        task = calibrated(task, model.eval(), [record for records in zip(*files, strict=False) for record in records])
    shutil.rmtree(out / "final", ignore_errors=True)
    save_model(model.half(), task, out / "final", also=[Continuation.within(config.length, framed=True)])


def package(final: Path, folder: Path) -> None:
    """Put the model into the Python package that carries it; an incomplete copy is seen by `allmask verify`."""
    inner = folder / folder.name.replace("-", "_")
    for file in final.iterdir():
        shutil.copyfile(file, inner / file.name)
    print(f"{inner}: {sum(file.stat().st_size for file in inner.iterdir()) / 1e6:.1f} MB")


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", type=Path, default=Path(), help="the folder that the files of the config are in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change values of the config")
    parser.add_argument("--precision", default="auto")
    parser.add_argument(
        "--package", type=Path, metavar="FOLDER", help="put the trained model there, for pip to install"
    )
    args = parser.parse_args(words)
    common.log_to_stderr()
    run(Config.read(args.config, args.set, args.data), args.out, args.precision)
    if args.package:
        package(args.out / "final", args.package)


if __name__ == "__main__":
    main()
