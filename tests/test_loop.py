"""The training loop: what it returns, what it repeats bit for bit, what it refuses."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import varprop as vp
from varprop.training import batches, checkpoints
from varprop.training.epochs import epoch_seed

N = 50
torch.manual_seed(7)
X = torch.randn(N, 3)
Y = X[:, :1].abs() + 0.1 * torch.randn(N, 1)
OTHER = torch.randn(20, 3)


def objective(n_data: int = N, method: vp.Method = vp.VBP, seed: int = 0, **options: Any) -> vp.ELBO:
    torch.manual_seed(seed)
    net = vp.variational(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)), logvar=-5.0)
    return vp.ELBO(net, method, vp.likelihoods.Normal(**options), vp.priors.Normal(), n_data=n_data)


def same(a: vp.ELBO, b: vp.ELBO) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def close(a: vp.ELBO, b: vp.ELBO, **tolerance: float) -> bool:
    return all(
        torch.allclose(value, b.state_dict()[name], **tolerance) for name, value in a.state_dict().items()
    )


class Spy:
    """Makes an Adam that notes its rate and the norm of the gradient at each step."""

    def __init__(self, **options: Any) -> None:
        self.options, self.rates, self.norms = options, [], []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        optimiser = torch.optim.Adam(parameters, **self.options)

        def note(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            group = optimiser.param_groups[0]
            self.rates.append(group["lr"])
            self.norms.append(float(torch.stack([p.grad.norm() for p in group["params"]]).norm()))

        optimiser.register_step_pre_hook(note)
        return optimiser


# ------------------------------------------------------------------------------------------- history and data


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_step_changes_nothing() -> None:
    plain, compiled = objective(method=vp.DVI), objective(method=vp.DVI)
    options: dict[str, Any] = {"epochs": 3, "batch_size": 16, "kl_warmup": 2}  # the last batch has 2 rows
    histories = [vp.fit(plain, (X, Y), **options), vp.fit(compiled, (X, Y), compile=True, **options)]
    assert close(plain, compiled, atol=1e-5)
    assert np.allclose(*(history[["loss", "data_fit", "kl"]] for history in histories), rtol=1e-4)


def test_history_has_a_row_for_each_epoch() -> None:
    history = vp.fit(objective(), (X, Y), epochs=5, validation=(OTHER, OTHER[:, :1].abs()))
    assert list(history.columns) == [
        "epoch",
        "loss",
        "data_fit",
        "kl",
        "seconds",
        "rows_per_second",
        "validation",
    ]
    assert history.epoch.tolist() == [0, 1, 2, 3, 4]
    assert history.notna().all().all()
    assert (history.rows_per_second > 0).all()
    assert torch.tensor(history.loss.iloc[-1]) < history.loss.iloc[0]


def test_the_loss_of_the_history_is_the_mean_over_rows(float64: None) -> None:
    """With a rate of almost zero, three unequal batches average to the loss of the whole data."""
    x, y, elbo = X.double(), Y.double(), objective()
    expected = elbo(x, y)
    history = vp.fit(elbo, (x, y), epochs=1, lr=1e-12, batch_size=20)
    assert math.isclose(history.loss[0], float(expected.detach()), rel_tol=1e-6)
    assert math.isclose(history.kl[0] / N - history.data_fit[0], history.loss[0], rel_tol=1e-6)


def test_tensors_dataset_and_loader_give_one_result() -> None:
    results = []
    for data in ((X, Y), TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), batch_size=N)):
        elbo = objective()
        history = vp.fit(elbo, data, epochs=3, batch_size=N)
        results.append((elbo, history))
    for elbo, history in results[1:]:
        assert close(elbo, results[0][0], rtol=1e-4, atol=1e-6)
        assert list(history.columns) == list(results[0][1].columns)


def test_every_row_is_seen_once_an_epoch() -> None:
    seen: list[Tensor] = []
    elbo = objective()
    terms = elbo.terms
    elbo.terms = lambda x, y, weight=None: (seen.append(x), terms(x, y, weight))[1]  # type: ignore[method-assign]
    vp.fit(elbo, (X, Y), epochs=2, batch_size=16)
    assert [len(x) for x in seen] == [16, 16, 16, 2] * 2
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert torch.equal(first.sort(0).values, X.sort(0).values)
    assert torch.equal(second.sort(0).values, X.sort(0).values)
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------------------------- randomness


def test_all_bits_of_a_seed_count() -> None:
    """A generator of the CPU takes 32 bits of its seed only."""
    pairs = itertools.product((0, 1, 4096, 2**32, 2**40, -1), (0, 1, 2**12))
    drawn = {torch.randint(2**60, (), generator=_seeded(*pair)).item() for pair in pairs}
    assert len(drawn) == 18


def _seeded(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(epoch_seed(seed, epoch))


@pytest.mark.parametrize("method", [vp.VBP, vp.LOCAL_REPARAM], ids=lambda method: method.name)
def test_one_seed_gives_one_result_and_another_another(method: vp.Method) -> None:
    runs = []
    for seed in (3, 3, 4):
        elbo = objective(method=method)
        torch.manual_seed(len(runs))
        runs.append((elbo, vp.fit(elbo, (X, Y), epochs=3, batch_size=16, validation=0.2, seed=seed)))
    assert same(runs[0][0], runs[1][0])
    timeless = ["loss", "data_fit", "kl", "validation"]
    assert runs[0][1][timeless].equals(runs[1][1][timeless])
    assert not same(runs[0][0], runs[2][0])


def test_the_global_random_state_is_left_alone() -> None:
    elbo = objective()
    before = torch.random.get_rng_state()
    vp.fit(elbo, DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True), epochs=2)
    vp.fit(elbo, (X, Y), epochs=2, validation=0.3)
    assert torch.equal(torch.random.get_rng_state(), before)


# --------------------------------------------------------------------------------------- rates, warm-up, clip


def test_cosine_falls_from_the_rate_to_zero() -> None:
    spy = Spy(lr=0.5)
    vp.fit(objective(), (X, Y), epochs=4, batch_size=25, optimizer=spy, schedule="cosine")
    assert spy.rates == pytest.approx([0.25 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])


def test_a_schedule_of_the_user_steps_each_epoch() -> None:
    spy = Spy(lr=0.5)
    vp.fit(
        objective(),
        (X, Y),
        epochs=3,
        batch_size=25,
        optimizer=spy,
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.1),
    )
    assert spy.rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


def test_warm_up_raises_the_weight_of_the_divergence() -> None:
    """With a rate of almost zero, the loss of epoch e is -data_fit + (e + 1)/4 KL/n up to full weight."""
    history = vp.fit(objective(), (X, Y), epochs=5, lr=1e-12, batch_size=N, kl_warmup=3, noise="fixed")
    weights = (history.loss + history.data_fit) * N / history.kl
    assert weights.tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], rel=1e-4)


def test_clip_bounds_the_gradient() -> None:
    free, clipped = Spy(lr=1e-3), Spy(lr=1e-3)
    vp.fit(objective(), (X, 100 * Y), epochs=1, optimizer=free)
    vp.fit(objective(), (X, 100 * Y), epochs=1, optimizer=clipped, clip=0.5)
    assert free.norms[0] > 1
    assert clipped.norms[0] == pytest.approx(0.5, rel=1e-4)


# ------------------------------------------------------------------------------------------------------ noise


@torch.no_grad()
def expected_square(elbo: vp.ELBO, x: Tensor, y: Tensor) -> float:
    return float(elbo.likelihood.statistic(elbo.method(elbo.net, x), y))


def test_exact_noise_is_that_of_the_final_weights_and_running_noise_close_to_it() -> None:
    exact, running = objective(), objective()
    vp.fit(exact, (X, Y), epochs=20, batch_size=16, noise="exact")
    assert 1 / float(exact.likelihood.precision) == pytest.approx(expected_square(exact, X, Y), rel=1e-5)
    vp.fit(running, (X, Y), epochs=20, batch_size=16, noise="running")
    assert 1 / float(running.likelihood.precision) != pytest.approx(expected_square(running, X, Y), rel=1e-5)
    assert 1 / float(running.likelihood.precision) == pytest.approx(expected_square(running, X, Y), rel=0.2)


def test_running_noise_averages_over_rows_not_batches() -> None:
    elbo = objective()
    expected = expected_square(elbo, X, Y)
    vp.fit(elbo, (X, Y), epochs=1, lr=1e-12, batch_size=16)
    assert 1 / float(elbo.likelihood.precision) == pytest.approx(expected, rel=1e-4)


def test_fixed_noise_stays() -> None:
    elbo = objective(precision=3.0)
    vp.fit(elbo, (X, Y), epochs=3, noise="fixed")
    assert float(elbo.likelihood.precision) == 3.0


# ------------------------------------------------------------------------------------------------- validation


def test_the_best_weights_are_restored() -> None:
    """A rate that is far too high spoils the fit after a good start."""
    held_out = (OTHER, OTHER[:, :1].abs())
    elbo = objective()
    history = vp.fit(elbo, (X, Y), epochs=12, lr=0.3, validation=held_out)
    assert history.validation.idxmax() < 11
    assert float(elbo.predict(OTHER).log_prob(held_out[1]).mean()) == pytest.approx(
        history.validation.max(), rel=1e-5
    )


def test_patience_ends_the_run() -> None:
    held_out = (OTHER, OTHER[:, :1].abs())
    full = vp.fit(objective(), (X, Y), epochs=40, lr=0.3, validation=held_out)
    short = vp.fit(objective(), (X, Y), epochs=40, lr=0.3, validation=held_out, patience=3)
    best, since = -math.inf, 0
    for epochs, score in enumerate(full.validation, 1):  # noqa: B007
        best, since = (score, 0) if score > best else (best, since + 1)
        if since == 3:
            break
    assert epochs < 40
    assert len(short) == epochs


def test_patience_with_a_buffer_without_dimensions() -> None:
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)))
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=N)
    vp.fit(elbo, (X, Y), epochs=3, validation=0.2, patience=2)
    assert net[1].num_batches_tracked > 0


def test_a_share_is_held_out_and_not_trained_on() -> None:
    train, held_out = batches.split((X, Y), 0.2, seed=1)
    assert len(train[0]) == 40
    assert torch.equal(torch.cat([train[0], held_out[0]]).sort(0).values, X.sort(0).values)
    a, b = objective(), objective(n_data=40)
    vp.fit(a, (X, Y), epochs=2, validation=0.2, seed=1)
    vp.fit(b, (X, Y), epochs=2, validation=0.2, seed=1)
    assert not same(a, b), "n_data is the user's to say: all rows, or those trained on"


# ---------------------------------------------------------------------------------------------------- weights


def test_weights_count_like_repeated_rows(float64: None) -> None:
    x, y = X.double(), Y.double()
    counts = torch.arange(N) % 3 + 1
    repeated = (x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    n = int(counts.sum())
    weighted, duplicated = objective(), objective(n)
    # The weighted loss is n/N times the other: gradient descent with the rate divided by that is the same.
    vp.fit(
        weighted,
        (x, y, counts.double()),
        epochs=30,
        batch_size=n,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02 * N / n),
    )
    vp.fit(duplicated, repeated, epochs=30, batch_size=n, optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
    assert close(weighted, duplicated, rtol=1e-9, atol=1e-12)
    assert not close(weighted, objective(), rtol=1e-2)


def test_weights_count_in_validation() -> None:
    weight = torch.zeros(20)
    weight[:5] = 2.0
    y = OTHER[:, :1].abs()
    some = vp.fit(objective(), (X, Y), epochs=1, validation=(OTHER[:5], y[:5]))
    weighted = vp.fit(objective(), (X, Y), epochs=1, validation=(OTHER, y, weight))
    assert weighted.validation[0] == pytest.approx(some.validation[0], rel=1e-5)


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be positive"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"noise": "none"}, "noise must be"),
        ({"schedule": "linear"}, "schedule must be"),
        ({"patience": 3}, "patience needs validation data"),
        ({"resume": True}, "resume needs the file"),
        ({"validation": 1.5}, "validation must be a share"),
        ({"validation": 0.999}, "validation=0.999 leaves none of the 50 rows to train on"),
        ({"validation": (OTHER, OTHER[:3])}, "validation has shapes"),
        ({"validation": 0.1, "patience": 0}, "patience must be positive"),
        ({"epochs": 2.5}, "epochs must be positive and a whole number"),
        ({"epochs": "ten"}, "epochs must be positive and a whole number"),
        ({"kl_warmup": -1}, "kl_warmup must be a whole number of epochs, zero or more"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"compile": "max"}, "compile must be True or False, got 'max'"),
        ({"seed": 2**50}, "a seed must be a whole number below"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vp.fit(objective(), (X, Y), **options)


def test_batches_without_targets_are_refused() -> None:
    rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    with pytest.raises(
        TypeError, match=r"must be \(x, y\) or \(x, y, weight\), got keys x, y; .* collate_fn"
    ):
        vp.fit(objective(), DataLoader(rows, 10), epochs=1)  # type: ignore[arg-type, type-var]
    with pytest.raises(TypeError, match="got Tensor"):
        vp.fit(objective(), DataLoader(X, 10), epochs=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [40, 50])
@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_n_data_may_count_the_rows_that_are_held_out(rows: int, kind: str) -> None:
    data = (X, Y) if kind == "tensors" else TensorDataset(X, Y)
    assert len(vp.fit(objective(n_data=rows), data, epochs=2, validation=0.2)) == 2


def test_a_wrong_n_data_is_told_what_to_be() -> None:
    right = (
        r"n_data=45, the data has 50 rows, 40 of them to train on; make the ELBO with n_data=50 or n_data=40"
    )
    with pytest.raises(ValueError, match=right):
        vp.fit(objective(n_data=45), (X, Y), validation=0.2)
    weighted = TensorDataset(X, Y, torch.full((N,), 2.0))
    vp.fit(objective(n_data=2 * N), weighted, epochs=1)  # weights tell how much data there is


def test_a_share_may_be_any_real_number() -> None:
    share: Any = np.float32(0.2)
    assert len(vp.fit(objective(), (X, Y), epochs=1, validation=share)) == 1


def test_a_share_of_a_dataset_is_that_of_its_tensors() -> None:
    _, tensors = batches.split((X, Y), 0.1, seed=3)
    _, rows = batches.split(TensorDataset(X, Y), 0.1, seed=3)
    assert torch.equal(torch.stack([x for x, _ in rows]), tensors[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, "data must be tensors"),
        ("data.csv", "data must be tensors"),
        ((X.numpy(), Y.numpy()), "got tuple of ndarray, ndarray"),
        ((X,), "got 1 of them"),
        ((X[:0], Y[:0]), "data has no rows"),
        ((X, Y, torch.zeros(N)), "weights of data must be zero or more, and not all zero"),
        ((X, Y, -torch.ones(N)), "weights of data must be zero or more, and not all zero"),
    ],
    ids=str,
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"fit: .*{message}"):
        vp.fit(objective(), data, epochs=1)


FITS: dict[str, Callable[[vp.ELBO, torch.Tensor], object]] = {
    "tensors": lambda elbo, y: vp.fit(elbo, (X, y), epochs=1),
    "loader": lambda elbo, y: vp.fit(elbo, DataLoader(TensorDataset(X, y), 10), epochs=1),
    "replicas": lambda elbo, y: vp.replicas.fit([elbo], X.unsqueeze(0), y.unsqueeze(0), epochs=1),
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_targets_that_the_likelihood_does_not_know_are_refused(
    fit: Callable[[vp.ELBO, torch.Tensor], object],
) -> None:
    elbo, y = objective(), (Y > 0).float()
    elbo.likelihood, y[7] = vp.likelihoods.Bernoulli(), 2.0
    with pytest.raises(ValueError, match="targets must be 0 or 1, got 2 in row 7"):
        fit(elbo, y)


def test_data_is_checked() -> None:
    with pytest.raises(ValueError, match="the objective has n_data=49, the data has 50 rows"):
        vp.fit(objective(49), (X, Y))
    with pytest.raises(
        ValueError, match=r"data has shapes \(50, 3\), \(49, 1\); the first dimension must be the same"
    ):
        vp.fit(objective(), (X, Y[:-1]))
    with pytest.raises(ValueError, match="target has shape"):
        vp.fit(objective(), (X, Y[:, 0]))
    with pytest.raises(ValueError, match="a DataLoader cannot be split"):
        vp.fit(objective(), DataLoader(TensorDataset(X, Y)), validation=0.1)
    with pytest.raises(ValueError, match="the data gave no batch"):
        vp.fit(objective(), DataLoader(TensorDataset(X, Y), batch_size=64, drop_last=True), epochs=1)


def test_an_objective_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="there is nothing to train"):
        vp.fit(objective().requires_grad_(False), (X, Y))


def test_missing_values_end_the_run() -> None:
    x = X.clone()
    x[3, 1] = math.nan
    with pytest.raises(
        FloatingPointError,
        match=r"the loss is not finite in epoch 0, batch \d: the inputs are not, in row \d+ of the batch",
    ):
        vp.fit(objective(), (x, Y))


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def rooted(calls: list[int], fails: int) -> vp.ELBO:
    """An objective whose network has a square root, which gets a negative number in one of the passes."""
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(X.shape[1], 4), Root(), nn.Linear(4, 1)))

    def root(method: vp.Method, module: nn.Module, x: vp.Gaussian) -> vp.Gaussian:
        calls.append(1)
        mean = x.mean.abs() + 1
        return vp.Gaussian.of(module(-mean if len(calls) >= fails else mean), x.var)

    likelihood, prior = vp.likelihoods.Normal(), vp.priors.Normal()
    return vp.ELBO(net, vp.DVI | {Root: root}, likelihood, prior, n_data=len(X))


@pytest.mark.parametrize("optimizer", [None, "lbfgs"])
def test_a_run_that_diverges_names_the_operation_and_keeps_the_last_good_state(
    tmp_path: Path, optimizer: Any
) -> None:
    """The second epoch fails in its second batch, or, for L-BFGS, with all rows at once."""
    per_epoch = 4 if optimizer is None else 21
    options: dict[str, Any] = {"batch_size": -(-len(X) // 4), "optimizer": optimizer}
    warm = 0 if optimizer is None else 30
    reference, calls = rooted([], 10**9), list[int]()
    elbo = rooted(calls, warm + per_epoch + 2)
    vp.fit(reference, (X, Y), epochs=1, **options)
    batch = 1 if optimizer is None else 0
    with pytest.raises(
        FloatingPointError,
        match=rf"in epoch 1, batch {batch}: the output of Root at '1' is the first; check the data",
    ):
        vp.fit(elbo, (X, Y), epochs=3, checkpoint=tmp_path / "run.pt", **options)
    states = zip(reference.state_dict().values(), elbo.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    assert not elbo.training
    kept = torch.load(tmp_path / "run.pt", weights_only=True)
    assert kept["progress"]["epoch"] == 1
    assert all(torch.equal(kept["elbo"][name], value) for name, value in elbo.state_dict().items())


def test_a_gradient_that_is_not_finite_is_found_before_the_next_epoch() -> None:
    class Spiky(vp.likelihoods.Normal):
        def expected_log_prob(self, f: vp.Gaussian, y: Tensor) -> Tensor:
            return super().expected_log_prob(f, y) + (0 * f.mean).sqrt()  # 0, with the derivative 0 * inf

    elbo = objective()
    elbo.likelihood = Spiky()
    before = {name: value.clone() for name, value in elbo.state_dict().items()}
    with pytest.raises(FloatingPointError, match="is not, after a gradient that was not finite"):
        vp.fit(elbo, (X, Y), epochs=1, batch_size=len(X))
    assert all(torch.equal(before[name], value) for name, value in elbo.state_dict().items())


# -------------------------------------------------------------------------------------------- bar and loggers


def test_the_bar_writes_to_stderr_when_asked_only(capsys: pytest.CaptureFixture[str]) -> None:
    vp.fit(objective(), (X, Y), epochs=2)
    assert capsys.readouterr() == ("", "")
    vp.fit(objective(), (X, Y), epochs=2, validation=0.2, progress=True)
    out, err = capsys.readouterr()
    assert not out
    for word in ("2/2", "ELBO", "fit", "KL", "noise", "validation", "rows/s"):
        assert word in err


def test_loggers_of_fabric_are_told(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    vp.fit(objective(), (X, Y), epochs=3, fabric=Fabric(accelerator="cpu", devices=1, loggers=logger))
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "loss" in header
    assert "kl" in header
    assert len(rows) == 3


# ----------------------------------------------------------------------------------------- checkpoint, resume


def own_generator() -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(X, Y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5)
    )


def own_sampler() -> DataLoader[Any]:
    data = TensorDataset(X, Y)
    return DataLoader(
        data, batch_size=16, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5))
    )


RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "tensors": (lambda: (X, Y), {"schedule": "cosine", "kl_warmup": 2, "batch_size": 16}),
    "dataset": (lambda: TensorDataset(X, Y), {"batch_size": 16, "validation": 0.2, "noise": "exact"}),
    "early stopping": (lambda: (X, Y), {"validation": (OTHER, OTHER[:, :1].abs()), "patience": 2, "lr": 0.3}),
    "loader with a generator": (
        own_generator,
        {
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            "schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        },
    ),
    "loader with a sampler": (own_sampler, {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_at_any_epoch_ends_at_the_same_bits(name: str, tmp_path: Path) -> None:
    make, options = RUNS[name]
    method = vp.LOCAL_REPARAM if name == "tensors" else vp.VBP
    whole = objective(method=method)
    timeless = ["epoch", "loss", "data_fit", "kl"]
    history = vp.fit(whole, make(), epochs=5, **options)
    assert len(history) > 2
    for stop in range(1, len(history)):
        path = tmp_path / f"{stop}.pt"
        # The first run is stopped as a killed one is: in the middle of a run of five epochs.
        first = objective(method=method)
        with pytest.raises(StopError):
            vp.fit(first, make(), epochs=5, checkpoint=path, fabric=stopping(stop), **options)
        second = objective(method=method, seed=1)
        resumed = vp.fit(second, make(), epochs=5, checkpoint=path, resume=True, **options)
        assert same(whole, second)
        assert resumed[timeless].equals(history[timeless])


class StopError(Exception):
    pass


def stopping(epoch: int) -> Fabric:
    """A Fabric that fails while it logs the epoch after `epoch`, before anything of it is written."""
    fabric = Fabric(accelerator="cpu", devices=1)

    def log_dict(metrics: Any, step: int | None = None) -> None:
        if step == epoch + 1:
            raise StopError

    fabric.log_dict = log_dict  # type: ignore[method-assign]
    return fabric


def test_a_checkpoint_is_written_every_so_many_epochs_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(checkpoints.Run, "save", lambda run, path: written.append(run.epoch))
    vp.fit(objective(), (X, Y), epochs=8, checkpoint=tmp_path / "run.pt", every=3)
    assert written == [3, 6, 8]


def test_resume_without_a_file_starts_and_after_the_end_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.pt"
    elbo, again = objective(), objective(seed=1)
    history = vp.fit(elbo, (X, Y), epochs=3, checkpoint=path, resume=True)
    assert vp.fit(again, (X, Y), epochs=3, checkpoint=path, resume=True).equals(history)
    assert same(elbo, again)


def test_wrong_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    vp.fit(objective(), (X, Y), epochs=1, checkpoint=path)
    whole = path.read_bytes()
    adam_only = {"optimizer": lambda p: torch.optim.Adam([{"params": [q]} for q in p])}

    def refused(message: str, elbo: vp.ELBO | None = None, **options: Any) -> None:
        elbo = elbo or objective()
        before = {name: value.clone() for name, value in elbo.state_dict().items()}
        with pytest.raises(
            ValueError, match=f"cannot resume from .*run.pt: {message}.*; delete the file, or give another"
        ) as error:
            vp.fit(elbo, (X, Y), epochs=2, checkpoint=path, resume=True, **options)
        assert "\n" not in str(error.value)
        assert all(torch.equal(value, before[name]) for name, value in elbo.state_dict().items())

    refused("it was written with seed=0", seed=1)
    refused("it was written with another optimiser", **adam_only)
    refused("it was written with another schedule", schedule=lambda o: torch.optim.lr_scheduler.ConstantLR(o))
    wider = vp.variational(nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 1)))
    refused(
        "it belongs to another network",
        vp.ELBO(wider, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=N),
    )
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused("it is damaged, or no checkpoint")
    path.write_text("a,b\n1,2\n")
    refused("it is damaged, or no checkpoint")
    torch.save(objective(), path)
    refused("it is damaged, or no checkpoint")
    torch.save(objective().state_dict(), path)
    refused("fit did not write it")


def test_an_unfinished_write_leaves_the_checkpoint_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    vp.fit(objective(), (X, Y), epochs=1, checkpoint=path)
    (tmp_path / ".run.pt.1234.partial").write_bytes(b"half")
    vp.fit(objective(), (X, Y), epochs=2, checkpoint=path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
