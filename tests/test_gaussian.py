from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varprop import Gaussian
from varprop.gaussian import mean_of, move, second_moment_of, sqrt

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def random(shape: tuple[int, ...]) -> Gaussian:
    return Gaussian(torch.randn(shape), torch.rand(shape))


@settings(deadline=None)
@given(shape=shapes)
def test_moments_of_any_shape(shape: tuple[int, ...]) -> None:
    x = random(shape)
    assert x.shape == shape
    torch.testing.assert_close(x.std.square(), x.var)
    torch.testing.assert_close(x.second_moment, x.var + x.mean**2)


@settings(deadline=None)
@given(shape=shapes, scale=st.floats(-3, 3), shift=st.floats(-3, 3))
def test_scaling_and_shifting(shape: tuple[int, ...], scale: float, shift: float) -> None:
    x = random(shape)
    y = scale * x + shift
    torch.testing.assert_close(y.mean, scale * x.mean + shift)
    torch.testing.assert_close(y.var, scale**2 * x.var)


def test_a_sum_adds_the_variances_of_independent_parts() -> None:
    x, y = random((3, 4)), random((3, 4))
    assert torch.equal((x + y).var, x.var + y.var)
    assert torch.equal((x + y).mean, x.mean + y.mean)


def test_a_shift_that_broadcasts_keeps_mean_and_variance_of_one_shape() -> None:
    assert (random((3, 1)) + torch.zeros(3, 4)).var.shape == (3, 4)


def test_map_moves_mean_and_variance_alike() -> None:
    x = random((2, 6))
    y = x.map(lambda t: t.view(3, 4))
    assert y.shape == (3, 4)
    assert torch.equal(y.var.flatten(), x.var.flatten())
    assert torch.equal(mean_of(move(torch.t, x)), x.mean.t())
    assert torch.equal(move(torch.t, x.mean), x.mean.t())


def test_samples_have_the_moments_and_carry_gradients() -> None:
    x = Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.25, 0.0]))
    samples = x.sample((100_000,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples.mean(0), x.mean, atol=0.01, rtol=0)
    torch.testing.assert_close(samples.var(0), x.var, atol=0.01, rtol=0)
    var = torch.tensor([0.25, 0.0], requires_grad=True)
    Gaussian.of(x.mean, var).sample().sum().backward()
    assert torch.isfinite(var.grad).all()


def test_square_root_has_no_infinite_gradient() -> None:
    var = torch.tensor([0.0, 4.0], requires_grad=True)
    sqrt(var).sum().backward()
    assert var.grad.tolist() == [0.0, 0.25]


def test_plain_tensors_have_moments_too() -> None:
    x = torch.tensor([2.0])
    assert mean_of(x) is x
    assert second_moment_of(x).item() == 4.0


@pytest.mark.parametrize(
    ("mean", "var", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(3), ValueError, r"mean has shape \(2,\) and var \(3,\)"),
        (torch.zeros(2), torch.tensor([0.1, -0.1]), ValueError, "negative or NaN"),
        (torch.zeros(1), torch.tensor([float("nan")]), ValueError, "negative or NaN"),
        (torch.zeros(1), 1.0, TypeError, "var must be a torch.Tensor, got float"),
    ],
)
def test_wrong_input_is_one_sentence(mean: object, var: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Gaussian(mean, var)


def test_it_is_frozen_and_survives_copy_and_pickle() -> None:
    x = random((2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.mean = torch.zeros(2)
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(again.mean, x.mean)
        assert torch.equal(again.var, x.var)


def test_it_passes_through_vmap_and_export() -> None:
    x = random((5, 2))
    doubled = torch.vmap(lambda g: g * 2.0)(x)
    assert torch.equal(doubled.var, 4 * x.var)

    class Scale(torch.nn.Module):
        def forward(self, x: Gaussian) -> Gaussian:
            return x * 3.0

    exported = torch.export.export(Scale(), (x,)).module()
    assert torch.equal(exported(x).var, 9 * x.var)
