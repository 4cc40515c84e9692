"""Does every call work on networks that others wrote, and is the variance true? `python -m experiments.zoo`.

    python -m experiments.zoo --networks "torchvision resnet18" "timm vit" --draws 200
    python -m experiments.zoo --again          # once more where something failed

`zoo_networks.py` builds the networks with random weights. Each weight gets a standard deviation of 1 % and of
10 % of the root mean square of its tensor. The variances of VBP, DVI and `vp.correlated` are divided by those
of 1,000 sampled networks, each a plain pass in evaluation mode. One cell for each network; cells that exist
are not computed again.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from benchmarks.turns import compared as ratios
from benchmarks.turns import take_turns
from varprop.gaussian import Activation, mean_of
from varprop.methods.base import chosen
from varprop.posterior import draw
from varprop.substitution import substituted

from . import cells
from .accuracy import Moments
from .tables import markdown
from .zoo_networks import ZOO, Built

RELATIVE = (0.01, 0.1)
"""Standard deviation of a weight over the root mean square of the weights of its tensor."""
CALLS = ("variational", "VBP", "DVI", "summary", "ELBO", "compile", "correlated")
METHODS = ("VBP", "DVI", "correlated")
SECONDS = 300
"""How long a call may take, in processor time."""
FOLDER = cells.RESULTS / "zoo"

Scores = dict[str, Any]


# -------------------- networks ready to be judged


def prepared(build: Callable[[], Built]) -> Built:
    """The network in evaluation mode, with no weight left at zero and with running statistics of noise.

    Some networks start with layers or scales of zero, which would hide what stands behind them.
    """
    torch.manual_seed(0)
    built = build()
    for layer in built.net.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and not weight.any():
            nn.init.ones_(weight) if weight.dim() == 1 else nn.init.xavier_normal_(weight)
    built.net.eval()
    norms = [part for part in built.net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if norms:
        _settle(built, norms)
    return built


@torch.no_grad()
def _settle(built: Built, norms: Sequence[nn.modules.batchnorm._BatchNorm]) -> None:
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = None  # averages all batches
    for _ in range(5):
        built.net(*map(_noise, built.args), **{name: _noise(x) for name, x in built.kwargs.items()})
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def _noise(x: Any) -> Any:
    """Sixteen examples like x."""
    if not isinstance(x, Tensor):
        return x
    return torch.randn(16, *x.shape[1:]) if x.is_floating_point() else x[:1].expand(16, *x.shape[1:])


@torch.no_grad()
def scale(net: nn.Module, relative: float) -> None:
    """Give every random tensor one variance, relative to its mean square."""
    for name, q in vp.posteriors(net):
        owner, _, tensor = name.rpartition(".")
        logvar = getattr(net.get_submodule(owner), f"{tensor}_logvar")
        logvar.fill_((relative**2 * q.mean.square().mean()).clamp(min=1e-20).log())


# -------------------- the calls


def calls(built: Built) -> dict[str, Callable[[], Any]]:
    """Each call as a user would write it."""
    net, args, kwargs = built.net, built.args, built.kwargs
    choice = {} if built.output is None else {"output": built.output}

    def elbo() -> None:
        with torch.no_grad():
            y = mean_of(chosen(net(*args, **kwargs), built.output))
        objective = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(4.0), n_data=1000, **choice)
        loss = objective(inputs(built), y)
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        if not (loss.isfinite() and gradients and all(g.isfinite().all() for g in gradients)):
            raise ArithmeticError("the loss or a gradient is not finite")

    def compiled() -> None:
        torch.compiler.reset()
        one_pass = torch.compile(lambda: vp.DVI(net, *args, **kwargs), fullgraph=True, backend="eager")
        eager, fast = (chosen(f, built.output) for f in (vp.DVI(net, *args, **kwargs), one_pass()))
        torch.testing.assert_close(fast.var, eager.var, rtol=1e-3, atol=0.0)

    return {
        "VBP": lambda: random(chosen(vp.VBP(net, *args, **kwargs), built.output)),
        "DVI": lambda: random(chosen(vp.DVI(net, *args, **kwargs), built.output)),
        "summary": lambda: str(vp.summary(net, vp.DVI, *args, **kwargs)),
        "ELBO": elbo,
        "compile": compiled,
        "correlated": lambda: random(vp.correlated(net, *args, batched=built.batched, **choice, **kwargs)),
    }


def inputs(built: Built) -> Any:
    """One batch, as an ELBO takes it: a tensor, a tuple or a dictionary."""
    if built.kwargs:
        return dict(built.kwargs)
    return built.args[0] if len(built.args) == 1 else built.args


def random(f: Activation) -> vp.Gaussian:
    if not isinstance(f, vp.Gaussian):
        raise TypeError(f"the output is a {type(f).__name__} without variance")
    if not bool((f.mean.isfinite() & f.var.isfinite()).all()):
        raise ArithmeticError("the mean or the variance is not finite")
    return f


def tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call returns, or its error in a sentence."""
    try:
        with within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(), None
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return None, f"{type(error).__name__}: {' '.join(lines[:2])}"[:400]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -------------------- truth and cost


@torch.no_grad()
def sampled(built: Built, draws: int) -> tuple[Tensor, Tensor]:
    """Mean and variance over networks with sampled weights."""
    moments, generator = Moments(), torch.Generator().manual_seed(1)
    for _ in range(draws):
        weights = {name: w[0] for name, w in draw(built.net, 1, generator).items()}
        f = substituted(built.net, weights, nn.Module.__call__, *built.args, **built.kwargs)
        moments.add(chosen(f, built.output).unsqueeze(0))
    return moments.result()


def compared(f: vp.Gaussian, mean: Tensor, var: Tensor) -> dict[str, float]:
    """Predicted over sampled variance, and the error of the mean in standard deviations."""
    varies = var > 1e-12 * var.max()
    ratio = (f.var / var)[varies].double()
    low, median, high = torch.quantile(ratio, torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
    error = ((f.mean - mean).abs() / var.sqrt())[varies].mean().item()
    return {"median": median, "low": low, "high": high, "mean_error": error}


@torch.no_grad()
def costs(built: Built, passes: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """The processor time of each over that of the plain network, taken in turns."""
    every = {"plain": lambda: built.net(*built.args, **built.kwargs), **passes}
    found = ratios(take_turns(every, seconds=60, rounds=(1, rounds)), "plain")
    return {name: found[name]["ratio"] for name in passes}


def measure(build: Callable[[], Built], draws: int) -> Scores:
    built = prepared(build)
    _, error = tried(lambda: vp.variational(built.net))
    report: Scores = {"calls": {"variational": error}}
    if error is not None:
        return report
    scale(built.net, RELATIVE[0])
    runs, found = calls(built), dict[str, Any]()
    for name, run in runs.items():
        context = torch.enable_grad() if name == "ELBO" else torch.no_grad()
        with context:
            found[name], report["calls"][name] = tried(run)
    works = [name for name in METHODS if report["calls"][name] is None]
    if not works:
        return report
    report["weights"] = sum(q.mean.numel() for _, q in vp.posteriors(built.net))
    report["passes"] = costs(built, {name: runs[name] for name in works})
    report["ratios"], report["spread"] = {}, {}
    for relative in RELATIVE:
        scale(built.net, relative)
        truth, error = tried(lambda: sampled(built, draws))
        if error is not None:
            report["calls"]["draw"] = error
            break
        report["outputs"] = truth[0][0].numel()
        report["spread"][f"{relative:g}"] = (truth[1].mean() / truth[0].var()).sqrt().item()
        with torch.no_grad():
            predicted = {name: tried(runs[name])[0] for name in works}
        report["ratios"][f"{relative:g}"] = {
            name: compared(f, *truth) for name, f in predicted.items() if f is not None
        }
    return report


# -------------------- the table


def rows(folder: Path = FOLDER) -> dict[str, Scores]:
    """The cells that exist, in the order of the zoo."""
    paths = {name: folder / f"{cells.slug(name)}.json" for name in ZOO}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def table(folder: Path = FOLDER) -> str:
    head = ["network", "weights", *CALLS[1:]]
    head += [f"{method}, {100 * r:g} %" for r in RELATIVE for method in METHODS]
    head += [f"mean of {METHODS[-1]}, {100 * r:g} %" for r in RELATIVE]
    head += [f"spread, {100 * r:g} %" for r in RELATIVE]
    head += [f"cost of {method}" for method in METHODS] + ["outputs"]
    return markdown([head, *(_line(name, row) for name, row in rows(folder).items())])


def _line(name: str, row: Scores) -> list[str]:
    works = ["yes" if row["calls"].get(call, "") is None else "no" for call in CALLS[1:]]
    scores = [row.get("ratios", {}).get(f"{r:g}", {}) for r in RELATIVE]
    ratios = [_ratio(score.get(method)) for score in scores for method in METHODS]
    means = [f"{score[METHODS[-1]]['mean_error']:.2f}" if METHODS[-1] in score else "" for score in scores]
    spread = [
        f"{row['spread'][key]:.2g}" if key in row.get("spread", {}) else "" for key in map(str, RELATIVE)
    ]
    passes = [f"{row['passes'][m]:.1f}" if m in row.get("passes", {}) else "" for m in METHODS]
    size, outputs = f"{row.get('weights', 0):,}", str(row.get("outputs", ""))
    return [name, size, *works, *ratios, *means, *spread, *passes, outputs]


def _ratio(score: Mapping[str, float] | None) -> str:
    return "" if score is None else f"{score['median']:.2f} ({score['low']:.2f}–{score['high']:.2f})"


def failures(folder: Path = FOLDER) -> str:
    """What does not work, with the sentence that a user sees."""
    lines = [
        [name, call, error.replace("|", "\\|")]
        for name, row in rows(folder).items()
        for call, error in row["calls"].items()
        if error is not None
    ]
    return markdown([["network", "call", "error"], *lines])


def run(name: str, draws: int, out: Path, again: bool) -> None:
    """Compute a cell, unless it exists already."""
    package = ZOO[name].package
    configuration = {"network": name, "package": f"{package} {version(package)}", "draws": draws}
    path = out / f"{cells.slug(name)}.json"
    failed = path.exists() and any(json.loads(path.read_text())["calls"].values())
    if cells.finished(path, configuration) and not (again and failed):
        return
    start = time.process_time()
    scores = measure(ZOO[name].build, draws)
    cells.write(path, configuration, **scores, seconds=round(time.process_time() - start, 1))
    missing = [call for call in CALLS if scores["calls"].get(call, "") is not None]
    true = [_ratio(score.get(METHODS[-1])) for score in scores.get("ratios", {}).values()]
    print(f"{name:40} fails: {', '.join(missing) or 'nothing':40} {'   '.join(true)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.zoo", description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=ZOO, default=list(ZOO), metavar="NAME")
    parser.add_argument("--draws", type=int, default=1000, help="sampled networks")
    parser.add_argument("--again", action="store_true", help="also compute cells anew in which a call failed")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.networks:
        if ZOO[name].is_installed:
            run(name, options.draws, options.out, options.again)
        else:
            print(f"{name}: {ZOO[name].package} is not installed, see experiments/zoo.txt", flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()
