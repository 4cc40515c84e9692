"""All tables as Markdown: `python -m experiments.tables` writes RESULTS.md from the committed results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import cells
from .data import SPLITS

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

IMAGES = ("MNIST", "FashionMNIST", "CIFAR-10", "CIFAR-100")
PUBLISHED_IMAGES = {
    "vbp": ("0.85 10.10 31.33 60.97", "-0.03 -0.28 -0.90 -2.37"),
    "dvi": ("0.97 10.33 35.15 66.21", "-0.03 -0.29 -1.00 -2.61"),
    "varout": ("1.12 10.81 33.40 62.85", "-0.03 -0.30 -0.95 -2.44"),
}
"""Table 2 of the paper: test errors in per cent and log-likelihoods in the order of the sets."""

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
    head = ["images", "row", "runs", "error, %", "paper", "log-likelihood", "paper", "ECE", "Brier score"]
    lines = []
    for k, name in enumerate(IMAGES):
        for row, sets in rows.items():
            if runs := sets[name]:
                paper = [numbers.split()[k] for numbers in PUBLISHED_IMAGES.get(row, ())] or ["", ""]
                own = {score: [run["own"][score] for run in runs] for score in runs[0]["own"]}
                error = spread([100 * value for value in own["error"]], 2)
                fit, ece, brier = (spread(own[score], 4) for score in ("log_likelihood", "ece", "brier"))
                seconds = f"{np.median([run['seconds_per_epoch'] for run in runs]):.0f}"
                lines.append([name, row, str(len(runs)), error, paper[0], fit, paper[1], ece, brier, seconds])
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


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation, as in the paper; one value alone."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


COSTS = {"seconds": "s to get ready", "prediction_seconds": "s to predict"}


def calibration(folder: Path = cells.RESULTS / "calibrate") -> str:
    """Test scores of plain networks and of the same networks after calibration."""
    lines = []
    for place in sorted(folder.iterdir()):
        runs = [json.loads(path.read_text())["rows"] for path in sorted(place.glob("*.json"))]
        for row in dict.fromkeys(row for run in runs for row in run):
            having = [run[row] for run in runs if row in run]
            values = {score: np.array([run[score] for run in having]) for score in having[0]}
            shown = [
                f"{values[score].mean():.4f} ± {standard_error(values[score]):.4f}"
                for score in ("accuracy", "log_likelihood", "ece", "brier")
            ]
            costs = [values[part].mean() if part in values else None for part in COSTS]
            seconds = ["" if cost is None else f"{cost:.3g}" for cost in costs]
            lines.append([place.name, row, str(len(having)), *shown, *seconds])
    head = ["set", "", "runs", "accuracy", "log-likelihood", "ECE", "Brier score", *COSTS.values()]
    return markdown([head, *lines])


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


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def markdown(lines: Iterable[list[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *lines = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def main(arguments: Sequence[str] | None = None) -> None:
    from . import (  # they import this module
        consistency,
        correlations,
        deep,
        defaults,
        epochs,
        estimators,
        gaps,
        networks,
        positions,
        split_mnist,
        table3,
        tabular_ranks,
        zoo,
        zoo_peers,
    )

    here = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--out", type=Path, default=here / "RESULTS.md")
    options = parser.parse_args(arguments)
    accuracy = cells.RESULTS / "accuracy"
    sections = {
        "table1": table1(),
        "table2": f"{table2()}\n\n{epochs.table(cells.RESULTS / 'table2' / 'epochs.json')}",
        "table3": table3.table(),
        "consistency": consistency.tables(),
        "correlations": correlations.tables(),
        "deep": deep.table(),
        "networks": networks.table(json.loads((accuracy / "networks.json").read_text())["networks"]),
        "positions": positions.table(json.loads((accuracy / "positions.json").read_text())["rows"]),
        "calibrate": calibration(),
        "split_mnist": split_mnist.table(),
        "defaults": defaults.tables(),
        "estimators": estimators.tables(),
        "gaps": gaps.tables(),
        "tabular": tabular_ranks.tables(),
        "zoo": "\n\n".join(
            (zoo.table(), "### What fails", zoo.failures(), "### With other packages", zoo_peers.table())
        ),
    }
    parts = [
        f"{(here / 'notes' / f'{name}.md').read_text().strip()}\n\n{tables}"
        for name, tables in sections.items()
    ]
    options.out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
