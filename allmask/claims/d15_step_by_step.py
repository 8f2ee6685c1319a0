"""D15. Writing starts with "SOS", and each step reads all that was written before.

Statement: A text is written token by token. The first step reads only a start token; each later one reads what has been
    written so far; the end token stops it. In training, one masked pass over the whole text does all steps at once.
Source: Vaswani et al. 2017; textbooks print it as "SOS" → What, "SOS What" → is, …
Criterion: allmask-en writes titles of three texts, allmask-zh of three Chinese ones; the start token is the [SEP] after
    the text, and no three tokens are written twice in a row, as usual for these models. Steps without a cache, each
    fed with all tokens before it, write exactly the tokens that the cached search writes, and end with [SEP]. One pass
    under the prefix mask over each finished title predicts the same token at every step. Weaker: some titles end only
    at 32 tokens. (First tokens could be repeated at will, and some titles did not end, as in C19; without repetitions
    two of six still do not. The claim is about the steps, and all of these agree; that a small model does not find an
    end is another matter, so the verdict is weaker then, not a failure.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import allmask
from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.decoding import Decoding, MaskWriter, generate
from allmask.decoding.filters import ban, no_repeat
from allmask.mask import Mask
from allmask.model import Model
from allmask.tasks.seq2seq import Title

TEXTS = {
    "allmask-en": (
        "The city council voted on Monday to build a new bridge over the river, after years of debate about its cost.",
        "Researchers have found a new species of frog in the mountains, which lives in trees and sings at night.",
        "The company said that it will close two of its factories next year, because fewer people buy its cars.",
    ),
    "allmask-zh": (
        "本文研究了城市道路的交通流量，提出了一种新的预测方法，实验表明该方法比现有方法更准确。",
        "昨天下午，北京举行了一场大型音乐会，数千名观众冒雨观看了演出。",
        "针对小麦产量下降的问题，我们分析了土壤和气候的影响，并给出了改进种植的建议。",
    ),
}


def measure(trial: Trial, fed: bool = True) -> Numbers:
    """`fed`: otherwise what was written is not fed back, and every step reads the start token only."""
    found: Numbers = {"steps": [], "same": [], "ended": [], "one pass": []}
    for name, texts in TEXTS.items():
        model = allmask.load(name)
        longest = 8 if trial.brief else 32
        task = Title(max_source=128, max_target=longest, no_repeat_ngram=3, end_bias=0.0)
        assert model.tokenizer is not None
        settings = task.decoding(model)
        prompts = task.prompts(model.tokenizer, texts[:1] if trial.brief else texts).ids
        for prompt, best in zip(prompts, generate(MaskWriter(model), prompts, settings), strict=True):
            written = by_steps(model, prompt, settings, fed)
            ended = written[-1:] == list(settings.end)
            found["same"].append(written == [*best[0].tokens, *(settings.end if best[0].finished else ())])
            found["ended"].append(ended)
            found["one pass"].append(in_one_pass(model, prompt, written, settings) == written)
            found["steps"].append(model.tokenizer.tokens(written))
    return found


def by_steps(model: Model, prompt: Sequence[int], settings: Decoding, fed: bool) -> list[int]:
    written: list[int] = []
    while len(written) < settings.max_new and written[-1:] != list(settings.end):
        scores = next_scores(model, prompt, written if fed else [])
        written.append(likeliest(scores[-1:], written, settings))
    return written


def in_one_pass(model: Model, prompt: Sequence[int], written: Sequence[int], settings: Decoding) -> list[int]:
    scores = next_scores(model, prompt, written[:-1])
    return [likeliest(scores[step : step + 1], written[:step], settings) for step in range(len(written))]


def likeliest(scores: torch.Tensor, written: Sequence[int], settings: Decoding) -> int:
    """The likeliest token of scores (1, V) that the settings allow after those written."""
    allowed = no_repeat(ban(scores, settings.banned), [written], settings.no_repeat_ngram)
    return int(allowed.argmax())


@torch.inference_mode()
def next_scores(model: Model, prompt: Sequence[int], written: Sequence[int]) -> torch.Tensor:
    """The scores (n + 1, V) of the token after the prompt, and after each of the n tokens written."""
    ids = torch.tensor([[*prompt, *written]])
    is_target = torch.arange(ids.shape[1])[None] >= len(prompt)
    return model(ids, Mask.prefix(is_target), segments=is_target.long()).logits[0, len(prompt) - 1 :]


def judge(numbers: Numbers) -> Verdict:
    count = len(numbers["same"])
    counts = {name: sum(numbers[name]) for name in ("same", "ended", "one pass")}
    shown = lines(numbers["steps"][0])[:3]
    return judged(
        all(value == count for value in counts.values()),
        f"{counts['same']} of {count} texts are those of the cached search, {counts['one pass']} those of one pass, "
        f"{counts['ended']} end with [SEP]; {'; '.join(shown)}",
        weaker=counts["same"] == counts["one pass"] == count,
    )


def lines(tokens: Sequence[str]) -> list[str]:
    """For example: SOS What → is"""
    return [f"{' '.join(['SOS', *tokens[:step]])} → {token}" for step, token in enumerate(tokens)]


def draw(axes, numbers: Numbers) -> None:
    axes.axis("off")
    shown = lines(numbers["steps"][0])
    for number, line in enumerate(shown):
        axes.text(0, 1 - number / max(1, len(shown)), line, va="top", fontsize=7, transform=axes.transAxes)
