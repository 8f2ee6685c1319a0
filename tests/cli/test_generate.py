"""`allmask generate`: lines in, lines out; titles and continuations equal those of the library."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from allmask.decoding import Decoding, MaskWriter, generate
from allmask.model import load
from tests import tiny

TEXT = "red cat runs here."


@pytest.fixture
def say(cli, monkeypatch, tmp_path: Path):
    """Run `allmask generate` with these bytes on stdin."""

    def run(data: bytes, *words: object):
        (tmp_path / "stdin").write_bytes(data)
        with (tmp_path / "stdin").open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            return cli("generate", *words)

    return run


def reference(folder: Path, text: str, **options) -> list[str]:
    """By the library's parts: [CLS] source [SEP], the search, and the pieces joined."""
    model = load(folder)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(text).ids
    banned = tuple(tokenizer.special_ids - {tokenizer.sep_id})
    settings = Decoding(end=(tokenizer.sep_id,), banned=banned, max_new=9, **options)
    return [tokenizer.decode(one.tokens) for one in generate(MaskWriter(model), [prompt], settings)[0]]


def test_a_text(cli, titles: Path):
    ran = cli("generate", titles / "final", "--text", TEXT, "--precision", "fp32")
    assert ran.code == 0, ran.err
    assert ran.out == reference(titles / "final", TEXT)[0] + "\n" and ran.out.strip()


def test_a_run_stands_for_its_final_model(cli, titles: Path):
    assert cli("generate", titles, "--text", TEXT).out == cli("generate", titles / "final", "--text", TEXT).out


def test_beams_and_n_best(cli, titles: Path):
    ran = cli(
        "generate",
        titles,
        "--text",
        TEXT,
        "--beams",
        4,
        "--n-best",
        3,
        "--length-penalty",
        0.5,
        "--min-new",
        1,
        "--precision",
        "fp32",
    )
    expected = reference(titles / "final", TEXT, beams=4, n_best=3, length_penalty=0.5, min_new=1)
    assert ran.out.splitlines() == expected and len(set(expected)) == 3


def test_json_has_the_scores(cli, titles: Path):
    ran = cli("generate", titles, "--text", TEXT, "--beams", 3, "--n-best", 2, "--json")
    found = json.loads(ran.out)
    assert found["source"] == TEXT and len(found["written"]) == 2
    for one in found["written"]:
        length = one["tokens"] + one["finished"]
        assert one["score"] == pytest.approx(one["log_probability"] / length)
    assert found["written"][0]["score"] > found["written"][1]["score"]


def test_lines_of_stdin(say, cli, titles: Path):
    sources = [row["source"] for row in tiny.english(40, seed=3)]
    ran = say("\n".join(sources).encode(), titles, "--precision", "fp32")
    assert ran.code == 0 and len(ran.out.splitlines()) == 40
    for number in (0, 17, 39):  # batches do not matter
        assert (
            ran.out.splitlines()[number]
            == cli("generate", titles, "--text", sources[number], "--precision", "fp32").out.strip()
        )


def test_an_empty_line_stays_one(say, titles: Path):
    ran = say(b"\xef\xbb\xbfred cat.\r\n\n  \nblue dog.\n", titles)
    lines = ran.out.split("\n")
    assert len(lines) == 5 and lines[1] == lines[2] == lines[4] == "" and lines[0] and lines[3]


def test_bytes_that_are_no_text(say, titles: Path):
    ran = say(b"red cat.\nblue \xff dog.\n", titles)
    assert ran.code == 3 and "stdin:2: not UTF-8 at byte 6" in ran.err


def test_answers_come_at_once(python: str, titles: Path):
    """One who asks line by line over a pipe is answered line by line."""
    process = subprocess.Popen(
        [python, "-m", "allmask", "generate", str(titles)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    for text in (TEXT, "", "blue dog."):
        process.stdin.write(text + "\n")
        process.stdin.flush()
        assert bool(process.stdout.readline().strip()) == bool(text)
    process.communicate(timeout=300)
    assert process.returncode == 0


def test_streamed_text_is_the_same_text(cli, titles: Path):
    plain = cli("generate", titles, "--text", TEXT, "--min-new", 5)
    assert cli("generate", titles, "--text", TEXT, "--min-new", 5, "--stream").out == plain.out


def test_sampling_follows_the_seed(cli, titles: Path):
    words = ("generate", titles, "--text", TEXT, "--sample", "--temperature", 3.0, "--n-best", 6)
    first = cli(*words, "--seed", 1).out
    assert first == cli(*words, "--seed", 1).out != cli(*words, "--seed", 2).out
    assert len(set(first.splitlines())) > 1
    greedy = cli("generate", titles, "--text", TEXT).out
    assert cli("generate", titles, "--text", TEXT, "--sample", "--top-k", 1).out == greedy


def test_the_mask_of_that_very_text(cli, titles: Path):
    ran = cli("generate", titles, "--text", TEXT, "--show-mask")
    title = ran.out.strip()
    rows = [line for line in ran.err.splitlines() if "■" in line]
    names = [line.split()[0] for line in rows]
    assert names == ["[CLS]", "red", "cat", "runs", "here", ".", "[SEP]", *title.split()]
    cells = ["".join(cell for cell in line if cell in "■·") for line in rows]
    target = len(title.split())
    assert cells[:7] == ["■" * 7 + "·" * target] * 7
    assert cells[7:] == ["■" * (7 + 1 + place) + "·" * (target - 1 - place) for place in range(target)]


def test_the_mask_of_a_long_text_is_shortened(cli, titles: Path):
    ran = cli("generate", titles, "--text", " ".join(tiny.WORDS * 3), "--show-mask")
    assert "(11 tokens in the middle of the source are left out)" in ran.err  # 33 + [CLS] + [SEP], 24 shown


def test_chinese_has_no_spaces(cli, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "zh.jsonl", tiny.chinese(64))
    words = ("--steps", 30, "--batch-tokens", 256, "--lr", 0.02, "--max-target", 8, "--quiet")
    cli("finetune", bert, "--data", file, "--out", tmp_path / "zh", *words)
    ran = cli("generate", tmp_path / "zh", "--text", "北京欢迎你。", "--min-new", 3)
    assert len(ran.out.strip()) >= 3 and " " not in ran.out.strip()


# ---- GPT-2 -------------------------------------------------------------------------------------------------------


def test_gpt2_goes_on_as_in_transformers(cli, gpt2: Path):
    model = load(gpt2)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("red cat", special=False).ids
    theirs = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    end = model.tokenizer.eos_id
    with torch.no_grad():
        ids = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=12,
            do_sample=False, eos_token_id=end, pad_token_id=end,
        )[0, len(prompt) :]  # fmt: skip
    expected = model.tokenizer.decode([id for id in ids.tolist() if id != end])
    words = ("generate", gpt2, "--text", "red cat", "--max-new", 12, "--precision", "fp32")
    ran = cli(*words)
    assert ran.code == 0, ran.err
    assert ran.out.rstrip("\n") == " ".join(expected.splitlines()) and expected.strip()
    assert cli(*words, "--stream").out.rstrip("\n") == expected


def test_of_a_long_prompt_the_end_counts(cli, gpt2: Path):
    long = " ".join(tiny.WORDS * 12)
    ran = cli("generate", gpt2, "--text", long, "--max-new", 8, "--json", "--precision", "fp32")
    model = load(gpt2)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(long, special=False).ids
    assert len(ids) > 48
    expected = generate(MaskWriter(model), [ids[-41:]], Decoding(end=(model.tokenizer.eos_id,), max_new=8))[0][0]
    assert json.loads(ran.out)["written"][0]["log_probability"] == pytest.approx(expected.log_probability, abs=1e-4)


# ---- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{bert}", "--text", "x"], 4, "has no language model head, so it cannot write yet"),
        (["{bert}", "--text", "x"], 4, "allmask finetune"),
        (["nosuch", "--text", "x"], 4, "nosuch: no such folder"),
        (["Some text without an option."], 2, 'pass a text with --text "…"'),
        (["本文提出一种方法。"], 2, 'pass a text with --text "…"'),
        (["{run}", "--text", "x", "--top-p", "0.5"], 2, "--top-p: no effect without --sample"),
        (["{run}", "--text", "x", "--sample", "--beams", "2"], 2, "exclude each other"),
        (["{run}", "--text", "x", "--n-best", "2"], 2, "n_best is 2 of 1 beams"),
        (["{run}", "--text", "x", "--stream", "--beams", "2"], 2, "only for a single hypothesis"),
        (["{run}", "--text", "x", "--stream", "--json"], 2, "--stream and --json"),
        (["{run}", "--show-mask"], 2, "--show-mask"),
        (["{run}", "--text", "x", "--beams", "0"], 2, "--beams"),
    ],
)
def test_refusals(cli, bert: Path, titles: Path, words: list[str], code: int, says: str):
    ran = cli("generate", *[word.format(bert=bert, run=titles) for word in words])
    assert ran.code == code and says in ran.err and ran.out == "", ran.err


def test_a_bert_that_only_fills_in_words_is_warned_of(cli, tmp_path: Path):
    folder = tiny.bert(tmp_path / "mlm", ["lm"])
    ran = cli("generate", folder, "--text", TEXT)
    assert ran.code == 0 and "was not fine-tuned to write" in ran.err
    (folder / "allmask.json").write_text('{"task": "title", "max_target": 8}')
    ran = cli("generate", folder, "--text", TEXT)
    assert ran.code == 0 and ran.err == ""


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "int8"])
def test_every_precision_writes(cli, titles: Path, precision: str):
    """A few decimals apart, no more: the model is sure enough of its scores."""
    exact, rounded = (
        json.loads(cli("generate", titles, "--text", TEXT, "--precision", name, "--json").out)["written"][0]
        for name in ("fp32", precision)
    )
    assert rounded["score"] == pytest.approx(exact["score"], abs=0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "allmask.json:1: not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"task": "sing"}', "the task is 'sing'"),
        ('{"task": "title", "mask": "x"}', "mask is 'x'"),
        ('{"task": "title", "volume": 3}', "volume"),
    ],
)
def test_a_broken_task_file(cli, tmp_path: Path, text: str, says: str):
    folder = tiny.bert(tmp_path / "model", ["lm"])
    (folder / "allmask.json").write_text(text)
    ran = cli("generate", folder, "--text", TEXT)
    assert ran.code == 4 and "allmask.json" in ran.err and says in ran.err


def test_an_unfinished_run(cli, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("task: title")
    ran = cli("generate", tmp_path, "--text", TEXT)
    assert ran.code == 4 and "not finished" in ran.err and "--resume" in ran.err
