"""The files of the model are in this folder: `allmask.load("allmask-zh")` finds them."""

from pathlib import Path

FOLDER = Path(__file__).parent
