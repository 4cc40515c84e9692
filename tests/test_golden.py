"""Reference values computed independently of this package, to the digits shown."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import varprop as vp
from varprop import likelihoods, moments, priors
from varprop.posterior import Posterior, Scales

pytestmark = pytest.mark.usefixtures("float64")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def gaussian(m: float, v: float) -> vp.Gaussian:
    return vp.Gaussian(tensor(m), tensor(v))


@pytest.mark.parametrize(
    ("m", "v", "mean", "var"),
    [
        (0.0, 1.0, 0.3989422804, 0.3408450569),
        (0.3, 0.5, 0.4571092413, 0.2603406038),
        (-2.0, 1.3, 0.0182537962, 0.0147761134),
    ],
)
def test_rectified_normal(m, v, mean, var):
    out = vp.DVI(nn.ReLU(), gaussian(m, v))
    assert out.mean.item() == pytest.approx(mean, abs=1e-10)
    assert out.var.item() == pytest.approx(var, abs=1e-10)


def test_rectified_normal_keeps_its_digits_far_below_zero():
    x = vp.Gaussian(torch.tensor([-6.0], dtype=torch.float32), torch.ones(1, dtype=torch.float32))
    assert vp.DVI(nn.ReLU(), x).var.item() == pytest.approx(4.8e-11, rel=0.02)


@pytest.mark.parametrize(
    ("m", "v", "slope", "mean", "var"),
    [
        (0.0, 1.0, 100.0, 0.0, 0.5),
        (0.01, 0.25, 100.0, 0.0073105858, 0.1827843059),
        (-0.02, 0.25, 100.0, -0.0023840584, 0.0298427279),
        (0.5, 0.3, 10.0, 0.4966535745, 0.2996541589),
    ],
)
def test_gate(m, v, slope, mean, var):
    out = vp.vbp(slope)(nn.ReLU(), gaussian(m, v))
    assert out.mean.item() == pytest.approx(mean, abs=1e-10)
    assert out.var.item() == pytest.approx(var, abs=1e-10)


def test_softmax():
    f = vp.Gaussian(tensor(1.0, -0.5, 0.2).unsqueeze(0), tensor(0.3, 0.8, 0.1).unsqueeze(0))
    softmax = likelihoods.Categorical("delta")
    log_prob = softmax.expected_log_prob(f, torch.tensor([0])).item()
    assert 1.0 - log_prob == pytest.approx(1.6064269458, abs=1e-10)
    assert softmax.predictive(f).probs[0].tolist() == pytest.approx(
        [0.56374885, 0.16883487, 0.26741627], abs=1e-8
    )


def test_heteroscedastic_normal():
    m, log, v, log_v, y = 1.0, 0.4, 0.25, 0.09, 2.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    a, b = m + math.sqrt(v) * nodes[:, None], log + math.sqrt(log_v) * nodes
    expected = weights @ stats.norm.logpdf(y, a, np.exp(b / 2)) @ weights
    assert expected == pytest.approx(
        -0.5 * (math.log(2 * math.pi) + 0.4 + math.exp(-0.4 + 0.045) * 1.25), abs=1e-9
    )
    f = vp.Gaussian(tensor(m, log).unsqueeze(0), tensor(v, log_v).unsqueeze(0))
    ours = likelihoods.HeteroscedasticNormal().expected_log_prob(f, torch.tensor([[y]]))
    assert ours.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("prior", "mean", "logvar", "value"),
    [
        (priors.Normal(10.0), 0.3, -2.0, 0.4753838697),
        (priors.LogUniform(), 1.0, -2.0, 1.5405327412),
        (priors.LogUniform(), 1.0, 0.0, 0.4312389510),
        (priors.LogUniform(), 1.0, 2.0, 0.0684165460),
    ],
)
def test_weight_divergence(prior, mean, logvar, value):
    # The library has log a = log s² - log(μ² + 1e-8); the reference values do without the 1e-8.
    assert prior.kl(Posterior(tensor(mean), tensor(logvar))).item() == pytest.approx(value, abs=2e-8)


@pytest.mark.parametrize(
    ("row", "value"), [(0, 1.1102930464), (1, 0.6664091937)], ids=["Gamma", "InverseGamma"]
)
def test_divergence_of_a_lognormal_scale(row, value):
    """Moving one scale from LN(0, 1) to LN(0.3, 0.4) changes the total divergence by that of this scale."""
    q, prior = Scales(1, logvar=0.0), priors.Horseshoe()
    before = prior.kl(Posterior(tensor(0.0), tensor(0.0), q)).item()
    q.group_mean.data[row], q.group_logvar.data[row] = 0.3, math.log(0.4)
    after = prior.kl(Posterior(tensor(0.0), tensor(0.0), q)).item()
    # The divergence of LN(0, 1) from Gamma(1/2, 1), which is that from InverseGamma(1/2, 1) too.
    at_start = math.exp(0.5) - 0.5 * (math.log(2) + 1)
    assert after - before + at_start == pytest.approx(value, abs=1e-9)


def test_empirical_bayes_optimum():
    """n = 500, T = 37, InverseGamma(1, 10): s* = 57/504."""
    mean, logvar = torch.full((500,), math.sqrt(0.034)), torch.full((500,), math.log(0.04))
    s, n, a, b, total = 57 / 504, 500, 1.0, 10.0, 37.0
    kl = 0.5 * (n * math.log(s) + total / s - n - n * math.log(0.04))
    hyper = -a * math.log(b) + math.lgamma(a) + (a + 1) * math.log(s) + b / s
    assert priors.EmpiricalBayes((a, b)).kl(Posterior(mean, logvar)).item() == pytest.approx(
        kl + hyper, rel=1e-10
    )


def test_probit():
    f = gaussian(0.4, 0.8)
    assert likelihoods.Bernoulli().predictive(f).probs.item() == pytest.approx(0.6172027580, abs=1e-10)
    assert likelihoods.Bernoulli("paper").expected_log_prob(f, tensor(1.0)).item() == pytest.approx(
        -0.8920835348, abs=1e-10
    )


@pytest.mark.parametrize(
    ("slope", "m", "s", "value"),
    [
        (1.0, 0.0, 1.0, 0.112912),
        (10.0, 0.3, 0.3, 0.331989),
        (100.0, 0.0, 0.1, 3.361166),
        (100.0, 0.05, 0.1, 2.028673),
    ],
)
def test_gate_divergence(slope, m, s, value):
    assert moments.gate_kl(gaussian(m, s**2), slope).item() == pytest.approx(value, abs=1.1e-6)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0.3, 0.5), (-0.2, 1.1)),
        ((0.0, 1.0), (0.0, 1.0)),
        ((-1.0, 0.2), (2.0, 0.7)),
        ((1.0, 0.0), (0.5, 0.4)),
    ],
)
def test_clark_maximum_of_independent_normals(a, b):
    """E max^k = ∫ y^k d(F_a F_b), by quadrature of the tails."""
    fa, fb = (stats.norm(m, math.sqrt(v)) if v else stats.uniform(m, 1e-12) for m, v in (a, b))
    low, high = -15.0, 15.0
    points = sorted({a[0], b[0], 0.0})
    product = lambda t: fa.cdf(t) * fb.cdf(t)  # noqa: E731
    options = {"points": points, "limit": 400, "epsabs": 1e-12}
    mean = high - integrate.quad(product, low, high, **options)[0]
    second = high**2 - integrate.quad(lambda t: 2 * t * product(t), low, high, **options)[0]
    out = moments.maximum(gaussian(*a), gaussian(*b))
    assert out.mean.item() == pytest.approx(mean, abs=1e-8)
    assert out.var.item() == pytest.approx(second - mean**2, abs=1e-7)


def test_max_pool_of_dvi_is_clark_and_of_vbp_is_the_winner():
    x = vp.Gaussian(tensor(0.3, -0.2).view(1, 1, 2), tensor(0.5, 1.1).view(1, 1, 2))
    grid = np.linspace(-12, 12, 200_001)
    cdf = stats.norm(0.3, math.sqrt(0.5)).cdf(grid) * stats.norm(-0.2, math.sqrt(1.1)).cdf(grid)
    mean = 12 - integrate.simpson(cdf, x=grid)
    second = 144 - integrate.simpson(2 * grid * cdf, x=grid)
    clark, winner = vp.DVI(nn.MaxPool1d(2), x), vp.VBP(nn.MaxPool1d(2), x)
    assert clark.mean.item() == pytest.approx(mean, abs=1e-8)
    assert clark.var.item() == pytest.approx(second - mean**2, abs=1e-8)
    assert (winner.mean.item(), winner.var.item()) == (0.3, 0.5)
