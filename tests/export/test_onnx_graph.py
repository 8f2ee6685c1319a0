"""ONNX: what ONNX Runtime computes is what the model computes; what has no graph is refused, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from allmask import presets
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.export import onnx_graph
from allmask.model import Model, load
from allmask.nn.heads import SPAN, Labels
from allmask.tasks.classify import Classify
from allmask.tasks.task import save_task
from allmask.text import Tokenizer
from tests import tiny

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

SIZES = {
    "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 48, "vocab_size": 60, "init_std": 0.3,
}  # fmt: skip
CONFIGS = {
    "bert": replace(presets.bert_base(), **SIZES),
    "gpt2": replace(presets.gpt2(), **SIZES),
    "a causal bert": replace(presets.bert_base(), **SIZES, own_mask="causal"),
    "norms in front, RMS, gated": replace(
        presets.bert_base(),
        **SIZES,
        norm_place="pre",
        norm="rms",
        gated=True,
        bias=False,
        activation="gelu_tanh",
        position_kind="sinusoidal",
        segments=0,
    ),
    "relu, wide heads, scaled": replace(
        presets.bert_base(),
        **SIZES,
        activation="relu",
        head_width=12,
        embedding_scaled=True,
        segments=1,
        scores_scaled=False,
    ),
    "roberta": replace(presets.bert_base(), **SIZES, family="roberta", position_offset=2, segments=1),
    "distilbert": replace(presets.bert_base(), **SIZES, family="distilbert", segments=0),
    "albert": replace(presets.bert_base(), **SIZES, family="albert", embedding_width=8, shared_layers=True),
    "electra": replace(presets.bert_base(), **SIZES, family="electra", embedding_width=8),
    "ernie": replace(presets.bert_base(), **SIZES, family="ernie", task_types=3),
}
HEADS = {"none": None, "texts": Labels("single", ("好", "坏", "?")), "words": Labels("tag", ("O", "B")), "spans": SPAN}
TEXTS = ["red cat runs here.", "北京欢迎你。", "blue dog sings there today."]


def fresh(config: Config, labels: Labels | None = None) -> Model:
    """With biases and norms that differ from 0 and 1."""
    rng = torch.Generator().manual_seed(0)
    model = Model.fresh(config, [], rng)
    model = model if labels is None else model.with_labels(labels, rng)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng)
    return model.eval()


def run(folder: Path, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    feed = {name: tensor.numpy() for name, tensor in given.items() if name in wanted}
    assert feed.keys() == wanted
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))


# All families give hidden states, and those of whole texts in their own ways; heads of tokens are one layer for all
PAIRS = [(name, head) for name in CONFIGS for head in HEADS if head in ("none", "texts") or name in ("bert", "albert")]


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_onnx_runtime_computes_the_same(name: str, head: str, tmp_path: Path):
    model, labels = fresh(CONFIGS[name], HEADS[head]), HEADS[head]
    onnx_graph.write(model, tmp_path)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    rng = torch.Generator().manual_seed(1)
    for lengths, left in (([5, 9, 1], False), ([3], False), ([2, 6], True)):  # the graph is for any batch and length
        ids = torch.randint(60, (len(lengths), max(lengths)), generator=rng)
        valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        valid = valid.flip(1) if left else valid
        segments = torch.randint(max(1, model.config.segments), ids.shape, generator=rng)
        found = run(tmp_path, input_ids=ids, attention_mask=valid.long(), token_type_ids=segments)
        with torch.no_grad():
            output = model(ids, model.own_mask(valid), segments)
            expected = output.hidden if labels is None else output.answers
        if labels is None:
            torch.testing.assert_close(found["last_hidden_state"], expected, rtol=0, atol=1e-4)
            mean = torch.stack([row[own].mean(0) for row, own in zip(expected, valid, strict=True)])
            torch.testing.assert_close(found["sentence_embedding"], mean, rtol=0, atol=1e-4)
        elif labels.kind == "span":
            both = torch.stack([found["start_logits"], found["end_logits"]], -1)[valid]
            torch.testing.assert_close(both, expected, rtol=0, atol=1e-4)
        else:
            logits = found["logits"][valid] if labels.of_tokens else found["logits"]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_the_first_token_as_the_vector(tmp_path: Path):
    model = fresh(CONFIGS["bert"])
    onnx_graph.write(model, tmp_path, pool="cls")
    ids = torch.tensor([[2, 7, 9, 3]])
    ones = torch.ones_like(ids)
    found = run(tmp_path, input_ids=ids, attention_mask=ones, token_type_ids=0 * ones)
    torch.testing.assert_close(found["sentence_embedding"], found["last_hidden_state"][:, 0])


def test_int8_is_small_and_close(tmp_path: Path):
    model = fresh(replace(CONFIGS["bert"], width=64, ffn_width=256, vocab_size=500))
    for name in ("whole", "int8"):
        (tmp_path / name).mkdir()
        onnx_graph.write(model, tmp_path / name, int8=name == "int8")
        assert [file.name for file in (tmp_path / name).iterdir()] == ["model.onnx"]
    sizes = {name: (tmp_path / name / "model.onnx").stat().st_size for name in ("whole", "int8")}
    assert sizes["int8"] < 0.4 * sizes["whole"]
    ids = torch.randint(500, (4, 20), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    vectors = [run(tmp_path / name, **given)["sentence_embedding"] for name in ("whole", "int8")]
    assert torch.cosine_similarity(*vectors).min() > 0.99


def test_large_weights_are_beside_the_graph(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(onnx_graph, "LARGE", 1000)
    model, ids = fresh(CONFIGS["gpt2"]), torch.tensor([[2, 7, 9, 3]])
    onnx_graph.write(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    found = run(tmp_path, input_ids=ids, attention_mask=torch.ones_like(ids))["last_hidden_state"]
    torch.testing.assert_close(found, model(ids).hidden.detach(), rtol=0, atol=1e-4)


REFUSED = {
    "encoder–decoder": (replace(presets.transformer_small(), **SIZES, decoder_layers=2), None, "encoder–decoder"),
    "xlnet": (replace(presets.xlnet_base(), **SIZES), None, "shifted positions"),
    "roformer": (replace(presets.bert_base(), **SIZES, family="roformer", position_kind="rotary"), None, "rotary"),
    "crf": (CONFIGS["bert"], Labels("chain", ("O", "B")), "CRF"),
    "batch norm": (replace(CONFIGS["bert"], norm="batch"), None, "batch norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_graph(case: str):
    config, labels, why = REFUSED[case]
    model = Model.fresh(config, [], torch.Generator().manual_seed(0))
    with pytest.raises(CheckpointError, match=f"mine: .*{why}"):
        onnx_graph.expect_convertible(model if labels is None else model.with_labels(labels), "mine")


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reviews"
    model = load(tiny.bert(folder)).with_labels(HEADS["texts"], torch.Generator().manual_seed(1))
    model.save(folder)
    save_task(Classify(), folder)
    return folder


def test_texts_to_labels_with_the_folder_alone(cli, classifier: Path, tmp_path: Path):
    """The tokenizer and the names of the labels are beside the graph."""
    out = tmp_path / "out"
    ran = cli("convert", classifier, "--to", "onnx", "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["layout"] == "onnx" and not (out / "model.safetensors").exists()
    tokenizer = Tokenizer.load(out)
    encoded = [one.raw for one in tokenizer.encode_batch(TEXTS)]
    for one in encoded:
        one.pad(max(len(other) for other in encoded))
    names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    given = {name: torch.tensor([getattr(one, field) for one in encoded]) for name, field in names.items()}
    logits = run(out, **given)["logits"]
    labels = json.loads((out / "config.json").read_text())["id2label"]
    import allmask

    expected = allmask.pipeline("classify", classifier, precision="fp32", device="cpu")(TEXTS)
    assert [labels[str(number)] for number in logits.argmax(1).tolist()] == [one.label for one in expected]
    probabilities = [one.probability for one in expected]
    np.testing.assert_allclose(logits.softmax(1).max(1).values.numpy(), probabilities, atol=1e-4)


def test_transformers_reads_the_settings(cli, classifier: Path, tmp_path: Path):
    from transformers import AutoConfig, AutoTokenizer

    assert cli("convert", classifier, "--to", "onnx", "--out", tmp_path / "out").code == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "好", 1: "坏", 2: "?"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("北京")["input_ids"]


def test_a_writer_is_refused_and_its_encoder_is_not(cli, tmp_path: Path):
    writer, out = tiny.writer(tmp_path / "writer"), tmp_path / "out"
    ran = cli("convert", writer, "--to", "onnx", "--out", out)
    assert ran.code == 4 and "prefix mask" in ran.err and "--encoder" in ran.err and not out.exists()
    assert cli("convert", writer, "--to", "onnx", "--encoder", "--out", out).code == 0
    gpt2 = tiny.gpt2(tmp_path / "gpt2")
    ran = cli("convert", gpt2, "--to", "onnx", "--out", tmp_path / "other")
    assert ran.code == 4 and "step by step" in ran.err and "--to ctranslate2" in ran.err


def test_a_language_model_head_is_left_out_aloud(cli, tmp_path: Path):
    ran = cli("convert", tiny.bert(tmp_path / "bert", ["lm"]), "--to", "onnx", "--out", tmp_path / "out")
    assert ran.code == 0 and "without its language model head" in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "onnx", "--dtype", "float16"], "float32 or int8"),
        (["--to", "ctranslate2", "--dtype", "float16", "--int8"], "exclude each other"),
        (["--int8"], "for --to onnx and ctranslate2"),
        (["--encoder"], "for --to onnx and ctranslate2"),
    ],
)
def test_options_that_contradict_each_other(cli, words: list[str], message: str, tmp_path: Path):
    ran = cli("convert", "minilm", "--out", tmp_path / "out", *words)
    assert ran.code == 2 and message in ran.err and not (tmp_path / "out").exists()


def test_a_missing_package_is_named(cli, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("allmask.export.find_spec", lambda name: None)
    ran = cli("convert", "minilm", "--to", "onnx", "--int8", "--out", tmp_path / "out")
    assert ran.code == 2 and "needs onnx and onnxruntime" in ran.err and "pip install onnx onnxruntime" in ran.err
