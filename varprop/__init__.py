"""Calibrated uncertainty from a neural network in one forward pass."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import likelihoods, methods, moments, predictive, priors
    from .cache import WeightCache
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
        VRELU,
        Method,
        NoRuleError,
        Rule,
        vbp,
    )
    from .objectives import ELBO, LogMarginal, Terms
    from .posterior import centred, posteriors, remembered
    from .randomisation import variational
    from .reporting import report
    from .sklearn import BayesianMLPClassifier, BayesianMLPRegressor
    from .training import replicas
    from .training.ascent import CoordinateAscent
    from .training.calibration import calibrate, import_posterior
    from .training.filtering import AssumedDensityFilter
    from .training.loop import fit
    from .training.streaming import update

_NAMES = {
    "cache": "WeightCache",
    "gaussian": "Gaussian",
    "inspect.consistency": "Audit audit",
    "inspect.explanation": "Explanation explain",
    "inspect.operations": "summary",
    "io.description": "ModelFileError",
    "io.files": "load save",
    "io.program": "export export_onnx",
    "jacobian": "correlated",
    "methods": "CVBP DETERMINISTIC DVI LOCAL_REPARAM METHODS PBP VBP VRELU Method NoRuleError Rule vbp",
    "objectives": "ELBO LogMarginal Terms",
    "posterior": "centred posteriors remembered",
    "randomisation": "variational",
    "reporting": "report",
    "sklearn": "BayesianMLPClassifier BayesianMLPRegressor",
    "training.ascent": "CoordinateAscent",
    "training.calibration": "calibrate import_posterior",
    "training.filtering": "AssumedDensityFilter",
    "training.loop": "fit",
    "training.streaming": "update",
}
_MODULES = {"metrics": "inspect.metrics", "replicas": "training.replicas"}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Everything on first use: torch and scikit-learn take seconds to import, too long for a shell."""
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        module = f"{__name__}.{_MODULES.get(name, name)}"
        try:
            value = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


__all__ = [
    "CVBP",
    "DETERMINISTIC",
    "DVI",
    "ELBO",
    "LOCAL_REPARAM",
    "METHODS",
    "PBP",
    "VBP",
    "VRELU",
    "AssumedDensityFilter",
    "Audit",
    "BayesianMLPClassifier",
    "BayesianMLPRegressor",
    "CoordinateAscent",
    "Explanation",
    "Gaussian",
    "LogMarginal",
    "Method",
    "ModelFileError",
    "NoRuleError",
    "Rule",
    "Terms",
    "WeightCache",
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
    "remembered",
    "replicas",
    "report",
    "save",
    "summary",
    "update",
    "variational",
    "vbp",
]
