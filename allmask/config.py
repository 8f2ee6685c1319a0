"""`Config`: the shape of a model's body and the variants it is built from, as plain numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

from allmask.errors import CheckpointError

# A size beyond these is a broken file, not a model: said before anything is allocated.
_LIMITS = {
    "vocab_size": 10_000_000,
    "width": 65_536,
    "layers": 1_000,
    "heads": 1_024,
    "ffn_width": 1_048_576,
    "max_positions": 16_777_216,
    "buckets": 65_536,
    "bucket_distance": 16_777_216,
}
_MAX_PARAMETERS = 200_000_000_000
_CHOICES = {
    "family": ("bert", "gpt2", "transformer", "t5", "xlnet", "lstm", "elmo"),
    "position_kind": ("learned", "sinusoidal", "relative", "shifted", "none"),
    "norm": ("layer", "rms", "batch", "instance"),
    "norm_place": ("post", "pre"),
    "activation": ("gelu", "gelu_tanh", "relu"),
    "own_mask": ("bidirectional", "causal"),
}
_FLAGS = (
    "embedding_norm", "embedding_scaled", "tied", "bias", "scores_scaled", "gated", "output_scaled",
    "source_attention", "both_ways",
)  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


@dataclass(frozen=True)
class Config:
    """The shape of one body and the variants chosen when it is built: a Transformer stack, or two; or recurrences."""

    family: str = "bert"
    vocab_size: int = 30522
    width: int = 768
    layers: int = 12
    heads: int = 12
    ffn_width: int = 3072  # width of the feed-forward layer
    max_positions: int = 512
    position_kind: str = "learned"
    segments: int = 2  # 0: no segment embedding
    norm: str = "layer"
    norm_place: str = "post"
    norm_eps: float = 1e-12
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    embedding_norm: bool = True
    embedding_scaled: bool = False  # multiply token embeddings by sqrt(width)
    own_mask: str = "bidirectional"  # what mask=None means
    tied: bool = True  # the output layer shares the token embedding
    pad_token: int | None = 0
    init_std: float = 0.02
    decoder_layers: int = 0  # more than 0: an encoder–decoder
    start_token: int | None = None  # what its decoder reads first
    end_token: int | None = None  # and what it writes last
    head_width: int = 0  # 0: width / heads
    bias: bool = True  # matrices have a bias
    scores_scaled: bool = True  # scores of attention are divided by sqrt(head_width)
    gated: bool = False  # the feed-forward layer multiplies what it activates by a second expansion
    ffn_dropout: float = 0.0  # inside the feed-forward layer
    output_scaled: bool = False  # hidden states are divided by sqrt(width) before the output layer
    buckets: int = 32  # of relative positions, see layers.py
    bucket_distance: int = 128  # all that are further away share a bucket
    clamp: int = 0  # of shifted positions: further away is as far as this; 0: no limit, see relative_attention.py
    source_attention: bool = True  # a recurrent decoder looks at all states of its source, not at the last ones alone
    both_ways: bool = True  # a recurrent encoder reads a source from both ends

    def __post_init__(self):
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not _is_whole(value) or not 0 < value <= limit:
                raise CheckpointError(f"config: {name} is {value!r}; expected a whole number from 1 to {limit:,}")
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected one of {', '.join(words)}")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            if not _is_number(getattr(self, name)) or not 0.0 <= getattr(self, name) < 1.0:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected 0 <= p < 1")
        for name, limit in (("norm_eps", 1.0), ("init_std", 1e3)):
            if not _is_number(getattr(self, name)) or not 0.0 < getattr(self, name) < limit:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected a small positive number")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected true or false")
        for name, limit in (
            ("segments", 1024),
            ("decoder_layers", _LIMITS["layers"]),
            ("head_width", _LIMITS["width"]),
            ("clamp", _LIMITS["max_positions"]),
        ):
            if not _is_whole(getattr(self, name)) or not 0 <= getattr(self, name) <= limit:
                raise CheckpointError(
                    f"config: {name} is {getattr(self, name)!r}; expected a whole number from 0 to {limit:,}"
                )
        for name in ("pad_token", "start_token", "end_token"):
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or not 0 <= value < self.vocab_size):
                raise CheckpointError(f"config: {name} is {value!r}; expected null or the number of a token")
        if not self.head_width and self.width % self.heads:
            raise CheckpointError(f"config: width {self.width} is not a multiple of heads {self.heads}")
        self._check_recurrent()
        if self.position_kind == "shifted" and self.decoder_layers:
            raise CheckpointError("config: an encoder–decoder has no shifted positions")
        if self.parameters() > _MAX_PARAMETERS:
            raise CheckpointError(
                f"config: {self.parameters():,} parameters; more than {_MAX_PARAMETERS:,} is surely a mistake"
            )

    def _check_recurrent(self) -> None:
        if self.family in ("lstm", "elmo") and (self.family == "lstm") != bool(self.decoder_layers):
            raise CheckpointError(f"config: decoder_layers is {self.decoder_layers}; an lstm has some, an elmo none")
        if self.family == "lstm" and self.both_ways and self.width % 2:
            raise CheckpointError(f"config: width {self.width} is odd; each way of an encoder has half of it")

    def parameters(self) -> int:
        """About how many parameters (matrices only): enough to refuse an absurd file before allocating."""
        attention = 4 * self.width * self.attention_width
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn_width
        cross = self.decoder_layers * (2 * attention + feed_forward)
        embedding = (self.vocab_size + self.max_positions) * self.width
        return embedding + self.layers * (attention + feed_forward) + cross

    @property
    def attention_width(self) -> int:
        """Of all heads together."""
        return self.heads * self.head_width if self.head_width else self.width

    @property
    def speaker(self) -> str:
        """Which token stands for a text: the first, XLNet's last; of an elmo, where none does, all of them do."""
        return {"elmo": "all", "xlnet": "last"}.get(self.family, "first")

    @property
    def features(self) -> int:
        """How many numbers a task head reads of a token: of an elmo those of all its layers, in both ways."""
        return 2 * (self.layers + 1) * self.width if self.family == "elmo" else self.width

    @property
    def max_length(self) -> int:
        """How many positions a text may have: only learned embeddings have a last one."""
        return self.max_positions if self.position_kind == "learned" else _LIMITS["max_positions"]
