"""Many copies of one network trained at once: the splits of a data set, several seeds, the members of an ensemble.

The copies' parameters are stacked in front and the objective is mapped over them (`torch.func`), so that a step of all of them
is a step of one network with larger tensors. Each copy keeps its own data, order of batches, noise and early stopping: it ends where it
would have ended alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from ..objectives import ELBO


def fit(
    objectives: Sequence[ELBO],
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    *,
    epochs: int,
    lr: float = 0.01,
    batch_size: int = 32,
    schedule: Literal["constant", "cosine"] = "constant",
    warmup: int = 0,
    validation: Sequence[Tensor] | None = None,
    patience: int = 20,
    seeds: Sequence[int] | None = None,
    compile: bool = False,
) -> Tensor:
    """Train objectives of one shape with Adam, all at once and in place; returns the mean loss of each epoch and replica.

    After each epoch the likelihood's own parameters, such as the noise, are set from what its batches showed, and at the end from
    a pass over all data with the final weights (Eq. 21).

    :param x: inputs with the replicas in the first dimension; where all share their data, `x.expand(replicas, *x.shape)`.
    :param y: targets, likewise.
    :param weight: how often each data point counts, likewise (replicas, n).
    :param schedule: "cosine" lets the rate fall to zero over the epochs.
    :param warmup: epochs over which the divergence from the prior is phased in.
    :param validation: inputs, targets and perhaps weights, likewise. Each replica then ends with the values of its best epoch, by
        expected log-likelihood.
    :param patience: epochs without a better one after which a replica stops; training ends when all have.
    :param seeds: one for each replica's order of batches; 0, 1, 2, ... by default.
    :param compile: compile the step with `torch.compile`. It takes some ten seconds and pays beyond a few thousand steps.

    >>> def member():
    ...     net = vp.variational(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), init="he")
    ...     return vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=64)
    >>> members, x = [member() for _ in range(5)], torch.linspace(-1, 1, 64).view(-1, 1)
    >>> vp.replicas.fit(members, x.expand(5, 64, 1), x.abs().expand(5, 64, 1), epochs=2).shape
    torch.Size([2, 5])
    >>> ensemble = vp.predictive.mixture([member.predict(x) for member in members])
    """
    _check(objectives, x, y, weight, schedule)
    stack = _Stack(objectives)
    replicas, n = x.shape[:2]
    rows = torch.arange(replicas, device=x.device).unsqueeze(1)
    data = (x, y) if weight is None else (x, y, weight)
    generators = [
        torch.Generator().manual_seed(seed) for seed in (range(replicas) if seeds is None else seeds)
    ]
    optimiser = torch.optim.Adam(stack.trained, lr, fused=True)
    steps: dict[int, Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]] = {}
    total, done, history = epochs * math.ceil(n / batch_size), 0, []
    best = None if validation is None else _Best(stack, patience)

    for epoch in range(epochs):
        kl_weight = torch.full(
            (replicas,), min(1.0, (epoch + 1) / (warmup + 1)), dtype=x.dtype, device=x.device
        )
        order = torch.stack([torch.randperm(n, generator=generator) for generator in generators]).to(x.device)
        losses: Any = 0.0
        statistics: Any = 0.0
        for batch in order.split(batch_size, dim=1):
            arguments, size = (kl_weight, *(t[rows, batch] for t in data)), batch.shape[1]
            if size not in steps:
                steps[size] = stack.gradient(*arguments, compile=compile and size == batch_size)
            if schedule == "cosine":
                optimiser.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / total))
            with torch.no_grad():
                loss, statistic, gradients = steps[size](stack.params, stack.buffers, *arguments)
            for parameter, gradient in zip(stack.trained, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            losses, done = losses + loss * (size / n), done + 1
            statistics = statistics + _in_proportion(statistic, data, arguments[1:])
        stack.map(_update, statistics)
        history.append(losses)
        if best is not None and validation is not None and best.stops(stack.map(_data_fit, *validation)):
            break
    if best is not None:
        best.restore()
    # Within an epoch the weights moved; the noise that stays is that of the final ones.
    parts = zip(*(t.split(4096, 1) for t in data), strict=True)
    statistics = sum(_in_proportion(stack.map(_statistic, *part), data, part) for part in parts)
    stack.map(_update, statistics)
    stack.write_back()
    return torch.stack(history)


class _Bound(nn.Module):
    """An objective with a `forward` that applies any function to it, which is what `functional_call` can call."""

    def __init__(self, objective: ELBO) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, function: Callable[..., Any], *args: Tensor) -> Any:
        return function(self.objective, *args)


class _Stack:
    """The parameters and buffers of several objectives, stacked in front, and functions mapped over them."""

    def __init__(self, objectives: Sequence[ELBO]) -> None:
        self.bound = [_Bound(objective) for objective in objectives]
        self.params, self.buffers = stack_module_state(list[nn.Module](self.bound))
        self.trained = [p for p in self.params.values() if p.requires_grad]

    def _mapped(self, function: Callable[..., Any], params: Any, buffers: Any, *args: Tensor) -> Any:
        def one(params: Any, buffers: Any, *args: Tensor) -> Any:
            return functional_call(self.bound[0], (params, buffers), (function, *args))

        return vmap(one, randomness="different")(params, buffers, *args)

    @torch.no_grad()
    def map(self, function: Callable[..., Any], *args: Tensor) -> Any:
        """function(objective, *args) for each replica and its slice of the arguments."""
        return self._mapped(function, self.params, self.buffers, *args)

    def gradient(
        self, *data: Tensor, compile: bool
    ) -> Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]:
        """Losses, statistics and gradients of a batch of this shape, as one program of plain tensor operations.

        Tracing it once leaves the cost of mapping, of module calls and of recording gradients out of every further step.
        """

        def gradient(params: Any, buffers: Any, *data: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
            loss, statistic = self._mapped(_loss, params, buffers, *data)
            trained = [p for p in params.values() if p.requires_grad]
            # A parameter belongs to one replica, so the gradient of the sum is that of each replica's own loss.
            gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True, materialize_grads=True)
            # The fused optimiser reads memory in order, whatever the strides.
            return loss, statistic, [g.contiguous() for g in gradients]

        # Tracing runs the step once, which must not move running statistics.
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        program = make_fx(gradient)(self.params, copies, *data)
        _drop_idle_operations(program)
        return torch.compile(program, dynamic=False) if compile else program

    @torch.no_grad()
    def write_back(self) -> None:
        """Give each objective the values of its replica."""
        for r, bound in enumerate(self.bound):
            for name, value in (*bound.named_parameters(), *bound.named_buffers()):
                value.copy_((self.params if name in self.params else self.buffers)[name][r])


def _drop_idle_operations(program: torch.fx.GraphModule) -> None:
    """Take out what mapping and differentiating leave behind: reshapes to the same shape, results without a use."""
    aten = torch.ops.aten
    idle = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.detach.default)
    for node in program.graph.nodes:
        if node.target in idle and node.meta["tensor_meta"].shape == node.args[0].meta["tensor_meta"].shape:
            node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()


class _Best:
    """Early stopping of each replica by itself: the values of its best epoch, and the epochs since."""

    def __init__(self, stack: _Stack, patience: int) -> None:
        self.patience = patience
        self.values = [*stack.params.values(), *stack.buffers.values()]
        self.kept = [value.detach().clone() for value in self.values]
        self.score = torch.full((len(stack.bound),), -math.inf, device=self.values[0].device)
        self.age = torch.zeros_like(self.score)

    @torch.no_grad()
    def stops(self, score: Tensor) -> bool:
        """Note the epoch's scores; whether all replicas have now been without a better one for too long."""
        better = (score > self.score) & (self.age < self.patience)
        self.score = torch.where(better, score, self.score)
        self.age = torch.where(better, 0, self.age + 1)
        for kept, value in zip(self.kept, self.values, strict=True):
            kept[better] = value[better]
        return bool((self.age >= self.patience).all())

    @torch.no_grad()
    def restore(self) -> None:
        for kept, value in zip(self.kept, self.values, strict=True):
            value.copy_(kept)


def _in_proportion(statistic: Tensor, data: Sequence[Tensor], part: Sequence[Tensor]) -> Tensor:
    """A part's statistic as it counts among all data: by its rows or, where there are weights, by its weight."""
    if len(data) == 2:
        return statistic * (part[0].shape[1] / data[0].shape[1])
    share = part[2].sum(1) / data[2].sum(1)
    return statistic * share.view(-1, *(1,) * (statistic.dim() - 1))


def _loss(
    objective: ELBO, kl_weight: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    terms = objective.terms(x, y, weight)
    statistic = objective.likelihood.statistic(terms.f, y, weight)
    loss = objective.loss(replace(terms, kl=kl_weight * terms.kl))
    return loss, torch.zeros_like(loss) if statistic is None else statistic


def _statistic(objective: ELBO, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    return _loss(objective, torch.ones((), device=x.device), x, y, weight)[1]


def _update(objective: ELBO, statistic: Tensor) -> Tensor:
    objective.likelihood.update(statistic)
    return statistic


def _data_fit(objective: ELBO, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    return objective.terms(x, y, weight).data_fit


def _check(objectives: Sequence[ELBO], x: Tensor, y: Tensor, weight: Tensor | None, schedule: str) -> None:
    if schedule not in ("constant", "cosine"):
        raise ValueError(f'replicas.fit: schedule must be "constant" or "cosine", got {schedule!r}.')
    if not objectives:
        raise ValueError("replicas.fit: there is no objective to train; give at least one.")
    first = objectives[0]
    for r, other in enumerate(objectives):
        for name in ("method.name", "prior", "n_data", "kl_z_weight"):
            if attrgetter(name)(other) != attrgetter(name)(first):
                raise ValueError(
                    f"replicas.fit: objective {r} differs from the first in {name}; replicas differ in their values only."
                )
        if [(k, v.shape) for k, v in other.state_dict().items()] != [
            (k, v.shape) for k, v in first.state_dict().items()
        ]:
            raise ValueError(
                f"replicas.fit: the network of objective {r} is not that of the first; replicas share one architecture."
            )
    for name, data in (("x", x), ("y", y), ("weight", weight)):
        if data is not None and data.shape[:2] != (len(objectives), x.shape[1]):
            raise ValueError(
                f"replicas.fit: {name} has shape {tuple(data.shape)}, its first dimensions must be {len(objectives)} replicas and "
                f"{x.shape[1]} data points; data that all share is given as {name}.expand({len(objectives)}, *{name}.shape)."
            )
