"""A report: one HTML page that shows how a model learned, how well it predicts and how far its uncertainty can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ..inspect import attribution, metrics
from ..inspect.consistency import audit
from ..io.storage import replacing
from ..objectives import ELBO
from ..posterior import posteriors
from ..predictive import (
    ClassPredictive,
    LabelPredictive,
    Predictive,
    Regression,
    concatenate,
    mixture,
    rescaled,
    two_classes,
)
from .cases import extremes

if TYPE_CHECKING:
    from .figures import Figure

BATCH = 4096
SAMPLES = 100
AUDITED = 500


def report(
    model: Any,
    x: Any,
    y: Any,
    path: str | Path,
    history: pd.DataFrame | None = None,
    names: Sequence[str] | None = None,
) -> Path:
    """Write a page on how the model does on data it was not trained on, and return its path. It needs the extra `plots`.

    :param model: an ELBO, or a fitted estimator.
    :param x: inputs as the model takes them; images, (cases, 1 or 3, height, width), are shown as images.
    :param history: what `fit` returned, for the learning curves; an estimator brings its own.
    :param names: names of the columns of x; those of a DataFrame by default.
    """
    try:
        import jinja2

        from . import figures
    except ImportError as error:
        raise ImportError(
            f"report: needs {error.name}; install it with `pip install 'varprop[plots]'`."
        ) from error
    from .. import __version__

    t = _trial(model, x, y)
    classes = (
        t.classes or [str(i) for i in range(t.p.probs.shape[1])] if isinstance(t.p, ClassPredictive) else None
    )
    history = getattr(model, "history_", None) if history is None else history
    ratios = {
        name: ratio.numpy(force=True) for name, ratio in attribution.signal_to_noise(t.elbo.net).items()
    }
    found = {
        "learning": figures.learning_curves(history) if history is not None and len(history) else [],
        **_of_data(t.p, t.y, classes),
        "layers": figures.layers(attribution.variance_shares(t.elbo, t.net_input[:BATCH]), ratios),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("varprop.reporting"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    html = environment.get_template("report.html.jinja").render(
        title=f"Report on {t.target}" if t.target else "Report on a model",
        subtitle=f"{t.elbo.method.name}, judged on {len(t.y):,} cases.",
        metrics={
            name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            for name, value in metrics.summary(t.p, t.y).items()
        },
        sections=[
            Section(name, title, text, found.get(name, [])) for name, (title, text) in SECTIONS.items()
        ],
        cases=extremes(t.p, t.y, _shown(x, names), classes),
        facts=_facts(t),
        version=__version__,
    )
    path = Path(path)
    with replacing(path) as file:
        file.write(html.encode())
    return path


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, and figures."""

    name: str
    title: str
    text: str
    figures: Sequence[Figure]


SECTIONS = {
    "prediction": (
        "Prediction and truth",
        "How close the predictions come, and whether the truth lies where it was said to lie.",
    ),
    "calibration": ("Calibration", "Whether the stated probabilities are those that come true."),
    "uncertainty": (
        "Uncertainty",
        "Whether uncertainty tells where the mistakes are, and what it is made of.",
    ),
    "learning": ("Training", "The evidence lower bound and its parts, epoch by epoch."),
    "layers": ("Weights", "Which layers the epistemic uncertainty comes from, and how sure each weight is."),
}


@dataclass(frozen=True)
class Trial:
    """A model's prediction beside the truth."""

    elbo: ELBO
    p: Predictive
    y: Tensor
    net_input: Tensor
    net_target: Tensor
    """As the network was trained on it: of numbers, standardised."""
    classes: Sequence[str] | None = None
    target: str = ""


def _trial(model: Any, x: Any, y: Any) -> Trial:
    if hasattr(model, "trial"):
        return model.trial(x, y)
    if hasattr(model, "members_"):
        return _trial_of_estimator(model, x, y)
    if not isinstance(model, ELBO):
        raise TypeError(f"report: model must be an ELBO or a fitted estimator, got {type(model).__name__}.")
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    p = predictive(model, x)
    if isinstance(p, LabelPredictive):
        return Trial(model, two_classes(p), y.flatten().long(), x, y)
    y = y.view_as(p.mean).to(p.mean) if isinstance(p, Regression) else y
    return Trial(model, p, y, x, y)


def _trial_of_estimator(model: Any, x: Any, y: Any) -> Trial:
    """Predictions and truth in the target's own units; the weights shown are those of the first replica."""
    inputs = model._inputs(np.asarray(x))
    target = model._target(np.asarray(y), inputs.dtype)
    p = mixture([predictive(member, inputs) for member in model.members_])
    if isinstance(p, ClassPredictive):
        return Trial(model.elbo_, p, target, inputs, target, [str(c) for c in model.classes_])
    mean, scale = (torch.as_tensor(v, dtype=inputs.dtype) for v in (model.y_mean_, model.y_scale_))
    p = rescaled(p, mean, scale)
    return Trial(
        model.elbo_, p, torch.tensor(np.asarray(y), dtype=inputs.dtype).view(len(inputs), -1), inputs, target
    )


def predictive(elbo: ELBO, x: Tensor) -> Predictive:
    """The prediction for all of x, made in parts; a method that samples draws the same every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return concatenate(
            [elbo.predict(part, SAMPLES if elbo.method.samples else None) for part in x.split(BATCH)]
        )


def _of_data(p: Predictive, y: Tensor, classes: Sequence[str] | None) -> dict[str, list[Figure]]:
    """The figures that suit a prediction."""
    from .figures_classes import Classes, classification
    from .figures_regression import Numbers, regression

    if isinstance(p, ClassPredictive) and p.probs.dim() == 2 and classes is not None:
        y_, probs, epistemic = (v.numpy(force=True) for v in (y, p.probs, p.mutual_information))
        return classification(Classes(y_, probs, epistemic, classes))
    if isinstance(p, Regression):
        several = p.mean.numel() > len(y)
        scale = y.flatten(1).std(0).clamp(min=1e-12) if several else torch.ones(1, dtype=y.dtype)
        parts = [v.flatten(1) / scale for v in (y, p.mean, *p.interval(0.9))]
        parts += [v.flatten(1) / scale**2 for v in (p.epistemic, p.aleatoric)]
        unit = " (standard deviations of each target)" if several else ""
        return regression(
            Numbers(unit, *(v.flatten().double().numpy(force=True) for v in (*parts, p.cdf(y))))
        )
    return {}


def _shown(x: Any, names: Sequence[str] | None) -> Tensor | pd.DataFrame:
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
    elbo = t.elbo
    layers = [layer for layer in elbo.net.modules() if not list(layer.children())]
    random = sum(q.random.mean.numel() for _, q in posteriors(elbo.net))
    facts = (
        {"audit": audit(elbo, t.net_input[:AUDITED], t.net_target[:AUDITED], samples=200).verdict}
        if random
        else {}
    )
    return facts | {
        "method": elbo.method.name,
        "likelihood": type(elbo.likelihood).__name__,
        "prior": str(elbo.prior),
        "network": ", ".join(map(_layer, layers)),
        "random weights": f"{random:,}",
        "training cases": f"{elbo.n_data:,.0f}",
    }


def _layer(layer: nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    return (
        f"{type(layer).__name__} {'×'.join(map(str, weight.shape))}"
        if isinstance(weight, Tensor)
        else type(layer).__name__
    )
