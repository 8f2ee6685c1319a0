"""`allmask predict` over a folder of JSON lines, as a Ray Data job.

python deploy/ray_predict.py runs/title articles/ titles/ --processes 8
"""

import argparse
from pathlib import Path

import pyarrow
import ray


class Predict:
    """A model in a process of its own; rows in, rows with the predicted columns out."""

    def __init__(self, model: str):
        from allmask.tasks.task import ModelFolder

        self.predictor = ModelFolder.open(model).predictor()

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        from allmask.data import DataFile

        rows = table.to_pylist()
        records = list(self.predictor.read(DataFile(Path("row"), items=rows)))
        found = self.predictor.predict(records)
        return pyarrow.Table.from_pylist([{**row, **one} for row, one in zip(rows, found, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", help="a folder or a file of JSON lines")
    parser.add_argument("out", help="a folder to write to")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    rows = ray.data.read_json(str(Path(given.data).resolve()), lines=True)
    pool = ray.data.ActorPoolStrategy(size=given.processes)
    made = rows.map_batches(
        Predict, fn_constructor_args=[given.model], compute=pool, batch_size=256, batch_format="pyarrow"
    )
    made.write_json(str(Path(given.out).resolve()), force_ascii=False)


if __name__ == "__main__":
    main()
