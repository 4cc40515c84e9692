"""The figures of the documentation: `python docs/figures.py` writes docs/figures/*.svg."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
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


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def gate() -> None:
    """Mean and standard deviation of ReLU by the gates of VBP and exactly, for s = 1."""
    m = torch.linspace(-3, 3, 601)
    x = vp.Gaussian(m, torch.ones_like(m))
    curves = [
        ("exact (DVI, Eq. 6)", vp.moments.rectify(x), {"color": INK, "lw": 2.2}),
        ("hard gate (VBP, Eq. 4)", vp.moments.gate(x), {"color": BLUE, "lw": 1.8}),
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
    """Mean and variance of the outputs of a dense ReLU network whose weights are drawn from q."""

    def drawn(layer: nn.Linear, h: Tensor) -> Tensor:
        return torch.einsum("noi,nbi->nbo", random_weight(layer).sample((n,)), h) + layer.bias

    h = x.expand(n, *x.shape)
    for layer in net:
        h = drawn(layer, h) if isinstance(layer, nn.Linear) else layer(h)
    return vp.Gaussian(h.mean(0), h.var(0))


def regression() -> None:
    """A curve with a gap in its data: what three trainings believe, and what their own posterior says when its weights are drawn."""
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
            label="f, its own moments: mean ± 2 std",
        )
        ax.plot(grid, own.mean, color=BLUE, lw=1.8)
        for k, label in ((-2, "f, weights drawn from q: ± 2 std"), (2, None)):
            ax.plot(grid, drawn.mean + k * drawn.std, color=ORANGE, lw=1.2, ls="--", label=label)
        ax.plot(x, y, ".", color=INK, ms=3, label="data")
        ax.set(title=title, xlabel="x", ylim=(-4, 4), xlim=(-5, 5))
        print(
            f"{title}: standard deviation {own.std.mean():.3f} by its own moments, {drawn.std.mean():.3f} of drawn weights"
        )
    axes[0].set_ylabel("y")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.02)
    )
    save(figure, "regression.svg")


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    gate()
    regression()
