"""`allmask convert`: what it writes, transformers loads; what it refuses, it leaves alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from allmask.model import Model
from allmask.presets import transformer_small

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"北京欢迎你白切鸡想吃啥", "play", "##ing", "##ed"]
TEXT = "北京欢迎你 playing"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT as transformers writes it, with the vocabulary above."""
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=len(PIECES),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return folder


def predict(folder: Path, text: str) -> dict[str, torch.Tensor]:
    """What transformers makes of a folder: for each piece of its vocabulary the logits at every position."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return {piece: logits[:, id] for piece, id in tokenizer.get_vocab().items()}


def test_transformers_loads_the_same_model(cli, bert: Path, tmp_path: Path):
    ran = cli("convert", bert, "--out", tmp_path / "new" / "out")
    assert ran.code == 0, ran.err
    before, after = predict(bert, TEXT), predict(tmp_path / "new" / "out", TEXT)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[piece], after[piece]) for piece in before)
    assert "parameters in float32" in ran.out


def test_what_is_written_can_be_verified(cli, bert: Path, tmp_path: Path):
    cli("convert", bert, "--out", tmp_path / "out")
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0 and ran.out.endswith("intact\n")
    with (tmp_path / "out" / "vocab.txt").open("a") as file:
        file.write("x\n")
    assert "vocab.txt is damaged" in cli("verify", tmp_path / "out").out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precision(cli, bert: Path, tmp_path: Path, dtype: str):
    report = json.loads(cli("convert", bert, "--out", tmp_path / "out", "--dtype", dtype, "--json").out)
    assert report["dtype"] == dtype and report["bytes"] == 2 * report["parameters"]
    written = BertModel.from_pretrained(tmp_path / "out", dtype="auto")
    original = BertModel.from_pretrained(bert, dtype=torch.float32)
    expected = original.embeddings.word_embeddings.weight.to(getattr(torch, dtype))
    assert torch.equal(written.embeddings.word_embeddings.weight, expected)


def test_keep_tokens(cli, bert: Path, tmp_path: Path):
    (tmp_path / "corpus.txt").write_text(TEXT + "\n", encoding="utf-8")
    ran = cli("convert", bert, "--out", tmp_path / "out", "--keep-tokens", tmp_path / "corpus.txt", "--json")
    report = json.loads(ran.out)
    before, after = predict(bert, TEXT), predict(tmp_path / "out", TEXT)
    assert set(after) == {*PIECES[:5], *"北京欢迎你", "play", "##ing"}
    for piece, logits in after.items():
        torch.testing.assert_close(logits, before[piece], rtol=0, atol=1e-6)
    dropped = len(PIECES) - len(after)
    assert (report["vocab_size_before"], report["vocab_size"]) == (len(PIECES), len(after))
    assert report["bytes_saved"] == dropped * (16 + 1) * 4  # an embedding row and an output bias each, in fp32


def test_the_saving_is_told(cli, bert: Path, tmp_path: Path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "白切鸡"}\n', encoding="utf-8")
    ran = cli("convert", bert, "--out", tmp_path / "out", "--keep-tokens", tmp_path / "corpus.jsonl")
    assert f"vocabulary {len(PIECES)} → 8, " in ran.out and "MB saved" in ran.out


def test_the_corpus_may_be_a_folder_of_any_kind_of_file(cli, bert: Path, tmp_path: Path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.csv").write_text("body\n白切\n", encoding="utf-8")
    (tmp_path / "corpus" / "b.jsonl.gz").write_bytes(gzip.compress('{"body": "鸡"}\n'.encode()))
    line = ("--keep-tokens", tmp_path / "corpus", "--text-field", "body")
    ran = cli("convert", bert, "--out", tmp_path / "out", *line)
    assert f"vocabulary {len(PIECES)} → 8, " in ran.out, ran.err


def test_an_occupied_place_is_left_alone(cli, bert: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("full", "full/notes.txt", "dangling"):
        ran = cli("convert", bert, "--out", tmp_path / name)
        assert ran.code == 2 and f"error[usage]: {tmp_path / name}: already there" in ran.err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_folder_is_fine(cli, bert: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert cli("convert", bert, "--out", tmp_path / "empty").code == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nosuch"], 4, "error[model]: nosuch"),
        (["{bert}", "--keep-tokens", "nosuch.txt"], 3, "error[data]: nosuch.txt"),
        (["{bert}", "--to", "gguf"], 2, "--to"),
        (["{bert}", "--dtype", "int3"], 2, "--dtype"),
    ],
)
def test_a_failure_leaves_nothing_behind(cli, bert: Path, tmp_path: Path, words: list[str], code: int, says: str):
    ran = cli("convert", *[word.format(bert=bert) for word in words], "--out", tmp_path / "out")
    assert ran.code == code and says in ran.err
    assert list(tmp_path.iterdir()) == []


def test_keep_tokens_needs_a_tokenizer(cli, bert: Path, tmp_path: Path):
    model = tmp_path / "bare"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((bert / name).read_bytes())
    (tmp_path / "corpus.txt").write_text(TEXT, encoding="utf-8")
    ran = cli("convert", model, "--out", tmp_path / "out", "--keep-tokens", tmp_path / "corpus.txt")
    assert ran.code == 2 and "has no tokenizer" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_model_only_allmask_has_is_said_to_be_one(cli, tmp_path: Path):
    Model.fresh(transformer_small(), ["lm"], rng=torch.Generator().manual_seed(0)).save(tmp_path / "ours")
    ran = cli("convert", tmp_path / "ours", "--out", tmp_path / "out", "--json")
    assert ran.code == 0 and json.loads(ran.out)["layout"] == "allmask"
    assert "allmask's own layout" in ran.err
