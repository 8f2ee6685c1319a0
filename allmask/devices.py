"""Where a model computes: on the CPU or on a GPU.

Importing this does not import torch, so a device that cannot be here is refused before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from allmask.errors import UsageError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
HELP = "Where to compute; auto: a CUDA GPU if there is one, else the CPU."
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows below WSL, of AMD


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expect_device(name: str) -> str:
    """Return the name, or refuse one that no torch could compute on here; torch is not imported."""
    if name not in DEVICES:
        raise UsageError(f"device is {name!r}; expected one of {', '.join(DEVICES)}")
    linux = sys.platform.startswith("linux")
    without = sys.platform == "darwin" or (linux and not any(Path(driver).exists() for driver in _DRIVERS))
    if (name == "cuda" and without) or (name == "mps" and sys.platform != "darwin"):
        raise _absent(name)
    return name


def find_device(name: str = "auto") -> torch.device:
    """Return the device of this name; `auto` does not choose mps, which lacks fp64 and is not tested."""
    import torch

    expect_device(name)
    here = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name in here and not here[name]():
        raise _absent(name)
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def shown(device: torch.device) -> str:
    """Return the device as messages name it: cuda:0 (NVIDIA L4)."""
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _absent(name: str) -> UsageError:
    kind = "CUDA GPU" if name == "cuda" else "Apple GPU"
    return UsageError(f"--device {name}: there is no {kind} that torch could use", "leave it out, or --device cpu")
