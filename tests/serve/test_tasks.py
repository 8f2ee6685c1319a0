"""Every task over HTTP gives what the command line writes; wrong requests get its words."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allmask
from allmask.registry import TASKS, USES
from allmask.serve.tasks import REMEMBERED, known_options
from tests import tiny
from tests.serve.conftest import RECORDS

SOURCES = [row["source"] for row in [*tiny.english(5, seed=3), *tiny.chinese(5, seed=4)]]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("translate", {"beams": 2, "n_best": 2}),
        ("classify", {}),
        ("choose", {}),
        ("tag", {}),
        ("answer", {"n_best": 2}),
    ],
    ids=lambda word: word if isinstance(word, str) else "",
)
def test_a_task_gives_what_predict_writes(
    task: str, options: dict[str, Any], folder: Path, ask: Callable, cli: Callable, tmp_path: Path
):
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    ran = cli(
        "predict", folder / task, folder / f"{task}.jsonl", "-o", tmp_path / "out.jsonl", "--keep", "none", *flags
    )
    assert ran.code == 0, ran.err
    given = [{name: row[name] for name in row if name not in ("label", "target", "tags")} for row in RECORDS[task]]
    answer = ask(f"/v1/tasks/{task}", {"input": given, **options})
    assert answer.status_code == 200, answer.text
    expected = tiny.read_jsonl(tmp_path / "out.jsonl")
    output = answer.json()["output"]
    for row, found in zip(expected, output, strict=True):
        row = {name.removeprefix("model_"): value for name, value in row.items()}
        assert {name: found[name] for name in row} == row and found.keys() - row.keys() <= {"tokens"}  # given words
    one = ask(f"/v1/tasks/{task}", {"input": given[0], **options}).json()
    assert one == {"model": task, "task": task, "output": output[0]}


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"sample": True, "seed": 5, "top_k": 9, "max_new": 6}])
def test_titles(options: dict[str, Any], folder: Path, ask: Callable):
    write = allmask.pipeline("title", folder / "writer")
    expected = [{"prediction": text, "score": one.score} for ((text, one),) in write.write(SOURCES, **options)]
    assert ask("/v1/tasks/title", {"input": SOURCES, **options}).json()["output"] == expected
    same = ask("/v1/tasks/generate", {"input": SOURCES, "model": "writer", **options})
    assert same.json()["output"] == expected


def embedder(app: Any, folder: Path) -> Any:
    """The embedder of the writer, in the precision that the server says it has chosen."""
    from starlette.testclient import TestClient

    found = {model["id"]: model["precision"] for model in TestClient(app).get("/v1/models").json()["data"]}
    return allmask.pipeline("embed", folder / "writer", precision=found["writer"]["embed"])


def test_filling_and_vectors(folder: Path, ask: Callable, app: Any):
    fill, embed = allmask.pipeline("fill", folder / "writer"), embedder(app, folder)
    found = ask("/v1/tasks/fill", {"input": "北京[MASK]你", "top": 2}).json()["output"]
    assert found["text"] == fill("北京[MASK]你", 2).text and len(found["gaps"][0]) == 2
    rows = ask("/v1/tasks/embed", {"input": SOURCES, "pool": "cls"}).json()["output"]
    np.testing.assert_allclose([row["vector"] for row in rows], embed.vectors(SOURCES, "cls"), rtol=1e-6)


def test_a_result_has_the_same_bits_alone_and_in_company(ask: Callable, app: Any):
    """Many requests at once, of four tasks; then each alone."""
    texts = [" ".join(SOURCES[:number]) for number in range(1, 9)]
    requests = [("/v1/tasks/title", {"input": text, "beams": 2}) for text in texts]
    requests += [("/v1/embeddings", {"input": text, "model": "writer", "encoding_format": "base64"}) for text in texts]
    requests += [("/v1/tasks/classify", {"input": text}) for text in texts]
    requests += [("/v1/tasks/fill", {"input": f"{text[:20]} [MASK]"}) for text in texts]
    before = _batches(app)
    together = [answer.json() for answer in ask(requests)]
    assert _batches(app) - before < len(requests) * 0.7, "requests were computed together"
    for request, answer in zip(requests, together, strict=True):
        assert ask(*request).json() == answer


def _batches(app: Any) -> float:
    samples = [sample for family in app.state.models.metrics.batch.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_count"))


WRONG: dict[str, tuple[str, Any, int, str]] = {
    "no such task": ("tittle", {"input": "a"}, 404, "did you mean title"),
    "a task of no model": ("image", {"input": "a"}, 404, 'no model here was trained for "image"'),
    "no such model": ("title", {"input": "a", "model": "wrter"}, 404, "did you mean writer"),
    "a path as a model": ("title", {"input": "a", "model": "/etc/passwd"}, 404, "there is no model"),
    "a model of another task": ("title", {"input": "a", "model": "tag"}, 404, "it can do: tag"),
    "no input": ("title", {}, 422, 'there is no "input"'),
    "an empty list": ("title", {"input": []}, 422, "expected 1 to 40"),
    "too many": ("title", {"input": ["a"] * 41}, 422, "expected 1 to 40"),
    "a blank text": ("title", {"input": ["a", " "]}, 422, 'input 2: "source" is blank'),
    "half a character": ("title", {"input": "\ud800"}, 422, "half a surrogate pair"),
    "a misspelt field": ("title", {"input": [{"sorce": "a"}]}, 422, 'did you mean "source" by "sorce"?'),
    "a number": ("title", {"input": 5}, 422, "input 1: 5 is not an object"),
    "two fields needed": ("answer", {"input": "a"}, 422, '{"question": …, "context": …}'),
    "one choice": ("choose", {"input": {"context": "a", "choices": ["b"]}}, 422, "expected two at least"),
    "no gap": ("fill", {"input": "a"}, 422, "there is no [MASK]"),
    "an option of another task": ("classify", {"input": "a", "beams": 2}, 422, "there is no option 'beams'"),
    "a misspelt option": ("title", {"input": "a", "beam": 2}, 422, "did you mean beams"),
    "an option out of range": ("title", {"input": "a", "beams": 0}, 422, "beams is 0; expected at least 1"),
    "an option of another type": ("title", {"input": "a", "beams": "2"}, 422, "expected a whole number"),
    "true for a number": ("title", {"input": "a", "beams": True}, 422, "expected a whole number"),
    "options that contradict": ("title", {"input": "a", "beams": 2, "sample": True}, 422, "exclude each other"),
    "sampling without sample": ("title", {"input": "a", "sample": False, "top_k": 2}, 422, '"sample": true'),
    "too much to write": ("title", {"input": ["a"] * 40, "beams": 8, "max_new": 24}, 422, "a request has 4,096"),
    "too much to read": ("embed", {"input": "cat " * 5000}, 422, "to read"),
    "a silly penalty": ("title", {"input": "a", "length_penalty": 1e9}, 422, "length_penalty is"),
    "a body that is too large": ("title", {"input": "a" * 50_000}, 413, "more than 50,000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests(case: str, ask: Callable):
    task, content, status, words = WRONG[case]
    answer = ask(f"/v1/tasks/{task}", content)
    problem = answer.json()
    assert answer.status_code == status == problem["status"], problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert words in f"{problem['detail']}\n{problem.get('hint')}"
    assert "Traceback" not in answer.text and ".py" not in answer.text and "--on-bad-record" not in answer.text


def test_options_that_were_accepted_do_not_excuse_others(ask: Callable, app: Any):
    """Checked options are remembered; 1, 1.0 and true are equal, but only one of them is a number of beams."""
    model = app.state.models["writer"]
    model.options.clear()
    for value, status in ((1, 200), (True, 422), (1.0, 422), ([1], 422), (2, 200), (1, 200), ({}, 422)):
        found = ask("/v1/tasks/title", {"model": "writer", "input": "red cat", "beams": value, "max_new": 2})
        assert found.status_code == status, value
    assert len(model.options) == 2
    for number in range(300):
        ask_for = {"beams": 1, "seed": None, "max_new": None, "length_penalty": number / 300}
        known_options(model, "title", model.predictors["title"], ask_for)
    assert len(model.options) <= REMEMBERED


def test_the_words_are_those_of_the_command_line(ask: Callable, cli: Callable, folder: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [{"source": "a"}, {"source": 3}])
    ran = cli("predict", folder / "translate", file, "-o", tmp_path / "b.jsonl")
    detail = ask("/v1/tasks/translate", {"input": [{"source": "a"}, {"source": 3}]}).json()["detail"]
    assert detail.removeprefix("input 2: ") in ran.err and ran.code == 3


def test_other_bodies(app: Any):
    from starlette.testclient import TestClient

    client = TestClient(app)
    plain = client.post("/v1/tasks/title", content='{"input": "a"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415 and "application/json" in plain.json()["detail"]
    json_type = {"Content-Type": "application/json"}
    for content in ('{"input": "a"', "\xff", '{"input": ' + "[" * 40_000, ""):
        answer = client.post("/v1/tasks/title", content=content.encode("latin-1"), headers=json_type)
        assert answer.status_code == 400 and "not JSON" in answer.json()["detail"]
    assert client.post("/v1/tasks/title", content="[1]", headers=json_type).status_code == 422
    assert client.get("/v1/tasks/title").status_code == 405
    assert client.get("/nothing").json()["hint"] == "GET /docs lists what there is"


def test_documentation_without_the_network(app: Any):
    from starlette.testclient import TestClient

    client = TestClient(app)
    page = client.get("/docs").text
    assert "<script" not in page and "http://testserver/v1/tasks/title" in page and "https://" not in page
    described = client.get("/openapi.json").json()
    served = {name for model in app.state.models.values() for name in model.predictors}
    assert served == {*TASKS, *USES} - {"image"}
    assert {f"/v1/tasks/{name}" for name in served} <= described["paths"].keys()
    body = described["paths"]["/v1/tasks/title"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["beams"]["minimum"] == 1 and body["required"] == ["input"]
    assert json.loads(json.dumps(described)) == described


def test_the_playground_is_there_if_it_is_asked_for(app: Any):
    from starlette.testclient import TestClient

    from allmask.serve.app import make_app

    assert TestClient(app).get("/play").status_code == 404
    assert "<html" in TestClient(make_app(app.state.models, page=True)).get("/play").text


def test_metrics_ready_and_models(app: Any, ask: Callable):
    from prometheus_client.parser import text_string_to_metric_families as parse
    from starlette.testclient import TestClient

    ask("/v1/tasks/classify", {"input": ["北京欢迎你", "白切鸡"]})
    ask("/v1/tasks/nonsense", {"input": "a"})
    client = TestClient(app)
    families = {family.name: family for family in parse(client.get("/metrics").text)}
    found = {(s.labels["model"], s.labels["task"], s.labels["status"]) for s in families["allmask_requests"].samples}
    assert ("classify", "classify", "200") in found and ("none", "unknown", "404") in found
    assert "nonsense" not in client.get("/metrics").text, "a client must not be able to add labels"
    for name in ("request_seconds", "queue_inputs", "batch_inputs", "tokens", "errors"):
        assert families[f"allmask_{name}"].samples
    assert client.get("/health").json() == {"status": "ok"}
    assert "writer" in client.get("/ready").json()["models"]
    data = client.get("/v1/models").json()["data"]
    models = {model["id"]: model["tasks"] for model in data}
    assert models["tag"] == ["tag", "embed"] and models["writer"] == ["title", "continue", "generate", "fill", "embed"]
    for model in data:
        assert [*model["precision"]] == model["tasks"] and {*model["precision"].values()} <= {"fp32", "bf16", "int8"}


def test_a_precision_that_is_asked_for_is_used(folder: Path):
    from allmask.serve.models import load_models
    from allmask.serve.settings import Settings

    asked = load_models([str(folder / "writer"), str(folder / "classify")], Settings(), precision="fp32")
    assert {precision for model in asked.values() for precision in model.precisions.values()} == {"fp32"}
    asked.close()


def test_vectors_for_clients_of_openai(ask: Callable, folder: Path, app: Any):
    embed = embedder(app, folder)
    answer = ask("/v1/embeddings", {"model": "writer", "input": SOURCES[:2]}).json()
    unit = embed.vectors(SOURCES[:2], normalize=True)
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], unit, rtol=1e-6)
    coded = ask("/v1/embeddings", {"model": "writer", "input": SOURCES[0], "encoding_format": "base64"}).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4"), unit[0])
    assert ask("/v1/embeddings", {"model": "writer", "input": [1, 2]}).status_code == 422
    assert ask("/v1/embeddings", {"model": "writer", "input": "a", "dimensions": 3}).status_code == 422
