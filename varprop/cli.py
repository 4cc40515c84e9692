"""The command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Calibrated uncertainty from a neural network in one forward pass.")


@app.callback()
def main_options() -> None:
    """Keeps `varprop` a group of commands while it has one."""


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("demo")) -> None:
    """Fit two data sets that scikit-learn carries and show what uncertainty adds."""
    from .demo import demo

    demo(out)


def main() -> None:
    app()
