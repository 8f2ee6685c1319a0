"""Attention maps are transformers' own weights, rows sum to 1, and forbidden cells are 0 and look forbidden."""

from __future__ import annotations

import re
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, T5Config, T5Model, XLNetConfig, XLNetModel

import allmask
from allmask.errors import UsageError
from allmask.inference.attention import AttentionMap, _colours, attention_map
from allmask.mask import Mask
from allmask.model import Model
from allmask.presets import PRESETS
from allmask.text import Tokenizer
from tests import tiny

TEXT, TARGET = "the red cat sleeps here", "red cat"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def model(bert) -> Model:
    return allmask.load(bert)


def sharpened(folder, family: str) -> tuple[Model, torch.nn.Module]:
    """Our model and transformers', with larger weights: attention that is not nearly uniform."""
    ours = allmask.load(folder)
    torch.manual_seed(1)
    for parameter in ours.parameters():
        if parameter.ndim == 2:
            parameter.data += torch.randn_like(parameter) * 0.4
    ours.save(folder.with_name(f"{family}-sharp"))
    theirs = AutoModel.from_pretrained(folder.with_name(f"{family}-sharp"), attn_implementation="eager")
    return ours, theirs.eval()


def weights_of(theirs, ids, **more) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(theirs(torch.tensor([ids]), output_attentions=True, **more).attentions)[:, 0]


def test_bert_is_transformers(bert):
    ours, theirs = sharpened(bert, "bert")
    found, encoded = attention_map(ours, TEXT), ours.tokenizer.encode(TEXT)
    assert found.rows == found.columns == encoded.tokens and found.weights.shape == (2, 2, len(encoded), len(encoded))
    expected = weights_of(theirs, encoded.ids)
    assert expected.std() > 0.02
    torch.testing.assert_close(found.weights, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, 2, len(encoded)), atol=1e-6, rtol=0)


def test_prefix_of_a_pair_is_transformers_with_an_additive_mask(bert):
    ours, theirs = sharpened(bert, "bert")
    found, encoded = attention_map(ours, TEXT, TARGET), ours.tokenizer.encode(TEXT, TARGET)
    assert found.rows == encoded.tokens
    visible = Mask.prefix(torch.tensor([encoded.segments]).bool()).visible()
    additive = torch.where(visible[:, None], 0.0, -torch.inf)
    segments = torch.tensor([encoded.segments])
    expected = weights_of(theirs, encoded.ids, attention_mask=additive, token_type_ids=segments)
    torch.testing.assert_close(found.weights, expected, atol=1e-5, rtol=0)
    assert torch.equal(found.visible, visible[0]) and not visible.all()
    assert bool((found.weights[:, :, ~found.visible] == 0).all())
    assert bool((found.weights[:, :, found.visible] > 0).all())


def test_gpt2_is_transformers(tmp_path):
    ours, theirs = sharpened(tiny.gpt2(tmp_path / "gpt2"), "gpt2")
    found = attention_map(ours, TEXT)
    expected = weights_of(theirs, ours.tokenizer.encode(TEXT).ids)
    torch.testing.assert_close(found.weights, expected, atol=1e-5, rtol=0)


def test_parts_of_t5_are_transformers(bert, tmp_path):
    tokenizer = allmask.load(bert).tokenizer
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    theirs = T5Model(T5Config(vocab_size=tokenizer.size, decoder_start_token_id=0, **sizes)).eval()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path / "t5")
    ours = allmask.load(tmp_path / "t5")
    ours.tokenizer = tokenizer
    source, target = tokenizer.encode(TEXT).ids, [0, *tokenizer.encode(TARGET, special=False).ids]
    with torch.no_grad():
        theirs.set_attn_implementation("eager")
        out = theirs(torch.tensor([source]), decoder_input_ids=torch.tensor([target]), output_attentions=True)
    for part, expected in (
        ("encoder", out.encoder_attentions), ("decoder", out.decoder_attentions), ("cross", out.cross_attentions),
    ):  # fmt: skip
        found = attention_map(ours, TEXT, TARGET, part=part)
        torch.testing.assert_close(found.weights, torch.stack(expected)[:, 0], atol=1e-5, rtol=0)
    assert len(found.rows) == len(target) and len(found.columns) == len(source)
    assert attention_map(ours, TEXT, TARGET).weights.shape == found.weights.shape  # cross, unless told otherwise
    assert attention_map(ours, TEXT).weights.shape == (2, 2, len(source), len(source))
    with pytest.raises(UsageError, match="decoder and cross need a target"):
        attention_map(ours, TEXT, part="cross")
    with pytest.raises(UsageError, match="has its own"):
        attention_map(ours, TEXT, TARGET, mask="causal")


def test_xlnet_reads_both_texts_in_one_frame():
    words = {"<unk>": 0, "<sep>": 1, "<cls>": 2, "red": 3, "cat": 4, "<pad>": 5}
    backend = Backend(WordLevel(words, "<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single="$A:0 <sep>:0 <cls>:2", pair="$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        special_tokens=[("<sep>", 1), ("<cls>", 2)],
    )  # fmt: skip
    sizes = {"vocab_size": 6, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
    theirs = XLNetModel(XLNetConfig(**sizes, attn_type="bi")).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = allmask.load(folder)
    ours.tokenizer = Tokenizer(backend, {"unk": "<unk>", "sep": "<sep>", "cls": "<cls>"})
    found = attention_map(ours, "red cat", "cat", mask="bidirectional")
    assert found.rows == ["red", "cat", "<sep>", "cat", "<sep>", "<cls>"] and found.special == {2, 4, 5}
    expected = weights_of(theirs, [3, 4, 1, 4, 1, 2], token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 2]]))
    torch.testing.assert_close(found.weights, expected, atol=1e-5, rtol=0)


# ---- masks -----------------------------------------------------------------------------------------------------


def test_masks_by_name_by_order_and_as_a_value(model):
    count = len(attention_map(model, TEXT).rows)
    causal = Mask.causal(torch.ones(1, count, dtype=torch.bool))
    named = attention_map(model, TEXT, mask="causal")
    assert torch.equal(named.weights, attention_map(model, TEXT, mask=causal).weights)
    assert torch.equal(named.weights, attention_map(model, TEXT, order=range(count)).weights)
    near = attention_map(model, TEXT, mask="causal", window=2).visible
    assert near.sum() == 2 * count - 1
    assert attention_map(model, TEXT, TARGET, mask="naive").visible.sum() > named.visible.sum()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"mask": "prefix"}, "a prefix mask needs a target"),
        ({"mask": "permutation"}, "a permutation mask is made from rank"),
        ({"mask": "casual"}, "did you mean causal"),
        ({"order": [0, 1]}, "the order has 2 numbers, the text 7 tokens"),
        ({"order": range(7), "mask": "causal"}, "an order is for the mask order"),
        ({"mask": Mask.causal(torch.ones(1, 2).bool())}, "the text has 7 tokens"),
        ({"part": "cross"}, "only an encoder–decoder has parts"),
    ],
)
def test_refusals(model, words, says):
    with pytest.raises(UsageError, match=says):
        attention_map(model, "red cat runs here.", **words)


def test_a_text_that_is_too_long_is_refused(model):
    with pytest.raises(UsageError, match="beyond the 48"):
        attention_map(model, "cat " * 60)


def test_a_model_without_attention_or_tokenizer_is_refused():
    with pytest.raises(UsageError, match="has no tokenizer"):
        attention_map(Model.fresh(PRESETS["bert-tiny"]()), "a")


def test_dropout_is_off_and_training_goes_on(model):
    expected = attention_map(model, TEXT).weights
    model.train()
    try:
        assert torch.equal(attention_map(model, TEXT).weights, expected) and model.training
    finally:
        model.eval()


# ---- looking ---------------------------------------------------------------------------------------------------

ROWS = ["[CLS]", "the", "ani", "##mal", "was", "它", "Ġtired", "[SEP]"]


def made(rows=ROWS) -> AttentionMap:
    """Layer 0, head 0 looks at the token before, layer 1 at the first one; head 1 is uniform."""
    count = len(rows)
    before = torch.eye(count).roll(-1, 1).tril(-1)
    before[0, 0] = 1.0
    first = torch.zeros(count, count)
    first[:, 0] = 1.0
    uniform = torch.ones(count, count).tril() / torch.arange(1, count + 1)[:, None]
    weights = torch.stack([torch.stack([before, uniform]), torch.stack([first, uniform])])
    return AttentionMap(rows, rows, torch.ones(count, count).tril().bool(), weights, frozenset({0, count - 1}))


def test_a_word_is_found_by_its_tokens_or_its_position():
    found = made()
    assert found.find("animal") == [2, 3] and found.find("The") == [1] and found.find("tired") == [6]
    assert found.find("它") == [5] and found.find(4) == [4] and found.find("[CLS]") == [0]
    with pytest.raises(UsageError, match=r"'ani mals' is not among the tokens[\s\S]*\[CLS\] the ani ##mal"):
        found.find("ani mals")
    with pytest.raises(UsageError, match="tokens 0 to 7"):
        found.find(8)
    with pytest.raises(UsageError, match="not among"):
        found.find(" ")


def test_what_a_word_looks_at_is_worked_out_by_hand():
    found = made()
    assert torch.equal(found.mean(1, 0), found.weights[1, 0])
    assert found.looks_at("the", 1, 0, top=1)[0][:2] == ("[CLS]", 0)
    looks = found.looks_at(4)  # means: first (1 + 1/5 + 1/5)/4, each other 1/10
    assert looks[0] == ("[CLS]", 0, pytest.approx((1 + 0.4) / 4))
    assert found.looks_at(4, special=False)[0].token != "[CLS]"
    assert sum(look.weight for look in looks) == pytest.approx(1)
    both = found.looks_at("animal", 1, 1)
    assert both[0].weight == pytest.approx((1 / 3 + 1 / 4) / 2)
    for words in ({"layer": 2}, {"head": 2}, {"layer": -1}):
        with pytest.raises(UsageError, match="there is no"):
            found.mean(**words)


def test_forbidden_cells_are_marked_in_text_and_small_ones_are_not():
    lines = made(["a", "b", "c"]).text(1, 0).splitlines()
    assert lines[:4] == ["       0  1  2", "  0 a ██  ·  ·", "  1 b ██ ░░  ·", "  2 c ██ ░░ ░░"]
    assert lines[-1] == "░ less  ▒ from 5%  ▓ from 15%  █ from 40%  · forbidden"


def test_forbidden_cells_are_hatched_and_larger_weights_are_darker():
    svg = made(["a", "b", "c"]).drawing(0, 1)._repr_svg_()
    assert len(re.findall(r'width="24.5"[^>]*url\(#allmask-hatch\)', svg)) == 3
    brightness = _colours(np.linspace(0, 1, 50)).sum(-1)
    assert (np.diff(brightness.astype(int)) <= 0).all() and brightness[0] > 700 > 200 > brightness[-1]
    assert "forbidden by the mask" in svg


def test_without_special_tokens_the_columns_are_words():
    words = made().without_special()
    assert words.columns == ROWS[1:-1] and words.rows == ROWS
    assert words.weights.shape == (2, 2, 8, 6) and words.drawing().canvas.width > 100


def test_many_tokens_are_an_image():
    svg = made(["x"] * 70)._repr_svg_()
    assert "data:image/png" in svg and repr(made()) == "AttentionMap(2 layers, 2 heads, 8×8 tokens)"
