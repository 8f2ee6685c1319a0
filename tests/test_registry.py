"""The registry: its own entries by name, those registered, and those of installed packages; nothing imported early."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from allmask import registry as module
from allmask.errors import UsageError
from allmask.registry import Registry


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Modules that say when they are imported, and a function that installs entry points."""
    (tmp_path / "whole_thing.py").write_text("import sys; sys.stderr.write('imported'); Thing = object()\n")
    (tmp_path / "broken_thing.py").write_text("raise RuntimeError('no such weather')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def install(*points: tuple[str, str, str]) -> None:
        made = [EntryPoint(name, value, "allmask.things") for name, value, _ in points]
        for point, (_, _, package) in zip(made, points, strict=True):
            vars(point)["dist"] = SimpleNamespace(name=package)
        monkeypatch.setattr(module, "entry_points", lambda group: EntryPoints(made).select(group=group))

    install()
    yield install
    for name in ("whole_thing", "broken_thing"):
        sys.modules.pop(name, None)


@pytest.fixture
def things(packages) -> Registry:
    return Registry("thing", {"own": "whole_thing:Thing"})


def test_an_entry_is_imported_when_it_is_asked_for_and_not_before(things: Registry, packages, capsys):
    packages(("other", "broken_thing:Thing", "other-package"))
    assert list(things) == ["own", "other"] and len(things) == 2
    assert "own" in things and "other" in things and "nobody" not in things
    assert "whole_thing" not in sys.modules and "broken_thing" not in sys.modules
    assert things["own"] is sys.modules["whole_thing"].Thing and capsys.readouterr().err == "imported"


def test_an_entry_is_registered_once(things: Registry):
    entry = object()
    assert things.register("mine", entry) is entry is things["mine"]
    assert things.register("mine", entry) is entry  # a module that is imported twice
    assert list(things) == ["own", "mine"]
    with pytest.raises(UsageError, match="thing 'mine': there is already one of this name"):
        things.register("mine", object())
    with pytest.raises(UsageError, match="thing 'own': allmask has one of this name"):
        things.register("own", object())
    assert things["mine"] is entry


def test_an_entry_point_of_an_installed_package(things: Registry, packages):
    packages(("other", "whole_thing:Thing", "other-package"), ("own", "broken_thing:Thing", "greedy"))
    assert things["other"] is sys.modules["whole_thing"].Thing is things["other"]
    assert things["own"] is things["other"]  # this package's names stay its own
    assert list(things) == ["own", "other"]


def test_what_is_registered_goes_before_an_entry_point(things: Registry, packages):
    packages(("other", "broken_thing:Thing", "other-package"))
    things.register("other", "mine")
    assert things["other"] == "mine" and len(things) == 2


def test_the_group_of_entry_points():
    assert Registry("task", {}).group == "allmask.tasks"
    assert Registry("family", {}, group="allmask.families").group == "allmask.families"


def test_a_broken_entry_point_names_its_package(things: Registry, packages):
    packages(("other", "broken_thing:Thing", "other-package"), ("lacks", "whole_thing:Nothing", "other-package"))
    with pytest.raises(UsageError) as caught:
        things["other"]
    assert caught.value.message == (
        "thing 'other' of the package other-package: broken_thing:Thing cannot be imported: no such weather"
    )
    assert caught.value.hint == "mend, update or uninstall other-package"
    with pytest.raises(UsageError, match="whole_thing:Nothing cannot be imported"):
        things["lacks"]


def test_two_packages_with_one_name(things: Registry, packages):
    packages(("other", "whole_thing:Thing", "first"), ("other", "broken_thing:Thing", "second"))
    with pytest.raises(UsageError, match="thing 'other': of several packages: first, second"):
        things["other"]


def test_a_package_that_is_found_twice(things: Registry, packages):
    packages(("other", "whole_thing:Thing", "first"), ("other", "whole_thing:Thing", "first"))
    assert things["other"] is sys.modules["whole_thing"].Thing


def test_a_name_that_is_not_there(things: Registry):
    things.register("classify", 1)
    with pytest.raises(UsageError) as caught:
        things["clasify"]
    assert caught.value.message == "there is no thing 'clasify'"
    assert caught.value.hint == "did you mean classify? there are: own, classify"
    assert things.get("clasify") is None and things.get("classify") == 1
