"""Build a wheel with compiled kernels for x86-64, or for ARM where it is built there; the rest is in pyproject.toml.

`python -m build` and `pip wheel` compile each C file for each instruction set that it supports, with the flags of
`allmask/kernels/compiling.py`, which name no processor; allmask chooses among them when it runs. Without a C compiler,
or for another system, the wheel has no kernels and is for any platform: they are compiled on first use.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = platform.machine()
KERNELS = Path(__file__).parent / "allmask" / "kernels"
spec = importlib.util.spec_from_file_location("compiling", KERNELS / "compiling.py")  # importing allmask needs torch
assert spec is not None and spec.loader is not None
compiling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiling)


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "allmask", "kernels", "prebuilt")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if self.editable_mode or not sys.platform.startswith("linux") or MACHINE not in ("x86_64", "aarch64"):
            return
        folder.mkdir(parents=True)
        for source, instructions in compiling.variants(sorted(KERNELS.glob("*.c"))):
            try:
                code = compiling.compiled(source, instructions, folder)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no compiler, or an old or slow one
                self.warn(f"{source.name} is not compiled for {instructions[-1]}, but on first use: {error}")
                continue
            file = folder / compiling.library_name(source, instructions)
            file.write_bytes(code)
            file.with_name(f"{file.name}.sha256").write_bytes(compiling.checksum(code))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python, and with kernels: Linux with at least the glibc that they need."""
        libraries = list(Path(self.bdist_dir).rglob("prebuilt/*.so"))
        if not libraries:
            return "py3", "none", "any"
        needed = {version for file in libraries for version in re.findall(rb"GLIBC_(\d+)\.(\d+)", file.read_bytes())}
        major, minor = max((int(major), int(minor)) for major, minor in needed)
        return "py3", "none", f"manylinux_{major}_{minor}_{MACHINE}"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
