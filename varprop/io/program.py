"""Programs: a trained model as one graph of tensor operations, as a torch.export program or an ONNX file."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..model import Fitted, Model, as_model
from ..objectives import ELBO
from ..predictive import (
    ClassPredictive,
    LabelPredictive,
    LatentPredictive,
    Predictive,
    Regression,
    mixture,
)
from .storage import replacing
from .tails import Tails

if TYPE_CHECKING:
    from onnx_ir import Graph as OnnxGraph

OPSET = 20
"""The version of ONNX's operators that files are written in."""

_CLASSES = {"probabilities": "probs", "entropy": "entropy", "mutual_information": "mutual_information"}
OUTPUTS: Mapping[type, Mapping[str, str]] = {
    Regression: {"mean": "mean", "variance": "var", "epistemic": "epistemic", "aleatoric": "aleatoric"},
    ClassPredictive: _CLASSES,
    LabelPredictive: _CLASSES,
    LatentPredictive: {"f_mean": "f.mean", "f_variance": "f.var"},
}
"""The outputs of a graph: for each kind of prediction, their names and the attributes that hold them."""


def export(model: ELBO | Fitted, example: Tensor | np.ndarray | None = None) -> ExportedProgram:
    """A model's prediction as a torch.export program: from a tensor with any number of rows to a dictionary.

    An objective takes what its network takes. An estimator takes raw features and predicts in the target's
    own unit. Outputs: mean, variance, epistemic and aleatoric for numbers; probabilities, entropy and
    mutual_information for classes; f_mean and f_variance, the network's output, for a likelihood that is not
    the library's.

    :param model: an ELBO, a fitted estimator, or the model of a table. A method that predicts by sampling is
        refused.
    :param example: an input with any values. The graph has its shape, except for the number of rows, and its
        type for inputs, weights and outputs. Estimators and tables need none: their graphs use single
        precision.

    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=100)
    >>> program = vp.export(elbo, torch.zeros(1, 2)).module()
    >>> program(torch.ones(5, 2))["variance"].shape
    torch.Size([5, 1])
    """
    return _export(_checked(model), example)


def export_onnx(model: ELBO | Fitted, path: str | Path, example: Tensor | np.ndarray | None = None) -> None:
    """Write the prediction of a model to an ONNX file: input `x`, outputs and parameters as in `export`.

    The file is replaced in one step. Its metadata say what the input and the outputs are, where the model
    knows: `columns`, `classes`, `target`. The distribution function of a normal, for which ONNX has only the
    error function, is written so that its tail keeps its precision (Eq. 53).
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"export_onnx: needs {error.name}; install it with `pip install 'varprop[onnx]'`."
        ) from error
    checked = _checked(model)
    with _quiet():
        with Tails():
            program = _export(checked, example)
        written = torch.onnx.export(
            program, dynamo=True, verbose=False, opset_version=OPSET, dynamic_shapes={"x": {0: "rows"}}
        )
    assert written is not None
    _name_outputs(written.model.graph, program)
    about = {name: json.dumps(value, ensure_ascii=False) for name, value in _about(checked).items()}
    written.model.metadata_props.update(about)
    with replacing(path) as file:
        file.write(written.model_proto.SerializeToString())


def _checked(model: ELBO | Fitted) -> Model:
    checked = as_model(model, "export")
    for member in checked.members:
        sampled = member.method.name if member.method.samples else None
        if getattr(member.likelihood, "approximation", None) == "samples":
            sampled = f'{type(member.likelihood).__name__}(approximation="samples")'
        if sampled:
            raise ValueError(
                f"export: {sampled} predicts by sampling, which a graph cannot do; predict with VBP or DVI "
                "instead."
            )
        if member.moments == "correlated":
            raise ValueError(
                "export: correlated moments need derivatives of the network, which a graph cannot take; set "
                '`elbo.moments = "independent"` to predict by one pass.'
            )
    return checked


def _about(model: Model) -> dict[str, object]:
    """What a reader of the graph has to know about its input and outputs."""
    target = model.target
    about = {"columns": list(model.columns), "target": target.name, "classes": target.classes}
    return {name: value for name, value in about.items() if value}


class Graph(nn.Module):
    """Raw inputs in, the numbers of a prediction out."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        members = nn.ModuleList(deepcopy(list(model.members))).cpu().eval().requires_grad_(False)
        self.members = members.to(dtype) if dtype.is_floating_point else members
        before = [None if model.encoder is None else model.encoder.module(), model.standardise]
        self.inputs = nn.Sequential(*(module for module in before if module is not None))
        self.target = model.target

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.inputs(x).to(x.dtype)
        predictions = [self._predictive(member, z) for member in self.members]
        p = self.target.unscaled(predictions[0] if len(predictions) == 1 else mixture(predictions))
        outputs: dict[str, Tensor] = {name: attrgetter(path)(p) for name, path in _outputs(p).items()}
        # The target's own unit is in double precision; the graph gives what it takes.
        return (
            {name: value.to(z.dtype) for name, value in outputs.items()} if z.is_floating_point() else outputs
        )

    @staticmethod
    def _predictive(member: nn.Module, z: Tensor) -> Predictive:
        assert isinstance(member, ELBO)
        return member.likelihood.predictive(member.latent(z))


def _outputs(p: Predictive) -> Mapping[str, str]:
    for kind in type(p).__mro__:
        if kind in OUTPUTS:
            return OUTPUTS[kind]
    raise TypeError(
        f"export: a {type(p).__name__} has no named outputs; the likelihood must give one of varprop's "
        "predictions."
    )


# ----------------------------------------------------------------------------------------------------- export


def _export(model: Model, example: Tensor | np.ndarray | None) -> ExportedProgram:
    # With one row, torch.export would take the number of rows for a constant.
    rows = _example(model, example)[:1].repeat_interleave(2, 0)
    with torch.no_grad():
        program = torch.export.export(
            Graph(model, rows.dtype), (rows,), dynamic_shapes={"x": {0: Dim("rows")}}, strict=False
        )
    for node in program.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random and node.args[-1:] != (False,):  # the last argument of dropout says whether it is active
            raise ValueError(
                f"export: the network draws random numbers ({node.target}), but a graph must give the same "
                "result "
                f"at every call; remove the operation."
            )
    return program


def _example(model: Model, example: Tensor | np.ndarray | None) -> Tensor:
    width = model.width
    if example is None:
        if width is None:
            raise ValueError(
                "export: an objective does not know what its network takes; give an example input."
            )
        return torch.zeros(1, width)
    if not isinstance(example, Tensor | np.ndarray):
        raise TypeError(f"export: the example must be a tensor or an array, got {type(example).__name__}.")
    example = torch.as_tensor(example).detach().cpu()
    if not example.dim() or not len(example) or (width is not None and example.shape[1:] != (width,)):
        shape = "(rows, ...)" if width is None else f"(rows, {width})"
        raise ValueError(
            f"export: the example has shape {tuple(example.shape)}, the model takes {shape} with one row or "
            "more."
        )
    return example


def _name_outputs(graph: OnnxGraph, program: ExportedProgram) -> None:
    """Name the outputs; values inside the graph with the same name, such as `mean`, are renamed."""
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
    """Silence torch's messages about optional packages and about its own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
