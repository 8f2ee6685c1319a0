"""T5 equals transformers': both editions through the real loader and back, padded batches, gradients, texts, sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Model
from transformers.models.t5.modeling_t5 import T5Attention

import allmask
from allmask.checkpoints.families.t5 import T5
from allmask.data import Record
from allmask.decoding import Decoding, PairWriter, generate
from allmask.errors import CheckpointError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.relative_attention import RelativePositionBias
from allmask.presets import PRESETS
from allmask.tasks.seq2seq import Title
from allmask.text import train_tokenizer

SIZES = {
    "vocab_size": 60, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "decoder_start_token_id": 0,
}  # fmt: skip
EDITIONS = {
    "1.0": {},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "tied, gated with relu": {"feed_forward_proj": "gated-relu", "num_decoder_layers": None},
}
END, PAD = 1, 0


def theirs_of(edition, kind=T5ForConditionalGeneration, **changes):
    torch.manual_seed(0)
    model = kind(T5Config(**{**SIZES, **EDITIONS[edition], **changes}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    if edition == "1.1":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(60, 32) * 0.3)
    return model.eval()


def converted(theirs, folder):
    theirs.save_pretrained(folder)
    return allmask.load(folder)


def batch():
    """Sources of 7, 4, 6 and targets of 5, 5, 3 tokens: as transformers takes them, and as one row for us."""
    rng = torch.Generator().manual_seed(1)
    source, target = torch.randint(3, 60, (3, 7), generator=rng), torch.randint(3, 60, (3, 5), generator=rng)
    target[:, 0] = 0
    read, written = torch.arange(7) < torch.tensor([[7], [4], [6]]), torch.arange(5) < torch.tensor([[5], [5], [3]])
    words = {
        "input_ids": source, "attention_mask": read.long(), "decoder_input_ids": target,
        "decoder_attention_mask": written.long(),
    }  # fmt: skip
    mask = Mask.encoder_decoder((torch.arange(12) >= 7).expand(3, -1), torch.cat([read, written], 1))
    return words, torch.cat([source, target], 1), mask


@pytest.mark.parametrize("edition", EDITIONS)
def test_logits_of_padded_batches(edition, tmp_path):
    theirs = theirs_of(edition)
    ours = converted(theirs, tmp_path / "t5")
    words, ids, mask = batch()
    with torch.no_grad():
        expected, out = theirs(**words), ours(ids, mask)
    read, written = mask.valid[:, :7], mask.valid[:, 7:]
    assert (out.hidden[:, :7] - expected.encoder_last_hidden_state)[read].abs().max() <= 1e-5
    assert (out.logits[:, 7:] - expected.logits)[written].abs().max() <= 1e-5
    assert ours.config.tied == (edition != "1.1") and ours.config.gated == (edition != "1.0")


@pytest.mark.parametrize("edition", ["1.0", "1.1"])
def test_gradients(edition, tmp_path):
    theirs = theirs_of(edition)
    ours = converted(theirs, tmp_path / "t5")
    words, ids, mask = batch()
    expected, written = theirs(**words).logits, mask.valid[:, 7:]
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * written[..., None]
    (expected * cotangent).sum().backward()
    (ours(ids, mask).logits[:, 7:] * cotangent).sum().backward()
    names = {
        "shared.weight": "body.embedding.tokens.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "body.encoder.relative.table.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "body.decoder.relative.table.weight",
        "encoder.block.1.layer.0.SelfAttention.q.weight": "body.encoder.layers.1.attention.query.weight",
        "decoder.block.2.layer.1.EncDecAttention.k.weight": "body.decoder.layers.2.cross.key.weight",
        "decoder.block.0.layer.2.DenseReluDense.wo.weight": "body.decoder.layers.0.layer.feed_forward.contract.weight",
        "decoder.final_layer_norm.weight": "body.decoder.norm.weight",
    }
    for name, our_name in names.items():
        reference, gradient = theirs.get_parameter(name).grad, ours.get_parameter(our_name).grad
        assert reference.abs().max() > 1e-3
        assert (gradient - reference).abs().max() <= 1e-4 * max(1.0, float(reference.abs().max())), name


@pytest.mark.parametrize("edition, kind", [(e, T5ForConditionalGeneration) for e in EDITIONS] + [("1.0", T5Model)])
def test_what_is_saved_loads_in_transformers_with_the_same_outputs(edition, kind, tmp_path):
    theirs, (words, _, _) = theirs_of(edition, kind), batch()
    first = converted(theirs, tmp_path / "in")
    first.save(tmp_path / "out")
    back, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(back.eval()(**words)[0], theirs(**words)[0])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "t5"
    assert allmask.load(tmp_path / "out").config == first.config


def test_older_files_name_the_embedding_three_times(tmp_path):
    """And hold a tensor nobody uses; one embedding that differs from the others is refused."""
    theirs = theirs_of("1.0")
    expected = converted(theirs, tmp_path / "t5").state_dict()
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
    assert {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"} <= set(
        state
    )
    (tmp_path / "t5" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "t5" / "pytorch_model.bin")
    found = allmask.load(tmp_path / "t5").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    torch.save(state | {"decoder.embed_tokens.weight": torch.zeros(60, 32)}, tmp_path / "t5" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"differs from shared\.weight"):
        allmask.load(tmp_path / "t5")


@pytest.mark.parametrize("change, words", [({"feed_forward_proj": "swish"}, "swish"), ({"d_kv": None}, "d_kv")])
def test_unsupported_settings_are_refused(change, words, tmp_path):
    converted(theirs_of("1.0"), tmp_path / "t5")
    file = tmp_path / "t5" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        allmask.load(tmp_path / "t5")


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 10), (16, 64)])
def test_buckets_are_theirs(buckets, distance, both_ways):
    ours = RelativePositionBias(1, buckets, distance, both_ways)
    ours.table.weight = torch.nn.Parameter(torch.arange(buckets).float()[:, None])
    relative = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(relative, both_ways, buckets, distance)
    assert ours._look_up(relative[None, None])[0, 0, 0].long().tolist() == expected.tolist()


# ---- texts -------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 7, 11, END], [4, END], [8, 8, 20, 31, 6, 44, END], [5, 9, 7, 11, END]]


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def writers(request, tmp_path_factory):
    theirs = theirs_of(request.param, num_decoder_layers=2)  # their `generate` takes stacks of one depth only
    with torch.no_grad():  # far from each other, so that no two tokens are alike likely
        theirs.shared.weight.mul_(3.0)
    return theirs, PairWriter(converted(theirs, tmp_path_factory.mktemp("t5")))


def their_texts(model, prompt, **options):
    options = {"max_new_tokens": 10, "output_scores": True, "pad_token_id": PAD, **options}
    out = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    return out, [row[1:] for row in out.sequences.tolist()]  # without the token that begins


def same_text(ours, theirs):
    tokens = [*ours.tokens, *([END] if ours.finished else [])]
    return tokens == theirs[: len(tokens)] and all(token == PAD for token in theirs[len(tokens) :])


def test_greedy(writers):
    model, writer = writers
    for prompt, [ours] in zip(PROMPTS, generate(writer, PROMPTS, Decoding(end=(END,), max_new=10)), strict=True):
        out, [theirs] = their_texts(model, prompt, do_sample=False, output_logits=True)
        length = len(ours.tokens) + ours.finished
        steps = torch.stack(out.logits)[:length, 0].log_softmax(1)
        total = steps.gather(1, torch.tensor(theirs[:length])[:, None]).sum().item()
        assert same_text(ours, theirs) and abs(ours.log_probability - total) < 1e-4


@pytest.mark.parametrize("beams, penalty", [(2, 1.0), (4, 0.5)])
def test_beams(writers, beams, penalty):
    model, writer = writers
    rules = Decoding(end=(END,), max_new=10, beams=beams, n_best=beams, length_penalty=penalty)
    for prompt, found in zip(PROMPTS, generate(writer, PROMPTS, rules), strict=True):
        out, texts = their_texts(
            model, prompt, do_sample=False, num_beams=beams, num_return_sequences=beams, length_penalty=penalty,
            early_stopping="never",
        )  # fmt: skip
        for ours, theirs, score in zip(found, texts, out.sequences_scores.tolist(), strict=True):
            assert same_text(ours, theirs) and abs(ours.score - score) < 1e-4


# ---- sizes and beginnings ----------------------------------------------------------------------------------


COUNTS = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "t5-v1.1-small": 76_961_152, "t5-v1.1-base": 247_577_856, "t5-v1.1-large": 783_150_080,
}  # fmt: skip


@pytest.mark.parametrize("preset", COUNTS)
def test_exact_parameter_counts(preset):
    with torch.device("meta"):
        model = Model(PRESETS[preset](), ["lm"])
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset]


def test_a_body_without_an_output_learns_to_write(tmp_path):
    """A new output layer has no bias that could begin with frequencies."""
    theirs_of("tied, gated with relu", T5Model, tie_word_embeddings=False, vocab_size=130).save_pretrained(tmp_path)
    made = allmask.load(tmp_path)
    made.tokenizer = train_tokenizer(["red cat", "blue dog"], "unigram", 130)
    records = [Record({"source": "red cat", "target": "blue dog"}, "here:1")]
    ready = Title().fitted(made).prepare(made, records)
    assert ready.lm_head is not None and ready.lm_head.bias is None


def test_an_activation_without_a_word_is_not_renamed(tmp_path):
    """T5's "gated-gelu" is the formula with a tanh; another is written in our own layout."""
    sizes = {"width": 32, "layers": 1, "decoder_layers": 1, "heads": 2, "ffn_width": 16, "vocab_size": 60}
    made = Model.fresh(replace(PRESETS["t5-v1.1-small"](), activation="gelu", **sizes), ["lm"])
    made.save(tmp_path / "t5")
    assert allmask.load(tmp_path / "t5").config == made.config


def test_fresh_weights_have_the_sizes_of_transformers():
    """Of each kind of matrix, and so scores q·k of size 1 without a 1/√d."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    theirs = T5ForConditionalGeneration(T5Config(**sizes))
    shape = {"vocab_size": 400, "width": 128, "head_width": 32, "ffn_width": 256, "heads": 4}
    small = replace(PRESETS["t5-small"](), **shape, layers=1, decoder_layers=1)
    found = Model.fresh(small, ["lm"], torch.Generator().manual_seed(0)).state_dict()
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name in T5.pairs(1, 1)}
    del state["lm_head.weight"]
    expected = T5.to_ours(state, 1, 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float(found[name].std()) == pytest.approx(float(tensor.std()), rel=0.15, abs=1e-6), name
