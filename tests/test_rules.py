"""User-defined rules: they can state everything that the library's own rules state."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.methods import Call, unexplained

from .sampling import difference, draws

pytestmark = pytest.mark.usefixtures("float64")


class Bend(nn.Module):
    """tanh as an activation that the library has no rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Skip(nn.Module):
    """h + W act(V h): a residual sum after a random layer."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.front, self.first, self.act, self.second = nn.Linear(3, 6), nn.Linear(6, 6), act, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        return h + self.second(self.act(self.first(h)))


def by_quadrature(method: vp.Method, module: nn.Module, x: vp.Gaussian | Tensor) -> vp.Gaussian | Tensor:
    return vp.moments.quadrature(module, x) if isinstance(x, vp.Gaussian) else module(x)


def slope(call: Call) -> Tensor:
    return vp.moments.smooth_slope(call.module, call.x)


SILENT = vp.DVI | {Bend: by_quadrature}
"""A plain function as a rule: it gives moments and states nothing else."""
STATED = vp.DVI | {Bend: vp.Rule(by_quadrature, "approximate", gain=slope, noise=unexplained)}


def skip(act: nn.Module, logvar: float = -3.0) -> nn.Module:
    torch.manual_seed(0)
    return vp.variational(Skip(act), logvar).eval()


def test_a_users_gain_corrects_a_residual_sum() -> None:
    ours, theirs, x = skip(nn.Tanh()), skip(Bend()), torch.randn(4, 3)
    torch.testing.assert_close(STATED(theirs, x).var, vp.DVI(ours, x).var)
    assert not torch.allclose(SILENT(theirs, x).var, vp.DVI(ours, x).var, rtol=1e-3)
    assert [str(row.kind) for row in vp.summary(theirs, SILENT, x).operations][-1] == "independent"
    assert [row.kind.word for row in vp.summary(theirs, STATED, x).operations][-1] == "corrected"


def test_a_users_noise_counts_in_correlated() -> None:
    """With the variance beyond the mean slope of tanh, `correlated` is exact for one hidden layer."""
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(3, 6), Bend(), nn.Linear(6, 2)), logvar=-1.0)
    with torch.no_grad():
        net[2].weight_logvar.fill_(-9.0)
    x = torch.randn(4, 3)
    stated, silent = (vp.correlated(net, x, method=method) for method in (STATED, SILENT))
    torch.testing.assert_close(stated.var, STATED(net, x).var, rtol=1e-3, atol=0)
    assert not difference(stated, draws(net, x))
    assert difference(silent, draws(net, x))


def test_a_users_gate_has_a_divergence() -> None:
    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    def gated(method: vp.Method, module: nn.Module, x: vp.Gaussian) -> vp.Gaussian:
        return vp.moments.gate(x)

    method = vp.VBP | {Closed: vp.Rule(gated, "approximate", 6, knots=lambda module: (0.0,))}
    elbos = []
    for act, table in ((nn.ReLU(), vp.VBP), (Closed(), method)):
        torch.manual_seed(0)
        net = vp.variational(nn.Sequential(nn.Linear(2, 5), act, nn.Linear(5, 1)))
        likelihood, prior = vp.likelihoods.Normal(), vp.priors.Normal()
        elbos.append(vp.ELBO(net.double(), table, likelihood.double(), prior, n_data=10))
    x, y = torch.randn(10, 2), torch.randn(10, 1)
    ours, theirs = (elbo.terms(x, y) for elbo in elbos)
    assert theirs.kl_z.item() == pytest.approx(ours.kl_z.item()) != 0


def test_a_rule_may_state_a_linear_layer_as_its_gain() -> None:
    """A residual sum then uses the mean matrix of that layer as the Jacobian."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Sum(nn.Module):
        def __init__(self, side: nn.Module) -> None:
            super().__init__()
            self.side = side

        def forward(self, x: Tensor) -> Tensor:
            return x + self.side(x)

    torch.manual_seed(0)
    linear, x = nn.Linear(3, 3), vp.Gaussian(torch.randn(2, 3), torch.rand(2, 3))
    rule = vp.Rule(
        lambda method, module, x: method(module.inner, x), "exact", gain=lambda call: call.operation.inner
    )
    method = vp.DVI | {Wrapped: rule}
    torch.testing.assert_close(method(Sum(Wrapped(linear)), x).var, vp.DVI(Sum(linear), x).var)
    exact = (torch.eye(3) + linear.weight).square() @ x.var.T
    torch.testing.assert_close(method(Sum(Wrapped(linear)), x).var, exact.T)


def test_the_key_tells_a_method_from_a_changed_copy() -> None:
    assert (vp.PBP | {}).key == vp.PBP.key == "pbp"
    assert (vp.PBP | {Bend: by_quadrature}).key is None
    assert (vp.PBP | {}).scaled


def test_a_gain_may_be_a_whole_number() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Double()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.twice(x)

    method = vp.DVI | {Double: vp.Rule(lambda method, module, x: x * 2.0, "exact", gain=lambda call: 2)}
    x = vp.Gaussian(torch.zeros(3), torch.ones(3))
    assert method(Sum(), x).var.tolist() == [9.0, 9.0, 9.0]


def test_a_rule_keeps_its_gain_in_a_method_with_other_gates() -> None:
    """VBP has gates, but exact moments of ReLU have none, whatever the method that uses them."""
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)), logvar=-1.0)
    mixed, x = vp.VBP | {nn.ReLU: vp.DVI.rules[nn.ReLU]}, torch.randn(4, 3)
    torch.testing.assert_close(vp.correlated(net, x, method=mixed).var, vp.correlated(net, x).var)


def test_gates_in_a_method_without_a_slope_are_steps() -> None:
    mixed = vp.DVI | {nn.ReLU: vp.VBP.rules[nn.ReLU]}
    net = vp.variational(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)))
    x = torch.randn(4, 3)
    torch.testing.assert_close(mixed(net, x).var, vp.VBP(net, x).var)
    torch.testing.assert_close(
        vp.correlated(net, x, method=mixed).var, vp.correlated(net, x, method=vp.VBP).var
    )


def test_a_changed_copy_of_a_rule_can_be_pickled() -> None:
    rule = replace(vp.DVI.rules[nn.ReLU], kind="copied")  # type: ignore[type-var]
    again = pickle.loads(pickle.dumps(vp.DVI | {nn.ReLU: rule})).rules[nn.ReLU]
    assert (again.kind, again.apply, again.gain) == ("copied", rule.apply, rule.gain)


def test_recurrent_layers_cite_their_own_equations() -> None:
    rows = [
        vp.summary(vp.variational(kind(3, 4)), vp.DVI, torch.randn(2, 5, 3))
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    ]
    assert [row.operations[0].kind.equation for row in rows] == [22, 23, 16]
    assert pickle.loads(pickle.dumps(vp.DVI)).rules[nn.GRU].equation == 23
