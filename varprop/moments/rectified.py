"""The rectified normal: exact moments of piecewise-linear activations, from the tail beyond each knot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from ..gaussian import Gaussian
from .piecewise import RELU, Piecewise, step


@dataclass(frozen=True)
class Tail:
    """Moments of r = |x - knot| beyond the knot, seen from the mean of x, and r = 0 before it (Eq. 7)."""

    mean: Tensor
    second_moment: Tensor
    probability: Tensor
    above: Tensor
    """Whether the mean lies above the knot; the tail is then the part of x below it."""


def tail(x: Gaussian, knot: float = 0.0) -> Tail:
    """The tail of x beyond a knot (Eq. 7), with a = -|m - knot|/s:

        E[r] = s (φ(a) + a Φ(a)),    E[r²] = v ((1 + a²) Φ(a) + a φ(a)),    P = Φ(a)

    The textbook moments of a rectified normal cancel terms of the size of m and v. These are sums of small
    terms and keep their relative precision, as does Φ computed by erfc instead of 1 + erf.
    """
    m = x.mean - knot
    mean, second_moment, probability = _Tail.apply(m, x.var)  # type: ignore[no-untyped-call]
    return Tail(mean, second_moment, probability, m > 0)


class _Saved(Protocol):
    """The context of a backward pass."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...


class _Tail(torch.autograd.Function):
    """E[r], E[r²] and P with analytic derivatives, which take a quarter of autograd's operations.

        d/dm: -h P, -2h E[r], -h φ/s,    d/dv: φ/(2s), P, |a| φ/(2v)

    with h = 1 for a mean above the knot and h = -1 below.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance, density = _beyond(m, v)
        probability = 0.5 * torch.erfc(distance / math.sqrt(2))
        mean = v.sqrt() * F.relu(density - distance * probability)
        second = v * F.relu((1 + distance.square()) * probability - distance * density)
        return mean, second, probability

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*inputs, output[0], output[2])

    @staticmethod
    def backward(
        ctx: _Saved, to_mean: Tensor, to_second: Tensor, to_probability: Tensor
    ) -> tuple[Tensor, Tensor]:
        m, v, mean, probability = ctx.saved_tensors
        distance, density = _beyond(m, v)
        per_std = torch.where(v > 0, v, 1.0).rsqrt()
        inwards = probability * to_mean + 2 * mean * to_second + per_std * density * to_probability
        to_v = probability * to_second + 0.5 * per_std * density * (
            to_mean + per_std * distance * to_probability
        )
        return torch.where(m > 0, -inwards, inwards), to_v


def _reach(v: Tensor) -> float:
    """The distance, in standard deviations, at which |a| is clamped, which keeps a finite as v goes to zero.

    The tail there is below 1e-19, and its products with small variances and gradients are not yet subnormal
    numbers, with which processors are up to a hundred times slower.
    """
    return 30.0 if v.dtype == torch.float64 else 9.1


def _beyond(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """|a| and φ(a)."""
    reach = _reach(v)
    distance = torch.where(v > 0, m.abs() / v.sqrt(), reach).clamp(max=reach)
    return distance, torch.exp(-0.5 * distance.square()) / math.sqrt(2 * math.pi)


def rectify(x: Gaussian, pieces: Piecewise = RELU) -> Gaussian:
    """Exact moments of a piecewise-linear function of a normal variable (Eq. 8).

    They are those of the hard gate, corrected by the tail beyond each knot. For ReLU, with h = [m > 0]:

        E = max(0, m) + E[r],    Var = h v (1 - 2P) + E[r²] - E[r]²

    >>> rectify(Gaussian(torch.tensor(0.0), torch.tensor(1.0)))
    Gaussian(mean=tensor(0.3989), var=tensor(0.3408))
    """
    if pieces is RELU:
        if not torch.is_grad_enabled():
            return Gaussian.of(*_relu(x.mean, x.var)[:2])
        return Gaussian.of(*_Relu.apply(x.mean, x.var)[:2])  # type: ignore[no-untyped-call]
    mean, here = pieces(x.mean), pieces.slope(x.mean)
    var = here.square() * x.var
    tails = [(knot, bend, tail(x, knot)) for knot, bend in pieces.bends]
    for _, bend, r in tails:
        mean = mean + bend * r.mean
        with_x = torch.where(r.above, -x.var, x.var) * r.probability
        var = var + bend**2 * (r.second_moment - r.mean.square()) + 2 * here * bend * with_x
    for (low, bend, r), (high, other, t) in combinations(tails, 2):
        both_up = t.second_moment + (high - low) * t.mean
        both_down = r.second_moment + (high - low) * r.mean
        zero = torch.zeros_like(r.mean)
        joint = torch.where(t.above, both_down, torch.where(r.above, zero, both_up))
        var = var + 2 * bend * other * (joint - r.mean * t.mean)
    return Gaussian.of(mean, F.relu(var))


def anchored(x: Gaussian, pieces: Piecewise = RELU) -> Gaussian:
    """A piecewise-linear function g at the mean, with the mean squared deviation of g(x) from it (Eq. 9).

        E = g(m),    Var = E[(g(x) - g(m))²] = Var[g(x)] + (E[g(x)] - g(m))²

    The mean is that of the hard gate. The variance includes what the gate leaves out: a unit whose gate is
    closed still has one.

    >>> anchored(Gaussian(torch.tensor(-1.0), torch.tensor(1.0)))
    Gaussian(mean=tensor(0.), var=tensor(0.0753))
    """
    return anchor(pieces(x.mean), rectify(x, pieces))


class _Relu(torch.autograd.Function):
    """Moments of ReLU in few passes over memory, because they dominate the cost of a step of DVI and CVBP.

    With k = |m|/s, P = Φ(-k), U = Φ(m/s), g = φ(k) - k P and e = φ(k)/s:

        E = max(0, m) + s g,    Var = v (U - g (k + g))
        dE = U dm + e/2 dv,     dVar = 2 E (1-U) dm + (U - E e) dv
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _relu(m, v, derivatives=True)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        mean, _, *saved = output
        # Only torch.func differentiates twice (`vp.correlated` in training), and needs the inputs for that.
        twice = torch._C._functorch.maybe_current_level() is not None
        ctx.save_for_backward(mean, *saved, *(inputs if twice else ()))
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: _Saved, to_mean: Tensor | None, to_var: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        mean, above, e, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivatives are to be differentiated themselves
            if not inputs:
                raise RuntimeError(
                    "Second derivatives of ReLU's moments need torch.func, as in vp.correlated."
                )
            above, e = _step_and_density(*inputs)
        if to_mean is None:
            to_mean = torch.zeros_like(mean)
        if to_var is None:  # `vp.correlated` follows means alone
            return to_mean * above, 0.5 * to_mean * e if ctx.needs_input_grad[1] else None
        to_m = torch.addcmul(to_mean * above, to_var, torch.addcmul(mean, mean, above, value=-1), value=2)
        to_v = torch.addcmul(0.5 * to_mean * e, to_var, torch.addcmul(above, mean, e, value=-1))
        return to_m, to_v


def _relu(m: Tensor, v: Tensor, derivatives: bool = False) -> tuple[Tensor, ...]:
    """E and Var of `_Relu` and, for the derivatives, U and e.

    Whatever is not needed any more gives up its memory, to what comes next or at once.
    """
    per_std = v.clamp(min=torch.finfo(v.dtype).tiny).rsqrt_()
    k = (m * per_std).abs_().clamp_max_(_reach(v))
    below = (k * math.sqrt(0.5)).erfc_().mul_(0.5)
    density = k.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    std = v * per_std if derivatives else per_std.mul_(v)
    gap = torch.addcmul(density, k, below, value=-1).relu_()
    e = density.mul_(per_std).mul_(std).mul_(per_std) if derivatives else None  # zero where v is
    del density
    mean = torch.addcmul(F.relu(m), std, gap)
    above = step(torch.rsub(below, 1, alpha=2), m).add_(below)
    var = torch.addcmul(above, gap, k.add_(gap), value=-1).relu_().mul_(v)
    return (mean, var) if e is None else (mean, var, above, e)


def _step_and_density(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """U and e of `_Relu`, with derivatives."""
    distance, density = _beyond(m, v)
    below = 0.5 * torch.erfc(distance / math.sqrt(2))
    e = density * torch.where(v > 0, v, 1.0).rsqrt()
    return torch.where(m > 0, 1 - below, below), torch.where(v > 0, e, 0.0)


def anchor(mean: Tensor, x: Gaussian) -> Gaussian:
    """Replace the mean of x; the variance becomes the mean squared deviation from the new one (Eq. 9)."""
    return Gaussian.of(mean, x.var + (x.mean - mean).square())


def slope(x: Gaussian, pieces: Piecewise = RELU) -> Tensor:
    """Mean slope of a piecewise-linear function, E[h'(x)] = Cov(h(x), x)/Var[x] by Stein's lemma (Eq. 25).

    >>> slope(Gaussian(torch.tensor(1.0), torch.tensor(1.0)))
    tensor(0.8413)
    """
    per_std = x.var.clamp(min=torch.finfo(x.var.dtype).tiny).rsqrt()
    reach = _reach(x.var)
    above = [
        bend * 0.5 * torch.erfc(((knot - x.mean) * per_std).clamp(-reach, reach) * math.sqrt(0.5))
        for knot, bend in pieces.bends
    ]
    return sum(above, pieces.slopes[0] * x.mean.new_ones(()))
