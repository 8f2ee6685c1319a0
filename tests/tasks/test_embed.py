"""Vectors of texts: those of the model itself, whatever stands beside a text; the nearest by brute force."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.errors import CheckpointError, UsageError
from allmask.kernels import int8
from allmask.model import Model, load
from allmask.tasks.embed import (
    CLOSE,
    POOLING,
    SAMPLES,
    Embedder,
    as_digits,
    open_served_embedder,
    pool_of,
    vector_as_json,
)
from allmask.tasks.task import ModelFolder
from tests import tiny

TEXTS = [row["source"] for row in tiny.english(12) + tiny.chinese(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


def by_hand(model: Model, text: str, pool: str) -> np.ndarray:
    with torch.no_grad():
        hidden = model(torch.tensor([model.tokenizer.encode(text).ids])).hidden[0]
    return (hidden.mean(0) if pool == "mean" else hidden[0]).numpy()


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_vectors_are_those_of_the_model(model, pool: str):
    embed = Embedder(model, pool, precision="fp32")
    expected = np.stack([by_hand(model, text, pool) for text in TEXTS])
    np.testing.assert_allclose(embed(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(embed(TEXTS[3]), expected[3], atol=1e-5)
    np.testing.assert_allclose(np.concatenate(list(embed.stream(iter(TEXTS), window=5))), expected, atol=1e-5)
    assert embed([]).shape == (0, 16) and embed(TEXTS).dtype == np.float32
    unit = Embedder(model, pool, normalize=True, precision="fp32")(TEXTS)
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_a_vector_as_json(numbers: list[float]):
    assert json.loads(vector_as_json(np.array(numbers, dtype=np.float32))) == as_digits(numbers)


def test_long_texts_are_counted(model):
    embed = Embedder(model, precision="fp32")
    embed(["red " * 200, "red", "北" * 300])
    assert embed.cut == 2


def test_the_nearest_by_brute_force(model):
    embed = Embedder(model, precision="fp32")
    query = "北京 cat"
    vectors, wanted = embed(TEXTS), embed(query)
    cosines = vectors @ wanted / np.linalg.norm(vectors, axis=1) / np.linalg.norm(wanted)
    found = embed.search(query, iter(TEXTS), top=4)
    assert [one.number for one in found] == np.argsort(-cosines, kind="stable")[:4].tolist()
    assert [one.score for one in found] == pytest.approx(sorted(cosines, reverse=True)[:4], abs=1e-5)
    assert all(one.what == TEXTS[one.number] for one in found)
    assert [one.number for one in embed.search(query, [TEXTS[0]] * 3, top=2)] == [0, 1]
    assert embed.search(query, []) == []


def test_pooling_as_the_folder_says(folder: Path, tmp_path: Path):
    assert pool_of(folder) == "mean"
    file = tmp_path / POOLING
    file.parent.mkdir()
    for output, expected in (("pooling_mode_cls_token", "cls"), ("pooling_mode_mean_tokens", "mean")):
        file.write_text(json.dumps({"word_embedding_dimension": 16, "include_prompt": True, output: True}))
        assert pool_of(tmp_path) == expected
    for bad in ('{"pooling_mode_max_tokens": true}', "{}", "[]", "no json"):
        file.write_text(bad)
        with pytest.raises(CheckpointError, match=r"--pool|cannot be read|pools by"):
            pool_of(tmp_path)


def test_what_cannot_be_embedded(model, tmp_path: Path):
    with pytest.raises(UsageError, match="pool is 'max'"):
        Embedder(model, "max")
    with pytest.raises(UsageError, match="left to right"):
        Embedder(load(tiny.gpt2(tmp_path / "gpt2")), "cls")


def lowest_by_hand(model: Model, found: np.ndarray) -> float:
    exact = np.stack([by_hand(model, text, "mean") for text in SAMPLES])
    norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(found, axis=1)
    return float(((exact * found).sum(1) / norms).min())


@pytest.mark.skipif(int8.library() is None, reason="there are no kernels for int8 here")
def test_a_server_embeds_in_int8_only_if_the_vectors_stay_close(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO, "allmask")
    folder = tiny.bert(tmp_path / "bert", width=64, ffn_width=128)
    chosen, model = open_served_embedder(ModelFolder.open(folder)), load(folder)
    lowest = lowest_by_hand(model, chosen(SAMPLES))
    assert chosen.computes_in() == "int8" and lowest >= CLOSE
    assert f"is {lowest:.4f}, so int8 is used" in caplog.text
    for layer in model.body.layers:  # one large activation sets the scale of all others
        layer.feed_forward.expand.weight.data[0] *= 1000
        layer.feed_forward.contract.weight.data *= 20
        layer.feed_forward.contract.weight.data[:, 0] /= 1000
    model.save(tmp_path / "outlier")
    chosen = open_served_embedder(ModelFolder.open(tmp_path / "outlier"))
    assert lowest_by_hand(model, Embedder(model, precision="int8")(SAMPLES)) < CLOSE
    assert chosen.computes_in() == Embedder(model).computes_in() != "int8" and "so int8 is not used" in caplog.text


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_an_embedder_tells_its_precision(tmp_path: Path, precision: str):
    model = load(tiny.bert(tmp_path / "bert", width=64, ffn_width=128))  # heads wide enough for all kernels
    assert Embedder(model, precision=precision).computes_in() == precision


def test_a_server_embeds_as_usual_without_kernels_for_int8(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(int8, "library", lambda: None)
    assert open_served_embedder(ModelFolder.open(folder)).computes_in() == Embedder(load(folder)).computes_in()
    assert open_served_embedder(ModelFolder.open(folder), "fp32").computes_in() == "fp32"
    assert Embedder(load(folder), precision="fp32").computes_in() == "fp32"
    assert Embedder(load(folder), precision="bf16").computes_in() == "bf16"
