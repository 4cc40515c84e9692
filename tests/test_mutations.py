"""A test of the tests: a rule with a plausible mistake must fail the check that the right rule passes."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop.gaussian import Activation, Gaussian

from .sampling import agrees, difference, draws

pytestmark = pytest.mark.usefixtures("float64")

LinearRule = Callable[[Gaussian, Gaussian, Gaussian], Gaussian]


def layer() -> tuple[nn.Linear, Gaussian]:
    torch.manual_seed(0)
    linear = vp.variational(nn.Linear(4, 3), logvar=-1.0, biases=True)
    nn.init.normal_(linear.bias)
    return linear, Gaussian(torch.randn(2, 4), torch.rand(2, 4) + 0.2)


def apply(formula: LinearRule, method: vp.Method, module: nn.Linear, x: Activation) -> Gaussian:
    w = Gaussian(module.weight.detach(), module.weight_logvar.detach().exp())
    b = Gaussian(module.bias.detach(), module.bias_logvar.detach().exp())
    return formula(x, w, b)


def right(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    var = F.linear(x.var, w.mean**2) + F.linear(x.mean**2 + x.var, w.var) + b.var
    return Gaussian(F.linear(x.mean, w.mean, b.mean), var)


def cross_term_dropped(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    return Gaussian(
        F.linear(x.mean, w.mean, b.mean), F.linear(x.var, w.mean**2) + F.linear(x.mean**2, w.var) + b.var
    )


def weight_variance_dropped(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    return Gaussian(F.linear(x.mean, w.mean, b.mean), F.linear(x.var, w.mean**2) + b.var)


def absolute_weight_for_its_square(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    return Gaussian(
        F.linear(x.mean, w.mean, b.mean),
        F.linear(x.var, w.mean.abs()) + F.linear(x.mean**2 + x.var, w.var) + b.var,
    )


def mean_bias_in_the_variance(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    out = right(x, w, b)
    return Gaussian(out.mean, out.var + b.mean.abs())


def bias_variance_dropped(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    out = right(x, w, b)
    return Gaussian(out.mean, out.var - b.var)


def bias_dropped_from_the_mean(x: Gaussian, w: Gaussian, b: Gaussian) -> Gaussian:
    out = right(x, w, b)
    return Gaussian(out.mean - b.mean, out.var)


WRONG_LINEAR = [
    cross_term_dropped,
    weight_variance_dropped,
    absolute_weight_for_its_square,
    mean_bias_in_the_variance,
    bias_variance_dropped,
    bias_dropped_from_the_mean,
]


def test_the_right_linear_rule_passes():
    linear, x = layer()
    assert agrees(vp.VBP, linear, x)
    assert agrees(vp.VBP | {nn.Linear: partial(apply, right)}, linear, x)


@pytest.mark.parametrize("formula", WRONG_LINEAR, ids=lambda f: f.__name__)
def test_a_wrong_linear_rule_fails(formula):
    linear, x = layer()
    assert not agrees(vp.VBP | {nn.Linear: partial(apply, formula)}, linear, x)


def test_a_dropped_variance_fails():
    linear, x = layer()
    wrong = vp.VBP | {
        nn.Linear: lambda method, module, x: F.linear(x.mean, module.weight, module.bias).detach()
    }
    assert not agrees(wrong, linear, x)


@pytest.mark.parametrize("square", [lambda x: x.mean**2, lambda x: x.var], ids=["E[x]²", "Var[x]"])
def test_a_wrong_second_moment_fails(square, monkeypatch):
    linear, x = layer()
    assert agrees(vp.VBP, linear, x)
    monkeypatch.setattr("varprop.moments.linear.second_moment_of", square)
    assert not agrees(vp.VBP, linear, x)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_with_a_mirrored_variance_fails(kind):
    torch.manual_seed(0)
    conv = vp.variational(kind(2, 2, 3, padding=1), logvar=-1.0)
    x = Gaussian(torch.randn(1, 2, 4, 4), torch.rand(1, 2, 4, 4) + 0.2)
    assert agrees(vp.VBP, conv, x)
    flipped = vp.VBP | {
        kind: lambda method, module, x: Gaussian(
            (f := vp.VBP(module, x)).mean.detach(), f.var.detach().flip(-1)
        )
    }
    assert not agrees(flipped, conv, x)


# ------------------------------------------------------------------------------------------------ activations


def relu_input() -> Gaussian:
    return Gaussian(torch.tensor([-1.0, -0.3, 0.2, 0.8]), torch.tensor([0.8, 0.5, 0.7, 0.4]))


def rectified(x: Gaussian, shift: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Gaussian:
    s = x.var.sqrt()
    t = x.mean / s
    cdf, pdf = torch.special.ndtr(t), torch.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    return Gaussian(s * (pdf + t * cdf), x.var * shift(t, cdf, pdf + t * cdf))


def test_wrong_moments_of_a_rectified_normal_fail():
    x = relu_input()

    def method(shift):
        return vp.DVI | {nn.ReLU: lambda method, module, x: rectified(x, shift)}

    assert agrees(vp.DVI, nn.ReLU(), x)
    assert agrees(method(lambda t, cdf, sr: cdf + t * sr - sr**2), nn.ReLU(), x)
    assert not agrees(method(lambda t, cdf, sr: cdf + t * sr), nn.ReLU(), x)
    assert not agrees(method(lambda t, cdf, sr: cdf), nn.ReLU(), x)
    assert not agrees(vp.VBP, nn.ReLU(), x)


def gated(
    x: Gaussian, slope: float, factor: Callable[[Tensor], Tensor], spread: Callable[[Tensor], Tensor]
) -> Gaussian:
    p = torch.sigmoid(slope * x.mean)
    return Gaussian(p * x.mean, factor(p) * x.var + spread(p) * x.mean**2)


@pytest.mark.parametrize(
    ("factor", "spread"),
    [
        (lambda p: p**2, lambda p: p * (1 - p)),
        (lambda p: p, lambda p: 0 * p),
        (lambda p: p, lambda p: p),
        (lambda p: (p > 0.5).to(p), lambda p: p * (1 - p)),
    ],
    ids=["p² for p", "no variance of the gate", "p for p(1-p)", "step for p"],
)
def test_a_wrong_gate_fails_against_independent_gates(factor, spread):
    slope, x = 2.0, relu_input()
    f = draws(nn.Identity(), x, 50_000)
    z = torch.bernoulli(
        torch.sigmoid(slope * x.mean).expand_as(f), generator=torch.Generator().manual_seed(1)
    )
    assert not difference(vp.vbp(slope)(nn.ReLU(), x), z * f)
    assert not difference(gated(x, slope, lambda p: p, lambda p: p * (1 - p)), z * f)
    assert difference(gated(x, slope, factor, spread), z * f)


def test_a_wrong_slope_fails_against_independent_gates():
    x = relu_input()
    f = draws(nn.Identity(), x, 50_000)
    z = torch.bernoulli(torch.sigmoid(2 * x.mean).expand_as(f), generator=torch.Generator().manual_seed(1))
    assert difference(vp.vbp(2.2)(nn.ReLU(), x), z * f)


# ------------------------------------------------------------------------------------------- the check itself


def test_the_check_detects_a_small_error_of_mean_or_variance():
    linear, x = layer()
    f, samples = vp.VBP(linear, x).detach(), draws(linear, x, 20_000)
    assert not difference(f, samples)
    assert difference(Gaussian(f.mean, f.var * 1.1), samples)
    assert difference(Gaussian(f.mean + 0.07 * f.std, f.var), samples)
    assert difference(Gaussian(f.mean * math.nan, f.var), samples)
    assert "shape" in difference(f.map(lambda t: t[:1]), samples)


def test_the_check_is_exact_without_randomness():
    x = torch.randn(3)
    assert agrees(vp.VBP, nn.ReLU(), x, samples=10)
    assert not agrees(vp.VBP | {nn.ReLU: lambda method, module, x: x.relu() + 1e-9}, nn.ReLU(), x, samples=10)
