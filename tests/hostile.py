"""Files from a stranger: model folders, tokenizers and data that announce far more than they hold.

`BOMBS` are functions that write one into a folder and return the path to open; `random_bomb` draws one with sizes of
its own. An `Opener` is a process that opens them under a limit of memory, and says what happened:

    opener = Opener()
    happened = opener(BOMBS["stride_zero"](folder))     # refused, in which words, megabytes, seconds
    opener.close()
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pickle
import random
import signal
import struct
import time
import zipfile
from collections.abc import Callable
from importlib import import_module
from itertools import islice, pairwise, product
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors.torch import save_file

import allmask
from allmask.checkpoints.formats.crc32c import crc32c
from allmask.checkpoints.formats.tensorflow_bundle import _masked
from allmask.errors import AllmaskError
from tests.forked import limit_memory, megabytes, reset_peak

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


def empty_tensors(folder: Path, count: int = 110_000, name: str = "x") -> Path:
    """Very many tensors without data: an error must not list them all."""
    _folder(folder, BERT)
    entry = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
    header = ("{" + ",".join(f'"{name}{number}":{{{entry}}}' for number in range(count)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def classifier_tensors(folder: Path, count: int = 20_000) -> Path:
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


def shared_keys(folder: Path, key: int = 60_000, count: int = 20_000) -> Path:
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


def nested_settings(folder: Path, megabytes: int = 17) -> Path:
    """Settings of very many empty lists."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type":"bert","x":[' + "[]," * (megabytes * 350_000) + "[]]}")
    return folder


def deflated_weights(folder: Path, megabytes: int = 70) -> Path:
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


def sparse_trie(folder: Path, pieces: int = 2_000, size: int = 300) -> Path:
    """Few long pieces: 600 kB become 200 MB."""
    return large_trie(folder, pieces, digits=size)


def large_trie(folder: Path, pieces: int = 30_000, seed: int = 0, digits: int = 24) -> Path:
    """Pieces that share no beginning."""
    rng = random.Random(seed)
    vocabulary = [["<unk>", 0.0], *([rng.randbytes(digits // 2).hex(), -1.0] for _ in range(pieces))]
    return _tokenizer(folder, model={"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False})


def dense_trie(folder: Path, pieces: int = 150_000, size: int = 5) -> Path:
    """Short pieces, in few bytes each, with little in common: the library would take 95 times the file."""
    rng = random.Random(0)
    names = {"".join(rng.choices(_LETTERS, k=size)) for _ in range(pieces)}
    entries = ",".join(f'["{name}",0]' for name in sorted(names))
    start, end = json.dumps(EMPTY_TOKENIZER | {"model": None}).split("null}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(start + '{"type":"Unigram","unk_id":0,"byte_fallback":false,"vocab":[' + entries + "]}}" + end)
    return file


def short_lines(folder: Path, lines: int = 400_000) -> Path:
    """A vocab.txt of four bytes a line."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("".join(letters) for letters in product(_LETTERS, repeat=3))
    file = folder / "vocab.txt"
    file.write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", *islice(names, lines)]) + "\n")
    return file


def long_added_tokens(folder: Path, tokens: int = 5_000, size: int = 500) -> Path:
    """Added tokens become one automaton, with a state for each character."""
    rng, flags = random.Random(0), dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    contents = [rng.randbytes(size // 2).hex() for _ in range(tokens)]
    return _tokenizer(folder, added_tokens=[{"id": 2 + n, "content": c} | flags for n, c in enumerate(contents)])


def many_objects(folder: Path, count: int = 1_000_000) -> Path:
    """Each takes 33 times as much as its seven bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text('{"model":{"type":"WordLevel"},"x":[' + '{"":0},' * count + "0]}")
    return file


_LETTERS = [chr(code) for code in range(33, 127) if chr(code) not in '"\\']


def large_vocabulary(folder: Path, megabytes: int = 65) -> Path:
    """A tokenizer.json of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    start, end = json.dumps(EMPTY_TOKENIZER).split('"a": 1')
    with file.open("w") as stream:
        stream.write(start)
        for number in range(megabytes):  # names of 1 kB
            stream.write("".join(f'"{n:01000d}":{n},' for n in range(1024 * number + 1, 1024 * number + 1025)))
        stream.write(f'"a":{1024 * megabytes + 1}{end}')
    return file


def repeated_piece(folder: Path, pieces: int = 50_000) -> Path:
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


def packed_arrays(folder: Path, images: int = 25_000) -> Path:
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


def deflated_lines(folder: Path, megabytes: int = 80) -> Path:
    """Records that gzip has made a thousandth of their size."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl.gz"
    line = b'{"source": "%s", "target": "a"}\n' % (b"a" * (1 << 20))
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(megabytes):
            stream.write(line)
    return file


def deflated_array(folder: Path, megabytes: int = 80) -> Path:
    """The same as one JSON array, which is read as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.json.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(b"[")
        for _ in range(megabytes):
            stream.write(b" " * (1 << 20))
    return file


def _parquet(folder: Path, source: Any, rows: int, **options: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.parquet"
    table = pyarrow.table({"source": source, "target": pyarrow.array(["a"] * rows)})
    parquet.write_table(table, file, compression="zstd", dictionary_pagesize_limit=1 << 30, **options)
    return file


def repeated_text(folder: Path, size: int = 8 << 20, rows: int = 2_000) -> Path:
    """A long text that a parquet file stores once: 256 rows of it would be 2 GB."""
    import pyarrow

    indices = pyarrow.array([0] * rows, pyarrow.int32())
    return _parquet(folder, pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * size])), rows)


def repeated_in_a_list(folder: Path, size: int = 1 << 20, times: int = 10_000) -> Path:
    """The same in the list of one row."""
    import pyarrow

    indices = pyarrow.array([0] * times, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * size]))
    file = _parquet(folder, pyarrow.ListArray.from_arrays(pyarrow.array([0, times], pyarrow.int32()), texts), 1)
    return file.rename(file.with_name("tagged.parquet"))


def packed_page(folder: Path, megabytes: int = 40) -> Path:
    """A column of zeros that zstd packs to nothing."""
    import pyarrow

    texts = pyarrow.array(["a" * (1 << 20)] * megabytes)
    return _parquet(folder, texts, megabytes, use_dictionary=False, data_page_size=1 << 30)


# ---- parquet files by hand: a footer and page headers (Thrift, compact) that say what they like --------------------


def _int(value: int) -> bytes:
    return varint((value << 1) ^ (value >> 63))


def _thrift(**fields: Any) -> bytes:
    """A struct: `i5=1` is field 5, an integer of 32 bits; l 64 bits, b bytes, s a struct, y yes or no, v a list."""
    out, before = b"", 0
    for name, value in fields.items():
        kind, number = name[0], int(name[1:])
        code = {"i": 5, "l": 6, "b": 8, "v": 9, "s": 12, "y": 1 if value else 2}[kind]
        out += bytes([(number - before) << 4 | code])
        before = number
        if kind in "il":
            out += _int(value)
        elif kind == "b":
            out += varint(len(value)) + value
        elif kind == "s":
            out += value
        elif kind == "v":  # (code of the elements, elements)
            count = len(value[1])
            out += bytes([min(count, 15) << 4 | value[0]]) + (varint(count) if count > 14 else b"") + b"".join(value[1])
    return out + b"\0"


_PLAIN, _RLE, _DELTA_LENGTH, _DELTA_TEXTS, _INDICES = 0, 3, 6, 7, 8  # encodings
_ZSTD = 6  # a codec


def _data_page(content: bytes, values: int, encoding: int = _PLAIN, unpacked: int | None = None) -> bytes:
    """A data page, compressed; its header may say another size."""
    import pyarrow

    packed = pyarrow.compress(content, codec="zstd", asbytes=True)
    said = _thrift(i1=values, i2=encoding, i3=_RLE, i4=_RLE)
    return _thrift(i1=0, i2=len(content) if unpacked is None else unpacked, i3=len(packed), s5=said) + packed


def _dictionary_page(content: bytes, values: int) -> bytes:
    import pyarrow

    packed = pyarrow.compress(content, codec="zstd", asbytes=True)
    return _thrift(i1=2, i2=len(content), i3=len(packed), s7=_thrift(i1=values, i2=_PLAIN)) + packed


def _parquet_by_hand(
    folder: Path, pages: bytes, rows: int, *, values: int | None = None, nested: bool = False, groups: int = 1
) -> Path:
    """A file with one column of texts, or of lists of texts, whose footer knows of nothing unusual."""
    folder.mkdir(parents=True, exist_ok=True)
    root = _thrift(b4=b"schema", i5=1)
    if nested:
        leaf = _thrift(i1=6, i3=0, b4=b"element", i6=0)
        schema = [root, _thrift(i3=0, b4=b"source", i5=1, i6=3), _thrift(i3=2, b4=b"list", i5=1), leaf]
        path = [b"source", b"list", b"element"]
    else:
        schema, path = [root, _thrift(i1=6, i3=0, b4=b"source", i6=0)], [b"source"]
    column = _thrift(
        i1=6, v2=(5, [_int(_PLAIN)]), v3=(8, [varint(len(name)) + name for name in path]), i4=_ZSTD,
        l5=rows if values is None else values, l6=100, l7=len(pages), l9=4,
    )  # fmt: skip
    group = _thrift(v1=(12, [_thrift(l2=4, s3=column)]), l2=100, l3=rows)
    footer = _thrift(i1=2, v2=(12, schema), l3=rows * groups, v4=(12, [group] * groups))
    file = folder / ("tagged.parquet" if nested else "train.parquet")
    file.write_bytes(b"PAR1" + pages + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return file


def _plain_texts(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _run(value: int, count: int, width: int = 1) -> bytes:
    """A run of equal numbers: a few bytes, however long it is."""
    return varint(count << 1) + value.to_bytes((width + 7) // 8, "little")


def _delta(count: int) -> bytes:
    """Delta-packed integers, all 0: one block with no bits for each of its numbers."""
    return varint(1 << 30) + varint(1) + varint(count) + _int(0) + (_int(0) + b"\0") * (count // (1 << 30) + 1)


def honest_page(folder: Path) -> Path:
    """What is made here can be read, if it does not lie."""
    return _parquet_by_hand(folder, _data_page(_plain_texts(b"a cat", b"a dog"), 2), 2)


def many_groups(folder: Path, groups: int = 20_000, pages: int = 20_000) -> Path:
    """Groups of rows that are all the same pages, most of them empty: 400,000,000 headers to read."""
    empty = _data_page(b"", 0)
    return _parquet_by_hand(folder, empty * pages + _data_page(_plain_texts(b"a"), 1), 1, groups=groups)


def endless_header(folder: Path, count: int = 1 << 60) -> Path:
    """The header of a page with a list of very many things, which take no place."""
    header = _thrift(i1=0, i2=1, i3=1, v9=(2, [])).replace(b"\x69\x02\0", b"\x69\xf2" + varint(count))
    return _parquet_by_hand(folder, header, 1)


def understated_page(folder: Path, megabytes: int = 200) -> Path:
    """The footer says that its column has 100 bytes."""
    return _parquet_by_hand(folder, _data_page(_plain_texts(*[b"a" * (1 << 20)] * megabytes), megabytes), megabytes)


def overstated_page(folder: Path, size: int = (1 << 31) - 1) -> Path:
    """A page of some bytes that would unpack to 2 GB."""
    return _parquet_by_hand(folder, _data_page(_plain_texts(b"a cat", b"a dog"), 2, unpacked=size), 2)


def hidden_dictionary(folder: Path, size: int = 8 << 20, rows: int = 2_000) -> Path:
    """A text for all rows in a dictionary that the footer does not mention."""
    pages = _dictionary_page(_plain_texts(b"a" * size), 1)
    return _parquet_by_hand(folder, pages + _data_page(b"\1" + _run(0, rows), rows, _INDICES), rows)


def endless_dictionary(folder: Path, values: int = (1 << 31) - 1) -> Path:
    """A dictionary that announces two billion texts, and has one."""
    pages = _dictionary_page(_plain_texts(b"a"), values)
    return _parquet_by_hand(folder, pages + _data_page(b"\1" + _run(0, 2), 2, _INDICES), 2)


def endless_rows(folder: Path, rows: int = 2_000_000_000) -> Path:
    """Two billion rows in one run."""
    pages = _dictionary_page(_plain_texts(b"a"), 1)
    return _parquet_by_hand(folder, pages + _data_page(b"\1" + _run(0, rows), rows, _INDICES), rows)


def endless_list(folder: Path, values: int = 1_000_000_000) -> Path:
    """One row with a list of a billion texts, of which the footer says that it has one."""
    levels = [_run(0, 1) + _run(1, values - 1), _run(1, values)]  # where rows begin; which are there
    content = b"".join(struct.pack("<I", len(level)) + level for level in levels) + b"\1" + _run(0, values)
    pages = _dictionary_page(_plain_texts(b"a"), 1) + _data_page(content, values, _INDICES)
    return _parquet_by_hand(folder, pages, 1, values=1, nested=True)


def endless_lengths(folder: Path, count: int = 1_000_000_000) -> Path:
    """Texts after their lengths, of which there are a billion in a few bytes."""
    return _parquet_by_hand(folder, _data_page(_delta(count), 2, _DELTA_LENGTH), 2)


def endless_beginnings(folder: Path, size: int = 1 << 20, times: int = 2_000) -> Path:
    """Texts of a list that begin like the one before: a page of some kB has 2 GB of them."""
    prefixes, suffixes = [0] + [size] * (times - 1), [size] + [0] * (times - 1)
    levels = [_run(0, 1) + _run(1, times - 1), _run(1, times)]  # where rows begin; which are there
    content = b"".join(struct.pack("<I", len(level)) + level for level in levels)
    content += _packed_steps(prefixes) + _packed_steps(suffixes) + b"a" * size
    return _parquet_by_hand(folder, _data_page(content, times, _DELTA_TEXTS), 1, values=times, nested=True)


def _packed_steps(numbers: list[int]) -> bytes:
    """Delta-packed integers, 32 bits each, in blocks of 128."""
    out = varint(128) + varint(1) + varint(len(numbers)) + _int(numbers[0])
    steps = [after - before for before, after in pairwise(numbers)]
    for at in range(0, len(steps), 128):
        least = min(steps[at : at + 128])
        block = [step - least for step in steps[at : at + 128]]
        out += _int(least) + b"\x20" + struct.pack("<128I", *block, *[0] * (128 - len(block)))
    return out


def _workbook(folder: Path, **parts: bytes | tuple[bytes, bytes, int, bytes]) -> Path:
    """A workbook in which parts are replaced: by bytes, or by (start, repeated, times, end)."""
    import openpyxl

    folder.mkdir(parents=True, exist_ok=True)
    plain, file = folder / "plain.zip", folder / "train.xlsx"
    book = openpyxl.Workbook()
    book.active.append(["source", "target"])  # type: ignore[union-attr]
    book.active.append(["a cat", "一只猫"])  # type: ignore[union-attr]
    book.save(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        whole = {name.rsplit("/", 1)[-1].removesuffix(".xml"): (name, old.read(name)) for name in old.namelist()}
        kinds = whole["[Content_Types]"][1].replace(b"</Types>", _SHARED + b"</Types>")
        whole |= {"[Content_Types]": ("[Content_Types].xml", kinds)}
        whole |= {"sharedStrings": ("xl/sharedStrings.xml", _STRINGS + b"</sst>")}
        for key, (name, content) in whole.items():
            part = parts.get(key, content)
            with new.open(name, "w") as stream:
                if isinstance(part, bytes):
                    stream.write(part)
                    continue
                start, repeated, times, end = part
                stream.write(start)
                for left in range(times, 0, -100_000):
                    stream.write(repeated * min(left, 100_000))
                stream.write(end)
    plain.unlink()
    return file


_SHEET = b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
_STYLES = b'<styleSheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">'
_STRINGS = b'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">'
_CLOSED = b"</sheetData></worksheet>"
_SHARED = (
    b'<Override PartName="/xl/sharedStrings.xml" '
    b'ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"/>'
)


def many_formats(folder: Path, count: int = 1_000_000) -> Path:
    """Formats of cells, of which each becomes an object."""
    return _workbook(folder, styles=(_STYLES + b"<cellXfs>", b"<xf/>", count, b"</cellXfs></styleSheet>"))


def many_strings(folder: Path, count: int = 1_000_000) -> Path:
    return _workbook(folder, sharedStrings=(_STRINGS, b"<si/>", count, b"</sst>"))


def endless_row(folder: Path, cells: int = 1_000_000) -> Path:
    return _workbook(folder, sheet1=(_SHEET + b"<row>", b"<c/>", cells, b"</row>" + _CLOSED))


def distant_row(folder: Path, number: int = 10**15) -> Path:
    """All rows before it are made."""
    cell = b'<c t="inlineStr"><is><t>source</t></is></c>'
    return _workbook(
        folder, sheet1=_SHEET + b'<row r="1">%s</row><row r="%d">%s</row>' % (cell, number, cell) + _CLOSED
    )


def large_sheet(folder: Path, megabytes: int = 80) -> Path:
    return _workbook(folder, sheet1=(_SHEET, b"<row></row>" + b" " * 1013, megabytes << 10, _CLOSED))


def billion_laughs(folder: Path, depth: int = 12) -> Path:
    """Entities of entities."""
    names = [b"a%d" % number for number in range(depth)]
    entities = b"".join(b'<!ENTITY %s "%s">' % (name, b"&%s;" % before * 10) for before, name in pairwise(names))
    start = b'<!DOCTYPE s [<!ENTITY a0 "ha">%s]>' % entities
    return _workbook(folder, sharedStrings=start + _STRINGS + b"<si><t>&%s;</t></si></sst>" % names[-1])


def blank_image(folder: Path, side: int = 4_000, mode: str = "RGB", kind: str = "png") -> Path:
    """An image of one colour."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"image.{kind}"
    Image.new(mode, (side, side)).save(file, **({"compression": "tiff_adobe_deflate"} if kind == "tiff" else {}))
    return file


BOMBS: dict[str, Callable[..., Path]] = {
    function.__name__: function
    for function in (
        many_positions, distant_buckets, clipped_distances, stride_zero, one_tensor_many_names, meta_tensors,
        empty_tensors, classifier_tensors, endless_labels, shared_keys, nested_settings, deflated_weights,
        multiplying_normalizer, regex_normalizer, charsmap_normalizer, multiplying_decoder, endless_frame, long_piece,
        large_trie, sparse_trie, dense_trie, long_added_tokens, many_objects, large_vocabulary, repeated_piece,
        endless_vocab_txt, packed_arrays, deflated_lines,
        deflated_array, repeated_text, repeated_in_a_list, packed_page,
        many_groups, endless_header, understated_page, overstated_page, hidden_dictionary, endless_dictionary,
        endless_rows, endless_list,
        endless_lengths, endless_beginnings, many_formats, many_strings, endless_row,
        distant_row, large_sheet, billion_laughs, blank_image,
    )
}  # fmt: skip


def random_bomb(folder: Path, rng: random.Random) -> Path:
    """Write one of the bombs with sizes drawn at random, large enough to hurt."""
    kind = rng.choice(sorted(BOMBS))
    sizes: dict[str, dict[str, Any]] = {
        "many_positions": {"positions": rng.randrange(10**5, 16_000_000), "width": 16 * rng.randrange(1, 256)},
        "distant_buckets": {"distance": rng.randrange(10**5, 16_000_000)},
        "clipped_distances": {"clamp": rng.randrange(10**6, 16_000_000)},
        "stride_zero": {"rows": rng.randrange(10**5, 10**6), "zipped": rng.random() < 0.5},
        "one_tensor_many_names": {"names": rng.randrange(100, 20_000), "size": rng.randrange(10_000, 10**6)},
        "meta_tensors": {"rows": rng.randrange(10**6, 10**10)},
        "empty_tensors": {"count": rng.randrange(1_000, 200_000), "name": rng.choice(["x", "encoder.", "a.b."])},
        "classifier_tensors": {"count": rng.randrange(1_000, 40_000)},
        "endless_labels": {"labels": rng.randrange(10**8, 10**15)},
        "shared_keys": {"key": rng.randrange(2_000, 65_000), "count": rng.randrange(10_000, 100_000)},
        "nested_settings": {"megabytes": rng.randrange(17, 20)},
        "multiplying_normalizer": {"steps": rng.randrange(20, 500), "factor": rng.randrange(2, 50)},
        "regex_normalizer": {"written": rng.randrange(1_000, 50_000), "steps": rng.randrange(1, 20)},
        "charsmap_normalizer": {"size": rng.randrange(10_000, 10**6)},
        "multiplying_decoder": {"steps": rng.randrange(20, 500)},
        "endless_frame": {"ids": rng.randrange(1_000, 50_000), "times": rng.randrange(1_000, 20_000)},
        "long_piece": {"size": rng.randrange(10**5, 5_000_000)},
        "large_trie": {"pieces": rng.randrange(25_000, 200_000), "seed": rng.randrange(1 << 30)},
        "sparse_trie": {"pieces": rng.randrange(1_000, 2_000), "size": rng.randrange(500, 1_000)},
        "dense_trie": {"pieces": rng.randrange(110_000, 300_000), "size": rng.randrange(5, 8)},
        "long_added_tokens": {"tokens": rng.randrange(2_100, 20_000), "size": 2 * rng.randrange(250, 500)},
        "many_objects": {"count": rng.randrange(310_000, 3_000_000)},
        "repeated_piece": {"pieces": rng.randrange(50_000, 200_000)},
        "large_vocabulary": {"megabytes": rng.randrange(65, 160)},
        "deflated_weights": {"megabytes": rng.randrange(70, 200)},
        "endless_vocab_txt": {"lines": rng.randrange(2_000_000, 6_000_000)},
        "packed_arrays": {"images": rng.randrange(60_000, 120_000)},
        "deflated_lines": {"megabytes": rng.randrange(70, 200)},
        "deflated_array": {"megabytes": rng.randrange(70, 200)},
        "repeated_text": {"size": rng.randrange(10**6, 10**7), "rows": rng.randrange(1_000, 10**5)},
        "repeated_in_a_list": {"size": rng.randrange(10**5, 10**6), "times": rng.randrange(1_000, 10**5)},
        "many_groups": {"groups": rng.randrange(1_000, 30_000), "pages": rng.randrange(10_000, 30_000)},
        "endless_header": {"count": rng.randrange(1 << 30, 1 << 60)},
        "understated_page": {"megabytes": rng.randrange(33, 300)},
        "overstated_page": {"size": rng.randrange(1 << 26, 1 << 31)},
        "hidden_dictionary": {"size": rng.randrange(10**6, 10**7), "rows": rng.randrange(1_000, 10**5)},
        "endless_dictionary": {"values": rng.randrange(10**6, 1 << 31)},
        "endless_rows": {"rows": rng.randrange(10**7, 1 << 31)},
        "endless_list": {"values": rng.randrange(10**7, 1 << 30)},
        "endless_lengths": {"count": rng.randrange(10**6, 1 << 31)},
        "endless_beginnings": {"size": rng.randrange(10**5, 10**6), "times": rng.randrange(1_000, 100_000)},
        "packed_page": {"megabytes": rng.randrange(70, 200)},
        "many_formats": {"count": rng.randrange(300_000, 5_000_000)},
        "many_strings": {"count": rng.randrange(300_000, 10_000_000)},
        "endless_row": {"cells": rng.randrange(500_000, 10_000_000)},
        "distant_row": {"number": rng.randrange(1_100_000, 10**18)},
        "large_sheet": {"megabytes": rng.randrange(70, 200)},
        "billion_laughs": {"depth": rng.randrange(8, 30)},
        "blank_image": {
            "side": rng.randrange(6_000, 20_000),
            "mode": rng.choice(["L", "RGB"]),
            "kind": rng.choice(["png", "gif", "tiff"]),
        },
    }
    return BOMBS[kind](folder / kind, **sizes[kind])


# ---- opening them --------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """What happened: `refused` in our words, with the peak of memory beyond that of a process that opens nothing."""

    refused: bool
    words: str
    megabytes: float
    seconds: float  # of CPU time


def open_one(path: Path) -> None:
    """Open a path as its name asks for."""
    from allmask.data import list_of, read_records, text
    from allmask.text import Tokenizer
    from allmask.vision import datasets, images

    if path.suffix == ".npz":
        datasets.read(path)
    elif path.name in ("tokenizer.json", "vocab.txt"):
        Tokenizer.load(path).encode("a cat, 一只猫")
    elif path.name.startswith("image."):
        images.read_all([path], 32, 32, 3)
    elif path.name.startswith(("train.", "tagged.")):
        list(read_records(path, {"source": list_of(text) if path.name.startswith("tagged.") else text}))
    else:
        allmask.load(path)


def _open_all(paths: IO[str], answers: IO[str]) -> None:
    """Open one path after another, and write what happened to each."""
    for module in ("openpyxl", "PIL.Image", "pyarrow.compute", "pyarrow.parquet", "torch._subclasses.fake_tensor"):
        import_module(module)  # which must not count
    limit_memory(4 << 30)
    for line in paths:
        reset_peak()
        before, start, words, refused = megabytes("VmRSS"), time.process_time(), "", False
        try:
            open_one(Path(line.rstrip("\n")))
        except AllmaskError as error:
            words, refused = str(error), True
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        peak = megabytes("VmHWM") - before
        print(json.dumps([refused, words, peak, time.process_time() - start]), file=answers, flush=True)


class Opener:
    """A process that opens one path after another, under a limit of memory: `opener(path)` says what happened.

    It is a fork of this one, so that it need not import anything.
    """

    def __init__(self) -> None:
        torch.empty(1, device="meta").normal_()  # imports much
        (paths, self.to), (self.answers, answers) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self.to)
                os.close(self.answers)
                _open_all(os.fdopen(paths), os.fdopen(answers, "w"))
            finally:
                os._exit(1)
        os.close(paths)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(self.to, "w"), os.fdopen(self.answers)

    def __call__(self, path: Path) -> Opened:
        print(path, file=self.stdin, flush=True)
        line = self.stdout.readline()
        return Opened(*json.loads(line)) if line else Opened(False, "its process ended", float("inf"), 0.0)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.stdin.close()
        self.stdout.close()
