"""Calibrated uncertainty from a neural network in one forward pass."""

from . import functional, likelihoods, metrics, predictive, priors, replicas
from .gaussian import Gaussian
from .methods import DETERMINISTIC, DVI, LOCAL_REPARAM, METHODS, VBP, Method, NoRuleError, vbp
from .objectives import ELBO, Terms
from .posterior import posteriors, variational

__version__ = "0.1.0"

__all__ = [
    "DETERMINISTIC",
    "DVI",
    "ELBO",
    "LOCAL_REPARAM",
    "METHODS",
    "VBP",
    "Gaussian",
    "Method",
    "NoRuleError",
    "Terms",
    "functional",
    "likelihoods",
    "metrics",
    "posteriors",
    "predictive",
    "priors",
    "replicas",
    "variational",
    "vbp",
]
