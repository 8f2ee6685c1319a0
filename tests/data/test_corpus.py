"""The token store: the same tokens from every format, whole after any interruption, never damaged without a word."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from allmask.data import Texts
from allmask.data import corpus as module
from allmask.data.corpus import Corpus, fingerprint, prepare
from allmask.errors import CheckpointError, DataError, ResourceError, UsageError
from allmask.text import Tokenizer, train_tokenizer

TEXT = "北京欢迎你。\n你想吃啥\n\n\n白切鸡\n \u3000\nred cat\n"
DOCUMENTS = [["北京欢迎你。", "你想吃啥"], ["白切鸡"], ["red cat"]]
ALPHABET = "北京欢迎你。想吃啥白切鸡redcat\n "


def characters(alphabet: str = ALPHABET, extra: int = 0) -> Tokenizer:
    """A token a character, numbered as in the alphabet after [UNK]; none for an x."""
    pieces = ["[UNK]", *dict.fromkeys(alphabet), *(f"extra{number}" for number in range(extra))]
    backend = Backend(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Replace("x", "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return Tokenizer(backend, {"unk": "[UNK]"})


def text_of(corpus: Corpus, tokenizer: Tokenizer) -> list[list[str]]:
    """The documents as lists of sentences, put together again."""
    found = []
    for number in range(corpus.documents):
        ids, starts = corpus.document(number)
        cut = np.split(ids, starts[1:])
        found.append(["".join(tokenizer.tokens(sentence.tolist())) for sentence in cut])
    return found


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in module.FILES}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "a.txt", TEXT)


@pytest.fixture
def long_source(tmp_path: Path) -> Path:
    lines = [f"你想吃啥{'白切鸡' * (n % 5)}\n" + "x\n" * (n % 7 == 0) + "\n" * (n % 3 == 0) for n in range(200)]
    return write(tmp_path / "long.txt", "".join(lines))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    monkeypatch.setattr(module, "PART_TOKENS", 200)


# ---- what is in it -----------------------------------------------------------------------------------------


def test_by_hand(tmp_path: Path, source: Path):
    corpus = prepare([source], characters(), tmp_path / "corpus")
    assert corpus.ids.tolist() == [1, 2, 3, 4, 5, 6, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 16, 17, 18]
    assert corpus.ids.dtype == np.uint16
    assert corpus.sentence_starts.tolist() == [0, 6, 10, 13, 20]
    assert corpus.document_starts.tolist() == [0, 2, 3, 4]
    assert (corpus.documents, corpus.sentences, corpus.tokens) == (3, 4, 20)
    ids, starts = corpus.document(0)
    assert (ids.tolist(), starts.tolist()) == ([1, 2, 3, 4, 5, 6, 5, 7, 8, 9], [0, 6])
    with pytest.raises(IndexError, match="document 3 of 3"):
        corpus.document(3)
    assert repr(corpus).endswith("3 documents, 4 sentences, 20 tokens)")
    meta = corpus.meta
    assert (meta["documents"], meta["sentences"], meta["tokens"], meta["skipped"]) == (3, 4, 20, {})
    assert sorted(os.listdir(tmp_path / "corpus")) == ["documents.bin", "meta.json", "sentences.bin", "tokens.bin"]


def test_every_format_gives_the_same(tmp_path: Path):
    lines = ["\n".join(document) for document in DOCUMENTS]
    jsonl = "".join(json.dumps({"text": text, "id": 1}, ensure_ascii=False) + "\n" for text in lines)
    files = [write(tmp_path / "a.txt", TEXT), write(tmp_path / "b.jsonl", jsonl), tmp_path / "c.txt.gz"]
    files[2].write_bytes(gzip.compress(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()))
    files += [tmp_path / "d.jsonl.gz", tmp_path / "e.parquet"]
    files[3].write_bytes(gzip.compress(jsonl.encode()))
    parquet.write_table(arrow.table({"id": [1, 2, 3], "text": lines}), files[4])
    for file in files:
        corpus = prepare([file], characters(), tmp_path / f"corpus-{file.name}")
        assert text_of(corpus, characters()) == DOCUMENTS, file.name
    assert text_of(prepare(files, characters(), tmp_path / "all"), characters()) == DOCUMENTS * 5


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "bpe"])
def test_the_ids_are_those_of_single_lines(tmp_path: Path, long_source: Path, kind: str):
    tokenizer = train_tokenizer(Texts([long_source]), kind, 300)
    lines = [line for line in long_source.read_text(encoding="utf-8").splitlines() if line]
    corpus = prepare([long_source], tokenizer, tmp_path / "corpus")
    singly = [tokenizer.encode(line, special=False).ids for line in lines]
    assert corpus.ids.tolist() == [id for ids in singly for id in ids]
    assert np.diff(corpus.sentence_starts).tolist() == [len(ids) for ids in singly]


def test_a_large_vocabulary_needs_four_bytes(tmp_path: Path, source: Path):
    for extra, dtype in ((65_536 - 21, "uint16"), (65_537 - 21, "uint32")):
        tokenizer = characters(extra=extra)
        corpus = prepare([source], tokenizer, tmp_path / dtype)
        assert corpus.ids.dtype == dtype
        assert text_of(corpus, tokenizer) == DOCUMENTS


def test_sentences_without_a_token_are_left_out(tmp_path: Path):
    tokenizer = characters()
    corpus = prepare([write(tmp_path / "a.txt", "x\n白\n\nxx\n\nx\n\nx\n鸡\nx\n吃\n")], tokenizer, tmp_path / "corpus")
    assert text_of(corpus, tokenizer) == [["白"], ["鸡", "吃"]]
    with pytest.raises(DataError, match=r"b.txt: the tokenizer produces no tokens"):
        prepare([write(tmp_path / "b.txt", "xx\n")], tokenizer, tmp_path / "none")


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.text("北京你red", min_size=1, max_size=30), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 80), st.integers(0, 3),
)  # fmt: skip
def test_any_documents_come_back(tmp_path_factory, documents: list[list[str]], chunk: int, workers: int):
    folder = tmp_path_factory.mktemp("any")
    file = write(folder / "a.txt", "\n\n".join("\n".join(document) for document in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        corpus = prepare([file], characters(), folder / "corpus", workers)
    assert text_of(corpus, characters()) == documents


# ---- what is wrong with the text ---------------------------------------------------------------------------


def test_a_bad_line_is_named_and_leaves_no_store(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("白\n".encode() + b"\xff")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8"):
        prepare([tmp_path / "a.txt"], characters(), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(UsageError, match="workers is -1"):
        prepare([tmp_path / "a.txt"], characters(), tmp_path / "corpus", -1)


def test_bad_records_can_be_skipped_and_are_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n" + "白\n".encode())
    write(tmp_path / "b.jsonl", '{"text": "鸡"}\n{"text": " "}\nnothing\n')
    files, said = [tmp_path / "a.txt", tmp_path / "b.jsonl"], []
    corpus = prepare(files, characters(), tmp_path / "corpus", on_bad_record="skip")
    assert text_of(corpus, characters()) == [["白"], ["鸡"]]
    assert corpus.meta["skipped"] == {"not UTF-8": 1, 'blank "text"': 1, "malformed JSON": 1}
    with pytest.raises(DataError, match=r"a\.txt:1: not UTF-8"):  # a store with less than asked for is not taken
        prepare(files, characters(), tmp_path / "corpus", say=said.append)
    assert said == [f"bad records were skipped, which is no longer allowed; preparing {tmp_path / 'corpus'} again"]


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path, source: Path):
    def grow(done: int, total: int) -> None:
        with source.open("a") as stream:
            stream.write("\n")

    with pytest.raises(DataError, match=r"a\.txt: changed while it was read"):
        prepare([source], characters(), tmp_path / "corpus", progress=grow)
    assert not (tmp_path / "corpus").exists()


# ---- taken again, made again -------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sentences each call encoded."""
    calls, real = [], module._encode

    def encode(tokenizer, chunk):
        calls.append(len(chunk))
        return real(tokenizer, chunk)

    monkeypatch.setattr(module, "_encode", encode)
    return calls


def test_an_unchanged_store_is_reused(tmp_path: Path, source: Path, encoded: list[int]):
    said: list[str] = []
    for _ in range(2):
        prepare([source], characters(), tmp_path / "corpus", say=said.append)
    os.utime(source, (1, 1))  # another date, the same content
    prepare([source], characters(), tmp_path / "corpus", say=said.append, on_bad_record="skip")
    moved = source.rename(tmp_path / "moved.txt")
    assert prepare([moved], characters(), tmp_path / "corpus", say=said.append).documents == 3
    assert encoded == [4] and said == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("text", "a.txt has changed"),
        ("more files", "there are 2 files instead of 1"),
        ("tokenizer", "the tokenizer has changed"),
        ("verbatim", "the options of reading have changed"),
        ("damage", "tokens.bin: damaged: its SHA-256 is not the one in meta.json"),
        ("meta", "meta.json: damaged: its checksum is wrong"),
    ],
)
def test_a_store_is_made_again_with_the_reason_of_the_change(tmp_path: Path, source: Path, change: str, reason: str):
    folder, said, files, tokenizer = tmp_path / "corpus", [], [source], characters()
    prepare(files, tokenizer, folder)
    if change == "text":
        os.utime(write(source, TEXT.replace("red", "cat")), ns=(1, 1))
    elif change == "more files":
        files = [source, write(tmp_path / "b.txt", "鸡")]
    elif change == "tokenizer":
        tokenizer = characters(ALPHABET[::-1])
    elif change == "damage":
        flip(folder / "tokens.bin", 0)
    elif change == "meta":
        (folder / "meta.json").write_text("{")
    verbatim = change == "verbatim"
    again = prepare(files, tokenizer, folder, say=said.append, verbatim=verbatim)
    assert len(said) == 1 and said[0].endswith(f"{reason}; preparing {folder} again")
    fresh = prepare(files, tokenizer, tmp_path / "fresh", verbatim=verbatim)
    assert files_of(folder) == files_of(tmp_path / "fresh")
    assert again.tokens == fresh.tokens == Corpus.open(folder).tokens


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path, source: Path):
    with pytest.raises(UsageError, match=r"not a token store: it contains a\.txt"):
        prepare([source], characters(), tmp_path)
    with pytest.raises(UsageError, match="not a token store: it contains"):
        prepare([source], characters(), source)
    assert source.read_text() == TEXT


def test_the_folder_may_be_a_symbolic_link(tmp_path: Path, source: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "disk")
    prepare([source], characters(), tmp_path / "corpus")
    assert (tmp_path / "corpus").is_symlink() and Corpus.open(tmp_path / "disk").documents == 3


def test_fingerprints():
    assert fingerprint(characters()) == fingerprint(characters())
    assert fingerprint(characters()) != fingerprint(characters(ALPHABET[::-1]))
    assert fingerprint(characters()) != fingerprint(Tokenizer(characters().backend, {"pad": "[UNK]"}))


# ---- damage ------------------------------------------------------------------------------------------------


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("name", module.FILES)
def test_damage_is_found_and_named(tmp_path: Path, source: Path, name: str):
    folder = tmp_path / "corpus"
    prepare([source], characters(), folder)
    file = folder / name
    flip(file, -1)
    with pytest.raises(DataError, match=f"{name}: damaged: its SHA-256"):
        Corpus.open(folder)
    Corpus.open(folder, verify=False)
    file.write_bytes(file.read_bytes()[:-2])
    for verify in (True, False):
        with pytest.raises(DataError, match=rf"{name}: damaged: \d+ bytes instead of"):
            Corpus.open(folder, verify)
    file.unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        Corpus.open(folder, verify=False)


def test_folders_that_are_not_stores_are_refused(tmp_path: Path, source: Path):
    with pytest.raises(DataError, match="not a token store"):
        Corpus.open(tmp_path)
    prepare([source], characters(), tmp_path / "corpus")
    meta = tmp_path / "corpus" / "meta.json"
    whole = meta.read_text()
    flip(meta, len(whole) // 2)
    with pytest.raises(DataError, match=r"meta\.json: damaged"):
        Corpus.open(tmp_path / "corpus", verify=False)
    meta.write_text(module.sealed({**module.unsealed(whole), "format": 99}))
    with pytest.raises(DataError, match="format 99; this version reads 1"):
        Corpus.open(tmp_path / "corpus")


@given(st.data())
def test_a_checksum_detects_any_flipped_bit(data: st.DataObject):
    values = {"tokens": 120, "path": "/白/鸡.txt", "sizes": {"a": 1}}
    text = bytearray(module.sealed(values).encode())
    assert module.unsealed(text.decode()) == values
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert module.unsealed(text.decode("utf-8", "replace")) in (None, values)  # hex digits have two cases


# ---- interruptions -----------------------------------------------------------------------------------------


def stop_after(calls: int, error: BaseException) -> Callable[[int, int], None]:
    """As progress: raises when it is called so often."""
    done = iter(range(calls))

    def progress(*_: int) -> None:
        if next(done, None) is None:
            raise error

    return progress


@pytest.mark.parametrize("calls", [0, 1, 7, 12])
def test_an_interrupted_preparation_is_resumed(tmp_path: Path, long_source: Path, small_parts, encoded, calls: int):
    tokenizer, folder, said = characters(), tmp_path / "corpus", []
    prepare([long_source], tokenizer, tmp_path / "whole")
    total = sum(encoded)
    with pytest.raises(KeyboardInterrupt):
        prepare([long_source], tokenizer, folder, progress=stop_after(calls, KeyboardInterrupt()))
    assert not folder.exists()
    encoded.clear()
    prepare([long_source], tokenizer, folder, say=said.append)
    assert files_of(folder) == files_of(tmp_path / "whole")
    assert (sum(encoded) < total) == bool(said) == (calls > 0)  # the first comes before a part ends
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("name", [*module.FILES, module.JOURNAL])
@pytest.mark.parametrize("harm", ["flip the first byte", "flip the middle", "cut", "remove"])
def test_a_damaged_partial_store_is_not_resumed_from_its_damage(
    tmp_path: Path, long_source: Path, small_parts, name: str, harm: str
):
    tokenizer, folder = characters(), tmp_path / "corpus"
    prepare([long_source], tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare([long_source], tokenizer, folder, progress=stop_after(9, KeyboardInterrupt()))
    file = folder.with_name(".corpus.partial") / name
    if harm == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "remove":
        file.unlink()
    else:
        flip(file, 0 if "first" in harm else file.stat().st_size // 3)
    prepare([long_source], tokenizer, folder)
    assert files_of(folder) == files_of(tmp_path / "whole")
    assert Corpus.open(folder).meta["files"] == Corpus.open(tmp_path / "whole").meta["files"]


def test_after_a_bad_line_the_finished_parts_are_reused(tmp_path: Path, long_source: Path, small_parts):
    long_source.write_bytes(long_source.read_bytes() + b"\xff\n")
    with pytest.raises(DataError, match=r"long\.txt:\d+: not UTF-8"):
        prepare([long_source], characters(), tmp_path / "corpus")
    said: list[str] = []
    corpus = prepare([long_source], characters(), tmp_path / "corpus", on_bad_record="skip", say=said.append)
    assert "resuming after" in said[0] and corpus.sentences == 200 and corpus.meta["skipped"] == {"not UTF-8": 1}


def test_a_partial_store_of_another_corpus_is_dropped(tmp_path: Path, long_source: Path, source: Path, small_parts):
    folder = tmp_path / "corpus"
    with pytest.raises(KeyboardInterrupt):
        prepare([long_source], characters(), folder, progress=stop_after(9, KeyboardInterrupt()))
    assert text_of(prepare([source], characters(), folder), characters()) == DOCUMENTS


def test_a_full_disk_is_reported_and_finished_parts_are_kept(
    tmp_path: Path, long_source, small_parts, monkeypatch, encoded
):
    folder, real, flushes = tmp_path / "corpus", os.fsync, iter(range(8))

    def fsync(handle: int) -> None:
        if next(flushes, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(ResourceError, match="corpus: cannot be written: No space left on device"):
        prepare([long_source], characters(), folder)
    monkeypatch.setattr(module.os, "fsync", real)
    said: list[str] = []
    prepare([long_source], characters(), folder, say=said.append)
    assert "resuming after" in said[0]
    prepare([long_source], characters(), tmp_path / "whole")
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_other_failures_are_reported(tmp_path: Path, source: Path):
    with pytest.raises(ResourceError, match="cannot be written"):
        prepare([source], characters(), source / "corpus")
    backend = Backend(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # its unknown token is not in it
    with pytest.raises(CheckpointError, match="tokenizer: not a usable tokenizer"):
        prepare([source], Tokenizer(backend, {}), tmp_path / "corpus")


def test_progress_ends_at_the_total(tmp_path: Path, source: Path):
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode() * 50))
    parquet.write_table(arrow.table({"text": [TEXT + str(number) for number in range(50)]}), tmp_path / "c.parquet")
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 100)
        files = [source, tmp_path / "b.txt.gz", tmp_path / "c.parquet"]
        prepare(files, characters(), tmp_path / "corpus", progress=lambda *numbers: seen.append(numbers))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and len(set(done)) > 20
    assert set(totals) == {done[-1]} and done[-1] > len(TEXT.encode()) * 51


# ---- other processes ---------------------------------------------------------------------------------------

HELD = """
import sys, time
from pathlib import Path
from allmask.data import corpus as module
from allmask.text import Tokenizer
source, tokenizer, folder, hold = sys.argv[1:]
module.CHUNK, module.PART_TOKENS, real, calls = 100, 200, module._encode, iter(range(10))
def encode(tokenizer, chunk):
    while next(calls, None) is None and Path(hold).exists():
        time.sleep(0.01)
    print("encoded", flush=True)
    return real(tokenizer, chunk)
module._encode = encode
say = lambda line: print(line, flush=True)
say(module.prepare([source], Tokenizer.load(tokenizer), folder, say=say))
"""


def start(script: str, *arguments: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        cwd=Path(module.__file__).parents[2],
    )  # fmt: skip


def test_of_three_processes_one_works_and_another_resumes_when_it_is_killed(tmp_path: Path, long_source: Path):
    tokenizer, folder, hold = characters(), tmp_path / "corpus", write(tmp_path / "hold", "")
    tokenizer.save(tmp_path / "tokenizer")
    whole = prepare([long_source], tokenizer, tmp_path / "whole")
    processes = [start(HELD, long_source, tmp_path / "tokenizer", folder, hold) for _ in range(3)]
    try:
        first = {process: process.stdout.readline() for process in processes if process.stdout}
        waiting = [process for process, line in first.items() if "another process is preparing it; waiting" in line]
        assert len(waiting) == 2 and not folder.exists()
        [worker] = [process for process in processes if process not in waiting]
        journal = folder.with_name(".corpus.partial") / module.JOURNAL
        while not (journal.is_file() and journal.read_text().count("\n") >= 2):
            assert worker.poll() is None
            time.sleep(0.01)
        worker.kill()
        hold.unlink()
        said = [process.communicate(timeout=60)[0] for process in waiting]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in waiting] == [0, 0]
    assert all(f"Corpus({folder}, {whole.documents} documents" in text for text in said)
    assert sorted("encoded" in text and "resuming after" in text for text in said) == [False, True]
    assert sorted("encoded" in text for text in said) == [False, True]  # the third found it done
    assert files_of(folder) == files_of(tmp_path / "whole")


MEMORY = """
import resource, sys
from allmask.data.corpus import prepare
from allmask.text import Tokenizer
folder, tokenizer = sys.argv[1], Tokenizer.load(sys.argv[2])
for megabytes in (5, 50):
    with open(f"{folder}/{megabytes}.txt", "w") as file:
        for number in range(megabytes * 100):
            print((f"白{'x' * 196} " * 50).strip() + "\\n" * (number % 10 == 0), file=file)
    tokens = prepare([f"{folder}/{megabytes}.txt"], tokenizer, f"{folder}/{megabytes}").tokens
    print(tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path):
    backend = Backend(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, {"unk": "[UNK]"}).save(tmp_path / "tokenizer")
    process = start(MEMORY, tmp_path, tmp_path / "tokenizer")
    small, large = (list(map(int, line.split())) for line in process.communicate(timeout=120)[0].splitlines())
    assert (small[0], large[0]) == (25_000, 250_000)
    assert large[1] - small[1] < 15_000  # kilobytes; the text itself is 45 MB longer
