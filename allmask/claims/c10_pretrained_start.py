"""C10. A pretrained body writes titles soon, an LSTM much later.

Statement: A body that was pretrained as a masked language model writes readable titles after about 1,000 steps. An LSTM
    needs tens of times more.
Source: 苏剑林, Transformer如戏，全靠Mask.
Criterion: A small body is pretrained on made-up stories, without titles. Then it learns to write titles under the
    prefix mask, and an LSTM with attention learns the same from nothing, at the same learning rate. In the median of
    five seeds the body gets 75 % of the characters of held-out titles right within 1,000 steps; the LSTM needs at
    least 20 times as many steps. Weaker: 3 times. The LSTM stops after 1,000 steps. (First three seeds. Stories have
    only 76 characters, which an LSTM soon knows, too: it needs 3 times as many steps. So --full has a larger language:
    first one of 1,406 characters, where one seed needed 15.6 times as many.)
Full: Stories of 4,060 characters, which a body has to know before it can write them; 6,000 steps of pretraining. The
    LSTM goes on until it reaches the level, for up to 100,000 steps. About an hour.
At length: python quality/starts.py DATA
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import (
    FEW,
    PRETRAINING,
    Words,
    accuracy_on,
    pretrained_story_model,
    story_tokenizer,
    title_work,
    train_on,
)
from allmask.model import Model
from allmask.presets import lstm_small

LEVEL, EVERY = 75.0, 5


def measure(trial: Trial, pretrained: bool = True) -> Numbers:
    """`pretrained`: otherwise an LSTM from nothing takes the place of the body, too."""
    found: Numbers = {"pretrained": [], "lstm": []}
    for seed in trial.seeds(5):
        for name, runs in found.items():
            trial.say(f"{name}, seed {seed}")
            which = name if pretrained else "lstm"
            runs.append(trial.part(f"{name}-{seed}", partial(curve, which, seed, trial)))
    return found


def small_lstm(seed: int, words: Words = FEW) -> Model:
    tokenizer = story_tokenizer(words)
    sizes = {"width": 64, "ffn_width": 64, "dropout": 0.0, "attention_dropout": 0.0}
    shape = replace(lstm_small(), vocab_size=tokenizer.size, start_token=tokenizer.cls_id, **sizes)
    model = Model.fresh(shape, ["lm"], torch.Generator().manual_seed(seed))
    model.tokenizer = tokenizer
    return model


def curve(name: str, seed: int, trial: Trial) -> list[float]:
    """The share of right characters after every few steps, until it reaches the level."""
    words, examples, steps = (Words.many(), 16_000, 6000) if trial.full else (FEW, 2000, PRETRAINING)
    if name == "lstm":
        model = small_lstm(seed, words)
    else:
        model = copy.deepcopy(pretrained_story_model(seed, trial.steps(steps), words=words))
    train = title_work(model, trial.examples(examples), seed, words)
    test = title_work(model, trial.examples(100), 1000, words)
    found: list[float] = []

    def look(step: int) -> bool:
        if step % EVERY == 0 or trial.brief:
            found.append(accuracy_on(model, test))
        return bool(found) and found[-1] >= LEVEL

    train_on(model, train, trial.steps(100_000 if trial.full else 1000), seed, look, warmup=20.0)
    return found


def judge(numbers: Numbers) -> Verdict:
    reached = all(run and run[-1] >= LEVEL for run in numbers["pretrained"])
    body, lstm = (EVERY * median(len(run) for run in numbers[name]) for name in ("pretrained", "lstm"))
    ratio = lstm / max(1, body)
    return judged(
        reached and body <= 1000 and ratio >= 20,
        f"{LEVEL:.0f} % after {body:.0f} steps, the LSTM after {lstm:.0f}: {ratio:.1f} times as many",
        weaker=reached and body <= 1000 and ratio >= 3,
    )


def draw(axes, numbers: Numbers) -> None:
    for number, (name, runs) in enumerate(numbers.items()):
        for seed, run in enumerate(runs):
            steps = [EVERY * (look + 1) for look in range(len(run))]
            axes.plot(steps, run, color=f"C{number}", label=None if seed else name)
    axes.axhline(LEVEL, color="grey", lw=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="right characters (%)", xscale="log")
    axes.legend(frameon=False)
