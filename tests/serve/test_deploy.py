"""The files of deploy/: their commands can be typed, their paths and metrics exist, and Ray runs them."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import allmask
from tests import tiny
from tests.cli.test_help import command_of

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENT = {"RAY_raylet_start_wait_time_s": "300", "RAY_USAGE_STATS_ENABLED": "0"}  # a busy machine is not a bug
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[serve,data]'")


def can_be_typed(words: list[str]) -> None:
    """`words` begin with serve; typer parses them without running anything."""
    command, context, rest = command_of(words)
    command.make_context(words[0], rest, parent=context)


def test_systemd():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "allmask.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0].endswith("/allmask")
    can_be_typed(words[1:])
    assert "HUP" in unit["Service"]["ExecReload"] and int(unit["Service"]["TimeoutStopSec"]) > 30


def test_kubernetes(app: Any):
    deployment, service, scaler = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    can_be_typed(container["args"])
    routes = {route.path for route in app.routes}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(probe["path"] in routes and probe["port"] == container["ports"][0]["name"] for probe in probes)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric in app.state.models.metrics.response().body.decode()
    assert pod["terminationGracePeriodSeconds"] > app.state.settings.grace


@needs_ray
def test_ray_serve(folder: Path):
    code = """
import ray, sys, json, urllib.request
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": 8642})
from deploy.ray_serve import app
serve.run(app)
request = urllib.request.Request("http://127.0.0.1:8642/v1/tasks/title", sys.argv[1].encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
serve.shutdown()
"""
    texts = [row["source"] for row in tiny.chinese(4)]
    env = {**os.environ, **PATIENT, "ALLMASK_MODELS": str(folder / "writer"), "PYTHONPATH": str(DEPLOY.parent)}
    words = [sys.executable, "-c", code, json.dumps({"input": texts})]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (answer,) = [line for line in ran.stdout.splitlines() if line.startswith('{"model"')]  # Ray prints lines, too
    found = json.loads(answer)["output"]
    assert [one["prediction"] for one in found] == allmask.pipeline("title", folder / "writer")(texts)


@needs_ray
def test_ray_data(folder: Path, tmp_path: Path):
    rows = tiny.chinese(8)
    (tmp_path / "in").mkdir()
    tiny.write_jsonl(tmp_path / "in" / "a.jsonl", rows[:5])
    tiny.write_jsonl(tmp_path / "in" / "b.jsonl", rows[5:])
    env = {**os.environ, **PATIENT, "PYTHONPATH": str(DEPLOY.parent)}
    words = [sys.executable, DEPLOY / "ray_predict.py", folder / "writer", tmp_path / "in", tmp_path / "out"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [row for file in (tmp_path / "out").glob("*.json*") for row in tiny.read_jsonl(file)]
    write = allmask.pipeline("title", folder / "writer")
    assert {row["source"]: row["prediction"] for row in found} == {row["source"]: write(row["source"]) for row in rows}
