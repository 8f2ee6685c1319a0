"""D11. The table of costs: attention n²d, recurrence nd², convolution knd².

Statement: Per layer, attention costs n²d, recurrence nd² and convolution knd². Two tokens that are n apart meet after 1
    layer of attention, n steps of a recurrence, and n/(k - 1) layers of a causal convolution of width k.
Source: Vaswani et al. 2017, table 1.
Criterion: Medians of processor time in interleaved rounds. Twice the tokens (1,024 to 2,048, 128 wide): attention
    takes 2.8 to 6 times as long (4 by the table), the others 1.5 to 3 times (2). Twice the width (128 to 256, 1,024
    tokens): attention 1.4 to 3 times (2), the others 2.5 to 6 times (4). Twice the kernel, 4 to 8: convolution 1.4 to 3
    times. (First half as many tokens: there the fixed cost of a call blurs the factors of the convolution.)
    The layers until the last of 17 tokens depends on the first, found by autograd: 1 of attention, 8 of a convolution
    of width 3, and 1 of an LSTM, which takes 17 steps for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import Route, attend

SIZES = {"base": (1024, 128, 4), "tokens": (2048, 128, 4), "width": (1024, 256, 4), "kernel": (1024, 128, 8)}
EXPECTED = {  # what doubles, and by how much the time grows
    "attention": {"tokens": (2.8, 6.0), "width": (1.4, 3.0)},
    "recurrence": {"tokens": (1.5, 3.0), "width": (2.5, 6.0)},
    "convolution": {"tokens": (1.5, 3.0), "width": (2.5, 6.0), "kernel": (1.4, 3.0)},
}
APART = 17


def measure(trial: Trial, everything: bool = True) -> Numbers:
    """`everything`: each token reads all; otherwise only those of its own 32, and attention costs nd."""
    seconds: dict[str, dict[str, list[float]]] = {name: {size: [] for size in SIZES} for name in EXPECTED}
    with torch.inference_mode():
        jobs = {size: layers(*numbers, everything) for size, numbers in SIZES.items()}
        for _ in range(60 if trial.full else 2 if trial.brief else 15):
            for size, named in jobs.items():
                for name, job in named.items():
                    started = time.process_time()
                    job()
                    seconds[name][size].append(time.process_time() - started)
    times = {name: {size: 1000 * median(found) for size, found in values.items()} for name, values in seconds.items()}
    return {"milliseconds": times, "layers": depth_until_met()}


def layers(n: int, d: int, k: int, everything: bool) -> dict[str, Callable[[], object]]:
    """A layer of each kind. Of attention the scores and sums, which the table counts; the projections cost nd²."""
    x = torch.randn(1, n, d, generator=torch.Generator().manual_seed(1))
    heads = x.view(1 if everything else n // 32, -1, 1, d)
    route = Route.find(Mask.bidirectional(torch.ones(heads.shape[:2], dtype=torch.bool)))
    recurrent, convolution, channels = nn.LSTM(d, d, batch_first=True), nn.Conv1d(d, d, k), x.transpose(1, 2)
    return {
        "attention": lambda: attend(heads, heads, heads, route),
        "recurrence": lambda: recurrent(x),
        "convolution": lambda: convolution(channels),
    }


def depth_until_met() -> dict[str, int]:
    """How many layers of each kind until the last of 17 tokens depends on the first."""
    causal = Route.find(Mask.causal(torch.ones(1, APART, dtype=torch.bool)))
    torch.manual_seed(1)
    recurrent, convolution = nn.LSTM(4, 4, batch_first=True), nn.Conv1d(4, 4, 3)
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "attention": lambda x: attend(x[:, :, None], x[:, :, None], x[:, :, None], causal)[:, :, 0],
        "recurrence": lambda x: recurrent(x)[0],
        "convolution": lambda x: convolution(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
    }
    found = {}
    for name, step in steps.items():
        first = x = torch.randn(1, APART, 4, requires_grad=True)
        for depth in range(1, APART + 1):
            x = step(x)
            (slope,) = torch.autograd.grad(x[0, -1].sum(), first, retain_graph=True)
            if bool((slope[0, 0] != 0).any()):
                found[name] = depth
                break
    return found


def judge(numbers: Numbers) -> Verdict:
    times = numbers["milliseconds"]
    growth = {name: {what: times[name][what] / times[name]["base"] for what in EXPECTED[name]} for name in EXPECTED}
    fits = all(low <= growth[name][what] <= high for name in EXPECTED for what, (low, high) in EXPECTED[name].items())
    met = ", ".join(str(numbers["layers"].get(name)) for name in EXPECTED)
    said = ", ".join(f"{name} × {found['tokens']:.1f} and × {found['width']:.1f}" for name, found in growth.items())
    return judged(fits and met == "1, 1, 8", f"twice the tokens and twice the width: {said}; met after {met} layers")


def draw(axes, numbers: Numbers) -> None:
    for number, values in enumerate(numbers["milliseconds"].values()):
        places = [number - 0.3 + 0.2 * place for place in range(len(SIZES))]
        axes.bar(places, values.values(), 0.18, color=[f"C{place}" for place in range(len(SIZES))])
    axes.set(ylabel="milliseconds", xticks=range(len(EXPECTED)), xticklabels=list(EXPECTED))
    labels = ["1,024 tokens, 128 wide", "2,048 tokens", "256 wide", "kernel 8"]
    axes.legend(axes.patches[: len(SIZES)], labels, frameon=False)
