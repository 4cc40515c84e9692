"""Probabilistic backpropagation against a second one in plain NumPy, with complex-step gradients."""

import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

import varprop as vp
from varprop.training.filtering import Gamma


def network(*sizes, **options):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return vp.variational(nn.Sequential(*layers[:-1]).double(), biases=True, **options)


def regression(n, inputs, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, inputs))
    y = np.sin(x.sum(1, keepdims=True)) + 0.1 * rng.normal(size=(n, 1))
    return x, y


# ------------------------------------------------------------------ the same algorithm, written a second time


class NumpyPBP:
    """Layers are matrices [weight | bias] of means and variances."""

    def __init__(self, means):
        self.m = [m.copy() for m in means]
        self.v = [np.full(m.shape, 6 / 5) for m in means]
        self.a = self.b = self.ap = self.bp = 6.0
        self.site_mean = [np.zeros(m.shape) for m in means]
        self.site_precision = [np.full(m.shape, 5 / 6) for m in means]
        self.site_a = [np.zeros(m.shape) for m in means]
        self.site_b = [np.zeros(m.shape) for m in means]

    @staticmethod
    def forward(m, v, x):
        h_m, h_v = x, np.zeros_like(x)
        for layer, (M, V) in enumerate(zip(m, v, strict=True)):
            if layer > 0:
                t = a_m / np.sqrt(a_v)  # noqa: F821
                Phi, phi = scipy.special.ndtr(t), np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)
                SR = phi + t * Phi
                h_m, h_v = np.sqrt(a_v) * SR, a_v * (Phi + t * SR - SR**2)  # noqa: F821
            h_m, h_v = np.append(h_m, 1.0), np.append(h_v, 0.0)
            n = len(h_m)
            a_m, a_v = M @ h_m / np.sqrt(n), (V @ (h_v + h_m**2) + (M * M) @ h_v) / n
        return a_m[0], a_v[0]

    @staticmethod
    def log_normal(y, m, v):
        return -0.5 * np.log(2 * np.pi * v) - (y - m) ** 2 / (2 * v)

    def gradients(self, x, y):
        """d log Z / dm and dv of every weight: the imaginary part of log Z at m + ih, divided by h."""
        h, noise = 1e-30, self.b / (self.a - 1)

        slopes = ([np.zeros(w.shape) for w in self.m], [np.zeros(w.shape) for w in self.m])
        for which in (0, 1):
            for layer, w in enumerate(self.m):
                for entry in np.ndindex(w.shape):
                    moments = [[w.astype(complex) for w in ws] for ws in (self.m, self.v)]
                    moments[which][layer][entry] += 1j * h
                    m, v = self.forward(*moments, x.astype(complex))
                    slopes[which][layer][entry] = self.log_normal(y, m, v + noise).imag / h
        return slopes

    @staticmethod
    def gamma(a, b, z, z1, z2):
        new_a = 1 / (np.exp(z + z2 - 2 * z1) * (a + 1) / a - 1)
        new_b = 1 / (np.exp(z2 - z1) * (a + 1) / b - np.exp(z1 - z) * a / b)
        return new_a, new_b

    def visit(self, x, y):
        a, b = self.a, self.b
        mo, vo = self.forward(self.m, self.v, x)
        for m, v, g_m, g_v in zip(self.m, self.v, *self.gradients(x, y), strict=True):
            new_m, new_v = m + v * g_m, v - v**2 * (g_m**2 - 2 * g_v)
            keep = (new_v <= 1e-100) | ~np.isfinite(new_v)
            m[:], v[:] = np.where(keep, m, new_m), np.where(keep, v, new_v)
        self.a, self.b = self.gamma(a, b, *(self.log_normal(y, mo, vo + b / k) for k in (a - 1, a, a + 1)))

    def refine_prior(self):
        for layer, matrix in enumerate(self.m):
            outputs, inputs = matrix.shape
            order = [(j, i) for j in range(outputs) for i in range(inputs - 1)] + [
                (j, inputs - 1) for j in range(outputs)
            ]
            for entry in order:
                self.refine(layer, entry)

    def refine(self, layer, e):
        m, v, mn, vn, an, bn = (
            s[layer] for s in (self.m, self.v, self.site_mean, self.site_precision, self.site_a, self.site_b)
        )
        vc = 1 / (1 / v[e] - vn[e])
        mc = vc * (m[e] / v[e] - mn[e])
        ac, bc = self.ap - an[e], self.bp + bn[e]
        if not (0 < vc < 1e6 and bc > 0 and ac > 1):
            return
        v0, v1, v2 = (vc + bc / k for k in (ac - 1, ac, ac + 1))
        z = [-0.5 * np.log(vi) - mc**2 / (2 * vi) for vi in (v0, v1, v2)]
        dm, dv = -mc / v0, -1 / (2 * v0) + mc**2 / (2 * v0**2)
        m[e], v[e] = mc + vc * dm, vc - vc**2 * (dm**2 - 2 * dv)
        self.ap, self.bp = self.gamma(ac, bc, *z)
        mn[e], vn[e] = m[e] / v[e] - mc / vc, 1 / v[e] - 1 / vc
        an[e], bn[e] = (self.ap - 1) - (ac - 1), -self.bp + bc


def matrices(net):
    """[weight | bias] of means and of variances."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    join = lambda w, b: torch.cat([w, b.unsqueeze(-1)], 1).detach().numpy()  # noqa: E731
    means = [join(layer.weight, layer.bias) for layer in layers]
    return means, [join(layer.weight_logvar.exp(), layer.bias_logvar.exp()) for layer in layers]


def assert_equal(pbp, net, reference):
    pbp.load()
    for ours, theirs in zip(matrices(net), (reference.m, reference.v), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8)
    gammas = [g.item() for g in (*pbp.belief.noise, *pbp.prior)]
    np.testing.assert_allclose(gammas, [reference.a, reference.b, reference.ap, reference.bp], rtol=1e-8)


def start(*sizes):
    """A filter, its network and the reference, all from the same means."""
    net = network(*sizes)
    pbp = vp.AssumedDensityFilter(net)
    pbp.load()
    return pbp, net, NumpyPBP(matrices(net)[0])


def after_a_pass(rows):
    """The same three after a pass over some rows, and the inputs of these."""
    x, y = regression(rows, 3)
    pbp, net, reference = start(3, 5, 1)
    pbp.update(torch.tensor(x), torch.tensor(y))
    for row, target in zip(x, y, strict=True):
        reference.visit(row, target[0])
    return pbp, net, reference, x


@pytest.mark.parametrize("sizes", [(3, 5, 1), (3, 4, 3, 1)])
def test_epochs_equal_the_numpy_implementation(sizes):
    x, y = regression(12, sizes[0])
    pbp, net, reference = start(*sizes)
    rng = np.random.default_rng(1)
    for _ in range(3):
        order = rng.permutation(len(x))
        for i in order:
            reference.visit(x[i], y[i, 0])
        pbp.update(torch.tensor(x[order]), torch.tensor(y[order]))
        reference.refine_prior()
        pbp.refresh()
        assert_equal(pbp, net, reference)


def test_a_weight_keeps_its_moments_where_the_update_gives_no_variance():
    pbp, net, reference = start(3, 5, 1)
    before = pbp.belief
    x, y = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64), torch.tensor([[50.0]], dtype=torch.float64)
    pbp.update(x, y)
    reference.visit(x.numpy()[0], y.item())
    assert_equal(pbp, net, reference)
    kept = pbp.belief.logvar == before.logvar
    assert kept.any()
    assert not kept.all()
    assert torch.equal(pbp.belief.mean[kept], before.mean[kept])


def test_the_refresh_leaves_out_a_weight_that_is_nothing_without_its_prior():
    pbp, net, reference, _ = after_a_pass(6)
    rest = np.array(
        [-0.1, 5e-7]
    )  # precisions without the prior's: one negative, one of a variance beyond 1e6
    reference.v[0][0, :2] = 1 / (5 / 6 + rest)
    logvar = pbp.belief.logvar.clone()
    logvar[0, :2] = torch.tensor(np.log(reference.v[0][0, :2]))
    before = pbp.belief = pbp.belief._replace(logvar=logvar)
    pbp.refresh()
    reference.refine_prior()
    assert_equal(pbp, net, reference)
    assert torch.equal(pbp.belief.logvar[0, :2], before.logvar[0, :2])
    assert (pbp.belief.mean[0, 3:8] != before.mean[0, 3:8]).all()


def test_a_target_that_is_not_a_number_leaves_the_weights_as_they_were():
    pbp, _, _ = start(3, 5, 1)
    before = pbp.belief
    pbp.update(torch.zeros(1, 3), torch.full((1, 1), math.nan))
    assert torch.equal(pbp.belief.mean, before.mean)
    assert torch.equal(pbp.belief.logvar, before.logvar)


def test_the_posterior_starts_at_random_means_and_the_prior_variance():
    mean, logvar, _ = vp.AssumedDensityFilter(network(99, 300, 1)).belief
    assert mean[0, : 100 * 300].std().item() == pytest.approx(0.1, rel=0.03)
    assert (logvar.exp() - 1.2).abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------- gamma beliefs


def gamma(shape, rate):
    return Gamma(torch.tensor(shape, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64))


def test_gamma_after_an_observation_has_the_golden_value():
    belief = gamma(6.0, 6.0)
    var = 0.2 + belief.variances
    shape, rate = belief.after(-0.5 * (var.log() + 1.3**2 / var))
    assert shape.item() == pytest.approx(6.3666901314, abs=5e-11)
    assert rate.item() == pytest.approx(6.5182089033, abs=5e-11)


def test_gamma_is_conjugate_when_the_evidence_is_exact():
    """With Student-t evidence for the residual r the update is (a + 1/2, b + r²/2)."""
    a, b, r = 3.5, 2.0, 0.7
    k = a + torch.arange(3, dtype=torch.float64)
    log_z = torch.lgamma(k + 0.5) - torch.lgamma(k) + k * math.log(b) - (k + 0.5) * math.log(b + r**2 / 2)
    shape, rate = gamma(a, b).after(log_z)
    assert shape.item() == pytest.approx(a + 0.5, rel=1e-12)
    assert rate.item() == pytest.approx(b + r**2 / 2, rel=1e-12)


# ---------------------------------------------------------------------------------------- one layer is Kalman


def linear_filter(inputs):
    return vp.AssumedDensityFilter(vp.variational(nn.Linear(inputs, 1, bias=False).double()))


def visits_with_known_noise(pbp, x, y):
    """Yield the moments after each visit, the noise reset to what it was."""
    noise = pbp.belief.noise
    for i in range(len(x)):
        pbp.update(x[i : i + 1], y[i : i + 1])
        pbp.belief = pbp.belief._replace(noise=noise)
        yield pbp.belief.mean[0], pbp.belief.logvar[0].exp()


def test_one_layer_on_single_inputs_is_bayesian_linear_regression():
    d, n = 4, 30
    rng = torch.Generator().manual_seed(0)
    x = torch.eye(d, dtype=torch.float64)[torch.randint(d, (n,), generator=rng)] * 1.7
    y = torch.randn(n, 1, generator=rng, dtype=torch.float64)
    pbp = linear_filter(d)
    m0, v0, noise = pbp.belief.mean[0], pbp.belief.logvar[0].exp(), pbp.belief.noise.variances[0, 0]
    *_, (mean, var) = visits_with_known_noise(pbp, x, y)
    features = x / math.sqrt(d)
    precision = torch.diag(1 / v0) + features.T @ features / noise
    exact = torch.linalg.solve(precision, m0 / v0 + features.T @ y.squeeze(-1) / noise)
    torch.testing.assert_close(mean, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(var, torch.linalg.inv(precision).diagonal(), rtol=1e-12, atol=1e-12)


def test_one_layer_is_a_kalman_filter_that_keeps_the_diagonal_and_never_widens():
    x, y = (torch.tensor(t) for t in regression(20, 3))
    pbp = linear_filter(3)
    mean, var, noise = pbp.belief.mean[0], pbp.belief.logvar[0].exp(), pbp.belief.noise.variances[0, 0]
    for (ours, our_var), row, target in zip(
        visits_with_known_noise(pbp, x, y), x / math.sqrt(3), y, strict=True
    ):
        gain = var * row / (row @ (var * row) + noise)
        mean, narrower = mean + gain * (target - row @ mean), var - gain * row * var
        torch.testing.assert_close(ours, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_var, narrower, rtol=1e-12, atol=1e-12)
        assert (our_var <= var).all()
        var = narrower


# ---------------------------------------------------------------------------- prediction, replicas, compiling


def test_prediction_is_the_moments_of_the_network_plus_the_expected_noise():
    pbp, _, reference, x = after_a_pass(10)
    p = pbp.predict(torch.tensor(x))
    mean, var = zip(*(reference.forward(reference.m, reference.v, row) for row in x), strict=True)
    np.testing.assert_allclose(p.mean[:, 0], mean, rtol=1e-8)
    np.testing.assert_allclose(p.epistemic[:, 0], var, rtol=1e-8)
    np.testing.assert_allclose(p.aleatoric[:, 0], np.full(10, reference.b / (reference.a - 1)), rtol=1e-8)


def test_a_replica_equals_the_network_filtered_alone():
    x = torch.randn(2, 8, 3, dtype=torch.float64)
    y = torch.randn(2, 8, 1, dtype=torch.float64)
    together = vp.AssumedDensityFilter(network(3, 5, 1), replicas=2)
    alone = [vp.AssumedDensityFilter(network(3, 5, 1)) for _ in range(2)]
    for r, pbp in enumerate(alone):
        pbp.belief = pbp.belief._replace(mean=together.belief.mean[r : r + 1])
        pbp.update(x[r], y[r])
        pbp.refresh()
    together.update(x, y)
    together.refresh()
    for r, pbp in enumerate(alone):
        ours, theirs = together.predict(x[r], replica=r), pbp.predict(x[r])
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(ours.var, theirs.var, rtol=1e-12, atol=0.0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # raised inside torch, while it imports its compiler
def test_compiled_visits_equal_plain_ones():
    x, y = (torch.tensor(t) for t in regression(6, 3))
    plain, compiled = (
        vp.AssumedDensityFilter(network(3, 5, 1), generator=torch.Generator().manual_seed(0), compile=c)
        for c in (False, True)
    )
    for pbp in (plain, compiled):
        pbp.update(x, y)
        pbp.refresh()
    for a, b in zip(compiled.belief[:2], plain.belief[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=0.0)


def test_fit_repeats_with_its_generator_and_learns():
    x, y = (torch.tensor(t) for t in regression(40, 1))
    fits = []
    for _ in range(2):
        pbp = vp.AssumedDensityFilter(network(1, 10, 1), generator=torch.Generator().manual_seed(0))
        before = pbp.predict(x).log_prob(y).mean()
        pbp.fit(x, y, epochs=3)
        fits.append(pbp.predict(x).log_prob(y).mean())
    assert fits[0] == fits[1]
    assert fits[0] > before


def test_the_network_holds_the_posterior_after_a_fit():
    x, y = (torch.tensor(t, dtype=torch.float32) for t in regression(5, 3))
    net = vp.variational(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), biases=True)
    pbp = vp.AssumedDensityFilter(net)
    pbp.fit(x, y, epochs=1)
    torch.testing.assert_close(
        net[0].weight_logvar.flatten().double(), pbp.belief.logvar[0, :12], rtol=1e-6, atol=0.0
    )
    assert pbp.predict(x).var.dtype == torch.float32


def test_a_convolution_divides_by_the_root_of_its_kernel_and_bias():
    conv = vp.variational(nn.Conv2d(2, 3, 3), biases=True)
    x = torch.randn(1, 2, 5, 5)
    scaled, plain = vp.METHODS["pbp"](conv, x), vp.DVI(conv, x)
    torch.testing.assert_close(scaled.mean, plain.mean / math.sqrt(19))
    torch.testing.assert_close(scaled.var, plain.var / 19)


# ----------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "options", [{}, {"biases": True, "posterior": "factored"}, {"biases": True, "posterior": "horseshoe"}]
)
def test_a_parameter_without_a_variance_of_its_own_is_refused(options):
    with pytest.raises(ValueError, match="must be a random weight"):
        vp.AssumedDensityFilter(vp.variational(nn.Linear(2, 1), **options))


@pytest.mark.parametrize(("replicas", "shape"), [(None, (7, 1)), (2, (2, 7, 1)), (3, (3, 8, 1))])
def test_data_that_do_not_fit_are_refused(replicas, shape):
    pbp = vp.AssumedDensityFilter(network(3, 2, 1), replicas=replicas)
    with pytest.raises(ValueError, match="give a target for each input"):
        pbp.update(torch.zeros((8, 3) if replicas is None else (2, 8, 3)), torch.zeros(shape))


def test_a_target_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match="target has shape"):
        vp.AssumedDensityFilter(network(3, 2, 1)).update(torch.zeros(8, 3), torch.zeros(8))


def test_a_network_without_random_weights_has_no_log_marginal():
    with pytest.raises(ValueError, match="without variance"):
        vp.LogMarginal(nn.Linear(2, 1), vp.PBP)(torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": (1.0, 6.0)}, "noise must be a shape above 1 and a positive rate, got 1.0 and 6.0"),
        ({"prior": (6.0, 0.0)}, "prior must be a shape above 1"),
        ({"replicas": 0}, "replicas must be positive"),
    ],
)
def test_options_that_are_no_distribution_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vp.AssumedDensityFilter(network(3, 2, 1), **options)
