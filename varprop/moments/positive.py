"""Functions of positive values, taken as log-normal; and the variance of entries among themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gaussian import Gaussian


def log_normal(x: Gaussian) -> Gaussian:
    """The logarithm of a log-normal variable with this mean and variance (Eq. 64).

        E[log x] = log m - log(1 + v/m²)/2        Var[log x] = log(1 + v/m²)

    >>> log_normal(Gaussian(torch.tensor(1.0), torch.tensor(0.0))).mean
    tensor(0.)
    """
    mean = x.mean
    var = torch.log1p(x.var / torch.where(mean == 0, 1.0, mean.square()))
    return Gaussian.of(mean.log() - var / 2, var)


def log_normal_power(x: Gaussian, exponent: float) -> Gaussian:
    """Moments of x^p for a log-normal x with this mean and variance (Eq. 64).

        E[x^p] = m^p r^{p(p-1)/2}        Var[x^p] = E[x^p]² (r^{p²} - 1)        with r = 1 + v/m²

    >>> log_normal_power(Gaussian(torch.tensor(4.0), torch.tensor(0.0)), 0.5).mean
    tensor(2.)
    """
    log_r = log_normal(x).var
    mean = x.mean.pow(exponent) * torch.exp(exponent * (exponent - 1) / 2 * log_r)
    return Gaussian.of(mean, mean.square() * torch.expm1(exponent**2 * log_r))


def entry_variance(x: Gaussian, dims: tuple[int, ...], correction: float = 1) -> Gaussian:
    """Moments of Σ_i (x_i - x̄)² / (n - correction) of independent normal entries, exact (Eq. 65).

    >>> entry_variance(Gaussian(torch.zeros(4), torch.ones(4)), (0,)).mean
    tensor(1.)
    """
    n = x.mean.numel() // x.mean.sum(dims).numel()
    centred = x.mean - x.mean.mean(dims, keepdim=True)
    total = x.var.sum(dims)
    mean = centred.square().sum(dims) + (1 - 1 / n) * total
    chi = x.var.square().sum(dims) * (1 - 2 / n) + (total / n).square()
    var = 2 * chi + 4 * (x.var * centred.square()).sum(dims)
    return Gaussian.of(mean / (n - correction), var / (n - correction) ** 2)


def log_sum_exp(x: Gaussian, dim: int | tuple[int, ...]) -> Gaussian:
    """Moments of log Σ_i exp x_i to second order about the means, with p = softmax(m) (Eq. 66).

    E ≈ log Σ exp m_i + Σ p_i (1 - p_i) v_i / 2        Var ≈ Σ p_i² v_i
    """
    log_total = x.mean.logsumexp(dim, keepdim=True)
    p: Tensor = torch.exp(x.mean - log_total)
    mean = x.mean.logsumexp(dim) + (p * (1 - p) * x.var).sum(dim) / 2
    return Gaussian.of(mean, (p.square() * x.var).sum(dim))
