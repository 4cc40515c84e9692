"""Does a long stream need more memory? `python -m benchmarks.stream`.

A million made-up rows go through `BayesianMLPRegressor.partial_fit` in parts, drawn as they are needed. After
each part: the memory of the process, the processor time so far, and the log-likelihood of rows that are never
learned, which at best is that of the noise. Results are in benchmarks/results/stream.json.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import varprop as vp
from experiments import cells

RESULT = Path(__file__).parent / "results" / "stream.json"
NOISE = 0.3


def rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    x = random.normal(size=(n, 10)).astype(np.float32)
    return x, np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + NOISE * random.normal(size=n)


def memory() -> float:
    """Of this process, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def stream(total: int, part: int, **options: Any) -> list[dict[str, float]]:
    model = vp.BayesianMLPRegressor(folds=1, noise="constant", log_target=False, random_state=0, **options)
    x_test, y_test = rows(10_000, -1 % 2**32)
    found, began = [], time.process_time()
    for k in range(total // part):
        model.partial_fit(*rows(part, k))
        found.append(
            {
                "rows": (k + 1) * part,
                "seconds": time.process_time() - began,
                "memory": memory(),
                "log_likelihood": float(model.log_prob(x_test, y_test).mean()),
            }
        )
        print(*(f"{name} {value:,.3f}" for name, value in found[-1].items()), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=10_000, help="rows of each call")
    parser.add_argument("--epochs", type=int, help="of each call, instead of the default's")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells.commit()  # cached now, because the tree may change meanwhile
    chosen = {} if options.epochs is None else {"epochs": options.epochs}
    found = stream(options.rows, options.part, **chosen)
    best = -0.5 * float(np.log(2 * np.pi * np.e * NOISE**2))
    configuration = {"rows": options.rows, "part": options.part, **chosen}
    cells.write(options.out, configuration, log_likelihood_of_the_noise=best, parts=found)


if __name__ == "__main__":
    main()
