"""A table of a network's operations under a method: the rule of each, and where cost and variance arise."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..gaussian import Gaussian
from ..graph.residual import covariance
from ..graph.steps import Place, Ref
from ..graph.walk import graph_for, walk
from ..methods import DVI
from ..methods.base import (
    Call,
    Method,
    NoRuleError,
    Value,
    check_method,
    check_network,
    is_random_value,
)
from ..methods.facts import Kind
from ..methods.keys import row
from ..posterior import posteriors
from .attribution import output_variance, variance_losses

INDEPENDENT = Kind("independent")
FAR_BEYOND = 3.0
"""A variance so many times that of DVI is told."""


@dataclass(frozen=True)
class Operation:
    """A row of a summary."""

    place: str
    """The path of the layer, or of the module that calls the function."""
    name: str
    kind: Kind
    parameters: int = 0
    random: int = 0
    """How many of the parameters are random weights."""
    flops: float = 0.0
    """Share of the matrix products and convolutions of a pass."""
    variance: float | None = None
    """Share of the output's variance lost with the layer's weights fixed; None without random weights."""


@dataclass(frozen=True)
class Summary:
    """The operations of a network in order; prints as a table."""

    method: str
    operations: Sequence[Operation]
    way: str = "traced"
    """How the graph was taken: "traced" by torch.fx, or "recorded" for these shapes."""
    beyond: float | None = None
    """The variance of the output over that of DVI, where both have one. What the hard gates of VBP shut out
    has a mean too, and the errors add up in some deep networks."""

    @property
    def independent(self) -> list[Operation]:
        """Operations whose operands are correlated but assumed independent."""
        return [operation for operation in self.operations if operation.kind == INDEPENDENT]

    @property
    def _caption(self) -> str | None:
        if self.beyond is None or self.beyond < FAR_BEYOND:
            return None
        return f"The variance of the output is {self.beyond:.3g} times that of DVI; use DVI for this network."

    def __rich__(self) -> Table:
        table = Table(
            title=f"{self.method}, {len(self.operations)} operations"
            + (", recorded" if self.way == "recorded" else ""),
            title_justify="left",
            box=None,
            pad_edge=False,
            caption=self._caption,
            caption_justify="left",
        )
        for name in ("where", "operation", "rule"):
            table.add_column(name, no_wrap=True)
        for name in ("parameters", "random", "FLOPs", "variance"):
            table.add_column(name, justify="right", no_wrap=True)
        for line in self.operations:
            numbers = (
                f"{line.parameters:,}" if line.parameters else "",
                f"{line.random:,}" if line.random else "",
            )
            shares = ("" if not share else f"{share:.1%}" for share in (line.flops, line.variance))
            table.add_row(line.place, line.name, str(line.kind), *numbers, *shares)
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    __repr__ = __str__


@torch.no_grad()
def summary(net: nn.Module, method: Method, *x: Value, **options: Value) -> Summary:
    """List the operations of a network with their rules, parameters, cost and share of the variance.

    "exact" and "approximate" refer to a single operation with independent inputs. "corrected" is a sum of
    correlated values that includes their covariance (Eq. 24); "independent" is a sum or product whose
    correlated operands are assumed independent. Variances of layers multiply, so the shares need not sum to
    one.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> [(row.place, str(row.kind)) for row in vp.summary(net, vp.DVI, torch.randn(5, 2)).operations]
    [('0', 'exact (Eq. 1)'), ('1', 'exact (Eq. 8)'), ('2', 'exact (Eq. 1)')]
    """
    check_network("summary", net)
    check_method("summary", method)
    if row(method.rules, net) not in (None, nn.Module, nn.Sequential):
        net = nn.Sequential(net)
    with FlopCounterMode(display=False) as counter:
        recorder = _Recorder(net, counter)
        walk(method.watching(recorder.watch), net, x, options)
    total = sum(line.flops for line in recorder.rows)
    losses: Mapping[str, float] = variance_losses(method, net, *x, **options)
    return Summary(
        method.name,
        [
            replace(
                line,
                flops=line.flops / max(1, total),
                variance=losses.get(line.place) if line.random else None,
            )
            for line in recorder.rows
        ],
        graph_for(method, net, x, options).way,
        _beyond(method, net, (x, options)),
    )


def _beyond(method: Method, net: nn.Module, inputs: Value) -> float | None:
    if method.samples or method.deterministic or method is DVI:
        return None
    try:
        usual = output_variance(DVI, net, inputs)
    except NoRuleError:
        return None
    return output_variance(method, net, inputs) / usual if usual else None


class _Recorder:
    """Watches the calls of one walk and records a row for each."""

    def __init__(self, net: nn.Module, counter: FlopCounterMode) -> None:
        self.net, self.counter, self.counted = net, counter, 0
        self.rows: list[Operation] = []
        self.origins: dict[str, set[str]] = {}

    def watch(self, call: Call) -> Value:
        place = call.place
        if place is None or place.net is not self.net:
            return call.output
        self.origins[place.step.name] = self._origins_of(place, call)
        flops = self.counter.get_total_flops() - self.counted
        line = Operation(place.step.place, operation_name(call), self._kind(call, place), flops=flops)
        self.rows.append(
            _with_parameters(line, call.module) if isinstance(call.operation, nn.Module) else line
        )
        self.counted = self.counter.get_total_flops()
        return call.output

    def _origins(self, place: Place, name: str) -> set[str]:
        """The random values and random layers that the value of a step depends on."""
        if name not in self.origins:  # an input or a parameter, not the output of a rule
            self.origins[name] = {name} if is_random_value(place.values[name]) else set()
        return self.origins[name]

    def _origins_of(self, place: Place, call: Call) -> set[str]:
        if not is_random_value(call.output):
            return set()
        before = set[str]().union(*(self._origins(place, source) for source in place.step.sources))
        if isinstance(call.operation, nn.Module) and next(posteriors(call.operation), None) is not None:
            return {*before, f"module {place.step.target}"}
        return before

    def _kind(self, call: Call, place: Place) -> Kind:
        if not (is_random_value(call.output) or call.method.samples):
            return Kind("plain")
        rule = call.as_layer.rule
        known = Kind(rule.kind, rule.equation)
        if not rule.takes_independent:
            return known
        corrected = covariance(call.method, rule, place, call.output)
        if corrected is not None:
            return Kind("corrected", corrected[1])
        operands = [name for name in place.step.sources if isinstance(place.values[name], Gaussian)]
        if len(operands) == 2 and not self._origins(place, operands[0]).isdisjoint(
            self._origins(place, operands[1])
        ):
            return INDEPENDENT
        square = call.method.function_rule(torch.square)
        if square and operands * 2 == [a.name for a in place.step.args if isinstance(a, Ref)]:
            return Kind(square.kind, square.equation)  # a product of a value with itself
        return known


def operation_name(call: Call) -> str:
    """A layer by its type, a function by its name, a tensor method by its name after a point."""
    operation = call.operation
    if isinstance(operation, nn.Module):
        return type(operation).__name__
    return f".{operation}" if isinstance(operation, str) else operation.__name__


def _with_parameters(row: Operation, module: nn.Module) -> Operation:
    random = sum(q.random.mean.numel() for _, q in posteriors(module))
    names = dict(module.named_parameters())
    own = [name for name in names if "logvar" not in name and "scales." not in name]
    return replace(row, parameters=sum(names[name].numel() for name in own), random=random)
