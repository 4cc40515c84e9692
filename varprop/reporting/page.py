"""The page of a report: how well a model predicts, how well it is calibrated, and what drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..inspect import attribution, metrics
from ..inspect.consistency import audit
from ..inspect.explanation import Explanation
from ..inspect.novelty import Rows, unlike_training
from ..io.storage import replacing
from ..model import Fitted, Model, as_model
from ..objectives import ELBO
from ..posterior import posteriors
from ..predictive import ClassPredictive, Discrete, LabelPredictive, Predictive, Regression, two_classes
from .cases import Group, extremes
from .numerals import layer_in_words, plain, tensor_in_words

if TYPE_CHECKING:
    from .figures import Figure

ROWS = 4096
"""Rows that the variance of each layer is computed on."""
AUDITED = 500
"""Rows of the audit."""


def report(
    model: ELBO | Fitted,
    x: ArrayLike | Tensor | pd.DataFrame,
    y: ArrayLike | Tensor,
    path: str | Path,
    history: pd.DataFrame | None = None,
    names: Sequence[str] | None = None,
) -> Path:
    """Write a page on how the model does on held-out data, and return its path. It needs the extra `plots`.

    :param model: an ELBO, a fitted estimator, or the model of a table.
    :param x: inputs as the model takes them; images, (cases, 1 or 3, height, width), are shown as images.
    :param history: what `fit` returned, for the learning curves; an estimator has its own.
    :param names: names of the columns of x; those of a DataFrame by default.
    """
    try:
        import jinja2

        from . import drivers, figures
    except ImportError as error:
        raise ImportError(
            f"report: needs {error.name}; install it with `pip install 'varprop[plots]'`."
        ) from error
    from .. import __version__

    t = Trial.of(as_model(model, "report"), x, y)
    shown = _shown(x, names)
    e = _explained(model, t, shown)
    unlike = None if e is None else unlike_training(Rows.of(t.model, shown))
    history = t.model.history if history is None else history
    drawn, tables = _of_predictions(t)
    drawn |= {
        "drivers": [] if e is None else drivers.drivers(e),
        "learning": figures.learning_curves(history) if history is not None and len(history) else [],
        "layers": figures.layers(*_of_weights(t)),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("varprop.reporting"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    target = t.model.target.name
    html = environment.get_template("report.html.jinja").render(
        title=f"Report on {target}" if target else "Report on a model",
        subtitle=f"{t.elbo.method.name}, judged on {len(t.y):,} cases.",
        metrics={
            name: f"{value:,}" if isinstance(value, int) else plain(value)
            for name, value in metrics.summary(t.p, t.y).items()
        },
        baselines=_baselines(t),
        warning=drivers.warning(unlike),
        sections=[
            Section(name, *words, drawn.get(name, []), tables.get(name, []))
            for name, words in SECTIONS.items()
        ],
        cases=extremes(t.p, t.y, shown, t.classes, unlike),
        facts=_facts(t),
        version=__version__,
    )
    with replacing(path) as file:
        file.write(html.encode())
    return Path(path)


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, figures and tables."""

    name: str
    title: str
    text: str
    figures: Sequence[Figure]
    tables: Sequence[Group]


SECTIONS = {
    "prediction": (
        "Prediction and truth",
        "How close the predictions are to the truth.",
    ),
    "calibration": ("Calibration", "Whether events happen as often as the predicted probabilities say."),
    "uncertainty": (
        "Uncertainty",
        "Whether errors are larger where the uncertainty is, and how much of it is epistemic.",
    ),
    "drivers": (
        "What drives it",
        "How much the predictions and their uncertainty change with each column, while the others stay as "
        "they are.",
    ),
    "learning": ("Training", "The evidence lower bound and its parts, epoch by epoch."),
    "layers": (
        "Weights",
        "Which layers the epistemic uncertainty comes from, and how certain each weight is.",
    ),
}


@dataclass(frozen=True)
class Trial:
    """A model's prediction beside the truth, both in the target's own unit."""

    model: Model
    p: Predictive
    y: Tensor
    inputs: Tensor
    """As the network takes them."""
    targets: Tensor
    """As the likelihood takes them."""

    @classmethod
    def of(cls, model: Model, x: object, y: ArrayLike | Tensor) -> Trial:
        p, truth, targets = model.predict(x), model.target.values(y), model.targets(y)
        if isinstance(p, LabelPredictive):
            p, truth = two_classes(p), truth.flatten().long()
        elif isinstance(p, Regression):
            truth = truth.view_as(p.mean).to(p.mean)
            targets = targets.view_as(p.mean).to(next(model.elbo.parameters()))
        return cls(model, p, truth, model.inputs(x), targets)

    @property
    def elbo(self) -> ELBO:
        """The first member, whose weights are shown."""
        return self.model.elbo

    @property
    def classes(self) -> Sequence[str] | None:
        if not isinstance(self.p, ClassPredictive):
            return None
        return self.model.target.classes or [str(i) for i in range(self.p.probs.shape[1])]


def _explained(model: ELBO | Fitted, t: Trial, x: Tensor | pd.DataFrame) -> Explanation | None:
    """What drives the predictions; None for data that is no table of numbers and categories."""
    from .drivers import explained

    if not isinstance(x, pd.DataFrame) or not x.columns.is_unique or t.inputs.dim() != 2:
        return None
    if not t.inputs.is_floating_point() or not isinstance(t.p, Regression | Discrete):
        return None
    return explained(model, x)


def _of_weights(t: Trial) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Share of the variance of each layer, and signal-to-noise of each tensor, by their names and shapes."""
    net = t.elbo.net
    shares = attribution.variance_shares(t.elbo, t.inputs[:ROWS])
    ratios = attribution.signal_to_noise(net)
    return (
        {tensor_in_words(net, name): share for name, share in shares.items()},
        {tensor_in_words(net, name): ratio.numpy(force=True) for name, ratio in ratios.items()},
    )


def _baselines(t: Trial) -> dict[str, str]:
    """What a prediction without inputs would score, by the name of the score."""
    if isinstance(t.p, ClassPredictive) and t.p.probs.dim() == 2:
        rates = torch.bincount(t.y, minlength=t.p.probs.shape[1]).double() / max(len(t.y), 1)
        fit = -float(torch.special.entr(rates).sum())
        return {
            "accuracy": f"the commonest class: {plain(float(rates.max()))}",
            "log-likelihood": f"base rates: {plain(fit)}",
        }
    if isinstance(t.p, Regression) and t.p.mean.numel() == len(t.y):
        std = float(t.y.double().std(correction=0))
        return {"root mean squared error": f"the mean of the targets: {plain(std)}"}
    return {}


def _of_predictions(t: Trial) -> tuple[dict[str, list[Figure]], dict[str, list[Group]]]:
    """The figures and tables that suit a prediction, by section."""
    from .figures_classes import Classes, classification
    from .figures_regression import Numbers, regression
    from .tables import by_class, by_size

    p, y = t.p, t.y
    if isinstance(p, ClassPredictive) and p.probs.dim() == 2 and t.classes is not None:
        truth, probs, epistemic = (v.numpy(force=True) for v in (y, p.probs, p.mutual_information))
        c = Classes(truth, probs, epistemic, t.classes)
        return classification(c), {"prediction": by_class(c)}
    if isinstance(p, Regression):
        several = p.mean.numel() > len(y)
        scale = y.flatten(1).std(0).clamp(min=1e-12) if several else torch.ones(1, dtype=y.dtype)
        parts = [v.flatten(1) / scale for v in (y, p.mean, *p.interval(0.9))]
        parts += [v.flatten(1) / scale**2 for v in (p.epistemic, p.aleatoric)]
        unit = " (standard deviations of each target)" if several else ""
        n = Numbers(unit, *(v.flatten().double().numpy(force=True) for v in (*parts, p.cdf(y))))
        return regression(n), {"calibration": by_size(n)}
    return {}, {}


def _shown(x: ArrayLike | Tensor | pd.DataFrame, names: Sequence[str] | None) -> Tensor | pd.DataFrame:
    """Inputs as the cases show them: a table with names, or images."""
    if isinstance(x, pd.DataFrame):
        return x if names is None else x.set_axis(list(names), axis=1)
    x = torch.as_tensor(x)
    if x.dim() != 2:
        return x
    names = names if names is not None else [f"x{i + 1}" for i in range(x.shape[1])]
    if len(names) != x.shape[1]:
        raise ValueError(f"report: there are {len(names)} names for {x.shape[1]} columns; give one for each.")
    return pd.DataFrame(x.numpy(force=True), columns=list(names))


def _facts(t: Trial) -> dict[str, str]:
    from .drivers import units_in_words

    elbo, members = t.elbo, t.model.members
    units = units_in_words([attribution.units_in_use(member.net) for member in members])
    layers = [layer for layer in elbo.net.modules() if not list(layer.children())]
    random = sum(q.random.mean.numel() for _, q in posteriors(elbo.net))
    facts = (
        {"audit": audit(elbo, t.inputs[:AUDITED], t.targets[:AUDITED], samples=200).verdict} if random else {}
    )
    return facts | {
        "method": elbo.method.name,
        "likelihood": type(elbo.likelihood).__name__,
        "prior": str(elbo.prior),
        "network": ", ".join(map(layer_in_words, layers))
        + (f"; {len(members)} of them" if len(members) > 1 else ""),
        "random weights": f"{random:,}" + (" in each" if len(members) > 1 else ""),
        **({"hidden units in use": units} if units else {}),
        "training cases": f"{elbo.n_data:,.0f}",
    }
