"""A model: one body, the heads found with it, its tokenizer. `load()` brings it from disk, `save()` writes it back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmask import checkpoints
from allmask.config import Config
from allmask.errors import CheckpointError, UsageError
from allmask.mask import Mask, expect_mask
from allmask.nn.cache import Cache, PairCache
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.heads import (
    Labels,
    LanguageModelHead,
    Pooler,
    TaskHead,
    bert_head,
    first_tokens,
    plain_head,
    pool_answers,
    pooled_tokens,
)
from allmask.nn.init import initialize, initialize_recurrent, initialize_t5, initialize_xavier
from allmask.nn.layers import ACTIVATIONS
from allmask.nn.recurrent import Elmo, RecurrentCache, ScalarMix, Seq2Seq, texts_in
from allmask.nn.transformer import Transformer
from allmask.text import Tokenizer

log = logging.getLogger("allmask")

OWN_MASKS = {"bidirectional": Mask.bidirectional, "causal": Mask.causal}
PER_TOKEN = ("body.embedding.tokens.weight", "lm_head.bias", "lm_head.output.weight")  # tensors with a row a token


@dataclass(frozen=True, eq=False, repr=False)
class Output:
    """Hidden states, and what the heads make of them, computed when first used."""

    hidden: Tensor  # (B, T, W)
    model: Model
    mask: Mask
    cache: Cache | PairCache | RecurrentCache | None = None

    @cached_property
    def logits(self) -> Tensor:
        """(B, T, V), from the language model head. Where few positions matter: `model.logits(hidden[where])`."""
        return self.model.logits(self.hidden)

    @cached_property
    def pooled(self) -> Tensor:
        """(documents, W), BERT's summary of each document, from its first token, in the order they stand in the rows.

        Padding and packing do not matter; where each row is one document, this is (B, W).
        """
        return self.model.head("pooler")(self.hidden[first_tokens(self.mask)])

    @cached_property
    def next_sentence(self) -> Tensor:
        """(documents, 2): logits of "the second segment follows the first" and of "it is a random one"."""
        return self.model.head("nsp_head")(self.pooled)

    @cached_property
    def answers(self) -> Tensor:
        """(texts, labels), from the task head, text by text as they stand in the rows."""
        where = self.model.asked(self.mask)
        answers = self.model.answers(self.hidden[where])
        if not self.model.reads_all:
            return answers
        return pool_answers(answers, texts_in(self.mask)[0][where], "mean")

    def __repr__(self) -> str:
        made_by = {"lm": "logits", "pooler": "pooled", "nsp": "next_sentence", "task": "answers"}
        heads = [attribute for head, attribute in made_by.items() if head in self.model.heads]
        cache = [] if self.cache is None else [f"cache={type(self.cache).__name__}"]
        shown = [f"hidden={tuple(self.hidden.shape)} {self.hidden.dtype}", f"mask={self.mask}", *cache]
        return f"Output({', '.join(shown)}{'; and ' if heads else ''}{', '.join(heads)})"


class Model(nn.Module):
    """One Transformer body; `heads` are some of "pooler", "lm", "nsp". With `labels` it has a task head, too.

    An encoder–decoder is one as well: its mask says which tokens are the source's and which the target's.
    """

    body: Any  # Transformer or EncoderDecoder, Seq2Seq or Elmo

    def __init__(
        self, config: Config, heads: Iterable[str] = (), tokenizer: Tokenizer | None = None,
        labels: Labels | None = None,
    ):  # fmt: skip
        super().__init__()
        heads = frozenset(heads)
        self.config = config
        self.tokenizer = tokenizer
        self.labels = labels
        self.body = _body(config)
        pooled = heads & {"pooler", "nsp"} or (labels is not None and _reads_pooler(config, labels))
        self.pooler = Pooler(config.width) if pooled else None
        self.lm_head = _lm_head(config) if "lm" in heads else None
        self.nsp_head = nn.Linear(config.width, 2) if "nsp" in heads else None
        self.task_head = None if labels is None else _task_head(config, labels)

    @classmethod
    def fresh(cls, config: Config, heads: Iterable[str] = (), rng: torch.Generator | None = None) -> Model:
        """A new model, its weights drawn as its family draws them."""
        model = cls(config, heads)
        if config.family == "gpt2":
            return initialize(model, config.init_std, rng, "normal", residual_scale=(2 * config.layers) ** -0.5)
        if config.family == "t5":
            return initialize_t5(model, config.init_std, rng)
        if config.family == "transformer":
            return initialize_xavier(model, rng)
        if config.family in ("lstm", "elmo"):
            return initialize_recurrent(model, rng)
        if config.family == "xlnet":
            return initialize(model, config.init_std, rng, "normal")
        return initialize(model, config.init_std, rng)

    def forward(
        self, ids: Tensor, mask: Mask | None = None, segments: Tensor | None = None, positions: Tensor | None = None,
        cache: Cache | PairCache | RecurrentCache | None = None,
    ) -> Output:  # fmt: skip
        """Hidden states of `ids` (B, T) under a mask; None is the family's own, with no padding.

        An encoder–decoder takes a row of sources and targets, see `Mask.encoder_decoder`; with none it reads a source.

        Positions are the mask's places unless given. With a cache (`Cache()` to begin) the ids are those that come
        next, and the output carries the cache of all so far.
        """
        _check_ids(ids)
        mask = self.own_mask(torch.ones_like(ids, dtype=torch.bool)) if mask is None else expect_mask(mask)
        self._check(ids, mask, positions)
        if cache is None:
            return Output(self.body(ids, mask, positions, segments), self, mask)
        hidden, cache = self.body.step(ids, mask, cache, positions=positions, segments=segments)
        return Output(hidden, self, mask, cache)

    def own_mask(self, valid: Tensor) -> Mask:
        """The mask this family was pretrained with: bidirectional for BERT, causal for GPT-2."""
        return OWN_MASKS[self.config.own_mask](valid)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of any hidden states (…, W)."""
        return self._told_by(hidden)(hidden, self.body.embedding.tokens.weight)

    def token_loss(self, hidden: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross-entropy of labels (M,) at hidden states (M, W); where they are many, piece by piece."""
        return self._told_by(hidden).loss(hidden, self.body.embedding.tokens.weight, labels, smoothing)

    def _told_by(self, hidden: Tensor) -> LanguageModelHead:
        if hidden.shape[-1] != self.config.width:
            raise UsageError("an elmo tells tokens in one direction only", "give Mask.causal or Mask.reverse")
        head = self.head("lm_head")
        assert isinstance(head, LanguageModelHead)
        return head

    def asked(self, mask: Mask) -> Tensor:
        """(B, T), True at the token of each text that the task head reads: [CLS], or the last if read to the right.

        A head that is asked of tokens reads all of them.
        """
        of_tokens = self.labels is not None and self.labels.of_tokens
        return pooled_tokens(mask, "all" if of_tokens else self.config.speaker)

    @property
    def reads_all(self) -> bool:
        """Whether what is said of a text is the mean of what is said of its tokens."""
        return self.config.speaker == "all" and self.labels is not None and not self.labels.of_tokens

    def answers(self, hidden: Tensor) -> Tensor:
        """Scores (M, labels) of the hidden states (M, W) of asked tokens; BERT reads those of texts off its pooler."""
        head, labels = self.head("task_head"), self.labels
        assert labels is not None
        return head(self.head("pooler")(hidden) if _reads_pooler(self.config, labels) else hidden)

    def head(self, name: str) -> nn.Module:
        head = getattr(self, name)
        if head is None:
            raise UsageError(f"this model has no {name}", f"it has: {', '.join(sorted(self.heads)) or 'a body only'}")
        return head

    @property
    def heads(self) -> frozenset[str]:
        named = {"pooler": self.pooler, "lm": self.lm_head, "nsp": self.nsp_head, "task": self.task_head}
        return frozenset(name for name, head in named.items() if head is not None)

    def keep_tokens(self, ids: Sequence[int]) -> Model:
        """The same model over part of its vocabulary: kept tokens keep their logits, special tokens always stay."""
        tokenizer, kept = (None, sorted(set(ids))) if self.tokenizer is None else self.tokenizer.keep(ids)
        _check_kept(kept, self.config.vocab_size)
        new = {name: _moved(kept, getattr(self.config, name)) for name in ("pad_token", "start_token", "end_token")}
        config = replace(self.config, vocab_size=len(kept), **new)
        index = torch.tensor(kept)
        rows = {
            name: tensor[index] if name in PER_TOKEN else tensor.clone() for name, tensor in self.state_dict().items()
        }
        return _assemble(config, self.heads, tokenizer, rows, labels=self.labels)

    def keep_layers(self, count: int) -> Model:
        """The same model with the first layers only, of each stack: cheaper, and often as quick to learn anew."""
        if not 1 <= count <= self.config.layers:
            raise UsageError(f"cannot keep {count} layers; this model has {self.config.layers}")
        config = replace(self.config, layers=count, decoder_layers=min(count, self.config.decoder_layers))
        with torch.device("meta"):
            names = Model(config, self.heads, labels=self.labels).state_dict().keys()
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items() if name in names}
        return _assemble(config, self.heads, self.tokenizer, tensors, labels=self.labels)

    def with_language_model(self, rng: torch.Generator | None = None) -> Model:
        """The same model with a language model head; a missing one is made around the token embedding."""
        if self.lm_head is not None:
            return self
        new = {"lm_head": _lm_head(self.config)}
        return self._with(new, self.heads | {"lm"}, self.labels, rng)

    def with_labels(self, labels: Labels, rng: torch.Generator | None = None) -> Model:
        """The same model with a new task head for these labels; where BERT's pooler is missing, with a new one."""
        new: dict[str, nn.Module] = {"task_head": _task_head(self.config, labels)}
        if _reads_pooler(self.config, labels) and self.pooler is None:
            new["pooler"] = Pooler(self.config.width)
        return self._with(new, self.heads, labels, rng)

    def without(self, *heads: str) -> Model:
        """The same model without some of its heads."""
        if not self.heads & set(heads):
            return self
        return self._with({}, self.heads - set(heads), None if "task" in heads else self.labels)

    def _with(
        self, new: dict[str, nn.Module], heads: Iterable[str], labels: Labels | None, rng: torch.Generator | None = None
    ) -> Model:
        """The same body; of the heads some are new, their weights drawn, and those that are not named are gone."""
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        for part, module in new.items():
            drawn = initialize(module, self.config.init_std, rng).state_dict()
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}.")}
            tensors |= {f"{part}.{name}": value for name, value in drawn.items()}
        with torch.device("meta"):
            names = Model(self.config, heads, labels=labels).state_dict().keys()
        kept = {name: tensor for name, tensor in tensors.items() if name in names}
        return _assemble(self.config, heads, self.tokenizer, kept, labels=labels)

    def save(self, folder: str | Path) -> None:
        """Write a folder in the Hugging Face layout, whole or not at all."""
        checkpoints.write(folder, self.config, self.state_dict(), self.tokenizer, self.labels)

    def _check(self, ids: Tensor, mask: Mask, positions: Tensor | None) -> None:
        if tuple(ids.shape) != mask.shape:
            raise UsageError(f"ids are {tuple(ids.shape)} and the mask is {mask.shape}; both must be (B, T)")
        if ids.numel() == 0:
            raise UsageError("no tokens: ids are empty")
        last, limit = int((mask.position if positions is None else positions).max()), self.config.max_length
        if last >= limit:
            raise UsageError(
                f"position {last} is beyond the {limit} this model has", "truncate the text, see allmask.text"
            )
        if int(ids.max()) >= self.config.vocab_size or int(ids.min()) < 0:
            raise UsageError(f"token id {int(ids.max())} is not in the vocabulary of {self.config.vocab_size}")


def load(source: str | Path, *, keep_tokens: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Model:
    """A model from a folder or file, the bundled name "minilm", or "org/name" on the hub; fp32 unless asked otherwise.

    model = allmask.load("minilm")
    model = allmask.load("chinese_L-12_H-768_A-12", keep_tokens=common)
    """
    model = load_folder(checkpoints.resolve(source), str(source), dtype)
    return model if keep_tokens is None else model.keep_tokens(keep_tokens)


def load_folder(folder: Path, source: str, dtype: torch.dtype | None = None) -> Model:
    """The model of a folder or file that was found already; `source` is what the user calls it."""
    found = checkpoints.read(folder)
    for name in found.left_out:
        log.warning("%s: %s is a head allmask does not use here; it was left out", source, name)
    dtype = torch.float32 if dtype is None else dtype
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in found.tensors.items()}  # not mapped to the file
    return _assemble(found.config, found.heads, _tokenizer(found), tensors, found.folder, found.labels)


def _assemble(
    config: Config,
    heads: Iterable[str],
    tokenizer: Tokenizer | None,
    tensors: dict[str, Tensor],
    where: str | Path = "model",
    labels: Labels | None = None,
) -> Model:
    """A model around given tensors: built without memory of its own, then handed them."""
    with torch.device("meta"):
        model = Model(config, heads, tokenizer, labels)
    checkpoints.check(where, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, tensors)
    model.load_state_dict(tensors, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _tokenizer(found: checkpoints.Checkpoint) -> Tokenizer | None:
    """The tokenizer beside the weights, if there is one; one that does not fit them is an error."""
    tokenizer, rows = Tokenizer.find(found.folder), found.config.vocab_size
    if tokenizer is None or tokenizer.size <= rows:
        return tokenizer
    added = [token for token in (tokenizer.id_to_token(id) for id in range(rows, tokenizer.size)) if token]
    if tokenizer.backend.get_vocab_size(with_added_tokens=False) > rows:
        raise CheckpointError(f"{found.folder}: the tokenizer has {tokenizer.size:,} tokens, the model {rows:,}")
    log.warning(
        "%s: the model has no embedding for %s; texts that use it will be refused", found.folder, ", ".join(added)
    )
    return tokenizer


def _check_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor):
        raise UsageError(f"ids are a {type(ids).__name__}; expected a tensor (B, T)", "torch.tensor([[2, 7, 3]])")
    if ids.ndim != 2 or ids.is_floating_point():
        what = f"{tuple(ids.shape)} of {ids.dtype}"
        raise UsageError(f"ids are {what}; expected whole numbers (B, T)", "one text is a row: ids[None]")


def _moved(kept: Sequence[int], token: int | None) -> int | None:
    """The new number of a token."""
    return kept.index(token) if token in kept else None


def _check_kept(kept: Sequence[int], vocab_size: int) -> None:
    if not kept or kept[0] < 0 or kept[-1] >= vocab_size:
        raise UsageError(f"keep_tokens must be ids from 0 to {vocab_size - 1}")


def _body(config: Config) -> nn.Module:
    if config.family == "elmo":
        return Elmo(config)
    if config.family == "lstm":
        return Seq2Seq(config)
    return EncoderDecoder(config) if config.decoder_layers else Transformer(config)


def _lm_head(config: Config) -> nn.Module:
    if config.family == "bert":
        activation = ACTIVATIONS[config.activation]()
        return bert_head(config.width, config.vocab_size, activation, config.norm_eps, config.tied)
    biased = config.family == "xlnet"
    return plain_head(config.width, config.vocab_size, config.tied, config.output_scaled, biased)


def _task_head(config: Config, labels: Labels) -> TaskHead:
    """As transformers has them: BERT's with dropout (but not for spans) and bias, GPT-2's a plain matrix.

    XLNet's of texts begins with a summary of its own, and only there is dropout. Over the features of an elmo it is
    like BERT's, and begins with a mix of them.
    """
    if config.family == "elmo":
        mix, chain = ScalarMix(config.layers + 1), labels.kind == "chain"
        return TaskHead(2 * config.width, len(labels), config.dropout, bias=True, chain=chain, before=mix)
    chain = labels.kind == "chain"
    if config.family == "xlnet":
        before, dropout = (None, 0.0) if labels.of_tokens else (Pooler(config.width), config.dropout)
        return TaskHead(config.width, len(labels), dropout, bias=True, chain=chain, before=before)
    bert = config.family == "bert"
    dropout = config.dropout if bert and labels.kind != "span" else 0.0
    return TaskHead(config.width, len(labels), dropout, bias=bert, chain=chain)


def _reads_pooler(config: Config, labels: Labels) -> bool:
    return config.family == "bert" and not labels.of_tokens
