"""`allmask convert`: write a model as a folder that other libraries load, smaller or in another precision if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, note
from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.data import Texts
    from allmask.model import Model

EXAMPLES = """
    allmask convert minilm --out minilm-half --dtype float16
    allmask convert chinese_L-12_H-768_A-12 --to hf --out bert-base-chinese
    allmask convert bert-base-chinese --out small --keep-tokens corpus.txt --json
"""


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder or file, the bundled name minilm, or org/name.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write: a new one, or an empty one.")],
    to: Annotated[Literal["hf"], typer.Option(help="The layout: hf is what Hugging Face transformers loads.")] = "hf",
    keep_tokens: Annotated[
        Path | None,
        typer.Option(help="A text file or a folder of them: keep only the tokens it uses, and the special ones."),
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="For --keep-tokens: the field of a record, or the column, that is the text.")
    ] = "text",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="The precision of the written weights.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write MODEL as a folder that other libraries load: all of it, or nothing when something fails."""
    _refuse_occupied(out)
    import torch

    from allmask.data.sentences import Reading, Texts
    from allmask.model import load

    texts = None if keep_tokens is None else Texts([keep_tokens], Reading(text_field))
    loaded = load(model, dtype=getattr(torch, dtype))
    written = loaded if texts is None else _prune(loaded, model, texts)
    written.save(out)
    result = {"model": model, "out": str(out), "layout": _layout(out, to), "dtype": dtype, **_sizes(loaded, written)}
    emit(as_json, result, _in_words(result))


def _refuse_occupied(out: Path) -> None:
    """Before anything is loaded: an existing model is never overwritten by a slip of the hand."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: already there", "name a new folder, or remove this one first")


def _prune(model: Model, name: str, texts: Texts) -> Model:
    from allmask.text import propose_keep_tokens

    if model.tokenizer is None:
        raise UsageError(
            f"{name}: has no tokenizer, so --keep-tokens cannot tell which tokens {texts.files[0]} uses",
            "put tokenizer.json or vocab.txt beside the weights",
        )
    note(f"reading {', '.join(map(str, texts.files))}")
    return model.keep_tokens(propose_keep_tokens(model.tokenizer, texts))


def _layout(folder: Path, asked: str) -> str:
    """What was really written: a model that transformers has no name for comes out in allmask's own layout."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    if kind != "allmask":
        return asked
    note(f"{folder}: written in allmask's own layout, as other libraries have no such model")
    return kind


def _sizes(loaded: Model, written: Model) -> dict[str, int]:
    before, after = (sum(p.numel() * p.element_size() for p in model.parameters()) for model in (loaded, written))
    return {
        "parameters": sum(p.numel() for p in written.parameters()),
        "bytes": after,
        "vocab_size": written.config.vocab_size,
        "vocab_size_before": loaded.config.vocab_size,
        "bytes_saved": before - after,
    }


def _in_words(result: dict[str, Any]) -> str:
    text = f"{result['out']}: {result['parameters']:,} parameters in {result['dtype']}, {_megabytes(result['bytes'])}"
    if result["vocab_size"] < result["vocab_size_before"]:
        text += f"\nvocabulary {result['vocab_size_before']:,} → {result['vocab_size']:,}"
        text += f", {_megabytes(result['bytes_saved'])} saved"
    return text


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
