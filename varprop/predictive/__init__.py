"""Predictive distributions over targets, which tell epistemic from aleatoric uncertainty."""

from .base import (
    Elementwise,
    LatentPredictive,
    Predictive,
    check_labels,
    check_shape,
    log_probability,
    of_class,
    per_datum,
)
from .classes import ClassPredictive, Discrete, LabelPredictive, binary_entropy, tempered, two_classes
from .mixtures import Mixture, RegressionMixture, concatenate, mixture, mixture_of_numbers, reordered
from .regression import (
    LogNormalPredictive,
    NormalPredictive,
    Regression,
    StudentPredictive,
    check_level,
    quantile,
)
from .scales import exponential, limited, rescaled, widened

__all__ = [
    "ClassPredictive",
    "Discrete",
    "Elementwise",
    "LabelPredictive",
    "LatentPredictive",
    "LogNormalPredictive",
    "Mixture",
    "NormalPredictive",
    "Predictive",
    "Regression",
    "RegressionMixture",
    "StudentPredictive",
    "binary_entropy",
    "check_labels",
    "check_level",
    "check_shape",
    "concatenate",
    "exponential",
    "limited",
    "log_probability",
    "mixture",
    "mixture_of_numbers",
    "of_class",
    "per_datum",
    "quantile",
    "reordered",
    "rescaled",
    "tempered",
    "two_classes",
    "widened",
]
