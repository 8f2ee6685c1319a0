"""Files of TencentPretrain and UER-py: a transformers BERT under their names gives the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import allmask
from allmask.checkpoints import read
from allmask.errors import CheckpointError
from allmask.mask import Mask

SETTINGS = {  # as in their models/bert/base_config.json; without the size of the vocabulary
    "emb_size": 16, "feedforward_size": 24, "hidden_size": 16, "hidden_act": "gelu", "heads_num": 2, "layers_num": 2,
    "max_seq_length": 512, "dropout": 0.1, "data_processor": "bert", "embedding": ["word", "pos", "seg"],
    "encoder": "transformer", "mask": "fully_visible", "target": ["mlm", "sp"], "tie_weights": True,
}  # fmt: skip
# Parts of names, from the first to the last, by which a name of transformers becomes one of theirs.
WORDS = [
    ("bert.embeddings.word_embeddings", "embedding.word.embedding"),
    ("bert.embeddings.position_embeddings", "embedding.pos.embedding"),
    ("bert.embeddings.token_type_embeddings", "embedding.seg.embedding"),
    ("bert.embeddings.LayerNorm", "embedding.layer_norm"),
    ("bert.encoder.layer", "encoder.transformer"),
    ("attention.self.query", "self_attn.linear_layers.0"),
    ("attention.self.key", "self_attn.linear_layers.1"),
    ("attention.self.value", "self_attn.linear_layers.2"),
    ("attention.output.dense", "self_attn.final_linear"),
    ("attention.output.LayerNorm", "layer_norm_1"),
    ("intermediate.dense", "feed_forward.linear_1"),
    ("output.dense", "feed_forward.linear_2"),
    ("output.LayerNorm", "layer_norm_2"),
    ("bert.pooler.dense", "target.sp.linear_1"),
    ("cls.seq_relationship", "target.sp.linear_2"),
    ("cls.predictions.transform.dense", "target.mlm.linear_1"),
    ("cls.predictions.transform.LayerNorm", "target.mlm.layer_norm"),
    ("cls.predictions.decoder", "target.mlm.linear_2"),
]
OLD = [  # their names before 2022
    ("word.embedding", "word_embedding"),
    ("pos.embedding", "position_embedding"),
    ("seg.embedding", "segment_embedding"),
    ("target.mlm.layer_norm", "target.layer_norm"),
    ("target.mlm.linear", "target.mlm_linear"),
    ("target.sp.linear", "target.nsp_linear"),
]


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        if name == "cls.predictions.bias":  # also cls.predictions.decoder.bias
            continue
        for theirs, new in WORDS:
            name = name.replace(theirs, new)
        if "layer_norm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        if name.startswith("embedding.seg"):
            tensor = torch.cat([torch.full((1, 16), 9.0), tensor])  # segment 0 is that of padding
        found[name] = tensor.clone()
    return found


@pytest.fixture
def reference(tools):
    return tools.randomised(transformers.BertForPreTraining(tools.bert_config()))


def written(folder: Path, state: dict[str, Tensor], name: str = "model.bin", config: str = "config.json", **changes):
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / name)
    (folder / config).write_text(json.dumps({**SETTINGS, **changes}))
    return folder


@torch.no_grad()
def test_the_same_numbers_as_transformers(reference, tmp_path):
    ours = allmask.load(written(tmp_path / "uer", renamed(reference.state_dict())))
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    valid, segments = torch.arange(9) < torch.tensor([[9], [4], [6]]), torch.arange(9).expand(3, 9) % 2
    expected = reference(ids, attention_mask=valid.long(), token_type_ids=segments)
    out = ours(ids, Mask.bidirectional(valid), segments=segments)
    scale = expected.prediction_logits.abs().max()
    assert (out.logits - expected.prediction_logits)[valid].abs().max() <= 1e-5 * scale
    assert (out.next_sentence - expected.seq_relationship_logits).abs().max() <= 1e-5 * scale
    assert ours.config.vocab_size == 40 and ours.config.max_positions == 12  # told by the weights
    ours.save(tmp_path / "saved")
    back = transformers.BertForPreTraining.from_pretrained(tmp_path / "saved").eval()
    again = back(ids, attention_mask=valid.long(), token_type_ids=segments)
    assert torch.equal(again.prediction_logits, expected.prediction_logits)


def test_old_names_several_processes_and_other_files(reference, tools, tmp_path):
    """The file may have any name, beside one `…config.json`; its tensors may begin with `module.`"""
    state = renamed(reference.state_dict())
    expected = read(written(tmp_path / "new", state)).tensors
    tools.same(
        read(written(tmp_path / "named", state, "cluecorpussmall.bin-50000.bin", "base_config.json")).tensors, expected
    )
    tools.same(read(tmp_path / "named" / "cluecorpussmall.bin-50000.bin").tensors, expected)
    tools.same(read(written(tmp_path / "module", {f"module.{name}": x for name, x in state.items()})).tensors, expected)
    for new, old in OLD:
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    assert "target.nsp_linear_2.bias" in state and "embedding.word_embedding.weight" in state
    tools.same(read(written(tmp_path / "old", state)).tensors, expected)


def test_a_body_alone_and_the_head_of_a_classifier(reference, tmp_path):
    state = {name: x for name, x in renamed(reference.state_dict()).items() if not name.startswith("target.")}
    found = read(written(tmp_path / "uer", state | {"output_layer_1.weight": torch.zeros(16, 16)}, mask="causal"))
    assert found.heads == set() and found.left_out == ["output_layer_1.weight"] and found.config.own_mask == "causal"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layernorm_positioning": "pre"}, "layernorm_positioning is 'pre'"),
        ({"encoder": "lstm"}, "encoder is 'lstm'"),
        ({"embedding": ["word"]}, r"embedding is \['word'\]"),
        ({"mask": "causal_with_prefix"}, "mask is 'causal_with_prefix'"),
        ({"emb_size": 8}, "emb_size is 8"),
        ({"layers_num": 3}, r"missing +encoder\.transformer\.2\.self_attn\.linear_layers\.0\.weight"),
        ({"layers_num": None}, "no layers_num"),
    ],
)
def test_what_does_not_fit_is_refused_in_their_words(reference, tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        read(written(tmp_path / "uer", renamed(reference.state_dict()), **changes))


def test_of_several_files_none_is_guessed(reference, tmp_path):
    folder = written(tmp_path / "uer", renamed(reference.state_dict()), config="base_config.json")
    (folder / "large_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no config\.json beside model\.bin"):
        read(folder)
    torch.save({}, folder / "other.bin")
    with pytest.raises(CheckpointError, match="no weights; looked for"):
        read(folder)


# ---- BERTs under other names ---------------------------------------------------------------------------------------

CHINESE = {  # settings of chinese-roberta-wwm-ext and of chinese-macbert, besides the sizes
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi",
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "model_type": "bert", "pad_token_id": 0, "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
OWN = {
    "chinese-roberta-wwm-ext": {"bos_token_id": 0, "eos_token_id": 2, "output_past": True},
    "chinese-macbert-base": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_macbert_and_roberta_wwm_are_berts(reference, tmp_path, name):
    """As published: a pickle with all the heads of pretraining, also under TensorFlow's old names of norms."""
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 12, "type_vocab_size": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CHINESE | OWN[name] | sizes))
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for key, tensor in reference.state_dict().items()
    }
    state = {key.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for key, tensor in state.items()}
    torch.save(state | {"bert.embeddings.position_ids": torch.arange(12)[None]}, tmp_path / "pytorch_model.bin")
    ours, ids = allmask.load(tmp_path), torch.arange(9)[None]
    expected = reference(ids).prediction_logits
    assert (ours(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ours.heads == {"pooler", "lm", "nsp"}
