"""Where a training run met a number that is not finite, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..gaussian import Gaussian
from ..graph.steps import tensors_in
from ..inspect.operations import operation_name
from ..methods.base import Call, Value, chosen
from ..objectives import ELBO
from ..posterior import posteriors


def diverged(where: str, epoch: int, batch: int, elbo: ELBO, data: Sequence[Tensor]) -> FloatingPointError:
    """The error for a batch after which nothing can be learned: it names the first number that is not finite.

    :param where: the caller and whose loss it is, such as "fit: the loss".
    """
    return FloatingPointError(
        f"{where} is not finite in epoch {epoch}, batch {batch}: {first_failure(elbo, data)}; check "
        "the data, lower lr, or set clip. The weights are those before this epoch."
    )


@torch.no_grad()
def first_failure(elbo: ELBO, data: Sequence[Tensor]) -> str:
    """What is not finite first: the data, a weight, an operation of the network, or a term of the objective.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)))
    >>> elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=1)
    >>> first_failure(elbo, (torch.tensor([[1e38]]), torch.zeros(1, 1)))
    "the output of Linear at '0' is the first"
    """
    for name, value in zip(("inputs", "targets", "weights of the rows"), data, strict=False):
        for tensor in tensors_in(value):
            if not is_finite(tensor):
                row = int((~tensor.reshape(len(tensor), -1).isfinite().all(1)).long().argmax())
                return f"the {name} are not, in row {row} of the batch"
    for name, value in learned(elbo).items():
        if not is_finite(value):
            return f"{name!r} is not, after a gradient that was not finite or too large"
    x, y = data[:2]
    watch = _First(elbo.net)
    f = chosen(elbo.method.watching(watch.note).at(elbo.net, x), elbo.output)
    if watch.found is not None:
        return watch.found
    log_prob = (
        elbo.likelihood.expected_log_prob(f, y) if isinstance(f, Gaussian) else elbo.likelihood.log_prob(f, y)
    )
    if not is_finite(log_prob):
        return f"the log-likelihood of {type(elbo.likelihood).__name__} is the first"
    for name, q in posteriors(elbo.net):
        if not is_finite(elbo.prior.kl(q.random)):
            return f"the divergence of {name!r} from its prior is the first"
    return "by a second pass, none of its operations is to blame"


class _First:
    """Watches a pass for the first output that is not finite."""

    def __init__(self, net: nn.Module) -> None:
        self.names = {module: name for name, module in net.named_modules()}
        self.found: str | None = None

    def note(self, call: Call) -> Value:
        if self.found is None and not is_finite(call.output):
            known = self.names.get(call.operation) if isinstance(call.operation, nn.Module) else None
            place = known if known is not None or call.place is None else call.place.step.place
            self.found = (
                f"the output of {operation_name(call)}{f' at {place!r}' if place else ''} is the first"
            )
        return call.output


def is_finite(value: Value) -> bool:
    """Whether every number of a value, and of its parts, is finite."""
    match value:
        case Tensor():
            return not value.is_floating_point() or bool(value.isfinite().all())
        case Gaussian():
            return is_finite(value.mean) and is_finite(value.var)
        case dict():
            return is_finite(tuple(value.values()))
        case list() | tuple():
            return all(map(is_finite, value))
    return True


class Kept:
    """The state at the start of an epoch, to which a run that diverges returns."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.values = {name: value.detach().clone() for name, value in state.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            state[name].copy_(value)


def learned(elbo: ELBO) -> dict[str, Tensor]:
    """What training changes; the network's own buffers, such as a mask, may hold infinities."""
    likelihood = {f"likelihood.{name}": value for name, value in elbo.likelihood.named_buffers()}
    return {**dict(elbo.named_parameters()), **likelihood}
