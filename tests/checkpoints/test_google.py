"""Google's TensorFlow BERT, read without TensorFlow.

`data/google_tiny` was written by TensorFlow 2.21 (`tf.compat.v1.train.Saver`) from the random arrays that lie beside
it in `true_tensors.npz`, with a few Adam slots and a step counter; `data/google_v1` is the format before 2017.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allmask.checkpoints import read, resolve, write
from allmask.checkpoints.formats.crc32c import crc32c
from allmask.checkpoints.formats.tensorflow_bundle import open_bundle
from allmask.errors import CheckpointError

DATA = Path(__file__).parent / "data"
TINY = DATA / "google_tiny"
INDEX, BYTES = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(TINY, tmp_path / "google")
    return tmp_path / "google"


def test_every_array_is_the_one_tensorflow_wrote():
    truth = np.load(TINY / "true_tensors.npz")
    bundle = open_bundle(TINY / INDEX)
    assert set(truth.files) < set(bundle)
    for name in truth.files:
        shape, dtype, load = bundle[name]
        assert shape == truth[name].shape and dtype == "float32"
        assert np.array_equal(load().numpy(), truth[name])
    assert bundle["global_step"][1] == "int64" and bundle["global_step"][2]().item() == 1000
    assert sum(name.endswith(("adam_m", "adam_v")) for name in bundle) == 6


def test_read_gives_our_names_and_turns_the_kernels():
    truth = np.load(TINY / "true_tensors.npz")
    found = read(TINY)
    assert found.heads == {"pooler", "lm", "nsp"} and found.left_out == [] and len(found.tensors) == len(truth.files)
    kernel = truth["bert/encoder/layer_1/intermediate/dense/kernel"]  # (in, out)
    assert np.array_equal(found.tensors["body.layers.1.feed_forward.expand.weight"].numpy(), kernel.T)
    assert np.array_equal(found.tensors["nsp_head.weight"].numpy(), truth["cls/seq_relationship/output_weights"])
    assert (found.config.vocab_size, found.config.width, found.config.norm_eps) == (40, 16, 1e-12)


def test_converted_to_a_folder_it_is_the_same_function_in_transformers(tmp_path):
    """An independent conversion by numpy: Google's kernels applied by hand to the first layer's query."""
    found = read(TINY)
    write(tmp_path / "hf", found.config, found.tensors)
    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    truth = np.load(TINY / "true_tensors.npz")
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    start = "bert/encoder/layer_0/attention/self/query"
    by_hand = x.numpy() @ truth[f"{start}/kernel"] + truth[f"{start}/bias"]
    assert np.allclose(model.bert.encoder.layer[0].attention.self.query(x).detach().numpy(), by_hand, atol=1e-5)
    head = x.numpy() @ truth["cls/seq_relationship/output_weights"].T + truth["cls/seq_relationship/output_bias"]
    assert np.allclose(model.cls.seq_relationship(x).detach().numpy(), head, atol=1e-5)


def test_every_way_to_name_it(tools):
    expected = read(TINY).tensors
    for path in (TINY / INDEX, TINY / BYTES, TINY / "bert_model.ckpt", resolve(str(TINY / "bert_model.ckpt"))):
        tools.same(read(path).tensors, expected)


def test_several_checkpoints_need_a_choice(copy):
    for number in (10, 20):
        shutil.copy(copy / INDEX, copy / f"model.ckpt-{number}.index")
        shutil.copy(copy / BYTES, copy / f"model.ckpt-{number}.data-00000-of-00001")
    assert len(read(copy).tensors) == 46  # the published name goes first
    (copy / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"several TensorFlow checkpoints: model\.ckpt-10\.index"):
        read(copy)
    assert len(read(copy / "model.ckpt-20").tensors) == 46


@pytest.mark.parametrize("place", [DATA / "google_v1", DATA / "google_v1" / "bert_model.ckpt"])
def test_the_format_before_2017_is_named(place):
    with pytest.raises(CheckpointError, match="before 2017"):
        read(place)


def test_settings_are_required_and_checked(copy):
    (copy / "bert_config.json").rename(copy / "kept.json")
    with pytest.raises(CheckpointError, match=r"no bert_config\.json beside bert_model\.ckpt\.index"):
        read(copy)
    settings = json.loads((copy / "kept.json").read_text())
    (copy / "bert_config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"missing +bert/encoder/layer_2/output/dense/kernel +expected \[32, 1"):
        read(copy)
    (copy / "bert_config.json").write_text(json.dumps(settings | {"vocab_size": 41}))
    with pytest.raises(CheckpointError, match=r"word_embeddings +expected \[41, 16\], found \[40, 16\]"):
        read(copy)


# ---- damage --------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_data_is_found(copy):
    for at in (0, 7, 12_345, -1):
        content = bytearray((TINY / BYTES).read_bytes())
        content[at] ^= 1
        (copy / BYTES).write_bytes(content)
        bundle = open_bundle(copy / INDEX)
        broken = 0
        for _, _, load in bundle.values():
            try:
                load()
            except CheckpointError as error:
                assert "checksum" in str(error)
                broken += 1
        assert broken == 1


def test_missing_and_truncated_data(copy):
    (copy / BYTES).write_bytes((TINY / BYTES).read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match=r"cut short: .* should lie at bytes"):
        read(copy)
    (copy / BYTES).unlink()
    with pytest.raises(CheckpointError, match="data-00000-of-00001: cannot be read"):
        read(copy)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2064), bit=st.integers(0, 7), cut=st.none() | st.integers(0, 2064))
def test_any_damage_to_the_index_is_an_error_or_harmless(copy, at, bit, cut):
    """Flip any bit, or cut anywhere: an error in our words, or the same tensors (the footer has spare bytes)."""
    content = bytearray((TINY / INDEX).read_bytes())
    assert len(content) == 2065
    content[at] ^= 1 << bit
    (copy / INDEX).write_bytes(content if cut is None else content[:cut])
    try:
        found = open_bundle(copy / INDEX)
    except CheckpointError as error:
        assert str(copy / INDEX) in str(error)
    else:
        assert cut is None and found.keys() == open_bundle(TINY / INDEX).keys()


def masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    return struct.pack("<I", (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def block(*pairs: tuple[bytes, bytes], shared: int = 0) -> bytes:
    body = b"".join(varint(shared) + varint(len(key)) + varint(len(value)) + key + value for key, value in pairs)
    body += struct.pack("<II", 0, 1)
    return body + b"\0" + masked(body + b"\0")


def table(*pairs: tuple[bytes, bytes], repeats: int = 1, shared: int = 0) -> bytes:
    """An index with valid checksums and any content."""
    data, nothing = block(*pairs, shared=shared), block()
    handle = varint(0) + varint(len(data) - 5)
    index = block(*((bytes([n]), handle) for n in range(repeats)))
    footer = varint(len(data)) + varint(len(nothing) - 5) + varint(len(data) + len(nothing)) + varint(len(index) - 5)
    return data + nothing + index + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


HEADER = (b"", field(1, 1))


def tensor_entry(*sizes: int, size: int, **other: int) -> bytes:
    shape = b"".join(field(2, field(1, n)) for n in sizes)
    return field(1, other.get("dtype", 1)) + field(2, shape) + field(3, other.get("shard", 0)) + field(5, size)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (table(), "number of data files"),
        (table((b"", field(1, 10**12))), "number of data files"),
        (table((b"", field(1, 1) + field(2, 1))), "big-endian"),
        (table(HEADER, (b"w", tensor_entry(2**39, 2**39, size=16))), "in 16 bytes"),
        (table(HEADER, (b"w", tensor_entry(2**63, size=0))), "has the shape"),
        (table(HEADER, (b"w", tensor_entry(2, size=8, shard=5))), "data file 5 of 1"),
        (table(HEADER, (b"w", tensor_entry(2, size=8) + field(7, b""))), "slices"),
        (table(HEADER, (b"w", field(2, 7))), "entry of w is malformed: field 2 is an integer"),
        (table(HEADER, (b"w", field(1, b"x"))), "entry of w is malformed: field 1 is not an integer"),
        (table(HEADER, (b"w", b"\x07")), "unknown wire type"),
        (table(HEADER, (b"w", b"\x08" + b"\xff" * 11)), "integer without an end"),
        (table(HEADER, (b"w", tensor_entry(2, size=8)), (b"a", b"")), "out of order"),
        (table(HEADER, (b"w", tensor_entry(2, size=8)), repeats=200), "out of order"),
        (table((b"w", tensor_entry(2, size=8)), shared=5), "shares more bytes than"),
        (table(HEADER, (b"\xff", tensor_entry(2, size=8))), "cannot be read"),
    ],
)
def test_an_index_that_lies(copy, content, words):
    (copy / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read(copy)


def test_a_tensor_announced_as_huge_takes_no_memory(copy):
    """Shape and size agree, the data file is small: the file's own length decides."""
    (copy / INDEX).write_bytes(table(HEADER, (b"w", tensor_entry(2**38, size=2**40))))
    with pytest.raises(CheckpointError, match="cut short"):
        open_bundle(copy / INDEX)["w"][2]()


def test_the_writer_in_these_tests_makes_tables_that_are_read(copy):
    """Otherwise the tests above would prove nothing."""
    values = np.arange(6, dtype="<f4")
    (copy / BYTES).write_bytes(values.tobytes())
    checksum = varint(6 << 3 | 5) + masked(values.tobytes())
    text = field(1, 7) + field(2, b"") + field(5, 3)  # a string: known by name, refused only when asked for
    (copy / INDEX).write_bytes(table(HEADER, (b"note", text), (b"w", tensor_entry(2, 3, size=24) + checksum)))
    bundle = open_bundle(copy / INDEX)
    assert np.array_equal(bundle["w"][2]().numpy(), values.reshape(2, 3))
    with pytest.raises(CheckpointError, match="does not hold numbers"):
        bundle["note"][2]()
