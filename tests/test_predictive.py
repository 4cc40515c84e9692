"""Predictions are normalised and have the moments, quantiles and entropies of Monte Carlo samples."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch import distributions as dist

import varprop as vp
from varprop import likelihoods, predictive
from varprop.predictive import ClassPredictive, NormalPredictive, mixture

from .test_likelihoods import Poisson, expectation, output

pytestmark = pytest.mark.usefixtures("float64")

APPROXIMATIONS = ["quadrature", "delta", "mackay", "plugin", "samples"]


def softmax_samples(f: vp.Gaussian, n: int = 100_000) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (f.mean + f.var.sqrt() * torch.randn((n, *f.shape), generator=generator)).softmax(2)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


# -------------------- normal


def regression(seed: int = 0) -> NormalPredictive:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(5, 2, generator=generator)
    return NormalPredictive(
        mean, torch.rand(5, 2, generator=generator), torch.rand(5, 2, generator=generator) + 0.1
    )


def test_normal_predictive_is_the_normal_of_torch():
    p, y = regression(), torch.randn(5, 2)
    normal = dist.Normal(p.mean, torch.sqrt(p.epistemic + p.aleatoric))
    torch.testing.assert_close(p.log_prob(y), normal.log_prob(y).sum(1))
    torch.testing.assert_close(p.cdf(y), normal.cdf(y))
    torch.testing.assert_close(p.var, normal.variance)
    torch.testing.assert_close(p.std, normal.stddev)


def test_normal_predictive_of_a_network_is_the_output_and_the_noise():
    f, y = output(6, 1, scale=2.0), torch.randn(6, 1)
    p = likelihoods.Normal(4.0).predictive(f)
    density = expectation(lambda a: dist.Normal(a, 0.5).log_prob(y).exp(), f, nodes=150)
    torch.testing.assert_close(p.log_prob(y), density.log().squeeze(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(p.epistemic, f.var)
    torch.testing.assert_close(p.aleatoric, torch.full((6, 1), 0.25))


@pytest.mark.parametrize("level", [0.05, 0.5, 0.9, 0.999, 1 - 1e-10])
def test_interval_contains_its_level(level):
    p = regression()
    low, high = p.interval(level)
    torch.testing.assert_close(p.cdf(high) - p.cdf(low), torch.full((5, 2), level), rtol=0, atol=1e-12)
    torch.testing.assert_close(p.cdf(low), torch.full((5, 2), (1 - level) / 2), rtol=1e-6, atol=0)


def test_interval_covers_samples():
    p, n = regression(), 20_000
    y = p.mean + p.std * torch.randn(n, 5, 2)
    low, high = p.interval(0.8)
    covered = ((low < y) & (y < high)).double().mean(0)
    assert ((covered - 0.8).abs() < 5 * math.sqrt(0.16 / n)).all()


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 90, math.nan])
def test_interval_refuses_a_level_that_is_no_probability(level):
    for p in (regression(), mixture([regression(), regression(1)])):
        with pytest.raises(ValueError, match="between 0 and 1"):
            p.interval(level)


# -------------------- heavy tails, log scale


def student(epistemic: float, dof: float, rows: int = 6) -> predictive.StudentPredictive:
    """Noise of scale 1 around zero."""
    values = (0.0, epistemic, dof / (dof - 2), dof)
    return predictive.StudentPredictive(*(torch.full((rows, 1), value) for value in values))


@pytest.mark.parametrize("dof", [2.1, 3.0, 10.0, 50.0])
def test_student_prediction_without_epistemic_variance_is_student_t(dof):
    y, t = torch.tensor([[0.0], [0.5], [1.0], [3.0], [8.0], [12.0]]), scipy.stats.t(dof)
    p = student(0.0, dof)
    torch.testing.assert_close(p.log_prob(y).numpy(), t.logpdf(y.numpy())[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p.cdf(-y).numpy(), t.cdf(-y.numpy()), rtol=1e-3, atol=0)
    lower, upper = p.interval(0.95)
    assert upper[0].item() == pytest.approx(t.ppf(0.975), rel=1e-4)
    torch.testing.assert_close(lower, -upper)


def test_student_prediction_is_the_sum_of_a_normal_and_student_noise():
    generator = np.random.default_rng(0)
    drawn = 1.5 * generator.normal(size=400_000) + generator.standard_t(4.0, 400_000)
    p = student(2.25, 4.0, 3)
    y = torch.tensor([[-2.0], [0.5], [4.0]])
    share = (drawn < y.numpy()).mean(1)
    assert np.abs(p.cdf(y)[:, 0].numpy() - share).max() < 4 * 0.5 / math.sqrt(len(drawn))
    assert p.var[0].item() == pytest.approx(2.25 + 2.0)


def test_log_normal_prediction_against_sampling():
    log = NormalPredictive(*(torch.full((1, 1), v) for v in (0.3, 0.2, 0.1)))
    p, n = predictive.exponential(log), 1_000_000
    generator = torch.Generator().manual_seed(0)
    f = 0.3 + math.sqrt(0.2) * torch.randn(n, generator=generator)
    y = torch.exp(f + math.sqrt(0.1) * torch.randn(n, generator=generator))
    expected_given_f = torch.exp(f + 0.05)
    assert p.mean.item() == pytest.approx(y.mean().item(), rel=0.005)
    assert p.var.item() == pytest.approx(y.var().item(), rel=0.02)
    assert p.epistemic.item() == pytest.approx(expected_given_f.var().item(), rel=0.02)
    at = torch.tensor([[1.7]])
    assert p.cdf(at).item() == pytest.approx((y < 1.7).double().mean().item(), abs=0.002)
    torch.testing.assert_close(
        p.log_prob(at), torch.distributions.LogNormal(0.3, math.sqrt(0.3)).log_prob(at)[:, 0]
    )
    assert p.log_prob(torch.tensor([[-1.0]])).item() == -math.inf
    lower, upper = p.interval(0.8)
    assert ((lower < y) & (y < upper)).double().mean().item() == pytest.approx(0.8, abs=0.002)


def test_a_wider_prediction_keeps_the_disagreement_of_its_members():
    members = [NormalPredictive(*(torch.full((1, 1), v) for v in (m, 0.2, 0.3))) for m in (-1.0, 1.0)]
    p = predictive.widened(mixture(members), 2.0)
    assert p.aleatoric.item() == pytest.approx(0.6)
    assert p.epistemic.item() == pytest.approx(0.4 + 1.0)


def test_the_mean_of_a_limited_exponential_is_that_of_a_known_target():
    centre, scale = 1.0, 2.0
    low, high = (torch.tensor([math.log(y) - centre]) / scale for y in (0.5, 40.0))
    logs = NormalPredictive(
        torch.tensor([[-9.0], [0.0], [1.2], [9.0]]), torch.full((4, 1), 3.0), torch.full((4, 1), 0.5)
    )
    p = predictive.limited(mixture([logs, logs]), low, high, torch.tensor([scale]), 0.25)
    kept = p.components[0]
    assert kept.mean[:, 0].tolist() == pytest.approx(
        [low.item(), 0.0, high.item() - 0.75, high.item() - 0.75]
    )
    assert kept.epistemic.unique().tolist() == [0.25]
    mean = predictive.exponential(predictive.rescaled(p, centre, scale)).mean[:, 0].tolist()
    assert mean == pytest.approx([0.5 * math.exp(1.5), math.exp(1 + 1.5), 40.0, 40.0], rel=1e-5)


@pytest.mark.parametrize("function", [predictive.widened, predictive.rescaled, predictive.exponential])
def test_what_is_not_a_prediction_of_numbers_is_refused(function):
    arguments = {"widened": (2.0,), "rescaled": (0.0, 1.0), "exponential": ()}[function.__name__]
    with pytest.raises(TypeError, match="needs a prediction of numbers"):
        function(ClassPredictive(torch.ones(1, 1), torch.zeros(1)), *arguments)


# -------------------- classes


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_class_probabilities_are_probabilities(approximation, scale, classes):
    f = output(50, classes, scale=scale)
    p = likelihoods.Categorical(approximation).predictive(f)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(50), rtol=0, atol=1e-12)
    assert (p.probs > 0).all()
    assert (p.mutual_information >= 0).all()
    assert (p.expected_entropy >= 0).all()
    assert (p.expected_entropy <= math.log(classes) + 1e-9).all()
    assert p.log_prob(torch.randint(classes, (50,))).isfinite().all()


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_without_variance_the_probabilities_are_the_softmax(approximation):
    m = torch.randn(6, 4)
    # The integral is truncated where the density of the largest Gumbel variable falls below 1e-5.
    cut = 3e-4 if approximation == "quadrature" else 1e-12
    for f in (m, vp.Gaussian(m, torch.zeros_like(m))):
        p = likelihoods.Categorical(approximation).predictive(f)
        torch.testing.assert_close(p.probs, m.softmax(1))
        torch.testing.assert_close(p.expected_entropy, entropy(m.softmax(1)), rtol=0, atol=cut)
        torch.testing.assert_close(p.mutual_information, torch.zeros(6), rtol=0, atol=cut)


def delta_error(scale: float) -> Tensor:
    f = output(30, 3, scale=scale)
    exact = expectation(lambda a: a.softmax(-1), f, nodes=24)
    return (likelihoods.Categorical("delta").predictive(f).probs - exact).abs()


def test_delta_probabilities_are_right_to_second_order():
    assert delta_error(0.01).max() < 1e-5
    assert delta_error(0.01).mean() / delta_error(0.005).mean() == pytest.approx(4, abs=0.2)


def test_delta_probabilities_of_two_classes_agree_with_the_expected_sigmoid():
    m, v = torch.linspace(-3, 3, 13), 0.01
    f = vp.Gaussian(
        torch.stack([m, torch.zeros(13)], 1), torch.stack([torch.full((13,), v), torch.zeros(13)], 1)
    )
    exact = expectation(torch.sigmoid, vp.Gaussian(m.unsqueeze(1), torch.full((13, 1), v)))
    torch.testing.assert_close(
        likelihoods.Categorical("delta").predictive(f).probs[:, :1], exact, rtol=0, atol=v**2 / 8
    )


@pytest.mark.parametrize(
    ("approximation", "scale", "tolerance"),
    [
        ("quadrature", 3.0, 0.006),
        ("quadrature", 1e3, 0.01),
        ("samples", 3.0, 0.02),
        ("delta", 0.3, 0.015),
        ("mackay", 1.0, 0.15),
    ],
)
def test_probabilities_against_monte_carlo(approximation, scale, tolerance):
    f = output(20, 3, scale=2 * scale)
    truth = softmax_samples(f).mean(0)
    error = (likelihoods.Categorical(approximation).predictive(f).probs - truth).abs().max()
    plugin = (f.mean.softmax(1) - truth).abs().max()
    assert error < min(tolerance, plugin)


def test_samples_repeat_and_get_better_with_their_number():
    f = output(20, 3, scale=4.0)
    exact = expectation(lambda a: a.softmax(-1), f)

    def probs(n: int) -> Tensor:
        return likelihoods.Categorical("samples", samples=n).predictive(f).probs

    assert torch.equal(probs(64), probs(64))
    assert (probs(4096) - exact).abs().max() < (probs(64) - exact).abs().max() / 4


@pytest.mark.parametrize(
    ("approximation", "scale", "relative"),
    [("quadrature", 2.0, 0.03), ("delta", 0.02, 0.03), ("samples", 0.02, 0.03), ("samples", 2.0, 0.05)],
)
def test_mutual_information_against_sampling(approximation, scale, relative):
    f = output(20, 3, scale=scale)
    samples = softmax_samples(f)
    exact = entropy(samples.mean(0)) - entropy(samples).mean(0)
    p = likelihoods.Categorical(approximation).predictive(f)
    assert ((p.mutual_information - exact).abs() < relative * exact.max()).all()
    torch.testing.assert_close(p.entropy, entropy(p.probs))


def test_plugin_and_mackay_have_no_mutual_information():
    f = output(5, 3)
    for approximation in ("plugin", "mackay"):
        information = likelihoods.Categorical(approximation).predictive(f).mutual_information
        torch.testing.assert_close(information, torch.zeros(5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_a_map_of_classes_is_predicted_point_by_point(approximation):
    f, likelihood = output(2, 3, 4, 5), likelihoods.Categorical(approximation)
    p, y = likelihood.predictive(f), torch.randint(3, (2, 4, 5))
    q = likelihood.predictive(f.map(lambda t: t[:, :, 1, 2]))
    torch.testing.assert_close(p.probs[:, :, 1, 2], q.probs)
    torch.testing.assert_close(p.mutual_information[:, 1, 2], q.mutual_information)
    chosen = torch.stack(
        [p.probs[n, y[n, i, j], i, j].log() for n in range(2) for i in range(4) for j in range(5)]
    )
    torch.testing.assert_close(p.log_prob(y), chosen.view(2, -1).sum(1))


def test_class_log_prob_is_that_of_the_label():
    p = likelihoods.Categorical().predictive(output(6, 4))
    y = torch.randint(4, (6,))
    torch.testing.assert_close(p.log_prob(y), dist.Categorical(p.probs).log_prob(y))
    with pytest.raises(ValueError, match="integers"):
        p.log_prob(y.double())


# -------------------- labels


def test_label_probability_and_information_by_quadrature():
    f = output(30, 1, scale=3.0)
    p = likelihoods.Bernoulli().predictive(f)
    exact = expectation(torch.special.ndtr, f, nodes=150)
    torch.testing.assert_close(p.probs, exact, rtol=0, atol=1e-7)

    def binary(q: Tensor) -> Tensor:
        return dist.Bernoulli(q.clamp(1e-12, 1 - 1e-12)).entropy()

    torch.testing.assert_close(p.entropy, binary(exact), rtol=0, atol=1e-6)
    left = expectation(lambda a: binary(torch.special.ndtr(a)), f, nodes=150)
    torch.testing.assert_close(p.mutual_information, binary(exact) - left, rtol=0, atol=1e-4)


def test_label_log_prob_sums_over_labels():
    f, y = output(6, 3), torch.randint(2, (6, 3))
    p = likelihoods.MultiLabel().predictive(f)
    torch.testing.assert_close(p.log_prob(y), dist.Bernoulli(p.probs).log_prob(y.double()).sum(1))


@pytest.mark.parametrize("score", [-12.0, -7.0, 7.0, 12.0])
def test_label_log_prob_is_precise_for_a_confident_wrong_prediction(score):
    f = torch.tensor([[score]], dtype=torch.float32)
    y = (f < 0).long()
    expected = torch.special.log_ndtr(torch.tensor(-abs(score))).item()
    p = likelihoods.Bernoulli().predictive(f)
    assert p.log_prob(y).item() == pytest.approx(expected, rel=1e-4)
    assert mixture([p, p]).log_prob(y).item() == pytest.approx(expected, rel=1e-4)


# -------------------- latent


def test_own_likelihood_predicts_by_quadrature_and_is_normalised():
    f = output(4, 1, scale=0.5)
    p = Poisson().predictive(f)
    y = torch.full((4, 1), 2.0)
    exact = expectation(lambda a: dist.Poisson(a.exp()).log_prob(y).exp(), f, nodes=150)
    torch.testing.assert_close(p.log_prob(y), exact.log().squeeze(1), rtol=1e-6, atol=1e-6)
    total = sum(p.log_prob(torch.full((4, 1), float(k))).exp() for k in range(150))
    torch.testing.assert_close(total, torch.ones(4), rtol=0, atol=1e-6)


# -------------------- mixture


def members() -> list[NormalPredictive]:
    return [regression(seed) for seed in range(3)]


def mixture_samples(n: int = 200_000) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    parts = members()
    mean, std = torch.stack([p.mean for p in parts]), torch.stack([p.std for p in parts])
    which = torch.randint(3, (n,), generator=generator)
    return mean[which] + std[which] * torch.randn((n, 5, 2), generator=generator)


def test_mixture_moments_quantiles_and_distribution_function_against_sampling():
    p, y = mixture(members()), mixture_samples()
    n = len(y)
    assert ((p.mean - y.mean(0)).abs() < 5 * y.std(0) / math.sqrt(n)).all()
    fourth = (y - y.mean(0)).pow(4).mean(0)
    assert ((p.var - y.var(0)).abs() < 5 * ((fourth - y.var(0) ** 2) / n).sqrt()).all()
    at = torch.randn(5, 2)
    assert ((p.cdf(at) - (y < at).double().mean(0)).abs() < 5 * 0.5 / math.sqrt(n)).all()
    low, high = p.interval(0.9)
    for quantile, probability in ((low, 0.05), (high, 0.95)):
        assert (((y < quantile).double().mean(0) - probability).abs() < 5 * math.sqrt(0.0475 / n)).all()
        torch.testing.assert_close(p.cdf(quantile), torch.full((5, 2), probability), rtol=0, atol=1e-10)


def test_mixture_splits_its_variance_into_disagreement_and_noise():
    parts = members()
    p = mixture(parts)
    between = torch.stack([q.mean for q in parts]).var(0, unbiased=False)
    torch.testing.assert_close(p.epistemic, torch.stack([q.epistemic for q in parts]).mean(0) + between)
    torch.testing.assert_close(p.aleatoric, torch.stack([q.aleatoric for q in parts]).mean(0))


def test_mixture_log_prob_mixes_whole_targets():
    parts, y = members(), torch.randn(5, 2)
    components = dist.Normal(torch.stack([q.mean for q in parts], 1), torch.stack([q.std for q in parts], 1))
    weights = dist.Categorical(torch.ones(5, 3))
    exact = dist.MixtureSameFamily(weights, dist.Independent(components, 1)).log_prob(y)
    torch.testing.assert_close(mixture(parts).log_prob(y), exact)


def test_mixture_of_one_is_that_one():
    p, y = regression(), torch.randn(5, 2)
    q = mixture([p])
    for name in ("mean", "epistemic", "aleatoric", "var"):
        torch.testing.assert_close(getattr(q, name), getattr(p, name))
    torch.testing.assert_close(q.log_prob(y), p.log_prob(y))
    torch.testing.assert_close(torch.stack(q.interval(0.7)), torch.stack(p.interval(0.7)))


def test_mixture_of_classes_averages_probabilities_and_measures_disagreement():
    a, b = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.2, 0.8]])
    p = mixture([ClassPredictive(q, entropy(q)) for q in (a, b)])
    torch.testing.assert_close(p.probs, (a + b) / 2)
    torch.testing.assert_close(p.mutual_information, entropy((a + b) / 2) - (entropy(a) + entropy(b)) / 2)
    assert p.log_prob(torch.tensor([1])).exp().item() == pytest.approx(0.45)


def test_mixture_of_latent_predictions_averages_densities():
    parts, y = [Poisson().predictive(output(4, 2, seed=s)) for s in (0, 1)], torch.randint(4, (4, 2)).double()
    exact = torch.stack([p.log_prob(y).exp() for p in parts]).mean(0).log()
    torch.testing.assert_close(mixture(parts).log_prob(y), exact)


def test_mixture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to mix"):
        mixture([])


# -------------------- shapes


@pytest.mark.parametrize(
    ("p", "shape"),
    [
        (likelihoods.Normal().predictive(torch.zeros(4, 1)), (4,)),
        (likelihoods.Normal().predictive(torch.zeros(4, 1)), (1, 4)),
        (likelihoods.HeteroscedasticNormal().predictive(torch.zeros(4, 2)), (4,)),
        (likelihoods.Categorical().predictive(torch.zeros(4, 3)), (4, 1)),
        (likelihoods.Categorical().predictive(torch.zeros(4, 3)), (4, 3)),
        (likelihoods.Bernoulli().predictive(torch.zeros(4, 1)), (4,)),
        (Poisson().predictive(torch.zeros(4, 1)), (4,)),
        (mixture(members()), (5,)),
    ],
)
def test_a_target_of_another_shape_is_refused(p, shape):
    with pytest.raises(ValueError, match="target has shape"):
        p.log_prob(torch.zeros(shape, dtype=torch.long))
