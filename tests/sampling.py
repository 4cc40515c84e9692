"""The Monte Carlo check: the torch module is run on samples of its weights and inputs, and the moments must
agree.

It is the reference for rules that claim to be exact. VBP's gate is not one of them: its model samples the
gate independently of the input.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import varprop as vp
from varprop.posterior import draw

CHUNK = 2_000
STANDARD_ERRORS = 5.0


def draws(module: nn.Module, x: vp.Gaussian | Tensor, samples: int = 20_000, seed: int = 0) -> Tensor:
    """Outputs of the module for Monte Carlo samples of its weights and input, along the first dimension."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return torch.cat([_run(module, x, min(CHUNK, samples - i)) for i in range(0, samples, CHUNK)])


def moments(samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The sample mean and variance, each with its standard error; the second uses the fourth moment."""
    n, mean, var = len(samples), samples.mean(0), samples.var(0)
    fourth = (samples - mean).pow(4).mean(0)
    yield mean, torch.sqrt(var / n)
    yield var, torch.sqrt((fourth - var.square()).clamp(min=0) / n)


def disagreement(method: vp.Method, module: nn.Module, x: vp.Gaussian | Tensor, samples: int = 20_000) -> str:
    """Describe where the method is off by more than five standard errors; empty if it agrees."""
    with torch.no_grad():
        f = method(module, x)
    f = f if isinstance(f, vp.Gaussian) else vp.Gaussian(f, torch.zeros_like(f))
    return difference(f, draws(module, x, samples))


def difference(f: vp.Gaussian, samples: Tensor) -> str:
    """Describe where the moments of f and of the samples differ by more than five standard errors."""
    if f.shape != samples.shape[1:]:
        return f"shape {tuple(f.shape)}, sampling gives {tuple(samples.shape[1:])}"
    wrong = []
    for name, claim, (value, error) in zip(("mean", "var"), (f.mean, f.var), moments(samples), strict=True):
        # Without variance all samples are equal up to rounding.
        rounding = 100 * torch.finfo(value.dtype).eps * samples.abs().amax(0).clamp(min=1)
        ratio = (claim - value).abs() / (error + rounding / STANDARD_ERRORS)
        worst = ratio.nan_to_num(torch.inf).argmax()
        if not (ratio <= STANDARD_ERRORS).all():
            wrong.append(
                f"{name} is {claim.flatten()[worst]:.6g}, "
                f"sampling gives {value.flatten()[worst]:.6g} ± {error.flatten()[worst]:.2g} "
                f"({ratio.flatten()[worst]:.1f} standard errors, entry {worst} of {value.numel()})"
            )
    return "; ".join(wrong)


def agrees(method: vp.Method, module: nn.Module, x: vp.Gaussian | Tensor, samples: int = 20_000) -> bool:
    """Whether the method's mean and variance agree with sampling within five standard errors."""
    return not disagreement(method, module, x, samples)


def assert_agrees(
    method: vp.Method, module: nn.Module, x: vp.Gaussian | Tensor, samples: int = 20_000
) -> None:
    wrong = disagreement(method, module, x, samples)
    assert not wrong, f"{method.name} on {type(module).__name__}: {wrong}"


def _run(module: nn.Module, x: vp.Gaussian | Tensor, n: int) -> Tensor:
    weights = draw(module, n)

    def once(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, weights, (x,))

    inputs, axis = (
        (x.mean + x.var.sqrt() * _normal(n, x.mean), 0) if isinstance(x, vp.Gaussian) else (x, None)
    )
    out = vmap(once, in_dims=(0 if weights else None, axis), randomness="different", out_dims=0)
    return (
        out(weights, inputs)
        if weights or axis == 0
        else vmap(lambda _: once({}, x), randomness="different")(torch.zeros(n))
    )


def _normal(n: int, like: Tensor) -> Tensor:
    return torch.randn((n, *like.shape), dtype=like.dtype)
