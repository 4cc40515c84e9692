"""The report: one self-contained page that escapes its data and opens in a browser without complaint."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import varprop as vp
from varprop.inspect import attribution
from varprop.predictive import ClassPredictive, NormalPredictive, concatenate, mixture, rescaled
from varprop.reporting.cases import as_png
from varprop.reporting.drivers import units_in_words
from varprop.reporting.figures import histogram, layers, learning_curves
from varprop.reporting.figures_classes import Classes, coverage
from varprop.reporting.figures_regression import Numbers
from varprop.reporting.tables import by_class, by_size
from varprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from varprop.table import model as tabular
from varprop.table.target import TargetColumn

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
        self.handlers: list[str] = []
        self._figure = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
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


ATTACKS = [
    EVIL,
    '"><img src=x onerror=alert(1)>',
    "</title></style></svg><svg onload=alert(1)>",
    "-->]]><a href=javascript:alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
]


@pytest.mark.parametrize("classes", [False, True])
def test_nothing_in_a_table_becomes_markup(tmp_path: Path, classes: bool) -> None:
    """Neither the names of columns nor categories, classes, words in numbers, or the target's name."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({f"{attack} {i}": rng.normal(size=60) for i, attack in enumerate(ATTACKS)})
    table[ATTACKS[1]] = np.array(ATTACKS)[np.arange(60) % 5]
    target = ATTACKS[2]
    table[target] = np.array(ATTACKS)[np.arange(60) // 3 % 3] if classes else rng.normal(size=60)
    column = TargetColumn.fit(table, [target])
    options: dict[str, Any] = {"hidden_layer_sizes": (3,), "folds": 1, "epochs": 2, "random_state": 0}
    model = tabular.train(table, column, **options)
    path = vp.report(model, table[list(model.types)], model.truth(table), tmp_path / "report.html")
    page = Page(path)
    assert page.loads == []
    assert page.handlers == []
    assert not {"script", "img", "iframe", "object", "embed", "base"} & {*page.tags}
    assert "&lt;script&gt;" in path.read_text()
    assert "49{%" not in path.read_text()


def test_class_names_are_escaped_inside_the_figures(tmp_path: Path) -> None:
    names = [EVIL, "$\\frac{", "a & b"]
    rng = np.random.default_rng(0)
    table = pd.DataFrame({EVIL: rng.normal(size=90), "b": rng.normal(size=90)})
    model = BayesianMLPClassifier(hidden_layer_sizes=(4,), folds=1, epochs=2, random_state=0).fit(
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
        hidden_layer_sizes=(4,), folds=2, noise="constant", epochs=2, random_state=0
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
        model = BayesianMLPRegressor((4,), folds=1, epochs=5, random_state=0).fit(x, y + offset)
        pages.append(vp.report(model, x, y + offset, tmp_path / "r.html").read_text())
    near, far = (re.findall(r"<dt>[^<]*</dt><dd>([^<]*)</dd>", page) for page in pages)
    assert len(near) == 8
    np.testing.assert_allclose([float(value) for value in far], [float(value) for value in near], rtol=2e-3)
    assert "<td" in pages[1]
    assert "1.7e+09" not in pages[1].partition('id="cases"')[2]


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on prices in the tens of thousands, one of whose rows is far away."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(150, 3)), columns=["area", "age", "idle"])
    price = 50_000 + 12_000 * table["area"] - 4000 * table["age"] + rng.normal(0, 1000, 150)
    model = BayesianMLPRegressor((8,), folds=1, epochs=40, random_state=0).fit(table, price)
    table.loc[4, "age"] = 9.0
    return vp.report(model, table, price, tmp_path_factory.mktemp("report") / "r.html").read_text()


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def rows_under(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a title, its head first."""
    table = page.partition(f"<h3>{title}</h3>")[2].partition("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in table.split("<tr")[1:]]


def test_numbers_are_plain(prices: str) -> None:
    words = re.sub(r"<svg.*?</svg>", "", prices.partition("<body>")[2], flags=re.DOTALL)
    assert not re.findall(r"\d(?:\.\d+)?e[+-]?\d+", words)
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", section(prices, "uncertainty"))
    assert any(re.fullmatch(r"[\d,]+,000", tick) for tick in ticks)
    assert not any("e" in tick for tick in ticks if re.fullmatch(r"[\d.e+]+", tick))


def test_what_drives_it_is_in_order(prices: str) -> None:
    alt = re.search(r'aria-label="Share of the mean&#39;s variance by column: ([^"]*)"', prices)
    assert alt is not None
    assert [part.split()[0] for part in alt[1].split(", ")] == ["area", "age", "idle"]


def test_rows_unlike_the_training_data_are_told(prices: str) -> None:
    warning = re.search(r'class="warning"[^>]*>([^<]*)<', prices)
    assert warning is not None
    assert "1 row is unlike the training data (0.7% of 150): a number more than 5" in warning[1]
    assert ", in age." in warning[1]
    head, row = rows_under(prices, "Unlike the training data")
    assert row[0] == "5"
    assert row[head.index("column")] == "age"
    assert 7 < float(row[head.index("distance")]) < 12


def test_the_largest_errors_come_first(prices: str) -> None:
    head, *rows = rows_under(prices, "Largest errors")
    errors = [abs(float(row[head.index("error")].replace(",", ""))) for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert rows[0][0] == "5"


def test_coverage_by_size_of_the_prediction(prices: str) -> None:
    head, *rows = rows_under(prices, "By size of the prediction")
    assert [row[head.index("targets")] for row in rows] == ["30"] * 5
    lowest = [float(row[0].split()[0].replace(",", "")) for row in rows]
    assert lowest == sorted(lowest)


def test_a_fifth_that_is_too_narrow_is_seen() -> None:
    y = np.linspace(0, 1, 100)
    off = np.where(y > 0.8, 9.0, 0.0)
    n = Numbers("", y, y + off, y + off - 1, y + off + 1, *np.ones((3, 100)))
    (group,) = by_size(n)
    shown = [dict(row.cells)["coverage of 90 % intervals"] for row in group.rows]
    assert shown == ["100%"] * 4 + ["0%"]
    assert by_size(replace(n, **{name: value[:9] for name, value in vars(n).items() if name != "unit"})) == []


def test_rare_classes_have_their_base_rate_recall_and_auc(tmp_path: Path) -> None:
    y = np.array([0] * 90 + [1] * 10)
    positive = np.concatenate([np.full(80, 0.1), np.full(10, 0.6), np.full(6, 0.7), np.full(4, 0.2)])
    (group,) = by_class(Classes(y, np.stack([1 - positive, positive], 1), np.zeros(100), ["no", "yes"]))
    no, yes = (dict(row.cells) for row in group.rows)
    assert (yes["class"], yes["base rate"], yes["recall"], yes["precision"]) == (
        "yes",
        "10.0%",
        "60.0%",
        "37.5%",
    )
    assert yes["AUC"] == f"{(6 * 90 + 4 * 80) / 900:.3f}"
    assert no["recall"] == "88.9%"
    (none,) = by_class(Classes(y[:90], np.full((90, 2), 0.5), np.zeros(90), ["no", "yes"]))
    assert dict(none.rows[1].cells)["recall"] == ""
    x = np.random.default_rng(0).normal(size=(100, 2)) + y[:, None]
    model = BayesianMLPClassifier(hidden_layer_sizes=(4,), folds=1, epochs=3, random_state=0).fit(x, y)
    text = vp.report(model, x, y, tmp_path / "r.html").read_text()
    assert "the commonest class: 0.9<" in text
    assert rows_under(text, "By class")[2][1:3] == ["10", "10.0%"]


def test_layers_by_name_and_shape_and_units_in_use(prices: str) -> None:
    assert "0: Linear 3 → 8" in section(prices, "layers")
    assert re.search(r"<th>hidden units in use</th><td>[1-8] of 8 ", prices)
    assert units_in_words([{"2": (3, 50)}, {"2": (5, 50)}]).startswith("3, 5 of 50 in the 2 networks")
    assert units_in_words([{}]) == ""


def test_no_weight_is_dropped_from_the_signal_to_noise_plot() -> None:
    ratios = {"w": np.array([0.0, 1e-5, 1.0, 10.0])}
    (drawn,) = layers({}, ratios)
    assert "50.0% below -60 dB" in drawn.caption
    heights = histogram(np.array([-120.0, -100.0, 0.0, 20.0]), np.linspace(-60, 20, 26))
    assert heights.sum() == pytest.approx(1.0)
    assert heights[0] == pytest.approx(0.5)


def test_plots_without_content_are_left_out(tmp_path: Path) -> None:
    x = torch.randn(60, 2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    elbo = vp.ELBO(net, vp.DETERMINISTIC, vp.likelihoods.Categorical(), vp.priors.Normal(), n_data=60)
    history = pd.DataFrame(
        {"epoch": [0, 1], "loss": [2.0, 1.0], "kl": [0.0, 0.0], "validation": [np.nan] * 2}
    )
    y = (x[:, 0] > 0).long()
    page = vp.report(elbo, x, y, tmp_path / "r.html", history=history)
    drawn = set(Page(page).figures)
    assert not drawn & {"divergence", "epistemic", "snr", "shares", "drives-epistemic"}
    assert {"aleatoric", "learning", "drives-mean"} <= drawn
    assert ">validation<" not in section(page.read_text(), "learning")


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


def test_epochs_are_counted_in_whole_numbers() -> None:
    history = pd.DataFrame({"epoch": range(20), "loss": np.linspace(3, 1, 20), "kl": np.linspace(9, 5, 20)})
    for curve in learning_curves(history):
        names = re.findall(r"<text[^>]*>([^<]*)</text>", curve.svg[: curve.svg.index(">epoch<")])
        assert "15" in names
        assert not any("." in name and float(name) > 9 for name in names)
