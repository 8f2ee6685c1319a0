"""Frozen models give the model's own numbers, vectors do not depend on who shares a row, and no mask becomes T×T."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmask import presets
from allmask.errors import UsageError
from allmask.inference import embed, embed_ids, freeze
from allmask.inference import frozen as inference
from allmask.inference.frozen import Packed
from allmask.kernels import int8
from allmask.kernels import packed_attention as documents
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.attention import attend
from allmask.nn.cache import Cache
from tests.relatives import relatives

SMALL = {"vocab_size": 60, "width": 64, "heads": 4, "ffn_width": 64, "layers": 2, "max_positions": 24}
CONFIGS = {
    "bert": replace(presets.bert_base(), **SMALL),
    "gpt2": replace(presets.gpt2(), **SMALL),
    "relu": replace(presets.gpt2(), **SMALL, norm="rms", activation="relu"),
    **relatives(SMALL),
}
TEXTS = ["北京欢迎你", "The mask is the program.", "", "你想吃啥？白切鸡！ " * 3, "a", "Beijing welcomes you, 你好。"]


def small(family: str = "bert") -> Model:
    rng = torch.Generator().manual_seed(0)
    model = Model(CONFIGS[family], heads=["lm"]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


@pytest.fixture(scope="module")
def minilm() -> Model:
    return load("minilm")


def hidden_one_by_one(model: Model, ids: list[list[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([text])).hidden[0].float() for text in ids]


# ---- frozen == not frozen ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_frozen_fp32_equals_the_model(family):
    model = small(family)
    frozen = freeze(model, "fp32")
    ids = torch.randint(0, 60, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = Mask.prefix(torch.arange(11).expand(3, 11) >= 4, torch.arange(11) < torch.tensor([[11], [7], [5]]))
    expected, found = model(ids, mask), frozen(ids, mask)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-5)
    assert not found.hidden.requires_grad


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_frozen_model_steps_with_a_cache(family):
    model, ids = freeze(small(family), "fp32"), torch.arange(1, 9)[None]
    mask = Mask.causal(torch.ones(1, 8, dtype=torch.bool))
    full, first = model(ids, mask).hidden, model(ids[:, :5], mask[:, :5], cache=Cache())
    second = model(ids[:, 5:], mask[:, 5:], cache=first.cache)
    torch.testing.assert_close(torch.cat([first.hidden, second.hidden], 1), full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_linear_layer_and_its_activation_in_one_call(precision):
    dtype = inference.PRECISIONS[precision]
    if not inference.can_pack(dtype):
        pytest.skip("this torch cannot pack weights here")
    linear = nn.Linear(48, 80, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    after = {
        "none": exact,
        "gelu": nn.functional.gelu(exact),
        "gelu_tanh": nn.functional.gelu(exact, approximate="tanh"),
        "relu": exact.relu(),
    }
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for name, expected in after.items():
        torch.testing.assert_close(Packed(linear, name)(x).double(), expected, atol=tolerance, rtol=tolerance)


def test_frozen_minilm_equals_the_model(minilm):
    reference = embed(minilm, TEXTS)
    torch.testing.assert_close(embed(freeze(minilm, "fp32"), TEXTS), reference, atol=1e-5, rtol=0)
    sentences = [embed.__doc__, freeze.__doc__, Mask.prefix.__doc__, logging.__doc__, inference.__doc__]
    cosine = torch.cosine_similarity(embed(freeze(minilm, "bf16"), sentences), embed(minilm, sentences))
    assert cosine.min() >= 0.9999


@pytest.mark.parametrize("family", ["bert", "gpt2", "relu", "albert"])
def test_fp32_layers_in_one_call_are_those_of_torch_and_the_same_in_any_batch(family, monkeypatch):
    if int8.library() is None or documents.library(torch.float32) is None:
        pytest.skip("no compiler, or a processor without AVX2")
    model, texts = small(family), [list(range(1, 1 + length)) for length in (1, 24, 7, 16, 3)]
    fast = freeze(model, "fp32")
    assert fast.body.whole is not None
    together, alone = embed_ids(fast, texts), torch.cat([embed_ids(fast, [text]) for text in texts])
    assert torch.equal(together, alone)
    monkeypatch.setattr(type(fast.body.whole), "run", lambda *_: None)  # each layer by itself
    torch.testing.assert_close(together, embed_ids(fast, texts), atol=1e-5, rtol=0)
    torch.testing.assert_close(together, embed_ids(model, texts), atol=1e-5, rtol=0)


def test_where_nothing_can_be_packed_plain_layers_stay(monkeypatch):
    monkeypatch.setattr(inference, "can_pack", lambda dtype: False)
    monkeypatch.setattr(int8, "library", lambda: None)
    model, ids = small(), torch.arange(1, 9)[None]
    plain = freeze(model, "fp32")
    assert not any(isinstance(module, Packed) for module in plain.modules())
    torch.testing.assert_close(plain(ids).hidden, model(ids).hidden, atol=0, rtol=0)


def test_a_missing_operator_is_noticed(monkeypatch):
    def missing(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr(inference.Packed, "forward", missing)
    assert not inference.can_pack.__wrapped__(torch.float32)


@pytest.mark.parametrize("able", [True, False])
def test_auto_is_bf16_only_where_it_is_native(monkeypatch, able):
    monkeypatch.delenv("ALLMASK_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    frozen = freeze(small())
    assert frozen.body.embedding.tokens.weight.dtype == (torch.bfloat16 if able else torch.float32)


# ---- the kernel of documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_frozen_with_and_without_the_kernel(monkeypatch, kind):
    model, ids = small(), torch.randint(0, 60, (5, 20), generator=torch.Generator().manual_seed(1))
    mask = getattr(Mask, kind)(torch.arange(20) < torch.tensor([[3], [20], [7], [7], [1]]))
    with_kernel = freeze(model, "fp32")(ids, mask).hidden
    monkeypatch.setattr(documents, "library", lambda dtype: None)
    torch.testing.assert_close(freeze(model, "fp32")(ids, mask).hidden, with_kernel, atol=1e-5, rtol=1e-5)


# ---- frozen stays frozen -----------------------------------------------------------------------------------


def test_the_model_itself_is_untouched():
    model, ids = small(), torch.arange(1, 9)[None]
    before = model(ids).hidden
    frozen = freeze(model, "bf16")
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(model(ids).hidden, before, atol=0, rtol=0)
    kept = frozen(ids).hidden.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(frozen(ids).hidden, kept, atol=0, rtol=0)


def test_training_mode_brings_no_dropout_back():
    frozen, ids = freeze(small(), "fp32"), torch.arange(1, 9)[None]
    torch.testing.assert_close(frozen.train()(ids).hidden, frozen.eval()(ids).hidden, atol=0, rtol=0)


def test_what_a_frozen_model_refuses(tmp_path):
    model = small()
    frozen = freeze(model, "fp32")
    with pytest.raises(UsageError, match="cannot be saved"):
        frozen.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="frozen already"):
        freeze(frozen)
    with pytest.raises(UsageError, match="expected one of auto, fp32, bf16, int8"):
        freeze(model, "int3")


# ---- vectors -----------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 59), max_size=12)


@settings(max_examples=40)
@given(
    st.sampled_from(["bert", "gpt2"]),
    st.lists(TOKENS, max_size=9),
    st.integers(1, 40),
    st.sampled_from(["mean", "cls"]),
)
def test_a_vector_does_not_depend_on_the_others(family, ids, budget, pool):
    model = small(family)
    found = embed_ids(model, ids, pool=pool, batch_tokens=budget)
    assert found.shape == (len(ids), 64)
    for vector, text in zip(found, ids, strict=True):
        hidden = model(torch.tensor([text])).hidden[0] if text else torch.zeros(1, 64)
        expected = hidden.mean(0) if pool == "mean" else hidden[0]
        torch.testing.assert_close(vector, expected.detach(), atol=1e-5, rtol=1e-5)


def test_texts_one_by_one_and_in_order(minilm):
    ids = [minilm.tokenizer.encode(text).ids for text in TEXTS]
    expected = torch.stack([hidden.mean(0) for hidden in hidden_one_by_one(minilm, ids)])
    torch.testing.assert_close(embed(minilm, TEXTS, batch_tokens=16), expected, atol=1e-5, rtol=0)
    first = torch.stack([hidden[0] for hidden in hidden_one_by_one(minilm, ids)])
    torch.testing.assert_close(embed(minilm, TEXTS, pool="cls"), first, atol=1e-5, rtol=0)
    lengths = embed(minilm, TEXTS, normalize=True).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(len(TEXTS)))


def test_no_texts_no_vectors(minilm):
    assert embed(minilm, []).shape == (0, 384)
    assert embed_ids(minilm, [[], []]).abs().sum() == 0


def test_a_long_text_keeps_its_beginning_and_its_frame(minilm, caplog):
    words = "mask program order group " * 200
    with caplog.at_level(logging.WARNING, logger="allmask"):
        vectors = embed(minilm, ["short", words])
    assert "text 1 has 802 tokens; only the first 512 are read" in caplog.text
    ids = minilm.tokenizer.encode(words).ids
    kept = [*ids[:511], ids[-1]]  # [CLS], 510 of the text, [SEP]
    torch.testing.assert_close(vectors[1:], embed_ids(minilm, [kept]), atol=1e-5, rtol=0)


def test_progress_counts_texts():
    seen: list[int] = []
    embed_ids(small(), [[1, 2, 3], [], [4, 5], [6] * 9], batch_tokens=6, progress=seen.append)
    assert seen == [3, 4]


def test_wrong_arguments_raise_an_error(minilm):
    with pytest.raises(UsageError, match="a list of texts"):
        embed(minilm, "北京欢迎你")
    with pytest.raises(UsageError, match="expected one of mean, cls"):
        embed(minilm, ["北京"], pool="max")
    with pytest.raises(UsageError, match="no tokenizer"):
        embed(small(), ["北京"])


# ---- memory ------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any tensor made under it stands for."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *made])
        return out


def long_mask(kind: str, tokens: int) -> Mask:
    valid = torch.ones(1, tokens, dtype=torch.bool)
    if kind == "prefix":
        return Mask.prefix(torch.arange(tokens)[None] >= tokens // 2)
    if kind == "packed":
        return Mask.prefix(torch.arange(tokens)[None] % 512 > 200, document=torch.arange(tokens)[None] // 512)
    return Mask.causal(valid, window=64 if kind == "window" else None)


@pytest.mark.parametrize("kind", ["causal", "prefix", "packed", "window"])
def test_no_tensor_grows_with_the_square_of_the_text(kind):
    tokens, largest = 4096, Largest()
    with largest:
        q, k, v = (torch.randn(1, tokens, 1, 8, requires_grad=True) for _ in range(3))
        attend(q, k, v, long_mask(kind, tokens)).sum().backward()
    assert largest.elements <= tokens * tokens // 4


def test_the_largest_tensor_is_seen():
    largest = Largest()
    with largest:
        long_mask("causal", 256).visible()
    assert largest.elements >= 256 * 256
