"""CTranslate2: encoders, generators and translators compute what our models compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allmask import presets
from allmask.errors import CheckpointError
from allmask.export import ctranslate2_spec
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.text import Tokenizer
from tests import tiny
from tests.export.test_onnx_graph import SIZES, TEXTS

ctranslate2: Any = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
BERT, GPT2 = presets.bert_base(), presets.gpt2()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = load(tiny.bert(tmp_path_factory.mktemp("models") / "bert")).tokenizer
    assert found is not None
    return found


def fresh(config: Any, heads: list[str], tokenizer: Tokenizer) -> Model:
    rng = torch.Generator().manual_seed(0)
    sizes = {**SIZES, "vocab_size": tokenizer.size + 2}  # two ids have no token
    model = Model.fresh(replace(config, **sizes, **({"head_width": 12} if config.head_width else {})), heads, rng)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng)
    model.tokenizer = tokenizer
    return model.eval()


ENCODERS = {
    "bert": BERT,
    "roberta": replace(BERT, family="roberta", position_offset=2, segments=1),
    "ernie, shared layers": replace(BERT, family="ernie", task_types=3, shared_layers=True),
    "norms in front": replace(BERT, norm_place="pre"),
    "RMS norm, no segments, sinusoidal, gated": replace(
        BERT, norm="rms", segments=0, position_kind="sinusoidal", gated=True, activation="gelu_tanh"
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, tokenizer: Tokenizer, tmp_path: Path):
    model = fresh(ENCODERS[name], ["pooler"], tokenizer)
    assert ctranslate2_spec.write(model, tmp_path) == "Encoder"
    rows = [one.ids for one in tokenizer.encode_batch(TEXTS)]
    found = ctranslate2.Encoder(str(tmp_path)).forward_batch(rows)
    for row, hidden, pooled in zip(rows, np.array(found.last_hidden_state), np.array(found.pooler_output), strict=True):
        with torch.no_grad():
            output = model(torch.tensor([row]))
        np.testing.assert_allclose(hidden[: len(row)], output.hidden[0].numpy(), atol=1e-4)
        np.testing.assert_allclose(pooled, output.pooled[0].detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("config", [GPT2, replace(GPT2, tied=False)], ids=["tied", "an output matrix"])
def test_generators(config: Any, tokenizer: Tokenizer, tmp_path: Path):
    model = fresh(config, ["lm"], tokenizer)
    assert ctranslate2_spec.write(model, tmp_path) == "Generator"
    generator = ctranslate2.Generator(str(tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(np.array(generator.forward_batch([ids]))[0], expected, atol=1e-4)


@pytest.mark.parametrize("preset", ["transformer_base", "t5_small", "t5_v1_1_small"])
def test_translators(preset: str, tokenizer: Tokenizer, tmp_path: Path):
    config = replace(getattr(presets, preset)(), decoder_layers=2, start_token=2, end_token=3)
    model = fresh(config, ["lm"], tokenizer)
    assert ctranslate2_spec.write(model, tmp_path) == "Translator"
    source, target = (tokenizer.encode(text, special=False).ids for text in TEXTS[:2])
    ids = torch.tensor([[*source, 2, *target]])
    with torch.no_grad():
        logits = model(ids, Mask.encoder_decoder(torch.arange(ids.shape[1])[None] >= len(source))).logits[0]
    shares = logits[len(source) :].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(shares, [*target, 3], strict=True)]
    translator = ctranslate2.Translator(str(tmp_path))
    (found,) = translator.score_batch([tokenizer.tokens(source)], [tokenizer.tokens(target)])
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)


def test_int8_weights(tokenizer: Tokenizer, tmp_path: Path):
    model, rows = fresh(BERT, [], tokenizer), [one.ids for one in tokenizer.encode_batch(TEXTS[:1])]
    expected, sizes = model(torch.tensor(rows)).hidden[0].detach(), []
    for int8 in (False, True):
        assert ctranslate2_spec.write(model, tmp_path, int8=int8) == "Encoder"
        sizes.append((tmp_path / "model.bin").stat().st_size)
    found = ctranslate2.Encoder(str(tmp_path), compute_type="float32").forward_batch(rows)
    hidden = torch.from_numpy(np.array(found.last_hidden_state)[0])
    assert torch.cosine_similarity(hidden, expected).min() > 0.99
    assert torch.equal(model(torch.tensor(rows)).hidden[0], expected), "writing must not change the model"
    assert sizes[1] < 0.6 * sizes[0]


REFUSED = {
    "a task head": (BERT, [], "no task heads"),
    "xlnet": (presets.xlnet_base(), ["lm"], "no xlnet"),
    "a causal bert": (replace(BERT, own_mask="causal"), ["lm"], "from left to right"),
    "rotary": (replace(BERT, family="roformer", position_kind="rotary"), [], "rotary"),
    "narrow": (replace(BERT, family="albert", embedding_width=8), [], "narrower"),
    "no head": (GPT2, [], "cannot write"),
    "batch norm": (replace(BERT, norm="batch"), [], "batch norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ctranslate2_does_not_compute(case: str, tokenizer: Tokenizer):
    config, heads, why = REFUSED[case]
    model = fresh(config, heads, tokenizer)
    model = model.with_labels(Labels("tag", ("O", "B"))) if case == "a task head" else model
    with pytest.raises(CheckpointError, match=f"mine: .*{why}"):
        ctranslate2_spec.expect_convertible(model, "mine")


def test_without_a_tokenizer(tokenizer: Tokenizer):
    model = fresh(BERT, [], tokenizer)
    model.tokenizer = None
    with pytest.raises(CheckpointError, match="tokens of its vocabulary"):
        ctranslate2_spec.expect_convertible(model, "mine")


def test_the_command(cli, tmp_path: Path):
    out = tmp_path / "out"
    ran = cli("convert", tiny.gpt2(tmp_path / "gpt2"), "--to", "ctranslate2", "--out", out)
    assert ran.code == 0 and f'ctranslate2.Generator("{out}")' in ran.out
    tokenizer = Tokenizer.load(out)
    expected = load(tmp_path / "gpt2")(torch.tensor([tokenizer.encode(TEXTS[0]).ids])).logits[0, -1].argmax()
    (found,) = ctranslate2.Generator(str(out)).generate_batch(
        [tokenizer.tokens(tokenizer.encode(TEXTS[0]).ids)], max_length=1, include_prompt_in_result=False
    )
    assert found.sequences_ids[0][:1] == [int(expected)]
