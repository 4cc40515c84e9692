"""The rows of the tabular benchmark: what a user would pick, each with its defaults.

A row is a function of training features (a DataFrame), targets and a seed that returns a function of test
features: a `Prediction`, or class probabilities with the classes sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from varprop import BayesianMLPClassifier, BayesianMLPRegressor

from .tabular_scores import LEVEL, Prediction, normals, of, two_pieces

Regressor = Callable[[pd.DataFrame, np.ndarray, int], Callable[[pd.DataFrame], Prediction]]
Classifier = Callable[[pd.DataFrame, np.ndarray, int], Callable[[pd.DataFrame], np.ndarray]]
MEMBERS = 5
MOST_ROWS_OF_GP = 2000


def encoding(*, scaled: bool = True) -> Any:
    """Missing numbers by the median, with indicators; categories as indicators; numbers standardised."""
    numbers = [SimpleImputer(strategy="median", add_indicator=True), *([StandardScaler()] if scaled else [])]
    return make_column_transformer(
        (make_pipeline(*numbers), make_column_selector(dtype_include="number")),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_include="category"),
        ),
    )


# -------------------- regression


def boosting(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    """Constant noise: the root mean square of the residuals in five-fold cross-validation."""
    model = HistGradientBoostingRegressor(random_state=seed)
    std = np.sqrt(np.mean((cross_val_predict(model, x, y) - y) ** 2))
    model.fit(x, y)
    return lambda x: normals(model.predict(x), np.full(len(x), std))


def quantiles(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    models = [
        HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed).fit(x, y)
        for q in ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)
    ]
    return lambda x: two_pieces(np.stack([model.predict(x) for model in models]), 0.01 * y.std())


def conformal(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    """MAPIE's CV+ around gradient boosting: an interval, and no distribution."""
    from mapie.regression import CrossConformalRegressor

    model = CrossConformalRegressor(HistGradientBoostingRegressor(random_state=seed), confidence_level=LEVEL)
    model.fit_conformalize(x, y)

    def predict(x: pd.DataFrame) -> Prediction:
        # In parts, because memory grows with the test rows times the training rows.
        parts = [model.predict_interval(x.iloc[i : i + 500]) for i in range(0, len(x), 500)]
        mean, ends = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Prediction(mean, ends[:, 0, 0], ends[:, 1, 0])

    return predict


def ngboost(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    from ngboost import NGBRegressor

    encoder = encoding(scaled=False)
    model = NGBRegressor(verbose=False, random_state=seed).fit(encoder.fit_transform(x), y)

    def predict(x: pd.DataFrame) -> Prediction:
        p = model.pred_dist(encoder.transform(x)).params
        return normals(p["loc"], p["scale"])

    return predict


def forest(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    """The variance between trees plus constant noise, so that out of bag the sum is the squared error."""
    encoder = encoding(scaled=False)
    z = encoder.fit_transform(x)
    model = RandomForestRegressor(oob_score=True, random_state=seed).fit(z, y)
    trees = np.stack([tree.predict(z) for tree in model.estimators_])
    for k, rows in enumerate(model.estimators_samples_):
        trees[k, rows] = np.nan
    error = np.mean((model.oob_prediction_ - y) ** 2)
    noise = max(error - np.nanmean(np.nanvar(trees, axis=0)), 1e-3 * error)

    def predict(x: pd.DataFrame) -> Prediction:
        z = encoder.transform(x)
        trees = np.stack([tree.predict(z) for tree in model.estimators_])
        return normals(trees.mean(0), np.sqrt(trees.var(0) + noise))

    return predict


def standardised(estimator: Callable[[int], Any]) -> Regressor:
    """A regressor of scikit-learn with `return_std`, on standardised features and targets."""

    def fit(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
        centre, scale = y.mean(), y.std()
        model = make_pipeline(encoding(), estimator(seed)).fit(x, (y - centre) / scale)

        def predict(x: pd.DataFrame) -> Prediction:
            mean, std = model.predict(x, return_std=True)
            return normals(mean * scale + centre, std * scale)

        return predict

    return fit


def gaussian_process(seed: int) -> Any:
    return GaussianProcessRegressor(ConstantKernel() * RBF() + WhiteKernel(), random_state=seed)


def networks(members: int) -> Regressor:
    """MLPRegressor with early stopping, whose noise is the error on the part that it stops by.

    That part is a tenth of the rows; its error is 1 - R², in units of the target's variance.
    """

    def fit(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
        centre, scale = y.mean(), y.std()
        encoder = encoding()
        z = encoder.fit_transform(x)
        models = [
            MLPRegressor(early_stopping=True, random_state=members * seed + k).fit(z, (y - centre) / scale)
            for k in range(members)
        ]
        stds = [scale * np.sqrt(1 - model.best_validation_score_) for model in models]

        def predict(x: pd.DataFrame) -> Prediction:
            z = encoder.transform(x)
            means = np.stack([model.predict(z) * scale + centre for model in models])
            return normals(means, np.repeat(np.array(stds)[:, None], len(x), 1))

        return predict

    return fit


def catboost(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    from catboost import CatBoostRegressor

    model = CatBoostRegressor(loss_function="RMSEWithUncertainty", **_catboost(x, seed)).fit(_text(x), y)

    def predict(x: pd.DataFrame) -> Prediction:
        mean, var = model.predict(_text(x), prediction_type="RMSEWithUncertainty").T
        return normals(mean, np.sqrt(var))

    return predict


def _catboost(x: pd.DataFrame, seed: int) -> dict[str, Any]:
    columns = list(x.select_dtypes("category"))
    quiet = {"verbose": False, "allow_writing_files": False, "thread_count": 1}
    return {"cat_features": columns, "random_seed": seed, **quiet}


def _text(x: pd.DataFrame) -> pd.DataFrame:
    """Categories as text, in which a missing value is a category."""
    return x.assign(**{str(name): x[name].astype(object).fillna("") for name in x.select_dtypes("category")})


def ours(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], Prediction]:
    model = BayesianMLPRegressor(random_state=seed).fit(x, y)

    return lambda x: of(model.predictive(x))


# -------------------- classes


def classifier(model: Callable[[int], Any], *, encoded: bool = True, scaled: bool = True) -> Classifier:
    """A classifier of scikit-learn, by default on encoded and standardised features."""
    return ensemble(model, 1, encoded=encoded, scaled=scaled)


def ensemble(
    model: Callable[[int], Any], members: int, *, encoded: bool = True, scaled: bool = True
) -> Classifier:
    """The average of the probabilities of several classifiers."""

    def fit(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], np.ndarray]:
        models = [
            make_pipeline(encoding(scaled=scaled) if encoded else "passthrough", model(members * seed + k))
            for k in range(members)
        ]
        for each in models:
            each.fit(x, y)
        return lambda x: np.mean([each.predict_proba(x) for each in models], 0)

    return fit


def catboost_classes(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], np.ndarray]:
    from catboost import CatBoostClassifier

    model = CatBoostClassifier(**_catboost(x, seed)).fit(_text(x), y)
    return lambda x: model.predict_proba(_text(x))


def our_classes(x: pd.DataFrame, y: np.ndarray, seed: int) -> Callable[[pd.DataFrame], np.ndarray]:
    model = BayesianMLPClassifier(random_state=seed).fit(x, y)
    return lambda x: np.asarray(model.predict_proba(x))


OURS = "varprop"
NUMBERS: dict[str, Regressor] = {
    OURS: ours,
    "boosting": boosting,
    "boosting-quantiles": quantiles,
    "boosting-conformal": conformal,
    "ngboost": ngboost,
    "catboost": catboost,
    "forest": forest,
    "gp": standardised(gaussian_process),
    "bayesian-ridge": standardised(lambda seed: BayesianRidge()),
    "mlp": networks(1),
    "mlp-ensemble": networks(MEMBERS),
}
CLASSES: dict[str, Classifier] = {
    OURS: our_classes,
    "boosting": classifier(lambda seed: HistGradientBoostingClassifier(random_state=seed), encoded=False),
    "catboost": catboost_classes,
    "forest": classifier(lambda seed: RandomForestClassifier(random_state=seed), scaled=False),
    "logistic": classifier(lambda seed: LogisticRegression()),
    "mlp": classifier(lambda seed: MLPClassifier(random_state=seed)),
    "mlp-early": classifier(lambda seed: MLPClassifier(early_stopping=True, random_state=seed)),
    "mlp-ensemble": ensemble(lambda seed: MLPClassifier(early_stopping=True, random_state=seed), MEMBERS),
}
ROWS = list(dict.fromkeys([*NUMBERS, *CLASSES]))
