"""Mean and variance of a deep network with the correlations of its activations, by the Jacobian of the mean.

A method assumes independent activations, so it ignores that units share inputs and that positions share
weights. Here every source of randomness is propagated to the output along all paths at once (Eq. 29). The
mean depends on the weights' means through every rule of the method, so autograd gives the first-order
variance of any network that the method supports. Terms beyond first order are added as noise at the operation
where they arise, as its rule states (Eq. 30, 31).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from .gaussian import Gaussian
from .graph.steps import tensors_in
from .graph.store import UndecidedError
from .methods.base import Call, Function, Method, Value, Which, chosen, is_random_value
from .methods.noise import Noise, Source, Uses, of_weights
from .methods.tables import DVI
from .posterior import is_random, posteriors
from .substitution import substituted

ENTRIES = 2**24
"""How many derivatives to hold in memory at once."""


def correlated(
    net: nn.Module,
    *x: Value,
    method: Method = DVI,
    output: Which = None,
    outputs: int | Sequence[int] | Tensor | None = None,
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
    _check(net, inputs, method, batched)
    first = _examples(lambda t: t[:1], inputs) if batched else inputs
    network = _Network.of(net, method, output, batched, first, inputs)

    def one(example: Value) -> tuple[Tensor, Tensor]:
        linear = network.at(example, network.factors(example))
        rows = _rows(outputs, linear.mean.flatten())
        at_once = max(1, ENTRIES // network.size)
        var = torch.cat([linear.variances(part) for part in rows.split(at_once)])
        if outputs is None:
            return linear.mean, var.view(linear.mean.shape)
        return rows @ linear.mean.flatten(), var

    if not batched:
        return Gaussian.of(*one(inputs))
    at_once = max(1, ENTRIES // (len(_rows(outputs, network.mean.flatten())) * network.size))
    try:
        every = vmap(lambda inputs: one(_examples(lambda t: t.unsqueeze(0), inputs)), chunk_size=at_once)
        return Gaussian.of(*every(inputs))
    except UndecidedError:
        found = []
        for i in range(len(tensors_in(inputs)[0])):
            args, given = example = _examples(itemgetter(slice(i, i + 1)), inputs)
            method(net, *args, **given)  # takes the graph of this example's decisions
            found.append(one(example))
        return Gaussian.of(*map(torch.stack, zip(*found, strict=True)))


@dataclass(frozen=True)
class _Linear:
    """The means of one example as linear functions of all sources of randomness."""

    mean: Tensor
    """Of the outputs."""
    averages: list[Gaussian]
    """Averages over positions inside the network, with the variances of independent positions."""
    gradients: Function
    weights: list[Tensor]
    """Variances of the weights that are followed by autograd."""
    sources: list[list[Source]]

    def variances(self, rows: Tensor, average: int | None = None) -> Tensor:
        """Of weighted sums of the outputs, a row for each, or of an average inside the network."""
        means = [self.mean, *(y.mean for y in self.averages)]
        place = 0 if average is None else average + 1

        def gradients(row: Tensor) -> Value:
            sums = [torch.zeros_like(t) for t in means]
            sums[place] = row.view_as(means[place])
            return self.gradients(sums)

        of_weights, of_shifts = vmap(gradients)(rows)
        slopes = [*of_weights.values()]
        slopes += [sum(s.slopes(of_shifts[s.shift]) for s in same) for same in self.sources]
        variances = [*self.weights, *(same[0].var for same in self.sources)]
        parts = [slope.flatten(1).square() @ v.flatten() for slope, v in zip(slopes, variances, strict=True)]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class _Network:
    """A network, with what a first pass tells about it."""

    net: nn.Module
    method: Method
    output: Which
    batched: bool
    uses: Uses
    weights: dict[str, Gaussian]
    """Those that are followed by autograd."""
    mean: Tensor
    shifts: list[Tensor]
    signs: list[Tensor]
    """Of the entries of each average, a row for each sum."""
    size: int
    """The largest number of derivatives of an output by one source."""

    @classmethod
    def of(
        cls, net: nn.Module, method: Method, output: Which, batched: bool, first: Value, inputs: Value
    ) -> _Network:
        uses = _uses(net, method, first, inputs)
        weights, noise = dict(_weights(net, uses)), Noise(uses)
        args, given = noise.inputs(first)
        f = chosen(method.watching(noise.watch)(net, *args, **given), output)
        if not isinstance(f, Gaussian):
            raise TypeError(
                f"correlated: needs one Gaussian as the network's output, and {method.name} gives a "
                f"{type(f).__name__}; see vp.DVI(net, x), and name the value that is meant with output=."
            )
        tensors = f.mean, *(w.mean for w in weights.values()), *(s.var for s in noise.sources)
        signs, size = [_signs(y.mean) for y in noise.averages], max(t.numel() for t in tensors)
        return cls(net, method, output, batched, uses, weights, f.mean, noise.shapes, signs, size)

    def at(self, example: Value, factors: list[Tensor] | None) -> _Linear:
        """The network near its means at one example."""

        def means(weights: dict[str, Tensor], shifts: list[Tensor]) -> Value:
            noise = Noise(self.uses, shifts, factors)
            args, given = noise.inputs(example)
            watched = self.method.watching(noise.watch)
            f = chosen(substituted(self.net, weights, watched, *args, **given), self.output).mean
            averages = noise.averages
            return [f[0] if self.batched else f, *(y.mean for y in averages)], (noise.sources, averages)

        at = {name: w.mean for name, w in self.weights.items()}
        pulled: Value = vjp(means, at, self.shifts, has_aux=True)
        (mean, *_), gradients, (sources, averages) = pulled
        weights = [w.var for w in self.weights.values()]
        return _Linear(mean, averages, gradients, weights, list(_grouped(sources)))

    def factors(self, example: Value) -> list[Tensor] | None:
        """The variance of each average over that of independent positions (Eq. 31)."""
        if not self.signs:
            return None
        linear = self.at(example, None)
        found = []
        for i, (y, signs) in enumerate(zip(linear.averages, self.signs, strict=True)):
            var = linear.variances(signs, average=i).mean()
            independent = y.var.sum()
            found.append(
                torch.where(independent > 0, var / torch.where(independent > 0, independent, 1.0), 1.0)
            )
        return found


def _signs(y: Tensor, n: int = 2) -> Tensor:
    """Rows of random signs, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(2, (n, *y.shape), generator=generator) - 1).to(y)


def _examples(change: Callable[[Tensor], Tensor], inputs: Value) -> Value:
    return pytree.tree_map_only(Tensor, change, inputs)


def _rows(outputs: int | Sequence[int] | Tensor | None, f: Tensor) -> Tensor:
    """A row for each weighted sum of outputs whose variance is wanted."""
    if isinstance(outputs, Tensor) and outputs.dim() == 2:
        return outputs.to(f)
    every = torch.eye(f.numel(), dtype=f.dtype, device=f.device)
    if outputs is None:
        return every
    return every[f.topk(outputs).indices if isinstance(outputs, int) else torch.as_tensor(outputs)]


def _grouped(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Sources of noise one by one, and all uses of a layer's weights together."""
    groups: dict[Hashable, list[Source]] = {}
    for i, source in enumerate(sources):
        groups.setdefault(i if source.layer is None else (source.layer, source.part), []).append(source)
    yield from groups.values()


def _check(net: nn.Module, inputs: Value, method: Method, batched: bool) -> None:
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
