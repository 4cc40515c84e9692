"""Scores against Monte Carlo and against values known in advance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from varprop.inspect.metrics import _distance_from_step, coverage, crps, ece, log_likelihood, rmse, summary
from varprop.predictive import (
    ClassPredictive,
    LogNormalPredictive,
    NormalPredictive,
    StudentPredictive,
    mixture,
)


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


@pytest.mark.parametrize("y", [-1.0, 0.3, 4.0, 40.0])
def test_crps_by_the_integral_is_that_of_samples(y: float) -> None:
    zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    random = np.random.default_rng(0)
    predictions = {
        StudentPredictive(zero, one, 2 * one, 4 * one): random.normal(size=400_000)
        + random.standard_t(4, 400_000),
        LogNormalPredictive(NormalPredictive(zero, 0.3 * one, 0.5 * one)): np.exp(
            np.sqrt(0.8) * random.normal(size=400_000)
        ),
    }
    for p, drawn in predictions.items():
        half, other = np.split(drawn, 2)
        expected = np.mean(np.abs(drawn - y)) - np.mean(np.abs(half - other)) / 2
        assert crps(p, torch.full((1, 1), y).double()).item() == pytest.approx(expected, abs=0.02)
        same = crps(mixture([p, p]), torch.full((1, 1), y).double())  # type: ignore[arg-type]
        assert same.item() == pytest.approx(crps(p, torch.full((1, 1), y).double()).item(), rel=1e-3)


def test_crps_by_the_integral_is_that_in_closed_form() -> None:
    p, y = NormalPredictive(*torch.rand(3, 5, 1).double().unbind(0)), torch.randn(5, 1).double()
    torch.testing.assert_close(_distance_from_step(p, y), crps(p, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", [rmse, crps, coverage, log_likelihood])
def test_a_target_that_would_broadcast_is_refused(score) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="reshape"):
        score(normal(0.0, 1.0, n=3), torch.zeros(3))


CLASSES = ClassPredictive(torch.full((3, 2), 0.5), torch.zeros(3))


@pytest.mark.parametrize(
    ("score", "p", "message"),
    [
        (ece, normal(0.0, 1.0), "ece: a prediction of classes comes first"),
        (rmse, CLASSES, "rmse: a prediction of numbers comes first, .*; got a ClassPredictive"),
        (
            rmse,
            torch.zeros(3, 1),
            "rmse: a prediction of numbers comes first, then the targets; got a Tensor",
        ),
        (crps, CLASSES, "crps: a prediction of numbers"),
        (coverage, CLASSES, "coverage: a prediction of numbers"),
        (log_likelihood, torch.zeros(3, 1), "log_likelihood: a prediction comes first"),
        (summary, torch.zeros(3, 1), "summary: a prediction comes first"),
    ],
)
def test_what_a_score_cannot_judge_is_refused(score, p, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match=message):
        score(p, torch.zeros(3, 1))


@pytest.mark.parametrize("level", [90, "0.9"])
def test_a_level_that_is_no_share_is_refused(level) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"^level must be a number between 0 and 1, such as 0\.9, got"):
        coverage(normal(0.0, 1.0), torch.zeros(1, 1), level)


def test_calibrated_classes_have_no_calibration_error() -> None:
    torch.manual_seed(0)
    probs = torch.randn(50_000, 3).softmax(1)
    y = torch.multinomial(probs, 1).squeeze(1)
    calibrated, sharpened = (
        ClassPredictive(p, torch.zeros(len(p))) for p in (probs, (3 * probs.log()).softmax(1))
    )
    assert ece(calibrated, y) < 0.01
    assert ece(sharpened, y) > 0.1
