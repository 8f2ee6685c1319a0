"""NEZHA, which transformers no longer has: our outputs are those of its description, written out below."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import allmask
from allmask.mask import Mask
from allmask.nn.cache import Cache

HEADS, CLAMP, EPS = 2, 4, 1e-12
State = dict[str, Tensor]


def encoding(distance: int, width: int) -> Tensor:
    """That of a key `distance` after its query."""
    place = max(-CLAMP, min(CLAMP, distance)) + CLAMP
    angles = [place / 10000 ** (2 * (n // 2) / width) for n in range(width)]
    return torch.tensor([math.cos(angle) if n % 2 else math.sin(angle) for n, angle in enumerate(angles)])


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], EPS)


def attention(state: State, name: str, x: Tensor, visible: Tensor) -> Tensor:
    """Of one text (T, W), query by query, head by head."""
    q, k, v = (linear(state, f"{name}.{part}", x).unflatten(-1, (HEADS, -1)) for part in ("query", "key", "value"))
    width, rows = q.shape[-1], []
    for i in range(len(x)):
        away = torch.stack([encoding(j - i, width) for j in range(len(x))])  # (T, D)
        heads = []
        for head in range(HEADS):
            scores = ((k[:, head] + away) @ q[i, head]) / math.sqrt(width)
            weights = scores.masked_fill(~visible[i], -torch.inf).softmax(-1)
            heads.append(weights @ (v[:, head] + away))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def hidden_of(state: State, ids: Tensor, segments: Tensor, visible: Tensor) -> Tensor:
    """The last hidden states (T, W) of one text."""
    words, types = "nezha.embeddings.word_embeddings.weight", "nezha.embeddings.token_type_embeddings.weight"
    x = norm(state, "nezha.embeddings.LayerNorm", state[words][ids] + state[types][segments])
    for number in range(2):
        layer = f"nezha.encoder.layer.{number}"
        read = linear(state, f"{layer}.attention.output.dense", attention(state, f"{layer}.attention.self", x, visible))
        x = norm(state, f"{layer}.attention.output.LayerNorm", x + read)
        wide = F.gelu(linear(state, f"{layer}.intermediate.dense", x))
        x = norm(state, f"{layer}.output.LayerNorm", x + linear(state, f"{layer}.output.dense", wide))
    return x


@pytest.fixture
def folder(tools, tmp_path: Path) -> Path:
    """A NEZHA for masked tokens, made from the tensors of a BERT."""
    model = transformers.BertForMaskedLM(tools.bert_config(initializer_range=0.3))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    state = {name.replace("bert.", "nezha."): x.clone() for name, x in model.state_dict().items()}
    state = {name: x for name, x in state.items() if "position" not in name and "decoder" not in name}
    (tmp_path / "nezha").mkdir()
    table = "nezha.encoder.layer.0.attention.self.relative_positions_encoding.positions_encoding"
    save_file(state | {table: torch.zeros(12, 12, 8)}, tmp_path / "nezha" / "model.safetensors")
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings |= {"model_type": "nezha", "architectures": ["NezhaForMaskedLM"], "max_relative_position": CLAMP}
    (tmp_path / "nezha" / "config.json").write_text(json.dumps(settings))
    return tmp_path / "nezha"


def masks() -> dict[str, Mask]:
    right = torch.arange(11) < torch.tensor([[11], [4], [7]])
    return {
        "bidirectional": Mask.bidirectional(right),
        "padding on the left": Mask.bidirectional(right.flip(1)),
        "causal": Mask.causal(right),
        "prefix": Mask.prefix(torch.arange(11).expand(3, 11) >= 3, right),
        "window": Mask.causal(right, window=3),
    }


@pytest.mark.parametrize("name", masks())
@torch.no_grad()
def test_the_hidden_states_are_those_of_the_description(folder: Path, name: str):
    model, state, mask = allmask.load(folder), load_file(folder / "model.safetensors"), masks()[name]
    ids = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(1))
    segments = torch.arange(11).expand(3, 11) % 2
    found = model(ids, mask, segments=segments).hidden
    for row in range(3):
        valid = mask.valid[row]
        visible = mask.visible()[row][valid][:, valid]
        expected = hidden_of(state, ids[row][valid], segments[row][valid], visible)
        assert (found[row][valid] - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_logits_step_by_step_and_saved_again(folder: Path, tmp_path: Path):
    model, state = allmask.load(folder), load_file(folder / "model.safetensors")
    ids = torch.randint(0, 40, (1, 11), generator=torch.Generator().manual_seed(1))
    visible = torch.ones(11, 11).tril().bool()
    x = hidden_of(state, ids[0], torch.zeros(11, dtype=torch.long), visible)
    x = norm(state, "cls.predictions.transform.LayerNorm", F.gelu(linear(state, "cls.predictions.transform.dense", x)))
    expected = x @ state["nezha.embeddings.word_embeddings.weight"].T + state["cls.predictions.bias"]
    cache, parts, mask = Cache(), [], Mask.causal(torch.ones(1, 11).bool())
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        out = model(ids[:, start:stop], mask[:, start:stop], cache=cache)
        parts.append(out.logits)
        cache = out.cache
    assert (torch.cat(parts, dim=1)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    model.save(tmp_path / "again")
    settings = json.loads((tmp_path / "again" / "config.json").read_text())
    assert settings["architectures"] == ["NezhaForMaskedLM"] and settings["max_relative_position"] == CLAMP
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(saved[name], x) for name, x in state.items() if "relative_positions" not in name)
    weights = model.body.weights(ids, mask)
    assert torch.allclose(weights[1].sum(-1), torch.ones(())) and not weights[1][0, 0].triu(1).any()
