"""Does a longer table need more memory? `python -m benchmarks.large_table`.

The commands fit, report and predict read made-up tables of 20 columns and growing length, each in its own
process. Its largest memory is noted, with and without the pages of files, which the system takes back when it
needs them. Results are in benchmarks/results/large_table.json.
"""

from __future__ import annotations

import argparse
import re
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
NOISE = 0.1


def write(path: Path, rows: int) -> None:
    """A table of 19 numbers and a category; the target is one of the numbers."""
    for k in range(-(-rows // PART)):
        n, random = min(PART, rows - k * PART), np.random.RandomState(k)
        table = pd.DataFrame(random.normal(size=(n, 18)).round(4), columns=[f"x{i}" for i in range(18)])
        table["kind"] = random.choice(["a", "b", "c"], n)
        table["y"] = (np.sin(table.x0) + NOISE * random.normal(size=n)).round(4)
        table.to_csv(path, mode="a", header=k == 0, index=False)


def run(*arguments: object) -> dict[str, float]:
    """The largest memory of a command in MB, that without pages of files, and its time."""
    began, peak = time.monotonic(), {"memory": 0.0, "anonymous": 0.0}
    command = [sys.executable, "-m", "varprop", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for name, field in (("memory", "VmRSS"), ("anonymous", "RssAnon")):
                peak[name] = max(peak[name], _kilobytes(process.pid, field) / 1024)
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"large_table: varprop {' '.join(map(str, arguments))} failed.")
    return {**peak, "seconds": time.monotonic() - began}


def _kilobytes(process: int, field: str) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+)", status)  # a process that has just ended has none
    return int(found[1]) if found else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_table", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--epochs", type=int, help="of fit; by default as many as it takes")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cells.commit()
    epochs = ("--epochs", options.epochs) if options.epochs else ()
    found: dict[str, dict[str, object]] = {}
    for rows in options.rows:
        with TemporaryDirectory() as name:
            folder = Path(name)
            table, model = folder / "table.csv", folder / "model"
            write(table, rows)
            here: dict[str, object] = {"megabytes": table.stat().st_size / 2**20}
            found[str(rows)] = here
            for command in (
                ("fit", table, "--target", "y", "--out", model, *epochs),
                ("report", model, table, "--out", folder / "report.html"),
                ("predict", model, table, "--out", folder / "predictions.csv"),
            ):
                here[str(command[0])] = run(*command)
                print(f"{rows:,} rows, {command[0]}: {here[str(command[0])]}", flush=True)
                cells.write(options.out, {"rows": options.rows}, tables=found)


if __name__ == "__main__":
    main()
