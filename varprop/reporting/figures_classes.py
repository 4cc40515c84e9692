"""Figures of class predictions: truth, calibration, error, and the parts of the entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba

from .figures import BINS, BLUE, GREY, INK, ORANGE, RED, SMALL, Figure, diagonal, figure, pit_histogram
from .numerals import plain

READABLE = 12
"""Up to this many classes have room for names and counts."""


@dataclass(frozen=True)
class Classes:
    """Predictions of classes beside the truth, one row for each case."""

    y: np.ndarray
    probs: np.ndarray
    mutual_information: np.ndarray
    names: Sequence[str]

    @property
    def chosen(self) -> np.ndarray:
        return self.probs.argmax(1)

    @property
    def right(self) -> np.ndarray:
        return self.chosen == self.y

    @property
    def confidence(self) -> np.ndarray:
        return self.probs.max(1)

    @property
    def entropy(self) -> np.ndarray:
        return -(self.probs * np.log(np.maximum(self.probs, 1e-30))).sum(1)

    @property
    def expected_entropy(self) -> np.ndarray:
        return np.maximum(self.entropy - self.mutual_information, 0)


def classification(c: Classes) -> dict[str, list[Figure]]:
    """Figures of class predictions, by section."""
    levels = np.linspace(0, 1, 2 * BINS + 1)
    covered = coverage(c, levels)
    return {
        "prediction": [_confusion(c)],
        "calibration": [
            _reliability(c),
            diagonal(
                "coverage",
                (levels, covered),
                ("nominal level", "coverage"),
                "Share of cases whose class is in the smallest set of classes with the nominal probability "
                "(the last class of a set counts in part). Above the line the model is underconfident, "
                "below it is overconfident.",
            ),
            pit_histogram(
                np.diff(covered),
                "The same, level by level: the share of cases that enter the sets at each level. Flat if "
                "calibrated; falling: underconfident; rising: overconfident.",
            ),
        ],
        "uncertainty": [
            _rejection(c),
            *(_parts(c, name, part) for name, part in _entropies(c).items() if part.max() > 1e-9),
        ],
    }


def _entropies(c: Classes) -> dict[str, np.ndarray]:
    return {"epistemic": c.mutual_information, "aleatoric": c.expected_entropy}


def coverage(c: Classes, levels: np.ndarray) -> np.ndarray:
    """P(U ≤ level), which equals the level if the probabilities are calibrated.

    U is uniform between the probability of all classes that are likelier than the true one, and that sum
    with the true class added.
    """
    own = c.probs[np.arange(len(c.y)), c.y]
    before = np.where(c.probs > own[:, None], c.probs, 0).sum(1)
    return np.clip((levels[:, None] - before) / np.maximum(own, 1e-12), 0, 1).mean(1)


def _confusion(c: Classes) -> Figure:
    k = c.probs.shape[1]
    counts = np.zeros((k, k), int)
    np.add.at(counts, (c.y, c.chosen), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)

    def draw(axes: Axes) -> None:
        axes.grid(visible=False)
        # From transparent to blue, so that empty cells have the colour of the page.
        cmap = LinearSegmentedColormap.from_list("", [to_rgba(BLUE, 0), to_rgba(BLUE, 1)])
        axes.imshow(shares, cmap=cmap, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(xlabel="predicted class", ylabel="true class")
        if k > READABLE:
            return
        names = [name if len(name) <= 16 else name[:15] + "…" for name in c.names]
        crowded = max(map(len, names)) > 90 / k
        axes.set_xticks(range(k), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
        axes.set_yticks(range(k), names)
        for i, j in np.argwhere(counts > 0):
            axes.text(
                j,
                i,
                str(counts[i, j]),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if shares[i, j] > 0.6 else INK,
            )

    return figure(
        "confusion",
        f"Confusion matrix of {k} classes; {c.right.mean():.1%} of {len(c.y)} cases are on its diagonal.",
        "Cases of each true class (rows, as shares of the row) by the class predicted for them.",
        draw,
        (9.4, min(6.0, 2.2 + 0.36 * k)),
    )


def _reliability(c: Classes) -> Figure:
    edges = np.linspace(0, 1, BINS + 1)
    groups = [np.flatnonzero((c.confidence > low) & (c.confidence <= high)) for low, high in pairwise(edges)]
    groups = [g for g in groups if len(g)]
    sure = np.array([c.confidence[g].mean() for g in groups])
    right = np.array([c.right[g].mean() for g in groups])
    count = np.array([len(g) for g in groups])
    error = np.sqrt(np.maximum(right * (1 - right), 0.25 / count) / count)
    gap = float((np.abs(right - sure) * count).sum() / count.sum())

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=INK, lw=0.9, ls="--")
        axes.bar(
            (edges[:-1] + edges[1:]) / 2,
            np.histogram(c.confidence, edges)[0] / len(c.y),
            0.092,
            color=GREY,
            alpha=0.35,
            label="share of cases",
        )
        axes.errorbar(sure, right, error, fmt="o-", ms=4, color=BLUE, label="accuracy")
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(loc="upper left", fontsize=8)

    return figure(
        "reliability",
        f"Reliability diagram; accuracy and confidence differ by {gap:.3f} on average.",
        "Accuracy in bins of confidence, with standard errors. On the dashed line the model is right as "
        "often as it says.",
        draw,
        SMALL,
    )


def _rejection(c: Classes) -> Figure:
    order = np.argsort(c.entropy, kind="stable")
    kept = np.arange(1, len(order) + 1)
    error = np.cumsum(~c.right[order]) / kept
    ideal = np.maximum(kept - c.right.sum(), 0) / kept
    shown = np.unique(np.linspace(max(0, len(order) // 20), len(order) - 1, 200).astype(int))

    def draw(axes: Axes) -> None:
        axes.plot(100 * kept[shown] / len(order), 100 * error[shown], label="by entropy")
        axes.axhline(100 * error[-1], color=ORANGE, lw=1, label="at random")
        axes.plot(
            100 * kept[shown] / len(order),
            100 * ideal[shown],
            color=GREY,
            lw=1,
            ls="--",
            label="by an oracle",
        )
        axes.set(xlabel="cases kept, most certain first, %", ylabel="error among them, %", xlim=(0, 100))
        axes.set_ylim(0, max(135 * error[-1], 1e-3))
        axes.legend(loc="upper left", fontsize=8)

    half = error[len(order) // 2]
    return figure(
        "error",
        f"Error rate among the most certain cases: {half:.1%} in the more certain half, "
        f"{error[-1]:.1%} in all.",
        "Error that remains when the least certain cases are rejected. The faster it falls, the better the "
        "uncertainty finds the mistakes.",
        draw,
        SMALL,
    )


def _parts(c: Classes, name: str, entropy: np.ndarray) -> Figure:
    edges = np.linspace(0, max(float(entropy.max()), 1e-6), 31)
    words = {
        "epistemic": (
            "mutual information, nats",
            "Epistemic: mutual information with the weights, which more data would remove.",
        ),
        "aleatoric": (
            "expected entropy, nats",
            "Aleatoric: entropy that would be left if the weights were known.",
        ),
    }
    right, wrong = (
        np.histogram(entropy[mask], edges)[0] / max(int(mask.sum()), 1) for mask in (c.right, ~c.right)
    )

    def draw(axes: Axes) -> None:
        axes.stairs(right, edges, color=BLUE, fill=True, alpha=0.45, label=f"right ({int(c.right.sum())})")
        if not c.right.all():
            axes.stairs(wrong, edges, color=RED, lw=1.6, label=f"wrong ({int((~c.right).sum())})")
        axes.set(xlabel=words[name][0], ylabel="share of cases")
        axes.legend(fontsize=8)

    means = [
        f"{plain(entropy[mask].mean(), 3)} for {what}"
        for mask, what in ((c.right, "right"), (~c.right, "wrong"))
        if mask.any()
    ]
    return figure(
        name,
        f"Histogram of {name} uncertainty ({words[name][0]}); its mean is {' and '.join(means)} predictions.",
        f"{words[name][1]} Mistakes should lie to the right.",
        draw,
        SMALL,
    )
