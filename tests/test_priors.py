"""Each divergence against torch.distributions, Monte Carlo or quadrature."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, nn
from torch import distributions as dist

import varprop as vp
from varprop import priors
from varprop.posterior import Posterior, Scales

from .sampling import assert_agrees

pytestmark = pytest.mark.usefixtures("float64")


def posterior(*shape: int, seed: int = 0) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    mean, logvar = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) - 1
    return Posterior(mean.requires_grad_(), logvar.requires_grad_())


def normal(q: Posterior) -> dist.Normal:
    return dist.Normal(q.mean, torch.exp(q.logvar / 2))


def by_sampling(q: dist.Distribution, p: dist.Distribution, n: int = 100_000) -> tuple[Tensor, Tensor]:
    """A Monte Carlo estimate of KL(q || p), summed, and the variance of the estimate."""
    torch.manual_seed(0)
    w = q.sample((n,))
    ratio = (q.log_prob(w) - p.log_prob(w)).flatten(1).sum(1)
    return ratio.mean().detach(), (ratio.var() / n).detach()


# -------------------- Normal


@pytest.mark.parametrize("precision", [0.1, 1.0, 10.0, 1e4])
def test_normal(precision):
    q = posterior(5, 4)
    p = dist.Normal(0.0, precision**-0.5)
    kl = priors.Normal(precision).kl(q)
    assert kl.item() == pytest.approx(dist.kl_divergence(normal(q), p).sum().item(), rel=1e-12)
    value, var = by_sampling(normal(q), p)
    assert abs(kl - value) < 5 * var.sqrt()


@pytest.mark.parametrize(("shape", "inputs"), [((4, 6), 6), ((4, 2, 3, 3), 18), ((4,), 1)])
def test_fan_in_is_normal_with_a_variance_by_the_number_of_inputs(shape, inputs):
    q = posterior(*shape)
    torch.testing.assert_close(priors.FanIn(gain=3.0).kl(q), priors.Normal(precision=inputs / 3.0).kl(q))


def test_fan_in_follows_the_layer_where_the_posterior_knows_it():
    q = replace(posterior(4, 6), fan_in=30.0)
    torch.testing.assert_close(priors.FanIn(gain=3.0).kl(q), priors.Normal(precision=10.0).kl(q))


def test_fan_in_is_around_the_centre_where_there_is_one():
    q = posterior(4, 6)
    moved = replace(q, mean=q.mean + 2.0, centre=torch.full((4, 6), 2.0))
    torch.testing.assert_close(priors.FanIn(gain=3.0).kl(moved), priors.FanIn(gain=3.0).kl(q))


def test_fan_in_of_an_embedding_without_its_padding_row_is_still_one():
    ((_, q),) = vp.posteriors(vp.variational(nn.Embedding(5, 3, padding_idx=0)))
    torch.testing.assert_close(priors.FanIn(gain=2.0).kl(q.random), priors.Normal(precision=0.5).kl(q.random))


def test_normal_is_zero_at_the_prior_and_positive_elsewhere():
    at_prior = Posterior(torch.zeros(3), torch.full((3,), math.log(0.25)))
    assert priors.Normal(4.0).kl(at_prior).item() == pytest.approx(0.0, abs=1e-14)
    for q in (
        Posterior(torch.full((3,), 0.01), at_prior.logvar),
        Posterior(at_prior.mean, at_prior.logvar + 0.01),
    ):
        assert priors.Normal(4.0).kl(q) > 0


# -------------------- LogUniform


def exact_log_uniform(log_alpha: float) -> float:
    """KL = E log|z + d| - E log|z| with d = 1/√alpha, relative to its limit for infinite alpha."""
    d = math.exp(-log_alpha / 2)
    value, _ = integrate.quad(
        lambda u: math.log(abs(u)) * math.exp(-((u - d) ** 2) / 2) if u else 0.0,
        -14.0,
        d + 14,
        points=sorted({0.0, d}),
        limit=400,
    )
    return value / math.sqrt(2 * math.pi) + (np.euler_gamma + math.log(2)) / 2


def log_uniform(log_alpha: float, mean: float = 1.0) -> float:
    return (
        priors.LogUniform()
        .kl(Posterior(torch.tensor([mean]), torch.tensor([log_alpha + 2 * math.log(abs(mean))])))
        .item()
    )


def test_log_uniform_is_close_to_the_exact_divergence():
    deviation = [abs(log_uniform(a) - exact_log_uniform(a)) for a in np.linspace(-7.9, 7.9, 80)]
    assert max(deviation) < 0.0095
    assert abs(log_uniform(-3.6) - exact_log_uniform(-3.6)) == pytest.approx(0.0094, abs=1e-4)


def test_log_uniform_differences_agree_with_sampling():
    """The prior p(w) ∝ 1/|w| is improper, but differences of divergences are well defined."""
    torch.manual_seed(0)
    values, error = [], 0.0
    for log_alpha in (-2.0, 1.0):
        q = dist.Normal(1.0, math.exp(log_alpha / 2))
        w = q.sample((400_000,))
        ratio = q.log_prob(w) + w.abs().log()
        values.append(ratio.mean().item())
        error += ratio.var().item() / len(w)
    assert abs((log_uniform(-2.0) - log_uniform(1.0)) - (values[0] - values[1])) < 0.0094 * 2 + 5 * math.sqrt(
        error
    )


def test_log_uniform_depends_only_on_the_ratio_of_mean_and_deviation_and_falls_to_zero():
    assert log_uniform(-1.0, mean=0.2) == pytest.approx(log_uniform(-1.0, mean=-3.0), abs=1e-6)
    values = [log_uniform(a) for a in np.linspace(-8, 8, 50)]
    assert all(a > b > 0 for a, b in pairwise(values))
    assert values[-1] < 2e-4
    q = Posterior(torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True))
    for gradient in torch.autograd.grad(priors.LogUniform().kl(q), (q.mean, q.logvar)):
        assert gradient.isfinite().all()


# -------------------- EmpiricalBayes


def hyper(s: float, hyperprior: tuple[float, float] | None) -> float:
    return 0.0 if hyperprior is None else -stats.invgamma(hyperprior[0], scale=hyperprior[1]).logpdf(s)


@pytest.mark.parametrize("hyperprior", [None, (1.0, 10.0), (4.4798, 0.3)])
def test_empirical_bayes_is_the_minimum_over_the_prior_variance(hyperprior):
    q = posterior(6, 3)

    def objective(log_s: float) -> float:
        s = math.exp(log_s)
        return dist.kl_divergence(normal(q), dist.Normal(0.0, math.sqrt(s))).sum().item() + hyper(
            s, hyperprior
        )

    best = optimize.minimize_scalar(objective, bracket=(-3, 3), tol=1e-12)
    assert priors.EmpiricalBayes(hyperprior).kl(q).item() == pytest.approx(best.fun, rel=1e-10)


@pytest.mark.parametrize("hyperprior", [None, (1.0, 10.0)])
def test_empirical_bayes_gradient_is_that_at_a_fixed_variance(hyperprior):
    """The objective is flat in s at the optimum, so its gradient is that of a Normal prior with fixed s."""
    q = posterior(6, 3)
    n, total = q.mean.numel(), (q.mean**2 + q.logvar.exp()).sum().item()
    a, b = hyperprior or (-1.0, 0.0)
    s = (total + 2 * b) / (n + 2 * a + 2)
    ours = torch.autograd.grad(priors.EmpiricalBayes(hyperprior).kl(q), (q.mean, q.logvar))
    fixed = torch.autograd.grad(
        dist.kl_divergence(normal(q), dist.Normal(0.0, math.sqrt(s))).sum(), (q.mean, q.logvar)
    )
    for g, expected in zip(ours, fixed, strict=True):
        torch.testing.assert_close(g, expected)


def test_empirical_bayes_is_zero_where_the_posterior_is_a_normal_prior():
    q = Posterior(torch.zeros(4, 5), torch.full((4, 5), -2.3))
    assert priors.EmpiricalBayes().kl(q).item() == pytest.approx(0.0, abs=1e-12)
    assert priors.EmpiricalBayes().kl(posterior(4, 5)) > 0


# -------------------- Horseshoe


def horseshoe_posterior() -> Posterior:
    torch.manual_seed(1)
    scales = Scales(4)
    for parameter in scales.parameters():
        nn.init.normal_(parameter, -0.5, 0.5)
    q = posterior(3, 4)
    return Posterior(q.mean, q.logvar, scales)


@pytest.mark.parametrize("scale", [0.05, 1.0, 2.5])
def test_horseshoe_against_sampling_of_all_its_parts(scale):
    q = horseshoe_posterior()
    log_scales = [
        (q.scales.group_mean[0], q.scales.group_logvar[0], dist.Gamma(0.5, 1.0)),
        (
            q.scales.group_mean[1],
            q.scales.group_logvar[1],
            dist.InverseGamma(torch.tensor(0.5), torch.tensor(1.0)),
        ),
        (q.scales.layer_mean[0], q.scales.layer_logvar[0], dist.Gamma(0.5, 1.0 / scale**2)),
        (
            q.scales.layer_mean[1],
            q.scales.layer_logvar[1],
            dist.InverseGamma(torch.tensor(0.5), torch.tensor(1.0)),
        ),
    ]
    parts = [
        (normal(q), dist.Normal(0.0, 1.0)),
        *((dist.LogNormal(m, torch.exp(t / 2)), p) for m, t, p in log_scales),
    ]
    estimates = [by_sampling(*part) for part in parts]
    value, error = sum(e[0] for e in estimates), sum(e[1] for e in estimates).sqrt()
    kl = priors.Horseshoe(scale).kl(q)
    assert abs(kl - value) < 5 * error
    assert error < 0.01 * kl


@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_root_of_gamma_times_inverse_gamma_is_half_cauchy(scale):
    torch.manual_seed(0)
    a = dist.Gamma(0.5, 1 / scale**2).sample((20_000,))
    b = dist.InverseGamma(torch.tensor(0.5), torch.tensor(1.0)).sample((20_000,))
    assert stats.kstest(torch.sqrt(a * b).numpy(), stats.halfcauchy(scale=scale).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 3), (2, 4)), (nn.Conv1d(2, 3, 2), (2, 2, 4))], ids=["Linear", "Conv1d"]
)
def test_horseshoe_scales_are_shared_by_their_group_and_layer(layer, shape):
    torch.manual_seed(2)
    vp.variational(layer.double(), logvar=-2.0, posterior="horseshoe")
    for parameter in layer.scales.parameters():
        nn.init.normal_(parameter, -1.0, 0.3)
    assert_agrees(vp.VBP, layer, vp.Gaussian(torch.randn(shape), torch.rand(shape)), samples=100_000)


def test_horseshoe_minimum_over_a_scale_is_where_its_gradient_vanishes():
    """d/du [-u/2 + e^(u+t/2)/θ] = 0 at u = log(θ/2) - t/2."""
    scale, t = 0.3, 0.4
    scales = Scales(1, logvar=math.log(t))
    scales.layer_mean.data[0] = math.log(scale**2 / 2) - t / 2
    q = Posterior(torch.zeros(1, 1), torch.zeros(1, 1), scales)
    (gradient,) = torch.autograd.grad(priors.Horseshoe(scale).kl(q), scales.layer_mean)
    assert gradient[0].item() == pytest.approx(0.0, abs=1e-12)


def test_horseshoe_gives_random_biases_a_standard_normal_and_refuses_weights_without_scales():
    q = posterior(4)
    assert priors.Horseshoe(0.1).kl(q).item() == pytest.approx(
        dist.kl_divergence(normal(q), dist.Normal(0.0, 1.0)).sum().item()
    )
    with pytest.raises(ValueError, match="group scales"):
        priors.Horseshoe().kl(posterior(4, 3))


# -------------------- errors


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        priors.Normal,
        priors.FanIn,
        priors.Horseshoe,
        lambda v: priors.EmpiricalBayes((v, 1.0)),
        lambda v: priors.EmpiricalBayes((1.0, v)),
        lambda v: priors.Tempered(priors.Normal(), v),
    ],
    ids=["Normal", "FanIn", "Horseshoe", "EmpiricalBayes a", "EmpiricalBayes b", "Tempered"],
)
def test_bad_arguments_are_refused(make, value):
    with pytest.raises(ValueError, match="must be positive"):
        make(value)


# -------------------- sums over a network


PRIORS = [
    priors.Normal(3.0),
    priors.LogUniform(),
    priors.EmpiricalBayes(),
    priors.EmpiricalBayes((1.0, 10.0)),
]


@pytest.mark.parametrize("form", ["full", "factored"])
def test_divergence_of_a_network_is_the_sum_over_its_random_weights(form):
    net = vp.variational(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), posterior=form, biases=True
    )
    for name, parameter in net.named_parameters():
        if "logvar" in name:
            nn.init.normal_(parameter, -1.0)
    expected = 0.0
    for layer in (net[0], net[2]):
        logvar = layer.weight_logvar if form == "full" else layer.weight_logvar_out + layer.weight_logvar_in
        for mean, log in ((layer.weight, logvar), (layer.bias, layer.bias_logvar)):
            q, p = dist.Normal(mean, torch.exp(log / 2)), dist.Normal(0.0, 3**-0.5)
            expected += dist.kl_divergence(q, p).sum().item()
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), priors.Normal(3.0), n_data=7)
    assert elbo.kl().item() == pytest.approx(expected)
    assert elbo.terms(torch.randn(2, 3), torch.randn(2, 2)).kl.item() == pytest.approx(expected)


def test_deterministic_weights_have_no_divergence():
    net = vp.variational(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), where=lambda name, _: name == "2"
    )
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), priors.Normal(), n_data=7)
    q = dist.Normal(net[2].weight, torch.exp(net[2].weight_logvar / 2))
    assert elbo.kl().item() == pytest.approx(dist.kl_divergence(q, dist.Normal(0.0, 1.0)).sum().item())
    plain = vp.ELBO(nn.Linear(3, 2), vp.DETERMINISTIC, vp.likelihoods.Normal(), priors.Normal(), n_data=7)
    assert plain.kl() == 0


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_shared_log_variances_count_for_each_weight(prior):
    q = posterior(3, 4)
    column = q.logvar[:, :1]
    torch.testing.assert_close(
        prior.kl(Posterior(q.mean, column)), prior.kl(Posterior(q.mean, column.expand(3, 4)))
    )


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_gradients_are_those_of_finite_differences(prior):
    q = posterior(3, 2)
    assert torch.autograd.gradcheck(lambda m, v: prior.kl(Posterior(m, v)), (q.mean, q.logvar))


def test_a_tempered_divergence_is_a_part_of_the_whole():
    qs = [posterior(5, 4), posterior(3, seed=1)]
    for prior in PRIORS:
        tempered = priors.Tempered(prior, 0.1)
        torch.testing.assert_close(tempered.kl(qs[0]), 0.1 * prior.kl(qs[0]))
        torch.testing.assert_close(tempered.total(qs), 0.1 * prior.total(qs))


def test_a_tempered_prior_needs_a_prior():
    with pytest.raises(TypeError, match="Tempered: prior must be a prior"):
        priors.Tempered(0.1)


@pytest.mark.parametrize("prior", [priors.Normal(3.0), priors.FanIn(2.0), priors.LogUniform()])
def test_the_total_is_the_sum_over_tensors(prior):
    qs = [posterior(5, 4), posterior(3, seed=1)]
    torch.testing.assert_close(prior.total(qs), prior.kl(qs[0]) + prior.kl(qs[1]))


def test_the_total_of_a_subclass_is_by_its_own_divergence():
    class Doubled(priors.Normal):
        def kl(self, q: Posterior) -> Tensor:
            return 2 * super().kl(q)

    qs = [posterior(5, 4), posterior(3, seed=1)]
    torch.testing.assert_close(Doubled(3.0).total(qs), 2 * priors.Normal(3.0).total(qs))


def test_first_and_second_derivatives_of_the_total_are_those_of_finite_differences():
    tensors = [t for q in (posterior(5, 4), posterior(3, seed=1)) for t in (q.mean, q.logvar)]

    def total(*tensors: Tensor) -> Tensor:
        return priors.FanIn(2.0).total([Posterior(*tensors[:2]), Posterior(*tensors[2:])])

    assert torch.autograd.gradcheck(total, tensors)
    assert torch.autograd.gradgradcheck(total, tensors)
