"""Import torch without what only its compiler needs: a quarter of the time that a short command takes.

`import torch` also imports `torch._meta_registrations`: kernels in Python that compute shapes alone, and with them
thousands of functions that describe operators to the compiler. Here that module is left out, and imported as soon as
one of those that build on it is wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

LEFT_OUT = "torch._meta_registrations"
ABOVE = ("torch._decomp", "torch._dynamo", "torch._inductor", "torch._prims", "torch._refs")  # they build on it


def import_torch() -> None:
    """Import torch, unless it is there already."""
    if "torch" in sys.modules:
        return
    sys.modules[LEFT_OUT] = ModuleType(LEFT_OUT)
    try:
        import torch
    finally:
        del sys.modules[LEFT_OUT]
    with suppress(AttributeError):  # recent versions: one of the modules left out does this
        torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)  # type: ignore[attr-defined]
    try:
        torch.Generator()
    except RuntimeError:  # another version of torch needs it for something else
        import_module(LEFT_OUT)
    else:
        sys.meta_path.insert(0, _Completion())


class _Completion(MetaPathFinder, Loader):
    """Imports what was left out before a module that builds on it.

    That imports some of these modules itself; for such a module this is also the loader, which has nothing to do.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (LEFT_OUT, *ABOVE):
            return None
        sys.meta_path.remove(self)
        if fullname == LEFT_OUT:
            return None
        import_module(LEFT_OUT)
        module = sys.modules.get(fullname)
        if module is None:
            return None
        self.own = module.__spec__
        module.__spec__ = spec_from_loader(fullname, self)  # Python takes the spec from here
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own
