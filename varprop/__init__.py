"""Calibrated uncertainty from a neural network in one forward pass."""

from . import functional, likelihoods, priors
from .filtering import AssumedDensityFilter
from .gaussian import Gaussian
from .methods import DETERMINISTIC, DVI, LOCAL_REPARAM, METHODS, PBP, VBP, Method, NoRuleError, vbp
from .objectives import ELBO, LogMarginal, Terms
from .posterior import posteriors, variational

__version__ = "0.1.0"

__all__ = [
    "DETERMINISTIC",
    "DVI",
    "ELBO",
    "LOCAL_REPARAM",
    "METHODS",
    "PBP",
    "VBP",
    "AssumedDensityFilter",
    "Gaussian",
    "LogMarginal",
    "Method",
    "NoRuleError",
    "Terms",
    "functional",
    "likelihoods",
    "posteriors",
    "priors",
    "variational",
    "vbp",
]
