"""Predictions as tables, with no more digits than they are worth."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..predictive import ClassPredictive, Predictive, Regression
from .target import TargetColumn

DIGITS = 6
"""Of a standard deviation, a variance or a probability; a mean ends where its standard deviation does."""


def as_columns(p: Predictive, target: TargetColumn, level: float = 0.9) -> pd.DataFrame:
    """A prediction as a table; of several targets, each has its own columns, such as mean_<name>."""
    if isinstance(p, ClassPredictive) and target.classes is not None:
        probs = p.probs.numpy(force=True)
        columns: dict[str, np.ndarray] = {"class": np.array(target.classes, dtype=object)[probs.argmax(1)]}
        columns |= {f"p_{name}": significant(probs[:, i]) for i, name in enumerate(target.classes)}
        columns["entropy"] = significant(p.entropy.numpy(force=True))
        columns["mutual_information"] = significant(p.mutual_information.numpy(force=True))
        return pd.DataFrame(columns)
    assert isinstance(p, Regression)
    std = p.std.numpy(force=True)
    lower, upper = p.interval(level)
    places = {
        name: value.numpy(force=True)
        for name, value in (("mean", p.mean), ("lower", lower), ("upper", upper))
    }
    parts = {"mean": rounded(places["mean"], std), "std": significant(std)}
    parts |= {name: rounded(places[name], std) for name in ("lower", "upper")}
    parts |= {name: significant(getattr(p, name).numpy(force=True)) for name in ("epistemic", "aleatoric")}
    endings = [""] if len(target.names) == 1 else [f"_{name}" for name in target.names]
    return pd.DataFrame(
        {f"{name}{end}": value[:, i] for i, end in enumerate(endings) for name, value in parts.items()}
    )


def significant(values: np.ndarray) -> np.ndarray:
    """Values with six significant digits.

    >>> significant(np.array([0.123456789, 1234567.0])).tolist()
    [0.123457, 1234570.0]
    """
    return rounded(values, values)


def rounded(values: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Values to the sixth significant digit of their sizes."""
    values, size = values.astype(np.float64), np.abs(size.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where((size > 0) & np.isfinite(size), DIGITS - 1 - np.floor(np.log10(size)), 300)
    # Powers of ten up to 22 are exact, so that a quotient has as few digits as possible.
    up, down = 10.0 ** np.clip(digits, 0, 22), 10.0 ** np.clip(-digits, 0, 300)
    near = np.rint(values / down * up) / up * down
    return np.where((digits > 22) | ~np.isfinite(near), values, near)
