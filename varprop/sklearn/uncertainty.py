"""The two parts of what a prediction does not know."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Uncertainty(NamedTuple):
    """The parts of a prediction's uncertainty: variances for numbers, entropies in nats for classes.

    They add up to the whole variance or entropy.
    """

    epistemic: np.ndarray
    """From not knowing the weights: it shrinks with more data."""
    aleatoric: np.ndarray
    """From the noise of the data: it does not."""
