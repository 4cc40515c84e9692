"""What drives a model, for its report: columns, rows unlike the training data, and units in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..inspect.explanation import NODES, Explanation, explain
from ..inspect.novelty import FAR
from ..model import Fitted
from ..objectives import ELBO
from .figures import BLUE, GREEN, GREY, Figure, bars

ROWS, PASSES = 300, 200_000
"""Most rows that are explained, and about how many passes of a row that may take."""
SHOWN = 12
"""Columns that have a bar."""


def explained(model: ELBO | Fitted, x: pd.DataFrame) -> Explanation:
    """An explanation of as many rows as are quickly done."""
    rows = int(np.clip(PASSES // (NODES * x.shape[1]), 20, ROWS))
    return explain(model, x.sample(min(rows, len(x)), random_state=0))


def drivers(e: Explanation) -> list[Figure]:
    """What each column does to the mean, and to each part of the uncertainty that columns do change."""
    figures = []
    words = {
        "mean": (
            BLUE,
            "variance of the mean, %",
            "Share of the mean's variance by column",
            "Variance of the prediction when only this column varies, over the variance of the predictions. "
            "Columns that stand for each other have small shares.",
        ),
        "epistemic": (
            GREEN,
            "change of the epistemic part, %",
            "Change of the epistemic uncertainty by column",
            "By how much the column's value changes the uncertainty from not knowing the weights.",
        ),
        "aleatoric": (
            GREY,
            "change of the aleatoric part, %",
            "Change of the aleatoric uncertainty by column",
            "By how much the column's value changes the predicted noise.",
        ),
    }
    for name, (colour, label, alt, caption) in words.items():
        shares = e.table[name].sort_values(ascending=False, kind="stable").iloc[:SHOWN]
        if shares.max() > 1e-6:
            more = f" The first {SHOWN} of {len(e.table)} columns." if len(e.table) > SHOWN else ""
            values = {str(column): float(share) for column, share in shares.items()}
            figures.append(bars(f"drives-{name}", values, label, alt, caption + more, colour))
    return figures


def warning(unlike: pd.DataFrame | None) -> str:
    """A sentence on rows unlike the training data; none if there are none."""
    if unlike is None or not unlike["far"].any():
        return ""
    far = unlike[unlike["far"]]
    columns = [str(name) for name in far["column"].value_counts().index if name != ""]
    count = "1 row is" if len(far) == 1 else f"{len(far):,} rows are"
    listed = ", ".join(columns[:5]) + (", …" if len(columns) > 5 else "")
    unseen = np.isinf(far["distance"].to_numpy())
    reasons = []
    if not unseen.all():
        reasons.append(f"a number more than {FAR:.0f} standard deviations from its training mean")
    if unseen.any():
        reasons.append("a category that training never had")
    return (
        f"{count} unlike the training data ({len(far) / len(unlike):.1%} of {len(unlike):,}): "
        + " or ".join(reasons)
        + (f", in {listed}" if listed else "")
        + ". There the predictions extrapolate; look at them one by one."
    )


def units_in_words(members: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """How many hidden units are in use, in one network or in each of several."""
    counts = [(sum(a for a, _ in units.values()), sum(n for _, n in units.values())) for units in members]
    if not counts or not counts[0][1]:
        return ""
    used = ", ".join(str(a) for a, _ in counts)
    several = f" in the {len(counts)} networks" if len(counts) > 1 else ""
    return f"{used} of {counts[0][1]}{several} (a weight out of them has |mean| > std)"
