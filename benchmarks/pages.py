"""The page of the benchmarks: `python -m benchmarks.pages` writes README.md and its two figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.tables import markdown

from . import figures
from .peers.__main__ import NETWORKS, TASKS

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURES = HERE.parent / "docs" / "figures"
TITLES = {
    "plain": "plain",
    "vbp": "VBP",
    "dvi": "DVI",
    "cvbp": "CVBP",
    "local_reparam": "LOCAL_REPARAM",
    "factored": "VBP, factored",
    "vbp, kept": "VBP, kept",
    "dvi, kept": "DVI, kept",
    "correlated": "correlated",
    "by hand": "by hand",
    "plain, recorded": "plain, recorded",
    "vbp, recorded": "VBP",
    "dvi, recorded": "DVI",
    "cvbp, recorded": "CVBP",
    "local_reparam, recorded": "LOCAL_REPARAM",
    "factored, recorded": "VBP, factored",
}
INTRODUCTION = """# Speed

`python -m benchmarks.run` measures the methods against the plain network, and `python -m benchmarks.peers`
other packages, each in a virtual environment of its own; `python -m benchmarks.pages` writes this page. All
contestants take turns. A number is the median of the ratios to the plain network in the same round, with the
quartiles in brackets.

"Plain" is the same network in the same objective with `vp.DETERMINISTIC`; "by hand" is a training loop in
torch alone. A pass of LOCAL_REPARAM is one sample. "Kept" is with a `vp.WeightCache`. `vp.correlated` is
measured for single inputs."""


FAIRNESS = """Log-likelihoods are averages over published splits of concrete and over runs from several
seeds on the same 2,000 digits, with standard errors. They are no ranking of methods: the prior of varprop,
FanIn(4), was chosen on inner splits of such sets, while the peers have the defaults of their documentation,
untuned. All train by Adam with a rate of 0.01 (classes: 0.001), IVON by its own steps with a rate of 0.1,
pytagi by its own updates. Peers learn the noise with the weights; varprop fits it after each epoch. The
initial deviations of fastbnns are copied, because fused Adam crashes on them."""


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def ratio(row: Mapping[str, float] | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def source(path: Path, *cells: Mapping[str, Any]) -> str:
    machines, commits = (
        " and ".join(sorted(found))
        for found in ({_machine(cell["machine"]) for cell in cells}, {cell["commit"] for cell in cells})
    )
    minutes = sum(cell["took"] for cell in cells) / 60
    return f"`benchmarks/results/{path}`: {machines}, commit {commits}, {minutes:.0f} minutes."


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def turns(found: Mapping[str, Any]) -> str:
    """Network × mode × batch, with a column for each contestant."""
    rows = [
        (network, mode, batch, row)
        for network, modes in found.items()
        for mode, by_batch in modes.items()
        for batch, row in by_batch.items()
    ]
    names = [name for name in TITLES if name != "plain" and any(name in row for *_, row in rows)]
    lines = [["network", "", "batch", "plain", *(TITLES[name] for name in names)]]
    for network, mode, batch, row in rows:
        plain = milliseconds(row["plain"]["seconds"])
        lines.append([network, mode, batch, plain, *(ratio(row.get(name)) for name in names)])
    return markdown(lines)


def memory(found: Mapping[str, Any]) -> str:
    names = [name for name in TITLES if name in next(iter(found.values()))]
    lines = [["network", *(TITLES[name] for name in names)]]
    for network, row in found.items():
        plain = f"{row['plain']['bytes'] / 2**20:.3g} MiB"
        lines.append([network, plain, *(f"{row[name]['ratio']:.2f}" for name in names[1:])])
    return markdown(lines)


def shares(found: Mapping[str, Any]) -> str:
    kinds = {"products": "products", "entries": "entry by entry", "optimiser": "optimiser"}
    lines = [["network", "step of", *kinds.values(), "all"]]
    for network, by_method in found.items():
        for who, row in by_method.items():
            numbers = *(row[kind] for kind in kinds), sum(row.values())
            lines.append([network, TITLES[who], *(f"{number:.2f}" for number in numbers)])
    return markdown(lines)


def growth(found: Mapping[str, Any]) -> str:
    lines = [["as it grows", *(TITLES[name] for name in ("plain", "vbp", "dvi"))]]
    for axis, part in found.items():
        lines.append([axis, *(f"{part['exponents'][name]:.2f}" for name in ("plain", "vbp", "dvi"))])
    return markdown(lines)


def replicas(found: Mapping[str, Any]) -> str:
    return (
        "A VBP step of twenty perceptrons with `vp.replicas`, against one step of one plain perceptron: "
        f"{ratio(found['eager'])} eager and {ratio(found['compiled'])} compiled."
    )


@dataclass(frozen=True)
class Part:
    """A section of the page, from one file of results."""

    heading: str
    shown: Callable[[Mapping[str, Any]], str]
    text: str = ""
    figure: str = ""


PARTS = {
    "steps": Part("One thread, eager", turns),
    "recorded": Part(
        "A step of vp.fit",
        turns,
        "`vp.fit` records the operations of a small network's step and runs them again, without rules, "
        "modules and autograd. Ratios are to the plain network's step as autograd takes it.",
    ),
    "threads": Part("Two threads, eager", turns),
    "compiled": Part("One thread, compiled", turns),
    "onnx": Part("ONNX in onnxruntime, one thread", turns),
    "replicas": Part("Twenty replicas at once", replicas),
    "memory": Part("Peak memory of a training step", memory),
    "shares": Part(
        "Where the time of a training step goes",
        shares,
        "By torch's profiler, as multiples of the plain network's step: matrix products and convolutions, "
        "operations on single entries, and the optimiser. A layer with random weights and inputs takes three "
        "products where the plain one takes one.",
    ),
    "growth": Part(
        "Growth",
        growth,
        "Exponents of the time of a training step, fitted to the larger half of the sizes. With torch's own "
        "initial weights, the numbers of a deep perceptron shrink from layer to layer until they are "
        'subnormal, with which processors are slow; "flushed" is with `torch.set_flush_denormal(True)`.',
        "![Time of a training step by width, depth and batch](../docs/figures/growth.png)",
    ),
}
"""By the names of the parts of `benchmarks.run`."""


def page(results: Path) -> str:
    parts = [INTRODUCTION]
    for name, part in PARTS.items():
        path = Path("run") / f"{name}.json"
        if (results / path).exists():
            cell = load(results / path)
            section = (
                f"## {part.heading}",
                source(path, cell),
                part.text,
                part.shown(cell["found"]),
                part.figure,
            )
            parts += [paragraph for paragraph in section if paragraph]
    return "\n\n".join([*parts, *peers(results)]) + "\n"


def of_peers(results: Path, kind: str) -> dict[str, Any]:
    """The cells of the networks or of the tasks, by name."""
    found = [load(path) for path in sorted((results / "peers" / kind).glob("*.json"))]
    by_name = {cell["name"]: cell for cell in found}
    return {name: by_name[name] for name in (*NETWORKS, *TASKS) if name in by_name}


def peers(results: Path) -> Iterator[str]:
    speed, quality = of_peers(results, "speed"), of_peers(results, "quality")
    every = [*speed.values(), *quality.values()]
    if not every:
        return
    yield "## Other packages"
    yield source(Path("peers"), *every)
    yield (
        f"{', '.join(every[0]['versions'].values())}. Each has its own defaults and the same network, data "
        "and epochs. Batches are the usual ones, except for 32 images with LeNet-CIFAR. Training and "
        "inference are ratios to the plain network in torch alone."
    )
    yield FAIRNESS
    yield "![Test log-likelihood against the cost of a prediction](../docs/figures/peers.png)"
    for mode in ("training", "inference"):
        by_network = [cell["found"][mode] for cell in speed.values()]
        names = dict.fromkeys(name for found in by_network for name in found if name != "plain")
        lines = [[name, *(ratio(found.get(name)) for found in by_network)] for name in names]
        yield markdown([[mode, *speed], *lines])
    for task, cell in quality.items():
        title = f"{task}, {cell['configuration']['runs']} runs"
        lines = [[title, "training", "samples", "log-likelihood", "prediction of a row"]]
        for name, run in cell["found"].items():
            for score in run["scores"]:
                reached = f"{score['log_likelihood']:.3f} ± {score['standard_error']:.3f}"
                cost = f"{score['seconds_per_row'] * 1e6:.3g} µs"
                lines.append([name, f"{run['training_seconds']:.3g} s", str(score["samples"]), reached, cost])
        yield markdown(lines)
    yield "\n".join(f"* {what}: {reason}" for cell in every for what, reason in cell["failed"].items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=HERE / "README.md")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    options.out.write_text(page(options.results))
    growing = options.results / "run" / "growth.json"
    if growing.exists():
        figures.growth(load(growing)["found"], TITLES).savefig(options.figures / "growth.png", dpi=150)
    if tasks := of_peers(options.results, "quality"):
        figures.quality(tasks).savefig(options.figures / "peers.png", dpi=150)


if __name__ == "__main__":
    main()
