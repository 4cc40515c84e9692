"""Learning that goes on: the posterior of the data so far is the prior of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ..objectives import ELBO, check_objective
from ..posterior import deterministic_parameters, posteriors, remembered
from ..priors import Earlier
from .batches import Batch, check_data
from .epochs import Noise, Totals, step
from .loop import fit

ROWS = 4096
"""Rows that pass through a network at once before and after training."""


def update(
    elbo: ELBO,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    *,
    epochs: int = 20,
    schedule: Any = "cosine",
    noise: Noise = "running",
    **options: Any,
) -> pd.DataFrame:
    """Learn from more data, and return the history.

    The posterior so far becomes the prior (Eq. 33), so that the earlier data are not needed again. The first
    data of a new objective are learned with its own prior. What has no posterior, such as the noise and most
    biases, becomes the average over all data so far. A network without random weights is only trained on.

    A copy is trained: whatever goes wrong, the objective stays as it was.

    :param weight: how often each data point counts.
    :param noise: "fixed" leaves the likelihood's parameters as they are.
    :param options: further options of `fit`.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=64)
    >>> for x in torch.randn(3, 64, 1):
    ...     history = vp.update(elbo, x, x.abs())
    >>> elbo.seen
    192.0
    """
    check_objective("update", elbo)
    batch: Batch = (x, y) if weight is None else (x, y, weight)
    check_data("update", "the data", batch)
    n_data = float(len(x) if weight is None else weight.sum())
    if weight is not None:
        batch = (x, y, weight / weight.mean())

    def train(members: Sequence[ELBO], noise: Noise) -> pd.DataFrame:
        return fit(members[0], batch, epochs=epochs, schedule=schedule, noise=noise, **options)

    return learn([elbo], batch, n_data, train, noise)


def learn(
    members: Sequence[ELBO],
    batch: Batch,
    n_data: float,
    train: Callable[[Sequence[ELBO], Noise], pd.DataFrame],
    noise: Noise = "running",
) -> pd.DataFrame:
    """Let objectives learn from more data with their posteriors as priors; on an error they stay the same.

    :param n_data: how many data points the batch stands for.
    :param train: fits objectives to the batch, with their noise as said, and returns the history.
    """
    copies = deepcopy(list(members))
    _check_batch(copies[0].eval(), batch)
    goes_on = members[0].seen > 0 and next(posteriors(members[0].net), None) is not None
    for copy in copies:
        copy.n_data, copy.covariance = n_data, None
        if goes_on:
            remembered(copy.net)
            copy.prior = Earlier()
    history = train(copies, "fixed" if goes_on else noise)
    for member, copy in zip(members, copies, strict=True):
        copy.to(_device(member)).seen = member.seen + n_data
        if goes_on:
            _average(copy, member, n_data / copy.seen, batch if noise != "fixed" else None)
        if not all(bool(value.isfinite().all()) for value in copy.state_dict().values()):
            raise FloatingPointError(
                "update: training gave weights that are not finite; check the data, lower lr, or set clip."
            )
    for member, copy in zip(members, copies, strict=True):
        if goes_on:
            remembered(member.net)
        member.covariance = None
        member.load_state_dict(copy.state_dict())
        member.prior, member.n_data, member.seen = copy.prior, copy.n_data, copy.seen
        member.eval()
    return history


@torch.no_grad()
def _average(copy: ELBO, before: ELBO, share: float, batch: Batch | None) -> None:
    """Let what has no posterior move by the share that the batch has in all data; the noise as well.

    Left free, biases fit the last batch and forget the earlier ones.
    """
    for parameter, earlier in zip(_without_posterior(copy), _without_posterior(before), strict=True):
        parameter.lerp_(earlier, 1 - share)
    totals = Totals()
    for part in [] if batch is None else _parts(batch, copy):
        _, averages = step(copy, 1.0, *part)
        totals.add(len(part[0]), averages)
    if totals.statistic is not None:
        copy.likelihood.update(totals.statistic, share)


def _without_posterior(elbo: ELBO) -> list[nn.Parameter]:
    return [*deterministic_parameters(elbo.net), *elbo.likelihood.parameters()]


@torch.no_grad()
def _check_batch(elbo: ELBO, batch: Batch) -> None:
    """Refuse data with NaN, or that the network or the likelihood does not take."""
    for name, values in zip(("x", "y", "weight"), batch, strict=False):
        finite = values.isfinite().view(len(values), -1).all(1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise ValueError(f"update: {name} has NaN or infinity in row {row}; correct or remove the row.")
    try:
        with torch.random.fork_rng():
            for part in _parts(batch, elbo):
                elbo.terms(*part)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        x, y = (tuple(values.shape) for values in batch[:2])
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"update: the objective does not take x of shape {x} with y of shape {y} ({reason}); give rows "
            "like those it has learned."
        ) from error


def _parts(batch: Batch, elbo: ELBO) -> Iterator[Sequence[Tensor]]:
    device = _device(elbo)
    for part in zip(*(values.split(ROWS) for values in batch), strict=True):
        yield [values.to(device) for values in part]


def _device(elbo: ELBO) -> torch.device:
    return next(elbo.parameters()).device
