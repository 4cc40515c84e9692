"""Table 1 as Markdown: the nine regression sets, with the published numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import cells
from .data import SPLITS
from .tables import markdown, standard_error

PUBLISHED = {
    "vbp": (
        "-2.59±0.03 -3.15±0.02 -1.11±0.07 1.04±0.01 5.79±0.07 -2.85±0.01 -2.92±0.00 -0.96±0.01 -1.54±0.06"
    ),
    "dvi": (
        "-2.58±0.04 -3.23±0.01 -2.09±0.06 1.01±0.01 5.84±0.06 -2.82±0.00 -2.94±0.00 -0.96±0.01 -1.41±0.03"
    ),
    "pbp": (
        "-2.57±0.09 -3.16±0.02 -2.04±0.02 0.90±0.01 3.73±0.01 -2.84±0.01 -2.97±0.00 -0.97±0.01 -1.63±0.02"
    ),
    "varout": (
        "-2.59±0.03 -3.18±0.02 -1.25±0.05 1.02±0.01 5.52±0.04 -2.83±0.01 -2.92±0.00 -0.96±0.01 -1.65±0.05"
    ),
    "dvi-hetero": (
        "-2.41±0.02 -3.06±0.01 -1.01±0.06 1.13±0.00 6.29±0.04 -2.80±0.00 -2.85±0.01 -0.90±0.01 -0.47±0.03"
    ),
}
"""Published test log-likelihoods in the order of the sets.

From Table 1 of the paper; dvi-hetero from Table 2 of Wu et al. (2019).
"""

ROWS = (
    "vbp",
    "dvi",
    "varout",
    "pbp",
    "deterministic",
    "vbp-cosine",
    "vbp-gates",
    "vbp-gates-1",
    "dvi-cosine",
    "cvbp",
    "cvbp-gates",
    "vbp-eb",
    "vbp-hetero",
    "vbp-hetero-gates",
    "cvbp-hetero-gates",
    "vbp-hetero-eb",
    "dvi-hetero",
    "vbp-ensemble",
)
"""The first rows of the table, in this order."""

Cells = dict[str, dict[str, Any]]
"""The cells of one row, by data set."""


def table1(folder: Path = cells.RESULTS / "table1") -> str:
    """All rows, by the method's own moments and by the exact moments of the same posterior."""
    names = {path.parent.name for path in folder.glob("*/*.json")}
    rows = {row: _cells(folder / row) for row in [r for r in ROWS if r in names] + sorted(names - set(ROWS))}
    return "\n\n".join(
        f"{title}\n\n{markdown([['', *SPLITS], *_lines(rows, score, digits)])}"
        for title, score, digits in (
            ("### Test log-likelihood, mean ± standard error over the splits", "log_likelihood", 2),
            ("### RMSE", "rmse", 3),
            ("### CRPS", "crps", 3),
            ("### Share of test targets inside the 90 % interval", "coverage", 2),
        )
    )


def _cells(folder: Path) -> Cells:
    return {
        name: json.loads(path.read_text()) for name in SPLITS if (path := folder / f"{name}.json").exists()
    }


def _lines(rows: dict[str, Cells], score: str, digits: int) -> Iterator[list[str]]:
    for row, sets in rows.items():
        if score == "log_likelihood" and row in PUBLISHED:
            yield [f"{row}, published", *(number.replace("±", " ± ") for number in PUBLISHED[row].split())]
        yield [f"**{row}**", *(_average(sets.get(name), "own", score, digits) for name in SPLITS)]
        if any(cell["splits"][0]["exact"] for cell in sets.values()):
            yield [
                f"{row}, exact moments",
                *(_average(sets.get(name), "exact", score, digits) for name in SPLITS),
            ]
    if score == "log_likelihood":
        yield ["seconds, all splits", *("" for _ in SPLITS)]
        for row, sets in rows.items():
            yield [row, *(f"{sets[name]['seconds']:.0f}" if name in sets else "" for name in SPLITS)]


def _average(cell: dict[str, Any] | None, moments: str, score: str, digits: int) -> str:
    if cell is None:
        return ""
    values = np.array([split[moments][score] for split in cell["splits"]])
    if score in ("rmse", "crps"):  # three significant digits, because the errors of naval are tiny
        digits = max(digits, 2 - int(np.floor(np.log10(abs(values.mean())))))
    return f"{values.mean():.{digits}f} ± {standard_error(values):.{digits}f}"
