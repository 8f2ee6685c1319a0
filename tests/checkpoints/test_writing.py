"""A folder is written whole or not at all, and never over what is not a model."""

from __future__ import annotations

import os
import stat

import pytest
import torch
import transformers
from safetensors import safe_open

from allmask import files
from allmask.checkpoints import read, write
from allmask.errors import CheckpointError, ResourceError


class Words:
    """A tokenizer as far as writing is concerned."""

    def __init__(self, text="你 好"):
        self.text = text

    def save(self, folder):
        (folder / "vocab.txt").write_text(self.text, encoding="utf-8")


class Fails:
    def save(self, folder):
        raise OSError(28, "No space left on device")


@pytest.fixture
def model(tools, tmp_path):
    tools.randomised(transformers.BertForPreTraining(tools.bert_config())).save_pretrained(tmp_path / "theirs")
    return read(tmp_path / "theirs")


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_new_empty_and_nested_folders(model, tmp_path, tools):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "new", tmp_path / "empty", tmp_path / "a" / "b" / "白切鸡", str(tmp_path / "text")):
        write(place, model.config, model.tensors, Words())
        tools.same(read(place).tensors, model.tensors)
    assert names(tmp_path / "new") == ["config.json", "model.safetensors", "vocab.txt"]
    assert names(tmp_path) == ["a", "empty", "new", "text", "theirs"]  # nothing is left beside


def test_everybody_may_read_what_the_user_lets_them(model, tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "new", model.config, model.tensors)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [tmp_path / "new", *(tmp_path / "new").iterdir()]}
    assert modes == {"new": 0o755, "config.json": 0o644, "model.safetensors": 0o644}


def test_what_is_not_a_model_folder_is_left_alone(model, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.txt").write_text("科学空间")
    (tmp_path / "file").write_text("x")
    for place, words in (("thesis", "not empty, and not a model folder"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=words):
            write(tmp_path / place, model.config, model.tensors)
    assert names(tmp_path / "thesis") == ["draft.txt"] and (tmp_path / "file").read_text() == "x"


def test_a_model_folder_is_replaced_and_what_else_lies_in_it_stays(model, tmp_path, tools):
    folder = tmp_path / "theirs"
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "merges.txt"):
        (folder / name).write_text("stale")
    (folder / "README.md").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.svg").write_text("<svg/>")
    changed = {name: tensor + 1 for name, tensor in model.tensors.items()}
    write(folder, model.config, changed, Words("北 京"))
    tools.same(read(folder).tensors, changed)
    assert names(folder) == ["README.md", "config.json", "model.safetensors", "plots", "vocab.txt"]
    assert (folder / "plots" / "loss.svg").read_text() == "<svg/>" and names(tmp_path) == ["theirs"]
    write(folder, model.config, model.tensors)  # no tokenizer given: the one there stays
    assert (folder / "vocab.txt").read_text(encoding="utf-8") == "北 京"


def test_a_model_may_be_written_over_the_files_it_was_read_from(model, tmp_path, tools):
    """Loaded tensors may still be views of the old file."""
    expected = {name: tensor.clone() for name, tensor in model.tensors.items()}
    write(tmp_path / "theirs", model.config, model.tensors)
    tools.same(model.tensors, expected)
    tools.same(read(tmp_path / "theirs").tensors, expected)


def test_a_link_to_a_model_folder_stays_a_link(model, tmp_path):
    (tmp_path / "latest").symlink_to(tmp_path / "theirs")
    write(tmp_path / "latest", model.config, model.tensors, Words())
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "theirs" / "vocab.txt").is_file()


@pytest.mark.parametrize("step", ["tokenizer", "sync", "exchange", "rename"])
def test_a_failure_at_any_step_leaves_the_old_model(model, tmp_path, tools, monkeypatch, step):
    expected = {name: tensor.clone() for name, tensor in model.tensors.items()}
    changed = {name: tensor + 1 for name, tensor in model.tensors.items()}
    if step == "sync":
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    if step == "exchange":
        monkeypatch.setattr(files, "_exchange", lambda one, other: (_ for _ in ()).throw(OSError(16, "busy")))
    if step == "rename":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)  # as where folders cannot swap names
        rename = os.rename

        def second_fails(source, target):
            if source.name.endswith(".partial"):
                raise OSError(16, "Device or resource busy")
            return rename(source, target)

        monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(ResourceError, match=r"cannot be written: .*(No space|error|busy)") as caught:
        write(tmp_path / "theirs", model.config, changed, Fails() if step == "tokenizer" else None)
    assert caught.value.exit_code == 5
    tools.same(read(tmp_path / "theirs").tensors, expected)
    assert names(tmp_path) == ["theirs"]


def test_an_interrupt_leaves_nothing_behind(model, tmp_path):
    class Interrupted:
        def save(self, folder):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "new", model.config, model.tensors, Interrupted())
    assert names(tmp_path) == ["theirs"]


def test_a_full_disk_inside_safetensors(model, tmp_path, monkeypatch):
    import safetensors.torch
    from safetensors import SafetensorError

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        write(tmp_path / "new", model.config, model.tensors)
    assert names(tmp_path) == ["theirs"]


def test_tensors_that_do_not_fit_their_config_are_not_written(model, tmp_path):
    tensors = dict(model.tensors)
    del tensors["pooler.bias"]
    tensors["lm_head.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "new", model.config, tensors)
    assert "pooler.bias  expected [16]" in str(caught.value)
    assert "lm_head.bias  expected [40], found [3]" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_slices_of_one_matrix_and_turned_views(model, tmp_path, tools):
    """Tensors that share memory or lie transposed are written as what they are."""
    big = torch.randn(3 * 16, 16)
    tensors = dict(model.tensors)
    for n, name in enumerate(("query", "key", "value")):
        tensors[f"body.layers.0.attention.{name}.weight"] = big[16 * n : 16 * n + 16]
    tensors["pooler.weight"] = big[:16].T
    tensors["body.layers.1.attention.query.weight"] = tensors["body.layers.1.attention.key.weight"] = big[8:24]
    write(tmp_path / "new", model.config, tensors)
    tools.same(read(tmp_path / "new").tensors, tensors)


def test_the_mark_that_older_transformers_ask_for(model, tmp_path):
    write(tmp_path / "new", model.config, model.tensors)
    with safe_open(tmp_path / "new" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
