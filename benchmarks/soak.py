"""Does a process that works for long need more and more memory? `python -m benchmarks.soak --minutes 20`.

Round after round, a process trains an estimator and an objective with checkpoints, saves them, loads them
again, and predicts, in one thread and in several. After each round: the memory of the process, its open files
and its threads. The loaded model must predict what the saved one did. Results are in
benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

import varprop as vp
from experiments import cells

from .stream import memory

RESULT = Path(__file__).parent / "results" / "soak.json"
WARM_UP = 0.25
"""The share of the rounds before the memory is compared: allocators and caches fill up."""


def work(folder: Path, seed: int) -> None:
    """Train, save, load and predict."""
    random = np.random.RandomState(seed)
    x = random.normal(size=(400, 5))
    y = np.sin(2 * x[:, 0]) + 0.1 * random.normal(size=400)
    options: dict[str, Any] = {"folds": 2, "epochs": 5, "random_state": seed}
    estimator: vp.BayesianMLPClassifier | vp.BayesianMLPRegressor
    if seed % 2:
        estimator = vp.BayesianMLPClassifier(**options).fit(x, y > 0)
    else:
        estimator = vp.BayesianMLPRegressor(noise="constant", **options).fit(x, y)
    vp.save(estimator, folder / "estimator")
    again = vp.load(folder / "estimator")
    expected = estimator.predict(x)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(again.predict, [x] * 4):
            np.testing.assert_array_equal(found, expected)

    net = vp.variational(nn.Sequential(nn.Linear(5, 50), nn.ReLU(), nn.Linear(50, 1)))
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=400)
    data = torch.tensor(x).float(), torch.tensor(y).float().unsqueeze(1)
    vp.fit(elbo, data, epochs=3, checkpoint=folder / "run.pt", accelerator="cpu")
    vp.fit(elbo, data, epochs=5, checkpoint=folder / "run.pt", resume=True, accelerator="cpu")
    vp.save(elbo, folder / "objective")
    again = vp.load(folder / "objective")
    torch.testing.assert_close(
        again.predict(data[0]).log_prob(data[1]), elbo.predict(data[0]).log_prob(data[1])
    )


def soak(minutes: float) -> list[dict[str, float]]:
    """The rounds that fit into so many minutes."""
    began, rounds = time.monotonic(), list[dict[str, float]]()
    with TemporaryDirectory() as folder:
        while not rounds or time.monotonic() - began < 60 * minutes:
            work(Path(folder), len(rounds))
            rounds.append(
                {
                    "seconds": round(time.monotonic() - began, 1),
                    "memory": round(memory(), 2),
                    "files": len(list(Path("/proc/self/fd").iterdir())),
                    "threads": threading.active_count(),
                }
            )
    return rounds


def growth(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """After the warm-up: the range of the memory in MB, and the slope of a line through it in MB an hour."""
    later = rounds[int(WARM_UP * len(rounds)) :]
    hours, used = (np.array([r[name] for r in later]) for name in ("seconds", "memory"))
    slope = float(np.polyfit(hours / 3600, used, 1)[0]) if len(later) > 2 else 0.0
    return {"from": float(used.min()), "to": float(used.max()), "slope": slope}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cells.commit()
    rounds = soak(options.minutes)
    found = growth(rounds)
    every = max(1, len(rounds) // 100)
    configuration = {"minutes": options.minutes}
    cells.write(options.out, configuration, rounds=len(rounds), memory=found, trace=rounds[::every])
    print(f"{len(rounds)} rounds", *(f"{name} {value:.1f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
