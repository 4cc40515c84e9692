"""How close are the moments of trained networks to Monte Carlo estimates? `python -m experiments.networks`.

A perceptron, a LeNet and a residual network are trained with DVI on data that come with scikit-learn. Then
all weights are sampled 20,000 times, each sample being one network for all inputs, and the mean and variance
of every output are compared with those of one pass. DVI, CVBP and `correlated` are compared with the sampled
networks themselves, VBP with its own model: the same networks with every gate fixed by the mean of its input.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap

import varprop as vp
from varprop.gaussian import Activation, Gaussian, mean_of, move
from varprop.posterior import draw

from . import cells
from .accuracy import Moments, compared
from .block import Block
from .tables import markdown

CHUNK, INPUTS = 100, 20


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))


def lenet() -> nn.Module:
    layers = (
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    head = nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(8), Block(8), *head)


PASSES: dict[str, Callable[..., Gaussian]] = {
    "dvi": vp.DVI,
    "correlated": vp.correlated,
    "cvbp": vp.CVBP,
    "vbp": vp.VBP,
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "lenet": lenet, "resnet": resnet}


def trained(name: str, epochs: int) -> tuple[nn.Module, Tensor]:
    """A network trained with DVI, and held-out inputs."""
    torch.manual_seed(0)
    load = load_diabetes if name == "mlp" else load_digits
    x, y = (torch.tensor(a, dtype=torch.float32) for a in load(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-3) if name == "mlp" else x.view(-1, 1, 8, 8) / 8 - 1
    y = ((y - y.mean()) / y.std()).unsqueeze(1) if name == "mlp" else y.long()
    likelihood = vp.likelihoods.Normal() if name == "mlp" else vp.likelihoods.Categorical()
    order = torch.randperm(len(x))
    x, y, held_out = x[order[INPUTS:]], y[order[INPUTS:]], x[order[:INPUTS]]
    elbo = vp.ELBO(
        vp.variational(NETWORKS[name]()), vp.DVI, likelihood, vp.priors.Normal(10.0), n_data=len(x)
    )
    vp.fit(elbo, (x, y), epochs=epochs, lr=3e-3, batch_size=64, seed=0, progress=False)
    return elbo.net.eval(), held_out


class Gates:
    """VBP's model of the gates: the means of their inputs fix them for all samples of the weights."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.open: list[Tensor] = []
        (vp.VBP | {nn.ReLU: self._note})(net, x)

    def _note(self, method: vp.Method, module: nn.Module, x: Activation) -> Activation:
        self.open.append(mean_of(x) > 0)
        return vp.VBP(module, x)

    def method(self) -> vp.Method:
        """A method that uses these gates, for one pass."""
        gates = iter(self.open)

        def kept(method: vp.Method, module: nn.Module, x: Activation) -> Activation:
            is_open = next(gates)
            return move(lambda t: t * is_open, x)

        return vp.VBP | {nn.ReLU: kept}


class Gated(nn.Module):
    """The network with fixed gates and deterministic weights, as a module for `functional_call`."""

    def __init__(self, net: nn.Module, gates: Gates) -> None:
        super().__init__()
        self.net, self.gates = net, gates

    def forward(self, x: Tensor) -> Tensor:
        return mean_of(self.gates.method()(self.net, x))


@torch.no_grad()
def measure(net: nn.Module, x: Tensor, samples: int) -> dict[str, dict[str, float]]:
    gated = Gated(net, Gates(net, x))
    real, own = Moments(), Moments()
    generator = torch.Generator().manual_seed(1)
    for start in range(0, samples, CHUNK):
        weights = draw(net, min(CHUNK, samples - start), generator)
        real.add(vmap(lambda w: functional_call(net, w, (x,)))(weights))
        own.add(vmap(lambda w: functional_call(gated, {f"net.{k}": v for k, v in w.items()}, (x,)))(weights))
    moments = {"dvi": real, "correlated": real, "cvbp": real, "vbp": own}
    rows = {name: compared(PASSES[name](net, x), *by.result()) for name, by in moments.items()}
    rows["correlated"]["cost"] = cost(net, x.repeat(5, *(1,) * (x.dim() - 1)))
    return rows


@torch.no_grad()
def cost(net: nn.Module, x: Tensor, repeats: int = 15) -> float:
    """The cost of `correlated` in passes of DVI: processor time, the fastest of several runs of each."""
    passes = {f: timeit.Timer(partial(f, net, x), timer=process_time) for f in (vp.DVI, vp.correlated)}
    seconds = {f: min(timer.repeat(repeats, number=1)) for f, timer in passes.items()}
    return seconds[vp.correlated] / seconds[vp.DVI]


def table(networks: dict[str, dict[str, dict[str, float]]]) -> str:
    titles = {name: name if name == "correlated" else name.upper() for name in PASSES}
    head = [
        "network",
        *(f"{title}: {what}" for title in titles.values() for what in ("variance", "mean")),
        "correlated: cost",
    ]
    lines = [
        [
            name,
            *(f"{rows[m][key]:.3f}" for m in PASSES for key in ("var_ratio", "mean_error")),
            f"{rows['correlated']['cost']:.0f}",
        ]
        for name, rows in networks.items()
    ]
    return markdown([head, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.networks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--draws", type=int, default=20_000, help="Monte Carlo samples")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "accuracy")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.out / "networks.json"
    configuration = {
        "draws": options.draws,
        "epochs": options.epochs,
        "networks": options.networks,
        "passes": list(PASSES),
    }
    if not cells.finished(path, configuration):
        rows = {name: measure(*trained(name, options.epochs), options.draws) for name in options.networks}
        cells.write(path, configuration, networks=rows)
    print(table(json.loads(path.read_text())["networks"]))


if __name__ == "__main__":
    main()
