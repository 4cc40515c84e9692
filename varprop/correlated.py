"""Mean and variance of a deep network with the correlations of its activations, by the Jacobian of the mean.

A method takes activations as independent, and so forgets that units share inputs and that positions share weights. Here every source of
randomness is followed to the output, along all paths at once (Eq. 49). The mean depends on the weights' means through every rule of the
method, so that autograd gives the first order of anything that a method takes. The rest is added where it arises (Eq. 50, 51).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from .gaussian import Activation, Gaussian, mean_of, move, sqrt
from .methods import functions, moments
from .methods.base import Method, Rule, Watching
from .methods.correlation import gain
from .methods.dvi import DVI
from .methods.kinds import parts_of
from .moments import smooth_slope
from .posterior import Layer, is_random, posteriors

TOGETHER = 0.5
"""Correlation that the deviations of one feature have at two positions: halfway between none and one, where weights are shared (Eq. 51)."""
ENTRIES = 2**24
"""How many derivatives to hold at a time."""


@torch.no_grad()
def correlated(net: nn.Module, *x: Activation, method: Method = DVI) -> Gaussian:
    """Mean and variance of the output, with the correlations of activations that a pass of the method leaves out (Eq. 49).

        Var[f] = Σ_s (∂E[f]/∂s)² Var[s]    over weights s and, for what is not linear in them, over noise that layers add

    Exact for one hidden layer of elementwise activations and for three linear layers, with certain inputs. It takes a backward pass for
    each output of the network, and gives no gradients: for predictions, not for training. Examples are rows of the first dimension.

    >>> net = vp.variational(nn.Sequential(nn.Conv1d(1, 1, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten()), logvar=0.0)
    >>> x = torch.ones(1, 1, 100)
    >>> [round(f.var.item(), 2) for f in (vp.DVI(net, x), vp.correlated(net, x))]      # one weight, averaged with itself
    [0.01, 1.0]
    """
    _check(net, x, method)
    first = [move(lambda t: t[:1], a) for a in x]
    alone = _alone(net, method, first)
    weights = dict(_weights(net, alone))
    bound = _Bound(net)

    def one(*example: Activation) -> tuple[Tensor, Tensor]:
        rows = [move(lambda t: t.unsqueeze(0), a) for a in example]

        def mean(means: dict[str, Tensor], shifts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            noise = _Noise(alone, shifts)
            f = functional_call(bound, means, (noise.method(method), *noise.inputs(rows)))
            return f.mean[0], noise.variances

        pulled: Any = vjp(mean, {name: w.mean for name, w in weights.items()}, shifts, has_aux=True)
        f, gradients, noise = pulled
        variances = [*(w.var for w in weights.values()), *noise]

        def var(output: Tensor) -> Tensor:
            of_weights, of_noise = gradients(output)
            slopes = [*of_weights.values(), *of_noise]
            return torch.stack(
                [g.flatten().square() @ v.flatten() for g, v in zip(slopes, variances, strict=True)]
            ).sum()

        outputs = torch.eye(f.numel(), dtype=f.dtype, device=f.device).view(-1, *f.shape)
        return f, vmap(var, chunk_size=max(1, ENTRIES // sources))(outputs).view(f.shape)

    noise = _Noise(alone)
    output = noise.method(method)(net, *noise.inputs(first))
    if not isinstance(output, Gaussian):
        kind = type(output).__name__
        raise TypeError(
            f"correlated: needs one Gaussian as the network's output, and {method.name} gives a {kind}; see vp.DVI(net, x)."
        )
    shifts = [torch.zeros_like(var) for var in noise.variances]
    sources = sum(w.mean.numel() for w in weights.values()) + sum(shift.numel() for shift in shifts)
    at_once = max(1, ENTRIES // (output.mean.numel() * sources))
    return Gaussian.of(*vmap(one, chunk_size=at_once)(*x))


def _check(net: nn.Module, x: Sequence[Activation], method: Method) -> None:
    if method.samples:
        raise ValueError(
            f"correlated: {method.name} draws samples and carries no variance; give a method with moments, such as vp.DVI."
        )
    if next(posteriors(net), None) is None and not any(isinstance(a, Gaussian) for a in x):
        raise ValueError(
            "correlated: neither the weights nor the inputs are random; make weights random with variational(net)."
        )
    if not x or any(len(a.shape) == 0 or a.shape[0] != x[0].shape[0] or a.shape[0] == 0 for a in x):
        raise ValueError(
            f"correlated: inputs must have examples in their first dimension, got shapes {[tuple(a.shape) for a in x]}."
        )
    for module in net.modules():
        norm, kind = isinstance(module, nn.modules.batchnorm._BatchNorm), type(module).__name__
        if norm and (module.training or module.running_mean is None):
            raise ValueError(
                f"correlated: {kind} mixes examples by the statistics of a batch; give it running ones and call net.eval()."
            )
        if module.training and (
            isinstance(module, nn.modules.dropout._DropoutNd) or getattr(module, "dropout", False)
        ):
            raise ValueError(
                f"correlated: {kind} is in training, where it drops entries; call net.eval() first."
            )


class _Bound(nn.Module):
    """A module with a `forward` that passes it through a method or a rule, which is what `functional_call` can call."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method: Callable[..., Any], *x: Activation) -> Any:
        return method(self.net, *x)


# ----------------------------------------------------------------------------------------------------------- random weights


def _alone(net: nn.Module, method: Method, x: Sequence[Activation]) -> set[nn.Module]:
    """Linear layers that one example passes once: every output has weights of its own, and their noise is independent."""
    rows: Counter[nn.Module] = Counter()

    def counted(rule: Rule, method: Method, layer: nn.Module, x: Activation) -> Any:
        if is_random(layer) and isinstance(layer, nn.Linear) and not hasattr(layer, "scales"):
            rows[layer] += x.shape[:-1].numel()
        return rule(method, layer, x)

    (
        method
        | {
            key: Watching(counted, rule)
            for key, rule in method.rules.items()
            if moments.affine in parts_of(rule)
        }
    )(net, *x)
    return {layer for layer, n in rows.items() if n == 1}


def _weights(net: nn.Module, alone: set[nn.Module]) -> Iterator[tuple[str, Gaussian]]:
    """Every other normal variable, by the name of its mean in a bound network; horseshoe scales are normal in their logarithms."""
    for name, q in posteriors(net):
        path = name.rpartition(".")[0]
        if net.get_submodule(path) in alone:
            continue
        yield f"net.{name}", Gaussian.of(q.mean, q.var.expand_as(q.mean))
        if q.scales is not None:
            for part in ("group", "layer"):
                mean, logvar = getattr(q.scales, f"{part}_mean"), getattr(q.scales, f"{part}_logvar")
                yield (
                    ".".join(filter(None, ("net", path, "scales", f"{part}_mean"))),
                    Gaussian.of(mean, logvar.exp()),
                )


# -------------------------------------------------------------------------------------------------- noise that layers add


class _Noise:
    """What a pass adds to the first order: variances, and for each a shift of the mean that stands for it, by default zero."""

    def __init__(self, alone: set[nn.Module], shifts: Sequence[Tensor] | None = None) -> None:
        self.alone, self.variances = alone, list[Tensor]()
        self._shifts = None if shifts is None else iter(shifts)

    def shift(self, var: Tensor) -> Tensor:
        self.variances.append(var)
        return torch.zeros_like(var) if self._shifts is None else next(self._shifts)

    def added(self, x: Gaussian, var: Tensor) -> Gaussian:
        """x with independent noise."""
        return Gaussian.of(x.mean + self.shift(var), x.var)

    def inputs(self, x: Sequence[Activation]) -> list[Activation]:
        return [self.added(a, a.var) if isinstance(a, Gaussian) else a for a in x]

    def method(self, method: Method) -> Method:
        """The method, whose rules note what they add where the library knows it."""
        rules = {key: (rule, set(parts_of(rule))) for key, rule in method.rules.items()}
        noisy = {
            key: Watching(NOISE[f], self, rule)
            for key, (rule, parts) in rules.items()
            for f in parts
            if f in NOISE
        }
        return (
            method
            | noisy
            | {key: partial(_average, rule) for key, (rule, parts) in rules.items() if parts & AVERAGES}
        )


def _affine(noise: _Noise, rule: Rule, method: Method, layer: Layer, x: Activation) -> Any:
    """A layer's second order, deviations of its weights times deviations of its input (Eq. 50); all of its noise where it is alone."""
    y = rule(method, layer, x)
    if layer in noise.alone:
        return noise.added(
            y, y.var if isinstance(x, Tensor) else rule(method, layer, sqrt(x.second_moment)).var
        )
    if isinstance(x, Tensor) or not is_random(layer):
        return y
    apart = rule(method, layer, x.std).var - rule(method, layer, torch.zeros_like(x.mean)).var
    if hasattr(layer, "scales"):
        return noise.added(y, apart)
    return _shared(noise, rule, method, layer, x, noise.added(y, (1 - TOGETHER) * apart))


def _shared(noise: _Noise, rule: Rule, method: Method, layer: Layer, x: Gaussian, y: Gaussian) -> Gaussian:
    """The part of the second order that positions have in common, since they share the weights (Eq. 51)."""
    shift = {
        "net.weight": noise.shift(TOGETHER * dict(posteriors(layer))["weight"].var.expand_as(layer.weight))
    }
    if layer.bias is not None:
        shift["net.bias"] = torch.zeros_like(layer.bias)
    common = functional_call(_Bound(layer), shift, (partial(rule, method), x.std))
    return Gaussian.of(y.mean + mean_of(common), y.var)


def _bilinear(
    noise: _Noise, rule: Rule, method: Method, function: Any, a: Any, b: Any, *rest: Any, **options: Any
) -> Any:
    """A product of two random values: the product of their deviations (Eq. 50)."""
    y = rule(method, function, a, b, *rest, **options)
    if a is b or not (isinstance(a, Gaussian) and isinstance(b, Gaussian)):
        return y
    deviations = [Gaussian.of(torch.zeros_like(g.mean), g.var) for g in (a, b)]
    without_bias = (
        (*(None for _ in rest[:1]), *rest[1:]),
        {name: value for name, value in options.items() if name != "bias"},
    )
    return noise.added(y, rule(method, function, *deviations, *without_bias[0], **without_bias[1]).var)


def _activation(noise: _Noise, rule: Rule, method: Method, module: nn.Module, x: Activation) -> Any:
    """An activation: what its mean slope leaves of the variance (Eq. 50)."""
    y = rule(method, module, x)
    return noise.added(y, _left(y, gain(method, module, x, y), x)) if isinstance(x, Gaussian) else y


def _elementwise(
    noise: _Noise,
    rule: Rule,
    method: Method,
    function: Callable[..., Tensor],
    x: Gaussian,
    *args: Any,
    **options: Any,
) -> Any:
    y = rule(method, function, x, *args, **options)
    return noise.added(y, _left(y, smooth_slope(lambda t: function(t, *args, **options), x), x))


def _left(y: Gaussian, slope: Any, x: Gaussian) -> Tensor:
    return F.relu(y.var - slope**2 * x.var)


def _average(
    rule: Rule, method: Method, average: Callable[..., Tensor], x: Activation, *args: Any, **options: Any
) -> Any:
    """Positions that are averaged have come from the same weights: in part they deviate together (Eq. 51)."""
    if not isinstance(x, Gaussian):
        return rule(method, average, x, *args, **options)
    y, together = rule(method, average, x, *args, **options), average(x.std, *args, **options).square()
    return Gaussian.of(y.mean, torch.lerp(y.var, together, TOGETHER))


NOISE: dict[Callable[..., Any], Callable[..., Any]] = {
    moments.affine: _affine,
    **dict.fromkeys((functions.affine, functions.bilinear, functions.multiply), _bilinear),
    **dict.fromkeys((moments._bent, moments._smooth), _activation),
    **dict.fromkeys((functions.elementwise, functions.power), _elementwise),
}
"""By the library's rule that it is for; all other rules add nothing to the first order."""
AVERAGES = {moments._average, moments._adaptive_average, functions.average}
