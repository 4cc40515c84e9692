"""Mean and variance of a deep network with the correlations of its activations, by the Jacobian of the mean.

A method assumes independent activations, so it ignores that units share inputs and that positions share
weights. Here every source of randomness is propagated to the output along all paths at once (Eq. 29). The
mean depends on the weights' means through every rule of the method, so autograd gives the first-order
variance of any network that the method supports. Terms beyond first order are added as noise at the operation
where they arise, as its rule states (Eq. 30, 31).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from .cache import WeightCache
from .gaussian import Gaussian
from .graph.steps import tensors_in
from .graph.store import UndecidedError
from .methods.base import (
    Call,
    Function,
    Method,
    Value,
    Which,
    check_method,
    check_network,
    chosen,
    is_random_value,
)
from .methods.noise import Noise, Uses, of_weights
from .methods.tables import DVI
from .posterior import is_random, posteriors
from .substitution import substituted
from .tangent import Tangent, followed, gradients, recorded, signs
from .wanted import Outputs, Wanted

ENTRIES = 2**24
"""How many derivatives to hold in memory at once."""


def correlated(
    net: nn.Module,
    *x: Value,
    method: Method = DVI,
    output: Which = None,
    outputs: Outputs = None,
    batched: bool = True,
    **options: Value,
) -> Gaussian:
    """Mean and variance of the output, with the correlations that a pass of the method leaves out (Eq. 29).

        Var[f] = Σ_s (∂E[f]/∂s)² Var[s]    over weights s and, beyond first order, noise of the layers

    Exact for one hidden layer of elementwise activations and for three linear layers, with deterministic
    inputs. It takes a backward pass for each output of the network. It has gradients of its own, so a network
    of few outputs can be trained with it.

    :param x: inputs, as the network takes them; so are the keyword inputs in `options`. The first dimension
        of each tensor counts examples, which must not depend on each other.
    :param output: which value is meant if the network returns several: an item, an attribute, or a function
        that picks it.
    :param outputs: the outputs whose variance is wanted, by their numbers; or how many, those of the largest
        mean; or a matrix with a row for each weighted sum of outputs.
    :param batched: False if the input is one example, such as a graph whose nodes are rows.

    >>> net = nn.Sequential(nn.Conv1d(1, 1, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    >>> net, x = vp.variational(net, logvar=0.0), torch.ones(1, 1, 100)
    >>> [round(f.var.item(), 2) for f in (vp.DVI(net, x), vp.correlated(net, x))]  # one weight, averaged
    [0.01, 1.0]
    """
    inputs: Value = x, options
    if torch.is_inference_mode_enabled():  # its tensors have no derivatives
        with torch.inference_mode(False), torch.no_grad():
            x, options = _examples(Tensor.clone, inputs)
            return correlated(
                net, *x, method=method, output=output, outputs=outputs, batched=batched, **options
            )
    _check(net, inputs, method, batched)
    with WeightCache():  # what the passes below compute from the weights, they share
        return _correlated(net, inputs, method, output, outputs, batched)


def _correlated(
    net: nn.Module, inputs: Value, method: Method, output: Which, outputs: Outputs, batched: bool
) -> Gaussian:
    network = _Network.of(net, method, output, batched, inputs)
    wanted = Wanted(outputs, network.outputs)
    if not batched:
        return Gaussian.of(*network.moments(wanted, inputs, 1))
    n = len(tensors_in(inputs)[0])
    rows = len(wanted) if network.is_transformed(inputs) else 1
    at_once = max(1, ENTRIES // (rows * network.size))
    parts = [slice(i, i + at_once) for i in range(0, n, at_once)]
    if not network.in_turn:
        try:
            return Gaussian.of(*vmap(partial(network.one, wanted), chunk_size=at_once)(inputs))
        except UndecidedError:
            parts = [slice(i, i + 1) for i in range(n)]
    found = []
    for part in parts:
        args, given = some = _examples(itemgetter(part), inputs)
        if not network.in_turn:
            method(net, *args, **given)  # takes the graph of this example's decisions
        found.append(network.moments(wanted, some, len(tensors_in(some)[0])))
    return Gaussian.of(*map(torch.cat, zip(*found, strict=True)))


@dataclass(frozen=True)
class _Network:
    """A network, with what passes of one and of two examples tell about it."""

    net: nn.Module
    method: Method
    output: Which
    batched: bool
    uses: Uses
    weights: dict[str, Gaussian]
    """Those that no rule states as a source."""
    shifts: list[Tensor]
    """Zeros, for one example."""
    outputs: int
    size: int
    """The largest number of derivatives of an output by one source."""
    in_turn: bool
    """Whether one pass can serve several examples: every shift holds one example after the other."""
    tangent: Tangent | None = None
    """At the inputs, if they are one example and nothing has to be known before its pass."""

    @classmethod
    def of(cls, net: nn.Module, method: Method, output: Which, batched: bool, inputs: Value) -> _Network:
        first = _examples(itemgetter(slice(1)), inputs) if batched else inputs
        uses = _uses(net, method, first, inputs)
        weights, noise = dict(_weights(net, uses)), Noise(uses)
        is_one = not batched or len(tensors_in(inputs)[0]) == 1
        if is_one and not weights and not _is_transformed(net, inputs):
            tangent = recorded(partial(_run, net, method, output, inputs), uses, 1, net)
            entries = tangent.mean.numel()
            size = max(entries, tangent.size)
            return cls(net, method, output, batched, uses, weights, [], entries, size, True, tangent)
        f = _run(net, method, output, first, {}, noise)
        shifts = [torch.zeros_like(mean) for mean in noise.means]
        run = partial(_run, net, method, output)
        in_turn = batched and not weights and _lie_in_turn(run, uses, shifts, inputs)
        tensors = [f.mean, *shifts, *(w.mean for w in weights.values())]
        if not in_turn:
            tensors += [s.var for s in noise.sources]
        size = max(t.numel() for t in tensors)
        return cls(net, method, output, batched, uses, weights, shifts, f.mean.numel(), size, in_turn)

    def moments(self, wanted: Wanted, inputs: Value, n: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs that are wanted, of n examples."""
        run = partial(_run, self.net, self.method, self.output, inputs)
        if self.is_transformed(inputs):
            shifts = [t.repeat(n, *(1,) * (t.dim() - 1)) if n > 1 else t for t in self.shifts]
            tangent = followed(run, self.uses, n, self.weights, shifts)
            f = tangent.mean
        else:
            tangent = self.tangent or recorded(run, self.uses, n, self.net)
            f = tangent.mean.detach()
        flat, sums, var = f.reshape(n, -1), [], []
        for rows in wanted.rows(flat, at_once=max(1, ENTRIES // (n * self.size))):
            sums.append(torch.einsum("kne,ne->nk", rows, flat))
            var.append(tangent.variances(rows))
        found = torch.cat(sums, 1), torch.cat(var, 1)
        if wanted.outputs is None:
            return f, found[1].view_as(f)
        return found if self.batched else (found[0][0], found[1][0])

    def one(self, wanted: Wanted, inputs: Value) -> tuple[Tensor, Tensor]:
        """The same of one example, whose tensors do not count examples."""
        mean, var = self.moments(wanted, _examples(lambda t: t.unsqueeze(0), inputs), 1)
        return mean[0], var[0]

    def is_transformed(self, inputs: Value) -> bool:
        """Whether torch.func is needed: the result is to be differentiated, or the network is transformed."""
        return bool(self.weights) or _is_transformed(self.net, inputs)


def _run(
    net: nn.Module, method: Method, output: Which, inputs: Value, weights: Mapping[str, Tensor], noise: Noise
) -> Gaussian:
    """A pass with these weights in the place of the network's own, and with this noise."""
    args, given = noise.inputs(inputs)
    f = chosen(substituted(net, weights, method.watching(noise.watch), *args, **given), output)
    if not isinstance(f, Gaussian):
        raise TypeError(
            f"correlated: needs one Gaussian as the network's output, and {method.name} gives a "
            f"{type(f).__name__}; see vp.DVI(net, x), and name the value that is meant with output=."
        )
    return f


def _is_transformed(net: nn.Module, inputs: Value) -> bool:
    """Whether the result is to be differentiated, or the network is transformed."""
    tensors = *net.parameters(), *tensors_in(inputs)
    return _inside_transform() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _inside_transform() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _lie_in_turn(run: Function, uses: Uses, shifts: Sequence[Tensor], inputs: Value) -> bool:
    """Whether every shift holds one example after the other: by the shapes and the slopes of two examples."""
    if len(tensors_in(inputs)[0]) < 2:
        return True
    if _inside_transform():
        return False
    with torch.enable_grad():
        noise = Noise(uses, 2, recorded=True)
        f = run(_examples(itemgetter(slice(2)), inputs), {}, noise).mean
    pairs = [(tuple(mean.shape), tuple(zero.shape)) for mean, zero in zip(noise.means, shifts, strict=True)]
    if not all(one and two == (2 * one[0], *one[1:]) for two, one in pairs):
        return False
    of_first = torch.zeros_like(f)
    of_first[0] = signs(f[:1].reshape(1, -1), 1).view_as(f[0])
    _, slopes = gradients(f, noise.means, of_first)
    return not any(slope[len(slope) // 2 :].any() for slope in slopes if slope is not None)


def _examples(change: Callable[[Tensor], Tensor], inputs: Value) -> Value:
    return pytree.tree_map_only(Tensor, change, inputs)


def _check(net: nn.Module, inputs: Value, method: Method, batched: bool) -> None:
    check_network("correlated", net)
    check_method("correlated", method)
    if method.samples:
        raise ValueError(
            f"correlated: {method.name} draws samples and carries no variance; "
            "use a method with moments, such as vp.DVI."
        )
    if next(posteriors(net), None) is None and not is_random_value(inputs):
        raise ValueError(
            "correlated: neither the weights nor the inputs are random; "
            "make the weights random with variational(net)."
        )
    if not batched:
        return
    shapes = [tuple(t.shape) for t in tensors_in(inputs)]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes} - {0}) != 1:
        raise ValueError(
            f"correlated: inputs must have examples in their first dimension, got shapes {shapes}; "
            "give batched=False if the input is one example."
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


def _uses(net: nn.Module, method: Method, first: Value, inputs: Value) -> Uses:
    rows: Counter[nn.Module] = Counter()
    directly: set[int] = set()

    def count(call: Call) -> Value:
        if isinstance(call.operation, nn.Module):
            layer = call.module
            if call.rule.noise is of_weights and is_random(layer) and not hasattr(layer, "scales"):
                rows[layer] += call.x.shape[:-1].numel() if isinstance(layer, nn.Linear) else 2
        else:
            directly.update(id(a.mean) for a in call.args if isinstance(a, Gaussian))
        return call.output

    try:
        method.watching(count)(net, *first[0], **first[1])
    except (RuntimeError, IndexError) as error:
        method(net, *inputs[0], **inputs[1])  # the network's own error, if it takes no such inputs at all
        raise ValueError(
            "correlated: the network does not take one row of the input alone, so its rows depend on each "
            "other; give batched=False to take the input as one example."
        ) from error
    directly |= {tensor for tensor, n in _owners(net).items() if n > 1}
    own = [layer for layer in rows if not any(id(q.mean) in directly for _, q in posteriors(layer))]
    alone = frozenset(layer for layer in own if rows[layer] == 1)
    return Uses(alone, frozenset(own) - alone)


def _owners(net: nn.Module) -> Counter[int]:
    """How many layers each parameter belongs to."""
    return Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))


def _weights(net: nn.Module, uses: Uses) -> Iterator[tuple[str, Gaussian]]:
    """Every other normal variable, by the name of its mean.

    The scales of a horseshoe are normal in their logarithms.
    """
    for name, q in posteriors(net):
        path = name.rpartition(".")[0]
        if net.get_submodule(path) in uses.alone | uses.shared:
            continue
        yield name, Gaussian.of(q.mean, q.var.expand_as(q.mean))
        if q.scales is not None:
            for part in ("group", "layer"):
                mean, logvar = getattr(q.scales, f"{part}_mean"), getattr(q.scales, f"{part}_logvar")
                yield (
                    ".".join(filter(None, (path, "scales", f"{part}_mean"))),
                    Gaussian.of(mean, logvar.exp()),
                )
