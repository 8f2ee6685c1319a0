"""`Config`: the shape of a model's body and the variants it is built from, as plain numbers and words."""

from __future__ import annotations

from dataclasses import dataclass, fields

from allmask.errors import CheckpointError

# Larger sizes mean that the file is broken; they are refused before anything is allocated.
_RANGES = {
    "vocab_size": (1, 10_000_000),
    "width": (1, 65_536),
    "layers": (1, 1_000),
    "heads": (1, 1_024),
    "ffn_width": (1, 1_048_576),
    "max_positions": (1, 16_777_216),
    "buckets": (1, 65_536),
    "bucket_distance": (1, 65_536),
    "segments": (0, 1_024),
    "decoder_layers": (0, 1_000),
    "head_width": (0, 65_536),
    "clamp": (0, 16_777_216),
    "position_offset": (0, 65_536),
    "embedding_width": (0, 65_536),
    "task_types": (0, 1_024),
}
_MAX_PARAMETERS = 200_000_000_000
_MAX_TABLE = 1 << 22  # numbers of a table that is not in the file, but computed
# BERT, and the families whose body is a BERT with small differences
BERTS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "ernie", "albert", "roformer", "nezha")
_CHOICES = {
    "family": (*BERTS, "gpt2", "transformer", "t5", "xlnet", "lstm", "elmo"),
    "position_kind": ("learned", "sinusoidal", "relative", "shifted", "rotary", "clipped", "none"),
    "norm": ("layer", "rms", "batch", "instance"),
    "norm_place": ("post", "pre"),
    "activation": ("gelu", "gelu_tanh", "relu"),
    "own_mask": ("bidirectional", "causal"),
    "parametrization": ("standard", "ntk"),
}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


@dataclass(frozen=True)
class Config:
    """Sizes and variants of one body: a Transformer stack, an encoder–decoder, or a recurrent network."""

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
    own_mask: str = "bidirectional"  # the mask that is used if none is given
    tied: bool = True  # the output layer shares the token embedding
    pad_token: int | None = 0
    init_std: float = 0.02
    decoder_layers: int = 0  # more than 0: an encoder–decoder
    start_token: int | None = None  # the first token that a decoder reads
    end_token: int | None = None  # the token that ends a target
    head_width: int = 0  # 0: width / heads
    bias: bool = True  # linear layers have a bias
    scores_scaled: bool = True  # attention scores are divided by sqrt(head_width)
    gated: bool = False  # gated feed-forward (GLU): act(gate(x)) * up(x)
    ffn_dropout: float = 0.0  # after the activation of the feed-forward layer
    output_scaled: bool = False  # hidden states are divided by sqrt(width) before the output layer
    buckets: int = 32  # of relative positions (T5), see nn/relative_attention.py
    bucket_distance: int = 128  # larger distances share the last bucket
    clamp: int = 0  # largest distance of shifted or clipped positions, see nn/relative_attention.py; 0: no limit
    source_attention: bool = True  # a recurrent decoder attends to all states of its source, not only the last
    both_ways: bool = True  # a recurrent encoder is bidirectional
    position_offset: int = 0  # rows before that of position 0 in the table of learned positions (RoBERTa)
    embedding_width: int = 0  # of tokens, positions and segments, which are then projected to `width`; 0: width
    shared_layers: bool = False  # all layers have the same weights (ALBERT)
    task_types: int = 0  # rows of a table whose first one is added to every token (ERNIE); 0: no table
    parametrization: str = "standard"  # ntk: matrices of size 1, scaled in the forward pass, see `ntk` in nn/init.py

    def __post_init__(self):
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            self._expect(name, _is_whole(value) and least <= value <= most, f"a whole number from {least} to {most:,}")
        for name, words in _CHOICES.items():
            self._expect(name, getattr(self, name) in words, f"one of {', '.join(words)}")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            value = getattr(self, name)
            self._expect(name, _is_number(value) and 0.0 <= value < 1.0, "0 <= p < 1")
        for name, limit in (("norm_eps", 1.0), ("init_std", 1e3)):
            value = getattr(self, name)
            self._expect(name, _is_number(value) and 0.0 < value < limit, "a small positive number")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            self._expect(name, isinstance(getattr(self, name), bool), "true or false")
        for name in ("pad_token", "start_token", "end_token"):
            value = getattr(self, name)
            fits = value is None or (_is_whole(value) and 0 <= value < self.vocab_size)
            self._expect(name, fits, "null or the id of a token")
        if not self.head_width and self.width % self.heads:
            raise CheckpointError(f"config: width {self.width} is not a multiple of heads {self.heads}")
        if self.family in ("lstm", "elmo"):
            fits = (self.family == "lstm") == bool(self.decoder_layers)
            self._expect("decoder_layers", fits, "0 in an elmo, more in an lstm")
        if self.family == "lstm" and self.both_ways and self.width % 2:
            raise CheckpointError(f"config: width {self.width} is odd; each direction of the encoder has half of it")
        if self.position_kind in ("shifted", "rotary", "clipped") and self.decoder_layers:
            raise CheckpointError(f"config: an encoder–decoder has no {self.position_kind} positions")
        if self.position_kind == "shifted" and self.norm_place == "pre":
            raise CheckpointError("config: shifted positions (XLNet) have norms after each step, not before it")
        if self.parametrization == "ntk" and self.family in ("lstm", "elmo"):
            raise CheckpointError("config: a recurrent model has no NTK parametrization")
        if self.position_kind == "clipped":
            most = _MAX_TABLE * self.heads // (2 * self.attention_width)
            self._expect("clamp", 0 < self.clamp <= most, f"the largest distance of clipped positions, 1 to {most:,}")
        if self.position_kind == "rotary" and self.attention_width // self.heads % 2:
            raise CheckpointError(f"config: heads of width {self.attention_width // self.heads} cannot be rotated")
        if self.parameters() > _MAX_PARAMETERS:
            raise CheckpointError(
                f"config: {self.parameters():,} parameters; more than {_MAX_PARAMETERS:,} is surely a mistake"
            )

    def _expect(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected {what}")

    def parameters(self) -> int:
        """The approximate number of parameters (matrices only), to refuse an absurd file before allocating."""
        attention = 4 * self.width * self.attention_width
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn_width
        cross = self.decoder_layers * (2 * attention + feed_forward)
        embedding = (self.vocab_size + self.max_positions) * (self.embedding_width or self.width)
        return embedding + (1 if self.shared_layers else self.layers) * (attention + feed_forward) + cross

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_width if self.head_width else self.width

    @property
    def is_bert(self) -> bool:
        """Whether the body and the language model head are those of a BERT, whatever the family calls itself."""
        return self.family in BERTS

    @property
    def pooled_token(self) -> str:
        """The token that represents a text: "first", "last" (XLNet), or "all" (ELMo, which averages over them)."""
        return {"elmo": "all", "xlnet": "last"}.get(self.family, "first")

    @property
    def features(self) -> int:
        """The width of the vector that a task head reads at a token; for ELMo that of all layers and directions."""
        return 2 * (self.layers + 1) * self.width if self.family == "elmo" else self.width

    @property
    def max_length(self) -> int:
        """The number of positions a text may have; only learned position embeddings limit it."""
        return self.max_positions if self.position_kind == "learned" else _RANGES["max_positions"][1]
