"""The report: one self-contained page that escapes its data and opens in a browser without complaint."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import varprop as vp
from varprop.inspect import attribution
from varprop.predictive import ClassPredictive, NormalPredictive, concatenate, mixture, rescaled
from varprop.reporting.cases import as_png
from varprop.reporting.figures_classes import Classes, coverage
from varprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

EVIL = "<script>alert(1)</script>"
REGRESSION = [
    "drives-mean",
    "drives-epistemic",
    "truth",
    "reliability",
    "coverage",
    "pit",
    "error",
    "parts",
    "learning",
    "divergence",
    "shares",
    "snr",
]
CLASSES = [
    "confusion",
    "reliability",
    "coverage",
    "pit",
    "error",
    "epistemic",
    "aleatoric",
    "learning",
    "divergence",
    "shares",
    "snr",
]


def trained(
    likelihood: vp.likelihoods.Likelihood, x: torch.Tensor, y: torch.Tensor, outputs: int
) -> tuple[vp.ELBO, pd.DataFrame]:
    torch.manual_seed(0)
    net = vp.variational(
        nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 12), nn.ReLU(), nn.Linear(12, outputs))
    )
    elbo = vp.ELBO(net, vp.VBP, likelihood, vp.priors.Normal(10.0), n_data=len(x))
    return elbo, vp.fit(elbo, (x, y), epochs=4, progress=False)


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=rng)
    y = x[:, :1] + 0.3 * torch.randn(300, 1, generator=rng)
    elbo, history = trained(vp.likelihoods.Normal(), x, y, 1)
    path = tmp_path_factory.mktemp("report") / "regression.html"
    assert vp.report(elbo, x, y, path, history=history, names=[EVIL, "b & c", '"d"', "$e$"]) == path
    return path


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (200,), generator=rng)
    x = torch.randn(200, 1, 8, 8, generator=rng) + y.view(-1, 1, 1, 1)
    elbo, history = trained(vp.likelihoods.Categorical(), x, y, 3)
    return vp.report(elbo, x, y, tmp_path_factory.mktemp("report") / "classes.html", history=history)


class Page(HTMLParser):
    """What a page has: figures and their alternative texts, images, ids, and addresses it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.figures: dict[str, str] = {}
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._figure = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "figure":
            self._figure = str(given.get("id", "")).removeprefix("figure-")
        if given.get("role") == "img":
            self.figures[self._figure] = given.get("aria-label") or ""
        if tag == "img":
            self.images.append(given)
        self.loads += [
            v
            for k, v in attrs
            if k in ("src", "href", "xlink:href", "srcset") and v and not v.startswith(("#", "data:"))
        ]


@pytest.mark.parametrize(("name", "figures"), [("regression", REGRESSION), ("classes", CLASSES)])
def test_every_figure_is_there_and_nothing_is_loaded(
    name: str, figures: list[str], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    page = Page(path)
    assert sorted(page.figures) == sorted(figures)
    assert all(len(alt) > 20 for alt in page.figures.values())
    assert page.loads == []
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert path.stat().st_size < 2_000_000
    assert "url(http" not in path.read_text()


def test_names_are_escaped(regression: Path) -> None:
    text = regression.read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "b &amp; c" in text
    assert "$e$" in text


def test_class_names_are_escaped_inside_the_figures(tmp_path: Path) -> None:
    names = [EVIL, "$\\frac{", "a & b"]
    rng = np.random.default_rng(0)
    table = pd.DataFrame({EVIL: rng.normal(size=90), "b": rng.normal(size=90)})
    model = BayesianMLPClassifier(hidden_layer_sizes=(4,), epochs=2, random_state=0).fit(
        table, np.array(names)[np.arange(90) % 3]
    )
    text = vp.report(model, table, np.array(names)[np.arange(90) % 3], tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "$\\frac{" in text


def test_images_are_shown_as_images(classes: Path) -> None:
    images = Page(classes).images
    assert len(images) == 36
    assert all(
        str(image["src"]).startswith("data:image/png;base64,") and "truth" in str(image["alt"])
        for image in images
    )


def test_large_images_are_made_small() -> None:
    assert len(as_png(torch.rand(3, 500, 300))) < 25_000
    assert as_png(torch.zeros(1, 4, 4)).startswith("data:image/png")


@pytest.mark.parametrize("name", ["regression", "classes"])
def test_a_browser_shows_it_without_complaint(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is on the PATH; install the package chromium")
    path = request.getfixturevalue(name)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += [
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path}",
    ]
    done = subprocess.run(
        [browser, *flags, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    (tmp_path / "dom.html").write_text(done.stdout)
    page, shown = Page(path), Page(tmp_path / "dom.html")
    assert shown.figures == page.figures
    assert shown.tags.count("svg") == len(page.figures)
    assert shown.tags.count("path") > 10 * len(page.figures)


def test_estimators_and_several_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = np.stack([100 + 10 * x[:, 0], x[:, 1]], 1)
    model = BayesianMLPRegressor(
        hidden_layer_sizes=(4,), epochs=2, n_replicas=2, batch_size=60, random_state=0
    ).fit(x, y)
    text = vp.report(model, x, y, tmp_path / "r.html").read_text()
    assert "standard deviations of each target" in text
    assert "figure-truth" in text
    with pytest.raises(TypeError, match="Linear is neither an ELBO nor one of varprop's fitted"):
        vp.report(nn.Linear(1, 1), x, y, tmp_path / "s.html")
    with pytest.raises(ValueError, match="2 names for 3 columns"):
        vp.report(model, x, y, tmp_path / "s.html", names=["a", "b"])
    assert not (tmp_path / "s.html").exists()


def test_targets_far_from_zero_are_judged_in_double_precision(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    y = 10 * x[:, 0].astype(np.float64)
    pages = []
    for offset in (0.0, 1.7e9):
        model = BayesianMLPRegressor(hidden_layer_sizes=(4,), epochs=5, random_state=0).fit(x, y + offset)
        pages.append(vp.report(model, x, y + offset, tmp_path / "r.html").read_text())
    near, far = (re.findall(r"<dt>[^<]*</dt><dd>([^<]*)</dd>", page) for page in pages)
    assert len(near) == 8
    np.testing.assert_allclose([float(value) for value in far], [float(value) for value in near], rtol=2e-3)
    assert "<td" in pages[1]
    assert "1.7e+09" not in pages[1].partition('id="cases"')[2]


def test_other_likelihoods_have_a_report(tmp_path: Path) -> None:
    x = torch.randn(60, 2)
    for likelihood, y in (
        (vp.likelihoods.Bernoulli(), (x[:, :1] > 0).float()),
        (vp.likelihoods.HeteroscedasticNormal(), x[:, :1]),
    ):
        elbo, _ = trained(
            likelihood, x, y, 2 if isinstance(likelihood, vp.likelihoods.HeteroscedasticNormal) else 1
        )
        assert "figure-pit" in vp.report(elbo, x, y, tmp_path / "r.html").read_text()


def test_shares_of_variance_add_up_in_a_linear_network() -> None:
    net = vp.variational(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), logvar=-14.0)
    elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=10)
    shares = attribution.variance_shares(elbo, torch.randn(50, 3))
    assert sum(shares.values()) == pytest.approx(
        1.0, abs=1e-3
    )  # but for the product of two variances, which are small
    assert all(0 < share < 1 for share in shares.values())
    x = torch.randn(50, 3)
    only_last = nn.Sequential(net[1])
    with torch.no_grad():
        expected = vp.VBP(only_last, net[0](x)).var.mean() / vp.VBP(net, x).var.mean()
    assert attribution.variance_shares(elbo, x)["1"] == pytest.approx(float(expected), rel=1e-4)


def test_signal_to_noise_by_hand() -> None:
    net = vp.variational(nn.Sequential(nn.Linear(1, 1)))
    with torch.no_grad():
        net[0].weight.fill_(-3.0)
        net[0].weight_logvar.fill_(np.log(4.0))
    assert attribution.signal_to_noise(net)["0.weight"].item() == pytest.approx(1.5)


def test_coverage_of_classes_is_the_level_when_calibrated() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet([1.0, 2.0, 0.5], 40_000)
    y = (rng.random((len(probs), 1)) > probs.cumsum(1)[:, :-1]).sum(1)
    levels = np.linspace(0, 1, 11)
    assert np.abs(coverage(Classes(y, probs, np.zeros(len(y)), "abc"), levels) - levels).max() < 0.01
    sharp = np.eye(3)[y] * 0.9 + 0.1 / 3
    assert coverage(Classes(y, sharp, np.zeros(len(y)), "abc"), levels)[5] > 0.52


def test_predictions_join_and_rescale() -> None:
    parts = [NormalPredictive(*torch.rand(3, 5, 1)) for _ in range(2)]
    both = concatenate([mixture(parts), mixture(parts)])
    assert isinstance(both, vp.predictive.RegressionMixture)
    torch.testing.assert_close(both.cdf(torch.zeros(10, 1))[5:], mixture(parts).cdf(torch.zeros(5, 1)))
    moved = rescaled(mixture(parts), 3.0, 2.0)
    assert isinstance(moved, vp.predictive.RegressionMixture)
    torch.testing.assert_close(
        moved.interval(0.8)[0], mixture(parts).interval(0.8)[0] * 2 + 3, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(moved.epistemic, mixture(parts).epistemic * 4)
    joined = concatenate([ClassPredictive(torch.full((2, 2), 0.5), torch.zeros(2))] * 3)
    assert joined.probs.shape == (6, 2)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2; install it with `pip install 'varprop\[plots\]'`"):
        vp.report(None, None, None, tmp_path / "r.html")
