"""The folder of a demo: replaced only when the new one is complete, and left alone when anything goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from allmask.demo import run
from allmask.errors import DataError, Interrupted, ResourceError
from allmask.tasks.task import ModelFolder


def finished(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / run.RESULT).write_text(word)
    return folder


def test_a_demo_is_replaced_when_the_new_one_is_complete(tmp_path: Path):
    out = finished(tmp_path / "demo", "old")
    left = tmp_path / f".demo.{2**22 + 1}.partial"  # by a killed run: no process has such a number
    left.mkdir()
    (left / "half").write_text("")
    with run.replace_folder(out) as folder:
        (folder / run.RESULT).write_text("new")
        assert (out / run.RESULT).read_text() == "old"
    assert (out / run.RESULT).read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["demo", run.RESULT]


def test_a_failed_demo_leaves_the_old_one(tmp_path: Path):
    out = finished(tmp_path / "demo", "old")
    with pytest.raises(ZeroDivisionError), run.replace_folder(out) as folder:
        (folder / run.RESULT).write_text("new")
        raise ZeroDivisionError
    assert (out / run.RESULT).read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_that_is_no_demo_is_refused(tmp_path: Path):
    run.expect_replaceable(tmp_path / "new" / "deep")
    run.expect_replaceable(finished(tmp_path / "demo", "old"))
    (tmp_path / "empty").mkdir()
    run.expect_replaceable(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for out in (tmp_path / "other", tmp_path / "other" / "thesis.tex"):
        with pytest.raises(ResourceError, match="not a finished demo"):
            run.expect_replaceable(out)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted("stopped", 143), 143)])
def test_an_interruption_says_how_to_go_on(monkeypatch, tmp_path: Path, error: BaseException, code: int):
    def stop(self: run.Demo):
        (self.folder / "half").write_text("")
        raise error

    monkeypatch.setattr(run.Demo, "run", stop)
    with pytest.raises(Interrupted, match=r"stopped") as caught:
        run.run_demo(finished(tmp_path / "demo", "old"))
    assert caught.value.exit_code == code
    assert "is unchanged" in str(caught.value) and "same command" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]


def test_a_python_without_sources_is_refused(monkeypatch, writer: ModelFolder, tmp_path: Path):
    monkeypatch.setattr(run.Demo, "show_masks", lambda *_: [])
    monkeypatch.setattr(run, "default_model", lambda _: writer.folder)
    monkeypatch.setattr(run, "python_folders", lambda _: [tmp_path])
    with pytest.raises(DataError, match="too few docstrings"):
        run.run_demo(tmp_path / "demo", say=lambda _: None)
