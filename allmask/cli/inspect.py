"""`allmask inspect`: the parameters and shapes of a model, and what becomes of signal and gradient in its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmask.cli import emit, note
from allmask.config import PRESETS, Config
from allmask.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from allmask.initialise import Signal

EXAMPLES = """
    allmask inspect minilm
    allmask inspect minilm --text 北京欢迎你 --png signal.png
    allmask inspect --preset bert-base --heads pooler,lm,nsp --shapes-only
    allmask inspect --preset gpt2 --json
"""
ROWS = 4  # of random tokens, when no text is given
HEADS = ("pooler", "lm", "nsp")


def command(
    model: Annotated[
        str | None, typer.Argument(help="A model folder or file, the bundled name minilm, or org/name.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"A fresh model instead: {', '.join(PRESETS)}.", show_default=False)
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
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Seed of all that is random: tokens, a fresh model, the gradient sent back."
        ),
    ] = 0,
    png: Annotated[Path | None, typer.Option(help="Plot signal and gradient per layer into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show a model's parameters and shapes, and the size of signal and gradient layer by layer.

    Sizes are root mean squares. The signal is what leaves a layer; the gradient is what comes back to it when random
    numbers of size 1 are sent back from the output: how strongly the output hangs on that layer.
    """
    if (model is None) == (preset is None):
        raise UsageError("name either a model or a --preset", "allmask inspect minilm, or --preset bert-base")
    if shapes_only and (png is not None or text is not None):
        raise UsageError("--shapes-only measures nothing that --png or --text would need")
    import torch

    rng = torch.Generator().manual_seed(seed)
    if preset is not None:
        network, config = _fresh(preset, heads, None if shapes_only else rng)
    else:
        network, config = _loaded(str(model), heads)
    signals = [] if shapes_only else _signals(network, config, text, tokens, rng)
    if png is not None:
        _plot(signals, _title(config), png)
        note(f"{png}: signal and gradient per layer")
    tensors = _tensors(network)
    result = {
        "source": preset or model,
        "config": asdict(config),
        "heads": sorted(getattr(network, "heads", ())),
        "tensors": tensors,
        "parameters": sum(row["parameters"] for row in tensors),
        "bytes": sum(p.numel() * p.element_size() for p in network.parameters()),
        "signals": [{name: _finite(value) for name, value in asdict(row).items()} for row in signals],
    }
    emit(as_json, result, _in_words(result, config, signals, every))


# ---- the model ------------------------------------------------------------------------------------------------


def _loaded(source: str, heads: str | None) -> tuple[nn.Module, Config]:
    from allmask.model import load

    if heads is not None:
        raise UsageError("--heads is for a --preset; a model has the heads it came with")
    model = load(source)
    return model, model.config


def _fresh(preset: str, heads: str | None, rng: Any) -> tuple[nn.Module, Config]:
    """A new model of this preset; without a generator only its shapes, on no device."""
    import torch

    config = _preset(preset)
    with torch.device("meta" if rng is None else "cpu"):
        return _build(config, _heads(config, heads), rng), config


def _build(config: Config, heads: Sequence[str], rng: Any) -> nn.Module:
    from allmask.model import Model

    return Model(config, heads) if rng is None else Model.fresh(config, heads, rng=rng)


def _preset(name: str) -> Config:
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(PRESETS)}"
        raise UsageError(f"--preset {name}: no such preset", hint)
    return PRESETS[name]()


def _heads(config: Config, asked: str | None) -> tuple[str, ...]:
    """The heads asked for; else what the family's own encoder or language model has."""
    if asked is None:
        return ("pooler",) if config.family == "bert" else ("lm",)
    names = tuple(name.strip() for name in asked.split(",") if name.strip())
    unknown = [name for name in names if name not in HEADS]
    if unknown:
        raise UsageError(f"--heads {asked}: expected {', '.join(HEADS)}")
    return names


# ---- what is measured -----------------------------------------------------------------------------------------


def _tensors(network: nn.Module) -> list[dict[str, Any]]:
    """Every parameter once, also where two modules share it."""
    return [
        {"name": name, "shape": list(p.shape), "parameters": p.numel(), "dtype": str(p.dtype).removeprefix("torch.")}
        for name, p in network.named_parameters()
    ]


def _signals(network: nn.Module, config: Config, text: str | None, tokens: int, rng: Any) -> list[Signal]:
    import torch

    from allmask.initialise import signal_report

    if text is None:
        shape = (ROWS, min(tokens, config.max_positions))
        ids = torch.randint(config.vocabulary, shape, generator=rng)
    else:
        ids = _encode(network, text, config.max_positions)
    return signal_report(network, _pass(network, ids), rng)


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

    from allmask.masks import Mask

    if not network.config.decoder_layers:
        return lambda: network(ids).hidden
    twice = torch.cat([ids, ids], dim=1)
    mask = Mask.encoder_decoder((torch.arange(twice.shape[1]) >= ids.shape[1]).expand_as(twice))
    return lambda: network(twice, mask).hidden[:, ids.shape[1] :]


# ---- words and pictures ---------------------------------------------------------------------------------------


def _in_words(result: dict[str, Any], config: Config, signals: Sequence[Signal], every: bool) -> str:
    heads = f", with {' and '.join(result['heads'])}" if result["heads"] else ""
    total = f"{result['parameters']:,} parameters, {result['bytes'] / 1e6:,.1f} MB"
    title = f"{result['source']}: {_title(config)}, vocabulary {config.vocabulary:,}{heads}"
    parts = [title, _shape_table(result["tensors"], every), total]
    return "\n\n".join([*parts, _signal_table(signals)] if signals else parts)


def _title(config: Config) -> str:
    depth = f"{config.layers} + {config.decoder_layers}" if config.decoder_layers else str(config.layers)
    return f"{config.family}, {depth} layers, {config.width} wide, {config.heads} heads"


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
    """A bar in eighths of a cell; nothing for a number that is none."""
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
