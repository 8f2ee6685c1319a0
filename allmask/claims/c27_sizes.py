"""C27. The sizes of the models, counted.

Statement: A BERT has about V·H + L·12·H² parameters. The exact counts are 109,482,240 for BERT-base, 110,106,428 with
    both heads of pretraining, 335,141,888 for BERT-large, 124,439,808 for GPT-2, 60,506,624 for T5-small, 116,750,336
    for XLNet-base, 269,722 for CIFAR's ResNet-20.
Source: Devlin et al. 2019; Radford et al. 2019; Raffel et al. 2020; Yang et al. 2019; He et al. 2016.
Criterion: Every count is exact, and the formula is within 2 % for BERT-base and BERT-large.
"""

from __future__ import annotations

from dataclasses import replace

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.build import empty_parameters
from allmask.presets import PRESETS
from allmask.vision.resnet import shape_of, small

MODELS = {  # preset, heads, and the count
    "BERT-base": ("bert-base", ("pooler",), 109_482_240),
    "BERT-base, both heads": ("bert-base", ("pooler", "lm", "nsp"), 110_106_428),
    "BERT-large": ("bert-large", ("pooler",), 335_141_888),
    "GPT-2": ("gpt2", ("lm",), 124_439_808),
    "T5-small": ("t5-small", ("lm",), 60_506_624),
    "XLNet-base": ("xlnet-base", ("lm",), 116_750_336),
}
RESNET = 269_722


def measure(trial: Trial, with_biases: bool = True) -> Numbers:
    """Count without allocating. `with_biases`: otherwise linear layers have none, and no count is right."""
    found: Numbers = {"counts": {}, "formula": {}}
    for name, (preset, heads, _) in MODELS.items():
        config = PRESETS[preset]()
        config = config if with_biases else replace(config, bias=not config.bias)
        found["counts"][name] = sum(weight.numel() for weight in empty_parameters(config, heads).values())
        if heads == ("pooler",):
            found["formula"][name] = config.vocab_size * config.width + config.layers * 12 * config.width**2
    found["counts"]["ResNet-20"] = sum(weight.numel() for weight in shape_of(small(20)).parameters())
    return found


def judge(numbers: Numbers) -> Verdict:
    expected = {name: count for name, (_, _, count) in MODELS.items()} | {"ResNet-20": RESNET}
    wrong = [name for name, count in expected.items() if numbers["counts"][name] != count]
    off = max(abs(about / numbers["counts"][name] - 1) for name, about in numbers["formula"].items())
    said = f"wrong: {', '.join(wrong)}" if wrong else f"all {len(expected)} counts are exact"
    return judged(not wrong and off < 0.02, f"{said}; the formula is off by {100 * off:.1f} %")


def draw(axes, numbers: Numbers) -> None:
    names = list(numbers["counts"])
    counts = [numbers["counts"][name] for name in names]
    axes.barh(names, [count / 1e6 for count in counts])
    axes.bar_label(axes.containers[0], [f"{count:,}" for count in counts], padding=2, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="million parameters")
