"""The files of the model are in this folder: `allmask.load("allmask-en")` finds them."""

from pathlib import Path

FOLDER = Path(__file__).parent
