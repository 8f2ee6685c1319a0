"""`allmask convert`: write a model as a folder that other libraries load, optionally with fewer tokens or in fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from allmask.cli import AsJson, ModelName, emit, note
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.export import expect_packages

if TYPE_CHECKING:
    from allmask.model import Model
    from allmask.tasks.task import ModelFolder

EXAMPLES = """
    allmask convert allmask-en --out half --dtype float16
    allmask convert chinese_L-12_H-768_A-12 --to hf --out bert-base-chinese
    allmask convert bert-base-chinese --out small --keep-tokens corpus.txt --json
    allmask convert runs/reviews --to onnx --out reviews-onnx
    allmask convert allmask-zh --to onnx --encoder --int8 --out vectors-zh
    allmask convert runs/de-en --to ctranslate2 --out de-en-ct2
"""


def command(
    model: ModelName,
    out: Annotated[Path, Option(help="Folder to write: a new or an empty one.", metavar="FOLDER")],
    to: Annotated[
        Literal["hf", "onnx", "ctranslate2"],
        Option(help="Layout: hf is that of Hugging Face transformers; onnx and ctranslate2 are for other runtimes."),
    ] = "hf",
    encoder: Annotated[
        bool, Option("--encoder", help="onnx, ctranslate2: only what makes vectors of texts, of a model that writes.")
    ] = False,
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
    int8: Annotated[bool, Option("--int8", help="onnx, ctranslate2: quantize the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write MODEL as a folder that other libraries load. The folder appears when it is complete.

    onnx: an encoder of texts, a classifier, a tagger or an answerer, as one graph for ONNX Runtime. ctranslate2: a BERT
    as an encoder, a GPT-2, an encoder–decoder. What a format cannot hold is refused.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UsageError(f"{out}: already there", "name a new folder, or remove this one first")
    if keep_tokens is not None and not keep_tokens.exists():
        raise DataError(f"{keep_tokens}: no such file", "check the path")
    if to == "hf" and (int8 or encoder):
        raise UsageError(f"{'--int8' if int8 else '--encoder'}: for --to onnx and ctranslate2", "leave it out")
    if dtype != "float32" and int8:
        raise UsageError(f"--int8 and --dtype {dtype} exclude each other", "leave one of them out")
    if dtype != "float32" and to == "onnx":
        raise UsageError(f"--dtype {dtype}: ONNX graphs are written in float32 or int8", "leave it out, or --int8")
    expect_packages(to, int8)
    from allmask.tasks.task import ModelFolder

    opened = ModelFolder.open(model)
    import torch

    from allmask.data.sentences import Reading, Texts
    from allmask.model import load_folder
    from allmask.runs.folder import save_model
    from allmask.text import propose_keep_tokens

    loaded = written = load_folder(opened.folder, model, getattr(torch, dtype) if to == "hf" else None)
    written = written.standard()
    if to != "hf":
        written = _exportable(opened, written, to, encoder)
    if keep_tokens is not None:
        texts = Texts([keep_tokens], Reading(text_field))
        if loaded.tokenizer is None:
            raise UsageError(
                f"{model}: has no tokenizer, so the tokens that {keep_tokens} uses are unknown",
                "put tokenizer.json or vocab.txt in the folder of the weights",
            )
        note(f"reading {', '.join(map(str, texts.files))}")
        written = written.keep_tokens(propose_keep_tokens(loaded.tokenizer, texts))
    result = {
        "model": model, "out": str(out), "layout": to, "dtype": "int8" if int8 else dtype,
        "parameters": sum(p.numel() for p in written.parameters()),
        "vocab_size": written.config.vocab_size, "vocab_size_before": loaded.config.vocab_size,
    }  # fmt: skip
    if to == "hf":
        save_model(written, next(iter(opened.saved_tasks), None), out, opened.saved_tasks[1:])
        if json.loads((out / "config.json").read_text(encoding="utf-8"))["model_type"] == "allmask":
            result["layout"] = "allmask"
            note(f"{out}: written in allmask's own layout, as other libraries have no such model", important=True)
        before, after = (sum(p.numel() * p.element_size() for p in each.parameters()) for each in (loaded, written))
        result |= {"bytes": after, "bytes_saved": before - after}
    else:
        result |= _export(opened, written, to, out, dtype, int8)
        after = result["bytes"]
    text = f"{out}: {result['parameters']:,} parameters in {result['dtype']}, {after / 1e6:,.1f} MB"
    if written.config.vocab_size < loaded.config.vocab_size:
        text += f"\nvocabulary {loaded.config.vocab_size:,} → {written.config.vocab_size:,}"
        text += f", {result['bytes_saved'] / 1e6:,.1f} MB saved" if "bytes_saved" in result else ""
    if "use" in result:
        text += f"\nuse it: {result['use']}"
    emit(as_json, result, text)


# ---- other runtimes --------------------------------------------------------------------------------------------


def _exportable(opened: ModelFolder, model: Model, to: str, encoder: bool) -> Model:
    """Return what of the model is written, or refuse it and say why."""
    from allmask.export import ctranslate2_spec, onnx_graph

    source, config = opened.source, model.config
    task = next((task.name for task in opened.saved_tasks if hasattr(task, "decoding")), None)
    if encoder:
        model = model.without("lm", "nsp", "task")
    elif model.labels is None and config.is_bert and task is not None:
        raise CheckpointError(
            f'{source}: writes ("{task}") by a BERT under the prefix mask, which neither ONNX Runtime nor CTranslate2 '
            "decodes with",
            "--encoder writes the part that makes vectors of texts; allmask generate writes with the model",
        )
    elif to == "onnx" and model.labels is None and config.family == "gpt2" and model.lm_head is not None:
        raise CheckpointError(
            f"{source}: a GPT-2 writes step by step with a cache, which this ONNX graph does not have",
            "--to ctranslate2 writes with it; --encoder writes the part that makes vectors of texts",
        )
    module = onnx_graph if to == "onnx" else ctranslate2_spec
    module.expect_convertible(model, source)
    if to == "ctranslate2" and not config.is_bert:
        return model
    if model.labels is None and "lm" in model.heads:
        note(f"{source}: written as an encoder, without its language model head", important=True)
    return model.without("lm", "nsp")


def _export(opened: ModelFolder, model: Model, to: str, out: Path, dtype: str, int8: bool) -> dict[str, Any]:
    from allmask.checkpoints.writer import settings_of
    from allmask.export import ctranslate2_spec, onnx_graph
    from allmask.files import new_folder
    from allmask.tasks.embed import pool_of
    from allmask.training.checkpoint import sign

    with new_folder(out) as folder:
        if to == "onnx":
            onnx_graph.write(model, folder, pool_of(opened.folder), int8)
            settings = settings_of(model.config, model.state_dict(), model.labels)
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            use = f'onnxruntime.InferenceSession("{out / onnx_graph.FILE}")'
        else:
            use = f'ctranslate2.{ctranslate2_spec.write(model, folder, dtype, int8)}("{out}")'
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        sign(folder)
        size = sum(file.stat().st_size for file in folder.glob("model.*"))
    return {"bytes": size, "use": use}
