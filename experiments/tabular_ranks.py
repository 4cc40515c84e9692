"""Tables and ranks of the tabular benchmark, and the critical-difference plots, from its cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from . import cells, tabular_data, tabular_rows
from .tables import markdown

SCORES = {
    "regression": {
        "log_likelihood": "log-likelihood",
        "crps": "CRPS",
        "rmse": "RMSE",
        "interval_score": "interval score (90 %)",
        "coverage": "share of test targets inside the 90 % interval",
        "seconds": "processor time of the fit, seconds",
    },
    "classes": {
        "log_likelihood": "log-likelihood",
        "error": "error, %",
        "brier": "Brier score",
        "ece": "calibration error (ECE)",
        "auc": "area under the ROC curve",
        "seconds": "processor time of the fit, seconds",
    },
}
RANKED = {"regression": ("log_likelihood", "crps"), "classes": ("log_likelihood", "error")}

Means = dict[str, dict[str, float]]
"""By row and table, the mean over the splits."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks over tables, 1 for the best, of the rows that have a score on each of them."""

    mean: dict[str, float]
    tables: list[str]
    p: float
    """Of the Friedman test, that all rows are alike."""
    difference: float
    """The critical difference of two mean ranks at 5 % (Nemenyi)."""


def score(folder: Path, kind: str, half: str, name: str) -> Means:
    """Of every row that has this score on some table of the half."""
    found: Means = {}
    for row in tabular_rows.ROWS:
        for table in _tables(kind, half):
            path = folder / row / f"{table}.json"
            if path.exists():
                values = [split[name] for split in json.loads(path.read_text())["splits"]]
                if None not in values:
                    found.setdefault(row, {})[table] = float(np.mean(values))
    return found


def _tables(kind: str, half: str) -> list[str]:
    return [
        name
        for name in tabular_data.NAMES
        if tabular_data.kind(name) == kind and tabular_data.HALVES[name] == half
    ]


def ranks(means: Means, *, larger: bool) -> Ranks | None:
    """Of the rows that have every table; Friedman's test needs three rows and two tables."""
    names = sorted({table for row in means.values() for table in row})
    complete = {row: [of[name] for name in names] for row, of in means.items() if len(of) == len(names)}
    if len(complete) < 3 or len(names) < 2:
        return None
    values = np.array(list(complete.values())) * (-1 if larger else 1)
    places = stats.rankdata(values, axis=0).mean(1)
    k, n = values.shape
    difference = stats.studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    p = stats.friedmanchisquare(*values).pvalue
    mean = dict(sorted(zip(complete, places.tolist(), strict=True), key=lambda item: item[1]))
    return Ranks(mean, names, float(p), float(difference))


def groups(mean: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The longest runs of sorted mean ranks that differ by less than the critical difference.

    >>> groups([1.0, 1.5, 2.5, 4.0], 1.6)
    [(0, 2), (2, 3)]
    """
    runs: list[tuple[int, int]] = []
    for first in range(len(mean)):
        last = max(k for k in range(first, len(mean)) if mean[k] - mean[first] < difference)
        if last > first and (not runs or last > runs[-1][1]):
            runs.append((first, last))
    return runs


def figure(found: Ranks, title: str) -> Any:
    """Mean ranks on an axis; bars join rows whose difference is not significant."""
    from matplotlib.figure import Figure

    names, mean = list(found.mean), list(found.mean.values())
    k, bars = len(mean), groups(mean, found.difference)
    half, top = (k + 1) // 2, 0.45 + 0.16 * len(bars)
    height = top + 0.24 * half + 0.75
    canvas = Figure(figsize=(8.4, height * 0.95))
    axes = canvas.add_axes((0.24, 0, 0.52, 1))
    axes.set(xlim=(1, k), ylim=(-top - 0.24 * half - 0.05, 0.7))
    axes.axis("off")
    axes.plot([1, k], [0, 0], color="#33363c", lw=1, clip_on=False)
    for tick in range(1, k + 1):
        axes.plot([tick, tick], [0, 0.06], color="#33363c", lw=1, clip_on=False)
        axes.text(tick, 0.09, str(tick), ha="center", va="bottom", fontsize=8)
    for i, (name, place) in enumerate(zip(names, mean, strict=True)):
        left = i < half
        y = -top - 0.24 * (i if left else k - 1 - i)
        end = 1 - 0.02 * k if left else k + 0.02 * k
        own = name == tabular_rows.OURS
        axes.plot([place, place, end], [0, y, y], color="#9b2c6f" if own else "#8a8f98", lw=1, clip_on=False)
        axes.text(
            end,
            y,
            f" {name}  {place:.2f} ",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
            weight="bold" if own else "normal",
        )
    for i, (first, last) in enumerate(bars):
        y = -0.18 - 0.16 * i
        axes.plot(
            [mean[first] - 0.04, mean[last] + 0.04], [y, y], color="#2a6fbb", lw=3.5, solid_capstyle="butt"
        )
    axes.plot([1, 1 + found.difference], [0.42, 0.42], color="#33363c", lw=1.5, clip_on=False)
    axes.text(1, 0.47, f"critical difference {found.difference:.2f}", fontsize=8, va="bottom")
    axes.text(k, 0.47, title, fontsize=9, va="bottom", ha="right")
    return canvas


def draw(folder: Path = cells.RESULTS / "tabular", out: Path = cells.FIGURES) -> None:
    """A plot for each kind and ranked score of the reported half."""
    out.mkdir(parents=True, exist_ok=True)
    for half, kind, name, found in _all(folder):
        if half == "report":
            what = f"{_title(kind, name)}, {kind}, {len(found.tables)} tables"
            figure(found, what).savefig(out / _file(kind, name), dpi=150, metadata={"Software": None})


def _file(kind: str, name: str) -> str:
    return f"tabular-{kind}-{name.replace('_', '-')}.png"


def _title(kind: str, name: str) -> str:
    return SCORES[kind][name].split(",")[0]


def _all(folder: Path) -> list[tuple[str, str, str, Ranks]]:
    return [
        (half, kind, name, found)
        for half in ("choose", "report")
        for kind, names in RANKED.items()
        for name in names
        if (found := ranks(score(folder, kind, half, name), larger=name == "log_likelihood"))
    ]


def tables(folder: Path = cells.RESULTS / "tabular") -> str:
    """Mean ranks with their plots, worst cases, then every score by row and table, for each half."""
    images = [
        f"![Mean ranks in {_title(kind, name)}, {kind}](../docs/figures/{_file(kind, name)})"
        for half, kind, name, _ in _all(folder)
        if half == "report"
    ]
    parts = [f"### Mean ranks\n\n{ranking(folder)}", *images]
    parts += [
        f"### Worst cases: regression, {half}\n\n{worst(folder, half)}" for half in ("report", "choose")
    ]
    for half in ("report", "choose"):
        for kind, names in SCORES.items():
            for name, title in names.items():
                if means := score(folder, kind, half, name):
                    parts.append(
                        f"### {title[0].upper() + title[1:]}: {kind}, {half}\n\n{_scores(means, name)}"
                    )
    return "\n\n".join(parts)


def ranking(folder: Path) -> str:
    """The mean ranks of both halves."""
    head = ["half", "tables", "score", "mean ranks, the best first", "Friedman's p", "critical difference"]
    lines = [
        [
            half,
            f"{len(each.tables)} of {kind}",
            _title(kind, name),
            ", ".join(f"{_bold(row)} {place:.2f}" for row, place in each.mean.items()),
            f"{each.p:.1g}",
            f"{each.difference:.2f}",
        ]
        for half, kind, name, each in _all(folder)
    ]
    return markdown([head, *lines])


def worst(folder: Path, half: str) -> str:
    """Coverage, and the largest ratios of RMSE and interval score to the best of the other rows."""
    inside, *errors = (
        score(folder, "regression", half, name) for name in ("coverage", "rmse", "interval_score")
    )
    head = ["", "coverage of 90 % intervals, mean", "lowest", "highest"]
    lines = []
    for row, of in inside.items():
        shares = [
            f"{value:.3f}" for value in (np.mean(list(of.values())), min(of.values()), max(of.values()))
        ]
        lines.append([_bold(row), *shares, *(_worst(means, row) for means in errors)])
    return markdown(
        [[*head, "RMSE / the best other's, at most", "interval score / the best other's"], *lines]
    )


def _worst(means: Means, row: str) -> str:
    ratios = {
        table: value / min(others)
        for table, value in means[row].items()
        if (others := [of[table] for other, of in means.items() if other != row and table in of])
    }
    if not ratios:
        return ""
    table = max(ratios, key=lambda name: ratios[name])
    return f"{ratios[table]:.2f} ({table})"


def _scores(means: Means, name: str) -> str:
    columns = [t for t in tabular_data.NAMES if any(t in row for row in means.values())]
    factor = 100 if name == "error" else 1
    return markdown(
        [
            ["", *columns],
            *(
                [_bold(row), *(_number(factor * of[t]) if t in of else "" for t in columns)]
                for row, of in means.items()
            ),
        ]
    )


def _bold(row: str) -> str:
    return f"**{row}**" if row == tabular_rows.OURS else row


def _number(value: float) -> str:
    """Three significant digits without an exponent.

    >>> [_number(v) for v in (-2.4567, 1234.5, 0.012345, 0.0)]
    ['-2.46', '1234', '0.0123', '0']
    """
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(abs(value)))))}f}"
