"""All tables as Markdown: `python -m experiments.tables` writes RESULTS.md from the committed results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from . import cells


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation, as in the paper; one value alone."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def markdown(lines: Iterable[list[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *lines = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def main(arguments: Sequence[str] | None = None) -> None:
    from . import (  # they import this module
        calibrate,
        consistency,
        correlations,
        deep,
        defaults,
        epochs,
        estimators,
        gaps,
        image_tables,
        networks,
        positions,
        split_mnist,
        table3,
        tabular_ranks,
        uci_tables,
        zoo,
        zoo_peers,
    )

    here = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--out", type=Path, default=here / "RESULTS.md")
    options = parser.parse_args(arguments)
    accuracy = cells.RESULTS / "accuracy"
    sections = {
        "table1": uci_tables.table1(),
        "table2": f"{image_tables.table2()}\n\n{epochs.table(cells.RESULTS / 'table2' / 'epochs.json')}",
        "table3": table3.table(),
        "consistency": consistency.tables(),
        "correlations": correlations.tables(),
        "deep": deep.table(),
        "networks": networks.table(json.loads((accuracy / "networks.json").read_text())["networks"]),
        "positions": positions.table(json.loads((accuracy / "positions.json").read_text())["rows"]),
        "calibrate": calibrate.table(),
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
