"""The page of the benchmarks: `python -m benchmarks.pages` writes README.md and its two figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tables import markdown

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
}
HEADINGS = {
    "steps": "One thread, eager",
    "threads": "Two threads, eager",
    "compiled": "One thread, compiled",
    "onnx": "ONNX in onnxruntime, one thread",
}
INTRODUCTION = """# Speed

`python -m benchmarks.run` measures the methods against the plain network, and `python -m benchmarks.peers`
other packages, each in a virtual environment of its own; `python -m benchmarks.pages` writes this page. All
contestants take turns. A number is the median of the ratios to the plain network in the same round, with the
quartiles in brackets.

"Plain" is the same network in the same objective with `vp.DETERMINISTIC`; "by hand" is a training loop in
torch alone. A pass of LOCAL_REPARAM is one sample. "Kept" is with a `vp.WeightCache`. `vp.correlated` is
measured for single inputs."""


FAIRNESS = """Log-likelihoods are of {splits} published split(s) of concrete, one seed each.
They are no ranking of methods: the prior of varprop, FanIn(4), was chosen on inner splits of such sets, while
the peers have the defaults of their documentation, untuned. All train by Adam with a rate of 0.01 (classes:
0.001), IVON by its own steps with a rate of 0.1. Peers learn the noise with the weights; varprop fits it
after each epoch. The initial deviations of fastbnns are copied, because fused Adam crashes on them."""


def load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def ratio(row: Mapping[str, float] | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def source(part: str, cell: Mapping[str, Any]) -> str:
    machine = cell["machine"]
    return (
        f"`benchmarks/results/{part}.json`: {machine['cpu']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, commit {cell['commit']}, {cell['took'] / 60:.0f} minutes."
    )


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


def peers(cell: Mapping[str, Any]) -> Iterator[str]:
    networks = list(cell["speed"])
    for mode in ("training", "inference"):
        by_network = [cell["speed"][network][mode] for network in networks]
        names = [name for name in by_network[0] if name != "plain"]
        lines = [[name, *(ratio(found.get(name)) for found in by_network)] for name in names]
        yield markdown([[mode, *networks], *lines])
    for task, found in cell["quality"].items():
        lines = [[task, "training", "samples", "log-likelihood", "prediction of a row"]]
        for name, run in found.items():
            for score in run["scores"]:
                numbers = f"{score['log_likelihood']:.3f}", f"{score['seconds_per_row'] * 1e6:.3g} µs"
                lines.append([name, f"{run['training_seconds']:.3g} s", str(score["samples"]), *numbers])
        yield markdown(lines)
    for what, reason in cell["failed"].items():
        yield f"* {what}: {reason}"


def page(results: Path) -> str:
    parts = [INTRODUCTION]
    for part, heading in HEADINGS.items():
        cell = load(results / "run" / f"{part}.json")
        if cell is not None:
            parts += [f"## {heading}", source(f"run/{part}", cell), turns(cell["found"])]
    cell = load(results / "run" / "replicas.json")
    if cell is not None:
        row = cell["found"]
        parts += ["## Twenty replicas at once", source("run/replicas", cell)]
        parts.append(
            "A VBP step of twenty perceptrons with `vp.replicas`, against one step of one plain perceptron: "
            f"{ratio(row['eager'])} eager and {ratio(row['compiled'])} compiled."
        )
    cell = load(results / "run" / "memory.json")
    if cell is not None:
        parts += ["## Peak memory of a training step", source("run/memory", cell), memory(cell["found"])]
    cell = load(results / "run" / "shares.json")
    if cell is not None:
        parts += ["## Where the time of a training step goes", source("run/shares", cell)]
        parts.append(
            "By torch's profiler, as multiples of the plain network's step: matrix products and "
            "convolutions, operations on single entries, and the optimiser. A layer with random weights and "
            "inputs takes three products where the plain one takes one."
        )
        parts.append(shares(cell["found"]))
    cell = load(results / "run" / "growth.json")
    if cell is not None:
        parts += ["## Growth", source("run/growth", cell)]
        parts.append(
            "Exponents of the time of a training step, fitted to the larger half of the sizes. With torch's "
            "own initial weights, the numbers of a deep perceptron shrink from layer to layer until they are "
            'subnormal, with which processors are slow; "flushed" is with `torch.set_flush_denormal(True)`.'
        )
        parts += [
            growth(cell["found"]),
            "![Time of a training step by width, depth and batch](../docs/figures/growth.png)",
        ]
    cell = load(results / "peers.json")
    if cell is not None:
        versions = ", ".join(cell["versions"].values())
        parts += ["## Other packages", source("peers", cell)]
        parts.append(
            f"{versions}. Each has its own defaults and the same network, data and epochs. Batches are the "
            "usual ones, except for 32 images with LeNet-CIFAR. Training and inference are ratios to the "
            "plain network in torch alone."
        )
        parts.append(FAIRNESS.format(splits=cell["configuration"]["splits"]))
        parts += [
            "![Test log-likelihood against the cost of a prediction](../docs/figures/peers.png)",
            *peers(cell),
        ]
    return "\n\n".join(parts) + "\n"


def draw(results: Path, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cell = load(results / "run" / "growth.json")
    if cell is not None:
        figure, axes = plt.subplots(
            1, len(cell["found"]), figsize=(10, 2.8), layout="constrained", sharey=True
        )
        for axis, (name, part) in zip(axes, cell["found"].items(), strict=True):
            for who in ("plain", "vbp", "dvi"):
                sizes = [int(n) for n in part["rows"]]
                seconds = [row[who]["seconds"] * 1e3 for row in part["rows"].values()]
                axis.loglog(sizes, seconds, "o-", ms=3, label=f"{TITLES[who]}: {part['exponents'][who]:.2f}")
            axis.set(xlabel=name)
            axis.legend(title="exponent", frameon=False, fontsize=8)
        axes[0].set_ylabel("ms for a training step")
        figure.savefig(folder / "growth.png", dpi=150)
        plt.close(figure)
    cell = load(results / "peers.json")
    if cell is not None and cell["quality"]:
        figure, axes = plt.subplots(
            1, len(cell["quality"]), figsize=(9, 3.6), layout="constrained", squeeze=False
        )
        for axis, (task, found) in zip(axes[0], cell["quality"].items(), strict=True):
            for k, (name, run) in enumerate(found.items()):
                cost = [score["seconds_per_row"] * 1e6 for score in run["scores"]]
                score = [score["log_likelihood"] for score in run["scores"]]
                ours = name.startswith("varprop")
                axis.semilogx(
                    cost,
                    score,
                    "*-" if ours else "o-",
                    ms=11 if ours else 4,
                    color=f"C{k - 1}" if k else "black",
                    label=name,
                )
            axis.set(title=task, xlabel="µs for the prediction of a row")
        axes[0][0].set_ylabel("test log-likelihood")
        figure.legend(
            *axes[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8
        )
        figure.savefig(folder / "peers.png", dpi=150)
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=HERE / "README.md")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    options.out.write_text(page(options.results))
    draw(options.results, options.figures)


if __name__ == "__main__":
    main()
