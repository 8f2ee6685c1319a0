"""`allmask inspect`: the parameters and shapes of a model, and the size of signal and gradient in its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmask.cli import emit, many, note
from allmask.errors import UsageError
from allmask.files import did_you_mean
from allmask.presets import PRESETS

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from allmask.config import Config
    from allmask.nn.init import Signal

EXAMPLES = """
    allmask inspect minilm
    allmask inspect minilm --text 北京欢迎你 --png signal.png
    allmask inspect --preset bert-base --heads pooler,lm,nsp --shapes-only
    allmask inspect --preset gpt2 --json
    allmask inspect resnet20
    allmask inspect runs/digits
"""
ROWS = 4  # of random tokens, or images, when no text is given
HEADS = ("pooler", "lm", "nsp")


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model folder, run or file, the bundled name minilm, org/name, or the name of a preset."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"A fresh model instead: {', '.join(PRESETS)}; resnet18, plain20 and others; toy, mlp, dcgan.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads of the fresh model: some of pooler,lm,nsp. [default: the family's]")
    ] = None,
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Skip the signals; a fresh model then takes no memory.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="One line for every tensor, not for every kind of it.")] = False,
    text: Annotated[str | None, typer.Option(help="Send this text through the model, not random tokens.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many random tokens a row.")] = 64,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed: of tokens, a fresh model, the gradient sent back.")
    ] = 0,
    png: Annotated[Path | None, typer.Option(help="Plot signal and gradient per layer into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show a model's parameters and shapes, and the size of signal and gradient layer by layer.

    Sizes are root mean squares. The signal is what leaves a layer; the gradient is what comes back to it when random
    numbers of size 1 are sent back from the output: how strongly the output depends on that layer.
    """
    if (model is None) == (preset is None):
        raise UsageError("name either a model or a --preset", "allmask inspect minilm, or --preset bert-base")
    if shapes_only and (png is not None or text is not None):
        raise UsageError("--shapes-only measures nothing that --png or --text would need")
    if preset is None and not Path(str(model)).exists() and (model in PRESETS or _kind_of(str(model)) is not Texts):
        preset = model
    if preset is not None and _kind_of(preset) is Texts and preset not in PRESETS:
        raise UsageError(f"--preset {preset}: no such preset", did_you_mean(preset, PRESETS))
    import torch

    rng = torch.Generator().manual_seed(seed)
    if preset is not None:
        found = _kind_of(preset).fresh(preset, heads, None if shapes_only else rng)
    elif heads is not None:
        raise UsageError("--heads is for a --preset; a model has the heads it came with")
    else:
        found = _load(str(model))
    signals = [] if shapes_only else found.signals(text, tokens, rng)
    if png is not None:
        if not signals:
            raise UsageError(f"--png: {preset or model} has no stack of layers to measure")
        _plot(signals, found.title, png)
        note(f"{png}: signal and gradient per layer")
    tensors = _tensors(found.network)
    result = {
        "source": preset or model,
        "config": asdict(found.config),
        "heads": sorted(getattr(found.network, "heads", ())),
        "tensors": tensors,
        "parameters": sum(row["parameters"] for row in tensors),
        "bytes": sum(p.numel() * p.element_size() for p in found.network.parameters()),
        "signals": [{name: _finite(value) for name, value in asdict(row).items()} for row in signals],
    }
    emit(as_json, result, _in_words(result, found, signals, every))


# ---- kinds of models ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """A language model of this library."""

    network: Any
    config: Any

    @classmethod
    def fresh(cls, preset: str, heads: str | None, rng: Generator | None) -> Texts:
        """A new model of this preset; without a generator only its shapes, on no device."""
        import torch

        from allmask.model import Model

        config = PRESETS[preset]()
        names = _heads(config, heads)
        with torch.device("meta" if rng is None else "cpu"):
            return cls(Model(config, names) if rng is None else Model.fresh(config, names, rng=rng), config)

    @classmethod
    def load(cls, folder: Path) -> Texts:
        from allmask.model import load

        model = load(folder)
        return cls(model, model.config)

    @property
    def title(self) -> str:
        config = self.config
        depth = f"{config.layers} + {config.decoder_layers}" if config.decoder_layers else str(config.layers)
        return f"{config.family}, {depth} layers, {config.width} wide, {config.heads} heads"

    @property
    def details(self) -> str:
        heads = sorted(self.network.heads)
        return f", vocabulary {self.config.vocab_size:,}" + (f", with {' and '.join(heads)}" if heads else "")

    def signals(self, text: str | None, tokens: int, rng: Generator) -> list[Signal]:
        import torch

        from allmask.nn.init import signal_report

        limit = self.config.max_positions
        if text is None:
            ids = torch.randint(self.config.vocab_size, (ROWS, min(tokens, limit)), generator=rng)
        else:
            ids = _encode(self.network, text, limit)
        return signal_report(self.network, _pass(self.network, ids), rng)


@dataclass(frozen=True)
class Images:
    """A residual network."""

    network: Any
    config: Any
    details = ""

    @classmethod
    def fresh(cls, preset: str, heads: str | None, rng: Generator | None) -> Images:
        from allmask.vision import resnet

        _expect_no_heads(heads, preset)
        if preset not in resnet.PRESETS:
            raise UsageError(f"--preset {preset}: no such preset", did_you_mean(preset, resnet.PRESETS))
        config = resnet.PRESETS[preset]()
        return cls(resnet.shape_of(config) if rng is None else resnet.fresh(config, rng), config)

    @classmethod
    def load(cls, folder: Path) -> Images:
        from allmask.vision import checkpoints

        model = checkpoints.load(folder).model
        return cls(model, model.config)

    @property
    def title(self) -> str:
        kind = "plain network" if self.config.shortcut == "none" else "residual network"
        channels, classes = many(self.config.channels, "channel"), f"{self.config.classes:,} classes"
        return f"{kind}, {self.config.depth} layers, {channels}, {classes}"

    def signals(self, text: str | None, tokens: int, rng: Generator) -> list[Signal]:
        import torch

        from allmask.nn.init import signal_report

        _expect_no_text(text)
        side = 64 if self.config.stem == "large" else 32
        images = torch.randn(ROWS, self.config.channels, side, side, generator=rng)
        return signal_report(self.network, lambda: self.network(images), rng)


@dataclass(frozen=True)
class Games:
    """A generator and a discriminator; they have no stack of layers to measure."""

    network: Any
    config: Any
    details = ""

    @classmethod
    def fresh(cls, preset: str, heads: str | None, rng: Generator | None) -> Games:
        import torch

        from allmask.gan import networks

        _expect_no_heads(heads, preset)
        shape = (1,) if preset == "toy" else (1, 28, 28)
        config = networks.GanConfig(preset, shape, **networks.PRESETS[preset])
        with torch.device("meta" if rng is None else "cpu"):
            return cls(networks.Gan(config) if rng is None else networks.fresh(config, rng), config)

    @classmethod
    def load(cls, folder: Path) -> Games:
        from allmask.gan import networks

        model = networks.load(folder)
        return cls(model, model.config)

    @property
    def title(self) -> str:
        shape = " × ".join(map(str, self.config.shape))
        return f"{self.config.kind} gan, {many(self.config.noise, 'number')} of noise to examples of {shape}"

    def signals(self, text: str | None, tokens: int, rng: Generator) -> list[Signal]:
        _expect_no_text(text)
        return []


Kind = type[Texts] | type[Images] | type[Games]
KINDS: dict[str, Kind] = {r"(resnet|plain)\d+": Images, "toy|mlp|dcgan": Games}  # by the name of a preset; else Texts
SAVED: dict[str, Kind] = {"allmask-resnet": Images, "allmask-gan": Games}  # by config.json's model_type; else Texts


def _kind_of(preset: str) -> Kind:
    return next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, preset)), Texts)


def _load(source: str) -> Texts | Images | Games:
    from allmask.checkpoints import resolve
    from allmask.checkpoints.config_json import read_json

    folder = resolve(source)
    settings = folder / "config.json"
    saved = read_json(settings).get("model_type") if settings.is_file() else None
    return SAVED.get(str(saved), Texts).load(folder)


def _heads(config: Config, asked: str | None) -> tuple[str, ...]:
    """The heads asked for; else what the family's own encoder or language model has."""
    if asked is None:
        return ("pooler",) if config.family == "bert" else ("lm",)
    names = tuple(name.strip() for name in asked.split(",") if name.strip())
    if any(name not in HEADS for name in names):
        raise UsageError(f"--heads {asked}: expected {', '.join(HEADS)}")
    return names


def _expect_no_heads(heads: str | None, preset: str) -> None:
    if heads is not None:
        raise UsageError(f"--heads is for language models; {preset} has one output")


def _expect_no_text(text: str | None) -> None:
    if text is not None:
        raise UsageError("--text is for language models", "leave it out")


# ---- what is measured -----------------------------------------------------------------------------------------


def _tensors(network: nn.Module) -> list[dict[str, Any]]:
    """Every parameter once, also where two modules share it."""
    return [
        {"name": name, "shape": list(p.shape), "parameters": p.numel(), "dtype": str(p.dtype).removeprefix("torch.")}
        for name, p in network.named_parameters()
    ]


def _encode(network: nn.Module, text: str, limit: int) -> Tensor:
    import torch

    tokenizer = getattr(network, "tokenizer", None)
    if tokenizer is None:
        raise UsageError("--text needs a tokenizer, and this model has none", "leave --text out to send random tokens")
    ids = tokenizer.encode(text).ids
    if not ids:
        raise UsageError("--text is empty")
    if len(ids) > limit:
        note(f"the text has {len(ids)} tokens; the first {limit} are used")
    return torch.tensor([ids[:limit]])


def _pass(network: Any, ids: Tensor) -> Callable[[], Tensor]:
    """One forward pass to the last hidden states, under the family's own mask; an encoder–decoder copies its input."""
    import torch

    from allmask.mask import Mask

    if not network.config.decoder_layers:
        return lambda: network(ids).hidden
    twice = torch.cat([ids, ids], dim=1)
    mask = Mask.encoder_decoder((torch.arange(twice.shape[1]) >= ids.shape[1]).expand_as(twice))
    return lambda: network(twice, mask).hidden[:, ids.shape[1] :]


# ---- words and pictures ---------------------------------------------------------------------------------------


def _in_words(result: dict[str, Any], found: Texts | Images | Games, signals: Sequence[Signal], every: bool) -> str:
    total = f"{result['parameters']:,} parameters, {result['bytes'] / 1e6:,.1f} MB"
    parts = [f"{result['source']}: {found.title}{found.details}", _shape_table(result["tensors"], every), total]
    return "\n\n".join([*parts, _signal_table(signals)] if signals else parts)


def _shape_table(tensors: Sequence[dict[str, Any]], every: bool) -> str:
    """Name, shape, parameters, dtype; tensors that differ in the number of their layer only share a line."""
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
    top_signal, top_gradient = (_largest([getattr(row, name) for row in signals]) for name in ("signal", "gradient"))
    lines = [
        (
            row.name,
            f"{row.signal:.4g}",
            _bar(row.signal, top_signal),
            f"{row.gradient:.4g}",
            _bar(row.gradient, top_gradient),
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
    """A bar in eighths of a cell; empty for NaN and infinity."""
    if not (math.isfinite(value) and largest > 0):
        return ""
    eighths = round(value / largest * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _finite(value: Any) -> Any:
    """JSON has no infinity; a broken model is worth reporting all the same."""
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
