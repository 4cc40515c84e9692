"""The figures of the documentation: `python docs/figures.py` writes them to docs/figures."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from sklearn.datasets import make_moons
from torch import Tensor, nn

import varprop as vp
from varprop.posterior import random_weight

HERE = Path(__file__).parent / "figures"
BLUE, ORANGE, GREY, INK = "#2a6fbb", "#d9722e", "#8a8f98", "#33363c"
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.titlesize": 10,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "svg.fonttype": "path",
        "svg.hashsalt": "varprop",
    }
)


def save(figure: plt.Figure, name: str, **options: float) -> None:
    metadata = {"Date": None} if name.endswith(".svg") else {"Software": None}
    figure.savefig(HERE / name, bbox_inches="tight", metadata=metadata, **options)
    plt.close(figure)


def front() -> None:
    """A regression and a classifier with their uncertainty, near the data and far from them."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.1), width_ratios=(1.3, 1), layout="constrained")
    _curve(axes[0])
    _moons(axes[1])
    save(figure, "front.png", dpi=160)


def _curve(ax: Axes) -> None:
    """A noisy sine with a gap: the mean and the two parts of its 90 % interval."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(90, 1) * 2 - 4, torch.rand(90, 1) * 2 - 0.5])
    y = torch.sin(1.5 * x) + 0.15 * torch.randn_like(x)
    model = vp.BayesianMLPRegressor(random_state=0).fit(x.numpy(), y[:, 0].numpy())
    grid = torch.linspace(-5, 2.5, 400).view(-1, 1)
    p = model.predictive(grid.numpy())
    low, high = p.interval(0.9)
    spread = 1.645 * p.epistemic.sqrt()
    band = {"lw": 0, "color": BLUE}
    ax.fill_between(grid[:, 0], low[:, 0], high[:, 0], alpha=0.2, label="90 % interval", **band)
    inner = ((p.mean + sign * spread)[:, 0] for sign in (-1, 1))
    ax.fill_between(grid[:, 0], *inner, alpha=0.35, label="its epistemic part", **band)
    ax.plot(grid, p.mean, color=BLUE, lw=1.8, label="mean")
    ax.plot(x, y, ".", color=INK, ms=3, label="data")
    ax.set(title="regression", xlabel="x", ylabel="y", xlim=(-5, 2.5), ylim=(-4.2, 4.2))
    ax.legend(loc="upper center", ncols=2, fontsize=8)


def _moons(ax: Axes) -> None:
    """Two classes: the entropy of the prediction, high between them and far from both."""
    torch.manual_seed(0)
    points, labels = make_moons(300, noise=0.15, random_state=0)
    x = torch.tensor(points, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    net = vp.variational(
        nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)), init="he"
    )
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Categorical(), vp.priors.FanIn(4.0), n_data=len(x))
    vp.fit(elbo, (x, torch.tensor(labels)), epochs=200, lr=0.02, batch_size=50, schedule="cosine")
    axis = torch.linspace(-4, 4, 161)
    grid = torch.cartesian_prod(axis, axis)
    p = elbo.predict(grid)
    unsure = p.entropy.view(161, 161).T / math.log(2)
    filled = ax.contourf(axis, axis, unsure, levels=torch.linspace(0, 1, 11).tolist(), cmap="Blues")
    for label, colour in ((0, ORANGE), (1, INK)):
        ax.plot(*x[labels == label].T, ".", color=colour, ms=3, label=f"class {label}")
    ax.figure.colorbar(filled, ax=ax, label="entropy, bits", ticks=[0, 0.5, 1])
    ax.set(title="classification", xlabel="x₁", ylabel="x₂", aspect="equal")


def gate() -> None:
    """Mean and standard deviation of ReLU by the gates of VBP and exactly, for s = 1."""
    m = torch.linspace(-3, 3, 601)
    x = vp.Gaussian(m, torch.ones_like(m))
    curves = [
        ("exact (DVI)", vp.moments.rectify(x), {"color": INK, "lw": 2.2}),
        ("hard gate (VBP)", vp.moments.gate(x), {"color": BLUE, "lw": 1.8}),
        ("gate of slope 2/s", vp.moments.gate(x, slope=2.0), {"color": ORANGE, "lw": 1.8, "ls": "--"}),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.7), sharex=True)
    for label, h, style in curves:
        axes[0].plot(m, h.mean, label=label, **style)
        axes[1].plot(m, h.std, **style)
    axes[0].set(title="mean / s", xlabel="m / s", ylim=(-0.35, 3.1))
    axes[1].set(title="standard deviation / s", xlabel="m / s", ylim=(-0.03, 1.12))
    axes[0].legend(loc="upper left", handlelength=1.8)
    for ax in axes:
        ax.axvline(0, color=GREY, lw=0.6, zorder=0)
        ax.grid(alpha=0.25, lw=0.5)
    save(figure, "gate.svg")


def with_sampled_weights(net: nn.Sequential, x: Tensor, n: int = 2000) -> vp.Gaussian:
    """Mean and variance of the outputs of a dense ReLU network with Monte Carlo samples of its weights."""

    def drawn(layer: nn.Linear, h: Tensor) -> Tensor:
        return torch.einsum("noi,nbi->nbo", random_weight(layer).sample((n,)), h) + layer.bias

    h = x.expand(n, *x.shape)
    for layer in net:
        h = drawn(layer, h) if isinstance(layer, nn.Linear) else layer(h)
    return vp.Gaussian(h.mean(0), h.var(0))


def regression() -> None:
    """A curve with a gap in its data, trained in three ways: own moments against samples of the posterior."""
    torch.manual_seed(1)
    x = torch.cat([torch.rand(60, 1) * 2 - 3, torch.rand(60, 1) * 2 + 1])
    y = torch.sin(1.5 * x) + 0.1 * torch.randn_like(x)
    grid = torch.linspace(-5, 5, 301).view(-1, 1)
    trainings = [("VBP", vp.VBP, 0.0), ("VBP, kl_z_weight = 1", vp.VBP, 1.0), ("DVI", vp.DVI, 0.0)]
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 2.9), sharey=True)
    for ax, (title, method, kl_z_weight) in zip(axes, trainings, strict=True):
        torch.manual_seed(0)
        net = vp.variational(nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1)), init="he")
        elbo = vp.ELBO(
            net,
            method,
            vp.likelihoods.Normal(),
            vp.priors.Normal(1.0),
            n_data=len(x),
            kl_z_weight=kl_z_weight,
        )
        vp.fit(elbo, (x, y), epochs=1500, lr=0.01, batch_size=40, schedule="cosine")
        with torch.no_grad():
            own, drawn = method(net, grid), with_sampled_weights(net, grid)
        low, high = (own.mean + k * own.std for k in (-2, 2))
        ax.fill_between(
            grid[:, 0],
            low[:, 0],
            high[:, 0],
            color=BLUE,
            alpha=0.22,
            lw=0,
            label="f, own moments: mean ± 2 std",
        )
        ax.plot(grid, own.mean, color=BLUE, lw=1.8)
        for k, label in ((-2, "f, weights sampled from q: ± 2 std"), (2, None)):
            ax.plot(grid, drawn.mean + k * drawn.std, color=ORANGE, lw=1.2, ls="--", label=label)
        ax.plot(x, y, ".", color=INK, ms=3, label="data")
        ax.set(title=title, xlabel="x", ylim=(-4, 4), xlim=(-5, 5))
        print(
            f"{title}: std {own.std.mean():.3f} by its own moments, {drawn.std.mean():.3f} by sampled weights"
        )
    axes[0].set_ylabel("y")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.02)
    )
    save(figure, "regression.svg")


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    front()
    gate()
    regression()
