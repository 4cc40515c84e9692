"""Residual sums h + g(h): the variance with operands taken as independent, and with their covariance, against sampled networks.

`python -m experiments.residual` prints the table and writes experiments/results/residual.json. Inputs are normal with variance 0.1, the
log-variance of weights is -8. VBP is compared with sampled weights and frozen gates, its own model; DVI with the sampled network itself.
"""

from __future__ import annotations

import argparse
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import varprop as vp
from varprop.posterior import draw

from . import cells
from .tables import markdown

INDEPENDENT = {operator.add: lambda method, add, a, b: a + b}


class Block(nn.Module):
    """shortcut(h) + V relu(W h), with the gates of the ReLU fixed where they are given."""

    def __init__(self, first: Any, second: Any, shortcut: Any) -> None:
        super().__init__()
        self.first, self.second, self.shortcut = first, second, shortcut
        self.gates: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.shortcut(x) + self.second(F.relu(h) if self.gates is None else h * self.gates)


BLOCKS: dict[str, tuple[Callable[[], Block], tuple[int, ...]]] = {
    "dense": (lambda: Block(nn.Linear(32, 64), nn.Linear(64, 32), nn.Identity()), (8, 32)),
    "convolutions": (lambda: Block(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Identity()), (2, 8, 6, 6)),
    "halved, projected": (
        lambda: Block(nn.Conv2d(8, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, 2)),
        (2, 8, 6, 6),
    ),
}
INNER = {"torch's initial weights": None, "V = -Wᵀ": -1.0, "V = Wᵀ": 1.0}


@torch.no_grad()
def build(name: str, sign: float | None) -> tuple[Block, vp.Gaussian]:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    net = make()
    if sign is not None:
        weight = net.first.weight
        net.second.weight.copy_(sign * weight.transpose(0, 1).flip(tuple(range(2, weight.dim()))))
    return vp.variational(net, logvar=-8.0), vp.Gaussian(torch.randn(shape), torch.full(shape, 0.1))


@torch.no_grad()
def sampled(net: Block, x: vp.Gaussian, samples: int) -> Tensor:
    """The variance of the network's output over draws of its weights and its input."""
    run = vmap(lambda w, h: functional_call(net, w, (h,)), chunk_size=1_000)
    return run(draw(net, samples), x.sample((samples,))).var(0)


@torch.no_grad()
def measure(samples: int) -> list[dict[str, Any]]:
    rows = []
    for name in BLOCKS:
        for inner, sign in INNER.items():
            for method in (vp.VBP, vp.DVI):
                net, x = build(name, sign)
                predictions = {"independent": (method | INDEPENDENT)(net, x).var, "corrected": method(net, x).var}
                net.gates = (method(net.first, x).mean > 0).to(x.mean.dtype) if method is vp.VBP else None
                truth = sampled(net, x, samples)
                ratios = {key: (var / truth).mean().item() for key, var in predictions.items()}
                rows.append({"block": name, "inner": inner, "method": method.name, **ratios})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [[r["block"], r["inner"], r["method"], f"{r['independent']:.2f}", f"{r['corrected']:.2f}"] for r in rows]
    return markdown([["block", "inner path", "method", "independent", "corrected"], *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.residual", description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "residual.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    configuration = {"samples": options.samples}
    if not cells.finished(options.out, configuration):
        cells.write(options.out, configuration, rows=measure(options.samples))
    print(table(json.loads(options.out.read_text())["rows"]))


if __name__ == "__main__":
    main()
