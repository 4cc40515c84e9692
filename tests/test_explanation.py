"""What each column does to a prediction: against closed forms, against all values, and on mixtures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import varprop as vp
from varprop.inspect.attribution import units_in_use
from varprop.inspect.explanation import column_nodes, gauss_rule
from varprop.inspect.novelty import FAR
from varprop.model import Classes, Fitted, Model, Numbers, Standardise
from varprop.table.model import train
from varprop.table.target import TargetColumn


class Given(Fitted):
    """A model as it is."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def model_(self) -> Model:
        return self.model

    def description(self) -> dict[str, object]:
        return {}


def member(
    net: nn.Module, likelihood: vp.likelihoods.Likelihood | None = None, logvar: float = -5.0
) -> vp.ELBO:
    net = vp.variational(net.double(), logvar=logvar)
    return vp.ELBO(net, vp.DVI, likelihood or vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)


def network(seed: int, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, outputs))


def rows(n: int = 300, seed: int = 0) -> torch.Tensor:
    """A normal column, a skewed one, and a binary one."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    return torch.stack([z[:, 0], z[:, 1].exp(), (z[:, 2] > 1).double()], 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_linear_network_gives_the_variance_of_each_term(layers: int) -> None:
    """Var = w_j² Var[x_j], whatever the number of linear layers; diagonal moments fail with two."""
    torch.manual_seed(0)
    x = rows()
    net = nn.Linear(3, 1) if layers == 1 else nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))
    elbo = member(net, logvar=-30.0)
    weight = torch.autograd.functional.jacobian(net, x[0])[0]
    e = vp.explain(elbo, x)
    expected = weight.square() * x.var(0, correction=0)
    np.testing.assert_allclose(e.variance.mean(), expected, rtol=1e-6)
    total = vp.DVI(net, x).mean.var(correction=0)
    np.testing.assert_allclose(e.table["mean"][["x1", "x2", "x3"]], (expected / total).detach(), rtol=1e-6)
    np.testing.assert_allclose(e.effect, (weight * (x - x.mean(0))).detach(), atol=1e-6)


def test_epistemic_variance_of_a_linear_network() -> None:
    """It is Σ x_j² s_j, so that knowing x_j changes it by (x_j² - E[x_j²]) s_j."""
    x = rows()
    net = nn.Linear(3, 1)
    e = vp.explain(member(net, logvar=-3.0), x)
    of_weights = net.weight_logvar.detach().exp()
    expected = (x.square() - x.square().mean(0)) * of_weights
    np.testing.assert_allclose(e.epistemic, expected, rtol=1e-6, atol=1e-9)
    total = (x.square() * of_weights).sum(1).mean()
    np.testing.assert_allclose(
        e.table["epistemic"][["x1", "x2", "x3"]], expected.abs().mean(0) / total, rtol=1e-6
    )
    np.testing.assert_allclose(e.table["aleatoric"], 0, atol=1e-12)


MODELS = {
    "one network": Model([member(network(0))]),
    "mixture": Model([member(network(seed)) for seed in range(3)]),
    "scaled": Model(
        [member(network(0))],
        Numbers(*torch.tensor([[50.0], [10.0]], dtype=torch.float64)),
        Standardise([0.0, 1.5, 0.2], [1.0, 2.0, 0.4]),
    ),
    "heteroscedastic": Model([member(network(1, 2), vp.likelihoods.HeteroscedasticNormal())]),
    "classes": Model(
        [member(network(s, 3), vp.likelihoods.Categorical()) for s in (1, 2)], Classes(np.arange(3))
    ),
    "labels": Model([member(network(1), vp.likelihoods.Bernoulli())]),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_agrees_with_all_values_of_a_column(name: str) -> None:
    """Each row is predicted with every value that the column has in the data; no approximation is left."""
    model, x = MODELS[name], rows()
    p = model.predict(x)
    e = vp.explain(Given(model), x)
    for j, column in enumerate(("x1", "x2", "x3")):
        every = x.repeat(len(x), 1)
        every[:, j] = x[:, j].repeat_interleave(len(x))
        all_of_them = model.predict(every)
        regression = isinstance(p, vp.predictive.Regression)
        if regression:
            values, epistemic, own = all_of_them.mean, all_of_them.epistemic, p.epistemic
        else:
            values, epistemic, own = all_of_them.probs, all_of_them.mutual_information, p.mutual_information
        values = values.view(len(x), len(x), -1)
        variance = values.var(0, correction=0)
        np.testing.assert_allclose(e.variance[column].mean(), variance.sum(1).mean(), rtol=0.03)
        np.testing.assert_allclose(
            e.variance[column], variance.sum(1), rtol=0.3, atol=0.02 * variance.sum(1).max()
        )
        change = own.flatten() - epistemic.view(len(x), len(x)).mean(0)
        np.testing.assert_allclose(e.epistemic[column], change, atol=0.02 * own.max())
        shown = p.mean if regression else p.probs
        effect = shown.view(len(x), -1) - values.mean(0)
        chosen = shown.argmax(1) if name == "classes" else torch.zeros(len(x), dtype=torch.long)
        effect = effect.gather(1, chosen[:, None])[:, 0]
        np.testing.assert_allclose(e.effect[column], effect, atol=0.02 * effect.abs().max())
        total = shown.view(len(x), -1).var(0, correction=0)
        np.testing.assert_allclose(
            e.table.loc[column, "mean"], variance.mean(0).sum() / total.sum(), rtol=0.03
        )


def test_a_column_drawn_from_its_normal_distribution() -> None:
    """Draws of the column and of the weights, from a network with many units that share the column."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 1))
    elbo = member(net, logvar=-8.0)
    x = torch.randn(400, 2, dtype=torch.float64)
    x[:, 0] = 0.5 + 2 * torch.special.ndtri((torch.arange(400) + 0.5) / 400)
    e = vp.explain(elbo, x[:1], background=x)
    drawn = x[:1].repeat(20_000, 1)
    drawn[:, 0] = x[:, 0].mean() + x[:, 0].std() * torch.randn(20_000, dtype=torch.float64)
    sampled = vp.DVI(net, drawn).mean.var()
    assert e.variance["x1"].item() == pytest.approx(sampled.item(), rel=0.1)
    mean = torch.stack([x[:, 0].mean(), x[0, 1]])[None]
    alone = vp.DVI(net, vp.Gaussian(mean, torch.tensor([[x[:, 0].var(), 0.0]], dtype=torch.float64)))
    # Why a single pass with a Gaussian will not do: it takes the units as independent.
    assert not 0.5 < alone.var.item() / sampled.item() < 2


@pytest.mark.parametrize("values", ["normal", "skewed", "binary", "constant", "outlier"])
def test_the_rule_has_the_moments_of_the_values(values: str) -> None:
    x = np.random.default_rng(0).normal(size=500)
    x = {
        "normal": x,
        "skewed": np.exp(2 * x),
        "binary": (x > 1).astype(float),
        "constant": np.full(9, 3.0),
        "outlier": np.append(x, 1e9),
    }[values]
    nodes, weights = gauss_rule(x, 6)
    assert len(nodes) <= 6
    assert weights.min() >= 0
    assert x.min() - 1e-9 * np.ptp(x) <= nodes.min()
    assert nodes.max() <= x.max() + 1e-9 * np.ptp(x)
    scale = np.abs(x).max()
    for power in range(6):
        assert weights @ (nodes / scale) ** power == pytest.approx(np.mean((x / scale) ** power), rel=1e-6)


@pytest.mark.parametrize("kind", ["numbers", "words", "truth values", "many words"])
def test_the_values_of_a_column_keep_their_shares(kind: str) -> None:
    column = {
        "numbers": pd.Series([1.0, 1.0, 4.0, np.nan, np.nan]),
        "words": pd.Series(["a", "a", "b", None, None], dtype=object),
        "truth values": pd.Series([True, True, False, False, False]),
        "many words": pd.Series([f"{i:03}" for i in range(200)]),
    }[kind]
    values, weights = column_nodes(column, categorical=False)
    shares = column.value_counts(normalize=True, dropna=False)
    if kind == "many words":
        assert len(values) == 20
        assert values.iloc[0] == "005"
        shares = pd.Series(1 / 20, values)
    for value, weight in zip(values, weights.tolist(), strict=True):
        expected = shares[shares.index.isna()].sum() if pd.isna(value) else shares[value]
        assert weight == pytest.approx(expected)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    town = np.array(["Ulm", "Bonn", "Köln"], dtype=object)[rng.choice(3, 300, p=[0.5, 0.47, 0.03])]
    area = rng.normal(100, 20, 300)
    area[::17] = np.nan
    return pd.DataFrame(
        {
            "town": town,
            "idle": rng.normal(size=300),
            "area": area,
            "price": 3.0 * (town == "Ulm") + np.nan_to_num(area, nan=100.0) / 20 + rng.normal(0, 0.1, 300),
        }
    )


def test_the_columns_of_a_table(table: pd.DataFrame) -> None:
    """Categories are explained as one column, and missing numbers are values too."""
    model = train(table, TargetColumn(["price"]), epochs=40, random_state=0)
    e = vp.explain(model, table)
    assert set(e.table.index) == {"town", "idle", "area"}
    assert e.table.index[2] == "idle"
    assert e.table["mean"]["town"] == pytest.approx(2.25 / 3.2, rel=0.15)
    assert e.table["mean"]["idle"] < 0.01
    assert e.effect["town"][(table["town"] == "Ulm").to_numpy()].mean() == pytest.approx(
        3 * (table["town"] != "Ulm").mean(), rel=0.05
    )
    assert list(vp.explain(model, table, columns=["area"]).table.index) == ["area"]
    assert e.unlike is not None
    assert not e.unlike["far"].any()  # a town of 3 % of the rows is known
    far = table.assign(area=table["area"].where(table.index != 7, 300.0))
    unlike = vp.explain(model, far, columns=["idle"]).unlike
    assert unlike is not None
    assert unlike.index[unlike["far"]].tolist() == [7]
    assert unlike["column"][7] == "area"
    assert unlike["distance"][7] > FAR
    assert "1 of 300 rows" in str(vp.explain(model, far))


def test_the_training_mean_is_not_far_and_an_indicator_never_set_is() -> None:
    scales = Standardise([5.0, 0.01, 0.0], [2.0, np.sqrt(0.01 * 0.99), 1.0])
    model = Given(Model([member(network(0))], standardise=scales))
    x = np.array([[5.0, 0, 0], [15.1, 0, 0], [5.0, 1, 0], [5.0, 0.5, 0], [5.0, 0, 1], [-4.9, 0, 0]])
    unlike = vp.explain(model, x).unlike
    assert unlike is not None
    assert unlike["far"].tolist() == [False, True, False, False, True, False]
    assert unlike["column"].tolist() == ["", "x1", "", "", "x3", ""]
    assert unlike["distance"][3] == pytest.approx(0.49 / np.sqrt(0.0099))
    assert vp.explain(member(network(0)), x).unlike is None


def test_units_in_use_by_hand() -> None:
    net = vp.variational(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), logvar=0.0)
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([[0.9, 1.1, 0.0, 0.5], [0.0, 0.0, -2.0, 0.5]]))
    assert units_in_use(net) == {"2": (2, 4)}
    assert vp.explain(member_of(net), torch.randn(5, 2)).units == [{"2": (2, 4)}]
    assert units_in_use(nn.Linear(2, 1)) == {}


def member_of(net: nn.Module) -> vp.ELBO:
    likelihood = vp.likelihoods.Categorical()
    return vp.ELBO(net, vp.DVI, likelihood, vp.priors.Normal(), n_data=9)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(0, 3), {}, "there are no rows"),
        (torch.zeros(4, 3), {"columns": ["z"]}, "there is no column 'z'; there are x1, x2, x3"),
        (torch.zeros(4, 1, 3), {}, r"needs rows and columns, got the shape \(4, 1, 3\)"),
    ],
)
def test_mistakes_are_named(x: torch.Tensor, options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vp.explain(member(network(0)), x, **options)


def test_what_cannot_be_explained_is_named() -> None:
    class Poisson(vp.likelihoods.Likelihood):
        def log_prob(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return y * f - f.exp()

    with pytest.raises(TypeError, match="of numbers or classes, got LatentPredictive"):
        vp.explain(member(network(0), Poisson()), rows())
