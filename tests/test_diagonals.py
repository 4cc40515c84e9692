"""Covariances of a projection or identity and several convolutions, against Jacobians and sampling."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop import Gaussian
from varprop.graph.diagonals import Path, diagonal

from .networks import BasicBlock, Bottleneck
from .sampling import draws

INDEPENDENT = {operator.add: lambda method, add, a, b: a + b, operator.iadd: lambda method, add, a, b: a + b}


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """shortcut(x) + V (gates ∘ … W x): a residual block of ReLU layers with fixed gates."""

    def __init__(self, shortcut: nn.Module | None, *layers: nn.Module) -> None:
        super().__init__()
        self.shortcut, self.layers = shortcut or nn.Identity(), nn.ModuleList(layers)

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layers[0](x)
        for i, layer in enumerate(list(self.layers)[1:]):
            h = layer(h * getattr(self, f"gates_{i}"))
        return self.shortcut(x), h

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.sides(x)
        return a + b


BLOCKS: dict[str, Callable[[], Block]] = {
    "projected": lambda: Block(conv(3, 4, 1), conv(3, 5, 3), conv(5, 4, 3)),
    "halved": lambda: Block(conv(3, 4, 1, 2), conv(3, 5, 3, 2), conv(5, 4, 3)),
    "halved in the second": lambda: Block(conv(3, 4, 1, 2), conv(3, 5, 3), conv(5, 4, 3, 2)),
    "bottleneck": lambda: Block(None, conv(5, 4, 1), conv(4, 4, 3), conv(4, 5, 1)),
    "bottleneck, halved": lambda: Block(conv(5, 6, 1, 2), conv(5, 3, 1), conv(3, 4, 3, 2), conv(4, 6, 1)),
    "bottleneck, halved at first": lambda: Block(
        conv(5, 6, 1, 2), conv(5, 3, 1, 2), conv(3, 4, 3), conv(4, 6, 1)
    ),
}


@torch.no_grad()
def align(shortcut: nn.Module | None, first: nn.Module, *others: nn.Module) -> None:
    """Make the two paths of a block similar, which is the worst case for assuming independence."""
    *between, last = others
    for layer in between:
        nn.init.dirac_(layer.weight)
    if not isinstance(shortcut, nn.Conv2d):
        last.weight.copy_(first.weight.transpose(0, 1))
        return
    product = centre(last)
    for layer in (*reversed(between), first):
        product = product @ centre(layer)
    shortcut.weight.copy_(product[..., None, None] * (shortcut.weight.norm() / product.norm()))


def centre(layer: nn.Module) -> Tensor:
    return layer.weight[:, :, layer.kernel_size[0] // 2, layer.kernel_size[1] // 2]


every_block = pytest.mark.parametrize("name", BLOCKS)


def build(name: str, varying: int, size: int = 5) -> tuple[Block, Gaussian]:
    """A block whose gates, except those of one layer, are the same at all positions of a channel."""
    torch.manual_seed(4)
    net = BLOCKS[name]().double()
    x = torch.randn(1, net.layers[0].in_channels, size, size).double()
    h = x
    for i, layer in enumerate(list(net.layers)[:-1]):
        h = layer(h).detach()
        net.register_buffer(
            f"gates_{i}", torch.rand_like(h) if i == varying else torch.rand_like(h[:, :, :1, :1])
        )
    var = torch.rand(x.shape[:2]).double()[..., None, None] * torch.rand(1, 1, size, size).double()
    return net, Gaussian(x, var)


def jacobian_covariance(net: Block, x: Gaussian) -> Tensor:
    """Σ_i P_ji J_ji v_i, with both matrices written out."""
    a, b = torch.func.jacrev(net.sides)(x.mean)
    return (a * b * x.var).flatten(4).sum(-1)


@every_block
@pytest.mark.parametrize("varying", [0, 1], ids=["first gates vary", "second gates vary"])
@pytest.mark.parametrize("size", [4, 5])
def test_the_covariance_is_exact_if_one_factor_varies_over_positions(
    name: str, varying: int, size: int
) -> None:
    net, x = build(name, varying, size)
    known = vp.VBP(net, x).var - (vp.VBP | INDEPENDENT)(net, x).var
    torch.testing.assert_close(known / 2, jacobian_covariance(net, x))


@every_block
def test_the_covariance_agrees_with_sampling(name: str) -> None:
    net, x = build(name, varying=0)
    align(net.shortcut, *net.layers)
    vp.variational(net, logvar=-4.0)

    class Sides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(self.net.sides(x))

    with torch.no_grad():
        predicted = (vp.VBP(net, x).var - (vp.VBP | INDEPENDENT)(net, x).var) / 2
        sides = draws(Sides(), x, 4000)
    centred = sides - sides.mean(0)
    products = centred[:, 0] * centred[:, 1]
    for of_each, claim in ((products, predicted), (products.flatten(1).sum(1), predicted.sum())):
        error = of_each.std(0) / len(sides) ** 0.5
        assert ((claim - of_each.mean(0)).abs() < 5 * error).all()
    assert predicted.sum() > 5 * error


RESNETS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18, halved": lambda: BasicBlock(4, 8, stride=2),
    "ResNet-50": lambda: Bottleneck(16, 4),
    "ResNet-50, halved": lambda: Bottleneck(8, 4, stride=2),
}


@pytest.mark.parametrize("name", RESNETS)
def test_the_correction_brings_resnet_blocks_closer_to_sampling(name: str) -> None:
    torch.manual_seed(0)
    net = RESNETS[name]().double().eval()
    layers = [
        module
        for path, module in net.named_modules()
        if isinstance(module, nn.Conv2d) and "downsample" not in path
    ]
    align(None if net.downsample is None else net.downsample[0], *layers)
    norm = [
        module
        for path, module in net.named_modules()
        if isinstance(module, nn.BatchNorm2d) and "downsample" not in path
    ][-1]
    nn.init.constant_(norm.bias, 4.0)  # the last ReLU is open
    vp.variational(net, logvar=-9.0)
    shape = (1, layers[0].in_channels, 6, 6)
    x = Gaussian(torch.randn(shape).double(), torch.full(shape, 0.05).double())
    assert [str(row.kind) for row in vp.summary(net, vp.DVI, x).operations if row.name == "add"] == [
        "corrected (Eq. 28)"
    ]
    with torch.no_grad():
        truth = draws(net, x, 2000).var(0)
        corrected, independent = (
            ((method(net, x).var / truth).log().mean()).abs() for method in (vp.DVI, vp.DVI | INDEPENDENT)
        )
    assert corrected < 0.6 * independent


def test_paths_without_a_cheap_formula_stay_independent() -> None:
    x = torch.randn(2, 4, 6, 6)
    inputs = [x, x, x]
    wide = [conv(4, 4, 3)] * 3
    plain, dense = Path([], [1.0], []), [nn.Linear(4, 4)] * 2
    assert diagonal(x.square(), plain, Path(wide, [1.0, 1.0, 1.0, 1.0], inputs)) is None
    for shortcut in (conv(4, 4, 3), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, stride=2)):
        assert (
            diagonal(
                x.square(), Path([shortcut], [1.0, 1.0], [x]), Path(wide[:2], [1.0, 1.0, 1.0], inputs[:2])
            )
            is None
        )
    one_by_one = x[..., :1, :1]
    assert (
        diagonal(
            one_by_one.square(),
            Path([conv(4, 4, 1)], [1.0, 1.0], [one_by_one]),
            Path(dense, [1.0] * 3, inputs[:2]),
        )
        is None
    )
    many = torch.randn(1, 64, 1, 1)
    bottleneck = [conv(64, 64, 1), conv(64, 64, 3), conv(64, 64, 1)]
    assert diagonal(many.square(), plain, Path(bottleneck, [1.0] * 4, [many] * 3)) is None
