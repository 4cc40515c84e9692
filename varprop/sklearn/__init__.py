"""Bayesian multilayer perceptrons with scikit-learn's contract."""

from .classifier import BayesianMLPClassifier
from .regressor import BayesianMLPRegressor
from .uncertainty import Uncertainty

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor", "Uncertainty"]
