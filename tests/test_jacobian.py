"""`vp.correlated` is exact where the theory says so, and elsewhere close to Monte Carlo sampling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop.methods.slopes import bias_slopes, taken_apart, weight_slopes

from .sampling import difference, draws


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Branches(nn.Module):
    """A residual sum, a concatenation and a layer that is used twice."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.inner, self.side, self.head, self.act = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 3), act

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.inner(x))
        return self.head(torch.cat([self.act(self.side(h)) + h, h], 1))


class OverTime(nn.Module):
    """Weights shared by all steps of a sequence, and an average over the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


class Sum(nn.Module):
    """Two inputs, each with its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 5), nn.Linear(3, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


class Functions(nn.Module):
    """One hidden layer whose weights are used directly in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            F.relu(F.linear(x, self.a.weight, self.a.bias)), weight=self.b.weight, bias=self.b.bias
        )


class Last(nn.Module):
    """The last step of a sequence after a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


def random(net: nn.Module, logvar: float = -4.0, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return vp.variational(net, logvar, **options).eval()  # type: ignore[arg-type]


def ratio(f: vp.Gaussian, samples: Tensor) -> float:
    return (f.var.sum() / samples.var(0).sum()).item()


def perceptron(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def pooled() -> nn.Sequential:
    front = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*front, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, lambda: nn.PReLU(9), nn.Tanh])
@pytest.mark.parametrize("options", [{}, {"biases": True}, {"posterior": "factored"}], ids=str)
@pytest.mark.usefixtures("float64")
def test_one_hidden_layer_equals_dvi(act: Callable[[], nn.Module], options: dict[str, object]) -> None:
    net, x = random(perceptron(4, 9, 2, act=act), **options), torch.randn(5, 4)
    f, dvi = vp.correlated(net, x), vp.DVI(net, x)
    torch.testing.assert_close(f.mean, dvi.mean)
    torch.testing.assert_close(f.var, dvi.var, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("float64")
def test_weights_used_directly_in_forward():
    net, x = random(Functions(), biases=True), torch.randn(3, 4)
    torch.testing.assert_close(vp.correlated(net, x).var, vp.DVI(net, x).var.detach())


@pytest.mark.usefixtures("float64")
def test_positions_share_half_of_the_second_order_variance():
    """Eq. 31, written out for kernels of one weight."""
    net, x = (
        random(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1), nn.AdaptiveAvgPool1d(1)), biases=True),
        torch.randn(1, 1, 7),
    )
    first, second = net[0], net[1]
    v1, c1, v2, c2 = (q.var for _, q in vp.posteriors(net))
    v = v1 * x.square() + c1
    of_first_order = second.weight**2 * (v1 * x.mean() ** 2 + c1) + v2 * first(x).mean() ** 2 + c2
    shared = 0.5 * v2 * v.mean() / 7 + 0.5 * v2 * v.sqrt().mean() ** 2
    torch.testing.assert_close(vp.correlated(net, x).var, (of_first_order + shared).detach())


@pytest.mark.usefixtures("float64")
def test_an_average_knows_the_correlations_of_its_positions():
    net, x = (
        random(nn.Sequential(nn.Conv1d(1, 1, 1), nn.AvgPool1d(7), nn.Flatten(), nn.Linear(1, 1))),
        torch.randn(1, 1, 7),
    )
    v1, v2 = (q.var for _, q in vp.posteriors(net))
    pooled_variance = v1 * x.mean() ** 2
    var = net[3].weight ** 2 * pooled_variance + v2 * (net[0](x).mean() ** 2 + pooled_variance)
    torch.testing.assert_close(vp.correlated(net, x).var, var[0].detach())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)), (2, 4)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            ),
            (2, 2, 6, 6),
        ),
        (lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3, 2), nn.AvgPool1d(3), nn.Flatten()), (2, 2, 6)),
        (
            lambda: nn.Sequential(
                nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular", groups=2), nn.AvgPool1d(2)
            ),
            (2, 2, 6),
        ),
        (Branches, (2, 4)),
        (OverTime, (2, 7, 4)),
        (Product, (2, 4)),
    ],
    ids=["linear", "convolution", "transposed", "circular", "branches", "over time", "product"],
)
def test_linear_networks_agree_with_sampling(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net, x = random(make(), biases=True), torch.rand(shape)
    assert difference(vp.correlated(net, x), draws(net, x)) == ""


@pytest.mark.parametrize("logvar", [-7.0, -4.0])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: perceptron(4, 20, 20, 20, 2), (4, 4)),
        (lambda: perceptron(4, 20, 20, 20, 2, act=nn.Tanh), (4, 4)),
        (lambda: Branches(torch.relu), (4, 4)),
        (pooled, (3, 1, 6, 6)),
    ],
    ids=["perceptron", "tanh", "branches", "pooled"],
)
def test_deep_networks_are_close_to_sampling(
    make: Callable[[], nn.Module], shape: tuple[int, ...], logvar: float
) -> None:
    net, x = random(make(), logvar, init="he"), torch.rand(shape)
    samples = draws(net, x, 4000)
    f = vp.correlated(net, x)
    assert 0.85 < ratio(f, samples) < 1.15
    assert ((f.mean - samples.mean(0)).abs() / samples.std(0)).max() < 0.3


def test_independent_activations_fail_these_checks():
    """Shows that the two tests above can fail."""
    net, x = random(pooled(), init="he"), torch.rand(3, 1, 6, 6)
    assert ratio(vp.DVI(net, x), draws(net, x, 4000)) < 0.6
    net, x = (
        random(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)), biases=True),
        torch.rand(2, 4),
    )
    assert "var" in difference(vp.DVI(net, x), draws(net, x))


@pytest.mark.parametrize(("logvar", "scales"), [(-4.0, -9.0), (-9.0, -3.0)], ids=["weights", "scales"])
def test_a_horseshoe_is_close_to_sampling(logvar: float, scales: float) -> None:
    net, x = random(perceptron(4, 12, 12, 2), logvar, posterior="horseshoe"), torch.randn(4, 4)
    for name, parameter in net.named_parameters():
        if "scales" in name and name.endswith("logvar"):
            nn.init.constant_(parameter, scales)
    assert 0.85 < ratio(vp.correlated(net, x), draws(net, x, 4000)) < 1.15


@pytest.mark.usefixtures("float64")
def test_random_inputs_and_deterministic_layers():
    net = random(perceptron(4, 9, 2), where=lambda name, _: name == "2")
    x = vp.Gaussian(torch.randn(3, 4), torch.rand(3, 4))
    torch.testing.assert_close(
        vp.correlated(net[:1], x).var, net[0].weight.square().mul(x.var[:, None]).sum(-1).detach()
    )
    torch.testing.assert_close(vp.correlated(net, x.mean).var, vp.DVI(net, x.mean).var.detach())


@pytest.mark.usefixtures("float64")
def test_several_inputs():
    net, a, b = random(Sum()), torch.randn(4, 2), vp.Gaussian(torch.randn(4, 3), torch.rand(4, 3))
    torch.testing.assert_close(vp.correlated(net, a, b).var, vp.DVI(net, a, b).var.detach())


@pytest.mark.usefixtures("float64")
def test_other_methods_keep_their_means():
    net, x = random(perceptron(4, 9, 9, 2)), torch.randn(3, 4)
    for method in (vp.VBP, vp.CVBP):
        torch.testing.assert_close(vp.correlated(net, x, method=method).mean, net(x).detach())
    shallow = random(perceptron(4, 9, 2))
    torch.testing.assert_close(vp.correlated(shallow, x, method=vp.VBP).var, vp.VBP(shallow, x).var.detach())


@pytest.mark.parametrize(
    "make",
    [lambda: Last(nn.LSTM(4, 4, batch_first=True)), lambda: Last(nn.GRU(4, 4, batch_first=True)), Attention],
)
def test_recurrent_and_attention_layers_to_first_order(make: Callable[[], nn.Module]) -> None:
    net, x = random(make(), -20.0), torch.randn(2, 5, 4)
    f = vp.correlated(net, x)
    torch.testing.assert_close(f.mean, net(x).detach(), rtol=1e-3, atol=1e-4)
    jacobians = torch.func.jacrev(lambda w: torch.func.functional_call(net, w, (x,)))(
        {k: q.mean for k, q in vp.posteriors(net)}
    )
    var = sum((jacobians[k].square() * q.var).flatten(2).sum(2) for k, q in vp.posteriors(net))
    torch.testing.assert_close(f.var, var.detach(), rtol=0.02, atol=0)


def test_results_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = random(pooled()), torch.rand(4, 1, 6, 6)
    together = vp.correlated(net, x)
    monkeypatch.setattr(sys.modules["varprop.jacobian"], "ENTRIES", 1)
    one_by_one = vp.correlated(net, x)
    monkeypatch.setattr(sys.modules["varprop.methods.noise"], "BLOCK", 1)
    with torch.no_grad():
        in_blocks = vp.correlated(net, x)
    torch.testing.assert_close(together.var, one_by_one.var)
    torch.testing.assert_close(together.var, in_blocks.var)
    torch.testing.assert_close(together.var[2:3], vp.correlated(net, x[2:3]).var)


class StepsFirst(nn.Module):
    """The examples are in the second dimension of the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(x.transpose(0, 1))).mean(0))


class Windows(nn.Module):
    """Two windows of each example are rows; if mixed, first the first windows of all examples."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.inner, self.head, self.mixed = nn.Linear(4, 5), nn.Linear(10, 2), mixed

    def forward(self, x: Tensor) -> Tensor:
        windows = x.transpose(0, 1) if self.mixed else x
        h = torch.relu(self.inner(windows.reshape(-1, 4))).reshape(*windows.shape[:2], 5)
        return self.head((h.transpose(0, 1) if self.mixed else h).flatten(1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (StepsFirst, (4, 2, 4)),
        (lambda: Windows(True), (4, 2, 4)),
        (lambda: Windows(False), (4, 2, 4)),
        (pooled, (4, 1, 6, 6)),
        (Branches, (4, 4)),
    ],
)
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.usefixtures("float64")
def test_examples_together_are_what_they_are_alone(
    make: Callable[[], nn.Module], shape: tuple[int, ...], recording: bool
) -> None:
    net, x = random(make(), init="he"), torch.randn(shape)
    with torch.set_grad_enabled(not recording):
        together, alone = vp.correlated(net, x), [vp.correlated(net, row) for row in x.split(1)]
    torch.testing.assert_close(together.mean, torch.cat([f.mean for f in alone]))
    torch.testing.assert_close(together.var, torch.cat([f.var for f in alone]))


@pytest.mark.usefixtures("float64")
def test_recording_a_pass_and_following_it_agree() -> None:
    for make, shape in ((pooled, (3, 1, 6, 6)), (lambda: perceptron(4, 9, 9, 2, act=nn.GELU), (3, 4))):
        net, x = random(make(), init="he"), torch.randn(shape)
        followed = vp.correlated(net, x)
        assert followed.var.requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                recorded = vp.correlated(net, x.clone())
            torch.testing.assert_close(recorded.mean, followed.mean.detach())
            torch.testing.assert_close(recorded.var, followed.var.detach())


def test_output_shapes_are_those_of_the_network():
    net, x = random(nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 2, 1))), torch.randn(3, 2, 6)
    assert vp.correlated(net, x).shape == net(x).shape
    flat = random(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)))
    assert vp.correlated(
        nn.Sequential(flat[0], nn.ReLU(), nn.Linear(3, 1), nn.Flatten(-2)), torch.randn(3, 4)
    ).shape == (3,)


def test_some_outputs_the_largest_and_weighted_sums() -> None:
    net, x = random(pooled(), -7.0, init="he"), torch.rand(4, 1, 6, 6)
    f = vp.correlated(net, x)
    some = vp.correlated(net, x, outputs=[2, 0])
    torch.testing.assert_close((some.mean, some.var), (f.mean[:, [2, 0]], f.var[:, [2, 0]]))
    largest, at = f.mean.topk(2)
    top = vp.correlated(net, x, outputs=2)
    torch.testing.assert_close((top.mean, top.var), (largest, f.var.gather(1, at)))
    margin = vp.correlated(net, x, outputs=torch.tensor([[1.0, -1.0, 0.0]]))
    samples = draws(net, x, 4000)
    assert 0.9 < (margin.var.sum() / (samples[..., 0] - samples[..., 1]).var(0).sum()).item() < 1.1


@pytest.mark.usefixtures("float64")
def test_gradients_of_the_variance_agree_with_differences() -> None:
    net, x = random(perceptron(3, 5, 5, 1)), torch.randn(2, 3)
    parameters = [p for p in net.parameters() if p.dim() > 1]

    gradients = torch.autograd.grad(vp.correlated(net, x).var.sum(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        step = torch.zeros_like(parameter)
        step.view(-1)[1] = 1e-5
        ends = []
        for sign in (1, -1):
            parameter.data += sign * step
            ends.append(vp.correlated(net, x).var.sum().item())
            parameter.data -= sign * step
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(gradient.flatten()[1].item(), rel=1e-5)


class GraphConvolution(nn.Module):
    """The nodes of a graph are rows, and each depends on its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.b(edges @ torch.tanh(self.a(x)))


def test_a_graph_whose_rows_depend_on_each_other() -> None:
    net, x = random(GraphConvolution(), -6.0), torch.randn(5, 3)
    edges = torch.softmax(torch.randn(5, 5), 1)
    with pytest.raises(ValueError, match="its rows depend on each other; give batched=False"):
        vp.correlated(net, x, edges)
    f = vp.correlated(net, x, edges, batched=False)
    weights = vp.posterior.draw(net, 4000)
    run = lambda w: torch.func.functional_call(net, w, (x, edges))  # noqa: E731
    assert 0.9 < ratio(f, torch.func.vmap(run)(weights)) < 1.1


def several() -> nn.Module:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), F.relu(self.layer(x))

    return Several()


@pytest.mark.parametrize(
    ("make", "shape", "options", "message"),
    [
        (lambda: nn.Linear(4, 2), (0, 4), {}, "examples in their first dimension"),
        (
            lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).train(),
            (3, 4),
            {},
            "BatchNorm1d mixes examples",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)),
            (3, 4),
            {},
            "give it running statistics",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout()).train(), (3, 4), {}, "Dropout is in training"),
        (several, (3, 4), {}, "needs one Gaussian as the network's output, and DVI gives a tuple.*output="),
        (lambda: nn.Linear(4, 2), (3, 4), {"method": vp.DETERMINISTIC}, "DETERMINISTIC gives a Tensor"),
        (lambda: nn.Linear(4, 2), (3, 4), {"method": vp.LOCAL_REPARAM}, "LOCAL_REPARAM draws samples"),
        *(
            (lambda: nn.Linear(4, 2), (3, 4), {"outputs": outputs}, "does not fit the network's 2 outputs")
            for outputs in ([5], [-1], [], 3, 0, torch.ones(1, 3))
        ),
    ],
)
def test_unsupported_arguments_are_errors(
    make: Callable[[], nn.Module], shape: tuple[int, ...], options: dict, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        vp.correlated(vp.variational(make()), torch.randn(shape), **options)


def test_a_deterministic_network_is_an_error():
    with pytest.raises(ValueError, match="neither the weights nor the inputs are random"):
        vp.correlated(nn.Linear(4, 2), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 4), (2, 5, 3)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(2, 1)), (2, 4, 9, 8)),
        (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
        (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 6)),
        (nn.ConvTranspose1d(4, 6, 3, dilation=2), (2, 4, 5)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    ],
    ids=str,
)
def test_slopes_by_weights_are_those_of_autograd(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = layer.double(), torch.randn(shape).double()
    slopes = torch.randn_like(layer(x))
    for n in {1, len(x)}:
        of_weights, of_biases = weight_slopes(layer, x, slopes, n), bias_slopes(layer, slopes, n)
        parts = zip(x.split(len(x) // n), slopes.split(len(x) // n), strict=True)
        for (part, slope), of_weight, of_bias in zip(parts, of_weights, of_biases, strict=True):
            by_autograd = torch.autograd.grad((layer(part) * slope).sum(), [layer.weight, layer.bias])
            torch.testing.assert_close((of_weight, of_bias), by_autograd)
        channel = -1 if isinstance(layer, nn.Linear) else 1
        std = torch.rand_like(x.narrow(channel, 0, 1)) * torch.arange(1.0, x.shape[channel] + 1).view(
            *(-1 if d == channel % x.dim() else 1 for d in range(x.dim()))
        )
        var, apart = torch.rand_like(layer.weight), taken_apart(layer, std.double(), n)
        expected = weight_slopes(layer, std.double(), slopes, n).square().flatten(1) @ var.flatten()
        of_positions = weight_slopes(layer, apart.positions, slopes, n).flatten(1).square()
        torch.testing.assert_close((of_positions * apart.variances(layer, var)).sum(1), expected)
        assert apart.rest.max() < 1e-12
