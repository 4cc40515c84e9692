"""Table 1, the row of probabilistic backpropagation: `python -m experiments.pbp --datasets yacht boston`.

Its splits are filtered side by side, one data point of each at a time. A data set whose result is on disk is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.predictive import NormalPredictive

DATASETS = ("yacht", "boston", "energy", "concrete", "wine-red", "kin8nm", "power", "naval", "protein")
HIDDEN = dict.fromkeys(DATASETS, 50) | {"protein": 100}


def run(dataset: str, epochs: int = 40, seed: int = 0) -> dict[str, object]:
    """All splits of one data set: float64, inputs and targets standardised on the training part (Section 6.1 of the protocol)."""
    table = np.load(Path(os.environ["VARPROP_DATA"]) / "uci" / f"{dataset}.npz", allow_pickle=False)
    X, y = (torch.from_numpy(table[name]) for name in ("X", "y"))
    train, test = (torch.from_numpy(table[name]).long() for name in ("train_idx", "test_idx"))
    x_mean, x_std = _standard(X[train])
    y_mean, y_std = _standard(y[train].unsqueeze(-1))
    splits, hidden = len(train), HIDDEN[dataset]

    net = vp.variational(nn.Sequential(nn.Linear(X.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 1)).double(), biases=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    start, cpu_start = time.perf_counter(), time.process_time()
    pbp = vp.AssumedDensityFilter(net, replicas=splits, generator=torch.Generator().manual_seed(seed), compile=True)
    pbp.fit((X[train] - x_mean) / x_std, (y[train].unsqueeze(-1) - y_mean) / y_std, epochs=epochs)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start

    inputs = (X[test] - x_mean) / x_std
    predictions = [_rescaled(pbp.predict(inputs[s], replica=s), y_mean[s], y_std[s]) for s in range(splits)]
    return {
        "configuration": {"row": "pbp", "dataset": dataset, "splits": splits, "seed": seed},
        "recipe": {"hidden": hidden, "epochs": epochs, "dtype": "float64", "noise": [6.0, 6.0], "prior": [6.0, 6.0]},
        "splits": [
            {"own": _scores(p, y[test[s]].unsqueeze(-1)), "exact": None, "seconds": seconds / splits} for s, p in enumerate(predictions)
        ],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "commit": commit,
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def _standard(t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the data of each split; a constant column is left as it is."""
    std = t.std(1, correction=0, keepdim=True)
    return t.mean(1, keepdim=True), torch.where(std > 0, std, 1.0)


def _rescaled(p: NormalPredictive, mean: Tensor, std: Tensor) -> NormalPredictive:
    return NormalPredictive(p.mean * std + mean, p.epistemic * std**2, p.aleatoric * std**2)


def _scores(p: NormalPredictive, y: Tensor) -> dict[str, float]:
    z = (y - p.mean) / p.std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    crps = p.std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    low, high = p.interval(0.9)
    return {
        "log_likelihood": p.log_prob(y).mean().item(),
        "rmse": (y - p.mean).square().mean().sqrt().item(),
        "crps": crps.mean().item(),
        "coverage": ((low <= y) & (y <= high)).double().mean().item(),
    }


def summary(result: dict[str, object], score: str) -> str:
    values = np.array([split["own"][score] for split in result["splits"]])  # type: ignore[attr-defined]
    return f"{values.mean():.4f} ± {values.std(ddof=1) / math.sqrt(len(values)):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/table1/pbp"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for dataset in args.datasets:
        path = args.out / f"{dataset}.json"
        if not path.exists():
            path.write_text(json.dumps(run(dataset, args.epochs, args.seed), indent=1) + "\n")
        result = json.loads(path.read_text())
        scores = ", ".join(f"{name} {summary(result, name)}" for name in ("log_likelihood", "rmse", "crps", "coverage"))
        print(f"{dataset}: {scores}, {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
