"""`allmask doctor`: what this machine has, whether the kernels and the weights are intact, and a short self-test."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmask.cli import AsJson, emit, plural
from allmask.devices import usable_cores
from allmask.errors import AllmaskError, CheckpointError, ResourceError

if TYPE_CHECKING:
    from allmask.model import Model

EXAMPLES = """
    allmask doctor
    allmask doctor --json
"""
_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "pyarrow", "huggingface_hub", "typer")
_SETS = ("avx2", "fma", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "amxint8", "asimd", "asimddp", "i8mm", "bf16")
_VARIABLES = (
    "ALLMASK_KERNELS",
    "ALLMASK_ISA",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CC",
    "HF_HOME",
    "HF_ENDPOINT",
)
_MODEL = "allmask-en"
_SECONDS = 0.7  # of each measurement of speed


def command(as_json: AsJson = False) -> int:
    """Show what this machine has and whether allmask works on it: what a bug report should contain.

    Processor, memory and threads; versions; C kernels: where each comes from, for which instruction set, and that its
    checksum is right; the cache; the weights that are installed; and a self-test of about five seconds, with numbers.
    Nothing is sent anywhere. The exit code is 0 if allmask works here, if slowly, and 5 if something is wrong.
    """
    import logging

    logging.getLogger("allmask").setLevel(logging.ERROR)  # what is wrong is in the report
    found: dict[str, Any] = {
        "versions": _versions(),
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "weights": _weights(),
        "self_test": _self_test(),
    }
    found |= {"kernels": _kernels(), "cache": _cache()}  # after the self-test, which uses all of them
    found |= {"slower": _slower(found["kernels"]), "problems": _problems(found)}
    emit(as_json, found, "\n".join(_lines(found)))
    return ResourceError.exit_code if found["problems"] else 0


# ---- what there is -------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    from allmask import __version__

    found = {"allmask": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _machine() -> dict[str, Any]:
    import torch

    from allmask.kernels import build

    def value(file: str, name: str) -> str | None:
        """The value of a line `name : value` in a file of /proc."""
        with suppress(OSError):
            for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith(name):
                    return line.partition(":")[2].strip()
        return None

    def gigabytes(name: str) -> float | None:
        words = (value("/proc/meminfo", name) or "").split()
        return round(int(words[0]) / 2**20, 1) if words else None

    return {
        "system": platform.platform(),
        "processor": value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "instruction_sets": [name for name in _SETS if build.has((name,))],
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": gigabytes("MemTotal"),
        "available_gb": gigabytes("MemAvailable"),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _kernels() -> list[dict[str, Any]]:
    """One entry for each library that was loaded, and for each C file that is not used, with the reason."""
    from allmask.kernels import build, compiling

    names = {instructions: name for name, instructions in compiling.SETS.items()}
    rows: list[dict[str, Any]] = [
        {"kernel": name.rpartition("-")[0], "instruction_set": names.get(each.instructions), "origin": each.origin,
         "verified": _is_intact(each.path), "path": str(each.path)}
        for name, each in sorted(build.loaded.items())
    ]  # fmt: skip
    rows += [{"kernel": Path(name).stem, "problem": why} for name, why in sorted(build.refused.items())]
    known = {row["kernel"] for row in rows}
    unused = sorted(source.stem for source in Path(build.__file__).parent.glob("*.c") if source.stem not in known)
    return rows + [{"kernel": name, "note": "not needed by the self-test on this processor"} for name in unused]


def _is_intact(path: Path) -> bool:
    """Whether the file is still the one that was loaded, which was checked then."""
    from allmask.kernels.compiling import checksum

    try:
        return checksum(path.read_bytes()) == path.with_name(f"{path.name}.sha256").read_bytes()
    except OSError:
        return False


def _cache() -> dict[str, Any]:
    from allmask.kernels import build

    try:
        folder, mode = build._cache_folder()
        files = sorted(folder.glob("*.so")) if folder.is_dir() else []
        size = sum(file.stat().st_size for file in files)
        found: dict[str, Any] = {"folder": str(folder), "libraries": len(files), "bytes": size}
        if folder.exists():  # checked as before loading; nothing is made for that
            with build._opened_folder(folder, mode):
                pass
    except (OSError, RuntimeError, AttributeError) as error:
        return {"problem": str(error)}
    return found


def _weights() -> dict[str, str]:
    """The bundled models that are installed: intact, or what is wrong with them."""
    from allmask.checkpoints.sources import BUNDLED, resolve
    from allmask.files import MANIFEST, verify

    found = {}
    for name in BUNDLED:
        with suppress(CheckpointError):
            folder = resolve(name)
            has_checksums = (folder / MANIFEST).is_file()
            found[name] = (verify(folder) or "intact") if has_checksums else "installed, without checksums"
    return found


# ---- self-test -----------------------------------------------------------------------------------------------------


def _self_test() -> dict[str, Any]:
    """Run all checks. Each has a number; `ok` says whether it is as it must be, and is None for a speed."""
    start, checks = time.perf_counter(), []
    for test in (_kernel_errors, _model_checks):
        try:
            checks += test()
        except Exception as error:  # a report with an error in it is worth more than none
            why = error.message if isinstance(error, AllmaskError) else f"{type(error).__name__}: {error}"
            checks.append({"check": test.__name__.strip("_").replace("_", " "), "value": why, "ok": False})
    return {"checks": checks, "seconds": round(time.perf_counter() - start, 1)}


def _kernel_errors() -> Iterator[dict[str, Any]]:
    """The largest difference of each kernel to the same computation in torch, in double precision."""
    import torch
    from torch.nn import functional as F

    from allmask.kernels import activation, int8, packed_attention, residual_norm, rms_norm, top_tokens
    from allmask.kernels.cross_entropy import linear_cross_entropy

    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    def error(name: str, ours: torch.Tensor, exact: torch.Tensor, limit: float) -> dict[str, Any]:
        off = (ours.double() - exact.double()).abs().max().item()
        return {"check": f"{name}: largest error", "value": off, "at_most": limit, "ok": off <= limit}

    x, weight = drawn(7, 64), drawn(64)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    yield error("rms_norm", rms_norm.rms_norm(x, weight, 1e-6), exact, 1e-5)
    if residual_norm.suits(x, 64) and activation.suits(x.device, 64):
        step, bias, shift = drawn(7, 64), drawn(64), drawn(64)
        exact = F.layer_norm((x + step + bias).double(), (64,), weight.double(), shift.double(), 1e-6)
        ours = residual_norm.residual_norm(x, step, bias, weight, shift, 1e-6)[0]
        yield error("residual_norm", ours, exact, 1e-5)
        yield error("activation", activation.activate(x, bias, "gelu"), F.gelu((x + bias).double()), 1e-5)
    logits = 5 * drawn(5, 1000)
    yield error("top_tokens, log-sum-exp", top_tokens.log_totals(logits), logits.double().logsumexp(1), 1e-5)
    yield error("top_tokens, best", top_tokens.best(logits, 4)[0], logits.topk(4).values, 0.0)
    q, k, v = (drawn(2, 24, 4, 32) for _ in range(3))
    first = [each.double().transpose(1, 2) for each in (q, k, v)]  # (B, H, T, D)
    exact = F.scaled_dot_product_attention(first[0], first[1], first[2], is_causal=True).transpose(1, 2)
    blocks = (packed_attention.Block(0, 24, "causal"),)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if packed_attention.suits(q, k, v, blocks):
            ours = packed_attention.attend_documents(q, k, v, blocks)
            yield error(f"packed_attention, {str(dtype).removeprefix('torch.')}", ours, exact, limit)
    hidden, labels = drawn(16, 64).bfloat16(), torch.arange(16)
    table = drawn(100, 64).bfloat16()
    exact = F.cross_entropy(hidden.double() @ table.double().T, labels, reduction="sum") / 16
    yield error("cross_entropy, bfloat16", linear_cross_entropy(hidden, table, None, labels) / 16, exact, 0.1)
    if int8.library() is not None:
        matrix, bias = drawn(96, 64), drawn(96)
        ours = int8.linear(int8.PackedLinear.of(matrix, bias), x)
        exact = F.linear(x.double(), matrix.double(), bias.double())
        yield error("int8, to fp32", ours, exact, 0.5)


def _model_checks() -> Iterator[dict[str, Any]]:
    """The shipped model: how near its fast engines are to fp32, that forbidden inputs do not matter, and its speed."""
    import torch

    import allmask
    from allmask.demo.texts import EXAMPLE
    from allmask.inference import freeze

    try:
        model = allmask.load(_MODEL)
    except CheckpointError as error:
        yield {"check": _MODEL, "value": f"not tested: {error.message}", "ok": None}
        return
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(EXAMPLE).ids])
    with torch.no_grad():
        exact = model(ids).hidden
        engines = {name: freeze(model, name) for name in ("fp32", "bf16", "int8")}
        for name, limit in (("fp32", 0.99999), ("bf16", 0.99), ("int8", 0.99)):
            cosine = torch.cosine_similarity(engines[name](ids).hidden.float(), exact, dim=-1).min().item()
            name = f"{name}: lowest cosine to torch in fp32"
            yield {"check": name, "value": cosine, "at_least": limit, "ok": cosine >= limit}
        for name, engine in engines.items():
            changed, pairs = _forbidden(engine, ids)
            row = {"check": f"{name}: forbidden inputs that changed an output", "value": f"{changed} of {pairs}"}
            yield {**row, "ok": changed == 0}
        many = ids.repeat(8, 1)
        for name, engine in engines.items():
            rate = _rate(lambda engine=engine: engine(many), many.numel())
            yield {"check": f"{name}: encoding, tokens per second", "value": round(rate), "ok": None}
    writer = allmask.pipeline("title", _MODEL)
    written: Any = writer(EXAMPLE, beams=4)
    title = written if isinstance(written, str) else written.get("prediction", written)
    yield {"check": "a title for a text of two sentences", "value": title, "ok": bool(title)}
    rate = _rate(lambda: writer(EXAMPLE, beams=4), 1)
    yield {"check": "titles per second, one at a time", "value": round(rate, 1), "ok": None}


def _forbidden(model: Model, ids: Any) -> tuple[int, int]:
    """Exchange each of some inputs under a causal mask: how many earlier outputs changed, and of how many."""
    import torch

    from allmask.mask import Mask

    mask, changed, pairs = Mask.causal(torch.ones_like(ids, dtype=torch.bool)), 0, 0
    before = model(ids, mask).hidden
    for at in range(1, ids.shape[1], 4):
        other = ids.clone()
        other[0, at] = 2000 + at
        same = (model(other, mask).hidden == before).all(-1)[0, :at]
        changed, pairs = changed + int((~same).sum()), pairs + at
    return changed, pairs


def _rate(action: Callable[[], Any], amount: int) -> float:
    """How much of something is done in a second, after a first time that does not count."""
    action()
    start, times = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < _SECONDS:
        action()
        times += 1
    return times * amount / spent


# ---- the report ----------------------------------------------------------------------------------------------------


def _slower(kernels: list[dict[str, Any]]) -> str | None:
    """Return what takes longer where the kernels cannot be compiled; torch computes the same."""
    from allmask.kernels.compiling import NO_COMPILER

    if any(row.get("problem") == NO_COMPILER for row in kernels):
        return f"{NO_COMPILER}, so torch computes: writing takes about twice as long, encoding up to a fifth longer"
    return None


def _problems(found: dict[str, Any]) -> list[str]:
    """Return what is wrong, in words: not an old processor, nor kernels that are switched off or cannot be compiled."""
    from allmask.kernels import build
    from allmask.kernels.compiling import NO_COMPILER

    problems = [f"{check['check']}: {check['value']}" for check in found["self_test"]["checks"] if check["ok"] is False]
    fine = ("intact", "installed, without checksums")
    problems += [f"weights {name}: {state}" for name, state in found["weights"].items() if state not in fine]
    expected = build.has(build.baseline()) and os.environ.get("ALLMASK_KERNELS") != "0"
    reasons = [row["problem"] for row in found["kernels"] if "problem" in row and " has no " not in row["problem"]]
    reasons = [reason for reason in reasons if reason != NO_COMPILER]
    problems += [f"kernels: {reason}" for reason in dict.fromkeys(reasons) if expected]
    problems += [
        f"kernels: {row['path']} has been changed since it was loaded"
        for row in found["kernels"]
        if row.get("verified") is False
    ]
    if "problem" in found["cache"] and not any(found["cache"]["problem"] in problem for problem in problems):
        problems.append(f"cache: {found['cache']['problem']}")
    return problems


def _lines(found: dict[str, Any]) -> Iterator[str]:
    machine, test = found["machine"], found["self_test"]
    yield "versions    " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"system      {machine['system']}"
    yield f"processor   {machine['processor']}; {' '.join(machine['instruction_sets']) or 'unknown instruction sets'}"
    cores = f"{plural(machine['cores'], 'core')}, {plural(machine['threads'], 'thread')}"
    memory = "" if machine["memory_gb"] is None else f"; {machine['available_gb']} of {machine['memory_gb']} GB free"
    yield f"            {cores}{memory}{'; ' + machine['cuda'] if machine['cuda'] else ''}"
    if found["environment"]:
        yield "environment " + ", ".join(f"{name}={value}" for name, value in found["environment"].items())
    for start, row in zip(_once("kernels"), found["kernels"], strict=False):
        what = row.get("problem") or row.get("note")
        if what is None:
            state = "checksum right" if row["verified"] else "CHANGED SINCE"
            what = f"{row['instruction_set'] or 'plain'}, {row['origin']}, {state}"
        yield f"{start}{row['kernel']:<17} {what}"
    cache = found["cache"]
    yield "cache       " + (
        cache.get("problem") or f"{cache['folder']}: {cache['libraries']} libraries, {cache['bytes'] / 1e3:,.0f} kB"
    )
    for start, (name, state) in zip(_once("weights"), found["weights"].items(), strict=False):
        yield f"{start}{name:<17} {state}"
    for start, check in zip(_once("self-test"), test["checks"], strict=False):
        value = check["value"]
        if isinstance(value, float):  # an error, a cosine, or a rate
            value = f"{value:.2g}" if value < 0.1 else f"{value:.5f}" if value <= 1 else f"{value:,.1f}"
        if isinstance(value, int):
            value = f"{value:,}"
        bounds = (f" ({name.replace('_', ' ')} {check[name]:g})" for name in ("at_most", "at_least") if name in check)
        limit = next(bounds, "")
        yield f"{start}{check['check']:<52} {value}{limit}{'  FAILED' if check['ok'] is False else ''}"
    yield f"            in {test['seconds']} s"
    yield "" if found["problems"] else "\nall is well"
    if found["slower"]:
        yield f"slower: {found['slower']}"
    for problem in found["problems"]:
        yield f"problem: {problem}"


def _once(title: str) -> Iterator[str]:
    """Yield the title of a section for its first line, and blanks for the others."""
    yield f"{title:<12}"
    while True:
        yield " " * 12
