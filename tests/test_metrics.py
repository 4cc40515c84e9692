"""Scores against Monte Carlo and against values known in advance."""

from __future__ import annotations

import pytest
import torch

from varprop.inspect.metrics import coverage, crps, ece, log_likelihood, rmse
from varprop.predictive import ClassPredictive, NormalPredictive, mixture


def normal(mean: float, var: float, n: int = 1) -> NormalPredictive:
    return NormalPredictive(
        torch.full((n, 1), mean), torch.full((n, 1), var / 4), torch.full((n, 1), 3 * var / 4)
    )


def test_crps_is_the_expected_distance_to_a_sample_minus_half_that_between_two_samples() -> None:
    torch.manual_seed(0)
    p = mixture([normal(-1.0, 0.5), normal(2.0, 3.0), normal(0.0, 1.0)])
    means, stds = torch.tensor([-1.0, 2.0, 0.0]), torch.tensor([0.5, 3.0, 1.0]).sqrt()
    which = torch.randint(3, (2, 400_000))
    a, b = means[which] + stds[which] * torch.randn(2, 400_000)
    for y in (-2.0, 0.3, 4.0):
        samples = (a - y).abs() - (a - b).abs() / 2
        error = samples.std() / samples.numel() ** 0.5
        assert (crps(p, torch.tensor([[y]])) - samples.mean()).abs() < 5 * error


def test_crps_of_one_component_is_that_of_its_mixture_with_itself() -> None:
    p, y = normal(0.3, 2.0, n=5), torch.linspace(-3, 3, 5).view(-1, 1)
    torch.testing.assert_close(crps(p, y), crps(mixture([p, p]), y))  # type: ignore[arg-type]


def test_crps_refuses_other_predictions() -> None:
    with pytest.raises(TypeError, match="mixture of normal"):
        crps(mixture([mixture([normal(0.0, 1.0)])]), torch.zeros(1, 1))  # type: ignore[arg-type]


def test_coverage_of_samples_is_the_level() -> None:
    torch.manual_seed(0)
    p, n = normal(1.0, 4.0, n=20_000), 20_000
    y = 1 + 2 * torch.randn(n, 1)
    assert abs(coverage(p, y, 0.8).item() - 0.8) < 5 * (0.8 * 0.2 / n) ** 0.5


def test_rmse_and_log_likelihood() -> None:
    p, y = normal(1.0, 1.0, n=2), torch.tensor([[4.0], [-3.0]])
    assert rmse(p, y).item() == pytest.approx(12.5**0.5)
    torch.testing.assert_close(log_likelihood(p, y), torch.distributions.Normal(1.0, 1.0).log_prob(y).mean())


@pytest.mark.parametrize("score", [rmse, crps, coverage, log_likelihood])
def test_a_target_that_would_broadcast_is_refused(score) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="reshape"):
        score(normal(0.0, 1.0, n=3), torch.zeros(3))


def test_calibrated_classes_have_no_calibration_error() -> None:
    torch.manual_seed(0)
    probs = torch.randn(50_000, 3).softmax(1)
    y = torch.multinomial(probs, 1).squeeze(1)
    calibrated, sharpened = (
        ClassPredictive(p, torch.zeros(len(p))) for p in (probs, (3 * probs.log()).softmax(1))
    )
    assert ece(calibrated, y) < 0.01
    assert ece(sharpened, y) > 0.1
