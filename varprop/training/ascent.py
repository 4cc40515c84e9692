"""V-ReLU-Net (Kandemir 2018): coordinate ascent in which every factor has a closed-form update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import likelihoods, moments
from ..gaussian import Gaussian
from ..methods.tables import scale
from ..posterior import Layer
from ..predictive import Predictive
from .factors import Batch, Inputs, Units, Weights
from .filtering import check_all_random
from .outputs import output_of


class CoordinateAscent:
    """A network's posterior by coordinate ascent on the bound of V-ReLU-Net: no gradient, no learning rate.

    The model of a hidden layer has noise on its sums and on its activations, and random gates (Eq. 58):

        f ~ N(w'h, 1/sums),    z ~ Bernoulli(sigmoid(slope · f)),    h' ~ N(z f, 1/units)

    Each factor q(w), q(f), q(z), q(h) is set to its optimum given the others, from the output down. `fit`
    does so on all data; `update` takes a batch of a stream, with the posterior of the last batch as prior.

    :param net: a stack of Linear and ReLU whose parameters are all random, `variational(net, biases=True)`.
        The prior of a hidden layer is centred on its means, which break the symmetry of the units, and that
        of the last layer on zero; both have variance gain/n, with n the number of weights into a unit.
    :param likelihood: `Normal`, whose precision is fitted; `Bernoulli` or `MultiLabel`, probit with a latent
        margin; or `Categorical`, for which classes are fitted as numbers, 1 for the class and -1 for others.
    :param labels: the precision of those numbers.
    :param window: how many rows the hidden layers remember, by exponential forgetting; all by default. Their
        targets come from the network itself, and early ones are worse.
    :param output_window: the same for the last layer, whose inputs change as the hidden layers learn.
    :param rounds: how often the factors of a hidden layer's units are updated before those of its weights.

    >>> net = nn.Sequential(nn.Linear(1, 10), nn.ReLU(), nn.Linear(10, 1))
    >>> net = vp.variational(net, init="he", biases=True)
    >>> x = torch.linspace(-1, 1, 200).unsqueeze(-1)
    >>> ascent = vp.CoordinateAscent(net, vp.likelihoods.Normal())
    >>> for rows in torch.randperm(200).split(50):
    ...     ascent.update(x[rows], x[rows].abs())
    >>> ascent.predict(x).interval(0.9)[0].shape
    torch.Size([200, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: likelihoods.Likelihood,
        *,
        gain: float = 1.0,
        sums: float = 10.0,
        units: float = 100.0,
        slope: float = 100.0,
        labels: float = 1000.0,
        window: float = math.inf,
        output_window: float = math.inf,
        rounds: int = 10,
    ) -> None:
        positive = {"gain": gain, "sums": sums, "units": units, "slope": slope, "labels": labels}
        for name, value in {**positive, "rounds": rounds}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"CoordinateAscent: {name} must be positive and finite, got {value}.")
        for name, rows in {"window": window, "output_window": output_window}.items():
            if not rows > 0:
                raise ValueError(f"CoordinateAscent: {name} must be a positive number of rows, got {rows}.")
        check_all_random(net, "CoordinateAscent")
        self.net, self.likelihood = net, likelihood
        self.output = output_of(likelihood, labels)
        self.sums, self.units, self.slope, self.rounds = sums, units, slope, rounds
        self.layers = _layers(net)
        self.windows = [window] * (len(self.layers) - 1) + [output_window]
        self.priors = [_prior(layer, gain) for layer in self.layers]
        self.priors[-1].mean.zero_()
        self.weights = list(self.priors)
        self.seen = torch.zeros(2, dtype=self.weights[0].mean.dtype, device=self.weights[0].mean.device)
        """The sum of the squared errors of the outputs, and their number, as far as they are remembered."""

    def fit(self, x: Tensor, y: Tensor, sweeps: int = 100) -> None:
        """The posterior of these data alone, by so many sweeps over all factors, loaded into the network."""
        if not sweeps > 0:
            raise ValueError(f"CoordinateAscent: sweeps must be positive, got {sweeps}.")
        self.weights, self.seen = list(self.priors), torch.zeros_like(self.seen)
        self.update(x, y, sweeps)

    def update(self, x: Tensor, y: Tensor, sweeps: int = 1) -> None:
        """Add a batch of a stream: the posterior, faded by the windows, is the prior of the batch.

        With one sweep the weights of a layer are updated while its inputs are still those of a forward pass,
        which is what they will be in a prediction. A batch that is refused changes nothing.
        """
        for name, value in {"x": x, "y": y}.items():
            if not value.isfinite().all():
                raise ValueError(
                    f"CoordinateAscent: {name} has a value that is not finite; leave its row out."
                )
        before = self.weights, self.seen
        state = deepcopy(self.likelihood.state_dict())
        try:
            for _ in self.ascend(x, y, sweeps):
                pass
        except BaseException:
            self.weights, self.seen = before
            self.likelihood.load_state_dict(state)
            raise
        self.load()

    @torch.no_grad()
    def ascend(self, x: Tensor, y: Tensor, sweeps: int = 1) -> Iterator[Batch]:
        """Update one factor after another, from the output down, and give the batch after each."""
        shares = [math.exp(-len(x) / window) for window in self.windows]
        faded = zip(self.weights, shares, self.priors, strict=True)
        priors = [q.faded(share, prior) for q, share, prior in faded]
        seen = shares[-1] * self.seen
        self.weights, batch = list(priors), self._forward(x, y)
        for _ in range(sweeps):
            for layer in reversed(range(len(priors))):
                inputs, last = self._inputs(batch, layer), layer == len(priors) - 1
                if last:
                    batch.location = inputs.mean @ self.weights[layer].mean
                    yield batch
                targets = self._targets(batch, layer)
                self.weights[layer] = priors[layer].after(inputs, targets, self._noise(layer))
                yield batch
                if last:
                    error = self.output.squared_errors(inputs, targets, priors[layer], self.weights[layer])
                    self.seen = seen + torch.stack([error, error.new_tensor(targets.numel())])
                    self.output.fit(self.variance)
                    yield batch
                if layer > 0:
                    yield from self._update_units(batch, layer - 1)

    def _update_units(self, batch: Batch, layer: int) -> Iterator[Batch]:
        """Rounds of q(h), q(f) and q(z) of a hidden layer, given the weights below and above it.

        Eq. 60 and Eq. 61.
        """
        q, above, noise = batch.units[layer], self.weights[layer + 1], self._noise(layer + 1)
        size = q.h.shape[1]
        mean, square = above.mean[:size], noise * above.square
        cov = _inverse(square[:size, :size] + self.units * torch.eye(size).to(square))
        a = self._inputs(batch, layer).mean @ self.weights[layer].mean

        def message() -> Tensor:
            return noise * self._targets(batch, layer + 1) @ mean.T - square[:size, size:].sum(1)

        from_above = message()
        for _ in range(self.rounds):
            q.h = (self.units * q.z * q.f + from_above) @ cov
            q.cov = cov
            yield batch
            # The message of the gate is Jaakkola and Jordan's bound, at its optimum for the present q(f).
            xi = self.slope * torch.sqrt(q.f.square() + q.f_var)
            precision = self.sums + self.units * q.z + self.slope**2 * torch.tanh(xi / 2) / (2 * xi)
            q.f = (self.sums * a + self.units * q.z * q.h + self.slope * (q.z - 0.5)) / precision
            q.f_var = 1 / precision
            yield batch
            evidence = self.units * (q.h * q.f - (q.f.square() + q.f_var) / 2)
            q.z = torch.sigmoid(self.slope * q.f + evidence)
            yield batch
            if layer == len(batch.units) - 1:
                batch.location = self._inputs(batch, layer + 1).mean @ above.mean
                from_above = message()
                yield batch

    def _forward(self, x: Tensor, y: Tensor) -> Batch:
        """The factors without anything that the layers above know."""
        batch = Batch(x.flatten(1).to(self.seen), y, [], x)
        for layer, q in enumerate(self.weights):
            a = self._inputs(batch, layer).mean @ q.mean
            if layer < len(self.weights) - 1:
                z = torch.sigmoid(self.slope * a)
                cov = torch.eye(a.shape[1]).to(a) / self.units
                batch.units.append(Units(a, 1 / (self.sums + self.units * z), z, z * a, cov))
        batch.location = a
        likelihoods.check_target(self.likelihood, a, y)
        return batch

    def _inputs(self, batch: Batch, layer: int) -> Inputs:
        mean = batch.units[layer - 1].h if layer else batch.x
        cov = batch.units[layer - 1].cov if layer else None
        if self.layers[layer].bias is None:
            return Inputs(mean, cov)
        return Inputs(F.pad(mean, (0, 1), value=1.0), None if cov is None else F.pad(cov, (0, 1, 0, 1)))

    def _targets(self, batch: Batch, layer: int) -> Tensor:
        """The means of what a layer puts out, as far as the factors above know it."""
        if layer < len(batch.units):
            return batch.units[layer].f
        return self.output.targets(batch.location, batch.y)

    def _noise(self, layer: int) -> float:
        return self.sums if layer < len(self.weights) - 1 else self.output.precision

    @property
    def variance(self) -> Tensor:
        """The mean squared error of the outputs, as far as it is remembered; 1 before any data."""
        error, count = self.seen
        return error / count if count > 0 else torch.ones_like(error)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predictive:
        """The prediction by the posterior with all its correlations within a layer, and the model's noise."""
        return self.output.predictive(self.moments(x), self.variance)

    def moments(self, x: Tensor) -> Gaussian:
        """Mean and variance of the output, with gates that follow the means of their sums."""
        mean, var = x.flatten(1).to(self.seen), None
        for layer, q in enumerate(self.weights):
            size = mean.shape[1]
            inputs = mean if self.layers[layer].bias is None else F.pad(mean, (0, 1), value=1.0)
            f = Gaussian(
                inputs @ q.mean, (inputs @ q.cov * inputs).sum(1, keepdim=True).expand(-1, q.mean.shape[1])
            )
            if var is not None:
                f = Gaussian(f.mean, f.var + var @ (q.mean[:size].square() + q.cov.diagonal()[:size, None]))
            if layer < len(self.weights) - 1:
                h = moments.gate(Gaussian(f.mean, f.var + 1 / self.sums), self.slope)
                mean, var = h.mean, h.var + 1 / self.units
        return f

    @torch.no_grad()
    def load(self) -> None:
        """Load the means into the network, and the variances of the best factorised normal, 1/precision."""
        for layer, q in zip(self.layers, self.weights, strict=True):
            size = layer.in_features
            logvar = -q.precision.diagonal().log()
            layer.weight.copy_(q.mean[:size].T)
            layer.weight_logvar.copy_(logvar[:size].expand_as(layer.weight))
            if layer.bias is not None:
                layer.bias.copy_(q.mean[size])
                layer.bias_logvar.fill_(logvar[size].item())


def _layers(net: nn.Module) -> list[Layer]:
    """The linear layers of a stack of Linear and ReLU, perhaps after a Flatten."""
    parts = [part for part in net.modules() if not isinstance(part, nn.Sequential)]
    parts = parts[1:] if parts and isinstance(parts[0], nn.Flatten) else parts
    for k, part in enumerate(parts):
        if not isinstance(part, nn.ReLU if k % 2 else nn.Linear):
            raise ValueError(
                "CoordinateAscent: the network must be Linear, ReLU, Linear, ..., with an optional Flatten in"
                f" front, and its layer {k} is {type(part).__name__}."
            )
    if len(parts) % 2 == 0:
        raise ValueError("CoordinateAscent: the network must end with a Linear layer.")
    return parts[::2]


def _prior(layer: Layer, gain: float) -> Weights:
    parts = [layer.weight, *([] if layer.bias is None else [layer.bias.unsqueeze(1)])]
    mean = torch.cat(parts, 1).T.detach().clone()
    return Weights(mean, torch.eye(len(mean)).to(mean) / (gain * scale(layer) ** 2))


def _inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
