"""`fit` records its step: the same numbers, bit for bit, unless code of the user's runs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.training import recorded, trainer

from . import cases

N = 40
torch.manual_seed(3)
X = torch.randn(N, 3)
Y = X[:, :1].abs() + 0.1 * torch.randn(N, 1)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
IMAGES = torch.randn(N, 1, 8, 8)


def perceptron(outputs: int = 1, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), *between, nn.ReLU(), nn.Linear(6, outputs))


def convolutions() -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


NORMAL, PRIOR = vp.likelihoods.Normal, vp.priors.Normal()
CASES: dict[str, tuple[Callable[[], nn.Module], vp.Method, Any, vp.priors.Prior, Any, dict[str, Any]]] = {
    "vbp": (perceptron, vp.VBP, NORMAL, PRIOR, (X, Y), {"kl_warmup": 2, "schedule": "cosine"}),
    "gates": (perceptron, vp.vbp(slope=5.0), NORMAL, PRIOR, (X, Y), {"noise": "exact"}),
    "dvi": (perceptron, vp.DVI, NORMAL, vp.priors.Tempered(PRIOR), (X, Y, X[:, 0].abs()), {"clip": 0.1}),
    "samples": (lambda: perceptron(1, nn.Dropout()), vp.LOCAL_REPARAM, NORMAL, PRIOR, (X, Y), {}),
    "plain": (perceptron, vp.DETERMINISTIC, NORMAL, PRIOR, (X, Y), {"validation": 0.2, "batch_size": 8}),
    "lbfgs": (perceptron, vp.CVBP, NORMAL, PRIOR, (X, Y), {"optimizer": "lbfgs"}),
    "noise that varies": (
        lambda: perceptron(2),
        vp.DVI,
        vp.likelihoods.HeteroscedasticNormal,
        vp.priors.EmpiricalBayes(),
        (X, Y),
        {},
    ),
    "classes": (lambda: perceptron(3), vp.DVI, vp.likelihoods.Categorical, PRIOR, (X, LABELS), {}),
    "images": (convolutions, vp.DVI, vp.likelihoods.Categorical, PRIOR, (IMAGES, LABELS), {}),
}


def objective(name: str) -> vp.ELBO:
    make, method, likelihood, prior, data, _ = CASES[name]
    torch.manual_seed(0)
    net = make()
    if not method.deterministic:
        vp.variational(net, logvar=-5.0)
    return vp.ELBO(net, method, likelihood(), prior, n_data=len(data[0]) * 0.8 if name == "plain" else N)


@pytest.fixture(autouse=True)
def from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "FIRST", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[recorded.Recorded]:
    """What is recorded meanwhile."""
    found: list[recorded.Recorded] = []

    class Noted(recorded.Recorded):
        def __init__(self, elbo: vp.ELBO) -> None:
            super().__init__(elbo)
            found.append(self)

    monkeypatch.setattr(trainer, "Recorded", Noted)
    return found


def assert_the_same(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], vp.ELBO], data: Any, **options: Any
) -> None:
    """That training ends at the same numbers when nothing is recorded."""
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    second = make()
    found = vp.fit(first, data, **options)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "can_be_recorded", lambda *_: False)
        expected = vp.fit(second, data, **options)
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    times = ["seconds", "rows_per_second"]
    assert found.drop(columns=times).equals(expected.drop(columns=times))


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_step_is_the_step(
    name: str, made: list[recorded.Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, data, options = CASES[name]
    assert_the_same(monkeypatch, lambda: objective(name), data, **{"epochs": 4, "batch_size": 16, **options})
    assert [one.program is not None for one in made] == [True]


class Counting(NORMAL):  # type: ignore[misc, valid-type]
    """Does something else at every step."""

    steps = 0

    def expected_log_prob(self, f: vp.Gaussian, y: Tensor) -> Tensor:
        self.steps += 1
        return super().expected_log_prob(f, y)


def hooked() -> nn.Module:
    net = perceptron()
    net[1].register_forward_hook(lambda *_: None)
    return net


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def activated() -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 8, activation=twice, batch_first=True)


def twice(x: Tensor) -> Tensor:
    return torch.relu(2 * x)


def doubled(method: vp.Method, module: nn.Module, x: Any) -> Any:
    return x * 2.0


@pytest.mark.parametrize(
    ("net", "method", "likelihood"),
    [
        (perceptron, vp.DVI, Counting),
        (hooked, vp.DVI, NORMAL),
        (lambda: perceptron(1, Doubled()), vp.DVI | {Doubled: doubled}, NORMAL),
        (lambda: perceptron(1, nn.Tanh()), vp.DVI | {nn.Tanh: doubled}, NORMAL),
        (lambda: torch.fx.symbolic_trace(perceptron()), vp.DVI, NORMAL),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), activated(), nn.Flatten(), nn.Linear(3, 1)),
            vp.DETERMINISTIC,
            NORMAL,
        ),
    ],
    ids=["likelihood", "hook", "layer", "rule", "traced", "activation"],
)
def test_code_of_the_user_runs_in_every_step(
    net: Any, method: vp.Method, likelihood: Any, made: list[recorded.Recorded]
) -> None:
    elbo = vp.ELBO(vp.variational(net()), method, likelihood(), PRIOR, n_data=N)
    vp.fit(elbo, (X, Y), epochs=3, batch_size=20)
    assert not made
    if isinstance(elbo.likelihood, Counting):
        assert elbo.likelihood.steps == 6


def test_a_hook_of_a_parameter_runs_in_every_step(made: list[recorded.Recorded]) -> None:
    elbo, seen = objective("dvi"), []
    next(elbo.parameters()).register_hook(lambda gradient: seen.append(gradient))
    vp.fit(elbo, (X, Y), epochs=3, batch_size=20)
    assert not made
    assert len(seen) == 6


def plain(net: nn.Module) -> vp.ELBO:
    return vp.ELBO(net, vp.DETERMINISTIC, NORMAL(), PRIOR, n_data=N)


def embedded(sparse: bool) -> vp.ELBO:
    net = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 1))
    return plain(net)


NOT_RECORDABLE = {
    "a number read from a tensor": (lambda: plain(perceptron(1, nn.BatchNorm1d(6, momentum=None))), X),
    "a sparse gradient": (lambda: embedded(sparse=True), torch.arange(2 * N).view(N, 2) % 10),
    "much memory": (lambda: plain(nn.Sequential(nn.Linear(3, 10_000), nn.ReLU(), nn.Linear(10_000, 1))), X),
}


@pytest.mark.parametrize("name", NOT_RECORDABLE)
def test_what_cannot_be_recorded_runs_as_it_is(
    name: str, made: list[recorded.Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, x = NOT_RECORDABLE[name]
    monkeypatch.setattr(recorded, "MEMORY", 5e6)
    options = {"epochs": 3, "batch_size": 20, "optimizer": lambda p: torch.optim.SGD(p, lr=0.001)}
    assert_the_same(monkeypatch, make, (x, Y), **options)
    assert [one.program for one in made] == [None]


def test_few_steps_are_not_worth_recording(
    made: list[recorded.Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "FIRST", 6)
    vp.fit(objective("vbp"), (X, Y), epochs=3, batch_size=20)
    assert made[0].program is None
    vp.fit(objective("vbp"), (X, Y), epochs=4, batch_size=20)
    assert made[1].program is not None


def swapped(batch: int) -> tuple[Any, Tensor]:
    pair = {"input1": X[:20], "input2": torch.ones(20, 3)}
    return dict(reversed(pair.items())) if batch else pair, Y[:20]


def transposed(batch: int) -> tuple[Any, Tensor]:
    x = torch.randn(10, 4, 6)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if batch else x, Y[:10]


def repeated(batch: int) -> tuple[Any, Tensor]:
    return X, X + 1 if batch else X


@pytest.mark.parametrize(
    ("batch", "make"),
    [
        (swapped, lambda: plain(nn.Bilinear(3, 3, 1))),
        (transposed, lambda: plain(nn.Sequential(nn.Flatten(), nn.Linear(24, 1)))),
        (repeated, lambda: plain(nn.Linear(3, 3))),
        (lambda i: (X[: 30 - i], Y[: 30 - i]), lambda: plain(nn.Linear(3, 1))),
    ],
    ids=["order", "strides", "one tensor twice", "shape"],
)
def test_batches_unlike_the_first_are_not_recorded(
    batch: Callable[[int], Any], make: Callable[[], vp.ELBO], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [batch(i % 2) for i in range(4)]
    assert_the_same(monkeypatch, make, torch.utils.data.DataLoader(data, batch_size=None), epochs=3)  # type: ignore[arg-type]


class EveryOther(torch.optim.SGD):
    """Adds the gradients of two batches."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.steps % 2 == 0:
            super().zero_grad(set_to_none)

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        EveryOther.steps += 1
        if self.steps % 2 == 0:
            super().step()
        return loss


def test_gradients_can_be_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EveryOther, "steps", 0)
    options = {"epochs": 4, "batch_size": 20, "optimizer": lambda p: EveryOther(p, lr=0.01)}
    assert_the_same(monkeypatch, lambda: objective("dvi"), (X, Y), **options)


def test_an_old_gradient_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> vp.ELBO:
        elbo = objective("vbp")
        elbo.net.register_parameter("unused", nn.Parameter(torch.ones(2)))
        elbo.net.unused.grad = torch.ones(2)  # type: ignore[union-attr]
        return elbo

    assert_the_same(monkeypatch, make, (X, Y), epochs=3, batch_size=20)


def test_a_scheduler_of_the_users_may_change_anything(made: list[recorded.Recorded]) -> None:
    class Freezing(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 1:
                self.optimizer.param_groups[0]["params"][0].requires_grad_(False)

    vp.fit(objective("dvi"), (X, Y), epochs=3, schedule=lambda o: Freezing(o, lambda _: 1.0))
    assert not made


def test_a_step_in_other_precision_is_not_recorded(made: list[recorded.Recorded]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vp.fit(objective("dvi"), (X, Y), epochs=3)
    assert not made


def test_a_hook_of_all_modules_runs_in_every_step(made: list[recorded.Recorded]) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        vp.fit(objective("dvi"), (X, Y), epochs=3)
    finally:
        handle.remove()
    assert not made


def test_a_loss_that_is_not_finite_ends_a_recorded_run() -> None:
    x = X.clone()
    x[-1] = float("nan")
    with pytest.raises(FloatingPointError, match="the inputs are not, in row"):
        vp.fit(objective("vbp"), (x, Y), epochs=2, batch_size=20)


def test_frozen_weights_stay_without_a_gradient() -> None:
    elbo = objective("vbp")
    frozen = elbo.net[0].weight.requires_grad_(False)  # type: ignore[index]
    before = frozen.clone()
    vp.fit(elbo, (X, Y), epochs=2, batch_size=20)
    assert frozen.grad is None
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("method", [vp.VBP, vp.DVI], ids=["vbp", "dvi"])
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.name)
def test_every_layer_can_be_recorded(case: cases.Case, method: vp.Method) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(case.shape[-1], case.shape[-1]), case.make(), nn.Flatten()]
    rows, width = nn.Sequential(*layers)(torch.randn(case.shape)).shape
    net = vp.variational(nn.Sequential(*layers, nn.Linear(width, 1)), logvar=-4.0)
    elbo = vp.ELBO(net, method, NORMAL(), PRIOR, n_data=10).train()
    steps = recorded.Recorded(elbo)
    if not recorded.can_be_recorded(elbo):
        pytest.skip("has code of its own")
    for _ in range(2):
        x, y = torch.randn(case.shape), torch.randn(rows, 1)
        before = [buffer.clone() for buffer in elbo.buffers()]
        elbo.zero_grad()
        loss = elbo(x, y)
        expected = torch.autograd.grad(loss, steps.parameters, allow_unused=True)
        moved = [buffer.clone() for buffer in elbo.buffers()]
        for buffer, value in zip(elbo.buffers(), before, strict=True):
            buffer.copy_(value)
        assert torch.equal(steps.gradients(1.0, (x, y))["terms"][0], loss.detach())
        assert all(map(torch.equal, elbo.buffers(), moved))
        for parameter, gradient in zip(steps.parameters, expected, strict=True):
            assert gradient is parameter.grad or torch.equal(parameter.grad, gradient)
