"""The audit finds what is there: a promise kept, a leak, a blind spot; on our models and on transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel

from allmask import presets
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.audit import (
    Subject,
    audit,
    audit_tokens,
    compare,
    our_subject,
    probe_mask,
    probed,
    transformers_subject,
)
from allmask.model import Model

SMALL = {"vocab_size": 40, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 16}


def rng():
    return torch.Generator().manual_seed(0)


def ours(preset=presets.bert_base):
    return Model.fresh(replace(preset(), **SMALL), rng=rng())


def theirs(attention="sdpa"):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(
        BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16, attn_implementation=attention)
    )


@pytest.mark.parametrize("preset", [presets.bert_base, presets.gpt2])
@pytest.mark.parametrize("kind", probed())
def test_our_models_obey_every_mask(kind, preset):
    result = audit(our_subject(ours(preset)), probe_mask(kind, 9, rng()), rng())
    assert result.holds and result.leaks == [] and result.blind == []


@pytest.mark.parametrize("kind", probed())
def test_an_audit_of_given_tokens_keeps_equal_ones_apart(kind):
    model, mask = ours(), probe_mask(kind, 9, rng())
    result = audit_tokens(model, torch.tensor([[7, 8, 7, 7, 8, 9, 7, 8, 7]]), mask)
    assert result.holds and torch.equal(result.depends, audit(our_subject(model), mask, rng()).depends)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_leak_is_found_where_it_is():
    """A body that is handed one extra cell: output 1 may read input 4."""
    model, mask = ours(), Mask.causal(torch.ones(1, 6).bool())
    matrix = mask.visible()
    matrix[0, 1, 4] = True
    leaky = Subject(
        lambda ids, _: model.eval()(ids, Mask.from_matrix(matrix)).hidden, model.body.embedding.tokens.weight, 2
    )
    result = audit(leaky, mask, rng())
    seen = {(1, 4), (1, 2), (1, 3), (2, 4), (3, 4)}  # two layers: 1 reads 4 and what 4 read; the readers of 1 get 4
    assert not result.holds and set(result.leaks) == seen and not result.blind


def test_a_blind_spot_is_found():
    model, mask = ours(), Mask.bidirectional(torch.ones(1, 4).bool())
    blind = Subject(
        lambda ids, _: model.eval()(ids, Mask.causal(torch.ones(1, 4).bool())).hidden,
        model.body.embedding.tokens.weight,
        2,
    )
    result = audit(blind, mask, rng())
    assert result.leaks == [] and result.blind == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    "way, kind, attention, holds",
    [
        ("4D boolean", "prefix", "sdpa", True),
        ("4D additive, 0 or -inf", "prefix", "eager", True),
        ("4D float, 1 or 0", "prefix", "sdpa", False),
        ("positions that restart", "packed", "sdpa", False),
    ],
)
def test_each_way_to_pass_a_mask_to_transformers(way, kind, attention, holds):
    assert audit(transformers_subject(theirs(attention), way), probe_mask(kind, 9), rng()).holds is holds


def test_comparison_has_a_row_for_each_way(tmp_path):
    model = Model.fresh(replace(presets.bert_base(), **SMALL), ("pooler",), rng())
    model.save(tmp_path / "m")
    findings = compare(model, tmp_path / "m", tokens=6)
    assert all(row.leaks == row.blind == 0 for row in findings if row.library == "allmask")
    assert any(row.leaks for row in findings if row.library != "allmask")
    refused = {row.way for row in findings if row.refused}
    assert {"3D boolean", "generate() with a 4D boolean"} <= refused


def test_an_audit_refuses_what_it_cannot_measure():
    with pytest.raises(UsageError, match="one row without padding"):
        audit(our_subject(ours()), Mask.causal(torch.tensor([[True, False]])))
    with pytest.raises(UsageError, match="the vocabulary has 40"):
        audit(our_subject(ours()), Mask.causal(torch.ones(1, 41).bool()))
