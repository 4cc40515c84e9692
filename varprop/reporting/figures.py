"""The figures of a report, each an SVG that takes its text colour and font from the page around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, ScalarFormatter, StrMethodFormatter

from .numerals import plain

BLUE, ORANGE, GREEN, RED, GREY = "#4a86c5", "#d9822b", "#4c9f70", "#cc5a52", "#8a9099"
LONGEST = 26
"""Letters of a name beside a bar."""
COLOURS = [BLUE, ORANGE, GREEN, RED, GREY]
INK = "#010203"  # replaced by the colour of the page's text, which matplotlib does not know
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.prop_cycle": cycler(color=COLOURS),
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-6, 12),
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # names come from the data and may have dollar signs
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
PARTS = {"data fit": "data_fit", "validation": "validation"}
"""What is drawn beside the ELBO, and its column in the history."""
BINS = 10
LOWEST = -60.0
"""Signal-to-noise ratios, in dB, are shown from here on; lower ones are counted here."""
SMALL, MEDIUM, WIDE = (3.5, 3.0), (4.6, 3.3), (9.4, 4.6)


@dataclass(frozen=True)
class Figure:
    """A drawing, its alternative text, and a caption that says how to read it."""

    name: str
    svg: str
    alt: str
    caption: str
    wide: bool = False


def figure(
    name: str, alt: str, caption: str, draw: Callable[[Axes], None], size: tuple[float, float] = MEDIUM
) -> Figure:
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        axes = canvas.subplots()
        draw(axes)
        if size == SMALL:
            axes.locator_params(axis="x", nbins=5)
        for axis in (axes.xaxis, axes.yaxis):
            large = max(map(abs, axis.get_view_interval())) >= 1e4
            if axis.get_label_text() == "epoch":
                axis.set_major_locator(MaxNLocator("auto", integer=True))
            if large and isinstance(axis.get_major_formatter(), ScalarFormatter):
                axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        out = StringIO()
        canvas.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Type": None, "Format": None},
        )
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Several drawings share a page, so their ids must differ.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return Figure(
        name, re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL), alt, caption, wide=size > MEDIUM
    )


# --------------------------------------------------------------------------------------------------- training


def learning_curves(history: pd.DataFrame) -> list[Figure]:
    epochs = history["epoch"] if "epoch" in history else np.arange(len(history))

    def fit(axes: Axes) -> None:
        columns = {"ELBO": -history["loss"]}
        columns |= {label: history[name] for label, name in PARTS.items() if name in history}
        series = {label: values for label, values in columns.items() if np.isfinite(values).any()}
        for label, values in series.items():
            axes.plot(epochs, values, label=label, marker="." if len(history) < 3 else None)
        worst = min(values.iloc[len(history) // 20 :].min() for values in series.values())
        best = max(values.max() for values in series.values())
        if best > worst:  # without the first steps, which would flatten the rest
            axes.set_ylim(worst - 0.05 * (best - worst), best + 0.05 * (best - worst))
        axes.set(xlabel="epoch", ylabel="nats per data point")
        axes.legend()

    def kl(axes: Axes) -> None:
        axes.plot(epochs, history["kl"], color=GREEN, marker="." if len(history) < 3 else None)
        axes.set(xlabel="epoch", ylabel="KL(q || p), nats")

    curves = [
        figure(
            "learning",
            f"Learning curves over {len(history)} epochs; the ELBO ends at "
            f"{plain(-history['loss'].iloc[-1])} nats per data point.",
            "The evidence lower bound (ELBO) and its data fit per data point, and the log-likelihood of the "
            "held-out data, if there is any. Higher is better.",
            fit,
        )
    ]
    if "kl" in history and (history["kl"] > 0).any():
        alt = (
            f"Divergence of the weights over {len(history)} epochs; it ends at "
            f"{plain(history['kl'].iloc[-1])} nats."
        )
        curves.append(
            figure(
                "divergence",
                alt,
                "Divergence of the posterior from the prior: how much the weights have learned.",
                kl,
            )
        )
    return curves


# ------------------------------------------------------------------------------------------------ calibration


def diagonal(
    name: str, curve: tuple[np.ndarray, np.ndarray], labels: tuple[str, str], caption: str
) -> Figure:
    """A curve that lies on the diagonal if the model is calibrated."""
    gap = float(np.abs(curve[1] - curve[0]).max())

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=INK, lw=0.9, ls="--")
        axes.fill_between(*curve, curve[0], color=BLUE, alpha=0.2, lw=0)
        axes.plot(*curve)
        axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(0, 1))

    return figure(
        name,
        f"{labels[1].capitalize()} against {labels[0]}; the largest gap is {gap:.3f}.",
        caption,
        draw,
        SMALL,
    )


def pit_histogram(shares: np.ndarray, caption: str, n: int | None = None) -> Figure:
    """Shares of the transform in equal bins, with a band of two standard errors for n data points."""
    k = len(shares)

    def draw(axes: Axes) -> None:
        axes.bar((np.arange(k) + 0.5) / k, shares * k, width=0.92 / k, color=BLUE)
        if n is not None:
            spread = 2 * np.sqrt((k - 1) / n)
            axes.axhspan(1 - spread, 1 + spread, color=GREY, alpha=0.3, lw=0)
        axes.axhline(1, color=INK, lw=0.9, ls="--")
        axes.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
        axes.set_ylim(bottom=0)

    return figure(
        "pit",
        f"Histogram of the probability integral transform; its density goes from {shares.min() * k:.2f} to "
        f"{shares.max() * k:.2f}.",
        caption,
        draw,
        SMALL,
    )


# ----------------------------------------------------------------------------------------------------- layers


def layers(shares: Mapping[str, float], ratios: Mapping[str, np.ndarray]) -> list[Figure]:
    """Share of the variance by layer, and signal-to-noise of the weights in decibels."""
    decibels = {name: 20 * np.log10(np.maximum(ratio, 1e-6)) for name, ratio in ratios.items()}
    figures = []
    if shares:
        figures.append(
            bars(
                "shares",
                shares,
                "% of the output's variance",
                "Share of the output's variance by layer",
                "Variance of the output when only this layer's weights are random, over the variance when "
                "all are. The rest to 100 % comes from the interaction of layers.",
            )
        )
    if decibels:
        figures.append(_signal_to_noise(decibels))
    return figures


def bars(
    name: str, shares: Mapping[str, float], label: str, alt: str, caption: str, colour: str = BLUE
) -> Figure:
    """Horizontal bars of shares, in per cent."""
    names = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in map(str, shares)]

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))
        drawn = axes.barh(places, [100 * share for share in shares.values()], color=colour, height=0.7)
        axes.bar_label(drawn, [f"{share:.1%}" for share in shares.values()], padding=3, fontsize=8)
        axes.set_yticks(places, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.margins(x=0.16)
        axes.grid(axis="y", visible=False)
        axes.set(xlabel=label)

    said = ", ".join(f"{text} {share:.1%}" for text, share in zip(names, shares.values(), strict=True))
    return figure(name, f"{alt}: {said}.", caption, draw, (4.6, 0.9 + 0.24 * max(len(names), 3)))


def histogram(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The share of the values between the edges; all below the first edge count as there."""
    shares: np.ndarray = np.histogram(np.maximum(values, edges[0]), edges)[0] / values.size
    return shares


def _signal_to_noise(decibels: Mapping[str, np.ndarray]) -> Figure:
    everything = np.concatenate([values.ravel() for values in decibels.values()])
    edges = np.linspace(max(everything.min(), LOWEST), max(everything.max(), LOWEST + 1) + 1e-9, 26)

    def draw(axes: Axes) -> None:
        colours = (
            COLOURS
            if len(decibels) <= len(COLOURS)
            else mpl.colormaps["viridis"](np.linspace(0.35, 0.9, len(decibels)))
        )
        for (name, values), colour in zip(decibels.items(), colours, strict=False):
            axes.stairs(histogram(values, edges), edges, color=colour, lw=1.6, label=name)
        axes.axvline(0, color=INK, lw=0.9, ls="--")
        axes.set(xlabel="|mean| / standard deviation, dB", ylabel="share of weights")
        if len(decibels) <= 8:
            axes.legend(fontsize=8, loc="best")

    low = (everything < LOWEST).mean()
    return figure(
        "snr",
        f"Signal-to-noise of the weights; the median is {np.median(everything):.1f} dB, "
        f"{(everything < 0).mean():.0%} are below 0 dB.",
        "Signal-to-noise ratio of the weights, by tensor. Left of 0 dB not even the sign of a weight is "
        "certain, and the weight can be pruned."
        + (f" The first bar has the {low:.1%} below {LOWEST:.0f} dB, too." if low else ""),
        draw,
    )
