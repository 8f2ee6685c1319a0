"""Files from a stranger: model folders, tokenizers and data that announce far more than they hold.

`BOMBS` are functions that write one into a folder and return the path to open; `random_bomb` draws one with sizes of
its own. An `Opener` is a process that opens them under a limit of memory, and says what happened:

    opener = Opener()
    happened = opener(BOMBS["stride_zero"](folder))     # refused, in which words, megabytes, seconds
    opener.close()
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from allmask.checkpoints.formats.crc32c import crc32c
from allmask.checkpoints.formats.tensorflow_bundle import _masked

ROOT = Path(__file__).parents[1]
BERT = {
    "model_type": "bert", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 20,
}  # fmt: skip
OWN = {
    "model_type": "allmask", "heads_present": [], "family": "transformer", "vocab_size": 40, "width": 16, "layers": 1,
    "heads": 2, "ffn_width": 32, "max_positions": 20, "position_kind": "sinusoidal", "segments": 0,
}  # fmt: skip
EMPTY_TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
}  # fmt: skip


# ---- weights -------------------------------------------------------------------------------------------------------


def _folder(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def many_positions(folder: Path, positions: int = 4_000_000, width: int = 16) -> Path:
    """A config of some hundred bytes with sinusoidal positions, which are computed and not in the file."""
    _folder(folder, OWN | {"max_positions": positions, "width": width})
    save_file({"body.embedding.tokens.weight": torch.zeros(40, width)}, folder / "model.safetensors")
    return folder


def distant_buckets(folder: Path, distance: int = 16_000_000) -> Path:
    """Buckets of relative positions, also computed from the config."""
    _folder(folder, OWN | {"position_kind": "relative", "bucket_distance": distance})
    save_file({"body.embedding.tokens.weight": torch.zeros(40, 16)}, folder / "model.safetensors")
    return folder


def clipped_distances(folder: Path, clamp: int = 16_000_000) -> Path:
    _folder(folder, OWN | {"family": "nezha", "position_kind": "clipped", "clamp": clamp, "segments": 2})
    save_file({"body.embedding.tokens.weight": torch.zeros(40, 16)}, folder / "model.safetensors")
    return folder


def stride_zero(folder: Path, rows: int = 500_000, zipped: bool = True) -> Path:
    """A pickle of a few kB in which one number is a matrix."""
    _folder(folder, BERT | {"vocab_size": rows, "hidden_size": 1024, "num_attention_heads": 16})
    state = {"embeddings.word_embeddings.weight": torch.zeros(1).expand(rows, 1024)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return folder


def one_tensor_many_names(folder: Path, names: int = 5_000, size: int = 100_000) -> Path:
    """Each layer has the same data."""
    _folder(folder, BERT)
    tensor = torch.zeros(size)
    torch.save({f"x.{number}": tensor for number in range(names)}, folder / "pytorch_model.bin")
    return folder


def meta_tensors(folder: Path, rows: int = 10**9) -> Path:
    """Shapes without data, on the meta device."""
    _folder(folder, BERT)
    state = {"embeddings.word_embeddings.weight": torch.empty(rows, 1024, device="meta")}
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def empty_tensors(folder: Path, count: int = 150_000, name: str = "x") -> Path:
    """Very many tensors without data: an error must not list them all."""
    _folder(folder, BERT)
    entry = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
    header = ("{" + ",".join(f'"{name}{number}":{{{entry}}}' for number in range(count)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def classifier_tensors(folder: Path, count: int = 60_000) -> Path:
    """Tensors of heads that are not supported are left out, with a warning."""
    return empty_tensors(folder, count, "classifier.")


def endless_labels(folder: Path, labels: int = 10**12) -> Path:
    """An empty tensor that announces a label for each of its rows."""
    _folder(folder, BERT | {"architectures": ["BertForTokenClassification"]})
    save_file({"classifier.weight": torch.zeros(labels, 0)}, folder / "model.safetensors")
    return folder


def varint(value: int) -> bytes:
    """An integer as protocol buffers have it: seven bits a byte."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def shared_keys(folder: Path, key: int = 60_000, count: int = 50_000) -> Path:
    """A TensorFlow index whose long keys take four bytes each: most of a key is shared with the one before."""
    _folder(folder, BERT)
    block = bytearray(varint(0) + varint(key) + varint(0) + b"a" * key)
    for number in range(count):
        tail = struct.pack(">I", number)
        block += varint(key - 4) + varint(4) + varint(0) + tail
    block += struct.pack("<I", 0)

    def closed(content: bytes) -> bytes:
        return content + b"\0" + struct.pack("<I", _masked(crc32c(content + b"\0")))

    first = closed(bytes(block))
    handle = varint(0) + varint(len(block))
    index = varint(0) + varint(1) + varint(len(handle)) + b"z" + handle + struct.pack("<I", 0)
    empty = struct.pack("<I", 0)
    second, third = closed(empty), closed(index)
    footer = varint(len(first)) + varint(len(empty)) + varint(len(first) + len(second)) + varint(len(index))
    content = first + second + third + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    (folder / "bert_model.ckpt.index").write_bytes(content)
    return folder


def nested_settings(folder: Path, megabytes: int = 20) -> Path:
    """Settings of very many empty lists."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type":"bert","x":[' + "[]," * (megabytes * 350_000) + "[]]}")
    return folder


def deflated_weights(folder: Path, megabytes: int = 100) -> Path:
    """A decompression bomb with the name of a file of weights."""
    _folder(folder, BERT)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with archive.open("archive/data/0", "w", force_zip64=True) as stream:
            for _ in range(megabytes):
                stream.write(bytes(1 << 20))
    return folder


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def _tokenizer(folder: Path, **parts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(EMPTY_TOKENIZER | parts))
    return file


def multiplying_normalizer(folder: Path, steps: int = 40, factor: int = 2) -> Path:
    """Each step makes the text longer: 2^40 times."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * factor}
    return _tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [step] * steps})


def regex_normalizer(folder: Path, written: int = 10_000, steps: int = 3) -> Path:
    """A pattern that matches between all characters."""
    step = {"type": "Replace", "pattern": {"Regex": "(?=.)|$"}, "content": "b" * written}
    return _tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [step] * steps})


def charsmap_normalizer(folder: Path, size: int = 100_000) -> Path:
    """A compiled table that replaces a letter by a book."""
    table = struct.pack("<I", 4) + bytes(4) + b"x" * size + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return _tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [step] * 4})


def multiplying_decoder(folder: Path, steps: int = 40) -> Path:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return _tokenizer(folder, decoder={"type": "Sequence", "decoders": [step] * steps})


def endless_frame(folder: Path, ids: int = 20_000, times: int = 5_000) -> Path:
    """Special tokens around a text: one stands for many, and is put there often."""
    special = {"id": "[X]", "ids": [1] * ids, "tokens": ["a"] * ids}
    frame = [{"SpecialToken": {"id": "[X]", "type_id": 0}}] * times
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {
        "type": "TemplateProcessing", "single": sequence + frame, "pair": pair, "special_tokens": {"[X]": special},
    }  # fmt: skip
    return _tokenizer(folder, post_processor=processor)


def long_piece(folder: Path, size: int = 2_000_000) -> Path:
    """A trie as deep as this overflows the stack when it is freed."""
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["x" * size, -1.0]], "byte_fallback": False}
    return _tokenizer(folder, model=model)


def large_trie(folder: Path, pieces: int = 200_000, seed: int = 0) -> Path:
    """Pieces that share no beginning."""
    rng = random.Random(seed)
    vocabulary = [["<unk>", 0.0], *([f"{rng.getrandbits(96):024x}", -1.0] for _ in range(pieces))]
    return _tokenizer(folder, model={"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False})


def large_vocabulary(folder: Path, megabytes: int = 158) -> Path:
    """A tokenizer.json of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    start, end = json.dumps(EMPTY_TOKENIZER).split('"a": 1')
    with file.open("w") as stream:
        stream.write(start)
        number, written = 1, 0
        while written < megabytes << 20:
            part = "".join(f'"w{n}":{n},' for n in range(number, number + 10_000))
            stream.write(part)
            number, written = number + 10_000, written + len(part)
        stream.write(f'"a":{number}{end}')
    return file


def repeated_piece(folder: Path, pieces: int = 150_000) -> Path:
    """The last name of an object with very many occurs twice."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ",".join(f'"w{number}":{number}' for number in range(pieces))
    file = folder / "tokenizer.json"
    file.write_text('{"model":{"type":"WordLevel","vocab":{' + names + f',"w{pieces - 1}":5}}}}}}')
    return file


def endless_vocab_txt(folder: Path, lines: int = 3_000_000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "vocab.txt"
    file.write_bytes(b"a\n" * lines)
    return file


# ---- data ----------------------------------------------------------------------------------------------------------


def packed_arrays(folder: Path, images: int = 60_000) -> Path:
    """An .npz of images that are all zero: 3.6 MB unpack to 5 GB at 1,700,000 images."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "images.npz"

    def header(shape: tuple[int, ...], kind: str) -> bytes:
        stream = io.BytesIO()
        import numpy as np

        np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
        return stream.getvalue()

    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, shape in (("x_train", (images, 56, 56)), ("y_train", (images,))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                stream.write(header(shape, "|u1"))
                left = images * (56 * 56 if len(shape) == 3 else 1)
                while left:
                    stream.write(bytes(min(left, 1 << 20)))
                    left -= min(left, 1 << 20)
    return file


BOMBS: dict[str, Callable[..., Path]] = {
    function.__name__: function
    for function in (
        many_positions, distant_buckets, clipped_distances, stride_zero, one_tensor_many_names, meta_tensors,
        empty_tensors, classifier_tensors, endless_labels, shared_keys, nested_settings, deflated_weights,
        multiplying_normalizer, regex_normalizer, charsmap_normalizer, multiplying_decoder, endless_frame, long_piece,
        large_trie, large_vocabulary, repeated_piece, endless_vocab_txt, packed_arrays,
    )
}  # fmt: skip


def random_bomb(folder: Path, rng: random.Random) -> Path:
    """Write one of the bombs with sizes drawn at random, large enough to hurt."""
    kind = rng.choice(sorted(BOMBS.keys() - {"large_vocabulary", "deflated_weights"}))
    sizes: dict[str, dict[str, Any]] = {
        "many_positions": {"positions": rng.randrange(10**5, 16_000_000), "width": 16 * rng.randrange(1, 256)},
        "distant_buckets": {"distance": rng.randrange(10**5, 16_000_000)},
        "clipped_distances": {"clamp": rng.randrange(10**6, 16_000_000)},
        "stride_zero": {"rows": rng.randrange(10**5, 10**6), "zipped": rng.random() < 0.5},
        "one_tensor_many_names": {"names": rng.randrange(100, 20_000), "size": rng.randrange(10_000, 10**6)},
        "meta_tensors": {"rows": rng.randrange(10**6, 10**10)},
        "empty_tensors": {"count": rng.randrange(1_000, 200_000), "name": rng.choice(["x", "encoder.", "a.b."])},
        "classifier_tensors": {"count": rng.randrange(1_000, 90_000)},
        "endless_labels": {"labels": rng.randrange(10**8, 10**15)},
        "shared_keys": {"key": rng.randrange(2_000, 65_000), "count": rng.randrange(10_000, 100_000)},
        "nested_settings": {"megabytes": rng.randrange(17, 20)},
        "multiplying_normalizer": {"steps": rng.randrange(20, 500), "factor": rng.randrange(2, 50)},
        "regex_normalizer": {"written": rng.randrange(1_000, 50_000), "steps": rng.randrange(1, 20)},
        "charsmap_normalizer": {"size": rng.randrange(10_000, 10**6)},
        "multiplying_decoder": {"steps": rng.randrange(20, 500)},
        "endless_frame": {"ids": rng.randrange(1_000, 50_000), "times": rng.randrange(1_000, 20_000)},
        "long_piece": {"size": rng.randrange(10**5, 5_000_000)},
        "large_trie": {"pieces": rng.randrange(190_000, 220_000), "seed": rng.randrange(1 << 30)},
        "repeated_piece": {"pieces": rng.randrange(50_000, 200_000)},
        "endless_vocab_txt": {"lines": rng.randrange(2_000_000, 6_000_000)},
        "packed_arrays": {"images": rng.randrange(60_000, 120_000)},
    }
    return BOMBS[kind](folder / kind, **sizes[kind])


# ---- opening them --------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """What happened: `refused` in our words, with the peak of memory beyond that of a process that opens nothing."""

    refused: bool
    words: str
    megabytes: float
    seconds: float  # of CPU time


_OPEN = """
import json, resource, sys, time
from pathlib import Path
import torch, allmask
from allmask.errors import AllmaskError
from allmask.text import Tokenizer
from allmask.vision import datasets
import allmask.checkpoints.reader, safetensors, torch._subclasses.fake_tensor

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

def open_one(path):
    if path.suffix == ".npz":
        datasets.read(path)
    elif path.name in ("tokenizer.json", "vocab.txt"):
        Tokenizer.load(path).encode("a cat, 一只猫")
    else:
        allmask.load(path)

def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

soft = 4 << 30
resource.setrlimit(resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + soft,) * 2)
for line in sys.stdin:
    path = Path(line.rstrip("\\n"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start, words, refused = memory(), time.process_time(), "", False
    try:
        open_one(path)
    except AllmaskError as error:
        words, refused = str(error), True
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
    print(json.dumps([refused, words, peak() - before, time.process_time() - start]), flush=True)
"""


class Opener:
    """A process that opens one path after another, under a limit of memory: `opener(path)` says what happened."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", _OPEN], env=environment, text=True, **pipes)

    def __call__(self, path: Path) -> Opened:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            return Opened(False, f"the process ended with {self.process.wait()}", float("inf"), 0.0)
        return Opened(*json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
