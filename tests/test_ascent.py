"""V-ReLU-Net: its bound, written out here a second time in NumPy, never falls after a single update."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.datasets import load_digits
from torch import nn

import varprop as vp
from varprop.training.factors import Weights

LIKELIHOODS = {
    "numbers": vp.likelihoods.Normal,
    "classes": vp.likelihoods.Categorical,
    "labels": vp.likelihoods.MultiLabel,
}


def network(*sizes, bias=True):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair, bias=bias), nn.ReLU())]
    return vp.variational(nn.Sequential(*layers[:-1]).double(), init="he", biases=True)


def targets(kind, n, outputs):
    if kind == "numbers":
        return torch.randn(n, outputs).double()
    return torch.randint(outputs, (n,)) if kind == "classes" else torch.randint(2, (n, outputs)).double()


def problem(kind, seed, sizes=(3, 5, 4, 2), bias=True, n=9, **options):
    """An ascent with random precisions, and data."""
    torch.manual_seed(seed)
    choice = torch.rand(4).mul(4).sub(1).exp().tolist()
    names = ("sums", "units", "slope", "labels")
    ascent = vp.CoordinateAscent(
        network(*sizes, bias=bias),
        LIKELIHOODS[kind]().double(),
        rounds=2,
        **dict(zip(names, choice, strict=True)) | options,
    )
    return ascent, torch.randn(n, sizes[0]).double(), targets(kind, n, sizes[-1])


# --------------------------------------------------------------------------- the bound, written a second time


def log_normal(square, precision):
    """E log N(t | m, 1/precision), summed, from E(t - m)²."""
    return np.sum(0.5 * np.log(precision / (2 * np.pi)) - 0.5 * precision * square)


def array(t):
    return t.detach().numpy()


def with_bias(ascent, layer, h, cov):
    if ascent.layers[layer].bias is None:
        return h, cov
    return np.hstack([h, np.ones((len(h), 1))]), np.pad(cov, (0, 1))


def squared_errors(mean, mean_square, h, cov, w):
    """E(t - w'h)² of every row and unit, for independent t, w and h."""
    M, S = array(w.mean), np.linalg.inv(array(w.precision))
    errors = np.empty(mean.shape)
    for n, j in np.ndindex(*mean.shape):
        second = np.sum((np.outer(M[:, j], M[:, j]) + S) * (np.outer(h[n], h[n]) + cov))
        errors[n, j] = mean_square[n, j] - 2 * mean[n, j] * (M[:, j] @ h[n]) + second
    return errors


def divergence(q, p):
    """KL(q || p) of the weights of all units of a layer."""
    S, P = np.linalg.inv(array(q.precision)), array(p.precision)
    d, units = q.mean.shape
    gap = array(q.mean) - array(p.mean)
    log_det = np.linalg.slogdet(array(q.precision))[1] - np.linalg.slogdet(P)[1]
    return 0.5 * (units * (np.trace(P @ S) - d + log_det) + np.sum(gap * (P @ gap)))


def gate_bound(q, slope):
    """E log p(z | f) with Jaakkola and Jordan's bound of the logistic function, at its best xi."""
    square = array(q.f) ** 2 + array(q.f_var)
    xi = slope * np.sqrt(square)
    lam = np.tanh(xi / 2) / (4 * xi)
    log_sigmoid = -np.log1p(np.exp(-xi))
    linear = slope * array(q.f) * (array(q.z) - 0.5)
    return np.sum(linear + log_sigmoid - xi / 2 - lam * (slope**2 * square - xi**2))


def entropies(q):
    z = np.clip(array(q.z), 1e-300, 1)
    closed = np.clip(1 - array(q.z), 1e-300, 1)
    of_gates = -np.sum(z * np.log(z) + closed * np.log(closed))
    of_sums = 0.5 * np.sum(np.log(2 * np.pi * np.e * array(q.f_var)))
    rows, size = q.h.shape
    of_units = 0.5 * rows * (size * np.log(2 * np.pi * np.e) + np.linalg.slogdet(array(q.cov))[1])
    return of_gates + of_sums + of_units


def output_bound(ascent, batch, h, cov):
    w, y = ascent.weights[-1], batch.y.numpy()
    if isinstance(ascent.likelihood, vp.likelihoods.MultiLabel):
        location = array(batch.location)
        positive = y > 0
        lower, upper = np.where(positive, -location, -np.inf), np.where(positive, np.inf, -location)
        q = scipy.stats.truncnorm(lower, upper, loc=location)
        square = squared_errors(q.mean(), q.var() + q.mean() ** 2, h, cov, w)
        log_mass = scipy.stats.norm.logcdf(np.where(positive, location, -location))
        own = log_normal(q.var() + (q.mean() - location) ** 2, 1.0) - np.sum(log_mass)  # E log q
        return log_normal(square, 1.0) - own
    if isinstance(ascent.likelihood, vp.likelihoods.Categorical):
        y, precision = 2.0 * np.eye(w.mean.shape[1])[y] - 1, ascent.output.precision
    else:
        precision = ascent.likelihood.precision.item()
    return log_normal(squared_errors(y, y**2, h, cov, w), precision)


def bound(ascent, priors, batch):
    total = -sum(divergence(q, p) for q, p in zip(ascent.weights, priors, strict=True))
    h, cov = batch.x.numpy(), np.zeros((batch.x.shape[1],) * 2)
    for layer, q in enumerate(batch.units):
        f, z, mean_square = array(q.f), array(q.z), array(q.f) ** 2 + array(q.f_var)
        inputs = with_bias(ascent, layer, h, cov)
        total += log_normal(squared_errors(f, mean_square, *inputs, ascent.weights[layer]), ascent.sums)
        total += gate_bound(q, ascent.slope) + entropies(q)
        h, cov = array(q.h), array(q.cov)
        total += log_normal(h**2 + np.diag(cov) - 2 * h * z * f + z * mean_square, ascent.units)
    return total + output_bound(ascent, batch, *with_bias(ascent, len(batch.units), h, cov))


# --------------------------------------------------------------------------------------------- coordinates


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_bound_never_falls(kind, bias, seed):
    ascent, x, y = problem(kind, seed, bias=bias)
    values = [bound(ascent, ascent.priors, batch) for batch in ascent.ascend(x, y, sweeps=3)]
    assert len(values) > 45
    rises = np.diff(values)
    assert rises.min() > -1e-9 * np.abs(values).max()
    assert np.sum(rises > 1e-6) > 20  # every factor has moved


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_bound_never_falls_with_the_last_posterior_as_prior(kind):
    ascent, x, y = problem(kind, 5, sizes=(3, 6, 2))
    ascent.update(x, y)
    priors = list(ascent.weights)
    if kind == "numbers":
        ascent.output.fit = lambda variance: None  # the noise of both batches is not the optimum of one
    _, x, y = problem(kind, 6, sizes=(3, 6, 2))
    values = [bound(ascent, priors, batch) for batch in ascent.ascend(x, y, sweeps=2)]
    assert np.diff(values).min() > -1e-9 * np.abs(values).max()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_each_update_is_the_optimum_of_its_factor(kind):
    """Every small change of a factor that was just updated lowers the bound."""
    ascent, x, y = problem(kind, 1)
    random = torch.Generator().manual_seed(0)
    layers = len(ascent.layers)
    seen = set()
    previous = None
    for batch in ascent.ascend(x, y, sweeps=2):
        state = [*((q.h, q.z) for q in batch.units)], list(ascent.weights)
        if previous is not None:
            best = bound(ascent, ascent.priors, batch)
            for layer in range(layers):
                if ascent.weights[layer] is not previous[1][layer]:
                    seen.add(("w", layer))
                    for changed in _neighbours_of(ascent.weights[layer], random):
                        kept, ascent.weights[layer] = ascent.weights[layer], changed
                        assert bound(ascent, ascent.priors, batch) < best
                        ascent.weights[layer] = kept
            for layer, q in enumerate(batch.units):
                for name, k in (("h", 0), ("z", 1)):
                    if state[0][layer][k] is not previous[0][layer][k]:
                        seen.add((name, layer))
                        kept = getattr(q, name)
                        for sign in (1, -1):
                            step = sign * 1e-3 * torch.randn(kept.shape, generator=random).double()
                            step = step * (kept * (1 - kept)).clamp(min=0) if name == "z" else step
                            setattr(q, name, kept + step)
                            assert bound(ascent, ascent.priors, batch) < best + 1e-12 * abs(best)
                        setattr(q, name, kept)
                        if name == "h":
                            kept = q.cov
                            for factor in (0.99, 1.01):
                                q.cov = factor * kept
                                assert bound(ascent, ascent.priors, batch) < best
                            q.cov = kept
        previous = state
    assert seen == {("w", k) for k in range(layers)} | {(n, k) for n in "hz" for k in range(layers - 1)}


def _neighbours_of(q, random):
    for sign in (1, -1):
        step = sign * 1e-3 * torch.randn(q.mean.shape, generator=random).double()
        yield replace(q, mean=q.mean + step)
        yield Weights(q.mean, q.precision * (1 + 1e-3 * sign))


# --------------------------------------------------------------------------------------------- streams


def test_a_linear_model_in_parts_is_bayesian_linear_regression():
    torch.manual_seed(0)
    x, y = torch.randn(60, 3).double(), torch.randint(2, (60,))
    ascent = vp.CoordinateAscent(network(3, 2), vp.likelihoods.Categorical(), labels=7.0, gain=0.5)
    for rows in torch.arange(60).split(25):
        ascent.update(x[rows], y[rows])
    H, codes = np.hstack([x.numpy(), np.ones((60, 1))]), 2 * np.eye(2)[y.numpy()] - 1
    precision = 4 / 0.5 * np.eye(4) + 7 * H.T @ H
    np.testing.assert_allclose(ascent.weights[0].precision, precision, rtol=1e-9)
    np.testing.assert_allclose(ascent.weights[0].mean, np.linalg.solve(precision, 7 * H.T @ codes), rtol=1e-9)
    np.testing.assert_allclose(ascent.net[0].weight_logvar[0].detach().exp(), 1 / np.diag(precision)[:3])


def test_a_window_forgets_exponentially_and_keeps_the_prior():
    torch.manual_seed(0)
    x, y = torch.randn(10, 3).double(), torch.randint(2, (10,))
    ascent = vp.CoordinateAscent(network(3, 2), vp.likelihoods.Categorical(), labels=7.0, output_window=20.0)
    for _ in range(100):
        ascent.update(x, y)
    H = np.hstack([x.numpy(), np.ones((10, 1))])
    limit = 4 * np.eye(4) + 7 * H.T @ H / (1 - np.exp(-0.5))
    np.testing.assert_allclose(ascent.weights[0].precision, limit, rtol=1e-9)


@pytest.mark.parametrize("where", ["x", "y", "shape", "width", "within"])
def test_a_batch_that_is_refused_changes_nothing(where, monkeypatch):
    ascent, x, y = problem("numbers", 0)
    ascent.update(x, y)
    weights, variance, noise = list(ascent.weights), ascent.variance, ascent.likelihood.precision.clone()
    state = {name: value.clone() for name, value in ascent.net.state_dict().items()}
    bad_x, bad_y = x.clone(), y.clone()
    if where == "x":
        bad_x[2, 1] = float("nan")
    elif where == "y":
        bad_y[2, 1] = float("inf")
    elif where == "within":

        def broken(matrix):
            raise torch.linalg.LinAlgError("not positive definite")

        monkeypatch.setattr("varprop.training.ascent._inverse", broken)
    with pytest.raises((ValueError, RuntimeError)):
        ascent.update(
            bad_x[:, :2] if where == "width" else bad_x, bad_y[:, :1] if where == "shape" else bad_y
        )
    assert all(a is b for a, b in zip(ascent.weights, weights, strict=True))
    assert (ascent.variance, ascent.likelihood.precision) == (variance, noise)
    assert all(torch.equal(value, state[name]) for name, value in ascent.net.state_dict().items())


def test_the_noise_is_the_error_of_the_outputs():
    ascent, x, y = problem("numbers", 2, sizes=(3, 2))
    ascent.fit(x, y, sweeps=200)
    w = ascent.weights[0]
    square = squared_errors(y.numpy(), y.numpy() ** 2, *with_bias(ascent, 0, x.numpy(), np.zeros((3, 3))), w)
    assert 1 / ascent.likelihood.precision.item() == pytest.approx(square.mean(), rel=1e-6)


# --------------------------------------------------------------------------------------------- predictions


def test_the_moments_are_those_of_the_model():
    """Weights are drawn from q, sums and activations with their noise, gates independently of their sums."""
    torch.manual_seed(0)
    ascent = vp.CoordinateAscent(network(3, 4, 2), vp.likelihoods.Normal().double(), slope=3.0, sums=20.0)
    ascent.update(torch.randn(30, 3).double(), torch.randn(30, 2).double())
    x, n = torch.randn(5, 3).double(), 200_000
    f = ascent.moments(x)
    first, last = ascent.weights

    def sums(q, inputs):
        inputs = torch.cat([inputs, torch.ones(*inputs.shape[:-1], 1).double()], -1)
        noise = torch.linalg.cholesky(torch.linalg.inv(q.precision)) @ torch.randn(n, *q.mean.shape).double()
        return (inputs.unsqueeze(-2) @ (q.mean + noise)).squeeze(-2)

    for row in range(5):
        a = sums(first, x[row].expand(n, 3))
        a = a + torch.randn(a.shape).double() / 20**0.5
        mean = torch.cat([x[row], torch.ones(1).double()]) @ first.mean
        z = torch.bernoulli(torch.sigmoid(3 * mean).expand_as(a))
        out = sums(last, z * a + torch.randn(a.shape).double() / 10)
        centred = out - out.mean(0)
        kurtosis = centred.pow(4).mean(0) / out.var(0).square()
        assert ((f.mean[row] - out.mean(0)).abs() < 5 * (out.var(0) / n).sqrt()).all()
        assert ((f.var[row] - out.var(0)).abs() < 5 * out.var(0) * ((kurtosis - 1) / n).sqrt()).all()


def test_class_probabilities_are_bayes_rule_among_the_codes():
    ascent, x, y = problem("classes", 0, sizes=(3, 4, 3))
    ascent.update(x, y)
    variance = ascent.variance.item()
    f = ascent.moments(x)
    p = ascent.output.predictive(f.mean, ascent.variance).probs
    codes = 2 * np.eye(3) - 1
    density = np.exp(-((f.mean.numpy()[:, None] - codes) ** 2).sum(-1) / (2 * variance))
    np.testing.assert_allclose(p, density / density.sum(1, keepdims=True), rtol=1e-6)
    assert ascent.predict(x).log_prob(y).isfinite().all()


def test_labels_are_predicted_by_their_margins():
    ascent, x, y = problem("labels", 0)
    ascent.update(x, y)
    f = ascent.moments(x)
    np.testing.assert_allclose(
        ascent.predict(x).probs, scipy.stats.norm.cdf((f.mean / (1 + f.var).sqrt()).numpy()), rtol=1e-6
    )


def test_the_network_holds_the_posterior():
    ascent, x, y = problem("numbers", 3)
    ascent.update(x, y)
    f = vp.METHODS["vrelu"](ascent.net, x)
    h = x
    for q in ascent.weights[:-1]:
        h = (h @ q.mean[:-1] + q.mean[-1]).relu()
    torch.testing.assert_close(f.mean, h @ ascent.weights[-1].mean[:-1] + ascent.weights[-1].mean[-1])
    assert (f.var > 0).all()


def test_it_learns_a_function_in_one_pass():
    torch.manual_seed(0)
    x = torch.rand(2000, 1).double() * 4 - 2
    y = x.abs() + 0.1 * torch.randn_like(x)
    ascent = vp.CoordinateAscent(network(1, 30, 1), vp.likelihoods.Normal().double())
    for rows in torch.arange(2000).split(100):
        ascent.update(x[rows], y[rows])
    p = ascent.predict(x)
    assert (p.mean - x.abs()).square().mean().sqrt() < 0.1
    low, high = p.interval(0.9)
    assert 0.8 < ((low < y) & (y < high)).double().mean() <= 1


def test_it_fits_small_data_in_many_sweeps():
    torch.manual_seed(0)
    x = torch.rand(200, 1).double() * 4 - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
    error = {}
    for sweeps in (1, 300):
        torch.manual_seed(1)
        likelihood = vp.likelihoods.Normal().double()
        ascent = vp.CoordinateAscent(network(1, 30, 1), likelihood, sums=100.0, units=10_000.0)
        ascent.fit(x, y, sweeps)
        error[sweeps] = (ascent.predict(x).mean - torch.sin(2 * x)).square().mean().sqrt()
    assert error[300] < 0.15
    assert error[1] > 0.5  # of the features as they were drawn


def test_its_hidden_layer_learns():
    """On digits in one pass: better than the same output on the features of the first layer as drawn."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = (x.double() - x.mean()) / x.std()
    right = {}
    for name, sums in {"learning": 10.0, "idle": 1e9}.items():
        torch.manual_seed(0)
        ascent = vp.CoordinateAscent(
            network(64, 30, 10), vp.likelihoods.Categorical(), sums=sums, window=500.0, output_window=1000.0
        )
        first = ascent.weights[0].mean.clone()
        for rows in torch.randperm(1200).split(50):
            ascent.update(x[rows], y[rows])
        moved = (ascent.weights[0].mean - first).norm() / first.norm()
        assert moved > 0.1 if name == "learning" else moved < 1e-3
        right[name] = (ascent.predict(x[1200:]).probs.argmax(1) == y[1200:]).double().mean().item()
    assert right["learning"] > right["idle"] + 0.02


# --------------------------------------------------------------------------------------------- mistakes


def test_other_networks_are_refused():
    normal = vp.likelihoods.Normal()

    def made(*layers):
        return vp.variational(nn.Sequential(*layers), biases=True)

    with pytest.raises(ValueError, match="layer 1 is Tanh"):
        vp.CoordinateAscent(made(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), normal)
    with pytest.raises(ValueError, match="must end with a Linear layer"):
        vp.CoordinateAscent(made(nn.Linear(2, 3), nn.ReLU()), normal)
    with pytest.raises(ValueError, match="has no variance"):
        vp.CoordinateAscent(vp.variational(nn.Sequential(nn.Linear(2, 3))), normal)
    with pytest.raises(ValueError, match="likelihood must be"):
        vp.CoordinateAscent(made(nn.Linear(2, 2)), vp.likelihoods.HeteroscedasticNormal())
    vp.CoordinateAscent(
        made(nn.Flatten(), nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1)), normal
    )


@pytest.mark.parametrize(
    "option", [{"sums": 0.0}, {"units": -1.0}, {"window": 0.0}, {"rounds": 0}, {"slope": float("inf")}]
)
def test_bad_options_are_named(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        vp.CoordinateAscent(network(2, 3, 1), vp.likelihoods.Normal(), **option)
    with pytest.raises(ValueError, match="sweeps must be positive"):
        vp.CoordinateAscent(network(2, 1), vp.likelihoods.Normal()).fit(
            torch.ones(2, 2), torch.ones(2, 1), sweeps=0
        )
