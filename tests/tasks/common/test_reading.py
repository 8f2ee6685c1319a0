"""Long texts: truncation, windows that cover a text, and pooling of their scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.errors import UsageError
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.objectives import losses_of
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.common.heads import answer_all
from allmask.tasks.common.reading import MOST_WINDOWS, _fitted, read
from tests import tiny

LABELS = Labels("single", ("neg", "pos", "中"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = load(tiny.bert(tmp_path_factory.mktemp("models") / "bert")).with_labels(LABELS)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
    return made


def tokens_of(model: Model, texts: list, rule: str, limit: int = 8) -> list[str]:
    made = read(model.tokenizer, model.config, texts, limit, rule)
    return [" ".join(model.tokenizer.tokens(example.ids)) for example in made.examples]


def test_windows_by_hand(model):
    assert tokens_of(model, ["北京欢迎你想吃啥"], "windows", 7) == [
        "[CLS] 北 京 欢 迎 你 [SEP]",
        "[CLS] 迎 你 想 吃 啥 [SEP]",
    ]
    assert tokens_of(model, [("北京欢迎你想吃啥", "白鸡")], "windows", 10) == [
        "[CLS] 北 京 欢 迎 你 [SEP] 白 鸡 [SEP]",
        "[CLS] 迎 你 想 吃 啥 [SEP] 白 鸡 [SEP]",
    ]
    assert (
        tokens_of(model, [("白鸡", "北京欢迎你想吃啥")], "windows", 10)[1] == "[CLS] 白 鸡 [SEP] 迎 你 想 吃 啥 [SEP]"
    )
    assert tokens_of(model, ["北京"], "windows") == ["[CLS] 北 京 [SEP]"]
    assert tokens_of(model, ["北京欢迎你想吃啥"], "tail", 7) == ["[CLS] 迎 你 想 吃 啥 [SEP]"]


@given(st.integers(1, 90), st.integers(0, 90), st.integers(6, 30))
def test_windows_cover_everything_and_fit(first: int, second: int, room: int):
    parts = [list(range(first)), *([list(range(1000, 1000 + second))] if second else [])]
    rows, whole = _fitted(parts, room, "windows")
    assert all(sum(map(len, row)) <= room and all(row) for row in rows) and len(rows) <= MOST_WINDOWS
    seen = [{id for row in rows for id in row[side]} for side in range(len(parts))]
    assert whole == all(found == set(part) for found, part in zip(seen, parts, strict=True))
    if first + second <= room:
        assert rows == [parts]
    if not second and first <= room:
        assert whole


def test_very_long_texts_are_counted(model):
    made = read(model.tokenizer, model.config, ["red " * 500, "red", "red " * 20], 12, "windows")
    assert np.diff(made.starts).tolist() == [MOST_WINDOWS, 1, 3] and made.cut == 1 and len(made) == 3
    assert made.lengths == [MOST_WINDOWS * 12, 3, 36]


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_scores_of_windows_are_pooled(model, pool: str):
    texts = ["red blue green cat dog bird runs sleeps sings here there", "北京欢迎你白切鸡想吃啥", "red"]
    task = Classify(max_length=8, truncate="windows", pool_windows=pool)
    reading = task.rows(model, texts)
    each = answer_all(model, reading.examples)
    by_hand = [each[a:b].mean(0) if pool == "mean" else each[a:b].amax(0)
               for a, b in zip(reading.starts, reading.starts[1:], strict=False)]  # fmt: skip
    classifier = Classifier(model, task, "fp32")
    torch.testing.assert_close(classifier.answers(texts), torch.stack(by_hand), atol=1e-5, rtol=1e-5)
    alone = torch.cat([classifier.answers([text]) for text in texts])
    torch.testing.assert_close(alone, torch.stack(by_hand), atol=1e-5, rtol=1e-5)

    records = [Record({"text": text, "text_b": None, "label": label}, "") for text, label in
               zip(texts, ("pos", "neg", "中"), strict=True)]  # fmt: skip
    work = task.workload(model, records)
    loss, count = losses_of(model.eval(), work.batch([2, 0, 1], 0))["classify"]
    expected = torch.nn.functional.cross_entropy(torch.stack(by_hand), torch.tensor([1, 0, 2]), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and count == 3
    single = [losses_of(model, work.batch([number], 0))["classify"][0].item() for number in range(3)]
    assert sum(single) == pytest.approx(loss.item(), rel=1e-5)
    assert work.evaluate(model) is None and task.workload(model, records, records).evaluate(model) is not None


@pytest.mark.parametrize("values", [{"pool_windows": "best"}, {"truncate": "window"}])
def test_what_cannot_be(values: dict):
    with pytest.raises(UsageError):
        Classify(**values)


def test_windows_are_learnt_through_the_command(cli, tmp_path: Path):
    """The word that matters stands far behind what the model can read at once."""
    rows = [{"text": "red " * (40 + n) + word, "label": word} for n in range(12) for word in ("cat", "北京")]
    file, dev = (
        tiny.write_jsonl(tmp_path / name, some) for name, some in (("long.jsonl", rows), ("dev.jsonl", rows[::-1]))
    )
    bert = tiny.bert(tmp_path / "bert")
    words = ("finetune", bert, "--task", "classify", "--data", file, "--eval", dev, "--max-length", 16, "--steps", 40)
    words = (*words, "--lr", "5e-3", "--precision", "fp32", "--truncate", "windows", "--pool-windows", "max")
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 0 and "24 of 24 texts are read in windows" in ran.err, ran.err
    assert "accuracy 1 " in ran.out
    ran = cli("predict", tmp_path / "run", file, "-o", "-")
    assert ran.code == 0 and "cut" not in ran.err and '"prediction": "北京"' in ran.out
    ran = cli("finetune", bert, "--data", file, "--truncate", "windows", "--out", tmp_path / "x")
    assert ran.code == 2 and "truncate" in ran.err
