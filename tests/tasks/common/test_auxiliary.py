"""The language model's loss beside a task's: the sum of both, and no position sees its own answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from allmask.data import NO_LABEL, Batch, Record
from allmask.errors import DataError, UsageError
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.objectives import losses_of
from allmask.options import Settings
from allmask.tasks.classify import Classify
from allmask.tasks.common.auxiliary import Auxiliary, general_texts, with_language
from allmask.tasks.seq2seq import Title
from allmask.training.loop import Trainer
from tests import tiny

RECORDS = [
    Record({"text": row["source"], "text_b": None, "label": row["source"].split()[0] if number % 2 else "red"}, "")
    for number, row in enumerate(tiny.english(24, seed=5))
]
TITLES = [Record(row, "") for row in [*tiny.english(8), *tiny.chinese(8)]]
NUMBERS = [3, 0, 7, 11]


def double(model: Model) -> Model:
    return model.double().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.bert(folder / "bert", ["lm"]), tiny.gpt2(folder / "gpt2")
    return folder


def works(folder: Path, case: str, weight: float, seed: int = 4):
    """A model and its work: "title", or a classifier of a family."""
    model = load(folder / ("gpt2" if case == "gpt2" else "bert"))
    if case == "title":
        return double(model), Title(max_target=8).workload(model, TITLES, (), Auxiliary.of(model, weight, seed))
    if case == "causal bert":
        model.config = replace(model.config, own_mask="causal")
    task = Classify(kind="single")
    model = task.prepare(model, RECORDS, 1, language=True)
    if case == "causal bert":
        model.config = replace(model.config, own_mask="causal")
    return double(model), task.workload(model, RECORDS, (), Auxiliary.of(model, weight, seed))


CASES = ["title", "bert", "gpt2", "causal bert"]
NAMES = {"title": ("lm", "mlm"), "bert": ("classify", "mlm"), "gpt2": ("classify", "causal")}
NAMES["causal bert"] = NAMES["gpt2"]


def gradient(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model: Model, batch: Batch) -> torch.Tensor:
    """The mean token loss of a row, text by text through a whole forward, logits everywhere."""
    total = torch.zeros((), dtype=torch.float64)
    for number in batch.mask.group.unique().tolist():
        mine = batch.mask.group[0] == number
        logits = model(batch.ids[:, mine], batch.mask[:, mine], batch.segments[:, mine]).logits[0]
        total = total + F.cross_entropy(logits, batch.labels[0, mine], ignore_index=NO_LABEL, reduction="sum")
    return total / batch.targets


@pytest.mark.parametrize("case", CASES)
def test_without_a_weight_nothing_changes(folder: Path, case: str):
    _, plain = works(folder, case, 0.0)
    _, both = works(folder, case, 0.5)
    assert plain.auxiliary is None
    without, beside = plain.batch(NUMBERS, 2), both.batch(NUMBERS, 2)
    assert set(without.counts) == {NAMES[case][0]} and without.also is None
    assert torch.equal(without.ids, beside.ids) and torch.equal(without.mask.order, beside.mask.order)
    assert set(beside.counts) == set(NAMES[case])


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_sum_of_both(folder: Path, case: str):
    weight = 0.5
    model, work = works(folder, case, weight)
    _, plain = works(folder, case, 0.0)
    batch, task = work.batch(NUMBERS, 1), NAMES[case][0]
    found = losses_of(model, batch)
    assert set(found) == set(NAMES[case]) and {name: count for name, (_, count) in found.items()} == batch.counts
    whole = gradient(model, sum(loss / count for loss, count in found.values()))
    loss, count = losses_of(model, plain.batch(NUMBERS, 1))[task]
    language = by_hand(model, batch if batch.also is None else batch.also)
    first = gradient(model, loss / count)
    second = gradient(model, weight * language)
    assert found[NAMES[case][1]][0].item() / found[NAMES[case][1]][1] == pytest.approx(weight * language.item())
    for name, value in whole.items():
        zero = torch.zeros_like(value)
        torch.testing.assert_close(value, first.get(name, zero) + second.get(name, zero), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_no_label_is_seen(folder: Path, case: str):
    """From left to right a logit does not depend on its label's token; otherwise most of them are not there to see."""
    model, work = works(folder, case, 0.5)
    batch = work.batch(NUMBERS, 1)
    row = batch if batch.also is None else batch.also
    if row.name == "causal":
        sees = row.mask.visible()[0]
        for place in (row.labels[0] >= 0).nonzero()[:, 0].tolist():
            assert row.ids[0, place + 1] == row.labels[0, place] and not sees[place, place + 1]
        return
    many = [work.batch(list(range(len(work.lengths))), epoch).also for epoch in range(60)]
    chosen = [one.labels >= 0 for one in many]
    hidden = sum(
        int((one.ids[where] == model.tokenizer.mask_id).sum()) for one, where in zip(many, chosen, strict=True)
    )
    total = sum(int(where.sum()) for where in chosen)
    special = torch.tensor(sorted(model.tokenizer.special_ids))
    assert 0.75 < hidden / total < 0.85
    ordinary = sum(
        int(((~torch.isin(one.ids, special)) | where).sum()) for one, where in zip(many, chosen, strict=True)
    )
    assert 0.12 < total / ordinary < 0.18
    assert all(not torch.isin(one.labels[where], special).any() for one, where in zip(many, chosen, strict=True))


def test_the_auxiliary_row_has_no_targets(folder: Path):
    """The second row has sources only: another title for them leaves it as it was."""
    model = load(folder / "bert")
    auxiliary = Auxiliary.of(model, 0.5, 4)
    other = [Record({**record.fields, "target": "green bird"}, "") for record in TITLES]
    rows = [
        Title(max_target=8).workload(model, records, (), auxiliary).batch(NUMBERS, 3) for records in (TITLES, other)
    ]
    assert not torch.equal(rows[0].ids, rows[1].ids)
    first, second = (row.also for row in rows)
    assert torch.equal(first.ids, second.ids) and torch.equal(first.labels, second.labels)
    assert (first.segments == 0).all() and (first.mask.order == 0).all()


def test_what_is_hidden_depends_on_the_text_and_the_epoch_alone(folder: Path):
    _, work = works(folder, "bert", 0.5)
    whole, alone = work.batch(NUMBERS, 3).also, work.batch([7], 3).also
    mine = whole.mask.group[0] == NUMBERS.index(7)
    assert torch.equal(whole.ids[:, mine], alone.ids) and torch.equal(whole.labels[:, mine], alone.labels)
    assert not torch.equal(work.batch(NUMBERS, 4).also.ids, whole.ids)


def test_the_loop_adds_them_up(folder: Path, tmp_path: Path):
    """A step of the loop is a step along the sum; both parts are logged by name."""
    model, work = works(folder, "bert", 0.5)
    settings = Settings(steps=1, precision="fp32", clip=1e9, warmup=0.0, dropout=0.0)
    trainer = Trainer(model, work, settings, tmp_path, quiet=True)
    batches = [work.batch(NUMBERS, 0), work.batch([1, 2], 0)]
    counts = {name: sum(batch.counts[name] for batch in batches) for name in NAMES["bert"]}
    expected = {name: 0.0 for name in NAMES["bert"]}
    for batch in batches:
        for name, (loss, _) in losses_of(model, batch).items():
            expected[name] += loss.item() / counts[name]
    whole = [loss / counts[name] for batch in batches for name, (loss, _) in losses_of(model, batch).items()]
    summed, seen = gradient(model, torch.stack(whole).sum()), {}
    model.zero_grad()
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    )
    output, _, _ = trainer._learn(batches)
    assert output == pytest.approx(expected)
    assert seen.keys() == summed.keys()
    for name, value in summed.items():
        torch.testing.assert_close(seen[name], value, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf")])
def test_weights_that_are_refused(weight: float):
    from allmask.runs.finetuning import FineTuning

    with pytest.raises(UsageError, match="lm_weight is"):
        FineTuning("d", "m", lm_weight=weight)


def test_a_new_output_bias_starts_at_the_token_frequencies(tmp_path: Path):
    model = load(tiny.bert(tmp_path / "body"))
    made = with_language(model, ["red red red cat"], 0)
    bias = made.lm_head.bias
    red, cat, dog = (bias[made.tokenizer.token_to_id(word)].item() for word in ("red", "cat", "dog"))
    assert red > cat > dog and with_language(made, [], 1) is made
    assert made.with_labels(Labels("single", ("a", "b"))).heads == {"pooler", "lm", "task"}


# ---- --lm-text ---------------------------------------------------------------------------------------------------

GENERAL = ["blue bird sings here. " * 40, "北京欢迎你。" * 3, "dog sleeps there"]


def general_works(folder: Path, case: str, texts: list[str]):
    model = load(folder / ("gpt2" if case == "gpt2" else "bert"))
    auxiliary = Auxiliary.of(model, 0.5, 4, texts)
    if case == "title":
        return double(model), Title(max_target=8).workload(model, TITLES, (), auxiliary)
    task = Classify(kind="single")
    model = task.prepare(model, RECORDS, 1, language=True)
    return double(model), task.workload(model, RECORDS, (), auxiliary)


@pytest.mark.parametrize("case", ["title", "bert", "gpt2"])
def test_general_text_replaces_the_texts_of_the_task(folder: Path, case: str):
    """Only the row beside the task's changes; its tokens are of the general text, its loss counts λ times."""
    model, work = general_works(folder, case, GENERAL)
    _, plain = works(folder, case, 0.0)
    batch, alone = work.batch(NUMBERS, 2), plain.batch(NUMBERS, 2)
    assert torch.equal(batch.ids, alone.ids) and torch.equal(batch.labels, alone.labels)
    row = batch.also
    assert row is not None and row.name == NAMES[case][1] and row.weight == 0.5
    ids = {id for one in model.tokenizer.encode_batch(GENERAL, special=False) for id in one.ids}
    assert set(row.labels[row.labels >= 0].tolist()) <= ids | model.tokenizer.special_ids
    assert row.tokens <= batch.tokens + 2 * len(NUMBERS) or row.mask.group.max() == 0  # not more than the task's
    loss, count = losses_of(model, batch)[row.name]
    assert loss.item() / count == pytest.approx(0.5 * by_hand(model, row).item())


def test_rows_of_general_text_fit_and_cover_it(folder: Path):
    model = load(folder / "bert")
    auxiliary = Auxiliary.of(model, 0.5, 4, GENERAL)
    encoded = [one.ids for one in model.tokenizer.encode_batch(GENERAL, special=False)]
    assert sum(map(len, auxiliary.general)) == sum(map(len, encoded))
    assert max(map(len, auxiliary.general)) == model.config.max_positions - 2
    text = Title(max_target=8).examples(model.tokenizer, TITLES[:1])
    seen = {int(id) for epoch in range(60) for id in auxiliary.batch(text, [1], epoch).ids[0]}
    assert {id for ids in encoded for id in ids} <= seen
    first, again, other = (auxiliary.batch(text, [1], epoch).ids for epoch in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_general_text_is_read_by_document(tmp_path: Path):
    file = tmp_path / "general.txt"
    file.write_text("red cat\nblue bird\n\n北京欢迎你\n", encoding="utf-8")
    assert general_texts(file) == ["red cat blue bird", "北京欢迎你"]
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="there is no text in it"):
        general_texts(file)
