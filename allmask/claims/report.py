"""The page of all results: a tile for each claim, with its verdict, figure and plot. One file, nothing from outside.

python -m allmask.claims.report RESULTS docs     the page and the table of the documentation, from a report
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

from allmask.claims.claim import WORDS, Claim, Result, all_claims, saved_results
from allmask.errors import DataError
from allmask.files import atomic_file

Run = tuple[Claim, Result]
COLOURS = {"holds": "#2e8b57", "weaker": "#c78500", "fails": "#c0392b", "error": "#7f8c8d"}
MARKS = ("<!-- verdicts -->", "<!-- end of verdicts -->")  # in docs/claims.md
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #222; --soft: #667; --tile: #f6f7f9; --line: #dde; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #e6e6e6; --soft: #9aa; --tile: #1f2228; --line: #333; }
}
body { margin: 0 auto; max-width: 1200px; padding: 1rem; background: var(--page); color: var(--text);
       font: 16px/1.45 system-ui, sans-serif; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
article { background: var(--tile); border: 1px solid var(--line); border-top: 5px solid var(--verdict);
          border-radius: 6px; padding: 0.8rem 1rem; }
h2 { font-size: 1.05rem; margin: 0 0 0.3rem; }
.verdict { color: var(--verdict); font-weight: 600; }
.plot { background: #fff; border-radius: 4px; margin: 0.5rem 0; }
.plot svg { width: 100%; height: auto; display: block; }
dl { margin: 0.4rem 0 0; font-size: 0.86rem; color: var(--soft); }
dt { font-weight: 600; } dd { margin: 0 0 0.3rem; }
footer { color: var(--soft); font-size: 0.86rem; margin-top: 1rem; }
"""


PLURAL = {"holds": "hold", "weaker": "hold here, but weaker", "fails": "do not hold here", "error": "did not run"}


def summary(results: Sequence[Result]) -> str:
    """For example: 12 claims ran in 34 s: 11 hold, 1 does not hold here."""
    counts = {level: sum(result.verdict.level == level for result in results) for level in WORDS}
    said = [f"{count} {WORDS[level] if count == 1 else PLURAL[level]}" for level, count in counts.items() if count]
    seconds = sum(result.seconds for result in results)
    return f"{len(results)} claim{'s' * (len(results) != 1)} ran in {seconds:.0f} s: {', '.join(said)}"


def write_report(folder: Path, runs: Sequence[Run]) -> None:
    """Write claims.html and claims.md."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "claims.html") as file:
        file.write(_page(runs))
    with atomic_file(folder / "claims.md") as file:
        file.write(_markdown(runs))


def plot(claim: Claim, result: Result) -> str:
    """The plot as SVG; equal numbers give equal bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {"svg.hashsalt": claim.name, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = plt.subplots(figsize=(4.6, 2.9), layout="constrained")
        claim.draw(axes, result.numbers)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
        plt.close(figure)
    svg = written.getvalue()
    label = html.escape(claim.title, quote=True)
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _page(runs: Sequence[Run]) -> str:
    results = [result for _, result in runs]
    tiles = "\n".join(_tile(claim, result) for claim, result in runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Claims, run</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>Claims of the literature, run</h1>\n"
        f"<p>{html.escape(summary(results))}.</p>\n<main>\n{tiles}\n</main>\n"
        f"<footer>{html.escape(_setting(results))}</footer>\n</body>\n</html>\n"
    )


def _tile(claim: Claim, result: Result) -> str:
    drawn = "" if not result.numbers else f'<div class="plot">{plot(claim, result)}</div>\n'
    facts = {"Claim": claim.statement, "Criterion": claim.criterion, "Source": claim.source}
    if claim.in_full:
        facts["With --full"] = claim.in_full
    if claim.at_length:
        facts["At length"] = claim.at_length
    facts["Time"] = f"{result.seconds:.1f} s{', full run' if result.full else ''}"
    listed = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items())
    return (
        f'<article id="{claim.name}" style="--verdict: {COLOURS[result.verdict.level]}">\n'
        f"<h2>{claim.name} · {html.escape(claim.title)}</h2>\n"
        f'<div><span class="verdict">{result.verdict.words}</span>: {html.escape(result.verdict.figure)}</div>\n'
        f"{drawn}<dl>{listed}</dl>\n</article>"
    )


def _markdown(runs: Sequence[Run]) -> str:
    results = [result for _, result in runs]
    parts = ["# Claims of the literature, run", f"{summary(results)}.", table(runs), _setting(results)]
    return "\n\n".join(parts) + "\n"


def table(runs: Sequence[tuple[Claim, Result | None]]) -> str:
    """A line for each claim; without a verdict, if it was not run."""
    lines = ["| claim | | verdict | figure | seconds |", "|---|---|---|---|---|"]
    for claim, result in runs:
        found = "| | |"
        if result is not None:
            figure = result.verdict.figure.replace("|", "\\|")
            found = f"{result.verdict.words} | {figure} | {result.seconds:.1f} |"
        lines.append(f"| {claim.name} | {claim.title} | {found}")
    return "\n".join(lines)


def write_docs(docs: Path, runs: Sequence[Run]) -> None:
    """Write the report to figures/claims.html, and the table and the summary into claims.md, between its two marks."""
    results = [result for _, result in runs]
    page, by_name = docs / "claims.md", {result.name: result for result in results}
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise DataError(f"{page}: has no {MARKS[0]} … {MARKS[1]}", "put both marks where the table belongs")
    shown = table([(claim, by_name.get(claim.name)) for claim in all_claims()])
    with atomic_file(page) as file:
        file.write(f"{before}{MARKS[0]}\n{summary(results)} ({_setting(results)}).\n\n{shown}\n{MARKS[1]}{after}")
    with atomic_file(docs / "figures" / "claims.html") as file:
        file.write(_page(runs))


def _setting(results: Sequence[Result]) -> str:
    """Where the results come from; several settings if an earlier report was continued."""
    seen = {", ".join(f"{name} {value}" for name, value in result.setting.items()) for result in results}
    return "; ".join(sorted(seen))


if __name__ == "__main__":
    import sys

    write_docs(Path(sys.argv[2]), saved_results(Path(sys.argv[1])))
