"""The model as users hold it: heads, keep_tokens, fresh weights, dtypes, clear refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allmask
from allmask import presets
from allmask.errors import CheckpointError, UsageError
from allmask.inference.frozen import freeze
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject
from allmask.mask.drawing import draw
from allmask.mask.prover import prove, prove_rows
from allmask.model import Model
from allmask.nn.attention import Route, attend, attention_weights
from allmask.nn.cache import Cache
from allmask.nn.heads import Labels, columnwise_linear
from allmask.text import propose_keep_tokens

SMALL = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 12}


def fresh(preset=presets.bert_base, heads=("lm",), **changes):
    return Model.fresh(replace(preset(), **{**SMALL, **changes}), heads, torch.Generator().manual_seed(0)).eval()


IDS = torch.tensor([[2, 7, 11, 30, 3], [2, 39, 7, 3, 5]])


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(0, 39), min_size=2),
    st.sampled_from([True, False]),
    st.sampled_from([presets.bert_base, presets.gpt2]),
)
def test_kept_logits_are_bit_identical(kept, tied, preset):
    model = fresh(preset, tied=tied)
    kept = sorted(kept)
    pruned = model.keep_tokens(kept)
    new = torch.tensor([kept.index(i) for i in kept])
    ids = torch.tensor([kept[:10]])
    out, small = model(ids), pruned(new[None, :10])
    assert torch.equal(out.hidden, small.hidden)
    assert pruned.config.vocab_size == len(kept) == small.logits.shape[-1]
    assert torch.equal(out.logits[..., kept], small.logits)


def test_real_vocabulary_pruned_with_its_tokenizer(tmp_path):
    """MiniLM: text of the corpus gives the same pieces and the same hidden states."""
    model = allmask.load("minilm")
    corpus = ["The attention mask is the program.", "Beijing welcomes you, 北京欢迎你!"]
    kept = propose_keep_tokens(model.tokenizer, corpus)
    small = allmask.load("minilm", keep_tokens=kept)
    assert small.config.vocab_size == len(kept) == small.tokenizer.size < 200
    for text in corpus:
        old, new = model.tokenizer.encode(text), small.tokenizer.encode(text)
        assert old.tokens == new.tokens
        with torch.no_grad():
            hidden = model(torch.tensor([old.ids])).hidden
            assert torch.equal(hidden, small(torch.tensor([new.ids])).hidden)
    assert {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} <= {small.tokenizer.id_to_token(i) for i in range(len(kept))}
    assert small.config.pad_token == small.tokenizer.pad_id
    small.save(tmp_path / "small")
    again = allmask.load(tmp_path / "small")
    assert again.tokenizer == small.tokenizer and again.config == small.config
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), small.state_dict().values(), strict=True))


def test_the_output_layer_differentiates_like_a_plain_linear_layer():
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 16), (40, 16), (40,)))
    ours, theirs = columnwise_linear(x, w, b), torch.nn.functional.linear(x, w, b)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    cotangent = torch.randn_like(ours)
    for a, e in zip(
        torch.autograd.grad(ours, (x, w, b), cotangent), torch.autograd.grad(theirs, (x, w, b), cotangent), strict=True
    ):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=0)


def test_a_pruned_model_shares_no_memory_with_its_origin():
    model = fresh()
    before = model.body.layers[0].attention.query.weight.clone()
    with torch.no_grad():
        model.keep_tokens([1, 2, 3]).body.layers[0].attention.query.weight.add_(1.0)
    assert torch.equal(model.body.layers[0].attention.query.weight, before)


def test_a_language_model_head_is_made_where_there_is_none():
    body = fresh(heads=("pooler",))
    writer = body.with_language_model(torch.Generator().manual_seed(0))
    assert writer.heads == {"pooler", "lm"} and writer.with_language_model() is writer
    assert torch.equal(writer(IDS).hidden, body(IDS).hidden) and writer(IDS).logits.shape == (2, 5, 40)


def test_a_family_without_a_rename_table_comes_back_too(tmp_path):
    model = fresh(presets.transformer_base, ("lm",), decoder_layers=0)
    model.save(tmp_path / "m")
    assert torch.equal(allmask.load(tmp_path / "m")(IDS).logits, model(IDS).logits)


def test_keep_tokens_outside_the_vocabulary():
    with pytest.raises(UsageError, match="from 0 to 39"):
        fresh().keep_tokens([3, 40])


@pytest.mark.parametrize(
    "preset, heads", [(presets.bert_base, ("lm", "nsp")), (presets.gpt2, ("lm",)), (presets.bert_base, ())]
)
def test_saved_equals_loaded(preset, heads, tmp_path):
    model = fresh(preset, heads)
    model.save(tmp_path / "m")
    back = allmask.load(tmp_path / "m")
    assert back.config == model.config and back.heads == model.heads
    assert torch.equal(back(IDS).hidden, model(IDS).hidden)


def test_dtype_of_loading(tmp_path):
    fresh().save(tmp_path / "m")
    assert {p.dtype for p in allmask.load(tmp_path / "m", dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    half = fresh().to(torch.float16)
    half.save(tmp_path / "half")
    loaded = allmask.load(tmp_path / "half")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.body.embedding.tokens.weight, half.body.embedding.tokens.weight.float())


def test_a_loaded_model_can_be_trained(tmp_path):
    fresh().save(tmp_path / "m")
    model = allmask.load(tmp_path / "m")
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_fresh_gpt2_scales_what_writes_into_the_residual_stream():
    model = fresh(presets.gpt2, width=64, layers=8)
    plain, residual = model.body.layers[0].attention.query.weight, model.body.layers[0].attention.output.weight
    assert plain.std().item() == pytest.approx(0.02, rel=0.05)
    assert residual.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_logits_only_where_there_is_a_target():
    model, where = fresh(), torch.tensor([[False, True, False, False, True]] * 2)
    out = model(IDS)
    torch.testing.assert_close(model.logits(out.hidden[where]), out.logits[where], atol=1e-6, rtol=0)


def test_clear_refusals():
    model = fresh(heads=())
    with pytest.raises(UsageError, match="no lm_head"):
        _ = model(IDS).logits
    with pytest.raises(UsageError, match="position 12 is beyond the 12"):
        model(torch.ones(1, 13, dtype=torch.long))
    with pytest.raises(UsageError, match="not in the vocabulary of 40"):
        model(torch.tensor([[40]]))
    with pytest.raises(UsageError, match="both must be"):
        model(IDS, Mask.causal(torch.ones(2, 4).bool()))
    with pytest.raises(UsageError, match="no tokens"):
        model(torch.zeros(1, 0, dtype=torch.long))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    fresh().save(tmp_path / "m")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]
    (tmp_path / "m" / "vocab.txt").write_text("\n".join(words))
    with pytest.raises(CheckpointError, match="65 tokens, the model 40"):
        allmask.load(tmp_path / "m")


def test_a_tokenizer_much_smaller_than_the_model_is_a_warning(tmp_path, caplog):
    """A folder that was saved with another tokenizer, or with an empty one."""
    fresh().save(tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    allmask.load(tmp_path / "m")
    assert "the tokenizer has 5 tokens, the model 40; is it the right one?" in caplog.text


def test_an_added_token_without_an_embedding_is_a_warning(tmp_path, caplog):
    """Folders whose tokenizer has a [PAD] without an embedding are common."""
    fresh().save(tmp_path / "m")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]
    (tmp_path / "m" / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"bos_token": "<start>", "do_lower_case": true}')
    with caplog.at_level("WARNING", logger="allmask"):
        model = allmask.load(tmp_path / "m")
    assert "no embedding for <start>" in caplog.text
    with pytest.raises(UsageError, match="token id 40"):
        model(torch.tensor([[model.tokenizer.bos_id]]))


def test_keep_layers_is_the_state_after_them():
    model = fresh(layers=3)
    seen = []
    model.body.layers[1].register_forward_hook(lambda module, read, out: seen.append(out))
    mask = Mask.bidirectional(torch.ones_like(IDS, dtype=torch.bool))
    model.body(IDS, mask)
    kept = model.keep_layers(2)
    assert kept.config.layers == 2
    assert torch.equal(kept.body(IDS, mask), seen[0][0])
    with pytest.raises(UsageError, match="has 3"):
        model.keep_layers(4)


# ---- a tensor as a mask: the habit of other libraries -----------------------------------------------------------


def bodies():
    return {
        "bert": fresh(),
        "t5": fresh(presets.t5_small, head_width=8, decoder_layers=1),
        "lstm": fresh(presets.lstm_small, decoder_layers=1),
        "elmo": fresh(presets.elmo_tiny),
    }


def calls_with_a_mask(given):
    """Every place where a mask enters."""
    where = torch.ones_like(IDS, dtype=torch.bool)
    for name, model in bodies().items():
        yield f"{name} model", lambda model=model: model(IDS, given)
        yield f"{name} with a cache", lambda model=model: model(IDS, given, cache=Cache())
        yield f"{name} body", lambda model=model: model.body(IDS, given)
        yield f"{name} positions", lambda model=model: model.body(IDS, given, torch.arange(5))
        yield f"{name} forward_at", lambda model=model: model.body.forward_at(where, IDS, given)
        yield f"{name} step", lambda model=model: model.body.step(IDS, given, Cache())
        yield f"{name} read", lambda model=model: model.body.read(IDS, given)
    yield "weights", lambda: fresh().body.weights(IDS, given)
    yield "query_stream", lambda: fresh().body.query_stream(IDS, given, Cache())
    q = torch.zeros(2, 5, 2, 8)
    yield "attend", lambda: attend(q, q, q, given)
    yield "attention_weights", lambda: attention_weights(q, q, given)
    yield "Route.find", lambda: Route.find(given)
    yield "Route.find, keys", lambda: Route.find(Mask.bidirectional(where), given)
    yield "prove_rows", lambda: prove_rows(given)
    yield "audit", lambda: audit(our_subject(fresh()), given)


@pytest.mark.parametrize("given", [torch.ones(2, 5).long(), torch.ones(2, 1, 5, 5), [[1] * 5] * 2, np.ones((2, 5))])
def test_a_tensor_is_no_mask_and_the_error_says_what_to_pass(given):
    for name, call in calls_with_a_mask(given):
        with pytest.raises(UsageError, match=r"expected a Mask\n  pass Mask.bidirectional\(valid\)") as caught:
            call()
        assert "attention_mask.bool()" in str(caught.value), name


def test_what_is_drawn_and_proven_is_a_mask_or_a_boolean_matrix():
    for call in (lambda given: prove(given), lambda given: draw(given, ["a", "b"])):
        with pytest.raises(UsageError, match="expected a Mask"):
            call([[True, False], [True, True]])
        with pytest.raises(UsageError, match="boolean"):
            call(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[2, 7, 3]], "ids are a list; expected a tensor"),
        (np.array([[2, 7, 3]]), "ids are a ndarray; expected a tensor"),
        (torch.tensor([2, 7, 3]), r"ids are \(3,\) of torch.int64; expected whole numbers \(B, T\)"),
        (torch.ones(1, 3), "torch.float32; expected whole numbers"),
    ],
)
def test_ids_are_a_tensor_of_rows(ids, message):
    with pytest.raises(UsageError, match=message):
        fresh()(ids)


# ---- what the heads make of a document -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    make=st.sampled_from([Mask.bidirectional, Mask.causal, Mask.reverse]),
    how=st.sampled_from(["right", "left", "packed"]),
    seed=st.integers(0, 99),
)
def test_pooling_goes_by_the_document_not_by_the_row(lengths, make, how, seed):
    """Left-padded, right-padded or packed: each document has the vector it has alone."""
    model = fresh(heads=("pooler", "nsp")).double()
    rng = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 40, (length,), generator=rng) for length in lengths]
    if how == "packed":
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        ids, mask = torch.cat(texts)[None], Mask.packed(make(torch.ones_like(document, dtype=torch.bool)), document)
    else:
        there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        valid = there if how == "right" else there.flip(1)
        ids = torch.zeros(valid.shape, dtype=torch.long)
        ids[valid] = torch.cat(texts)
        mask = make(valid)
    out = model(ids, mask)
    assert out.pooled.shape == (len(texts), 16) and out.next_sentence.shape == (len(texts), 2)
    for number, text in enumerate(texts):
        alone = model(text[None], make(torch.ones(1, len(text), dtype=torch.bool)))
        torch.testing.assert_close(out.pooled[number], alone.pooled[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(out.next_sentence[number], alone.next_sentence[0], atol=1e-12, rtol=0)


def test_pooling_of_rows_that_begin_with_their_text_keeps_its_bits():
    model = fresh(heads=("pooler",))
    valid = torch.tensor([[True] * 5, [True, True, True, False, False]])
    for mask in (
        None,
        Mask.bidirectional(valid),
        Mask.causal(valid),
        Mask.prefix((torch.arange(5) > 1) & valid, valid),
    ):
        out = model(IDS, mask)
        assert torch.equal(
            out.pooled, torch.tanh(torch.nn.functional.linear(out.hidden[:, 0], *model.pooler.parameters()))
        )


def test_an_encoder_decoder_pools_its_source():
    model = fresh(presets.transformer_base, heads=("pooler",), decoder_layers=1)
    is_target = torch.tensor([[False, False, False, True, True]])
    out = model(IDS[:1], Mask.encoder_decoder(is_target))
    assert out.pooled.shape == (1, 16)
    torch.testing.assert_close(out.pooled, model(IDS[:1, :3]).pooled, atol=1e-5, rtol=0)


def test_an_output_is_shown_by_its_shapes():
    out = fresh(heads=("lm", "pooler"))(IDS)
    text = "Output(hidden=(2, 5, 16) torch.float32, mask=Mask(0 0 0 0 0; 0 0 0 0 0); and logits, pooled)"
    assert repr(out) == str(out) == text
    assert "cache=Cache" in repr(fresh(presets.gpt2)(IDS, cache=Cache()))


# ---- NTK parametrization ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [presets.bert_base, presets.gpt2, presets.t5_small, presets.transformer_small])
def test_an_ntk_model_starts_as_the_same_function_with_weights_of_size_1(preset):
    changes = {"decoder_layers": 2} if preset().decoder_layers else {}
    plain, ntk = (fresh(preset, parametrization=kind, **changes) for kind in ("standard", "ntk"))
    is_target = torch.tensor([[False, False, False, True, True]]).expand(2, -1)
    mask = Mask.encoder_decoder(is_target) if changes else None
    torch.testing.assert_close(ntk(IDS, mask).logits, plain(IDS, mask).logits, rtol=1e-4, atol=1e-5)
    sizes = [p.pow(2).mean().sqrt().item() for name, p in ntk.named_parameters() if p.ndim == 2]
    assert len(sizes) > 10 and sizes == pytest.approx([1.0] * len(sizes), abs=1e-3)


def test_an_ntk_model_is_saved_loaded_pruned_and_made_plain(tmp_path):
    model = fresh(parametrization="ntk")
    model.save(tmp_path / "ntk")
    loaded = allmask.load(tmp_path / "ntk")
    assert loaded.config.parametrization == "ntk" and torch.equal(loaded(IDS).logits, model(IDS).logits)
    kept = sorted(set(IDS.flatten().tolist()))
    small, ids = model.keep_tokens(kept), torch.tensor([[kept.index(id) for id in row] for row in IDS.tolist()])
    torch.testing.assert_close(small(ids).logits, model(IDS).logits[..., kept])
    plain = model.standard()
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits)
    plain.save(tmp_path / "plain")
    theirs = pytest.importorskip("transformers").AutoModelForMaskedLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    labelled = model.with_labels(Labels("single", ("a", "b")), torch.Generator().manual_seed(1))
    torch.testing.assert_close(labelled.standard()(IDS).answers, labelled(IDS).answers)
    torch.testing.assert_close(freeze(model, "fp32")(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_step_of_adam_changes_an_ntk_model_by_a_percentage():
    model = fresh(parametrization="ntk").train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-12)
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    moved = {name: ((p - before[name]).norm() / before[name].norm()).item() for name, p in model.named_parameters()}
    layers = [value for name, value in moved.items() if ".layers." in name and name.endswith("original")]
    assert len(layers) == 12 and layers == pytest.approx([0.01] * 12, abs=2e-3)


def test_recurrent_models_have_no_ntk():
    with pytest.raises(CheckpointError, match="recurrent model has no NTK"):
        replace(presets.lstm_small(), parametrization="ntk")


@pytest.mark.parametrize("norm", ["layer", "rms", "batch", "instance"])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_norms_are_saved_and_loaded(norm, place, tmp_path):
    model = fresh(norm=norm, norm_place=place, norm_eps=1e-5)
    model.train()(IDS)  # batch norm keeps statistics
    model.eval().save(tmp_path / "model")
    assert torch.equal(allmask.load(tmp_path / "model")(IDS).logits, model(IDS).logits)
