"""The endpoints of OpenAI, with its own client; streams, errors and reloads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import allmask

if TYPE_CHECKING:
    import openai  # takes seconds, so not while tests are collected

TEXTS = ["red cat runs here.", "北京欢迎你。", "blue bird sings there."]


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_and_vectors(client: openai.OpenAI, folder: Path):
    assert [model.id for model in client.models.list()] == ["writer", "gpt2", "replaced"]
    found = client.embeddings.create(model="writer", input=TEXTS)
    chosen: Any = next(iter(client.models.list())).model_extra
    embed = allmask.pipeline("embed", folder / "writer", precision=chosen["precision"]["embed"])
    expected = embed.vectors(TEXTS, normalize=True)
    assert np.array_equal(np.array([one.embedding for one in found.data], dtype=np.float32), expected)
    assert found.usage.prompt_tokens > 8


def test_completions(client: openai.OpenAI, folder: Path):
    write = allmask.pipeline("generate", folder / "gpt2")
    found = client.completions.create(model="gpt2", prompt=TEXTS, max_tokens=6)
    assert [choice.text for choice in found.choices] == write(TEXTS, max_new=6)
    assert found.usage is not None and found.usage.completion_tokens == 18
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    drawn = client.completions.create(model="gpt2", prompt="red", max_tokens=6, temperature=0.8, seed=4, n=2)
    expected = write("red", max_new=6, temperature=0.8, seed=4, n_best=2, sample=True)
    assert [choice.text for choice in drawn.choices] == expected
    beams = client.completions.create(model="writer", prompt=TEXTS[0], extra_body={"beams": 3})
    assert beams.choices[0].text == allmask.pipeline("title", folder / "writer")(TEXTS[0], beams=3)


def test_streams_join_to_the_whole_text(client: openai.OpenAI, folder: Path):
    expected = allmask.pipeline("title", folder / "writer")(TEXTS)
    written, reasons = ["", "", ""], {}
    options = {"include_usage": True}
    pieces = list(client.completions.create(model="writer", prompt=TEXTS, stream=True, stream_options=options))  # type: ignore
    for piece in pieces[:-1]:
        for choice in piece.choices:
            written[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert written == expected and set(reasons) == {0, 1, 2} and len(pieces) > 12
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens > 12


def test_errors_have_the_words_of_the_command_line(client: openai.OpenAI):
    import openai

    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt3'\n  did you mean gpt2"):
        client.completions.create(model="gpt3", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="single hypothesis"):
        client.completions.create(model="writer", prompt="a", stream=True, extra_body={"beams": 2})
    with pytest.raises(openai.UnprocessableEntityError, match="stop is not supported"):
        client.completions.create(model="writer", prompt="a", stop="b")


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_that_are_not_numbers_are_an_error(ask: Callable[..., Any], app: Any, monkeypatch, form: str):
    predictor = app.state.models["writer"].predictors["embed"]
    broken = np.array([[1.0, np.nan]], dtype=np.float32)
    monkeypatch.setattr(predictor, "vectors_of", lambda texts, **options: broken[[0] * len(texts)])
    found = ask("/v1/embeddings", {"model": "writer", "input": "red cat", "encoding_format": form})
    assert found.status_code == 500 and found.json()["detail"] == "the result is not a number"


# ---- without a client ----------------------------------------------------------------------------------------------


def events_of(answer: Any) -> list[Any]:
    """The contents of server-sent events."""
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) if "[DONE]" not in line else None for line in lines]


@pytest.mark.parametrize("model", ["gpt2", "writer"])
def test_a_stream_has_the_texts_reasons_and_counts_of_the_whole(ask: Callable[..., Any], model: str):
    body = {"model": model, "prompt": TEXTS, "max_tokens": 6}
    whole = ask("/v1/completions", body).json()
    *pieces, counts, done = events_of(
        ask("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert done is None and counts["usage"] == whole["usage"] and counts["choices"] == []
    written, reasons = dict.fromkeys(range(3), ""), {}
    for piece in pieces:
        (choice,) = piece["choices"]
        written[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    choices = whole["choices"]
    assert written == {choice["index"]: choice["text"] for choice in choices}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in choices}
    assert events_of(ask("/v1/completions", {**body, "stream": True}))[-1] is None  # no counts, if nobody asks


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [(MemoryError(), 503, "out of memory"), (KeyError("secret"), 500, "the server failed at this request")],
)
def test_an_error_within_a_stream_is_its_last_event(
    ask: Callable[..., Any], app: Any, monkeypatch, error: Exception, status: int, says: str
):
    def failing(texts: Any, put: Callable[[int, str], None], **options: Any) -> Any:
        put(0, "half a ")
        raise error

    monkeypatch.setattr(app.state.models["gpt2"].predictors["generate"], "stream_all", failing)
    answer = ask("/v1/completions", {"model": "gpt2", "prompt": "red", "stream": True})
    first, last = events_of(answer)
    assert first["choices"][0]["text"] == "half a " and (last["status"], last["detail"]) == (status, says)
    assert "secret" not in answer.text


WRONG = {
    "a stream that is no flag": ({"stream": "yes"}, 'stream is "yes"; expected true or false'),
    "options that are no object": ({"stream_options": [1]}, "stream_options is not an object"),
    "the best of several": ({"best_of": 4}, "best_of is not supported"),
    "one thing twice": ({"max_tokens": 4, "max_new": 4}, "max_tokens and max_new are the same"),
    "true for a temperature": ({"temperature": True}, "temperature"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_completions(ask: Callable[..., Any], case: str):
    options, words = WRONG[case]
    answer = ask("/v1/completions", {"model": "gpt2", "prompt": "red", **options})
    assert answer.status_code == 422 and words in answer.json()["error"]["message"]


def test_a_temperature_of_zero_is_greedy(ask: Callable[..., Any]):
    body = {"model": "gpt2", "prompt": "red", "max_tokens": 4}
    texts = [
        ask("/v1/completions", {**body, **more}).json()["choices"][0]["text"]
        for more in ({}, {"temperature": 0, "top_p": 0.5, "seed": 3}, {"n": 1, "best_of": 1})
    ]
    assert len(set(texts)) == 1 and texts[0]


def test_an_unknown_form_of_vectors(ask: Callable[..., Any]):
    answer = ask("/v1/embeddings", {"model": "writer", "input": "red", "encoding_format": "int8"})
    assert answer.status_code == 422 and 'encoding_format is "int8"' in answer.json()["detail"]


def test_models_are_replaced_if_all_of_them_can_be_loaded(folder: Path, tmp_path: Path):
    from allmask.serve.models import load_models
    from allmask.serve.settings import Settings

    shutil.copytree(folder / "writer", tmp_path / "writer")
    models = load_models([str(tmp_path / "writer")], Settings())
    first = models["writer"]
    assert models.reload() and models["writer"] is not first
    second = models["writer"]
    (tmp_path / "writer" / "config.json").write_text("{")
    assert not models.reload() and models["writer"] is second  # the old one stays
    models.close()
