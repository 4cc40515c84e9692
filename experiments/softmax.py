"""Class probabilities of normal logits: which approximation of E softmax(f) is the most accurate?

`python -m experiments.softmax` prints the tables and writes experiments/results/softmax.json. The truth is an
average over 100,000 samples; means are N(0, 2²), variances uniform between 0 and twice the scale.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varprop as vp

from . import cells
from .tables import markdown

SCALES = (0.05, 0.3, 1.0, 3.0, 10.0, 30.0)
CLASSES = (3, 10)
Approximation = Callable[[Tensor, Tensor], Tensor]


def of_the_library(name: vp.likelihoods.Approximation) -> Approximation:
    return lambda m, v: vp.likelihoods.Categorical(name).predictive(vp.Gaussian(m, v)).probs


def pairwise(m: Tensor, v: Tensor) -> Tensor:
    """MacKay's sigmoid for pairs of classes, combined and rescaled (Lu, Ie and Sha 2020, mean-field 1)."""
    spread = torch.sqrt(1 + math.pi / 8 * (v.unsqueeze(2) + v.unsqueeze(1)))
    odds = (m.unsqueeze(1) - m.unsqueeze(2)) / spread
    diagonal = torch.eye(m.shape[1], dtype=torch.bool)
    return (-odds.masked_fill(diagonal, 0.0).logsumexp(2)).softmax(1)


def one_against_rest(m: Tensor, v: Tensor) -> Tensor:
    """MacKay's sigmoid of f_c minus the log-sum-exp of the others, expanded to second order and rescaled."""
    itself = torch.eye(m.shape[1], dtype=torch.bool)
    others = m.unsqueeze(1).masked_fill(itself, -torch.inf)
    q, v_others = others.softmax(2), v.unsqueeze(1)
    expansion = others.logsumexp(2) + 0.5 * (v_others * q * (1 - q)).sum(2)
    # An upper bound on E lse by Jensen's inequality, which the expansion can exceed if the variances are
    # large.
    bound = (others + v_others / 2).logsumexp(2)
    spread = 1 + math.pi / 8 * (v + (v_others * q.square()).sum(2))
    p = torch.sigmoid((m - torch.minimum(expansion, bound)) / spread.sqrt())
    return p / p.sum(1, keepdim=True)


APPROXIMATIONS: dict[str, Approximation] = {
    "plugin": of_the_library("plugin"),
    "delta": of_the_library("delta"),
    "mackay": of_the_library("mackay"),
    "pairwise": pairwise,
    "one against rest": one_against_rest,
    "samples (128)": of_the_library("samples"),
    "quadrature": of_the_library("quadrature"),
}


def truth(m: Tensor, v: Tensor, samples: int, generator: torch.Generator, chunk: int = 1_000) -> Tensor:
    total = torch.zeros_like(m)
    for _ in range(samples // (2 * chunk)):
        noise = v.sqrt() * torch.randn((chunk, *m.shape), generator=generator, dtype=m.dtype)
        total += (m + noise).softmax(2).sum(0) + (m - noise).softmax(2).sum(0)
    return total / (samples // (2 * chunk) * 2 * chunk)


def errors(p: Tensor, q: Tensor) -> dict[str, float]:
    """Mean KL(p || q), and mean and largest |p - q|."""
    kl = (p * (p.log() - q.clamp(min=1e-30).log())).sum(1)
    return {
        "kl": kl.mean().item(),
        "mean_error": (p - q).abs().mean().item(),
        "max_error": (p - q).abs().max().item(),
    }


def measure(problems: int, samples: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for classes in CLASSES:
        for scale in SCALES:
            generator = torch.Generator().manual_seed(seed)
            m = 2 * torch.randn(problems, classes, generator=generator, dtype=torch.float64)
            v = 2 * scale * torch.rand(problems, classes, generator=generator, dtype=torch.float64)
            p = truth(m, v, samples, generator)
            again: Approximation = partial(truth, samples=samples, generator=generator)
            for name, approximation in {**APPROXIMATIONS, "another truth": again}.items():
                start = time.perf_counter()
                q = approximation(m, v)
                seconds = time.perf_counter() - start
                case = {"classes": classes, "scale": scale, "approximation": name}
                rows.append({**case, **errors(p, q), "seconds": seconds})
    return rows


def table(rows: list[dict[str, Any]], classes: int, quantity: str) -> str:
    names = list(dict.fromkeys(row["approximation"] for row in rows))
    lines = []
    for scale in SCALES:
        values = {
            row["approximation"]: row[quantity]
            for row in rows
            if row["classes"] == classes and row["scale"] == scale
        }
        lines.append([f"{scale:g}", *(f"{values[name]:.2g}" for name in names)])
    return markdown([["variance", *names], *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.softmax", description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=cells.RESULTS / "softmax.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    configuration = {"problems": options.problems, "samples": options.samples, "seed": options.seed}
    if not cells.finished(options.out, configuration):
        cells.write(options.out, configuration, rows=measure(**configuration))
    rows = json.loads(options.out.read_text())["rows"]
    for classes in CLASSES:
        for quantity, title in (
            ("kl", "mean KL(truth || approximation)"),
            ("mean_error", "mean |error|"),
            ("max_error", "largest |error|"),
        ):
            print(f"\n{classes} classes, {title}\n\n{table(rows, classes, quantity)}")


if __name__ == "__main__":
    main()
