"""How do other packages compare, in cost and in quality? `python -m benchmarks.peers`.

Each peer runs in a process of its own environment, and the processes take turns. Measured are a training
step, a prediction, and the test log-likelihood after the same epochs on concrete (published splits) and 2,000
digits of MNIST, each peer with its own defaults. Results are in benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from experiments import cells, data

from ..turns import Times, compared
from .adapters import OURS
from .environments import CACHE, PEERS, interpreter

RESULT = Path(__file__).parents[1] / "results" / "peers.json"
ROOT = Path(__file__).parents[2]
NETWORKS = "perceptron", "wide perceptron", "LeNet-small", "LeNet-CIFAR"
ROWS = {"LeNet-CIFAR": 32}
"""A smaller batch where a hundred samples of a larger one would take minutes."""
DIGITS = 2000


class Process:
    """A worker with the environment of a peer."""

    def __init__(self, peer: str, python: Path) -> None:
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


def started(peers: Sequence[str], folder: Path, failed: dict[str, str]) -> dict[str, Process]:
    """The plain network, varprop and all peers that can be installed."""
    found = {name: Process(name, Path(sys.executable)) for name in OURS}
    for peer in peers:
        try:
            process = Process(peer, interpreter(peer, folder))
            process.ask("samples")
            found[peer] = process
        except (RuntimeError, subprocess.CalledProcessError) as error:  # noqa: PERF203
            failed[peer] = f"does not install or run: {error}"
    return found


def requests(processes: dict[str, Process], network: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, peer and request of everything that is timed on a network."""
    shared = {"network": network, "rows": ROWS.get(network)}
    for peer, process in processes.items():
        yield f"{peer}, training", peer, {**shared, "mode": "training"}
        for samples in process.ask("samples"):
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


TASKS = "concrete", "MNIST"


def tasks(names: Sequence[str], splits: int) -> Iterator[tuple[str, dict[str, np.ndarray], int, int]]:
    """Name, arrays, epochs and batch of each training task."""
    if "concrete" in names:
        concrete = data.regression("concrete", tuple(range(splits)))
        for k in range(splits):
            parts = {name: getattr(concrete, name)[k].numpy() for name in ("x", "y", "x_test", "y_test")}
            yield "concrete", parts, 100, 32
    if "MNIST" in names:
        yield "MNIST", digits(), 20, 128


def digits() -> dict[str, np.ndarray]:
    x, y, x_test, y_test = data.mnist()
    flat = [(t.flatten(1).float() / 255 - 0.1307) / 0.3081 for t in (x[:DIGITS], x_test[:DIGITS])]
    arrays = {"x": flat[0], "y": y[:DIGITS].long(), "x_test": flat[1], "y_test": y_test[:DIGITS].long()}
    return {name: t.numpy() for name, t in arrays.items()}


def quality(processes: dict[str, Process], names: Sequence[str], splits: int, failed: dict[str, str]) -> Any:
    """Test log-likelihoods with their costs, averaged over the splits of a data set."""
    runs: dict[str, dict[str, list[Any]]] = {}
    with TemporaryDirectory() as folder:
        for seed, (task, arrays, epochs, batch) in enumerate(tasks(names, splits)):
            path = Path(folder) / f"{seed}.npz"
            np.savez(path, **arrays)  # type: ignore[arg-type]
            for peer, process in processes.items():
                request = {"path": str(path), "epochs": epochs, "batch": batch, "seed": seed}
                try:
                    run = process.ask("quality", **request)
                    runs.setdefault(task, {}).setdefault(peer, []).append(run)
                    best = max(score["log_likelihood"] for score in run["scores"])
                    print(f"{task} {seed}, {peer}: {best:.3f}, {run['training_seconds']:.1f} s", flush=True)
                except RuntimeError as error:
                    failed[f"{peer} on {task}"] = str(error)
    return {task: {peer: averaged(found) for peer, found in peers.items()} for task, peers in runs.items()}


def averaged(runs: Sequence[Any]) -> Any:
    """The mean of runs on several splits."""
    scores = [
        {
            "samples": at[0]["samples"],
            **{key: fmean(score[key] for score in at) for key in ("log_likelihood", "seconds_per_row")},
        }
        for at in zip(*(run["scores"] for run in runs), strict=True)
    ]
    return {"training_seconds": fmean(run["training_seconds"] for run in runs), "scores": scores}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--splits", type=int, default=3, help="of concrete")
    parser.add_argument("--envs", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells.commit()  # cached now, because the tree may change meanwhile
    began, failed = time.perf_counter(), dict[str, str]()
    processes = started(options.peers, options.envs, failed)
    found = {}
    for network in options.networks:
        found[network] = speed(processes, network, options.rounds, failed)
        print(network, json.dumps(found[network]), flush=True)
    scores = quality(processes, options.tasks, options.splits, failed)
    for process in processes.values():
        process.end()
    configuration = {"rounds": options.rounds, "splits": options.splits, "rows": ROWS, "digits": DIGITS}
    versions = {peer: PEERS[peer][0] for peer in options.peers}
    took = time.perf_counter() - began
    cells.write(
        options.out,
        configuration,
        versions=versions,
        speed=found,
        quality=scores,
        failed=failed,
        took=took,
    )
    print(json.dumps(failed, indent=1))


if __name__ == "__main__":
    main()
