"""Tables that need not fit into memory: judged by a sample, learned from whole, in files that vanish."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import Result

import varprop as vp
from varprop.io.storage import scratch
from varprop.table.cache import LongTable
from varprop.table.encoding import Encoder
from varprop.table.model import TableModel
from varprop.table.sampling import sampled
from varprop.table.target import TargetColumn
from varprop.training.folds import Folds

from .shell import run

LONG = 300


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are many here, and files are read in small chunks."""
    for module in ("table.sampling", "training.folds", "training.rows"):
        monkeypatch.setattr(f"varprop.{module}.LONG", LONG)
    for module in ("training.folds", "training.rows", "perceptron"):
        monkeypatch.setattr(f"varprop.{module}.PART", 128)
    monkeypatch.setattr("varprop.table.reading.chunks.__defaults__", (None, 64))


def towns(rows: int = 1000, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x, town = rng.normal(size=rows), rng.choice(["Ulm", "Bonn"], rows)
    y = np.sin(2 * x) + (town == "Ulm") + 0.1 * rng.normal(size=rows)
    table = pd.DataFrame({"x": x, "town": town, "y": y, "kind": np.where(y > 0.5, "high", "low")})
    table.loc[rows - 2, "kind"] = "rare"
    table.loc[::50, "x"] = None
    return table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    towns().to_csv(tmp_path / "towns.csv", index=False)
    return tmp_path / "towns.csv"


def works(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def parts(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (table.iloc[i : i + 70] for i in range(0, len(table), 70))


def test_a_short_table_is_its_own_sample() -> None:
    table = towns(LONG)
    sample = sampled(parts(table), "kind")
    pd.testing.assert_frame_equal(sample.table, table)
    assert sample.is_whole


def test_a_sample_is_drawn_evenly_and_has_every_class() -> None:
    table, counts = towns(), np.zeros(1000)
    for seed in range(50):
        sample = sampled(parts(table), "kind", seed)
        assert len(sample.table) == LONG
        assert sample.rows == 1000
        assert not sample.is_whole
        assert sample.table.index.is_monotonic_increasing
        assert (sample.table.kind == "rare").sum() == 1
        counts[sample.table.index] += 1
    always = counts == 50
    assert always.sum() == 3  # the first rows of the three classes
    deviations = (counts[~always] - 50 * 297 / 997) / np.sqrt(50 * 0.3 * 0.7)
    assert abs(deviations.mean()) < 0.1
    assert 0.9 < deviations.std() < 1.1


def test_a_long_table_is_encoded_as_a_short_one(path: Path) -> None:
    table = towns()
    table.loc[5, "y"] = None
    table.to_csv(path, index=False)
    target, encoder = TargetColumn(["y"]), Encoder.fit(table[["x", "town"]])
    X, y, rows = LongTable(path, 1000, pd.Index([3, 700])).encoded(encoder, target)
    expected = table.drop(index=[2, 5, 699])
    np.testing.assert_array_equal(X, encoder.transform(expected))
    np.testing.assert_allclose(y, expected.y)
    np.testing.assert_array_equal(rows, expected.index + 1)
    assert isinstance(X, np.memmap)


def test_nothing_is_left_of_an_array_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    array = scratch((1000, 3), np.float64)
    array[:] = 1.0
    assert not list(tmp_path.iterdir())
    assert array.sum() == 3000


def test_a_full_disk_is_told_before_any_work(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varprop.io.storage.shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    result = run("fit", path, "--target", "y", "--out", path.parent / "m")
    assert result.exit_code == 2
    assert "0.0 GB left" in result.stderr
    assert "TMPDIR" in result.stderr
    assert not (path.parent / "m").exists()


def test_folds_of_many_rows_are_even_and_keep_equal_rows_together() -> None:
    x = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    folds = Folds.draw(x, x[:, 0], 5, seed=0)
    assert (folds.part[:2000] == folds.part[2000:]).all()
    assert (folds.part.bincount(minlength=5) - 800).abs().max() < 4 * (2000 * 0.16) ** 0.5 * 2
    assert not (Folds.draw(x, x[:, 0], 5, seed=1).part == folds.part).all()
    assert len(folds.judges.unique()) == LONG


@pytest.mark.parametrize("rows", [50, 1000])
def test_a_member_is_trained_without_its_part_and_judged_by_it(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(float(rows)).unsqueeze(1)
    folds = Folds.draw(x, x[:, 0], 3, seed=0)
    monkeypatch.setattr(
        "varprop.training.folds.groups.fit", lambda members, *data, **options: (data, options)
    )
    train, options = folds.fit([None] * 3, x, x[:, 0], torch.ones(rows))
    judging = torch.zeros(rows, dtype=torch.bool).index_fill_(0, folds.judges, True)
    for held_out, data in ((False, train), (True, options["validation"])):
        for k, (places, weight) in enumerate(zip(data[0].rows, data[2], strict=True)):
            own = (folds.part == k) & judging if held_out else folds.part != k
            assert places[weight > 0].sort().values.tolist() == own.nonzero()[:, 0].tolist()


def test_an_estimator_learns_from_all_rows_and_is_judged_by_some() -> None:
    table = towns()
    X, y = table[["x", "town"]], table.y
    options = {"random_state": 0, "optimizer": "adam", "noise": "constant", "batch_size": 128}
    model = vp.BayesianMLPRegressor(20, epochs=100, **options).fit(X, y)
    assert len(model.oof_rows_) == len(model.oof_predict_) == LONG
    residuals = y.to_numpy()[model.oof_rows_] - model.oof_predict_
    assert residuals.std() < 0.2
    new = towns(seed=1)
    score = model.log_prob(new[["x", "town"]], new.y).mean()
    assert abs(score - model.oof_log_likelihood_) < 0.2
    assert model.n_seen_ == 800


def test_out_of_fold_rows_are_counted_among_all_rows() -> None:
    table = towns(400)
    weight = np.ones(400)
    weight[:50] = 0.0
    options = {"random_state": 0, "optimizer": "adam", "epochs": 2, "noise": "constant"}
    model = vp.BayesianMLPRegressor(**options).fit(table[["x", "town"]], table.y, weight)
    assert len(model.oof_rows_) == LONG
    assert model.oof_rows_.min() >= 50
    assert model.oof_rows_.max() == 399


def test_a_long_table_at_the_shell(path: Path) -> None:
    folder, quick = path.parent, ("--epochs", 2, "--noise", "constant")
    fitted = works("fit", path, "--target", "y", "--ignore", "kind", *quick, "--out", folder / "m")
    assert "has 1,000 rows; scores come from 300, drawn at random" in fitted.stderr
    assert "1,000 rows, 2 columns used" in fitted.stdout
    assert "out of fold: cases" in fitted.stdout
    assert TableModel.load(folder / "m").rows == 800
    assert "scores come from 300" in works("evaluate", folder / "m", path).stderr
    works("report", folder / "m", path, "--out", folder / "report.html")
    assert "judged on 300 cases" in (folder / "report.html").read_text()
    assert "1,000" in works("update", folder / "m", path, "--epochs", 1).stdout


def test_rows_held_out_of_a_long_table_are_not_learned_from(path: Path) -> None:
    options = ("--target", "y", "--ignore", "kind", "--epochs", 2, "--folds", 1, "--noise", "constant")
    held = works("fit", path, *options, "--holdout", 0.2, "--no-refit", "--out", path.parent / "m")
    assert "held out: log-likelihood" in held.stdout
    assert TableModel.load(path.parent / "m").rows == 1000 - 60


def test_every_class_of_a_long_table_is_known(path: Path) -> None:
    model = path.parent / "m"
    works(
        "fit",
        path,
        "--target",
        "kind",
        "--ignore",
        "y",
        "--epochs",
        2,
        "--class-weight",
        "balanced",
        "--out",
        model,
    )
    assert TableModel.load(model).target.classes == ["high", "low", "rare"]
