"""Task heads: the same scores as in transformers, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from allmask.checkpoints import read, write
from allmask.errors import CheckpointError
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.presets import bert_tiny

KINDS = {"single": "single_label_classification", "multi": "multi_label_classification", "number": "regression"}
IDS = torch.tensor([[2, 7, 9, 3, 11, 3], [2, 5, 8, 13, 3, 0], [2, 3, 0, 0, 0, 0]])
SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
VALID = IDS != 0


def reference(tools, family: str, kind: str):
    names = {0: "数"} if kind == "number" else {0: "neg", 1: "中", 2: "pos"}
    settings = {"id2label": names, "label2id": {name: n for n, name in names.items()}, "problem_type": KINDS[kind]}
    if family == "bert":
        return tools.randomised(transformers.BertForSequenceClassification(tools.bert_config(**settings)))
    return tools.randomised(transformers.GPT2ForSequenceClassification(tools.gpt2_config(pad_token_id=0, **settings)))


def theirs_of(model) -> torch.Tensor:
    segments = {"token_type_ids": SEGMENTS} if model.config.model_type == "bert" else {}
    with torch.no_grad():
        return model(IDS, attention_mask=VALID.long(), **segments).logits


def ours_of(model: Model) -> torch.Tensor:
    mask = model.own_mask(VALID)
    with torch.no_grad():
        return model(IDS, mask, SEGMENTS if model.config.family == "bert" else None).answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_there_and_back(tools, tmp_path: Path, family: str, kind: str):
    theirs = reference(tools, family, kind)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert model.labels == Labels(kind, tuple(theirs.config.id2label.values())) and "task" in model.heads
    torch.testing.assert_close(ours_of(model), theirs_of(theirs), atol=1e-5, rtol=1e-5)
    model.save(tmp_path / "ours")
    auto = transformers.AutoModelForSequenceClassification
    again, report = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.id2label == theirs.config.id2label and again.config.problem_type == KINDS[kind]
    assert again.config.label2id == theirs.config.label2id and again.config.num_labels == theirs.config.num_labels
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    torch.testing.assert_close(ours_of(model), theirs_of(again.eval()), atol=1e-5, rtol=1e-5)


def test_an_output_layer_beside_it_is_kept(tools, tmp_path: Path):
    reference(tools, "bert", "single").save_pretrained(tmp_path / "theirs")
    both = load(tmp_path / "theirs").with_language_model(torch.Generator().manual_seed(1))
    both.save(tmp_path / "both")
    again = load(tmp_path / "both")
    assert again.heads == {"pooler", "lm", "task"}
    assert torch.equal(again(IDS, again.own_mask(VALID)).logits, both(IDS, both.own_mask(VALID)).logits)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "both").eval()
    torch.testing.assert_close(theirs_of(loaded), ours_of(both), atol=1e-5, rtol=1e-5)


def test_missing_label_names_are_numbered(tools, tmp_path: Path):
    theirs = transformers.BertForSequenceClassification(tools.bert_config(num_labels=3))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in settings.items() if "label" not in name}))
    assert read(tmp_path).labels == Labels("single", ("LABEL_0", "LABEL_1", "LABEL_2"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "id2label names 2 labels; the head has 3"),
        ({"id2label": {"0": "a", "1": "b", "3": "c"}}, "id2label names 3 labels; the head has 3, numbered from 0"),
        ({"id2label": {"0": "a", "1": "b", "2": "b"}}, "the name 'b' occurs more than once"),
        ({"id2label": ["a", "b", "c"]}, "expected an object"),
        ({"id2label": {"0": "a", "1": "b", "2": 7}}, "numbered from 0"),
        ({"problem_type": "guess"}, "problem_type is 'guess'"),
        ({"problem_type": ["regression"]}, "problem_type is"),
    ],
)
def test_settings_that_do_not_fit(tools, tmp_path: Path, changes: dict, says: str):
    reference(tools, "bert", "single").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=says) as caught:
        read(tmp_path)
    assert caught.value.message.startswith(str(file))


def test_half_a_head_is_an_error(tools, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    reference(tools, "bert", "single").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "classifier.bias"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing +classifier.bias +expected \[3\]"):
        read(tmp_path)


@pytest.mark.parametrize("changes", [{"norm_place": "pre"}, {"own_mask": "causal"}])
def test_task_heads_that_transformers_lacks_are_in_our_own_layout(tmp_path: Path, changes: dict):
    config = replace(bert_tiny(), vocab_size=40, width=16, heads=2, ffn_width=24, max_positions=12, **changes)
    labels = Labels("multi", ("a", "b"))
    model = Model.fresh(config, (), torch.Generator().manual_seed(0)).with_labels(
        labels, torch.Generator().manual_seed(1)
    )
    model.save(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "allmask"
    again = load(tmp_path / "own")
    assert again.labels == labels and torch.equal(ours_of(again), ours_of(model))
    file = tmp_path / "own" / "config.json"
    good = json.loads(file.read_text())
    for bad in ({"labels": 3}, {"labels": {"kind": "single", "names": []}}, {"labels": {"names": ["a"]}}):
        file.write_text(json.dumps(good | bad))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(tmp_path / "own")
    file.write_text(json.dumps({name: value for name, value in good.items() if name != "labels"}))
    with pytest.raises(CheckpointError, match="a task head needs labels"):
        load(tmp_path / "own")


def test_a_head_without_labels_is_not_written(tmp_path: Path):
    config = replace(bert_tiny(), vocab_size=40, width=16, heads=2, ffn_width=24, max_positions=12)
    model = Model(config, labels=Labels("single", ("a", "b")))
    with pytest.raises(CheckpointError, match="saved with its labels"):
        write(tmp_path / "x", config, model.state_dict())


def test_a_new_head_leaves_the_rest_alone(tools, tmp_path: Path):
    reference(tools, "bert", "single").save_pretrained(tmp_path)
    model = load(tmp_path)
    other = model.with_labels(Labels("number", ("x",)), torch.Generator().manual_seed(0))
    assert other.labels == Labels("number", ("x",)) and ours_of(other).shape == (3, 1)
    for name, tensor in model.state_dict().items():
        assert name.startswith("task_head.") or torch.equal(other.state_dict()[name], tensor)
    bare = other.without("task", "pooler")
    assert bare.heads == set() and bare.labels is None
    assert bare.with_labels(Labels("single", ("a", "b"))).heads == {"pooler", "task"}
    kept = model.keep_tokens([2, 3, 5, 7, 8, 9, 11, 13]).keep_layers(1)
    assert kept.labels == model.labels and kept.config.vocab_size == 8


@pytest.mark.parametrize("causal", [False, True])
def test_the_task_head_reads_the_first_token_that_sees_all_of_its_text(causal: bool):
    config = replace(bert_tiny(), own_mask="causal" if causal else "bidirectional")
    with torch.device("meta"):
        model = Model(config)
    document = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [4, 4, 7, 7, 7, 7, 7]])
    valid = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    mask = Mask.packed(model.own_mask(valid), document)
    sees = mask.visible()
    expected = torch.zeros_like(valid)
    for row in range(2):
        for group in set(mask.group[row].tolist()) - {-1}:
            mine = (mask.group[row] == group).nonzero()[:, 0]
            expected[row, next(token for token in mine if sees[row, token, mine].all())] = True
    assert torch.equal(model.asked(mask), expected)
