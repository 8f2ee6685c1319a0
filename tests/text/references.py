"""Independent tokenizers in plain Python, slow and short, and the text they are compared on."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import regex
from hypothesis import strategies as st
from transformers import AutoTokenizer

from allmask.text import Tokenizer

CORPUS = [
    "The mask decides who may look at whom; the weights of the model stay the same.",
    "A reader reads both ways, a writer writes from left to right, unreadable words are rewritten.",
    "Readers and writers: reading, writing, rewriting. 2019, 2020, 2021!",
    "北京欢迎你，你想吃啥？白切鸡。",
    "掩码决定一切：谁能看见谁。机器学习的模型，双向地读，单向地写。",
    "BERT 读 both ways, GPT-2 写 left to right; 模型 models 都 一样.",
    "Café naïve Zürich, señor, Ångström — crème brûlée 😀👍🏽 end.",
] * 3

TEXTS = [
    "",
    " ",
    "The reader re-reads what the writers wrote.",
    "北京欢迎你",
    "BERT读both ways，GPT-2写left→right。",
    "Café NAÏVE Zürich ÅNGSTRÖM señor İstanbul ΣΊΣΥΦΟΣ ﬁne Ⅷ",
    "e\u0301 n\u0303 a\u0300\u0301 \u0301",  # combining marks, one with nothing before it
    "😀👍🏽 👨‍👩‍👧 flag 🇨🇳 text",
    "tab\there\nnew\r\nline\u00a0hard\u2003em\u3000wide\u2028sep",
    "nul\x00bell\x07del\x7fzero\u200bwidth\ufeffbom\ufffdbad\u00adsoft",
    "x" * 100,
    "x" * 101,
    "read" * 26 + " ok",
    "读" * 150,
    "한국어 ไทย العربية हिन्दी ελληνικά",
    "don't can't I'm they'll 3.14 1,000 50% $5 C++ a_b #tag @you http://a.b/c?d=e&f",
    "[CLS] a [MASK] b[SEP]c [UNK] [mask] <|endoftext|>x",
    "𠀀𪚥龘 extension B，㐀 extension A，ﾊﾝｶｸ カタカナ ひらがな",
    "  leading  and   trailing   ",
]

# Assigned characters of every kind the cleaning steps treat differently.
_CHARACTERS = (
    "abcdeghilmnorstuwxyzABRWÉéñüßåİıﬁ0129 .,;:!?'\"()[]#-_$+<>|~`^"
    "\t\n\r\u00a0\u2003\u3000\u2028\x00\x07\x7f\u200b\ufeff\ufffd\u00ad"
    "\u0301\u0308北京欢迎你想吃啥白切鸡，。？：读写模型掩码龘𠀀㐀한글ไทยкириллицаελσςΣ—“”…😀👍🏽\u200d"
)
words = st.sampled_from([word for line in CORPUS for word in line.split()])
any_text = st.lists(st.one_of(words, st.text(_CHARACTERS, max_size=8)), max_size=8).map(" ".join)


def wordpiece(text: str, vocabulary: dict[str, int], lowercase: bool) -> list[int]:
    """BERT's basic and WordPiece tokenization after its description, without special tokens."""
    spaced = "".join(_cleaned(character) for character in text)
    if lowercase:
        plain = unicodedata.normalize("NFD", spaced)
        spaced = "".join(c.lower() for c in plain if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if _is_punctuation(c) else c for c in spaced)
    return [id for word in spaced.split() for id in _pieces(word, vocabulary)]


def _cleaned(c: str) -> str:
    if c in "\t\n\r" or (c.isspace() and unicodedata.category(c) != "Cc"):
        return " "
    if c == "\ufffd" or unicodedata.category(c).startswith("C"):
        return ""
    return f" {c} " if _is_chinese(ord(c)) else c


def _is_chinese(code: int) -> bool:
    blocks = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)]
    return any(low <= code <= high for low, high in [*blocks, (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)])


def _is_punctuation(c: str) -> bool:
    return c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" or unicodedata.category(c).startswith("P")


def _pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    ids: list[int] = []
    rest = word
    while rest and len(word) <= 100:
        mark = "##" if ids else ""
        piece = next((rest[:n] for n in range(len(rest), 0, -1) if mark + rest[:n] in vocabulary), None)
        if piece is None:
            break
        ids.append(vocabulary[mark + piece])
        rest = rest[len(piece) :]
    return [vocabulary["[UNK]"]] if rest else ids


_GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_bpe(text: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """GPT-2's tokenization after its description: always the earliest learnt merge that applies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    rank = {pair: n for n, pair in enumerate(merges)}
    ids: list[int] = []
    for word in _GPT2_WORDS.findall(text):
        parts = [letters[byte] for byte in word.encode()]
        while pairs := [pair for pair in pairwise(parts) if pair in rank]:
            parts = _merge(parts, min(pairs, key=rank.__getitem__))
        ids += [vocabulary[part] for part in parts]
    return ids


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair and not merged[-1].endswith("\0"):
            merged[-1] = f"{merged[-1]}{part}\0"  # a mark, so that a fresh piece does not merge again in this round
        else:
            merged.append(part)
    return [part.removesuffix("\0") for part in merged]


def assert_read_back(ours, folder, texts):
    """A saved tokenizer gives the same ids when it is read: with its settings, without them, by transformers."""
    ours.save(folder)
    again, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer_config.json").unlink()
    alone = Tokenizer.load(folder)
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == again.encode(text).ids == alone.encode(text).ids == theirs(text)["input_ids"]
    return again, alone, theirs
