"""Accuracy against examples seen, from the cells of Table 3: `python -m experiments.table3_figure`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from . import cells
from .figures import COLOURS, LOOK, panels
from .table3 import NAMES, TASKS, found

DASHED = ("plain", "sgd", "frozen")
"""Rows that are not in the paper."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.table3_figure", description=__doc__)
    parser.add_argument("--cells", type=Path, default=cells.RESULTS / "table3", help="folder of the cells")
    parser.add_argument("--out", type=Path, default=cells.FIGURES / "table3-accuracy.png")
    options = parser.parse_args(arguments)
    sets = {name: {row: found(options.cells, row, name) for row in NAMES} for name in TASKS}
    sets = {name: rows for name, rows in sets.items() if any(rows.values())}
    colours = dict(zip(NAMES, (*COLOURS, "#b08900"), strict=True))
    with plt.rc_context(LOOK):
        figure, axes = panels(len(sets))
        figure.set_size_inches(4.2 * len(sets), 3.6)
        for ax, (name, rows) in zip(axes, sets.items(), strict=True):
            for row, runs in rows.items():
                if runs:
                    seen = [point[0] for point in runs[0]["curve"]]
                    right = 100 * np.mean([[point[1] for point in run["curve"]] for run in runs], 0)
                    style = "--" if row in DASHED else "-"
                    ax.plot(seen, right, style, marker="o", ms=2.5, lw=1.5, color=colours[row], label=row)
            ax.set(title=name, xscale="log", xlabel="examples seen", ylabel="test accuracy, %")
        axes[0].legend(loc="lower right")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=130, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
