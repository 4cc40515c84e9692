"""The command line: predictions from a table; every failure is one sentence and exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import varprop as vp
from varprop.cli import app
from varprop.table.target import TargetColumn, guess_task
from varprop.table.task import Task
from varprop.table.model import TableModel


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
            30,
            "--out",
            place / target,
        )
        assert result.exit_code == 0, (result.output, result.exception)
        assert "held out" in result.stdout
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
    np.testing.assert_allclose(p["upper"] - p["lower"], 2 * 1.6449 * p["std"], rtol=1e-3)
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
    np.testing.assert_allclose(
        *(np.array([row.split(",") for row in text.split()[1:]], float) for text in (whole, parts)), rtol=1e-4
    )


def test_targets_far_from_zero_keep_their_digits(place: Path, tmp_path: Path) -> None:
    """Seconds since 1970, which single precision rounds to two minutes."""
    table = houses(400)
    table["time"] = (1.7e9 + 10 * table.price).round().astype("int64")
    table.drop(columns=["price", "dear"]).to_csv(tmp_path / "times.csv", index=False)
    fitted = run(
        "fit", tmp_path / "times.csv", "--target", "time", "--epochs", 30, "--out", tmp_path / "model"
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
    model = TableModel.load(place / "price")
    assert model.types == {"area": "float64", "rooms": "float64", "town": "str"}
    assert len(model.history) == 30


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
    (tmp_path / "latin.csv").write_bytes("area,town,rooms\n1,Köln,2\n".encode("latin-1"))
    fails(
        "predict",
        place / "price",
        tmp_path / "latin.csv",
        "--out",
        tmp_path / "p.csv",
        saying="not UTF-8 text (byte 0xf6",
    )
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
    (tmp_path / "semicolons.csv").write_text("area;price\n1;2\n")
    words = ["fit", tmp_path / "semicolons.csv", "--target", "price", "--out", tmp_path / "m"]
    fails(*words, saying="it has 'area;price' (separated by semicolons?")
    pd.read_csv(place / "new.csv").drop(columns="town").to_csv(tmp_path / "less.csv")
    fails("predict", place / "price", tmp_path / "less.csv", saying="less.csv has no column 'town'")


@pytest.mark.parametrize(
    ("column", "value", "saying"),
    [
        ("area", "large", "column 'area' has 'large' in row 33, where a finite number is needed"),
        ("area", "inf", "column 'area' has 'inf' in row 33"),
        (
            "town",
            "Rome",
            "column 'town' has 'Rome' in row 33, a category that the model was not trained with",
        ),
    ],
)
def test_values_that_do_not_fit_the_model(
    place: Path, tmp_path: Path, column: str, value: str, saying: str
) -> None:
    data = table_with(place, tmp_path, column, 33, value)
    fails("predict", place / "price", data, "--out", tmp_path / "p.csv", saying=saying)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv"]


@pytest.mark.parametrize(
    ("value", "saying"),
    [
        ("", "has no value in row 12"),
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
        saying="column 'y' has 1 different values",
    )


def test_models_that_are_none(place: Path, tmp_path: Path) -> None:
    fails("predict", tmp_path, place / "new.csv", saying="model.json")
    for name, change, saying in (
        ("cut", lambda text: text[: len(text) // 2], "damaged"),
        ("changed", lambda text: text.replace('"town"', '"city"'), "checksum"),
        ("newer", lambda text: text.replace('"format": 2', '"format": 99'), "upgrade varprop"),
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


def test_what_auto_takes_for_classes() -> None:
    assert guess_task(pd.Series(["a", "b"])) is Task.classification
    assert guess_task(pd.Series(["0", "1", "1"])) is Task.classification
    assert guess_task(pd.Series(["0.5", "1", "1"])) is Task.regression
    assert guess_task(pd.Series(range(30))) is Task.regression
    assert TargetColumn.fit(pd.Series(["10", "9", "x"], name="y")).classes == ["9", "10", "x"]


def test_a_word_in_a_column_of_numbers_does_not_make_them_classes() -> None:
    column = pd.Series([*(f"{i}.5" for i in range(20)), "unknown"], name="price", index=range(1, 22))
    with pytest.raises(ValueError, match="'price', the target, has numbers, but 'unknown' in row 21"):
        TargetColumn.fit(column)
    assert len(TargetColumn.fit(column, Task.classification).classes or ()) == 21
