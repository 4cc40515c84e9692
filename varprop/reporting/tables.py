"""Tables of a report: the intervals by size of the prediction, and the classes one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .cases import Case, Group
from .figures_classes import Classes
from .figures_regression import Numbers
from .numerals import plain

FEWEST = 25
"""Targets from which on they are split into fifths."""
MOST = 30
"""Classes that are listed."""


def by_size(n: Numbers) -> list[Group]:
    """Error and coverage in fifths of the targets, from the smallest to the largest prediction."""
    if len(n.y) < FEWEST:
        return []
    rows = []
    for part in np.array_split(np.argsort(n.mean, kind="stable"), 5):
        inside = (n.low[part] <= n.y[part]) & (n.y[part] <= n.high[part])
        error = n.mean[part] - n.y[part]
        rows.append(
            {
                "prediction": f"{plain(n.mean[part].min(), 3)} to {plain(n.mean[part].max(), 3)}",
                "targets": f"{len(part):,}",
                "bias": plain(error.mean(), 3),
                "root mean squared error": plain(np.sqrt((error**2).mean()), 3),
                "predicted std": plain(np.sqrt((n.std[part] ** 2).mean()), 3),
                "coverage of 90 % intervals": f"{inside.mean():.0%}",
                "their width": plain((n.high[part] - n.low[part]).mean(), 3),
            }
        )
    text = (
        f"Coverage should be 90 % in each fifth, not only on average; with {len(n.y) // 5} targets it is "
        f"uncertain by {np.sqrt(0.09 / (len(n.y) // 5)):.0%}."
    )
    return [_group("By size of the prediction", text, rows, ["prediction"])]


def by_class(c: Classes) -> list[Group]:
    """How often each class occurs, is found, and is right where it is predicted."""
    from sklearn.metrics import roc_auc_score

    rows = []
    for k in np.argsort(-np.bincount(c.y, minlength=len(c.names)), kind="stable")[:MOST]:
        true, chosen = c.y == k, c.chosen == k
        both = (true & chosen).sum()
        rows.append(
            {
                "class": c.names[k],
                "cases": f"{true.sum():,}",
                "base rate": f"{true.mean():.1%}",
                "mean probability": f"{c.probs[:, k].mean():.1%}",
                "predicted": f"{chosen.sum():,}",
                "recall": f"{both / true.sum():.1%}" if true.any() else "",
                "precision": f"{both / chosen.sum():.1%}" if chosen.any() else "",
                "AUC": f"{roc_auc_score(true, c.probs[:, k]):.3f}" if 0 < true.sum() < len(true) else "",
            }
        )
    text = (
        "Recall is the share of a class's cases that are found, precision the share of right ones among "
        "those predicted. AUC is the probability that a case of the class has a larger probability of it "
        "than another case; 0.5 is chance, whatever the base rate."
    )
    return [_group("By class", text, rows, ["class"])]


def _group(title: str, text: str, rows: Iterable[Mapping[str, str]], words: Iterable[str]) -> Group:
    cases = [Case(list(row.items())) for row in rows]
    names = [name for name, _ in cases[0].cells]
    return Group(title, names, frozenset(names) - {*words}, cases, text=text)
