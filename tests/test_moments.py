"""Closed-form moments against quadrature and Monte Carlo, without any layer."""

from __future__ import annotations

import math
import pkgutil
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.nn import functional as F

from varprop import Gaussian, moments

GRID = [(m, v) for m in (-3.0, -0.7, 0.0, 0.2, 2.5) for v in (0.05, 0.6, 4.0)]
PIECEWISE = {
    "relu": moments.RELU,
    "leaky": moments.Piecewise((0.0,), (0.2, 1.0)),
    "absolute value": moments.Piecewise((0.0,), (-1.0, 1.0)),
    "relu6": moments.Piecewise((0.0, 6.0), (0.0, 1.0, 0.0)),
    "hardtanh": moments.Piecewise((-1.0, 1.0), (0.0, 1.0, 0.0), -1.0),
    "softshrink": moments.Piecewise((-0.5, 0.5), (1.0, 0.0, 1.0)),
    "four pieces": moments.Piecewise((-1.0, 0.3, 1.5), (0.5, -1.0, 2.0, 0.1), 0.7),
}


def test_no_function_shares_its_name_with_a_module() -> None:
    modules = [module.name for module in pkgutil.iter_modules(moments.__path__)]
    assert "piecewise" in modules
    assert all(isinstance(getattr(moments, name, ModuleType(name)), ModuleType) for name in modules)
    assert not {*modules} & {*moments.__all__}


def gaussian(m: float, v: float, dtype: torch.dtype = torch.float64) -> Gaussian:
    return Gaussian(torch.tensor(m, dtype=dtype), torch.tensor(v, dtype=dtype))


def integral(g, m: float, v: float, knots: tuple[float, ...] = ()) -> float:
    """E[g(x)] by adaptive quadrature between the knots."""
    s = math.sqrt(v)
    ends = [m - 12 * s, *sorted(k for k in knots if abs(k - m) < 12 * s), m + 12 * s]
    return sum(
        integrate.quad(lambda x: g(x) * stats.norm.pdf(x, m, s), a, b, epsabs=1e-13)[0]
        for a, b in pairwise(ends)
    )


@pytest.mark.parametrize("name", PIECEWISE)
@pytest.mark.parametrize(("m", "v"), GRID)
def test_piecewise_linear_moments_are_exact(name: str, m: float, v: float) -> None:
    pieces = PIECEWISE[name]

    def h(x: float) -> float:
        return pieces(torch.tensor(x, dtype=torch.float64)).item()

    mean = integral(h, m, v, pieces.knots)
    var = integral(lambda x: (h(x) - mean) ** 2, m, v, pieces.knots)
    out = moments.rectify(gaussian(m, v), pieces)
    assert out.mean.item() == pytest.approx(mean, abs=1e-9)
    assert out.var.item() == pytest.approx(var, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("t", [-9.0, -6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0, 12.0])
@pytest.mark.parametrize("s", [1e-3, 1.0, 1e3])
def test_rectified_normal_keeps_its_relative_precision_in_float32(t: float, s: float) -> None:
    """The textbook form is 39 times too large in the mean at t = -6, and negative in the variance."""
    exact = moments.rectify(gaussian(t * s, s * s))
    single = moments.rectify(gaussian(t * s, s * s, torch.float32))
    assert single.mean.item() == pytest.approx(exact.mean.item(), rel=2e-3, abs=1e-38)
    assert single.var.item() == pytest.approx(exact.var.item(), rel=0.15, abs=1e-38)


@pytest.mark.parametrize("moments_of", [moments.rectify, moments.anchored])
def test_far_tails_and_their_gradients_are_not_subnormal(moments_of: Callable[..., Gaussian]) -> None:
    """A processor is many times slower with them, and narrow posteriors have many units with far tails."""
    m, v = torch.linspace(-100, 100, 401, requires_grad=True), torch.full((401,), 1e-4, requires_grad=True)
    out = moments_of(Gaussian(m, v))
    gradients = torch.autograd.grad((out.mean + out.var).sum() * 1e-8, (m, v))
    for t in (out.mean, out.var, *gradients):
        assert not ((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).any()
    closed = m < -1
    assert (out.mean[closed] <= 1e-20).all()
    assert (out.var[closed] <= 1e-20).all()


def test_rectified_normal_tail_against_arbitrary_precision() -> None:
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 60
    for t in (-20, -8, -6, -2, 3, 8):
        phi, cdf = mp.npdf(t), mp.ncdf(t)
        mean = phi + t * cdf
        var = (1 + t * t) * cdf + t * phi - mean**2
        out = moments.rectify(gaussian(float(t), 1.0))
        assert out.mean.item() == pytest.approx(float(mean), rel=1e-9)
        assert out.var.item() == pytest.approx(float(var), rel=1e-6)


def test_rectify_has_the_right_gradient_at_zero_mean() -> None:
    m, v = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    moments.rectify(Gaussian.of(m, v)).mean.backward()
    assert m.grad.item() == pytest.approx(0.5)
    assert v.grad.item() == pytest.approx(0.5 / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("name", PIECEWISE)
def test_the_hard_gate_is_the_limit_of_the_soft_one(name: str) -> None:
    pieces = PIECEWISE[name]
    x = Gaussian(torch.linspace(-7.03, 7.01, 97).double(), torch.rand(97).double())
    hard, soft = moments.gate(x, math.inf, pieces), moments.gate(x, 1e5, pieces)
    torch.testing.assert_close(soft.mean, hard.mean, atol=1e-8, rtol=0)
    torch.testing.assert_close(soft.var, hard.var, atol=1e-8, rtol=0)
    torch.testing.assert_close(hard.mean, pieces(x.mean))


def test_gate_stays_within_the_stated_distance_of_relu() -> None:
    x = Gaussian(torch.linspace(-1, 1, 4001).double(), torch.zeros(4001).double())
    for slope in (10.0, 100.0):
        soft = moments.gate(x, slope)
        assert (soft.mean - F.relu(x.mean)).abs().max() <= 0.2785 / slope
        assert soft.var.max() <= 0.43923 / slope**2 * 1.0001


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0.3, 0.5), (-0.2, 1.1)),
        ((0.0, 1.0), (0.0, 1.0)),
        ((5.0, 0.1), (-5.0, 0.1)),
        ((1.0, 0.0), (0.9, 2.0)),
    ],
)
def test_maximum_of_two(a: tuple[float, float], b: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    n = 4_000_000
    samples = np.maximum(rng.normal(a[0], a[1] ** 0.5, n), rng.normal(b[0], b[1] ** 0.5, n))
    for one, two in ((a, b), (b, a)):
        out = moments.maximum(gaussian(*one), gaussian(*two))
        error = samples.std() / math.sqrt(n)
        assert abs(out.mean.item() - samples.mean()) < 5 * error + 1e-12
        fourth = ((samples - samples.mean()) ** 4).mean()
        assert abs(out.var.item() - samples.var()) < 5 * math.sqrt((fourth - samples.var() ** 2) / n) + 1e-12


def test_winner_takes_mean_and_variance_together() -> None:
    a, b = (
        Gaussian(torch.tensor([1.0, -1.0]), torch.tensor([4.0, 5.0])),
        Gaussian(torch.tensor([0.0, 0.0]), torch.tensor([6.0, 7.0])),
    )
    out = moments.winner(a, b)
    assert out.mean.tolist() == [1.0, 0.0]
    assert out.var.tolist() == [4.0, 7.0]


def test_product_against_sampling() -> None:
    a, b = gaussian(1.5, 0.4), gaussian(-0.7, 0.9)
    samples = a.sample((1_000_000,)) * b.sample((1_000_000,))
    out = moments.product(a, b)
    assert out.mean.item() == pytest.approx(samples.mean().item(), abs=0.01)
    assert out.var.item() == pytest.approx(samples.var().item(), rel=0.01)
    assert moments.product(a, b.mean).var.item() == pytest.approx(0.4 * 0.49)
    assert torch.equal(moments.product(a.mean, b.mean), a.mean * b.mean)


def test_affine_does_no_more_operations_than_it_needs() -> None:
    calls = []

    def op(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(None)
        return F.linear(x, w, b)

    x, w = Gaussian(torch.ones(2, 3), torch.ones(2, 3)), Gaussian(torch.ones(4, 3), torch.ones(4, 3))
    for arguments, count in {(x, w): 3, (x.mean, w): 2, (x, w.mean): 2, (x.mean, w.mean): 1}.items():
        calls.clear()
        moments.affine(op, *arguments)
        assert len(calls) == count


@pytest.mark.parametrize("g", [torch.tanh, torch.sigmoid, F.gelu, F.softplus, torch.sin])
@pytest.mark.parametrize(("m", "v"), [(0.0, 1.0), (-1.0, 0.3), (2.0, 2.0)])
def test_quadrature(g, m: float, v: float) -> None:
    def value(x: float) -> float:
        return g(torch.tensor(x, dtype=torch.float64)).item()

    mean = integral(value, m, v)
    var = integral(lambda x: (value(x) - mean) ** 2, m, v)
    out = moments.quadrature(g, gaussian(m, v))
    assert out.mean.item() == pytest.approx(mean, abs=1e-5)
    assert out.var.item() == pytest.approx(var, abs=5e-5)
    log = moments.log_expectation_exp(g, gaussian(m, v)).item()
    assert log == pytest.approx(math.log(integral(lambda x: math.exp(value(x)), m, v)), abs=1e-5)


@pytest.mark.parametrize("slope", [0.5, 3.0, 10.0, 100.0])
@pytest.mark.parametrize(("m", "s"), [(0.0, 1.0), (0.3, 0.3), (-0.5, 0.02), (2.0, 3.0), (0.0, 0.0)])
def test_gate_divergence(slope: float, m: float, s: float) -> None:
    def softplus(x: float) -> float:
        return float(np.logaddexp(0, slope * x))

    exact = integral(softplus, m, s * s, (0.0,)) - softplus(m) if s else 0.0
    assert moments.gate_kl(gaussian(m, s * s), slope).item() == pytest.approx(
        exact, abs=2e-6 * max(1, slope * s)
    )
    assert abs(moments.gate_kl(gaussian(m, s * s), slope, exact=False).item() - exact) <= math.log(2)


def test_gate_divergence_has_finite_gradients() -> None:
    for m, v in [(0.0, 0.0), (0.0, 1e-30), (1e3, 1e-30), (-1.0, 1e6)]:
        mean, var = torch.tensor(m, requires_grad=True), torch.tensor(v, requires_grad=True)
        for exact in (False, True):
            grads = torch.autograd.grad(moments.gate_kl(Gaussian.of(mean, var), 100.0, exact), (mean, var))
            assert all(torch.isfinite(g) for g in grads), (m, v, exact)


@pytest.mark.parametrize("relu", [moments.gate, moments.rectify, moments.anchored], ids=lambda f: f.__name__)
def test_gradients_of_relu_are_those_of_finite_differences(relu: Callable[[Gaussian], Gaussian]) -> None:
    def both(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = relu(Gaussian(m, v))
        return y.mean, y.var

    m, v = (
        torch.tensor(a, dtype=torch.float64, requires_grad=True)
        for a in ([-3.0, -0.4, 0.3, 2.0], [1.0, 0.5, 2.0, 0.7])
    )
    assert torch.autograd.gradcheck(both, (m, v))


@pytest.mark.parametrize("g", [torch.sigmoid, nn.GELU(), nn.Softplus(), nn.SiLU(inplace=True)])
def test_derivatives_of_smooth_functions_are_those_of_the_quadrature(g: Callable[[Tensor], Tensor]) -> None:
    def values(quadrature: bool) -> list[Tensor]:
        m = torch.linspace(-3, 3, 12, dtype=torch.float64).requires_grad_()
        v = torch.tensor([0.0, 1e-6, 0.5, 4.0] * 3, dtype=torch.float64).requires_grad_()
        x = Gaussian.of(m, v)
        y = moments.quadrature(g if quadrature else lambda t: g(t), x)  # of a lambda, autograd takes them
        loss = (y.mean * torch.arange(12)).sum() + y.var.square().sum()
        first = torch.autograd.grad(loss, (m, v), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (m, v))
        return [y.mean, y.var, *first, *second]

    for by_rule, by_autograd in zip(values(True), values(False), strict=True):
        torch.testing.assert_close(by_rule, by_autograd)


@pytest.mark.parametrize("g", [torch.sigmoid, nn.SiLU(inplace=True), lambda t: torch.exp(t)])
def test_large_tensors_have_the_same_quadrature(
    g: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def values() -> list[Tensor]:
        m = torch.linspace(-3, 3, 12, dtype=torch.float64).requires_grad_()
        v = torch.tensor([0.0, 1e-6, 0.5, 4.0] * 3, dtype=torch.float64).requires_grad_()
        y = moments.quadrature(g, Gaussian.of(m, v))
        gradients = torch.autograd.grad((y.mean * torch.arange(12)).sum() + y.var.square().sum(), (m, v))
        with torch.no_grad():
            return [y.mean, y.var, *gradients, moments.smooth_slope(g, Gaussian.of(m, v))]

    at_once = values()
    monkeypatch.setattr(sys.modules["varprop.moments.smooth"], "BLOCK", 0)
    torch.testing.assert_close(values(), at_once)


def test_parameters_of_a_smooth_function_have_gradients() -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    swish = Swish()
    moments.quadrature(swish, Gaussian(torch.ones(3), torch.ones(3))).mean.sum().backward()
    assert swish.beta.grad is not None
    assert swish.beta.grad != 0
