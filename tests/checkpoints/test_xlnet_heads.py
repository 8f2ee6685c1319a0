"""XLNet's task heads: the same scores as in transformers, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import XLNetConfig

from allmask.checkpoints import read
from allmask.errors import CheckpointError
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.heads import SPAN, Labels
from allmask.presets import xlnet_tiny
from allmask.tasks.common import reading
from allmask.text import Tokenizer

SIZES = {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "number": "regression"}
IDS = torch.tensor([[7, 9, 4, 11, 4, 3], [5, 8, 13, 20, 4, 3], [5, 5, 5, 6, 4, 3]])  # padded on the left by 5
VALID = torch.tensor([[True] * 6, [False] + [True] * 5, [False] * 3 + [True] * 3])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [3, 0, 0, 0, 0, 2], [3, 3, 3, 0, 0, 2]])
NAMES = {0: "neg", 1: "中", 2: "pos"}


def config_of(names: dict[int, str] | None = None, **changes) -> XLNetConfig:
    labels = {} if names is None else {"id2label": names, "label2id": {name: n for n, name in names.items()}}
    return XLNetConfig(**SIZES, mem_len=None, **labels, **changes)


def made(tools, layout: str, kind: str, **changes):
    """A random model of transformers, its weights not so large that tanh is always 1."""
    names = {"number": {0: "数"}, "choice": None, "span": None}.get(kind, NAMES)
    problem = {"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {}
    theirs = tools.randomised(getattr(transformers, layout)(config_of(names, **problem, **changes)))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter *= 0.3
    return theirs


def asked(theirs, kind: str) -> torch.Tensor:
    """The scores of theirs, in the rows of ours: a text each, or a token that is no padding."""
    with torch.no_grad():
        if kind == "choice":
            given = [x[None] for x in (IDS, VALID.long(), SEGMENTS)]
            return theirs(given[0], attention_mask=given[1], token_type_ids=given[2]).logits[0, :, None]
        found = theirs(IDS, attention_mask=VALID.long(), token_type_ids=SEGMENTS)
    if kind == "span":
        return torch.stack([found.start_logits, found.end_logits], -1)[VALID]
    return found.logits[VALID] if kind == "tag" else found.logits


def ours_of(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, model.own_mask(VALID), SEGMENTS).answers


KINDS = {
    "single": "XLNetForSequenceClassification",
    "multi": "XLNetForSequenceClassification",
    "number": "XLNetForSequenceClassification",
    "tag": "XLNetForTokenClassification",
    "choice": "XLNetForMultipleChoice",
    "span": "XLNetForQuestionAnsweringSimple",
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(tools, tmp_path: Path, kind: str):
    theirs = made(tools, KINDS[kind], kind)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert model.labels is not None and model.labels.kind == kind and model.heads == {"task"}
    if kind not in ("choice", "span"):
        assert model.labels.names == tuple(theirs.config.id2label.values())
    torch.testing.assert_close(ours_of(model), asked(theirs, kind), atol=1e-5, rtol=1e-5)
    model.save(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [KINDS[kind]]
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.id2label == theirs.config.id2label and again.config.problem_type == theirs.config.problem_type
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    torch.testing.assert_close(asked(again.eval(), kind), asked(theirs, kind), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "chain"])
def test_new_heads_are_loaded_by_transformers(tmp_path: Path, kind: str):
    sizes = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 24}
    rng = torch.Generator().manual_seed(0)
    labels = {"span": SPAN, "choice": Labels("choice", ("choice",)), "number": Labels("number", ("x",))}
    body = Model.fresh(replace(xlnet_tiny(), **sizes, init_std=0.2), (), rng)
    model = body.with_labels(labels.get(kind, Labels(kind, ("a", "乙", "c"))), rng)
    model.save(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.labels == model.labels and again.config == model.config
    assert torch.equal(ours_of(again), ours_of(model))
    layout = KINDS["tag" if kind == "chain" else kind]
    theirs, report = getattr(transformers, layout).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and bool(report["unexpected_keys"]) == (kind == "chain")
    expected = asked(theirs.eval(), "tag" if kind == "chain" else kind)
    torch.testing.assert_close(expected, ours_of(model), atol=1e-5, rtol=1e-5)


def test_one_way_the_last_token_is_read_too(tools, tmp_path: Path):
    theirs = made(tools, "XLNetForSequenceClassification", "single", attn_type="uni")
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        assert model.config.own_mask == "causal"
        torch.testing.assert_close(model(IDS).answers, theirs(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"summary_type": "first"}, {"summary_use_proj": False}, {"summary_activation": None}]
)
def test_another_summary_is_refused_where_it_is_read(tools, tmp_path: Path, changes: dict):
    made(tools, "XLNetForSequenceClassification", "single").save_pretrained(tmp_path / "texts")
    made(tools, "XLNetForTokenClassification", "tag").save_pretrained(tmp_path / "tokens")
    for folder in (tmp_path / "texts", tmp_path / "tokens"):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=next(iter(changes))) as caught:
        read(tmp_path / "texts")
    assert str(tmp_path / "texts" / "config.json") in caught.value.message
    assert read(tmp_path / "tokens").labels is not None


def test_the_task_head_reads_the_last_token_that_sees_all_of_its_text():
    with torch.device("meta"):
        model = Model(replace(xlnet_tiny(), vocab_size=40), labels=Labels("single", ("a", "b")))
    document = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [4, 4, 7, 7, 7, 7, 7]])
    valid = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    expected = torch.tensor([[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
    for mask in (Mask.bidirectional(valid), Mask.causal(valid)):
        assert torch.equal(model.asked(Mask.packed(mask, document)), expected)


# ---- what it reads -------------------------------------------------------------------------------------------------


def tokenizer(cls_last: bool) -> Tokenizer:
    """Words, framed as XLNet's or as BERT's."""
    marks = ["<unk>", "<sep>", "<cls>", "<pad>"]
    backend = Backend(WordLevel({word: n for n, word in enumerate([*marks, "red", "blue", "北京"])}, "<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    frames = ("$A <sep> <cls>:2", "$A <sep> $B:1 <sep>:1 <cls>:2") if cls_last else ("<cls> $A <sep>", None)
    both = frames[1] or "<cls> $A <sep> $B:1 <sep>:1"
    backend.post_processor = TemplateProcessing(
        single=frames[0], pair=both, special_tokens=[("<sep>", 1), ("<cls>", 2)]
    )
    return Tokenizer(backend, {"unk": "<unk>", "sep": "<sep>", "cls": "<cls>", "pad": "<pad>"})


@pytest.mark.parametrize("cls_last", [True, False])
def test_texts_are_framed_as_its_tokenizer_frames_them(cls_last: bool):
    words, config = tokenizer(cls_last), replace(xlnet_tiny(), vocab_size=7)
    pair = ("red blue", "北京")
    read_all = reading.read(words, config, ["red blue", pair], 16, "head")
    assert read_all.speaker == "last"
    for example, encoded in zip(read_all.examples, (words.encode("red blue"), words.encode(*pair)), strict=True):
        assert (example.ids.tolist(), example.segments.tolist()) == (encoded.ids, encoded.segments)


def test_cut_texts_keep_their_frame():
    words, config = tokenizer(True), replace(xlnet_tiny(), vocab_size=7)
    long = " ".join(["red"] * 30)
    found = reading.read(words, config, [long, (long, long)], 10, "head")
    assert [example.ids.tolist() for example in found.examples] == [
        [4] * 8 + [1, 2],
        [4] * 4 + [1] + [4] * 3 + [1, 2],
    ]
    assert found.examples[1].segments.tolist() == [0] * 5 + [1] * 4 + [2]
