"""How close are the moments of single layers to Monte Carlo estimates?

One layer stands behind a random convolution or linear layer. `python -m experiments.accuracy` samples all
weights 20,000 times, each sample being one network for the whole batch, and compares the mean and variance of
every output with those of one pass. DVI is compared with the sampled networks themselves, VBP with its own
model: the same networks with every gate fixed by the mean of its input. It prints the table and writes
experiments/results/accuracy/layers.json. Variances are summed over all outputs before their ratio is taken;
errors of the mean are in units of the sampled standard deviation, averaged over outputs.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import varprop as vp
from varprop.gaussian import Activation, Gaussian, as_gaussian
from varprop.methods.rules.activations import PIECEWISE, SMOOTH, piecewise
from varprop.posterior import draw

from . import cells

LOGVAR = -4.0
CHUNK = 500


# -------------------- the cases


@dataclass(frozen=True)
class Front:
    """A first layer with random weights, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


FRONTS = {
    "conv": Front(lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 8, 8)),
    "linear": Front(lambda: nn.Linear(16, 16), (8, 16)),
    "linear over time": Front(lambda: nn.Linear(8, 8), (2, 5, 8)),
    "none": Front(nn.Identity, (4, 5)),
}
INPUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "uniform": torch.rand,
    "index": lambda shape: torch.randint(10, shape),
}


@dataclass(frozen=True)
class Case:
    """A layer behind a front, with one kind of input."""

    layer: Callable[[], nn.Module]
    front: str = "conv"
    input: str = "normal"
    training: bool = False

    @property
    def configuration(self) -> dict[str, str]:
        layer = self.layer()
        name = repr(getattr(layer, "inner", layer)) + (", training" if self.training else "")
        return {"front": self.front, "input": self.input, "layer": name.replace("\n", "")}

    def build(self) -> tuple[nn.Module, nn.Module, Tensor]:
        torch.manual_seed(0)
        front = FRONTS[self.front]
        net = nn.Sequential(front.make(), self.layer()).eval()
        net[1].train(self.training)
        vp.variational(net, logvar=LOGVAR)
        x = INPUTS[self.input](front.shape)
        settle(net[1], as_gaussian(vp.DVI(net[0], x)).detach())
        return net[0], net[1], x


class Output(nn.Module):
    """The first output of a recurrent layer or of self-attention, without states or attention weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def arguments(self, x: Activation) -> tuple[Activation, ...]:
        return (x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else (x,)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*self.arguments(x))[0]


def output(method: vp.Method, module: Output, x: Activation) -> Activation:
    return method(module.inner, *module.arguments(x))[0]


def settle(layer: nn.Module, x: Gaussian) -> None:
    """Set the running statistics of a batch normalisation to those of this batch."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
        layer.momentum = 1.0
        vp.DVI(layer.train(), x)
        layer.eval()


def recurrent(kind: type[nn.RNNBase]) -> Output:
    make: Callable[..., nn.RNNBase] = kind
    return Output(make(8, 8, batch_first=True))


ELEMENTWISE = [*(kind for kind in PIECEWISE if kind is not nn.Softshrink), *SMOOTH]
LAYERS = [
    *(Case(layer) for layer in (nn.Identity, *ELEMENTWISE, lambda: nn.Softshrink(0.3), lambda: nn.GLU(1))),
    *(Case(lambda: nn.MaxPool2d(2), input=x) for x in ("normal", "uniform")),
    *(Case(lambda: nn.AvgPool2d(2), input=x) for x in ("normal", "uniform")),
    *(Case(lambda: nn.AdaptiveAvgPool2d(1), input=x) for x in ("normal", "uniform")),
    Case(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    Case(lambda: nn.BatchNorm2d(8)),
    Case(lambda: nn.BatchNorm2d(8, track_running_stats=False), training=True),
    Case(lambda: nn.BatchNorm1d(16, track_running_stats=False), "linear", training=True),
    Case(lambda: nn.InstanceNorm2d(8)),
    Case(lambda: nn.GroupNorm(2, 8)),
    Case(lambda: nn.LayerNorm((8, 8, 8))),
    Case(lambda: nn.LayerNorm(16), "linear"),
    Case(lambda: nn.RMSNorm(16), "linear"),
    Case(lambda: nn.Softmax(1)),
    Case(lambda: nn.Softmax(1), "linear"),
    Case(lambda: nn.LogSoftmax(1), "linear"),
    Case(nn.Softmax2d),
    Case(lambda: nn.Embedding(10, 4), "none", "index"),
    Case(lambda: Output(nn.MultiheadAttention(8, 2, batch_first=True)), "linear over time"),
    Case(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "linear over time"),
    *(Case(partial(recurrent, kind), "linear over time") for kind in (nn.RNN, nn.LSTM, nn.GRU)),
]


# -------------------- sampling


def sampled(front: nn.Module, layer: nn.Module, x: Tensor, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs of the front and of the layer for n samples of all weights, in chunks."""
    fused = nn.RNNBase, nn.TransformerEncoderLayer  # vmap cannot map their kernels over weights
    runs = _one_by_one if any(isinstance(m, fused) for m in layer.modules()) else _mapped
    for start in range(0, n, CHUNK):
        yield runs(front, layer, x, min(CHUNK, n - start))


def _mapped(front: nn.Module, layer: nn.Module, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    def run(ours: dict[str, Tensor], theirs: dict[str, Tensor], _: Tensor) -> tuple[Tensor, Tensor]:
        hidden = functional_call(front, ours, (x,))
        return hidden, functional_call(layer, theirs, (hidden,))

    weights = draw(front, n), draw(layer, n)
    out: tuple[Tensor, Tensor] = vmap(run, randomness="different")(*weights, torch.zeros(n))
    return out


def _one_by_one(front: nn.Module, layer: nn.Module, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    net = copy.deepcopy(nn.Sequential(front, layer))
    weights, outputs = draw(nn.Sequential(front, layer), n), []
    for i in range(n):
        for name, value in weights.items():
            net.get_parameter(name).copy_(value[i])
        hidden = net[0](x)
        outputs.append((hidden, net[1](hidden)))
    return torch.stack([h for h, _ in outputs]), torch.stack([y for _, y in outputs])


def gated(layer: nn.Module, mean: Tensor) -> Callable[[Tensor], Tensor] | None:
    """VBP's model of a layer with gates: the mean of the input picks the piece or the largest entry."""
    if isinstance(layer, tuple(PIECEWISE)):
        pieces = piecewise(layer)
        return lambda h: pieces(mean) + pieces.slope(mean) * (h - mean)
    if isinstance(layer, nn.MaxPool2d):
        _, winners = nn.MaxPool2d(layer.kernel_size, return_indices=True)(mean)

        def pick(h: Tensor) -> Tensor:
            index = winners.flatten(-2).expand(len(h), *winners.shape[:-2], -1)
            return h.flatten(-2).gather(-1, index).view(len(h), *winners.shape)

        return pick
    return None


class Moments:
    """Mean and variance of samples that arrive in chunks."""

    def __init__(self) -> None:
        self.n = 0
        self.sums: list[tuple[Tensor, Tensor]] = []

    def add(self, y: Tensor) -> None:
        y = y.double()
        if not self.n:
            self.shift = y.mean(0)
        d = y - self.shift
        self.n += len(y)
        self.sums.append((d.sum(0), d.square().sum(0)))

    def result(self) -> tuple[Tensor, Tensor]:
        first, second = (sum(s) / self.n for s in zip(*self.sums, strict=True))
        return self.shift + first, (second - first.square()) * self.n / (self.n - 1)


# -------------------- comparing


def compared(f: Gaussian, mean: Tensor, var: Tensor) -> dict[str, float]:
    random = var > 1e-12
    ratio, error = (f.var / var)[random], ((f.mean - mean).abs() / var.sqrt())[random]
    low, high = torch.quantile(ratio.double(), torch.tensor([0.05, 0.95]).double()).tolist()
    return {
        "var_ratio": (f.var.sum() / var.sum()).item(),
        "low": low,
        "high": high,
        "mean_error": error.mean().item(),
    }


@torch.no_grad()
def measure(case: Case, n: int) -> dict[str, Any]:
    front, layer, x = case.build()
    hidden = as_gaussian(vp.DVI(front, x)).mean
    model = gated(layer, hidden)
    real, own = Moments(), Moments()
    torch.manual_seed(1)
    for h, y in sampled(front, layer, x, n):
        real.add(y)
        if model is not None:
            own.add(model(h))
    net, rules = nn.Sequential(front, layer), {Output: output}
    row = {**case.configuration, "type": type(getattr(layer, "inner", layer)).__name__, "logvar": LOGVAR}
    row["dvi"] = compared((vp.DVI | rules)(net, x), *real.result())
    row["vbp"] = compared((vp.VBP | rules)(net, x), *(own if model is not None else real).result())
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case; a module with submodules is shown by its name only."""
    lines = [
        "| front | input | layer | DVI: variance | 5 to 95 % | mean | VBP: variance | mean |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        d, v, layer = row["dvi"], row["vbp"], row["layer"].split("(  ")[0]
        lines.append(
            f"| {row['front']} | {row['input']} | {layer} | {d['var_ratio']:.3f} "
            f"| {d['low']:.2f} to {d['high']:.2f} | {d['mean_error']:.3f} "
            f"| {v['var_ratio']:.3f} | {v['mean_error']:.3f} |"
        )
    return "\n".join(lines)


GROUPS = {"layers": LAYERS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--draws", type=int, default=20_000, help="Monte Carlo samples")
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "accuracy")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # another kernel that vmap cannot map
    for group in options.groups:
        path = options.out / f"{group}.json"
        configuration = {
            "draws": options.draws,
            "logvar": LOGVAR,
            "cases": [case.configuration for case in GROUPS[group]],
        }
        if not cells.finished(path, configuration):
            cells.write(path, configuration, rows=[measure(case, options.draws) for case in GROUPS[group]])
        print(table(json.loads(path.read_text())["rows"]))


if __name__ == "__main__":
    main()
