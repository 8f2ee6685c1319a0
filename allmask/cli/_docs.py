"""docs/options.md: the options of all commands as tables, made from the command line itself.

python -m allmask.cli._docs > docs/options.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allmask.cli._options import sections
from allmask.cli.main import COMMANDS, built

HEAD = """# Options

Made from the declarations in `allmask/options.py` and `allmask/cli/`: `python -m allmask.cli._docs > docs/options.md`.
`allmask COMMAND --help` says the same, and `allmask finetune --task classify --help` what one task has.

The options of `finetune`, `train` and `pretrain` are also keys of the YAML file that `--config` names, with underscores
(`--batch-tokens 8192` is `batch_tokens: 8192`), except `--out`, `--config`, `--resume`, `--quiet`, `--json`, `--shard`.
Flags override the file. A run writes all values, the defaults too, to its `config.yaml`.
"""


def markdown() -> str:
    app = built(list(COMMANDS))
    context = app.make_context("allmask", [], resilient_parsing=True)
    parts = [HEAD]
    for name in COMMANDS:
        for words, command in _commands(name, app.commands[name]):
            parts.append(f"\n## {words}\n\n{COMMANDS[name][1] if words == name else command.get_short_help_str(100)}\n")
            inner = command.make_context(words, [], parent=context, resilient_parsing=True)
            for section, shown in sections(command, inner).items():
                parts.append(f"\n| {section.capitalize()} | Default | |\n|---|---|---|\n")
                for one in shown:
                    if one.words != "-h, --help":
                        parts.append(f"| `{_cell(one.words)}` | {_cell(one.default)} | {_cell(one.help)} |\n")
    return "".join(parts)


def _commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or the commands of a group."""
    found = getattr(command, "commands", None)
    if found is None:
        yield words, command
    for name, inner in (found or {}).items():
        yield f"{words} {name}", inner


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
