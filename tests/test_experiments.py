"""Every experiment and benchmark from end to end at a small size, how a second run resumes, and the data."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import varprop as vp
from benchmarks import lbfgs, stream
from benchmarks import tables as table_times
from experiments import (
    accuracy,
    calibrate,
    cells,
    consistency,
    correlations,
    data,
    deep,
    defaults,
    estimators,
    gaps,
    networks,
    positions,
    residual,
    softmax,
    split_mnist,
    table1,
    tables,
)

needs_data = pytest.mark.skipif(
    not os.environ.get("VARPROP_DATA"), reason="VARPROP_DATA is not set: no UCI data to run on"
)


def made_up(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    # 64 rows for training are four full batches; one feature is constant, as in naval.
    x = random.normal(size=(71, 3)) * [1, 5, 0]
    return x, 7 + 3 * x[:, 0] + random.normal(size=71), *data.published_splits(71, 20)


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "uci", made_up)


@pytest.mark.usefixtures("without_files")
def test_a_cell_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--datasets yacht --methods vbp bayesian-ridge --splits 2 --epochs 2 --out {tmp_path}".split()
    table1.main(command)
    path = tmp_path / "vbp" / "yacht.json"
    cell = json.loads(path.read_text())
    assert [set(split) for split in cell["splits"]] == [{"own", "exact", "seconds"}] * 2
    assert set(cell["splits"][0]["own"]) == {"log_likelihood", "rmse", "crps", "coverage"}
    assert cell["configuration"]["epochs"] == 2
    assert {"cpu", "cores", "torch"} <= set(cell["machine"])
    printed = capsys.readouterr().out
    mean = np.mean([split["own"]["log_likelihood"] for split in cell["splits"]])
    assert f"| **vbp** |  |  |  |  |  |  |  |  | {mean:.2f} ±" in printed
    assert "vbp, published | -2.59 ± 0.03" in printed

    before = path.stat().st_mtime_ns
    table1.main(command)
    assert path.stat().st_mtime_ns == before
    table1.main([*command[:2], "--methods", "vbp", "--splits", "2", "--epochs", "3", "--out", str(tmp_path)])
    assert json.loads(path.read_text())["configuration"]["epochs"] == 3


@pytest.mark.usefixtures("without_files")
def test_splits_trained_together_are_splits_trained_alone() -> None:
    together = table1.train(table1.Recipe(table1.vp.VBP), data.regression("yacht", (0, 1)), 2, 0)
    alone = table1.train(table1.Recipe(table1.vp.VBP), data.regression("yacht", (1,)), 2, 0)
    assert together[1].own == pytest.approx(alone[0].own, abs=1e-4)


@pytest.mark.usefixtures("without_files")
def test_scores_are_in_the_unit_of_the_target() -> None:
    splits = data.regression("yacht", (0,))
    x, y, train, test = made_up("yacht")
    (result,) = table1.one_by_one(table1.bayesian_ridge, splits, None, 0)
    model = table1.bayesian_ridge().fit(x[train[0]], y[train[0]])
    mean, std = model.predict(x[test[0]], return_std=True)
    normal = torch.distributions.Normal(torch.tensor(mean), torch.tensor(std))
    density = normal.log_prob(torch.tensor(y[test[0]])).mean().item()
    # The ridge penalty depends slightly on the scale of the target.
    assert result.own["log_likelihood"] == pytest.approx(density, abs=0.05)
    assert result.own["rmse"] == pytest.approx(np.sqrt(np.mean((mean - y[test[0]]) ** 2)), rel=0.02)


@pytest.mark.usefixtures("without_files")
def test_every_kind_of_recipe_has_own_and_exact_scores() -> None:
    splits = data.regression("yacht", (0, 1))
    for recipe in (
        table1.Recipe(table1.vp.VBP, members=2),
        table1.Recipe(table1.vp.LOCAL_REPARAM),
        table1.Recipe(table1.vp.VBP, noise="heteroscedastic", settle=0.5),
    ):
        for result in table1.train(recipe, splits, 2, 0):
            assert result.exact is not None
            assert np.isfinite([*result.own.values(), *result.exact.values()]).all()


def test_a_heteroscedastic_network_starts_where_the_settled_one_was() -> None:
    recipe = table1.Recipe(table1.vp.DVI, noise="heteroscedastic")
    settled = table1.Recipe(table1.vp.DVI).objective(10, 3, 20, seed=0)
    settled.likelihood.update(torch.tensor([0.3]))
    member = recipe.objective(10, 3, 20, seed=1)
    table1.take_over(member, settled)
    x = torch.randn(5, 3)
    torch.testing.assert_close(member.predict(x).mean, settled.predict(x).mean)
    torch.testing.assert_close(member.predict(x).epistemic, settled.predict(x).epistemic)
    torch.testing.assert_close(member.predict(x).aleatoric, settled.predict(x).aleatoric, rtol=0.01, atol=0)


@pytest.mark.usefixtures("without_files")
def test_the_row_of_pbp_filters_every_split() -> None:
    first, second = table1.filtered(data.regression("yacht", (0, 1)), 1, 0)
    assert first.own != second.own
    assert np.isfinite([*first.own.values(), *second.own.values()]).all()


@pytest.mark.usefixtures("without_files")
def test_an_inner_split_leaves_the_test_part_alone() -> None:
    splits = data.regression("yacht", (3,))
    inner = splits.inner()
    assert torch.equal(torch.cat([inner.x, inner.x_test], 1), splits.x)


def test_a_cell_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "row" / "set.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            cells.write(path, {"a": 1})
    assert not cells.finished(path, {"a": 1})
    cells.write(path, {"a": 1}, splits=[])
    assert cells.finished(path, {"a": 1})
    assert not cells.finished(path, {"a": 2})


def test_files_are_named_without_punctuation() -> None:
    assert cells.slug("torch's initialisation, 2,000 steps x 0.1") == "torchs-initialisation-2000-steps-x-0.1"
    assert not [path for path in cells.RESULTS.rglob("*") if cells.slug(path.name) != path.name]


def test_a_missing_data_set_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path))
    for load in (lambda: data.uci("yacht"), lambda: data.uci("unknown"), data.mnist, data.cifar10):
        with pytest.raises(SystemExit, match=r"data set|VARPROP_DATA") as error:
            load()
        assert "\n" not in str(error.value)


@needs_data
def test_the_published_splits_come_back() -> None:
    for name in ("boston", "yacht"):
        _, y, train, test = data.uci(name)
        for ours, theirs in zip(data.published_splits(len(y), data.SPLITS[name]), (train, test), strict=True):
            assert np.array_equal(ours, theirs)


@needs_data
def test_images() -> None:
    x, y, x_test, y_test = data.fashion_mnist()
    assert (x.shape, x_test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert torch.bincount(y).tolist() == [6000] * 10
    assert torch.bincount(y_test).tolist() == [1000] * 10


def test_the_standard_error_is_of_the_mean() -> None:
    assert tables.standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)


def test_the_accuracy_of_layers_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = torch.nn.Identity, torch.nn.MaxPool2d
    chosen = [
        case
        for case in accuracy.LAYERS
        if isinstance(case.layer(), kinds) or case.front == "linear over time"
    ]
    monkeypatch.setattr(accuracy, "GROUPS", {"layers": chosen})
    accuracy.main(["--draws", "200", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "layers.json").read_text())["rows"]
    exact = rows[0]
    assert exact["type"] == "Identity"
    assert exact["dvi"]["var_ratio"] == pytest.approx(1, abs=0.1)
    assert exact["dvi"] == exact["vbp"]
    for row in rows:
        assert 0.4 < row["dvi"]["var_ratio"] < 1.3
        # VBP agrees with its own model, even for maxima of correlated entries.
        if row["type"] not in ("TransformerEncoderLayer", "LSTM", "GRU"):
            assert row["vbp"]["var_ratio"] == pytest.approx(1, abs=0.2)
    assert "| conv | uniform | MaxPool2d" in capsys.readouterr().out


def test_committed_accuracy_is_nearer_to_one_than_that_of_the_nearest_package() -> None:
    """FastBNNs 0.4.3, measured on one layer after a convolution."""
    others = {
        "MaxPool2d": 1.58,
        "PReLU": 0.79,
        "LayerNorm": 0.80,
        "LeakyReLU": 0.98,
        "Tanh": 0.97,
        "AvgPool2d": 0.93,
        "Softmax": 0.0,
    }
    rows = json.loads((cells.RESULTS / "accuracy" / "layers.json").read_text())["rows"]
    for name, other in others.items():
        (ratio,) = {
            row["dvi"]["var_ratio"]
            for row in rows
            if (row["type"], row["front"], row["input"]) == (name, "conv", "normal")
        }
        assert abs(ratio - 1) < abs(other - 1), name


def test_calibration_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["plain", "temperature", "calibrated, vbp", "calibrated, dvi", "dropout, 30 samples"]
    command = ["--datasets", "digits", "--runs", "1", "--epochs", "3", "--out", str(tmp_path), "--rows"]
    calibrate.main([*command, *rows[:2]])
    command += rows
    calibrate.main(command)
    cell = json.loads((tmp_path / "digits" / "0.json").read_text())
    assert list(cell["rows"]) == rows
    accuracies = {row["accuracy"] for name, row in cell["rows"].items() if name in rows[:3]}
    assert len(accuracies) == 1
    assert f"| digits | plain | 1 | {cell['rows']['plain']['accuracy']:.4f} ±" in capsys.readouterr().out
    before = (tmp_path / "digits" / "0.json").stat().st_mtime_ns
    calibrate.main(command)
    assert (tmp_path / "digits" / "0.json").stat().st_mtime_ns == before


@needs_data
def test_consistency_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "REGRESSION", {"CVBP": "cvbp"})
    small = ["--rows", "60", "--epochs", "1", "--splits", "2", "--datasets", "yacht"]
    consistency.main([*small, "--images", "MNIST", "--methods", "cvbp", "--out", str(tmp_path)])
    cell = json.loads((tmp_path / "consistency" / "MNIST" / "cvbp-0.json").read_text())
    assert set(cell["auroc"]) == {"FashionMNIST", "KMNIST", "notMNIST"}
    assert cell["own"]["error"] == pytest.approx(cell["exact"]["error"], abs=0.2)
    assert "| CVBP | " in consistency.tables(tmp_path)


def test_the_accuracy_of_trained_networks_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    networks.main(["--networks", "lenet", "--draws", "200", "--epochs", "1", "--out", str(tmp_path)])
    row = json.loads((tmp_path / "networks.json").read_text())["networks"]["lenet"]
    assert all(0.7 < row[method]["var_ratio"] < 1.2 for method in networks.PASSES)
    assert "| lenet | " in capsys.readouterr().out


def test_defaults_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = replace(defaults.BASE, hidden=5, epochs=1, steps=(1, 3))
    rows = {"base": quick, "five members": replace(quick, members=5)}
    studies = {
        "regression": defaults.Study("Numbers", ("diabetes",), 2, rows),
        "classes": defaults.Study("Classes", ("iris",), 2, rows),
    }
    monkeypatch.setattr(defaults, "STUDIES", studies)
    defaults.main(["--out", str(tmp_path)])
    cell = json.loads((tmp_path / "classes" / "iris" / "five-members.json").read_text())
    assert {name: len(values) for name, values in cell["scores"].items()} == dict.fromkeys(
        ("error", "log_likelihood", "calibration", "gap"), 2
    )
    assert "| five members | " in capsys.readouterr().out


@pytest.mark.usefixtures("float64")
def test_residual_sums_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "BLOCKS", {"dense": residual.BLOCKS["dense"]})
    residual.main(["--samples", "1000", "--out", str(tmp_path / "residual.json")])
    rows = json.loads((tmp_path / "residual.json").read_text())["rows"]
    assert [(row["inner"], row["method"]) for row in rows] == list(product(residual.INNER, ("VBP", "DVI")))
    assert all(abs(row["corrected"] - 1) < abs(row["independent"] - 1) for row in rows[2:])
    assert "| dense | J ~ -P | VBP | " in capsys.readouterr().out


def test_class_probabilities_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    softmax.main(["--problems", "20", "--samples", "2000", "--out", str(tmp_path / "softmax.json")])
    rows = json.loads((tmp_path / "softmax.json").read_text())["rows"]
    kl = {row["approximation"]: row["kl"] for row in rows if (row["classes"], row["scale"]) == (10, 3.0)}
    assert kl["quadrature"] < 0.01 < kl["plugin"]
    assert "10 classes, largest |error|" in capsys.readouterr().out


def test_the_estimators_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BayesianMLPRegressor", "BayesianMLPClassifier"):
        monkeypatch.setattr(estimators, name, partial(getattr(estimators, name), epochs=2))
    for name in ("MLPRegressor", "MLPClassifier"):
        monkeypatch.setattr(estimators, name, partial(getattr(estimators, name), max_iter=2))
    estimators.main(["--datasets", "diabetes", "iris", "--splits", "2", "--out", str(tmp_path)])
    sets = json.loads((tmp_path / "estimators.json").read_text())["sets"]
    first, second = sets["diabetes"]
    assert first["rmse"] != second["rmse"]
    assert 0 < first["coverage"] <= 1
    assert all(row["log_likelihood"] < 0 for row in sets["iris"])
    assert "| diabetes | 2 | " in capsys.readouterr().out


def test_gaps_are_scored_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (90, 2))
    y = x[:, 0] + 0.1 * random.randn(90)
    monkeypatch.setattr(gaps.data, "uci", lambda name: (x, y, [], []))
    monkeypatch.setattr(gaps, "BayesianMLPRegressor", partial(gaps.BayesianMLPRegressor, epochs=2))
    command = ["--datasets", "yacht", "--rows", "mean-field", "gp", "--out", str(tmp_path)]
    gaps.main([*command, "--features", "1"])
    gaps.main(command)
    cell = json.loads((tmp_path / "gp" / "yacht.json").read_text())
    assert len(cell["gaps"]) == 2
    assert cell["gaps"][0]["rmse"] != cell["gaps"][1]["rmse"]
    score = np.mean([gap["log_likelihood"] for gap in cell["gaps"]])
    assert f"| gp |  |  |  |  | {score:.2f} |" in capsys.readouterr().out


def test_the_page_of_results_is_made_of_the_committed_cells(tmp_path: Path) -> None:
    tables.main(["--out", str(tmp_path / "RESULTS.md")])
    assert (tmp_path / "RESULTS.md").read_text() == (
        Path(tables.__file__).parent / "RESULTS.md"
    ).read_text(), "python -m experiments.tables"


@pytest.mark.usefixtures("without_files")
def test_the_benchmark_of_lbfgs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--datasets", "boston", "--splits", "2", "--adam", "2", "--lbfgs", "2"]
    lbfgs.main([*options, "--out", str(tmp_path / "lbfgs.json")])
    results = json.loads((tmp_path / "lbfgs.json").read_text())["results"]["boston"]
    assert results["lbfgs from -9"][-1]["loss"] < results["adam from -9"][-1]["loss"]
    assert "| boston | lbfgs from -5 |" in capsys.readouterr().out


def test_the_time_of_a_table_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlxtend", reason="mlxtend carries boston")
    table_times.main(["--tables", "boston", "--epochs", "1", "--out", str(tmp_path / "tables.json")])
    found = json.loads((tmp_path / "tables.json").read_text())["tables"]["boston"]
    assert found["seconds"] == pytest.approx(sum(found["parts"].values()))
    assert min(found["parts"].values()) > 0
    assert "boston" in capsys.readouterr().out


def test_the_stream_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stream.json"
    stream.main(["--rows", "3000", "--part", "1000", "--epochs", "2", "--out", str(out)])
    assert [part["rows"] for part in json.loads(out.read_text())["parts"]] == [1000, 2000, 3000]
    assert "memory" in capsys.readouterr().out


def test_split_mnist_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images with a bright row for each digit."""
    y = torch.arange(600) % 10
    x = torch.randint(0, 60, (600, 1, 10, 10), dtype=torch.uint8)
    x[torch.arange(600), 0, y] = 255
    monkeypatch.setattr(data, "mnist", lambda: (x[:500], y[:500], x[500:], y[500:]))
    monkeypatch.setattr(split_mnist, "CORESET", 4)
    monkeypatch.setattr(split_mnist, "CORESET_EPOCHS", 2)
    command = [
        "--runs",
        "1",
        "--epochs",
        "10",
        "--out",
        str(tmp_path),
        "--figure",
        str(tmp_path / "figure.png"),
    ]
    split_mnist.main(command)
    cell = json.loads((tmp_path / "multi" / "dvi-0.json").read_text())
    assert [len(line) for line in cell["alone"]] == [1, 2, 3, 4, 5]
    assert cell["alone"][4][4] > 0.9, "the last task is learned"
    assert f"| DVI | {50 * sum(cell['alone'][1]):.1f} | " in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_committed_stream_needs_bounded_memory_and_learns() -> None:
    found = json.loads(stream.RESULT.read_text())
    parts = found["parts"]
    assert parts[-1]["rows"] == 1_000_000
    assert parts[-1]["memory"] < parts[0]["memory"] + 50
    assert parts[0]["log_likelihood"] < parts[-1]["log_likelihood"] < found["log_likelihood_of_the_noise"]


def test_the_correlation_of_positions_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    positions.main(["--networks", "LeNet", "--draws", "100", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "positions.json").read_text())["rows"]
    assert all(0.5 < row["correlated"][0] <= row["correlated"][2] * 1.01 < 1.5 for row in rows)
    assert "| LeNet | noise | -9 | " in capsys.readouterr().out


@needs_data
@pytest.mark.usefixtures("without_files")
def test_training_with_correlations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlations, "TESTED", 20)
    monkeypatch.setattr(correlations, "DEPTHS", (2,))
    monkeypatch.setattr(correlations, "METHODS", {"dvi": vp.DVI})
    sizes = "--splits 2 --epochs 1 --images 64 --image-epochs 1"
    command = f"--networks yacht LeNet {sizes} --out {tmp_path}".split()
    correlations.main(command)
    cell = json.loads((tmp_path / "dvi-correlated" / "yacht-2.json").read_text())
    assert [set(split) for split in cell["splits"]] == [{"own", "sampled"}] * 2
    assert "| DVI, correlated |" in capsys.readouterr().out


@needs_data
def test_a_residual_network_by_each_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "DRAWN", 2)
    rows = "plain-scaled vbp-calibrated dvi-further vbp"
    command = f"--rows {rows} --images 24 --epochs 1 --further 1 --out {tmp_path}".split()
    deep.main(command)
    scores = {name: json.loads((tmp_path / f"{name}.json").read_text())["scores"] for name in rows.split()}
    assert scores["vbp-calibrated"]["error"] == scores["plain-scaled"]["error"]
    assert set(scores["vbp"]["drawn"]) == {"error", "log_likelihood", "ece", "brier"}
    assert all(scores[name]["variance"] > 0 for name in rows.split()[1:])
    assert "| DVI, after plain |" in capsys.readouterr().out
