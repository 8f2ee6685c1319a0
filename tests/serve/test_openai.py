"""The endpoints of OpenAI, with its own client against a server process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serve_faults import Running

import allmask

if TYPE_CHECKING:
    import openai  # takes seconds, so not while tests are collected

TEXTS = ["red cat runs here.", "北京欢迎你。", "blue bird sings there."]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


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
