"""Mean and variance of a deep network with the correlations of its activations, by the Jacobian of the mean.

A method assumes independent activations, so it ignores that units share inputs and that positions share
weights. Here every source of randomness is propagated to the output along all paths at once (Eq. 29). The
mean depends on the weights' means through every rule of the method, so autograd gives the first-order
variance of any network that the method supports. Terms beyond first order are added as noise at the operation
where they arise, as its rule states (Eq. 30, 31).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from .gaussian import Activation, Gaussian, move
from .methods.base import Call, Method, Value
from .methods.noise import Bound, Noise, of_weights
from .methods.tables import DVI
from .posterior import is_random, posteriors

ENTRIES = 2**24
"""How many derivatives to hold in memory at once."""


@torch.no_grad()
def correlated(net: nn.Module, *x: Activation, method: Method = DVI) -> Gaussian:
    """Mean and variance of the output, with the correlations that a pass of the method leaves out (Eq. 29).

        Var[f] = Σ_s (∂E[f]/∂s)² Var[s]    over weights s and, beyond first order, noise of the layers

    Exact for one hidden layer of elementwise activations and for three linear layers, with deterministic
    inputs. It takes one backward pass for each output of the network and returns no gradients, so it is meant
    for prediction, not for training. The first dimension of each input counts examples.

    >>> net = nn.Sequential(nn.Conv1d(1, 1, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    >>> net, x = vp.variational(net, logvar=0.0), torch.ones(1, 1, 100)
    >>> [round(f.var.item(), 2) for f in (vp.DVI(net, x), vp.correlated(net, x))]  # one weight, averaged
    [0.01, 1.0]
    """
    _check(net, x, method)
    first = [move(lambda t: t[:1], a) for a in x]
    alone = _alone(net, method, first)
    weights = dict(_weights(net, alone))
    noise = Noise(alone)
    output = method.watching(noise.watch)(net, *noise.inputs(first))
    if not isinstance(output, Gaussian):
        raise TypeError(
            f"correlated: needs one Gaussian as the network's output, and {method.name} gives a "
            f"{type(output).__name__}; see vp.DVI(net, x)."
        )
    shifts = [torch.zeros_like(var) for var in noise.variances]
    sources = sum(t.numel() for t in (*(w.mean for w in weights.values()), *shifts))
    bound = Bound(net)

    def one(*example: Activation) -> tuple[Tensor, Tensor]:
        rows = [move(lambda t: t.unsqueeze(0), a) for a in example]

        def mean(means: dict[str, Tensor], shifts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            noise = Noise(alone, shifts)
            f = functional_call(bound, means, (method.watching(noise.watch), *noise.inputs(rows)))
            return f.mean[0], noise.variances

        pulled: Value = vjp(mean, {name: w.mean for name, w in weights.items()}, shifts, has_aux=True)
        f, gradients, noise = pulled
        variances = [*(w.var for w in weights.values()), *noise]

        def var(output: Tensor) -> Tensor:
            of_weights, of_noise = gradients(output)
            slopes = [*of_weights.values(), *of_noise]
            parts = [g.flatten().square() @ v.flatten() for g, v in zip(slopes, variances, strict=True)]
            return torch.stack(parts).sum()

        outputs = torch.eye(f.numel(), dtype=f.dtype, device=f.device).view(-1, *f.shape)
        return f, vmap(var, chunk_size=max(1, ENTRIES // sources))(outputs).view(f.shape)

    at_once = max(1, ENTRIES // (output.mean.numel() * sources))
    return Gaussian.of(*vmap(one, chunk_size=at_once)(*x))


def _check(net: nn.Module, x: Sequence[Activation], method: Method) -> None:
    if method.samples:
        raise ValueError(
            f"correlated: {method.name} draws samples and carries no variance; "
            "use a method with moments, such as vp.DVI."
        )
    if next(posteriors(net), None) is None and not any(isinstance(a, Gaussian) for a in x):
        raise ValueError(
            "correlated: neither the weights nor the inputs are random; "
            "make the weights random with variational(net)."
        )
    if not x or any(len(a.shape) == 0 or a.shape[0] != x[0].shape[0] or a.shape[0] == 0 for a in x):
        raise ValueError(
            "correlated: inputs must have examples in their first dimension, "
            f"got shapes {[tuple(a.shape) for a in x]}."
        )
    for module in net.modules():
        norm, kind = isinstance(module, nn.modules.batchnorm._BatchNorm), type(module).__name__
        if norm and (module.training or module.running_mean is None):
            raise ValueError(
                f"correlated: {kind} mixes examples by the statistics of a batch; "
                "give it running statistics and call net.eval()."
            )
        drops = isinstance(module, nn.modules.dropout._DropoutNd) or getattr(module, "dropout", False)
        if module.training and drops:
            raise ValueError(
                f"correlated: {kind} is in training mode and drops entries; call net.eval() first."
            )


def _alone(net: nn.Module, method: Method, x: Sequence[Activation]) -> set[nn.Module]:
    """Linear layers applied once per example: no two outputs share weights, so their noise is independent."""
    rows: Counter[nn.Module] = Counter()

    def count(call: Call) -> Value:
        layer = call.operation
        counts = (
            call.rule.noise is of_weights and isinstance(layer, nn.Linear) and not hasattr(layer, "scales")
        )
        if counts and is_random(call.module):
            rows[call.module] += call.x.shape[:-1].numel()
        return call.output

    method.watching(count)(net, *x)
    return {layer for layer, n in rows.items() if n == 1}


def _weights(net: nn.Module, alone: set[nn.Module]) -> Iterator[tuple[str, Gaussian]]:
    """Every other normal variable, by the name of its mean in the bound network.

    The scales of a horseshoe are normal in their logarithms.
    """
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
