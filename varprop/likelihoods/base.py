"""What a likelihood is: log p(y | f), its expectation over a random f, and the prediction of y."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ..gaussian import Activation, Gaussian, as_gaussian
from ..moments import expectation
from ..predictive import LatentPredictive, Predictive, check_shape


class Likelihood(nn.Module, ABC):
    """p(y | f). Implement `log_prob`, and `expected_log_prob` too if it couples several outputs.

    >>> class Poisson(Likelihood):
    ...     def log_prob(self, f, y):
    ...         return y * f - f.exp() - torch.lgamma(y + 1)
    >>> f = Gaussian(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
    >>> Poisson().expected_log_prob(f, torch.tensor([[2.0]]))       # 2 (0.5) - exp(0.55) - log 2
    tensor([[-1.4264]])
    """

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), elementwise."""

    def expected_log_prob(self, f: Gaussian, y: Tensor) -> Tensor:
        """E log p(y | f) over a random f, by quadrature (Eq. 16) unless a subclass has a closed form."""
        return expectation(lambda value: self.log_prob(value, y), f)

    def predictive(self, f: Activation) -> Predictive:
        """The distribution of y when f is random, by quadrature unless a subclass has a closed form."""
        return LatentPredictive(as_gaussian(f), self)

    def check(self, y: Tensor) -> None:
        """Refuse targets that the likelihood does not know; `fit` calls it before it learns them."""

    def target_shape(self, f: Activation) -> torch.Size:
        """The shape of the targets that belong to an output f."""
        return f.shape

    def statistic(self, f: Activation, y: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """What `update` needs from a batch, averaged over it; None if the likelihood has nothing to update.

        :param weight: of each data point, 1 by default.
        """
        return None

    def update(self, statistic: Tensor, share: float = 1.0) -> None:
        """Set the likelihood's parameters to their optimum, given the statistic averaged over the data.

        :param share: of these data among all; the others are those that the parameters were set from before.
        """


def check_target(likelihood: Likelihood, f: Activation, y: Tensor) -> None:
    """Refuse a target that would only broadcast against the prediction."""
    check_shape(y, likelihood.target_shape(f))
