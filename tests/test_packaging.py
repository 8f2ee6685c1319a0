"""A bare install has what the code imports, the tested versions are pinned; sdist and wheel are whole and work."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import allmask
from allmask.kernels import compiling
from allmask.kernels.build import AVX2, _cache_folder, has

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = {"transformers"}  # imported only when the user hands us a model of it


def plain(name: str) -> str:
    """A distribution's name as pip compares it, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def third_party(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"allmask"}


def imports() -> dict[str, set[str]]:
    """Third-party module -> the files that import it."""
    found: dict[str, set[str]] = {}
    for path in Path(allmask.__file__).parent.rglob("*.py"):
        for name in third_party(path):
            found.setdefault(name, set()).add(path.name)
    return found


def test_what_is_imported_is_declared():
    declared = {plain(line) for line in PROJECT["dependencies"]}
    optional = PROJECT["optional-dependencies"]  # those below may not be installed
    extras = {
        plain(line) for name in ("xlsx", "onnx", "ctranslate2", "serve") for line in optional[name]
    }  # may not be installed
    owners = packages_distributions()
    missing = {
        name: sorted(files)
        for name, files in imports().items()
        if plain(name) not in REFERENCE | extras and not {plain(owner) for owner in owners.get(name, [])} & declared
    }
    assert missing == {}, "declare these in pyproject.toml"


@pytest.mark.parametrize("group", ["core", *PROJECT["optional-dependencies"]])
def test_what_is_declared_is_pinned(group: str):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line) for line in lines if "==" in line}
    wanted = PROJECT["dependencies"] if group == "core" else PROJECT["optional-dependencies"][group]
    assert {plain(line) for line in wanted} - pinned == set()


# ---- what is built ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, kept_kernels: Path) -> tuple[Path, Path]:
    """The sdist, made from a copy of the sources, and the wheel, made from the sdist alone: it lacks nothing."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    (folder / "cc").write_text(f"#!{sys.executable} -IS\nCOMPILED = {compiled(kept_kernels)}\n{COMPILER}")
    (folder / "cc").chmod(0o755)
    left_out = shutil.ignore_patterns(".*", "*-run*", "corpora", "__pycache__", "*.safetensors", "*.egg-info", "dist")
    shutil.copytree(ROOT, source, ignore=left_out)
    sdist = folder / build(source, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, folder / build(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder)


COMPILER = """
import os, shutil, subprocess, sys
out, source = sys.argv[sys.argv.index("-o") + 1 :][:2]
asked = " ".join([os.path.basename(source), *(word for word in sys.argv if word.startswith("-m"))])
path = COMPILED[asked]
if not os.path.exists(path):
    fresh = f"{path}.{os.getpid()}"
    code = subprocess.call(["cc", *[fresh if word == out else word for word in sys.argv[1:]], "-O0"])
    if code:
        sys.exit(code)
    os.replace(fresh, path)
shutil.copy(path, out)
"""  # how fast the kernels are does not matter here


def compiled(kept: Path) -> dict[str, str]:
    """Where compiled kernels are: those of other tests, and those kept for the next run, named by their sources."""
    found = {}
    for source, instructions in compiling.variants(list((ROOT / "allmask" / "kernels").glob("*.c"))):
        name = compiling.library_name(source, instructions)
        flags = [word for word in compiling.compiler_flags(instructions) if word.startswith("-m")]
        used = _cache_folder()[0] / name
        found[" ".join([source.name, *flags])] = str(used if used.exists() else kept / name)
    return found


def build(source: Path, kind: str, out: Path) -> str:
    """Call the build backend as pip and build do, without isolation, so offline; return the name of the file made."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    environment = {**os.environ, "CC": str(out / "cc")}
    ran = subprocess.run([sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_what_is_in_the_sdist_and_the_wheel(built: tuple[Path, Path]):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    package = ROOT / "allmask"
    sources = {path for suffix in ("py", "c", "h") for path in package.rglob(f"*.{suffix}")} | {package / "py.typed"}
    sources |= {path for path in (package / "play" / "static").rglob("*") if path.is_file()}
    for path in sources:
        assert path.relative_to(ROOT).as_posix() in in_sdist & in_wheel, path
    assert {"LICENSE", "README.md", "pyproject.toml"} <= in_sdist
    assert {name.split("/")[0] for name in in_wheel} == {"allmask", f"allmask-{allmask.__version__}.dist-info"}
    for name in in_sdist | in_wheel:
        assert not name.startswith(("tests", "weights", "docs", "benchmarks")) and "safetensors" not in name, name
    assert wheel.stat().st_size < 2 << 20


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("cc"), reason="no C compiler, or not x86-64")
def test_the_wheel_has_kernels_for_every_processor(built: tuple[Path, Path]):
    """Whatever a binding asks for (`build.library(SOURCE, build.AVX2)`) is there; the tag says which glibc it takes."""
    asked: set[str] = set()
    for binding in (ROOT / "allmask" / "kernels").glob("*.py"):
        for call in ast.walk(ast.parse(binding.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "build.library":
                sets = [compiling.SETS[each.attr] for each in call.args[1:] if isinstance(each, ast.Attribute)]
                own = [each for each in sets if compiling.is_for(each, platform.machine())]
                asked |= {compiling.library_name(binding.with_suffix(".c"), each) for each in own}
    with zipfile.ZipFile(built[1]) as archive:
        content = {Path(name).name: archive.read(name) for name in archive.namelist() if "/prebuilt/" in name}
    assert len(asked) >= 12 and {name for name in content if name.endswith(".so")} >= asked
    for name in asked:
        assert content[f"{name}.sha256"].decode() == f"{hashlib.sha256(content[name]).hexdigest()}\n"
    assert re.search(r"-py3-none-manylinux_2_\d+_x86_64\.whl$", built[1].name)


GENERATE = """
import sys
from allmask.cli.main import main
from allmask.kernels import build
main(sys.argv[1:])
print(*sorted({each.origin for each in build.loaded.values()} | set(build.refused)))
"""


def test_the_wheel_in_a_fresh_environment(built: tuple[Path, Path], tmp_path: Path):
    """An environment with the wheel, which finds its requirements in this one; the sources are elsewhere."""
    venv.create(tmp_path / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "env")}))
    offline = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q"]
    python = tmp_path / "env" / "bin" / "python"
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, str(built[1])]
    subprocess.run(installing, check=True, capture_output=True)
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # after its own packages in sys.path

    left_out = ("PYTHONPATH", "ALLMASK_KERNELS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}

    def run(name: str, *words: str) -> str:
        command = [str(python.parent / name), *words]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert Path(run("python", "-c", "import allmask; print(allmask.__file__)")).is_relative_to(site)
    assert run("allmask", "--version") == f"allmask {allmask.__version__}\n"
    assert "鸡" in run("allmask", "mask", "prefix", "--source", "你想吃啥", "--target", "白切鸡")
    text = "This package provides a simple tool to convert images from one format to another."
    environment |= {"HOME": str(tmp_path), "PATH": str(python.parent)}  # no compiler, and no cache
    written, *kernels = run("python", "-c", GENERATE, "generate", "allmask-en", "--text", text).splitlines()
    assert "image" in written
    if platform.machine() == "x86_64" and shutil.which("cc") and has(AVX2):
        assert kernels == ["prebuilt"] and not (tmp_path / ".cache" / "allmask").exists()
