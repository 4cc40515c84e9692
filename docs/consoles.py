"""Run the documentation's commands and put what they print below them: `python docs/consoles.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_diabetes

PAGES = [Path(__file__).parent / name for name in ("start.md", "shell.md", "tables.md")]
BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
WIDTH = "130"
"""Columns of the terminal."""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def write_tables(folder: Path) -> None:
    """The tables that the commands read."""
    table = load_diabetes(as_frame=True).frame
    for name, part in {"diabetes": table, "first": table[:300], "new": table[300:]}.items():
        part.to_csv(folder / f"{name}.csv", index=False)
    sold = houses(300)
    sold.loc[7, "price"] = ""
    sold.to_csv(folder / "houses.csv", sep=";", index=False, encoding="latin-1")
    offers = houses(5, seed=1).drop(columns="price")
    offers.loc[2, "town"] = "Rom"
    offers.to_csv(folder / "offers.csv", sep=";", index=False)


def houses(rows: int, seed: int = 0) -> pd.DataFrame:
    """Houses as a German spreadsheet writes them."""
    random = np.random.default_rng(seed)
    town, area = random.choice(["Köln", "Ulm", "Bonn"], rows), random.uniform(40, 180, rows)
    rooms, tax = (area / 30 + random.uniform(0, 2, rows)).astype(int).astype(str), random.uniform(3, 5, rows)
    price = 2.5 * area + 40 * (town == "Köln") - 20 * tax + random.normal(0, 15, rows)
    sold = pd.Timestamp("2019-01-01") + pd.to_timedelta(random.integers(0, 2000, rows), "D")
    decimal = [f"%.{digits}f" for digits in (1, 1, 2)]
    area, tax, price = (
        [(form % value).replace(".", ",") for value in column]
        for form, column in zip(decimal, (area, tax, price), strict=True)
    )
    return pd.DataFrame(
        {
            "id": range(1, rows + 1),
            "town": town,
            "area": area,
            "rooms": np.where(random.uniform(size=rows) < 0.05, "?", rooms),
            "sold": sold.strftime("%d.%m.%Y"),
            "tax": [f"{value}%" for value in tax],
            "remark": [f"note {i}" for i in range(rows)],
            "price": price,
        }
    )


def printed(command: str, folder: Path) -> list[str]:
    """The lines on standard output and standard error; only what is strict may fail."""
    program = f"{sys.executable} -m varprop" if command.startswith("varprop ") else command.split()[0]
    line = " ".join([program, *command.split()[1:]])
    environment = {**os.environ, "COLUMNS": WIDTH}
    run = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        check="--strict" not in command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return [line.rstrip() for line in run.stdout.splitlines()]


def renewed(block: str, folder: Path) -> str:
    """The block with what its commands print now; where they show nothing or only a part, so it stays."""
    found: list[str] = []
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        lines = printed(command[2:], folder)
        if shown[-1:] == ["..."]:
            lines = [*lines[: len(shown) - 1], "..."]
        found += [command, *(lines if shown else [])]
    return "\n".join(found) + "\n"


def main() -> None:
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            write_tables(Path(folder))
            text = BLOCK.sub(lambda block: renewed(block[1], Path(folder)), page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
