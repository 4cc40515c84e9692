"""Table 2 as Markdown: the sets of images, with the published numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import cells
from .tables import markdown, spread

IMAGES = ("MNIST", "FashionMNIST", "CIFAR-10", "CIFAR-100")
PUBLISHED_IMAGES = {
    "vbp": ("0.85 10.10 31.33 60.97", "-0.03 -0.28 -0.90 -2.37"),
    "dvi": ("0.97 10.33 35.15 66.21", "-0.03 -0.29 -1.00 -2.61"),
    "varout": ("1.12 10.81 33.40 62.85", "-0.03 -0.30 -0.95 -2.44"),
}
"""Table 2 of the paper: test errors in per cent and log-likelihoods in the order of the sets."""

IMAGE_ROWS = ("vbp", "dvi", "varout", "plain", "plain-scaled", "ours")


def table2(folder: Path = cells.RESULTS / "table2") -> str:
    """For each schedule the scores on the test images; then what the posteriors and strangers show."""
    parts = []
    for schedule in ("short", "one-rate", "paper"):
        rows = {row: _runs(folder / schedule / row) for row in _in_order(folder / schedule)}
        if rows:
            parts += [f"### Schedule: {schedule}", _scores(rows), _drawn(rows), _strangers(rows)]
    if held_out := sorted((folder / "validation").rglob("*.json")):
        parts += ["### On held-out training images", _held_out(held_out)]
    return "\n\n".join(parts)


def _in_order(folder: Path) -> list[str]:
    names = {path.parent.name for path in folder.glob("*/*.json")}
    return [row for row in IMAGE_ROWS if row in names] + sorted(names - set(IMAGE_ROWS))


def _runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each set."""
    paths = {name: sorted(folder.glob(f"{name}-?.json")) for name in IMAGES}
    return {name: [json.loads(path.read_text()) for path in found] for name, found in paths.items()}


def _scores(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    head = [
        "images",
        "row",
        "runs",
        "epochs",
        "error, %",
        "paper",
        "log-likelihood",
        "paper",
        "ECE",
        "Brier score",
    ]
    lines = []
    for k, name in enumerate(IMAGES):
        for row, sets in rows.items():
            if runs := sets[name]:
                paper = [numbers.split()[k] for numbers in PUBLISHED_IMAGES.get(row, ())] or ["", ""]
                own = {score: [run["own"][score] for run in runs] for score in runs[0]["own"]}
                error = spread([100 * value for value in own["error"]], 2)
                fit, ece, brier = (spread(own[score], 4) for score in ("log_likelihood", "ece", "brier"))
                epochs = ", ".join(dict.fromkeys(str(run["configuration"]["epochs"]) for run in runs))
                seconds = f"{np.median([run['seconds_per_epoch'] for run in runs]):.0f}"
                lines.append(
                    [name, row, str(len(runs)), epochs, error, paper[0], fit, paper[1], ece, brier, seconds]
                )
    return markdown([[*head, "s / epoch"], *lines])


def _held_out(paths: Sequence[Path]) -> str:
    """What was compared before the test images were looked at."""
    head = ["images", "row", "augmented", "epochs", "peak of the rate", "of log-variances"]
    lines = [[*head, "error, %", "log-likelihood"]]
    for path in paths:
        cell = json.loads(path.read_text())
        by, own = cell["configuration"], cell["own"]
        scores = f"{100 * own['error']:.2f}", f"{own['log_likelihood']:.4f}"
        rates = str(by["rate"]), f"{by['rate'] * by.get('logvar', 1):g}"
        augmented = "yes" if by["augmented"] else "no"
        lines.append([by["dataset"], by["row"], augmented, str(by["epochs"]), *rates, *scores])
    return markdown(lines)


def _drawn(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Own moments against networks drawn from the same posterior, on the same images."""
    lines = [
        ["images", "row", "log-likelihood, own", "Monte Carlo", "error, %, own", "Monte Carlo", "test images"]
    ]
    for name in IMAGES:
        for row, sets in rows.items():
            if found := [run["audit"] for run in sets[name] if "audit" in run]:
                both = [[audit[by] for audit in found] for by in ("own", "drawn")]
                fit = [spread([scores["log_likelihood"] for scores in runs], 4) for runs in both]
                error = [spread([100 * scores["error"] for scores in runs], 2) for runs in both]
                lines.append([name, row, *fit, *error, str(found[0]["images"])])
    return markdown(lines)


def _strangers(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """AUROC of telling strange images from the test images."""
    lines = [["images", "out of distribution", "row", "AUROC by entropy", "by mutual information"]]
    for name in IMAGES:
        for strange in next((run["auroc"] for sets in rows.values() for run in sets[name]), {}):
            for row, sets in rows.items():
                if found := [run["auroc"][strange] for run in sets[name]]:
                    by_entropy = spread([auroc["entropy"] for auroc in found], 4)
                    by_information = spread([auroc["mutual_information"] for auroc in found], 4)
                    certain = row.startswith("plain")  # there the mutual information is zero
                    lines.append([name, strange, row, by_entropy, "" if certain else by_information])
    return markdown(lines)
