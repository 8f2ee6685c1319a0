"""RoBERTa, XLM-R, DistilBERT, ELECTRA, ERNIE, ALBERT and RoFormer: our outputs are those of transformers, and back."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

import allmask
from allmask import checkpoints
from allmask.checkpoints import read
from allmask.errors import CheckpointError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.text import Tokenizer

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 24, "initializer_range": 0.2,
}  # fmt: skip
DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 24}
FAMILIES = {  # the start of the names of its classes: settings
    "Roberta": {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "XLMRoberta": SIZES,
    "DistilBert": {**DISTIL, "initializer_range": 0.2},
    "Electra": {**SIZES, "embedding_size": 16},
    "Ernie": {**SIZES, "use_task_id": True},
    "Albert": {**SIZES, "embedding_size": 16},
    "RoFormer": {**SIZES, "embedding_size": 16},
}
OTHERS = [  # variants of the same
    ("Roberta", "ForCausalLM", {"is_decoder": True}, {"lm"}),
    ("Roberta", "ForMaskedLM", {"tie_word_embeddings": False, "pad_token_id": 3}, {"lm"}),
    ("XLMRoberta", "Model", {}, {"pooler"}),
    ("DistilBert", "ForMaskedLM", {"activation": "relu", "sinusoidal_pos_embds": True}, {"lm"}),
    ("Electra", "ForMaskedLM", {"embedding_size": 32, "tie_word_embeddings": False}, {"lm"}),
    ("Electra", "Model", {}, set()),
    ("Ernie", "ForPreTraining", {"use_task_id": False, "hidden_act": "relu"}, {"pooler", "lm", "nsp"}),
    ("Albert", "Model", {"embedding_size": 32, "hidden_act": "gelu"}, {"pooler"}),
    ("Albert", "ForMaskedLM", {"tie_word_embeddings": False}, {"lm"}),
    ("RoFormer", "ForMaskedLM", {"embedding_size": 32, "hidden_act": "gelu_new"}, {"lm"}),
]
HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"]
RIGHT = torch.arange(9) < torch.tensor([[9], [4], [6]])


def reference(start: str, kind: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{start}Config")(**{**FAMILIES[start], **changes})
    model = getattr(transformers, start + kind)(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases away from 1 and 0, so that a swapped or forgotten one shows
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


def batch(model, valid: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids, and all inputs of the model; positions count the tokens of a text, as everywhere in allmask."""
    ids = torch.randint(5, 60, valid.shape, generator=torch.Generator().manual_seed(1))
    ids = ids.masked_fill(~valid, model.config.pad_token_id)
    inputs = {"input_ids": ids, "attention_mask": valid.long()}
    names, counts = inspect.signature(model.forward).parameters, hasattr(model, "roberta")
    counts = counts or type(model).__name__.startswith(("Roberta", "XLMRoberta"))  # these do it themselves
    if "position_ids" in names and not counts:
        inputs["position_ids"] = (valid.cumsum(1) - 1).clamp(min=0)
    if "token_type_ids" in names and model.config.type_vocab_size > 1:
        inputs["token_type_ids"] = torch.arange(9).expand(3, 9) % 2
    return ids, inputs


def converted(theirs, folder) -> Model:
    theirs.save_pretrained(folder)
    return allmask.load(folder)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and (ours - theirs).abs().max().item() <= 1e-5


def same_again(theirs, ours: Model, folder, inputs: dict[str, Tensor]) -> None:
    """What we write is loaded by the same class, without a missing or unknown tensor, and gives the same outputs."""
    ours.save(folder)
    named = json.loads((folder / "config.json").read_text())["architectures"]
    assert named == [type(theirs).__name__]
    back, info = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    close(back.eval()(**inputs)[0], theirs(**inputs)[0])
    again = allmask.load(folder)
    assert (again.config, again.heads, again.labels) == (ours.config, ours.heads, ours.labels)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True))


@pytest.mark.parametrize("start", FAMILIES)
@torch.no_grad()
def test_a_masked_language_model_with_padding_on_either_side(start, tmp_path):
    theirs = reference(start, "ForMaskedLM")
    ours = converted(theirs, tmp_path / "in")
    for valid in (RIGHT, RIGHT.flip(1)):
        ids, inputs = batch(theirs, valid)
        expected = theirs(**inputs, output_hidden_states=True)
        out = ours(ids, Mask.bidirectional(valid), segments=inputs.get("token_type_ids"))
        close(out.hidden[valid], expected.hidden_states[-1][valid])
        close(out.logits[valid], expected.logits[valid])
    assert ours.heads == {"lm"}
    same_again(theirs, ours, tmp_path / "out", batch(theirs, RIGHT)[1])


@pytest.mark.parametrize(("start", "kind", "changes", "heads"), OTHERS)
@torch.no_grad()
def test_variants(start, kind, changes, heads, tmp_path):
    theirs = reference(start, kind, **changes)
    ours = converted(theirs, tmp_path / "in")
    ids, inputs = batch(theirs, RIGHT)
    out = ours(ids, ours.own_mask(RIGHT), segments=inputs.get("token_type_ids"))
    assert ours.heads == heads
    close((out.logits if "lm" in heads else out.hidden)[RIGHT], theirs(**inputs)[0][RIGHT])
    same_again(theirs, ours, tmp_path / "out", inputs)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("start", FAMILIES)
@torch.no_grad()
def test_task_heads(start, kind, tmp_path):
    labelled = {} if kind in HEADS[2:] else {"num_labels": 3, "id2label": {0: "好", 1: "坏", 2: "?"}}
    theirs = reference(start, kind, **labelled)
    if start == "RoFormer" and kind == "ForMultipleChoice":  # transformers reads the last token there, even padding
        theirs.save_pretrained(tmp_path)
        assert read(tmp_path).left_out == ["classifier.bias", "classifier.weight"]
        return
    ours = converted(theirs, tmp_path / "in")
    ids, inputs = batch(theirs, RIGHT)
    answers = ours(ids, Mask.bidirectional(RIGHT), segments=inputs.get("token_type_ids")).answers
    if kind == "ForMultipleChoice":  # three texts of one question
        inputs = {name: x[None] for name, x in inputs.items() if name != "position_ids"}
        close(answers[:, 0], theirs(**inputs).logits[0])
    elif kind == "ForQuestionAnswering":
        found = theirs(**inputs)
        close(answers, torch.stack([found.start_logits, found.end_logits], -1)[RIGHT])
    else:
        logits = theirs(**inputs).logits
        close(answers, logits[RIGHT] if kind == "ForTokenClassification" else logits)
        assert ours.labels is not None and ours.labels.names == ("好", "坏", "?")
    same_again(theirs, ours, tmp_path / "out", inputs)


@pytest.mark.parametrize("start", FAMILIES)
@torch.no_grad()
def test_the_prefix_mask_is_that_of_a_4d_mask(start, tmp_path):
    theirs = reference(start, "ForMaskedLM", attn_implementation="eager")
    ours = converted(theirs, tmp_path / "m")
    ids, inputs = batch(theirs, torch.ones(3, 9).bool())
    mask = Mask.prefix(torch.arange(9).expand(3, -1) >= torch.tensor([[4], [2], [7]]))
    inputs["attention_mask"] = torch.where(mask.visible()[:, None], 0.0, torch.finfo(torch.float32).min)
    close(ours(ids, mask, segments=inputs.get("token_type_ids")).logits, theirs(**inputs).logits)


@pytest.mark.parametrize(
    ("start", "names"),
    [("Electra", ["discriminator_predictions.dense.bias"]), ("Albert", ["sop_classifier.classifier.bias"])],
)
def test_heads_of_pretraining_that_nothing_uses_are_left_out(start, names, tmp_path):
    reference(start, "ForPreTraining").save_pretrained(tmp_path)
    found = read(tmp_path)
    assert set(names) <= set(found.left_out) and found.heads == ({"pooler", "lm"} if start == "Albert" else set())


@pytest.mark.parametrize(
    ("start", "changes", "words"),
    [
        ("Roberta", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("Electra", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("Albert", {"num_hidden_groups": 2}, "num_hidden_groups is 2; only 1 is supported"),
        ("Albert", {"inner_group_num": 2}, "inner_group_num is 2"),
        ("RoFormer", {"rotary_value": True}, "rotary_value is True"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(start, changes, words, tmp_path):
    reference(start, "Model", **changes).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path)


def test_a_head_that_a_family_has_no_names_for_is_written_in_our_own_layout(tmp_path):
    body = converted(reference("RoFormer", "Model"), tmp_path / "in")
    model = body.with_labels(Labels("choice", ("choice",)), torch.Generator().manual_seed(0))
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "allmask"
    ids = torch.arange(5, 14)[None]
    close(allmask.load(tmp_path / "out")(ids).answers, model(ids).answers)


def test_a_causal_albert_is_not_written_as_what_transformers_would_read_both_ways(tmp_path):
    model = converted(reference("Albert", "ForMaskedLM"), tmp_path / "in")
    checkpoints.write(tmp_path / "out", replace(model.config, own_mask="causal"), model.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "allmask"
    assert read(tmp_path / "out").config.own_mask == "causal"


def test_transformers_gives_a_distilbert_no_segments(tmp_path):
    """Its class for DistilBERT refuses them, and BERT's tokenizer would pass them."""
    model = converted(reference("DistilBert", "Model"), tmp_path / "in")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "北", "京"]))
    model.tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    model.save(tmp_path / "out")
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("北京", return_tensors="pt")
    assert inputs.keys() == {"input_ids", "attention_mask"}
    hidden = transformers.AutoModel.from_pretrained(tmp_path / "out")(**inputs).last_hidden_state
    close(allmask.load(tmp_path / "out")(inputs["input_ids"]).hidden, hidden)


def test_layers_that_are_shared_are_stored_once_and_trained_as_one(tmp_path):
    theirs = reference("Albert", "ForMaskedLM")
    ours, (ids, inputs) = converted(theirs, tmp_path / "m"), batch(theirs, RIGHT)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    found = ours(ids, Mask.bidirectional(RIGHT), segments=inputs["token_type_ids"])
    for logits in (theirs(**inputs).logits, found.logits):
        (logits * RIGHT[..., None]).square().sum().backward()
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    expected, gradient = theirs.get_parameter(name).grad, ours.body.layers[2].feed_forward.expand.weight.grad
    assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert ours.keep_layers(2).config.layers == 2
