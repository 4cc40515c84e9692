"""Replicas trained at once must be the networks trained alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import varprop as vp

N, BATCH, EPOCHS = 21, 8, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def objective(
    net: nn.Module, method: vp.Method, likelihood: vp.likelihoods.Likelihood, **options: object
) -> vp.ELBO:
    prior = options.pop("prior", vp.priors.Normal(10.0))
    return vp.ELBO(vp.variational(net), method, likelihood, prior, n_data=N, **options).double()  # type: ignore[arg-type]


CASES = {
    "vbp": lambda: objective(mlp(), vp.VBP, vp.likelihoods.Normal()),
    "vbp with gates": lambda: objective(mlp(), vp.vbp(slope=5.0), vp.likelihoods.Normal(), kl_z_weight=0.1),
    "dvi": lambda: objective(mlp(), vp.DVI, vp.likelihoods.Normal(), prior=vp.priors.EmpiricalBayes()),
    "heteroscedastic": lambda: objective(
        nn.Sequential(nn.Linear(3, 2)), vp.DVI, vp.likelihoods.HeteroscedasticNormal()
    ),
    "convolution": lambda: objective(conv(), vp.VBP, vp.likelihoods.Categorical()),
    "deterministic": lambda: vp.ELBO(
        mlp(), vp.DETERMINISTIC, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=N
    ).double(),
}


def data(case: str, replicas: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if case == "convolution":
        x = torch.randn(replicas, N, 1, 11, 11, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (replicas, N), generator=generator)
    x = torch.randn(replicas, N, 3, generator=generator, dtype=torch.float64)
    return x, x[..., :1].abs() + 0.1 * torch.randn(replicas, N, 1, generator=generator, dtype=torch.float64)


def train_alone(elbo: vp.ELBO, x: Tensor, y: Tensor, seed: int, cosine: bool, warmup: int) -> None:
    """The plain loop."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(elbo.parameters(), lr=0.01)
    steps = EPOCHS * math.ceil(N / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)) if cosine else 1.0
    )
    for epoch in range(EPOCHS):
        statistic = torch.zeros((), dtype=x.dtype)
        for batch in torch.randperm(N, generator=generator).split(BATCH):
            terms = elbo.terms(x[batch], y[batch])
            loss = elbo.loss(terms) - (1 - min(1, (epoch + 1) / (warmup + 1))) * terms.kl / elbo.n_data
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if (s := elbo.likelihood.statistic(terms.f, y[batch])) is not None:
                statistic = statistic + s.detach() * len(batch) / N
        if statistic.dim():
            elbo.likelihood.update(statistic)
    if (s := elbo.likelihood.statistic(elbo.method(elbo.net, x), y)) is not None:
        elbo.likelihood.update(s.detach())


def close(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.allclose(v, b.state_dict()[k], rtol=0, atol=1e-10) for k, v in a.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_a_replica_is_the_network_trained_alone(case: str) -> None:
    torch.manual_seed(0)
    members = [CASES[case]() for _ in range(3)]
    alone = copy.deepcopy(members)
    x, y = data(case)
    options = {"schedule": "cosine", "warmup": 2} if case == "dvi" else {}
    history = vp.replicas.fit(members, x, y, epochs=EPOCHS, batch_size=BATCH, seeds=[5, 6, 7], **options)  # type: ignore[arg-type]
    assert history.shape == (EPOCHS, 3)
    for r, (member, other) in enumerate(zip(members, alone, strict=True)):
        train_alone(other, x[r], y[r], 5 + r, cosine=case == "dvi", warmup=2 if case == "dvi" else 0)
        assert close(member, other)
    assert not close(members[0], members[1])


def test_equal_members_part_by_their_seeds_only() -> None:
    torch.manual_seed(0)
    members = [copy.deepcopy(elbo) for elbo in [CASES["vbp"]()] * 3]
    x, y = data("vbp", replicas=1)
    vp.replicas.fit(
        members, x.expand(3, N, 3), y.expand(3, N, 1), epochs=2, batch_size=BATCH, seeds=[1, 1, 2]
    )
    assert close(members[0], members[1])
    assert not close(members[0], members[2])


def test_a_sampling_method_draws_for_each_replica() -> None:
    torch.manual_seed(0)
    members = [
        copy.deepcopy(elbo) for elbo in [objective(mlp(), vp.LOCAL_REPARAM, vp.likelihoods.Normal())] * 2
    ]
    x, y = data("vbp", replicas=1)
    vp.replicas.fit(members, x.expand(2, N, 3), y.expand(2, N, 1), epochs=2, batch_size=BATCH, seeds=[1, 1])
    assert not close(members[0], members[1])


def test_each_replica_stops_at_its_own_best_epoch() -> None:
    """Against the same training cut off after every possible number of epochs; the last replica would get better again, too late."""
    torch.manual_seed(0)
    start = [CASES["heteroscedastic"]() for _ in range(3)]
    x, y = data("vbp")
    validation = x[:, :7] + 0.3, y[:, :7] * torch.tensor([1.0, 0.2, -1.0]).view(3, 1, 1)
    epochs, options = 6, {"lr": 1.0, "batch_size": N}
    cut = [copy.deepcopy(start) for _ in range(epochs)]
    for epoch, members in enumerate(cut):
        vp.replicas.fit(members, x, y, epochs=epoch + 1, **options)  # type: ignore[arg-type]
    stopped = copy.deepcopy(start)
    vp.replicas.fit(stopped, x, y, epochs=epochs, validation=validation, patience=2, **options)  # type: ignore[arg-type]
    bests = []
    for r in range(3):
        best, score, age = 0, -math.inf, 0
        for epoch, members in enumerate(cut):
            value = members[r].terms(validation[0][r], validation[1][r]).data_fit.item()
            best, score, age = (epoch, value, 0) if value > score else (best, score, age + 1)
            if age == 2:
                break
        assert close(stopped[r], cut[best][r])
        bests.append(best)
    assert bests == [1, 2, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_step_changes_nothing() -> None:
    torch.manual_seed(0)
    members = [CASES["vbp"]() for _ in range(2)]
    compiled = copy.deepcopy(members)
    x, y = data("vbp", replicas=2)
    vp.replicas.fit(members, x, y, epochs=2, batch_size=BATCH)
    vp.replicas.fit(compiled, x, y, epochs=2, batch_size=BATCH, compile=True)
    assert close(members[0], compiled[0])
    assert close(members[1], compiled[1])


def test_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    members = [CASES["vbp"]() for _ in range(2)]
    for member in members:
        member.net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    before = copy.deepcopy(members)
    vp.replicas.fit(members, *data("vbp", replicas=2), epochs=1, batch_size=BATCH)
    assert torch.equal(members[1].net[0].weight, before[1].net[0].weight)  # type: ignore[index, arg-type]
    assert not torch.equal(members[1].net[2].weight, before[1].net[2].weight)  # type: ignore[index, arg-type]


def test_replicas_that_differ_in_more_than_their_values_are_refused() -> None:
    x, y = data("vbp", replicas=2)
    with pytest.raises(ValueError, match="differs from the first in method"):
        vp.replicas.fit([CASES["vbp"](), objective(mlp(), vp.DVI, vp.likelihoods.Normal())], x, y, epochs=1)
    with pytest.raises(ValueError, match="share one architecture"):
        vp.replicas.fit(
            [CASES["vbp"](), objective(nn.Sequential(nn.Linear(3, 1)), vp.VBP, vp.likelihoods.Normal())],
            x,
            y,
            epochs=1,
        )
    with pytest.raises(ValueError, match=r"x\.expand\(3"):
        vp.replicas.fit([CASES["vbp"]() for _ in range(3)], x, y, epochs=1)
    with pytest.raises(ValueError, match="at least one"):
        vp.replicas.fit([], x, y, epochs=1)
    with pytest.raises(ValueError, match="schedule"):
        vp.replicas.fit([CASES["vbp"]()], x[:1], y[:1], epochs=1, schedule="linear")  # type: ignore[arg-type]


def test_weights_count_like_repeated_rows_for_each_replica(float64: None) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 12, 2), torch.randn(2, 12, 1)
    counts = torch.tensor([[1, 2, 0, 3] * 3, [2, 2, 1, 1] * 3])  # 18 in all for either replica
    repeated = [
        torch.stack([part.repeat_interleave(n, 0) for part, n in zip(t, counts, strict=True)]) for t in (x, y)
    ]

    def trained(data: list[torch.Tensor], batch_size: int) -> list[vp.ELBO]:
        torch.manual_seed(1)
        nets = [
            vp.variational(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), logvar=-4.0)
            for _ in range(2)
        ]
        members = [
            vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=18) for net in nets
        ]
        vp.replicas.fit(members, *data, epochs=15, batch_size=batch_size)
        return members

    # Weights of mean one and n_data their sum in counts: the same loss as that of the repeated rows.
    weighted = trained([x, y, counts * (12 / 18)], 12)
    for a, b in zip(weighted, trained(repeated, 18), strict=True):
        assert all(
            torch.allclose(value, b.state_dict()[name], rtol=1e-9) for name, value in a.state_dict().items()
        )
