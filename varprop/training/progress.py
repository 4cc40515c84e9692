"""The progress bar of a training run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from ..likelihoods import Likelihood
from .epochs import Record


class Bar:
    """A progress bar on stderr with the numbers of the latest epoch.

    :param progress: show it; None shows it on a terminal only.
    """

    def __init__(self, progress: bool | None, epochs: int, start: int) -> None:
        console = Console(stderr=True)
        visible = console.is_terminal if progress is None else progress
        # On a narrow terminal the numbers wrap to a second line.
        text = TextColumn("{task.description}", table_column=Column(ratio=1))
        columns = (TextColumn("fit"), BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(), text)
        self.progress = Progress(*columns, console=console, disable=not visible, expand=True)
        self.task = self.progress.add_task("", total=epochs, completed=start)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # rich 13 ends a bar with an empty line even if it is disabled.
        if not self.progress.disable:
            self.progress.stop()

    def show(self, record: Record, likelihood: Likelihood) -> None:
        text = f"ELBO {-record['loss']:.3f}  fit {record['data_fit']:.3f}  KL {record['kl']:.0f}"
        precision = getattr(likelihood, "precision", None)
        if isinstance(precision, Tensor):
            text += f"  noise {float(precision.mean()) ** -0.5:.3g}"
        if "validation" in record:
            text += f"  validation {record['validation']:.3f}"
        speed = f"{record['rows_per_second']:,.0f} rows/s"
        self.progress.update(self.task, advance=1, description=f"{text}  {speed}")
