"""The command line: predictions from a table; every failure is one sentence and exit code 2."""

import errno
import gzip
import json
import lzma
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import Result

import varprop as vp
from varprop.shell import one_sentence
from varprop.table.messages import TableWarning
from varprop.table.model import TableModel, train
from varprop.table.target import TargetColumn

from .shell import run


def fails(*arguments: object, saying: str) -> None:
    """The command fails as a shell user expects."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("varprop: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(".\n")
    assert saying in result.stderr, result.stderr


def houses(rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    area, town = rng.gamma(4.0, 25.0, rows), rng.choice(["Ulm", "Köln", "a,b"], rows)
    price = 0.05 * area + 3.0 * (town == "Ulm") + rng.normal(0.0, 1.0, rows)
    table = pd.DataFrame(
        {"area": area, "town": town, "rooms": rng.integers(1, 6, rows).astype(float), "price": price}
    )
    table["dear"] = np.where(price > 6, "yes", "no")
    table.loc[::6, "rooms"] = None
    table.loc[::7, "town"] = None
    return table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model of numbers and a model of classes."""
    place = tmp_path_factory.mktemp("cli")
    houses(400).to_csv(place / "train.csv", index=False)
    houses(100, seed=1).drop(columns=["price", "dear"]).to_csv(place / "new.csv", index=False)
    houses(100, seed=2).to_parquet(place / "test.parquet")
    for target, other in (("price", "dear"), ("dear", "price")):
        result = run(
            "fit",
            place / "train.csv",
            "--target",
            target,
            "--ignore",
            other,
            "--epochs",
            6,
            "--folds",
            3,
            "--out",
            place / target,
        )
        assert result.exit_code == 0, (result.output, result.exception)
        assert "out of fold: log-likelihood" in result.stdout
    return place


def test_numbers_are_predicted_with_their_uncertainty(place: Path, tmp_path: Path) -> None:
    assert (
        run("predict", place / "price", place / "new.csv", "--out", tmp_path / "sub" / "out.csv").exit_code
        == 0
    )
    p = pd.read_csv(tmp_path / "sub" / "out.csv")
    assert list(p) == ["mean", "std", "lower", "upper", "epistemic", "aleatoric"]
    assert len(p) == 100
    np.testing.assert_allclose(p["std"] ** 2, p.epistemic + p.aleatoric, rtol=1e-4)
    np.testing.assert_allclose(p["upper"] - p["lower"], 2 * 1.6449 * p["std"], rtol=0.2)  # a mixture
    truth = houses(100, seed=1)["price"]
    assert np.corrcoef(p["mean"], truth)[0, 1] > 0.7
    assert 0.75 <= ((p.lower <= truth) & (truth <= p.upper)).mean() <= 1.0


def test_classes_are_predicted_with_their_probabilities(place: Path) -> None:
    result = run("predict", place / "dear", place / "new.csv")
    lines = result.stdout.splitlines()
    assert lines[0] == "class,p_no,p_yes,entropy,mutual_information"
    p = pd.DataFrame([line.split(",") for line in lines[1:]], columns=lines[0].split(","))
    probabilities = p[["p_no", "p_yes"]].astype(float)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-4)
    assert (p["class"] == np.where(probabilities.p_yes > probabilities.p_no, "yes", "no")).all()
    assert (p["class"] == houses(100, seed=1)["dear"]).mean() > 0.7
    assert (p.mutual_information.astype(float) <= p.entropy.astype(float)).all()


def test_parts_of_a_file_are_predicted_as_the_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("predict", place / "price", place / "new.csv").stdout
    monkeypatch.setattr("varprop.table.model.chunks.__defaults__", (None, 7))
    parts = run("predict", place / "price", place / "new.csv").stdout
    numbers = [np.array([row.split(",") for row in text.split()[1:]], float) for text in (whole, parts)]
    np.testing.assert_allclose(*numbers, rtol=1e-4, atol=2e-5)  # the last digit that is printed


def test_targets_far_from_zero_keep_their_digits(place: Path, tmp_path: Path) -> None:
    """Seconds since 1970, which single precision rounds to two minutes."""
    table = houses(400)
    table["time"] = (1.7e9 + 10 * table.price).round().astype("int64")
    table.drop(columns=["price", "dear"]).to_csv(tmp_path / "times.csv", index=False)
    fitted = run(
        "fit",
        tmp_path / "times.csv",
        "--target",
        "time",
        "--epochs",
        30,
        "--folds",
        1,
        "--out",
        tmp_path / "model",
    )
    assert fitted.exit_code == 0, fitted.output
    model, near = TableModel.load(tmp_path / "model"), TableModel.load(place / "price")
    p = model.predict(table)
    error = (p.mean - model.values(table)).square().mean().sqrt().item()
    near_error = (near.predict(table).mean - near.values(table)).square().mean().sqrt().item()
    assert error == pytest.approx(10 * near_error, rel=0.1)
    measured = run("evaluate", tmp_path / "model", tmp_path / "times.csv").stdout
    assert re.search(rf"root mean squared error +│ {error:.4g} ", measured), measured


def test_the_model_is_json_and_safetensors(place: Path) -> None:
    assert {path.suffix for path in (place / "price").iterdir()} == {".json", ".safetensors"}
    model = vp.load(place / "price")
    assert model.types == {"area": "float64", "rooms": "float64", "town": "str"}
    assert 0 < len(model.history) <= 6


def test_devices_reach_the_estimator(place: Path, tmp_path: Path) -> None:
    """A small table is trained in one process all the same, because to start others would take longer."""
    options = ("--target", "price", "--epochs", 1, "--noise", "constant", "--devices", 2)
    run("fit", place / "train.csv", *options, "--out", tmp_path / "model")
    estimator = vp.load(tmp_path / "model").estimator
    assert estimator.devices == 2
    assert [estimator._processes(rows) for rows in (4_999, 5_000)] == [1, 2]


def test_one_seed_gives_one_model(place: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(
            "fit",
            place / "train.csv",
            "--target",
            "price",
            "--ignore",
            "dear",
            "--epochs",
            2,
            "--seed",
            3,
            "--out",
            tmp_path / name,
        )
    first, second = ((tmp_path / name / "model.json").read_text() for name in ("a", "b"))
    first, second = (json.loads(text) for text in (first, second))
    weights = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert first["preprocessing"]["target"] == second["preprocessing"]["target"]


def test_evaluate(place: Path) -> None:
    numbers = run("evaluate", place / "price", place / "test.parquet")
    assert "root mean squared error" in numbers.stdout
    assert "coverage of 90 % intervals" in numbers.stdout
    classes = run("evaluate", place / "dear", place / "test.parquet")
    assert "accuracy" in classes.stdout
    assert "100" in classes.stdout


def test_report(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run("report", place / "dear", place / "test.parquet", "--out", out).exit_code == 0
    page = out.read_text()
    assert "Report on dear" in page
    assert "figure-learning" in page
    assert '<td title="Ulm">Ulm</td>' in page


BOTH = """
import sys
from varprop.cli import main

good, bad, data = sys.argv[1:]
sys.argv[1:] = ["predict", good, data]
try:
    main()
except SystemExit as done:
    assert not done.code
sys.argv[1:] = ["predict", bad, data]
main()
"""


def test_a_real_process(place: Path, tmp_path: Path) -> None:
    """A command that succeeds and then one that fails, in one process, whose start takes seconds."""
    words = [sys.executable, "-c", BOTH, place / "price", tmp_path / "none", place / "new.csv"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 101
    assert done.stderr.startswith("varprop: ")
    assert len(done.stderr.splitlines()) == 1


def test_version_and_help() -> None:
    assert run("--version").stdout == f"varprop {vp.__version__}\n"
    text = run("--help").stdout
    assert all(name in text for name in ("fit", "predict", "evaluate", "report", "export", "demo"))


# --------------------------------------------------------------------------------------------------- failures


def table_with(place: Path, tmp_path: Path, column: str, row: int, value: object) -> Path:
    table = pd.read_csv(place / "train.csv").astype(object)
    table.loc[row - 1, column] = value
    table.to_csv(tmp_path / "data.csv", index=False)
    return tmp_path / "data.csv"


def test_files_that_cannot_be_read(place: Path, tmp_path: Path) -> None:
    fails(
        "fit",
        tmp_path / "none.csv",
        "--target",
        "y",
        "--out",
        tmp_path / "m",
        saying="none.csv does not exist",
    )
    (tmp_path / "empty.csv").write_text("area,town,rooms\n")
    fails(
        "predict",
        place / "price",
        tmp_path / "empty.csv",
        "--out",
        tmp_path / "p.csv",
        saying="empty.csv has no rows",
    )
    (tmp_path / "book.csv").write_bytes(b"PK\x03\x04" + bytes(99))
    words = ["predict", place / "price", tmp_path / "book.csv", "--out", tmp_path / "p.csv"]
    fails(*words, saying="book.csv is an Excel workbook or an archive; save the table as CSV")
    (tmp_path / "no.parquet").write_text("area")
    fails("evaluate", place / "price", tmp_path / "no.parquet", saying="cannot be read as Parquet")
    assert not (tmp_path / "p.csv").exists()


def test_columns_that_are_not_there(place: Path, tmp_path: Path) -> None:
    fails(
        "fit",
        place / "train.csv",
        "--target",
        "prize",
        "--out",
        tmp_path / "m",
        saying="has no column 'prize'; it has 'area', 'town'",
    )
    fails("evaluate", place / "price", place / "new.csv", saying="new.csv has no column 'price'")
    words = ["fit", place / "train.csv", "--target", "price", "--ignore", "price", "--out", tmp_path / "m"]
    fails(*words, saying="column 'price' is the target and cannot be ignored")
    every = [word for name in ("area", "town", "rooms", "dear") for word in ("--ignore", name)]
    words = ["fit", place / "train.csv", "--target", "price", *every, "--out", tmp_path / "m"]
    fails(*words, saying="every column besides the target is ignored")
    words = ["predict", place / "price", place / "new.csv", "--id", "nr"]
    fails(*words, saying="new.csv has no column 'nr'")
    pd.read_csv(place / "new.csv").drop(columns="town").to_csv(tmp_path / "less.csv")
    fails("predict", place / "price", tmp_path / "less.csv", saying="less.csv has no column 'town'")


@pytest.mark.parametrize(
    ("value", "saying", "options"),
    [
        ("large", "column 'area' has 'large' in row 33, where a finite number is needed", []),
        ("inf", "column 'area' has 'inf' in row 33, far beyond all that training had", ["--strict"]),
    ],
)
def test_values_that_do_not_fit_the_model(
    place: Path, tmp_path: Path, value: str, saying: str, options: list[str]
) -> None:
    data = table_with(place, tmp_path, "area", 33, value)
    fails("predict", place / "price", data, "--out", tmp_path / "p.csv", *options, saying=saying)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv"]


@pytest.mark.parametrize(
    ("value", "saying"),
    [
        ("inf", "'inf' in row 12"),
        ("dear", "'dear' in row 12, where a finite number is needed"),
    ],
)
def test_targets_that_are_no_numbers(place: Path, tmp_path: Path, value: str, saying: str) -> None:
    data = table_with(place, tmp_path, "price", 12, value)
    fails("fit", data, "--target", "price", "--task", "regression", "--out", tmp_path / "m", saying=saying)
    assert not (tmp_path / "m").exists()


def test_classes_that_are_unknown_or_one(place: Path, tmp_path: Path) -> None:
    fails(
        "evaluate",
        place / "dear",
        table_with(place, tmp_path, "dear", 5, "perhaps"),
        saying="'perhaps' in row 5, a class that",
    )
    (tmp_path / "one.csv").write_text("x,y\n1,a\n2,a\n")
    fails(
        "fit",
        tmp_path / "one.csv",
        "--target",
        "y",
        "--out",
        tmp_path / "m",
        saying="column 'y' has 1 different value;",
    )


def test_models_that_are_none(place: Path, tmp_path: Path) -> None:
    fails(
        "predict", tmp_path, place / "new.csv", saying="has no model.json; give a folder that `varprop fit`"
    )
    for name, change, saying in (
        ("cut", lambda text: text[: len(text) // 2], "damaged"),
        ("changed", lambda text: text.replace('"Ulm"', '"Bonn"'), "checksum"),
        ("newer", lambda text: re.sub(r'"format": \d+', '"format": 99', text), "upgrade varprop"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in (place / "price").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "model.json").write_text(change((folder / "model.json").read_text()))
        fails("predict", folder, place / "new.csv", "--out", tmp_path / "p.csv", saying=saying)
    vp.save(TableModel.load(place / "price").model.elbo, tmp_path / "plain")
    fails("predict", tmp_path / "plain", place / "new.csv", saying="not of a table")


def test_places_that_cannot_be_written(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    fails(
        "fit",
        place / "train.csv",
        "--target",
        "price",
        "--out",
        tmp_path / "file",
        saying="exists; give another --out",
    )
    fails(
        "predict",
        place / "price",
        place / "new.csv",
        "--out",
        tmp_path / "file",
        saying="exists; give another --out, or --overwrite",
    )
    fails(
        "report",
        place / "price",
        place / "train.csv",
        "--out",
        tmp_path / "file" / "r.html",
        saying="is not a folder",
    )
    fails(
        "predict",
        place / "price",
        place / "new.csv",
        "--out",
        place / "price",
        "--overwrite",
        saying="is a folder",
    )
    assert (tmp_path / "file").read_text() == "kept"
    assert (
        run(
            "predict", place / "price", place / "new.csv", "--out", tmp_path / "file", "--overwrite"
        ).exit_code
        == 0
    )
    assert (tmp_path / "file").read_text().startswith("mean,")


# ------------------------------------------------------------------------------- what is recognised, and said


def fitted(data: Path, *options: object) -> Result:
    result = run("fit", data, "--epochs", 2, "--folds", 1, "--out", data.parent / "model", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_a_new_category_is_told_once(place: Path, tmp_path: Path) -> None:
    table = pd.concat([houses(100, seed=1)] * 2, ignore_index=True)
    table.loc[[32, 150], "town"] = "Rome"
    table.to_csv(tmp_path / "data.csv", index=False)
    words = ["predict", place / "price", tmp_path / "data.csv", "--out", tmp_path / "p.csv"]
    result = run(*words)
    assert result.exit_code == 0
    assert result.stderr == (
        "varprop: column 'town' has 'Rome' in row 33 and 1 more like it, which training never had; it is "
        "treated as unknown.\n"
    )
    fails(
        *words,
        "--overwrite",
        "--strict",
        saying="'Rome' in row 33 and 1 more like it, which training never had; correct it",
    )


def test_a_new_category_widens_the_prediction() -> None:
    """The weights of an indicator that training never saw stay at their prior."""
    rows = houses(200).drop(columns="dear")
    model = train(
        rows, TargetColumn.fit(rows, ["price"]), folds=1, epochs=300, hidden_layer_sizes=10, random_state=0
    )
    with pytest.warns(TableWarning, match="'Rome' in row 0 and 199 more"):
        new = model.predict(rows.assign(town="Rome"))
    assert new.epistemic.mean() > 2 * model.predict(rows).epistemic.mean()


def test_parts_are_told_together(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    houses(100).assign(town="Rome").to_csv(tmp_path / "data.csv", index=False)
    monkeypatch.setattr("varprop.table.model.chunks.__defaults__", (None, 7))
    result = run("predict", place / "price", tmp_path / "data.csv")
    assert result.stderr.count("\n") == 1
    assert "'Rome' in row 1 and 99 more like it" in result.stderr


def test_an_unusual_file_is_read_and_said(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "german.csv"
    path.write_bytes(houses(60).to_csv(index=False, sep=";", decimal=",").encode("latin-1"))
    said = f"varprop: {path} is read as a table in Latin-1, separated by semicolons, with decimal commas.\n"
    result = run("predict", place / "price", path)
    assert (result.exit_code, result.stderr) == (0, said)
    houses(60).to_csv(tmp_path / "plain.csv", index=False)
    assert result.stdout == run("predict", place / "price", tmp_path / "plain.csv").stdout
    assert fitted(path, "--target", "price", "--ignore", "dear").stderr == said


def test_columns_that_are_left_out_are_said(tmp_path: Path) -> None:
    table = houses(60).assign(nr=range(60), name=[f"n{i}" for i in range(60)], empty=None)
    table.to_csv(tmp_path / "data.csv", index=False)
    result = fitted(tmp_path / "data.csv", "--target", "price", "--holdout", 0)
    assert result.stderr == (
        "varprop: left out: 'nr' numbers the rows, 'name' text with 60 different values, 'empty' has no "
        "values.\n"
    )
    result = fitted(tmp_path / "data.csv", "--target", "price", "--keep", "nr", "--overwrite")
    assert "'nr'" not in result.stderr
    assert "nr" in TableModel.load(tmp_path / "model").types


def test_rows_without_a_target_are_left_out_and_counted(place: Path, tmp_path: Path) -> None:
    table = houses(60)
    table.loc[:9, "price"] = None
    table.to_csv(tmp_path / "data.csv", index=False)
    said = "varprop: left out: 10 of 60 rows, which have no target.\n"
    result = fitted(tmp_path / "data.csv", "--target", "price", "--ignore", "dear")
    assert result.stderr == said
    assert "50 rows" in result.stdout
    result = run("evaluate", tmp_path / "model", tmp_path / "data.csv")
    assert (result.exit_code, result.stderr) == (0, said)
    assert re.search("cases +│ 50 ", result.stdout)
    table[:5].to_csv(tmp_path / "none.csv", index=False)
    fails("evaluate", tmp_path / "model", tmp_path / "none.csv", saying="no row with a value of 'price'")


def test_a_second_target_of_the_same_name_does_not_leak(tmp_path: Path) -> None:
    rows = "".join(f"{(i * 37) % 60},{i * 0.5},{i * 0.5}\n" for i in range(60))
    (tmp_path / "data.csv").write_text("x,y,y\n" + rows)
    result = fitted(tmp_path / "data.csv", "--target", "y")
    assert "the name 'y' twice" in result.stderr
    assert list(TableModel.load(tmp_path / "model").types) == ["x"]


def test_classes_named_none_are_classes(tmp_path: Path) -> None:
    rows = "".join(f"{i * 0.37},{'None' if i % 3 else 'some'}\n" for i in range(60))
    (tmp_path / "data.csv").write_text("x,y\n" + rows)
    assert "classification, 2 classes" in fitted(tmp_path / "data.csv", "--target", "y").stdout
    assert run("predict", tmp_path / "model", tmp_path / "data.csv").stdout.startswith("class,p_None,p_some")


# ---------------------------------------------------------------------------------------------------- options


def test_several_targets(place: Path, tmp_path: Path) -> None:
    houses(200).assign(double=lambda t: 2 * t.price).to_csv(tmp_path / "data.csv", index=False)
    options = ["--target", "price", "--target", "double", "--ignore", "dear", "--epochs", 6, "--folds", 3]
    result = fitted(tmp_path / "data.csv", *options)
    assert "out of fold: double: root mean squared error" in result.stdout
    p = [
        line.split(",") for line in run("predict", tmp_path / "model", place / "new.csv").stdout.splitlines()
    ]
    assert p[0][:2] + p[0][6:8] == ["mean_price", "std_price", "mean_double", "std_double"]
    values = np.array(p[1:], dtype=float)
    assert np.corrcoef(values[:, 0], values[:, 6])[0, 1] > 0.9
    assert run("evaluate", tmp_path / "model", tmp_path / "data.csv").exit_code == 0
    fails(
        *("fit", tmp_path / "data.csv", "--target", "price", "--target", "dear", "--out", tmp_path / "m"),
        saying="column 'dear' has 'no' in row 1, where a finite number is needed",
    )


def test_the_level_and_the_identifiers_of_predictions(place: Path, tmp_path: Path) -> None:
    houses(50, seed=1).assign(nr=[f"A{i}" for i in range(50)]).to_csv(tmp_path / "data.csv", index=False)
    words = ["predict", place / "price", tmp_path / "data.csv", "--id", "nr", "--id", "town", "--level", 0.5]
    assert run(*words, "--out", tmp_path / "p.csv").exit_code == 0
    p = pd.read_csv(tmp_path / "p.csv")
    assert list(p)[:3] == ["nr", "town", "mean"]
    assert p.nr.tolist() == [f"A{i}" for i in range(50)]
    ratio = (p["upper"] - p["lower"]) / p["std"]  # of a mixture, which is normal where its members agree
    assert np.median(ratio) == pytest.approx(2 * 0.67449, rel=0.1)


@pytest.mark.filterwarnings("default::UserWarning")
def test_folds_of_few_rows_are_said_once(tmp_path: Path) -> None:
    houses(30).to_csv(tmp_path / "data.csv", index=False)
    result = fitted(tmp_path / "data.csv", "--target", "price", "--ignore", "dear", "--folds", 20)
    assert result.stderr.count("varprop: 30 rows have no more than 15 folds, not 20.\n") == 1
    assert result.stderr.count("the score is optimistic; take fewer folds.\n") == 1


def test_predictions_are_written_as_the_name_of_their_file_says(place: Path, tmp_path: Path) -> None:
    words = ["predict", place / "price", place / "new.csv", "--out"]
    for name in ("p.csv", "p.csv.gz", "p.csv.xz"):
        assert run(*words, tmp_path / name).exit_code == 0
    plain = (tmp_path / "p.csv").read_bytes()
    assert gzip.decompress((tmp_path / "p.csv.gz").read_bytes()) == plain
    assert lzma.decompress((tmp_path / "p.csv.xz").read_bytes()) == plain
    fails(*words, tmp_path / "p.parquet", saying="written as CSV, not as .parquet; end --out in .csv")


def test_a_table_may_come_from_standard_input(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("new.csv", "test.parquet"):
        from_pipe = run("predict", place / "price", "-", stdin=(place / name).read_bytes())
        assert from_pipe.stdout == run("predict", place / "price", place / name).stdout
    fails("predict", place / "price", "-", saying="stdin cannot be read as a table")
    assert not list(tmp_path.iterdir())


def test_predictions_have_no_more_digits_than_they_are_worth(place: Path) -> None:
    lines = run("predict", place / "price", place / "new.csv").stdout.splitlines()[1:]
    assert max(len(field) for line in lines for field in line.split(",")) <= 10


def test_a_baseline_stands_beside_every_score(place: Path) -> None:
    numbers = run("evaluate", place / "price", place / "test.parquet").stdout
    test, train = houses(100, seed=2).price, houses(400).price
    error = np.sqrt(np.mean((test - train.mean()) ** 2))
    assert "mean of the target" in numbers
    assert re.search(rf"root mean squared error +│ [\d.]+ +│ {error:.4g} ", numbers), numbers
    classes = run("evaluate", place / "dear", place / "test.parquet").stdout
    share = (houses(100, seed=2).dear == houses(400).dear.mode()[0]).mean()
    assert re.search(rf"accuracy +│ [\d.]+ +│ {share:.4g} ", classes), classes


def test_the_model_is_trained_on_all_rows_after_it_was_judged(tmp_path: Path) -> None:
    houses(80).to_csv(tmp_path / "data.csv", index=False)
    for refit, rows in (("--refit", 80), ("--no-refit", 40)):
        options = ["--target", "price", "--holdout", 0.5, refit, "--overwrite"]
        assert "held out: cases" in fitted(tmp_path / "data.csv", *options).stdout
        estimator = TableModel.load(tmp_path / "model").estimator
        assert estimator is not None
        assert estimator.n_seen_ == rows


def test_rare_classes_count_as_much_as_others_if_balanced(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.uniform(size=600) < 0.1
    pd.DataFrame({"x": rng.normal(size=600) + y, "y": y}).to_csv(tmp_path / "data.csv", index=False)
    share = {}
    for weight in ("none", "balanced"):
        options = ["--target", "y", "--class-weight", weight, "--epochs", 20, "--overwrite"]
        fitted(tmp_path / "data.csv", *options)
        assert (
            run("predict", tmp_path / "model", tmp_path / "data.csv", "--out", tmp_path / weight).exit_code
            == 0
        )
        share[weight] = pd.read_csv(tmp_path / weight)["p_True"].mean()
    assert share["none"] < 0.15
    assert share["balanced"] > 0.3


@pytest.mark.parametrize(
    ("target", "options", "saying"),
    [
        ("price", ["--class-weight", "balanced"], "balanced is for classes, and 'price' has numbers; leave"),
        ("dear", ["--noise", "student"], "--noise student is for numbers, and 'dear' has classes"),
    ],
)
def test_options_that_cannot_apply_are_refused(
    place: Path, tmp_path: Path, target: str, options: list[object], saying: str
) -> None:
    fails("fit", place / "train.csv", "--target", target, *options, "--out", tmp_path / "m", saying=saying)


def test_networks_of_any_size_and_number(place: Path, tmp_path: Path) -> None:
    houses(60).to_csv(tmp_path / "data.csv", index=False)
    options = (
        "--hidden",
        "8,4",
        "--replicas",
        3,
        "--prior",
        2,
        "--noise",
        "student",
        "--folds",
        2,
        "--pieces",
        0,
    )
    fitted(tmp_path / "data.csv", "--target", "price", *options)
    model = TableModel.load(tmp_path / "model").model
    assert len(model.members) == 6
    assert isinstance(model.elbo.likelihood, vp.likelihoods.StudentT)
    assert [tuple(w.shape) for name, w in model.elbo.net.named_parameters() if name.endswith(".weight")][
        1:
    ] == [
        (4, 8),
        (1, 4),
    ]
    for option, value, saying in (
        ("--hidden", "8,x", "--hidden '8,x' is no list of sizes"),
        ("--pieces", "many", "--pieces must be auto or a whole number such as 8, got 'many'"),
    ):
        given = ("--target", "price", option, value, "--out", tmp_path / "m")
        fails("fit", tmp_path / "data.csv", *given, saying=saying)


# --------------------------------------------------------------------------------------------------- extremes


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("x,y\n1.5,2.5\n")
    words = ["fit", tmp_path / "one.csv", "--target", "y", "--out", tmp_path / "m"]
    fails(*words, "--holdout", 0, saying="1 rows with a target are too few to learn from")


def test_huge_features_are_predicted_and_told(place: Path, tmp_path: Path) -> None:
    houses(10).assign(area=[1e30, math.inf] * 5).to_csv(tmp_path / "data.csv", index=False)
    result = run("predict", place / "price", tmp_path / "data.csv", "--out", tmp_path / "p.csv")
    assert "column 'area' has '1e+30' in row 1 and 9 more like it, far beyond" in result.stderr
    p = pd.read_csv(tmp_path / "p.csv")
    assert np.isfinite(p).all(axis=None)
    assert (p["std"] > 10).all()


def test_a_huge_target_is_refused(place: Path, tmp_path: Path) -> None:
    data = table_with(place, tmp_path, "price", 12, 1e30)
    words = ["fit", data, "--target", "price", "--out", tmp_path / "m"]
    fails(*words, saying="column 'price', the target, has 1e+30 in row 12")


def test_targets_that_are_all_huge_are_fine(tmp_path: Path) -> None:
    houses(60).assign(price=lambda t: 1e30 * t.price).to_csv(tmp_path / "data.csv", index=False)
    fitted(tmp_path / "data.csv", "--target", "price", "--ignore", "dear")
    result = run("predict", tmp_path / "model", tmp_path / "data.csv", "--out", tmp_path / "p.csv")
    assert result.exit_code == 0
    assert np.isfinite(pd.read_csv(tmp_path / "p.csv")).all(axis=None)


SLOW = """
import sys
from varprop.cli import main

try:
    main()
except SystemExit as done:
    assert done.code == 2
assert not {"torch", "pandas", "sklearn"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "none.csv", "--target", "y"],
        ["fit", "data.csv", "--target", "z"],
        ["predict", "none", "data.csv"],
        ["predict", "price", "data.csv"],
        ["report", "price", "new.csv"],
    ],
)
def test_a_mistake_is_told_before_anything_large_is_imported(
    place: Path, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "price").symlink_to(place / "price")
    (tmp_path / "new.csv").symlink_to(place / "new.csv")
    (tmp_path / "data.csv").write_text("x,y\n1,2\n")
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(vp.__file__).parents[1])},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("\n") == 1


def test_update_learns_new_rows(place: Path, tmp_path: Path) -> None:
    """Houses of a kind that the model has not seen, at prices of their own."""
    for target in ("price", "dear"):
        shutil.copytree(place / target, tmp_path / target)
        new, later = (houses(150, seed).assign(town="Ulm") for seed in (3, 4))
        if target == "price":
            new["price"], later["price"] = new["price"] + 4, later["price"] + 4
        for name, table in (("new", new), ("later", later)):
            table.to_csv(tmp_path / f"{name}.csv", index=False)
        models = [TableModel.load(tmp_path / target)]
        result = run("update", tmp_path / target, tmp_path / "new.csv", "--epochs", 20)
        assert result.exit_code == 0, (result.output, result.exception)
        assert re.search(r"rows used +│ 150 ", result.stdout), result.stdout
        models.append(TableModel.load(tmp_path / target))
        before, after = (model.scores(later)["log-likelihood"][0] for model in models)
        assert after > before
        shown = re.search(r"log-likelihood +│ (\S+) +│ (\S+) ", result.stdout)
        assert shown is not None
        assert float(shown[1]) == pytest.approx(models[0].scores(new)["log-likelihood"][0], rel=1e-3)
        assert float(shown[2]) == pytest.approx(models[1].scores(new)["log-likelihood"][0], rel=1e-3)
        assert models[1].estimator.n_seen_ == pytest.approx(models[0].estimator.n_seen_ + 150)
        assert models[1].estimator.get_params() == models[0].estimator.get_params()
        assert run("update", tmp_path / target, tmp_path / "later.csv", "--epochs", 1).exit_code == 0


def test_a_failing_update_leaves_the_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(place / "price", model)
    content = {path.name: path.read_bytes() for path in model.iterdir()}

    def unchanged() -> bool:
        return content == {path.name: path.read_bytes() for path in model.iterdir()}

    houses(20, 3).drop(columns="price").to_csv(tmp_path / "bare.csv", index=False)
    fails("update", model, tmp_path / "bare.csv", saying="no column 'price'")
    wrong = houses(20, 3).astype({"price": object})
    wrong.loc[4, "price"] = "dear"
    wrong.to_csv(tmp_path / "wrong.csv", index=False)
    fails("update", model, tmp_path / "wrong.csv", saying="'dear' in row 5")
    huge = houses(20, 3)
    huge.loc[4, "price"] = 1e30
    huge.to_csv(tmp_path / "huge.csv", index=False)
    fails("update", model, tmp_path / "huge.csv", saying="times the usual distance from the median")
    fails("update", tmp_path / "none", tmp_path / "huge.csv", saying="does not exist")
    houses(20, 3).to_csv(tmp_path / "new.csv", index=False)

    def broken(*args: object, **kwargs: object) -> None:
        raise FloatingPointError("fit: the loss is nan in epoch 0; check the data, lower lr, or set clip.")

    with monkeypatch.context() as patched:
        patched.setattr("varprop.training.replicas.fit", broken)
        fails("update", model, tmp_path / "new.csv", saying="the loss is nan")
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", broken)
        fails("update", model, tmp_path / "new.csv", "--epochs", 1, saying="the loss is nan")
    assert unchanged()


@pytest.mark.parametrize("name", [None, "model/weights"])
def test_a_full_disk_is_one_sentence(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    @one_sentence
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    with pytest.raises(typer.Exit):
        full()
    assert capsys.readouterr().err == f"varprop: {name + ': ' if name else ''}No space left on device.\n"
