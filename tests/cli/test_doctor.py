"""`allmask doctor`: a report of the machine with numbers, and an exit code that says whether something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from allmask.cli import doctor
from allmask.errors import ResourceError
from allmask.kernels import build


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Speeds are not measured for long, and kernels are loaded anew."""
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(build, "loaded", {})
    monkeypatch.setattr(build, "refused", {})
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_a_healthy_machine(cli):
    ran = cli("doctor", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["problems"] == [], found
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]["threads"] == torch.get_num_threads()
    assert found["weights"]["allmask-en"] == "intact"
    checks = {check["check"]: check for check in found["self_test"]["checks"]}
    assert checks["int8: lowest cosine to torch in fp32"]["value"] > 0.99
    assert checks["int8: forbidden inputs that changed an output"]["value"].startswith("0 of ")
    assert all(check["ok"] is not False for check in checks.values())
    if build.has(build.AVX2):
        kernels = {row["kernel"]: row for row in found["kernels"]}
        assert {"int8", "decode_step", "packed_attention", "top_tokens", "rms_norm", "cross_entropy"} <= kernels.keys()
        assert kernels["int8"]["verified"] and kernels["int8"]["origin"] in ("prebuilt", "cached", "compiled")
        assert kernels["int8"]["instruction_set"] in ("AVX2", "AVX_VNNI", "AVX512_VNNI")


@pytest.mark.skipif(not build.has(build.AVX2), reason="no kernels here")
def test_what_is_wrong_is_said(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A cache that others can write to, weights that are damaged, and a kernel that computes something else."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_weights", lambda: {"allmask-zh": "model.safetensors is damaged"})
    monkeypatch.setattr(doctor, "_model_checks", lambda: [])
    monkeypatch.setattr("allmask.kernels.top_tokens.log_totals", lambda logits: logits.logsumexp(1) + 0.01)
    ran = cli("doctor")
    assert ran.code == ResourceError.exit_code
    problems = [line for line in ran.out.splitlines() if line.startswith("problem: ")]
    assert problems == [
        "problem: top_tokens, log-sum-exp: largest error: " + problems[0].split()[-1],
        "problem: weights allmask-zh: model.safetensors is damaged",
        f"problem: kernels: {tmp_path} is not trusted with code: it can be written by somebody else",
    ]
    assert "FAILED" in ran.out and "all is well" not in ran.out


def test_switched_off_is_not_wrong(cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALLMASK_KERNELS", "0")
    monkeypatch.setattr(doctor, "_model_checks", lambda: [])
    ran = cli("doctor")
    assert ran.code == 0 and "switched off by ALLMASK_KERNELS=0" in ran.out and "all is well" in ran.out


@pytest.mark.skipif(not build.has(build.AVX2), reason="no kernels here")
def test_a_machine_without_a_compiler_works(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It says what takes longer; nothing is wrong."""
    monkeypatch.setattr("allmask.kernels.build.PREBUILT", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("ALLMASK_KERNELS", raising=False)
    monkeypatch.setattr(doctor, "_model_checks", lambda: [])
    ran = cli("doctor")
    assert ran.code == 0 and "all is well" in ran.out and "problem: " not in ran.out, ran.out
    assert "slower: there is no C compiler" in ran.out and "writing takes about twice as long" in ran.out
