"""Titles: what a model is given to read and to predict, and what is made of what it writes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.decoding import Decoding
from allmask.errors import UsageError
from allmask.model import Model, load
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.common.writing import Steady, tidy
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import ModelFolder, save_task
from allmask.text import Tokenizer
from allmask.training import Settings
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny.bert(tmp_path_factory.mktemp("models") / "bert", ["lm"]))


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def records(rows: list[dict[str, str]]) -> list[Record]:
    return [Record(row, f"rows:{number}") for number, row in enumerate(rows, 1)]


# ---- what is read ----------------------------------------------------------------------------------------------


def test_an_example_token_by_token(tokenizer: Tokenizer):
    (example,) = Title().examples(tokenizer, records([{"source": "red cat.", "target": "red dog"}]))
    assert tokenizer.tokens(example.ids) == ["[CLS]", "red", "cat", ".", "[SEP]", "red", "dog", "[SEP]"]
    assert example.order.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert example.segments.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    predicted = [tokenizer.id_to_token(label) if label >= 0 else None for label in example.labels.tolist()]
    assert predicted == [None, None, None, None, "red", "dog", "[SEP]", None]


def test_the_naive_mask_reads_left_to_right(tokenizer: Tokenizer):
    (example,) = Title(mask="naive").examples(tokenizer, records([{"source": "北京", "target": "你"}]))
    assert example.order.tolist() == [0, 1, 2, 3, 4, 5]
    assert example.segments.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "kept"), [("head", "red blue green"), ("tail", "cat dog bird"), ("head+tail", "red dog bird")]
)
def test_long_sources_are_cut(tokenizer: Tokenizer, caplog, rule: str, kept: str):
    rows = records(
        [{"source": "red blue green cat dog bird", "target": "red cat dog"}, {"source": "red", "target": "a"}]
    )
    with caplog.at_level(logging.INFO, "allmask"):
        example = Title(max_source=3, max_target=2, truncate=rule).examples(tokenizer, rows)[0]
    assert tokenizer.tokens(example.ids) == ["[CLS]", *kept.split(), "[SEP]", "red", "cat", "[SEP]"]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 sources are cut to 3 tokens",
        "1 of 2 targets are cut to 2 tokens",
    ]


def test_the_source_makes_room_for_the_target(model: Model):
    assert Title(max_target=8).fitted(model) == Title(max_source=48 - 8 - 3, max_target=8)
    assert Title(max_source=20, max_target=8).fitted(model) == Title(max_source=20, max_target=8)
    with pytest.raises(UsageError, match="leaves no room"):
        Title(max_target=45).fitted(model)


@pytest.mark.parametrize("values", [{"max_source": 0}, {"max_target": 0}, {"mask": "both"}, {"truncate": "middle"}])
def test_what_a_task_cannot_be(values):
    with pytest.raises(UsageError):
        Title(**values)


# ---- what is written -------------------------------------------------------------------------------------------


def test_written_scores_are_those_of_the_training_mask(model: Model, tokenizer: Tokenizer):
    """The search's log-probability of a title equals minus its training loss: reading and writing agree."""
    for mask in ("prefix", "naive"):
        task = Title(max_target=8, mask=mask).fitted(model)
        source = "red cat runs here."
        ((_, best), *_) = next(task.write(model, [source], task.decoding(model, min_new=3)))
        sep = [tokenizer.sep_id] if best.finished else []
        ids = torch.tensor([[*task.prompts(tokenizer, [source]).ids[0], *best.tokens, *sep]])
        start = ids.shape[1] - len(best.tokens) - len(sep)
        is_target = torch.arange(ids.shape[1])[None] >= start
        with torch.no_grad():
            logits = model(ids, task.mask_of(is_target), segments=is_target.long()).logits[0, start - 1 : -1]
        total = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum().item()
        assert best.log_probability == pytest.approx(total, abs=1e-4)


def test_special_tokens_are_never_written(model: Model, tokenizer: Tokenizer):
    task = Title(max_target=12).fitted(model)
    settings = task.decoding(model, sample=True, temperature=100.0, n_best=50, min_new=10)
    for _, one in next(task.write(model, ["red cat"], settings)):
        assert not set(one.tokens) & tokenizer.special_ids


def test_a_blank_source_gets_no_title(model: Model):
    task = Title(max_target=8).fitted(model)
    sources = ["red cat", " ", "", "blue dog"]
    found = list(task.write(model, sources, batch=2))
    assert [len(best) for best in found] == [1, 0, 0, 1]
    assert found[3] == next(task.write(model, ["blue dog"]))


@pytest.mark.parametrize("text", ["red cat runs.", "北京欢迎你", ""])
def test_streamed_pieces_make_the_text(model: Model, text: str):
    task = Title(max_target=12).fitted(model)
    for seed in range(5):
        options = {"sample": True, "seed": seed, "min_new": 6}
        whole = next(task.write(model, [text], task.decoding(model, **options)))
        pieces = list(TextGenerator(model, task, None).stream(text, **options))
        assert "".join(pieces) == (whole[0][0] if whole else "")


@given(
    st.lists(
        st.sampled_from(["do", "not", "it", "'", "s", "-", "(", ")", ",", ".", "北", "，", "2", "0", "##ing", "%"])
    )
)
def test_what_is_shown_of_a_growing_text_stays(pieces: list[str]):
    """Joined and tidied as a tokenizer's pieces are: nothing shown early is changed by what comes later."""
    steady, shown = Steady(), ""
    for count in range(1, len(pieces) + 1):
        shown += steady.more(join(pieces[:count]))
    assert shown + steady.rest(join(pieces)) == join(pieces)


def join(pieces: list[str]) -> str:
    return tidy(" ".join(pieces).replace(" ##", "").replace(" do not", " don't"))


@pytest.mark.parametrize(
    ("decoded", "expected"),
    [
        ("北 京 欢 迎 你 ， 白 切 鸡 ！", "北京欢迎你，白切鸡！"),
        ("基 于 svm 的 分 类", "基于svm的分类"),
        ("state - of - the - art ( sota ) results", "state-of-the-art (sota) results"),
        ("bert : a model , and its masks", "bert: a model, and its masks"),
        ("it ' s 2. 0 and 10, 000 of 95 % and / or 3", "it's 2.0 and 10,000 of 95% and/or 3"),
        ("two words", "two words"),
        ("", ""),
    ],
)
def test_spaces_where_people_write_them(decoded: str, expected: str):
    assert tidy(decoded) == expected


@given(st.text("ab 北京,.-()'1", max_size=30))
def test_tidying_changes_nothing_but_spaces(text: str):
    assert tidy(text).replace(" ", "") == text.replace(" ", "")


# ---- what is learnt --------------------------------------------------------------------------------------------


def test_a_body_gets_a_head_and_keeps_what_the_data_uses(tmp_path: Path, caplog):
    body = load(tiny.bert(tmp_path / "body"))
    rows = records(tiny.english(40))
    with caplog.at_level(logging.INFO, "allmask"):
        made = Title().prepare(body, rows, seed=3)
    assert made.lm_head is not None and made.config.vocab_size < body.config.vocab_size
    assert made.tokenizer is not None and body.tokenizer is not None
    for row in rows:
        assert made.tokenizer.encode(row.fields["source"]).tokens == body.tokenizer.encode(row.fields["source"]).tokens
    saved = sum(p.numel() for p in body.with_language_model().parameters()) - sum(p.numel() for p in made.parameters())
    assert saved == (body.config.vocab_size - made.config.vocab_size) * (16 + 1)  # an embedding and a bias each
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no language model head; one is made from the token embedding",
        f"vocabulary: {body.config.vocab_size} → {made.config.vocab_size} tokens, −0.0M parameters",
    ]
    bias, words = (
        made.lm_head.bias.exp(),
        [token for row in rows for token in made.tokenizer.encode(row.fields["target"]).ids[1:]],
    )
    assert bias.sum().item() == pytest.approx(1.0, rel=1e-4)  # it expects what is written, how often it is written
    for token in set(words):
        assert bias[token].item() == pytest.approx((words.count(token) + 1) / (len(words) + len(bias)), rel=1e-4)
    again = Title().prepare(body, rows, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_pruning_only_where_it_pays(tmp_path: Path):
    body = load(tiny.bert(tmp_path / "body"))
    rows = records(tiny.english(40))
    small = Title().prepare(body, rows)
    assert Title().prepare(small, rows) is small  # the data uses all of it
    assert Title().prepare(body, records(tiny.english(9)), prune=False).config.vocab_size == body.config.vocab_size


def test_an_evaluator_scores_titles(model: Model):
    task = Title(max_target=8).fitted(model)
    rows = records(tiny.english(5))
    score = task.workload(model, rows, rows).evaluate(model)
    assert score is not None and score.value == score.metrics["rouge_l"]
    titles = [best[0][0] for best in task.write(model, [row.fields["source"] for row in rows])]
    assert score.metrics["rouge_l"] == pytest.approx(task.score(titles, rows)["model"]["rouge_l"])
    assert score.samples[2] == f"  written    {titles[0]}"
    assert task.workload(model, rows).evaluate(model) is None


def test_decoding_defaults(model: Model, tokenizer: Tokenizer):
    assert Title(max_target=8).decoding(model, beams=3) == Decoding(
        end=(tokenizer.sep_id,), banned=tuple(sorted(tokenizer.special_ids - {tokenizer.sep_id})), max_new=9, beams=3,
        no_repeat_ngram=3,
    )  # fmt: skip


# ---- what is chosen for a run ----------------------------------------------------------------------------------


def test_quotations_come_before_titles_and_once(model: Model, tokenizer: Tokenizer):
    rows = records(tiny.english(30))
    work = Title(max_target=8, quote=2).workload(model, rows)
    assert len(work.lengths) == len(rows) and len(work.quoted) == 2 * len(rows)  # evaluations are sized by the titles
    first, second = (work.step_spec.plan(work.lengths, 60, 1, epoch) for epoch in (0, 1))
    kinds = ["".join("q" if number >= len(rows) else "t" for number in numbers) for numbers in first]
    assert sorted("".join(kinds)) == ["q"] * 60 + ["t"] * 30
    assert "".join(kinds) == "q" * 60 + "t" * 30
    assert sorted(number for numbers in second for number in numbers) == list(range(30))
    for number in first[0]:
        ids = work.batch([number], 0).ids[0].tolist()
        end = ids.index(tokenizer.sep_id)
        source, quoted = (" ".join(map(str, part)) for part in (ids[1:end], ids[end + 1 : -1]))
        assert quoted in source


@pytest.mark.parametrize(
    ("count", "settings", "saved", "quote"),
    [
        (150, Settings(), None, 2),
        (150, Settings(), Title(), 0),  # it writes already
        (150, Settings(steps=20), None, 0),  # the steps are for titles
        (20, Settings(), None, 0),
    ],
)
def test_a_model_that_has_never_written_quotes_first(
    tmp_path: Path, caplog, count: int, settings: Settings, saved: Title | None, quote: int
):
    folder = tiny.bert(tmp_path / "bert")
    if saved:
        save_task(saved, folder)
    with caplog.at_level(logging.INFO, "allmask"):
        found = Title().from_start(ModelFolder.open(folder), records(tiny.english(count)), settings)
    assert found == Title(quote=quote)
    assert ("has never written, so it quotes" in caplog.text) == bool(quote)
    assert ("with 150 pairs, allmask-en, which has learnt to write, is probably better" in caplog.text) == bool(quote)
    assert Title(quote=7).from_start(ModelFolder.open(folder), [], settings).quote == 7


def test_with_many_pairs_its_own_model_may_be_as_good(tmp_path: Path, caplog):
    many = records(tiny.english(50)) * 60
    with caplog.at_level(logging.INFO, "allmask"):
        assert Title().from_start(ModelFolder.open(tiny.bert(tmp_path / "bert")), many, Settings()).quote == 2
    assert "so it quotes" in caplog.text and "probably better" not in caplog.text


def test_few_pairs_come_in_small_batches(model: Model):
    few = Title().suggested_settings(model, records(tiny.english(50)))
    many = Title().suggested_settings(model, records(tiny.english(50)) * 1000)
    assert few["batch_tokens"] == 1024 and many["batch_tokens"] == 4096
    assert few["lr"] == many["lr"] == 5e-4 and few["layer_decay"] == 0.85
