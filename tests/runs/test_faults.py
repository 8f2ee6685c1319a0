"""A run survives what happens to it, or says aloud what is wrong: stale folders, kills, damage, full disks, signals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from allmask import files
from allmask.data import Texts
from allmask.data.corpus import prepare
from allmask.errors import CheckpointError, DataError, Interrupted, ResourceError
from allmask.model import load
from allmask.runs import driver
from allmask.runs.folder import save_model
from allmask.runs.plan import Plan
from allmask.text import train_tokenizer
from allmask.training import checkpoint, train
from allmask.training.log import Metrics, read_metrics
from allmask.training.loop import Trainer
from tests import tiny
from tests.forked import forked, limit_memory
from tests.training.test_loop import FAST, Copying, Spoiled, model, same, weights

KEEP_1 = replace(FAST, keep=1, eval_every=2)
DEAD = 2**22 + 1  # beyond the largest number of a process


def names(run: Path) -> list[str]:
    return sorted(item.name for item in (run / "checkpoints").iterdir())


def flip(file: Path, bit: int = 4) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1 << bit
    file.write_bytes(data)


class Stopped(Copying):
    """Asks the run to stop in the evaluation of a step."""

    def __init__(self, at: int, number: int = signal.SIGTERM):
        super().__init__()
        self.at, self.number = at, number

    def evaluate(self, made: Any, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


def stopped(run: Path, at: int, **more: Any) -> None:
    with pytest.raises(Interrupted):
        train(model(), Stopped(at), KEEP_1, run, quiet=True, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing happened to."""
    made = model()
    train(made, Copying(), KEEP_1, tmp_path_factory.mktemp("whole") / "run", quiet=True)
    return weights(made)


def resumed(run: Path, **more: Any) -> dict[str, torch.Tensor]:
    made = model()
    train(made, Copying(), KEEP_1, run, resume=True, quiet=True, **more)
    return weights(made)


# ---- which checkpoints count -----------------------------------------------------------------------------------------


def test_stale_and_foreign_folders_neither_count_nor_go(tmp_path: Path, whole, caplog):
    """Once they were the newest by name: --keep 1 kept them and removed what had just been written."""
    stopped(tmp_path / "other", 6, identity="other")
    run = tmp_path / "run"
    stopped(run, 4, identity="this")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000006")
    shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000900")
    (run / "checkpoints" / "step-old").mkdir()
    assert same(resumed(run, identity="this"), whole)
    assert "step-00000006: a checkpoint of another run; ignored" in caplog.text
    assert "step-00000900: its name is not that of step 4; skipped" in caplog.text
    assert "step-old: not a checkpoint; ignored" in caplog.text
    assert names(run) == ["step-00000012", "step-00000900", "step-old"]  # it has a step 6 of its own by now, removed


def test_after_a_fall_back_the_newest_whole_checkpoint_stays(tmp_path: Path, whole, caplog):
    """A damaged step 10 must not count as the one that --keep 1 keeps."""
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(model(), Stopped(10), replace(KEEP_1, keep=9), run, quiet=True)
    for step in (6, 8):
        shutil.rmtree(checkpoint.folder_of(run, step))
    flip(checkpoint.folder_of(run, 10) / "optimizer.safetensors")
    with pytest.raises(Interrupted):
        train(model(), Stopped(6), KEEP_1, run, resume=True, quiet=True)
    assert "optimizer.safetensors is damaged" in caplog.text and "continuing from step 4" in caplog.text
    assert names(run) == ["step-00000006", "step-00000010"]
    assert same(resumed(run), whole) and names(run) == ["step-00000012"]


@pytest.mark.parametrize("damage", ["{}", "unlisted", "state", "model", "missing"])
def test_a_damaged_checkpoint_of_any_kind_falls_back(tmp_path: Path, damage: str, caplog):
    with pytest.raises(Interrupted):
        train(model(), Stopped(4), replace(KEEP_1, keep=2, ema=0.9), tmp_path, resume=False, quiet=True)
    newest = checkpoint.folder_of(tmp_path, 4)
    manifest = json.loads((newest / "manifest.json").read_text())
    if damage == "{}":
        (newest / "manifest.json").write_text("{}")
    elif damage == "missing":
        (newest / "average.safetensors").unlink()
    elif damage == "state":
        flip(newest / "state.json")
    else:
        manifest.pop("average.safetensors" if damage == "unlisted" else "model.safetensors")
        (newest / "manifest.json").write_text(json.dumps(manifest))
    found = checkpoint.history(tmp_path)
    assert found.resumable == (2,) and found.damaged and len(found.notes) == 1
    trainer = Trainer(model(), Copying(), replace(KEEP_1, ema=0.9), tmp_path, quiet=True)
    trainer.restore()
    assert trainer.step == 2 and "continuing from step 2" in caplog.text


def test_an_optimizer_that_was_about_to_be_removed_is_not_read(tmp_path: Path):
    """Its process was killed between the manifest without it and its removal: the weights are whole."""
    stopped(tmp_path, 4)
    folder = checkpoint.folder_of(tmp_path, 4)
    kept = (folder / "optimizer.safetensors").read_bytes()
    checkpoint.drop_optimizer(folder)
    (folder / "optimizer.safetensors").write_bytes(kept)
    assert checkpoint.history(tmp_path).weights == (4,) and not checkpoint.load_state(folder).optimizer


def test_a_run_that_begins_again_says_so(tmp_path: Path, whole, caplog):
    """It was killed after its first step, before its first checkpoint: there is nothing to continue from."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")  # which marks a run as begun
    Metrics(run, 0).add(step=1, loss=3.0)
    assert same(resumed(run), whole)
    assert [record.message for record in caplog.records] == [
        f"{run}: it was ended before its first checkpoint; begins again at step 1"
    ]


# ---- a step that is saved twice ------------------------------------------------------------------------------------


def killed_at(number: int, in_one: bool, run: Path) -> bool:
    """Save step 4 again in a process that is killed before its n-th change of a name; whether it was."""
    child = os.fork()
    if not child:
        left = iter(range(number))

        def deadly(call):
            def wrapped(*args, **more):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **more)

            return wrapped

        try:
            files._exchange = deadly(files._exchange) if in_one else lambda one, other: False
            os.rename, os.replace, shutil.rmtree = deadly(os.rename), deadly(os.replace), deadly(shutil.rmtree)
            trainer = Trainer(model(), Copying(), KEEP_1, run, quiet=True)
            trainer.restore()
            trainer.saved_step = None
            trainer.save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("in_one", [True, False])
def test_a_kill_while_a_step_is_saved_again_loses_nothing(tmp_path: Path, in_one: bool):
    """With --keep 1 there is no other checkpoint. Once it was moved aside, and nobody looked for it."""
    stopped(tmp_path / "run", 4)
    kills = 0
    while killed_at(kills, in_one, tmp_path / "run"):
        kills += 1
        checkpoint.prepare(tmp_path / "run", resume=True)
        assert names(tmp_path / "run") == ["step-00000004"] and checkpoint.history(tmp_path / "run").resumable == (4,)
    assert kills >= 3


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoint, "save_state", lambda run, state: saved.append(state.step))
    with pytest.raises(Interrupted):
        train(model(), Stopped(4), KEEP_1, tmp_path, quiet=True)
    assert saved == [2, 4]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_without_a_word(tmp_path: Path, whole):
    run = tmp_path / "run"
    stopped(run, 4)
    shutil.rmtree(run / "checkpoints")
    (run / "config.yaml").write_text("begun: true")
    with pytest.raises(CheckpointError, match=r"although there was one: metrics.jsonl ends at step 4"):
        resumed(run)
    kept = [json.dumps(line) for line in read_metrics(run) if line["step"] <= 2]
    (run / "metrics.jsonl").write_text("\n".join(kept))  # killed before the first checkpoint, at step 2, was saved
    assert same(resumed(run), whole)


# ---- the rest of a run's folder ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("values")
    rows = {"data": [*tiny.english(20), *tiny.chinese(20)], "eval": tiny.english(4, seed=1)}
    files = {name: str(tiny.write_jsonl(folder / f"{name}.jsonl", some)) for name, some in rows.items()}
    return {
        **files, "task": "title", "model": str(tiny.bert(folder / "bert")), "max_target": 8, "steps": 4,
        "batch_tokens": 64, "eval_every": 2, "keep": 1, "precision": "fp32",
    }  # fmt: skip


@contextmanager
def asked_to_stop(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    learn = Trainer._learn

    def learning(self, batches):
        if self.step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_learn", learning)
        yield


@pytest.fixture(scope="module")
def run_of_3(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 3 of 4."""
    run, patch = tmp_path_factory.mktemp("run") / "run", pytest.MonkeyPatch()
    with asked_to_stop(patch, 3), pytest.raises(Interrupted):
        driver.start(Plan.from_dict(values), run, quiet=True)
    return run


@pytest.fixture
def run(run_of_3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_of_3, tmp_path / "run"))


@pytest.fixture(scope="module")
def final(run_of_3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run."""
    run = Path(shutil.copytree(run_of_3, tmp_path_factory.mktemp("final") / "run"))
    driver.resume(run, quiet=True)
    return run


def test_damage_to_what_a_run_began_with_is_refused(run: Path, values: dict[str, Any]):
    """Every file of start/, and config.yaml, one flipped bit each."""
    damaged = [*sorted((run / "start").iterdir()), run / "config.yaml"]
    assert len(damaged) >= 6
    for file in damaged:
        before = file.read_bytes()
        flip(file, bit=1)
        with pytest.raises(CheckpointError):
            driver.resume(run, quiet=True)
        file.write_bytes(before)
    (run / "start" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lists no files"):
        driver.resume(run, quiet=True)
    shutil.rmtree(run / "start")
    save_model(load(values["model"]), None, run / "start")  # whole, but another one
    with pytest.raises(CheckpointError, match="not the model that this run began with"):
        driver.resume(run, quiet=True)


def test_config_yaml_that_was_edited_is_refused(run: Path, cli):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("# a comment changes nothing\n" + text)
    assert cli("verify", run).code == 0
    (run / "config.yaml").write_text(text.replace("seed: 1", "seed: 2"))
    for words in (("finetune", "--resume", "--out", run), ("verify", run)):
        ran = cli(*words)
        assert ran.code == 4 and "config.yaml: damaged, or changed since the run began" in ran.err


def test_garbage_in_the_records_of_a_run_does_not_block_it(run: Path, final: Path, caplog):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe garbage\n[1, 2]\n{"step": "x"}\n{"step": 2, "loss": "high"}\n' + b"[" * 5000)
    driver.resume(run, quiet=True)
    expected = (final / "final" / "model.safetensors").read_bytes()
    assert (run / "final" / "model.safetensors").read_bytes() == expected
    for garbage in (b"\xff{", b"[]", b""):
        (run / "result.json").write_bytes(garbage)
        result = driver.resume(run, quiet=True)
        assert result["steps"] == 4 and result["final"] == str(run / "final") and "made again" in caplog.text
        assert driver.resume(run, quiet=True) == result


@pytest.mark.parametrize("content", ["{", '{"final": 5}', '{"final": "x", "steps": 4, "metrics": {"loss": []}}'])
def test_a_finished_run_with_a_damaged_result_is_reported(final: Path, tmp_path: Path, cli, content: str):
    """Also one that is JSON, but no result; and with it a line of metrics that has no number."""
    run = Path(shutil.copytree(final, tmp_path / "run"))
    (run / "result.json").write_text(content)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval_loss": [1], "eval_rouge_l": 0.5}\n')
    ran = cli("finetune", "--resume", "--out", run)
    assert ran.code == 0 and "4 steps\nlast evaluation: rouge_l 0.5\n" in ran.out and "result.json: damaged" in ran.err


def test_a_finished_run_with_a_damaged_model_is_made_again(final: Path, tmp_path: Path, caplog):
    """Once it said "finished". A flipped bit in its weights, or its manifest; then the whole folder removed."""
    run = Path(shutil.copytree(final, tmp_path / "run"))
    expected = {file.name: file.read_bytes() for file in (run / "final").iterdir()}
    assert len(expected) >= 6
    for name in ("model.safetensors", "manifest.json", None):
        caplog.clear()
        if name is None:
            shutil.rmtree(run / "final")
        else:
            flip(run / "final" / name, bit=1)
        result = driver.resume(run, quiet=True)
        assert result["steps"] == 4 and result["final"] == str(run / "final")
        assert {file.name: file.read_bytes() for file in (run / "final").iterdir()} == expected
        assert "final: made again from the checkpoints" in caplog.text and not (run / "start").exists()
        assert name is None or ("moved to final.damaged" in caplog.text and (run / "final.damaged" / name).is_file())
        caplog.clear()
        assert driver.resume(run, quiet=True) == result and not caplog.text


def test_a_damaged_model_that_cannot_be_made_again_stays(
    final: Path, values: dict[str, Any], tmp_path: Path, monkeypatch, cli
):
    run = Path(shutil.copytree(final, tmp_path / "run"))
    flip(run / "final" / "model.safetensors")
    damaged = (run / "final" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:  # the model that it began with is another one by now
        patch.setattr(Plan.from_dict(values).job.__class__, "begin", lambda *_: (None, load(values["model"])))
        ran = cli("finetune", "--resume", "--out", run)
    assert (
        ran.code == 4
        and "model.safetensors is damaged" in ran.err
        and "not the model that this run began with" in ran.err
    )
    flip(run / "checkpoints" / "step-00000004" / "model.safetensors")
    ran = cli("finetune", "--resume", "--out", run)
    assert ran.code == 4 and "model.safetensors is damaged" in ran.err and "no checkpoint is whole either" in ran.err
    assert "finished" not in ran.err and (run / "final" / "model.safetensors").read_bytes() == damaged
    assert sorted(item.name for item in run.iterdir()) == sorted(item.name for item in final.iterdir())


def test_a_changed_number_in_metrics_is_noticed(run: Path, final: Path, caplog, cli):
    """It is valid JSON still: only the checksum in the checkpoint tells."""
    file = run / "metrics.jsonl"
    text = file.read_text()
    first = json.loads(text.splitlines()[0])
    file.write_text(text.replace(str(first["loss"]), str(first["loss"] + 1), 1))
    ran = cli("verify", run)
    assert ran.code == 4 and "metrics.jsonl" in ran.out and "damaged: its beginning" in ran.out
    driver.resume(run, quiet=True)
    assert "metrics.jsonl: damaged" in caplog.text and "The weights do not depend on it" in caplog.text
    same_weights = (final / "final" / "model.safetensors").read_bytes()
    assert (run / "final" / "model.safetensors").read_bytes() == same_weights
    assert cli("verify", run).code == 0  # as it is now


def test_metrics_that_are_whole_or_longer_are_not_mentioned(run: Path, caplog):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step')  # killed after step 4, before its checkpoint
    driver.resume(run, quiet=True)
    assert "metrics.jsonl" not in caplog.text and [line["step"] for line in read_metrics(run)] == [1, 2, 2, 3, 4, 4]
    run.joinpath("metrics.jsonl").unlink()
    assert files.beginning_problem(run / "metrics.jsonl", {"bytes": 3, "sha256": ""}) == "missing"


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "checkpoints/step-00000002/state.json"])
def test_a_pipe_or_a_broken_link_in_a_run_is_refused_and_not_waited_for(run: Path, cli, name: str):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    ran = cli("finetune", "--resume", "--out", run)
    assert ran.code == CheckpointError.exit_code and f"{name}: a pipe, not a file" in ran.err
    if name == "metrics.jsonl":
        ran = cli("verify", run)
        assert ran.code == CheckpointError.exit_code and "a pipe, not a file" in ran.out
    (run / name).unlink()
    (run / name).symlink_to(Path(name).name)
    ran = cli("finetune", "--resume", "--out", run)
    assert ran.code == CheckpointError.exit_code and f"{name}: a link that leads nowhere" in ran.err


def test_a_finished_model_with_a_pipe_in_it_is_refused(final: Path, tmp_path: Path, cli):
    run = shutil.copytree(final, tmp_path / "run")
    (run / "final" / "manifest.json").unlink()
    os.mkfifo(run / "final" / "manifest.json")
    ran = cli("finetune", "--resume", "--out", run)
    assert ran.code == CheckpointError.exit_code and "manifest.json: a pipe, not a file" in ran.err
    files.sync(run / "final" / "manifest.json")  # which once waited for a writer


def test_leftovers_are_removed_by_the_next_run(run: Path, values: dict[str, Any], tmp_path: Path):
    def litter(folder: Path) -> None:
        for name in (f".final.{DEAD}.partial", f"..final.{DEAD}.partial.{DEAD}.partial", f".start.{DEAD}.partial"):
            (folder / name).mkdir(parents=True)
        (folder / f".result.json.{DEAD}.partial").write_text("{")
        (folder / ".lock").write_text(f"process {DEAD} on nowhere")

    litter(run)
    (run / "checkpoints" / ".step-00000004.partial").mkdir()
    driver.resume(run, quiet=True)
    litter(tmp_path / "new")
    driver.start(Plan.from_dict(values), tmp_path / "new", quiet=True)
    assert not [path for folder in (run, tmp_path / "new") for path in folder.rglob(".*")]


def test_leftovers_of_a_finished_run_are_removed(run: Path):
    """A process that is killed while it removes what a finished run does not need."""
    result = driver.resume(run, quiet=True)
    step = next((run / "checkpoints").glob("step-*"))
    for name in (f".start.{DEAD}.partial", f"checkpoints/.{step.name}.{DEAD}.partial"):
        (run / name).mkdir()
    (step / f".manifest.json.{DEAD}.partial").write_text("{")
    with files.locked(run):  # another process may be about to do so
        assert driver.resume(run, quiet=True) == result
    assert driver.resume(run, quiet=True) == result and not list(run.rglob(".*"))


def test_two_processes_cannot_work_in_one_folder(run: Path, values: dict[str, Any], tmp_path: Path):
    with files.locked(run), pytest.raises(ResourceError, match=rf"process {os.getpid()} on .* is working there"):
        driver.resume(run, quiet=True)
    with files.locked(tmp_path / "new"), pytest.raises(ResourceError, match="is working there"):
        driver.start(Plan.from_dict(values), tmp_path / "new", quiet=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_best_checkpoint_that_is_damaged_is_replaced_by_the_last_aloud(tmp_path: Path, caplog):
    class Damaging(Copying):
        def evaluate(self, made, step):
            if step == 12:
                flip(checkpoint.folder_of(tmp_path, 4) / "model.safetensors")
            return super().evaluate(made, step)

    made = model()
    result = train(made, Damaging(scores=[3.0, 2.0, 1.0]), FAST, tmp_path, quiet=True)
    assert result.best_step == 12 and "the weights of step 12 are kept instead" in caplog.text
    assert same(weights(made), checkpoint.load_state(checkpoint.folder_of(tmp_path, 12)).model)


# ---- models --------------------------------------------------------------------------------------------------------


def test_a_damaged_model_is_not_loaded(final: Path, tmp_path: Path, monkeypatch, caplog):
    folder = Path(shutil.copytree(final / "final", tmp_path / "final"))
    load(folder)
    for file in sorted(folder.iterdir()):
        before = file.read_bytes()
        flip(file)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            load(folder)
        file.write_bytes(before)
    (folder / "manifest.json").write_text('{"config.json": "0"}')
    monkeypatch.setattr("allmask.model.VERIFIED", 10)  # bytes: this one is too large for that
    with caplog.at_level("INFO", "allmask"):
        load(folder)
    assert "loaded without comparing checksums; allmask verify does that" in caplog.text


def test_a_model_saved_over_another_loses_its_old_checksums(final: Path, tmp_path: Path):
    folder = Path(shutil.copytree(final / "final", tmp_path / "final"))
    made = load(folder)
    made.body.embedding.tokens.weight.data += 1
    made.save(folder)
    assert torch.equal(load(folder).body.embedding.tokens.weight, made.body.embedding.tokens.weight)


# ---- memory and disks ----------------------------------------------------------------------------------------------


MESSAGES = {
    "cpu": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "windows": "DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes.",
    "cuda": "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 22.03 GiB of which 1.2 GiB",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
}


@pytest.mark.parametrize("kind", [*MESSAGES, "cuda class", "python", "real"])
def test_out_of_memory_says_which_options_help(tmp_path: Path, kind: str):
    def fail():
        if kind == "real":
            torch.empty(1 << 50)
        raise {"cuda class": torch.OutOfMemoryError(MESSAGES["cuda"]), "python": MemoryError()}.get(kind) or (
            RuntimeError(MESSAGES[kind])
        )

    class Huge(Copying):
        def batch(self, numbers, epoch):
            fail()

    with pytest.raises(ResourceError) as caught:
        train(model(), Huge(), FAST, tmp_path, quiet=True)
    hint = caught.value.hint or ""
    assert caught.value.exit_code == 5 and caught.value.message.startswith("out of memory")
    assert ("8.00 GiB more were needed" in caught.value.message) == (kind in ("cpu", "windows", "cuda", "cuda class"))
    assert "--batch-tokens (now 60)" in hint
    assert all(f"--{name}" in hint for name in ("accumulate", "recompute", "shard"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_a_model_for_which_memory_is_short_is_not_called_damaged(tmp_path: Path):
    """In a process that may take 40 MB more: its file has 64 MB, and is mapped as a whole."""
    from safetensors.torch import save_file

    from allmask.checkpoints.formats.weights import open_weights

    def opened() -> str:
        limit_memory(40 << 20)
        try:
            open_weights(tmp_path / "model.safetensors")["x"].load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "read"

    save_file({"x": torch.zeros(4096, 4096)}, tmp_path / "model.safetensors")
    words = forked(opened)
    assert words.startswith("ResourceError: ") and "not enough memory to read it" in words and "damaged" not in words


def test_other_errors_are_not_about_memory(tmp_path: Path):
    class Wrong(Copying):
        def batch(self, numbers, epoch):
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        train(model(), Wrong(), FAST, tmp_path, quiet=True)


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system refuses to write more, as a full disk does."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
@pytest.mark.parametrize("what", ["checkpoint", "metrics", "model", "tokens", "config"])
def test_a_full_disk_is_a_resource_error_and_the_old_state_stays(
    tmp_path: Path, what: str, final: Path, values: dict[str, Any]
):
    folder = tmp_path / "there"
    texts = tmp_path / "text.txt"
    texts.write_text("".join(f"红色 the box {n}\n" for n in range(4000)), encoding="utf-8")
    if what in ("checkpoint", "metrics"):
        stopped(folder, 4)
    elif what == "model":
        shutil.copytree(final / "final", folder)
    made, tokenizer = load(final / "final"), train_tokenizer(Texts([texts]), "wordpiece", 60)
    before = tree(folder) if folder.exists() else {}
    calls = {
        "checkpoint": lambda: resumed(folder),
        "metrics": lambda: list(map(lambda n, to: to.add(step=5, loss=n), range(99), repeat(Metrics(folder, 4)))),
        "model": lambda: made.save(folder),
        "tokens": lambda: prepare([texts], tokenizer, folder),
        "config": lambda: driver.start(Plan.from_dict(values), folder, quiet=True),
    }
    with small_disk(1500 if what in ("config", "metrics") else 5000), pytest.raises(ResourceError) as caught:
        calls[what]()
    assert caught.value.exit_code == 5 and os.strerror(errno.EFBIG) in caught.value.message
    after = tree(folder) if folder.exists() else {}
    kept = [name for name in before if not name.endswith("metrics.jsonl")]
    assert all(after[name] == before[name] for name in kept)
    if what in ("checkpoint", "metrics"):
        assert checkpoint.history(folder).resumable == (4,) and read_metrics(folder)
        resumed(folder)
    if what == "tokens":
        assert prepare([texts], tokenizer, folder).sentences == 4000
    if what == "config":
        driver.start(Plan.from_dict(values), folder, quiet=True)


# ---- signals, bad steps, pipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once_with_its_code(tmp_path: Path, number: int, code: int):
    class Impatient(Stopped):
        def evaluate(self, made, step):
            super().evaluate(made, step)
            super().evaluate(made, step)

    with pytest.raises(SystemExit) as caught:
        train(model(), Impatient(4, number), KEEP_1, tmp_path, quiet=True)
    assert caught.value.code == code and names(tmp_path) == ["step-00000002"]


def test_a_skipped_step_is_mentioned(tmp_path: Path, caplog):
    made = model()
    train(made, Spoiled(made, {3, 4}), replace(FAST, steps=6), tmp_path, quiet=True)
    said = [record.message for record in caplog.records]
    assert said == [f"step {n}: the gradient was not finite; skipped, no weight was changed" for n in (3, 4)]


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.txt", "/dev/zero", "/dev/null"])
@pytest.mark.parametrize("command", ["finetune", "pretrain"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path, cli, name: str, command: str):
    path = Path(name) if name.startswith("/") else tmp_path / name
    if not path.exists():
        os.mkfifo(path)
    start = ("--task", "title") if command == "finetune" else ("--from", "minilm")
    ran = cli(command, *start, "--data", path, "--out", tmp_path / "run")
    assert ran.code == DataError.exit_code and ("a pipe, not" in ran.err or "a device, not" in ran.err)
    assert not (tmp_path / "run").exists()
