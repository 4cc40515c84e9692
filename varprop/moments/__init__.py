"""Means and variances of operations on independent normal variables, as pure functions of Gaussians.

Throughout, m and v are the mean and the variance of the input, s = √v, and Φ and φ are the distribution
function and the density of the standard normal. Equation numbers refer to `docs/maths.md`.
"""

from .categorical import attend, log_softmax, margin, softmax
from .gates import gate, gate_kl, gate_slope
from .linear import FactoredWeight, Op, Outer, Weight, affine, average, mask, per_channel, product, square
from .maxima import largest, maximum, strongest, winner
from .normalisation import count, normalise, spread
from .piecewise import RELU, Piecewise
from .positive import entry_variance, log_normal, log_normal_power, log_sum_exp
from .rectified import Tail, anchor, anchored, rectify, slope, tail
from .smooth import expectation, hermite, log_expectation_exp, quadrature, smooth_slope

__all__ = [
    "RELU",
    "FactoredWeight",
    "Op",
    "Outer",
    "Piecewise",
    "Tail",
    "Weight",
    "affine",
    "anchor",
    "anchored",
    "attend",
    "average",
    "count",
    "entry_variance",
    "expectation",
    "gate",
    "gate_kl",
    "gate_slope",
    "hermite",
    "largest",
    "log_expectation_exp",
    "log_normal",
    "log_normal_power",
    "log_softmax",
    "log_sum_exp",
    "margin",
    "mask",
    "maximum",
    "normalise",
    "per_channel",
    "product",
    "quadrature",
    "rectify",
    "slope",
    "smooth_slope",
    "softmax",
    "spread",
    "square",
    "strongest",
    "tail",
    "winner",
]
