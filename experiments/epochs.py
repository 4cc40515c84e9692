"""What an epoch on MNIST costs with each method, by the same loop: `python -m experiments.epochs`.

Part of an epoch of each in turn, several times over, on one thread and in processor time, so that what else
the machine does counts little; the median of each and its ratio to the plain network's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import varprop as vp

from . import cells, table2
from .images import Augmentation, ImageSet, loader
from .tables import markdown

METHODS = ("plain", "vbp", "dvi", "varout")


def seconds(row: str, images: ImageSet, batch: int) -> float:
    """Processor time of one pass over the images."""
    elbo = table2.ROWS[row].objective(images, seed=0)
    batches = loader(images, batch, Augmentation())
    start = time.process_time()
    vp.fit(elbo, batches, epochs=1, lr=0.001, progress=False)
    return time.process_time() - start


def table(path: Path) -> str:
    rows = json.loads(path.read_text())["rows"]
    head = ["", "an epoch on MNIST, s", "against the plain network"]
    return markdown([head, *([row, f"{v['seconds']:.1f}", f"{v['ratio']:.2f}"] for row, v in rows.items())])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.epochs", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=6400, help="images of the part")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "table2" / "epochs.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = table2.TASKS["MNIST"]
    whole = ImageSet.of(task.images())
    images = replace(whole, x=whole.x[: options.rows], y=whole.y[: options.rows])
    cells.commit()
    taken: dict[str, list[float]] = {row: [] for row in METHODS}
    for _ in range(options.rounds + 1):
        for row in METHODS:
            taken[row].append(seconds(row, images, task.batch))
    scale = len(whole.x) / options.rows
    found = {row: scale * median(values[1:]) for row, values in taken.items()}  # the first round warms up
    rows = {row: {"seconds": value, "ratio": value / found["plain"]} for row, value in found.items()}
    cells.write(options.out, {"rounds": options.rounds, "rows": options.rows}, rows=rows)
    print(table(options.out))


if __name__ == "__main__":
    main()
