"""Texts to pretrain on, a vocabulary to work with by hand, models small enough for gradients, scripted draws."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import logging
import pathlib
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from allmask import presets
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary
from allmask.registry import OBJECTIVES
from allmask.text import Tokenizer

CHINESE = """
清晨的雾还没有散去，河边的小镇已经醒来。卖豆浆的老人推着车走过石桥，铃声在巷子里回响。孩子们背着书包，一边跑一边笑。
桥下的水很慢，像是在等什么人。有人在窗前晾衣服，有人在门口读报纸，猫躺在屋顶上晒太阳。

语言模型只做一件事：根据已经知道的词，猜还不知道的词。从左往右猜，就是写作；把中间的词遮住再猜，就是填空。
如果把顺序打乱，每一种顺序都是一种读法。看得见什么，看不见什么，完全由掩码决定。同样的参数，换一个掩码，就换了一个角色。

北京的秋天很短，却是一年中最好的时候。天很高，风很轻，银杏叶一夜之间变成金黄。周末的公园里挤满了拍照的人。
胡同里的柿子熟了，老人搬出小板凳下棋。傍晚的时候，鸽子从屋顶上飞过，留下一阵哨声。再过几天，暖气就要来了。

做白切鸡要选三斤左右的嫩鸡。水烧开以后转小火，把鸡放进去浸熟，不能大火煮。中间要提起来几次，让肚子里的水流出来。
熟了马上放进冰水，皮才会脆。蘸料用姜末、葱花和热油，再加一点盐就够了。吃的时候不用筷子，用手更香。
"""


def chinese_documents() -> list[list[str]]:
    """Documents of sentences."""
    return [re.findall(r"[^。！？]+[。！？]", part.replace("\n", "")) for part in CHINESE.strip().split("\n\n")]


def english_documents() -> list[list[str]]:
    """What modules of the standard library say about their parts."""
    found: list[list[str]] = []
    for module in (argparse, json, logging, pathlib, random, textwrap, difflib):
        for part in (module, *vars(module).values()):
            if inspect.ismodule(part) and part.__name__.startswith(f"{module.__name__}."):
                continue  # such as logging.handlers, which is there if somebody has imported it
            text = inspect.getdoc(part) if inspect.ismodule(part) or inspect.isclass(part) else None
            sentences = re.split(r"(?<=[.:])\s+", " ".join((text or "").split()))
            found += [sentences] if 3 <= len(sentences) <= 40 and len(text or "") > 200 else []
    return [list(row) for row in dict.fromkeys(map(tuple, found))]


class Texts(list):
    """Samples that know their sentences and documents: sentences of a document up to `limit` tokens."""

    def __init__(self, documents: Sequence[Sequence[Sequence[int]]], limit: int = 64):
        super().__init__()
        self.starts, self.homes = [], []
        for number, document in enumerate(documents):
            for sentence in filter(len, document):
                self._add(list(sentence[:limit]), number, limit)

    def _add(self, sentence: list[int], number: int, limit: int) -> None:
        fits = len(self) and self.homes[-1] == number and len(self[-1]) + len(sentence) <= limit
        if fits:
            self.starts[-1].append(len(self[-1]))
            self[-1] = np.append(self[-1], sentence)
        else:
            self.append(np.array(sentence))
            self.starts.append([0])
            self.homes.append(number)

    def sentences(self, number: int) -> np.ndarray:
        return np.array(self.starts[number])

    def document(self, number: int) -> int:
        return self.homes[number]


def real_texts(tokenizer: Tokenizer, documents: list[list[str]], limit: int = 64) -> Texts:
    return Texts([[e.ids for e in tokenizer.encode_batch(document, special=False)] for document in documents], limit)


# ---- by hand -----------------------------------------------------------------------------------------------

UNK, CLS, SEP, MASK = 1, 2, 3, 4
SIZE, SENTINELS = 40, 5


def small_vocabulary() -> Vocabulary:
    """[PAD] [UNK] [CLS] [SEP] [MASK], then words, of which 30 to 39 go on with the one before; 5 sentinels."""
    special = np.arange(SIZE + SENTINELS) < 5
    special[SIZE:] = True
    continues = np.arange(SIZE + SENTINELS) >= 30
    return Vocabulary(SIZE, CLS, SEP, MASK, special, continues & ~special, np.arange(SIZE, SIZE + SENTINELS))


def small_texts(seed: int = 0) -> Texts:
    """Ten samples of 1 to 14 tokens, an unknown one now and then, from seven documents."""
    rng = np.random.default_rng(seed)
    lengths = [(3, 5, 9), (1, 7), (4, 4, 6), (2, 9, 8), (1,), (6, 5, 7), (2, 2)]
    rows = [[np.where((row := rng.integers(5, SIZE, n)) == 20, UNK, row) for n in document] for document in lengths]
    return Texts(rows, limit=14)


class Scripted:
    """A draw whose numbers are written down."""

    def __init__(self, samples: int = 1, batch: float = 0.0, **scripts: Sequence[float]):
        self.numbers, self.lot, self.scripts = list(range(samples)), batch, scripts

    def tokens(self, name: str, lengths: np.ndarray) -> np.ndarray:
        assert len(self.scripts[name]) == lengths.sum(), (name, lengths)
        return np.array(self.scripts[name])

    def rows(self, name: str) -> np.ndarray:
        assert len(self.scripts[name]) == len(self.numbers), name
        return np.array(self.scripts[name])

    def batch(self, name: str) -> float:
        return self.lot


# ---- models ------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": SIZE + SENTINELS, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 32}

ALL: dict[str, Callable[[Vocabulary], object]] = {
    **OBJECTIVES,
    "words": lambda v: OBJECTIVES["mlm"](v, whole_words=True, ngrams=(6, 3, 2)),
    "shuffled": lambda v: OBJECTIVES["permutation"](v, part=2, two_streams=False),
    "all-permuted": lambda v: OBJECTIVES["permutation"](v, part=1),
    **{
        f"unilm-{way}": lambda v, way=way: OBJECTIVES["unilm"](v, weights=[float(way == other) for other in range(4)])
        for way in range(4)
    },
}


def small_model(name: str):
    """The model that learns an objective, in float64, with weights large enough for a leak to show."""
    torch.manual_seed(0)
    if name in ("mass", "span"):
        model = Model(replace(presets.transformer_base(), **SMALL, decoder_layers=2), ["lm"])
    else:
        model = Model(replace(presets.bert_base(), **SMALL), ["lm", "nsp"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def draw(numbers: Sequence[int], epoch: int = 0, seed: int = 7) -> Draw:
    return Draw(seed, epoch, list(numbers))
