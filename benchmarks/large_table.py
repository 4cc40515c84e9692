"""Does a longer table need more memory to predict? `python -m benchmarks.large_table`.

`varprop predict` reads made-up tables of 20 columns, one much longer than the other, each in a process of its
own, whose largest memory is noted. Results are in benchmarks/results/large_table.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from experiments import cells

RESULT = Path(__file__).parent / "results" / "large_table.json"
PART = 100_000
COMMAND = """
import json, resource, sys
from varprop.cli import app
app(sys.argv[2:], standalone_mode=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
open(sys.argv[1], "w").write(json.dumps(peak))
"""


def write(path: Path, rows: int) -> None:
    """A table of 19 numbers and a category; the target is one of the numbers."""
    for k in range(-(-rows // PART)):
        n, random = min(PART, rows - k * PART), np.random.RandomState(k)
        table = pd.DataFrame(random.normal(size=(n, 18)).round(4), columns=[f"x{i}" for i in range(18)])
        table["kind"] = random.choice(["a", "b", "c"], n)
        table["y"] = (np.sin(table.x0) + 0.1 * random.normal(size=n)).round(4)
        table.to_csv(path, mode="a", header=k == 0, index=False)


def run(folder: Path, *arguments: object) -> dict[str, float]:
    """The largest memory of a command in MB, and its time."""
    began, peak = time.monotonic(), folder / "peak.json"
    command = [sys.executable, "-c", COMMAND, str(peak), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"memory": json.loads(peak.read_text()), "seconds": time.monotonic() - began}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_table", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[40_000, 300_000])
    parser.add_argument("--train", type=int, default=6000, help="rows to fit the model to")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cells.commit()
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "train.csv", options.train)
        fit = ("--target", "y", "--epochs", 2, "--noise", "constant", "--out", folder / "model")
        run(folder, "fit", folder / "train.csv", *fit)
        for rows in options.rows:
            table, predictions = folder / "table.csv", folder / "predictions.csv"
            table.unlink(missing_ok=True)
            write(table, rows)
            size = {"size": table.stat().st_size / 2**20}
            out = ("--out", predictions, "--overwrite", "--quiet")
            found[str(rows)] = size | run(folder, "predict", folder / "model", table, *out)
            print(rows, found[str(rows)], flush=True)
    cells.write(options.out, {"rows": options.rows, "train": options.train}, predict=found)


if __name__ == "__main__":
    main()
