"""Expected log-likelihoods against quadrature of high order and torch.distributions."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate
from scipy.special import entr, log_ndtr, ndtr
from torch import Tensor, nn
from torch import distributions as dist

import varprop as vp
from varprop import likelihoods
from varprop.likelihoods import check_target
from varprop.moments.probit import expected_log_ndtr

pytestmark = pytest.mark.usefixtures("float64")


def expectation(g, f: vp.Gaussian, nodes: int = 45) -> Tensor:
    """E g(f) over up to three independent entries of the last dimension, by Gauss-Hermite quadrature."""
    x, w = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(nodes))
    w, k = w / w.sum(), f.shape[-1]
    grid = torch.cartesian_prod(*(x,) * k).view(-1, *(1,) * (f.mean.dim() - 1), k)
    weights = torch.cartesian_prod(*(w,) * k).view(-1, k).prod(1)
    return torch.einsum("n,n...->...", weights, g(f.mean + f.var.sqrt() * grid))


def output(*shape: int, scale: float = 1.0, seed: int = 0) -> vp.Gaussian:
    generator = torch.Generator().manual_seed(seed)
    return vp.Gaussian(
        torch.randn(shape, generator=generator), scale * torch.rand(shape, generator=generator)
    )


# -------------------- Normal


@pytest.mark.parametrize("outputs", [1, 3])
def test_normal_is_the_expectation_of_the_log_density(outputs):
    f, y = output(4, 3), torch.randn(4, 3)
    likelihood = likelihoods.Normal(2.5, outputs)
    if outputs == 3:
        likelihood.update(torch.tensor([0.3, 1.0, 2.0]))
    expected = expectation(lambda a: dist.Normal(a, likelihood.precision**-0.5).log_prob(y), f, nodes=20)
    torch.testing.assert_close(likelihood.expected_log_prob(f, y), expected)
    torch.testing.assert_close(
        likelihood.log_prob(f.mean, y), dist.Normal(f.mean, likelihood.precision**-0.5).log_prob(y)
    )


@pytest.mark.parametrize("outputs", [1, 2])
def test_normal_update_is_the_optimum_of_the_precision(outputs):
    f, y = output(50, 2), torch.randn(50, 2) * torch.tensor([1.0, 3.0])
    likelihood = likelihoods.Normal(outputs=outputs)
    likelihood.update(likelihood.statistic(f, y))
    square = (y - f.mean) ** 2 + f.var
    torch.testing.assert_close(
        1 / likelihood.precision, square.mean(0) if outputs == 2 else square.mean().view(1)
    )
    likelihood.precision = likelihood.precision.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.expected_log_prob(f, y).sum(), likelihood.precision)
    torch.testing.assert_close(gradient, torch.zeros(outputs), rtol=0, atol=1e-9)


def test_normal_statistic_of_equal_batches_averages_to_the_whole():
    f, y, likelihood = output(12, 2), torch.randn(12, 2), likelihoods.Normal(outputs=2)
    parts = [likelihood.statistic(f.map(lambda t, i=i: t[i : i + 4]), y[i : i + 4]) for i in (0, 4, 8)]
    torch.testing.assert_close(torch.stack(parts).mean(0), likelihood.statistic(f, y))
    torch.testing.assert_close(likelihood.statistic(f.mean, y), ((f.mean - y) ** 2).mean(0))


def test_normal_update_survives_a_perfect_fit():
    likelihood = likelihoods.Normal()
    likelihood.update(likelihood.statistic(torch.ones(3, 1), torch.ones(3, 1)))
    assert likelihood.precision.isfinite().all()


@pytest.mark.parametrize("precision", [0.0, -1.0, math.nan, math.inf])
def test_normal_refuses_a_precision_that_is_not_positive(precision):
    with pytest.raises(ValueError, match="precision must be positive and finite, got 'a'"):
        likelihoods.Normal("a")
    with pytest.raises(ValueError, match="precision must be positive"):
        likelihoods.Normal(precision)


# -------------------- heteroscedastic


def test_heteroscedastic_is_the_expectation_of_the_log_density():
    f, y = output(6, 2), torch.randn(6, 1)
    expected = expectation(lambda a: dist.Normal(a[..., :1], torch.exp(a[..., 1:] / 2)).log_prob(y), f)
    torch.testing.assert_close(likelihoods.HeteroscedasticNormal().expected_log_prob(f, y), expected)


def test_heteroscedastic_takes_means_first_and_then_log_variances():
    f, y = output(5, 4), torch.randn(5, 2)
    likelihood = likelihoods.HeteroscedasticNormal()
    torch.testing.assert_close(
        likelihood.log_prob(f.mean, y), dist.Normal(f.mean[:, :2], torch.exp(f.mean[:, 2:] / 2)).log_prob(y)
    )
    p = likelihood.predictive(f)
    torch.testing.assert_close(p.mean, f.mean[:, :2])
    torch.testing.assert_close(p.epistemic, f.var[:, :2])
    torch.testing.assert_close(p.aleatoric, expectation(torch.exp, f.map(lambda t: t[:, 2:])))


@pytest.mark.parametrize("log", [-1e4, 1e4])
def test_heteroscedastic_is_finite_far_away(log):
    f = vp.Gaussian(torch.tensor([[0.0, log]]).requires_grad_(), torch.tensor([[1.0, 50.0]]))
    value = likelihoods.HeteroscedasticNormal().expected_log_prob(f, torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(value.sum(), f.mean)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert likelihoods.HeteroscedasticNormal().predictive(f).var.isfinite().all()


def test_heteroscedastic_needs_two_outputs_for_each_target():
    with pytest.raises(ValueError, match="two outputs for each target"):
        likelihoods.HeteroscedasticNormal().target_shape(output(4, 3))


# -------------------- noise within bounds


def test_bounded_noise_is_the_expectation_of_the_log_density():
    f, y = output(6, 2), torch.randn(6, 1)
    likelihood = likelihoods.BoundedNoise(bound=2.0)
    likelihood.precision.fill_(3.0)

    def log_prob(a: Tensor) -> Tensor:
        return dist.Normal(a[..., :1], torch.exp(torch.tanh(a[..., 1:] / 2)) / math.sqrt(3)).log_prob(y)

    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(likelihood.expected_log_prob(f, y), expectation(log_prob, f), **close)
    torch.testing.assert_close(likelihood.log_prob(f.mean, y), log_prob(f.mean))


def test_bounded_noise_predicts_the_mean_noise():
    f, likelihood = output(6, 2), likelihoods.BoundedNoise()
    p = likelihood.predictive(f)
    noise = expectation(lambda h: torch.exp(4 * torch.tanh(h / 4)), f.map(lambda t: t[:, 1:]))
    torch.testing.assert_close(p.aleatoric[:, 0], noise[:, 0], rtol=1e-4, atol=0)
    torch.testing.assert_close(p.epistemic, f.var[:, :1])


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_bounded_noise_stays_within_its_bounds_and_keeps_a_gradient_at_the_mean(level):
    f = vp.Gaussian(torch.tensor([[0.0, level]]).requires_grad_(), torch.tensor([[1.0, 50.0]]))
    likelihood = likelihoods.BoundedNoise(bound=3.0)
    assert math.exp(-3.001) < likelihood.predictive(f).aleatoric < math.exp(3.001)
    (gradient,) = torch.autograd.grad(likelihood.expected_log_prob(f, torch.ones(1, 1)).sum(), f.mean)
    assert gradient.isfinite().all()
    assert gradient[0, 0] != 0


@pytest.mark.parametrize("kind", [likelihoods.Normal, likelihoods.BoundedNoise])
def test_the_update_of_the_noise_is_its_optimum(kind):
    likelihood = kind(outputs=2)
    f, y = output(7, 2 if kind is likelihoods.Normal else 4), torch.randn(7, 2)
    likelihood.update(likelihood.statistic(f, y))
    best, at = likelihood.expected_log_prob(f, y).sum(), likelihood.precision.clone()
    for factor in (0.99, 1.01):
        likelihood.precision.copy_(at * factor)
        assert likelihood.expected_log_prob(f, y).sum() < best


def test_bounded_noise_refuses_a_bound_that_is_not_positive():
    with pytest.raises(ValueError, match="bound must be positive"):
        likelihoods.BoundedNoise(bound=0.0)


# -------------------- Student's t


@pytest.mark.parametrize("dof", [2.5, 4.0, 30.0])
def test_student_is_the_density_of_torch_and_its_expectation_a_lower_bound(dof):
    f, y = output(6, 1), 3 * torch.randn(6, 1)
    likelihood = likelihoods.StudentT(scale=0.7, dof=dof)
    torch.testing.assert_close(
        likelihood.log_prob(f.mean, y), dist.StudentT(dof, f.mean, torch.tensor(0.7)).log_prob(y)
    )
    exact = expectation(lambda a: likelihood.log_prob(a, y), f)
    assert (likelihood.expected_log_prob(f, y) <= exact).all()
    near = f.times(0.1).plus(0.9 * f.mean)
    torch.testing.assert_close(
        likelihood.expected_log_prob(near, y),
        expectation(lambda a: likelihood.log_prob(a, y), near),
        rtol=0,
        atol=0.01,
    )


def test_student_learns_heavy_tails():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, 1, generator=generator)
    precision = torch.distributions.Gamma(1.5, 1.5)
    torch.manual_seed(0)
    y = 0.5 * normal / precision.sample((20_000, 1)).sqrt()
    likelihood = likelihoods.StudentT()
    optimiser = torch.optim.LBFGS(likelihood.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -likelihood.log_prob(torch.zeros_like(y), y).mean()
        value.backward()
        return value

    optimiser.step(loss)
    assert likelihood.dof.item() == pytest.approx(3.0, abs=0.15)
    assert likelihood.scale.item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("scale", "dof"), [(0.0, 5.0), (1.0, 2.0)])
def test_student_refuses_a_scale_or_degrees_of_freedom_that_cannot_be(scale, dof):
    with pytest.raises(ValueError, match="scale must be positive and dof above 2"):
        likelihoods.StudentT(scale, dof)


# -------------------- Categorical


def lse_error(scale: float) -> Tensor:
    f, y = output(30, 3, scale=scale), torch.arange(30) % 3
    exact = expectation(lambda a: a.log_softmax(-1), f, nodes=24).gather(1, y.unsqueeze(1)).squeeze(1)
    return (likelihoods.Categorical().expected_log_prob(f, y) - exact).abs()


def test_categorical_expectation_is_right_to_second_order():
    assert lse_error(0.01).max() < 1e-5
    assert lse_error(0.01).mean() / lse_error(0.005).mean() == pytest.approx(4, abs=0.2)
    assert lse_error(1.0).max() < 0.03


def test_categorical_expectation_of_a_map_of_classes():
    f, y = output(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    value = likelihoods.Categorical().expected_log_prob(f, y)
    assert value.shape == (2, 4, 5)
    column = f.map(lambda t: t[:, :, 1, 2])
    torch.testing.assert_close(
        value[:, 1, 2], likelihoods.Categorical().expected_log_prob(column, y[:, 1, 2])
    )


def test_categorical_log_prob_is_the_categorical_of_torch():
    f, y = torch.randn(6, 4), torch.randint(4, (6,))
    torch.testing.assert_close(
        likelihoods.Categorical().log_prob(f, y), dist.Categorical(logits=f).log_prob(y)
    )


def test_categorical_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="approximation must be"):
        likelihoods.Categorical("exact")
    with pytest.raises(ValueError, match="samples must be"):
        likelihoods.Categorical("samples", samples=0)
    with pytest.raises(ValueError, match="integers"):
        likelihoods.Categorical().log_prob(torch.randn(2, 3), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_without_an_output_is_named_with_its_row(label):
    f, y = torch.randn(3, 3), torch.tensor([2, label, 0])
    expected = f"label {label} in row 1 is none of the classes: the network has 3 outputs"
    with pytest.raises(ValueError, match=expected):
        likelihoods.Categorical().log_prob(f, y)
    with pytest.raises(ValueError, match=expected):
        likelihoods.Categorical().predictive(f).log_prob(y)
    with pytest.raises(ValueError, match="a label is none of the classes: the network has 3 outputs"):
        torch.func.vmap(likelihoods.Categorical().log_prob)(f.expand(2, 3, 3), y.expand(2, 3))


# -------------------- probit


def exact_probit(f: vp.Gaussian, y: Tensor, k: float = 1.0) -> Tensor:
    return expectation(lambda a: torch.special.log_ndtr(k * torch.where(y > 0, a, -a)), f, nodes=150)


@pytest.mark.parametrize("kind", [likelihoods.Bernoulli, likelihoods.MultiLabel])
def test_probit_quadrature(kind):
    f, y = output(40, 1, scale=4.0), (torch.arange(40) % 2).view(40, 1).double()
    torch.testing.assert_close(kind().expected_log_prob(f, y), exact_probit(f, y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        kind().log_prob(f.mean, y), dist.Normal(0.0, 1.0).cdf((2 * y - 1) * f.mean).log()
    )


def _log_ndtr_at(z: float, m: float, s: float) -> float:
    return log_ndtr(m + s * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("var", [1e-6, 1e-2, 1.0, 30.0, 1e3, 1e6])
def test_probit_expectation_has_nine_digits_for_any_variance(var):
    """Against adaptive quadrature, split where the integrand bends."""
    for m in (-100.0, -5.0, -0.5, 0.0, 2.0, 20.0):
        s = math.sqrt(var)
        bends = [(a - m) / s for a in (-10, -1, 0, 1, 10)]
        ends = sorted({-12.0, 12.0, *(z for z in (*bends, -3, 0, 3) if -12 < z < 12)})
        exact = sum(
            integrate.quad(_log_ndtr_at, a, b, (m, s), epsabs=1e-13, epsrel=1e-10)[0]
            for a, b in pairwise(ends)
        )
        f = vp.Gaussian(torch.tensor([[m]]), torch.tensor([[var]]))
        found = [likelihoods.Bernoulli().expected_log_prob(f, torch.ones(1, 1))]
        found.append(likelihoods.Bernoulli().expected_log_prob(f * -1.0, torch.zeros(1, 1)))
        for value in found:
            assert value.item() == pytest.approx(exact, rel=1e-9, abs=1e-12), m


def test_probit_expectation_has_its_derivatives_for_a_variance_of_zero():
    m, v = torch.tensor([-3.0, 0.0, 2.0], requires_grad=True), torch.zeros(3, requires_grad=True)
    slope, bend = torch.autograd.grad(expected_log_ndtr(vp.Gaussian(m, v)).sum(), [m, v])
    hazard = torch.exp(dist.Normal(0.0, 1.0).log_prob(m) - torch.special.log_ndtr(m))
    torch.testing.assert_close(slope, hazard, rtol=1e-9, atol=0)
    torch.testing.assert_close(bend, -hazard * (hazard + m) / 2, rtol=1e-9, atol=0)


def test_the_expected_entropy_of_labels_is_right_for_any_variance():
    for var in (1e-6, 1.0, 30.0, 1e6):
        for m in (0.0, 1.0, -40.0):
            x = np.linspace(-9, 9, 200_001)
            inside = entr(ndtr(x)) + entr(ndtr(-x))
            s = math.sqrt(var)
            exact = np.trapezoid(inside * np.exp(-(((x - m) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi)), x)
            if var < 1e-3:  # the grid is too coarse, and the entropy constant
                exact = entr(ndtr(m)) + entr(ndtr(-m))
            p = likelihoods.Bernoulli().predictive(vp.Gaussian(torch.tensor([[m]]), torch.tensor([[var]])))
            assert p.expected_entropy.item() == pytest.approx(exact, rel=1e-6, abs=1e-9), (m, var)


def test_probit_bounds_lie_below_in_their_order():
    f, y = output(40, 1, scale=2.0), (torch.arange(40) % 2).view(40, 1)
    bound, paper = (likelihoods.Bernoulli(e).expected_log_prob(f, y) for e in ("bound", "paper"))
    assert (bound <= exact_probit(f, y)).all()
    # The paper's margin has unit noise, which makes the link Φ(f/√2); its tight bound is log Φ(m/√2) - v/4.
    k = math.sqrt(0.5)
    sign = 2 * y - 1
    torch.testing.assert_close(paper, torch.special.log_ndtr(sign * k * f.mean) - f.var / 2)
    assert (paper <= exact_probit(f, y, k) - f.var / 4 + 1e-9).all()


def test_papers_bound_is_the_integral_over_the_latent_margin():
    """L_clsf = log ∫ Φ(t y) exp(E log N(y | f, 1)) dy, for t = ±1."""
    m, v = 0.4, 0.8
    grid = torch.linspace(-14, 14, 20_001)
    for t in (-1.0, 1.0):
        inside = torch.special.ndtr(t * grid) * torch.exp(
            -0.5 * (math.log(2 * math.pi) + (grid - m) ** 2 + v)
        )
        expected = torch.trapezoid(inside, grid).log().item()
        f, y = vp.Gaussian(torch.tensor([[m]]), torch.tensor([[v]])), torch.tensor([[(t + 1) / 2]])
        assert likelihoods.Bernoulli("paper").expected_log_prob(f, y).item() == pytest.approx(
            expected, abs=1e-9
        )


def test_probit_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="expectation must be"):
        likelihoods.Bernoulli("exact")
    with pytest.raises(ValueError, match="one output"):
        likelihoods.Bernoulli().target_shape(output(4, 2))


@pytest.mark.parametrize("value", [math.nan, 2.0, -1.0])
def test_labels_other_than_0_and_1_are_refused(value):
    y = torch.tensor([[0.0, 1.0], [1.0, value]])
    p = likelihoods.MultiLabel().predictive(output(2, 2))
    for check in (likelihoods.MultiLabel().check, p.log_prob):
        with pytest.raises(ValueError, match=f"targets must be 0 or 1, got {value:g} in row 1"):
            check(y)


# -------------------- a user's own


class Poisson(likelihoods.Likelihood):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return y * f - f.exp() - torch.lgamma(y + 1)


def test_own_likelihood_by_quadrature():
    f, y = output(8, 2), torch.randint(5, (8, 2)).double()
    closed = y * f.mean - torch.exp(f.mean + f.var / 2) - torch.lgamma(y + 1)
    torch.testing.assert_close(Poisson().expected_log_prob(f, y), closed)


def test_own_likelihood_trains_and_predicts():
    net = vp.variational(nn.Linear(3, 1), logvar=-3.0)
    elbo = vp.ELBO(net, vp.VBP, Poisson(), vp.priors.Normal(), n_data=5)
    x, y = torch.randn(5, 3), torch.randint(4, (5, 1)).double()
    elbo(x, y).backward()
    assert net.weight_logvar.grad.abs().sum() > 0
    assert elbo.predict(x).log_prob(y).shape == (5,)


# -------------------- for all


ALL = {
    "Normal": (likelihoods.Normal(0.7), 2, torch.randn(4, 2)),
    "HeteroscedasticNormal": (likelihoods.HeteroscedasticNormal(), 4, torch.randn(4, 2)),
    "BoundedNoise": (likelihoods.BoundedNoise(2), 4, torch.randn(4, 2)),
    "StudentT": (likelihoods.StudentT(outputs=2), 2, torch.randn(4, 2)),
    "Categorical": (likelihoods.Categorical(), 3, torch.tensor([0, 1, 2, 1])),
    "Bernoulli": (likelihoods.Bernoulli(), 1, torch.tensor([[0], [1], [1], [0]])),
    "Bernoulli bound": (likelihoods.Bernoulli("bound"), 1, torch.tensor([[0], [1], [1], [0]])),
    "MultiLabel": (likelihoods.MultiLabel(), 3, torch.randint(2, (4, 3))),
    "Poisson": (Poisson(), 2, torch.randint(5, (4, 2)).double()),
}


@pytest.mark.parametrize("name", ALL)
def test_without_variance_the_expectation_is_the_log_likelihood(name):
    likelihood, outputs, y = ALL[name]
    m = torch.randn(4, outputs)
    y = y.to(m) if y.is_floating_point() else y
    torch.testing.assert_close(
        likelihood.expected_log_prob(vp.Gaussian(m, torch.zeros_like(m)), y), likelihood.log_prob(m, y)
    )


@pytest.mark.parametrize("name", ALL)
def test_the_right_target_is_taken_and_one_that_would_broadcast_is_refused(name):
    likelihood, outputs, y = ALL[name]
    f = output(4, outputs)
    check_target(likelihood, f, y)
    check_target(likelihood, f.mean, y)
    for wrong in (y.unsqueeze(-1), y[:3], y[:1], y.flatten() if y.dim() > 1 else y.view(2, 2)):
        with pytest.raises(ValueError, match=r"target has shape .* reshape"):
            check_target(likelihood, f, wrong)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_finite_differences(name):
    likelihood, outputs, y = ALL[name]
    f = output(4, outputs)
    y = y.to(f.mean) if y.is_floating_point() else y
    inputs = (f.mean.requires_grad_(), (f.var + 0.1).requires_grad_())
    assert torch.autograd.gradcheck(lambda m, v: likelihood.expected_log_prob(vp.Gaussian(m, v), y), inputs)
