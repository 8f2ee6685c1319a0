"""The API of the playground: what it computes, the limits it keeps, and the words in which it refuses."""

from __future__ import annotations

import base64
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette", reason="the extra serve is not installed")
from starlette.applications import Starlette
from starlette.testclient import TestClient

import allmask
from allmask.mask import Mask
from allmask.play import routes
from allmask.play.api import MAX_BODY, Busy, Desk
from allmask.play.server import make_app
from allmask.tasks.common.writing import text_of
from allmask.tasks.task import ModelFolder
from tests import tiny

SOURCE, TARGET = "red cat sleeps here 北京欢迎你", "blue bird"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.writer(tmp_path_factory.mktemp("play") / "writer")


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(make_app([str(folder)]), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return allmask.load(folder).eval()


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(f"/play/api/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def board(client: TestClient) -> dict[str, Any]:
    """A prefix mask over source and target."""
    found = post(client, "tokens", source=SOURCE, target=TARGET)
    return {"source": SOURCE, "target": TARGET, "order": np.cumsum(found["is_target"]).tolist()}


def row(model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids and segments as BERT takes a pair of texts, and the length of the first."""
    encoded = model.tokenizer.encode(SOURCE, TARGET)
    return torch.tensor([encoded.ids]), torch.tensor([encoded.segments]), encoded.segments.index(1)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_model(client: TestClient, model: Any):
    found = post(client, "tokens", source=SOURCE, target=TARGET)
    encoded = model.tokenizer.encode(SOURCE, TARGET)
    assert found["tokens"] == encoded.tokens
    assert found["is_target"] == encoded.segments
    assert [token for token, special in zip(found["tokens"], found["special"], strict=True) if special] == [
        "[CLS]", "[SEP]", "[SEP]",
    ]  # fmt: skip


def test_without_weights_tokens_are_words_and_characters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("allmask.play.weights.BUNDLED_WRITERS", ())
    bare = TestClient(Starlette(routes=routes()))
    found = post(bare, "tokens", source="GPT 写诗", target="好")
    assert found["tokens"] == ["[CLS]", "GPT", "写", "诗", "[SEP]", "好", "[SEP]"]
    assert found["model"] is None
    refused = bare.post("/play/api/titles", json={"source": "a"})
    assert refused.status_code == 422 and "no such model" in refused.json()["detail"]


def test_a_gap_is_filled_under_the_mask_of_the_board(client: TestClient, model: Any, board: dict[str, Any]):
    ids, segments, _ = row(model)
    ids[0, 3] = model.tokenizer.mask_id
    order = torch.tensor([board["order"]])
    for mask, sent in ((Mask.permutation(order), {}), (Mask.causal(ids > -1), {"order": list(range(ids.shape[1]))})):
        with torch.no_grad():
            shares = model(ids, mask, segments).logits[0, 3].softmax(-1)
        shares[list(model.tokenizer.special_ids)] = 0
        (gap,) = post(client, "fill", **{**board, **sent}, hidden=[3])["gaps"]
        assert gap["guesses"][0]["token"] == model.tokenizer.id_to_token(int(shares.argmax()))
        assert gap["guesses"][0]["probability"] == pytest.approx(float(shares.max()), abs=1e-4)


def test_a_title_under_the_prefix_mask_is_the_one_that_the_task_writes(
    client: TestClient, folder: Path, board: dict[str, Any]
):
    """The writer of the board computes all rows again at each step; the task has a cache."""
    task = ModelFolder.open(folder).predictor("title", None)
    rules = {"max_new": 24, "min_new": 1, "no_repeat_ngram": 2}
    assert post(client, "write", **board, how="title")["text"] == task([SOURCE], beams=1, **rules)[0]


def test_a_clicked_cell_changes_what_is_written(client: TestClient, model: Any, board: dict[str, Any]):
    """Greedy by hand: the last token of the source must not read anything but itself."""
    ids, segments, source = row(model)
    last = source - 1
    edits = [[last, k] for k in range(last)]
    written = post(client, "write", **board, how="title", edits=edits)
    visible = torch.ones(source, source, dtype=torch.bool)
    visible[last, :last] = False
    with torch.no_grad():
        logits = model(ids[:, :source], Mask.from_matrix(visible), segments[:, :source]).logits[0, -1]
    banned = sorted(model.tokenizer.special_ids)
    logits[banned] = -torch.inf
    assert written["steps"][0]["token"] == model.tokenizer.id_to_token(int(logits.argmax()))


def test_attention_is_that_of_the_layers(client: TestClient, model: Any, board: dict[str, Any]):
    ids, segments, _ = row(model)
    found = post(client, "attention", **board)
    shape = (found["layers"], found["heads"], found["tokens"], found["tokens"])
    weights = np.frombuffer(base64.b64decode(found["weights"]), np.uint8).reshape(shape)
    mask = Mask.permutation(torch.tensor([board["order"]]))
    with torch.no_grad():
        wanted = torch.stack(model.body.weights(ids, mask, segments=segments))[:, 0].numpy()
    assert np.abs((weights / 255) ** 2 - wanted).max() < 0.005
    assert (weights[:, :, ~mask.visible()[0].numpy()] == 0).all()


def test_an_audit_finds_the_leak_of_a_clicked_cell(client: TestClient, board: dict[str, Any]):
    """The first token reads the last one: after two layers, all of the source depends on it."""
    kept = post(client, "audit", **board)
    assert kept["depends"] == kept["promised"] and kept["holds"]
    tokens = len(board["order"])
    source = board["order"].count(0)
    found = post(client, "audit", **board, edits=[[0, tokens - 1]])
    leaks = {
        (q, k) for q in range(tokens) for k in range(tokens) if found["depends"][q][k] and not found["promised"][q][k]
    }
    # two layers: 0 reads the last token, which has read all; then every token reads 0
    last = {(q, tokens - 1) for q in range(tokens - 1)}
    assert leaks == last | {(0, k) for k in range(source, tokens)}
    assert found["holds"], "the model does what the matrix on the board says"


def test_steps_are_greedy_and_can_be_led_elsewhere(client: TestClient, folder: Path, model: Any):
    found = post(client, "steps", source=SOURCE)
    task = ModelFolder.open(folder).predictor("title", None)
    (best,) = task.write([SOURCE], beams=1, max_new=24, min_new=1)
    text, one = best[0]
    written = [step["id"] for step in found["steps"] if not step["ends"]]
    assert (found["text"], written) == (text, list(one.tokens))
    shares = [step["probability"] for step in found["steps"]]
    assert sum(np.log(np.maximum(shares, 1e-9))) == pytest.approx(one.log_probability, abs=0.2)
    assert found["cache"][0]["new"] == list(range(found["source"]))
    assert all(len(step["new"]) == 1 and not step["again"] for step in found["cache"][1:])
    other = next(x for x in found["steps"][0]["alternatives"] if not x["ends"] and x["id"] != written[0])
    led = post(client, "steps", source=SOURCE, forced=[other["id"]])
    assert led["steps"][0]["id"] == other["id"]
    assert led["steps"][0]["probability"] == other["probability"]
    assert led["text"].startswith(text_of(model.tokenizer, [other["id"]]))
    ended = post(client, "steps", source=SOURCE, forced=[written[0], model.tokenizer.end_id])
    assert [step["id"] for step in ended["steps"]] == [written[0], model.tokenizer.end_id]


def test_beams_are_a_tree_whose_best_leaf_is_the_best_title(client: TestClient, folder: Path):
    found = post(client, "beams", source=SOURCE, beams=3)
    task = ModelFolder.open(folder).predictor("title", None)
    (wanted,) = task.write([SOURCE], beams=3, n_best=3, max_new=24, min_new=1)
    assert [one["text"] for one in found["texts"]] == [text for text, _ in wanted]
    nodes = {node["id"]: node for node in found["nodes"]}
    for node in found["nodes"][1:]:
        assert nodes[node["parent"]]["depth"] == node["depth"] - 1
    per_step = [sum(node["depth"] == depth and node["end"] is None for node in found["nodes"]) for depth in (1, 2)]
    assert per_step == [3, 3]
    (best,) = [node for node in found["nodes"] if node["depth"] and node["end"] and node["end"]["rank"] == 0]
    assert best["log_probability"] == pytest.approx(wanted[0][1].log_probability, abs=2e-3)


def test_titles(client: TestClient, folder: Path):
    found = post(client, "titles", source=SOURCE, beams=3, count=2)
    task = ModelFolder.open(folder).predictor("title", "auto")
    assert [one["text"] for one in found["titles"]] == task([SOURCE], beams=3, n_best=2)[0]


def test_a_proof_is_the_provers(client: TestClient):
    found = post(client, "prove", order=[0, 0, 1], edits=[[0, 2]], layers=2, tokens=["北", "京", "欢"])
    assert found["is_order"] is False and found["witness"]["positions"] == [1, 0, 2]
    assert "1:京 reads 0:北" in found["text"]


def test_pictures(client: TestClient):
    body = {"order": [0, 1], "tokens": ["<b>", "你"]}
    svg = client.post("/play/api/picture", json={**body, "format": "svg"})
    assert svg.headers["content-type"] == "image/svg+xml" and "<b>" not in svg.text and "你" in svg.text
    png = client.post("/play/api/picture", json={**body, "format": "png"})
    assert png.content.startswith(b"\x89PNG")


def test_claims_are_listed_and_run(client: TestClient):
    quick = {claim["name"]: claim["quick"] for claim in client.get("/play/api/claims").json()}
    assert quick["C14"] and not quick["C9"] and sum(quick.values()) > 15
    refused = client.post("/play/api/claims", json={"name": "C9"})
    assert refused.status_code == 422 and "allmask claims C9" in refused.json()["hint"]
    assert client.get("/play/api/claims/C14.svg").status_code == 422
    assert post(client, "claims", name="C14")["result"]["level"] == "holds"
    assert client.get("/play/api/claims/C14.svg").text.startswith("<svg")


# ---- safety ----------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(client: TestClient):
    page = client.get("/play")
    assert page.status_code == 200 and "<main" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
    static = Path(allmask.__file__).parent / "play" / "static"
    for path in static.rglob("*"):
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert "http://" not in text and "https://" not in text and "//cdn" not in text, path
            assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, path
    script = client.get("/play/static/js/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "content-security-policy" in client.get("/play/api/models").headers


@pytest.mark.parametrize("path", ["../api.py", "..%2fapi.py", "%2e%2e/server.py", "js/../../board.py", "/etc/passwd"])
def test_no_other_file_is_served(client: TestClient, path: str):
    assert client.get(f"/play/static/{path}").status_code == 404


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no order": ("prove", {}, "order is missing"),
    "too many tokens": ("prove", {"order": [0] * 65}, "at most 64 numbers"),
    "an order of texts": ("prove", {"order": ["a"]}, "holds 'a'"),
    "true is no number": ("prove", {"order": [True]}, "holds True"),
    "a cell outside": ("prove", {"order": [0], "edits": [[0, 1]]}, "both below 1"),
    "too many layers": ("prove", {"order": [0], "layers": 10**9}, "from 1 to 48"),
    "a window of 0": ("prove", {"order": [0], "window": 0}, "window is 0"),
    "a long text": ("tokens", {"source": "a" * 1001}, "1,001 characters"),
    "a text of many tokens": ("tokens", {"source": "北" * 90}, "at most 64"),
    "half of a character": ("tokens", {"source": "\ud800"}, "surrogate"),
    "a path as a model": ("tokens", {"source": "a", "model": "/etc"}, "no such model"),
    "another order": ("fill", {"source": "red", "order": [0]}, "the order has 1 numbers"),
    "nothing to fill": ("fill", {"source": "red", "order": [0, 0, 0]}, "no [MASK]"),
    "no text": ("titles", {"source": "  "}, "no text was given"),
    "too many beams": ("beams", {"source": "red", "beams": 99}, "from 2 to 6"),
    "a token that is none": ("steps", {"source": "red", "forced": [9999]}, "not in the vocabulary"),
    "no such claim": ("claims", {"name": "C999"}, "no such claim"),
    "a format": ("picture", {"order": [0], "format": "exe"}, "one of svg, png"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said(client: TestClient, case: str):
    path, body, said = REFUSED[case]
    content = json.dumps(body)
    answer = client.post(f"/play/api/{path}", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert said in f"{problem['detail']} {problem['hint']}" and "Traceback" not in answer.text


def test_a_request_must_be_json_and_small(client: TestClient):
    def status(content: bytes, kind: str = "application/json") -> int:
        return client.post("/play/api/prove", content=content, headers={"Content-Type": kind}).status_code

    assert status(b'{"order": [0]}') == 200
    assert status(b'{"order": [0]}', "text/plain") == 415  # what a form of another site could send
    assert status(b"[1]") == status(b"{") == status(b"\xff") == status(b"[" * 100_000) == 400
    assert status(b" " * (MAX_BODY + 1)) == 413


def test_another_host_is_refused(client: TestClient):
    assert client.get("/play/", headers={"Host": "evil.example"}).status_code == 400


def test_silly_bodies_never_break_the_server(client: TestClient):
    """Random fields of random kinds: a clear refusal or an answer, never an internal error."""
    rng = random.Random(1)
    names = ["source", "target", "order", "group", "window", "edits", "layers", "scored", "tokens", "format", "hidden"]
    names += ["how", "kind", "beams", "count", "forced", "model", "name", "title"]
    values: list[Any] = [None, True, -1, 0, 1, 2.5, 10**30, "", "red", "北京", "prefix", "title", "svg", "\x00", "auto"]
    values += [[], [0], [0, 0, 0], [[0, 0]], {}, [None], ["a", "b", "c"], [2, 1, 0]]
    paths = ["tokens", "prove", "picture", "fill", "write", "attention", "audit", "steps", "beams", "titles"]
    seen: dict[int, int] = {}
    for _ in range(120):
        body = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, 8))}
        if rng.random() < 0.5:
            body = {**body, "source": "red", "order": [0, 0, 0]}
        answer = client.post(f"/play/api/{rng.choice(paths)}", json=body)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 422), (body, answer.text)
    assert min(seen.values()) > 10


def test_only_a_few_may_wait():
    desk = Desk(waiting=1)
    started, go = threading.Event(), threading.Event()

    def work() -> None:
        with desk.place():
            started.set()
            go.wait(10)

    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    started.wait(10)
    threads[1].start()
    while desk.free._value:  # until the second one waits
        pass
    with pytest.raises(Busy), desk.place():
        pass
    go.set()
    for thread in threads:
        thread.join(10)
    with desk.place():
        pass
