"""Which layer the variance of the output comes from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.inspect.attribution import signal_to_noise, variance_losses, variance_shares


def elbo(net: nn.Module) -> vp.ELBO:
    return vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=10)


@pytest.mark.parametrize("posterior", ["full", "factored", "horseshoe"])
def test_the_only_random_layer_has_all_of_the_variance(posterior: str) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    vp.variational(net, where=lambda name, _: name == "2", posterior=posterior)
    x = torch.randn(5, 3)
    assert variance_shares(elbo(net), x) == {"2": 1.0}
    assert variance_losses(vp.DVI, net, x) == {"2": 1.0}


@pytest.mark.parametrize("posterior", ["full", "factored"])
def test_shares_of_a_linear_network_are_those_of_its_closed_form(posterior: str) -> None:
    """Var = w₂² v₁ + (m₁² + v₁) v₂; the first layer alone gives w₂² v₁, the last alone m₁² v₂."""
    net = vp.variational(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), logvar=-2.0, posterior=posterior)
    x = torch.ones(1, 1)
    first, last = vp.DVI(net[0], x), vp.DVI(net[1], x)
    first_alone = (last.mean - net[1].bias).square() * first.var
    last_alone = first.mean.square() * last.var
    total = first_alone + last_alone + first.var * last.var
    shares, losses = variance_shares(elbo(net), x), variance_losses(vp.DVI, net, x)
    assert shares == pytest.approx({"0": (first_alone / total).item(), "1": (last_alone / total).item()})
    assert losses == pytest.approx({"0": 1 - shares["1"], "1": 1 - shares["0"]})


def test_the_output_projection_of_attention_has_its_share() -> None:
    net = vp.variational(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), logvar=-4.0)
    shares = variance_shares(elbo(net), torch.randn(2, 5, 8))
    assert set(shares) == {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    assert all(0.01 < share < 1 for share in shares.values())


def test_signal_to_noise_is_mean_over_standard_deviation() -> None:
    net = vp.variational(nn.Linear(3, 2), logvar=-4.0)
    torch.testing.assert_close(
        signal_to_noise(net)["weight"], net.weight.abs() / net.weight_logvar.exp().sqrt()
    )
