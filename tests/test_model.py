"""What every trained model shares: scaled data in, predictions in the target's own unit out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import varprop as vp
from varprop.model import Classes, Model, Numbers, Standardise, as_model


def objective(method: vp.Method = vp.DVI, outputs: int = 1, **options: Any) -> vp.ELBO:
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, outputs)), logvar=-4.0)
    likelihood = options.pop("likelihood", vp.likelihoods.Normal(outputs=outputs))
    return vp.ELBO(net, method, likelihood, vp.priors.Normal(), n_data=10).eval()


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 20])
def test_a_prediction_in_batches_is_that_of_all_rows(rows: int) -> None:
    elbo, x = objective(), torch.randn(rows, 2)
    whole, parts = elbo.predict(x), elbo.predict(x, batch_size=8)
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.var, whole.var)
    random = vp.Gaussian(x, torch.full_like(x, 0.1))
    torch.testing.assert_close(elbo.predict(random, batch_size=8).var, elbo.predict(random).var)


def test_batches_of_a_sampling_method_have_all_samples() -> None:
    p = objective(vp.LOCAL_REPARAM).predict(torch.randn(10, 2), samples=3, batch_size=4)
    assert isinstance(p, vp.predictive.RegressionMixture)
    assert [component.mean.shape for component in p.components] == [(10, 1)] * 3


def test_a_model_predicts_in_the_unit_of_its_target() -> None:
    mean, scale = (
        torch.tensor([1.7e9, 0.0], dtype=torch.float64),
        torch.tensor([10.0, 2.0], dtype=torch.float64),
    )
    elbo = objective(outputs=2)
    model = Model([elbo], Numbers(mean, scale), Standardise([1e9, 0.0], [1.0, 3.0]))
    x = np.array([[1e9 + 1, 3.0], [1e9 + 2, -3.0]])
    z = torch.tensor([[1.0, 1.0], [2.0, -1.0]])
    torch.testing.assert_close(model.inputs(x), z)
    p, own = model.predict(x), elbo.predict(z)
    torch.testing.assert_close(p.mean - mean, own.mean.double() * scale, rtol=0, atol=1e-6)
    torch.testing.assert_close(p.var, own.var.double() * scale**2)
    y = np.array([[1.7e9 + 1, 1.0], [1.7e9 + 2, -1.0]])
    torch.testing.assert_close(model.targets(y), torch.tensor([[0.1, 0.5], [0.2, -0.5]]))
    jacobian = scale.log().sum()
    log_prob = p.log_prob(model.target.values(y))
    torch.testing.assert_close(
        log_prob, own.log_prob(model.targets(y)).double() - jacobian, rtol=1e-5, atol=1e-5
    )


def test_a_sampling_method_repeats_its_predictions_and_leaves_the_generator_alone() -> None:
    model, x = Model([objective(vp.LOCAL_REPARAM)], seed=3), torch.randn(5, 2)
    before = torch.random.get_rng_state()
    torch.testing.assert_close(model.predict(x).mean, model.predict(x).mean, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_classes_keep_their_order_and_refuse_others() -> None:
    target = Classes(np.array(["9", "10", "x"], dtype=object), name="grade")
    assert target.values(["x", "9"]).tolist() == [2, 0]
    assert target.classes == ["9", "10", "x"]
    with pytest.raises(ValueError, match=r"y has classes \['b'\]"):
        target.values(["x", "b"])


def test_what_holds_no_model_is_named() -> None:
    assert as_model(objective(), "report").target.classes is None
    with pytest.raises(TypeError, match="report: Linear is neither an ELBO nor"):
        as_model(nn.Linear(1, 1), "report")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_size_that_is_no_number_of_rows_is_an_error(size: float) -> None:
    with pytest.raises(ValueError, match="batch_size must be positive and a whole number"):
        objective().predict(torch.randn(10, 2), batch_size=size)  # type: ignore[arg-type]
