"""The two figures of the page of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def growth(found: Mapping[str, Any], titles: Mapping[str, str]) -> Figure:
    """The time of a training step by width, depth and batch."""
    figure, axes = plt.subplots(1, len(found), figsize=(10, 2.8), layout="constrained", sharey=True)
    for axis, (name, part) in zip(axes, found.items(), strict=True):
        for who in ("plain", "vbp", "dvi"):
            sizes = [int(n) for n in part["rows"]]
            seconds = [row[who]["seconds"] * 1e3 for row in part["rows"].values()]
            axis.loglog(sizes, seconds, "o-", ms=3, label=f"{titles[who]}: {part['exponents'][who]:.2f}")
        axis.set(xlabel=name)
        axis.legend(title="exponent", frameon=False, fontsize=8)
    axes[0].set_ylabel("ms for a training step")
    return figure


def quality(tasks: Mapping[str, Any]) -> Figure:
    """The test log-likelihood of each peer against the cost of a prediction."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(9.5, 3.8), layout="constrained", squeeze=False)
    names = dict.fromkeys(name for cell in tasks.values() for name in cell["found"])
    colours = dict(zip(names, ["black", *(f"C{k}" for k in range(10)), "limegreen"], strict=False))
    for axis, (task, cell) in zip(axes[0], tasks.items(), strict=True):
        for name, run in cell["found"].items():
            ours = name.startswith("varprop")
            axis.errorbar(
                [score["seconds_per_row"] * 1e6 for score in run["scores"]],
                [score["log_likelihood"] for score in run["scores"]],
                [score["standard_error"] for score in run["scores"]],
                fmt="*-" if ours else "o-",
                ms=12 if ours else 4,
                lw=1,
                color=colours[name],
                label=name,
            )
        axis.set(title=task, xlabel="µs for the prediction of a row", xscale="log")
    axes[0][0].set_ylabel("test log-likelihood")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure
