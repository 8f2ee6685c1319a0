"""Whether the compiled writers write the tokens that torch writes, greedy and with four beams.

    python quality/equal_tokens.py acl/test.jsonl [--model allmask-en] [--first 0 --count 1000] [--isa avx2]

    search   int8: the whole search in one C call, against search.py over the same compiled steps; not a bit may differ
    steps    fp32: prompts and steps in C, against torch without any compiled kernel (ALLMASK_KERNELS=0)

The file has a `source` per line. Where the two differ, both score both results. They round differently, so a tie is
excused: each path prefers its own result, by less than TIE. Prints a line of JSON for each comparison; exits with 1 if
a difference is no tie.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # some files of both folders have the same name

import environment  # first: it sets what libraries read when they are loaded

# isort: split
import torch

from allmask.decoding.fast.engines import _EngineWriter
from allmask.registry import USES
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder

BATCH = 16
TIE = 1e-3  # in log-probability of a whole text: the sums of fp32 differ by about 1e-4
Text = tuple[list[int], float]  # the best tokens of a source, and their log-probability


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.child:  # a process without kernels: from JSON on stdin to JSON on stdout
        given = json.load(sys.stdin)
        generator = open_model(options.model, "fp32")
        if options.child == "score":
            print(json.dumps([[score(generator, source, tokens) for tokens in both] for source, *both in given]))
        else:
            print(json.dumps(write(generator, given, options.beams)))
        return
    with options.file.open(encoding="utf-8") as file:
        lines = islice(file, options.first, options.first + options.count)
        sources = [json.loads(line)["source"] for line in lines]
    comparisons = {"search": compare_searches, "steps": compare_steps}
    chosen = [comparisons[options.only]] if options.only else comparisons.values()
    worst = 0
    for compare in chosen:
        for beams in [options.beams] if options.beams else [1, 4]:
            started = time.monotonic()
            found = compare(options.model, sources, beams)
            found |= {"first": options.first, "isa": environment.ISA, "seconds": round(time.monotonic() - started)}
            print(json.dumps(found, ensure_ascii=False), flush=True)
            worst = max(worst, found["differ"] - found["ties"])
    raise SystemExit(min(worst, 1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, parents=[environment.PARSER])
    parser.add_argument("file", type=Path, nargs="?", help="a jsonl file with sources")
    parser.add_argument("--model", default="allmask-en")
    parser.add_argument("--first", type=int, default=0, help="number of the first source")
    parser.add_argument("--count", type=int, default=1000, help="of sources")
    parser.add_argument("--beams", type=int, help="only so many")
    parser.add_argument("--only", choices=("search", "steps"))
    parser.add_argument("--child", choices=("write", "score"), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- comparisons -------------------------------------------------------------------------------------------------


def compare_searches(model: str, sources: list[str], beams: int) -> dict[str, Any]:
    generator = open_model(model, "int8")
    whole, calls = _EngineWriter.search, [0]

    def counted(*arguments: Any) -> Any:
        found = whole(*arguments)
        calls[0] += found is not None
        return found

    _EngineWriter.search = counted  # type: ignore[method-assign]
    ours = write(generator, sources, beams)
    _EngineWriter.search = lambda *_: None  # type: ignore[method-assign,assignment]
    others = write(generator, sources, beams)
    _EngineWriter.search = whole  # type: ignore[method-assign]
    return {"compared": "search", "beams": beams, "calls": calls[0], **summary(sources, ours, others), "ties": 0}


def compare_steps(model: str, sources: list[str], beams: int) -> dict[str, Any]:
    generator = open_model(model, "fp32")
    ours = write(generator, sources, beams)
    others = without_kernels("write", model, beams, sources)
    found, ties = summary(sources, ours, others), []
    both = [(source, a, b) for source, (a, _), (b, _) in zip(sources, ours, others, strict=True)]
    wanted = [each for each in both if each[1] != each[2]]
    torch_scores = without_kernels("score", model, beams, wanted) if wanted else []
    for (source, *texts), (theirs_ours, theirs) in zip(wanted, torch_scores, strict=True):
        mine, mine_others = (score(generator, source, tokens) for tokens in texts)
        ties.append([round(mine - mine_others, 6), round(theirs - theirs_ours, 6)])  # how much each prefers its own
    return {
        "compared": "steps", "beams": beams, **found, "preferences": ties,
        "ties": sum(all(0 <= gap < TIE for gap in gaps) for gaps in ties),
    }  # fmt: skip


def summary(sources: list[str], ours: list[Text], others: list[Text]) -> dict[str, Any]:
    gaps = [abs(a[1] - b[1]) for a, b in zip(ours, others, strict=True) if a[0] == b[0]]
    return {"sources": len(sources), "differ": len(sources) - len(gaps), "largest gap of log-probability": max(gaps)}


def without_kernels(child: str, model: str, beams: int, given: object) -> Any:
    command = [sys.executable, __file__, "--child", child, "--model", model, "--beams", str(beams)]
    command += ["--isa", environment.ISA] if environment.ISA else []
    env = {**os.environ, "ALLMASK_KERNELS": "0"}
    done = subprocess.run(command, input=json.dumps(given), env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# ---- writing -----------------------------------------------------------------------------------------------------


def open_model(model: str, precision: str) -> TextGenerator:
    return USES["generate"](ModelFolder.open(model, "cpu"), precision, None)


def write(generator: TextGenerator, sources: list[str], beams: int) -> list[Text]:
    found = generator.write(sources, batch=BATCH, beams=beams)
    return [(list(best.tokens), best.log_probability) for [(_, best)] in found]


@torch.inference_mode()
def score(generator: TextGenerator, source: str, tokens: list[int]) -> float:
    """The log-probability of a text and its end token, given the source."""
    writer, settings = generator.writer, generator.settings()
    assert writer is not None
    [prompt] = generator.task.prompts(tokenizer_of(generator.model), [source]).ids
    logits, state = writer.begin([prompt])
    total = 0.0
    for token in [*tokens, *settings.end[:1]]:
        total += float(logits.float().log_softmax(1)[0, token])
        logits, state = writer.step(torch.tensor([token]), state)
    return total


if __name__ == "__main__":
    main()
