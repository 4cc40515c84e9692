"""How do other packages compare, in cost and in quality? `python -m benchmarks.peers`.

Each peer runs in a process of its own environment, and the processes take turns. Measured are a training
step and a prediction on each network, and the test log-likelihood after the same epochs on each task:
concrete (published splits) and 2,000 digits of MNIST. Each peer has its own defaults. A network or a task is
one file of benchmarks/results/peers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from experiments import cells, data

from ..networks import CASES
from ..turns import Times, compared
from .adapters import ADAPTERS, OURS
from .environments import CACHE, PEERS, interpreter

RESULTS = Path(__file__).parents[1] / "results" / "peers"
ROOT = Path(__file__).parents[2]
NETWORKS = "perceptron", "wide perceptron", "LeNet-small", "LeNet-CIFAR"
ROWS = {"LeNet-CIFAR": 32}
"""A smaller batch where a hundred samples of a larger one would take minutes."""
DIGITS = 2000


class Process:
    """A worker with the environment of a peer."""

    def __init__(self, peer: str, python: Path) -> None:
        self.samples = {**OURS, **ADAPTERS}[peer].samples
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [str(python), "-W", "ignore", "-m", "benchmarks.peers.worker", peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def ask(self, do: str, **request: Any) -> Any:
        """The answer of the worker, or a RuntimeError with its reason."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                answer = json.loads(line[1:])
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["answer"]
        raise RuntimeError("the process ended")

    def end(self) -> None:
        self.process.communicate()


@contextmanager
def started(peers: Sequence[str], folder: Path, failed: dict[str, str]) -> Iterator[dict[str, Process]]:
    """The plain network, varprop and all peers that can be installed."""
    found = {name: Process(name, Path(sys.executable)) for name in OURS}
    for peer in peers:
        try:
            found[peer] = Process(peer, interpreter(peer, folder))
        except (RuntimeError, subprocess.CalledProcessError) as error:  # noqa: PERF203
            failed[peer] = f"does not install: {error}"
    try:
        yield found
    finally:
        for process in found.values():
            process.end()


def requests(processes: dict[str, Process], network: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, peer and request of everything that is timed on a network."""
    shared = {"network": network, "rows": ROWS.get(network)}
    for peer, process in processes.items():
        yield f"{peer}, training", peer, {**shared, "mode": "training"}
        for samples in process.samples:
            name = peer if samples == 1 else f"{peer}, {samples} samples"
            yield f"{name}, inference", peer, {**shared, "mode": "inference", "samples": samples}


def speed(processes: dict[str, Process], network: str, rounds: int, failed: dict[str, str]) -> Any:
    """Seconds and ratios to the plain network of steps and predictions."""
    asked = list(requests(processes, network))
    times: Times = {name: [] for name, *_ in asked}
    for k in range(rounds + 1):
        for name, peer, request in asked:
            if name in times:
                try:
                    seconds = processes[peer].ask("seconds", **request)
                    times[name] += [seconds] if k else []
                except RuntimeError as error:
                    failed[f"{name} of {network}"] = str(error)
                    del times[name]
    found = {}
    for mode in ("training", "inference"):
        ours = {name.removesuffix(f", {mode}"): t for name, t in times.items() if name.endswith(mode)}
        found[mode] = compared(ours, "plain")
    return found


def concrete(splits: int) -> Iterator[dict[str, np.ndarray]]:
    found = data.regression("concrete", tuple(range(splits)))
    for k in range(splits):
        yield {name: getattr(found, name)[k].numpy() for name in ("x", "y", "x_test", "y_test")}


def digits(splits: int) -> Iterator[dict[str, np.ndarray]]:
    """The same digits for each seed."""
    x, y, x_test, y_test = data.mnist()
    flat = [(t.flatten(1).float() / 255 - 0.1307) / 0.3081 for t in (x[:DIGITS], x_test[:DIGITS])]
    arrays = {"x": flat[0], "y": y[:DIGITS].long(), "x_test": flat[1], "y_test": y_test[:DIGITS].long()}
    yield from [{name: t.numpy() for name, t in arrays.items()}] * splits


@dataclass(frozen=True)
class Task:
    """What is learned: the arrays of each run, with its epochs and batch."""

    splits: Callable[[int], Iterator[dict[str, np.ndarray]]]
    runs: int
    epochs: int
    batch: int


TASKS = {
    "concrete": Task(concrete, runs=10, epochs=100, batch=32),
    "MNIST": Task(digits, runs=3, epochs=20, batch=128),
}


def quality(processes: dict[str, Process], task: str, runs: int, failed: dict[str, str]) -> Any:
    """Test log-likelihoods with their costs, averaged over the runs of a task."""
    found: dict[str, list[Any]] = {}
    chosen = TASKS[task]
    with TemporaryDirectory() as folder:
        for seed, arrays in enumerate(chosen.splits(runs)):
            path = Path(folder) / f"{seed}.npz"
            np.savez(path, **arrays)  # type: ignore[arg-type]
            for peer, process in processes.items():
                request = {"path": str(path), "epochs": chosen.epochs, "batch": chosen.batch, "seed": seed}
                try:
                    run = process.ask("quality", **request)
                    found.setdefault(peer, []).append(run)
                    best = max(score["log_likelihood"] for score in run["scores"])
                    print(f"{task} {seed}, {peer}: {best:.3f}, {run['training_seconds']:.1f} s", flush=True)
                except RuntimeError as error:
                    failed[f"{peer} on {task}"] = str(error)
    return {peer: averaged(scores) for peer, scores in found.items()}


def averaged(runs: Sequence[Any]) -> Any:
    """The mean over runs, for log-likelihoods with its standard error."""
    scores = []
    for at in zip(*(run["scores"] for run in runs), strict=True):
        reached = [score["log_likelihood"] for score in at]
        error = stdev(reached) / math.sqrt(len(reached)) if len(reached) > 1 else None
        seconds = fmean(score["seconds_per_row"] for score in at)
        row = {"samples": at[0]["samples"], "log_likelihood": fmean(reached), "standard_error": error}
        scores.append({**row, "seconds_per_row": seconds})
    return {"training_seconds": fmean(run["training_seconds"] for run in runs), "scores": scores}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--networks", nargs="*", choices=CASES, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--runs", type=int, help="of each task, if not as many as it has")
    parser.add_argument("--envs", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells.commit()  # cached now, because the tree may change meanwhile
    versions = {peer: PEERS[peer][0] for peer in options.peers}
    for kind, name in [("speed", n) for n in options.networks] + [("quality", n) for n in options.tasks]:
        began, failed = time.perf_counter(), dict[str, str]()
        with started(options.peers, options.envs, failed) as processes:
            if kind == "speed":
                configuration = {"rounds": options.rounds, "rows": ROWS.get(name, CASES[name].batch)}
                found = speed(processes, name, options.rounds, failed)
            else:
                configuration = {"runs": options.runs or TASKS[name].runs}
                found = quality(processes, name, configuration["runs"], failed)
        took = time.perf_counter() - began
        path = options.out / kind / f"{cells.slug(name)}.json"
        content = {"name": name, "versions": versions, "found": found, "failed": failed, "took": took}
        cells.write(path, configuration, **content)
        print(name, json.dumps(found), json.dumps(failed), flush=True)


if __name__ == "__main__":
    main()
