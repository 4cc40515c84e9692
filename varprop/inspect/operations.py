"""What a method makes of a network: a table of its operations, what each rule is, and where cost and variance arise."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..gaussian import Activation, Gaussian
from ..methods import Method
from ..methods.base import Rule, row
from ..methods.correlation import covariance
from ..methods.functions import add, added, affine, bilinear, einsum, multiply, subtract
from ..methods.kinds import INDEPENDENT, OWN, PLAIN, SQUARE, Kind, kind
from ..methods.maxima import either, larger
from ..methods.network import holds_gaussian, walk
from ..methods.steps import Ref, Step, Values, layer
from ..methods.twins import by_twin, layer_type, twin_of
from ..posterior import posteriors
from .attribution import variance_losses


@dataclass(frozen=True)
class Operation:
    """A row of a summary."""

    place: str
    """The path of the layer, or of the module that a function stands in."""
    name: str
    kind: Kind
    parameters: int = 0
    random: int = 0
    """How many of the parameters are random weights."""
    flops: float = 0.0
    """Share of the matrix products and convolutions of a pass."""
    variance: float | None = None
    """Share of the output's variance that goes when the layer's weights are certain; None without random weights."""


@dataclass(frozen=True)
class Summary:
    """The operations of a network in their order; prints as a table."""

    method: str
    operations: Sequence[Operation]

    @property
    def independent(self) -> list[Operation]:
        """Operations whose operands are correlated and are taken as independent."""
        return [operation for operation in self.operations if operation.kind == INDEPENDENT]

    def __rich__(self) -> Table:
        table = Table(
            title=f"{self.method}, {len(self.operations)} operations",
            title_justify="left",
            box=None,
            pad_edge=False,
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


OF_TWO = (add, subtract, multiply, bilinear, affine, added, einsum, larger, either)


@torch.no_grad()
def summary(net: nn.Module, method: Method, x: Activation) -> Summary:
    """Every operation of a network on an input: its rule and whether that is exact, parameters, cost, and share in the output's variance.

    "Exact" and "approximate" are said of one operation whose inputs are independent. "corrected" is a sum of correlated values with
    their covariance (Eq. 41), "independent" one without, or a product. Variances of layers multiply, so that their shares need not sum
    to one.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> [(row.place, str(row.kind)) for row in vp.summary(net, vp.DVI, torch.randn(5, 2)).operations]
    [('0', 'exact (Eq. 1)'), ('1', 'exact (Eq. 6)'), ('2', 'exact (Eq. 1)')]
    """
    rows: dict[str, Operation] = {}
    origins: dict[str, set[str]] = {}
    counted = 0

    def visit(step: Step, operation: Any, rule: Rule | None, values: Values) -> None:
        nonlocal counted
        origins[step.name] = _origins(step, operation, values, origins)
        if operation is None:
            return
        flops = counter.get_total_flops() - counted
        called = layer(net, step)
        line = Operation(
            step.place, _name(operation), _kind(method, net, step, rule, values, origins), flops=flops
        )
        rows[step.name] = line if called is None else _with_parameters(line, called)
        counted = counter.get_total_flops()

    if row(method.rules, net) not in (None, nn.Module, nn.Sequential):
        net = nn.Sequential(net)
    with FlopCounterMode(display=False) as counter:
        walk(method, net, (x,), {}, visit)
    total = sum(line.flops for line in rows.values())
    losses: Mapping[str, float] = variance_losses(method, net, x)
    return Summary(
        method.name,
        [
            replace(
                line,
                flops=line.flops / max(1, total),
                variance=losses.get(line.place) if line.random else None,
            )
            for line in rows.values()
        ],
    )


def _name(operation: Any) -> str:
    if isinstance(operation, nn.Module):
        return type(operation).__name__
    return f".{operation}" if isinstance(operation, str) else operation.__name__


def _with_parameters(row: Operation, module: nn.Module) -> Operation:
    random = sum(q.random.mean.numel() for _, q in posteriors(module))
    parameters = sum(
        p.numel() for name, p in module.named_parameters() if "logvar" not in name and "scales." not in name
    )
    return replace(row, parameters=parameters, random=random)


def _origins(step: Step, operation: Any, values: Values, origins: Mapping[str, set[str]]) -> set[str]:
    """The random values and random layers that a step's value depends on."""
    if not holds_gaussian(values[step.name]):
        return set()
    before = set[str]().union(*(origins[source] for source in step.sources))
    if step.op == "placeholder":
        return {step.name}
    if isinstance(operation, nn.Module) and next(posteriors(operation), None) is not None:
        return {*before, f"module {step.target}"}
    return before


def _kind(
    method: Method,
    net: nn.Module,
    step: Step,
    rule: Rule | None,
    values: Values,
    origins: Mapping[str, set[str]],
) -> Kind:
    if rule is None or not (holds_gaussian(values[step.name]) or method.samples):
        return PLAIN
    if by_twin is getattr(rule, "func", None):
        twin = twin_of(step.target, step.args[1:], step.kwargs)
        assert twin is not None
        return kind(method.rule(twin)) or OWN
    asked = layer_type(rule)
    known = kind(rule if asked is None else method.rules[asked]) or OWN
    if layer(net, step) is not None or getattr(rule, "func", rule) not in OF_TWO:
        return known
    corrected = covariance(method, net, step, values)
    if corrected is not None:
        return Kind("corrected", corrected[1])
    operands = [name for name in step.sources if isinstance(values[name], Gaussian)]
    if len(operands) == 2 and not origins[operands[0]].isdisjoint(origins[operands[1]]):
        return INDEPENDENT
    return (
        SQUARE
        if rule is multiply and operands * 2 == [a.name for a in step.args if isinstance(a, Ref)]
        else known
    )
