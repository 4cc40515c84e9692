"""The audit finds the loophole of VBP, and finds none in CVBP and DVI."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import nn
from torch.func import functional_call

import varprop as vp
from varprop.inspect.units import at_prior


def trained(
    method: vp.Method, hidden: tuple[int, ...] = (20,), epochs: int = 300
) -> tuple[vp.ELBO, torch.Tensor, torch.Tensor]:
    """A network fitted to |x| on full batches."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 200).unsqueeze(1)
    y = x.abs() + 0.1 * torch.randn_like(x)
    sizes = (1, *hidden, 1)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
    net = vp.variational(nn.Sequential(*layers), init="he")
    elbo = vp.ELBO(net, method, vp.likelihoods.Normal(100.0), vp.priors.Normal(10.0), n_data=len(x))
    optimiser = torch.optim.Adam(elbo.parameters(), 0.02)
    for _ in range(epochs):
        optimiser.zero_grad()
        elbo(x, y).backward()
        optimiser.step()
    return elbo, x, y


def test_vbp_fails_its_audit_if_closed_units_have_prior_variances():
    elbo, x, y = trained(vp.VBP)
    with torch.no_grad():
        elbo.net[0].bias[:5] = -0.5
        elbo.net[0].weight[:5] = 0.0
        elbo.net[0].weight_logvar[:5] = math.log(0.1)
        elbo.net[2].weight[:, :5] = 1.0
    audit = vp.audit(elbo, x, y)
    assert abs(audit.gap) > 0.1
    assert not audit.consistent
    assert audit.exact.std > audit.own.std
    assert "NOT consistent" in str(audit)
    assert [(units.layer, units.idle) for units in audit.layers] == [("0", 0.25)]
    elbo.method = vp.CVBP
    assert abs(vp.audit(elbo, x, y).gap) < 0.2 * abs(audit.gap)


@pytest.mark.parametrize("method", [vp.CVBP, vp.DVI], ids=lambda m: m.name)
def test_cvbp_and_dvi_pass_their_audits(method):
    audit = vp.audit(*trained(method))
    assert audit.consistent, str(audit)
    assert audit.sampled is None
    assert str(audit).splitlines()[-1].startswith("Consistent")


def test_exact_moments_agree_with_monte_carlo():
    elbo, x, y = trained(vp.VBP)
    audit = vp.audit(elbo, x, y)
    weights = vp.posterior.draw(elbo.net, 4000, torch.Generator().manual_seed(1))
    with torch.no_grad():
        f = torch.stack(
            [functional_call(elbo.net, {k: w[i] for k, w in weights.items()}, (x,)) for i in range(4000)]
        )
        p = elbo.likelihood.predictive(vp.Gaussian(f.mean(0), f.var(0)))
    assert audit.exact.std == pytest.approx(p.std.mean().item(), rel=0.03)
    assert audit.exact.log_likelihood == pytest.approx(p.log_prob(y).mean().item(), abs=0.05)


def pooled(method: vp.Method) -> tuple[vp.ELBO, torch.Tensor, torch.Tensor]:
    """A convolution, a smooth activation and an average over positions that share weights."""
    torch.manual_seed(0)
    front = nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = vp.variational(nn.Sequential(*front, nn.Linear(4, 1)), logvar=-3.0)
    elbo = vp.ELBO(net, method, vp.likelihoods.Normal(100.0), vp.priors.Normal(), n_data=50)
    return elbo, torch.randn(50, 1, 8, 8) + 2.0, torch.randn(50, 1)


def test_a_network_without_piecewise_activations_is_judged_by_sampling():
    audit = vp.audit(*pooled(vp.DVI), samples=300)
    assert audit.sampled is not None
    assert not audit.consistent
    assert audit.exact.std == pytest.approx(audit.sampled.std, rel=0.05)


def test_the_advice_suits_the_method():
    assert audit_of(vp.DVI).verdict.endswith("predict with vp.correlated(net, x).")
    assert audit_of(vp.VBP).verdict.endswith("train with vp.DVI.")


def audit_of(method: vp.Method) -> vp.Audit:
    audit = vp.audit(*pooled(method), samples=100)
    assert not audit.consistent
    return audit


def test_a_method_and_its_unchanged_copy_have_the_same_audit():
    elbo, x, y = trained(vp.PBP, (6, 6), epochs=20)
    audit = vp.audit(elbo, x, y)
    elbo.method = vp.PBP | {}
    assert vp.audit(elbo, x, y) == audit


def test_a_deep_network_with_scaled_sums_is_judged_by_networks_that_scale_theirs():
    elbo, x, y = trained(vp.PBP, (6, 6), epochs=20)
    audit = vp.audit(elbo, x, y)
    assert audit.sampled is not None
    assert audit.sampled.std == pytest.approx(audit.exact.std, rel=0.05)
    assert audit.sampled.rmse == pytest.approx(audit.own.rmse, rel=0.1)


@pytest.mark.parametrize("function", [False, True])
def test_one_hidden_layer_needs_no_samples_and_an_activation_behind_two_layers_does(function):
    class ReLU(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    act = ReLU if function else nn.ReLU
    shallow = nn.Sequential(nn.Linear(2, 5), act(), nn.Linear(5, 1))
    late = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 5), act(), nn.Linear(5, 1))
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    for net, sampled in ((shallow, False), (late, True)):
        elbo = vp.ELBO(vp.variational(net), vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=20)
        assert (vp.audit(elbo, x, y, samples=20).sampled is not None) == sampled


def test_deeper_networks_are_judged_by_sampling():
    audit = vp.audit(*trained(vp.DVI, (10, 10)), samples=300)
    assert audit.sampled is not None
    assert audit.gap == audit.own.log_likelihood - audit.sampled.log_likelihood
    assert audit.exact.std == pytest.approx(audit.sampled.std, rel=0.05)


def test_classes_labels_and_sampling_methods():
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    for likelihood, outputs, y in (
        (vp.likelihoods.Categorical(), 4, torch.randint(4, (40,))),
        (vp.likelihoods.MultiLabel(), 2, torch.randint(2, (40, 2)).float()),
    ):
        net = vp.variational(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, outputs)))
        for method in (vp.CVBP, vp.LOCAL_REPARAM):
            audit = vp.audit(
                vp.ELBO(net, method, likelihood, vp.priors.Normal(), n_data=40), x, y, samples=50
            )
            assert audit.own.rmse is None
            assert 0 <= audit.own.error <= 1
            assert audit.own.error == pytest.approx(audit.exact.error, abs=0.1)


def test_the_units_of_a_convolution_are_its_channels():
    net = vp.variational(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)))
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([-100.0, -100.0, 100.0, 100.0]))
        net[0].weight_logvar[:1] = 0.0  # of the two closed channels only the first has the prior's variance
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Categorical(), vp.priors.Normal(1.0), n_data=8)
    audit = vp.audit(elbo, torch.randn(8, 1, 4, 4), torch.zeros(8).long())
    assert [(units.layer, units.idle) for units in audit.layers] == [("0", 0.25)]


@pytest.mark.parametrize(
    "prior",
    [vp.priors.Normal(4.0), vp.priors.EmpiricalBayes(), vp.priors.LogUniform()],
    ids=lambda p: type(p).__name__,
)
def test_a_variance_is_at_the_prior_if_nothing_else_affects_it(prior):
    layer = vp.variational(nn.Linear(50, 2))
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight_logvar.fill_(-1.386)
        layer.weight_logvar[1] = -20.0
    assert at_prior(prior, layer).tolist() == [True, False]


def test_the_audit_does_not_change_the_objective():
    elbo, x, y = trained(vp.VBP, epochs=1)
    elbo.train()
    before = {name: value.clone() for name, value in elbo.state_dict().items()}
    vp.audit(elbo, x, y)
    assert elbo.training
    assert all(torch.equal(value, before[name]) for name, value in elbo.state_dict().items())


def test_errors_say_what_to_do():
    elbo, x, y = trained(vp.VBP, epochs=1)
    with pytest.raises(ValueError, match="a target for each input"):
        vp.audit(elbo, x, y[:3])
    plain = vp.ELBO(nn.Linear(1, 1), vp.DETERMINISTIC, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=3)
    with pytest.raises(ValueError, match="no random weights"):
        vp.audit(plain, x, y)


@pytest.mark.parametrize(
    "load", [load_diabetes, load_breast_cancer, load_digits, load_wine], ids=lambda f: f.__name__
)
def test_a_default_estimator_passes_its_audit(load):
    x, y = load(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    train, test = order[len(x) // 4 :], order[: len(x) // 4]
    kind = vp.BayesianMLPRegressor if load is load_diabetes else vp.BayesianMLPClassifier
    audit = kind(random_state=0).fit(x[train], y[train]).audit(x[test], y[test])
    assert audit.consistent, str(audit)


class AfterSequence(nn.Module):
    """A ReLU after a layer that is neither linear nor a convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)[0] if isinstance(self.layer, nn.GRU) else self.layer(x)
        return self.head(torch.relu(h).mean(1))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.ReLU(), nn.Linear(12, 1)), (10, 1, 4, 4)),
        (nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2), nn.ReLU(), nn.Linear(2, 1)), (10, 3)),
        (AfterSequence(nn.GRU(3, 4, batch_first=True)), (10, 5, 3)),
        (AfterSequence(nn.Embedding(7, 4)), (10, 5)),
    ],
    ids=["flattened", "pooled", "recurrent", "embedding"],
)
def test_activations_that_are_not_the_units_of_a_layer_are_audited_too(net, shape):
    x = torch.randint(7, shape) if len(shape) == 2 and shape[1] == 5 else torch.randn(shape)
    elbo = vp.ELBO(vp.variational(net), vp.VBP, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=len(x))
    audit = vp.audit(elbo, x, torch.randn(len(x), 1), samples=10)
    assert audit.layers == ()
    assert audit.gate_kl > 0


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(2, 6), nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, a, b):
        hidden = torch.relu(self.left(a) + self.right(b))
        return {"hidden": hidden, "mean": self.last(hidden)}


@pytest.mark.parametrize("method", [vp.DVI, vp.LOCAL_REPARAM])
def test_several_inputs_and_outputs_are_audited(method):
    """As the same network that takes its inputs side by side and returns one output."""
    torch.manual_seed(0)
    two = vp.variational(TwoInputs(), logvar=-3.0)
    side = vp.variational(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)))
    with torch.no_grad():
        side[0].bias.copy_(two.left.bias + two.right.bias)
        side[2].bias.copy_(two.last.bias)
        for name in ("weight", "weight_logvar"):
            getattr(side[0], name).copy_(torch.cat([getattr(two.left, name), getattr(two.right, name)], 1))
            getattr(side[2], name).copy_(getattr(two.last, name))
    a, b, y = torch.randn(40, 2), torch.randn(40, 3), torch.randn(40, 1)
    found = {}
    for key, net, x in (("two", two, {"a": a, "b": b}), ("side", side, torch.cat([a, b], 1))):
        prior, output = vp.priors.Normal(), "mean" if key == "two" else None
        elbo = vp.ELBO(net, method, vp.likelihoods.Normal(), prior, n_data=40, output=output)
        found[key] = vp.audit(elbo, x, y, samples=4000)
    for scores in (found["two"].own, found["two"].exact, found["two"].sampled):
        assert scores.log_likelihood == pytest.approx(found["side"].exact.log_likelihood, abs=0.02)
        assert scores.std == pytest.approx(found["side"].exact.std, rel=0.05)
    with pytest.raises(ValueError, match="got 40 inputs and 39 targets"):
        vp.audit(elbo, torch.cat([a, b], 1), y[1:])
