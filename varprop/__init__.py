"""Calibrated uncertainty from a neural network in one forward pass."""

from . import functional, likelihoods, metrics, predictive, priors, replicas
from .filtering import AssumedDensityFilter
from .gaussian import Gaussian
from .methods import DETERMINISTIC, DVI, LOCAL_REPARAM, METHODS, PBP, VBP, Method, NoRuleError, vbp
from .modelfile import ModelFileError, load, save
from .objectives import ELBO, LogMarginal, Terms
from .posterior import posteriors, variational
from .report import report
from .training import fit

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
    "ModelFileError",
    "NoRuleError",
    "Terms",
    "fit",
    "functional",
    "likelihoods",
    "load",
    "metrics",
    "posteriors",
    "predictive",
    "priors",
    "replicas",
    "report",
    "save",
    "variational",
    "vbp",
]
