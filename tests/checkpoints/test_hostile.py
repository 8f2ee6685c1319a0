"""Broken files and files made to harm: one kind of error, exit code 4, nothing allocated, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from allmask.checkpoints import read
from allmask.checkpoints.formats import weights
from allmask.errors import CheckpointError


def refused(path, *words):
    """Reading fails in our words, with the file's name and without taking memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    return str(caught.value)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# ---- safetensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_safetensors(bert_folder, keep):
    file = bert_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(bert_folder, "model.safetensors: cannot be read", "fetch it again")


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**12) + b"{}",
        with_header(b"not json"),
        with_header(b"[]"),
        with_header(b'{"a": 5}'),
        with_header(json.dumps({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}).encode(), bytes(12)),
        with_header(json.dumps({"a": entry([2], 0, 800)}).encode(), bytes(8)),
        with_header(json.dumps({"a": entry([10**12, 10**12], 0, 8)}).encode(), bytes(8)),
        with_header(json.dumps({"a": entry([-2], 0, 8)}).encode(), bytes(8)),
        with_header(json.dumps({"a": entry([2], 8, 0)}).encode(), bytes(8)),
        with_header(json.dumps({"a": entry([2], 0, 8, "X99")}).encode(), bytes(8)),
    ],
)
def test_headers_that_lie(bert_folder, content):
    (bert_folder / "model.safetensors").write_bytes(content)
    refused(bert_folder, "model.safetensors: cannot be read")


def test_a_git_lfs_pointer_is_recognised(bert_folder):
    (bert_folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    refused(bert_folder, "git lfs pull")


def test_a_panic_in_a_library_is_an_error_of_ours(tmp_path):
    class PanicException(BaseException):
        """As pyo3 makes them: no Exception."""

    with (
        pytest.raises(CheckpointError, match=r"x\.bin: cannot be read: called unwrap"),
        weights.reading(tmp_path / "x.bin"),
    ):
        raise PanicException("called unwrap on a None")
    with pytest.raises(KeyboardInterrupt), weights.reading(tmp_path / "x.bin"):
        raise KeyboardInterrupt


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_listed(bert_folder):
    file = bert_folder / "model.safetensors"
    state = load_file(file)
    for n in (0, 1):
        del state[f"bert.encoder.layer.{n}.output.dense.bias"]
    state["bert.pooler.dense.weight"] = torch.zeros(16, 17)
    state["bert.encoder.layer.7.output.dense.bias"] = torch.zeros(16)
    state["surprise"] = torch.zeros(2, 3)
    state["cls.predictions.bias"] = torch.zeros(40, dtype=torch.int64)
    save_file(state, file)
    text = refused(bert_folder, "6 tensors do not fit")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  ")]
    assert ["missing", "encoder.layer.{0,1}.output.dense.bias  expected [16]"] in lines
    assert ["misshapen", "pooler.dense.weight  expected [16, 16], found [16, 17]"] in lines
    assert ["unknown", "encoder.layer.7.output.dense.bias  found [16]"] in lines
    assert ["unknown", "surprise  found [2, 3]"] in lines
    assert ["wrong", "type  cls.predictions.bias  expected floating point, found I64"] in lines


def test_half_a_head_is_an_error_and_a_whole_one_may_lack(bert_folder):
    file = bert_folder / "model.safetensors"
    state = load_file(file)
    save_file({name: tensor for name, tensor in state.items() if "predictions" not in name}, file)
    assert read(bert_folder).heads == {"pooler", "nsp"}
    save_file({name: tensor for name, tensor in state.items() if "predictions.transform" not in name}, file)
    refused(bert_folder, "cls.predictions.transform.dense.weight  expected [16, 16]")
    save_file({name: tensor for name, tensor in state.items() if "pooler" not in name}, file)
    refused(bert_folder, "pooler.dense.weight  expected [16, 16]")  # the next-sentence head reads it


def test_the_same_tensor_by_two_names(bert_folder):
    file = bert_folder / "model.safetensors"
    state = load_file(file)
    state["embeddings.LayerNorm.gamma"] = state["bert.embeddings.LayerNorm.weight"].clone()
    save_file(state, file)
    refused(bert_folder, "embeddings.LayerNorm.weight exists twice")


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        '"bert"',
        "null",
        "{'a': 1}",
        "\x00" * 10,
        "[" * 100_000,
        '{"hidden_size": ' + "9" * 5000 + "}",
    ],
)
def test_settings_that_are_no_json_object(bert_folder, text):
    (bert_folder / "config.json").write_text(text)
    refused(bert_folder, "config.json")


def test_settings_that_are_no_text(bert_folder):
    (bert_folder / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    refused(bert_folder, "config.json:1: not UTF-8 text")


def test_a_settings_file_that_is_too_large(bert_folder):
    with (bert_folder / "config.json").open("wb") as file:
        file.truncate(10**9)  # a sparse file: it says so, and holds nothing
    refused(bert_folder, "config.json: 1,000,000,000 bytes")


def test_a_syntax_error_names_its_line(bert_folder):
    (bert_folder / "config.json").write_text('{\n  "hidden_size": 16,\n  "vocab_size" 40\n}')
    refused(bert_folder, "config.json:3: not valid JSON")


SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_absurd_sizes(bert_folder, name):
    file = bert_folder / "config.json"
    good = json.loads(file.read_text())
    for value in (-1, 0, 10**12, 10**30, 16.0, "16", True, [16], {}, float("nan"), float("inf")):
        file.write_text(json.dumps(good | {name: value}))
        text = refused(bert_folder, "config.json")
        assert "num_attention_heads" in text if name == "num_attention_heads" else name in text
    del good[name]
    file.write_text(json.dumps(good))
    refused(bert_folder, f"no {name}")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_of_any_setting_is_more_than_an_error(bert_folder, data):
    file = bert_folder / "config.json"
    original = file.read_text()
    good = json.loads(original)
    value = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2)
    )
    change = data.draw(st.dictionaries(st.sampled_from(sorted(good)), value, min_size=1, max_size=2))
    file.write_text(json.dumps(good | change))
    try:
        read(bert_folder)
    except CheckpointError as error:
        assert str(bert_folder) in str(error)
    finally:
        file.write_text(original)


# ---- index files -----------------------------------------------------------------------------------------------------


def index_naming(folder, name):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(state, "model-00001-of-00001.safetensors") | {"bert.pooler.dense.bias": name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..\\secret.safetensors", "C:x.safetensors",
     "..", "", ".", "x.bin", "nul\0.safetensors", 7, None, ["model.safetensors"], {}],
)  # fmt: skip
def test_an_index_never_leads_out_of_its_folder(bert_folder, name):
    save_file({"bert.pooler.dense.bias": torch.zeros(16)}, bert_folder.parent / "secret.safetensors")
    index_naming(bert_folder, name)
    refused(bert_folder, "model.safetensors.index.json", repr(name), "same folder")


def test_an_index_and_its_files_must_agree(bert_folder):
    index_naming(bert_folder, "model-00002-of-00002.safetensors")
    refused(bert_folder, "model-00002-of-00002.safetensors does not exist")
    save_file({"other": torch.zeros(1)}, bert_folder / "model-00002-of-00002.safetensors")
    refused(bert_folder, "bert.pooler.dense.bias (in model-00002-of-00002.safetensors)")


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"weight_map": "x"}']
)
def test_an_index_that_is_none(bert_folder, content):
    (bert_folder / "model.safetensors").unlink()
    (bert_folder / "model.safetensors.index.json").write_text(content)
    refused(bert_folder, "model.safetensors.index.json")


# ---- pickles ---------------------------------------------------------------------------------------------------------


class Payload:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare"])
def test_code_in_a_pickle_does_not_run(bert_folder, tmp_path, kind):
    (bert_folder / "model.safetensors").unlink()
    file, trace = bert_folder / "pytorch_model.bin", tmp_path / "it_ran"
    content = {"bert.pooler.dense.bias": torch.zeros(16), "x": Payload(trace)}
    if kind == "bare":
        file.write_bytes(pickle.dumps(Payload(trace), protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    text = refused(bert_folder, "pytorch_model.bin: holds more than tensors: it asks to run", "system; nothing was run")
    assert "weights_only" not in text  # torch's own words say how to switch the guard off
    assert not trace.exists()
    if kind == "bare":  # the payload is live: a careless reader does run it
        pickle.loads(file.read_bytes())
        assert trace.exists()


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"epoch": 3, "state_dict": {}}, {3: torch.zeros(2)}, torch.zeros(2)]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_something_else(bert_folder, content, zipped):
    (bert_folder / "model.safetensors").unlink()
    torch.save(content, bert_folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(bert_folder, "pytorch_model.bin")


@pytest.mark.parametrize("keep", [0, 1, 50, 5000, -10])
@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_pickles(bert_folder, keep, zipped):
    state = load_file(bert_folder / "model.safetensors")
    (bert_folder / "model.safetensors").unlink()
    file = bert_folder / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[:keep])
    refused(bert_folder, "pytorch_model.bin")


def test_a_decompression_bomb_is_not_opened(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    with zipfile.ZipFile(bert_folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
        archive.writestr("archive/version", "3")
    assert (bert_folder / "pytorch_model.bin").stat().st_size < 100_000
    refused(bert_folder, "compressed records")


def test_a_legacy_pickle_that_announces_a_terabyte(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    file = bert_folder / "pytorch_model.bin"
    torch.save({"x": torch.zeros(77_777)}, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    small, huge = b"J" + struct.pack("<i", 77_777), b"\x8a\x06" + (2**40).to_bytes(6, "little")
    assert content.count(small) == 2  # the storage's size and the tensor's shape
    file.write_bytes(content.replace(small, huge))
    refused(bert_folder, "announces 4,398,046,511,104 bytes")


@pytest.mark.parametrize(("storage", "shape"), [(2**40, 2**40), (77_777, 2**40), (2**40, 5), (99_999, 99_999)])
def test_a_zip_that_announces_more_than_it_has(bert_folder, storage, shape):
    (bert_folder / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(77_777)}, bert_folder / "good.bin")
    small = b"J" + struct.pack("<i", 77_777)
    with (
        zipfile.ZipFile(bert_folder / "good.bin") as good,
        zipfile.ZipFile(bert_folder / "pytorch_model.bin", "w", zipfile.ZIP_STORED) as bad,
    ):
        for record in good.infolist():
            content = good.read(record)
            if record.filename.endswith("data.pkl"):
                assert content.count(small) == 2  # the storage's size, then the tensor's shape
                for size in (storage, shape):
                    content = content.replace(small, b"\x8a\x06" + size.to_bytes(6, "little"), 1)
            bad.writestr(record.filename, content)
    refused(bert_folder, "pytorch_model.bin")


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_folders_without_a_model(tmp_path, bert_folder):
    refused(tmp_path / "nowhere", "nowhere: no such folder or file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "looked for model.safetensors, ", "the folder is empty")
    (tmp_path / "empty" / "tf_model.h5").write_bytes(b"")
    refused(tmp_path / "empty", "Keras weights are not supported")
    (tmp_path / "notes.txt").write_text("白切鸡")
    refused(tmp_path / "notes.txt", "not a weight file")
    (bert_folder / "config.json").unlink()
    refused(bert_folder, "no config.json beside model.safetensors")
    (bert_folder / "config.json").mkdir()
    refused(bert_folder, "no config.json")


def test_a_folder_where_a_file_should_be(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    (bert_folder / "model.safetensors").mkdir()
    refused(bert_folder, "no weights")
    refused(bert_folder / "model.safetensors", "no weights")
