"""Pretraining: what each objective leaves behind, what an evaluation says, and runs that are killed and go on."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from allmask.data import Texts
from allmask.data.corpus import Corpus
from allmask.errors import CheckpointError, DataError, Interrupted, UsageError
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.objectives import Mlm, Unilm
from allmask.options import PRETRAINING as DEFAULTS
from allmask.pipelines import pipeline
from allmask.runs.driver import resume, start
from allmask.runs.folder import saved_plan
from allmask.runs.options import differences, saved_values
from allmask.runs.plan import Plan
from allmask.runs.pretraining import Pretraining, RowWorkload, read_corpora, rows_of, split_rows
from allmask.tasks.continuation import Continuation
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import load_task
from allmask.text import Tokenizer, train_tokenizer
from allmask.training import Settings
from allmask.training import checkpoint as runs
from allmask.training.progress import Progress
from tests import tiny

FAST = replace(DEFAULTS, steps=6, batch_tokens=256, lr=3e-3, precision="fp32", eval_every=3, save_every=2)
SINGLE = ["mlm", "nsp", "causal", "reverse", "permutation", "prefix", "unilm"]


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """Words, or characters, that follow each other in a circle; a document speaks one language, the last one word."""
    rng = random.Random(seed)
    made = []
    for number in range(documents):
        circle, space = (tiny.WORDS, " ") if number % 2 else (list(tiny.CHARACTERS), "")
        begins = [(rng.randrange(len(circle)), rng.randint(3, 9)) for _ in range(rng.randint(1, 5))]
        made.append("\n".join(space.join((circle * 2)[first : first + size]) for first, size in begins))
    path.write_text("\n\n".join([*made, "cat"]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(Texts([text]), "wordpiece", 200).save(folder)
    return folder


@pytest.fixture(scope="module")
def plan(text: Path, tokenizer: Path) -> Plan:
    job = Pretraining(
        (str(text),), tokenizer=str(tokenizer), preset="bert-tiny", width=16, heads=2, max_positions=32, length=24,
        held_out=0.1,
    )  # fmt: skip
    return Plan(job, FAST)


def changed(plan: Plan, settings: Settings = FAST, **options: Any) -> Plan:
    return Plan(replace(plan.job, **options), settings)


def rows(plan: Plan, made: Tokenizer, out: Path) -> RowWorkload:
    assert isinstance(plan.job, Pretraining)
    return rows_of(plan.job, plan.settings.seed, made, *read_corpora(plan.job, made, out, quiet=True))


def fingerprint(run: Path) -> tuple[bytes, str]:
    """What must not depend on interruptions: the weights, and all losses on the way."""
    told = tiny.read_jsonl(run / "metrics.jsonl")
    lines = [{name: line[name] for name in line if name not in ("speed", "mfu")} for line in told]
    return (run / "final" / "model.safetensors").read_bytes(), json.dumps(lines)


# ---- every objective -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [*SINGLE, "mlm:0.5,causal:0.25,permutation:0.25"])
def test_each_objective_learns_and_leaves_a_run(plan: Plan, tmp_path: Path, objective: str):
    run = tmp_path / "run"
    settings = replace(FAST, steps=48, eval_every=16, save_every=48, lr=1e-2, dropout=0.0, batch_tokens=512)
    told = start(changed(plan, objective=objective, held_out=0.3, settings=settings), run, quiet=True)
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "config.yaml", "corpus", "checkpoints", "metrics.jsonl", "loss.png", "result.json", "final",
    }  # fmt: skip
    assert told == json.loads((run / "result.json").read_text()) and told["steps"] == 48
    evaluations = [line["eval_loss"] for line in tiny.read_jsonl(run / "metrics.jsonl") if "eval_loss" in line]
    assert len(evaluations) == 3 and evaluations[-1] < evaluations[0]
    model = load(run / "final")
    assert model.heads == ({"lm", "nsp", "pooler"} if objective == "nsp" else {"lm"})
    assert model.config.own_mask == ("causal" if objective == "causal" else "bidirectional")
    assert model.tokenizer == Tokenizer.load(plan.job.tokenizer)
    writes = "causal" in objective or objective in ("permutation", "reverse")
    kind = Continuation if writes else Title if objective == "prefix" else type(None)
    assert isinstance(load_task(run / "final"), kind)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rms", "norm_place": "pre", "positions": "sinusoidal", "parametrization": "ntk"},
        {"norm": "batch", "positions": "clipped", "corruption": (1.0, 0.0, 0.0)},
        {"norm": "instance", "positions": "rotary"},
        {"preset": "gpt2", "norm_place": "post", "positions": "none", "objective": "causal", "layers": 1},
    ],
    ids=lambda options: options.get("norm", "post"),
)
def test_variants_of_a_shape_are_trained_saved_and_loaded(plan: Plan, tmp_path: Path, options: dict[str, Any]):
    run = tmp_path / "run"
    start(changed(plan, **options), run, quiet=True)
    model = load(run / "final")
    fields = {"positions": "position_kind"}
    for name, value in options.items():
        if name not in ("corruption", "preset", "objective"):
            assert getattr(model.config, fields.get(name, name)) == value
    job = saved_plan(run).job
    assert isinstance(job, Pretraining) and job.corruption == options.get("corruption", ())
    assert job.build(Tokenizer.load(run / "final")).objectives[0].name == options.get("objective", "mlm")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "instance", "objective": "causal"}, "instance norm shows each token all others; causal hides"),
        ({"norm": "batch", "objective": "mlm,prefix"}, "batch norm shows"),
        ({"norm": "rms", "preset": "elmo-tiny", "objective": "causal,reverse", "heads": None}, "has no such size or p"),
        ({"preset": "xlnet-tiny", "norm_place": "pre", "objective": "permutation"}, "norms after each step"),
        ({"preset": "t5-small", "positions": "rotary", "objective": "span"}, "no rotary positions"),
        ({"norm": "group"}, "norm is 'group'; expected one of layer, rms, batch, instance"),
        ({"corruption": (1.0, 1.0)}, "expected weights of"),
        ({"corruption": (1.0, 0.0, 0.0), "objective": "causal"}, "corruption is for mlm, nsp, unilm, not for causal"),
        ({"model": "minilm", "tokenizer": None, "preset": None, "width": None, "heads": None, "max_positions": None,
          "norm": "rms"}, "minilm has its own shape and tokenizer, so no norm"),
    ],
)  # fmt: skip
def test_variants_that_do_not_fit_are_refused(plan: Plan, options: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        job = changed(plan, **options).job
        made = Tokenizer.load(plan.job.tokenizer)
        job.build(made)
        job.shape(made)


def test_an_ntk_model_has_a_larger_learning_rate():
    assert Pretraining.usual({"parametrization": "ntk"})["lr"] == 0.01 and Pretraining.usual({})["lr"] == 5e-4


def test_losses_of_a_mixture_have_names(plan: Plan, tmp_path: Path):
    told = start(changed(plan, objective="mlm,causal,nsp"), tmp_path / "run", quiet=True)
    metrics = told["metrics"]
    named = {"loss", "loss_mlm", "loss_causal", "loss_nsp", "perplexity_causal", "accuracy_nsp", "mean_cosine"}
    assert set(metrics) == named
    assert metrics["perplexity_causal"] == pytest.approx(math.exp(metrics["loss_causal"]))
    assert 0.0 <= metrics["accuracy_nsp"] <= 1.0


def test_what_is_written_is_read_as_it_was_learnt(plan: Plan, tmp_path: Path):
    """Token by token against the whole text under the causal mask: [CLS] first, all of it segment 0."""
    start(changed(plan, objective="mlm,causal"), tmp_path / "run", quiet=True)
    write = pipeline("generate", tmp_path / "run", "fp32")
    model, made = write.model, write.model.tokenizer
    assert made is not None
    ids = [made.cls_id, *made.encode("red blue", special=False).ids]
    banned = sorted(made.special_ids - {made.sep_id})
    with torch.no_grad():
        for _ in range(5):
            text = torch.tensor([ids])
            logits = model(text, Mask.causal(torch.ones_like(text, dtype=torch.bool))).logits[0, -1]
            logits[[*banned, made.sep_id]] = -torch.inf  # min_new keeps the end away, too
            ids.append(int(logits.argmax()))
    ((_, best),) = next(iter(write.write(["red blue"], max_new=5, min_new=5)))
    assert list(best.tokens)[:5] == ids[3:]


def test_a_model_that_reads_from_right_to_left_writes_leftwards(plan: Plan, tmp_path: Path):
    """Token by token against the whole text under the reverse mask: [SEP] last, [CLS] ends it, the prompt its end."""
    start(changed(plan, objective="mlm,reverse"), tmp_path / "run", quiet=True)
    write = pipeline("generate", tmp_path / "run", "fp32")
    model, made = write.model, write.model.tokenizer
    assert made is not None
    ids = [*made.encode("red blue", special=False).ids, made.sep_id]
    prompt = list(ids)
    banned = sorted(made.special_ids)  # min_new keeps the end away, too
    with torch.no_grad():
        for _ in range(5):
            text = torch.tensor([ids])
            mask, positions = Mask.reverse(torch.ones_like(text, dtype=torch.bool)), torch.arange(24 - len(ids), 24)
            logits = model(text, mask, positions=positions).logits[0, 0]
            logits[banned] = -torch.inf
            ids.insert(0, int(logits.argmax()))
    ((shown, best),) = next(iter(write.write(["red blue"], max_new=5, min_new=5)))
    assert [*best.tokens[::-1], *prompt][-len(ids) :] == ids
    assert shown.replace(" ", "") == made.decode(best.tokens[::-1]).replace(" ", "")
    assert write.settings().end == (made.cls_id,)
    with pytest.raises(UsageError, match="from right to left"):
        list(write.stream("red blue"))


def test_a_gpt2_learns_from_left_to_right(text: Path, tmp_path: Path):
    train_tokenizer(Texts([text]), "byte-bpe", 300).save(tmp_path / "tok")
    job = Pretraining(
        (str(text),), "causal", tokenizer=str(tmp_path / "tok"), preset="gpt2", layers=1, width=16, heads=2, length=32,
        across=True,
    )  # fmt: skip
    told = start(Plan(job, FAST), tmp_path / "run", quiet=True)
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["model_type"] == "gpt2" and told["metrics"]["perplexity_causal"] < 300
    assert load_task(tmp_path / "run" / "final") == Continuation.within(32)  # rows of a stream begin anywhere


@pytest.mark.parametrize(("objective", "kind"), [("mlm", "BertForMaskedLM"), ("causal", "BertLMHeadModel")])
def test_transformers_loads_what_was_learnt(plan: Plan, tmp_path: Path, objective: str, kind: str):
    transformers = pytest.importorskip("transformers")
    start(changed(plan, objective=objective), tmp_path / "run", quiet=True)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path / "run" / "final").eval()
    ours = load(tmp_path / "run" / "final")
    assert ours.tokenizer is not None
    ids = torch.tensor([ours.tokenizer.encode("red cat 北京").ids])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_going_on_with_a_model(text: Path, tmp_path: Path, monkeypatch):
    """Its weights are where training begins; heads that it lacks are new."""
    old = tiny.bert(tmp_path / "old")
    more = Plan(Pretraining((str(text),), "nsp", model=str(old), length=24, held_out=0.1), FAST)
    run = stopped_run(more, tmp_path / "run", monkeypatch)
    before, first = load(old).state_dict(), load(run / "start")
    assert first.heads == {"lm", "nsp", "pooler"}
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in before.items())
    resume(run, quiet=True)
    assert not torch.equal(load(run / "final").body.layers[0].attention.query.weight,
                           first.body.layers[0].attention.query.weight)  # fmt: skip


def test_a_model_without_rows_for_all_its_tokens(text: Path, tmp_path: Path):
    folder = tiny.bert(tmp_path / "old")
    made = Tokenizer.load(folder)
    made.backend.add_tokens(["北京欢迎"])
    made.save(folder)
    with pytest.raises(CheckpointError, match=r"but the model has .* embeddings"):
        start(Plan(Pretraining((str(text),), model=str(folder), length=24)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_new_output_layer_expects_tokens_as_often_as_they_are(plan: Plan, tmp_path: Path, monkeypatch):
    run = stopped_run(plan, tmp_path / "run", monkeypatch)
    bias = load(run / "start").head("lm_head").get_parameter("bias").detach()
    counts = torch.bincount(torch.from_numpy(Corpus.open(tmp_path / "run" / "corpus").ids.astype(int)))
    assert bias.exp().sum().item() == pytest.approx(1.0, abs=1e-4)
    a, b = counts.topk(2).indices.tolist()
    assert (bias[a] - bias[b]).exp().item() == pytest.approx((counts[a] + 1).item() / (counts[b] + 1).item(), rel=1e-4)


# ---- batches and judgement -------------------------------------------------------------------------------------


def test_a_batch_depends_on_seed_epoch_and_numbers_alone(plan: Plan, tmp_path: Path):
    made = Tokenizer.load(plan.job.tokenizer)
    works = [rows(plan, made, tmp_path / "run") for _ in range(2)]
    first = works[0].batch([3, 1, 4], 2)
    works[1].batch([1, 5], 0)
    again = works[1].batch([3, 1, 4], 2)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    other = works[0].batch([3, 1, 4], 3)
    assert not torch.equal(first.labels, other.labels)
    assert max(works[0].lengths) <= plan.job.length


def test_no_held_out_document_is_trained_on(plan: Plan, tmp_path: Path):
    made = Tokenizer.load(plan.job.tokenizer)
    corpora = read_corpora(plan.job, made, tmp_path / "run", quiet=True)
    learnt, held_out = split_rows(plan.job, plan.settings.seed, made, *corpora)
    assert held_out is not None
    documents = [{part.document(row) for row in range(len(part))} for part in (learnt, held_out)]
    assert not documents[0] & documents[1] and len(documents[1]) == 4
    assert documents[0] | documents[1] == set(range(41))


def test_causal_evaluation_is_the_plain_mean_over_held_out_rows(plan: Plan, tmp_path: Path):
    """Against rows one by one, through the whole model and torch's own loss."""
    plan = changed(plan, objective="causal")
    made = Tokenizer.load(plan.job.tokenizer)
    work = rows(plan, made, tmp_path / "run")
    model = Model.fresh(plan.job.shape(made), ("lm",), torch.Generator().manual_seed(0)).eval()
    corpora = read_corpora(plan.job, made, tmp_path / "run", quiet=True)
    _, held_out = split_rows(plan.job, plan.settings.seed, made, *corpora)
    assert held_out is not None
    total, count = 0.0, 0
    with torch.no_grad():
        score = work.evaluate(model)
        for number in range(len(held_out)):
            ids = torch.tensor([[made.cls_id, *held_out[number].tolist(), made.sep_id]])
            logits = model(ids, Mask.causal(torch.ones_like(ids, dtype=torch.bool))).logits
            total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    assert score is not None
    assert score.metrics["loss_causal"] == pytest.approx(total / count, rel=1e-5)
    assert score.value == -score.metrics["loss"] == -score.metrics["loss_causal"]


def test_a_body_that_tells_no_token_from_another_is_reported(plan: Plan, tmp_path: Path):
    made = Tokenizer.load(plan.job.tokenizer)
    work = rows(plan, made, tmp_path / "run")
    model = Model.fresh(plan.job.shape(made), ("lm",), torch.Generator().manual_seed(0)).eval()
    assert work.evaluator is not None
    batch = work.evaluator.batches["mlm"][0]
    with torch.no_grad():
        hidden = model(batch.ids, batch.mask, batch.segments).hidden[0]
        alike = sum(float(F.cosine_similarity(one, hidden).sum()) for one in hidden) / len(hidden) ** 2
        fresh = work.evaluator(model)
        model.body.layers[-1].feed_forward.contract.bias += torch.linspace(0, 1e4, model.config.width)
        collapsed = work.evaluator(model)
    assert fresh.metrics["mean_cosine"] == pytest.approx(alike, abs=1e-5)
    assert alike < 0.9
    assert not fresh.warnings
    assert collapsed.metrics["mean_cosine"] > 0.99
    assert "the representation has collapsed" in collapsed.warnings[0]


def test_text_to_evaluate_on_of_its_own(plan: Plan, tmp_path: Path):
    other = write_text(tmp_path / "other.txt", 6, seed=9)
    told = start(changed(plan, eval=(str(other),), held_out=0.5), tmp_path / "run", quiet=True)
    assert "loss_mlm" in told["metrics"] and (tmp_path / "run" / "corpus-eval").is_dir()
    corpora = (Corpus.open(tmp_path / "run" / name) for name in ("corpus", "corpus-eval"))
    assert told["rows"] == len(split_rows(plan.job, 1, Tokenizer.load(plan.job.tokenizer), *corpora)[0])


def test_text_that_is_trained_on_is_not_evaluated_on(plan: Plan, tmp_path: Path):
    with pytest.raises(UsageError, match="also trained on"):
        start(changed(plan, eval=plan.job.data), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_one_document_alone_is_all_trained_on(plan: Plan, tmp_path: Path):
    (tmp_path / "one.txt").write_text("红\nred cat runs\nblue dog sings\n北京欢迎你", encoding="utf-8")
    told = start(changed(plan, data=(str(tmp_path / "one.txt"),)), tmp_path / "run", quiet=True)
    assert set(told["metrics"]) == {"train_loss"}
    with pytest.raises(DataError, match="only one document"):
        start(changed(plan, data=(str(tmp_path / "one.txt"),), objective="nsp"), tmp_path / "nsp", quiet=True)
    assert not (tmp_path / "nsp" / "config.yaml").exists()


# ---- stopped and gone on with ----------------------------------------------------------------------------------


class Killed(BaseException):
    """What nothing catches."""


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("objective", ["mlm,causal,permutation", "nsp,unilm"])
def test_killed_in_mid_epoch_and_resumed_is_never_stopped(plan, monkeypatch, tmp_path: Path, objective: str, stop):
    plan = changed(plan, objective=objective)
    start(plan, tmp_path / "whole", quiet=True)

    def kill(bar: Progress, done: int, text: str = "") -> None:
        if done == stop:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "update", kill)
        with pytest.raises(Killed):
            start(plan, tmp_path / "cut", quiet=True)
    resume(tmp_path / "cut", quiet=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_signal_saves(plan: Plan, monkeypatch, tmp_path: Path):
    import os
    import signal

    start(plan, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            Progress, "update", lambda bar, done, text="": os.kill(os.getpid(), signal.SIGTERM) if done == 3 else None
        )
        with pytest.raises(Interrupted) as stopped:
            start(plan, tmp_path / "cut", quiet=True)
    assert stopped.value.exit_code == 143 and runs.checkpoints(tmp_path / "cut")[0].name == "step-00000003"
    resume(tmp_path / "cut", quiet=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def stopped_run(plan: Plan, run: Path, monkeypatch) -> Path:
    with monkeypatch.context() as patched:
        patched.setattr("allmask.runs.driver.train", lambda *_, **__: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            start(plan, run, quiet=True)
    return run


def test_a_store_that_is_whole_needs_no_text_any_more(plan: Plan, monkeypatch, tmp_path: Path):
    file = write_text(tmp_path / "text.txt")
    run = stopped_run(changed(plan, data=(str(file),)), tmp_path / "run", monkeypatch)
    file.unlink()
    assert resume(run, quiet=True)["steps"] == 6


def test_a_damaged_store_is_made_again_or_refused(plan: Plan, monkeypatch, tmp_path: Path):
    file = write_text(tmp_path / "text.txt")
    plan = changed(plan, data=(str(file),))
    start(plan, tmp_path / "whole", quiet=True)
    for run in (tmp_path / "same", tmp_path / "other"):
        stopped_run(plan, run, monkeypatch)
        (run / "corpus" / "tokens.bin").write_bytes(b"\0" * 10)
    resume(tmp_path / "same", quiet=True)
    assert fingerprint(tmp_path / "same") == fingerprint(tmp_path / "whole")
    write_text(file, seed=5)
    with pytest.raises(DataError, match="changed since"):
        resume(tmp_path / "other", quiet=True)


def test_what_ended_before_it_began_is_begun_again(plan: Plan, monkeypatch, tmp_path: Path):
    """The tokens are kept; a half-written start is not."""
    with monkeypatch.context() as patched:
        patched.setattr("allmask.runs.folder.yaml.safe_dump", lambda *_, **__: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            start(plan, tmp_path / "run", quiet=True)
    made = (tmp_path / "run" / "corpus" / "tokens.bin").stat().st_mtime_ns
    start(plan, tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "corpus" / "tokens.bin").stat().st_mtime_ns == made


# ---- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_comes_back_as_it_was(plan: Plan, monkeypatch, tmp_path: Path):
    asked = changed(
        plan, objective="mlm:3,unilm", whole_words=True, ngrams=(6.0, 3.0, 2.0), unilm_weights=(1.0, 0.0, 0.0, 1.0)
    )
    run = stopped_run(asked, tmp_path / "run", monkeypatch)
    assert saved_plan(run) == asked
    assert saved_values(run)["preset"] == "bert-tiny" and saved_values(run)["betas"] == [0.9, 0.98]
    assert differences(saved_values(run), {"length": 24, "data": list(asked.job.data), "lr": 1.0}) == [
        "lr is 0.003, not 1.0"
    ]


@pytest.mark.parametrize(
    "given, lr",
    [
        ({}, 5e-4),
        ({"objective": "causal"}, 5e-4),
        ({"objective": "permutation"}, 2e-4),
        ({"objective": "permutation:1"}, 2e-4),
        ({"objective": "permutation,mlm"}, 5e-4),
        ({"objective": "permutation", "lr": 1e-3}, 1e-3),
    ],
)
def test_the_learning_rate_where_none_is_given(given: dict, lr: float):
    values = {"objective": "mlm", "data": ["text.txt"], "tokenizer": "words", **given}
    assert Plan.from_dict(values).settings.lr == lr


def test_options_reach_their_objectives(plan: Plan):
    made = Tokenizer.load(plan.job.tokenizer)
    asked = changed(plan, objective="mlm,unilm,causal", mask_share=0.4, ngrams=(1.0, 1.0))
    mlm, unilm, _ = asked.job.build(made).objectives
    assert isinstance(mlm, Mlm) and isinstance(unilm, Unilm)
    assert (mlm.share, unilm.share, unilm.ngrams) == (0.4, 0.4, (1.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "span"}, "there are: transformer-small"),
        ({"objective": "mass:2", "preset": "t5-smal"}, "did you mean t5-small"),
        ({"objective": "mlmm"}, "did you mean mlm"),
        ({"preset": "bert-smal"}, "did you mean bert-small"),
        ({"preset": "transformer-base"}, "preset is 'transformer-base'"),
        ({"tokenizer": None}, "allmask tokenizer train"),
        ({"model": "minilm"}, "tokenizer, preset, width"),
        ({"length": 2}, "length is 2; mlm needs at least 3"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"objective": "nsp", "across": True}, "within documents"),
        ({"objective": "causal", "whole_words": True}, "whole_words is for mlm, nsp"),
        ({"data": ()}, "no data was named"),
    ],
)
def test_what_is_refused(plan: Plan, changes: dict, says: str):
    with pytest.raises(UsageError) as refused:
        changed(plan, **changes)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 30, "heads": 4}, "not a multiple of heads"),
        ({"max_positions": 16}, "do not fit into 16 positions"),
        ({"objective": "nsp", "preset": "gpt2"}, "nsp cannot be learnt by a gpt2"),
    ],
)
def test_shapes_that_are_refused_before_anything_is_written(plan: Plan, tmp_path: Path, changes: dict, says: str):
    with pytest.raises(UsageError, match=says):
        start(changed(plan, **changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
