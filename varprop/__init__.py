"""Calibrated uncertainty from a neural network in one forward pass."""

from typing import TYPE_CHECKING, Any

from . import likelihoods, methods, moments, predictive, priors
from .gaussian import Gaussian
from .inspect import metrics
from .inspect.consistency import Audit, audit
from .inspect.explanation import Explanation, explain
from .inspect.operations import summary
from .io.description import ModelFileError
from .io.files import load, save
from .io.program import export, export_onnx
from .jacobian import correlated
from .methods import (
    CVBP,
    DETERMINISTIC,
    DVI,
    LOCAL_REPARAM,
    METHODS,
    PBP,
    VBP,
    Method,
    NoRuleError,
    Rule,
    vbp,
)
from .objectives import ELBO, LogMarginal, Terms
from .posterior import centred, posteriors, variational
from .reporting import report
from .training import replicas
from .training.calibration import calibrate, import_posterior
from .training.filtering import AssumedDensityFilter
from .training.loop import fit

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .sklearn import BayesianMLPClassifier, BayesianMLPRegressor


def __getattr__(name: str) -> Any:
    """The estimators, on first use: scikit-learn takes as long to import as the rest."""
    if name in ("BayesianMLPClassifier", "BayesianMLPRegressor"):
        from . import sklearn

        return getattr(sklearn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CVBP",
    "DETERMINISTIC",
    "DVI",
    "ELBO",
    "LOCAL_REPARAM",
    "METHODS",
    "PBP",
    "VBP",
    "AssumedDensityFilter",
    "Audit",
    "BayesianMLPClassifier",
    "BayesianMLPRegressor",
    "Explanation",
    "Gaussian",
    "LogMarginal",
    "Method",
    "ModelFileError",
    "NoRuleError",
    "Rule",
    "Terms",
    "audit",
    "calibrate",
    "centred",
    "correlated",
    "explain",
    "export",
    "export_onnx",
    "fit",
    "import_posterior",
    "likelihoods",
    "load",
    "methods",
    "metrics",
    "moments",
    "posteriors",
    "predictive",
    "priors",
    "replicas",
    "report",
    "save",
    "summary",
    "variational",
    "vbp",
]
