"""CVBP: the plain network's means, and the mean squared deviation of the true activations from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varprop as vp
from varprop import moments as fn

ACTIVATIONS = [
    nn.ReLU(),
    nn.LeakyReLU(0.2),
    nn.PReLU(3),
    nn.ReLU6(),
    nn.Hardtanh(),
    nn.Hardsigmoid(),
    nn.Softshrink(),
]
by_type = {"ids": lambda module: type(module).__name__}


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> vp.Gaussian:
    torch.manual_seed(3)
    return vp.Gaussian(0.7 * torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype) + 0.4)


@pytest.mark.parametrize("module", [*ACTIVATIONS, nn.MaxPool1d(2)], **by_type)
def test_the_variance_is_the_squared_deviation_from_the_plain_value(module):
    module, x = module.double(), normal((4, 3, 6))
    out = vp.CVBP(module, x)
    plain = module(x.mean)
    deviations = (
        (module(x.sample((50_000,)).flatten(0, 1)).unflatten(0, (50_000, -1)) - plain).square().detach()
    )
    torch.testing.assert_close(out.mean, plain)
    error = deviations.std(0) / 50_000**0.5
    assert ((out.var - deviations.mean(0)).abs() <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("module", [*ACTIVATIONS, nn.MaxPool1d(2)], **by_type)
def test_without_variance_it_is_the_plain_layer(module):
    module, x = module.double(), normal((4, 3, 6))
    out = vp.CVBP(module, vp.Gaussian(x.mean, torch.zeros_like(x.var)))
    torch.testing.assert_close(out.mean, module(x.mean))
    assert (out.var == 0).all()


def test_the_short_form_for_relu_equals_the_general_one():
    x = normal((500,))
    torch.testing.assert_close(fn.anchored(x).var, fn.anchor(x.mean.relu(), fn.rectify(x)).var)


def test_extremes_are_finite_in_value_and_gradient():
    m = torch.tensor([0.0, -1e3, 1e3, -1e-20, 5.0, -30.0]).repeat_interleave(4).requires_grad_()
    v = torch.tensor([0.0, 1e-30, 1.0, 1e6]).repeat(6).requires_grad_()
    out = fn.anchored(vp.Gaussian.of(m, v))
    (out.mean.sum() + out.var.sum()).backward()
    assert all(t.isfinite().all() for t in (out.mean, out.var, m.grad, v.grad))
    assert (out.var >= 0).all()


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Hardtanh()], **by_type)
def test_gradients(module):
    x = normal((10,))

    def moments(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = vp.CVBP(module, vp.Gaussian.of(m, v))
        return out.mean, out.var

    assert torch.autograd.gradcheck(moments, (x.mean.requires_grad_(), x.var.requires_grad_()))


def test_the_derivatives_of_the_tail():
    x = normal((6,))

    def tail(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r = fn.tail(vp.Gaussian.of(m, v))
        return r.mean, r.second_moment, r.probability

    arguments = x.mean.requires_grad_(), x.var.requires_grad_()
    assert torch.autograd.gradcheck(tail, arguments)


def test_compiled_objective_and_gradients_equal_eager():
    torch.manual_seed(0)
    net = vp.variational(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    )
    elbo = vp.ELBO(net, vp.CVBP, vp.likelihoods.Categorical(), vp.priors.Normal(), n_data=10, kl_z_weight=0.1)
    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    eager = elbo(x, y)
    expected = torch.autograd.grad(eager, list(elbo.parameters()))
    compiled = torch.compile(elbo, fullgraph=True, backend="aot_eager")(x, y)
    torch.testing.assert_close(compiled, eager)
    for got, wanted in zip(torch.autograd.grad(compiled, list(elbo.parameters())), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_means_are_those_of_the_plain_network_at_any_depth():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(5, 3)
    plain = net(x)
    assert torch.equal(vp.CVBP(vp.variational(net, logvar=-2.0), x).mean, plain)


def test_a_model_of_cvbp_is_saved_and_loaded(tmp_path):
    net = vp.variational(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    elbo = vp.ELBO(net, vp.CVBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=10)
    vp.save(elbo, tmp_path / "model")
    loaded = vp.load(tmp_path / "model")
    x = torch.randn(2, 3)
    assert loaded.method is vp.CVBP
    assert torch.equal(loaded.predict(x).var, elbo.predict(x).var)
