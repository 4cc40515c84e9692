"""Learning that goes on: what `update` keeps, what it learns, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as dist

import varprop as vp
from varprop.posterior import deterministic_parameters, draw

PARTS = 10


def objective(net: nn.Module | None = None, method: vp.Method = vp.VBP, **options: Any) -> vp.ELBO:
    torch.manual_seed(0)
    if net is None:
        net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    variational = {name: options.pop(name) for name in ("posterior", "biases") if name in options}
    net = vp.variational(net, logvar=-5.0, init="he", **variational)
    likelihood = options.pop("likelihood", vp.likelihoods.Normal())
    return vp.ELBO(net, method, likelihood, options.pop("prior", vp.priors.FanIn(4.0)), n_data=1, **options)


def curve(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, x[:, :1].abs() + 0.3 * torch.randn(n, 1, generator=generator)


def learned(**options: Any) -> vp.ELBO:
    elbo = objective(**options)
    vp.update(elbo, *curve(64, 1), epochs=5)
    return elbo


def state(elbo: vp.ELBO) -> dict[str, Any]:
    return {
        "tensors": {name: value.clone() for name, value in elbo.state_dict().items()},
        "rest": (elbo.prior, elbo.n_data, elbo.seen, [module.training for module in elbo.modules()]),
    }


def assert_unchanged(elbo: vp.ELBO, before: dict[str, Any]) -> None:
    now = state(elbo)
    assert now["rest"] == before["rest"]
    assert now["tensors"].keys() == before["tensors"].keys()
    assert all(torch.equal(value, before["tensors"][name]) for name, value in now["tensors"].items())


# ------------------------------------------------------------------------------------- the earlier posterior


@pytest.mark.parametrize("posterior", ["full", "factored"])
def test_the_divergence_from_an_earlier_posterior_is_that_of_two_normals(posterior: str) -> None:
    net = vp.variational(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), posterior=posterior)
    earlier = {
        name: dist.Normal(q.mean.detach().clone(), q.std.detach().clone()) for name, q in vp.posteriors(net)
    }
    vp.remembered(net)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Earlier(), n_data=1)
    expected = sum(
        dist.kl_divergence(dist.Normal(q.mean, q.std), earlier[name]).sum() for name, q in vp.posteriors(net)
    )
    torch.testing.assert_close(elbo.kl(), expected)


def test_the_divergence_agrees_with_sampling() -> None:
    net = vp.remembered(vp.variational(nn.Linear(3, 2), logvar=-1.0, biases=True))
    earlier = [q.earlier for _, q in vp.posteriors(net)]
    for parameter in net.parameters():
        parameter.data += 0.4
    samples = draw(net, 20_000, torch.Generator().manual_seed(0))
    ratios = torch.zeros(20_000)
    for (name, q), before in zip(vp.posteriors(net), earlier, strict=True):
        w, now = samples[name], dist.Normal(q.mean, q.std)
        ratio = now.log_prob(w) - dist.Normal(before.mean, before.std).log_prob(w)
        ratios += ratio.flatten(1).sum(1).detach()
    kl = sum(vp.priors.Earlier().kl(q).detach() for _, q in vp.posteriors(net))
    assert abs(float(ratios.mean() - kl)) < 5 * float(ratios.std()) / 20_000**0.5


def test_scales_of_a_horseshoe_and_padding_are_remembered_too() -> None:
    net = vp.remembered(vp.variational(nn.Linear(3, 2), posterior="horseshoe"))
    assert sum(vp.priors.Earlier().kl(q) for _, q in vp.posteriors(net)) == 0
    with torch.no_grad():
        net.scales.group_mean += 0.1
    variance = net.scales.group_logvar.exp()
    expected = (0.01 / variance / 2).sum()
    torch.testing.assert_close(sum(vp.priors.Earlier().kl(q) for _, q in vp.posteriors(net)), expected)
    padded = vp.remembered(vp.variational(nn.Embedding(5, 3, padding_idx=2)))
    with torch.no_grad():
        padded.weight[2] += 1.0
    ((_, q),) = vp.posteriors(padded)
    assert vp.priors.Earlier().kl(q.random) == 0


def test_without_an_earlier_posterior_the_prior_says_what_to_do() -> None:
    elbo = objective(prior=vp.priors.Earlier())
    with pytest.raises(ValueError, match=r"store it with remembered\(net\)"):
        elbo.kl()


# -------------------------------------------------------------------------------------------------- learning


def linear(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    w = torch.tensor([[1.0], [-0.5], [0.3], [0.0]], dtype=torch.float64)
    return x, x @ w + 0.5 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("method", [vp.VBP, vp.DVI, vp.LOCAL_REPARAM], ids=lambda method: method.name)
def test_ten_parts_teach_what_all_data_at_once_do(method: vp.Method) -> None:
    """On a linear-Gaussian problem the exact posterior and its predictive density are known."""
    generator = torch.Generator().manual_seed(0)
    (x, y), (x_test, y_test) = linear(100, generator), linear(2000, generator)
    noise, prior = 0.25, 2.0
    precision = prior * torch.eye(4, dtype=torch.float64) + x.T @ x / noise
    mean = torch.linalg.solve(precision, x.T @ y / noise)
    var = (x_test * torch.linalg.solve(precision, x_test.T).T).sum(1, keepdim=True)
    exact = dist.Normal(x_test @ mean, torch.sqrt(var + noise)).log_prob(y_test).mean()
    scores = []
    for parts in (1, PARTS):
        elbo = objective(
            nn.Linear(4, 1, bias=False),
            method,
            prior=vp.priors.Normal(prior),
            likelihood=vp.likelihoods.Normal(1 / noise),
        ).double()
        options: dict[str, Any] = {"optimizer": "lbfgs", "epochs": 3}
        if method.samples:
            options = {"epochs": 100 if parts > 1 else 10, "lr": 0.1, "batch_size": 10}
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            vp.update(elbo, *part, noise="fixed", **options)
        assert elbo.seen == 100
        samples = 200 if method.samples else None
        scores.append(elbo.predict(x_test, samples=samples).log_prob(y_test).mean())
    at_once, in_parts = scores
    tolerance = 0.05 if method.samples else 0.001
    assert abs(in_parts - at_once) < tolerance
    assert abs(in_parts - exact) < tolerance
    assert elbo.predict(x_test[:1], samples=samples).epistemic < 2 * var.max()


def test_the_noise_is_the_average_over_all_data() -> None:
    elbo = learned()
    before = 1 / elbo.likelihood.precision.item()
    x, y = curve(192, 2)
    vp.update(elbo, x, y, epochs=3)
    f = elbo.method(elbo.net, x)
    new = ((f.mean - y).square() + f.var).mean().item()
    assert 1 / elbo.likelihood.precision.item() == pytest.approx(0.25 * before + 0.75 * new, rel=1e-4)
    vp.update(elbo, x, y, epochs=1, noise="fixed")
    assert 1 / elbo.likelihood.precision.item() == pytest.approx(0.25 * before + 0.75 * new, rel=1e-4)


def test_what_has_no_posterior_moves_by_the_share_of_the_data() -> None:
    elbo = learned(likelihood=vp.likelihoods.StudentT())
    assert len(list(deterministic_parameters(elbo.net))) == 2
    bias, scale = elbo.net[0].bias.clone(), elbo.likelihood.log_scale.clone()
    vp.update(elbo, *curve(1, 2), epochs=100, lr=0.1)
    moved = (elbo.net[0].bias - bias).abs().max(), (elbo.likelihood.log_scale - scale).abs().max()
    assert all(0 < distance < 0.1 for distance in moved)


def test_weights_count_as_repeated_rows() -> None:
    x, y = curve(32, 2)
    twice, weighted = learned(), learned()
    vp.update(twice, x.repeat(2, 1), y.repeat(2, 1), epochs=20, batch_size=64)
    vp.update(weighted, x, y, torch.full((32,), 2.0), epochs=20, batch_size=32)
    assert twice.seen == weighted.seen == 128
    torch.testing.assert_close(twice.predict(x).mean, weighted.predict(x).mean, atol=0.02, rtol=0)


def test_a_network_without_posterior_is_only_trained_on() -> None:
    elbo = vp.ELBO(nn.Linear(2, 1), vp.DETERMINISTIC, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=1)
    for seed in range(2):
        vp.update(elbo, *curve(32, seed), epochs=2)
    assert elbo.seen == 64
    assert isinstance(elbo.prior, vp.priors.Normal)


# --------------------------------------------------------------------------------------------------- failures


def refused() -> Iterator[tuple[str, tuple[Tensor, ...], str]]:
    x, y = curve(8, 3)
    bad = x.clone()
    bad[5, 1] = torch.nan
    yield "NaN in x", (bad, y), "update: x has NaN or infinity in row 5; correct or remove the row"
    yield "infinite y", (x, y * torch.inf), "update: y has NaN or infinity in row 0"
    yield "columns", (x.repeat(1, 2), y), r"does not take x of shape \(8, 4\) with y of shape \(8, 1\) \("
    yield "targets", (x, y.repeat(1, 2)), r"does not take x of shape \(8, 2\) with y of shape \(8, 2\) \("
    yield "type", (x.double(), y.double()), r"does not take x of shape \(8, 2\)"
    yield "rows", (x, y[:4]), "the first dimension must be the same"
    yield "no rows", (x[:0], y[:0]), "the data has no rows"
    yield "weights", (x, y, -y[:, 0].abs()), "the weights of the data must be zero or more"


@pytest.mark.parametrize(
    ("batch", "message"), [case[1:] for case in refused()], ids=[c[0] for c in refused()]
)
def test_a_wrong_batch_is_refused_and_changes_nothing(batch: tuple[Tensor, ...], message: str) -> None:
    elbo = learned().train()
    elbo.net[0].eval()
    before = state(elbo)
    with pytest.raises(ValueError, match=message) as error:
        vp.update(elbo, *batch)
    assert "\n" not in str(error.value)
    assert_unchanged(elbo, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_training_that_breaks_off_changes_nothing(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    elbo = learned()
    before = state(elbo)

    def broken(self: object, statistic: Tensor, share: float = 1.0) -> None:
        raise error

    monkeypatch.setattr(vp.likelihoods.Normal, "update", broken)
    with pytest.raises(error):
        vp.update(elbo, *curve(32, 2), epochs=1)
    assert_unchanged(elbo, before)


def test_training_that_diverges_changes_nothing() -> None:
    elbo = learned()
    before = state(elbo)
    for epochs in (1, 5):
        with pytest.raises(FloatingPointError):
            vp.update(elbo, *curve(32, 2), epochs=epochs, lr=1e30, schedule=None)
        assert_unchanged(elbo, before)


# -------------------------------------------------------------------------------------------------- long life


@pytest.mark.parametrize("posterior", ["full", "factored", "horseshoe"])
def test_a_saved_model_goes_on_where_it_was(posterior: str, tmp_path: Path) -> None:
    elbo = learned(posterior=posterior, biases=True)
    vp.update(elbo, *curve(32, 2), epochs=2)
    vp.save(elbo, tmp_path)
    again = vp.load(tmp_path)
    assert (again.seen, again.prior) == (96.0, vp.priors.Earlier())
    for each in (elbo, again):
        vp.update(each, *curve(32, 3), epochs=2)
    assert_unchanged(again, state(elbo))


def test_fit_and_calibrate_count_what_they_have_seen() -> None:
    x, y = curve(32, 0)
    elbo = vp.ELBO(objective().net, vp.VBP, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=32)
    assert elbo.seen == 0
    vp.fit(elbo, (x, y), epochs=1)
    assert elbo.seen == 32
    calibrated = vp.calibrate(nn.Linear(2, 1), (x, y), vp.likelihoods.Normal(), epochs=1)
    assert calibrated.seen == 32
    vp.update(elbo, x, y, epochs=1)
    assert isinstance(elbo.prior, vp.priors.Earlier)
    assert elbo.seen == 64


def test_memory_does_not_grow() -> None:
    elbo = learned()
    for seed in range(3):
        vp.update(elbo, *curve(16, seed), epochs=1)
    tensors = {name: value.numel() for name, value in elbo.state_dict().items()}
    vp.update(elbo, *curve(16, 9), epochs=1)
    assert {name: value.numel() for name, value in elbo.state_dict().items()} == tensors
    assert all(parameter.grad is None for parameter in elbo.parameters())
