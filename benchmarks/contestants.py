"""What takes turns on a network: the training step and the pass of each method, and of the plain network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varprop as vp
from varprop.randomisation import Form
from varprop.training.recorded import FIRST, Recorded

from .networks import Case

Run: TypeAlias = Callable[[], object]
Mode: TypeAlias = Literal["training", "inference"]
PLAIN, BY_HAND, CORRELATED = "plain", "by hand", "correlated"
KEPT = ", kept"
"""Ends the name of a contestant that predicts with a `vp.WeightCache`."""
METHODS: dict[str, tuple[vp.Method, Form]] = {
    PLAIN: (vp.DETERMINISTIC, "full"),
    "vbp": (vp.VBP, "full"),
    "dvi": (vp.DVI, "full"),
    "cvbp": (vp.CVBP, "full"),
    "local_reparam": (vp.LOCAL_REPARAM, "full"),
    "factored": (vp.VBP, "factored"),
}
"""The methods by their names, with the posterior of the weights."""


def objective(case: Case, name: str) -> vp.ELBO:
    method, posterior = METHODS[name]
    net = case.net()
    if not method.deterministic:
        vp.variational(net, posterior=posterior)
    likelihood = vp.likelihoods.Normal() if case.classes is None else vp.likelihoods.Categorical()
    return vp.ELBO(net, method, likelihood, vp.priors.Normal(10.0), n_data=1000)


def training(case: Case, rows: int, name: str, compiled: bool = False) -> Run:
    """A step of Adam. By hand, it is the one of a plain network without anything of this library."""
    x, y = case.data(rows)
    loss: Callable[[Tensor, Tensor], Tensor]
    if name == BY_HAND:
        module = case.net()
        loss = _by_hand(module, case)
    else:
        module = objective(case, name)
        loss = torch.compile(module) if compiled else module
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        loss(x, y).backward()
        optimiser.step()

    return step


def recorded(case: Case, rows: int, name: str) -> Run | None:
    """The step that `vp.fit` takes after its first ones, without its bookkeeping; None if it records none."""
    batch = case.data(rows)
    elbo = objective(case, name).train()
    steps = Recorded(elbo)
    steps.steps = FIRST
    if steps.gradients(1.0, batch) is None:
        return None
    optimiser = torch.optim.Adam(elbo.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        steps.gradients(1.0, batch)
        optimiser.step()

    return step


def _by_hand(net: nn.Module, case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    criterion = F.mse_loss if case.classes is None else F.cross_entropy
    return lambda x, y: criterion(net(x), y)


def inference(case: Case, rows: int, name: str, compiled: bool = False) -> Run:
    """A pass of the network in evaluation mode; of a method that samples, one sample."""
    x, _ = case.data(rows)
    cache = vp.WeightCache() if name.endswith(KEPT) else nullcontext()
    name = name.removesuffix(KEPT)
    net = objective(case, "vbp" if name == CORRELATED else name).net.eval()
    method: Callable[[nn.Module, Tensor], object] = vp.correlated if name == CORRELATED else METHODS[name][0]
    passed: Callable[[Tensor], object] = lambda x: method(net, x)  # noqa: E731
    run = torch.compile(passed) if compiled else passed

    def infer() -> object:
        with torch.no_grad(), cache:
            return run(x)

    return infer


def exported(case: Case, rows: int, name: str) -> Run:
    """A prediction of the ONNX graph by onnxruntime, on one thread."""
    import onnxruntime

    x, _ = case.data(rows)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        vp.export_onnx(objective(case, name).eval(), path, x)
        session = onnxruntime.InferenceSession(path.read_bytes(), options)
    inputs = {"x": x.numpy()}
    return lambda: session.run(None, inputs)
