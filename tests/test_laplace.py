"""The linearised Laplace approximation against derivatives by autograd, linear algebra and sampling."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import varprop as vp
from varprop.laplace import Laplace
from varprop.perceptron import REACHES

GAIN = 8.0


def network(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, units in pairwise(sizes):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def jacobian(net: nn.Sequential, x: Tensor) -> Tensor:
    """(rows, outputs, weights), by autograd."""
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def output(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        result: Tensor = functional_call(net, weights, (row,))
        return result

    found = vmap(jacrev(output), (None, 0))(weights, x)
    return torch.cat([found[name].flatten(2) for name in weights], 2)


def prior_variances(net: nn.Sequential) -> Tensor:
    sizes = [(p, p.shape[1] if p.dim() == 2 else 1) for p in net.parameters()]
    return torch.cat([torch.full((p.numel(),), GAIN / n, dtype=torch.float64) for p, n in sizes])


@pytest.mark.parametrize(("sizes", "rows"), [((3, 6, 1), 20), ((3, 6, 1), 60), ((2, 5, 4, 2), 30)])
def test_variance_is_that_of_the_linear_model(sizes: tuple[int, ...], rows: int) -> None:
    net, x, new = network(*sizes), torch.randn(rows, sizes[0]).double(), torch.randn(7, sizes[0]).double()
    noise, weight = torch.rand(rows, sizes[-1]).double() + 0.1, torch.rand(rows).double()
    found = Laplace.fit(net, GAIN, x, noise, weight, rank=1000).variance(net, new)
    seen, unseen = jacobian(net, x), jacobian(net, new)
    for k in range(sizes[-1]):
        precision = prior_variances(net).reciprocal().diag()
        precision = precision + (seen[:, k].T * (weight / noise[:, k])) @ seen[:, k]
        expected = (unseen[:, k] @ precision.inverse() * unseen[:, k]).sum(1)
        torch.testing.assert_close(found[:, k], expected)


def test_derivatives_are_those_of_the_mean() -> None:
    """Of a network with random weights, whose mean is smooth."""
    net = vp.variational(network(3, 6, 2), logvar=-2.0)
    x, new, noise = torch.randn(30, 3).double(), torch.randn(5, 3).double(), torch.ones(30, 2).double()
    found = Laplace.fit(net, GAIN, x, noise, rank=1000).variance(net, new)
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    means = {name: net.get_parameter(name).detach() for name in names}

    def mean(means: dict[str, Tensor], x: Tensor) -> Tensor:
        call = _Mean(net)
        return functional_call(call, {f"net.{name}": value for name, value in means.items()}, (x,))

    seen, unseen = (
        torch.cat([j[name].flatten(2) for name in names], 2)
        for j in (jacrev(mean)(means, x), jacrev(mean)(means, new))
    )
    prior = torch.cat(
        [torch.full((m.numel(),), GAIN / (m.shape[1] if m.dim() == 2 else 1)) for m in means.values()]
    ).double()
    for k in range(2):
        covariance = (prior.reciprocal().diag() + seen[:, k].T @ seen[:, k]).inverse()
        torch.testing.assert_close(found[:, k], (unseen[:, k] @ covariance * unseen[:, k]).sum(1))


class _Mean(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return vp.DVI(self.net, x).mean


def test_rows_that_repeat_others_add_no_direction() -> None:
    net, x = network(3, 6, 1), torch.randn(4, 3).double().repeat(3, 1)
    laplace = Laplace.fit(net, GAIN, x, torch.full((12, 1), 0.1).double())
    assert laplace.directions.norm(dim=1).round(decimals=6).unique().tolist() == [0.0, 1.0]
    torch.testing.assert_close(
        laplace.float().variance(net.float(), x.float())[:4], laplace.variance(net, x.float())[8:]
    )


def test_a_linear_network_has_its_exact_posterior() -> None:
    """Weights drawn from the prior, and targets from them: the variance is that of their errors."""
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(2, 1)).double(), torch.randn(15, 2).double()
    new = torch.tensor([[0.5, -1.0], [4.0, 4.0]]).double()
    features = torch.cat([x, torch.ones(15, 1)], 1).double()
    std = torch.tensor([(GAIN / 2) ** 0.5, (GAIN / 2) ** 0.5, GAIN**0.5]).double()
    drawn = std * torch.randn(100_000, 3).double()
    targets = drawn @ features.T + 0.3 * torch.randn(100_000, 15).double()
    gram = features.T @ features / 0.09 + std.square().reciprocal().diag()
    means = torch.linalg.solve(gram, features.T @ targets.T / 0.09).T
    errors = (drawn - means) @ torch.cat([new, torch.ones(2, 1)], 1).double().T
    found = Laplace.fit(net, GAIN, x, torch.full((15, 1), 0.09).double()).variance(net, new)[:, 0]
    sampled, standard_error = errors.square().mean(0), errors.square().std(0) / 100_000**0.5
    assert ((found - sampled).abs() < 4 * standard_error).all()


def test_a_wider_prior_needs_no_other_fit() -> None:
    net, x, new = network(3, 6, 1), torch.randn(20, 3).double(), torch.randn(7, 3).double()
    noise = torch.rand(20, 1).double() + 0.1
    laplace, expected = (Laplace.fit(net, gain, x, noise) for gain in (GAIN, 3 * GAIN))
    torch.testing.assert_close(laplace.with_prior(3.0).variance(net, new), expected.variance(net, new))


def test_few_directions_make_the_variance_larger() -> None:
    net, x = network(3, 6, 1), torch.randn(60, 3).double()
    noise = torch.full((60, 1), 0.1).double()
    variances = [Laplace.fit(net, GAIN, x, noise, rank=rank).variance(net, x) for rank in (2, 10, 1000)]
    assert (variances[0] >= variances[1]).all()
    assert (variances[1] >= variances[2] - 1e-12).all()
    assert (variances[2] > 0).all()


def test_the_band_of_an_estimator_widens_in_a_gap() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.rand(60, 1, generator=generator) - 2, torch.rand(60, 1, generator=generator) + 1]
    ).double()
    y = x.cos() + 0.05 * torch.randn(120, 1, generator=generator)
    ratio = {}
    for laplace in (False, True):
        model = vp.BayesianMLPRegressor(random_state=0, noise="constant", laplace=laplace, epochs=12)
        model.fit(x.numpy(), y[:, 0].numpy())
        _, std = model.predict([[-1.5], [0.0]], return_std=True)
        ratio[laplace] = std[1] / std[0]
    assert ratio[True] > 1.5 * ratio[False]
    assert ratio[True] > 2


def test_covariance_is_saved_exported_and_left_out_of_training(tmp_path: object) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = vp.BayesianMLPRegressor(random_state=0, noise="constant", log_target=False, epochs=2).fit(X, y)
    assert all(member.covariance is not None for member in model.members_)
    vp.save(model, str(tmp_path))
    _, std = vp.load(str(tmp_path)).predict(X[:5], return_std=True)
    assert std == pytest.approx(model.predict(X[:5], return_std=True)[1])
    found = vp.export(model).module()(torch.tensor(X[:5], dtype=torch.float32))
    assert found["variance"][:, 0].sqrt().numpy() == pytest.approx(std, rel=1e-3)
    model.partial_fit(X, y)
    assert all(member.covariance is None for member in model.members_)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_layer_sizes": 500},
        {"laplace": False},
        {"prior": vp.priors.Normal(1.0)},
        {"method": "deterministic"},
    ],
)
def test_covariance_can_be_left_out(options: dict[str, object]) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = vp.BayesianMLPRegressor(random_state=0, noise="constant", epochs=1, **options)  # type: ignore[arg-type]
    assert model.fit(X, y).elbo_.covariance is None


def test_the_prior_of_an_estimator_is_not_calibrated() -> None:
    """Factors on all variances are for the noise; where there are no rows, the prior decides as before."""
    generator = np.random.RandomState(0)
    x = generator.uniform(-2, 2, (120, 1))
    y = np.cos(3 * x[:, 0]) + 0.05 * generator.randn(120)
    model = vp.BayesianMLPRegressor(random_state=0, noise="constant", pieces=0, epochs=8).fit(x, y)
    assert max(model.spread_, model.agreement_) < 0.95
    for member in model.members_:
        assert member.covariance is not None
        bias = member.covariance.scale[-1].square().item()
        assert model.spread_ * model.agreement_ * bias == pytest.approx(REACHES[0] * model.prior, rel=0.05)


def test_a_prior_that_is_too_wide_among_the_rows_is_narrowed() -> None:
    """Most of the variance is noise, and 90 % intervals cover 90 %."""
    generator = np.random.RandomState(0)
    x, new = generator.randn(400, 10), generator.randn(2000, 10)
    y, targets = x[:, 0] + generator.randn(400), new[:, 0] + generator.randn(2000)
    model = vp.BayesianMLPRegressor(random_state=0, noise="constant", pieces=0, epochs=4).fit(x, y)
    part = model.predict_uncertainty(new)
    assert part.epistemic.mean() < part.aleatoric.mean()
    lower, upper = model.predict_interval(new, 0.9)
    assert 0.86 < ((lower <= targets) & (targets <= upper)).mean() < 0.94
