"""Translation: what an encoder–decoder reads and must write, how it is scored, what a new model begins with."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml

from allmask.data import NO_LABEL, Record, pack
from allmask.decoding import Decoding, PairWriter
from allmask.decoding.fast.engines import FastPairWriter
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model, load
from allmask.objectives import losses_of
from allmask.pipelines import pipeline
from allmask.runs.average import mean_model, mean_weights, take_mean
from allmask.runs.finetuning import FineTuning
from allmask.runs.folder import save_model
from allmask.runs.fresh import Fresh
from allmask.runs.options import differences, sealed_values
from allmask.runs.plan import Plan
from allmask.tasks.common.writing import text_of, tokenizer_of
from allmask.tasks.metrics.text import score_translations, signatures
from allmask.tasks.seq2seq import Title, Translate, TranslateEvaluator
from allmask.text import Tokenizer, train_tokenizer
from allmask.training import Result, Score, Settings, mean_loss, train
from allmask.training import checkpoint as runs
from tests import tiny

SMALL = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 32, "vocab_size": 60}


def records(rows: list[dict[str, str]]) -> list[Record]:
    return [Record(row, f"rows:{number}") for number, row in enumerate(rows, 1)]


ROWS = records(tiny.english(30))


@pytest.fixture(scope="module")
def model() -> Model:
    return Fresh(**SMALL).model(ROWS, seed=3).eval()


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


@pytest.fixture(scope="module")
def task(model: Model) -> Translate:
    return Translate(max_target=8).fitted(model)


# ---- what is read ----------------------------------------------------------------------------------------------


def test_an_example_token_by_token(task: Translate, tokenizer: Tokenizer):
    (example,) = task.examples(tokenizer, records([{"source": "red cat", "target": "cat"}]))
    source, target = (tokenizer.encode(text, special=False).tokens for text in ("red cat", "cat"))
    assert tokenizer.tokens(example.ids) == ["<s>", *source, "</s>", "<s>", *target]
    read, written = len(source) + 2, len(target) + 1
    assert example.order.tolist() == [0] * read + list(range(1, written + 1))
    assert example.position is not None and example.position.tolist() == [*range(read), *range(written)]
    predicted = [tokenizer.id_to_token(label) for label in example.labels.tolist() if label != NO_LABEL]
    assert predicted == [*target, "</s>"] and (example.labels[:read] == NO_LABEL).all()


def test_it_fits_any_body(model: Model, tmp_path: Path):
    assert Translate().fitted(model).mask == "encoder-decoder"
    bert = load(tiny.bert(tmp_path / "bert", ["lm"]))
    assert Translate(max_target=8).fitted(bert) == Translate(max_source=48 - 8 - 3, max_target=8, mask="prefix")
    again = Translate().fitted(model)  # a task fitted to one model can be fitted to another
    assert replace(again, max_source=254, max_target=8).fitted(bert).mask == "prefix"
    assert bert.tokenizer is not None
    rows = records(tiny.english(2))
    pairs = zip(Translate().examples(bert.tokenizer, rows), Title().examples(bert.tokenizer, rows), strict=True)
    for mine, title in pairs:
        assert mine.ids.tolist() == title.ids.tolist() and mine.order.tolist() == title.order.tolist()


@pytest.mark.parametrize("values", [{"max_source": 0}, {"best": "rouge"}, {"mask": "both"}, {"truncate": "middle"}])
def test_what_a_task_cannot_be(values):
    with pytest.raises(UsageError):
        Translate(**values)


# ---- what is written -------------------------------------------------------------------------------------------


def test_written_scores_are_those_of_training(task: Translate, model: Model):
    """A hypothesis's log-probability is minus its training loss: encoder, decoder and search read the same row."""
    ((text, best), *_) = next(task.write(model, ["red cat runs."], task.decoding(model, min_new=3, max_new=20)))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    end = [tokenizer.eos_id] if best.finished else []
    example = replace(task, max_target=30).examples(tokenizer, records([{"source": "red cat runs.", "target": "x"}]))[0]
    read = int((example.order == 0).sum())
    written = [*best.tokens, *end]
    row = type(example).pair(example.ids[:read], [tokenizer.bos_id, *written[:-1]], written)
    loss = losses_of(model, pack([row]))["lm"][0].item()
    assert best.log_probability == pytest.approx(-loss, abs=1e-4)
    assert text == tokenizer.decode(best.tokens)


def test_decoding_defaults(task: Translate, model: Model, tokenizer: Tokenizer):
    banned = tuple(sorted(tokenizer.special_ids - {tokenizer.eos_id}))
    assert task.decoding(model, beams=5) == Decoding(end=(tokenizer.eos_id,), banned=banned, max_new=9, beams=5)


def test_only_wordpiece_is_tidied(task: Translate, model: Model, tokenizer: Tokenizer):
    lines = ["a ( b ) , c", "红 猫 - 跑 !"]
    spaced = train_tokenizer(lines * 3, "bpe", 40)
    for line in lines:
        assert text_of(spaced, spaced.encode(line, special=False).ids) == line


# ---- scores ----------------------------------------------------------------------------------------------------

WRITTEN = ["The cat sat on the mat.", "a dog runs", "It is raining cats and dogs today"]
REFERENCES = ["The cat sat on a mat.", "A dog runs", "It is raining cats and dogs today"]


def test_scores_are_sacrebleu_s():
    found = score_translations(WRITTEN, REFERENCES)
    assert found["bleu"] == sacrebleu.corpus_bleu(WRITTEN, [REFERENCES]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(WRITTEN, [REFERENCES]).score
    assert found["exact"] == pytest.approx(100 / 3)  # upper and lower case are not the same
    assert found["length"] == pytest.approx((6 + 3 + 7) / 3)


def test_chinese_is_counted_by_characters():
    written, true = ["北京欢迎你们"], ["北京欢迎你"]
    assert score_translations(written, true)["bleu"] == sacrebleu.corpus_bleu(written, [true], tokenize="zh").score
    assert "tok:zh" in signatures(true)["bleu"] and "tok:13a" in signatures(REFERENCES)["bleu"]


def test_signatures_say_how_it_was_counted():
    metric = sacrebleu.BLEU()
    metric.corpus_score(WRITTEN, [REFERENCES])
    assert signatures(REFERENCES)["bleu"] == str(metric.get_signature())
    assert signatures(REFERENCES)["chrf"].startswith("nrefs:1|case:mixed|")


@pytest.mark.parametrize("best", ["bleu", "loss"])
def test_an_evaluator(task: Translate, model: Model, best: str):
    task, rows = replace(task, best=best), ROWS[:7]
    score = task.workload(model, rows, rows).evaluate(model)
    assert score is not None and set(score.metrics) == {"loss", "bleu", "chrf"}
    by_bleu = score.metrics["bleu"] + 1e-4 * score.metrics["chrf"]
    assert score.value == pytest.approx(by_bleu if best == "bleu" else -score.metrics["loss"])
    tokenizer = model.tokenizer
    assert tokenizer is not None
    limit = 2 * max(len(tokenizer.encode(row.fields["target"]).ids) - 1 for row in rows)
    settings = task.decoding(model, max_new=min(9, limit))
    texts = [best[0][0] for best in task.write(model, [row.fields["source"] for row in rows], settings, batch=3)]
    assert score.metrics["chrf"] == pytest.approx(task.score(texts, rows)["model"]["chrf"])
    assert score.samples[2] == f"  written    {texts[0]}"
    assert task.workload(model, rows).evaluate(model) is None


def test_chrf_decides_if_bleu_is_always_0(task: Translate, model: Model):
    """No target has four words, so BLEU is 0 of anything; the evaluator still prefers what is nearer."""
    rows = [Record({"source": row.fields["source"], "target": "红猫"}, row.where) for row in ROWS[:3]]
    assert sacrebleu.BLEU().corpus_score(["a b"], [["a b"]]).score == 0.0
    evaluator = TranslateEvaluator(task, rows, task.examples(tokenizer_of(model), rows))
    values = []
    for text in ("x", "红", "红猫"):
        evaluator.texts = lambda model, records, text=text: [text] * len(records)
        values.append(evaluator(model).value)
    assert values == sorted(values) and values[0] < values[1] < values[2]


def test_the_start_token_is_that_of_the_config(task: Translate, model: Model):
    """The tokenizer's own idea is for models that say nothing."""
    tokenizer = tokenizer_of(model)
    other = Model(replace(model.config, start_token=5), ["lm"])
    other.load_state_dict(model.state_dict())
    other.tokenizer = tokenizer
    (first,) = task.workload(other, ROWS[:1]).examples
    assert first.ids[first.order > 0][0] == 5 != tokenizer.start_id
    assert getattr(task.writer(other), "start", None) == [5]
    (usual,) = task.workload(model, ROWS[:1]).examples
    assert usual.ids[usual.order > 0][0] == tokenizer.start_id == model.config.start_token


# ---- a new model -----------------------------------------------------------------------------------------------


def test_a_new_model_is_a_function_of_data_and_seed(model: Model, tokenizer: Tokenizer):
    again, other = Fresh(**SMALL).model(ROWS, seed=3), Fresh(**SMALL).model(ROWS, seed=4)
    assert again.tokenizer == tokenizer == other.tokenizer
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for row in ROWS:  # one vocabulary knows sources and targets
        for text in row.fields.values():
            assert tokenizer.unk_id not in tokenizer.encode(text).ids
    assert (model.config.start_token, model.config.end_token) == (tokenizer.bos_id, tokenizer.eos_id)


def test_one_embedding_for_source_target_and_output(model: Model):
    """Counted by hand: the embedding once, attention 4 (w² + w), feed-forward, norms 2w; a decoder attends twice."""
    width, inner, tokens = 16, 32, model.config.vocab_size
    attention, norm = 4 * (width**2 + width), 2 * width
    feed_forward = 2 * width * inner + width + inner
    layers = (attention + feed_forward + 2 * norm) + (2 * attention + feed_forward + 3 * norm)
    assert sum(p.numel() for p in model.parameters()) == tokens * width + layers
    assert model.config.embedding_scaled and model.config.position_kind == "sinusoidal"


@pytest.mark.parametrize("words", [{"heads": 4}, {"ffn_width": 99}])
def test_shape_options_that_a_recurrent_body_lacks(words):
    with pytest.raises(UsageError, match="lstm-small-plain, a recurrent model, has no such size or part"):
        Fresh("lstm-small-plain", vocab_size=60, **words).model(ROWS, 1)
    assert Fresh("lstm-small", vocab_size=60, width=16, ffn_width=8).model(ROWS, 1).config.ffn_width == 8


def test_another_vocabulary_may_be_given(tmp_path: Path):
    train_tokenizer(["北京欢迎你", "red cat"] * 3, "unigram", 150).save(tmp_path / "tok")
    made = Fresh("t5-small", str(tmp_path / "tok"), layers=1, width=64, ffn_width=32).model(ROWS, 1)
    assert made.tokenizer == Tokenizer.load(tmp_path / "tok") and made.config.family == "t5"
    assert made.config.start_token == made.tokenizer.pad_id and made.config.decoder_layers == 1
    assert made.config.heads == 1


def test_a_single_stack_may_be_trained_as_well(tmp_path: Path):
    made = Fresh("bert-tiny", layers=1, width=64, vocab_size=60).model(ROWS, 1)
    assert made.config.decoder_layers == 0 and Translate().fitted(made).mask == "prefix"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"preset": "transfomer-small"}, "did you mean transformer-small"),
        ({"preset": "gpt2"}, "preset is 'gpt2'"),
        ({"tokenizer": "tok", "vocab_size": 99}, "its own vocabulary"),
    ],
)
def test_what_a_new_model_cannot_be(values, says: str):
    with pytest.raises(UsageError, match=says):
        Fresh(**values)


def test_a_shape_that_cannot_be():
    with pytest.raises(UsageError, match="not a multiple of heads 3"):
        Fresh(width=16, heads=3, vocab_size=60).model(ROWS, 1)


def settled(plan: Plan, model: Model) -> Plan:
    assert isinstance(plan.job, FineTuning)
    return plan.job.settled(plan, plan.job.task, model, ROWS)


def test_the_settings_of_2017(model: Model):
    plan = Plan.from_dict({"task": "translate", "data": "d.jsonl", "preset": "transformer-small", **SMALL})
    made = settled(plan, model).settings
    assert (made.betas, made.adam_eps, made.schedule) == ((0.9, 0.98), 1e-9, "inverse-root")
    assert (made.label_smoothing, made.weight_decay, made.epochs) == (0.1, 0.0, 20.0)
    assert made.lr == pytest.approx(1 / math.sqrt(16 * 4000)) and made.warmup == 0.1
    long = settled(replace(plan, settings=replace(plan.settings, steps=100_000)), model).settings
    assert long.warmup == 4000
    given = {"lr": 0.5, "warmup": 7, "label_smoothing": 0.0, "epochs": 2}
    kept = Plan.from_dict({"task": "translate", "data": "d", "preset": "transformer-small", **given})
    asked = settled(kept, model).settings
    assert [getattr(asked, name) for name in given] == list(given.values())


def test_a_plan_comes_back(model: Model):
    output = {"task": "translate", "data": "d.jsonl", "preset": "transformer-small", "average": 4, **SMALL}
    plan = settled(Plan.from_dict(output), model)
    assert plan.settings.keep == 4 and plan.job.prune is False
    assert Plan.from_dict(plan.to_dict()) == plan
    assert not differences(plan.to_dict(), output)
    assert differences(plan.to_dict(), {"vocab_size": 61}) == ["vocab_size is 60, not 61"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"vocab_size": 99, "model": "m"}, "vocab_size: for a new model"),
        ({"preset": "transformer-small", "model": "m"}, "begins with a model or with a preset"),
        ({"preset": "transformer-small", "average": 1}, "average is 1"),
        ({"preset": "transformer-small", "average": 5, "keep": 2}, "--average 5 needs as many checkpoints, not 2"),
        ({"preset": "transformer-small", "crf": True}, "crf is for --task tag, not for translate"),
    ],
)
def test_what_a_plan_cannot_be(values, says: str):
    with pytest.raises(UsageError, match=says):
        Plan.from_dict({"task": "translate", "data": "d.jsonl", **values})


@pytest.mark.parametrize(
    "preset", ["transformer-small", "t5-small", "t5-v1.1-small", "lstm-small", "lstm-small-plain", "bert-tiny"]
)
def test_every_body_learns_and_comes_back(preset: str, tmp_path: Path):
    """Some steps, the loss falls; saved, loaded, it writes the same, one by one or together."""
    made = Fresh(preset, layers=1, width=32, heads=2 if preset[0] != "l" else None, vocab_size=60).model(ROWS, seed=1)
    task = Translate(max_target=10).fitted(made)
    work = task.workload(made, ROWS)
    settings = Settings(steps=12, lr=1e-2, warmup=0.0, batch_tokens=600, precision="fp32", dropout=0.0)
    before = mean_loss(made, [work.batch(range(30), 0)])
    train(made, work, settings, tmp_path / "run", quiet=True)
    assert mean_loss(made, [work.batch(range(30), 0)]) < 0.8 * before
    save_model(made, task, tmp_path / "model")
    write = pipeline("translate", tmp_path / "model", "fp32")
    sources = [row.fields["source"] for row in ROWS[:4]]
    written = write(sources, beams=2)
    assert written == [write(source, beams=2) for source in sources]
    assert written == [best[0][0] for best in task.write(made.eval(), sources, task.decoding(made, beams=2))]


# ---- means -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(model: Model, task: Translate, tmp_path: Path) -> Path:
    """Three checkpoints: all weights at 1, 2 and 6 more than at the start."""
    save_model(model, task, tmp_path / "run" / "start")
    for step, more in ((1, 1.0), (2, 2.0), (3, 6.0)):
        weights = {name: tensor + more for name, tensor in model.state_dict().items()}
        runs.save_state(tmp_path / "run", runs.State(step, weights, {}, {}))
    return tmp_path / "run"


@pytest.mark.parametrize(("last", "steps", "more"), [(1, [3], 6.0), (2, [2, 3], 4.0), (3, [1, 2, 3], 3.0)])
def test_the_mean_of_the_last_checkpoints(run: Path, model: Model, task: Translate, last, steps, more):
    made, found, taken = mean_model(run, last)
    assert (found, taken) == (task, steps)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(made.state_dict()[name], tensor + more, atol=1e-6)


def test_an_old_best_checkpoint_is_not_averaged(run: Path):
    (run / "config.yaml").write_text(
        yaml.safe_dump(sealed_values({"keep": 2}, {}))
    )  # step 1 is there because it was the best
    assert mean_model(run)[2] == [2, 3]
    with pytest.raises(UsageError, match="has 2 checkpoints, not 3"):
        mean_model(run, 3)


def test_an_ema_is_averaged_instead_of_the_weights(run: Path, model: Model):
    name = "body.embedding.tokens.weight"
    mean = {name: torch.full_like(model.state_dict()[name], 9.0)}
    runs.save_state(run, runs.State(4, dict(model.state_dict()), {}, {}, mean))
    assert (mean_weights(run, 1)[1][name] == 9.0).all()


def test_means_that_cannot_be_taken(run: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="has 3 checkpoints, not 4"):
        mean_model(run, 4)
    file = run / "checkpoints" / "step-00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(CheckpointError, match=r"step-00000002: model\.safetensors is damaged"):
        mean_model(run)
    with pytest.raises(CheckpointError, match="no run with checkpoints"):
        mean_model(tmp_path)


class Told:
    """A workload whose evaluation is a function of the weights, given by the test."""

    lengths = (1,)

    def __init__(self, value: float | None):
        self.value = value

    def batch(self, numbers, epoch):
        raise AssertionError

    def evaluate(self, model: Model, step: int) -> Score | None:
        return None if self.value is None else Score(self.value, {"bleu": self.value})


@pytest.mark.parametrize(("value", "taken"), [(None, True), (11.0, True), (9.0, False)])
def test_a_mean_is_taken_if_it_is_better(run: Path, model: Model, value: float | None, taken: bool):
    mine = Fresh(**SMALL).model(ROWS, seed=3)
    result = Result(3, 3, None if value is None else Score(10.0, {"bleu": 10.0}), 1.0)
    steps = take_mean(mine, Told(value), result, run, 2)
    assert list(steps) == ([2, 3] if taken else [])
    weight = model.state_dict()["body.embedding.tokens.weight"]
    assert torch.allclose(mine.state_dict()["body.embedding.tokens.weight"], weight + 4.0 * taken, atol=1e-6)
    assert value is None or (result.best is not None and result.best.value == max(value, 10.0))


# ---- how it is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["transformer-small", "lstm-small", "lstm-small-plain"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "int8"])
def test_every_body_writes_in_every_precision(preset: str, precision: str):
    model = Fresh(preset=preset, layers=1, width=16, vocab_size=60).model(ROWS, seed=3).eval()
    task = Translate(max_target=8).fitted(model)
    rules = task.decoding(model, beams=2)
    sources = ["red cat", "a blue bird"]
    plain = [best[0] for best in task.write(model, sources, rules)]
    fast = [best[0] for best in task.write(model, sources, rules, writer=task.writer(model, precision))]
    if precision == "fp32":
        assert [text for text, _ in fast] == [text for text, _ in plain]
        assert [best.score for _, best in fast] == pytest.approx([best.score for _, best in plain], abs=1e-4)
    assert all(math.isfinite(best.score) for _, best in fast)


def test_a_transformer_writes_by_the_fast_step(task: Translate, model: Model):
    assert isinstance(task.writer(model, "fp32"), FastPairWriter)
    assert isinstance(task.writer(model), PairWriter)
