"""The methods against plain tensor formulas for two networks, and structural facts of the mathematics."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import varprop as vp

from .sampling import assert_agrees, difference, disagreement, draws, moments

pytestmark = pytest.mark.usefixtures("float64")

METHODS = {
    "VBP": vp.VBP,
    "VBP at slope 100": vp.vbp(slope=100.0),
    "VBP at slope 2": vp.vbp(slope=2.0),
    "DVI": vp.DVI,
}


def perturbed(net: nn.Module, logvar: float = -3.0, **options: object) -> nn.Module:
    """A random network with a different variance for every weight and nonzero biases."""
    torch.manual_seed(1)
    vp.variational(net, **options)
    for name, parameter in net.named_parameters():
        if name.endswith("logvar"):
            nn.init.normal_(parameter, logvar, 0.7)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.3)
    return net


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 15), nn.ReLU(), nn.Linear(15, 2))


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5, 2),
        nn.ReLU(),
        nn.Conv2d(20, 50, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


# ----------------------------------------------------------------------------------------- reference formulas


def reference_activation(m: Tensor, v: Tensor, method: vp.Method) -> tuple[Tensor, Tensor]:
    if method.name == "DVI":
        s = torch.sqrt(v)
        t = m / s
        cdf = 0.5 * torch.erfc(-t / math.sqrt(2))
        sr = torch.exp(-(t**2) / 2) / math.sqrt(2 * math.pi) + t * cdf
        return s * sr, v * (cdf + t * sr - sr**2)
    p = (m > 0).double() if method.slope == math.inf else 1 / (1 + torch.exp(-method.slope * m))
    return p * m, p * v + p * (1 - p) * m**2


def reference_linear(m: Tensor, v: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    M, S2 = layer.weight, torch.exp(layer.weight_logvar)
    return m @ M.T + layer.bias, v @ (M * M + S2).T + (m * m) @ S2.T


def reference_conv(m: Tensor, v: Tensor, layer: nn.Conv2d) -> tuple[Tensor, Tensor]:
    M, S2 = layer.weight, torch.exp(layer.weight_logvar)
    return F.conv2d(m, M, layer.bias, 2), F.conv2d(v, M * M + S2, None, 2) + F.conv2d(m * m, S2, None, 2)


def reference_mlp(net: nn.Sequential, x: Tensor, method: vp.Method) -> tuple[Tensor, Tensor]:
    m, v = reference_linear(x, torch.zeros_like(x), net[0])
    m, v = reference_activation(m, v, method)
    m, v = reference_linear(m, v, net[2])
    m, v = reference_activation(m, v, method)
    return reference_linear(m, v, net[4])


def reference_lenet(net: nn.Sequential, x: Tensor, method: vp.Method) -> tuple[Tensor, Tensor]:
    m, v = reference_conv(x, torch.zeros_like(x), net[0])
    m, v = reference_activation(m, v, method)
    m, v = reference_conv(m, v, net[2])
    m, v = reference_activation(m, v, method)
    m, v = m.reshape(len(x), 800), v.reshape(len(x), 800)
    m, v = reference_linear(m, v, net[5])
    m, v = reference_activation(m, v, method)
    return reference_linear(m, v, net[7])


def reference_kl(net: nn.Module, alpha: float) -> Tensor:
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    each = [
        alpha * (a.weight**2 + a.weight_logvar.exp()) - a.weight_logvar - 1 - math.log(alpha) for a in layers
    ]
    return 0.5 * sum(e.sum() for e in each)


@pytest.mark.parametrize("name", METHODS)
def test_regression_mlp_equals_the_reference(name):
    method, net = METHODS[name], perturbed(mlp())
    x, y = torch.randn(7, 5), torch.randn(7, 2)
    m, v = reference_mlp(net, x, method)
    f = method(net, x)
    torch.testing.assert_close(f.mean, m, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(f.var, v, rtol=1e-9, atol=1e-9)

    beta, alpha, n = 3.7, 10.0, 91
    noise = 0.5 * math.log(2 * math.pi) - 0.5 * math.log(beta)
    expected = (noise + beta / 2 * ((y - m) ** 2 + v)).sum(1).mean() + reference_kl(net, alpha) / n
    elbo = vp.ELBO(net, method, vp.likelihoods.Normal(beta), vp.priors.Normal(alpha), n_data=n)
    torch.testing.assert_close(elbo(x, y), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_lenet_equals_the_reference(name):
    method, net = METHODS[name], perturbed(lenet(), logvar=-6.0)
    x, y = torch.randn(3, 1, 28, 28), torch.tensor([1, 0, 9])
    m, v = reference_lenet(net, x, method)
    f = method(net, x)
    torch.testing.assert_close(f.mean, m, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(f.var, v, rtol=1e-9, atol=1e-9)

    p = torch.exp(m) / torch.exp(m).sum(1, keepdim=True)
    fit = m[range(3), y] - torch.log(torch.exp(m).sum(1)) - 0.5 * (v * p * (1 - p)).sum(1)
    expected = reference_kl(net, 100.0) / 60_000 - fit.mean()
    elbo = vp.ELBO(net, method, vp.likelihoods.Categorical(), vp.priors.Normal(100.0), n_data=60_000)
    torch.testing.assert_close(elbo(x, y), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["VBP", "VBP at slope 2", "DVI"])
def test_gradient_of_the_elbo_equals_the_reference(name):
    method, net = METHODS[name], perturbed(mlp())
    x, y = torch.randn(7, 5), torch.randn(7, 2)
    m, v = reference_mlp(net, x, method)
    expected = (0.5 * ((y - m) ** 2 + v)).sum(1).mean() + reference_kl(net, 10.0) / 50
    loss = vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=50)(x, y)
    parameters = list(net.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


# --------------------------------------------------------------------------------------- number of operations


class Calls(TorchDispatchMode):
    """Counts the linear operations that reach the kernels."""

    LINEAR = ("convolution", "addmm", "mm", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.LINEAR:
            self.counts["linear"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [vp.VBP, vp.vbp(slope=100.0), vp.DVI], ids=lambda m: m.name)
def test_three_linear_operations_a_layer_and_two_in_the_first(method, dtype):
    net, x = perturbed(lenet()).to(dtype), torch.randn(2, 1, 28, 28, dtype=dtype)
    with torch.no_grad(), Calls() as calls:
        method(net, x)
    assert calls.counts["linear"] == 2 + 3 * 3

    def flops(run, module, x) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            run(module, x)
        return counter.get_total_flops()

    plain, first = flops(nn.Module.__call__, net, x), flops(nn.Module.__call__, net[0], x)
    assert flops(method, net, x) == 3 * plain - first


def test_lenet_in_float32_is_close_to_float64():
    net, x = perturbed(lenet(), logvar=-6.0), torch.randn(2, 1, 28, 28)
    exact = vp.VBP(net, x)
    f = vp.VBP(net.float(), x.float())
    assert f.mean.dtype == f.var.dtype == torch.float32
    torch.testing.assert_close(f.mean.double(), exact.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(f.var.double(), exact.var, rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------------- linear networks


def linear_net(depth: int) -> nn.Sequential:
    net = perturbed(nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))), logvar=-2.0)
    for layer in net:
        nn.init.normal_(layer.weight)  # large means propagate the correlation of the units
    return net


def full_covariance(net: nn.Sequential, x: Tensor) -> Tensor:
    """Exact output variance of a linear network: Σ' = M Σ Mᵀ + diag(S²(diag Σ + m²))."""
    m, cov = x, torch.zeros(x.shape[-1], x.shape[-1])
    for layer in net:
        M, S2 = layer.weight, layer.weight_logvar.exp()
        cov = M @ cov @ M.T + torch.diag(S2 @ (cov.diagonal() + m**2))
        m = M @ m + layer.bias
    return cov.diagonal()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", [vp.VBP, vp.DVI], ids=lambda m: m.name)
def test_linear_network_of_two_layers_is_exact(method, depth):
    net, x = linear_net(depth), torch.randn(3)
    torch.testing.assert_close(method(net, x).var, full_covariance(net, x))
    assert_agrees(method, net, x, samples=100_000)


def test_linear_network_of_three_layers_has_the_right_mean_and_a_wrong_variance():
    net, x = linear_net(3), torch.randn(3)
    samples = draws(net, x, 200_000)
    wrong = disagreement(vp.VBP, net, x, samples=200_000)
    assert "var is" in wrong
    assert "mean is" not in wrong
    exact = vp.Gaussian(vp.VBP(net, x).mean.detach(), full_covariance(net, x).detach())
    assert not difference(exact, samples)


def test_first_convolution_is_exact_and_the_second_is_not():
    net, x = (
        perturbed(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2)), logvar=-1.0),
        torch.rand(1, 2, 5, 5),
    )
    assert_agrees(vp.VBP, net[0], x)
    wrong = disagreement(vp.VBP, net, x)
    assert "var is" in wrong
    assert "mean is" not in wrong


@pytest.mark.parametrize("method", [vp.VBP, vp.vbp(slope=100.0), vp.DVI], ids=lambda m: m.name)
def test_convolution_with_a_kernel_of_the_image_is_a_linear_layer(method):
    conv = perturbed(nn.Sequential(nn.Conv2d(2, 6, 4), nn.ReLU()), biases=True)
    linear = vp.variational(nn.Sequential(nn.Linear(32, 6), nn.ReLU()), biases=True)
    linear.load_state_dict({k: v.reshape(linear.state_dict()[k].shape) for k, v in conv.state_dict().items()})
    x = vp.Gaussian(torch.randn(3, 2, 4, 4), torch.rand(3, 2, 4, 4))
    a, b = method(conv, x).map(lambda t: t.flatten(1)), method(linear, x.map(lambda t: t.flatten(1)))
    torch.testing.assert_close(a.mean, b.mean)
    torch.testing.assert_close(a.var, b.var)


# ----------------------------------------------------------------------------------------------------- limits


def without_variance(net: nn.Module) -> nn.Module:
    for name, parameter in net.named_parameters():
        if name.endswith("logvar"):
            nn.init.constant_(parameter, -math.inf)
    return net


@pytest.mark.parametrize(("net", "shape"), [(mlp(), (4, 5)), (lenet(), (2, 1, 28, 28))], ids=["mlp", "lenet"])
@pytest.mark.parametrize("method", [vp.VBP, vp.DVI, vp.LOCAL_REPARAM], ids=lambda m: m.name)
def test_without_variance_a_method_equals_the_plain_network(method, net, shape):
    net, x = without_variance(perturbed(net.double())), torch.randn(shape)
    f = method(net, x)
    if method.samples:
        f = vp.Gaussian(f, torch.zeros_like(f))
    torch.testing.assert_close(f.mean, net(x))
    assert (f.var == 0).all()


@pytest.mark.parametrize("slope", [1.0, 10.0, 100.0])
def test_gate_without_variance_is_within_its_bounds(slope):
    m = torch.linspace(-5, 5, 20_001) * 3 / slope
    out = vp.vbp(slope)(nn.ReLU(), vp.Gaussian(m, torch.zeros_like(m)))
    assert (out.mean - m.relu()).abs().max() == pytest.approx(0.27846 / slope, rel=1e-4)
    assert out.mean.min() == pytest.approx(-0.27846 / slope, rel=1e-4)
    assert out.var.max() == pytest.approx(0.43923 / slope**2, rel=1e-4)


def test_hard_gate_is_the_limit_of_steep_ones():
    net, x = perturbed(mlp()), torch.randn(6, 5)
    hard = vp.VBP(net, x)
    distance = [
        ((f := vp.vbp(slope)(net, x)).mean - hard.mean).abs().max() + (f.var - hard.var).abs().max()
        for slope in (1e1, 1e3, 1e5)
    ]
    assert distance[0] > distance[1] > distance[2]
    m = torch.tensor([-3.0, -1e-4, 1e-4, 0.2])
    limit, steep = (
        method(nn.ReLU(), vp.Gaussian(m, torch.full_like(m, 0.5))) for method in (vp.VBP, vp.vbp(slope=1e6))
    )
    torch.testing.assert_close(steep.mean, limit.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(steep.var, limit.var, rtol=0, atol=1e-12)


def test_when_every_unit_is_active_vbp_is_dvi_and_the_product_formula():
    net, x = perturbed(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))), torch.randn(5, 4)
    nn.init.constant_(net[0].bias, 50.0)
    M1, M2, S1, S2 = net[0].weight, net[2].weight, net[0].weight_logvar.exp(), net[2].weight_logvar.exp()
    m, v = x @ M1.T + 50.0, x**2 @ S1.T
    var = v @ (M2**2).T + (m**2 + v) @ S2.T
    for method in (vp.VBP, vp.vbp(slope=100.0), vp.DVI):
        f = method(net, x)
        torch.testing.assert_close(f.mean, m @ M2.T + net[2].bias)
        torch.testing.assert_close(f.var, var)


def test_vbp_and_dvi_differ_by_the_tail():
    s = torch.tensor([0.3, 1.0, 2.0])
    for sign in (-1, 1):
        x = vp.Gaussian(sign * 4 * s, s**2)
        hard, exact = vp.VBP(nn.ReLU(), x), vp.DVI(nn.ReLU(), x)
        torch.testing.assert_close(exact.mean - hard.mean, 7.145258e-6 * s, rtol=1e-5, atol=0)
        assert ((exact.var - hard.var).abs() < 1e-4 * s**2).all()


# ----------------------------------------------------------------------------------- methods against sampling


@pytest.mark.parametrize("biases", [False, True])
def test_dvi_with_one_hidden_layer_is_exact(biases):
    net = perturbed(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), logvar=-1.0, biases=biases)
    x = torch.randn(3, 3)
    assert_agrees(vp.DVI, net, x, samples=100_000)
    assert disagreement(vp.VBP, net, x, samples=100_000)


@pytest.mark.parametrize("slope", [math.inf, 100.0, 3.0, 1.0])
def test_vbp_with_one_hidden_layer_is_exact_under_its_own_model(slope):
    net, x = (
        perturbed(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), logvar=-1.0),
        torch.randn(3, 3),
    )
    n = 200_000
    if 1 < slope < math.inf:
        for mean in (net[0].weight, net[0].bias):
            mean.data.mul_(2 / slope)  # so that steep gates are sometimes open and sometimes closed
    pre = x @ net[0].weight.T + net[0].bias  # the gate depends only on the mean of its unit
    p = (pre > 0).double() if slope == math.inf else torch.sigmoid(slope * pre)
    f = draws(net[0], x, n)
    gated = vp.vbp(slope)(net[:2], x)
    z = torch.bernoulli(p.expand(n, -1, -1), generator=torch.Generator().manual_seed(3))
    assert not difference(gated, z * f)
    W2 = net[2].weight + (net[2].weight_logvar / 2).exp() * torch.randn(n, 2, 5)
    out = torch.einsum("njk,nik->nij", W2, z * f) + net[2].bias
    assert not difference(vp.vbp(slope)(net, x), out.detach())


def test_local_reparametrisation_averages_to_the_data_fit_of_dvi():
    net = perturbed(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), logvar=-1.0)
    x, y, n = torch.randn(4, 3), torch.randn(4, 1), 50_000
    likelihood, prior = vp.likelihoods.Normal(2.0), vp.priors.Normal()
    exact = vp.ELBO(net, vp.DVI, likelihood, prior, n_data=10).terms(x, y).data_fit
    with torch.no_grad():
        f = vp.LOCAL_REPARAM(net, x.repeat(n, 1))  # samples the pre-activations of every row
    fits = (
        (-0.5 * (2.0 * (f - y.repeat(n, 1)) ** 2 - math.log(2.0) + math.log(2 * math.pi))).view(n, 4).mean(1)
    )
    (mean, error), _ = moments(fits)
    assert abs(mean - exact) < 5 * error
    assert error < 0.02 * abs(exact)
    torch.manual_seed(0)
    one = (
        vp.ELBO(net, vp.LOCAL_REPARAM, likelihood, prior, n_data=10)
        .terms(x.repeat(n, 1), y.repeat(n, 1))
        .data_fit
    )
    assert abs(one - exact) < 5 * error


def test_local_reparametrisation_samples_the_output_of_the_layer():
    layer, x = perturbed(nn.Linear(3, 2), logvar=-1.0), torch.randn(2, 3)
    samples = vp.LOCAL_REPARAM(layer, x.expand(50_000, 2, 3)).detach()
    assert not difference(vp.DVI(layer, x), samples)


@pytest.mark.parametrize("method", [vp.VBP, vp.DVI], ids=lambda m: m.name)
def test_equal_batches_average_to_the_whole(method):
    net = perturbed(mlp())
    x, y = torch.randn(12, 5), torch.randn(12, 2)
    elbo = vp.ELBO(
        net, method, vp.likelihoods.Normal(2.0), vp.priors.Normal(10.0), n_data=12, kl_z_weight=0.3
    )
    parts = [elbo(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    torch.testing.assert_close(sum(parts) / 3, elbo(x, y))
