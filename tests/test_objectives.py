"""The evidence lower bound: its scale, its terms, a problem with a known optimum, and its predictions."""

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop import likelihoods, priors
from varprop.objectives import Terms
from varprop.predictive import ClassPredictive, Predictive, Regression

pytestmark = pytest.mark.usefixtures("float64")

NETWORK_METHODS = [vp.VBP, vp.vbp(slope=100.0), vp.DVI]


def network(outputs: int = 1, activation: nn.Module | None = None, logvar: float = -2.0) -> nn.Sequential:
    torch.manual_seed(3)
    net = vp.variational(nn.Sequential(nn.Linear(3, 6), activation or nn.ReLU(), nn.Linear(6, outputs)))
    for layer in (net[0], net[2]):
        nn.init.normal_(layer.weight_logvar, logvar, 0.5)
    return net


def objective(net: nn.Module, method: vp.Method = vp.VBP, n_data: int = 40, **options: float) -> vp.ELBO:
    return vp.ELBO(net, method, likelihoods.Normal(2.0), priors.Normal(4.0), n_data=n_data, **options)


def batch(n: int = 5, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(n, 3, generator=generator), torch.randn(n, outputs, generator=generator)


# ------------------------------------------------------------------------------------------------------ scale


def test_divergence_counts_once_for_all_data():
    net, (x, y) = network(), batch()
    terms = objective(net).terms(x, y)
    for n in (1, 5, 1000):
        torch.testing.assert_close(objective(net, n_data=n)(x, y), terms.kl / n - terms.data_fit)


def averaging() -> nn.Module:
    """One weight, averaged over positions that it makes equal."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(1, 1, 1, bias=False)

        def forward(self, signal: Tensor) -> Tensor:
            return self.layer(signal.unsqueeze(1)).mean(2)

    return vp.variational(Averaging(), logvar=-2.0)


def test_correlated_moments_are_those_that_samples_have():
    net, (x, y) = averaging(), batch()
    elbo = objective(net, vp.DVI, moments="correlated")
    f = vp.correlated(net, x)
    torch.testing.assert_close(f.var, x.mean(1, keepdim=True).square() * net.layer.weight_logvar.exp().item())
    fit = likelihoods.Normal(2.0).expected_log_prob(f, y).mean()
    torch.testing.assert_close(elbo(x, y), elbo.kl() / 40 - fit)
    torch.testing.assert_close(elbo.predict(x).mean, f.mean)
    torch.testing.assert_close(elbo.predict(x).epistemic, f.var)
    honest, hopeful = (
        vp.audit(objective(net, vp.DVI, moments=moments), x, y, samples=4000)
        for moments in ("correlated", "independent")
    )
    assert honest.consistent
    assert not hopeful.consistent


def test_correlated_moments_take_several_and_keyword_inputs():
    elbo, (x, y) = objective(averaging(), vp.DVI, moments="correlated"), batch()
    for given in ((x,), {"signal": x}):
        torch.testing.assert_close(elbo(given, y), elbo(x, y))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (vp.DVI, {"moments": "exact"}, "moments must be independent or correlated, got 'exact'"),
        (vp.LOCAL_REPARAM, {"moments": "correlated"}, "need a method with moments"),
        (vp.DETERMINISTIC, {"moments": "correlated"}, "need a method with moments"),
        (vp.VBP, {"moments": "correlated", "kl_z_weight": 0.1}, "kl_z_weight=0"),
    ],
)
def test_moments_that_cannot_be_are_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        objective(averaging(), method, **options)


def test_size_of_the_data_is_required_and_positive():
    with pytest.raises(TypeError, match="n_data"):
        vp.ELBO(network(), vp.VBP, likelihoods.Normal(), priors.Normal())
    for n in (0, -5, math.nan, "100", None):
        with pytest.raises(ValueError, match="n_data"):
            objective(network(), n_data=n)


@pytest.mark.parametrize(
    ("position", "part", "message"),
    [
        (1, "dvi", r"method must be a Method such as vp\.DVI, got 'dvi'"),
        (2, likelihoods.Normal, r"likelihood must be a Likelihood such as vp\.likelihoods\.Normal\(\)"),
        (3, priors.Normal, r"prior must be a Prior such as vp\.priors\.FanIn\(4\.0\)"),
        (3, 4.0, "got 4.0"),
    ],
)
def test_parts_of_another_type_are_refused(position: int, part: object, message: str):
    parts = [network(), vp.VBP, likelihoods.Normal(), priors.Normal()]
    parts[position] = part
    with pytest.raises(TypeError, match=message):
        vp.ELBO(*parts, n_data=10)


def test_data_fit_sums_over_outputs_and_averages_over_data():
    net, (x, y) = network(outputs=3), batch(outputs=3)
    f = vp.VBP(net, x)
    expected = 0.5 * (math.log(2.0 / (2 * math.pi)) - 2.0 * ((y - f.mean) ** 2 + f.var)).sum(1)
    torch.testing.assert_close(objective(net).terms(x, y).data_fit, expected.mean())
    torch.testing.assert_close(objective(net).terms(x.repeat(3, 1), y.repeat(3, 1)).data_fit, expected.mean())


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y"),
    [
        (likelihoods.Normal(), 1, torch.zeros(5)),
        (likelihoods.Normal(), 2, torch.zeros(5, 1)),
        (likelihoods.HeteroscedasticNormal(), 2, torch.zeros(5, 2)),
        (likelihoods.Categorical(), 3, torch.zeros(5, 1, dtype=torch.long)),
        (likelihoods.Bernoulli(), 1, torch.zeros(5)),
        (likelihoods.MultiLabel(), 3, torch.zeros(5, 1)),
    ],
)
@pytest.mark.parametrize("method", [vp.VBP, vp.LOCAL_REPARAM, vp.DETERMINISTIC], ids=lambda m: m.name)
def test_a_target_that_would_broadcast_is_refused(likelihood, outputs, y, method):
    elbo = vp.ELBO(network(outputs), method, likelihood, priors.Normal(), n_data=5)
    with pytest.raises(ValueError, match="target has shape"):
        elbo(batch()[0], y)


# ---------------------------------------------------------------------------------------------- known answers


def bayesian_linear_regression() -> tuple[Tensor, Tensor, float, float]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(20, 4, generator=generator) @ torch.randn(4, 4, generator=generator)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + 0.5 * torch.randn(20, 1, generator=generator), 1.7, 3.1


@pytest.mark.parametrize("method", NETWORK_METHODS, ids=lambda m: m.name)
def test_optimum_for_a_linear_model_is_the_exact_mean_field_posterior(method):
    x, y, alpha, beta = bayesian_linear_regression()
    n, d = x.shape
    precision = alpha * torch.eye(d) + beta * x.T @ x
    mean = torch.linalg.solve(precision, beta * x.T @ y).squeeze(1)
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(n), torch.eye(n) / beta + x @ x.T / alpha
    ).log_prob(y.squeeze(1))
    gap = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision))

    net = vp.variational(nn.Linear(d, 1, bias=False))
    elbo = vp.ELBO(net, method, likelihoods.Normal(beta), priors.Normal(alpha), n_data=n)
    optimiser = torch.optim.LBFGS(
        net.parameters(),
        max_iter=2000,
        tolerance_grad=1e-11,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = elbo(x, y)
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(net.weight.detach().squeeze(0), mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        net.weight_logvar.exp().detach().squeeze(0), 1 / precision.diagonal(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(-n * elbo(x, y).detach(), evidence - gap, rtol=1e-7, atol=1e-7)


def test_the_papers_objective_can_exceed_the_evidence_and_that_of_dvi_does_not():
    """y = w₂ relu(w₁), y = 0, precision 100, standard normal prior, q = N(-0.001, 1) N(0, 1).

    The log evidence is 0.909.
    """
    net = vp.variational(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)))
    for layer, mean in ((net[0], -1e-3), (net[2], 0.0)):
        nn.init.constant_(layer.weight, mean)
        nn.init.constant_(layer.weight_logvar, 0.0)
    x, y = torch.ones(1, 1), torch.zeros(1, 1)
    value = {
        m.name: -vp.ELBO(net, m, likelihoods.Normal(100.0), priors.Normal(), n_data=1)(x, y).item()
        for m in (vp.VBP, vp.DVI)
    }
    assert value["VBP"] == pytest.approx(1.384, abs=1e-3)
    assert value["DVI"] == pytest.approx(-23.6, abs=0.05)


def test_a_random_input_adds_its_variance():
    net = vp.variational(nn.Linear(3, 2), logvar=-2.0)
    x, y = batch(outputs=2)
    noise = torch.rand(5, 3)
    M, S2 = net.weight, net.weight_logvar.exp()
    m, v = x @ M.T + net.bias, noise @ (M**2).T + (x**2 + noise) @ S2.T
    expected = 0.5 * (math.log(2.0 / (2 * math.pi)) - 2.0 * ((y - m) ** 2 + v)).sum(1).mean()
    elbo = objective(net)
    torch.testing.assert_close(elbo.terms(vp.Gaussian(x, noise), y).data_fit, expected)
    torch.testing.assert_close(elbo.predict(vp.Gaussian(x, noise)).epistemic, v.detach())
    constant = elbo(vp.Gaussian(x, torch.zeros_like(x)), y)
    torch.testing.assert_close(constant, elbo(x, y))


def test_deterministic_has_the_plain_loss():
    net, (x, y) = network(), batch()
    loss = objective(net, vp.DETERMINISTIC).terms(x, y)
    mse = ((net(x) - y) ** 2).sum(1).mean()
    torch.testing.assert_close(loss.data_fit, 0.5 * (math.log(2.0 / (2 * math.pi)) - 2.0 * mse))


# ------------------------------------------------------------------------------------ divergence of the gates


def expected_softplus(m: float, s: float, slope: float) -> float:
    """E softplus(C f) with f ~ N(m, s²), by quadrature refined at the kink and at the mean."""

    def inside(f: float) -> float:
        return float(F.softplus(torch.tensor(slope * f))) * math.exp(-((f - m) ** 2) / (2 * s * s))

    value, _ = integrate.quad(
        inside, m - 12 * s, m + 12 * s, points=[max(min(0.0, m + 11 * s), m - 11 * s), m], limit=200
    )
    return value / (s * math.sqrt(2 * math.pi))


def pre_activations(net: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ net[0].weight.T + net[0].bias, torch.sqrt(x**2 @ net[0].weight_logvar.exp().T)


@pytest.mark.parametrize("slope", [0.5, 3.0, 100.0])
def test_divergence_of_the_gates_is_the_integral(slope):
    net, (x, y) = network(), batch(2)
    m, s = (t.flatten().tolist() for t in pre_activations(net, x))
    exact = (
        sum(
            expected_softplus(a, b, slope) - math.log1p(math.exp(slope * a))
            for a, b in zip(m, s, strict=True)
        )
        / 2
    )
    terms = objective(net, vp.vbp(slope)).terms(x, y)
    assert terms.kl_z_exact.item() == pytest.approx(exact, rel=1e-5, abs=1e-5)


def closed_form(m: Tensor, s: Tensor, slope: float) -> Tensor:
    normal = torch.distributions.Normal(0.0, 1.0)
    return slope * (m * normal.cdf(m / s) + s * normal.log_prob(m / s).exp() - m.relu())


@pytest.mark.parametrize("slope", [0.5, 3.0, 100.0])
def test_divergence_of_the_gates_by_the_papers_closed_form(slope):
    net, (x, y) = network(), batch()
    each = closed_form(*pre_activations(net, x), slope)
    terms = objective(net, vp.vbp(slope)).terms(x, y)
    torch.testing.assert_close(terms.kl_z, each.sum() / 5)
    assert abs(terms.kl_z - terms.kl_z_exact) < 6 * math.log(2)


def test_divergence_of_hard_gates_is_given_per_unit_of_slope():
    net, (x, y) = network(), batch()
    terms = objective(net).terms(x, y)
    torch.testing.assert_close(terms.kl_z, closed_form(*pre_activations(net, x), 1.0).sum() / 5)
    torch.testing.assert_close(terms.kl_z_exact, terms.kl_z)
    steep = objective(net, vp.vbp(slope=1e5)).terms(x, y)
    assert steep.kl_z_exact.item() / 1e5 == pytest.approx(terms.kl_z.item(), rel=1e-4)


def test_divergence_sums_over_layers():
    net = vp.variational(
        nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)), logvar=-2.0
    )
    (x, y), slope = batch(), 3.0
    m, s = pre_activations(net, x)
    first = closed_form(m, s, slope).sum()
    p = torch.sigmoid(slope * m)
    h, v = p * m, p * s**2 + p * (1 - p) * m**2
    M, S2 = net[2].weight, net[2].weight_logvar.exp()
    second = closed_form(h @ M.T + net[2].bias, torch.sqrt(v @ (M**2).T + (h**2 + v) @ S2.T), slope).sum()
    torch.testing.assert_close(objective(net, vp.vbp(slope)).terms(x, y).kl_z, (first + second) / 5)


def test_divergence_of_a_three_way_gate():
    """KL(q || p) of a softmax gate with logits l, linear in f, is E lse(l(f)) - lse(l(m))."""
    net, (x, y), slope = network(activation=nn.Hardtanh()), batch(), 6.0
    m, s = pre_activations(net, x)
    z = torch.linspace(-9, 9, 4001).view(-1, 1, 1)
    weights = torch.exp(-(z**2) / 2) / torch.exp(-(z**2) / 2).sum()

    def lse(f: Tensor) -> Tensor:
        return torch.stack([-slope * (f + 1), torch.zeros_like(f), slope * (f - 1)]).logsumexp(0)

    exact = ((weights * lse(m + s * z)).sum(0) - lse(m)).sum() / 5
    terms = objective(net, vp.vbp(slope)).terms(x, y)
    assert terms.kl_z_exact.item() == pytest.approx(exact.item(), rel=1e-3)


@pytest.mark.parametrize("method", [vp.VBP, vp.vbp(slope=10.0)], ids=lambda m: m.name)
def test_weight_of_the_gates_divergence_in_the_loss(method):
    net, (x, y) = network(), batch()
    plain, weighted = objective(net, method), objective(net, method, kl_z_weight=0.3)
    torch.testing.assert_close(weighted(x, y) - plain(x, y), 0.3 * plain.terms(x, y).kl_z)
    gradients = [torch.autograd.grad(e(x, y), net[0].weight_logvar)[0] for e in (plain, weighted)]
    assert not torch.allclose(*gradients)


def test_methods_without_gates_have_zero_gate_divergence():
    net, (x, y) = network(), batch()
    for method in (vp.DVI, vp.LOCAL_REPARAM, vp.DETERMINISTIC):
        assert objective(net, method).terms(x, y).kl_z == 0


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
def test_a_bad_weight_of_the_gates_divergence_is_refused(weight):
    with pytest.raises(ValueError, match="kl_z_weight"):
        objective(network(), kl_z_weight=weight)


# ---------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("method", vp.METHODS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "kind"),
    [
        (likelihoods.Normal(), 1, torch.zeros(5, 1), Regression),
        (likelihoods.HeteroscedasticNormal(), 2, torch.zeros(5, 1), Regression),
        (likelihoods.Categorical(), 3, torch.arange(5) % 3, ClassPredictive),
        (likelihoods.MultiLabel(), 3, torch.ones(5, 3), Predictive),
    ],
    ids=["Normal", "HeteroscedasticNormal", "Categorical", "MultiLabel"],
)
def test_every_method_trains_and_predicts_with_every_likelihood(method, likelihood, outputs, y, kind):
    net, x = network(outputs), batch()[0]
    elbo = vp.ELBO(net, method, likelihood, priors.Normal(), n_data=5)
    elbo(x, y).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    p = elbo.predict(x, samples=7) if method.samples else elbo.predict(x)
    assert isinstance(p, kind)
    log_prob = p.log_prob(y)
    assert log_prob.shape == (5,)
    assert log_prob.isfinite().all()
    assert not log_prob.requires_grad


def test_samples_are_required_by_sampling_methods_and_refused_by_others():
    net, (x, _) = network(), batch()
    with pytest.raises(ValueError, match="samples=100"):
        objective(net, vp.LOCAL_REPARAM).predict(x)
    with pytest.raises(ValueError, match="at least one"):
        objective(net, vp.LOCAL_REPARAM).predict(x, samples=0)
    for method in (vp.VBP, vp.DVI, vp.DETERMINISTIC):
        with pytest.raises(ValueError, match="draws no samples"):
            objective(net, method).predict(x, samples=3)


@pytest.mark.parametrize("method", NETWORK_METHODS, ids=lambda m: m.name)
def test_prediction_is_the_moments_and_the_noise(method):
    net, (x, _) = network(), batch()
    f, p = method(net, x), objective(net, method).predict(x)
    torch.testing.assert_close(p.mean, f.mean.detach())
    torch.testing.assert_close(p.epistemic, f.var.detach())
    torch.testing.assert_close(p.aleatoric, torch.full((5, 1), 0.5))


def test_sampled_prediction_tends_to_that_of_dvi():
    net, (x, y) = network(), batch()
    torch.manual_seed(0)
    n = 3000
    sampled, exact = objective(net, vp.LOCAL_REPARAM).predict(x, samples=n), objective(net, vp.DVI).predict(x)
    assert ((sampled.mean - exact.mean).abs() < 5 * torch.sqrt(exact.epistemic / n)).all()
    torch.testing.assert_close(sampled.epistemic, exact.epistemic, rtol=0.2, atol=0)
    torch.testing.assert_close(sampled.aleatoric, exact.aleatoric)
    assert (sampled.log_prob(y) - exact.log_prob(y)).abs().max() < 0.3


# ---------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("method", NETWORK_METHODS, ids=lambda m: m.name)
def test_compiled_loss_equals_eager(method):
    net, (x, y) = network(), batch()
    elbo = objective(net, method, kl_z_weight=0.1 if method.slope else 0.0)
    torch._dynamo.reset()
    compiled = torch.compile(elbo, fullgraph=True, backend="aot_eager")
    losses = elbo(x, y), compiled(x, y)
    torch.testing.assert_close(*losses)
    for eager, traced in zip(
        *(torch.autograd.grad(loss, list(net.parameters())) for loss in losses), strict=True
    ):
        torch.testing.assert_close(eager, traced)


def test_terms_hold_the_output_of_the_method():
    net, (x, y) = network(), batch()
    terms = objective(net).terms(x, y)
    assert isinstance(terms, Terms)
    torch.testing.assert_close(terms.f.var, vp.VBP(net, x).var)
    torch.testing.assert_close(objective(net).loss(terms), objective(net)(x, y))
