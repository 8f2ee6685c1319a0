"""Train a tokenizer on your own text, or show how one cuts a text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from allmask.cli import emit, examples, note
from allmask.errors import UsageError
from allmask.files import replace_folder

if TYPE_CHECKING:
    from allmask.text import Tokenizer

EXAMPLES = """
    allmask tokenizer train corpus/ --kind wordpiece --size 8000 --out tok/
    allmask tokenizer show tok/ --text "北京欢迎你"
"""
_TRAIN = """
    allmask tokenizer train corpus/ --size 8000 --out tok/
    allmask tokenizer train zh.jsonl.gz en.parquet --text-field body --kind byte-bpe --size 20000 --out tok/ --json
"""
_SHOW = """
    allmask tokenizer show bert-folder/ --text "Mask or 掩码?"
    allmask tokenizer show tok/vocab.txt --text "a question" --pair "its answer" --json
"""

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@command.command("train", epilog=examples(_TRAIN))
def train_command(
    files: Annotated[
        list[Path],
        typer.Argument(help="Text files (.txt, .jsonl, .csv, .parquet, also as .gz), or folders of them."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    kind: Annotated[
        Literal["wordpiece", "bpe", "byte-bpe", "unigram"],
        typer.Option(help="As BERT has it, plain, as GPT-2 or as T5 has it."),
    ] = "wordpiece",
    size: Annotated[int, typer.Option(help="Tokens in all, special ones included.")] = 8000,
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--cased", help="For wordpiece only; lowercase is its default.")
    ] = None,
    minimum: Annotated[int, typer.Option("--min-count", help="How often a pair must occur to become a piece.")] = 2,
    alphabet: Annotated[
        int | None, typer.Option(help="Keep only this many characters, the most frequent; others are unknown.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="The field of a record, or the column, that is the text.")] = "text",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with a line or record that cannot be read.")
    ] = "stop",
    force: Annotated[bool, typer.Option("--force", help="Replace a tokenizer that is already in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a tokenizer on text files, the same ones that `pretrain` reads.

    Writes a folder that allmask and transformers load. The same files give the same tokenizer.
    """
    from allmask.data.sentences import Reading, Texts
    from allmask.text import train_tokenizer

    _expect_free(out, force)
    texts = Texts(files, Reading(text_field, on_bad_record), _progress())
    tokenizer = train_tokenizer(texts, kind, size, lowercase=lowercase, minimum=minimum, alphabet=alphabet)
    with replace_folder(out) as beside:
        tokenizer.save(beside)
    data = {"kind": tokenizer.kind, "size": tokenizer.size, "specials": dict(tokenizer.specials), "out": str(out)}
    skipped = dict(texts.reading.skipped)
    if skipped:
        data["skipped"] = skipped
        note(f"skipped: {', '.join(f'{count:,} × {reason}' for reason, count in skipped.items())}")
    fewer = f" (the text has no more; {size:,} asked)" if tokenizer.size < size else ""
    emit(as_json, data, f"{tokenizer.kind} tokenizer with {tokenizer.size:,} tokens{fewer} in {out}")


@command.command("show", epilog=examples(_SHOW))
def show_command(
    source: Annotated[Path, typer.Argument(help="A model or tokenizer folder, a tokenizer.json or a vocab.txt.")],
    text: Annotated[str, typer.Option("--text", help="The text to cut.")],
    pair: Annotated[str | None, typer.Option("--pair", help="A second text.")] = None,
    special: Annotated[bool, typer.Option("--special/--no-special", help="Frame with special tokens.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print the pieces of a text.

    A line for each: its id, its segment, the characters it comes from, and the piece itself.
    """
    from allmask.text import Tokenizer

    tokenizer = Tokenizer.load(source)
    rows = _rows(tokenizer, text, pair, special)
    lines = [f"{row['id']:>7}  {row['segment']}  {row['start']:>4}–{row['end']:<4} {row['token']}" for row in rows]
    emit(as_json, rows, "\n".join(lines) if lines else "(no tokens)")


def _rows(tokenizer: Tokenizer, text: str, pair: str | None, special: bool) -> list[dict[str, int | str]]:
    encoded = tokenizer.encode(text, pair, special=special)
    columns = zip(encoded.ids, encoded.segments, encoded.offsets, encoded.tokens, strict=True)
    return [
        {"id": id, "segment": segment, "start": start, "end": end, "token": token}
        for id, segment, (start, end), token in columns
    ]


def _progress() -> Callable[[int, int], None]:
    """Say how far the reading is: in place on a terminal, at most ten lines in a log."""
    said = -1

    def report(done: int, total: int) -> None:
        nonlocal said
        percent = 100 * done // max(total, 1)
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rreading {percent:3d}% of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)
        elif percent // 10 > said or percent < said * 10:
            said = percent // 10
            note(f"reading {percent:3d}% of {total / 1e6:.1f} MB")

    return report


def _expect_free(out: Path, force: bool) -> None:
    """Before any work: is there room for the result, and would --force delete something that is not a tokenizer?"""
    from allmask.text.save import FILES

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file", "give a folder for --out")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not force:
        raise UsageError(f"{out}: the folder is not empty", "give another folder, or --force to replace the tokenizer")
    others = [name for name in found if name not in FILES]
    if others:
        raise UsageError(f"{out}: holds more than a tokenizer ({', '.join(others[:3])})", "give another folder")
