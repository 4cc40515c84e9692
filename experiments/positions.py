"""How correlated are the deviations at different positions of an image? `python -m experiments.positions`.

In its second-order terms, `vp.correlated` assumes that the deviations of one feature at two positions have
correlation 0.5. This experiment takes networks with He initialisation, normal noise and smooth images, narrow
and wide posteriors, and computes the ratio of predicted to sampled variance for DVI and for `correlated` with
correlations 0, 0.5 and 1. It prints the table and writes experiments/results/accuracy/positions.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import varprop as vp
from varprop.methods import noise
from varprop.posterior import draw

from . import cells
from .accuracy import Moments, compared
from .networks import CHUNK, lenet, resnet
from .tables import markdown

LOGVARS, CORRELATIONS = (-9.0, -6.0, -4.0), (0.0, 0.5, 1.0)


def averaged() -> nn.Module:
    front = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def upsampled() -> nn.Module:
    front = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, 2), nn.ReLU()
    return nn.Sequential(*front, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LeNet": lenet,
    "two convolutions, average of all positions": averaged,
    "convolution, transposed convolution, average of its windows": upsampled,
    "residual network": resnet,
}
IMAGES: dict[str, Callable[[], Tensor]] = {
    "noise": lambda: torch.randn(6, 1, 8, 8),
    "smooth": lambda: F.interpolate(torch.randn(6, 1, 2, 2), size=8, mode="bilinear") + 0.5,
}


@torch.no_grad()
def measure(name: str, images: str, logvar: float, samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net, x, sampled = vp.variational(NETWORKS[name](), logvar, init="he").eval(), IMAGES[images](), Moments()
    generator = torch.Generator().manual_seed(1)
    for start in range(0, samples, CHUNK):
        weights = draw(net, min(CHUNK, samples - start), generator)
        sampled.add(vmap(lambda w: functional_call(net, w, (x,)))(weights))

    def by(f: vp.Gaussian) -> float:
        return compared(f, *sampled.result())["var_ratio"]

    def assuming(correlation: float) -> float:
        with patch.object(noise, "TOGETHER", correlation):
            return by(vp.correlated(net, x))

    return {
        "network": name,
        "images": images,
        "logvar": logvar,
        "dvi": by(vp.DVI(net, x)),
        "correlated": [*map(assuming, CORRELATIONS)],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    titles = [f"correlated, {correlation:g}" for correlation in CORRELATIONS]
    lines = [["network", "images", "log-variance", "DVI", *titles]]
    for row in rows:
        ratios = [f"{value:.2f}" for value in (row["dvi"], *row["correlated"])]
        lines.append([row["network"], row["images"], f"{row['logvar']:g}", *ratios])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.positions", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--draws", type=int, default=10_000, help="Monte Carlo samples")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "accuracy")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.out / "positions.json"
    configuration = {"draws": options.draws, "networks": options.networks}
    if not cells.finished(path, configuration):
        cases = [
            (name, images, logvar) for name in options.networks for images in IMAGES for logvar in LOGVARS
        ]
        cells.write(path, configuration, rows=[measure(*case, options.draws) for case in cases])
    print(table(json.loads(path.read_text())["rows"]))


if __name__ == "__main__":
    main()
