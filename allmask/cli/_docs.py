"""Write docs/options.md, the options of all commands as tables, from the command line itself.

python -m allmask.cli._docs > docs/options.md
"""

from __future__ import annotations

from allmask.cli._options import sections
from allmask.cli.main import COMMANDS, built

HEAD = """# Options

Made from the declarations in `allmask/options.py` and `allmask/cli/`: `python -m allmask.cli._docs > docs/options.md`.
`allmask COMMAND --help` shows the same; `allmask finetune --task classify --help` shows the options of one task.

The options of `finetune`, `train` and `pretrain` are also keys of the YAML file that `--config` names, with underscores
(`--batch-tokens 8192` is `batch_tokens: 8192`), except `--out`, `--config`, `--resume`, `--quiet`, `--json`, `--shard`.
Flags override the file. A run writes all values, including defaults, to its `config.yaml`.
"""


def markdown() -> str:
    app = built(list(COMMANDS))
    context = app.make_context("allmask", [], resilient_parsing=True)
    parts = [HEAD]
    for name, (_, short_help) in COMMANDS.items():
        subcommands = getattr(app.commands[name], "commands", {})
        commands = {f"{name} {sub}": found for sub, found in subcommands.items()} or {name: app.commands[name]}
        for words, command in commands.items():
            parts.append(f"\n## {words}\n\n{short_help if words == name else command.get_short_help_str(100)}\n")
            inner = command.make_context(words, [], parent=context, resilient_parsing=True)
            for section, rows in sections(command, inner).items():
                parts.append(f"\n| {section.capitalize()} | Default | |\n|---|---|---|\n")
                for row in rows:
                    if row.words != "-h, --help":
                        cells = (cell.replace("|", "\\|") for cell in (f"`{row.words}`", row.default, row.help))
                        parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
