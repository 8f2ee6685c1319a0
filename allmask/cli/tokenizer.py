"""Train a tokenizer on your own text, or show how one splits a text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from allmask.cli import AsJson, Encoding, OnBadRecord, emit, examples, hushed, note, note_skipped
from allmask.errors import UsageError
from allmask.files import replace_folder

EXAMPLES = """
    allmask tokenizer train corpus/ --kind wordpiece --size 8000 --out tok/
    allmask tokenizer show tok/ --text "北京欢迎你"
"""
_TRAIN = """
    allmask tokenizer train corpus/ --size 8000 --out tok/
    allmask tokenizer train zh.jsonl.gz en.parquet --text-field body --kind byte-bpe --size 20000 --out tok/ --json
"""
_SHOW = """
    allmask tokenizer show allmask-zh --text 北京欢迎你
    allmask tokenizer show bert-folder/ --text "Mask or 掩码?"
    allmask tokenizer show tok/vocab.txt --text "a question" --pair "its answer" --json
"""

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@command.command("train", epilog=examples(_TRAIN), short_help="Train a tokenizer on text files.")
def train_command(
    files: Annotated[
        list[Path],
        Argument(help="Text files (.txt, .jsonl, .csv, .parquet, also as .gz), or folders of them."),
    ],
    out: Annotated[Path, Option("--out", "-o", help="Folder to write.", metavar="FOLDER")],
    kind: Annotated[
        Literal["wordpiece", "bpe", "byte-bpe", "unigram"],
        Option(help="Algorithm: wordpiece is BERT's, byte-bpe GPT-2's, unigram T5's."),
    ] = "wordpiece",
    size: Annotated[int, Option(help="Size of the vocabulary, special tokens included.")] = 8000,
    lowercase: Annotated[
        bool | None,
        Option("--lowercase/--cased", help="wordpiece: convert text to lower case.", show_default="lowercase"),
    ] = None,
    minimum: Annotated[int, Option("--min-count", help="Number of times a pair must occur to be merged.")] = 2,
    alphabet: Annotated[
        int | None,
        Option(help="Keep only the N most frequent characters.", metavar="N", show_default="all"),
    ] = None,
    text_field: Annotated[str, Option(help="Field of a record that holds the text.")] = "text",
    encoding: Encoding = None,
    on_bad_record: OnBadRecord = "stop",
    force: Annotated[bool, Option("--force", help="Replace a tokenizer that is already in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer on text files, the same ones that `pretrain` reads.

    Writes a folder that allmask and transformers load. The same files always give the same tokenizer.
    """
    from allmask.data.sentences import Reading, Texts
    from allmask.text import train_tokenizer

    _expect_free(out, force)
    texts = Texts(files, Reading(text_field, on_bad_record, encoding=encoding), _progress())
    tokenizer = train_tokenizer(texts, kind, size, lowercase=lowercase, minimum=minimum, alphabet=alphabet)
    with replace_folder(out) as beside:
        tokenizer.save(beside)
    data = {"kind": tokenizer.kind, "size": tokenizer.size, "specials": dict(tokenizer.specials), "out": str(out)}
    skipped = dict(texts.reading.skipped)
    data |= {"skipped": skipped} if skipped else {}
    note_skipped(skipped)
    fewer = f" (not {size:,}: the text has no more)" if tokenizer.size < size else ""
    emit(as_json, data, f"{tokenizer.kind} tokenizer with {tokenizer.size:,} tokens{fewer} in {out}")


@command.command("show", epilog=examples(_SHOW))
def show_command(
    source: Annotated[
        str, Argument(help="A model or tokenizer folder, a tokenizer.json, a vocab.txt, allmask-en, or org/name.")
    ],
    text: Annotated[str, Option("--text", help="The text to split.")],
    pair: Annotated[str | None, Option("--pair", help="A second text.", show_default="none")] = None,
    special: Annotated[bool, Option("--special/--no-special", help="Add [CLS] and [SEP].")] = True,
    as_json: AsJson = False,
) -> None:
    """Print the tokens of a text.

    Each line shows the id, the segment, the range of characters, and the token.
    """
    from allmask.checkpoints import resolve
    from allmask.text import Tokenizer

    encoded = Tokenizer.load(resolve(source)).encode(text, pair, special=special)
    columns = zip(encoded.ids, encoded.segments, encoded.offsets, encoded.tokens, strict=True)
    rows = [
        {"id": id, "segment": segment, "start": start, "end": end, "token": token}
        for id, segment, (start, end), token in columns
    ]
    lines = [f"{row['id']:>7}  {row['segment']}  {row['start']:>4}–{row['end']:<4} {row['token']}" for row in rows]
    emit(as_json, rows, "\n".join(lines) if lines else "(no tokens)")


def _progress() -> Callable[[int, int], None]:
    """Return a function that prints how much has been read: in place on a terminal, at most ten lines in a log."""
    tenths = -1

    def report(done: int, total: int) -> None:
        nonlocal tenths
        percent = 100 * done // max(total, 1)
        message = f"reading {percent:3d}% of {total / 1e6:.1f} MB"
        if sys.stderr.isatty() and not hushed():
            print(f"\r{message}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif percent // 10 > tenths or percent < tenths * 10:
            tenths = percent // 10
            note(message)

    return report


def _expect_free(out: Path, force: bool) -> None:
    """Refuse an occupied folder before any work; `force` allows one that holds a tokenizer and nothing else."""
    from allmask.text.save import FILES

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file", "give a folder for --out")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not force:
        raise UsageError(f"{out}: the folder is not empty", "give another folder, or --force to replace the tokenizer")
    others = [name for name in found if name not in FILES]
    if others:
        raise UsageError(f"{out}: holds more than a tokenizer ({', '.join(others[:3])})", "give another folder")
