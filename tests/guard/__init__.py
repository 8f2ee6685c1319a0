"""The guard of a refactoring: every training and predicting command, tiny and fixed, must go on giving the same bits.

It knows the command line and the formats of files, and nothing of the package's modules, so these may move. Names that
are changed on purpose are told to the tables at the top of lab.py; the record stays as it is, in the old names.

  inputs.py       the data and the BERT that all commands read, in English and Chinese
  recipes.py      the commands, in groups that need nothing of each other
  lab.py          runs a command, and keeps hashes and plain numbers of what it left
  record.py       expected.json: what was kept, by machine; how another is compared with it
  expected.json

    python -m tests.guard check [--only NAME]        a line a recipe; exit code 1 if one differs
    python -m tests.guard record [--force]           keep what this machine gives as what is expected of it
"""
