"""A model: a body, its heads and its tokenizer. `load()` reads one from disk, `save()` writes it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmask import checkpoints
from allmask.config import Config
from allmask.errors import CheckpointError, UsageError
from allmask.files import MANIFEST, listed, verify
from allmask.mask import Mask, expect_mask
from allmask.nn.build import (
    HEADS,
    build_body,
    build_heads,
    build_lm_head,
    build_task_head,
    empty_parameters,
    parametrized,
    reads_pooler,
    without_memory,
)
from allmask.nn.cache import Cache, PairCache
from allmask.nn.heads import Labels, LanguageModelHead, Pooler, first_tokens, pool_answers, pooled_tokens
from allmask.nn.init import (
    initialize,
    initialize_recurrent,
    initialize_t5,
    initialize_xavier,
    ntk,
    plain_name,
    without_ntk,
)
from allmask.nn.recurrent import RecurrentCache, texts_in
from allmask.text import Tokenizer

log = logging.getLogger("allmask")

WHOLE = (torch.int64, torch.int32)  # the types of ids
OWN_MASKS = {"bidirectional": Mask.bidirectional, "causal": Mask.causal}
VERIFIED = 1 << 30  # bytes of a model folder whose checksums are compared on loading: a second of work
PER_TOKEN = ("body.embedding.tokens.weight", "lm_head.bias", "lm_head.output.weight")  # tensors with one row per token


@dataclass(frozen=True, eq=False, repr=False)
class Output:
    """Hidden states. The outputs of the heads are computed when first used."""

    hidden: Tensor  # (B, T, W)
    model: Model
    mask: Mask
    cache: Cache | PairCache | RecurrentCache | None = None

    @cached_property
    def logits(self) -> Tensor:
        """(B, T, V), from the language model head. If few positions matter, call `model.logits(hidden[where])`."""
        return self.model.logits(self.hidden)

    @cached_property
    def pooled(self) -> Tensor:
        """(documents, W), the pooler's output at the first token of each document, in the order of the rows.

        The mask says where documents begin, whatever the padding or packing; one document a row gives (B, W).
        """
        return self.model.head("pooler")(self.hidden[first_tokens(self.mask)])

    @cached_property
    def next_sentence(self) -> Tensor:
        """(documents, 2), NSP logits: the second segment follows the first, or is a random one."""
        return self.model.head("nsp_head")(self.pooled)

    @cached_property
    def answers(self) -> Tensor:
        """(texts, labels), scores of the task head, in the order of the rows; (tokens, labels) if it labels tokens."""
        where, labels = self.model.asked(self.mask), self.model.labels
        answers = self.model.answers(self.hidden[where])
        if self.model.config.pooled_token != "all" or labels is None or labels.of_tokens:
            return answers
        return pool_answers(answers, texts_in(self.mask)[0][where], "mean")

    def __repr__(self) -> str:
        made_by = {"lm": "logits", "pooler": "pooled", "nsp": "next_sentence", "task": "answers"}
        heads = [attribute for head, attribute in made_by.items() if head in self.model.heads]
        cache = [] if self.cache is None else [f"cache={type(self.cache).__name__}"]
        shown = [f"hidden={tuple(self.hidden.shape)} {self.hidden.dtype}", f"mask={self.mask}", *cache]
        return f"Output({', '.join(shown)}{'; and ' if heads else ''}{', '.join(heads)})"


class Model(nn.Module):
    """A body, its heads (of "pooler", "lm" and "nsp", and a task head if there are `labels`) and its tokenizer.

    The body may be an encoder–decoder: the mask then says which tokens are the source and which the target.
    """

    body: Any  # Transformer, EncoderDecoder, Seq2Seq or Elmo

    def __init__(
        self, config: Config, heads: Iterable[str] = (), tokenizer: Tokenizer | None = None,
        labels: Labels | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.labels = labels
        self.body = build_body(config)
        self.pooler, self.lm_head, self.nsp_head, self.task_head = build_heads(config, frozenset(heads), labels)

    @classmethod
    def fresh(cls, config: Config, heads: Iterable[str] = (), rng: torch.Generator | None = None) -> Model:
        """A new model with random weights, initialized as usual for its family."""
        if config.parametrization == "ntk":
            plain = ntk(cls.fresh(replace(config, parametrization="standard"), heads, rng))
            return _assemble(config, heads, None, plain.state_dict()).train()
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
        """Compute the hidden states of `ids` (B, T) under a mask.

        Without a mask, the model's own is used and no token is padding; an encoder–decoder then reads a source only.
        Its rows hold source and target, see `Mask.encoder_decoder`. Positions are the mask's unless given.

        With a cache (`Cache()` at the start), `ids` continue the tokens in it, and the output has the extended cache.
        """
        mask = self._checked_mask(ids, mask, segments, positions)
        if cache is None:
            return Output(self.body(ids, mask, positions, segments), self, mask)
        hidden, cache = self.body.step(ids, mask, cache, positions=positions, segments=segments)
        return Output(hidden, self, mask, cache)

    def _checked_mask(self, ids: Tensor, mask: Mask | None, segments: Tensor | None, positions: Tensor | None) -> Mask:
        """Return the mask, or the model's own for None. Raise an error if the arguments do not fit."""
        for name, numbers in (("ids", ids), ("segments", segments), ("positions", positions)):
            if name != "ids" and numbers is None:
                continue
            if not isinstance(numbers, Tensor):
                what = f"{name} are a {type(numbers).__name__}; expected a tensor (B, T)"
                raise UsageError(what, "torch.tensor([[2, 7, 3]])")
            if numbers.dtype not in WHOLE or ids.ndim != 2:
                hint = f"{name}.long(); one text is a row: {name}[None]"
                what = f"{tuple(numbers.shape)} of {numbers.dtype}"
                raise UsageError(f"{name} are {what}; expected whole numbers (B, T)", hint)
            rows = (1, *numbers.shape) if numbers.ndim == 1 else tuple(numbers.shape)
            if len(rows) != 2 or rows[0] not in (1, len(ids)) or rows[1] not in (1, ids.shape[1]):
                raise UsageError(f"{name} are {tuple(numbers.shape)} and ids {tuple(ids.shape)}; both must be (B, T)")
        mask = self.own_mask(torch.ones_like(ids, dtype=torch.bool)) if mask is None else expect_mask(mask)
        if tuple(ids.shape) != mask.shape:
            raise UsageError(f"ids are {tuple(ids.shape)} and the mask is {mask.shape}; both must be (B, T)")
        if ids.numel() == 0:
            raise UsageError("no tokens: ids are empty")
        places = mask.position if positions is None else positions
        first, last, limit = int(places.min()), int(places.max()), self.config.max_length
        if first < 0 and self.config.position_kind in ("learned", "sinusoidal"):  # others are distances
            raise UsageError(f"position {first} is negative", "positions count from 0")
        if last >= limit:
            raise UsageError(
                f"position {last} is beyond the {limit} this model has", "truncate the text, see allmask.text"
            )
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self.config.vocab_size:
            wrong = least if least < 0 else most
            raise UsageError(f"token id {wrong} is not in the vocabulary of {self.config.vocab_size}")
        if segments is not None and isinstance(getattr(self.body.embedding, "segments", None), nn.Embedding):
            least, most = int(segments.min()), int(segments.max())
            if (least < 0 or most >= self.config.segments) and self.config.segments > 1:  # one stands for all (RoBERTa)
                kinds = f"this model has segments 0 to {self.config.segments - 1}"
                raise UsageError(f"segment {least if least < 0 else most}: {kinds}")
        return mask

    def own_mask(self, valid: Tensor) -> Mask:
        """The mask this family was pretrained with: bidirectional for BERT, causal for GPT-2."""
        return OWN_MASKS[self.config.own_mask](valid)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of hidden states (…, W)."""
        return self._lm_head_for(hidden)(hidden, self.body.embedding.tokens.weight)

    def token_loss(self, hidden: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross-entropy of labels (M,) at hidden states (M, W), in chunks if there are many."""
        return self._lm_head_for(hidden).loss(hidden, self.body.embedding.tokens.weight, labels, smoothing)

    def _lm_head_for(self, hidden: Tensor) -> LanguageModelHead:
        if hidden.shape[-1] != self.config.width:
            raise UsageError("an elmo predicts tokens in one direction only", "give Mask.causal or Mask.reverse")
        head = self.head("lm_head")
        assert isinstance(head, LanguageModelHead)
        return head

    def asked(self, mask: Mask) -> Tensor:
        """(B, T), True at the tokens that the task head reads: all, if it labels tokens; else one per text.

        That is the first token ([CLS]) of a text, or the last if the mask is causal; see `Config.pooled_token`.
        """
        of_tokens = self.labels is not None and self.labels.of_tokens
        return pooled_tokens(mask, "all" if of_tokens else self.config.pooled_token)

    def answers(self, hidden: Tensor) -> Tensor:
        """Scores (M, labels) of the task head for hidden states (M, W), through the pooler if it reads that."""
        head, labels = self.head("task_head"), self.labels
        assert labels is not None
        return head(self.head("pooler")(hidden) if reads_pooler(self.config, labels) else hidden)

    def head(self, name: str) -> nn.Module:
        head = getattr(self, name)
        if head is None:
            raise UsageError(f"this model has no {name}", f"it has: {', '.join(sorted(self.heads)) or 'a body only'}")
        return head

    @property
    def device(self) -> torch.device:
        return self.body.embedding.tokens.weight.device

    @property
    def heads(self) -> frozenset[str]:
        return frozenset(name for name, module in HEADS.items() if getattr(self, module) is not None)

    def keep_tokens(self, ids: Sequence[int]) -> Model:
        """A copy with part of the vocabulary. Special tokens are always kept, and kept tokens have the same logits."""
        tokenizer, kept = (None, sorted(set(ids))) if self.tokenizer is None else self.tokenizer.keep(ids)
        if not kept or kept[0] < 0 or kept[-1] >= self.config.vocab_size:
            raise UsageError(f"keep_tokens must be ids from 0 to {self.config.vocab_size - 1}")
        new_id = {old: new for new, old in enumerate(kept)}
        moved = {name: new_id.get(getattr(self.config, name)) for name in ("pad_token", "start_token", "end_token")}
        config = replace(self.config, vocab_size=len(kept), **moved)
        index = torch.tensor(kept, device=self.device)
        tensors = {
            name: tensor[index] if plain_name(name) in PER_TOKEN else tensor.clone()
            for name, tensor in self.state_dict().items()
        }
        return _assemble(config, self.heads, tokenizer, tensors, labels=self.labels)

    def keep_layers(self, count: int) -> Model:
        """A copy with the first `count` layers only, of each stack."""
        if not 1 <= count <= self.config.layers:
            raise UsageError(f"cannot keep {count} layers; this model has {self.config.layers}")
        config = replace(self.config, layers=count, decoder_layers=min(count, self.config.decoder_layers))
        return self._copy(config, self.heads, self.labels)

    def with_language_model(self, rng: torch.Generator | None = None) -> Model:
        """A copy with a new language model head, tied to the token embedding as in `config`; self if it has one."""
        if self.lm_head is not None:
            return self
        return self._copy(self.config, self.heads | {"lm"}, self.labels, {"lm_head": build_lm_head(self.config)}, rng)

    def with_labels(self, labels: Labels, rng: torch.Generator | None = None) -> Model:
        """A copy with a new task head for these labels, and a new pooler if the head needs one and there is none."""
        new: dict[str, nn.Module] = {"task_head": build_task_head(self.config, labels)}
        if reads_pooler(self.config, labels) and self.pooler is None:
            new["pooler"] = Pooler(self.config.width)
        return self._copy(self.config, self.heads, labels, new, rng)

    def standard(self) -> Model:
        """A copy without NTK parametrization that computes the same; self if it has none."""
        if self.config.parametrization == "standard":
            return self
        config, tensors = replace(self.config, parametrization="standard"), without_ntk(self.state_dict())
        return _assemble(config, self.heads, self.tokenizer, tensors, labels=self.labels).train(self.training)

    def without(self, *heads: str) -> Model:
        """A copy without these heads; self if it has none of them."""
        if not self.heads & set(heads):
            return self
        return self._copy(self.config, self.heads - set(heads), None if "task" in heads else self.labels)

    def _copy(
        self, config: Config, heads: Iterable[str], labels: Labels | None, new: Mapping[str, nn.Module] | None = None,
        rng: torch.Generator | None = None,
    ) -> Model:  # fmt: skip
        """A model of this config and these heads with copies of this one's weights, and initialized `new` modules."""
        tensors = self.state_dict()
        for part, module in (new or {}).items():
            drawn = parametrized(config, initialize(module, config.init_std, rng)).state_dict()
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}.")}
            tensors |= {f"{part}.{name}": value.to(self.device) for name, value in drawn.items()}
        names = empty_parameters(config, frozenset(heads), labels)
        kept = {name: tensor.clone() for name, tensor in tensors.items() if name in names}
        return _assemble(config, heads, self.tokenizer, kept, labels=labels)

    def save(self, folder: str | Path) -> None:
        """Write a folder in the Hugging Face layout; if writing fails, an existing folder is unchanged."""
        checkpoints.write(folder, self.config, self.state_dict(), self.tokenizer, self.labels)


@dataclass(frozen=True, eq=False)
class Outline:
    """A model without its weights: enough to tokenize for it."""

    config: Config
    tokenizer: Tokenizer | None


def load_outline(folder: Path) -> Outline:
    """Read config and tokenizer of a folder or file that `resolve` has found, but not its weights."""
    config, found = checkpoints.read_config(folder)
    return Outline(config, Tokenizer.find(found))


def load(source: str | Path, *, keep_tokens: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Model:
    """Load a model from a folder or file, by a bundled name such as "allmask-en", or by "org/name" from the hub.

    The weights become fp32, unless `dtype` says otherwise.

    model = allmask.load("allmask-en")
    model = allmask.load("chinese_L-12_H-768_A-12", keep_tokens=common)
    """
    model = load_folder(checkpoints.resolve(source), str(source), dtype)
    return model if keep_tokens is None else model.keep_tokens(keep_tokens)


def load_folder(folder: Path, source: str, dtype: torch.dtype | None = None) -> Model:
    """Load a model from a folder or file that `resolve` has found; `source` is the name to show in messages."""
    _expect_intact(folder if folder.is_dir() else folder.parent, source)
    found = checkpoints.read(folder)
    if found.left_out:
        belongs = "belongs" if len(found.left_out) == 1 else "belong"
        words = f"{belongs} to a head that allmask does not support, and {'was' if belongs[-1] == 's' else 'were'}"
        log.warning("%s: %s %s left out", source, listed(found.left_out), words)
    dtype = torch.float32 if dtype is None else dtype
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in found.tensors.items()}  # not mapped to the file
    return _assemble(found.config, found.heads, _tokenizer(found), tensors, found.folder, found.labels)


def _expect_intact(folder: Path, source: str) -> None:
    """Refuse a folder that differs from its manifest, if it has one. A very large one is loaded unverified."""
    if not (folder / MANIFEST).is_file():
        return
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if size > VERIFIED:
        log.info("%s: %.1f GB, loaded without comparing checksums; allmask verify does that", source, size / 1e9)
        return
    problem = verify(folder)
    if problem is not None:
        raise CheckpointError(
            f"{folder}: {problem}", f"copy the folder again; if you changed it on purpose, remove {MANIFEST}"
        )


def _assemble(
    config: Config, heads: Iterable[str], tokenizer: Tokenizer | None, tensors: dict[str, Tensor],
    where: str | Path = "model", labels: Labels | None = None,
) -> Model:  # fmt: skip
    """Build a model on the meta device and assign it these tensors; `where` is their origin, for errors."""
    with without_memory():
        model = Model(config, heads, tokenizer, labels)
    checkpoints.check(where, model.state_dict(), tensors)
    model.load_state_dict(tensors, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _tokenizer(found: checkpoints.Checkpoint) -> Tokenizer | None:
    """The tokenizer beside the weights, or None. Raise an error if it has more tokens than the model."""
    tokenizer, rows = Tokenizer.find(found.folder), found.config.vocab_size
    if tokenizer is None:
        return None
    tokenizer = replace(tokenizer, max_length=found.config.max_positions)
    if tokenizer.size < rows // 2:
        log.warning("%s: the tokenizer has %s tokens, the model %s; is it the right one?", found.folder,
                    f"{tokenizer.size:,}", f"{rows:,}")  # fmt: skip
    if tokenizer.size <= rows:
        return tokenizer
    added = [token for token in (tokenizer.id_to_token(id) for id in range(rows, tokenizer.size)) if token]
    if tokenizer.backend.get_vocab_size(with_added_tokens=False) > rows:
        raise CheckpointError(f"{found.folder}: the tokenizer has {tokenizer.size:,} tokens, the model {rows:,}")
    log.warning(
        "%s: the model has no embedding for %s; texts that contain it will be refused", found.folder, listed(added)
    )
    return tokenizer
