"""The scales of a horseshoe posterior: log-normal factors shared by a group of weights and by a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .gaussian import Gaussian


class Scales(nn.Module):
    """One scale for each group of a layer's weights and one for the whole layer (Eq. 37).

    A group is an input of a linear layer or a filter of a convolution. A half-Cauchy scale is √(a b) with
    a ~ Gamma and b ~ InverseGamma, which both have log-normal posteriors: row 0 of each parameter belongs to
    a and row 1 to b.
    """

    def __init__(
        self,
        groups: int,
        logvar: float = -9.0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()

        def parameter(columns: int, value: float) -> nn.Parameter:
            return nn.Parameter(torch.full((2, columns), value, dtype=dtype, device=device))

        self.group_mean, self.group_logvar = parameter(groups, 0.0), parameter(groups, logvar)
        self.layer_mean, self.layer_logvar = parameter(1, 0.0), parameter(1, logvar)

    @property
    def group(self) -> Gaussian:
        """Mean and variance of each group's scale."""
        return _root_moments(self.group_mean, self.group_logvar)

    @property
    def layer(self) -> Gaussian:
        """Mean and variance of the layer's scale."""
        return _root_moments(self.layer_mean, self.layer_logvar)

    def multiply(
        self, layer: nn.Linear | _ConvNd, w: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Samples w of the layer's normal weights, stacked in front, times samples of the scales."""
        group = _sample_root(self.group_mean, self.group_logvar, len(w), generator)
        whole = _sample_root(self.layer_mean, self.layer_logvar, len(w), generator)
        for scale in (_along_weight(layer, group), whole):
            w = w * scale.view(*scale.shape, *(1,) * (w.dim() - scale.dim()))
        return w


def _root_moments(log_mean: Tensor, log_logvar: Tensor) -> Gaussian:
    """Mean and variance of √(a b), which is log-normal."""
    m, v = log_mean.sum(0) / 2, log_logvar.exp().sum(0) / 4
    mean = torch.exp(m + v / 2)
    return Gaussian.of(mean, mean.square() * torch.expm1(v))


def _sample_root(mean: Tensor, logvar: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    noise = torch.randn((n, *mean.shape), generator=generator, dtype=mean.dtype, device=mean.device)
    return torch.exp((mean + torch.exp(logvar / 2) * noise).sum(1) / 2)


def _along_weight(layer: nn.Linear | _ConvNd, group: Tensor) -> Tensor:
    """Samples of the group scales, (n, groups), arranged along the leading axes of the layer's weight."""
    if isinstance(layer, nn.Linear):
        return group[:, None, :]
    if layer.transposed:
        # The weight is (in, out/groups, ...), and the inputs of a group feed only the outputs of that group.
        by_group = group.view(len(group), layer.groups, -1)
        return by_group.repeat_interleave(layer.in_channels // layer.groups, 1)
    return group
