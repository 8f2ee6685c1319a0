"""What a model is made of, as plain numbers and words; presets are functions of one another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from allmask.errors import CheckpointError

# A size beyond these is a broken file, not a model: said before anything is allocated.
_LIMITS = {
    "vocabulary": 10_000_000,
    "width": 65_536,
    "layers": 1_000,
    "heads": 1_024,
    "inner": 1_048_576,
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
    "embedding_norm", "embedding_scaled", "tied", "biased", "scores_scaled", "gated", "output_scaled",
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
    vocabulary: int = 30522
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072  # width of the feed-forward layer
    max_positions: int = 512
    position_kind: str = "learned"
    segments: int = 2  # 0: no segment embedding
    norm: str = "layer"
    norm_place: str = "post"
    epsilon: float = 1e-12
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
    biased: bool = True  # matrices have a bias
    scores_scaled: bool = True  # scores of attention are divided by sqrt(head_width)
    gated: bool = False  # the feed-forward layer multiplies what it activates by a second expansion
    inner_dropout: float = 0.0  # inside the feed-forward layer
    output_scaled: bool = False  # hidden states are divided by sqrt(width) before the output layer
    buckets: int = 32  # of relative positions, see layers.py
    bucket_distance: int = 128  # all that are further away share a bucket
    clamp: int = 0  # of shifted positions: further away is as far as this; 0: no limit, see distances.py
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
        for name in ("dropout", "attention_dropout", "inner_dropout"):
            if not _is_number(getattr(self, name)) or not 0.0 <= getattr(self, name) < 1.0:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected 0 <= p < 1")
        for name, limit in (("epsilon", 1.0), ("init_std", 1e3)):
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
            if value is not None and (not _is_whole(value) or not 0 <= value < self.vocabulary):
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
        feed_forward = (3 if self.gated else 2) * self.width * self.inner
        cross = self.decoder_layers * (2 * attention + feed_forward)
        embedding = (self.vocabulary + self.max_positions) * self.width
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
    def reach(self) -> int:
        """How many places there are: relative positions have no last one."""
        return self.max_positions if self.position_kind in ("learned", "sinusoidal") else _LIMITS["max_positions"]


def bert_base() -> Config:
    return Config()


def bert_large() -> Config:
    return replace(bert_base(), width=1024, layers=24, heads=16, inner=4096)


def bert_base_chinese() -> Config:
    return replace(bert_base(), vocabulary=21128)


def bert_small() -> Config:
    return replace(bert_base(), width=512, layers=4, heads=8, inner=2048)


def bert_tiny() -> Config:
    return replace(bert_base(), width=128, layers=2, heads=2, inner=512)


def gpt2() -> Config:
    return Config(
        family="gpt2",
        vocabulary=50257,
        max_positions=1024,
        segments=0,
        norm_place="pre",
        epsilon=1e-5,
        activation="gelu_tanh",
        embedding_norm=False,
        own_mask="causal",
        pad_token=None,
    )


def gpt2_medium() -> Config:
    return replace(gpt2(), width=1024, layers=24, heads=16, inner=4096)


def gpt2_large() -> Config:
    return replace(gpt2(), width=1280, layers=36, heads=20, inner=5120)


def gpt2_xl() -> Config:
    return replace(gpt2(), width=1600, layers=48, heads=25, inner=6400)


def transformer_base() -> Config:
    """The encoder–decoder of 2017 (arXiv 1706.03762), with its shared vocabulary of 37,000 pieces."""
    return Config(
        family="transformer",
        vocabulary=37000,
        width=512,
        layers=6,
        decoder_layers=6,
        heads=8,
        inner=2048,
        max_positions=1024,
        position_kind="sinusoidal",
        segments=0,
        epsilon=1e-5,
        activation="relu",
        attention_dropout=0.0,
        embedding_norm=False,
        embedding_scaled=True,
        start_token=0,
    )


def transformer_big() -> Config:
    return replace(transformer_base(), width=1024, heads=16, inner=4096, dropout=0.3)


def transformer_small() -> Config:
    return replace(transformer_base(), width=256, layers=3, decoder_layers=3, heads=4, inner=1024, vocabulary=8000)


def t5_small() -> Config:
    """T5 (arXiv 1910.10683): no biases, no centring, places known only by their distance; its decoder begins with 0."""
    return Config(
        family="t5",
        vocabulary=32128,
        width=512,
        layers=6,
        decoder_layers=6,
        heads=8,
        head_width=64,
        inner=2048,
        position_kind="relative",
        segments=0,
        norm="rms",
        norm_place="pre",
        epsilon=1e-6,
        activation="relu",
        inner_dropout=0.1,
        embedding_norm=False,
        biased=False,
        scores_scaled=False,
        output_scaled=True,
        start_token=0,
        end_token=1,
        init_std=1.0,  # a factor: each matrix has a size of its own, see initialise.py
    )


def t5_base() -> Config:
    return replace(t5_small(), width=768, layers=12, decoder_layers=12, heads=12, inner=3072)


def t5_large() -> Config:
    return replace(t5_small(), width=1024, layers=24, decoder_layers=24, heads=16, inner=4096)


def t5_v1_1_small() -> Config:
    """The second edition: gated, with an output layer of its own, pretrained without dropout."""
    gates = {"gated": True, "activation": "gelu_tanh", "tied": False, "output_scaled": False}
    return replace(t5_small(), layers=8, decoder_layers=8, heads=6, inner=1024, **gates)


def t5_v1_1_base() -> Config:
    return replace(t5_v1_1_small(), width=768, layers=12, decoder_layers=12, heads=12, inner=2048)


def t5_v1_1_large() -> Config:
    return replace(t5_v1_1_small(), width=1024, layers=24, decoder_layers=24, heads=16, inner=2816)


def lstm() -> Config:
    """A recurrent encoder–decoder with additive attention (arXiv 1409.0473), about the size of transformer-base."""
    return Config(
        family="lstm",
        vocabulary=37000,
        width=1024,
        layers=2,
        decoder_layers=2,
        heads=1,
        inner=1024,  # of the scores
        position_kind="none",
        segments=0,
        dropout=0.2,
        embedding_norm=False,
        embedding_scaled=True,
        start_token=0,
    )


def lstm_small() -> Config:
    return replace(lstm(), width=384, inner=384, vocabulary=8000)


def lstm_plain() -> Config:
    """Without attention: a source is what its last states say (arXiv 1409.3215)."""
    return replace(lstm(), source_attention=False)


def lstm_small_plain() -> Config:
    return replace(lstm_small(), source_attention=False)


def elmo_small() -> Config:
    """Two recurrent language models, one from each end of a text (arXiv 1802.05365)."""
    return replace(lstm(), family="elmo", vocabulary=30522, width=512, inner=512, decoder_layers=0, dropout=0.1)


def elmo_tiny() -> Config:
    return replace(elmo_small(), width=128, inner=128)


def xlnet_base() -> Config:
    """XLNet (arXiv 1906.08237): distances instead of places, another segment instead of a second one, two streams."""
    return Config(
        family="xlnet",
        vocabulary=32000,
        position_kind="shifted",
        segments=3,  # of a first text, a second, and of <cls>
        inner_dropout=0.1,
        embedding_norm=False,
        pad_token=5,
    )


def xlnet_large() -> Config:
    return replace(xlnet_base(), width=1024, layers=24, heads=16, inner=4096)


def xlnet_tiny() -> Config:
    return replace(xlnet_base(), width=128, layers=2, heads=2, inner=512)


PRESETS = {
    make.__name__.replace("_", "-").replace("v1-1", "v1.1"): make
    for make in (
        bert_tiny, bert_small, bert_base, bert_large, bert_base_chinese,
        gpt2, gpt2_medium, gpt2_large, gpt2_xl,
        transformer_small, transformer_base, transformer_big,
        t5_small, t5_base, t5_large, t5_v1_1_small, t5_v1_1_base, t5_v1_1_large,
        xlnet_tiny, xlnet_base, xlnet_large,
        lstm_small, lstm, lstm_small_plain, lstm_plain, elmo_tiny, elmo_small,
    )
}  # fmt: skip
