"""`allmask inspect`: the parameters and shapes of a model, and the size of signal and gradient in its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import AsJson, Device, emit, note, plural
from allmask.devices import find_device
from allmask.errors import UsageError
from allmask.files import did_you_mean
from allmask.options import GAN_PRESETS, IMAGE_PRESETS
from allmask.presets import PRESETS

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from allmask.nn.init import Signal
    from allmask.tasks.task import ModelFolder

    Forward = Callable[[], Tensor]

EXAMPLES = """
    allmask inspect allmask-en
    allmask inspect allmask-en --text 北京欢迎你 --png signal.png
    allmask inspect --preset bert-base --heads pooler,lm,nsp --shapes-only
    allmask inspect --preset gpt2 --json
    allmask inspect resnet20
    allmask inspect runs/digits
"""
ROWS = 4  # of random tokens, or images, if no text is given
HEADS = ("pooler", "lm", "nsp")


def command(
    model: Annotated[
        str | None,
        Argument(help="A model folder or file, a run, the bundled name allmask-en, org/name, or a preset."),
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            help=f"A new model with this shape: {', '.join(PRESETS)}; resnet18, plain20, …; toy, mlp, dcgan.",
        ),
    ] = None,
    heads: Annotated[
        str | None,
        Option(
            help=f"Heads of the new model, separated by commas: {', '.join(HEADS)}.",
            show_default="pooler for BERT, else lm",
        ),
    ] = None,
    shapes_only: Annotated[
        bool, Option("--shapes-only", help="Measure no signals; a new model then takes no memory.")
    ] = False,
    every: Annotated[bool, Option("--all", help="List each tensor of each layer.")] = False,
    text: Annotated[str | None, Option(help="Text to send through the model.", show_default="random tokens")] = None,
    tokens: Annotated[int, Option(min=1, help="Number of random tokens per row.")] = 64,
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="Random seed: of tokens, a new model, the gradient sent back.")
    ] = 0,
    png: Annotated[
        Path | None, Option(help="Plot signal and gradient per layer into this file.", metavar="FILE")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show the parameters and shapes of a model, and the size of signal and gradient in each layer.

    Sizes are root mean squares. The signal is the output of a layer. The gradient is what arrives at a layer if random
    numbers of size 1 are sent back from the output: it measures how strongly the output depends on that layer.
    """
    if (model is None) == (preset is None):
        raise UsageError("name either a model or a --preset", "allmask inspect allmask-en, or --preset bert-base")
    if shapes_only and (png is not None or text is not None):
        raise UsageError("--shapes-only measures no signals", "leave out --png and --text")
    presets = {name: kind for kind in KINDS.values() for name in kind.presets}
    if preset is None and model in presets and not Path(model).exists():
        preset = model
    if preset is None:
        if heads is not None:
            raise UsageError("--heads is for a --preset; a model has the heads it came with")
        from allmask.tasks.task import ModelFolder

        opened = ModelFolder.open(str(model), device)
        kind = KINDS.get(str(opened.settings.get("model_type")), TEXT)
    elif preset not in presets:
        raise UsageError(f"--preset {preset}: no such preset", did_you_mean(preset, presets))
    else:
        kind = presets[preset]
        if kind is TEXT and text is not None:
            raise UsageError("--text needs a tokenizer, and a new model has none", "leave it out to send random tokens")
        if kind is not TEXT and heads is not None:
            raise UsageError(f"--heads is for language models; {preset} has one output")
    if kind is not TEXT and text is not None:
        raise UsageError("--text is for language models", "leave it out")
    names = None if heads is None else tuple(name.strip() for name in heads.split(",") if name.strip())
    if not set(names or ()) <= set(HEADS):
        raise UsageError(f"--heads {heads}: expected {', '.join(HEADS)}")
    if png is not None and kind.forward is None:
        raise UsageError(f"--png: {preset or model} has no stack of layers to measure")
    import torch

    from allmask.nn.init import signal_report

    rng = torch.Generator().manual_seed(seed)
    if preset is None:
        network = kind.load(opened)
    else:
        network = kind.new(preset, names, None if shapes_only else rng)
        network = network if shapes_only else network.to(find_device(device))
    signals, title = [], kind.title(network)
    if kind.forward is not None and not shapes_only:
        signals = signal_report(network, kind.forward(network, text, tokens, rng), rng)
    if png is not None:
        _plot(signals, title, png)
        note(f"{png}: signal and gradient per layer")
    tensors = [  # each parameter once, also if two modules share it
        {"name": name, "shape": list(p.shape), "parameters": p.numel(), "dtype": str(p.dtype).removeprefix("torch.")}
        for name, p in network.named_parameters()
    ]
    result = {
        "source": preset or model,
        "config": asdict(network.config),
        "heads": sorted(getattr(network, "heads", ())),
        "tensors": tensors,
        "parameters": sum(row["parameters"] for row in tensors),
        "bytes": sum(p.numel() * p.element_size() for p in network.parameters()),
        "signals": [{name: _finite(value) for name, value in asdict(row).items()} for row in signals],
    }
    total = f"{result['parameters']:,} parameters, {result['bytes'] / 1e6:,.1f} MB"
    if kind is TEXT:
        title += f", vocabulary {network.config.vocab_size:,}"
        title += f", with {' and '.join(result['heads'])}" if result["heads"] else ""
    parts = [f"{result['source']}: {title}", _shape_table(tensors, every), total]
    emit(as_json, result, "\n\n".join([*parts, _signal_table(signals)] if signals else parts))


# ---- kinds of models -----------------------------------------------------------------------------------------


def _new_text(preset: str, heads: tuple[str, ...] | None, rng: Generator | None) -> Any:
    import torch

    from allmask.model import Model

    config = PRESETS[preset]()
    names = heads if heads is not None else ("pooler",) if config.is_bert else ("lm",)
    with torch.device("meta" if rng is None else "cpu"):
        return Model(config, names) if rng is None else Model.fresh(config, names, rng=rng)


def _text_title(model: Any) -> str:
    config = model.config
    depth = f"{config.layers} + {config.decoder_layers}" if config.decoder_layers else str(config.layers)
    return f"{config.family}, {depth} layers, {config.width} wide, {config.heads} heads"


def _text_forward(model: Any, text: str | None, tokens: int, rng: Generator) -> Forward:
    """Return a forward pass to the last hidden states, under the model's own mask; a decoder reads the same tokens."""
    import torch

    from allmask.mask import Mask

    limit = model.config.max_positions
    if text is None:
        ids = torch.randint(model.config.vocab_size, (ROWS, min(tokens, limit)), generator=rng)
    else:
        if model.tokenizer is None:
            raise UsageError("--text needs a tokenizer, and this model has none", "leave it out to send random tokens")
        encoded = model.tokenizer.encode(text).ids
        if not encoded:
            raise UsageError("--text is empty")
        if len(encoded) > limit:
            note(f"the text has {len(encoded)} tokens; the first {limit} are used", important=True)
        ids = torch.tensor([encoded[:limit]])
    ids = ids.to(next(model.parameters()).device)
    if not model.config.decoder_layers:
        return lambda: model(ids).hidden
    twice = torch.cat([ids, ids], dim=1)
    mask = Mask.encoder_decoder((torch.arange(twice.shape[1], device=ids.device) >= ids.shape[1]).expand_as(twice))
    return lambda: model(twice, mask).hidden[:, ids.shape[1] :]


def _new_image(preset: str, heads: tuple[str, ...] | None, rng: Generator | None) -> Any:
    from allmask.vision import resnet

    config = resnet.PRESETS[preset]()
    return resnet.shape_of(config) if rng is None else resnet.fresh(config, rng)


def _load_image(opened: ModelFolder) -> Any:
    from allmask.vision import checkpoints

    return opened.placed(checkpoints.load(opened.folder).model)


def _image_title(model: Any) -> str:
    config = model.config
    kind = "plain network" if config.shortcut == "none" else "residual network"
    return f"{kind}, {config.depth} layers, {plural(config.channels, 'channel')}, {config.classes:,} classes"


def _image_forward(model: Any, text: str | None, tokens: int, rng: Generator) -> Forward:
    import torch

    side = 64 if model.config.stem == "large" else 32
    images = torch.randn(ROWS, model.config.channels, side, side, generator=rng).to(next(model.parameters()).device)
    return lambda: model(images)


def _new_gan(preset: str, heads: tuple[str, ...] | None, rng: Generator | None) -> Any:
    import torch

    from allmask.gan import networks

    config = networks.GanConfig(preset, (1,) if preset == "toy" else (1, 28, 28), **networks.PRESETS[preset])
    with torch.device("meta" if rng is None else "cpu"):
        return networks.Gan(config) if rng is None else networks.fresh(config, rng)


def _load_gan(opened: ModelFolder) -> Any:
    from allmask.gan import networks

    return networks.load(opened.folder)


def _gan_title(model: Any) -> str:
    shape = " × ".join(map(str, model.config.shape))
    return f"{model.config.kind} gan, {plural(model.config.noise, 'number')} of noise to examples of {shape}"


@dataclass(frozen=True)
class Kind:
    """How to make, load, describe and run the models of one kind."""

    presets: Collection[str]
    new: Callable[[str, tuple[str, ...] | None, Generator | None], Any]  # without a generator: shapes, no memory
    load: Callable[[ModelFolder], Any]
    title: Callable[[Any], str]
    forward: Callable[[Any, str | None, int, Generator], Forward] | None  # None: there is no stack of layers


TEXT = Kind(PRESETS, _new_text, lambda opened: opened.model, _text_title, _text_forward)
KINDS = {  # by model_type in config.json; all others are language models
    "allmask": TEXT,
    "allmask-resnet": Kind(IMAGE_PRESETS, _new_image, _load_image, _image_title, _image_forward),
    "allmask-gan": Kind(GAN_PRESETS, _new_gan, _load_gan, _gan_title, None),
}


# ---- output --------------------------------------------------------------------------------------------------


def _shape_table(tensors: Sequence[dict[str, Any]], every: bool) -> str:
    """Return name, shape, parameters and dtype; the same tensor of several layers is one line, unless `every`."""
    kinds: dict[tuple, list[int]] = {}
    for row in tensors:
        name = row["name"] if every else re.sub(r"\.\d+\.", ".*.", row["name"])
        kinds.setdefault((name, " × ".join(map(str, row["shape"])), row["dtype"]), []).append(row["parameters"])
    lines = [
        (name, shape if len(sizes) == 1 else f"{len(sizes)} of {shape}", f"{sum(sizes):,}", dtype)
        for (name, shape, dtype), sizes in kinds.items()
    ]
    return _aligned([("tensor", "shape", "parameters", "dtype"), *lines], "<>><")


def _signal_table(signals: Sequence[Signal]) -> str:
    largest = {
        name: max((value for row in signals if math.isfinite(value := getattr(row, name))), default=0.0)
        for name in ("signal", "gradient")
    }
    lines = [
        (
            row.name,
            f"{row.signal:.4g}",
            _bar(row.signal, largest["signal"]),
            f"{row.gradient:.4g}",
            _bar(row.gradient, largest["gradient"]),
            "" if row.weights is None else f"{row.weights:.4g}",
        )
        for row in signals
    ]
    return _aligned([("layer", "signal", "", "gradient", "", "weights"), *lines], "<><><>")


def _aligned(lines: Sequence[Sequence[str]], sides: str) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[f"{cell:{side}{w}}" for cell, side, w in zip(line, sides, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _bar(value: float, largest: float, width: int = 12) -> str:
    """Return a bar in eighths of a character; nothing for NaN and infinity."""
    if not (math.isfinite(value) and largest > 0):
        return ""
    eighths = round(value / largest * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _finite(value: Any) -> Any:
    """Return None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plot(signals: Sequence[Signal], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 0.35 * len(signals) + 2), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, marker in (("signal", "o"), ("gradient", "s")):
        axes.plot([getattr(row, name) for row in signals], marker=marker, markersize=4, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(signals)), [row.name for row in signals], rotation=90, fontsize=7)
    axes.set_ylabel("root mean square")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144, format="png")
