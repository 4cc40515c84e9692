"""Normalisation layers beyond the table of cases: running statistics, replicas, random statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.gaussian import Gaussian

from .sampling import draws


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm2d(3), (2, 3, 2, 4)),
        (nn.BatchNorm2d(3, affine=False), (2, 3, 2, 4)),
    ],
)
def test_running_statistics_of_deterministic_batches_equal_torch(
    module: nn.Module, shape: tuple[int, ...], momentum: float | None
) -> None:
    ours, theirs = copy.deepcopy(module), copy.deepcopy(module)
    ours.momentum = theirs.momentum = momentum
    for _ in range(3):
        x = torch.randn(shape)
        out = vp.VBP(ours, Gaussian(x, torch.zeros_like(x)))
        torch.testing.assert_close(out.mean, theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_running_variance_includes_the_variance_of_the_activations() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(4, momentum=1.0)
    x = Gaussian(torch.randn(50, 4), torch.rand(50, 4))
    vp.DVI(layer, x)
    sampled = x.sample((4000,)).var(1).mean(0)
    torch.testing.assert_close(layer.running_var, sampled, rtol=0.01, atol=0)


def test_statistics_with_the_variance_are_closer_to_sampling_than_those_of_the_means() -> None:
    torch.manual_seed(0)
    front, norm, x = (
        vp.variational(nn.Linear(20, 8), logvar=-4.0),
        nn.BatchNorm1d(8, track_running_stats=False),
        torch.randn(64, 20),
    )
    with torch.no_grad():
        sampled = draws(nn.Sequential(front, norm), x, 4000).var(0)
        f = vp.DVI(front, x)
        ours = vp.DVI(norm, f).var
        of_the_means = f.var / (f.mean.var(0, correction=0) + norm.eps)
    assert (ours.sum() / sampled.sum()).item() == pytest.approx(1, abs=0.03)
    assert of_the_means.sum() / sampled.sum() > 2


@pytest.mark.parametrize("n", [100, 5000])
def test_the_share_of_an_entry_in_the_statistics_may_be_left_out_where_it_is_small(n: int) -> None:
    """Against sampling; at the smaller size the terms of order 1/n are seen by the largest entries."""
    generator = torch.Generator().manual_seed(0)
    x = Gaussian(
        torch.randn(n, 1, generator=generator).double(), torch.rand(n, 1, generator=generator).double()
    )
    x.mean[0] = 5.0
    norm = nn.BatchNorm1d(1).double()
    y = vp.DVI(norm, x)
    sums = torch.zeros(2, n, 1, dtype=torch.float64)
    for part in x.mean + x.var.sqrt() * torch.randn(2000, n, 1, generator=generator).double():
        value = norm(part)
        sums += torch.stack([value, value.square()])
    mean, square = sums / 2000
    ratio = y.var / (square - mean.square())
    torch.testing.assert_close(ratio.mean().item(), 1.0, atol=0.01, rtol=0)
    torch.testing.assert_close(ratio[0].item(), 1.0, atol=0.12, rtol=0)


def test_replicas_update_their_own_running_statistics() -> None:
    def member(seed: int) -> vp.ELBO:
        torch.manual_seed(seed)
        net = vp.variational(
            nn.Sequential(nn.Linear(2, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        )
        return vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=32)

    x = torch.randn(2, 32, 2)
    y = x.sum(2, keepdim=True)
    together = [member(0), member(1)]
    vp.replicas.fit(together, x, y, epochs=2, batch_size=16)
    alone = [member(1)]
    vp.replicas.fit(alone, x[1:], y[1:], epochs=2, batch_size=16, seeds=[1])
    for name, value in alone[0].net.state_dict().items():
        torch.testing.assert_close(together[1].net.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert alone[0].net[1].num_batches_tracked == 4, "two epochs of two batches"


def test_a_batch_of_one_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="BatchNorm1d: one value for each channel"):
        vp.VBP(nn.BatchNorm1d(3), Gaussian(torch.zeros(1, 3), torch.ones(1, 3)))
