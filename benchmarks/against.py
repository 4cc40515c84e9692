"""Is a training step slower than in another checkout? `python -m benchmarks.against PATH`.

One process for each checkout trains the 13-50-1 perceptron; they take turns, so that whatever else the
machine does affects both. The result is the ratio of the fastest medians. Results are in
benchmarks/results/against.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import cells

RESULT = Path(__file__).parent / "results" / "against.json"
HERE = Path(__file__).parents[1]
WORKER = """
import sys, time, torch, varprop as vp
from statistics import median
from torch import nn
torch.set_num_threads(1)
x, y = torch.randn(32, 13), torch.randn(32, 1)
def objective(method):
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1)))
    return vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=1000)
def seconds(elbo):
    elbo.zero_grad()
    start = time.process_time()
    elbo(x, y).backward()
    return time.process_time() - start
elbos = [objective(method) for method in (vp.VBP, vp.CVBP, vp.DVI)]
for line in sys.stdin:
    print(*[median(seconds(elbo) for _ in range(int(line))) for elbo in elbos], flush=True)
"""
"""Prints, for each number of steps that it reads, the median seconds of a step with VBP, CVBP and DVI."""


def worker(checkout: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=checkout,
    )


def ask(process: subprocess.Popen[str], steps: int) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return [float(seconds) for seconds in process.stdout.readline().split()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder with the other version")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    workers = {"other": worker(options.checkout), "this": worker(HERE)}
    times: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, process in workers.items():
            times[name].append(ask(process, options.steps))
    for process in workers.values():
        process.communicate()
    fastest = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    pairs = zip(("vbp", "cvbp", "dvi"), fastest["this"], fastest["other"], strict=True)
    ratios = {method: this / other for method, this, other in pairs}
    configuration = {"rounds": options.rounds, "steps": options.steps}
    cells.write(options.out, configuration, seconds=fastest, against_the_other=ratios)
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
