"""Exported graphs: they give what the model gives, at any number of rows, and draw nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special
from torch import Tensor, nn

import varprop as vp
from varprop.io.program import OUTPUTS
from varprop.predictive import Predictive
from varprop.table.messages import TableWarning
from varprop.table.model import TableModel

from . import shell
from .networks import ResNet

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'varprop[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'varprop[onnx]'")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'varprop[onnx]'")

RANDOM = (
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


def mlp(outputs: int, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 20), activation or nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, outputs))


def strided() -> nn.Sequential:
    """A small LeNet."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, 2), nn.ReLU(), nn.Conv2d(4, 6, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)
    )


def pooled() -> nn.Sequential:
    """A convolution, and maxima over windows."""
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(128, 10))


def objective(net: nn.Module, method: vp.Method, likelihood: vp.likelihoods.Likelihood) -> vp.ELBO:
    torch.manual_seed(0)
    return vp.ELBO(vp.variational(net, logvar=-4.0), method, likelihood, vp.priors.Normal(), n_data=1)


def session(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(path: Path, x: Any) -> dict[str, np.ndarray]:
    graph = session(path)
    names = [output.name for output in graph.get_outputs()]
    return dict(zip(names, graph.run(None, {"x": np.asarray(x)}), strict=True))


def outputs(p: Predictive, kind: type[Predictive]) -> dict[str, Any]:
    return {name: attrgetter(attribute)(p) for name, attribute in OUTPUTS[kind].items()}


def assert_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        value = np.asarray(value)
        # An entry may be zero. The unit of a class's outputs is one: mutual information is a difference of
        # entropies.
        unit = 1.0 if "entropy" in expected else np.abs(value).max(0)
        error = np.abs(np.asarray(got[name]) - value) - tolerance * np.abs(value)
        assert (error <= tolerance * unit).all(), f"{name}: {(error / unit).max():.2g}"


Poisson = type("Poisson", (vp.likelihoods.Likelihood,), {"log_prob": lambda self, f, y: y * f - f.exp()})
CASES = {
    "normal": (mlp(2), vp.VBP, vp.likelihoods.Normal(3.0, outputs=2), vp.predictive.Regression),
    "normal-dvi": (mlp(1), vp.DVI, vp.likelihoods.Normal(3.0), vp.predictive.Regression),
    "heteroscedastic": (mlp(4), vp.VBP, vp.likelihoods.HeteroscedasticNormal(), vp.predictive.Regression),
    "heteroscedastic-dvi": (
        mlp(2, nn.Tanh()),
        vp.DVI,
        vp.likelihoods.HeteroscedasticNormal(),
        vp.predictive.Regression,
    ),
    "deterministic": (mlp(1), vp.DETERMINISTIC, vp.likelihoods.Normal(3.0), vp.predictive.Regression),
    "slope": (mlp(1, nn.LeakyReLU(0.1)), vp.vbp(10.0), vp.likelihoods.Normal(3.0), vp.predictive.Regression),
    "anchored": (mlp(1), vp.CVBP, vp.likelihoods.Normal(3.0), vp.predictive.Regression),
    "classes": (mlp(3), vp.VBP, vp.likelihoods.Categorical(), vp.predictive.ClassPredictive),
    "labels": (mlp(3), vp.DVI, vp.likelihoods.MultiLabel(), vp.predictive.LabelPredictive),
    "own": (mlp(1), vp.VBP, Poisson(), vp.predictive.LatentPredictive),
}
IMAGES = {
    "strided": (strided(), vp.VBP, "plugin"),
    "strided-dvi": (strided(), vp.DVI, "delta"),
    "pooled": (pooled(), vp.VBP, "mackay"),
    "pooled-dvi": (pooled(), vp.DVI, "delta"),
}


def check(elbo: vp.ELBO, x: Tensor, kind: type[Predictive], path: Path) -> None:
    """The program and the file agree with the model, and nothing in them is random."""
    expected = outputs(elbo.eval().predict(x), kind)
    elbo.train()
    program = vp.export(elbo, x[:1])
    assert elbo.training
    assert_same(program.module()(x), expected)
    vp.export_onnx(elbo, path, x[:1])
    assert_same(run(path, x), expected)
    assert_same(run(path, x[:1]), {name: value[:1] for name, value in expected.items()})
    written = onnx.load(path)
    assert not {node.op_type for node in written.graph.node} & set(RANDOM)
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", 20)]
    assert written.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"


@pytest.mark.parametrize("case", CASES)
def test_perceptrons(case: str, tmp_path: Path) -> None:
    net, method, likelihood, kind = CASES[case]
    check(objective(net, method, likelihood), 2 * torch.randn(40, 3), kind, tmp_path / "model.onnx")


@pytest.mark.parametrize("case", IMAGES)
def test_images(case: str, tmp_path: Path) -> None:
    net, method, approximation = IMAGES[case]
    elbo = objective(net, method, vp.likelihoods.Categorical(approximation))  # type: ignore[arg-type]
    check(elbo, torch.randn(5, 1, 20, 20), vp.predictive.ClassPredictive, tmp_path / "model.onnx")


def test_a_residual_network_with_its_own_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ResNet(width=2, depths=(1, 1), classes=3)
    net(torch.randn(8, 3, 16, 16))  # the statistics of batch normalisation move away from zero and one
    elbo = objective(net.eval(), vp.VBP, vp.likelihoods.Categorical("delta"))
    check(elbo, torch.randn(3, 3, 16, 16), vp.predictive.ClassPredictive, tmp_path / "model.onnx")


# ------------------------------------------------------------------------------------ preprocessing folded in


def data(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets whose offsets are large beside their scales."""
    random = np.random.default_rng(0)
    X = np.array([2000.0, -3e4, 0.0]) + random.normal(size=(rows, 3)) * [5.0, 100.0, 1e-3]
    return X, 1e4 + 3 * (X[:, 0] - 2000) + random.normal(size=rows)


@pytest.mark.parametrize(
    ("outputs", "options"),
    [
        (1, {"folds": 1}),
        (2, {"folds": 2, "noise": "constant"}),
        (1, {"folds": 1, "noise": "heteroscedastic"}),
        (2, {"folds": 1, "noise": "student", "method": "vbp"}),
        (1, {"folds": 2, "noise": "constant", "log_target": True}),
    ],
    ids=str,
)
def test_a_regressor_takes_raw_features_and_predicts_in_its_own_units(
    outputs: int, options: dict[str, Any], tmp_path: Path
) -> None:
    X, y = data()
    y = y if outputs == 1 else np.stack([y, 1e-3 * X[:, 1] ** 2], 1)
    X = X.astype(np.float32).astype(np.float64)  # exactly what the graph will be given
    model = vp.BayesianMLPRegressor(8, epochs=3, batch_size=60, random_state=0, **options).fit(X, y)
    vp.export_onnx(model, tmp_path / "model.onnx")
    mean, std = model.predict(X, return_std=True)
    parts = model.predict_uncertainty(X)
    expected = {"mean": mean, "variance": std**2, "epistemic": parts.epistemic, "aleatoric": parts.aleatoric}
    got = run(tmp_path / "model.onnx", X.astype(np.float32))
    assert_same(got, {name: value.reshape(len(X), outputs) for name, value in expected.items()})
    spread = np.abs(got["mean"].reshape(y.shape) - mean).max(0) / y.std(0)
    assert (spread < 2e-4).all()  # single precision at an offset of thousands of standard deviations


def test_a_classifier(tmp_path: Path) -> None:
    X, y = data()
    table = pd.DataFrame(X.astype(np.float32), columns=["a", "b", "c"])
    labels = np.where(y > np.median(y), "high", "low")
    model = vp.BayesianMLPClassifier(8, epochs=3, folds=2, random_state=0).fit(table, labels)
    for member in model.members_:
        member.likelihood = vp.likelihoods.Categorical(
            "delta"
        )  # a tenth of the graph of the quadrature, which has its case above
    vp.export_onnx(model, tmp_path / "model.onnx")
    parts = model.predict_uncertainty(table)
    expected = {
        "probabilities": model.predict_proba(table),
        "entropy": parts.epistemic + parts.aleatoric,
        "mutual_information": parts.epistemic,
    }
    assert_same(run(tmp_path / "model.onnx", table.to_numpy()), expected)
    assert about(tmp_path / "model.onnx") == {"columns": ["a", "b", "c"], "classes": ["high", "low"]}


def about(path: Path) -> dict[str, Any]:
    return {
        name: json.loads(text) for name, text in session(path).get_modelmeta().custom_metadata_map.items()
    }


# ------------------------------------------------------------------------------------------- the command line


def houses(rows: int) -> pd.DataFrame:
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "area": random.gamma(4.0, 25.0, rows),
            "wealth": np.exp(3 * random.normal(size=rows)),
            "sold": (pd.Timestamp("2020-01-01") + pd.to_timedelta(random.integers(0, 999, rows), "D")).astype(
                str
            ),
            "town": random.choice(["Ulm", "Köln"], rows),
        }
    )
    table["price"] = 1000 + 5 * table.area + 300.0 * (table.town == "Ulm")
    table["dear"] = np.where(table.price > 1600, "yes", "no")
    table.loc[::5, "area"] = None
    table.loc[::7, "town"] = None
    return table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export")
    houses(80).to_csv(place / "houses.csv", index=False)
    for target, other, method in (
        ("price", "dear", "vbp"),
        ("dear", "price", "deterministic"),
        ("sampled", "dear", "local_reparam"),
    ):
        column = "price" if target == "sampled" else target
        options = [
            "--target",
            column,
            "--ignore",
            other,
            "--method",
            method,
            "--epochs",
            2,
            "--out",
            place / target,
        ]
        assert shell.run("fit", place / "houses.csv", *options).exit_code == 0
    return place


@pytest.fixture(scope="module")
def written(place: Path) -> dict[str, Path]:
    """The files of two models, one written by another process, as a user would, and one by this process."""
    files = {name: place / f"{name}.onnx" for name in ("price", "dear")}
    words = [
        sys.executable,
        "-c",
        "from varprop.cli import main; main()",
        "export",
        place / "price",
        "--out",
        files["price"],
    ]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert process.stderr == ""
    done = shell.run("export", place / "dear", "--out", files["dear"])
    assert done.exit_code == 0, done.output
    assert "mean, variance, epistemic, aleatoric" in process.stdout
    assert all("0 (missing), 1 Köln, 2 Ulm" in output for output in (process.stdout, done.stdout))
    return files


@pytest.mark.parametrize("target", ["price", "dear"])
def test_the_command_writes_what_takes_rows_as_they_are(
    place: Path, written: dict[str, Path], target: str
) -> None:
    columns = about(written[target])["columns"]
    assert columns == [
        {"name": "area"},
        {"name": "wealth"},
        {"name": "sold", "unit": "days since 1970-01-01"},
        {"name": "town", "categories": ["", "Köln", "Ulm"]},
    ]
    table = houses(80)
    code = table.town.map({"Köln": 1.0, "Ulm": 2.0})
    days = (pd.to_datetime(table.sold) - pd.Timestamp("1970-01-01")).dt.days
    rows = np.stack([table.area, table.wealth, days, code], 1).astype(np.float32)
    got = run(written[target], rows)
    expected = TableModel.load(place / target).predict(table)
    assert_same(
        got,
        outputs(expected, vp.predictive.Regression if target == "price" else vp.predictive.ClassPredictive),
    )


def test_any_other_place_is_another_category(place: Path, written: dict[str, Path]) -> None:
    known = [100.0, 1.0, 18_300.0]
    got = run(written["price"], np.array([[*known, place] for place in (1.0, 3.0, 0.5, -1.0)], np.float32))
    row = houses(1).assign(area=100.0, wealth=1.0, sold="2020-02-08", town="Rome")
    with pytest.warns(TableWarning, match="'Rome' in row 0"):
        expected = TableModel.load(place / "price").predict(row).mean.item()
    assert got["mean"].ravel()[1:].tolist() == pytest.approx([expected] * 3, rel=1e-4)
    assert got["mean"][0].item() != pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_exported_is_one_sentence(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, saying: str) -> None:
        done = shell.run("export", *arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("varprop: ")
        assert done.stderr.count("\n") == 1
        assert saying in done.stderr

    fails(place / "sampled", "--out", tmp_path / "m.onnx", saying="LOCAL_REPARAM predicts by sampling")
    fails(place / "none", "--out", tmp_path / "m.onnx", saying="does not exist")
    (tmp_path / "taken.onnx").touch()
    fails(place / "price", "--out", tmp_path / "taken.onnx", saying="--overwrite")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fails(
        place / "price",
        "--out",
        tmp_path / "m.onnx",
        saying="needs onnxscript; install it with `pip install 'varprop[onnx]'`",
    )
    assert not (tmp_path / "m.onnx").exists()


# --------------------------------------------------------------------------------------------------- refusals


def test_refusals(tmp_path: Path) -> None:
    def elbo(method: vp.Method = vp.VBP, likelihood: vp.likelihoods.Likelihood | None = None) -> vp.ELBO:
        return objective(mlp(2), method, likelihood or vp.likelihoods.Normal(outputs=2))

    x = torch.zeros(1, 3)
    with_correlations = elbo(vp.DVI)
    with_correlations.moments = "correlated"
    with pytest.raises(ValueError, match=r'elbo.moments = "independent"'):
        vp.export(with_correlations, x)
    with pytest.raises(ValueError, match="LOCAL_REPARAM predicts by sampling"):
        vp.export(elbo(vp.LOCAL_REPARAM), x)
    with pytest.raises(ValueError, match=r"samples.*predicts by sampling"):
        vp.export(elbo(likelihood=vp.likelihoods.Categorical("samples")), x)
    with pytest.raises(ValueError, match="give an example input"):
        vp.export(elbo())
    with pytest.raises(ValueError, match=r"the example has shape \(0, 3\)"):
        vp.export(elbo(), x[:0])
    with pytest.raises(TypeError, match="must be a tensor or an array, got Gaussian"):
        vp.export(elbo(), vp.Gaussian(x, x))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Sequential is neither"):
        vp.export(mlp(2), x)
    X, y = data(20)
    with pytest.raises(ValueError, match=r"the model takes \(rows, 3\)"):
        vp.export(vp.BayesianMLPRegressor(4, folds=1, epochs=1).fit(X, y), X[:, :2])
    noisy = type("Noisy", (nn.Module,), {"forward": lambda self, x: x + torch.randn_like(x)})
    method = vp.DETERMINISTIC
    with pytest.raises(ValueError, match=r"draws random numbers \(aten.randn_like.default\)"):
        vp.export(
            vp.ELBO(
                nn.Sequential(mlp(2), noisy()),
                method,
                vp.likelihoods.Normal(outputs=2),
                vp.priors.Normal(),
                n_data=1,
            ),
            x,
        )


def test_an_export_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        vp.export_onnx(objective(mlp(1), vp.VBP, vp.likelihoods.Normal()), path, torch.zeros(1, 3))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------------ tails


TAILS = ("erfc", "ndtr", "log_ndtr", "log1p", "erfc")


class Tails(nn.Module):
    """Every function that ONNX has no exact one for, each of a column of its own; the last in place."""

    def forward(self, x: Tensor) -> Tensor:
        *columns, last = x.split(1, 1)
        return torch.cat(
            [
                *(getattr(torch.special, name)(t) for name, t in zip(TAILS, columns, strict=False)),
                last.clone().erfc_(),
            ],
            1,
        )


def test_the_tails_of_the_normal_keep_their_precision(tmp_path: Path) -> None:
    """Through the file: ONNX's own way, 1 - erf, is off by 0.1 % at 3 and by everything at 5."""
    path = tmp_path / "model.onnx"
    elbo = vp.ELBO(Tails(), vp.DETERMINISTIC, vp.likelihoods.Normal(outputs=5), vp.priors.Normal(), n_data=1)
    vp.export_onnx(elbo, path, torch.zeros(1, 5))
    x = np.stack(
        [np.linspace(-0.9 if name == "log1p" else -9, 9, 2001, dtype=np.float32) for name in TAILS], 1
    )
    for name, got, column in zip(TAILS, run(path, x)["mean"].T, x.T, strict=True):
        np.testing.assert_allclose(
            got, getattr(special, name)(column.astype(np.float64)), rtol=1e-5, err_msg=name
        )


def test_a_graph_in_double_precision(tmp_path: Path) -> None:
    elbo = objective(mlp(2), vp.DVI, vp.likelihoods.Normal(3.0, outputs=2)).eval()
    x = torch.randn(30, 3, dtype=torch.float64)
    vp.export_onnx(elbo, tmp_path / "model.onnx", x)
    assert_same(
        run(tmp_path / "model.onnx", x), outputs(elbo.double().predict(x), vp.predictive.Regression), 1e-8
    )
