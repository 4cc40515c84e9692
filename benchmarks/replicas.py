"""Twenty boston splits trained at once against one after another: `python -m benchmarks.replicas`.

The runs are interleaved, so that other load on the machine affects both. A single network is trained by a
minimal loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

import varprop as vp
from experiments import cells, data
from experiments.table1 import BATCH, ROWS, Recipe

RESULT = Path(__file__).parent / "results" / "replicas.json"


def alone(elbo: vp.ELBO, x: torch.Tensor, y: torch.Tensor, epochs: int, batch_size: int, seed: int) -> None:
    n, generator = len(x), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(elbo.parameters(), lr=0.01, fused=True)
    for _ in range(epochs):
        statistic = torch.zeros(1)
        for batch in torch.randperm(n, generator=generator).split(batch_size):
            terms = elbo.terms(x[batch], y[batch])
            optimiser.zero_grad()
            elbo.loss(terms).backward()
            optimiser.step()
            of_batch = elbo.likelihood.statistic(terms.f, y[batch])
            assert of_batch is not None
            statistic += of_batch.detach() * (len(batch) / n)
        elbo.likelihood.update(statistic)


def timed(train: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock seconds and processor seconds."""
    clock, processor = time.perf_counter(), time.process_time()
    train()
    return time.perf_counter() - clock, time.process_time() - processor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=("vbp", "dvi"), default="vbp")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    recipe = ROWS[options.method]
    assert isinstance(recipe, Recipe)
    splits, batch = data.regression("boston"), BATCH["boston"]
    (_, n, features), seeds, epochs = splits.x.shape, splits.numbers, options.epochs

    def objectives() -> list[vp.ELBO]:
        return [recipe.objective(n, features, 50, seed) for seed in seeds]

    all_at_once = partial(vp.replicas.fit, epochs=epochs, batch_size=batch, seeds=seeds)
    one_by_one, at_once = [], []
    for k, elbo in enumerate(objectives()):
        one_by_one.append(timed(partial(alone, elbo, splits.x[k], splits.y[k], epochs, batch, seeds[k])))
        if k % 5 == 2:
            at_once.append(timed(partial(all_at_once, objectives(), splits.x, splits.y)))
    clock, processor = (
        sum(alone[i] for alone in one_by_one) / median(run[i] for run in at_once) for i in (0, 1)
    )
    configuration = {
        "dataset": "boston",
        "splits": len(seeds),
        "method": options.method,
        "epochs": epochs,
        "batch_size": batch,
    }
    cells.write(
        options.out,
        configuration,
        seconds={"one_by_one": [a for a, _ in one_by_one], "at_once": [a for a, _ in at_once]},
        processor_seconds={"one_by_one": [a for _, a in one_by_one], "at_once": [a for _, a in at_once]},
        times_faster=clock,
        times_faster_by_processor=processor,
    )
    print(json.dumps({"times_faster": round(clock, 1), "times_faster_by_processor": round(processor, 1)}))


if __name__ == "__main__":
    main()
