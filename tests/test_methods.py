"""Every layer rule of every method, against Monte Carlo sampling of the torch layer and at its limits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import varprop as vp
from varprop.gaussian import Gaussian
from varprop.methods.rules.activations import piecewise

from . import cases
from .cases import Case
from .sampling import assert_agrees, difference, draws, moments

MOMENT_METHODS = [vp.VBP, vp.vbp(slope=10.0), vp.DVI]
OWN_ROWS = [*cases.PIECEWISE, *cases.MAXIMA]
"""The layers for which each method has its own rule; a test below checks that all others share one rule."""
by_name = {"ids": lambda method: method.name}


def each_rule(chosen: list[Case]) -> dict[str, object]:
    """Arguments of `pytest.mark.parametrize`: all methods for layers where they differ, else one method."""
    pairs = [
        (case, method) for case in chosen for method in (MOMENT_METHODS if case in OWN_ROWS else [vp.DVI])
    ]
    return {
        "argnames": ("case", "method"),
        "argvalues": pairs,
        "ids": [f"{case.name}-{method.name}" for case, method in pairs],
    }


def close(a: Gaussian, b: Gaussian, **tolerance: float) -> None:
    torch.testing.assert_close(a.mean, b.mean, check_dtype=False, **tolerance)
    torch.testing.assert_close(a.var, b.var, check_dtype=False, **tolerance)


# ------------------------------------------------------------------------------------------- against sampling


@pytest.mark.parametrize(**cases.ids([*cases.SHARED, *cases.PIECEWISE, *cases.MAXIMA]))
def test_dvi_agrees_with_sampling_of_the_layer(case: Case) -> None:
    module, x = case.build()
    assert_agrees(vp.DVI, module, x.mean if case.deterministic_input else x)


@pytest.mark.parametrize(**cases.ids(cases.APPROXIMATE))
def test_approximations_are_as_close_to_sampling_as_stated(case: Case) -> None:
    module, x = case.build()
    real = copy.deepcopy(module)
    for layer in real.modules():
        # Sampling under vmap cannot update running statistics.
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = None
    mean, var = (value for value, _ in moments(draws(real, x)))
    f = vp.DVI(module, x)
    assert ((f.mean - mean).abs() / var.sqrt()).mean() < case.mean_error
    assert (f.var / var).log().abs().mean() < case.var_error


@pytest.mark.parametrize(**cases.ids([*cases.SHARED, *cases.APPROXIMATE]))
def test_methods_share_all_rules_except_activations_and_maxima(case: Case) -> None:
    module, x = case.build()
    for method in MOMENT_METHODS:
        assert method.rule(module) is vp.DVI.rule(module)
        close(method(module, x), vp.DVI(module, x), rtol=0, atol=0)


@pytest.mark.parametrize("posterior", ["factored", "horseshoe"])
@pytest.mark.parametrize(**cases.ids(cases.AFFINE))
def test_other_posteriors_agree_with_sampling(case: Case, posterior: str) -> None:
    torch.manual_seed(0)
    module = vp.variational(case.make().double(), logvar=-2.0, posterior=posterior, biases=True)
    x = Gaussian(torch.randn(case.shape).double(), torch.rand(case.shape).double())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "logvar" in name or "scales" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    assert_agrees(vp.DVI, module, x.mean if case.deterministic_input else x)


@pytest.mark.parametrize("slope", [0.3, 2.0, float("inf")])
@pytest.mark.parametrize(**cases.ids(cases.PIECEWISE))
def test_gates_agree_with_sampling_of_independent_gates(case: Case, slope: float) -> None:
    """VBP's own model: the piece is sampled from a softmax of log-odds linear in E[x], independently of x."""
    module, x = case.build()
    pieces = piecewise(module)
    if slope == 2.0 and max(map(abs, pieces.knots)) > 1:
        pytest.skip("the outer piece is too rare to sample")
    n = 40_000
    values = x.sample((n,))
    odds = torch.stack([torch.zeros_like(x.mean), *(x.mean - knot for knot in pieces.knots)]).cumsum(0)
    chances = (
        (slope * odds).softmax(0)
        if slope < float("inf")
        else nn.functional.one_hot(odds.argmax(0), len(odds)).movedim(-1, 0).double()
    )
    piece = torch.distributions.Categorical(probs=chances.movedim(0, -1)).sample((n,))
    samples = (
        torch.stack([_line(module, values, k, len(odds)) for k in range(len(odds))])
        .gather(0, piece.unsqueeze(0))
        .squeeze(0)
    )
    assert not (wrong := difference(vp.vbp(slope)(module, x), samples.detach())), wrong


def _line(module: nn.Module, x: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """Piece k of the torch activation as a line, from its value and slope in the middle of the piece."""
    knots = piecewise(module).knots
    ends = [knots[0] - 2.0, *knots, knots[-1] + 2.0]
    middle = torch.full_like(x[0], (ends[k] + ends[k + 1]) / 2).requires_grad_()
    value = module(middle)
    (slope,) = torch.autograd.grad(value.sum(), middle)
    return value.detach() + slope * (x - middle.detach())


@pytest.mark.parametrize(**cases.ids(cases.AFFINE))
def test_local_reparametrisation_has_the_layers_moments(case: Case) -> None:
    module, x = case.build()
    with torch.no_grad():
        samples = torch.vmap(lambda _: vp.LOCAL_REPARAM(module, x.mean), randomness="different")(
            torch.zeros(10_000)
        )
    assert not (wrong := difference(vp.VBP(module, x.mean), samples)), wrong


def test_vbp_max_pooling_keeps_the_largest_mean_with_its_variance() -> None:
    x = Gaussian(torch.tensor([[[1.0, 3.0, 2.0, -1.0]]]), torch.tensor([[[9.0, 0.1, 5.0, 7.0]]]))
    out = vp.VBP(nn.MaxPool1d(2), x)
    assert out.mean.flatten().tolist() == [3.0, 2.0]
    assert out.var.flatten().tolist() == pytest.approx([0.1, 5.0])


@pytest.mark.parametrize("method", [vp.VBP, vp.CVBP, vp.DVI], ids=lambda m: m.name)
def test_adaptive_max_pooling_is_max_pooling_for_windows_of_equal_size(method: vp.Method) -> None:
    x = vp.Gaussian(torch.randn(2, 6, 4), torch.rand(2, 6, 4))
    adaptive, plain = method(nn.AdaptiveMaxPool2d((3, 1)), x), method(nn.MaxPool2d((2, 4)), x)
    assert torch.equal(adaptive.mean, plain.mean)
    assert torch.equal(adaptive.var, plain.var)
    with pytest.raises(vp.NoRuleError, match=r"windows of several sizes, from \(6, 4\) to \(4, 1\)"):
        method(nn.AdaptiveMaxPool2d((4, 1)), x)


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.MaxPool2d(2, 1, dilation=2)]
)
def test_vbp_max_pooling_takes_the_variance_at_the_maximum_of_torch(pool: nn.MaxPool2d) -> None:
    x = Gaussian(torch.randn(2, 3, 7, 7), torch.rand(2, 3, 7, 7))
    tagged = {(m.item(), v.item()) for m, v in zip(x.mean.flatten(), x.var.flatten(), strict=True)}
    out = vp.VBP(pool, x)
    torch.testing.assert_close(out.mean, pool(x.mean))
    assert all(
        (m.item(), v.item()) in tagged for m, v in zip(out.mean.flatten(), out.var.flatten(), strict=True)
    )


@pytest.mark.parametrize("method", MOMENT_METHODS, **by_name)
def test_a_module_list_runs_in_order(method: vp.Method) -> None:
    layers = [vp.variational(nn.Linear(3, 4)), nn.ReLU(), vp.variational(nn.Linear(4, 2))]
    x = torch.randn(5, 3)
    close(method(nn.ModuleList(layers), x), method(nn.Sequential(*layers), x), rtol=0, atol=0)


# --------------------------------------------------------------------------------------- limits and gradients


@pytest.mark.parametrize(**each_rule([c for c in cases.ALL if not c.training]))
def test_without_variance_a_rule_equals_the_layer(case: Case, method: vp.Method) -> None:
    module, x = case.build(logvar=-200.0)
    if method.slope == 10.0 and case in cases.PIECEWISE:
        pytest.skip("a soft gate has its own variance")
    constant = Gaussian(x.mean, torch.zeros_like(x.var))
    out, expected = method(module, constant), module(x.mean)
    torch.testing.assert_close(out.mean, expected)
    torch.testing.assert_close(out.var, torch.zeros_like(expected), rtol=0, atol=1e-28)


@pytest.mark.parametrize("method", [vp.VBP, vp.DVI, vp.DETERMINISTIC], **by_name)
@pytest.mark.parametrize(**cases.ids([c for c in cases.ALL if not c.training and c not in cases.AFFINE]))
def test_a_deterministic_input_stays_a_tensor_without_random_weights(case: Case, method: vp.Method) -> None:
    module = case.make().double().eval()
    x = torch.randn(case.shape).double()
    out = method(module, x)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, module(x))


@pytest.mark.parametrize(**each_rule(cases.ALL))
def test_extreme_inputs_give_finite_values_and_gradients(case: Case, method: vp.Method) -> None:
    module, _ = case.build(torch.float32)
    module = copy.deepcopy(module)
    for mean, var in [
        (0.0, 0.0),
        (0.0, 1e-38),
        (1e4, 0.0),
        (-1e4, 1e-30),
        (-1e4, 1e8),
        (30.0, 1e-6),
        (1e4, 1e4),
        (-6.0, 1.0),
        (0.0, 1e8),
    ]:
        m = torch.full(case.shape, mean, requires_grad=True)
        v = torch.full(case.shape, var, requires_grad=True)
        out = method(module, Gaussian(m, v))
        assert torch.isfinite(out.mean).all(), (mean, var)
        assert torch.isfinite(out.var).all(), (mean, var)
        assert (out.var >= 0).all(), (mean, var)
        (out.mean.sum() + out.var.sum()).backward()
        assert torch.isfinite(m.grad).all(), (mean, var)
        assert torch.isfinite(v.grad).all(), (mean, var)


@pytest.mark.parametrize(**each_rule(cases.ALL))
def test_gradients_match_finite_differences(case: Case, method: vp.Method) -> None:
    module, x = case.build()
    leaves = [t.detach().requires_grad_() for t in (x.mean, x.var)]
    torch.autograd.gradcheck(
        lambda m, v: (lambda g: (g.mean, g.var))(method(module, Gaussian.of(m, v))), leaves, fast_mode=True
    )


@pytest.mark.parametrize(**each_rule(cases.ALL))
def test_float32_is_close_to_float64(case: Case, method: vp.Method) -> None:
    module, x = case.build(torch.float32)
    double = copy.deepcopy(module).double()
    close(method(module, x), method(double, x.map(torch.Tensor.double)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(**each_rule(cases.ALL))
def test_full_graph_compilation_equals_eager(case: Case, method: vp.Method) -> None:
    module, x = case.build()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda m, v: method(module, Gaussian.of(m, v)), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        close(compiled(x.mean, x.var), method(module, x))


# -------------------------------------------------------------------------------------- any shape and options


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A (transposed) convolution in one to three dimensions with any options, and an input shape."""
    n = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{n}d")
    groups = draw(st.integers(1, 3))
    channels = [groups * draw(st.integers(1, 2)) for _ in range(2)]
    kernel, stride, dilation = (draw(st.tuples(*[st.integers(1, 3)] * n)) for _ in range(3))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    module = kind(
        *channels, kernel, stride, padding, groups=groups, dilation=dilation, bias=draw(st.booleans())
    )
    return module, (
        2,
        channels[0],
        *(d * (k - 1) + draw(st.integers(1, 4)) for k, d in zip(kernel, dilation, strict=True)),
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A pooling layer in one to three dimensions with any options, and an input shape."""
    n = draw(st.integers(1, 3))
    kernel, stride = (draw(st.tuples(*[st.integers(1, 3)] * n)) for _ in range(2))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    options = {"ceil_mode": draw(st.booleans())}
    if draw(st.booleans()):
        module = getattr(nn, f"MaxPool{n}d")(kernel, stride, padding, **options)
    else:
        module = getattr(nn, f"AvgPool{n}d")(
            kernel, stride, padding, count_include_pad=draw(st.booleans()), **options
        )
    return module, (2, 2, *(k + draw(st.integers(0, 5)) for k in kernel))


@settings(deadline=None, max_examples=60)
@given(case=st.one_of(convolutions(), pools()))
def test_the_mean_of_vbp_equals_the_layer_for_any_options(
    case: tuple[nn.Module, tuple[int, ...]],
) -> None:
    module, shape = case
    if isinstance(module, vp.randomisation.RANDOM_LAYERS):
        vp.variational(module)
    x = Gaussian(torch.randn(shape), torch.rand(shape))
    with torch.no_grad():
        out, exact, expected = vp.VBP(module, x), vp.DVI(module, x), module(x.mean)
    torch.testing.assert_close(out.mean, expected)
    assert out.var.shape == exact.mean.shape == exact.var.shape == expected.shape
    assert (out.var >= 0).all()
    if isinstance(module, nn.modules.pooling._MaxPoolNd):
        assert (exact.mean >= out.mean - 1e-5).all()


# ------------------------------------------------------------------------------------------ tables and errors


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_the_error_for_an_unknown_module_names_it_and_the_fix() -> None:
    with pytest.raises(
        vp.NoRuleError, match=r"VBP has no rule for torch\..*\.LPPool1d; .*`method \| \{LPPool1d: rule\}`"
    ):
        vp.VBP(nn.Sequential(nn.LPPool1d(2, 2)), Gaussian(torch.ones(1, 1, 4), torch.ones(1, 1, 4)))


@pytest.mark.parametrize("method", [vp.DVI, vp.LOCAL_REPARAM], **by_name)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, 3, dtype=torch.float64), r"x is float64, the network float32; give x.float\(\)"),
        (torch.ones(4, 3, dtype=torch.long), r"x is int64, the network float32; give x.float\(\)"),
        (torch.ones(4, 2), r"Linear\(in_features=3.* takes 3 inputs, but x has the shape \(4, 2\)"),
        (np.ones((4, 3)), "x is of type ndarray, but a network takes tensors"),
        ([[1.0, 2.0, 3.0]], "x is of type list, but a network takes tensors"),
    ],
    ids=["float64", "int64", "width", "array", "list"],
)
def test_an_input_that_a_network_does_not_take_is_explained(method: vp.Method, x: Any, message: str) -> None:
    net = vp.variational(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    with pytest.raises(ValueError, match=f"^{method.name}: {message}"):
        method(net, x)


def test_errors_of_other_kinds_stay_as_they_are() -> None:
    def refuse(method: vp.Method, module: nn.Module, x: Any) -> Any:
        raise RuntimeError("of no kind that is known")

    with pytest.raises(RuntimeError, match="of no kind that is known"):
        (vp.DVI | {nn.Linear: refuse})(nn.Linear(3, 2), torch.ones(4, 3).double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda elbo, x: vp.DVI(elbo, x), "DVI: a network is needed, got an ELBO; give its `net`"),
        (lambda elbo, x: vp.summary(elbo, vp.DVI, x), "summary: a network is needed, got an ELBO"),
        (lambda elbo, x: vp.correlated(elbo, x), "correlated: a network is needed, got an ELBO"),
        (lambda elbo, x: vp.calibrate(elbo, (x, x), elbo.likelihood), "calibrate: a network is needed"),
        (lambda elbo, x: vp.ELBO(elbo, vp.DVI, elbo.likelihood, elbo.prior, n_data=4), "ELBO: a network"),
        (lambda elbo, x: vp.fit(elbo.net, (x, x)), "fit: an ELBO is needed, got a Sequential; make one"),
        (lambda elbo, x: vp.update(elbo.net, x, x), "update: an ELBO is needed, got a Sequential"),
        (lambda elbo, x: vp.audit(elbo.net, x, x), "audit: an ELBO is needed, got a Sequential"),
        (lambda elbo, x: vp.replicas.fit([elbo.net], x, x), "replicas.fit: an ELBO is needed"),
        (lambda elbo, x: vp.DVI(x, elbo.net), "DVI: the network comes first, got a Tensor"),
        (lambda elbo, x: vp.summary(elbo.net, x, vp.DVI), "summary: method must be a Method such as vp.DVI"),
        (lambda elbo, x: vp.DVI | 3, r"DVI \| rules: give a table .*, got 3"),
        (lambda elbo, x: vp.DVI | {nn.ReLU: 3}, r"DVI \| rules: give a table .*ReLU'>: 3"),
    ],
)
def test_arguments_in_the_place_of_others_are_refused(
    call: Callable[[Any, torch.Tensor], object], message: str
) -> None:
    net = vp.variational(nn.Sequential(nn.Linear(3, 1)))
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(), n_data=4)
    with pytest.raises(TypeError, match=message):
        call(elbo, torch.ones(4, 3))


def test_a_user_adds_a_rule() -> None:
    method = vp.DVI | {Double: lambda method, module, x: x * 2.0}
    x = Gaussian(torch.ones(2, 3), torch.ones(2, 3))
    assert_agrees(method, Double(), x)
    assert Double not in vp.DVI.rules


def test_a_subclass_keeps_the_rule_unless_it_overrides_forward() -> None:
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square()

    same, other = vp.variational(Same(2, 2), logvar=-2.0), vp.variational(Other(2, 2), logvar=-2.0)
    other.load_state_dict(same.state_dict())
    f = vp.VBP(same, torch.ones(1, 2))
    assert isinstance(f, Gaussian)
    close(vp.VBP(other, torch.ones(1, 2)), vp.moments.square(f))


def test_sampling_methods_refuse_random_weights_they_would_ignore() -> None:
    attention = nn.MultiheadAttention(2, 1)
    attention.out_proj.register_parameter("weight_logvar", nn.Parameter(torch.zeros(2, 2)))
    method = vp.Method("LOCAL", {nn.Module: vp.LOCAL_REPARAM.rules[nn.Module]}, samples=True)
    with pytest.raises(vp.NoRuleError, match=r"LOCAL .* MultiheadAttention, which contains random weights"):
        method(attention, torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2))


def test_deterministic_refuses_an_input_with_variance() -> None:
    with pytest.raises(vp.NoRuleError, match="DETERMINISTIC carries no variance"):
        vp.DETERMINISTIC(nn.Linear(2, 2), Gaussian(torch.ones(1, 2), torch.ones(1, 2)))


def test_local_reparametrisation_samples_a_random_input() -> None:
    x = Gaussian(torch.zeros(1, 1), torch.ones(1, 1))
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    samples = torch.stack([vp.LOCAL_REPARAM(net, x) for _ in range(5_000)])
    assert not (wrong := difference(vp.DVI(net, x), samples)), wrong


@pytest.mark.parametrize("slope", [0.0, -1.0, float("nan")])
def test_a_slope_must_be_positive(slope: float) -> None:
    with pytest.raises(ValueError, match="slope must be positive"):
        vp.vbp(slope)


@pytest.mark.parametrize("method", [*vp.METHODS.values(), vp.vbp(3.0)], **by_name)
def test_methods_pickle(method: vp.Method) -> None:
    again = pickle.loads(pickle.dumps(method))
    net = vp.variational(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    x = torch.randn(4, 2)
    torch.manual_seed(0)
    first = method(net, x)
    torch.manual_seed(0)
    second = again(net, x)
    pairs = zip(
        *((f.mean, f.var) if isinstance(f, Gaussian) else (f, f) for f in (first, second)), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
