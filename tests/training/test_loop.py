"""The loop: it learns, resumes bit for bit, survives bad numbers, damage and signals, and keeps what is best."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from allmask import presets
from allmask.data import Example, pack
from allmask.errors import CheckpointError, DivergedError, Interrupted, ResourceError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.attention import Attention
from allmask.nn.dropout import Dropout
from allmask.training import Paused, Score, Settings, loss_of, train
from allmask.training import checkpoint as runs
from allmask.training.log import Metrics, read_metrics
from allmask.training.loop import Trainer, _signals, set_dropout
from allmask.training.optimizer import adamw

SMALL = {"vocab_size": 30, "width": 16, "heads": 2, "ffn_width": 32, "layers": 2, "max_positions": 32}
FAST = Settings(steps=12, batch_tokens=60, lr=3e-3, eval_every=4, precision="fp32", seed=3)


class Copying:
    """A toy: write the source again. Sources of 2–6 tokens, then the same as target."""

    def __init__(self, count=40, scores=None):
        rng = torch.Generator().manual_seed(0)
        self.examples = [self._example(rng) for _ in range(count)]
        self.lengths = [len(example) for example in self.examples]
        self.scores = iter(scores) if scores is not None else None
        self.seen = []

    def _example(self, rng):
        n = int(torch.randint(2, 7, (), generator=rng))
        source = torch.randint(5, 30, (n,), generator=rng)
        ids = torch.cat([torch.tensor([1]), source, torch.tensor([2]), source, torch.tensor([2])])
        is_target = torch.arange(len(ids)) >= n + 2
        labels = torch.full_like(ids, -1)
        labels[:-1][is_target[1:]] = ids[1:][is_target[1:]]
        return Example(ids, Mask.prefix(is_target[None]).order[0], is_target, labels)

    def batch(self, numbers, epoch):
        self.seen.append((epoch, tuple(numbers)))
        return pack([self.examples[number] for number in numbers])

    def evaluate(self, model, step):
        if self.scores is None:
            return None
        value = next(self.scores)
        return Score(value, {"quality": value})


def model(dropout=0.1):
    config = replace(presets.bert_base(), **SMALL, dropout=dropout, attention_dropout=dropout)
    return Model.fresh(config, ("lm",), torch.Generator().manual_seed(0))


def weights(made):
    return {name: tensor.clone() for name, tensor in made.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns_to_copy(tmp_path):
    made = model(dropout=0.0)
    before = loss_of(made.eval(), pack(Copying().examples)).item()
    train(made, Copying(), replace(FAST, steps=180, lr=1e-2, eval_every=90), tmp_path / "run", quiet=True)
    assert loss_of(made.eval(), pack(Copying().examples)).item() < 0.3 * before


@pytest.mark.parametrize(("accumulate", "precision"), [(1, "fp32"), (2, "bf16")])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, precision, accumulate):
    settings = replace(FAST, precision=precision, accumulate=accumulate, save_every=1)
    whole, work = model(), Copying()
    train(whole, work, settings, tmp_path / "whole", quiet=True)
    for stop in (1, 5, 9):
        first = Trainer(model(), Copying(), settings, tmp_path / f"cut{stop}", quiet=True)
        first.eval_every = 10**9
        metrics = runs_metrics(first)
        source = first.batches_from(0)
        for _ in range(stop):
            first._one_step(source, metrics, quiet_bar(first))
        source.close()
        again, rest = model(dropout=0.1), Copying()
        with torch.no_grad():  # whatever it starts with must be replaced
            again.body.layers[0].attention.query.weight.fill_(7.0)
        train(again, rest, settings, tmp_path / f"cut{stop}", resume=True, quiet=True)
        assert same(weights(again), weights(whole))
        assert rest.seen[: 12 * accumulate - stop * accumulate] == work.seen[stop * accumulate : 12 * accumulate]
        steps = [line["loss"] for line in read_metrics(tmp_path / f"cut{stop}") if "loss" in line]
        assert steps == [line["loss"] for line in read_metrics(tmp_path / "whole") if "loss" in line]


def runs_metrics(trainer):
    runs.prepare(trainer.run, False)
    return Metrics(trainer.run)


def quiet_bar(trainer):
    from allmask.training.progress import Progress

    return Progress(trainer.steps, "step", quiet=True)


def test_accumulated_batches_are_one_large_batch():
    """Two halves give the gradient of the whole, by the number of targets and not by the number of batches."""
    made, examples = model(dropout=0.0).eval(), Copying().examples[:8]
    whole = pack(examples)
    (loss_of(made, whole) / whole.targets).backward()
    expected = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    halves = [pack(examples[:2]), pack(examples[2:])]
    for half in halves:
        (loss_of(made, half) / sum(h.targets for h in halves)).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(made.get_parameter(name).grad, gradient, atol=1e-6, rtol=1e-4)


def test_packed_loss_is_the_padded_loss_of_transformers_kind():
    """Against the long way round: each example alone, all logits, a shifted cross-entropy over its target."""
    made, total = model(dropout=0.0).eval(), 0.0
    examples = Copying().examples[:6]
    for example in examples:
        ids = torch.from_numpy(example.ids).long()[None]
        is_target = torch.from_numpy(example.segments).bool()
        logits = made(ids, Mask.prefix(is_target[None]), segments=is_target.long()[None]).logits[0]
        where = is_target[1:].nonzero()[:, 0]
        total -= logits[where].log_softmax(-1).gather(1, ids[0, where + 1, None]).sum().item()
    assert loss_of(made, pack(examples)).item() == pytest.approx(total, rel=1e-5)


def test_the_best_evaluation_is_what_remains(tmp_path):
    made = model()
    result = train(made, Copying(scores=[1.0, 3.0, 2.0]), FAST, tmp_path / "run", quiet=True)
    assert result.best_step == 8 and result.best.value == 3.0
    kept = runs.load_state(tmp_path / "run" / "checkpoints" / "step-00000008")
    assert same(weights(made), kept.model)


def test_old_checkpoints_go_and_the_best_stays(tmp_path):
    settings = replace(FAST, eval_every=2, keep=2)
    train(model(), Copying(scores=[9, 1, 1, 1, 1, 1]), settings, tmp_path / "run", quiet=True)
    assert [folder.name for folder in runs.checkpoints(tmp_path / "run")] == [
        "step-00000012",
        "step-00000010",
        "step-00000002",
    ]


def test_patience_stops_early(tmp_path):
    settings = replace(FAST, steps=40, eval_every=2, patience=2)
    result = train(model(), Copying(scores=[5, 6, 1, 2]), settings, tmp_path / "run", quiet=True)
    assert result.stopped_early and result.steps == 8 and result.best_step == 4


class Spoiled(Copying):
    """A gradient that is not finite at some steps."""

    def __init__(self, made, steps):
        super().__init__()
        self.made, self.steps, self.step = made, steps, 0
        made.lm_head.bias.register_hook(self._spoil)

    def _spoil(self, gradient):
        self.step += 1
        return gradient * math.nan if self.step in self.steps else gradient


def test_a_bad_step_is_skipped_and_counted(tmp_path):
    made = model()
    trainer_work = Spoiled(made, {3, 4})
    train(made, trainer_work, replace(FAST, steps=6), tmp_path / "run", quiet=True)
    assert all(tensor.isfinite().all() for tensor in made.state_dict().values())
    state = json.loads((runs.checkpoints(tmp_path / "run")[0] / "state.json").read_text())
    assert state["skipped"] == 2 and state["bad_steps"] == 0


def test_a_model_whose_weights_are_not_finite_is_named(tmp_path):
    made = model()
    made.body.embedding.tokens.weight.data[:] = math.nan
    with pytest.raises(DivergedError) as caught:
        train(made, Copying(), FAST, tmp_path / "run", quiet=True)
    assert "body.embedding.tokens.weight has numbers that are not finite" in (caught.value.hint or "")


def test_training_that_stays_bad_ends_with_finite_weights(tmp_path):
    made = model()
    with pytest.raises(DivergedError, match="5 steps in a row") as caught:
        train(made, Spoiled(made, set(range(6, 100))), replace(FAST, save_every=1), tmp_path / "run", quiet=True)
    assert caught.value.exit_code == 6
    for folder in runs.checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in runs.load_state(folder).model.values())


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    class Interrupting(Copying):
        def evaluate(self, made, step):
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped after step 4 of 12") as caught:
        train(model(), Interrupting(), FAST, tmp_path / "run", quiet=True)
    assert caught.value.exit_code == code and "--resume" in str(caught.value)
    whole, again = model(), model()
    train(whole, Copying(), FAST, tmp_path / "whole", quiet=True)
    train(again, Copying(), FAST, tmp_path / "run", resume=True, quiet=True)
    assert same(weights(again), weights(whole))


def test_one_of_several_processes_lives_to_report_its_error():
    """torchrun sends SIGTERM when another process has died; without a handler nobody would read why."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    alone, one_of_two = (SimpleNamespace(stop_signal=0, group=SimpleNamespace(size=size)) for size in (1, 2))
    with pytest.raises(ValueError), _signals(alone):  # type: ignore[arg-type]
        raise ValueError
    assert {number: signal.getsignal(number) for number in before} == before
    try:
        with pytest.raises(ValueError), _signals(one_of_two):  # type: ignore[arg-type]
            raise ValueError
        assert signal.getsignal(signal.SIGTERM) not in before.values()
        os.kill(os.getpid(), signal.SIGTERM)
        assert one_of_two.stop_signal == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    train(model(), Copying(), FAST, tmp_path / "run", quiet=True)
    newest, older = runs.checkpoints(tmp_path / "run")
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    assert "SHA-256" in runs.verify(newest) and runs.verify(older) is None
    trainer = Trainer(model(), Copying(), FAST, tmp_path / "run")
    trainer.restore()
    assert trainer.step == 8 and "model.safetensors is damaged" in caplog.text
    (older / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        Trainer(model(), Copying(), FAST, tmp_path / "run", quiet=True).restore()


def test_a_full_disk_leaves_the_old_checkpoints(tmp_path, monkeypatch):
    train(model(), Copying(), FAST, tmp_path / "run", quiet=True)
    before = {folder.name: runs.verify(folder) for folder in runs.checkpoints(tmp_path / "run")}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        Trainer(model(), Copying(), FAST, tmp_path / "run", step=20).save()
    assert {folder.name: runs.verify(folder) for folder in runs.checkpoints(tmp_path / "run")} == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_occupied_and_empty_run_folders(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.doc").write_text("dear")
    with pytest.raises(ResourceError, match="already there"):
        train(model(), Copying(), FAST, tmp_path / "run", quiet=True)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(model(), Copying(), FAST, tmp_path / "other", resume=True, quiet=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write there"):
        train(model(), Copying(), FAST, tmp_path / "file" / "run", quiet=True)


def test_dropout_of_a_run_is_not_the_models(tmp_path):
    made, plain = model(dropout=0.1), model(dropout=0.0)
    train(made, Copying(), replace(FAST, dropout=0.0), tmp_path / "made", quiet=True)
    train(plain, Copying(), FAST, tmp_path / "plain", quiet=True)
    assert same(weights(made), weights(plain)) and made.config.dropout == 0.1


def test_dropout_of_a_run_goes_where_the_model_drops():
    """The 2017 Transformer has none inside attention; a model without any gets it everywhere."""
    made = Model.fresh(replace(presets.transformer_small(), vocab_size=32, width=8, heads=2, ffn_width=8), ["lm"])
    set_dropout(made, 0.3)
    assert all(module.dropout == 0.0 for module in made.modules() if isinstance(module, Attention))
    assert {module.p for module in made.modules() if isinstance(module, Dropout)} == {0.0, 0.3}  # 0 in the inner layer
    bare = model(dropout=0.0)
    set_dropout(bare, 0.2)
    assert all(module.dropout == 0.2 for module in bare.modules() if isinstance(module, Attention))
    assert {module.p for module in bare.modules() if isinstance(module, Dropout)} == {0.2}


def test_norms_and_biases_are_not_decayed():
    decayed, spared = adamw(model(), FAST).param_groups
    assert decayed["weight_decay"] == 0.01 and all(p.ndim == 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0 and all(p.ndim == 1 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model().parameters()))


def test_one_step_equals_adamw_written_out(tmp_path):
    """Bias-corrected Adam with decoupled decay, clipping and warm-up, by the formulas."""
    settings = replace(FAST, steps=1, clip=0.5, warmup=0, weight_decay=0.1, batch_tokens=10**6)
    made, reference = model(dropout=0.0), model(dropout=0.0)
    train(made, Copying(), settings, tmp_path / "run", quiet=True)
    batch = pack(Copying().examples)
    (loss_of(reference, batch) / batch.targets).backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values() if g is not None))
    for name, parameter in reference.named_parameters():
        g = gradients[name] * min(1.0, 0.5 / (norm + 1e-6))
        mean, square = 0.1 * g / (1 - 0.9), 0.001 * g.square() / (1 - 0.999)
        decay = 0.1 if parameter.ndim >= 2 else 0.0
        expected = parameter * (1 - settings.lr * decay) - settings.lr * mean / (square.sqrt() + 1e-8)
        torch.testing.assert_close(made.get_parameter(name), expected, atol=2e-5, rtol=1e-3)


def test_an_evaluation_may_ask_for_a_pause(tmp_path):
    """What is left is done another time, and the whole is the run that never paused."""

    class Pausing(Copying):
        def evaluate(self, made, step):
            return Score(0.0, {}, pause=True)

    whole = model()
    train(whole, Copying(), FAST, tmp_path / "whole", quiet=True)
    made = model()
    for begun in (False, True):
        with pytest.raises(Paused):
            train(made, Pausing(), FAST, tmp_path / "run", resume=begun, quiet=True)
    assert [folder.name for folder in runs.checkpoints(tmp_path / "run")] == ["step-00000008", "step-00000004"]
    train(made, Copying(), FAST, tmp_path / "run", resume=True, quiet=True)
    state = runs.load_state(tmp_path / "run" / "checkpoints" / "step-00000012")
    assert same(state.model, weights(whole))


def test_an_evaluation_may_end_the_run_with_the_best_weights(tmp_path):
    """The first evaluation is the best; the second one, a worse one, asks to stop."""
    seen = []

    class Stopping(Copying):
        def evaluate(self, made, step):
            seen.append(weights(made))
            return Score(-float(step), {}, stop=len(seen) == 2)

    made = model()
    result = train(made, Stopping(), FAST, tmp_path / "run", quiet=True)
    assert len(seen) == 2 and result.stopped_early and result.steps < FAST.steps
    assert result.best_step == result.steps / 2 and same(weights(made), seen[0])
