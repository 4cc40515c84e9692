"""The estimators: scikit-learn's contract, what they predict, and what becomes of them in its tools."""

import json
import math
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import varprop as vp
from varprop import BayesianMLPClassifier, BayesianMLPRegressor, predictive, race
from varprop.io import files as modelfile
from varprop.pieces import Pieces
from varprop.training import folds

QUICK: dict[str, Any] = {
    "hidden_layer_sizes": 10,
    "folds": 2,
    "epochs": 2,
    "noise": "constant",
    "log_target": False,
    "pieces": 0,
    "random_state": 0,
}
"""Two folds, and no choices."""
PLAIN: dict[str, Any] = {"folds": 1, "epochs": 15, "lr": 0.05, "batch_size": 200, "random_state": 0}
"""All rows, without folds."""
X, Y = load_diabetes(return_X_y=True)
TRAIN, TEST = slice(0, 200), slice(200, 260)


# In batches the order of rows matters, so that weights and repeated rows agree only where a batch holds all
# rows. Folds are tested below.
@parametrize_with_checks([BayesianMLPRegressor(**PLAIN), BayesianMLPClassifier(**PLAIN)])
def test_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def test_class_weights_count_as_weights_of_rows(tmp_path: Path) -> None:
    X, y = load_iris(return_X_y=True)
    X, y = X[40:110], y[40:110]
    weights = {0: 2.0, 1: 1.0, 2: 0.5}
    options: dict[str, Any] = {"hidden_layer_sizes": 5, "folds": 2, "epochs": 2}

    def probabilities(weight: Any, class_weight: Any) -> np.ndarray:
        model = BayesianMLPClassifier(**options, class_weight=class_weight, random_state=0)
        return model.fit(X, y, weight).predict_proba(X)

    by_row = np.vectorize(weights.get)(y)
    np.testing.assert_array_equal(probabilities(None, weights), probabilities(by_row, None))
    shares = np.bincount(y) / len(y)
    np.testing.assert_allclose(probabilities(None, "balanced"), probabilities(1 / 3 / shares[y], None))
    model = BayesianMLPClassifier(**options, class_weight=weights).fit(X, y)
    vp.save(model, tmp_path / "model")
    assert vp.load(tmp_path / "model").class_weight == weights
    for wrong, message in (("even", "class_weight must be None"), ({7: 1.0}, r"class_weight has \['7'\]")):
        with pytest.raises(ValueError, match=message):
            model.set_params(class_weight=wrong).fit(X, y)


@pytest.fixture(scope="module")
def regressor() -> BayesianMLPRegressor:
    return BayesianMLPRegressor(folds=1, epochs=60, lr=0.03, random_state=0).fit(X[TRAIN], Y[TRAIN])


@pytest.fixture(scope="module")
def classifier() -> BayesianMLPClassifier:
    X, y = load_iris(return_X_y=True)
    return BayesianMLPClassifier(folds=3, epochs=5, random_state=0).fit(
        X, np.array(["setosa", "versicolor", "virginica"])[y]
    )


# ------------------------------------------------------------------------------------------------ predictions


def test_regression_is_better_than_the_mean_and_covers(regressor: BayesianMLPRegressor) -> None:
    mean, std = regressor.predict(X[TEST], return_std=True)
    assert np.sqrt(np.mean((mean - Y[TEST]) ** 2)) < 0.85 * Y[TEST].std()
    lower, upper = regressor.predict_interval(X[TEST], 0.9)
    assert 0.75 < np.mean((lower < Y[TEST]) & (Y[TEST] < upper)) <= 1
    np.testing.assert_allclose(upper - lower, 2 * 1.6448536 * std, rtol=1e-6)
    parts = regressor.predict_uncertainty(X[TEST])
    np.testing.assert_allclose(parts.epistemic + parts.aleatoric, std**2)
    assert np.ptp(parts.epistemic) > 0
    assert np.ptp(parts.aleatoric) == pytest.approx(0, abs=1e-9)


def test_predictions_are_those_of_the_objective_in_the_units_of_y(regressor: BayesianMLPRegressor) -> None:
    z = torch.tensor((X[TEST] - X[TRAIN].mean(0)) / X[TRAIN].std(0))
    p = regressor.elbo_.predict(z)
    mean, std = regressor.predict(X[TEST], return_std=True)
    np.testing.assert_allclose(mean, p.mean[:, 0].numpy() * Y[TRAIN].std() + Y[TRAIN].mean())
    np.testing.assert_allclose(std, p.std[:, 0].numpy() * Y[TRAIN].std())
    normal = torch.distributions.Normal(torch.tensor(mean), torch.tensor(std))
    np.testing.assert_allclose(
        regressor.log_prob(X[TEST], Y[TEST]), normal.log_prob(torch.tensor(Y[TEST])).numpy(), rtol=1e-6
    )


def test_units_of_the_target_do_not_matter(regressor: BayesianMLPRegressor) -> None:
    other = clone(regressor).fit(X[TRAIN] * 50 - 3, Y[TRAIN] * 1e-3 + 5)
    np.testing.assert_allclose(
        other.predict(X[TEST] * 50 - 3), regressor.predict(X[TEST]) * 1e-3 + 5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_targets_far_from_zero_keep_their_digits(dtype: type) -> None:
    """Seconds since 1970: in single precision two of them cannot be told apart within two minutes."""
    x, noise = X[TRAIN].astype(dtype), Y[TRAIN] - Y[TRAIN].mean()
    options: dict[str, Any] = {"folds": 1, "epochs": 15, "batch_size": 100, "random_state": 0}
    near = BayesianMLPRegressor(**options).fit(x, noise)
    far = BayesianMLPRegressor(**options).fit(x, noise + 1.7e9)
    np.testing.assert_allclose(far.predict(x) - 1.7e9, near.predict(x), atol=1e-3)
    np.testing.assert_allclose(far.log_prob(x, noise + 1.7e9), near.log_prob(x, noise), atol=1e-4)
    assert far.audit(x, noise + 1.7e9).own.rmse == pytest.approx(near.audit(x, noise).own.rmse, rel=1e-4)


def test_heteroscedastic_noise_follows_the_input() -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (400, 1))
    y = random.randn(400) * np.where(x[:, 0] > 0, 1.0, 0.1)
    model = BayesianMLPRegressor(noise="heteroscedastic", epochs=8, random_state=0).fit(x, y)
    quiet, loud = np.sqrt(model.predict_uncertainty([[-0.7], [0.7]]).aleatoric)
    assert quiet < 0.25
    assert loud > 0.7


def test_several_targets_each_have_their_noise() -> None:
    random = np.random.RandomState(0)
    y = np.c_[Y[TRAIN], 5 + 0.01 * X[TRAIN, 2] + 1e-6 * random.randn(200)]
    model = BayesianMLPRegressor(**PLAIN).fit(X[TRAIN], y)
    mean, std = model.predict(X[TEST], return_std=True)
    assert mean.shape == std.shape == (60, 2)
    assert std[:, 0].min() > 10
    assert std[:, 1].max() < 1e-3
    assert model.log_prob(X[TEST], np.c_[Y[TEST], mean[:, 1]]).shape == (60,)
    with pytest.raises(ValueError, match="first fitted with 2 targets"):
        model.partial_fit(X[TRAIN], Y[TRAIN])


def test_classification_gives_probabilities_and_their_uncertainty(classifier: BayesianMLPClassifier) -> None:
    X, y = load_iris(return_X_y=True)
    probs = classifier.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert classifier.score(X, classifier.classes_[y]) > 0.9
    parts = classifier.predict_uncertainty(X)
    entropy = -(probs * np.log(probs)).sum(1)
    np.testing.assert_allclose(parts.epistemic + parts.aleatoric, entropy, atol=1e-6)
    assert entropy[y == 0].mean() < entropy[y > 0].mean(), "setosa is told apart easily, the others are not"


@pytest.mark.parametrize(
    "method",
    ["cvbp", "vbp", "dvi", "local_reparam", "deterministic", "pbp", vp.vbp(slope=50.0)],
    ids=lambda method: getattr(method, "name", method),
)
@pytest.mark.parametrize("folds", [1, 2])
def test_every_method_trains_alone_and_in_folds(method: Any, folds: int) -> None:
    model = BayesianMLPRegressor(
        (10,),
        method=method,
        folds=folds,
        noise="constant",
        optimizer="adam",
        epochs=25,
        lr=0.05,
        batch_size=100,
        random_state=0,
    ).fit(X[TRAIN], Y[TRAIN])
    first, std = model.predict(X[TEST], return_std=True)
    assert np.isfinite(std).all()
    np.testing.assert_array_equal(first, model.predict(X[TEST]))
    assert np.sqrt(np.mean((first - Y[TEST]) ** 2)) < Y[TEST].std()


def test_an_ensemble_is_a_mixture_of_its_members() -> None:
    model = BayesianMLPRegressor(folds=1, n_replicas=3, epochs=10, batch_size=100, random_state=0).fit(
        X[TRAIN], Y[TRAIN]
    )
    assert len(model.members_) == 3
    z = torch.tensor((X[TEST] - model.x_mean_) / model.x_scale_)
    members = torch.stack([member.predict(z).mean[:, 0] for member in model.members_]).numpy()
    assert members.std(0).min() > 0
    np.testing.assert_allclose(model.predict(X[TEST]), members.mean(0) * model.y_scale_ + model.y_mean_)
    within = np.mean([member.predict(z).epistemic[:, 0].numpy() for member in model.members_], 0)
    assert (model.predict_uncertainty(X[TEST]).epistemic > within * model.y_scale_**2).all()


def test_priors_are_numbers_or_objects() -> None:
    for prior in (1.0, vp.priors.EmpiricalBayes(), vp.priors.Horseshoe()):
        assert np.isfinite(
            BayesianMLPRegressor(prior=prior, **QUICK).fit(X[TRAIN], Y[TRAIN]).predict(X[TEST])
        ).all()


# --------------------------------------------------------------------------------------------------- training


def test_the_random_state_fixes_everything_and_leaves_torch_alone() -> None:
    before = torch.random.get_rng_state()
    a, b, c = (
        BayesianMLPRegressor(**(QUICK | {"random_state": s})).fit(X[TRAIN], Y[TRAIN]).predict(X[TEST])
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_warm_start_goes_on() -> None:
    model = BayesianMLPRegressor(folds=1, epochs=3, warm_start=True, random_state=0).fit(X[TRAIN], Y[TRAIN])
    weights, first = model.elbo_.net[0].weight, model.history_.loss.iloc[-1]
    model.fit(X[TRAIN], Y[TRAIN])
    assert model.elbo_.net[0].weight is weights
    assert model.history_.epoch.tolist() == list(range(6))
    assert model.history_.loss.iloc[-1] < first
    assert model.elbo_.n_data == 200
    cold = (
        BayesianMLPRegressor(folds=1, epochs=3, random_state=0)
        .fit(X[TRAIN], Y[TRAIN])
        .fit(X[TRAIN], Y[TRAIN])
    )
    assert len(cold.history_) == 3


def test_partial_fit_learns_from_a_stream() -> None:
    model = BayesianMLPRegressor(random_state=0, epochs=20, n_replicas=2)
    first, *others = np.array_split(np.arange(200), 5)
    model.partial_fit(X[first], Y[first])
    scores = [model.log_prob(X[TEST], Y[TEST]).mean()]
    for part in others:
        earlier = [member.net[0].weight.clone() for member in model.members_]
        model.partial_fit(X[part], Y[part])
        for member, weight in zip(model.members_, earlier, strict=True):
            assert member.prior == vp.priors.Earlier()
            assert torch.equal(member.net[0].weight_earlier, weight), "the posterior so far is the prior"
        scores.append(model.log_prob(X[TEST], Y[TEST]).mean())
    assert model.n_seen_ == model.elbo_.seen == 200
    assert model.elbo_.n_data == 40
    assert scores[-1] > scores[0] + 0.02
    assert len(model.history_) == model.n_iter_ == 100
    with patch("varprop.perceptron.KEPT", 30):
        model.partial_fit(X[first], Y[first])
    assert len(model.history_) == 30
    assert model.history_.epoch.iloc[-1] == 119


def test_a_failing_partial_fit_changes_nothing() -> None:
    model = BayesianMLPRegressor(random_state=0, epochs=2, folds=2).fit(X[TRAIN], Y[TRAIN])
    before = pickle.dumps([model.predict(X[TEST]), model.n_seen_, model.oof_log_likelihood_])
    bad = X[:20].copy()
    bad[3, 1] = np.nan
    for rows in (bad, X[:20, :5]):
        with pytest.raises(ValueError, match=r"NaN|features"):
            model.partial_fit(rows, Y[:20])
    with pytest.raises(FloatingPointError):
        model.set_params(lr=1e30).partial_fit(X[:20], Y[:20])
    assert pickle.dumps([model.predict(X[TEST]), model.n_seen_, model.oof_log_likelihood_]) == before


def test_warm_starts_have_the_prior_of_the_estimator() -> None:
    model = BayesianMLPRegressor(**PLAIN, warm_start=True).fit(X[TRAIN], Y[TRAIN])
    model.partial_fit(X[200:], Y[200:]).fit(X[TRAIN], Y[TRAIN])
    assert model.elbo_.prior == vp.priors.FanIn(model.prior)
    assert model.n_seen_ == model.elbo_.n_data == 200


def test_partial_fit_of_classes(classifier: BayesianMLPClassifier) -> None:
    iris, y = load_iris(return_X_y=True)
    labels = BayesianMLPClassifier(random_state=0, epochs=20)
    with pytest.raises(ValueError, match="classes must be given with the first call"):
        labels.partial_fit(iris, y)
    labels.partial_fit(iris[:60], y[:60], classes=[0, 1, 2])
    assert labels.predict_proba(iris).shape == (150, 3)
    with pytest.raises(ValueError, match=r"y has classes \[3\] that are not among those of the first fit"):
        labels.partial_fit(iris[:2], [3, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "mcmc"}, "method must be one of cvbp, vbp, dvi"),
        ({"epochs": 0}, "epochs must be a positive whole number, got 0"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"batch_size": 2.5}, "batch_size must be a positive whole number"),
        ({"hidden_layer_sizes": (10, 0)}, "hidden_layer_sizes must be"),
        ({"hidden_layer_sizes": "many"}, "hidden_layer_sizes must be a positive whole number, got 'many'"),
        ({"n_replicas": 0}, "n_replicas must be"),
        ({"prior": -1.0}, "prior must be a positive number, got -1.0"),
        ({"laplace": "diagonal"}, "laplace must be True or False, got 'diagonal'"),
        ({"folds": 0}, "folds must be a positive whole number"),
        (
            {"noise": "pink"},
            "noise must be \"auto\" or one of constant, heteroscedastic, student, got 'pink'",
        ),
        ({"log_target": "maybe"}, 'log_target must be "auto", True or False'),
        ({"pieces": -1}, "pieces must be a positive whole number, got -1"),
        ({"log_target": True, "noise": "student"}, "exclude each other"),
        ({"optimizer": "sgd"}, 'optimizer must be "auto", "lbfgs" or "adam"'),
        ({"kl_weight": 0.0}, "kl_weight must be a positive number"),
        ({"n_iter_no_change": -1}, "n_iter_no_change must be a positive whole number"),
    ],
)
def test_parameters_are_checked_in_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BayesianMLPRegressor(**options).fit(X[TRAIN], Y[TRAIN])


# ------------------------------------------------------------------------------------------------------ folds


ROWS = pd.DataFrame(X[TRAIN], columns=list("abcdefghij"))


@pytest.mark.parametrize(
    ("kind", "rows", "y", "message"),
    [
        (BayesianMLPRegressor, ROWS, ["many", *Y[1:200]], "y has 'many' in row 0, where a finite number"),
        (BayesianMLPRegressor, ROWS, [*Y[:199], None], "y has None in row 199, where a finite number"),
        (BayesianMLPClassifier, ROWS, ["a", None] * 100, "y has no class in row 1; remove the row"),
        (BayesianMLPRegressor, ROWS.set_axis([*"aabcdefghi"], axis=1), Y[:200], "more than one column 'a'"),
        (BayesianMLPRegressor, ROWS.assign(a=[[1, 2]] * 200), Y[:200], "column 'a' has values of type list"),
    ],
)
def test_data_that_cannot_be_learned_are_refused(kind: Any, rows: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind().fit(rows, np.array(y, dtype=object))


def test_numbers_may_be_written_as_text() -> None:
    options = {**QUICK, "log_target": "auto", "noise": "auto"}
    as_text, as_numbers = (
        BayesianMLPRegressor(**options).fit(X[TRAIN], y) for y in (Y[TRAIN].astype(str), Y[TRAIN])
    )
    np.testing.assert_array_equal(as_text.predict(X[TEST]), as_numbers.predict(X[TEST]))


def test_weights_that_cannot_be_written_to_are_copied() -> None:
    weight = pd.Series(np.ones(200))
    assert BayesianMLPRegressor(**QUICK).fit(X[TRAIN], Y[TRAIN], weight).n_seen_ == 100


@pytest.mark.parametrize("weight", [None, [1.0, 0.0]])
def test_one_row_is_refused(weight: list[float] | None) -> None:
    rows = slice(None, 1 if weight is None else 2)
    model = BayesianMLPRegressor(epochs=1)
    with pytest.raises(ValueError, match="One row"):
        model.fit(np.eye(2)[rows], np.arange(2.0)[rows], sample_weight=weight)


def test_every_row_is_predicted_by_the_members_that_have_not_seen_it() -> None:
    options = QUICK | {"folds": 3, "n_replicas": 2}
    model = BayesianMLPRegressor(**options).fit(X[TRAIN], Y[TRAIN])
    assert len(model.members_) == 6
    row = 17
    fold = model.oof_fold_[row]
    z = torch.tensor((X[[row]] - model.x_mean_) / model.x_scale_)
    means = [model.members_[k].predict(z).mean.item() for k in (fold, fold + 3)]
    assert model.oof_predict_[row] == pytest.approx(np.mean(means) * model.y_scale_ + model.y_mean_, rel=1e-5)
    assert model.oof_predict_.shape == Y[TRAIN].shape
    # The honest score: about that of new rows, and not that of rows which members have seen.
    new, seen = model.log_prob(X[TEST], Y[TEST]).mean(), model.log_prob(X[TRAIN], Y[TRAIN]).mean()
    assert abs(model.oof_log_likelihood_ - new) < 0.2
    assert model.oof_log_likelihood_ < seen


def test_out_of_fold_predictions_of_classes_are_probabilities(classifier: BayesianMLPClassifier) -> None:
    assert classifier.oof_predict_.shape == (150, 3)
    np.testing.assert_allclose(classifier.oof_predict_.sum(1), 1, rtol=1e-5)
    _, y = load_iris(return_X_y=True)
    own = np.log(classifier.oof_predict_[np.arange(150), y]).mean()
    assert classifier.oof_log_likelihood_ == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize(
    ("folds", "rows", "messages"),
    [
        (5, 20, []),
        (5, 8, ["8 rows have no more than 4 folds, not 5"]),
        (10, 100, []),
        (10, 99, ["10 folds of 99 rows have fewer than 10 rows each"]),
        (500, 40, ["40 rows have no more than 20 folds, not 500", "20 folds of 40 rows have fewer than 10"]),
    ],
)
def test_fewer_folds_and_folds_of_few_rows_are_told(folds: int, rows: int, messages: list[str]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        BayesianMLPClassifier(folds=folds)._fold_count(rows)
    for warning, message in zip(told, messages, strict=True):
        assert message in str(warning.message)


def test_automatic_choices_are_the_best_out_of_fold_and_reported() -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (300, 1))
    noisy = x[:, 0] + random.randn(300) * np.where(x[:, 0] > 0, 1.0, 0.05)
    model = BayesianMLPRegressor(epochs=race.ROUNDS, random_state=0, laplace=False).fit(x, noisy)
    assert (model.choices_["noise"], model.choices_["log_target"]) == ("heteroscedastic", False)
    assert model.candidates_["noise"].tolist() == ["heteroscedastic", "student", *["heteroscedastic"] * 2]
    assert model.candidates_["kl_weight"].tolist()[:3] == [0.3, 0.3, 1.0]
    assert model.candidates_["pieces"].tolist() == [0, 0, 0, 8]
    best = model.candidates_.loc[model.candidates_["log-likelihood"].idxmax()]
    assert model.choices_["pieces"] == best["pieces"]
    assert model.oof_log_likelihood_ >= best["log-likelihood"]
    price = np.exp(2 * x[:, 0] + 0.1 * random.randn(300))
    model = BayesianMLPRegressor(noise="constant", epochs=6, random_state=0).fit(x, price)
    assert (model.choices_["noise"], model.choices_["log_target"]) == ("constant", True)
    lower, _ = model.predict_interval([[-1.0], [0.0]], 0.99)
    assert (lower > 0).all()
    assert model.predict([[0.0]])[0] == pytest.approx(1.0, abs=0.1)


def test_classes_that_are_hard_to_tell_apart_ask_for_more_of_the_divergence(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x = random.randn(200, 10)
    clear, hard = (x[:, :2] ** 2).sum(1) > 1.4, random.rand(200) < 0.5
    found = {}
    for name, rows, y in (("clear", x[:, :2], clear), ("hard", x, hard)):
        model = BayesianMLPClassifier(pieces=0, epochs=8, random_state=0).fit(rows, y)
        table = model.candidates_.set_index("kl_weight")["log-likelihood"]
        assert sorted(table.index) == [0.1, 0.3, 1.0]
        assert model.choices_["kl_weight"] == table.idxmax()
        assert model.oof_log_likelihood_ >= table.max()
        given = BayesianMLPClassifier(pieces=0, epochs=8, random_state=0, kl_weight=table.idxmax()).fit(
            rows, y
        )
        assert given.elbo_.n_data == model.elbo_.n_data
        assert "candidates_" not in vars(given)
        found[name] = model
    assert found["clear"].choices_["kl_weight"] < found["hard"].choices_["kl_weight"] == 1.0
    assert found["hard"].oof_log_likelihood_ > math.log(0.5) - 0.02
    vp.save(found["hard"], tmp_path / "model")
    assert vp.load(tmp_path / "model").partial_fit(x, hard).choices_["kl_weight"] == 1.0


def test_pieces_are_chosen_where_the_target_goes_up_and_down(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x = np.stack([random.uniform(0, 24, 400), random.randint(0, 2, 400)], 1)
    y = np.sin(2 * x[:, 0]) + 0.1 * random.randn(400)
    options = {"noise": "constant", "log_target": False, "kl_weight": 0.3, "epochs": 4, "folds": 2}
    options |= {"hidden_layer_sizes": 5}
    model = BayesianMLPRegressor(**options, random_state=0).fit(x, y)
    assert model.choices_["pieces"] == 8
    assert list(model.candidates_["pieces"]) == [0, 8]
    assert model.elbo_.net[0].columns == (0,) * 10  # the other column has two values
    none = BayesianMLPRegressor(**options, pieces=0, random_state=0).fit(x, y)
    assert "candidates_" not in vars(none)
    assert model.oof_log_likelihood_ > none.oof_log_likelihood_
    vp.save(model, tmp_path / "model")
    np.testing.assert_allclose(vp.load(tmp_path / "model").predict(x), model.predict(x), rtol=1e-6)
    far = model.predict([[1e30, 0.0], [-1e30, 1.0]], return_std=True)
    assert np.isfinite(far).all()


def test_pieces_cut_a_column_at_its_quantiles() -> None:
    x = torch.stack([torch.arange(101.0), torch.zeros(101), torch.arange(101) % 2], 1)
    pieces = Pieces.of(x, 4)
    assert pieces is not None
    assert pieces.columns == (0,) * 6
    torch.testing.assert_close(pieces.high, torch.tensor([0.0, 25.0, 50.0, 75.0, 100.0, 125.0]))
    for value, shares in (
        (60.0, [1.0, 1, 1, 0.4, 0, 0]),
        (150.0, [1.0, 1, 1, 1, 1, 2]),
        (-25.0, [0.0] * 6),
        (999.0, [1.0, 1, 1, 1, 1, 4]),
    ):
        torch.testing.assert_close(pieces.shares(torch.tensor([value, 0, 0])), torch.tensor(shares))
    added = pieces(x)[:, 3:]
    torch.testing.assert_close(added.mean(0), torch.zeros(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(added.std(0, correction=0), torch.tensor([0.0, 1, 1, 1, 1, 0]))
    assert Pieces.of(x[:, 1:], 4) is None
    one = Pieces.of(x, 1)
    assert one is not None
    torch.testing.assert_close(one.high, torch.tensor([0.0, 100.0, 200.0]))
    with_gap = Pieces.of(torch.cat([torch.arange(75.0), torch.arange(174.0, 199.0)]).view(-1, 1), 2)
    assert with_gap is not None
    assert with_gap.low.tolist() == [-49.5, 0.0, 49.5, 74.0, 124.0, 174.0, 198.0]


def test_a_log_scale_is_not_extrapolated(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (200, 1))
    price = np.exp(3 * x[:, 0] + 0.1 * random.randn(200))
    model = BayesianMLPRegressor(noise="constant", log_target=True, epochs=6, random_state=0).fit(x, price)
    logs, known = [member.log for member in model.predictive([[20.0]]).components], np.log(price)
    assert all(known.min() - 1e-6 < log.mean.item() < known.max() + 1e-6 for log in logs)
    assert all(log.epistemic.item() < known.var() + 1e-6 for log in logs)
    assert 0.9 * price.max() < model.predict([[20.0]])[0] <= price.max() * (1 + 1e-9)
    modelfile.save(model, tmp_path)
    assert modelfile.load(tmp_path).predict([[20.0]]) == pytest.approx(model.predict([[20.0]]))


def test_the_best_choice_is_trained_further_if_that_helps() -> None:
    X, y = load_diabetes(return_X_y=True)
    wave = np.sin(40 * X[:, 2]) + 0.01 * np.random.RandomState(0).randn(len(y))
    model = BayesianMLPRegressor(epochs=16, random_state=0, laplace=False).fit(X, wave)
    assert len(model.history_) == model.n_iter_ > race.ROUNDS > race.FINER
    assert model.oof_log_likelihood_ > model.candidates_["log-likelihood"].max() + 0.01
    assert model.n_seen_ == pytest.approx(0.8 * len(y))


def test_a_fit_that_fails_leaves_the_estimator_as_it_was() -> None:
    X, y = load_diabetes(return_X_y=True)
    model = BayesianMLPRegressor(epochs=2, folds=2, random_state=0)
    failing = {"side_effect": FloatingPointError}
    with patch("varprop.training.loop.fit", **failing), pytest.raises(FloatingPointError):
        model.partial_fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)
    before = model.fit(X, y).predict(X)
    with patch("varprop.training.replicas.fit", **failing), pytest.raises(FloatingPointError):
        model.fit(X[:, :4], y)
    np.testing.assert_array_equal(model.predict(X), before)


def test_equal_targets_warn_of_nothing() -> None:
    model = BayesianMLPRegressor(epochs=1, noise="constant", pieces=0, random_state=0)
    mean, std = model.fit(X[:20], np.full(20, 7.1)).predict(X[:5], return_std=True)
    assert np.abs(mean - 7.1).max() < 0.5
    assert (std > 0).all()


def test_heavy_tails_are_found() -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (400, 1))
    model = BayesianMLPRegressor(epochs=6, random_state=0).fit(x, x[:, 0] + 0.1 * random.standard_t(2, 400))
    assert model.choices_["noise"] == "student"


def test_tables_with_categories_dates_and_missing_values_are_taken(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    table = pd.DataFrame(
        {
            "area": np.where(np.arange(150) % 9 == 0, np.nan, random.gamma(2, 50, 150)),
            "town": random.choice(["Ulm", "Bonn"], 150),
            "built": pd.Timestamp("2000-01-01") + pd.to_timedelta(random.randint(0, 8000, 150), "D"),
        }
    )
    y = (table["town"] == "Bonn").to_numpy() * 3.0 + 0.1 * random.randn(150)
    model = BayesianMLPRegressor(**(QUICK | {"epochs": 4})).fit(table, y)
    assert np.sqrt(np.mean((model.predict(table) - y) ** 2)) < 0.5
    assert (model.n_features_in_, model.feature_names_in_.tolist()) == (3, ["area", "town", "built"])
    np.testing.assert_array_equal(model.predict(table[["town", "built", "area"]]), model.predict(table))
    shares = model.explain(table).table["mean"]
    assert shares["town"] > 0.8
    vp.save(model, tmp_path)
    np.testing.assert_array_equal(vp.load(tmp_path).predict(table), model.predict(table))
    with pytest.raises(TypeError, match="takes the same columns again, got ndarray"):
        model.predict(table.to_numpy())
    labels = np.where(y > 1.5, "dear", "cheap")
    classifier = BayesianMLPClassifier(5, folds=2, epochs=2, random_state=0).fit(table, labels)
    assert classifier.score(table, labels) > 0.9
    for forgetful in (model, classifier):
        with pytest.raises(ValueError, match="requires y to be passed"):
            forgetful.fit(table, None)


@pytest.mark.parametrize("wrong", [0.2, 5.0])
def test_variances_are_calibrated_by_rows_that_were_not_seen(wrong: float) -> None:
    """A network whose noise is made wrong on purpose is put right by the factor."""
    model = BayesianMLPRegressor(**(QUICK | {"epochs": 6})).fit(X[TRAIN], Y[TRAIN])
    z, t = torch.tensor((X[TRAIN] - model.x_mean_) / model.x_scale_), model.model_.targets(Y[TRAIN])
    p = model.members_[0].predict(z)
    p = replace(p, epistemic=p.epistemic * 0, aleatoric=torch.full_like(p.aleatoric, 1.0))
    model._calibrate(predictive.widened(p, wrong), t, torch.ones(200).double())
    error = (p.mean - t).square().mean().item()
    assert model.spread_ * wrong == pytest.approx(error, rel=0.05)


def test_members_together_have_the_variance_of_their_errors() -> None:
    """Each is right alone, about a truth that all know in part; the factor makes them right together."""
    generator = torch.Generator().manual_seed(0)
    noise, apart, rows, members = 0.7, 0.3, 20_000, 5
    truth = torch.randn(rows, 1, generator=generator)
    y = truth + noise * torch.randn(rows, 1, generator=generator)
    means = truth + apart * torch.randn(members, rows, 1, generator=generator)
    epistemic, aleatoric = (torch.full_like(truth, v**2) for v in (apart, noise))
    parts = [predictive.NormalPredictive(mean, epistemic, aleatoric) for mean in means]
    factor = folds.agreement(parts, torch.ones(rows))
    together = predictive.widened(predictive.mixture(parts), factor)
    errors = (y - together.mean).square()
    assert together.var.mean().item() == pytest.approx(
        errors.mean().item(), abs=5 * errors.std().item() / rows**0.5
    )
    assert together.var.mean() < 0.8 * predictive.mixture(parts).var.mean()


def test_members_predict_together_more_sharply_than_apart() -> None:
    model = BayesianMLPRegressor(**(QUICK | {"folds": 5})).fit(X[TRAIN], Y[TRAIN])
    assert 0.05 < model.agreement_ < 1
    assert model._target.spread == model.spread_ * model.agreement_
    lower, upper = model.predict_interval(X[TEST], 0.8, conformal=True)
    model.agreement_ = 1.0
    alone = model.predict_interval(X[TEST], 0.8, conformal=True)
    np.testing.assert_array_equal(alone, (lower, upper), "these come from members that predict apart")


def test_conformal_intervals_cover() -> None:
    model = BayesianMLPRegressor(**(QUICK | {"folds": 5})).fit(X[TRAIN], Y[TRAIN])
    lower, upper = model.predict_interval(X[200:], 0.8, conformal=True)
    assert 0.73 < np.mean((lower <= Y[200:]) & (Y[200:] <= upper)) < 0.87
    model.partial_fit(X[200:], Y[200:])
    assert not hasattr(model, "oof_predict_"), "every member has seen all rows now"
    with pytest.raises(ValueError, match="fit with folds=2 or more"):
        BayesianMLPRegressor(**PLAIN).fit(X[TRAIN], Y[TRAIN]).predict_interval(X[TEST], conformal=True)


# -------------------------------------------------------------------------------------------- tools and files


def test_works_in_pipelines_searches_and_cross_validation() -> None:
    model = make_pipeline(StandardScaler(), BayesianMLPRegressor(**QUICK))
    assert cross_val_score(model, X[TRAIN], Y[TRAIN], cv=2).shape == (2,)
    search = GridSearchCV(BayesianMLPRegressor(**QUICK), {"prior": [1.0, 10.0]}, cv=2)
    assert search.fit(X[TRAIN], Y[TRAIN]).best_params_.keys() == {"prior"}
    mean, std = model.fit(X[TRAIN], Y[TRAIN]).predict(X[TEST], return_std=True)
    assert mean.shape == std.shape


def test_pickles_and_clones(regressor: BayesianMLPRegressor) -> None:
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(X[TEST]), regressor.predict(X[TEST]))
    assert not hasattr(clone(regressor), "elbo_")


def test_regressors_are_saved_whole(regressor: BayesianMLPRegressor, tmp_path: Path) -> None:
    model = BayesianMLPRegressor(
        (7, 3),
        prior=vp.priors.EmpiricalBayes((1.0, 10.0)),
        noise="student",
        folds=2,
        n_replicas=2,
        epochs=2,
        random_state=1,
    )
    for saved in (regressor, model.fit(X[TRAIN], np.c_[Y[TRAIN], Y[TRAIN]])):
        vp.save(saved, tmp_path, preprocessing={"columns": ["age"]})
        again = vp.load(tmp_path)
        assert again.get_params() == saved.get_params()
        for method in ("predict", "predict_interval", "predict_uncertainty"):
            np.testing.assert_array_equal(getattr(again, method)(X[TEST]), getattr(saved, method)(X[TEST]))
        assert again.history_.equals(saved.history_)
        assert again.n_features_in_ == 10
        again.partial_fit(
            X[TRAIN],
            np.broadcast_to(Y[TRAIN].reshape(-1, *(1,) * saved.y_mean_.ndim), (200, *saved.y_mean_.shape)),
        )
        assert modelfile.preprocessing(tmp_path) == {"columns": ["age"]}


def test_classifiers_are_saved_with_classes_and_names(
    classifier: BayesianMLPClassifier, tmp_path: Path
) -> None:
    frame, y = load_iris(return_X_y=True, as_frame=True)
    named = BayesianMLPClassifier(method=vp.vbp(9.0), folds=2, epochs=2).fit(
        frame, np.array(["a", "b", "ü"], dtype=object)[y]
    )
    for saved, x in ((classifier, frame.to_numpy()), (named, frame)):
        vp.save(saved, tmp_path)
        again = vp.load(tmp_path)
        assert again.classes_.dtype == saved.classes_.dtype
        np.testing.assert_array_equal(again.predict(x), saved.predict(x))
        np.testing.assert_array_equal(again.predict_proba(x), saved.predict_proba(x))
    assert again.feature_names_in_.tolist() == list(frame.columns)


def test_what_no_file_can_hold_is_refused(regressor: BayesianMLPRegressor, tmp_path: Path) -> None:
    with pytest.raises(
        vp.ModelFileError, match="random_state is a RandomState, which a model file cannot hold"
    ):
        vp.save(
            clone(regressor)
            .set_params(random_state=np.random.RandomState(0), epochs=1)
            .fit(X[TRAIN], Y[TRAIN]),
            tmp_path,
        )
    with pytest.raises(ValueError, match="not fitted yet"):
        vp.save(BayesianMLPRegressor(), tmp_path)
    with pytest.raises(vp.ModelFileError, match="StandardScaler is neither an ELBO nor"):
        vp.save(StandardScaler(), tmp_path)
    Mine = type("Mine", (BayesianMLPRegressor,), {})
    with pytest.raises(vp.ModelFileError, match="Mine is a class of yours"):
        vp.save(Mine(folds=1, epochs=1).fit(X[TRAIN], Y[TRAIN]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("type", "Pipeline"),
        ("learned", {"__class__": 3}),
        ("learned", {"predict": 3}),
        ("parameters", {"os": 1}),
        ("learned", {"x_": {"array": [1], "dtype": "O,O"}}),
    ],
)
def test_a_forged_estimator_is_refused(
    place: str, value: Any, regressor: BayesianMLPRegressor, tmp_path: Path
) -> None:
    vp.save(regressor, tmp_path)
    description, weights = modelfile.read(tmp_path)
    description["estimator"][place] = value
    modelfile.write(tmp_path, json.loads(json.dumps(description)), weights)
    with pytest.raises(vp.ModelFileError, match="does not fit its weights"):
        vp.load(tmp_path)


def test_intervals_of_mapie_take_the_regressor(regressor: BayesianMLPRegressor) -> None:
    mapie = pytest.importorskip("mapie.regression", reason="MAPIE is not installed")
    conformal = mapie.SplitConformalRegressor(regressor, confidence_level=0.9, prefit=True).conformalize(
        X[260:360], Y[260:360]
    )
    _, interval = conformal.predict_interval(X[360:])
    assert 0.75 < np.mean((interval[:, 0, 0] < Y[360:]) & (Y[360:] < interval[:, 1, 0])) <= 1


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        (64, 4000),
        (3200, 12_000),
        (5120, 240 * 20),
        (8192, 6000),
        (50_000, 6000),
        (10**6, 2 * 4000),
        (10**7, 2 * 4000),
    ],
)
def test_automatic_epochs_follow_from_the_steps(rows: int, steps: int) -> None:
    model = vp.BayesianMLPRegressor()
    batch = model._batch_size(rows)
    per_epoch = -(-rows // batch)
    assert model._epochs(rows, batch) * per_epoch == pytest.approx(steps, abs=per_epoch)


@pytest.mark.parametrize(("rows", "units"), [(4999, 50), (5000, 100)])
def test_large_tables_have_more_units(rows: int, units: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, 1))
    model = BayesianMLPRegressor(folds=1, epochs=1, batch_size=rows, random_state=0).fit(x, x[:, 0])
    assert model.elbo_.net[0].out_features == units


def test_a_number_as_the_prior_is_the_gain_by_the_fan_in() -> None:
    model = BayesianMLPRegressor(**(PLAIN | {"prior": 3.0})).fit(X[TRAIN], Y[TRAIN])
    assert model.elbo_.prior == vp.priors.FanIn(gain=3.0)
