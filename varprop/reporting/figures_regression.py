"""Figures of numeric predictions: truth, calibration, error, and the parts of the variance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from .figures import BINS, BLUE, GREY, INK, ORANGE, RED, WIDE, Figure, diagonal, figure, pit_histogram
from .numerals import plain


@dataclass(frozen=True)
class Numbers:
    """Predictions of numbers beside the truth, one entry for each target."""

    unit: str
    y: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    epistemic: np.ndarray
    aleatoric: np.ndarray
    pit: np.ndarray
    """Probability integral transform: the predicted probability of a target below the one that came."""

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.epistemic + self.aleatoric)


def regression(n: Numbers) -> dict[str, list[Figure]]:
    """Figures of numeric predictions, by section."""
    levels = np.linspace(0, 1, 41)
    inside = np.array([(2 * np.abs(n.pit - 0.5) <= level).mean() for level in levels])
    below = np.array([(n.pit <= level).mean() for level in levels])
    return {
        "prediction": [_truth(n)],
        "calibration": [
            diagonal(
                "reliability",
                (levels, below),
                ("predicted probability", "share of targets below the quantile"),
                "Predicted quantiles against the share of targets below them. On the dashed line they agree.",
            ),
            diagonal(
                "coverage",
                (levels, inside),
                ("nominal level", "coverage"),
                "Share of the targets inside central intervals of each level. Above the line the intervals "
                "are too wide, below too narrow.",
            ),
            pit_histogram(
                np.histogram(n.pit, BINS * 2, (0, 1))[0] / len(n.pit),
                "Flat if calibrated (the band is two standard errors). High in the middle: intervals too "
                "wide; high at the ends: too narrow; a slope: biased.",
                len(n.pit),
            ),
        ],
        "uncertainty": [_error_against_std(n), _variance_parts(n)],
    }


def _truth(n: Numbers) -> Figure:
    shown = np.random.default_rng(0).permutation(len(n.y))[:250]
    inside = ((n.low <= n.y) & (n.y <= n.high))[shown]

    def draw(axes: Axes) -> None:
        for mask, colour, label in (
            (inside, BLUE, "truth inside the interval"),
            (~inside, RED, "truth outside"),
        ):
            i = shown[mask]
            bars = np.stack([n.mean[i] - n.low[i], n.high[i] - n.mean[i]])
            axes.errorbar(
                n.y[i],
                n.mean[i],
                bars,
                fmt="o",
                ms=3,
                lw=0.9,
                color=colour,
                ecolor=colour + "66",
                label=label,
            )
        ends = [n.y[shown].min(), n.y[shown].max()]
        axes.plot(ends, ends, color=INK, lw=0.9, ls="--")
        axes.set(xlabel=f"truth{n.unit}", ylabel=f"prediction{n.unit}")
        axes.legend(loc="upper left")

    return figure(
        "truth",
        f"Predictions with 90 % intervals against the truth for {len(shown)} of {len(n.y)} targets; "
        f"{inside.mean():.0%} lie inside.",
        f"Predictive mean with its 90 % interval for {len(shown)} targets. A perfect prediction lies on the "
        "dashed line.",
        draw,
        WIDE,
    )


def _error_against_std(n: Numbers) -> Figure:
    error, std = np.abs(n.y - n.mean), n.std
    shown = np.random.default_rng(0).permutation(len(error))[:800]
    groups = np.array_split(np.argsort(std, kind="stable"), min(BINS, len(std)))
    stds = np.array([np.sqrt((std[g] ** 2).mean()) for g in groups])
    errors = np.array([np.sqrt((error[g] ** 2).mean()) for g in groups])

    def draw(axes: Axes) -> None:
        axes.scatter(std[shown], error[shown], s=5, color=BLUE, alpha=0.35, lw=0, label="targets")
        axes.plot(stds, errors, "o-", color=ORANGE, ms=4, label="root mean square in ten groups")
        ends = [std.min(), std.max()]
        axes.plot(ends, ends, color=INK, lw=0.9, ls="--", label="error = standard deviation")
        axes.set(xlabel=f"predicted standard deviation{n.unit}", ylabel=f"|error|{n.unit}")
        axes.set_xlim(right=std.min() + 1.1 * max(np.quantile(std, 0.99) - std.min(), 1e-3 * std.min()))
        axes.set_ylim(0, max(np.quantile(error, 0.995), errors.max(), std.max()) * 1.25)
        axes.legend(fontsize=8)

    return figure(
        "error",
        "Error against predicted standard deviation; from the most to the least certain tenth the error "
        f"goes from {plain(errors[0], 3)} to {plain(errors[-1], 3)}.",
        "Where the uncertainty is larger, so should the errors be: in groups of similar uncertainty the root "
        "mean squared error should equal the predicted standard deviation.",
        draw,
    )


def _variance_parts(n: Numbers) -> Figure:
    order = np.argsort(n.epistemic + n.aleatoric, kind="stable")
    order = order[np.linspace(0, len(order) - 1, min(200, len(order))).round().astype(int)]
    share = n.epistemic.sum() / (n.epistemic + n.aleatoric).sum()

    def draw(axes: Axes) -> None:
        x = np.linspace(0, 100, len(order))
        axes.stackplot(
            x,
            n.aleatoric[order],
            n.epistemic[order],
            colors=[GREY, BLUE],
            labels=["aleatoric", "epistemic"],
            alpha=0.8,
            lw=0,
        )
        axes.set(xlabel="targets, most certain first, %", ylabel="predictive variance", xlim=(0, 100))
        axes.set_ylim(0, 1.25 * (n.epistemic + n.aleatoric)[order].max())
        axes.legend(loc="upper left")

    return figure(
        "parts",
        "Aleatoric and epistemic variance of each target, sorted; "
        f"{plain(100 * share, 2)} % of the variance is epistemic.",
        "Epistemic variance comes from not knowing the weights and shrinks with more data; aleatoric "
        f"variance is noise and does not. Here {plain(100 * share, 2)} % is epistemic.",
        draw,
    )
