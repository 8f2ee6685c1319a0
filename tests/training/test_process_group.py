"""Several processes: they compute what one computes, go on where others stopped, and survive the death of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from allmask.data import Batch, Texts
from allmask.data.corpus import prepare
from allmask.data.windows import Windows
from allmask.errors import ResourceError, UsageError
from allmask.model import Model, load
from allmask.objectives import Mixture, Vocabulary, losses_of
from allmask.presets import bert_base
from allmask.runs.pretraining import RowWorkload
from allmask.text import Tokenizer, train_tokenizer
from allmask.training import checkpoint as runs
from allmask.training.loop import divided, share_of
from allmask.training.process_group import attempt
from tests import tiny
from tests.training.group_member import do_all

ROOT = Path(__file__).parents[2]
MEMBER = Path(__file__).with_name("group_member.py")
STEPS = 6
MIXTURE = "mlm,causal,nsp,permutation"
TORCHRUN = ["-m", "torch.distributed.run", "--shutdown-timeout=60"]


def torchrun(*words: str | Path, python: str, **more: str) -> list[str]:
    """A command line; `more` are options of torchrun."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    return [python, *TORCHRUN, "--standalone", *options, *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"} | more


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    """`command` begins with a Python, which torchrun starts its processes with, too."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(PYTHON_EXEC=command[0], **more), **pipes)


def end(*started: subprocess.Popen[str], expect: int = 0, timeout: float = 600) -> str:
    """What commands say. One that takes too long is asked to end, so that torchrun takes its processes with it."""
    try:
        said = "\n".join(process.communicate(timeout=timeout)[0] for process in started)
    finally:
        for process in started:
            process.terminate()
            process.wait(30)
    assert [process.returncode for process in started] == [expect] * len(started), said
    return said


@contextmanager
def first_of_two() -> Iterator[dict[str, str]]:
    """Let this process be the first of two, without torchrun; yields what the other one needs in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**both, "RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}.items():
            patch.setenv(name, value)
        yield {**both, "RANK": "1"}


def do_with_another(jobs: list[dict[str, Any]], file: Path, python: str) -> None:
    """Do jobs in this process and in another one. Of several, one that is stopped keeps its handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with first_of_two() as others:
        other = start([python, str(MEMBER), str(write_jobs(file, jobs))], **others)
        try:
            do_all(jobs)
        except BaseException as error:
            other.kill()
            raise AssertionError(other.communicate()[0]) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    end(other)


def write_jobs(path: Path, jobs: Any) -> Path:
    path.write_text(json.dumps(jobs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("group")
    records = [*tiny.english(30), *tiny.chinese(30)]
    texts = [f"{record['source']}\n{record['target']}" for record in records]
    (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    train_tokenizer(Texts([folder / "text.txt"]), "wordpiece", 120).save(folder / "tokenizer")
    return folder


def recipe_of(place: Path, objective: str = "mlm", **more: Any) -> dict[str, Any]:
    """Batches so small that some hold fewer texts than there are processes; no dropout, which would tell them apart."""
    values = {
        "data": [str(place / "text.txt")], "tokenizer": str(place / "tokenizer"), "preset": "bert-tiny",
        "objective": objective, "width": 16, "heads": 2, "max_positions": 32, "length": 24, "held_out": 0.1, "lr": 0.01,
        "steps": STEPS, "batch_tokens": 24, "accumulate": 3, "precision": "fp32", "dropout": 0.0, "eval_every": 3,
        "save_every": 2, "keep": 9, "patience": 9,
    }  # fmt: skip
    return values | more


TASKS = ("title", "classify", "translate")
# Titles by two processes are compared where they are stopped and resumed
COMPARED = {"copied": ("mlm", "mixture", "pairs", "classify", "translate"), "sharded": ("mlm", "translate")}


def task_of(place: Path, task: str) -> dict[str, Any]:
    """A task to fine-tune for; translation is learnt from scratch. Some batches hold fewer texts than processes."""
    rows = [*tiny.english(24), *tiny.chinese(24)]
    if task == "classify":
        rows = [{"text": row["source"], "label": "中文" if row["source"] > "z" else "english"} for row in rows]
    files = {"data": rows[::2], "eval": rows[1::6]}
    values: dict[str, Any] = {"task": task, "precision": "fp32", "dropout": 0.0, "lr": 0.01, "steps": STEPS}
    values |= {"batch_tokens": 40, "accumulate": 2, "eval_every": 3, "save_every": STEPS, "keep": 9}
    for name, some in files.items():
        values[name] = str(tiny.write_jsonl(place / f"{task}-{name}.jsonl", some))
    if task != "classify":
        values["max_target"] = 8
    if task == "translate":
        return values | {"preset": "transformer-small", "layers": 1, "width": 16, "heads": 2, "vocab_size": 80}
    return values | {"model": str(tiny.bert(place / f"{task}-bert"))}


# ---- one batch, several processes ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True), st.integers(1, 12))
def test_rows_are_divided_between_all_and_each_counts_once(numbers, size):
    hands = [divided(numbers, rank, size) for rank in range(size)]
    kept = [number for hand, weight in hands if weight for number in hand]
    assert sorted(kept) == sorted(numbers) and all(len(hand) for hand, _ in hands)
    sizes = [len(hand) for hand, weight in hands if weight]
    assert len(sizes) == min(size, len(numbers)) and max(sizes) - min(sizes) <= 1


@pytest.fixture(scope="module")
def work(place: Path) -> Callable[[str], RowWorkload]:
    corpus = prepare([place / "text.txt"], Tokenizer.load(place / "tokenizer"), place / "tokens")

    def make(objective: str) -> RowWorkload:
        tokenizer = Tokenizer.load(place / "tokenizer")
        made = Mixture.parse(objective)
        return RowWorkload(made.build(Vocabulary.of(tokenizer)), Windows(corpus, 12), 5, made.frame)

    return make


def texts_of(batch: Batch, numbers: Sequence[int]) -> dict[int, list[Any]]:
    """All that is known of each sample of a batch."""
    found = {}
    for place, number in enumerate(numbers):
        mine = batch.mask.group == place
        values = [batch.ids, batch.labels, batch.segments, batch.mask.order, batch.mask.position]
        related = None if batch.relations is None else int(batch.relations[place])
        found[int(number)] = [batch.name, batch.query, related, *(value[mine].tolist() for value in values)]
    return found


@pytest.mark.parametrize(
    "objective", ["mlm", "nsp", "causal", "permutation", "prefix", "unilm", "unilm,mlm,nsp,causal"]
)
def test_each_process_makes_its_rows_as_they_are_in_the_whole_batch(work: Callable[[str], RowWorkload], objective: str):
    """Also what is drawn for a whole batch: which objective it gets, and which of unilm's four orders."""
    rows = work(objective)
    for epoch, batch_numbers in enumerate([[3, 1, 4], [5, 9, 2, 6, 8], [7], list(range(20)), [0, 11]]):
        whole = texts_of(rows.batch(batch_numbers, epoch), batch_numbers)
        shares = [share_of(rows, batch_numbers, epoch, rank, 3) for rank in range(3)]
        hands = [divided(batch_numbers, rank, 3)[0] for rank in range(3)]
        parts = [texts_of(share.batch, hand) for share, hand in zip(shares, hands, strict=True)]
        assert {number: text for part in parts for number, text in part.items()} == whole


def test_losses_of_the_parts_add_up_to_those_of_the_batch(work: Callable[[str], RowWorkload], place: Path):
    rows, numbers = work("nsp"), [3, 1, 4, 15, 9]
    config = replace(bert_base(), **tiny.SMALL, vocab_size=Tokenizer.load(place / "tokenizer").size)
    model = Model.fresh(config, ["lm", "nsp"], torch.Generator().manual_seed(0)).eval()
    whole = losses_of(model, rows.batch(numbers, 0))
    parts = [losses_of(model, share_of(rows, numbers, 0, rank, 3).batch) for rank in range(3)]
    for name, (loss, count) in whole.items():
        assert sum(part[name][0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-5)
        assert sum(part[name][1] for part in parts) == count


# ---- who is there ----------------------------------------------------------------------------------------------


def names_of(store: Any, ranks: list[int], size: int) -> dict[int, str]:
    found: dict[int, str] = {}

    def meet(rank: int) -> None:
        found[rank] = attempt(store, rank, size, timedelta(seconds=20))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_attempt_has_a_name_of_its_own_that_all_know():
    store = HashStore()
    first, second = names_of(store, [0, 1, 2], 3), names_of(store, [2, 1, 0], 3)
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


def test_notes_of_an_attempt_that_died_are_not_believed():
    store = HashStore()
    names_of(store, [0, 1], 2)
    with pytest.raises(ResourceError, match="process 1 of 2 waited"):  # all are there, but from the time before
        attempt(store, 1, 2, timedelta(seconds=0.3))
    with pytest.raises(ResourceError, match="process 0 of 2 waited"):
        attempt(store, 0, 2, timedelta(seconds=0.3))
    assert len(set(names_of(store, [0, 1], 2).values())) == 1


def test_other_training_is_refused_by_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from allmask.training import Settings
    from allmask.training import train as train_model

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(UsageError, match="in one process"):
        train_model(None, None, Settings(), tmp_path / "run")  # type: ignore[arg-type]


# ---- two processes and one -------------------------------------------------------------------------------------


class Launched(NamedTuple):
    processes: list[subprocess.Popen[str]]
    jobs: Path
    out: Path


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, str] | str]:
    """Two network namespaces with a cable between them: the address of each, by the name of its end of the cable.

    Where they are not allowed, the reason.
    """
    names = {side: f"am{os.getpid()}{side}" for side in "ab"}
    commands = [
        *(f"netns add {name}" for name in names.values()),
        f"link add {names['a']} netns {names['a']} type veth peer name {names['b']} netns {names['b']}",
        *(f"-n {name} link set lo up" for name in names.values()),
        *(f"-n {name} addr add 10.77.0.{number}/24 dev {name}" for number, name in enumerate(names.values(), 1)),
        *(f"-n {name} link set {name} up" for name in names.values()),
    ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"network namespaces are not allowed here: {error}"
    else:
        yield {name: f"10.77.0.{number}" for number, name in enumerate(names.values(), 1)}
    for name in names.values():
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture(scope="module")
def launched(place: Path, python: str, hosts: dict[str, str] | str) -> Iterator[dict[str, Launched]]:
    """Runs with disasters. They begin before all other tests: most of their time they wait for one that is dead."""
    started = {}
    for kind, disasters in DISASTERS.items():
        out, jobs = disaster(place, f"{kind}-disaster", kind == "sharded", disasters)
        command = torchrun(MEMBER, jobs, nproc_per_node="2", max_restarts="2", python=python)
        started[kind] = Launched([start(command)], jobs, out)
    if isinstance(hosts, dict):
        out, jobs = disaster(place, "hosts", False, [STEP_3])
        first = next(iter(hosts.values()))
        both = []
        for name, address in hosts.items():
            options = [
                "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=job",
                f"--rdzv-endpoint={first}:29400", f"--local-addr={address}", f"--rdzv-conf=is_host={address == first}",
            ]  # fmt: skip
            command = [python, *TORCHRUN, *options, str(MEMBER), str(jobs)]
            both.append(start(command, GLOO_SOCKET_IFNAME=name, WARM_PYTHON_NETWORK=name))
        started["hosts"] = Launched(both, jobs, out)
    command = [*words_of(recipe_of(place), place / "stopped"), "--timeout", "0.2"]
    disasters = [{"attempt": 0, "rank": 0, "when": "save", "number": 4, "how": "stops"}]
    jobs = write_jobs(place / "stopped.json", {"command": command, "disasters": disasters})
    with first_of_two() as others:
        both = [start([python, str(MEMBER), str(jobs)], **(others | {"RANK": str(rank)})) for rank in (0, 1)]
    started["stopped"] = Launched(both, jobs, place / "stopped")
    disasters = [{"attempt": 0, "rank": 1, "when": "step", "number": 1, "how": "fails"}]
    command = {"command": words_of(recipe_of(place), place / "refused"), "disasters": disasters}
    failing = torchrun(MEMBER, write_jobs(place / "refused.json", command), nproc_per_node="2", python=python)
    started["refused"] = Launched([start(failing)], place / "refused.json", place / "refused")
    command = words_of(recipe_of(place) | {"data": [str(place / "nothing.txt")]}, place / "nowhere")
    failing = torchrun("-m", "allmask", *command, nproc_per_node="2", python=python)
    started["nowhere"] = Launched([start(failing)], place / "nothing.json", place / "nowhere")
    yield started
    with suppress(FileNotFoundError, ProcessLookupError):  # it has not been stopped, or has ended
        os.kill(int(Path(f"{started['stopped'].jobs}.stopped").read_text()), signal.SIGKILL)
    for process in (process for one in started.values() for process in one.processes):
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def runs_of_all(place: Path, python: str, launched: dict[str, Launched]) -> Path:
    """The same recipes run by two processes in two ways and by one, whole and in pieces: 2 → 1 → 2, and 2 → 2."""
    recipes = {
        "mlm": recipe_of(place, ema=0.9),
        MIXTURE: recipe_of(place, MIXTURE, accumulate=2, recompute=True, save_every=STEPS),
    }
    named = {"mlm": recipes["mlm"], "mixture": recipes[MIXTURE]}
    named["pairs"] = recipe_of(place, "mass", preset="transformer-small", layers=2, ffn_width=32, save_every=STEPS)
    named |= {task: task_of(place, task) for task in TASKS}
    shaken = recipe_of(
        place, dropout=0.1, save_every=STEPS
    )  # bit for bit also with it, if the number of processes stays the same

    def jobs(*rows: tuple[str, Any, dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"plan": recipe, "out": str(place / out), **more}
                for out, recipe, more in rows]  # fmt: skip

    first = [
        row
        for kind, how in {"copied": {"shard": False}, "sharded": {"shard": True}}.items()
        for row in [
            *((f"{name}-{kind}", named[name], {"log": True, **how}) for name in COMPARED[kind]),
            (f"{kind}-1-other", recipes["mlm"], {"stop": 1, **how}),
            (f"{kind}-title-other", named["title"], {"stop": 3, **how}),
            (f"{kind}-whole", shaken, how),
            (f"{kind}-again", shaken, {"stop": 2, **how}),
        ]
    ]
    do_all(jobs(*((f"{name}-1", recipe, {"log": True}) for name, recipe in named.items())))
    do_with_another(jobs(*first), place / "first.json", python)
    do_all(jobs(*((f"{kind}-1-other", None, {"stop": 3}) for kind in ("copied", "sharded"))))
    do_all(jobs(*((f"{kind}-title-other", None, {}) for kind in ("copied", "sharded"))))
    last = [
        ("copied-1-other", None, {"shard": True}), ("sharded-1-other", None, {"shard": False}),
        ("copied-again", None, {"shard": False}), ("sharded-again", None, {"shard": True}),
    ]  # fmt: skip
    do_with_another(jobs(*last), place / "last.json", python)
    return place


def curve(run_folder: Path) -> dict[str, list[float]]:
    """The numbers of a run by name, but those of its speed."""
    lines = tiny.read_jsonl(run_folder / "metrics.jsonl")
    names = {name for line in lines for name in line} - {"speed", "mfu"}
    return {name: [line[name] for line in lines if name in line] for name in names}


def assert_close(one: Path, other: Path, tolerance: float) -> None:
    ours, theirs = curve(one), curve(other)
    assert ours.keys() == theirs.keys() and len(ours["loss"]) == STEPS
    for name, values in ours.items():
        assert values == pytest.approx(theirs[name], abs=tolerance), name


def final(run_folder: Path) -> dict[str, torch.Tensor]:
    return load(run_folder / "final").state_dict()


@pytest.mark.parametrize(("kind", "objective"), [(kind, name) for kind in COMPARED for name in COMPARED[kind]])
def test_two_processes_compute_what_one_computes(runs_of_all: Path, kind: str, objective: str):
    one, two = runs_of_all / f"{objective}-1", runs_of_all / f"{objective}-{kind}"
    assert_close(one, two, 1e-4)
    weights, theirs = final(one), final(two)
    assert weights.keys() == theirs.keys()
    # A bias of keys adds the same to all scores of a query, so nothing depends on it: its gradient is rounding alone
    compared = [name for name in weights if objective in ("mlm", "mixture") or not name.endswith("key.bias")]
    assert all(torch.allclose(weights[name], theirs[name], atol=1e-4) for name in compared)
    if objective == "mixture":
        assert {"loss_mlm", "loss_causal", "loss_nsp", "loss_permutation"} <= curve(one).keys()


@pytest.mark.parametrize(
    ("kind", "objective"), [("copied", "mlm"), ("copied", "mixture"), ("copied", "classify"), ("sharded", "mlm")]
)
def test_they_see_the_samples_that_one_sees(runs_of_all: Path, kind: str, objective: str):
    made = STEPS * (3 if objective == "mlm" else 2)  # and a few ahead, for steps that never came
    alone = tiny.read_jsonl(runs_of_all / f"{objective}-1.0.jsonl")[:made]
    both = [tiny.read_jsonl(runs_of_all / f"{objective}-{kind}.{rank}.jsonl")[:made] for rank in (0, 1)]
    assert len(alone) == made
    assert [line["all"] for line in alone] == [line["all"] for line in both[0]] == [line["all"] for line in both[1]]
    for line, first, second in zip(alone, *both, strict=True):
        assert sorted(first["mine"] + second["mine"]) == sorted(line["all"])
    assert any(not line["mine"] for line in both[1]) and any(line["mine"] for line in both[1])


@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_resumed_by_one_and_then_again_by_two(runs_of_all: Path, kind: str):
    """DDP, alone, sharded; and sharded, alone, copied."""
    assert_close(runs_of_all / "mlm-1", runs_of_all / f"{kind}-1-other", 1e-5)
    weights, theirs = final(runs_of_all / "mlm-1"), final(runs_of_all / f"{kind}-1-other")
    assert all(torch.allclose(weights[name], theirs[name], atol=1e-5) for name in weights)
    assert_close(runs_of_all / "title-1", runs_of_all / f"{kind}-title-other", 1e-5)


@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_resumed_by_as_many_is_the_same_bit_for_bit(runs_of_all: Path, kind: str):
    whole, again = runs_of_all / f"{kind}-whole", runs_of_all / f"{kind}-again"
    assert curve(whole) == curve(again)
    files = [(folder / "final" / "model.safetensors").read_bytes() for folder in (whole, again)]
    assert files[0] == files[1]


def test_checkpoints_of_all_kinds_are_verified(runs_of_all: Path, cli: Any, tmp_path: Path):
    folder = runs_of_all / "sharded-1-other"
    kinds = {bool(list(found.glob("shard-*"))) for found in runs.checkpoints(folder)}
    assert kinds == {True, False}  # written by two, by one, and by two again
    ran = cli("verify", folder, "--json")
    assert ran.code == 0 and str(folder / "corpus") in ran.out
    shutil.copytree(runs_of_all / "mlm-sharded" / "checkpoints" / "step-00000002", tmp_path / "step")
    assert runs.verify(tmp_path / "step") is None
    shard = next((tmp_path / "step").glob("shard-00002-*"))
    shutil.copy(shard, tmp_path / "step" / "shard-00003-model-00001-of-00001.safetensors")
    assert "another checkpoint" in (runs.verify(tmp_path / "step") or "")
    shard.unlink()
    assert "missing" in (runs.verify(tmp_path / "step") or "")


def test_a_damaged_store_of_tokens_is_seen(runs_of_all: Path, cli: Any, tmp_path: Path):
    shutil.copytree(runs_of_all / "mlm-1", tmp_path / "run")
    tokens = tmp_path / "run" / "corpus" / "tokens.bin"
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    ran = cli("verify", tmp_path / "run")
    assert ran.code == 4 and "tokens.bin: damaged" in ran.out


# ---- disasters -------------------------------------------------------------------------------------------------


def words_of(recipe: dict[str, Any], out: Path) -> list[str]:
    told = [(f"--{name.replace('_', '-')}", value) for name, value in recipe.items() if name != "data"]
    flags = [word for name, value in told for word in (name, str(value))]
    return ["pretrain", *flags, "--data", *recipe["data"], "--out", str(out)]


STEP_3, SAVE_4 = {"rank": 1, "when": "step", "number": 3}, {"when": "save", "number": 4}
DISASTERS = {"copied": [{"rank": 0, **SAVE_4}], "sharded": [STEP_3, {"rank": 1, **SAVE_4}]}  # one an attempt


def disaster(place: Path, name: str, shard: bool, disasters: list[dict[str, Any]]) -> tuple[Path, Path]:
    """The run that two processes did not live to see the end of, and the jobs that say why."""
    command = words_of(recipe_of(place, ema=0.9), place / name) + (["--shard"] if shard else [])
    told = [{"attempt": number, **one} for number, one in enumerate(disasters)]
    return place / name, write_jobs(place / f"{name}.json", {"command": command, "disasters": told})


def assert_recovered(one: Path, out: Path, jobs: Path, disasters: int) -> None:
    """They did happen, and the run is nevertheless that of one process."""
    assert [Path(f"{jobs}.died-in-{number}").exists() for number in range(disasters + 1)] == [True] * disasters + [
        False
    ]
    assert_close(one, out, 1e-4)
    weights, theirs = final(one), final(out)
    assert all(torch.allclose(weights[name], theirs[name], atol=1e-4) for name in weights)
    assert not list((out / "checkpoints").glob(".*"))
    whole = {folder.name: runs.verify(folder) for folder in runs.checkpoints(out)}
    assert whole == {f"step-{step:08d}": None for step in (2, 3, 4, 6)}


@pytest.mark.parametrize("kind", DISASTERS)
def test_a_process_is_killed_in_a_step_or_while_saving(runs_of_all: Path, launched: dict[str, Launched], kind: str):
    """torchrun starts all again, and the run goes on from the newest checkpoint that is whole."""
    processes, jobs, out = launched[kind]
    said = end(*processes)
    assert_recovered(runs_of_all / "mlm-1", out, jobs, len(DISASTERS[kind]))
    assert said.count("error[") == len(DISASTERS[kind]), said  # of the one that was left


def test_what_stops_one_process_is_said_once(launched: dict[str, Launched]):
    said = end(*launched["refused"].processes, expect=1)
    assert said.count("error[") == said.count("error[data]: text.txt: process 1 cannot read this") == 1
    assert "exitcode  : 3" in said


def test_a_first_process_that_is_stopped_while_saving_ends_the_others(launched: dict[str, Launched]):
    """It neither dies nor answers, and it keeps the store of all. Once the others waited for a week."""
    (_, other), jobs, out = launched["stopped"]
    said = other.communicate(timeout=300)[0]
    assert Path(f"{jobs}.stopped").exists()
    assert other.returncode == 5 and "another process of this run has not answered for 12 s" in said, said
    assert runs.history(out).resumable == (3, 2)


def test_what_stops_the_first_before_the_others_begin_is_said_once(launched: dict[str, Launched]):
    processes, _, out = launched["nowhere"]
    said = end(*processes, expect=1)
    assert said.count("error[") == said.count("nothing.txt") == 1 and not out.exists()


# ---- two hosts -------------------------------------------------------------------------------------------------


def test_two_hosts_run_one_job_and_one_loses_a_process(
    runs_of_all: Path, hosts: dict[str, str] | str, launched: dict[str, Launched]
):
    """Only the host where a process died counts a restart; they find each other all the same."""
    if isinstance(hosts, str):
        pytest.skip(hosts)
    processes, jobs, out = launched["hosts"]
    end(*processes)
    assert_recovered(runs_of_all / "mlm-1", out, jobs, 1)
