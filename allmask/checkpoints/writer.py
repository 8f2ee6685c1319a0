"""Write a model folder in the Hugging Face layout, first under a temporary name, which is then renamed.

A model that its family's `config.json` can describe is written in that layout, and transformers loads it. Any other
(a BERT with norms in front, the encoder–decoder of 2017) is written in our own layout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allmask.checkpoints.families import own
from allmask.checkpoints.labels import labels_to, layout_for
from allmask.checkpoints.reader import WEIGHTS, check
from allmask.checkpoints.renaming import Family
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.files import MANIFEST, replace_folder
from allmask.nn.build import empty_parameters, heads_in
from allmask.nn.heads import Labels
from allmask.registry import FAMILIES
from allmask.text import Tokenizer
from allmask.text.save import FILES as TOKENIZER_FILES


def write(
    folder: str | Path, config: Config, tensors: Mapping[str, Tensor], tokenizer: Tokenizer | None = None,
    labels: Labels | None = None,
) -> None:  # fmt: skip
    """Write a model folder. An existing one is replaced only after the new one is complete."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file", "name a new folder")
    is_model = (folder / "config.json").is_file() and any((folder / name).is_file() for name in WEIGHTS)
    if folder.is_dir() and any(folder.iterdir()) and not is_model:
        raise CheckpointError(f"{folder}: not empty, and not a model folder", "name a new folder, or empty this one")
    settings, stored = _in_layout(folder, config, tensors, labels)
    with replace_folder(folder) as beside:
        fill(beside, settings, stored)
        if tokenizer is not None:
            family = FAMILIES.get(config.family)
            tokenizer.save(beside, **({} if family is None else family.tokenizer))
        if folder.is_dir():
            _carry_over(folder, beside, tokenizer is not None)


def settings_of(config: Config, tensors: Mapping[str, Tensor], labels: Labels | None = None) -> dict[str, Any]:
    """Return what config.json says about a model."""
    return _in_layout(Path("model"), config, tensors, labels)[0]


def _in_layout(
    folder: Path, config: Config, tensors: Mapping[str, Tensor], labels: Labels | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert to the family's layout, or to our own if the family cannot describe the model."""
    heads = heads_in(tensors, config)
    if ("task" in heads) != (labels is not None):
        raise CheckpointError(f"{folder}: a task head must be saved with its labels", "pass labels=model.labels")
    family = FAMILIES.get(config.family)
    layout = None if family is None or labels is None else layout_for(family, config, labels)
    nameless = family is None or not heads - {"task"} <= set(family.may_lack)
    if family is None or nameless or not _describes(family, config) or (layout is None) != (labels is None):
        settings, stored = own.config_to(config, heads, labels), dict(tensors)
    else:
        check(folder, empty_parameters(config, heads, labels), tensors)
        settings = family.config_to(config, heads)
        if layout is not None and labels is not None:
            family, settings = family.with_task(layout), settings | labels_to(layout, labels)
        stored = _their_tensors(family, config, heads, tensors)
    dtype = str(tensors["body.embedding.tokens.weight"].dtype).removeprefix("torch.")
    return settings | {"dtype": dtype}, stored


def _describes(family: Family, config: Config) -> bool:
    """Whether the family's settings, when read again, give the same Config."""
    try:
        return family.config_from(family.config_to(config, frozenset())) == config
    except CheckpointError:
        return False


def _their_tensors(
    family: Family, config: Config, heads: frozenset[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename as transformers expects: names of the body have the prefix if there is a head other than the pooler."""
    renamed = family.to_theirs(dict(tensors), config.layers, config.decoder_layers)
    if family.second_bias and family.second_bias[1] in renamed and not config.tied:
        renamed[family.second_bias[0]] = renamed[family.second_bias[1]]
    names = family.pairs(config.layers, config.decoder_layers)
    inside = {theirs for theirs, ours in names.items() if ours.startswith(("body.", "pooler."))}
    prefix, constants = family.prefix if heads - {"pooler"} else "", family.constants(config)
    renamed, inside = renamed | constants, inside | constants.keys()
    return {prefix + name if name in inside else name: tensor for name, tensor in renamed.items()}


def fill(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        ready[name] = tensor.clone() if memory in seen else tensor  # safetensors refuses tensors that share memory
        seen.add(memory)
    try:
        save_file(ready, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # the disk is full, for example
        raise OSError(str(error)) from error
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # safetensors makes it private


def _carry_over(old: Path, new: Path, has_tokenizer: bool) -> None:
    """Copy all other files of the old folder (a README, plots), but not weights, settings or a replaced tokenizer.

    The checksums of the old files would be wrong for the new ones.
    """
    endings = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
    for item in old.iterdir():
        is_weights = item.name.startswith(("model", "pytorch_model")) and item.name.endswith(endings)
        old_tokenizer = has_tokenizer and item.name in TOKENIZER_FILES
        if is_weights or old_tokenizer or item.name == MANIFEST or (new / item.name).exists():
            continue
        if item.is_dir():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)
