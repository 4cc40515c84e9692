"""CV+ against its definition, and its coverage where the model is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from varprop import conformal
from varprop.predictive import NormalPredictive

pytestmark = pytest.mark.usefixtures("float64")


def prediction(means: torch.Tensor, std: float) -> NormalPredictive:
    return NormalPredictive(means, torch.zeros_like(means), torch.full_like(means, std**2))


def test_the_ends_are_order_statistics_of_the_ends_that_known_rows_give() -> None:
    generator = torch.Generator().manual_seed(0)
    folds = [prediction(torch.randn(4, 2, generator=generator), 0.3 + 0.2 * k) for k in range(3)]
    found = [torch.rand(n, 2, generator=generator) / 2 for n in (12, 9, 10)]
    lower, upper = conformal.interval(folds, found, 0.8)
    ends = []
    for p, scores in zip(folds, found, strict=True):
        for s in scores:
            half = p.std * torch.special.ndtri(0.5 + s)
            ends.append(torch.stack([p.mean - half, p.mean + half]))
    lows, highs = torch.stack(ends).sort(0).values.unbind(1)
    rank = int(0.2 * (len(ends) + 1))
    torch.testing.assert_close(lower, lows[rank - 1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(upper, highs[-rank], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("std", [0.3, 1.0, 5.0])
def test_a_wrong_noise_does_not_change_the_coverage(std: float) -> None:
    random = np.random.default_rng(0)
    parts = [torch.tensor(random.normal(size=(200, 1))) for _ in range(5)]
    found = [conformal.scores(prediction(torch.zeros(200, 1), std), y) for y in parts]
    new = torch.tensor(random.normal(size=(4000, 1)))
    lower, upper = conformal.interval([prediction(torch.zeros(4000, 1), std)] * 5, found, 0.9)
    covered = ((lower <= new) & (new <= upper)).double().mean().item()
    assert covered == pytest.approx(0.9, abs=0.03)


def test_too_few_rows_for_the_level_are_refused() -> None:
    p = prediction(torch.zeros(1, 1), 1.0)
    with pytest.raises(
        ValueError, match=r"level 0\.99 needs at least 99 rows to be fitted to, and there were 20"
    ):
        conformal.interval([p, p], [torch.rand(10, 1) / 2] * 2, 0.99)
