"""What drives a prediction: each column's part in the mean and in the uncertainty.

One column at a time is made random, with the distribution that it has in the data. What the prediction does
then is an integral over a single variable, for which a few closed-form passes are enough. A single pass with
the column as a `Gaussian` would take the hidden units as independent, though all of them share the column
(`docs/trust.md`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..model import Fitted, Model, as_model
from ..objectives import ELBO
from ..predictive import ClassPredictive, Discrete, Predictive, Regression
from .attribution import units_in_use
from .novelty import Rows, unlike_training

NODES, VALUES = 8, 20
"""Values that stand for the distribution of a column of numbers, and at most of any other column."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What each column does to the predictions; prints as a table."""

    table: pd.DataFrame
    """A row for each column, the most important first:

    - mean: variance of the predicted mean (of the probabilities, for classes) due to the column alone, over
      the variance of the mean among rows; Sobol's total effect. The shares need not add up to one.
    - epistemic, aleatoric: by how much knowing the column changes the epistemic and the aleatoric variance
      (mutual information and expected entropy, for classes), relative to their averages.
    """
    effect: pd.DataFrame
    """For each row and column: the mean less its average over the column, in the target's unit; for classes
    the same of the predicted class's probability. With several targets, of the first."""
    variance: pd.DataFrame
    """For each row and column: the variance of the mean if the column were not known, summed over outputs."""
    epistemic: pd.DataFrame
    """For each row and column: epistemic variance or mutual information less its average over the column."""
    unlike: pd.DataFrame | None
    """For each row, how far it is from the training data: see `unlike_training`."""
    units: Sequence[Mapping[str, tuple[int, int]]]
    """For each network and layer: how many of the units before it are in use, and how many there are."""

    def __str__(self) -> str:
        lines = [f"{'':24}" + "".join(f"{name:>12}" for name in self.table)]
        for name, row in self.table.iterrows():
            lines.append("".join([f"{str(name)[:23]:24}", *(f"{value:12.1%}" for value in row)]))
        if self.unlike is not None:
            lines.append(
                f"{self.unlike['far'].sum()} of {len(self.unlike)} rows are unlike the training data"
            )
        return "\n".join(lines)


@torch.no_grad()
def explain(
    model: ELBO | Fitted,
    X: ArrayLike | Tensor | pd.DataFrame,
    columns: Sequence[str] | None = None,
    background: ArrayLike | Tensor | pd.DataFrame | None = None,
) -> Explanation:
    """What each column contributes to the mean and to the uncertainty of the predictions for X.

    :param columns: names of the columns to explain; all by default. Columns without names are x1, x2, ...
    :param background: rows that a column takes its distribution from, such as those of training; X by
        default, which then needs more than a few rows.

    >>> x = torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9))
    >>> net = vp.variational(nn.Linear(2, 1))
    >>> with torch.no_grad():
    ...     _ = net.weight.copy_(torch.tensor([[3.0, 1.0]]))
    >>> elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=81)
    >>> vp.explain(elbo, x).table["mean"].round(1).to_dict()
    {'x1': 0.9, 'x2': 0.1}
    """
    rows = Rows.of(as_model(model, "explain"), X)
    others = rows if background is None else Rows.of(rows.model, background)
    names = _chosen(rows, columns)
    # The same model for rows that are encoded and scaled already.
    direct = replace(rows.model, encoder=None, standardise=None)
    known = Parts.of(direct.predict(rows.inputs))
    usual = known if background is None else Parts.of(direct.predict(others.inputs))
    nodes = [column_nodes(others.table[name], name in rows.categorical) for name in names]
    encoded = _encoded(others, names, [values for values, _ in nodes])
    parts = [
        _without(direct, rows.inputs, values, weights)
        for values, (_, weights) in zip(encoded, nodes, strict=True)
    ]
    table = pd.DataFrame(
        [usual.shares(known, unknown) for unknown in parts], index=pd.Index(names, name="column")
    )

    def frame(values: Sequence[Tensor]) -> pd.DataFrame:
        stacked = torch.stack(tuple(values), 1).double().numpy(force=True)
        return pd.DataFrame(stacked, index=rows.table.index, columns=names)

    return Explanation(
        table.sort_values("mean", ascending=False, kind="stable"),
        frame([known.of_interest(known.mean - unknown.mean) for unknown in parts]),
        frame([unknown.variance.sum(1) for unknown in parts]),
        frame([(known.epistemic - unknown.epistemic).sum(1) for unknown in parts]),
        unlike_training(rows),
        [units_in_use(member.net) for member in rows.model.members],
    )


# ---------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class Parts:
    """The moments of predictions that are compared, (rows, outputs) or (rows, 1)."""

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    variance: Tensor
    """Of the mean over the values of a column; zero if the column is known."""
    classes: bool

    @classmethod
    def of(cls, p: Predictive) -> Parts:
        if isinstance(p, Regression):
            parts, classes = (p.mean, p.epistemic, p.aleatoric), False
        elif isinstance(p, Discrete):
            parts, classes = (
                (p.probs, p.mutual_information, p.expected_entropy),
                isinstance(p, ClassPredictive),
            )
        else:
            raise TypeError(f"explain: needs a prediction of numbers or classes, got {type(p).__name__}.")
        mean, epistemic, aleatoric = (t.reshape(len(t), -1).double() for t in parts)
        return cls(mean, epistemic, aleatoric, torch.zeros_like(mean), classes)

    def averaged(self, weights: Tensor) -> Parts:
        """Over blocks of rows, one for each weight: the average of each moment, and the mean's variance."""

        def average(t: Tensor) -> Tensor:
            return torch.einsum("k,kno->no", weights, t.unflatten(0, (len(weights), -1)))

        mean = average(self.mean)
        variance = average((self.mean - mean.repeat(len(weights), 1)).square())
        return Parts(mean, average(self.epistemic), average(self.aleatoric), variance, self.classes)

    def shares(self, known: Parts, unknown: Parts) -> dict[str, float]:
        """What a column does, relative to these predictions of all rows."""
        total, explained = self.mean.var(0, correction=0), unknown.variance.mean(0)
        if self.classes:  # probabilities have one unit, targets have one each
            total, explained = total.sum(0, keepdim=True), explained.sum(0, keepdim=True)
        shares = {"mean": _ratio(explained, total)}
        for name in ("epistemic", "aleatoric"):
            change = (getattr(known, name) - getattr(unknown, name)).abs().mean(0)
            shares[name] = _ratio(change, getattr(self, name).mean(0))
        return shares

    def of_interest(self, values: Tensor) -> Tensor:
        """The column of the predicted class, or of the first target."""
        return values.gather(1, self.mean.argmax(1, keepdim=True))[:, 0] if self.classes else values[:, 0]


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0).mean())


def _without(model: Model, x: Tensor, values: tuple[Tensor, Tensor], weights: Tensor) -> Parts:
    """Predictions for inputs x, averaged over the values of the features that belong to a column."""
    features, value = values
    blocks = x.repeat(len(weights), 1)
    blocks[:, features] = value.repeat_interleave(len(x), 0)
    return Parts.of(model.predict(blocks)).averaged(weights)


# ----------------------------------------------------------------------------------- distributions of columns


def column_nodes(column: pd.Series, categorical: bool) -> tuple[pd.Series, Tensor]:
    """Values that stand for a column, and their weights.

    Numbers by the Gauss rule of their own distribution, missing ones by their share; anything else by its
    values with their shares, or, if there are many, by every so many rows in sorted order.
    """
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    present = column.notna().to_numpy()
    if numeric and not categorical and present.any():
        values, weights = gauss_rule(column[present].to_numpy(np.float64), NODES)
        if not present.all():
            share = present.mean()
            values, weights = np.append(values, np.nan), np.append(weights * share, 1 - share)
        return pd.Series(values, name=column.name), torch.from_numpy(weights)
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    if len(distinct) <= VALUES:
        places = np.array([int((codes == code).argmax()) for code in range(len(distinct))])
        weights = np.bincount(codes, minlength=len(distinct)) / len(codes)
    else:
        order = column.astype(str).argsort(kind="stable").to_numpy()
        places = order[((np.arange(VALUES) + 0.5) * len(order) / VALUES).astype(int)]
        weights = np.full(VALUES, 1 / VALUES)
    return column.iloc[places], torch.from_numpy(weights)


def gauss_rule(values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """At most n values with weights that have the first 2n - 1 moments of the given values (Lanczos).

    >>> nodes, weights = gauss_rule(np.random.default_rng(0).normal(size=1000) ** 2, 5)
    >>> bool((nodes > 0).all()), round(float(weights.sum()), 6)
    (True, 1.0)
    """
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= n:
        return distinct, counts / len(values)
    shift, scale = values.mean(), np.abs(distinct - values.mean()).max()
    z = (distinct - shift) / scale
    basis = [np.sqrt(counts / len(values))]
    diagonal, beside = [], []
    for _ in range(n):
        v = z * basis[-1]
        diagonal.append(v @ basis[-1])
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            v = v - np.stack(basis).T @ (np.stack(basis) @ v)
        beside.append(np.linalg.norm(v))
        if beside[-1] < 1e-10:
            break
        basis.append(v / beside[-1])
    k = len(diagonal)
    nodes, vectors = np.linalg.eigh(
        np.diag(diagonal) + np.diag(beside[: k - 1], 1) + np.diag(beside[: k - 1], -1)
    )
    return shift + scale * nodes, vectors[0] ** 2


def _encoded(rows: Rows, names: Sequence[str], nodes: Sequence[pd.Series]) -> list[tuple[Tensor, Tensor]]:
    """For each column: the features that belong to it, and their values at each node.

    A row of the table is repeated, with one column at a time at its nodes; the features that change are those
    of the column.
    """
    parts = []
    ends = np.cumsum([0, *map(len, nodes)])
    first = rows.table.iloc[np.zeros(ends[-1] + 1, int)].reset_index(drop=True)
    columns = {name: first[name] for name in first}
    for name, values, start in zip(names, nodes, ends, strict=False):
        column, stop = first[name], start + len(values)
        pieces = [column.iloc[:start], values, column.iloc[stop:]]
        columns[name] = pd.concat(pieces, ignore_index=True)
    inputs = rows.replaced(pd.DataFrame(columns)).inputs
    for start, stop in pairwise(ends):
        part = inputs[start:stop]
        features = (part != inputs[-1]).any(0).nonzero()[:, 0]
        parts.append((features, part[:, features]))
    return parts


def _chosen(rows: Rows, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return rows.names
    for name in columns:
        if name not in rows.names:
            raise ValueError(f"explain: there is no column {name!r}; there are {', '.join(rows.names[:12])}.")
    return list(columns)
