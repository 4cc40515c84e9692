"""The variance of residual sums h + g(h), with independent and with correlated operands, against Monte Carlo.

`python -m experiments.residual` prints the table and writes experiments/results/residual.json. Inputs are
normal with variance 0.1, and the log-variance of the weights is -8. VBP is compared with its own model,
sampled weights and frozen gates; DVI with the sampled networks themselves.
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
    """shortcut(h) + V relu(… W h); the gates of the ReLUs are fixed if they are given."""

    def __init__(self, shortcut: nn.Module, *layers: Any) -> None:
        super().__init__()
        self.shortcut, self.layers = shortcut, nn.ModuleList(layers)
        self.gates: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for i, layer in enumerate(list(self.layers)[1:]):
            h = layer(h * self.gates[i] if self.gates else F.relu(h))
        return self.shortcut(x) + h


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)


BLOCKS: dict[str, tuple[Callable[[], Block], tuple[int, ...]]] = {
    "dense": (lambda: Block(nn.Identity(), nn.Linear(32, 64), nn.Linear(64, 32)), (8, 32)),
    "dense, projected": (lambda: Block(nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)), (8, 32)),
    "convolutions": (lambda: Block(nn.Identity(), conv(8, 8, 3), conv(8, 8, 3)), (2, 8, 6, 6)),
    "projected": (lambda: Block(conv(8, 16, 1), conv(8, 16, 3), conv(16, 16, 3)), (2, 8, 6, 6)),
    "halved, projected": (lambda: Block(conv(8, 16, 1, 2), conv(8, 16, 3, 2), conv(16, 16, 3)), (2, 8, 8, 8)),
    "bottleneck": (
        lambda: Block(nn.Identity(), conv(32, 8, 1), conv(8, 8, 3), conv(8, 32, 1)),
        (2, 32, 6, 6),
    ),
    "bottleneck, halved, projected": (
        lambda: Block(conv(32, 32, 1, 2), conv(32, 8, 1), conv(8, 8, 3, 2), conv(8, 32, 1)),
        (2, 32, 8, 8),
    ),
}
INNER = {"torch's initial weights": None, "J ~ -P": -1.0, "J ~ P": 1.0}
"""P is the shortcut and J the other path with half of its gates open."""


def centre(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    for n in weight.shape[2:]:
        weight = weight.select(2, n // 2)
    return weight


@torch.no_grad()
def build(name: str, sign: float | None) -> tuple[Block, vp.Gaussian]:
    """A block whose two paths are independent, or as similar as possible up to the given sign."""
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    net = make()
    layers: list[Any] = list(net.layers)
    first, *between, last = layers
    shortcut: Any = net.shortcut
    if sign is not None and isinstance(net.shortcut, nn.Identity):
        weight = first.weight
        for layer in between:
            nn.init.dirac_(layer.weight)
        last.weight.copy_(sign * weight.transpose(0, 1).flip(tuple(range(2, weight.dim()))))
    elif sign is not None:
        for layer in between:
            nn.init.dirac_(layer.weight)
        linear = centre(last)
        for layer in (*reversed(between), first):
            linear = 0.5 * linear @ centre(layer)
        size = centre(shortcut).norm() / linear.norm()
        shortcut.weight.copy_((sign * size * linear).view_as(shortcut.weight))
    return vp.variational(net, logvar=-8.0), vp.Gaussian(torch.randn(shape), torch.full(shape, 0.1))


@torch.no_grad()
def freeze(net: Block, method: vp.Method, x: vp.Gaussian) -> None:
    """Fix the gates at the values that the method gives them."""
    gates: list[Tensor] = []
    h: Any = x
    for layer in list(net.layers)[:-1]:
        h = method(layer, h)
        gates.append((h.mean > 0).to(h.mean.dtype))
        h = method(nn.ReLU(), h)
    net.gates = gates


@torch.no_grad()
def sampled(net: Block, x: vp.Gaussian, samples: int) -> Tensor:
    """The variance of the network's output over samples of its weights and its input."""
    run = vmap(lambda w, h: functional_call(net, w, (h,)), chunk_size=1_000)
    return run(draw(net, samples), x.sample((samples,))).var(0)


@torch.no_grad()
def measure(samples: int) -> list[dict[str, Any]]:
    rows = []
    for name in BLOCKS:
        for inner, sign in INNER.items():
            for method in (vp.VBP, vp.DVI):
                net, x = build(name, sign)
                predictions = {
                    "independent": (method | INDEPENDENT)(net, x).var,
                    "corrected": method(net, x).var,
                }
                if method is vp.VBP:
                    freeze(net, method, x)
                truth = sampled(net, x, samples)
                ratios = {key: (var / truth).mean().item() for key, var in predictions.items()}
                rows.append({"block": name, "inner": inner, "method": method.name, **ratios})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [r["block"], r["inner"], r["method"], f"{r['independent']:.2f}", f"{r['corrected']:.2f}"]
        for r in rows
    ]
    return markdown([["block", "inner path", "method", "independent", "corrected"], *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.residual", description=__doc__.split("\n")[0]
    )
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
