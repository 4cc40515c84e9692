"""Pretrained networks: what calibrating leaves alone and what it improves, and posteriors made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop.posterior import Posterior, scale_variances


def blobs(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator)
    return x, (x[:, 0] * x[:, 1] + 0.5 * torch.randn(rows, generator=generator) > 0).long()


def trained(rows: tuple[Tensor, Tensor], loss: Any, outputs: int, steps: int = 600) -> nn.Sequential:
    """A plain network, trained until it knows its rows by heart."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(rows[0]), rows[1]).backward()
        optimiser.step()
    return net


@pytest.fixture(scope="module")
def classifier() -> dict[str, Tensor]:
    return trained(blobs(200), F.cross_entropy, 2).state_dict()


def again(state: dict[str, Tensor]) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    net.load_state_dict(state)
    return net


def test_frozen_means_predict_as_before_and_better(classifier: dict[str, Tensor]) -> None:
    net, unseen, (x, y) = again(classifier), blobs(300, 1), blobs(1000, 2)
    logits = net(x).detach()
    elbo = vp.calibrate(net, unseen, vp.likelihoods.Categorical())
    assert torch.equal(vp.VBP(elbo.net, x).mean, logits)
    assert all(torch.equal(elbo.net.state_dict()[name], value) for name, value in classifier.items())
    assert all(p.requires_grad for p in elbo.parameters())
    plain, p = vp.predictive.ClassPredictive(logits.softmax(1), torch.zeros(len(x))), elbo.predict(x)
    assert vp.metrics.log_likelihood(p, y) > vp.metrics.log_likelihood(plain, y) + 0.1
    assert vp.metrics.ece(p, y) < 0.7 * vp.metrics.ece(plain, y)
    same = (p.probs.argmax(1) == logits.argmax(1)).float().mean()  # type: ignore[attr-defined]
    assert same > 0.97


def test_normalisation_and_dropout_stay_as_in_evaluation() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))
    method = vp.VBP | {nn.BatchNorm1d: lambda method, module, x: module(x)}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    elbo = vp.calibrate(net, blobs(100), vp.likelihoods.Categorical(), method=method, epochs=1)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert not elbo.training


def test_the_noise_is_that_of_unseen_rows() -> None:
    def line(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        x, _ = blobs(rows, seed)
        return x, x[:, :1] + 0.5 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed + 9))

    train, unseen, (x, y) = line(40, 0), line(300, 1), line(2000, 2)
    net = trained(train, F.mse_loss, 1)
    before = net(x).detach()
    assert F.mse_loss(net(train[0]), train[1]) < 0.1 * F.mse_loss(before, y)
    for data, validation in ((unseen, None), (train, unseen)):
        p = vp.calibrate(net, data, vp.likelihoods.Normal(), validation=validation, epochs=3).predict(x)
        assert torch.equal(p.mean, before)  # type: ignore[attr-defined]
        assert 0.85 < vp.metrics.coverage(p, y, 0.9) < 0.97  # type: ignore[arg-type]


def test_the_factor_is_the_best(classifier: dict[str, Tensor]) -> None:
    unseen = blobs(300, 1)
    elbo = vp.calibrate(again(classifier), unseen, vp.likelihoods.Categorical())

    def score(shift: float) -> float:
        scale_variances(elbo.net, shift)
        value = vp.metrics.log_likelihood(elbo.predict(unseen[0]), unseen[1]).item()
        scale_variances(elbo.net, -shift)
        return value

    assert score(0.0) > max(score(-0.5), score(0.5))


def test_free_means_stay_near_where_they_were(classifier: dict[str, Tensor], tmp_path: Path) -> None:
    def moved(precision: float) -> float:
        net, prior = again(classifier), vp.priors.Centred(precision)
        elbo = vp.calibrate(
            net, blobs(300, 1), vp.likelihoods.Categorical(), means="free", prior=prior, epochs=3
        )
        vp.save(elbo, tmp_path)
        loaded = vp.load(tmp_path)
        assert torch.equal(loaded.kl(), elbo.kl())
        assert loaded.prior == prior
        return sum(
            (net.state_dict()[name] - value).square().sum().item()
            for name, value in classifier.items()
            if "weight" in name
        )

    assert 0 < moved(1e6) < 0.5 * moved(1.0)


def test_centred_is_normal_about_the_centre() -> None:
    mean, centre, logvar = torch.randn(3, 4).unbind()
    kl = vp.priors.Centred(3.0).kl(Posterior(mean, logvar, centre=centre))
    q, p = (
        torch.distributions.Normal(mean, (0.5 * logvar).exp()),
        torch.distributions.Normal(centre, 3.0**-0.5),
    )
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(q, p).sum())
    with pytest.raises(ValueError, match=r"store the pretrained weights with centred\(net\)"):
        vp.priors.Centred().kl(Posterior(mean, logvar))


def test_the_variances_of_a_factored_posterior_are_scaled_once() -> None:
    net = vp.variational(nn.Linear(3, 2), posterior="factored", biases=True)
    before = [q.logvar.detach().clone() for _, q in vp.posteriors(net)]
    scale_variances(net, 2.0)
    for (_, q), logvar in zip(vp.posteriors(net), before, strict=True):
        torch.testing.assert_close(q.logvar, logvar + 2)


def test_calibrate_refuses() -> None:
    data: Any = blobs(10)
    with pytest.raises(ValueError, match='means must be "frozen" or "free"'):
        vp.calibrate(nn.Linear(2, 2), data, vp.likelihoods.Categorical(), means="some")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- posteriors made elsewhere


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2, bias=False)
    )


def test_an_imported_posterior_is_the_one_given() -> None:
    net, source = small(), small()
    means = {name: torch.randn_like(p) for name, p in source.named_parameters()}
    variances = {name: torch.rand_like(means[name]) for name in ("0.weight", "0.bias", "4.weight")}
    variances["0.bias"][0] = 0.0
    assert vp.import_posterior(net, means, variances) is net
    imported = dict(vp.posteriors(net))
    assert imported.keys() == variances.keys()
    for name, q in imported.items():
        assert torch.equal(q.mean, means[name])
        torch.testing.assert_close(q.var, variances[name])
    assert torch.equal(net[1].weight, means["1.weight"])


def test_part_of_a_network_can_be_random() -> None:
    net = small()
    vp.import_posterior(net, dict(net.named_parameters()), {"4.weight": torch.ones(2, 4)})
    assert [name for name, _ in vp.posteriors(net)] == ["4.weight"]


@pytest.mark.parametrize(
    ("means", "variances", "message"),
    [
        ({"4.weight": None}, {}, r"means has no '4.weight'"),
        ({"5.weight": torch.ones(1)}, {}, r"means has '5.weight', which is not a parameter"),
        (
            {"4.weight": torch.ones(1, 4)},
            {},
            r"mean of '4.weight' has shape \(1, 4\), its parameter \(2, 4\)",
        ),
        ({}, {"4.weight": torch.ones(4)}, r"variance of '4.weight' has shape \(4,\)"),
        ({}, {"4.weight": -torch.ones(2, 4)}, r"variance of '4.weight' has negative or NaN"),
        ({}, {"4.weight": torch.full((2, 4), torch.nan)}, r"variance of '4.weight' has negative or NaN"),
        (
            {},
            {"1.weight": torch.ones(2)},
            r"variances has '1.weight', which is not a weight or bias of a linear or convolution",
        ),
        ({}, {"4.bias": torch.ones(2)}, r"variances has '4.bias'"),
        ({}, {"0.bias": torch.ones(2)}, r"variances has no '0.weight'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changed(
    means: dict[str, Any], variances: dict[str, Tensor], message: str
) -> None:
    net = small()
    full = {name: 2 * p.detach() for name, p in net.named_parameters()} | means
    with pytest.raises(ValueError, match=message):
        vp.import_posterior(
            net, {name: value for name, value in full.items() if value is not None}, variances
        )
    assert all(
        torch.equal(a, b)
        for a, b in zip(net.state_dict().values(), small().state_dict().values(), strict=True)
    )


def test_a_random_network_is_refused() -> None:
    net = vp.variational(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="random weights already"):
        vp.import_posterior(net, {}, {})
