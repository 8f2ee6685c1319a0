"""D12. As features, the last four layers are better than the last one.

Statement: If a BERT is not fine-tuned but gives fixed features to another model, the last four layers side by side are
    better features of a token than the last layer alone.
Source: Devlin et al. 2019, table 7 (names in texts: 96.1 against 94.9 F1).
Criterion: allmask-en, which reads lower-case letters only, gives features of the words of Python's own reference. A
    logistic regression tells from them which words inside a sentence had a capital letter. Over five splits into texts
    to learn from and others, its F1 is higher with the last four layers by more than two standard errors. Weaker: it is
    higher on average. (First the classifier took 60 steps of Adam on 100 paragraphs. The last four layers were ahead,
    28.9 to 23.6, but so were four copies of the last layer, 29.2: what helped were more weights. Now it is fitted to
    the end, with a penalty that makes copies worthless, and has 300 paragraphs.)
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

import allmask
from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import surely_above

PARAGRAPHS, WORDS, PENALTY = 300, 32, 1e-3


def measure(trial: Trial, four: bool = True) -> Numbers:
    """`four`: otherwise the last layer stands for all four."""
    layers, capital, paragraph = features(PARAGRAPHS // 5 if trial.brief else PARAGRAPHS, four)
    found: Numbers = {"last": [], "last four": []}
    for seed in trial.seeds(5):
        order = torch.randperm(int(paragraph.max()) + 1, generator=torch.Generator().manual_seed(seed))
        learnt = (order % 2 == 0)[paragraph]
        for name, x in (("last", layers[-1]), ("last four", torch.cat(layers, 1))):
            found[name].append(f1(x, capital, learnt))
    return found


def features(count: int, four: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """The last four layers (N, W) at words inside sentences, which of these had a capital letter, their paragraphs."""
    model = allmask.load("allmask-en")
    assert model.tokenizer is not None
    texts = [" ".join(part.split()) for text in topics.values() for part in re.split(r"\n\s*\n", text)]
    texts = [text for text in texts if len(text) > 200 and text[0].isalpha()][:count]
    hidden: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, result: hidden.append(result[0][0]))
        for layer in model.body.layers[-4:]
    ]
    found: list[list[Tensor]] = [[], [], [], []]
    capital, paragraph = [], []
    with torch.inference_mode():
        for number, text in enumerate(texts):
            words = re.findall(r"[\w']+|[^\w\s]", text)[:WORDS]
            pieces = [encoded.ids for encoded in model.tokenizer.encode_batch(words, special=False)]
            starts = [1 + sum(map(len, pieces[:n])) for n in range(len(pieces))]
            inside = [
                n for n in range(1, len(words)) if words[n][0].isalpha() and words[n - 1] not in ".:!?" and pieces[n]
            ]
            ids = [model.tokenizer.begin_id, *(id for piece in pieces for id in piece), model.tokenizer.end_id]
            hidden.clear()
            model(torch.tensor([ids]))
            for layer, states in zip(found, hidden if four else 4 * hidden[-1:], strict=True):
                layer.append(states[[starts[n] for n in inside]])
            capital += [words[n][0].isupper() for n in inside]
            paragraph += [number] * len(inside)
    for hook in hooks:
        hook.remove()
    return [torch.cat(layer).clone() for layer in found], torch.tensor(capital).float(), torch.tensor(paragraph)


def f1(x: Tensor, capital: Tensor, learnt: Tensor) -> float:
    """Of a logistic regression, in percent, on the words that it has not learnt from.

    Features have deviation 1/√width, so that under the penalty four copies of them are worth no more than one.
    """
    x = ((x - x[learnt].mean(0)) / x[learnt].std(0)).double() / x.shape[1] ** 0.5
    capital = capital.double()
    weight = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    rarer = (1 - capital[learnt]).sum() / capital[learnt].sum()  # so that both classes count the same
    optimizer = torch.optim.LBFGS([weight], max_iter=200, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = x[learnt] @ weight[1:] + weight[0]
        found = F.binary_cross_entropy_with_logits(scores, capital[learnt], pos_weight=rarer)
        found = found + PENALTY * weight[1:].pow(2).sum()
        found.backward()
        return found

    optimizer.step(loss)
    with torch.no_grad():
        said, true = x[~learnt] @ weight[1:] + weight[0] > 0, capital[~learnt] > 0
    return 100 * (2 * (said & true).sum() / (said.sum() + true.sum()).clamp(min=1)).item()


def judge(numbers: Numbers) -> Verdict:
    last, four = (mean(numbers[name]) for name in ("last", "last four"))
    differences = [b - a for a, b in zip(numbers["last"], numbers["last four"], strict=True)]
    said = f"F1 {last:.1f} with the last layer, {four:.1f} with the last four"
    return judged(surely_above(differences), said, weaker=four > last)


def draw(axes, numbers: Numbers) -> None:
    for place, name in enumerate(numbers):
        axes.scatter([place] * len(numbers[name]), numbers[name])
    for pair in zip(*numbers.values(), strict=True):
        axes.plot((0, 1), pair, color="0.7", lw=0.8)
    axes.set(ylabel="F1 of capital letters", xticks=range(2), xticklabels=list(numbers), xlim=(-0.5, 1.5))
