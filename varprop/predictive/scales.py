"""Predictions of numbers in another unit, with other variances, or of their exponentials."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .base import Predictive
from .mixtures import RegressionMixture, mixture_of_numbers
from .regression import LogNormalPredictive, NormalPredictive, Regression, StudentPredictive


def rescaled(p: Predictive, mean: Tensor | float, scale: Tensor | float) -> Regression:
    """The prediction of scale · y + mean, given a prediction of y.

    >>> p = NormalPredictive(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    >>> rescaled(p, 5.0, 2.0).interval(0.9)
    (tensor([[1.7103]]), tensor([[8.2897]]))
    """
    if isinstance(p, RegressionMixture):
        # Rescaled and not computed anew: the variance between large means would lose its digits.
        components = [rescaled(component, mean, scale) for component in p.components]
        return RegressionMixture(
            components, p.mean * scale + mean, p.epistemic * scale**2, p.aleatoric * scale**2
        )
    if isinstance(p, NormalPredictive | StudentPredictive):
        return replace(
            p,
            mean=p.mean * scale + mean,
            epistemic=p.epistemic * scale**2,
            aleatoric=p.aleatoric * scale**2,
        )
    raise _not_numbers("rescaled", p)


def widened(p: Predictive, factor: Tensor | float) -> Regression:
    """The prediction with all variances multiplied by a factor; between the means of a mixture they stay."""
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([widened(component, factor) for component in p.components])
    if isinstance(p, NormalPredictive | StudentPredictive):
        return replace(p, epistemic=p.epistemic * factor, aleatoric=p.aleatoric * factor)
    raise _not_numbers("widened", p)


def limited(p: Predictive, low: Tensor, high: Tensor, scale: Tensor, epistemic: float) -> Regression:
    """The prediction of a standardised logarithm, with the mean of its exponential between two bounds.

    That mean grows with the variance too, so that much noise needs a smaller logarithm.

    :param low, high: the logarithms of the bounds, standardised.
    :param scale: of the logarithm.
    :param epistemic: the largest epistemic variance.
    """
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([limited(each, low, high, scale, epistemic) for each in p.components])
    if isinstance(p, NormalPredictive):
        p = replace(p, epistemic=p.epistemic.clamp(max=epistemic))
        most = high.to(p.mean) - scale.to(p.mean) * p.var / 2
        return replace(p, mean=p.mean.clamp(low.to(p.mean), most))
    raise _not_numbers("limited", p)


def exponential(p: Predictive) -> Regression:
    """The prediction of exp(y), given a normal prediction of y or a mixture of normals."""
    if isinstance(p, RegressionMixture):
        return mixture_of_numbers([exponential(component) for component in p.components])
    if isinstance(p, NormalPredictive):
        return LogNormalPredictive(p)
    raise _not_numbers("exponential", p)


def _not_numbers(function: str, p: Predictive) -> TypeError:
    return TypeError(
        f"{function}: needs a prediction of numbers or a mixture of them, got {type(p).__name__}."
    )
