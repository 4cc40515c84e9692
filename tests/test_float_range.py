"""Legal numbers of any size give no NaN: means to 1e15, variances from 0 and subnormal numbers to 1e15.

Where the answer itself is beyond the type, as the square of 1e30 is in single precision, the result is
infinite; everywhere else value and gradient are finite. What the answer is, double precision tells.
`python -m experiments.many_cases float_range` draws many more cases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import varprop as vp
from varprop import likelihoods, predictive, priors
from varprop.gaussian import Gaussian
from varprop.horseshoe import Scales
from varprop.posterior import Posterior
from varprop.predictive import Predictive, Regression

from . import cases
from .many import MANY, TRIED, examples

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
METHODS = [vp.VBP, vp.vbp(slope=10.0), vp.DVI, vp.CVBP]
OWN = [*cases.PIECEWISE, *cases.MAXIMA]

MEANS = [0.0, 1.0, -1.0, 1e-5, -3.0, 30.0, -30.0, 300.0, -1e3, 6e4, -1e6, 1e10, 1e15, -1e15, 1e-30, -1e-300]
VARIANCES = [0.0, 5e-324, 1e-310, 1e-45, 1e-40, 1e-30, 1e-12, 1e-5, 1.0, 30.0, 1e4, 6e4, 1e8, 1e15]
SEEDS = st.integers(0, 2**32)
PAIRS = st.lists(st.tuples(st.floats(-1e15, 1e15), st.floats(0, 1e15)), min_size=2, max_size=4)


def drawn(
    shape: Sequence[int],
    dtype: torch.dtype,
    pairs: list[tuple[float, float]],
    random: Random,
    largest: float = math.inf,
) -> Gaussian:
    """Entries of every size: the extremes, what hypothesis has drawn, and ordinary numbers."""
    largest = min(largest, torch.finfo(dtype).max)
    n = math.prod(shape)
    ordinary = [(random.gauss(0, 3), random.expovariate(1)) for _ in range(3)]
    extreme = [(random.choice(MEANS), random.choice(VARIANCES)) for _ in range(6)]
    pool = [(m, v) for m, v in [*pairs, *ordinary, *extreme] if abs(m) <= largest and v <= largest]
    # Sometimes all entries are the same, as in a blank image.
    entries = [random.choice(pool)] * n if random.random() < 0.3 else random.choices(pool, k=n)
    values = torch.tensor(entries, dtype=torch.float64).to(dtype)
    return Gaussian(values[:, 0].reshape(tuple(shape)), values[:, 1].reshape(tuple(shape)))


Results = dict[str, Tensor]
"""Named outputs."""


def check(
    compute: Callable[[Gaussian], Results], exact: Callable[[Gaussian], Results], x: Gaussian
) -> Results:
    """Values and gradients are finite wherever those in double precision fit into the type; the values."""
    TRIED["cases"] += 1
    found, gradients = differentiated(compute, x)
    truth, true_gradients = differentiated(exact, x.map(Tensor.double))
    for name, value in found.items():
        fits = truth[name].abs() < torch.finfo(value.dtype).max / 16
        assert value[fits].isfinite().all(), (name, value[fits], x)
        if name.endswith("var"):
            assert not (value < 0).any(), (name, value, x)
    limit = torch.finfo(x.mean.dtype).max / 16
    for gradient, truth_of_it in zip(gradients, true_gradients, strict=True):
        if (
            all(value.isfinite().all() for value in (*found.values(), truth_of_it))
            and truth_of_it.abs().max() < limit
        ):
            assert gradient.isfinite().all(), (gradient, x)
    return found


def differentiated(compute: Callable[[Gaussian], Results], x: Gaussian) -> tuple[Results, list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in (x.mean, x.var)]
    found = compute(Gaussian.of(*leaves))
    total = sum(value.sum() for value in found.values())
    if not (isinstance(total, Tensor) and total.requires_grad):
        return found, []
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return found, [g for g in gradients if g is not None]


# ------------------------------------------------------------------------------------------------------ rules


class Of(nn.Module):
    """A torch function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Last(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x * x,
    "sum of branches": lambda x: x + torch.relu(x),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "maximum": lambda x: torch.maximum(x[:, :2], x[:, 2:]),
    "largest": lambda x: x.amax(1),
    "product": lambda x: x[:, :2] * x[:, 2:],
    "mean": lambda x: x.mean(1),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}
SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "rnn": lambda: Last(nn.RNN(4, 3, batch_first=True)),
    "lstm": lambda: Last(nn.LSTM(4, 3, batch_first=True)),
    "gru": lambda: Last(nn.GRU(4, 3, batch_first=True)),
}
RULES = [
    *((case, method) for case in cases.ALL for method in (METHODS if case in OWN else [vp.DVI])),
    *(
        (cases.Case(name, lambda f=f: Of(f), (3, 4)), method)
        for name, f in FUNCTIONS.items()
        for method in METHODS
    ),
    *((cases.Case(name, make, (2, 3, 4)), vp.DVI) for name, make in SEQUENCES.items()),
]


@by_dtype
@given(pairs=PAIRS, seed=SEEDS)
@examples(1)
def test_rules(dtype: torch.dtype, pairs: list[tuple[float, float]], seed: int) -> None:
    random = Random(seed)
    # In the suite, single precision has all of them and the other types a third.
    every = 1 if MANY or dtype is torch.float32 else 3
    for case, method in RULES[random.randrange(every) :: every]:
        module, _ = case.build(dtype)
        double = copy.deepcopy(module).double()
        if dtype is torch.bfloat16 and case.name == "avg pool3d":
            continue  # torch has none
        # The scores of attention are products of its inputs, and their variance has to fit, too.
        largest = 1e7 if "attention" in case.name or case.name == "transformer" else math.inf
        x = drawn(case.shape, dtype, pairs, random, largest)
        found = check(partial(moments, method, module), partial(moments, method, double), x)
        assert found["mean"].dtype == (torch.float32 if dtype is torch.float16 else dtype)


def moments(method: vp.Method, module: nn.Module, x: Gaussian) -> Results:
    y = method(module, x)
    return {"mean": y.mean, "var": y.var}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("mean", "var"),
    [
        # The largest weight is one but for 1e-18.
        (
            [[1, 6e4, 1, 6e4], [-3, 1, -3, 1], [-3, 1, -3, 1]],
            [[0, 0, 0, 0], [1e4, 0, 1e4, 0], [1e4, 0, 1e4, 0]],
        ),
        # The variance of a value is one, and the summands of its formula are 1e18.
        ([[300, 1, 1, 1], [1, 6e4, 1, 1], [6e4, 1, 1, 300]], [[1e4, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1e4]]),
    ],
    ids=["gradient", "value"],
)
def test_attention_to_a_single_position(
    dtype: torch.dtype, mean: list[list[float]], var: list[list[float]]
) -> None:
    x = Gaussian(torch.tensor(mean, dtype=dtype), torch.tensor(var, dtype=dtype))
    attention = partial(moments, vp.VBP, Of(FUNCTIONS["attention"]))
    found = check(attention, attention, x)
    truth = attention(x.map(Tensor.double))
    torch.testing.assert_close(found["var"].double(), truth["var"], rtol=0.01, atol=0.0)


@by_dtype
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("logvar", [-9.0, -3.5])
def test_a_hundred_layers_neither_overflow_nor_lose_the_variance(
    dtype: torch.dtype, method: vp.Method, logvar: float
) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(100)]
    net = vp.variational(nn.Sequential(*layers), logvar, init="he").to(dtype)
    with torch.no_grad():
        f = method(net, torch.randn(4, 64).to(dtype))
    assert f.mean.isfinite().all()
    assert f.var.isfinite().all()
    assert f.var.max() > torch.finfo(dtype).tiny


# ----------------------------------------------------------------------------------- likelihoods, predictions

LIKELIHOODS: dict[str, tuple[Callable[[], likelihoods.Likelihood], int]] = {
    "normal": (likelihoods.Normal, 1),
    "precise normal": (lambda: likelihoods.Normal(1e4), 1),
    "heteroscedastic": (likelihoods.HeteroscedasticNormal, 2),
    "bounded": (likelihoods.BoundedNoise, 2),
    "student": (likelihoods.StudentT, 1),
    "bernoulli": (likelihoods.Bernoulli, 1),
    "bernoulli, bound": (lambda: likelihoods.Bernoulli("bound"), 1),
    "bernoulli, paper": (lambda: likelihoods.Bernoulli("paper"), 1),
    "multi-label": (likelihoods.MultiLabel, 3),
    **{
        f"categorical, {how}": (lambda how=how: likelihoods.Categorical(how), 3)
        for how in ("quadrature", "delta", "mackay", "plugin", "samples")
    },
}


@by_dtype
@given(pairs=PAIRS, seed=SEEDS)
@examples(2)
def test_likelihoods_and_predictions(dtype: torch.dtype, pairs: list[tuple[float, float]], seed: int) -> None:
    random = Random(seed)
    # A float16 network's output has single precision, whatever the type of its targets.
    output = torch.float32 if dtype is torch.float16 else dtype
    for name, (make, outputs) in LIKELIHOODS.items():
        likelihood = make().to(output)
        double = copy.deepcopy(likelihood).double()
        # By a tiny variance of the noise's level, rounding errors are multiplied by the squared error.
        x = drawn((6, outputs), output, pairs, random, 1e9 if name == "bounded" else math.inf)
        y = targets(likelihood, x, pairs, random)
        check(partial(fitted, likelihood, y), partial(fitted, double, y), x)
        consistent(likelihood.predictive(x))


def targets(
    likelihood: likelihoods.Likelihood, f: Gaussian, pairs: list[tuple[float, float]], random: Random
) -> Tensor:
    shape = likelihood.target_shape(f)
    if isinstance(likelihood, likelihoods.Categorical):
        return torch.tensor([random.randrange(f.shape[1]) for _ in range(shape[0])])
    if isinstance(likelihood, likelihoods.Bernoulli | likelihoods.MultiLabel):
        return torch.tensor([float(random.random() < 0.5) for _ in range(math.prod(shape))]).view(shape)
    return drawn(shape, f.mean.dtype, pairs, random, 1e9).mean


def fitted(likelihood: likelihoods.Likelihood, y: Tensor, f: Gaussian) -> Results:
    y = y.to(f.mean.dtype) if y.is_floating_point() else y
    return {"expected": likelihood.expected_log_prob(f, y), "log_prob": likelihood.predictive(f).log_prob(y)}


def consistent(p: Predictive) -> None:
    """Intervals are in order, and probabilities are probabilities."""
    if isinstance(p, Regression):
        for level in (0.5, 0.999):
            lower, upper = p.interval(level)
            assert (lower <= p.mean).all()
            assert (p.mean <= upper).all()
        assert (p.std >= 0).all()
        assert (p.epistemic >= 0).all()
        at = torch.stack([p.cdf(p.mean + step * p.std) for step in (-1e3, -1.0, 0.0, 1.0, 1e3)])
        assert (at >= 0).all()
        assert (at <= 1).all()
        assert (at.diff(dim=0) >= -4 * torch.finfo(at.dtype).eps).all()
        return
    assert isinstance(p, predictive.ClassPredictive | predictive.LabelPredictive)
    assert (p.probs >= 0).all()
    assert (p.probs <= 1).all()
    total = (
        p.probs.double().sum(1)
        if isinstance(p, predictive.ClassPredictive)
        else (p.probs + p.complement).double()
    )
    assert ((total - 1).abs() < 4 * torch.finfo(p.probs.dtype).eps).all(), total
    for value in (p.entropy, p.expected_entropy, p.mutual_information):
        assert value.isfinite().all()
        assert (value >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(pairs=PAIRS, seed=SEEDS)
@examples(3)
def test_predictions_of_numbers(dtype: torch.dtype, pairs: list[tuple[float, float]], seed: int) -> None:
    random = Random(seed)
    parts = [drawn((5, 1), dtype, pairs, random) for _ in range(4)]
    # Noise that is zero makes a density infinite.
    noise = parts[1].var.clamp(min=torch.finfo(dtype).tiny)
    normal = predictive.NormalPredictive(parts[0].mean, parts[0].var, noise)
    other = replace(normal, mean=parts[2].mean, epistemic=parts[2].var)
    student = predictive.StudentPredictive(
        parts[0].mean, parts[0].var, noise, 2.1 + parts[3].var.clamp(max=1e6)
    )
    for p in (normal, student, predictive.mixture([normal, other]), predictive.rescaled(normal, 1e3, 1e-3)):
        TRIED["cases"] += 1
        consistent(p)
    small = predictive.NormalPredictive(
        parts[0].mean.clamp(-20, 20), parts[0].var.clamp(max=5), noise.clamp(max=5)
    )
    consistent_on_a_log_scale(predictive.exponential(small))
    consistent_on_a_log_scale(predictive.exponential(normal))


def consistent_on_a_log_scale(p: Regression) -> None:
    TRIED["cases"] += 1
    lower, upper = p.interval(0.9)
    for value in (p.mean, p.epistemic, p.aleatoric, lower, upper):
        assert not value.isnan().any()
        assert (value >= 0).all()
    assert (lower <= upper).all()


# ------------------------------------------------------------------------------------------------ divergences

PRIORS = [
    priors.Normal(),
    priors.Normal(1e-15),
    priors.FanIn(),
    priors.Centred(2.0),
    priors.Earlier(),
    priors.LogUniform(),
    priors.EmpiricalBayes(),
    priors.EmpiricalBayes((1.0, 10.0)),
]


def divergence(prior: priors.Prior, logvar: Tensor, centre: Tensor, earlier: Tensor, w: Gaussian) -> Results:
    """Of a posterior with the means of w; its log-variances are drawn for themselves."""
    logvar, centre, earlier = (t.to(w.mean) for t in (logvar, centre, earlier))
    before = Posterior(earlier, torch.zeros_like(logvar))
    return {"kl": prior.kl(Posterior(w.mean, logvar, centre=centre, earlier=before))}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: str(dtype)[6:])
@given(pairs=PAIRS, seed=SEEDS)
@examples(3)
def test_divergences(dtype: torch.dtype, pairs: list[tuple[float, float]], seed: int) -> None:
    random = Random(seed)
    smallest = math.log(torch.finfo(dtype).tiny)
    for prior in PRIORS:
        w = drawn((3, 2), dtype, pairs, random)
        centre, earlier = (drawn((3, 2), dtype, pairs, random).mean for _ in range(2))
        logvar = torch.tensor([[random.uniform(smallest, 34.5) for _ in range(2)] for _ in range(3)]).to(
            dtype
        )

        kl = partial(divergence, prior, logvar, centre, earlier)
        found = check(kl, kl, w)
        if not isinstance(prior, priors.LogUniform) and dtype is torch.float64:
            assert found["kl"] >= -1e-6 * (1 + w.mean.abs().max())


@given(seed=SEEDS)
@examples(5)
def test_the_divergence_of_a_horseshoe_is_finite(seed: int) -> None:
    torch.manual_seed(seed % 2**32)
    scales = Scales(3)
    with torch.no_grad():
        for parameter in scales.parameters():
            parameter.uniform_(-80.0, 4.0)
    q = Posterior(torch.randn(2, 3) * 1e3, torch.full((2, 3), -80.0), scales)
    TRIED["cases"] += 1
    kl = priors.Horseshoe().kl(q)
    kl.backward()
    assert kl.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in scales.parameters())


# ------------------------------------------------------------------------------------------- float16 networks


@pytest.mark.parametrize("posterior", ["full", "factored", "horseshoe"])
def test_a_float16_network_is_computed_in_single_precision(posterior: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 1))
    net = vp.variational(net, posterior=posterior).half()
    prior = priors.Horseshoe() if posterior == "horseshoe" else priors.Normal()
    elbo = vp.ELBO(net, vp.DVI, likelihoods.Normal().half(), prior, n_data=16)
    x, y = 300 * torch.randn(16, 3).half(), torch.randn(16, 1).half()
    elbo.train()
    loss = elbo(x, y)
    loss.backward()
    assert loss.dtype is torch.float32
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net[1].running_var.max() > 2  # the running statistics are those of the pass
    elbo.eval()
    half, single = vp.DVI(net, x), vp.DVI(copy.deepcopy(net).float(), x.float())
    torch.testing.assert_close((half.mean, half.var), (single.mean, single.var))
