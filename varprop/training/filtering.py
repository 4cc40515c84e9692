"""Assumed-density filtering: probabilistic backpropagation (Hernández-Lobato and Adams 2015)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ..methods import PBP, Method
from ..methods.tables import scale
from ..objectives import LogMarginal
from ..posterior import posteriors
from ..predictive import NormalPredictive
from ..substitution import substituted
from .tape import record


class Gamma(NamedTuple):
    """A gamma distribution of an unknown precision.

    >>> Gamma(torch.tensor(6.0), torch.tensor(6.0)).variances
    tensor([1.2000, 1.0000, 0.8571])
    """

    shape: Tensor
    rate: Tensor

    @property
    def variances(self) -> Tensor:
        """E[1/precision] = b/(a-1) for the shape a, and for a+1 and a+2, in the last dimension."""
        a, b = self
        return b.unsqueeze(-1) / torch.stack([a - 1, a, a + 1], -1)

    def after(self, log_z: Tensor) -> Gamma:
        """The gamma distribution with the precision's mean and variance after an observation (Eq. 50).

            a' = 1/(Z Z₂/Z₁² (a+1)/a - 1),    b' = 1/(Z₂/Z₁ (a+1)/b - Z₁/Z a/b)

        :param log_z: the observation's log Z, log Z₁ and log Z₂ under `variances`, in the last dimension.
        """
        a, b = self
        z, z1, z2 = log_z.unbind(-1)
        shape = 1 / (torch.exp(z + z2 - 2 * z1) * (a + 1) / a - 1)
        rate = 1 / (torch.exp(z2 - z1) * (a + 1) / b - torch.exp(z1 - z) * a / b)
        return Gamma(shape, rate)


class Belief(NamedTuple):
    """q of all weights, as one vector, and of the noise precision."""

    mean: Tensor
    logvar: Tensor
    noise: Gamma


class Site(NamedTuple):
    """The factor of a weight's prior N(w | 0, 1/precision) in the approximate posterior.

    It adds a precision to that of q(w), and a shape and a rate to the gamma distribution of the prior's
    precision.
    """

    precision: Tensor
    shape: Tensor
    rate: Tensor


Visit = Callable[[Belief, Tensor, Tensor], Belief]


class AssumedDensityFilter:
    """A network's posterior by assumed-density filtering: each data point updates it in closed form.

    The precisions of the noise and of the prior are unknown and have gamma distributions. There are no
    learning rate and no batches. Several passes over the same data, as in `fit`, count it several times, so
    the variances shrink with every pass. All arithmetic is in double precision.

    :param net: a network whose parameters are all random, `variational(net, biases=True)`; its means are
        drawn from N(0, 1/inputs).
    :param replicas: filter this many posteriors at once, each on its own data: x and y then have a leading
        dimension of this size.
    :param noise: shape and rate of the gamma distribution of the noise precision before any data.
    :param prior: shape and rate of the gamma distribution of the weights' precision.
    :param compile: compile the update to machine code, which needs a C++ compiler and about ten seconds, and
        makes each update about ten times faster.

    >>> net = vp.variational(nn.Sequential(nn.Linear(1, 10), nn.ReLU(), nn.Linear(10, 1)), biases=True)
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
    >>> pbp = vp.AssumedDensityFilter(net)
    >>> pbp.fit(x, x.abs(), epochs=2)
    >>> pbp.predict(x).interval(0.9)[0].shape
    torch.Size([20, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        replicas: int | None = None,
        method: Method = PBP,
        noise: tuple[float, float] = (6.0, 6.0),
        prior: tuple[float, float] = (6.0, 6.0),
        generator: torch.Generator | None = None,
        compile: bool = False,
    ) -> None:
        check_all_random(net, "AssumedDensityFilter")
        if replicas is not None and not replicas > 0:
            raise ValueError(f"AssumedDensityFilter: replicas must be positive, got {replicas}.")
        for name, (shape, rate) in {"noise": noise, "prior": prior}.items():
            if not (shape > 1 and rate > 0):
                raise ValueError(
                    f"AssumedDensityFilter: {name} must be a shape above 1 and a positive rate,"
                    f" got {shape} and {rate}."
                )
        self.log_marginal = LogMarginal(net, method)
        self.replicas = replicas
        self.generator = generator
        self._shapes = {name: q.mean.shape for name, q in posteriors(net)}
        copies = replicas or 1

        def gamma(shape: float, rate: float) -> Gamma:
            return Gamma(*(mean.new_full((copies,), value) for value in (shape, rate)))

        mean = torch.cat([_draw(net, name, copies, generator) for name in self._shapes], -1)
        self.prior = gamma(*prior)
        var = self.prior.variances[0, 0]
        self.belief = Belief(mean, var.log().expand_as(mean).clone(), gamma(*noise))
        self._sites = Site((1 / var).expand_as(mean), torch.zeros_like(mean), torch.zeros_like(mean))
        self._compile = compile
        self._programs: dict[tuple[torch.Size, ...], Visit] = {}

    def fit(self, x: Tensor, y: Tensor, epochs: int = 40) -> None:
        """Make `epochs` passes: visit all data in random order, then refine the prior.

        At the end the network holds the posterior, or the first of several.
        """
        if not epochs > 0:
            raise ValueError(f"AssumedDensityFilter: epochs must be positive, got {epochs}.")
        x, y = self._stacked(x, y)
        copies, n = x.shape[:2]
        for _ in range(epochs):
            order = torch.stack([torch.randperm(n, generator=self.generator) for _ in range(copies)])
            rows = torch.arange(copies).unsqueeze(-1), order
            self._filter(x[rows], y[rows])
            self.refresh()
        self.load()

    def update(self, x: Tensor, y: Tensor) -> None:
        """Visit each data point once, in the order given."""
        self._filter(*self._stacked(x, y))

    @torch.no_grad()
    def _filter(self, x: Tensor, y: Tensor) -> None:
        # A visit takes one data point of each replica.
        xs, ys = (t.transpose(0, 1).unsqueeze(2).contiguous() for t in (x, y))
        shapes = xs.shape[1:], ys.shape[1:]
        if shapes not in self._programs:
            self._programs[shapes] = _program(
                vmap(self._visit), self.belief, xs[0], ys[0], compile=self._compile
            )
        visit = self._programs[shapes]
        for datum in zip(xs, ys, strict=True):
            self.belief = visit(self.belief, *datum)

    def _visit(self, q: Belief, x: Tensor, y: Tensor) -> Belief:
        """Moments of the weights after one data point, from the gradients of its log marginal (Eq. 49):

            m' = m + v g_m,    v' = v - v² (g_m² - 2 g_v) = v (1 + 2 g_logv - v g_m²)

        Where v' is not a positive number, the weight keeps its moments.
        """

        def log_z(mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
            weights = self._parameters(mean, logvar)
            z = substituted(self.log_marginal, weights, nn.Module.__call__, x, y, q.noise.variances)
            return z[0], z

        (g_mean, g_logvar), z = grad(log_z, argnums=(0, 1), has_aux=True)(q.mean, q.logvar)
        var = q.logvar.exp()
        logvar = q.logvar + torch.log1p(2 * g_logvar - var * g_mean.square())
        sound = logvar.isfinite()
        mean = torch.where(sound, q.mean + var * g_mean, q.mean)
        return Belief(mean, torch.where(sound, logvar, q.logvar), q.noise.after(z))

    @torch.no_grad()
    def refresh(self) -> None:
        """Refine the prior by expectation propagation: remove and refit the factor of each weight (Eq. 51).

        The factor has mean 0, so the precision of a weight changes as much as that of the factor, and
        precision times mean does not change.
        """
        q, old = self.belief, self._sites
        precision = torch.exp(-q.logvar)
        v = 1 / (precision - old.precision)
        m = v * precision * q.mean
        sites = []
        for m_i, v_i, *site in zip(*(t.unbind(-1) for t in (m, v, *old)), strict=True):
            self.prior, new = _refit(self.prior, Site(*site), m_i, v_i)
            sites.append(new)
        self._sites = Site(*(torch.stack(t, -1) for t in zip(*sites, strict=True)))
        growth = 1 + (self._sites.precision - old.precision) / precision
        self.belief = q._replace(mean=q.mean / growth, logvar=q.logvar - growth.log())

    @torch.no_grad()
    def predict(self, x: Tensor, replica: int = 0) -> NormalPredictive:
        """N(E[f], Var[f] + b/(a-1)) under one posterior, which is loaded into the network."""
        self.load(replica)
        return self.log_marginal.predict(x, self.belief.noise.variances[replica, 0].to(x.dtype))

    @torch.no_grad()
    def load(self, replica: int = 0) -> None:
        """Load a posterior into the network."""
        for name, value in self._parameters(self.belief.mean[replica], self.belief.logvar[replica]).items():
            self.log_marginal.get_parameter(name).copy_(value)

    def _parameters(self, mean: Tensor, logvar: Tensor) -> dict[str, Tensor]:
        """The vectors of all weights, split into the parameters of the network."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = zip(self._shapes.items(), mean.split(sizes), logvar.split(sizes), strict=True)
        return {
            f"net.{name}{ending}": part.view(shape)
            for (name, shape), *both in parts
            for ending, part in zip(("", "_logvar"), both, strict=True)
        }

    def _stacked(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Data in double precision, replicas in front."""
        x, y = (
            t.to(self.belief.mean) if self.replicas else t.to(self.belief.mean).unsqueeze(0) for t in (x, y)
        )
        if x.shape[:2] != y.shape[:2] or len(x) != len(self.belief.mean):
            raise ValueError(
                f"AssumedDensityFilter: x has shape {tuple(x.shape)} and y {tuple(y.shape)}; give a target"
                " for each input" + (f", for each of {self.replicas} replicas." if self.replicas else ".")
            )
        return [x, y]


def _program(visit: Visit, q: Belief, x: Tensor, y: Tensor, compile: bool) -> Visit:
    """The function for arguments of these shapes, as tensor operations or, compiled, as machine code.

    Inductor is called directly, because the guards of `torch.compile` would take as long as the visit.
    """

    def flat(
        mean: Tensor, logvar: Tensor, shape: Tensor, rate: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, ...]:
        new = visit(Belief(mean, logvar, Gamma(shape, rate)), x, y)
        return new.mean, new.logvar, *new.noise

    example = [q.mean, q.logvar, *q.noise, x, y]
    program = record(flat, *example).operations
    if compile:
        from torch._inductor import compile as machine_code  # importing it takes seconds

        program = cast(Callable[..., Sequence[Tensor]], machine_code(program, example))  # type: ignore

    def run(q: Belief, x: Tensor, y: Tensor) -> Belief:
        mean, logvar, *noise = program(q.mean, q.logvar, *q.noise, x, y)
        return Belief(mean, logvar, Gamma(*noise))

    return run


def _refit(prior: Gamma, site: Site, m: Tensor, v: Tensor) -> tuple[Gamma, Site]:
    """The prior's precision and the factor of a weight that without it is N(m, v) (Eq. 51).

    Without the factor the precision is Gamma(a, b). The factor that matches moments has mean 0 and variance
    b/(a-1), and the precision is updated from Z = N(0 | m, v + b/(a-1)) as from a data point. Where either is
    not a proper distribution, nothing changes.
    """
    cavity = Gamma(prior.shape - site.shape, prior.rate - site.rate)
    total = v.unsqueeze(-1) + cavity.variances
    matched = cavity.after(-0.5 * (total.log() + m.square().unsqueeze(-1) / total))
    new = Site((cavity.shape - 1) / cavity.rate, matched.shape - cavity.shape, matched.rate - cavity.rate)
    proper = (v > 0) & (v < 1e6) & (cavity.rate > 0) & (cavity.shape > 1)

    def chosen(new: Iterable[Tensor], old: Iterable[Tensor]) -> Iterator[Tensor]:
        return (torch.where(proper, a, b) for a, b in zip(new, old, strict=True))

    return Gamma(*chosen(matched, prior)), Site(*chosen(new, site))


def check_all_random(net: nn.Module, caller: str) -> None:
    """Refuse a network with a parameter that has no variance."""
    random = {f"{name}{ending}" for name, _ in posteriors(net) for ending in ("", "_logvar")}
    deterministic = [name for name, _ in net.named_parameters() if name not in random]
    if deterministic:
        raise ValueError(
            f"{caller}: parameter {deterministic[0]!r} has no variance, and every parameter"
            " must be a random weight; use variational(net, biases=True)."
        )


def _draw(net: nn.Module, name: str, copies: int, generator: torch.Generator | None) -> Tensor:
    """Initial means of one tensor, scaled so that a layer's outputs are about as large as its inputs."""
    layer = net.get_submodule(name.rpartition(".")[0])
    tensor = net.get_parameter(name)
    normal = torch.randn(copies, tensor.numel(), generator=generator, dtype=torch.float64)
    return scale(layer) * normal.to(tensor.device)
