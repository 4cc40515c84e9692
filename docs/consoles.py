"""Run the documentation's commands and put what they print below them: `python docs/consoles.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from sklearn.datasets import load_diabetes

PAGES = [Path(__file__).parent / name for name in ("start.md", "shell.md")]
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


def printed(command: str, folder: Path) -> list[str]:
    """The lines on standard output."""
    program = f"{sys.executable} -m varprop" if command.startswith("varprop ") else command.split()[0]
    line = " ".join([program, *command.split()[1:]])
    environment = {**os.environ, "COLUMNS": WIDTH}
    run = subprocess.run(
        line, shell=True, cwd=folder, env=environment, check=True, capture_output=True, text=True
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
