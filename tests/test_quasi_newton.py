"""L-BFGS: the known optimum of a linear model, members that leave each other alone, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from varprop.training.quasi_newton import LBFGS, Rounds

pytestmark = pytest.mark.usefixtures("float64")


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=generator)
    return x, (x @ torch.tensor([1.0, -2.0, 0.5])).unsqueeze(1) + 0.3 * torch.randn(
        60, 1, generator=generator
    )


def objective(seed: int = 0, hidden: int = 8, method: vp.Method = vp.DVI) -> vp.ELBO:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    likelihood = vp.likelihoods.Normal().double()
    return vp.ELBO(vp.variational(net, init="he"), method, likelihood, vp.priors.FanIn(4.0), n_data=60)


def test_it_finds_the_mean_field_posterior_of_a_linear_model() -> None:
    """With noise variance 1/τ and prior N(0, 1): means (XᵀX + I/τ)⁻¹Xᵀy, variances 1/(1 + τ Σ x²)."""
    x, y = data()
    net = vp.variational(nn.Linear(3, 1, bias=False))
    likelihood = vp.likelihoods.Normal(precision=4.0).double()
    elbo = vp.ELBO(net, vp.DVI, likelihood, vp.priors.Normal(), n_data=60)
    vp.fit(elbo, (x, y), epochs=3, optimizer="lbfgs", noise="fixed")
    means = torch.linalg.solve(x.T @ x + torch.eye(3) / 4, x.T @ y)
    torch.testing.assert_close(net.weight.detach().T, means, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(net.weight_logvar.exp()[0], 1 / (1 + 4 * x.square().sum(0)), rtol=1e-5, atol=0)


def test_members_end_where_each_would_have_ended_alone() -> None:
    sets = [data(seed) for seed in range(3)]
    alone, members = ([objective(seed) for seed in range(3)] for _ in range(2))
    for elbo, rows in zip(alone, sets, strict=True):
        vp.fit(elbo, rows, epochs=2, optimizer="lbfgs")
    x, y = (torch.stack(part) for part in zip(*sets, strict=True))
    history = vp.replicas.fit(members, x, y, epochs=2, optimizer="lbfgs")
    assert history.groupby("replica").size().tolist() == [2, 2, 2]
    for one, other in zip(alone, members, strict=True):
        # Both are deterministic; a mapped product adds in another order, and a line search amplifies it.
        assert one(*sets[0]).item() == pytest.approx(other(*sets[0]).item(), rel=1e-4)


def test_every_member_has_its_own_line_search() -> None:
    """Quadratics of very different curvature: the steps that suit one never take another to its optimum."""
    curvature, optimum = torch.tensor([1e-3, 1.0, 1e4]), torch.tensor([5.0, -1.0, 0.2])
    w = nn.Parameter(torch.zeros(3, 2))
    optimiser = Rounds([w], 3)

    def closure() -> Tensor:
        w.grad = None
        losses = (curvature.view(3, 1) * (w - optimum.view(3, 1)).square()).sum(1)
        losses.sum().backward()
        return losses

    for _ in range(3):
        optimiser.step(closure)
    torch.testing.assert_close(w.detach(), optimum.view(3, 1).expand(3, 2), rtol=1e-5, atol=1e-6)


def test_it_is_ahead_of_adam_after_as_many_passes() -> None:
    x, y = data()
    newton, adam = objective(), objective()
    vp.fit(newton, (x, y), epochs=5, optimizer="lbfgs")
    vp.fit(adam, (x, y), epochs=5 * 25, batch_size=60)
    assert newton(x, y) < adam(x, y) - 0.1


def test_a_resumed_run_ends_at_the_same_weights(tmp_path: Path) -> None:
    x, y = data()
    whole, parts = objective(), objective()
    vp.fit(whole, (x, y), epochs=4, optimizer="lbfgs", validation=0.2)
    for epochs in (2, 4):
        options = {"checkpoint": tmp_path / "run", "resume": True, "validation": 0.2}
        vp.fit(parts, (x, y), epochs=epochs, optimizer="lbfgs", **options)  # type: ignore[arg-type]
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


def test_validation_stops_each_member_by_itself() -> None:
    x, y = (t.expand(3, *t.shape) for t in data())
    members = [objective(seed, hidden=30) for seed in range(3)]
    options = {"validation": 0.3, "patience": 2}
    history = vp.replicas.fit(members, x, y, epochs=40, optimizer="lbfgs", **options)  # type: ignore[arg-type]
    lengths = history.groupby("replica").size().tolist()
    assert max(lengths) < 40
    for r, rows in history.groupby("replica"):
        best = int(rows.validation.argmax())
        assert lengths[int(r)] == best + 3  # the best epoch, and two without a better one


def test_a_point_where_the_loss_is_not_finite_is_avoided() -> None:
    w = nn.Parameter(torch.tensor([0.9]))
    optimiser = LBFGS([w])

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -torch.log(1 - w).sum() + 10 * (w - 0.99).square().sum()  # NaN beyond one
        loss.backward()
        return loss

    before = closure().item()
    after = optimiser.step(closure).item()
    assert math.isfinite(after)
    assert after < before


@pytest.mark.parametrize("members", [1, 3])
def test_an_error_in_the_objective_ends_the_round(members: int) -> None:
    w = nn.Parameter(torch.zeros(members, 2))
    calls = iter(range(10**6))

    def closure() -> Tensor:
        if next(calls) == 2:
            raise RuntimeError("the objective fails")
        w.grad = 2 * (w.detach() - 1) * torch.arange(1.0, members + 1).view(-1, 1) ** 2
        return (w.detach() - 1).square().sum(1) * torch.arange(1.0, members + 1) ** 2

    with pytest.raises(RuntimeError, match="the objective fails"):
        Rounds([w], members).step(closure)


def test_what_it_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    with pytest.raises(ValueError, match="needs an objective without noise, and LOCAL_REPARAM samples"):
        vp.fit(objective(method=vp.LOCAL_REPARAM), (x, y), optimizer="lbfgs")
    plain = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    likelihood, prior = vp.likelihoods.Normal().double(), vp.priors.Normal()
    with pytest.raises(ValueError, match="needs an objective without noise, and Dropout samples"):
        vp.fit(vp.ELBO(plain, vp.DETERMINISTIC, likelihood, prior, n_data=60), (x, y), optimizer="lbfgs")
    with pytest.raises(ValueError, match="needs all rows at once"):
        vp.fit(objective(), DataLoader(TensorDataset(x, y), 10), optimizer="lbfgs")
    with pytest.raises(ValueError, match="leave `clip` out"):
        vp.fit(objective(), (x, y), optimizer="lbfgs", clip=1.0)
    monkeypatch.setattr(Fabric, "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match="in one process, and the fabric has 2"):
        vp.fit(objective(), (x, y), optimizer="lbfgs", fabric=Fabric(devices=1))
    with pytest.raises(ValueError, match="there is no objective to train"):
        vp.replicas.fit([], x[None], y[None], optimizer="lbfgs")
    with pytest.raises(ValueError, match="has shapes"):
        vp.replicas.fit([objective()], x[:, 0], y[:, 0], optimizer="lbfgs")
    with pytest.raises(ValueError, match='optimizer must be "lbfgs" or a function'):
        vp.fit(objective(), (x, y), optimizer="newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='optimizer must be None or "lbfgs"'):
        vp.replicas.fit([objective()], x[None], y[None], optimizer="newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step needs a closure"):
        LBFGS([nn.Parameter(torch.zeros(1))]).step()
