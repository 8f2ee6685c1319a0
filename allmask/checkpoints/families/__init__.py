"""Families of checkpoints, one file each: how they write `config.json`, the names of their tensors, what they refuse.

A family is data, see `Family` in checkpoints/renaming.py; `model_type` in `config.json` says which one a folder is of.
Another package adds a family by `FAMILIES.register("my-bert", MY_BERT)`, or by an entry point in `allmask.families`.
"""
