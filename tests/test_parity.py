"""Our model equals the reference: tiny random transformers models through the real loader and back, and real MiniLM."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
)

import allmask
from allmask.checkpoints import resolve
from allmask.mask import Mask
from allmask.nn.cache import Cache

BERTS = {
    "plain": {},
    "relu": {"hidden_act": "relu"},
    "tanh gelu, one segment": {"hidden_act": "gelu_new", "type_vocab_size": 1},
    "untied": {"tie_word_embeddings": False},
    "wide eps, deep": {"layer_norm_eps": 1e-5, "num_hidden_layers": 5, "num_attention_heads": 8},
}
GPTS = {
    "plain": {},
    "erf gelu": {"activation_function": "gelu"},
    "narrow inner": {"n_inner": 24, "n_head": 8},
    "untied": {"tie_word_embeddings": False},
}


def bert(changes, kind=BertForPreTraining):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(
        **{**sizes, "intermediate_size": 48, "max_position_embeddings": 20, "initializer_range": 0.2, **changes}
    )
    return roughen(kind(config))


def gpt2(changes, kind=GPT2LMHeadModel):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 20,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return roughen(kind(GPT2Config(**{**sizes, "initializer_range": 0.2, **changes})))


def roughen(model):
    """Norms and biases away from 1 and 0, so that a swapped or forgotten one shows."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


def batch(rows=3, tokens=9, segments=2):
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 60, (rows, tokens), generator=rng)
    valid = torch.arange(tokens) < torch.tensor([tokens, 4, 6])[:rows, None]
    return ids, valid, torch.randint(0, segments, (rows, tokens), generator=rng)


def converted(theirs, folder):
    theirs.save_pretrained(folder)
    return allmask.load(folder)


def close(ours, theirs, valid, tolerance=1e-5):
    assert (ours - theirs)[valid].abs().max().item() <= tolerance


@pytest.mark.parametrize("name", BERTS)
def test_bert_equals_transformers(name, tmp_path):
    theirs = bert(BERTS[name])
    ours = converted(theirs, tmp_path / "bert")
    ids, valid, segments = batch(segments=theirs.config.type_vocab_size)
    expected = theirs(ids, attention_mask=valid.long(), token_type_ids=segments, output_hidden_states=True)
    out = ours(ids, Mask.bidirectional(valid), segments=segments)
    close(out.hidden, expected.hidden_states[-1], valid)
    close(out.logits, expected.prediction_logits, valid)
    assert (out.next_sentence - expected.seq_relationship_logits).abs().max() <= 1e-5


@pytest.mark.parametrize("name", GPTS)
def test_gpt2_equals_transformers(name, tmp_path):
    theirs = gpt2(GPTS[name])
    ours = converted(theirs, tmp_path / "gpt2")
    ids, valid, _ = batch()
    expected = theirs(ids, attention_mask=valid.long(), output_hidden_states=True)
    out = ours(ids, Mask.causal(valid))
    close(out.hidden, expected.hidden_states[-1], valid)
    close(out.logits, expected.logits, valid)
    full = torch.ones_like(valid)
    close(ours(ids).logits, theirs(ids).logits, full)  # no mask: the family's own


def test_positions_are_an_input(tmp_path):
    theirs, (ids, _, _) = bert({}), batch()
    ours, positions = converted(theirs, tmp_path / "m"), torch.arange(9).flip(0).expand(3, -1) + 5
    expected = theirs(ids, position_ids=positions, output_hidden_states=True).hidden_states[-1]
    close(ours(ids, positions=positions).hidden, expected, torch.ones(3, 9).bool())


def test_bert_under_the_prefix_mask_equals_transformers_with_a_4d_mask(tmp_path):
    theirs, (ids, _, segments) = bert({}, BertForMaskedLM), batch()
    ours = converted(theirs, tmp_path / "m")
    mask = Mask.prefix(torch.arange(9).expand(3, -1) >= torch.tensor([[4], [2], [7]]))
    additive = torch.where(mask.visible()[:, None], 0.0, -torch.inf)
    expected = theirs(ids, attention_mask=additive, token_type_ids=segments).logits
    close(ours(ids, mask, segments=segments).logits, expected, torch.ones(3, 9).bool())


@pytest.mark.parametrize("make, family", [(bert, "bert"), (gpt2, "gpt2")])
def test_gradients_equal_transformers(make, family, tmp_path):
    theirs = make({})
    ours = converted(theirs, tmp_path / "m")
    ids, valid, _ = batch()
    mask = ours.own_mask(valid)
    expected = theirs(ids, attention_mask=valid.long())
    expected = expected.prediction_logits if family == "bert" else expected.logits
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * valid[..., None]
    (expected * cotangent).sum().backward()
    (ours(ids, mask).logits * cotangent).sum().backward()
    compared = 0
    for name, ours_name in PAIRS[family].items():
        reference, gradient = theirs.get_parameter(name).grad, ours.get_parameter(ours_name).grad
        reference = reference.T if reference.shape != gradient.shape else reference
        assert (gradient - reference).abs().max() <= 1e-4
        compared += 1
    assert compared == len(PAIRS[family])


PAIRS = {
    "bert": {
        "bert.embeddings.word_embeddings.weight": "body.embedding.tokens.weight",
        "bert.embeddings.position_embeddings.weight": "body.embedding.positions.weight",
        "bert.encoder.layer.0.attention.self.key.weight": "body.layers.0.attention.key.weight",
        "bert.encoder.layer.1.intermediate.dense.weight": "body.layers.1.feed_forward.expand.weight",
        "bert.encoder.layer.1.output.LayerNorm.weight": "body.layers.1.feed_forward_norm.weight",
        "cls.predictions.transform.dense.weight": "lm_head.transform.weight",
        "cls.predictions.bias": "lm_head.bias",
    },
    "gpt2": {
        "transformer.wte.weight": "body.embedding.tokens.weight",
        "transformer.wpe.weight": "body.embedding.positions.weight",
        "transformer.h.0.attn.c_proj.bias": "body.layers.0.attention.output.bias",
        "transformer.h.1.ln_1.weight": "body.layers.1.attention_norm.weight",
        "transformer.h.2.mlp.c_fc.weight": "body.layers.2.feed_forward.expand.weight",
        "transformer.ln_f.bias": "body.norm.bias",
    },
}


@pytest.mark.parametrize("make, kind, call", [
    (bert, BertModel, lambda m, ids: m(ids).last_hidden_state),
    (bert, BertForMaskedLM, lambda m, ids: m(ids).logits),
    (bert, BertForPreTraining, lambda m, ids: m(ids).seq_relationship_logits),
    (gpt2, GPT2Model, lambda m, ids: m(ids).last_hidden_state),
    (gpt2, GPT2LMHeadModel, lambda m, ids: m(ids).logits),
])  # fmt: skip
def test_what_is_saved_loads_in_transformers_with_the_same_outputs(make, kind, call, tmp_path):
    theirs, (ids, _, _) = make({}, kind), batch()
    converted(theirs, tmp_path / "in").save(tmp_path / "out")
    back, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(call(back.eval(), ids), call(theirs, ids))


def test_cached_decoding_equals_transformers(tmp_path):
    theirs, (ids, _, _) = gpt2({}), batch()
    ours, cache, past = converted(theirs, tmp_path / "m"), Cache(), None
    mask = Mask.causal(torch.ones(3, 9).bool())
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        out = ours(ids[:, start:stop], mask[:, start:stop], cache=cache)
        expected = theirs(ids[:, start:stop], past_key_values=past, use_cache=True)
        cache, past = out.cache, expected.past_key_values
        assert (out.logits - expected.logits).abs().max() <= 1e-5


def test_real_minilm_equals_transformers():
    theirs = BertModel.from_pretrained(resolve("minilm")).eval()
    ours = allmask.load("minilm")
    texts = [
        "Beijing welcomes you.",
        "The attention mask is the program; everything else is derived from it.",
        "北京欢迎你",
        "é 🙂 naïve",
    ]
    encoded = ours.tokenizer.encode_batch(texts)
    length = max(len(e) for e in encoded)
    ids = torch.tensor([e.ids + [0] * (length - len(e)) for e in encoded])
    valid = torch.arange(length) < torch.tensor([[len(e)] for e in encoded])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=valid.long())
        out = ours(ids, Mask.bidirectional(valid))
    close(out.hidden, expected.last_hidden_state, valid)
    assert (out.pooled - expected.pooler_output).abs().max() <= 1e-5


# ---- exact sizes -------------------------------------------------------------------------------------------

PRETRAINING = ("pooler", "lm", "nsp")
COUNTS = {
    ("bert-base", ("pooler",)): 109_482_240,
    ("bert-base", PRETRAINING): 110_106_428,
    ("bert-large", ("pooler",)): 335_141_888,
    ("bert-base-chinese", ("pooler",)): 102_267_648,
    ("gpt2", ("lm",)): 124_439_808,
    ("gpt2-medium", ("lm",)): 354_823_168,
    ("gpt2-large", ("lm",)): 774_030_080,
    ("gpt2-xl", ("lm",)): 1_557_611_200,
}


@pytest.mark.parametrize("preset, heads", COUNTS)
def test_exact_parameter_counts(preset, heads):
    from allmask.model import Model
    from allmask.presets import PRESETS

    with torch.device("meta"):
        model = Model(PRESETS[preset](), heads)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset, heads]


def test_bert_large_with_both_heads_counts_what_transformers_counts():
    from allmask.model import Model
    from allmask.presets import PRESETS

    with torch.device("meta"):
        ours = Model(PRESETS["bert-large"](), PRETRAINING)
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        theirs = BertForPreTraining(BertConfig(**sizes))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
