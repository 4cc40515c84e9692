"""Figures of Table 2, from its cells: `python -m experiments.figures` writes docs/figures/table2-*.png.

Accuracy against the share of images rejected, reliability diagrams, and entropies in and out of distribution;
run 0 of the short schedule.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from . import cells
from .curves import BINS, REJECTED
from .image_tables import IMAGE_ROWS, IMAGES

COLOURS = ("#2a6fbb", "#2a9d8f", "#d9722e", "#8a8f98", "#5b5f66", "#9b2c6f")
"""In the order of the rows."""
STYLES = {"plain-scaled": "--"}
INK, GREY = "#33363c", "#8a8f98"
LOOK: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
Cells = dict[str, dict[str, Any]]
"""Of one set, by row."""


def found(folder: Path) -> dict[str, Cells]:
    """By set, those that have any cell."""
    sets: dict[str, Cells] = {}
    for name in IMAGES:
        for row in IMAGE_ROWS:
            if (path := folder / row / f"{name}-0.json").exists():
                sets.setdefault(name, {})[row] = json.loads(path.read_text())
    return sets


def rejection(sets: dict[str, Cells]) -> Figure:
    """The error that remains when the most uncertain images, by entropy, are left undecided."""
    figure, axes = panels(len(sets))
    for ax, (name, rows) in zip(axes, sets.items(), strict=True):
        for row, cell in rows.items():
            ax.plot([100 * share for share in REJECTED], [100 * a for a in cell["rejection"]], **style(row))
        ax.set(title=name, xlabel="images rejected, %", ylabel="accuracy on the others, %")
    axes[0].legend(loc="lower right")
    return figure


def reliability(sets: dict[str, Cells]) -> Figure:
    """Accuracy less confidence in bins of confidence: below zero where a prediction is too sure of itself."""
    figure, axes = panels(len(sets))
    for ax, (name, rows) in zip(axes, sets.items(), strict=True):
        ax.axhline(0, color=GREY, lw=0.8)
        for row, cell in rows.items():
            # A bin of a few images says nothing.
            bins = np.array([b for b in cell["reliability"] if b[0] >= 0.002])
            ax.plot(bins[:, 1], bins[:, 2] - bins[:, 1], marker="o", ms=3, **style(row))
        ax.set(title=name, xlabel="confidence", ylabel="accuracy - confidence", ylim=(-0.35, 0.35))
    axes[0].legend(loc="lower left")
    return figure


def entropies(sets: dict[str, Cells]) -> Figure:
    """Histograms of the predictive entropy, of test images and of strangers."""
    columns = [row for row in IMAGE_ROWS if any(row in rows for rows in sets.values())]
    size = (2.4 * len(columns), 2.2 * len(sets))
    figure, axes = plt.subplots(len(sets), len(columns), figsize=size, squeeze=False, layout="constrained")
    for line, (name, rows) in zip(axes, sets.items(), strict=True):
        for ax, row in zip(line, columns, strict=True):
            if row not in rows:
                ax.set_axis_off()
                continue
            for k, (kind, shares) in enumerate(rows[row]["entropies"].items()):
                edges = np.linspace(0, math.log(10), BINS + 1)
                label = "test" if kind == "known" else kind
                colour = INK if kind == "known" else ("#d9722e", "#2a6fbb", "#2a9d8f")[k - 1]
                ax.stairs(shares, edges, color=colour, lw=1.8 if kind == "known" else 1.3, label=label)
            ax.set(title=f"{name}, {row}", xlabel="entropy, nats", yscale="log", ylim=(1e-4, 300))
            ax.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1])
            ax.legend(fontsize=7, loc="upper right", borderpad=0, labelspacing=0.2)
        line[0].set_ylabel("share of the images")
    return figure


def panels(n: int) -> tuple[Figure, Sequence[Any]]:
    figure, axes = plt.subplots(1, n, figsize=(3.3 * n, 3), squeeze=False, layout="constrained")
    return figure, axes[0]


def style(row: str) -> dict[str, Any]:
    return {"label": row, "color": COLOURS[IMAGE_ROWS.index(row)], "ls": STYLES.get(row, "-"), "lw": 1.5}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cells", type=Path, default=cells.RESULTS / "table2" / "short", help="folder of the cells"
    )
    parser.add_argument("--out", type=Path, default=cells.FIGURES)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sets = found(options.cells)
    with_strangers = {
        name: rows for name, rows in sets.items() if any(cell["auroc"] for cell in rows.values())
    }
    with plt.rc_context(LOOK):
        for draw in (rejection, reliability, entropies):
            shown = with_strangers if draw is entropies else sets
            if not shown:
                continue
            figure = draw(shown)
            figure.savefig(options.out / f"table2-{draw.__name__}.png", dpi=130, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
