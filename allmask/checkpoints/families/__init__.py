"""Families of checkpoints, one file each: their `config.json`, the names of their tensors, and what is refused.

A family is data, see `Family` in checkpoints/renaming.py. `model_type` in `config.json` names the family of a folder.
Another package adds a family by `FAMILIES.register("my-bert", MY_BERT)`, or by an entry point in `allmask.families`.
"""
