"""Other tensors take the place of weights for one pass, and only for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.substitution import substituted


class TwoNames(nn.Module):
    """A layer under two names, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = nn.ModuleList([self.first, nn.ReLU(), self.last])
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return TwoNames()


def test_a_tensor_is_exchanged_wherever_it_is_used(net: nn.Module) -> None:
    tensors = {"layers.0.weight": torch.eye(3), "layers.2.bias": torch.zeros(3)}
    x = torch.randn(4, 3)
    expected = (x + net.get_parameter("first.bias")).relu()
    torch.testing.assert_close(substituted(net, tensors, nn.Module.__call__, x), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_gets_its_own_tensors_back(net: nn.Module, fails: bool) -> None:
    before = dict(net.named_parameters())

    def use(net: nn.Module) -> None:
        if fails:
            raise ArithmeticError

    try:
        substituted(net, {name: torch.zeros_like(p) for name, p in before.items()}, use)
    except ArithmeticError:
        assert fails
    assert all(before[name] is p for name, p in net.named_parameters())


def test_a_pass_leaves_a_network_with_two_names_for_a_layer_as_it_was(net: nn.Module) -> None:
    vp.variational(net, logvar=-6.0)
    before = {name: (p, p.clone()) for name, p in net.named_parameters()}
    x = torch.randn(4, 3)
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=4)
    vp.correlated(net, x)
    vp.audit(elbo, x, torch.randn(4, 3), samples=20)
    for name, p in net.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])
