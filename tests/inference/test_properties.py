"""What holds of the shipped weights with every engine: forbidden inputs never matter, and neither do other texts.

Engines are fp32, and frozen fp32, bf16 and int8, each with the C kernels and without. Which inputs may matter is worked
out here from the definition of each mask, not by our own code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import allmask
from allmask import Mask
from allmask.checkpoints import resolve
from allmask.inference import freeze
from allmask.kernels import build, int8
from allmask.model import Model
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.task import load_task

ENGINES = ["plain", "fp32", "bf16", "int8"]
BATCH, TOKENS = 3, 9
LENGTHS = (9, 6, 3)
TOLERANCE = {"plain": 1e-5, "fp32": 1e-5, "bf16": 0.1, "int8": 0.1}  # of hidden states with a deviation of 0.12


@pytest.fixture(scope="module")
def model() -> Model:
    return allmask.load("allmask-en")


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the C kernels, or as if there were none."""
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda *_: None)
    return request.param


FROZEN: dict[tuple[str, str], Model] = {}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, model: Model, kernels: str) -> tuple[str, Model]:
    name: str = request.param
    made = FROZEN.get((name, kernels)) or (model if name == "plain" else freeze(model, name))
    FROZEN[name, kernels] = made
    return name, made


@torch.no_grad()
def hidden(model: Model, ids: Tensor, mask: Mask) -> Tensor:
    return model(ids, mask).hidden.float()


def drawn(model: Model, seed: int, *shape: int) -> Tensor:
    return torch.randint(1000, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---- forbidden inputs ------------------------------------------------------------------------------------------------

VALID = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
TARGET = torch.arange(TOKENS) >= torch.tensor([5, 3, 1])[:, None]
RANK = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(row)) for row in range(BATCH)])
DOCUMENT = torch.tensor([0] * 4 + [1] * 5).expand(BATCH, TOKENS)

# mask, and whether query i of row r reads key j, by definition
Reads = Callable[[int, int, int], bool]
MASKS: dict[str, tuple[Mask, Reads]] = {
    "bidirectional": (Mask.bidirectional(VALID), lambda r, i, j: True),
    "causal": (Mask.causal(VALID), lambda r, i, j: j <= i),
    "reverse": (Mask.reverse(VALID), lambda r, i, j: j >= i),
    "window": (Mask.causal(VALID, window=3), lambda r, i, j: i - 3 < j <= i),
    "prefix": (Mask.prefix(TARGET, VALID), lambda r, i, j: not TARGET[r, j] or (bool(TARGET[r, i]) and j <= i)),
    "permutation": (Mask.permutation(RANK, VALID), lambda r, i, j: bool(RANK[r, j] <= RANK[r, i])),
    "packed": (
        Mask.packed(Mask.causal(VALID), DOCUMENT),
        lambda r, i, j: bool(DOCUMENT[r, i] == DOCUMENT[r, j]) and j <= i,
    ),
}  # fmt: skip


def may_matter(reads: Reads, row: int, layers: int) -> Tensor:
    """(T, T), True where input j can reach output i through that many layers; each token also keeps itself."""
    length = LENGTHS[row]
    once = torch.tensor([[reads(row, i, j) or i == j for j in range(length)] for i in range(length)]).float()
    return torch.linalg.matrix_power(once, layers) > 0


@pytest.mark.parametrize("kind", MASKS)
def test_forbidden_inputs_never_matter(engine: tuple[str, Model], kind: str):
    """Each input is exchanged in turn: outputs that it cannot reach keep their bits, and its own output changes."""
    _, model = engine
    mask, reads = MASKS[kind]
    ids, others = drawn(model, 0, BATCH, TOKENS), drawn(model, 1, BATCH, TOKENS)
    before, pairs = hidden(model, ids, mask), 0
    reach = [may_matter(reads, row, model.config.layers) for row in range(BATCH)]
    for j in (0, 2, 5, 8):  # the first, and the last of each length
        after = hidden(model, torch.where(torch.arange(TOKENS) == j, others, ids), mask)
        same = (before == after).all(-1)
        for row, length in enumerate(LENGTHS):
            if j >= length:  # padding
                assert same[row, :length].all(), (kind, row, j)
                continue
            forbidden = ~reach[row][:, j]
            assert same[row, :length][forbidden].all(), (kind, row, j)
            assert not same[row, j], (kind, row, j)
            pairs += int(forbidden.sum())
    assert pairs > 0 or kind == "bidirectional"


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_other_texts_of_a_batch_never_matter(engine: tuple[str, Model]):
    """The bits of a row do not depend on what the other rows hold."""
    _, model = engine
    ids, mask = drawn(model, 2, BATCH, TOKENS), Mask.bidirectional(VALID)
    before = hidden(model, ids, mask)
    for row in range(BATCH):
        others = drawn(model, 3 + row, BATCH, TOKENS)
        others[row] = ids[row]
        assert torch.equal(hidden(model, others, mask)[row], before[row])


def test_a_text_alone_is_as_in_a_batch(engine: tuple[str, Model]):
    """Up to rounding, since products of other sizes are added up in another order."""
    name, model = engine
    ids = drawn(model, 4, BATCH, TOKENS)
    together = hidden(model, ids, Mask.bidirectional(VALID))
    for row, length in enumerate(LENGTHS):
        alone = hidden(model, ids[row : row + 1, :length], Mask.bidirectional(torch.ones(1, length, dtype=torch.bool)))
        assert (alone[0] - together[row, :length]).abs().max() < TOLERANCE[name]
        assert torch.cosine_similarity(alone[0], together[row, :length], dim=-1).min() > 0.995


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_these_engines_compute_all_layers_in_one_call(model: Model, monkeypatch: pytest.MonkeyPatch, precision: str):
    """So the tests above are about those calls; a window alone is computed layer by layer."""
    if not build.has(build.AVX2):
        pytest.skip("no C kernels here")
    calls, encode = [], int8.encode
    monkeypatch.setattr(int8, "encode", lambda *args: calls.append(1) or encode(*args))
    made, ids = freeze(model, precision), drawn(model, 6, BATCH, TOKENS)
    calls.clear()  # those of the self-check
    for kind, (mask, _) in MASKS.items():
        before = len(calls)
        hidden(made, ids, mask)
        assert len(calls) - before == (kind != "window"), kind


WRITERS: dict[tuple[str, str], TextGenerator] = {}


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_title_does_not_depend_on_the_other_texts(model: Model, kernels: str, precision: str, beams: int):
    """Alone, with others, and with others of the same length. Writing has its own engines; in int8, one call."""
    made = WRITERS.get((precision, kernels)) or TextGenerator(model, load_task(resolve("allmask-en")), precision)
    WRITERS[precision, kernels] = made
    found: list[bool] = []
    engine: Any = made.writer
    search = type(engine).search

    def seen(*args: Any) -> Any:
        result = search(engine, *args)
        found.append(result is not None)
        return result

    engine.search = seen

    def writer(texts: Any, max_new: int) -> Any:
        return made(texts, beams=beams, max_new=max_new)

    texts = ["A tool that makes small pictures of large ones.", "Sorts numbers, fast, in any order and any language."]
    others = ["A game that plays small parts of large songs.", "Draws letters, well, in any size and any colour."]
    together = writer(texts, max_new=5)
    assert all(together) and together == [writer(text, max_new=5) for text in texts]
    assert together[0] == writer([texts[0], others[1]], max_new=5)[0]
    assert together[1] == writer([others[0], texts[1]], max_new=5)[1]
    if kernels == "compiled" and precision == "int8" and build.has(build.AVX2):
        assert found and all(found)  # each in one call


def test_a_request_does_not_depend_on_the_others_that_the_server_computes_with_it():
    """Titles and vectors of requests that come at once, against each alone; with the server's own choice of engines."""
    pytest.importorskip("starlette")
    import httpx

    from allmask.serve.app import make_app
    from allmask.serve.models import load_models
    from allmask.serve.settings import Settings

    sizes: list[int] = []
    texts = ["A tool that makes small pictures.", "Sorts numbers, fast, in any order and any language.", "A game."]
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/tasks/title", {"input": [text], "beams": 4, "max_new": 5}) for text in texts),
        *(("/v1/embeddings", {"input": [text]}) for text in texts),
    ]  # fmt: skip

    async def answers(client: httpx.AsyncClient) -> tuple[list[Any], list[Any]]:
        alone = [await client.post(path, json=body) for path, body in asked]
        sizes.clear()
        return alone, await asyncio.gather(*(client.post(path, json=body) for path, body in asked))

    settings = Settings()
    models = load_models(["allmask-en"], settings)
    served = models["allmask-en"]
    observe = served.batcher.observe

    def observed(inputs: int, seconds: float) -> None:
        sizes.append(inputs)
        observe(inputs, seconds)

    served.batcher.observe = observed

    async def both() -> tuple[list[Any], list[Any]]:
        transport = httpx.ASGITransport(make_app(models, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return await answers(client)

    alone, together = asyncio.run(both())
    assert [one.status_code for one in (*alone, *together)] == [200] * 12 and max(sizes) > 1
    for one, other in zip(alone[:3], together[:3], strict=True):
        assert one.json()["output"] == other.json()["output"]
    for one, other in zip(alone[3:], together[3:], strict=True):
        first, second = (torch.tensor(answer.json()["data"][0]["embedding"]) for answer in (one, other))
        assert torch.cosine_similarity(first, second, dim=0) > 0.999


def test_int8_in_torch_differs_as_the_warning_says(model: Model, monkeypatch: pytest.MonkeyPatch, caplog):
    """Roundings differ, so the cosine is not 1; it is named where it happens."""
    if not build.has(build.AVX2):
        pytest.skip("no C kernels here")
    ids, mask = drawn(model, 5, BATCH, TOKENS), Mask.bidirectional(VALID)
    exact, compiled = (hidden(each, ids, mask)[VALID] for each in (model, freeze(model, "int8")))
    monkeypatch.setattr(build, "library", lambda *_: None)
    in_torch = hidden(freeze(model, "int8"), ids, mask)[VALID]
    assert "rounds elsewhere than the C kernels: hidden states have a mean cosine of 0.998 to 0.999" in caplog.text
    for one, other in ((in_torch, exact), (in_torch, compiled), (compiled, exact)):
        assert 0.9975 < torch.cosine_similarity(one, other, dim=-1).mean() < 0.9995
