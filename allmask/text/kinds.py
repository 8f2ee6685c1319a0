"""Build tokenizers from vocabularies: WordPiece (BERT), byte-level BPE (GPT-2, RoBERTa), BPE, unigrams (T5, XLNet).

Each function takes a vocabulary and returns the whole pipeline of the `tokenizers` library: normalizer, pre-tokenizer,
model, post-processor (the special tokens around a text) and decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
BERT_SPECIALS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GPT2_SPECIALS = {role: "<|endoftext|>" for role in ("unk", "bos", "eos")}  # one token for all, as in transformers
PLAIN_SPECIALS = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}
T5_SPECIALS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
XLNET_SPECIALS = PLAIN_SPECIALS | {"cls": "<cls>", "sep": "<sep>", "mask": "<mask>"}
ROBERTA_SPECIALS = PLAIN_SPECIALS | {"cls": "<s>", "sep": "</s>", "mask": "<mask>"}
ALBERT_SPECIALS = BERT_SPECIALS | {"pad": "<pad>", "unk": "<unk>"}
XLNET_OTHERS = ("<eop>", "<eod>")  # end of paragraph, end of document
SENTINEL, SENTINELS = "<extra_id_{}>", 100  # of T5: they stand for masked spans

Merges = list[tuple[str, str]]


def wordpiece(
    vocabulary: dict[str, int],
    specials: dict[str, str],
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,  # None: if lowercase
    chinese_characters: bool = True,  # split into single characters
) -> Backend:
    """BERT: split at spaces, punctuation and Chinese characters, then take the longest matching piece, repeatedly."""
    backend = Backend(models.WordPiece(vocabulary, unk_token=specials["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese_characters, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _frame(backend, before=specials["cls"], after=specials["sep"])
    return backend


def byte_bpe(
    vocabulary: dict[str, int], merges: Merges, *, prefix_space: bool = False, before: str | None = None
) -> Backend:
    """GPT-2: bytes, written as printable characters, are merged pair by pair; decoding gives any text back exactly."""
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    _frame(backend, before=before, again=True)
    return backend


def roberta_bpe(
    vocabulary: dict[str, int], merges: Merges, specials: dict[str, str], *, prefix_space: bool = False
) -> Backend:
    """RoBERTa: GPT-2's BPE; <s> text </s>, and <s> text </s></s> text </s> for a pair, all in segment 0."""
    backend = byte_bpe(vocabulary, merges, prefix_space=prefix_space)
    sep, cls = ((specials[role], vocabulary[specials[role]]) for role in ("sep", "cls"))
    backend.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=prefix_space)
    return backend


def plain_bpe(vocabulary: dict[str, int], merges: Merges, specials: dict[str, str]) -> Backend:
    """BPE on characters: a space is part (▁) of the following word, punctuation is split off."""
    backend = Backend(models.BPE(vocabulary, merges, unk_token=specials["unk"]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation("isolated")]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    _frame(backend, before=specials["bos"], after=specials["eos"])
    return backend


def unigram(
    pieces: Sequence[tuple[str, float]],
    specials: dict[str, str],
    *,
    charsmap: bytes | None = None,  # character replacements compiled by sentencepiece; None: NFC
    prefix_space: bool = True,
    trims: bool = True,
    byte_fallback: bool = False,
) -> Backend:
    """T5: the most likely split of a word; pieces have log-probabilities, and a space is part (▁) of a piece."""
    unknown = [piece for piece, _ in pieces].index(specials["unk"])
    backend = Backend(models.Unigram(list(pieces), unknown, byte_fallback))
    steps: list[normalizers.Normalizer] = [normalizers.NFC()] if charsmap is None else []
    steps += [normalizers.Precompiled(charsmap)] if charsmap else []
    steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")] if trims else []
    backend.normalizer = normalizers.Sequence(steps)
    inside = any("▁" in piece[1:].strip("▁") or piece[1:].endswith("▁") for piece, _ in pieces)
    scheme = "always" if prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=not inside)
    plain = decoders.Metaspace(prepend_scheme=scheme)
    with_bytes = [decoders.ByteFallback(), decoders.Fuse(), plain]
    backend.decoder = decoders.Sequence(with_bytes) if byte_fallback else plain
    _frame(backend, after=specials["eos"])
    return backend


def xlnet_unigram(
    pieces: Sequence[tuple[str, float]],
    specials: dict[str, str],
    *,
    charsmap: bytes | None = None,
    lowercase: bool = False,
    keep_accents: bool = False,
) -> Backend:
    """XLNet: a unigram model without accents and doubled quotes; <sep> and <cls> follow the text."""
    backend = _unigram_of_words(pieces, specials, _plain_text(lowercase, keep_accents), charsmap)
    sep, cls = specials["sep"], specials["cls"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {sep}:0 {cls}:2",
        pair=f"$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2",
        special_tokens=[(piece, backend.token_to_id(piece)) for piece in (sep, cls)],
    )
    return backend


def albert_unigram(
    pieces: Sequence[tuple[str, float]],
    specials: dict[str, str],
    *,
    charsmap: bytes | None = None,
    lowercase: bool = True,
    keep_accents: bool = False,
) -> Backend:
    """ALBERT: XLNet's unigram model with BERT's special tokens around the text."""
    backend = _unigram_of_words(pieces, specials, _plain_text(lowercase, keep_accents), charsmap)
    _frame(backend, before=specials["cls"], after=specials["sep"])
    return backend


def xlmr_unigram(
    pieces: Sequence[tuple[str, float]], specials: dict[str, str], *, charsmap: bytes | None = None
) -> Backend:
    """XLM-R: a unigram model with the special tokens of RoBERTa."""
    backend = _unigram_of_words(pieces, specials, [], charsmap)
    cls, sep = specials["cls"], specials["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} {sep} $B:0 {sep}",
        special_tokens=[(piece, backend.token_to_id(piece)) for piece in (cls, sep)],
    )
    return backend


def _plain_text(lowercase: bool, keep_accents: bool) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if keep_accents else [normalizers.NFKD(), normalizers.StripAccents()]
    return steps + ([normalizers.Lowercase()] if lowercase else [])


def _unigram_of_words(
    pieces: Sequence[tuple[str, float]], specials: dict[str, str], steps: list[normalizers.Normalizer],
    charsmap: bytes | None,
) -> Backend:  # fmt: skip
    """A unigram model of words between white space, after these steps of normalization."""
    unknown = [piece for piece, _ in pieces].index(specials["unk"])
    backend = Backend(models.Unigram(list(pieces), unknown, False))
    backend.normalizer = normalizers.Sequence(steps + ([normalizers.Precompiled(charsmap)] if charsmap else []))
    words = pre_tokenizers.WhitespaceSplit()
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Metaspace(prepend_scheme="always")])
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def sentinels(count: int = SENTINELS) -> list[tuple[str, float]]:
    """Return the sentinels as the last pieces of a vocabulary, in descending order."""
    return [(SENTINEL.format(number), 0.0) for number in reversed(range(count))]


def _frame(backend: Backend, before: str | None = None, after: str | None = None, again: bool = False) -> None:
    """Add special tokens around a text (segment 0) and a second one (segment 1); `again`: `before` precedes both."""
    single = [f"{before}:0"] * bool(before) + ["$A:0"] + [f"{after}:0"] * bool(after)
    second = [f"{before}:1"] * bool(before and again) + ["$B:1"] + [f"{after}:1"] * bool(after)
    ids = {token: backend.token_to_id(token) for token in (before, after) if token}
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=list(ids.items())
    )


def byte_alphabet() -> Sequence[str]:
    """Return the 256 characters that represent bytes, in the order of GPT-2's ids."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
