"""Single cases, as rows of a table or as images: the least certain ones, the worst, those unlike training."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from ..predictive import ClassPredictive, Predictive, Regression
from .numerals import as_text, plain

ROWS, IMAGES, COLUMNS, PIXELS = 6, 12, 8, 64


@dataclass(frozen=True)
class Case:
    """One data point: its values by column or its picture, and whether the model got it wrong."""

    cells: Sequence[tuple[str, str]] = ()
    image: str = ""
    alt: str = ""
    caption: str = ""
    wrong: bool = False


@dataclass(frozen=True)
class Group:
    """Cases under one title, with a sentence on how to read them."""

    title: str
    text: str = field(default="", kw_only=True)
    columns: Sequence[str] = ()
    numeric: frozenset[str] = frozenset()
    rows: Sequence[Case] = field(default=())
    images: Sequence[Case] = field(default=())


def extremes(
    p: Predictive,
    y: Tensor,
    x: Tensor | pd.DataFrame,
    classes: Sequence[str] | None,
    unlike: pd.DataFrame | None = None,
) -> list[Group]:
    """Cases at the extremes, for a prediction with one target for each case.

    :param unlike: how far each case is from the training data, as `unlike_training` gives it.
    """
    if isinstance(p, ClassPredictive) and p.probs.dim() == 2 and classes is not None:
        spread, shown, error = p.entropy, _class_columns(p, y, classes), -p.log_prob(y)
    elif isinstance(p, Regression) and p.mean.numel() == len(y):
        spread, shown, error = p.std.flatten(), _number_columns(p, y), (p.mean - y).abs().flatten()
    else:
        return []
    order = spread.argsort(stable=True).tolist()
    n = min(IMAGES if _are_images(x) else ROWS, len(order) // 2)
    worst = error.argsort(descending=True, stable=True).tolist()
    chosen = {"Largest errors": worst[:n], "Least certain": order[::-1][:n], "Most certain": order[:n]}
    if unlike is not None and unlike["far"].any():
        far = (
            unlike["distance"].to_numpy().argsort(kind="stable")[::-1][: min(ROWS, int(unlike["far"].sum()))]
        )
        chosen = {"Unlike the training data": far.tolist(), **chosen}
        shown["column"] = unlike["column"].to_numpy()
        shown["distance"] = unlike["distance"].to_numpy()
    if isinstance(x, Tensor) and _are_images(x):
        return [_images(title, rows, shown, x) for title, rows in chosen.items() if rows]
    table = x if isinstance(x, pd.DataFrame) else pd.DataFrame()
    return [_rows(title, rows, shown, table) for title, rows in chosen.items() if rows]


def _class_columns(p: ClassPredictive, y: Tensor, classes: Sequence[str]) -> pd.DataFrame:
    probability, chosen = p.probs.max(1)
    return pd.DataFrame(
        {
            "predicted": [classes[i] for i in chosen.tolist()],
            "truth": [classes[i] for i in y.tolist()],
            "probability": probability.numpy(force=True),
            "of the truth": p.probs.gather(1, y[:, None])[:, 0].numpy(force=True),
            "entropy": p.entropy.numpy(force=True),
            "mutual information": p.mutual_information.numpy(force=True),
            "wrong": (chosen != y).numpy(force=True),
        }
    )


def _number_columns(p: Regression, y: Tensor) -> pd.DataFrame:
    low, high = p.interval(0.9)
    columns = {"predicted": p.mean, "truth": y, "error": p.mean - y, "std": p.std}
    columns |= {"lower 5 %": low, "upper 95 %": high}
    table = pd.DataFrame({name: value.flatten().numpy(force=True) for name, value in columns.items()})
    table["wrong"] = (table["truth"] < table["lower 5 %"]) | (table["truth"] > table["upper 95 %"])
    return table


def _rows(title: str, rows: Sequence[int], shown: pd.DataFrame, x: pd.DataFrame) -> Group:
    inputs = x.iloc[:, :COLUMNS]
    judged = shown.drop(columns="wrong")
    if title != "Unlike the training data":
        judged = judged.drop(columns=["column", "distance"], errors="ignore")
    cases = []
    for i in rows:
        outcome = [(str(name), as_text(judged[name].iloc[i])) for name in judged]
        values = [(str(name), as_text(inputs.iloc[i, j])) for j, name in enumerate(inputs.columns)]
        cases.append(Case([("row", str(i + 1)), *outcome, *values], wrong=bool(shown["wrong"].iloc[i])))
    numeric = {
        str(name)
        for table in (judged, inputs)
        for name, kind in table.dtypes.items()
        if pd.api.types.is_numeric_dtype(kind)
    }
    return Group(title, [name for name, _ in cases[0].cells], frozenset({"row", *numeric}), rows=cases)


def _images(title: str, rows: Sequence[int], shown: pd.DataFrame, x: Tensor) -> Group:
    cases = []
    for i in rows:
        case = shown.iloc[i]
        said = f"{as_text(case['predicted'])}" + (
            f", truth {as_text(case['truth'])}" if case["wrong"] else ""
        )
        sure = f" ({case['probability']:.0%})" if "probability" in shown else f" ± {plain(case['std'], 3)}"
        alt = f"Input of row {i + 1}: predicted {as_text(case['predicted'])}, truth {as_text(case['truth'])}."
        cases.append(Case(image=as_png(x[i]), alt=alt, caption=said + sure, wrong=bool(case["wrong"])))
    return Group(title, images=cases)


def _are_images(x: Tensor | pd.DataFrame) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) > 1


def as_png(image: Tensor) -> str:
    """An image (channels, height, width) as a data URI: values stretched to the full range, size limited."""
    from matplotlib.image import imsave

    image = image.detach().float().cpu()
    if max(image.shape[1:]) > PIXELS:
        height, width = (max(1, round(side * PIXELS / max(image.shape[1:]))) for side in image.shape[1:])
        image = F.interpolate(image[None], (height, width), mode="area")[0]
    low, high = image.aminmax()
    image = ((image - low) / (high - low).clamp(min=torch.finfo(image.dtype).tiny)).movedim(0, -1)
    out = BytesIO()
    imsave(out, image.expand(-1, -1, 3).numpy(), format="png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
