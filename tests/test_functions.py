"""Functions and tensor methods, against Monte Carlo sampling and against the equivalent layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop import Gaussian
from varprop.methods import base

from . import cases
from .networks import Function
from .sampling import assert_agrees, difference, draws, moments

FIXED = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
GROUPS = torch.tensor([0, 1, 1]).view(3, 1)
FUNCTIONS: dict[str, base.Function] = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    ".relu()": lambda x: x.relu(),
    ".relu_()": lambda x: (1 * x).relu_(),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "F.hardtanh": lambda x: F.hardtanh(x, -0.5, max_val=0.7),
    "F.relu6": F.relu6,
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "F.silu": F.silu,
    "F.softplus": lambda x: F.softplus(x, beta=2.0),
    "F.elu": lambda x: F.elu(input=x, alpha=0.7),
    "F.prelu": lambda x: F.prelu(x, FIXED[:, 1]),
    "F.prelu with one slope": lambda x: F.prelu(x, FIXED[0, 1:2]),
    "torch.clamp": lambda x: torch.clamp(x, -0.5, max=0.7),
    ".clamp(min)": lambda x: x.clamp(min=0.2),
    ".clamp(max)": lambda x: x.clamp(max=1.0),
    ".clamp(0)": lambda x: x.clamp(0),
    "clip": lambda x: x.clip(-1, 1),
    "clamp_min clamp_max": lambda x: torch.cat([x.clamp_min(-0.3), torch.clamp_max(x, 1.0)]),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.1),
    ".abs()": lambda x: x.abs(),
    "torch.maximum": lambda x: torch.maximum(x[0], x[1]),
    "torch.maximum with a constant": lambda x: torch.maximum(x, FIXED),
    "torch.minimum": lambda x: torch.minimum(x[:1], x[1:]),
    "torch.max of two": lambda x: torch.max(x[0], other=x[1]),
    "torch.min of two": lambda x: x[0].min(x[1]),
    "max along a dimension": lambda x: x.max(dim=0)[0],
    "min along a dimension": lambda x: torch.min(x, 0, keepdim=True).values,
    "unpacked max": lambda x: (lambda both: both[0] + 1)(x[:, :2].max(-2)),
    "amax": lambda x: x[:, :2].amax(1, keepdim=True),
    "amin": lambda x: x[..., 3:].amin((0, 2)),
    "max of all": lambda x: x[0, 0, :2].max(),
    "torch.tanh": torch.tanh,
    ".sigmoid()": lambda x: x.sigmoid(),
    "torch.exp": torch.exp,
    "torch.sin": torch.sin,
    "+ constant": lambda x: 1 + x + FIXED,
    "add alpha": lambda x: torch.add(FIXED, x, alpha=2),
    "- constant": lambda x: FIXED - (x - 1),
    "* constant": lambda x: FIXED * x * 2,
    "/ constant": lambda x: x / 3,
    "neg": lambda x: -x,
    "x * x": lambda x: x * x,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x.pow(3),
    "torch.square": torch.square,
    "matmul": lambda x: torch.matmul(x, FIXED.T),
    "constant @ x": lambda x: FIXED @ x.transpose(-1, -2),
    "F.linear": lambda x: F.linear(x, FIXED, FIXED[:, 0]),
    "F.conv1d": lambda x: F.conv1d(x, FIXED.view(4, 3, 1).repeat(1, 1, 3), padding=1),
    "torch.addmm": lambda x: torch.addmm(FIXED[:, 0], x[0], FIXED.T, beta=2, alpha=0.5),
    "torch.baddbmm": lambda x: torch.baddbmm(x, FIXED[:, :3].expand(2, 3, 3), FIXED.expand(2, 3, 4)),
    "einsum": lambda x: torch.einsum("bij, kj -> bik", x, FIXED),
    "einsum from the right": lambda x: torch.einsum("kj,...ij->...ik", FIXED, x),
    "einsum of one": lambda x: torch.einsum("bij->bj", x),
    "einsum without an arrow": lambda x: torch.einsum("bij,ij", x, FIXED),
    "einsum of independent ones": lambda x: torch.einsum("ij,kj->ik", x[0], x[1]),
    "independent product": lambda x: x[:1] * x[1:],
    "independent matmul": lambda x: x[:1] @ x[1:].mT,
    "independent sum": lambda x: x[:1] + x[1:],
    "cat": lambda x: torch.cat([x, FIXED.expand(2, 3, 4)], dim=1),
    "stack": lambda x: torch.stack((x[0], x[1]), -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(x.shape[0], 2, -1),
    "permute": lambda x: x.permute(0, 2, 1).contiguous(),
    "transpose": lambda x: torch.transpose(x, 1, 2),
    ".mT": lambda x: x.mT,
    "unsqueeze squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1),
    "mean": lambda x: x.mean((1, 2), keepdim=True),
    "torch.mean": lambda x: torch.mean(x, dim=-1),
    "sum": lambda x: x.sum(dim=1),
    "sum of all": lambda x: x.sum(),
    "sum over two": lambda x: torch.sum(x, (0, -1), keepdim=True),
    "built-in sum": lambda x: sum([x[0], x[1]]),
    "torch.where": lambda x: torch.where(FIXED > 0, x, -1.0),
    "torch.where of two": lambda x: torch.where(FIXED > 0, x[0], 2 * x[1]),
    ".where": lambda x: x.where(FIXED > 0, FIXED),
    "masked_fill": lambda x: x.masked_fill(FIXED > 0, -3.0),
    "masked_fill_": lambda x: (1 * x).masked_fill_(FIXED > 0, 0.5),
    "tril, triu": lambda x: x.tril() + 2 * torch.triu(x, 1),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    ".unfold": lambda x: x.unfold(2, 2, 1),
    "F.unfold": lambda x: F.unfold(x.unsqueeze(0), 2),
    "scatter_add": lambda x: x.new_zeros(2, 2, 4).scatter_add_(1, GROUPS.expand(2, 3, 4), x),
    "index_add": lambda x: torch.index_add(x, 1, torch.tensor([2, 0]), FIXED[:2].expand(2, 2, 4), alpha=3),
    "index_add of x": lambda x: torch.ones(2, 2, 4).double().index_add(1, GROUPS.flatten(), x, alpha=-1),
    "F.embedding": lambda x: F.embedding(torch.tensor([[0, 2, 2]]), x[0]),
    "x[:, 0]": lambda x: x[:, 0],
    "index": lambda x: x[..., 1:3, None, 0],
    "index by tensor": lambda x: x[:, torch.tensor([0, 2])],
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "split": lambda x: torch.split(x, [1, 3], dim=-1)[1],
    "split and joined": lambda x: torch.cat(x.split(1, dim=1), dim=-1),
    "unpacked": lambda x: (lambda a, b: a - b)(*[x.unbind(0)[i] for i in range(2)]),
    "F.max_pool1d": lambda x: F.max_pool1d(x, 2),
    "F.max_pool2d": lambda x: F.max_pool2d(x.unsqueeze(1), kernel_size=(1, 2)),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 2, 1, padding=1),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 2)),
    "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "F.interpolate linear": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "F.softmax": lambda x: F.softmax(x[..., :2], dim=-1),
    "F.log_softmax": lambda x: F.log_softmax(x[..., :2], -1),
    "F.pad": lambda x: F.pad(x, (1, 0), value=3.0),
    "F.pad circular": lambda x: F.pad(x, (1, 1), mode="circular"),
    "F.dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "a layer made in forward": lambda x: nn.LeakyReLU(0.1)(x),
    "of nothing random": lambda x: x + torch.arange(4) * torch.ones(3, 1).cumsum(0),
    "zeros_like": lambda x: x + torch.zeros_like(x) + x.new_ones(()),
    "clone, to": lambda x: x.clone().to(x.dtype).double(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_sampling(name: str) -> None:
    torch.manual_seed(1)
    x = Gaussian(torch.randn(2, 3, 4).double(), torch.rand(2, 3, 4).double() + 0.1)
    assert_agrees(vp.DVI, Function(FUNCTIONS[name]), x, samples=10_000)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "F.dropout"])
@pytest.mark.parametrize("method", [vp.VBP, vp.LOCAL_REPARAM], ids=lambda method: method.name)
def test_functions_of_deterministic_values_just_run(name: str, method: vp.Method) -> None:
    x = torch.randn(2, 3, 4).double()
    torch.testing.assert_close(method(Function(FUNCTIONS[name]), x), FUNCTIONS[name](x))
    constant = vp.VBP(Function(FUNCTIONS[name]), Gaussian(x, torch.zeros_like(x)))
    torch.testing.assert_close(constant.mean, FUNCTIONS[name](x))
    assert constant.var.max() < 1e-25


def test_gates_of_functions_are_recorded_like_those_of_layers() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    net = vp.variational(nn.Sequential(layers[0], Function(F.relu), layers[2]), logvar=-2.0)
    x, y = torch.randn(5, 3), torch.randn(5, 1)

    def kl_z(net: nn.Module) -> Tensor:
        return vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=5).terms(x, y).kl_z

    assert kl_z(net) == kl_z(layers) > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: F.interpolate(x.unsqueeze(0), scale_factor=0.5, mode="bilinear", antialias=True),
            "interpolate with antialias=True",
        ),
        (lambda x: 2**x, "pow with a random exponent"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "div with these arguments .*rounding_mode"),
        (lambda x: F.max_pool1d(x, 2, return_indices=True), "max_pool1d"),
        (lambda x: nn.MaxPool1d(2, return_indices=True)(x), "MaxPool1d with return_indices=True"),
        (lambda x: x.cumprod(0), r"Tensor\.cumprod; add one with `method \| \{\"cumprod\": rule\}`"),
        (lambda x: nn.LPPool1d(2, 2)(x), "LPPool1d"),
        (
            lambda x: F.threshold(x, 0.1, 20.0),
            "F.threshold jumps from 20.0 to its threshold 0.1.*threshold: rule",
        ),
        (lambda x: torch.clamp(x, torch.zeros(4)), "clamp with a tensor among its options"),
        (lambda x: x * (x > 0), r"operator\.gt; add one with `method \| \{operator\.gt: rule\}`"),
        (
            lambda x: torch.einsum("bij,kl->bik", x, torch.ones(2, 3)),
            "which sums over an index that a random operand does not have",
        ),
        (
            lambda x: torch.einsum("bij,kj,k->bi", x, torch.ones(2, 4), torch.ones(2)),
            "einsum of more than two operands",
        ),
        (
            lambda x: F.embedding(torch.zeros(1, dtype=torch.long), x[0], max_norm=1.0),
            "embedding with max_norm",
        ),
        (lambda x: F.normalize(x, p=1.0), "normalize with p=1.0"),
    ],
)
def test_a_function_without_a_rule_is_an_error(function: base.Function, message: str) -> None:
    with pytest.raises(vp.NoRuleError, match=f"(?s){message}.*It stands in Function"):
        vp.VBP(Function(function), Gaussian(torch.ones(1, 2, 4), torch.ones(1, 2, 4)))


class OwnKernel(nn.Module):
    """A module with parameters of its own, which also reads the table of one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.scale = nn.Parameter(torch.randn(2, 3, 3, 3)), nn.Parameter(torch.randn(2, 1))
        self.table = nn.Embedding(4, 2, padding_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(x, self.kernel, stride=2, padding=1).flatten(2).mT
        words = F.embedding(torch.tensor([0, 1, 3, 2]), self.table.weight, padding_idx=1)
        return h * self.scale.mT + words


def test_parameters_of_a_module_and_of_its_layers_are_weights_like_any_other() -> None:
    torch.manual_seed(0)
    net = vp.variational(OwnKernel().double(), logvar=-2.0)
    x = Gaussian(torch.randn(2, 3, 4, 4).double(), torch.rand(2, 3, 4, 4).double())
    assert_agrees(vp.DVI, net, x, samples=4000)


# ---------------------------------------------------------------------------- functions equivalent to a layer

NORMS: dict[str, tuple[nn.Module, base.Function]] = {
    "F.layer_norm": (
        cases.scaled(nn.LayerNorm(4)),
        lambda x, m: F.layer_norm(x, (4,), m.weight, m.bias, m.eps),
    ),
    "F.layer_norm over two": (
        nn.LayerNorm((3, 4), elementwise_affine=False),
        lambda x, m: F.layer_norm(x, [3, 4]),
    ),
    "F.rms_norm": (cases.scaled(nn.RMSNorm(4)), lambda x, m: F.rms_norm(x, (4,), m.weight, m.eps)),
    "F.group_norm": (
        cases.scaled(nn.GroupNorm(1, 3)),
        lambda x, m: F.group_norm(x, 1, weight=m.weight, bias=m.bias),
    ),
    "F.instance_norm": (nn.InstanceNorm1d(3), lambda x, m: F.instance_norm(x)),
    "F.instance_norm by channel": (
        cases.scaled(nn.InstanceNorm1d(3, affine=True)),
        lambda x, m: F.instance_norm(x, None, None, m.weight, m.bias, True, 0.1, m.eps),
    ),
    "F.batch_norm": (
        cases.settled(nn.BatchNorm1d(3)).eval(),
        lambda x, m: F.batch_norm(
            x, m.running_mean, m.running_var, m.weight, m.bias, m.training, m.momentum, m.eps
        ),
    ),
    "F.batch_norm in training": (
        cases.settled(nn.BatchNorm1d(3)),
        lambda x, m: F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, training=True),
    ),
    "F.batch_norm of the batch": (
        nn.BatchNorm1d(3, affine=False, track_running_stats=False),
        lambda x, m: F.batch_norm(x, None, None, training=True),
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("method", [vp.VBP, vp.CVBP, vp.DVI], ids=lambda method: method.name)
def test_normalisation_functions_equal_their_layers(name: str, method: vp.Method) -> None:
    layer, function = NORMS[name]
    layer, again = copy.deepcopy(layer).double(), copy.deepcopy(layer).double()
    x = Gaussian(torch.randn(2, 3, 4).double(), torch.rand(2, 3, 4).double())
    net = Function(lambda x: function(x, again))
    net.layer = again
    ours, theirs = method(net, x), method(layer, x)
    torch.testing.assert_close((ours.mean, ours.var), (theirs.mean, theirs.var))
    if getattr(layer, "running_var", None) is not None:
        torch.testing.assert_close(
            (again.running_mean, again.running_var), (layer.running_mean, layer.running_var)
        )


CLOSE: dict[str, tuple[base.Function, float, float]] = {
    "F.normalize": (lambda x: F.normalize(x, dim=-1), 0.04, 0.1),
    "F.normalize over channels": (lambda x: F.normalize(x), 0.04, 0.1),
    "F.layer_norm": (lambda x: F.layer_norm(x, (16,)), 0.03, 0.08),
    "amax of many": (lambda x: x.amax(-1), 0.03, 0.2),
    "attention": (lambda x: F.scaled_dot_product_attention(x[0], x[1], x[2]), 0.05, 0.1),
    "attention that is causal": (
        lambda x: F.scaled_dot_product_attention(x[0], x[1], x[2], is_causal=True, scale=0.3),
        0.05,
        0.1,
    ),
    "attention to some": (
        lambda x: F.scaled_dot_product_attention(
            x[0], x[1], x[2], attn_mask=torch.eye(12, dtype=torch.bool).roll(3, 1)
        ),
        0.05,
        0.1,
    ),
}


@pytest.mark.parametrize("name", CLOSE)
def test_approximate_functions_are_close_to_sampling(name: str) -> None:
    torch.manual_seed(1)
    function, mean_error, var_error = CLOSE[name]
    x = Gaussian(torch.randn(3, 12, 16).double(), torch.rand(3, 12, 16).double() * 0.4 + 0.1)
    mean, var = (value for value, _ in moments(draws(Function(function), x, 4000)))
    f = vp.DVI(Function(function), x)
    assert ((f.mean - mean).abs() / var.sqrt()).mean() < mean_error
    assert (f.var / var).log().abs().mean() < var_error
    constant = vp.VBP(Function(function), Gaussian(x.mean, torch.zeros_like(x.mean)))
    torch.testing.assert_close(constant.mean, function(x.mean))
    assert constant.var.max() < 1e-25


# ----------------------------------------------------------------------------------------------------- maxima


def test_maxima_by_each_method() -> None:
    a, b = (
        Gaussian(torch.tensor([1.0]), torch.tensor([0.5])),
        Gaussian(torch.tensor([0.5]), torch.tensor([2.0])),
    )

    class Larger(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.maximum(a, b)

    vbp, dvi, cvbp = (method(Larger(), a, b) for method in (vp.VBP, vp.DVI, vp.CVBP))
    assert (vbp.mean, vbp.var) == (a.mean, a.var)
    assert cvbp.mean == a.mean
    samples = torch.maximum(a.sample((100_000,)), b.sample((100_000,)))
    assert dvi.mean.item() == pytest.approx(samples.mean().item(), abs=0.02)
    assert cvbp.var.item() == pytest.approx((samples - 1.0).square().mean().item(), abs=0.04)
    rows = vp.summary(
        nn.Sequential(nn.Linear(2, 2), Function(lambda x: torch.max(x, 2 * x))),
        vp.DVI,
        Gaussian(torch.ones(1, 2), torch.ones(1, 2)),
    )
    assert [str(row.kind) for row in rows.operations] == ["exact (Eq. 1)", "exact (Eq. 3)", "independent"]


@pytest.mark.parametrize("name", NORMS)
def test_the_summary_gives_a_function_the_kind_of_its_layer(name: str) -> None:
    layer, function = NORMS[name]
    x = Gaussian(torch.randn(2, 3, 4), torch.rand(2, 3, 4))
    ours, theirs = (
        vp.summary(Function(lambda x: function(x, layer)), vp.DVI, x),
        vp.summary(nn.Sequential(layer), vp.DVI, x),
    )
    assert ours.operations[0].kind == theirs.operations[0].kind


def test_a_maximum_with_itself_is_itself() -> None:
    x = Gaussian(torch.randn(3), torch.rand(3))
    assert vp.DVI(Function(lambda x: torch.maximum(x, x)), x) is x


@pytest.mark.parametrize("method", [vp.VBP, vp.CVBP, vp.DVI], ids=lambda method: method.name)
def test_a_maximum_along_a_dimension_equals_max_pooling(method: vp.Method) -> None:
    x = Gaussian(torch.randn(2, 3, 2), torch.rand(2, 3, 2))
    pooled, largest = method(nn.MaxPool1d(2), x), method(Function(lambda x: x.amax(-1, keepdim=True)), x)
    torch.testing.assert_close((pooled.mean, pooled.var), (largest.mean, largest.var))


# ----------------------------------------------------------------------------------- pickling and compilation


def test_methods_with_rules_for_functions_can_be_pickled() -> None:
    for method in (vp.VBP, vp.CVBP, vp.DVI):
        assert pickle.loads(pickle.dumps(method)).rules.keys() == method.rules.keys()


def test_functions_compile() -> None:
    layer = cases.scaled(nn.BatchNorm2d(3)).eval()

    def forward(x: Tensor) -> Tensor:
        x = F.batch_norm(
            F.prelu(x, layer.weight), layer.running_mean, layer.running_var, layer.weight, layer.bias
        )
        x = F.layer_norm(x.clamp(min=0.1), (4,)).masked_fill(x.new_zeros(4) > 0, 1.0)
        x = F.scaled_dot_product_attention(x, x, torch.maximum(x, 2 * x))
        return torch.einsum("bcij,kj->bcik", x, torch.ones(2, 4)).max(-1).values

    net = nn.Sequential(vp.variational(nn.Conv2d(3, 3, 1)), Function(forward))
    x = torch.randn(2, 3, 4, 4)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x: vp.DVI(net, x), fullgraph=True, backend="eager")(x)
        eager = vp.DVI(net, x)
    torch.testing.assert_close((compiled.mean, compiled.var), (eager.mean, eager.var))


def test_a_choice_has_the_shape_of_all_its_operands() -> None:
    x, other = Gaussian(torch.zeros(3), torch.ones(3)), torch.ones(2, 3)
    y = vp.DVI(Function(lambda x: torch.where(torch.tensor([True, False, True]), x, other)), x)
    assert y.var.tolist() == [[1.0, 0.0, 1.0]] * 2


def test_operands_may_be_given_by_name() -> None:
    x, ones = Gaussian(torch.randn(2, 3), torch.rand(2, 3)), torch.ones(3, 4)
    mask, zero = torch.tensor([True, False, True]), torch.zeros(())
    for named, plain in (
        (lambda x: torch.add(x, other=x[:1]), lambda x: torch.add(x, x[:1])),
        (lambda x: torch.mul(input=x, other=2.0), lambda x: x * 2.0),
        (lambda x: x.sub(other=1.0), lambda x: x - 1.0),
        (lambda x: torch.matmul(x, other=ones), lambda x: x @ ones),
        (lambda x: torch.max(x, other=x[:1]), lambda x: torch.max(x, x[:1])),
        (lambda x: torch.where(mask, input=x, other=zero), lambda x: torch.where(mask, x, zero)),
        (lambda x: torch.where(condition=mask, input=x, other=zero), lambda x: torch.where(mask, x, zero)),
        (lambda x: x.where(other=zero, condition=mask), lambda x: torch.where(mask, x, zero)),
        (lambda x: x + torch.where(condition=mask, input=zero, other=zero), lambda x: x + 0.0),
    ):
        ours, theirs = vp.DVI(Function(named), x), vp.DVI(Function(plain), x)
        torch.testing.assert_close((ours.mean, ours.var), (theirs.mean, theirs.var))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1, dtype=torch.float64),
        lambda x: torch.softmax(x, -1, torch.float64),
        lambda x: x.log_softmax(-1, dtype=torch.float64),
    ],
)
def test_a_softmax_in_another_precision(function: base.Function) -> None:
    y = vp.DVI(Function(function), Gaussian(torch.randn(2, 3), torch.rand(2, 3)))
    assert y.mean.dtype == y.var.dtype == torch.float64


POSITIVE = Gaussian(torch.tensor([0.5, 2.0, 7.0]).double(), torch.tensor([0.1, 0.5, 9.0]).double())


@pytest.mark.parametrize(
    "function",
    [torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log, torch.log2, torch.log10, lambda x: x**-1.5],
)
def test_positive_values_are_log_normal(function: base.Function) -> None:
    """Eq. 64, against samples of the model that it states."""
    log_var = torch.log1p(POSITIVE.var / POSITIVE.mean.square())
    log_mean = POSITIVE.mean.log() - log_var / 2
    torch.manual_seed(0)
    samples = function(torch.exp(log_mean + log_var.sqrt() * torch.randn(200_000, 3).double()))
    assert difference(vp.DVI(Function(function), POSITIVE), samples) == ""


def test_a_quotient_of_random_values() -> None:
    net = Function(lambda x: x[..., :1] / x[..., 1:])
    narrow = Gaussian(torch.tensor([[3.0, 5.0, -2.0]]), torch.tensor([[0.5, 0.01, 0.002]]))
    torch.manual_seed(0)
    f, samples = vp.DVI(net, narrow), net(narrow.sample((100_000,)))
    torch.testing.assert_close(f.mean, samples.mean(0), rtol=0.01, atol=0)
    torch.testing.assert_close(f.var, samples.var(0), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.var(1),
        lambda x: torch.var(x, (1, 2), correction=0, keepdim=True),
        lambda x: torch.var_mean(x, 2)[0],
        lambda x: torch.var_mean(x, 2)[1],
        lambda x: x.cumsum(1),
        lambda x: torch.addcmul(x, x.new_full((4,), 2.0), x.new_ones(4), value=0.5),
    ],
)
def test_statistics_of_entries_agree_with_sampling(function: base.Function) -> None:
    torch.manual_seed(0)
    assert_agrees(vp.DVI, Function(function), Gaussian(torch.randn(2, 3, 4), torch.rand(2, 3, 4)))


@pytest.mark.parametrize("function", [lambda x: x.std(1), lambda x: torch.logsumexp(x, 2, keepdim=True)])
def test_smooth_statistics_of_narrow_entries_agree_with_sampling(function: base.Function) -> None:
    torch.manual_seed(0)
    x = Gaussian(torch.randn(2, 3, 4).double(), 1e-4 * torch.rand(2, 3, 4).double())
    f, samples = (
        vp.DVI(Function(function), x),
        function(x.sample((20_000,)).flatten(0, 1)).unflatten(0, (-1, 2)),
    )
    assert difference(f, samples) == ""


def test_an_option_that_the_layer_does_not_have() -> None:
    net = Function(lambda x: F.interpolate(x, scale_factor=2, mode="nearest", antialias=False))
    x = Gaussian(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    assert [step.kind.word for step in vp.summary(net, vp.DVI, x).operations] == ["exact"]
