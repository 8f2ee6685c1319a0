"""`allmask convert`: write a model as a folder that other libraries load, optionally with fewer tokens or in fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from allmask.cli import AsJson, ModelName, emit, note
from allmask.errors import DataError, UsageError

EXAMPLES = """
    allmask convert allmask-en --out half --dtype float16
    allmask convert chinese_L-12_H-768_A-12 --to hf --out bert-base-chinese
    allmask convert bert-base-chinese --out small --keep-tokens corpus.txt --json
"""


def command(
    model: ModelName,
    out: Annotated[Path, Option(help="Folder to write: a new or an empty one.", metavar="FOLDER")],
    to: Annotated[Literal["hf"], Option(help="Layout: hf is that of Hugging Face transformers.")] = "hf",
    keep_tokens: Annotated[
        Path | None,
        Option(
            help="Keep only the tokens that this text file or folder uses, and the special tokens.", show_default="all"
        ),
    ] = None,
    text_field: Annotated[str, Option(help="--keep-tokens: field of a record that holds the text.")] = "text",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], Option(help="Precision of the written weights.")
    ] = "float32",
    as_json: AsJson = False,
) -> None:
    """Write MODEL as a folder that other libraries load. The folder appears when it is complete."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UsageError(f"{out}: already there", "name a new folder, or remove this one first")
    if keep_tokens is not None and not keep_tokens.exists():
        raise DataError(f"{keep_tokens}: no such file", "check the path")
    from allmask.checkpoints import resolve

    folder = resolve(model)
    import torch

    from allmask.data.sentences import Reading, Texts
    from allmask.model import load_folder
    from allmask.text import propose_keep_tokens

    loaded = written = load_folder(folder, model, getattr(torch, dtype))
    if keep_tokens is not None:
        texts = Texts([keep_tokens], Reading(text_field))
        if loaded.tokenizer is None:
            raise UsageError(
                f"{model}: has no tokenizer, so the tokens that {keep_tokens} uses are unknown",
                "put tokenizer.json or vocab.txt in the folder of the weights",
            )
        note(f"reading {', '.join(map(str, texts.files))}")
        written = loaded.keep_tokens(propose_keep_tokens(loaded.tokenizer, texts))
    written.save(out)
    is_ours = json.loads((out / "config.json").read_text(encoding="utf-8"))["model_type"] == "allmask"
    if is_ours:
        note(f"{out}: written in allmask's own layout, as other libraries have no such model", important=True)
    before, after = (sum(p.numel() * p.element_size() for p in each.parameters()) for each in (loaded, written))
    result = {
        "model": model, "out": str(out), "layout": "allmask" if is_ours else to, "dtype": dtype,
        "parameters": sum(p.numel() for p in written.parameters()), "bytes": after,
        "vocab_size": written.config.vocab_size, "vocab_size_before": loaded.config.vocab_size,
        "bytes_saved": before - after,
    }  # fmt: skip
    text = f"{out}: {result['parameters']:,} parameters in {dtype}, {after / 1e6:,.1f} MB"
    if written.config.vocab_size < loaded.config.vocab_size:
        text += f"\nvocabulary {loaded.config.vocab_size:,} → {written.config.vocab_size:,}"
        text += f", {(before - after) / 1e6:,.1f} MB saved"
    emit(as_json, result, text)
