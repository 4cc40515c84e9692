from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import varprop as vp


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))


def test_only_log_variances_are_added_and_the_means_stay() -> None:
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    assert vp.variational(net) is net
    for name, value in before.items():
        assert torch.equal(net.state_dict()[name], value)
    assert set(net.state_dict()) - set(before) == {"0.weight_logvar", "2.weight_logvar"}


def test_log_variances_are_initialised_as_in_the_paper() -> None:
    net = vp.variational(nn.Linear(200, 200))
    assert net.weight_logvar.mean().item() == pytest.approx(-9, abs=1e-4)
    assert net.weight_logvar.std().item() == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (nn.Linear(50, 400), 50),
        (nn.Conv2d(8, 300, 3), 72),
        (nn.Conv2d(8, 300, 3, groups=2), 36),
        (nn.ConvTranspose2d(8, 300, 4, stride=2), 32),
    ],
)
def test_he_initialisation(layer: nn.Module, fan_in: int) -> None:
    vp.variational(layer, init="he")
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
    assert layer.bias.abs().max() == 0


def test_he_initialisation_of_a_transposed_convolution_keeps_the_scale() -> None:
    torch.manual_seed(0)
    layer = vp.variational(nn.ConvTranspose2d(64, 64, 4, stride=2), init="he")
    x = torch.randn(4, 64, 16, 16).relu()
    inner = layer(x)[..., 4:-4, 4:-4]
    assert inner.square().mean().item() == pytest.approx(2 * x.square().mean().item(), rel=0.1)


FAN_IN = {
    "linear": (nn.Linear(7, 3), torch.ones(2, 7), 7),
    "convolution": (nn.Conv2d(8, 6, 3), torch.ones(2, 8, 6, 6), 72),
    "convolution with groups": (nn.Conv2d(8, 6, 3, groups=2), torch.ones(2, 8, 6, 6), 36),
    "strided convolution": (nn.Conv1d(4, 6, 3, stride=2), torch.ones(2, 4, 9), 12),
    "transposed convolution": (nn.ConvTranspose2d(16, 2, 3), torch.ones(2, 16, 8, 8), 144),
    "transposed convolution with groups": (nn.ConvTranspose1d(8, 4, 3, groups=2), torch.ones(2, 8, 9), 12),
    "transposed convolution with a stride": (nn.ConvTranspose2d(8, 3, 4, 2), torch.ones(2, 8, 9, 9), 32),
    "transposed convolution, uneven stride": (nn.ConvTranspose1d(8, 3, 3, 2), torch.ones(2, 8, 24), 12),
    "embedding": (nn.Embedding(50, 8), torch.tensor([[3, 7], [3, 0]]), 1),
    "bag of one": (nn.EmbeddingBag(50, 8), torch.tensor([[3], [7]]), 1),
}


@pytest.mark.parametrize("posterior", ["full", "factored"])
@pytest.mark.parametrize("name", FAN_IN)
def test_with_weights_from_the_fan_in_prior_outputs_are_as_large_as_inputs(name: str, posterior: str) -> None:
    layer, x, fan_in = FAN_IN[name]
    layer = vp.variational(copy.deepcopy(layer).double(), posterior=posterior)
    ((_, q),) = vp.posteriors(layer)
    assert q.fan_in == fan_in
    with torch.no_grad():
        layer.weight.zero_()
        for parameter_name, parameter in layer.named_parameters():
            if "logvar" in parameter_name:
                parameter.fill_(-math.log(q.fan_in) / (2 if hasattr(layer, "weight_logvar_in") else 1))
    ((_, q),) = vp.posteriors(layer)
    assert vp.priors.FanIn(gain=1.0).kl(q).item() == pytest.approx(0.0, abs=1e-9)
    var = vp.DVI(layer, x.double() if x.is_floating_point() else x).var
    edge = 4 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0  # border outputs see fewer inputs
    for dim in range(2, var.dim()):
        var = var.narrow(dim, edge, (var.shape[dim] - 2 * edge) // 2 * 2)
    torch.testing.assert_close(var.mean(), torch.tensor(1.0, dtype=torch.float64))


def test_the_fan_in_of_attention_and_recurrent_weights_is_their_number_of_columns() -> None:
    net = nn.ModuleList(
        [
            nn.MultiheadAttention(8, 2),
            nn.MultiheadAttention(8, 2, kdim=5, vdim=3),
            nn.LSTM(3, 6, proj_size=4),
            nn.GRUCell(3, 6),
        ]
    )
    found = {name: q.fan_in for name, q in vp.posteriors(vp.variational(net, biases=True))}
    assert found["0.in_proj_weight"] == found["0.out_proj.weight"] == 8
    assert [found[f"1.{part}_proj_weight"] for part in "qkv"] == [8, 5, 3]
    assert [found[f"2.weight_{kind}_l0"] for kind in ("ih", "hh", "hr")] == [3, 4, 6]
    assert [found[f"3.weight_{kind}"] for kind in ("ih", "hh")] == [3, 6]
    assert {value for name, value in found.items() if "bias" in name} == {1}


def test_it_is_idempotent() -> None:
    net = vp.variational(mlp())
    before = copy.deepcopy(net.state_dict())
    vp.variational(net, logvar=-1.0, init="he")
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_where_chooses_layers() -> None:
    net = vp.variational(mlp(), where=lambda name, module: name == "2")
    assert [name for name, _ in vp.posteriors(net)] == ["2.weight"]
    assert isinstance(vp.VBP(net, torch.randn(3, 5)), vp.Gaussian)


def test_biases_on_request() -> None:
    net = vp.variational(mlp(), biases=True)
    assert [name for name, _ in vp.posteriors(net)] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_plain_checkpoint_loads_with_only_the_log_variances_missing() -> None:
    plain, net = mlp(), vp.variational(mlp())
    keys = net.load_state_dict(plain.state_dict(), strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) == {"0.weight_logvar", "2.weight_logvar"}
    x = torch.randn(4, 5)
    assert torch.equal(vp.VBP(net, x).mean, plain(x))


@pytest.mark.parametrize("posterior", ["full", "factored", "horseshoe"])
def test_copies_pickles_and_casts(posterior: str) -> None:
    net = vp.variational(mlp(), posterior=posterior)
    x = torch.randn(4, 5)
    f = vp.VBP(net, x)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(vp.VBP(again, x).var, f.var)
    fresh = vp.variational(mlp(), posterior=posterior)
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(vp.VBP(fresh, x).var, f.var)
    double = vp.VBP(copy.deepcopy(net).double(), x.double())
    assert double.var.dtype == torch.float64
    assert vp.VBP(copy.deepcopy(net).to("meta"), x.to("meta")).var.device.type == "meta"


def test_factored_variances_have_a_parameter_for_each_output_and_each_input() -> None:
    layer = vp.variational(nn.Conv2d(3, 7, 5), posterior="factored")
    assert layer.weight_logvar_out.numel() == 7
    assert layer.weight_logvar_in.numel() == 3 * 25
    ((_, q),) = vp.posteriors(layer)
    assert q.logvar.shape == layer.weight.shape
    assert q.logvar.mean().item() == pytest.approx(-9, abs=1e-2)


def test_a_factored_layer_passes_one_output_channel_in_the_third_operation() -> None:
    shapes = []
    layer = vp.variational(nn.Linear(6, 50), posterior="factored")

    def op(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        shapes.append(tuple(w.shape))
        return nn.functional.linear(x, w, b)

    vp.moments.affine(op, torch.randn(2, 6), vp.posterior.random_weight(layer))
    assert shapes == [(50, 6), (1, 6)]


def test_state_dict_of_a_shared_layer_counts_it_once() -> None:
    shared = nn.Linear(4, 4)
    net = vp.variational(nn.Sequential(shared, nn.ReLU(), shared))
    assert len(list(vp.posteriors(net))) == 1


def test_parametrised_layers_keep_their_rule() -> None:
    layer = vp.variational(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert isinstance(vp.VBP(layer, torch.randn(2, 3)), vp.Gaussian)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vp.variational(nn.ReLU()), "no layer was chosen"),
        (lambda: vp.variational(mlp(), where=lambda name, module: False), "no layer was chosen"),
        (lambda: vp.variational(mlp(), posterior="half"), "posterior must be"),
        (lambda: vp.variational(mlp(), init="xavier"), "init must be"),
        (lambda: vp.variational(mlp(), logvar=math.inf), "logvar must be a finite number"),
        (lambda: vp.variational(mlp(), logvar="full"), "logvar must be a finite number"),
        (lambda: vp.variational(mlp(), where="0"), "where must be a function"),
        (lambda: vp.variational(nn.Linear), "net must be an nn.Module, got <class"),
    ],
)
def test_wrong_input_is_one_sentence(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_layer_without_a_shape_yet_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer '0' has no shape yet"):
        vp.variational(nn.Sequential(nn.LazyLinear(3)))
