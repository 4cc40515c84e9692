"""Calibrated uncertainty from a neural network in one forward pass."""

from typing import TYPE_CHECKING, Any

from . import delta, functional, likelihoods, metrics, predictive, priors, replicas
from .audit import Audit, audit
from .calibration import calibrate, import_posterior
from .correlated import correlated
from .description import ModelFileError
from .export import export, export_onnx
from .filtering import AssumedDensityFilter
from .gaussian import Gaussian
from .methods import CVBP, DETERMINISTIC, DVI, LOCAL_REPARAM, METHODS, PBP, VBP, Method, NoRuleError, vbp
from .modelfile import load, save
from .objectives import ELBO, LogMarginal, Terms
from .posterior import centred, posteriors, variational
from .report import report
from .summary import summary
from .training import fit

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .estimators import BayesianMLPClassifier, BayesianMLPRegressor


def __getattr__(name: str) -> Any:
    """The estimators, on first use: scikit-learn takes as long to import as the rest."""
    if name in ("BayesianMLPClassifier", "BayesianMLPRegressor"):
        from . import estimators

        return getattr(estimators, name)
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
    "Gaussian",
    "LogMarginal",
    "Method",
    "ModelFileError",
    "NoRuleError",
    "Terms",
    "audit",
    "calibrate",
    "centred",
    "correlated",
    "delta",
    "export",
    "export_onnx",
    "fit",
    "functional",
    "import_posterior",
    "likelihoods",
    "load",
    "metrics",
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
