"""A recorded program computes what the function does, for other numbers, with fewer operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from varprop.training.tape import record


def operations(program: object) -> list[str]:
    graph = program.operations.graph  # type: ignore[attr-defined]
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_gradients_of_mapped_modules_are_recorded() -> None:
    net = nn.Linear(3, 1)

    def gradient(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return torch.func.functional_call(net, {"weight": w}, (x,)).square().mean()

        return torch.autograd.grad(torch.func.vmap(loss)(weights["w"], x).sum(), weights["w"])[0]

    def example() -> tuple[dict[str, Tensor], Tensor]:
        return {"w": torch.randn(4, 1, 3, requires_grad=True)}, torch.randn(4, 5, 3)

    program = record(gradient, *example())
    for _ in range(2):
        arguments = example()
        torch.testing.assert_close(program(*arguments), gradient(*arguments))


def test_what_is_computed_twice_is_computed_once() -> None:
    program = record(
        lambda a: [a.exp() + torch.tensor([1.0, 2.0]), a.exp() * torch.tensor([1.0, 2.0])], torch.ones(2)
    )
    assert operations(program).count("aten.exp.default") == 1
    a = torch.tensor([0.5, -0.5])
    for found, expected in zip(
        program(a), (a.exp() + torch.tensor([1.0, 2.0]), a.exp() * torch.tensor([1.0, 2.0])), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_values_that_change_in_place_are_not_shared() -> None:
    def function(a: Tensor) -> list[Tensor]:
        first = a.exp()
        first[0].mul_(2)
        before = first.sum()
        first.add_(1)
        return [before, first.sum(), a.exp()]

    program = record(function, torch.ones(3))
    a = torch.tensor([0.5, -0.5, 2.0])
    torch.testing.assert_close(program(a), function(a))


def test_inputs_that_are_written_to_are_written_to() -> None:
    def function(total: Tensor, a: Tensor) -> Tensor:
        total.add_(a.sum())
        return total * 2

    program, total = record(function, torch.zeros(()), torch.ones(2)), torch.tensor(1.0)
    assert program(total, torch.tensor([1.0, 2.0])) == 8
    assert total == 4


def test_random_numbers_are_drawn_anew() -> None:
    program = record(lambda a: [a + torch.randn(3), a + torch.randn(3)], torch.zeros(3))
    first, second = program(torch.zeros(3))
    assert not torch.equal(first, second)
    assert not torch.equal(first, program(torch.zeros(3))[0])


def test_what_changes_nothing_is_left_out() -> None:
    program = record(
        lambda a: [a.t().t() * 3, (a * 1.0 + a.pow(2)).exp(), torch.ones(()).exp() * a], torch.ones(2, 3)
    )
    assert sorted(operations(program)) == [
        "aten.add.Tensor",
        "aten.exp.default",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.pow.Tensor_Scalar",
    ]


def test_gradients_have_no_powers_of_one() -> None:
    def gradient(a: Tensor) -> Tensor:
        return torch.autograd.grad(a.square().sum(), a)[0]

    program = record(gradient, torch.ones(3, requires_grad=True))
    a = torch.tensor([0.5, -2.0, 3.0])
    assert torch.equal(program(a), 2 * a)
    assert operations(program) == ["aten.mul.Scalar", "aten.mul.Tensor"]


def test_a_constant_that_changes_outside_is_read_anew() -> None:
    outside = torch.zeros(200)
    program = record(lambda a: a + outside.exp(), torch.zeros(200))
    outside.fill_(1.0)
    torch.testing.assert_close(program(torch.zeros(200)), outside.exp())


def test_a_product_with_one_that_changes_the_layout_stays() -> None:
    times, power = torch.ops.aten.mul.Scalar, torch.ops.aten.pow.Tensor_Scalar

    def function(a: Tensor) -> list[Tensor]:
        return [times(a.expand(4, 3), 1).view(12), power(a.long(), 1.0)]

    program = record(function, torch.ones(3))
    a = torch.tensor([0.0, 1.0, 2.0])
    stretched, first = program(a)
    assert torch.equal(stretched, a.repeat(4))
    assert first.dtype == a.dtype
