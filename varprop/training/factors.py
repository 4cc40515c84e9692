"""The factors of V-ReLU-Net's posterior: weights, hidden units, and what a batch has of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a layer sees in a batch, with a constant 1 for the bias; all rows have the same covariance."""

    mean: Tensor
    cov: Tensor | None = None
    """None for the data, which are known."""

    @property
    def square(self) -> Tensor:
        """E[h h'], summed over the rows."""
        square = self.mean.T @ self.mean
        return square if self.cov is None else square.add_(self.cov, alpha=len(self.mean))


@dataclass(frozen=True, eq=False)
class Weights:
    """q of a layer: the weights of each unit are N(mean[:, unit], precision⁻¹); the last one is its bias."""

    mean: Tensor
    precision: Tensor

    @cached_property
    def root(self) -> Tensor:
        return torch.linalg.cholesky(self.precision)

    @cached_property
    def cov(self) -> Tensor:
        return torch.cholesky_inverse(self.root)

    @property
    def square(self) -> Tensor:
        """E[w w'], summed over the units."""
        return self.mean @ self.mean.T + self.mean.shape[1] * self.cov

    def after(self, inputs: Inputs, outputs: Tensor, noise: float) -> Weights:
        """The posterior after outputs = inputs · w + noise of this precision, with this prior (Eq. 59)."""
        q = Weights(self.mean, self.precision + noise * inputs.square)
        change = torch.cholesky_solve(inputs.mean.T, q.root) @ (outputs - inputs.mean @ self.mean)
        if inputs.cov is not None:
            change -= len(outputs) * torch.cholesky_solve(inputs.cov @ self.mean, q.root)
        return replace(q, mean=self.mean + noise * change)

    def faded(self, share: float, prior: Weights) -> Weights:
        """The same means; the precision keeps this share and takes the rest from the first prior."""
        return Weights(self.mean, share * self.precision + (1 - share) * prior.precision)


@dataclass
class Units:
    """q of the sums f, the gates z and the activations h of a hidden layer, for the rows of a batch."""

    f: Tensor
    f_var: Tensor
    z: Tensor
    h: Tensor
    cov: Tensor
    """Of h, the same for every row."""


@dataclass
class Batch:
    """The factors of a batch, from the first hidden layer to the output."""

    x: Tensor
    y: Tensor
    units: list[Units]
    location: Tensor
    """w'h at the last layer when its targets were last updated: where the truncated normals stand."""
