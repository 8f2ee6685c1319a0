"""The main job in minutes: a pretrained BERT learns to write summaries of docstrings, by its mask alone."""

from allmask.demo.run import FAST, FULL, Size, run_demo

__all__ = ["FAST", "FULL", "Size", "run_demo"]
