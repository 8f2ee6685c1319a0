"""`pipeline()`: text in, text out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import allmask
from allmask.data import Record
from allmask.errors import CheckpointError, UsageError
from allmask.registry import TASKS, USES
from allmask.tasks.continuation import Continuation
from allmask.tasks.seq2seq import Title
from allmask.tasks.task import load_task, load_tasks, save_task
from allmask.text import Tokenizer
from tests import tiny

TEXTS = ["red cat runs here.", "", "blue dog sings there.", "北京欢迎你。"]


@pytest.fixture(scope="module")
def titles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.bert(tmp_path_factory.mktemp("models") / "titles", ["lm"])
    save_task(Title(max_target=8), folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gpt2(tmp_path_factory.mktemp("models") / "gpt2")


def test_one_or_many(titles: Path):
    write = allmask.pipeline("title", titles, precision="fp32")
    many = write(TEXTS, min_new=2)
    assert isinstance(many, list) and [bool(text) for text in many] == [True, False, True, True]
    assert [write(text, min_new=2) for text in TEXTS] == many
    assert write([]) == []


def test_decoding_options(titles: Path):
    write = allmask.pipeline("title", str(titles), precision="fp32")
    several = write(TEXTS[0], beams=4, n_best=3)
    assert len(set(several)) == 3
    assert [len(best) for best in write(TEXTS, beams=4, n_best=3)] == [3, 0, 3, 3]
    assert "".join(write.stream(TEXTS[0], min_new=3)) == write(TEXTS[0], min_new=3)
    with pytest.raises(UsageError, match="no option beam"):
        write(TEXTS[0], beam=4)


def test_a_text_is_tokenized_once(titles: Path, gpt2: Path, monkeypatch):
    """The prompts tell how many sources were cut."""
    seen: list[str] = []
    real = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: list[str], *words, **more):
        seen.extend(texts)
        return real(self, texts, *words, **more)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    long = " ".join(tiny.WORDS * 12)
    for folder in (titles, gpt2):
        write = allmask.pipeline("generate", folder, precision="fp32")
        write([TEXTS[0], long, ""], max_new=2)
        assert write.cut == 1
        "".join(write.stream(long, max_new=2))
        assert write.cut == 2 and seen == [TEXTS[0], long, long]
        seen.clear()
        list(write.predict([Record({"source": text}, "") for text in (long, TEXTS[0])], max_new=2))
        assert write.cut == 3 and seen == [TEXTS[0], long]
        seen.clear()


def test_more_new_tokens_leave_less_room_for_a_prompt(gpt2: Path):
    """GPT-2 has 48 positions here; the last token that is written is not read."""
    write = allmask.pipeline("generate", gpt2, precision="fp32")
    long = " ".join(tiny.WORDS * 12)
    prompts = [write.task.sized(new).prompts(write.model.tokenizer, [long]).ids[0] for new in (None, 8, 40)]
    assert [len(prompt) for prompt in prompts] == [25, 41, 9]
    assert write(long, max_new=40)
    with pytest.raises(UsageError, match="leave no room"):
        write(long, max_new=60)


def test_gpt2_goes_on(gpt2: Path):
    write = allmask.pipeline("generate", gpt2)
    assert write("red cat", max_new=6)
    with pytest.raises(CheckpointError, match='not trained for "title"'):
        allmask.pipeline("title", gpt2)


def test_a_title_model_generates_too(titles: Path):
    texts = (allmask.pipeline(task, titles, precision="fp32")(TEXTS[0]) for task in ("title", "generate"))
    assert len(set(texts)) == 1


def test_refusals(titles: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"no task 'poem'\s.*title, translate, continue, .*generate, fill, embed"):
        allmask.pipeline("poem", titles)
    with pytest.raises(CheckpointError, match="allmask finetune"):
        allmask.pipeline("title", tiny.bert(tmp_path / "body"))
    with pytest.raises(UsageError, match="precision is 'int3'"):
        allmask.pipeline("title", titles, precision="int3")


def test_no_command_asks_which_task_it_is():
    """Commands and pipelines ask the registry, never the name or the type of a task."""
    root = Path(allmask.__file__).parent
    names, kinds = {*TASKS, *USES}, {TASKS[name].__name__ for name in TASKS}
    for path in (root / "pipelines.py", *(root / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = {getattr(word, "value", None) for word in ast.walk(node) if isinstance(word, ast.Constant)}
            asks = isinstance(node, ast.Compare | ast.Match) and words & names
            assert not asks, f"{path}:{node.lineno}: {words & names}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node.args[1])}
                assert not asked & kinds, f"{path}:{node.lineno}: {asked}"


def test_a_task_comes_back_as_it_was(tmp_path: Path):
    task = Title(max_source=20, max_target=5, truncate="head+tail", mask="naive")
    assert load_task(tmp_path) is None
    save_task(task, tmp_path)
    assert load_task(tmp_path) == task


def test_one_model_has_several_tasks(tmp_path: Path, cli):
    """The same weights write titles under the prefix mask and go on with a text under the causal one."""
    tiny.bert(tmp_path / "both", ["lm"])
    tasks = [Title(max_source=9, max_target=4), Continuation.within(16, 4, framed=True)]
    save_task(tasks[0], tmp_path / "both", also=tasks[1:])
    assert load_tasks(tmp_path / "both") == tasks and load_task(tmp_path / "both") == tasks[0]
    written = {}
    for name in ("title", "continue"):
        generator = allmask.pipeline(name, tmp_path / "both", precision="fp32")
        assert type(generator.task) is type(TASKS[name](max_source=1, max_target=1))
        ran = cli("generate", tmp_path / "both", "--task", name, "--text", "北京 欢迎", "--precision", "fp32")
        assert ran.code == 0 and ran.out.strip() == generator("北京 欢迎")
        written[name] = ran.out
    assert cli("generate", tmp_path / "both", "--text", "北京 欢迎", "--precision", "fp32").out == written["title"]
    refused = cli("generate", tmp_path / "both", "--task", "translate", "--text", "北京")
    assert refused.code == 4 and 'was trained for "title" and "continue", not for "translate"' in refused.err
    assert cli("generate", tmp_path / "both", "--task", "poem", "--text", "北京").code == 2
    (tmp_path / "both" / "allmask.json").write_text('{"task": "title", "also": "continue"}')
    with pytest.raises(CheckpointError, match="a list of tasks"):
        load_tasks(tmp_path / "both")
