"""The cost of a training step with each method, relative to VBP: `python -m benchmarks.step`.

The steps of all methods are interleaved, so that other load on the machine affects all of them. Times are
medians of processor time on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import varprop as vp
from experiments import cells

RESULT = Path(__file__).parent / "results" / "step.json"
METHODS = {"plain": vp.DETERMINISTIC, "vbp": vp.VBP, "cvbp": vp.CVBP, "dvi": vp.DVI}


def mlp() -> tuple[nn.Sequential, Tensor, Tensor, vp.likelihoods.Likelihood]:
    net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1))
    return net, torch.randn(32, 13), torch.randn(32, 1), vp.likelihoods.Normal()


def lenet() -> tuple[nn.Sequential, Tensor, Tensor, vp.likelihoods.Likelihood]:
    """The paper's strided LeNet."""
    convolutions = nn.Conv2d(1, 20, 5, 2), nn.ReLU(), nn.Conv2d(20, 50, 5, 2), nn.ReLU(), nn.Flatten()
    net = nn.Sequential(*convolutions, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))
    return net, torch.randn(128, 1, 28, 28), torch.randint(10, (128,)), vp.likelihoods.Categorical()


NETWORKS = {"mlp": mlp, "lenet": lenet}


class Step:
    """A network and its optimiser, trained with one method."""

    def __init__(self, network: str, method: vp.Method, compile: bool) -> None:
        torch.manual_seed(0)
        net, self.x, self.y, likelihood = NETWORKS[network]()
        if not method.deterministic:
            vp.variational(net)
        self.elbo = vp.ELBO(net, method, likelihood, vp.priors.Normal(10.0), n_data=1000)
        self.loss = torch.compile(self.elbo) if compile else self.elbo
        self.optimiser = torch.optim.Adam(self.elbo.parameters(), lr=1e-3, fused=True)

    def seconds(self) -> float:
        start = time.process_time()
        self.optimiser.zero_grad()
        self.loss(self.x, self.y).backward()
        self.optimiser.step()
        return time.process_time() - start


def measure(network: str, steps: int, compile: bool) -> dict[str, float]:
    """The median seconds of a step with each method."""
    contestants = {name: Step(network, method, compile) for name, method in METHODS.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for k in range(steps + 3):
        for name, step in contestants.items():
            seconds = step.seconds()
            if k >= 3:
                times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true", help="measure compiled steps too")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    variants = dict.fromkeys(NETWORKS, False)
    if options.compile:
        variants |= {f"{network}, compiled": True for network in NETWORKS}
    results = {
        name: measure(name.split(",")[0], options.steps, compile) for name, compile in variants.items()
    }
    ratios = {
        network: {name: times[name] / times["vbp"] for name in times} for network, times in results.items()
    }
    cells.write(
        options.out, {"steps": options.steps, "compile": options.compile}, seconds=results, against_vbp=ratios
    )
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
