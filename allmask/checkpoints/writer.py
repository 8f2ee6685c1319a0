"""Writing a model folder in the Hugging Face layout: complete and on disk under another name first, then renamed.

A model that BERT's or GPT-2's `config.json` can say is written so, and transformers loads it; any other (a BERT with
norms in front, an encoder–decoder) is written in our own layout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from allmask.checkpoints.families import own
from allmask.checkpoints.labels import labels_to, layout_for
from allmask.checkpoints.names import expected_shapes, heads_in
from allmask.checkpoints.reader import WEIGHTS, check
from allmask.checkpoints.renaming import Family
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.files import replace_folder
from allmask.nn.heads import Labels
from allmask.registry import FAMILIES

_TOKENIZER_FILES = frozenset(
    ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json",
     "added_tokens.json", "spiece.model")
)  # fmt: skip


class SavesItself(Protocol):
    def save(self, folder: Path, /) -> None: ...


def write(
    folder: str | Path, config: Config, tensors: Mapping[str, Tensor], tokenizer: SavesItself | None = None,
    labels: Labels | None = None,
) -> None:  # fmt: skip
    """Write a model folder, whole or not at all; one already there is replaced only when the new one is complete."""
    folder = Path(folder).expanduser().resolve()
    _refuse_foreign(folder)
    settings, stored = _in_layout(folder, config, tensors, labels)
    with replace_folder(folder) as beside:
        fill(beside, settings, stored)
        if tokenizer is not None:
            tokenizer.save(beside)
        if folder.is_dir():
            _carry_over(folder, beside, tokenizer is not None)


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_model_folder(folder):
        raise CheckpointError(f"{folder}: not empty, and not a model folder", "name a new folder, or empty this one")


def _is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in WEIGHTS)


# ---- what to write -------------------------------------------------------------------------------------------------


def _in_layout(
    folder: Path, config: Config, tensors: Mapping[str, Tensor], labels: Labels | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors as the file shall have them."""
    heads = heads_in(tensors, config)
    if ("task" in heads) != (labels is not None):
        raise CheckpointError(f"{folder}: a task head is saved with its labels", "pass labels=model.labels")
    family = FAMILIES.get(config.family)
    layout = None if family is None or labels is None else layout_for(family, config, labels)
    if family is None or not _can_say(family, config) or (layout is None) != (labels is None):
        settings, stored = own.config_to(config, heads, labels), dict(tensors)
    else:
        check(folder, expected_shapes(config, heads, labels), tensors)
        settings = family.config_to(config, heads)
        if layout is not None and labels is not None:
            family, settings = family.with_task(layout), settings | labels_to(layout, labels)
        stored = _their_tensors(family, config, heads, tensors)
    dtype = str(tensors["body.embedding.tokens.weight"].dtype).removeprefix("torch.")
    return settings | {"dtype": dtype}, stored


def _can_say(family: Family, config: Config) -> bool:
    """Whether the family's settings, read back, give the same model."""
    try:
        return family.config_from(family.config_to(config, frozenset())) == config
    except CheckpointError:
        return False


def _their_tensors(
    family: Family, config: Config, heads: frozenset[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Names as transformers expects them: with the prefix where a head stands beside the body."""
    renamed = family.to_theirs(dict(tensors), config.layers, config.decoder_layers)
    if family.second_bias and family.second_bias[1] in renamed and not config.tied:
        renamed[family.second_bias[0]] = renamed[family.second_bias[1]]
    inside = {theirs for theirs, ours in family.table if ours.startswith(("body.", "pooler."))}
    prefix = family.prefix if heads - {"pooler"} else ""
    return {prefix + name if _starred(name) in inside else name: tensor for name, tensor in renamed.items()}


def _starred(name: str) -> str:
    """A name with its layer's number as the table writes it."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


# ---- how to write it -----------------------------------------------------------------------------------------------


def fill(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(_unshared(ready), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, in the words of the library
        raise OSError(str(error)) from error
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # the library makes it private


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Safetensors refuses tensors that share memory, as slices of one matrix do: those after the first are copied."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _carry_over(old: Path, new: Path, has_tokenizer: bool) -> None:
    """Keep what else lies in a model folder (a README, labels): only weights, settings and tokenizer are replaced."""
    for item in old.iterdir():
        old_tokenizer = has_tokenizer and item.name in _TOKENIZER_FILES
        if old_tokenizer or _is_weights(item.name) or (new / item.name).exists():
            continue
        if item.is_dir():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)


def _is_weights(name: str) -> bool:
    endings = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
    return name.startswith(("model", "pytorch_model")) and name.endswith(endings)
