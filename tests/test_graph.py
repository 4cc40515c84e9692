"""Networks with their own `forward`: methods, residual sums, errors, training, export and the summary."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop import Gaussian
from varprop.graph.store import GRAPHS
from varprop.graph.walk import walk
from varprop.methods.base import Call, Function

from . import networks
from .networks import (
    BasicBlock,
    Branching,
    DenseBlock,
    Residual,
    ResNet,
    SqueezeExcite,
    Twice,
    UNet,
)
from .sampling import assert_agrees, difference, draws

VBP, DVI, SAMPLED = vp.VBP, vp.DVI, vp.LOCAL_REPARAM
INDEPENDENT = {
    **dict.fromkeys((operator.add, "add"), lambda method, add, a, b: a + b),
    **dict.fromkeys((operator.sub, torch.sub), lambda method, sub, a, b, alpha=1: a + b * -alpha),
}
"""Rules that treat the operands of every sum as independent."""

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (2, 3, 32, 32)),
    "dense block": (DenseBlock, (2, 3, 5, 5)),
    "squeeze and excite": (SqueezeExcite, (2, 3, 5, 5)),
    "unet": (UNet, (2, 3, 6, 6)),
    "inside a sequential": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(Residual(4), nn.ReLU()), nn.Linear(4, 2)),
        (5, 3),
    ),
    "used twice": (Twice, (5, 4)),
}
every_net = pytest.mark.parametrize("name", NETS)


def build(name: str, logvar: float = -6.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2.0)
    return vp.variational(net, logvar=logvar).eval(), torch.randn(shape)


def elbo_of(net: nn.Module, method: vp.Method = vp.VBP, n_data: int = 32, **options: float) -> vp.ELBO:
    return vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=n_data, **options)


def residual_net(logvar: float = -6.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return vp.variational(nn.Sequential(nn.Linear(3, 4), Residual(4), nn.Linear(4, 1)), logvar=logvar)


# --------------------------------------------------------------------------------------------------- networks


@every_net
@pytest.mark.parametrize("method", [VBP, DVI], ids=lambda method: method.name)
def test_without_variance_a_method_equals_the_network(name: str, method: vp.Method) -> None:
    net, x = build(name, logvar=-60.0)
    f = method(net, x)
    torch.testing.assert_close(f.mean, net(x), rtol=1e-4, atol=1e-5)
    assert f.var.max() < 1e-15


@every_net
def test_every_method_runs_the_network(name: str) -> None:
    net, x = build(name)
    expected = net(x)
    if name in ("resnet", "dense block", "unet"):  # the others have smooth functions: E[f(x)] is not f(E[x])
        torch.testing.assert_close(VBP(net, x).mean, expected)
    torch.testing.assert_close(vp.DETERMINISTIC(net, x), expected)
    first, second = SAMPLED(net, x), SAMPLED(net, x)
    assert first.shape == expected.shape
    assert not torch.equal(first, second)
    assert (VBP(net, x).var > 0).any()


def test_resnet_variance_is_within_a_factor_of_two_of_sampling() -> None:
    net, x = build("resnet", logvar=-9.0)
    with torch.no_grad():
        ratio = VBP(net, x).var.mean() / draws(net, x, 300).var(0).mean()
    assert 0.5 < ratio < 2


def test_local_reparametrisation_samples_the_weights_of_inner_layers() -> None:
    net = residual_net(logvar=-2.0)
    x = torch.randn(2, 3)
    with torch.no_grad():
        samples = torch.vmap(lambda _: vp.LOCAL_REPARAM(net, x), randomness="different")(torch.zeros(4_000))
        f = vp.DVI(net, x)
    torch.testing.assert_close(samples.var(0), f.var, rtol=0.2, atol=0)


def test_a_network_may_have_several_inputs_options_and_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(
            self, x: Tensor, other: Tensor | None = None, *, twice: bool = False
        ) -> dict[str, Tensor]:
            h = self.fc(x)
            if other is not None:
                h = h + other
            return {"h": 2 * h if twice else h, "x": x}

    net = vp.variational(Two())
    x, other = torch.randn(2, 3), Gaussian(torch.randn(2, 3), torch.rand(2, 3))
    plain = vp.VBP(net, x)["h"]
    torch.testing.assert_close(vp.VBP(net, x, other)["h"].var, plain.var + other.var)
    torch.testing.assert_close(vp.VBP(net, x, None, twice=True)["h"].var, 4 * plain.var)
    torch.testing.assert_close(vp.VBP(net, x, other=other, twice=True)["h"].var, 4 * (plain.var + other.var))
    assert vp.VBP(net, x)["x"] is x


def test_a_network_that_torch_fx_has_traced_is_walked() -> None:
    net, x = vp.variational(Twice(), logvar=-3.0).eval(), torch.randn(5, 4)
    traced = torch.fx.symbolic_trace(net)
    for method in (vp.VBP, vp.DVI, vp.correlated):
        torch.testing.assert_close(method(traced, x).var, method(net, x).var)


def test_the_graph_follows_the_network_when_it_changes() -> None:
    net = vp.variational(Twice(), logvar=-4.0)
    x = torch.randn(5, 4)
    evaluated, trained = vp.VBP(net.eval(), x).var, vp.VBP(net.train(), x).var
    assert (trained > evaluated).any()
    net.drop_rate = 0.0
    torch.testing.assert_close(vp.VBP(net, x).var, evaluated)
    net.part = nn.Identity()
    torch.testing.assert_close(vp.VBP(net, Gaussian(x, x.square())).var, x.square())


def test_a_graph_holds_no_parameters_and_is_freed_with_its_network() -> None:
    net, x = residual_net(), torch.randn(2, 3)
    before = set(vars(GRAPHS))
    f = vp.VBP(net, x)
    names = set(vars(GRAPHS)) - before
    assert len(names) == 1
    with torch.no_grad():
        net[1].scale.zero_()
    assert not torch.equal(vp.VBP(net, x).mean, f.mean)
    assert set(vars(GRAPHS)) - before == names
    assert set(vars(net[1])) == set(vars(Residual()))
    del net, f
    gc.collect()
    assert not names & set(vars(GRAPHS))


def test_a_random_weight_used_directly_in_forward_keeps_its_variance() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.fc.weight, self.fc.bias)

    for form in ("full", "factored"):
        net, x = vp.variational(Tied(), posterior=form, biases=True, logvar=-2.0), torch.randn(4, 3)
        torch.testing.assert_close(vp.VBP(net, x).var, vp.VBP(net.fc, x).var)
        assert not torch.equal(vp.LOCAL_REPARAM(net, x), vp.LOCAL_REPARAM(net, x))


def test_later_steps_read_values_written_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = 1.0 * x
            self.relu(h)
            h.mul_(2.0)
            return h

    x = Gaussian(torch.tensor([-1.0, 1.0]), torch.tensor([0.1, 0.1]))
    f = vp.VBP(InPlace(), x)
    torch.testing.assert_close(f.mean, InPlace()(x.mean))
    torch.testing.assert_close(f.var, torch.tensor([0.0, 0.4]))


# ------------------------------------------------------------------------------------------------------- sums


class Sum(nn.Module):
    """A sum of two values with a common source."""

    def __init__(self, formula: Function, channels: int = 0) -> None:
        super().__init__()
        self.formula = formula
        self.a = nn.Conv2d(channels, channels, 3, padding=1) if channels else nn.Linear(4, 4)
        self.b = nn.Conv2d(channels, channels, (5, 1), padding="same") if channels else nn.Linear(4, 4)
        self.halved = nn.Conv2d(channels or 1, 2, 3, stride=2, padding=1)
        self.projected = nn.Conv2d(channels or 1, 2, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


FIXED = torch.linspace(-1, 1, 4, dtype=torch.float64)
DENSE: dict[str, Function] = {
    "x + x": lambda net, x: x + x,
    "x - x": lambda net, x: x - x,
    "x + a x": lambda net, x: x + -0.7 * x,
    "x - alpha x": lambda net, x: torch.sub(x, x / 2, alpha=3),
    "x + relu(x)": lambda net, x: x + F.relu(x),
    "x + hardtanh(x)": lambda net, x: x + F.hardtanh(x),
    "tanh(x) + x": lambda net, x: torch.tanh(x).add(x),
    "x + dropout(1 - x)": lambda net, x: x + F.dropout(1 - x, 0.3),
    "x + W x": lambda net, x: x + net.a(x),
    "a x - W b x": lambda net, x: 0.5 * x - net.a(x * FIXED),
    "V x + W x": lambda net, x: 2 * net.a(x) + net.b(-x),
}
CONVOLUTIONS: dict[str, Function] = {
    "x + W x": lambda net, x: x - net.b(x),
    "V x + W x": lambda net, x: net.a(x) + net.b(x),
    "halved": lambda net, x: net.halved(x) + net.projected(x),
}


@pytest.mark.parametrize("name", DENSE)
def test_sums_of_dense_paths_agree_with_sampling(name: str) -> None:
    torch.manual_seed(2)
    net = vp.variational(Sum(DENSE[name]).double(), logvar=-2.0)
    x = Gaussian(torch.randn(3, 4).double(), torch.rand(3, 4).double() + 0.1)
    assert_agrees(vp.DVI, net, x)
    if name not in ("x + dropout(1 - x)", "x - x"):
        assert difference(
            (vp.DVI | INDEPENDENT | {torch.sub: INDEPENDENT[operator.sub], "add": INDEPENDENT[operator.add]})(
                net, x
            ),
            draws(net, x),
        )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sums_of_convolutions_agree_with_sampling(name: str) -> None:
    torch.manual_seed(2)
    net = vp.variational(Sum(CONVOLUTIONS[name], channels=3).double(), logvar=-4.0)
    x = Gaussian(torch.randn(2, 3, 5, 5).double(), torch.rand(2, 3, 5, 5).double() + 0.1)
    assert_agrees(vp.DVI, net, x)


class Block(nn.Module):
    """h + V relu(W h)."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class Frozen(Block):
    """The two terms of the block, with fixed gates."""

    gates: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, self.second(self.gates * self.first(x))])


BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 4), (2, 4)),
    "over time": (lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 4), (2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1), lambda: nn.Conv1d(4, 2, 3, padding=1), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: nn.Conv2d(4, 2, 3, padding=1), (1, 2, 4, 5)),
    "conv2d of two sizes": (
        lambda: nn.Conv2d(2, 4, (1, 5), padding="same"),
        lambda: nn.Conv2d(4, 2, 3, padding=1),
        (1, 2, 4, 5),
    ),
}


def block(name: str, logvar: float = -3.0) -> tuple[Block, Gaussian]:
    torch.manual_seed(3)
    first, second, shape = BLOCKS[name]
    net = vp.variational(Block(first(), second()).double(), logvar=logvar)
    return net, Gaussian(torch.randn(shape).double(), torch.rand(shape).double() + 0.1)


@pytest.mark.parametrize("name", BLOCKS)
def test_residual_covariance_agrees_with_sampling_at_fixed_gates(name: str) -> None:
    net, x = block(name)
    frozen = Frozen(net.first, net.second)
    frozen.register_buffer("gates", (vp.VBP(net.first, x).mean > 0).double())
    with torch.no_grad():
        predicted = (vp.VBP(net, x).var - (vp.VBP | INDEPENDENT)(net, x).var) / 2
        sides = draws(frozen, x, 40_000)
    centred = sides - sides.mean(0)
    products = centred[:, 0] * centred[:, 1]
    error = products.std(0) / len(sides) ** 0.5
    assert ((predicted - products.mean(0)).abs() < 5 * error).all()
    assert (predicted.abs() > 5 * error).any()


@pytest.mark.parametrize("method", [vp.VBP, vp.vbp(3.0), vp.DVI], ids=lambda method: method.name)
def test_slopes_are_covariances_over_variances(method: vp.Method) -> None:
    """For a gate sampled independently of its input, and for the activation itself."""
    x = Gaussian(torch.tensor([-1.0, -0.2, 0.3, 1.5]).double(), torch.tensor([0.5, 1.0, 1.0, 0.3]).double())
    values = x.sample((200_000,), torch.Generator().manual_seed(0))
    for pieces in (vp.moments.RELU, vp.moments.Piecewise((-0.5, 0.5), (0.0, 1.0, 0.2))):
        if method.slope is None:
            out, slope = pieces(values), vp.moments.slope(x, pieces)
        else:
            odds = torch.stack([torch.zeros_like(x.mean), *(x.mean - knot for knot in pieces.knots)]).cumsum(
                0
            )
            chances = (min(method.slope, 1e9) * odds).softmax(0).movedim(0, -1)
            piece = torch.distributions.Categorical(probs=chances).sample((len(values),))
            out = pieces.lines(values).gather(0, piece.unsqueeze(0)).squeeze(0)
            slope = vp.moments.gate_slope(x, method.slope, pieces)
        sampled = ((out - out.mean(0)) * (values - x.mean)).mean(0) / x.var
        torch.testing.assert_close(slope, sampled, atol=0.03, rtol=0)


def test_the_slope_of_a_smooth_function_without_variance_is_its_derivative() -> None:
    x = Gaussian(torch.linspace(-2, 2, 9), torch.zeros(9))
    torch.testing.assert_close(
        vp.moments.smooth_slope(torch.tanh, x), 1 - torch.tanh(x.mean) ** 2, atol=1e-3, rtol=0
    )


def test_paths_without_a_formula_are_independent_and_the_summary_says_so() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            a, b, c, d = self.layers
            h = d(x)
            return h + c(b(a(h))) + a(h)

    net, x = vp.variational(Deep()), torch.randn(2, 4)
    torch.testing.assert_close(vp.VBP(net, x).var, (vp.VBP | INDEPENDENT)(net, x).var)
    words = [row.kind.word for row in vp.summary(net, vp.VBP, x).operations if row.name == "add"]
    assert words == ["independent", "independent"]


def test_a_layer_on_both_paths_has_no_covariance_formula() -> None:
    net = vp.variational(Sum(lambda net, x: net.a(x) + net.a(x)))
    x = Gaussian(torch.randn(3, 4), torch.rand(3, 4))
    torch.testing.assert_close(vp.VBP(net, x).var, 2 * vp.VBP(net.a, x).var)
    assert [row.kind.word for row in vp.summary(net, vp.VBP, x).operations] == [
        "exact",
        "exact",
        "independent",
    ]


def test_branches_of_a_deterministic_input_are_independent() -> None:
    net, x = vp.variational(Sum(DENSE["V x + W x"]), logvar=-2.0), torch.randn(3, 4)
    assert_agrees(vp.DVI, net, x)
    assert [row.kind.word for row in vp.summary(net, vp.DVI, x).operations] == [
        "exact",
        "exact",
        "plain",
        "exact",
        "exact",
    ]


def test_the_variance_of_a_sum_is_never_negative() -> None:
    net = vp.variational(Block(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), logvar=-20.0)
    with torch.no_grad():
        net.first.weight.copy_(torch.eye(4))
        net.second.weight.copy_(-torch.eye(4))
    x = Gaussian(torch.ones(1, 4), torch.ones(1, 4))
    f = vp.VBP(net, x)
    assert (f.var >= 0).all()
    assert f.var.max() < 1e-6


# ----------------------------------------------------------------------------------------------------- errors


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = networks.Function(lambda x: torch.sort(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x))


def test_the_error_for_a_function_names_it_its_module_and_the_fix() -> None:
    net = vp.variational(Sorted())
    with pytest.raises(
        vp.NoRuleError,
        match=r"(?s)VBP has no rule for .*sort; add one with `method \| \{.*sort: rule\}`.*`inner` of Sorted",
    ):
        vp.VBP(net, torch.ones(1, 4))
    method = vp.VBP | {torch.sort: lambda method, sort, x: x}
    assert isinstance(method(net, torch.ones(1, 4)), Gaussian)


def test_the_error_for_a_layer_names_it_and_its_path() -> None:
    net, x = build("resnet")
    with pytest.raises(vp.NoRuleError, match=r"(?s)no rule for torch\..*BatchNorm2d; .*`bn1` of ResNet"):
        vp.Method("BARE", {key: rule for key, rule in vp.VBP.rules.items() if key is not nn.BatchNorm2d})(
            net, x
        )


def test_the_error_for_control_flow_shows_a_rule_to_write() -> None:
    net = vp.variational(nn.Sequential(nn.Linear(4, 4), Branching()))
    with pytest.raises(
        vp.NoRuleError,
        match=r"(?s)cannot take the graph of .*networks\.Branching, because it decides by a value "
        r".*method\(block\.fc, x\).*\{Branching: rule\}",
    ):
        vp.VBP(net, torch.ones(1, 4))
    method = vp.VBP | {Branching: lambda method, block, x: method(block.fc, x)}
    assert isinstance(method(net, torch.ones(1, 4)), Gaussian)


def test_control_flow_on_deterministic_values_just_runs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branching = Branching()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.branching(x))

    net = vp.variational(Net(), where=lambda name, layer: name == "fc")
    x = torch.randn(3, 4)
    torch.testing.assert_close(vp.VBP(net, x).mean, net(x))
    with pytest.raises(vp.NoRuleError, match=r"(?s)Branching.*It stands in `branching` of Net"):
        vp.VBP(net, Gaussian(x, x.square()))


# ------------------------------------------------------------------------------- training, copying and export


def test_training_saving_and_loading(tmp_path: Path) -> None:
    net, x = residual_net(), torch.randn(32, 3)
    elbo = elbo_of(net, kl_z_weight=0.1)
    before = elbo(x, x[:, :1]).item()
    vp.fit(elbo, (x, x[:, :1]), epochs=3, lr=0.01)
    assert elbo(x, x[:, :1]).item() < before
    vp.save(elbo, tmp_path)
    again = vp.load(tmp_path, net=residual_net(seed=1))
    torch.testing.assert_close(again.predict(x).var, elbo.predict(x).var, rtol=0, atol=0)


def test_replicas_train_as_they_would_alone() -> None:
    x, y = torch.randn(2, 32, 3), torch.randn(2, 32, 1)
    together, alone = [elbo_of(residual_net(seed=seed)) for seed in range(2)], elbo_of(residual_net(seed=1))
    vp.replicas.fit(together, x, y, epochs=2)
    vp.replicas.fit([alone], x[1:], y[1:], epochs=2, seeds=[1])
    torch.testing.assert_close(together[1].predict(x[0]).var, alone.predict(x[0]).var)


def test_copies_and_pickles_are_independent_networks() -> None:
    net, x = residual_net(), torch.randn(2, 3)
    f = vp.VBP(net, x)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(vp.VBP(again, x).var, f.var, rtol=0, atol=0)
        with torch.no_grad():
            again[1].first.weight.zero_()
        assert not torch.equal(vp.VBP(again, x).var, f.var)
    torch.testing.assert_close(vp.VBP(net, x).var, f.var, rtol=0, atol=0)


def test_a_first_pass_inside_functional_call_leaves_no_values_in_the_graph() -> None:
    net, x = residual_net(), torch.randn(2, 3)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return vp.VBP(self.net, x).mean

    assert not torch.func.functional_call(
        Bound(), {f"net.{name}": value for name, value in zeros.items()}, (x,)
    ).any()
    torch.testing.assert_close(vp.VBP(net, x).mean, net(x), rtol=1e-2, atol=1e-3)  # tanh is smooth


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    net, x = residual_net(), torch.randn(2, 3)

    class Moments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            f = vp.VBP(self.net, x)
            return f.mean, f.var

    program = torch.export.export(
        Moments(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), strict=strict
    )
    x = torch.randn(5, 3)
    mean, var = program.module()(x)
    torch.testing.assert_close(mean, vp.VBP(net, x).mean)
    torch.testing.assert_close(var, vp.VBP(net, x).var)


# ----------------------------------------------------------------------------------------------------- resnet


def test_a_resnet_trains() -> None:
    net, x = build("resnet")
    elbo = vp.ELBO(net, VBP, vp.likelihoods.Categorical(), vp.priors.Normal(), n_data=2)
    elbo(x, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def small_resnet(*depths: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return vp.variational(ResNet(width=2, depths=depths or (1, 1))).eval(), torch.randn(2, 3, 16, 16)


def test_a_compiled_objective_equals_the_eager_one() -> None:
    net, x = small_resnet(1)
    elbo, y = (
        vp.ELBO(net, VBP, vp.likelihoods.Categorical(), vp.priors.Normal(), n_data=2),
        torch.tensor([0, 3]),
    )
    torch.compiler.reset()
    loss = torch.compile(elbo, fullgraph=True, backend="aot_eager")(x, y)
    torch.testing.assert_close(loss, elbo(x, y))
    compiled, eager = (torch.autograd.grad(value, list(net.parameters())) for value in (loss, elbo(x, y)))
    torch.testing.assert_close(compiled, eager)


def test_a_compiled_resnet_equals_the_eager_one() -> None:
    net, x = small_resnet()
    torch.compiler.reset()
    with torch.no_grad():
        compiled_pass = torch.compile(lambda x: VBP(net, x), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled_pass(x).var, VBP(net, x).var)
        net.fc.weight.mul_(2)
        torch.testing.assert_close(compiled_pass(x).mean, net(x))


@pytest.mark.parametrize("method", [VBP, DVI], ids=lambda method: method.name)
def test_bfloat16_keeps_the_variance(method: vp.Method) -> None:
    net, x = small_resnet()
    with torch.no_grad():
        exact = method(net, x)
        with torch.autocast("cpu", torch.bfloat16):
            f = method(net, x)
    assert f.var.isfinite().all()
    assert f.var.dtype == torch.float32
    torch.testing.assert_close(f.var, exact.var, rtol=0.05, atol=0)


# ---------------------------------------------------------------------------------------------------- summary


def test_the_summary_tells_where_the_errors_of_hard_gates_add_up() -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(32) for part in (nn.Linear(32, 32), nn.ReLU())]
    net, x = vp.variational(nn.Sequential(*hidden), init="he", logvar=-7.0), torch.randn(5, 32)
    told = vp.summary(net, vp.VBP, x)
    ratio = vp.VBP(net, x).var.mean() / vp.DVI(net, x).var.mean()
    assert told.beyond == pytest.approx(ratio.item())
    assert f"is {told.beyond:.3g} times that of DVI" in str(told)
    assert vp.summary(net, vp.DVI, x).beyond is None
    assert "times that of DVI" not in str(vp.summary(net[:2], vp.VBP, x))


def test_the_summary_lists_operations_rules_parameters_cost_and_variance() -> None:
    net, x = small_resnet()
    table = vp.summary(net, VBP, x)
    rows = {(row.place, row.name): row for row in table.operations}
    assert rows["layers.0.0", "add"].kind.word == "corrected"
    assert str(rows["layers.1.0", "add"].kind) == "corrected (Eq. 28)"
    assert not table.independent
    assert rows["layers.0.0", "relu"].kind == rows["relu", "ReLU"].kind
    assert rows["bn1", "BatchNorm2d"].kind.equation == 17
    assert rows["fc", "Linear"].parameters == 25
    assert rows["fc", "Linear"].random == 20
    assert sum(row.flops for row in table.operations) == pytest.approx(1)
    assert 0 < rows["fc", "Linear"].variance < 1
    assert rows["relu", "ReLU"].variance is None
    for name in ("layers.1.0.downsample.0", "corrected (Eq. 24)", "25", "20", "%"):
        assert name in str(table)


def test_the_share_of_variance_is_what_a_deterministic_layer_loses() -> None:
    net, x = residual_net(), torch.randn(3, 3)
    share = {row.place: row.variance for row in vp.summary(net, vp.DVI, x).operations}["1.first"]
    with torch.no_grad():
        total = vp.DVI(net, x).var.mean()
        net[1].first.weight_logvar.fill_(-torch.inf)
        assert share == pytest.approx(float(1 - vp.DVI(net, x).var.mean() / total), rel=1e-4)


def test_a_watch_sees_every_operation() -> None:
    net, x = residual_net(), torch.randn(2, 3)
    seen: list[tuple[str, str]] = []

    def watch(call: Call) -> object:
        if call.place is not None:  # not the layer that a function is equivalent to
            seen.append((call.place.step.place, call.rule.kind))
        return call.output

    walk(vp.VBP.watching(watch), net, (x,), {})
    assert [place for place, _ in seen] == ["0", "1", "1.first", "1", "1.second", "1", "1", "2"]
    assert [kind for _, kind in seen][:2] == ["exact", "as its layer"]


def test_a_watch_sees_a_sum_with_its_covariance() -> None:
    net, x = nn.Sequential(Residual(4)), Gaussian(torch.randn(2, 4), torch.rand(2, 4))
    sums: list[Tensor] = []

    def watch(call: Call) -> object:
        if call.operation is operator.add:
            sums.append(call.output.var)
        return call.output

    out = vp.DVI.watching(watch)(net, x)
    torch.testing.assert_close(sums, [out.var])
    assert not torch.allclose(out.var, (vp.DVI | INDEPENDENT)(net, x).var)


def test_the_return_value_of_a_watch_replaces_the_output() -> None:
    def shifted(call: Call) -> object:
        return call.output + 1.0 if isinstance(call.operation, nn.ReLU) else call.output

    x = Gaussian(torch.ones(1, 2), torch.ones(1, 2))
    assert vp.VBP.watching(shifted)(nn.Sequential(nn.ReLU(), nn.Flatten()), x).mean.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("method", vp.METHODS.values(), ids=vp.METHODS)
def test_methods_survive_pickling_with_their_rules(method: vp.Method) -> None:
    again = pickle.loads(pickle.dumps(method))
    assert again.rules.keys() == method.rules.keys()
    by_name = [
        key for key in (nn.ReLU, nn.Linear, nn.Module) if method.rules.get(key) is again.rules.get(key)
    ]
    assert again.key == method.key
    assert nn.Module in by_name


def test_a_weight_read_in_forward_keeps_its_variance() -> None:
    """Whatever its name: this includes the weights of attention and recurrent layers."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.rnn = nn.MultiheadAttention(4, 2), nn.RNN(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            read = self.attention.in_proj_weight, self.rnn.weight_ih_l0
            return torch.cat([F.linear(x, weight) for weight in read], -1)

    net, x = vp.variational(Reads(), logvar=-2.0), torch.randn(3, 4)
    assert_agrees(vp.DVI, net, x)
    assert vp.LOCAL_REPARAM(net, x).std() > 0


def test_a_basic_block_alone_has_its_covariance_corrected() -> None:
    net = vp.variational(BasicBlock(3, 3), logvar=-4.0).eval()
    x = Gaussian(torch.randn(1, 3, 5, 5), torch.rand(1, 3, 5, 5))
    corrected, independent = VBP(net, x), (VBP | INDEPENDENT)(net, x)
    torch.testing.assert_close(corrected.mean, independent.mean)
    assert not torch.allclose(corrected.var, independent.var)
