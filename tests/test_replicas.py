"""Replicas trained at once must be the networks trained alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.posterior import Posterior
from varprop.training.epochs import epoch_seed

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


class Poisson(vp.likelihoods.Likelihood):
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return y * f - f.exp() - torch.lgamma(y + 1)


CASES = {
    "vbp": lambda: objective(mlp(), vp.VBP, vp.likelihoods.Normal()),
    "dvi with correlations": lambda: objective(mlp(), vp.DVI, vp.likelihoods.Normal(), moments="correlated"),
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
        generator.manual_seed(epoch_seed(seed, epoch))
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


def close(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.allclose(v, b.state_dict()[k], rtol=0, atol=1e-10) for k, v in a.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_a_replica_is_the_network_trained_alone(case: str) -> None:
    torch.manual_seed(0)
    members = [CASES[case]() for _ in range(3)]
    alone = copy.deepcopy(members)
    x, y = data(case)
    options = {"schedule": "cosine", "kl_warmup": 2} if case == "dvi" else {}
    history = vp.replicas.fit(members, x, y, epochs=EPOCHS, batch_size=BATCH, seeds=[5, 6, 7], **options)  # type: ignore[arg-type]
    assert len(history) == EPOCHS * 3
    for r, (member, other) in enumerate(zip(members, alone, strict=True)):
        train_alone(other, x[r], y[r], 5 + r, cosine=case == "dvi", warmup=2 if case == "dvi" else 0)
        assert close(member, other)
    assert not close(members[0], members[1])


COLUMNS = ["epoch", "loss", "data_fit", "kl"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("noise", ["running", "exact", "fixed"])
def test_a_replica_ends_where_fit_ends(case: str, noise: Any) -> None:
    """The same options, weights, history and held-out rows."""
    torch.manual_seed(0)
    members = [CASES[case]() for _ in range(3)]
    alone = copy.deepcopy(members)
    x, y = data(case)
    weight = torch.rand(3, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options: dict[str, Any] = {
        "epochs": EPOCHS, "lr": 0.02, "batch_size": BATCH, "schedule": "cosine", "kl_warmup": 2,
        "noise": noise, "validation": 0.3,
    }  # fmt: skip
    history = vp.replicas.fit(members, x, y, weight, seeds=[5, 6, 7], **options)
    for r, (member, other) in enumerate(zip(members, alone, strict=True)):
        expected = vp.fit(other, (x[r], y[r], weight[r]), seed=5 + r, **options)
        assert close(member, other)
        ours = history[history.replica == r].reset_index(drop=True)
        assert list(ours.columns) == ["epoch", "replica", *expected.columns[1:]]
        columns = [*COLUMNS, "validation"]
        pd.testing.assert_frame_equal(ours[columns], expected[columns], rtol=1e-9)
        assert not member.training


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch maps log_ndtr replica by replica
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (vp.likelihoods.Normal(), 1),
        (vp.likelihoods.HeteroscedasticNormal(), 2),
        (vp.likelihoods.Categorical(), 3),
        (vp.likelihoods.Categorical("samples"), 3),
        (vp.likelihoods.Categorical("delta"), 3),
        (vp.likelihoods.Bernoulli(), 1),
        (vp.likelihoods.MultiLabel(), 2),
        (Poisson(), 1),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("method", [vp.VBP, vp.LOCAL_REPARAM], ids=lambda method: method.name)
def test_the_validation_is_the_predictive_log_likelihood(
    method: vp.Method, likelihood: vp.likelihoods.Likelihood, outputs: int
) -> None:
    torch.manual_seed(0)
    members = [objective(nn.Linear(3, outputs), method, copy.deepcopy(likelihood)) for _ in range(2)]
    x = torch.randn(2, N, 3, dtype=torch.float64)
    shape = members[0].likelihood.target_shape(torch.empty(N, outputs))
    y = torch.randint(2, (2, *shape))
    y = y if isinstance(likelihood, vp.likelihoods.Categorical) else y.double()
    history = vp.replicas.fit(members, x, y, epochs=1, batch_size=N, validation=(x, y))
    samples = 2000 if method.samples else None
    expected = [float(m.predict(x[r], samples).log_prob(y[r]).mean()) for r, m in enumerate(members)]
    assert history.validation.tolist() == pytest.approx(expected, rel=0.05 if method.samples else 1e-9)


def test_the_seeds_fix_everything_and_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    start = [objective(mlp(), vp.LOCAL_REPARAM, vp.likelihoods.Normal()) for _ in range(2)]
    x, y = data("vbp", replicas=2)
    runs = []
    for seeds in ([3, 4], [3, 4], [5, 4]):
        members = copy.deepcopy(start)
        torch.manual_seed(len(runs))
        before = torch.random.get_rng_state()
        vp.replicas.fit(members, x, y, epochs=2, batch_size=BATCH, validation=0.2, seeds=seeds)
        assert torch.equal(torch.random.get_rng_state(), before)
        runs.append(members)
    assert close(runs[0][0], runs[1][0])
    assert not close(runs[0][0], runs[2][0])


def test_validation_rows_do_not_move_running_statistics() -> None:
    def trained(**options: Any) -> vp.ELBO:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        members = [objective(net, vp.VBP, vp.likelihoods.Normal())]
        vp.replicas.fit(members, *data("vbp", replicas=1), epochs=1, batch_size=7, **options)
        return members[0]

    x, y = data("vbp", replicas=1)
    assert close(trained(), trained(validation=(x + 9, y)))
    assert trained(noise="exact").net[1].num_batches_tracked == 3  # type: ignore[index]


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
    """Against training cut off after each epoch; the last replica would get better again, too late."""
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
            value = members[r].predict(validation[0][r]).log_prob(validation[1][r]).mean().item()
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


def normal() -> vp.likelihoods.Likelihood:
    return vp.likelihoods.Normal()


def frozen() -> vp.ELBO:
    elbo = objective(mlp(), vp.VBP, normal())
    elbo.net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return elbo


def doubled(method: vp.Method, module: nn.Module, x: vp.Gaussian) -> vp.Gaussian:
    return x * 2.0


OTHERS = {
    "method": (lambda: objective(mlp(), vp.DVI, normal()), "its method"),
    "method of the same name": (
        lambda: objective(mlp(), vp.VBP | {nn.ReLU: doubled}, normal()),
        "its method",
    ),
    "slope": (lambda: objective(mlp(), vp.vbp(slope=5.0), normal()), "its method"),
    "prior": (lambda: objective(mlp(), vp.VBP, normal(), prior=vp.priors.Normal(9.0)), "its prior"),
    "kind of prior": (lambda: objective(mlp(), vp.VBP, normal(), prior=vp.priors.LogUniform()), "its prior"),
    "gates": (lambda: objective(mlp(), vp.VBP, normal(), kl_z_weight=0.5), "its kl_z_weight"),
    "moments": (lambda: objective(mlp(), vp.VBP, normal(), moments="correlated"), "its moments"),
    "likelihood": (
        lambda: objective(mlp(), vp.VBP, vp.likelihoods.MultiLabel()),
        r"its likelihood \(MultiLabel instead of Normal\)",
    ),
    "architecture": (
        lambda: objective(nn.Sequential(nn.Linear(3, 1)), vp.VBP, normal()),
        "its net .2 modules instead of 4",
    ),
    "activation": (
        lambda: objective(nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)), vp.VBP, normal()),
        r"its net \(Tanh instead of ReLU at '1'\)",
    ),
    "width": (
        lambda: objective(nn.Sequential(nn.Linear(3, 11), nn.ReLU(), nn.Linear(11, 1)), vp.VBP, normal()),
        "its net .other settings of Linear at '0'",
    ),
    "precision": (lambda: CASES["vbp"]().float(), "shape, type, device or requires_grad of"),
    "frozen": (frozen, "requires_grad of '0.weight'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_replicas_that_differ_in_more_than_their_values_are_refused(name: str) -> None:
    x, y = data("vbp", replicas=2)
    make, difference = OTHERS[name]
    with pytest.raises(ValueError, match=rf"member 1 differs from the first in .*{difference}") as error:
        vp.replicas.fit([CASES["vbp"](), make()], x, y, epochs=1)
    assert "\n" not in str(error.value)


def test_settings_of_a_likelihood_are_compared() -> None:
    x, y = data("convolution", replicas=2)
    members = [
        objective(conv(), vp.VBP, vp.likelihoods.Categorical(approximation))
        for approximation in ("quadrature", "delta")
    ]
    with pytest.raises(ValueError, match=r"its likelihood .other settings of Categorical"):
        vp.replicas.fit(members, x, y, epochs=1)


def test_members_may_have_been_made_apart() -> None:
    """With equal methods, priors and likelihoods, which Python itself would call different."""

    class Plain(vp.priors.Prior):
        def __init__(self, precision: float) -> None:
            self.precision = precision

        def kl(self, q: Posterior) -> Tensor:
            return vp.priors.Normal(self.precision).kl(q)

    def member(precision: float = 2.0) -> vp.ELBO:
        method = vp.vbp(slope=5.0) | {nn.Tanh: lambda method, module, x: x * precision}
        return objective(mlp(), method, vp.likelihoods.Normal(3.0), prior=Plain(precision))

    x, y = data("vbp", replicas=2)
    vp.replicas.fit([member(), member()], x, y, epochs=1)
    vp.replicas.fit([member(), copy.deepcopy(member())], x, y, epochs=1)
    with pytest.raises(ValueError, match="differs from the first in its method"):
        vp.replicas.fit([member(), member(3.0)], x, y, epochs=1)


def test_members_that_share_tensors_are_refused() -> None:
    x, y = data("vbp", replicas=2)
    with pytest.raises(ValueError, match=r"members 0 and 1 share the tensor 'net.0.weight'"):
        vp.replicas.fit([CASES["vbp"]()] * 2, x, y, epochs=1)
    likelihood = vp.likelihoods.Normal()
    members = [objective(mlp(), vp.VBP, likelihood) for _ in range(2)]
    with pytest.raises(ValueError, match=r"members 0 and 1 share the tensor 'likelihood.precision'"):
        vp.replicas.fit(members, x, y, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linear"}, 'schedule must be None or "cosine"'),
        ({"epochs": 0}, "epochs must be positive"),
        ({"kl_warmup": -1}, "kl_warmup must be a whole number of epochs, zero or more"),
        ({"noise": "none"}, "noise must be"),
        ({"patience": 3}, "patience needs validation data"),
        ({"validation": 0.99}, "validation=0.99 leaves none of the 21 rows"),
        ({"validation": (torch.zeros(2, 4, 3), torch.zeros(2, 5, 1))}, "validation has shapes"),
        ({"validation": (torch.zeros(3, 4, 3), torch.zeros(3, 4, 1))}, "validation is for 3 replicas"),
        ({"seeds": [1]}, "1 seeds for 2 members"),
        ({"seeds": [1, 2**60]}, "a seed must be a whole number"),
        ({"weight": torch.zeros(2, N)}, "weights of data must be zero or more, and not all zero"),
        ({"x": torch.zeros(2, 9, 3)}, r"data has shapes \(2, 9, 3\), \(2, 21, 1\)"),
    ],
)
def test_options_and_data_are_checked(options: dict[str, Any], message: str) -> None:
    x, y = data("vbp", replicas=2)
    members = [CASES["vbp"]() for _ in range(2)]
    with pytest.raises(ValueError, match=rf"replicas.fit: .*{message}"):
        vp.replicas.fit(members, **{"x": x, "y": y, "epochs": 1, **options})


def test_steps_that_cannot_be_mapped_name_the_way_out() -> None:
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    elbo = vp.ELBO(net, vp.DETERMINISTIC, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=5)
    with pytest.raises(ValueError, match="a tensor is sparse in a step; train such networks one by one"):
        vp.replicas.fit([elbo], torch.zeros(1, 5, 2).long(), torch.zeros(1, 5, 1), epochs=1)


def test_the_number_of_members_is_checked() -> None:
    x, y = data("vbp", replicas=2)
    with pytest.raises(ValueError, match=r"x\.expand\(3"):
        vp.replicas.fit([CASES["vbp"]() for _ in range(3)], x, y, epochs=1)
    with pytest.raises(ValueError, match="at least one"):
        vp.replicas.fit([], x, y, epochs=1)
    with pytest.raises(ValueError, match="n_data=21, the data has 20 rows; make the ELBO with n_data=20"):
        vp.replicas.fit([CASES["vbp"]() for _ in range(2)], x[:, 1:], y[:, 1:], epochs=1)


@pytest.mark.parametrize("optimizer", [None, "lbfgs"])
def test_a_loss_that_is_not_finite_names_its_replica_and_keeps_the_state(optimizer: Any) -> None:
    x, y = data("vbp", replicas=2)
    x[1, 3] = math.nan
    members = [CASES["vbp"]() for _ in range(2)]
    before = [copy.deepcopy(member.state_dict()) for member in members]
    with pytest.raises(
        FloatingPointError,
        match=r"the loss of replica 1 is not finite in epoch 0, batch \d: the inputs are not, in row \d",
    ):
        vp.replicas.fit(members, x, y, epochs=1, optimizer=optimizer)
    for member, state in zip(members, before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in member.state_dict().items())


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
