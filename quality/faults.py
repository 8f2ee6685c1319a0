"""What happens to runs and models when something goes wrong: kills, damage, full disks, lost processes, hostile files.

    python quality/faults.py                         # all scenarios, at most 20 minutes; prints a table
    python quality/faults.py --quick --only kills    # a few trials of one scenario
    python quality/faults.py --write docs/reliability.md

Every trial is a real process with a tiny model in a folder below --out; nothing else on the machine is touched. A trial
is good if the run ends with the very weights of a run that nothing happened to, or if the command says in one error
message what is wrong, with the right exit code. Results are kept until the code changes: a second call makes only the
trials that are missing; --again begins anew. Needs Linux.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", MPLBACKEND="agg", GLOO_SOCKET_IFNAME="lo")
sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import numpy as np
import torch

from allmask import files
from allmask.cli.main import main as command_line
from allmask.data import Texts
from allmask.devices import usable_cores
from allmask.errors import AllmaskError
from allmask.files import sha256, write_atomically
from allmask.model import load
from allmask.runs import plan
from allmask.text import train_tokenizer
from allmask.training import checkpoint, loop, process_group
from tests import tiny

IMPORTED = (  # once: each process is a fork of this one
    "torch._dynamo", "torch.distributed", "torch.nn.parallel", "rouge_score.rouge_scorer", "typer.rich_utils",
    "pydantic", "zoneinfo", "allmask.cli.predict", "allmask.cli.evaluate", "allmask.cli.check", "allmask.cli.drift",
    "allmask.cli.tokenizer", "allmask.cli.embed", "allmask.cli.verify",
    "allmask.cli.finetune", "allmask.cli.pretrain", "allmask.runs.driver", "allmask.runs.finetuning",
    "allmask.runs.pretraining", "allmask.checkpoints.reader", "allmask.checkpoints.writer",
    "allmask.checkpoints.families.bert", "allmask.tasks.seq2seq",
)  # fmt: skip
STEPS, PATIENCE = 8, 120  # steps of a run; seconds after which a process counts as hanging
TIMEOUT = 0.1  # minutes: --timeout of several processes
MARK = "<!-- table of quality/faults.py -->"
ERRORS = (2, 3, 4, 5)  # exit codes of errors that say what is wrong


# ---- processes -------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    code: int | None  # None: it had to be ended; negative: by this signal
    said: str

    @property
    def refused(self) -> bool:
        """It ended with one error of ours, and no traceback."""
        return self.code in ERRORS and self.said.count("error[") == 1 and "Traceback" not in self.said


@dataclass
class Child:
    """A process that calls a function, started as a fork; what it prints goes to a file."""

    pid: int
    log: Path
    code: int | None = None

    @classmethod
    def start(cls, log: Path, do: Callable[[], int]) -> Child:
        pid = os.fork()
        if pid:
            return cls(pid, log)
        code = 1
        try:
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            plan.plot_run = lambda run: run / "loss.png"  # which takes longer than these runs
            loop.measured_peak = lambda dtype, device: 1.0  # which takes a third of them; only MFU depends on it
            process_group.STORE = 1
            os.fsync = lambda handle: None  # a process that is killed loses nothing that it has written
            code = do()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end, and end it if that takes too long."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.003)
        found = self.code
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        return Ended(found, self.log.read_text(errors="replace") if self.log.exists() else "")


def call(log: Path, *words: object, **environment: str) -> Child:
    """Start the command line."""

    def run() -> int:
        os.environ.update(environment)
        return command_line([str(word) for word in words])

    return Child.start(log, run)


# ---- runs ------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """A folder with data and models, the results of runs that nothing happened to, and the trials' own folders."""

    place: Path
    rng: random.Random
    quick: bool
    done: int = 0  # trials of the scenario that were made before

    @property
    def log(self) -> Path:
        return self.place / "log.txt"

    def words(self, kind: str, out: Path) -> list[object]:
        """The command line of a run: each step is saved, only one checkpoint is kept."""
        every = [
            "--steps", STEPS, "--save-every", 1, "--eval-every", 3, "--keep", 1, "--precision", "fp32", "--lr", 0.01,
            "--quiet", "--out", out,
        ]  # fmt: skip
        if kind == "finetune":
            data = ["--data", self.place / "train.jsonl", "--eval", self.place / "dev.jsonl", "--max-target", 8]
            return ["finetune", self.place / "bert", "--task", "title", *data, "--batch-tokens", 64, *every]
        shape = ["--preset", "bert-tiny", "--width", 16, "--heads", 2, "--max-positions", 32, "--length", 24]
        data = ["--data", self.place / "text.txt", "--tokenizer", self.place / "tokenizer", "--batch-tokens", 48]
        ema = ["--ema", 0.9] if kind == "averaged" else []
        return ["pretrain", *data, *shape, "--dropout", 0, *ema, *every]

    def prepare(self) -> None:
        """Make data and models in a process of its own: this one starts no threads."""
        if (self.place / "bert").is_dir():
            return

        def make() -> int:
            rows = [*tiny.english(24), *tiny.chinese(24)]
            tiny.write_jsonl(self.place / "train.jsonl", rows)
            tiny.write_jsonl(self.place / "dev.jsonl", tiny.english(4, seed=1))
            text = "\n\n".join(f"{row['source']}\n{row['target']}" for row in rows)
            (self.place / "text.txt").write_text(text, encoding="utf-8")
            train_tokenizer(Texts([self.place / "text.txt"]), "wordpiece", 120).save(self.place / "tokenizer")
            tiny.bert(self.place / "bert")
            return 0

        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        made = Child.start(self.log, make).wait()
        assert made.code == 0, made.said

    def reference(self, kind: str) -> dict[str, Any]:
        """The weights of a run that nothing happens to, and how long it takes."""
        file, out = self.place / f"whole-{kind}.json", self.place / f"whole-{kind}"
        if not file.is_file():
            shutil.rmtree(out, ignore_errors=True)
            started = time.monotonic()
            ended = call(self.log, *self.words(kind, out)).wait()
            assert ended.code == 0, ended.said
            file.write_text(json.dumps({"weights": weights_of(out), "seconds": time.monotonic() - started}))
        return json.loads(file.read_text())

    def fresh(self, name: str) -> Path:
        """An empty place for a run."""
        shutil.rmtree(self.place / name, ignore_errors=True)
        return self.place / name

    def stopped(self, kind: str) -> Path:
        """A run that was stopped after some steps; two checkpoints are there."""
        out = self.place / f"stopped-{kind}"
        if not out.exists():
            child = call(self.log, *[word if word != 1 else 2 for word in self.words(kind, out)])
            while not child.ended() and len(checkpoint.checkpoints(out)) < 2:
                time.sleep(0.002)
            child.send(signal.SIGTERM)
            child.wait()
            checkpoint.remove_unfinished(out)
        return out

    def goes_on(self, kind: str, out: Path) -> str | None:
        """Finish a run that was ended; return what is wrong, or None if the weights are those of the reference.

        One that had not begun is started again, by the same command.
        """
        resume = ["--resume"] if (out / "config.yaml").is_file() else []
        ended = call(self.log, *self.words(kind, out), *resume).wait()
        if ended.code != 0:
            return f"code {ended.code}: {ended.said[-300:]}"
        left = [str(item.relative_to(out)) for item in out.rglob(".*") if not item.name.endswith(".lock")]
        if left:
            return f"left behind: {left[:3]}"
        return None if weights_of(out) == self.reference(kind)["weights"] else "other weights"


def weights_of(out: Path) -> str:
    return sha256(out / "final" / "model.safetensors")


# ---- scenarios: each yields a trial at a time, as (None or what was wrong) -----------------------------------------

Trials = Iterator[str | None]


def kills(lab: Lab) -> Trials:
    """SIGKILL at a random moment, then the same command with --resume"""
    while True:
        for kind in ("finetune", "pretrain", "averaged"):
            out, most = lab.fresh("killed"), lab.reference(kind)["seconds"]
            child = call(lab.log, *lab.words(kind, out))
            time.sleep(lab.rng.uniform(0, most))
            child.send(signal.SIGKILL)
            child.wait()
            yield lab.goes_on(kind, out)


def changes(lab: Lab) -> Trials:
    """SIGKILL before each change of a file or folder"""
    points = {kind: _changes(lab, kind, None) for kind in ("finetune", "pretrain")}
    every = [(kind, number) for kind, count in points.items() for number in range(count)]
    for kind, number in every[:: 40 if lab.quick else 1][lab.done :]:
        _changes(lab, kind, number)
        problem = lab.goes_on(kind, lab.place / "changed")
        yield problem and f"{kind}, change {number}: {problem}"


def _changes(lab: Lab, kind: str, until: int | None) -> int:
    """Run until the n-th change within the run's folder, or to the end; return how many there were."""
    out, count = lab.fresh("changed"), lab.place / "count"
    names = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(args[1], str) and args[1][:1] in "wax"
        if (writes or event in names) and out.name in str(args[0]):
            if seen == until:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    def run() -> int:
        swap = files._exchange

        def exchange(one: Path, other: Path) -> bool:
            hook("os.rename", (str(one),))
            done = swap(one, other)
            hook("os.rename", (str(one),))
            return done

        files._exchange = exchange
        sys.addaudithook(hook)
        code = command_line([str(word) for word in lab.words(kind, out)])
        count.write_text(str(seen))
        return code

    Child.start(lab.log, run).wait()
    return int(count.read_text()) if until is None else until


def signals(lab: Lab) -> Trials:
    """SIGTERM or Ctrl-C at a random moment, once or twice: exit code 143 or 130, then --resume"""
    while True:
        for number, code, twice in ((15, 143, False), (2, 130, False), (15, 143, True)):
            kind = lab.rng.choice(["finetune", "pretrain"])
            out, most = lab.fresh("signalled"), lab.reference(kind)["seconds"]
            child = call(lab.log, *lab.words(kind, out))
            time.sleep(lab.rng.uniform(0.1, 1) * most)
            child.send(number)
            if twice:
                time.sleep(0.01)
                child.send(number)
            ended = child.wait()
            if ended.code not in (0, code, -number):  # it may have finished, or not have begun to train
                yield f"code {ended.code}: {ended.said[-300:]}"
            else:
                yield lab.goes_on(kind, out)


def _flipped(rng: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def _damaged_run(lab: Lab, kind: str, file: Path, damage: Callable[[Path], None]) -> str | None:
    """Damage a file of a stopped run and resume it: the right weights, or one error."""
    source, out = lab.stopped(kind), lab.fresh("damaged")
    shutil.copytree(source, out)
    damage(out / file)
    ended = call(lab.log, *lab.words(kind, out)[:1], "--resume", "--out", out, "--quiet").wait()
    if ended.refused or (ended.code == 0 and weights_of(out) == weights_of_stopped(lab, kind)):
        return None
    return f"{kind}: {file}: code {ended.code}: {ended.said[-300:] if ended.code else 'other weights'}"


def weights_of_stopped(lab: Lab, kind: str) -> str:
    """The weights of the stopped run, finished without damage."""
    done = lab.place / f"finished-{kind}"
    if not done.exists():
        shutil.copytree(lab.stopped(kind), done)
        ended = call(lab.log, *lab.words(kind, done)[:1], "--resume", "--out", done, "--quiet").wait()
        assert ended.code == 0, ended.said
    return weights_of(done)


def _files_of_runs(lab: Lab) -> list[tuple[str, Path]]:
    found = []
    for kind in ("finetune", "averaged"):
        source = lab.stopped(kind)
        weights_of_stopped(lab, kind)
        files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
        found += [(kind, file) for file in files if not file.name.startswith(".")]
    return found[:: 9 if lab.quick else 1]


def run_flips(lab: Lab) -> Trials:
    """A bit flipped in each file of a stopped run, then --resume"""
    for kind, file in (_files_of_runs(lab) * 4)[lab.done :]:
        yield _damaged_run(lab, kind, file, lambda path: _flipped(lab.rng, path))


def run_losses(lab: Lab) -> Trials:
    """Each file of a stopped run cut off, emptied, removed or replaced by garbage, then --resume"""
    damages: tuple[Callable[[Path], Any], ...] = (
        lambda path: os.truncate(path, lab.rng.randrange(path.stat().st_size + 1)),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(lab.rng.randbytes(200)),
    )
    for damage, (kind, file) in list(product(damages, _files_of_runs(lab)))[lab.done :]:
        yield _damaged_run(lab, kind, file, damage)


def finished_flips(lab: Lab) -> Trials:
    """A bit flipped in each file of a finished run's model, then --resume: it is made again, bit for bit"""
    for kind in ("finetune", "averaged"):
        expected = weights_of_stopped(lab, kind)
        source = lab.place / f"finished-{kind}"
        for file in sorted((source / "final").iterdir())[:: 9 if lab.quick else 1]:
            out = lab.fresh("damaged")
            shutil.copytree(source, out)
            _flipped(lab.rng, out / "final" / file.name)
            ended = call(lab.log, *lab.words(kind, out)[:1], "--resume", "--out", out, "--quiet").wait()
            if ended.code != 0 or "made again" not in ended.said:
                yield f"{kind}: {file.name}: code {ended.code}: {ended.said[-300:]}"
            else:
                yield None if weights_of(out) == expected else f"{kind}: {file.name}: other weights"


def model_flips(lab: Lab) -> Trials:
    """A bit flipped in each file of a model, then load(): an error, or the same model"""

    def trial() -> int:
        folder = lab.place / "finished-finetune" / "final"
        weights_of_stopped(lab, "finetune")
        expected, bad = load(folder).state_dict(), []
        shutil.rmtree(lab.place / "flipped", ignore_errors=True)
        copy = shutil.copytree(folder, lab.place / "flipped")
        for file in sorted(copy.iterdir()):
            for _ in range(1 if lab.quick else 60):
                before = file.read_bytes()
                _flipped(lab.rng, file)
                try:
                    found = load(copy)
                    same = found.state_dict().keys() == expected.keys() and all(
                        torch.equal(found.state_dict()[name], expected[name]) for name in expected
                    )
                    bad.append(None if same else f"{file.name}: another model")
                except files.CheckpointError:
                    bad.append(None)
                except Exception as error:
                    bad.append(f"{file.name}: {type(error).__name__}: {error}")
                file.write_bytes(before)
        (lab.place / "flips.json").write_text(json.dumps(bad))
        return 0

    weights_of_stopped(lab, "finetune")
    ended = Child.start(lab.log, trial).wait(300)
    if ended.code != 0:
        yield ended.said[-300:]
        return
    yield from json.loads((lab.place / "flips.json").read_text())


def full_disks(lab: Lab) -> Trials:
    """A disk that fills up at a random moment: exit code 5; with more space, --resume"""
    while True:
        for kind in ("finetune", "pretrain"):
            size = lab.rng.randrange(4, 60) * 4096
            lab.reference(kind)
            found = lab.place / "disk.json"
            found.unlink(missing_ok=True)
            ended = Child.start(lab.log, lambda kind=kind, size=size: _on_small_disk(lab, kind, size)).wait(300)
            yield json.loads(found.read_text()) if found.exists() else f"code {ended.code}: {ended.said[-300:]}"


def _on_small_disk(lab: Lab, kind: str, size: int) -> int:
    """In a name space of its own, with a file system in memory: run until it is full, enlarge it, and resume."""
    disk = lab.fresh("disk")
    disk.mkdir()
    system, flags = ctypes.CDLL(None, use_errno=True), {"user": 0x10000000, "mounts": 0x00020000, "again": 32}
    user, group = os.getuid(), os.getgid()
    if system.unshare(flags["user"] | flags["mounts"]):
        raise OSError(ctypes.get_errno(), "no name space of one's own is permitted here")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")

    def mount(more: int, size: int) -> None:
        if system.mount(b"faults", str(disk).encode(), b"tmpfs", more, f"size={size}".encode()):
            raise OSError(ctypes.get_errno(), "a file system in memory cannot be mounted here")

    mount(0, size)
    inner = lab.place / "inner.txt"
    ended = call(inner, *lab.words(kind, disk / "run")).wait()
    problem = None
    if not (ended.code == 0 or (ended.code == 5 and ended.refused)):
        problem = f"{kind}, {size} bytes: code {ended.code}: {ended.said[-300:]}"
    mount(flags["again"], 1 << 28)
    if problem is None:
        resume = ["--resume"] if (disk / "run" / "config.yaml").is_file() else []
        ended = call(inner, *lab.words(kind, disk / "run"), *resume).wait()
        if ended.code != 0:
            problem = f"{kind}, {size} bytes, with more space: code {ended.code}: {ended.said[-300:]}"
        elif weights_of(disk / "run") != lab.reference(kind)["weights"]:
            problem = f"{kind}, {size} bytes: other weights"
    (lab.place / "disk.json").write_text(json.dumps(problem))
    return 0


def _two(lab: Lab, out: Path, *more: object) -> list[Child]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [*lab.words("pretrain", out), "--timeout", TIMEOUT, *more]
    return [call(lab.place / f"log-{rank}.txt", *words, RANK=str(rank), **shared) for rank in (0, 1)]


def _lost(lab: Lab, number: int) -> Trials:
    """Send a signal to one of two processes; the other must end with an error, and both go on from there."""
    whole = lab.fresh("two-whole")
    ended = [child.wait() for child in _two(lab, whole)]
    if [one.code for one in ended] != [0, 0]:
        yield f"two processes: {ended}"
        return
    expected = weights_of(whole)
    while True:
        for rank in (0, 1):
            out = lab.fresh("two")
            both = _two(lab, out)
            until = lab.rng.randrange(1, STEPS)
            while not any(child.ended() for child in both) and not _reached(out, until):
                time.sleep(0.002)
            time.sleep(lab.rng.uniform(0, 0.05))  # in a step, or while saving
            both[rank].send(number)
            other = both[1 - rank].wait()
            both[rank].send(signal.SIGKILL)
            both[rank].wait()
            if not other.refused:
                yield f"process {rank}: the other one: code {other.code}: {other.said[-300:]}"
                continue
            ended = [child.wait() for child in _two(lab, out, "--resume")]
            if [one.code for one in ended] != [0, 0]:
                yield f"resumed: {ended}"
            else:
                yield None if weights_of(out) == expected else "other weights"


def _reached(out: Path, step: int) -> bool:
    return checkpoint.folder_of(out, step).exists() or (out / "final").exists()


def killed_ranks(lab: Lab) -> Trials:
    """One of two processes killed: the other ends with code 5, and both continue with --resume"""
    yield from _lost(lab, signal.SIGKILL)


def stopped_ranks(lab: Lab) -> Trials:
    """One of two processes stopped (SIGSTOP), the first one too: the other ends after --timeout, then --resume"""
    yield from _lost(lab, signal.SIGSTOP)


def locks(lab: Lab) -> Trials:
    """A second process in the same folder is refused; after SIGKILL of the first one it continues"""
    while True:
        out = lab.fresh("locked")
        first = call(lab.place / "first.txt", *lab.words("pretrain", out))
        while not first.ended() and not checkpoint.checkpoints(out):
            time.sleep(0.002)
        first.send(signal.SIGSTOP)
        second = call(lab.log, *lab.words("pretrain", out), "--resume").wait()
        first.send(signal.SIGKILL)
        first.wait()
        if not (second.code == 5 and f"process {first.pid} on " in second.said):
            yield f"code {second.code}: {second.said[-300:]}"
        else:
            yield lab.goes_on("pretrain", out)


def pipes(lab: Lab) -> Trials:
    """A pipe or a device in place of a file: refused at once"""
    pipe = lab.place / "pipe.jsonl"
    if not pipe.exists():
        os.mkfifo(pipe)
    final = lab.place / "finished-finetune"
    weights_of_stopped(lab, "finetune")
    commands: list[tuple[object, ...]] = [
        command
        for path in (pipe, Path("/dev/zero"), Path("/dev/null"))
        for command in (
            ("finetune", lab.place / "bert", "--task", "title", "--data", path, "--out", lab.place / "none"),
            ("pretrain", "--from", lab.place / "bert", "--data", path, "--out", lab.place / "none"),
            ("predict", final, path), ("evaluate", final, path), ("check", path, "--task", "title"),
            ("tokenizer", "train", path, "--out", lab.place / "none"), ("drift", path, lab.place / "text.txt"),
            ("embed", lab.place / "bert", path, "-o", lab.place / "none.npy"),
        )
    ]  # fmt: skip
    for words in commands[lab.done :]:
        ended = call(lab.log, *words).wait(60)
        yield None if ended.refused else f"{' '.join(map(str, words))}: code {ended.code}: {ended.said[-300:]}"


class Payload:
    """Unpickled carelessly, it calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _with_code(folder: Path, marker: Path) -> Iterator[Path]:
    """Write files that create `marker` when their code runs, one after another; yield what to open."""
    calls = [
        Payload(os.system, f"touch {marker}"), Payload(eval, f"open({str(marker)!r}, 'w')"),
        Payload(exec, f"open({str(marker)!r}, 'w')"), Payload(subprocess.call, ["touch", str(marker)]),
        Payload(os.mkdir, str(marker)), Payload(shutil.copy, __file__, str(marker)),
    ]  # fmt: skip
    model = folder / "pytorch_model.bin"
    for call in calls:
        for content in (call, {"embeddings.word_embeddings.weight": call}, {call: torch.zeros(1)}):
            for zipped in (True, False):
                torch.save(content, model, _use_new_zipfile_serialization=zipped)
                yield folder
            for protocol in (0, 2, 5):
                model.write_bytes(pickle.dumps(content, protocol))
                yield folder
        model.unlink()
        for protocol in (0, 2, 5):
            (folder / "mnist.pkl").write_bytes(pickle.dumps([(call, call)] * 3, protocol))
            yield folder / "mnist.pkl"
        objects = np.array([call], dtype=object)
        np.savez(folder / "images.npz", x_train=objects, y_train=objects)
        yield folder / "images.npz"


def hostile_files(lab: Lab) -> Trials:
    """Pickles and arrays with code in them; models without checksums, cut off or garbled: no code runs, no raw error"""
    from allmask.vision import datasets

    count = 12 if lab.quick else 1000

    def trial() -> int:
        folder, marker, bad = lab.fresh("hostile"), lab.fresh("code-ran"), []
        shutil.copytree(lab.place / "bert", folder)
        (folder / "model.safetensors").rename(lab.place / "hostile.safetensors")
        for path in _with_code(folder, marker):
            try:
                load(path) if path.is_dir() else datasets.read(path)
                bad.append(f"{path.name}: was read")
            except AllmaskError:
                bad.append("code ran" if marker.exists() else None)
            except Exception as error:
                bad.append(f"{path.name}: {type(error).__name__}: {error}")
            if lab.quick and len(bad) == count // 2:
                break
        shutil.rmtree(folder)
        shutil.copytree(lab.place / "bert", folder)
        files_of_model = sorted(file for file in folder.iterdir() if file.is_file())
        while len(bad) < count:
            file = files_of_model[len(bad) % len(files_of_model)]
            before = file.read_bytes()
            if lab.rng.random() < 0.5:
                file.write_bytes(before[: lab.rng.randrange(len(before))])
            else:
                for _ in range(lab.rng.randrange(1, 20)):
                    _flipped(lab.rng, file)
            try:
                load(folder)
                bad.append(None)  # another model, perhaps: nothing tells
            except AllmaskError:
                bad.append(None)
            except Exception as error:
                bad.append(f"{file.name}: {type(error).__name__}: {error}")
            file.write_bytes(before)
        (lab.place / "hostile.json").write_text(json.dumps(bad))
        return 0

    ended = Child.start(lab.log, trial).wait(300)
    if ended.code != 0:
        yield f"code {ended.code}: {ended.said[-300:]}"
        return
    yield from json.loads((lab.place / "hostile.json").read_text())


def bombs(lab: Lab) -> Trials:
    """Files that announce far more than they hold: refused, with little memory and time"""
    from tests import hostile

    opener = hostile.Opener()
    try:
        named = [lambda folder, make=make: make(folder) for make in hostile.BOMBS.values()]
        for number in range(lab.done, len(named) + 200):
            folder = lab.fresh("bomb")
            folder.mkdir()
            make = named[number] if number < len(named) else lambda folder: hostile.random_bomb(folder, lab.rng)
            path = make(folder)
            size = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
            happened = opener(path)
            few = happened.megabytes < max(100.0, 20 * size / 2**20) and happened.seconds < 10
            yield None if happened.refused and few else f"{path.name}: {str(happened)[:300]}"
            shutil.rmtree(folder)
            if happened.megabytes == float("inf"):  # its process ended
                opener.close()
                opener = hostile.Opener()
    finally:
        opener.close()


SCENARIOS: dict[str, tuple[Callable[[Lab], Trials], int, int]] = {  # trials, and those of --quick
    "kills": (kills, 60, 2), "signals": (signals, 24, 3),
    "run-flips": (run_flips, 160, 6), "run-losses": (run_losses, 160, 6),
    "finished-flips": (finished_flips, 100, 2), "model-flips": (model_flips, 1000, 1000),
    "full-disks": (full_disks, 24, 2), "killed-ranks": (killed_ranks, 24, 1), "stopped-ranks": (stopped_ranks, 16, 1),
    "locks": (locks, 12, 1), "pipes": (pipes, 24, 3), "hostile-files": (hostile_files, 1000, 12),
    "bombs": (bombs, 240, 4),
    "changes": (changes, 1000, 9),  # the longest, with the time that the others leave
}  # fmt: skip


# ---- all of them -------------------------------------------------------------------------------------------------


def measure(lab: Lab, name: str, count: int, deadline: float, known: dict[str, Any]) -> dict[str, Any]:
    """Make the trials of a scenario that are missing, until all are made or the time is over."""
    trials, started = SCENARIOS[name][0](lab), time.monotonic()
    found = {"good": known.get("good", 0), "all": known.get("all", 0), "bad": known.get("bad", [])}
    while found["all"] < count and time.monotonic() < deadline:
        try:
            problem = next(trials)
        except StopIteration:
            found["complete"] = True
            break
        except ImportError as error:
            return known | {"absent": str(error)}
        found["all"] += 1
        found["good"] += problem is None
        if problem is not None:
            found["bad"].append(problem)
            print(f"{name}: {problem}", file=sys.stderr)
    trials.close()  # type: ignore[attr-defined]
    return found | {"seconds": round(known.get("seconds", 0) + time.monotonic() - started, 1)}


def measure_all(lab: Lab, names: list[str], seed: int, end: float, results: dict[str, Any], file: Path) -> None:
    """Measure some of the scenarios, one after another, and write what was found so far after each."""
    lab.prepare()
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        known = results[name]
        count = SCENARIOS[name][2 if lab.quick else 1]
        lab.done = known.get("all", 0)
        lab.rng.seed(f"{seed} {name} {lab.done}")
        if lab.done < count and not known.get("complete"):
            share = (end - time.monotonic()) / left  # time that a scenario does not need is left to the next ones
            shown = results[name] = measure(lab, name, count, min(end, time.monotonic() + share), known)
            found = f"{shown.get('good', 0)}/{shown.get('all', 0)} in {shown.get('seconds', 0)} s"
            print(f"{name}: {found}", file=sys.stderr, flush=True)
        write_atomically(file, json.dumps(results))


def code_of_all() -> str:
    """A checksum of the code that is tried: results of another one do not count."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in [*sorted((root / "allmask").rglob("*.py")), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def rows_of(results: dict[str, Any]) -> str:
    rows = []
    for name, (scenario, _, _) in SCENARIOS.items():
        found = results.get(name, {})
        if found.get("all"):
            rows.append([f"`{name}`", scenario.__doc__ or "", f"{found['good']}/{found['all']}"])
    return common.table(["scenario", "what happens, and what must follow", "good"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="some of the scenarios")
    parser.add_argument("--quick", action="store_true", help="a few trials of each")
    parser.add_argument("--minutes", type=float, default=20, help="time for all of them")
    parser.add_argument("--jobs", type=int, default=min(2, usable_cores()), help="scenarios at the same time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("quality-runs/faults"))
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    asked = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        parser.error("needs Linux")
    if asked.again:
        shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    file, end = asked.out / "results.json", time.monotonic() + 60 * asked.minutes
    results, code = json.loads(file.read_text()) if file.is_file() else {}, code_of_all()
    if results.get("code") != code:
        results = {"code": code}
        for place in asked.out.glob("lab-*"):
            shutil.rmtree(place, ignore_errors=True)
    for module in IMPORTED:
        import_module(module)
    names = asked.only or list(SCENARIOS)
    parts = [names[part :: asked.jobs] for part in range(min(asked.jobs, len(names)))]
    children = []
    for part, some in enumerate(parts):
        place = (asked.out / f"lab-{part}").resolve()
        made = asked.out / f"results-{part}.json"
        made.unlink(missing_ok=True)
        children.append((os.fork(), made))
        if not children[-1][0]:
            code = 1
            try:
                lab = Lab(place, random.Random(asked.seed), asked.quick)
                measure_all(lab, some, asked.seed, end, {name: results.get(name, {}) for name in some}, made)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    failed = False
    for pid, made in children:
        failed |= os.waitpid(pid, 0)[1] != 0
        results |= json.loads(made.read_text()) if made.is_file() else {}
    write_atomically(file, json.dumps(results, indent=1))
    table = rows_of(results)
    print(table)
    if asked.write:
        head, _, rest = asked.write.read_text(encoding="utf-8").partition(MARK)
        _, _, tail = rest.partition(MARK)
        write_atomically(asked.write, f"{head}{MARK}\n\n{table}\n\n{MARK}{tail}")
    return 1 if failed or any(results.get(name, {}).get("bad") for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
