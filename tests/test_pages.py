"""The pages: their code and commands run or can be typed as printed, their links lead somewhere, the site is built."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from allmask import errors
from allmask.checkpoints import sources
from allmask.registry import MASKS
from tests import tiny
from tests.cli.test_help import command_of

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```+[^\n]*\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("weights/*/README.md")]
    if path.name != "CHANGELOG.md"  # it tells of commands and files that have changed since
)
SHELL = ("|", "||", "&&", ";", "<", ">", "2>", "&")  # a command ends before one of these
RUN = ["docs/from-transformers.md", "docs/from-bert4keras.md", "docs/exit-codes.md", "README.zh.md"]
RUN += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/zh/*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- code and commands ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the files that the pages take for granted, and a tiny model that writes."""
    folder = tmp_path_factory.mktemp("desk")
    tiny.writer(folder / "tiny")
    rows = tiny.chinese(24)
    tiny.write_jsonl(folder / "titles.jsonl", rows)
    labels = ["好评", "差评"]
    reviews = [{"text": row["source"], "label": labels[number % 2]} for number, row in enumerate(rows)]
    tiny.write_jsonl(folder / "reviews.jsonl", reviews)
    tags = [["B-地名", "I-地名", *["O"] * (len(row["source"]) - 2)] for row in rows]
    tagged = [{"tokens": [*row["source"]], "tags": found} for row, found in zip(rows, tags, strict=True)]
    tiny.write_jsonl(folder / "names.jsonl", tagged)
    lines = ["\n".join(f"{token} {tag}" for token, tag in zip(*row.values(), strict=True)) for row in tagged]
    (folder / "names.conll").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    for name in ("texts.txt", "last-week.txt", "today.txt"):
        (folder / name).write_text("".join(f"{row['source']}\n" for row in rows), encoding="utf-8")
    return folder


@pytest.mark.parametrize("page", RUN)
def test_code_and_commands_run(page: str, desk: Path, cli: Callable, monkeypatch: pytest.MonkeyPatch):
    """Blocks of Python with the shipped weights; blocks of `sh` briefly, with a tiny model under their names."""
    monkeypatch.chdir(desk)
    monkeypatch.setattr(MASKS, "registered", {})  # the names that a page registers are gone afterwards
    space: dict = {}
    for kind, block in re.findall(r"```(python|sh)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        if kind == "python":
            exec(compile(block, page, "exec"), space)
            continue
        with monkeypatch.context() as patch:
            patch.setattr(sources, "_bundled", lambda name: desk / "tiny")
            for words in commands(block):
                run_once(desk, words, cli)


def run_once(desk: Path, words: list[str], cli: Callable) -> None:
    """Run a command that no page has run yet, and train for two steps only."""
    done = desk / "done.txt"
    before = done.read_text(encoding="utf-8") if done.exists() else ""
    if (line := f"{shlex.join(words)}\n") in before:
        return
    short: list[str] = []
    if words[0] == "finetune":
        short = ["--steps", "2", "--batch-tokens", "128", "--quiet"]
        shutil.rmtree(desk / words[words.index("--out") + 1], ignore_errors=True)
    ran = cli(*words, *short)
    assert ran.code == 0, (words, ran.err)
    done.write_text(before + line, encoding="utf-8")


def commands(block: str) -> Iterator[list[str]]:
    """The command lines of allmask in a block of code, without `allmask`, comments, pipes and redirections."""
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s#.*", "", line.strip().removeprefix("$ "))
        found = re.match(r"(?:(?:.* \| )|torchrun .* -m )?(?:\.venv/bin/|python -m )?allmask (.*)", line)
        if found:
            words = shlex.split(found[1].rstrip(";"))
            yield list(takewhile(lambda word: word not in SHELL, words))


def printed() -> dict[str, list[str]]:
    """The command lines of each page."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        indented = "\n".join(re.findall(r"^ {4,}.*$", text, re.MULTILINE))
        for block in [*(match[1] for match in FENCE.findall(text)), indented]:
            found.setdefault(name_of(page), set()).update(map(shlex.join, commands(block)))
        inline = "\n".join(re.findall(r"`(allmask [a-z]+ [^`[…]*)`", text.replace("\n", " ")))
        found.setdefault(name_of(page), set()).update(map(shlex.join, commands(inline)))
    return {page: sorted(lines) for page, lines in found.items() if lines}


PRINTED = printed()


@pytest.mark.parametrize("page", PRINTED)
def test_commands_can_be_typed(page: str):
    """The parser takes every command line of every page; a last `…` stands for what a reader adds."""
    for line in PRINTED[page]:
        words = shlex.split(line)
        if words[0] == "COMMAND" or "--help" in words:
            continue
        if words[-1] == "…" and not words[-2].startswith("-"):
            words.pop()
        command, context, rest = command_of(words)
        try:
            command.make_context(words[0], rest, parent=context)
        except typer.TyperException as error:  # what the text leaves out
            assert type(error).__name__ in ("MissingParameter", "BadOptionUsage"), f"allmask {line}: {error}"


# ---- links ----------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its code."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """What a link may name after #: the headings as GitHub and the site write them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        file = page if not target else (page.parent / target).resolve()
        assert file.exists(), target
        assert file.is_relative_to(ROOT), f"{target} is outside of the repository"
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_nothing_is_loaded_from_elsewhere():
    for page in PAGES:
        assert not re.search(r"!\[[^]]*\]\(\w+:|<(?:img|script|link)\b", prose(page)), page


def test_each_chinese_page_and_its_english_one_are_linked():
    pairs = [("README.md", "README.zh.md")] * (ROOT / "README.zh.md").exists()
    pairs += [(f"docs/{page.name}", f"docs/zh/{page.name}") for page in ROOT.glob("docs/zh/*.md")]
    assert len(pairs) == 7
    for english, chinese in pairs:
        assert f"]({os.path.relpath(ROOT / english, (ROOT / chinese).parent)})" in (ROOT / chinese).read_text("utf-8")
        if english != "README.md":
            assert f"](zh/{Path(chinese).name})" in (ROOT / english).read_text("utf-8")


# ---- exit codes, and the site ---------------------------------------------------------------------------------


def test_the_table_of_exit_codes_has_every_kind_of_error():
    rows = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and "exit_code" in vars(kind)]
    assert len(kinds) == 6
    for kind in kinds:
        assert f"| {kind.exit_code} | `{kind.kind}` |" in rows
    assert f"| 130 | `{errors.Interrupted.kind}` |" in rows and f"| 143 | `{errors.Interrupted.kind}` |" in rows


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (make docs installs it)")
def test_the_site_is_built_and_complete(tmp_path: Path):
    """With broken links as errors; nothing in it is fetched from elsewhere, and Chinese words can be searched."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=.?(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]+rel=.?(?:stylesheet|preconnect)[^>]+href=.?(?:https?:)?//", text), page
    assert 'class="doc doc-object' in (tmp_path / "api.html").read_text(encoding="utf-8")
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("注意力\u200b掩码" in row["text"] for row in index["docs"])
