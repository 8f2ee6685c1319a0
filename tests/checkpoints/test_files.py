"""The many ways a model has been put on disk: shards, pickles old and new, old names, with and without prefixes."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from allmask.checkpoints import read
from allmask.errors import CheckpointError


def rewrite(folder, change):
    """The weights of a folder with their names changed."""
    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors")


def as_pickle(folder, change=dict, **options):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(state), folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_sharded_safetensors(tools, tmp_path, kind):
    name = {"bert": "BertForPreTraining", "gpt2": "GPT2LMHeadModel"}[kind]
    model = tools.randomised(getattr(transformers, name)(getattr(tools, f"{kind}_config")()))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tools.same(read(tmp_path).tensors, getattr(tools, f"{kind}_truth")(model))
    tools.same(read(tmp_path / "model.safetensors.index.json").tensors, read(tmp_path).tensors)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before 2020"])
def test_pickles(tools, bert_folder, options):
    before = read(bert_folder).tensors
    as_pickle(bert_folder, **options)
    tools.same(read(bert_folder).tensors, {name: tensor.clone() for name, tensor in before.items()})
    tools.same(read(bert_folder / "pytorch_model.bin").tensors, before)


def test_a_pickle_of_parameters_with_tied_copies(tools, tmp_path):
    """What `torch.save(model.state_dict())` gives: the output layer is there twice, sharing memory."""
    model = tools.randomised(transformers.BertForMaskedLM(tools.bert_config()))
    model.config.save_pretrained(tmp_path)
    state = dict(model.named_parameters(remove_duplicate=False))
    assert "cls.predictions.decoder.weight" in state and state["cls.predictions.bias"].requires_grad
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = read(tmp_path)
    tools.same(found.tensors, tools.bert_truth(model))
    assert found.config.tied and not any(tensor.requires_grad for tensor in found.tensors.values())


def test_sharded_pickles(tools, bert_folder):
    before = read(bert_folder).tensors
    state = load_file(bert_folder / "model.safetensors")
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: state[name] for name in part}, bert_folder / file)
        weight_map |= dict.fromkeys(part, file)
    (bert_folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (bert_folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    tools.same(read(bert_folder).tensors, before)


def test_the_names_of_2018(tools, bert_folder):
    before = read(bert_folder).tensors

    def old(state):
        words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        pattern = re.compile("|".join(map(re.escape, words)))
        new = {pattern.sub(lambda m: words[m[0]], name): tensor for name, tensor in state.items()}
        assert any(name.endswith(".gamma") for name in new)
        return new

    rewrite(bert_folder, old)
    tools.same(read(bert_folder).tensors, before)


def test_with_and_without_the_prefix(tools, bert_folder, tmp_path):
    before = read(bert_folder).tensors
    rewrite(bert_folder, lambda state: {name.removeprefix("bert."): tensor for name, tensor in state.items()})
    tools.same(read(bert_folder).tensors, before)
    model = tools.randomised(transformers.GPT2Model(tools.gpt2_config()))
    model.save_pretrained(tmp_path / "gpt2")
    before = read(tmp_path / "gpt2").tensors
    rewrite(tmp_path / "gpt2", lambda state: {f"transformer.{name}": tensor for name, tensor in state.items()})
    tools.same(read(tmp_path / "gpt2").tensors, before)


def test_tensors_without_information_are_ignored(tools, bert_folder, tmp_path):
    before = read(bert_folder).tensors
    rewrite(bert_folder, lambda state: state | {"bert.embeddings.position_ids": torch.arange(12)[None]})
    tools.same(read(bert_folder).tensors, before)
    tools.randomised(transformers.GPT2LMHeadModel(tools.gpt2_config())).save_pretrained(tmp_path / "gpt2")
    before = read(tmp_path / "gpt2").tensors
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    rewrite(tmp_path / "gpt2", lambda state: state | buffers)
    tools.same(read(tmp_path / "gpt2").tensors, before)


def test_an_output_layer_that_differs_is_not_tied_whatever_the_settings_say(tools, tmp_path):
    """As transformers 5 does: two different matrices in the file are two matrices."""
    model = tools.randomised(transformers.GPT2LMHeadModel(tools.gpt2_config(tie_word_embeddings=False)))
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    found = read(tmp_path)
    assert not found.config.tied
    tools.same(found.tensors, tools.gpt2_truth(model))
    reference = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(found.tensors["lm_head.output.weight"], reference.lm_head.weight)


def test_only_the_output_matrix_was_saved(tools, tmp_path):
    model = tools.randomised(transformers.GPT2LMHeadModel(tools.gpt2_config()))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {n.replace("transformer.wte", "lm_head"): t for n, t in state.items()})
    found = read(tmp_path)
    tools.same(found.tensors, tools.gpt2_truth(model))
    assert found.config.tied


def test_a_single_file_and_a_folder_of_links(tools, bert_folder, tmp_path):
    """The hub's cache is a folder of links to blobs elsewhere: links the user has are followed."""
    before = read(bert_folder).tensors
    tools.same(read(bert_folder / "model.safetensors").tensors, before)
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(bert_folder / name)
    tools.same(read(tmp_path / "snapshot").tensors, before)


def test_settings_older_than_model_type(tools, bert_folder):
    before = read(bert_folder)
    settings = json.loads((bert_folder / "config.json").read_text())
    del settings["model_type"], settings["layer_norm_eps"], settings["tie_word_embeddings"]
    (bert_folder / "config.json").unlink()
    (bert_folder / "bert_config.json").write_text(json.dumps(settings))
    assert read(bert_folder).config == before.config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act"),
        ({"model_type": "deberta"}, "model_type is 'deberta'; supported here: bert or gpt2 or t5"),
        ({"model_type": 7}, "model_type is 7"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 3}, "not a multiple"),
    ],
)
def test_settings_that_would_change_the_numbers_are_refused(bert_folder, change, words):
    file = bert_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError) as caught:
        read(bert_folder)
    assert words in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("change", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}])
def test_gpt2_settings_that_would_change_the_numbers_are_refused(tools, tmp_path, change):
    transformers.GPT2LMHeadModel(tools.gpt2_config(**change)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read(tmp_path)


def test_a_padding_token_gpt2_never_got_is_none(tools, tmp_path):
    transformers.GPT2LMHeadModel(tools.gpt2_config()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 40}))
    assert read(tmp_path).config.pad_token is None
