"""Fitted models in many threads and in other processes, and scikit-learn's n_jobs."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import cross_val_score
from torch import nn

import varprop as vp
import varprop.model

random = np.random.RandomState(0)
X = random.normal(size=(160, 4))
Y = np.sin(X[:, 0]) + 0.1 * random.normal(size=160)
TABLE = pd.DataFrame(X, columns=list("abcd")).assign(e=np.where(X[:, 0] > 0, "high", "low"))
QUICK: dict[str, Any] = {"folds": 2, "epochs": 2, "random_state": 0}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.first(x).relu())


def regressor(**options: Any) -> vp.BayesianMLPRegressor:
    return vp.BayesianMLPRegressor(noise="constant", log_target=False, pieces=0, **QUICK, **options)


def predict(model: Any, rows: Any) -> np.ndarray:
    p = model.predict(rows) if isinstance(model, vp.ELBO) else model.predictive(rows)
    parts = (p.probs, p.entropy) if isinstance(model, vp.BayesianMLPClassifier) else (p.mean, p.std)
    return np.column_stack([part.numpy() for part in parts])


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "regressor": (lambda: regressor().fit(X, Y), X),
    "sampling": (lambda: regressor(method="local_reparam").fit(X, Y), X),
    "classifier": (lambda: vp.BayesianMLPClassifier(**QUICK).fit(X, Y > 0), X),
    "table": (lambda: regressor().fit(TABLE, Y), TABLE),
    "network": (lambda: network(), torch.tensor(X).float()),
}


def network() -> vp.ELBO:
    net = vp.variational(Residual())
    return vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=160).eval()


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_threads_predict_as_one(name: str, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varprop.model, "SAMPLES", 5)
    make, rows = MODELS[name]
    model = make()
    parts = [rows[i::16] for i in range(16)]
    expected = [predict(model, part) for part in parts]
    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(partial(predict, model), parts))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before), "the global random state is left alone"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", sorted({"fork", "spawn"} & set(multiprocessing.get_all_start_methods())))
def test_a_fitted_estimator_predicts_in_other_processes(method: str) -> None:
    model = regressor().fit(X, Y)
    expected = model.predict(X)
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as process:
        np.testing.assert_array_equal(process.submit(model.predict, X).result(), expected)


def test_jobs_of_scikit_learn_give_the_scores_of_one() -> None:
    alone = cross_val_score(regressor(), X, Y, cv=2)
    found = cross_val_score(regressor(), X, Y, cv=2, n_jobs=2)
    np.testing.assert_allclose(found, alone, rtol=1e-6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_trains() -> None:
    """As it would in the process that it was forked from, which has trained before."""
    expected = regressor().fit(X, Y).predict(X)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        found = processes.submit(_fitted).result(timeout=60)
    np.testing.assert_array_equal(found, expected)


def _fitted() -> np.ndarray:
    return regressor().fit(X, Y).predict(X)
