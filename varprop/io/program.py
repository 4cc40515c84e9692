"""Programs: a trained model as one graph of tensor operations, as a torch.export program or an ONNX file."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from ..objectives import ELBO
from ..predictive import (
    ClassPredictive,
    LabelPredictive,
    LatentPredictive,
    Predictive,
    Regression,
    mixture,
    rescaled,
)
from .storage import replacing

OPSET = 20
"""The version of ONNX's operators that files are written in."""

_CLASSES = {"probabilities": "probs", "entropy": "entropy", "mutual_information": "mutual_information"}
OUTPUTS: Mapping[type, Mapping[str, str]] = {
    Regression: {"mean": "mean", "variance": "var", "epistemic": "epistemic", "aleatoric": "aleatoric"},
    ClassPredictive: _CLASSES,
    LabelPredictive: _CLASSES,
    LatentPredictive: {"f_mean": "f.mean", "f_variance": "f.var"},
}
"""The outputs of a graph: for each kind of prediction, their names and the attributes that they are."""


def export(model: Any, example: Tensor | np.ndarray | None = None) -> ExportedProgram:
    """The prediction of a model as a torch.export program: a tensor in, a dictionary of tensors out, any number of rows.

    An objective takes what its network takes. An estimator takes features as they are and predicts in the target's own units. Outputs:
    mean, variance, epistemic and aleatoric of numbers; probabilities, entropy and mutual_information of classes; f_mean and f_variance, the
    network's output, for a likelihood of your own.

    :param model: an ELBO, an estimator, or a model of a table. A method that predicts by sampling is refused.
    :param example: an input of any values; its shape is the graph's but for the first dimension, its type the type of the graph's
        inputs, weights and outputs. Estimators and tables know theirs: single precision.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> program = vp.export(elbo, torch.zeros(1, 2)).module()
    >>> program(torch.ones(5, 2))["variance"].shape
    torch.Size([5, 1])
    """
    return _export(_parts(model), example)


def export_onnx(model: Any, path: str | Path, example: Tensor | np.ndarray | None = None) -> None:
    """Write the prediction of a model to an ONNX file: input `x`, outputs and parameters as of `export`, any number of rows.

    The file is replaced as a whole. Its metadata say what the input and the outputs are, where the model knows: `columns`, `classes`,
    `target`. The distribution function of a normal, for which ONNX has only the error function, is written so that its tail keeps its
    precision (Eq. 46).
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"export_onnx: needs {error.name}; install it with `pip install 'varprop[onnx]'`."
        ) from error
    parts = _parts(model)
    with _quiet():
        with _Tails():
            program = _export(parts, example)
        options: Any = {
            "dynamo": True,
            "verbose": False,
            "opset_version": OPSET,
            "dynamic_shapes": {"x": {0: "rows"}},
        }
        written = torch.onnx.export(program, **options)
    assert written is not None
    _name(written.model.graph, program)
    written.model.metadata_props.update(
        {name: json.dumps(value, ensure_ascii=False) for name, value in parts.about.items()}
    )
    with replacing(path) as file:
        file.write(written.model_proto.SerializeToString())


# --------------------------------------------------------------------------------------------------------------- the graph


@dataclass(frozen=True)
class Parts:
    """What a graph is made of: the members of a mixture, what stands before and after them, and what a reader should know."""

    members: Sequence[ELBO]
    inputs: nn.Module | None = None
    """Turns raw features into what the network was trained on."""
    width: int | None = None
    """How many raw features there are."""
    unit: tuple[Any, Any] | None = None
    """Mean and scale of the target."""
    about: Mapping[str, Any] = field(default_factory=dict)


class Graph(nn.Module):
    """Raw inputs in, the numbers of a prediction out."""

    def __init__(self, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        members = nn.ModuleList(deepcopy(list(parts.members))).cpu().eval().requires_grad_(False)
        self.members = members.to(dtype) if dtype.is_floating_point else members
        self.inputs = parts.inputs or nn.Identity()
        self.scaled = parts.unit is not None
        for name, value in zip(("mean", "scale"), parts.unit or (0.0, 1.0), strict=True):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.inputs(x).to(x.dtype)
        components = [member.likelihood.predictive(member.method(member.net, z)) for member in self.members]  # type: ignore[operator, union-attr]
        p = components[0] if len(components) == 1 else mixture(components)
        if self.scaled:
            p = rescaled(p, self.mean, self.scale)  # type: ignore[arg-type]
        outputs = {name: attrgetter(attribute)(p) for name, attribute in _outputs(p).items()}
        return {
            name: value.to(z.dtype) if z.is_floating_point() else value for name, value in outputs.items()
        }


class Standardise(nn.Module):
    """(x - mean) / scale, in double precision: an offset that is large beside its scale costs no digits."""

    def __init__(self, mean: Any, scale: Any) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() - self.mean) / self.scale  # type: ignore[operator]


class Number(nn.Module):
    """A column of a table that holds numbers: what is missing, NaN, becomes the median."""

    def __init__(self, median: float, mean: float, scale: float) -> None:
        super().__init__()
        self.median = median
        self.standardise = Standardise(mean, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.standardise(torch.where(x.isnan(), self.median, x))


class Indicators(nn.Module):
    """A column of a table that holds places in a list of categories: a one at the place. Of any other value all is NaN."""

    def __init__(self, categories: int, missing: int) -> None:
        super().__init__()
        self.missing = missing
        self.register_buffer("places", torch.arange(categories, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        is_place = torch.eq(torch.where(x.isnan(), self.missing, x), self.places)  # type: ignore[arg-type]
        return torch.where(is_place.any(1, keepdim=True), is_place.double(), math.nan)


class Columns(nn.Module):
    """The columns of a table, each by its own module, side by side."""

    def __init__(self, columns: Sequence[nn.Module]) -> None:
        super().__init__()
        self.columns = nn.ModuleList(columns)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([column(x[:, i : i + 1].double()) for i, column in enumerate(self.columns)], 1)


def _parts(model: Any) -> Parts:
    if isinstance(model, ELBO):
        parts = Parts([model])
    elif hasattr(model, "encoder"):
        parts = _table_parts(model)
    elif hasattr(model, "predict_uncertainty"):
        parts = _estimator_parts(model)
    else:
        raise TypeError(f"export: {type(model).__name__} is neither an ELBO nor one of varprop's estimators.")
    for member in parts.members:
        drawn = member.method.name if member.method.samples else None
        if getattr(member.likelihood, "approximation", None) == "samples":
            drawn = f'{type(member.likelihood).__name__}(approximation="samples")'
        if drawn:
            raise ValueError(
                f"export: {drawn} predicts by sampling, and a graph draws nothing; predict with VBP or DVI and no samples."
            )
    return parts


def _estimator_parts(estimator: Any) -> Parts:
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    about: dict[str, Any] = {}
    if hasattr(estimator, "feature_names_in_"):
        about["columns"] = estimator.feature_names_in_.tolist()
    if hasattr(estimator, "classes_"):
        about["classes"] = estimator.classes_.tolist()
    unit = (estimator.y_mean_, estimator.y_scale_) if hasattr(estimator, "y_mean_") else None
    inputs = Standardise(estimator.x_mean_, estimator.x_scale_)
    return Parts(estimator.members_, inputs, estimator.n_features_in_, unit, about)


def _table_parts(model: Any) -> Parts:
    from ..table.encoding import MISSING, Numeric

    columns: list[nn.Module] = []
    shown: list[dict[str, Any]] = []
    for column in model.encoder.columns:
        if isinstance(column, Numeric):
            columns.append(Number(column.median, column.mean, column.scale))
            shown.append({"name": column.name})
        else:
            columns.append(Indicators(len(column.categories), column.categories.index(MISSING)))
            shown.append({"name": column.name, "categories": column.categories})
    target = model.target
    about = {"columns": shown, "target": target.name} | (
        {} if target.classes is None else {"classes": target.classes}
    )
    unit = (target.mean, target.scale) if target.classes is None else None
    return Parts(
        [model.elbo],
        nn.Sequential(Columns(columns), Standardise(model.mean, model.scale)),
        len(columns),
        unit,
        about,
    )


def _outputs(p: Predictive) -> Mapping[str, str]:
    for kind in type(p).__mro__:
        if kind in OUTPUTS:
            return OUTPUTS[kind]
    raise TypeError(
        f"export: a {type(p).__name__} has no named outputs; the likelihood must give one of varprop's predictions."
    )


# ------------------------------------------------------------------------------------------------------------------ export


def _export(parts: Parts, example: Tensor | np.ndarray | None) -> ExportedProgram:
    if example is None:
        if parts.width is None:
            raise ValueError(
                "export: an objective does not say what its network takes; give an example input."
            )
        example = torch.zeros(1, parts.width)
    if not isinstance(example, Tensor | np.ndarray):
        raise TypeError(f"export: the example must be a tensor or an array, got {type(example).__name__}.")
    example = torch.as_tensor(example).detach().cpu()
    if (
        not example.dim()
        or not len(example)
        or (parts.width is not None and example.shape[1:] != (parts.width,))
    ):
        shape = "(rows, ...)" if parts.width is None else f"(rows, {parts.width})"
        raise ValueError(
            f"export: the example has shape {tuple(example.shape)}, the model takes {shape} with one row or more."
        )
    # With one row the number of rows would be taken for a constant.
    example = example[:1].repeat_interleave(2, 0)
    with torch.no_grad():
        program = torch.export.export(
            Graph(parts, example.dtype), (example,), dynamic_shapes={"x": {0: Dim("rows")}}, strict=False
        )
    for node in program.graph.nodes:
        # The last argument of dropout is whether it drops.
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.args[-1:] != (
            False,
        ):
            raise ValueError(
                f"export: the network draws random numbers ({node.target}); a graph must give the same at every call."
            )
    return program


def _name(graph: Any, program: ExportedProgram) -> None:
    """Give the outputs their names, which a value inside, such as the result of an operation `mean`, may bear."""
    spec = program.call_spec.out_spec
    assert spec is not None
    outputs = dict(zip(spec.context, graph.outputs, strict=True))
    for value in [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]:
        if value.name in outputs:
            value.name = f"{value.name}_inside"
    for name, value in outputs.items():
        value.name = name


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of packages that are not needed, and of its own ways."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------------------------- tails of the normal


class _Tails(TorchFunctionMode):
    """How ONNX is to compute what torch has as one operation each. Its own way, 1 - erf, has no digits left beyond x = 4."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name.removesuffix("_") not in _TAILS:
            return function(*args, **(kwargs or {}))
        value = _TAILS[name.removesuffix("_")](*args)
        return args[0].copy_(value) if name.endswith("_") else value


def _erfc(x: Tensor) -> Tensor:
    """erfc(x) = exp(-x²) t exp P(t) for x > 0, and 2 - erfc(-x) below (Eq. 46)."""
    upper = torch.exp(_log_scaled_erfc(x.abs()) - x.square())
    return torch.where(x < 0, 2 - upper, upper)


def _ndtr(x: Tensor) -> Tensor:
    return 0.5 * _erfc(-x / math.sqrt(2))


def _log_ndtr(x: Tensor) -> Tensor:
    """log Φ: for x < 0 without taking an exponential and its logarithm again."""
    log_tail = _log_scaled_erfc(x.abs() / math.sqrt(2)) - x.square() / 2 - math.log(2)
    return torch.where(x < 0, log_tail, _log1p(-torch.exp(log_tail)))


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x), which in ONNX is just that: the error of the rounded sum u cancels in x log(u) / (u - 1)."""
    u = 1 + x
    rounded_away = u == 1
    return torch.where(rounded_away, x, x * u.log() / torch.where(rounded_away, 1.0, u - 1))


def _log_scaled_erfc(x: Tensor) -> Tensor:
    """log exp(x²) erfc(x) = log t + P(t) for x ≥ 0, with t = 2/(2 + x) (Eq. 46)."""
    t = 2 / (2 + x)
    u = 2 * t - 1
    value = torch.zeros_like(u)
    for coefficient in reversed(_coefficients()):
        value = value * u + coefficient
    return t.log() + value


@cache
def _coefficients(degree: int = 12) -> tuple[float, ...]:
    """P by interpolation at Chebyshev's points of (-1, 1): 7e-9 off at most."""
    from scipy.special import erfcx

    def log_ratio(u: np.ndarray) -> np.ndarray:
        t = (1 + u) / 2
        return np.log(erfcx(2 / t - 2) / t)

    interpolated = np.polynomial.Chebyshev.interpolate(log_ratio, degree)
    return tuple(interpolated.convert(kind=np.polynomial.Polynomial).coef.tolist())


_TAILS: Mapping[str, Callable[..., Tensor]] = {
    "erfc": _erfc,
    "special_erfc": _erfc,
    "special_ndtr": _ndtr,
    "special_log_ndtr": _log_ndtr,
    "log1p": _log1p,
    "special_log1p": _log1p,
}
"""By the names of torch's functions and methods; in place they have an underscore behind."""
