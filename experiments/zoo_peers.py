"""The networks of the zoo with other packages: which ones they take, and whether their variance is true.

    python -m experiments.zoo_peers --draws 200

fastbnns and laplace-torch get the posterior that varprop has, each weight with a deviation of 1 % and of 10 %
of the root mean square of its tensor, and predict the variance of the output: fastbnns by moments in one
pass, laplace-torch by the Jacobian of the network. It is divided by that of sampled networks, as in the zoo.
Both packages have to be installed beside those of the zoo, as `benchmarks/peers/environments.py` lists them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import varprop as vp
from varprop.methods.base import chosen

from . import cells, zoo
from .operators import declare_torchvision
from .tables import markdown
from .zoo import RELATIVE, SECONDS, compared, costs, prepared, sampled, scale, tried
from .zoo_networks import ZOO, Built

FOLDER = cells.RESULTS / "zoo_peers"
Predict = Callable[[], vp.Gaussian]


def fastbnns(built: Built, variational: nn.Module) -> Predict:
    """Moments in one pass; what is not random has a deviation of nearly zero."""
    from fastbnns.bnn.base import BNN
    from fastbnns.bnn.types import MuVar

    net = BNN(built.net).eval()
    means = dict(built.net.named_parameters())
    std = {name: q.std for name, q in vp.posteriors(variational)}
    for name, parameter in net.named_parameters():
        plain = name.removeprefix("bnn.").replace("._module_params.", ".").replace("._module.", ".")
        if plain in means:  # which it draws anew
            parameter.data = means[plain].detach().clone()
        elif plain.endswith("_rho"):
            wanted = std.get(plain.removesuffix("_rho"), torch.tensor(1e-8)).expand_as(parameter)
            parameter.data = wanted.double().expm1().log().to(wanted)  # its deviations are log(1 + exp(rho))

    def predict() -> vp.Gaussian:
        args = [MuVar(x) for x in built.args]
        given = {name: MuVar(x) for name, x in built.kwargs.items()}
        f = chosen(net(*args, **given), built.output)
        return vp.Gaussian(f.mu, f.var)

    return predict


def laplace(built: Built, variational: nn.Module) -> Predict:
    """The linearised network with a diagonal posterior over all weights."""
    declare_torchvision()
    from laplace import DiagLaplace

    means = dict(vp.posteriors(variational))
    for name, parameter in variational.named_parameters():
        parameter.requires_grad_(name in means)
    model = variational if built.output is None else _Chosen(variational, built.output)
    found = DiagLaplace(model, "regression", prior_precision=0.0)
    prefix = "" if built.output is None else "net."
    named = [name.removeprefix(prefix) for name, p in model.named_parameters() if p.requires_grad]
    found.H = torch.cat([(1 / means[name].var.expand_as(means[name].mean)).flatten() for name in named])
    found.mean = torch.cat([means[name].mean.detach().flatten() for name in named])
    if len(built.args) != 1 or built.kwargs:
        raise TypeError("takes one tensor as its input")
    (x,) = built.args

    def predict() -> vp.Gaussian:
        with torch.enable_grad():
            mean, var = found._glm_predictive_distribution(x)
        return vp.Gaussian(mean.detach(), var.detach().diagonal(dim1=1, dim2=2))

    return predict


class _Chosen(nn.Module):
    """A network with one of its outputs."""

    def __init__(self, net: nn.Module, output: Any) -> None:
        super().__init__()
        self.net, self.output = net, output

    def forward(self, x: Any) -> Any:
        return chosen(self.net(x), self.output)


PEERS = {"fastbnns": fastbnns, "laplace-torch": laplace}


def measure(build: Callable[[], Built], draws: int) -> dict[str, Any]:
    """For each peer its error, or its ratios by the size of the variances and its cost."""
    built = prepared(build)
    random = replace(built, net=vp.variational(deepcopy(built.net)))
    found: dict[str, Any] = {peer: {"error": None, "ratios": {}} for peer in PEERS}
    for relative in RELATIVE:
        scale(random.net, relative)
        mean, var = sampled(random, draws)
        for peer, row in found.items():
            if row["error"] is None:
                result, row["error"] = tried(partial(predicted, peer, built, deepcopy(random.net)))
            if row["error"] is None:
                predict, f = result
                if f.shape != mean.shape:
                    row["error"] = f"its output has the shape {tuple(f.shape)}"
                    continue
                row["ratios"][f"{relative:g}"] = compared(f, mean, var)
                row["cost"] = costs(built, {peer: predict}, rounds=3)[peer]
    return found


@torch.no_grad()
def predicted(peer: str, built: Built, net: nn.Module) -> tuple[Predict, vp.Gaussian]:
    predict = PEERS[peer](built, net)
    return predict, predict()


def table(folder: Path = FOLDER, ours: Path = zoo.FOLDER) -> str:
    """How many networks each package takes, on how many its variance is true, and its cost.

    varprop stands beside them with the cells of the zoo for the same networks.
    """
    rows = {path.name: json.loads(path.read_text())["peers"] for path in sorted(folder.glob("*.json"))}
    runs = {peer: [row[peer] for row in rows.values() if row[peer]["error"] is None] for peer in PEERS}
    known = [json.loads((ours / name).read_text()) for name in rows if (ours / name).exists()]
    for method in zoo.METHODS[1:]:
        taken = [cell for cell in known if cell["calls"].get(method, "") is None and "ratios" in cell]
        runs[f"varprop, {method}"] = [
            {
                "ratios": {at: found[method] for at, found in cell["ratios"].items()},
                "cost": cell["passes"][method],
            }
            for cell in taken
        ]
    head = ["", "networks", *(f"within 10 %, deviations of {100 * r:g} %" for r in RELATIVE)]
    head += [*(f"median, {100 * r:g} %" for r in RELATIVE), "cost in passes"]
    lines = []
    for who, taken in runs.items():
        ratios = [[run["ratios"][f"{r:g}"]["median"] for run in taken] for r in RELATIVE]
        close = [f"{sum(abs(ratio - 1) <= 0.1 for ratio in at)}" for at in ratios]
        middle = [f"{median(at):.2f}" if at else "" for at in ratios]
        cost = f"{median(run['cost'] for run in taken):.1f}" if taken else ""
        every = len(known) if who.startswith("varprop") else len(rows)
        lines.append([who, f"{len(taken)} of {every}", *close, *middle, cost])
    return markdown([head, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.zoo_peers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--networks", nargs="+", choices=ZOO, default=list(ZOO), metavar="NAME")
    parser.add_argument("--draws", type=int, default=200, help="sampled networks")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.networks:
        path = options.out / f"{cells.slug(name)}.json"
        configuration = {"network": name, "draws": options.draws, "seconds": SECONDS}
        if ZOO[name].is_installed and not cells.finished(path, configuration):
            found, error = tried(partial(measure, ZOO[name].build, options.draws))
            if error is not None:
                print(f"{name}: {error}", flush=True)
                continue
            cells.write(path, configuration, peers=found)
            shown = {
                peer: run["error"] or {at: round(score["median"], 2) for at, score in run["ratios"].items()}
                for peer, run in found.items()
            }
            print(name, json.dumps(shown), flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()
