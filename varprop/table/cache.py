"""A long table as arrays: read in parts, encoded, and kept in a file that vanishes with the arrays."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ..io.storage import scratch
from .encoding import Encoder
from .messages import TableWarning
from .reading import chunks
from .target import TargetColumn


@dataclass(frozen=True)
class LongTable:
    """The file of a table, of which only a sample is in memory."""

    path: Path
    rows: int
    without: pd.Index = field(default_factory=lambda: pd.Index([], dtype=np.int64))
    """Rows, counted from 1, that nothing is to be learned from."""

    def encoded(self, encoder: Encoder, target: TargetColumn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Features, targets, and the numbers of the rows, for all rows that have the target."""
        types = {**encoder.types, **dict.fromkeys(target.names, "str")}
        X, index, seen = scratch((self.rows, encoder.width), np.float64), np.empty(self.rows, np.int64), 0
        y: list[np.ndarray] = []
        for part in chunks(self.path, types):
            part = target.complete(part[~part.index.isin(self.without)])
            own = slice(seen, seen + len(part))
            with warnings.catch_warnings():
                # What the sample did not have is not new to training.
                warnings.simplefilter("ignore", TableWarning)
                X[own] = encoder.transform(part)
            index[own], seen = part.index, own.stop
            y.append(target.values(part))
        return X[:seen], np.concatenate(y), index[:seen]
