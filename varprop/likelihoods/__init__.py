"""Likelihoods p(y | f) of a target y given the network's output f. A new one needs only log_prob(f, y)."""

from .base import Likelihood, check_target
from .classes import Approximation, Bernoulli, Categorical, MultiLabel
from .noise import BoundedNoise, HeteroscedasticNormal, Normal, StudentT

__all__ = [
    "Approximation",
    "Bernoulli",
    "BoundedNoise",
    "Categorical",
    "HeteroscedasticNormal",
    "Likelihood",
    "MultiLabel",
    "Normal",
    "StudentT",
    "check_target",
]
