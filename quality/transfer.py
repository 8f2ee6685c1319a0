"""What the shipped weights save: the same fine-tuning from them and from the model that they were trained from.

    python quality/transfer.py titles --out quality-runs/transfer                # docstrings, 200 to 3,000 pairs
    python quality/transfer.py reading --data FOLDER --out quality-runs/transfer # sst2, wnut17, chnsenticorp in FOLDER

A model that has never written quotes its texts for two more epochs by default. Titles are also learnt without that
(`--quote 0`), so that both starts can be compared after as many epochs. The differences of both are printed.

Every run is `allmask finetune` with its defaults and 3 epochs, chosen on dev and scored on test. Docstrings are in none
of the texts that the weights were trained on. Finished runs are in results.jsonl and are not repeated, so the command
can be stopped at any time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common

from allmask.demo.docstrings import find_pairs, python_folders

PAIRS = (200, 1000, 3000)
DEV, TEST = 200, 400
FILES = 240  # parsed, of each package
EPOCHS = 3
WRITERS = [("minilm", ", unquoted", ("--quote", 0)), ("minilm", "", ()), ("allmask-en", "", ())]
STARTS = {"en": ("minilm", "allmask-en"), "zh": ("bge-small-zh", "allmask-zh")}


@dataclass(frozen=True)
class DataSet:
    task: str
    language: str
    metric: str  # on the test set
    train: int
    dev: int
    test: int
    suffix: str = "jsonl"


SETS = {
    "sst2": DataSet("classify", "en", "accuracy", 3000, 400, 1821),
    "wnut17": DataSet("tag", "en", "f1", 2000, 300, 1287),
    "chnsenticorp": DataSet("classify", "zh", "accuracy", 800, 150, 1000),
}


@dataclass(frozen=True)
class Run:
    name: str
    start: str
    task: str
    data: Path  # a folder with train, dev and test files
    train: str  # the name of the file to train on
    seed: int
    options: tuple[Any, ...] = ()  # others than the defaults


class Results:
    """A line for each finished run."""

    def __init__(self, out: Path):
        self.out, self.file = out, out / "results.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def run(self, run: Run) -> dict[str, Any]:
        """Return the scores of a run on the test file; train and evaluate unless that was done before."""
        key = {"name": run.name, "start": Path(run.start).name, "seed": run.seed}
        for row in self.rows:
            if key.items() <= row.items():
                return row
        folder, began = self.out / "run", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        suffix = Path(run.train).suffix
        words = ["finetune", run.start, "--task", run.task, "--data", run.data / run.train]
        words += ["--eval", run.data / f"dev{suffix}", "--epochs", EPOCHS, "--seed", run.seed, "--out", folder]
        allmask(*words, *run.options, "--quiet")
        seconds = time.monotonic() - began
        found = json.loads(allmask("evaluate", folder / "final", run.data / f"test{suffix}", "--json", "--quiet"))
        row = {**key, "seconds": round(seconds), "scores": found}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)
        print(json.dumps(key), flush=True)
        return row


def allmask(*words: Any) -> str:
    ran = subprocess.run([sys.executable, "-m", "allmask", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(ran.returncode)
    return ran.stdout


def write_head(source: Path, target: Path, lines: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = source.read_text(encoding="utf-8").splitlines()[:lines]
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")


# ---- titles --------------------------------------------------------------------------------------------------


def docstrings(folder: Path) -> None:
    """Write the docstrings of this Python as train-*.jsonl, dev.jsonl and test.jsonl, each file in one of them."""
    if (folder / "test.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = find_pairs(python_folders(), FILES, workers=1).splits
    parts = {f"train-{pairs}": found["train"][:pairs] for pairs in PAIRS}
    for name, pairs in {**parts, "dev": found["dev"][:DEV], "test": found["test"][:TEST]}.items():
        lines = [json.dumps(asdict(pair), ensure_ascii=False) for pair in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def titles(results: Results) -> None:
    folder = results.out / "docstrings"
    docstrings(folder)
    rows, lead = [], 0.0
    curves: dict[str, list[float]] = {f"from {start}{how}": [] for start, how, _ in WRITERS}
    for pairs in PAIRS:
        for start, how, options in WRITERS:
            run = Run(f"docstrings-{pairs}{how}", start, "title", folder, f"train-{pairs}.jsonl", 1, options)
            found = results.run(run)
            scores = found["scores"]["scores"]
            lead = scores["lead sentence"]["rouge_l"]
            curves[f"from {start}{how}"].append(scores["model"]["rouge_l"])
            length = f"{scores['model']['length']:.1f} ({scores['model']['reference_length']:.1f})"
            rouge_l = f"{scores['model']['rouge_l']:.1f}"
            rows.append([f"{pairs:,}", start + how, rouge_l, length, str(found["seconds"])])
    print(common.table(["pairs", "start", "ROUGE-L", "words (people's)", "seconds"], rows))
    print(f"first sentence: {lead:.1f}")
    print("\n".join(differences(curves, lead)))
    draw(curves, lead, results.out / "transfer.png")


def differences(curves: dict[str, list[float]], lead: float) -> list[str]:
    """Say, by number of pairs, how much better the last start is than each other and than the first sentence."""
    *others, ours = curves.items()
    lines = []
    for place, pairs in enumerate(PAIRS):
        found = ours[1][place]
        beside = [*((name, values[place]) for name, values in others), ("the first sentence", lead)]
        parts = [f"{found - value:+.1f} against {name.removeprefix('from ')}" for name, value in beside]
        lines.append(f"{pairs:,} pairs, {ours[0]}: {', '.join(parts)}")
    return lines


def draw(curves: dict[str, list[float]], lead: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (start, values), colour in zip(curves.items(), ("#C9CED6", "#8B93A1", "#5B84D7"), strict=True):
        axes.plot(PAIRS, values, "o-", color=colour, label=start)
    axes.axhline(lead, color="#E39A57", linestyle="--", label="first sentence of the text")
    axes.set_xscale("log")
    axes.set_xticks(PAIRS, [f"{pairs:,}" for pairs in PAIRS])
    axes.minorticks_off()
    axes.set(xlabel="pairs to learn from", ylabel="ROUGE-L on held-out docstrings", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


# ---- reading -------------------------------------------------------------------------------------------------


def reading(results: Results, data: Path, chinese: str, seeds: int, only: Sequence[str]) -> None:
    rows = []
    for name, kind in [(name, SETS[name]) for name in only]:
        folder = results.out / name
        for part in ("train", "dev", "test"):
            write_head(data / name / f"{part}.{kind.suffix}", folder / f"{part}.{kind.suffix}", getattr(kind, part))
        for start in STARTS[kind.language]:
            found = list(repeated(results, name, kind, chinese if start == "bge-small-zh" else start, seeds))
            spread = f"± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            rows.append([name, start, kind.metric, f"{statistics.mean(found):.1f} {spread}"])
    print(common.table(["data", "start", "", "test"], rows))


def repeated(results: Results, name: str, kind: DataSet, start: str, seeds: int) -> Iterator[float]:
    for seed in range(1, seeds + 1):
        run = Run(name, start, kind.task, results.out / name, f"train.{kind.suffix}", seed)
        yield found_score(results.run(run)["scores"], kind.metric)


def found_score(scores: dict[str, Any], metric: str) -> float:
    """Return a metric, wherever it stands in what `evaluate --json` prints."""
    for name, value in scores.items():
        if name == metric and isinstance(value, int | float):
            return float(value)
    return next(found_score(value, metric) for value in scores.values() if isinstance(value, dict))


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("titles", "reading"))
    parser.add_argument("--data", type=Path, help="a folder with the data sets, for reading")
    parser.add_argument("--chinese", default="bge-small-zh", help="the folder of bge-small-zh, for reading")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), help="data sets, for reading")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    results = Results(args.out)
    if args.what == "titles":
        titles(results)
    elif args.data is None:
        parser.error("name the data sets with --data")
    else:
        reading(results, args.data, args.chinese, args.seeds, args.only)


if __name__ == "__main__":
    main()
