"""What does a step, a pass and a prediction cost? `python -m benchmarks.run`.

All methods take turns with the plain network in one process; a result is the ratio to the plain network in
the same round, its median and quartiles. Times are those of the processor, with two threads those of the
clock. Each part writes benchmarks/results/run/PART.json, and `python -m benchmarks.pages` the tables.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from experiments import cells
from varprop.training.stack import Stack

from .contestants import (
    BY_HAND,
    CORRELATED,
    KEPT,
    METHODS,
    PLAIN,
    Run,
    exported,
    inference,
    objective,
    recorded,
    training,
)
from .networks import CASES, Case, perceptron
from .turns import compared, take_turns

RESULTS = Path(__file__).parent / "results" / "run"
MODES = {"training": training, "inference": inference}
BATCHES = 1, 32, 128, 1024
COMPILED = "perceptron", "LeNet-small"
"""Compilation takes minutes, so two networks have to do."""
REPLICAS = 20
Part: TypeAlias = Callable[[Sequence[str], float], Any]


def contestants(mode: str, batch: int) -> list[str]:
    """Who takes part: correlations are for predictions, and cost as much as many passes."""
    if mode == "training":
        return [*METHODS, BY_HAND]
    kept = [f"{who}{KEPT}" for who in ("vbp", "dvi")]
    return [*METHODS, *kept, CORRELATED] if batch == 1 else [*METHODS, *kept]


def measure(runs: Mapping[str, Run], seconds: float, clock: Callable[[], float] = time.process_time) -> Any:
    return compared(take_turns(runs, seconds, clock), PLAIN)


def batches(case: Case) -> Sequence[int]:
    """All batches for quick networks; a thousand colour images would take most of the time of a run."""
    return BATCHES[:3] if case.shape[0] == 3 else BATCHES


def steps(networks: Sequence[str], seconds: float) -> Any:
    """Training step and pass of every method, eager, on one thread, by batch."""
    found: dict[str, Any] = {}
    for name in networks:
        for batch in batches(CASES[name]):
            for mode, make in MODES.items():
                runs = {who: make(CASES[name], batch, who) for who in contestants(mode, batch)}
                found.setdefault(name, {}).setdefault(mode, {})[batch] = measure(runs, seconds)
                _report(name, mode, batch, found[name][mode][batch])
    return found


RECORDED = ", recorded"
"""Ends the name of a contestant whose step is recorded."""


def steps_of_fit(networks: Sequence[str], seconds: float) -> Any:
    """The training step as `vp.fit` takes it, for networks whose step it records, with the usual batch."""
    found: dict[str, Any] = {}
    for name in networks:
        case = CASES[name]
        steps = {f"{who}{RECORDED}": recorded(case, case.batch, who) for who in METHODS}
        runs = {who: run for who, run in steps.items() if run}
        if len(runs) == len(steps):
            runs |= {who: training(case, case.batch, who) for who in (PLAIN, BY_HAND)}
            found[name] = {"training": {case.batch: measure(runs, seconds)}}
            _report(name, "recorded", case.batch, found[name]["training"][case.batch])
    return found


@contextmanager
def threads(n: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def two_threads(networks: Sequence[str], seconds: float) -> Any:
    """The same with the usual batch on two threads, by the clock on the wall."""
    with threads(2):
        return _usual(networks, partial(measure, seconds=seconds, clock=time.perf_counter))


def compiled(networks: Sequence[str], seconds: float) -> Any:
    """The same with torch.compile, for networks where it takes less than minutes."""
    chosen = [name for name in networks if name in COMPILED]
    return _usual(chosen, partial(measure, seconds=seconds), [PLAIN, "vbp", "dvi", "cvbp"], compiled=True)


def _usual(
    networks: Sequence[str], measure: Callable[..., Any], who: Sequence[str] = (), **options: Any
) -> Any:
    found: dict[str, Any] = {}
    for name in networks:
        case = CASES[name]
        for mode, make in MODES.items():
            names = who or contestants(mode, case.batch)
            row = measure({one: make(case, case.batch, one, **options) for one in names})
            found.setdefault(name, {})[mode] = {case.batch: row}
            _report(name, mode, case.batch, row)
    return found


def onnx(networks: Sequence[str], seconds: float) -> Any:
    """Predictions in onnxruntime, against the plain network exported the same way."""
    found: dict[str, Any] = {}
    for name in networks:
        for batch in (1, CASES[name].batch):
            runs = {who: exported(CASES[name], batch, who) for who in (PLAIN, "vbp", "dvi")}
            found.setdefault(name, {}).setdefault("inference", {})[batch] = measure(runs, seconds)
            _report(name, "onnx", batch, found[name]["inference"][batch])
    return found


def memory(networks: Sequence[str], seconds: float) -> Any:
    """Peak bytes of a training step with the usual batch; parameters, gradients and Adam's state count."""
    found: dict[str, Any] = {}
    for name in networks:
        case = CASES[name]
        peaks = {who: peak(partial(training, case, case.batch, who)) for who in METHODS}
        found[name] = {who: {"bytes": n, "ratio": n / peaks[PLAIN]} for who, n in peaks.items()}
        print(name, {who: round(row["ratio"], 2) for who, row in found[name].items()}, flush=True)
    return found


def peak(make: Callable[[], Run]) -> int:
    """The most bytes of tensors that exist at once while a contestant is made and takes three steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = make()
        for _ in range(3):
            step()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = total = 0
    for _, change in changes:
        total += change
        most = max(most, total)
    return most


KINDS = {
    "products": ("conv", "mm", "addmv", "dot"),
    "optimiser": ("adam",),
}
"""Operations of torch by parts of their names; all others work entry by entry."""


def shares(networks: Sequence[str], seconds: float) -> Any:
    """Where the time of a training step goes, as multiples of the plain network's step."""
    found: dict[str, Any] = {}
    for name in networks:
        case = CASES[name]
        spent = {who: by_kind(training(case, case.batch, who)) for who in (PLAIN, "vbp", "dvi", "factored")}
        plain = sum(spent[PLAIN].values())
        found[name] = {who: {kind: t / plain for kind, t in row.items()} for who, row in spent.items()}
        print(name, found[name], flush=True)
    return found


def by_kind(step: Run, steps: int = 5) -> dict[str, float]:
    """The processor time of a step in matrix products and convolutions, in the optimiser, and in the rest."""
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    spent = dict.fromkeys((*KINDS, "entries"), 0.0)
    for event in recorded.key_averages():
        kinds = (kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
        spent[next(kinds, "entries")] += event.self_cpu_time_total / steps
    return spent


FLUSHED = "depth, flushed"
"""With subnormal numbers as zero. The variances of deep networks become so small that they are subnormal."""


def growth(networks: Sequence[str], seconds: float) -> Any:
    """Training steps of perceptrons as the width, the depth and the batch grow."""
    axes: dict[str, tuple[Sequence[int], Callable[[int], tuple[Case, int]]]] = {
        "width": ((64, 128, 256, 512, 1024, 2048), lambda n: (_perceptron(n, 2), 128)),
        "depth": ((1, 2, 4, 8, 16), lambda n: (_perceptron(512, n), 128)),
        FLUSHED: ((1, 2, 4, 8, 16), lambda n: (_perceptron(512, n), 128)),
        "batch": ((32, 64, 128, 256, 512, 1024), lambda n: (_perceptron(512, 2), n)),
    }
    found: dict[str, Any] = {}
    for axis, (sizes, made) in axes.items():
        rows: dict[int, Any] = {}
        torch.set_flush_denormal(axis == FLUSHED)
        for n in sizes:
            case, batch = made(n)
            rows[n] = measure({who: training(case, batch, who) for who in (PLAIN, "vbp", "dvi")}, seconds)
        exponents = {
            who: exponent({n: row[who]["seconds"] for n, row in rows.items()}) for who in rows[sizes[0]]
        }
        found[axis] = {"rows": rows, "exponents": exponents}
        print(axis, {who: round(value, 2) for who, value in exponents.items()}, flush=True)
    return found


def _perceptron(width: int, depth: int) -> Case:
    return Case(lambda: perceptron(width, width, 1, depth), (width,), None)


def exponent(seconds: Mapping[int, float]) -> float:
    """The slope of log seconds over log size, fitted to the larger half, where overheads no longer count.

    >>> round(exponent({1: 5.0, 10: 6.0, 100: 600.0, 1000: 60000.0}), 2)
    2.0
    """
    sizes = sorted(seconds)[len(seconds) // 2 :]
    x, y = ([math.log(v) for v in values] for values in (sizes, [seconds[n] for n in sizes]))
    centre = sum(x) / len(x)
    spread = sum((a - centre) ** 2 for a in x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / spread


def replicas(networks: Sequence[str], seconds: float) -> Any:
    """A step of twenty perceptrons at once, with VBP, against one step of one plain perceptron."""
    case = CASES["perceptron"]
    runs = {PLAIN: training(case, case.batch, PLAIN)}
    for name in ("eager", "compiled"):
        runs[name] = at_once(case, name == "compiled")
    row = measure(runs, seconds)
    _report("perceptron", f"{REPLICAS} replicas", case.batch, row)
    return row


def at_once(case: Case, compile: bool) -> Run:
    """A step of all replicas, as `vp.replicas.fit` takes it."""
    stack = Stack([objective(case, "vbp") for _ in range(REPLICAS)])
    stack.train()
    x, y = (t.expand(REPLICAS, *t.shape).clone() for t in case.data(case.batch))
    optimiser = torch.optim.Adam(stack.trained, lr=1e-3, fused=True)
    weight = torch.ones(REPLICAS)

    def step() -> None:
        stack.gradients(weight, (x, y), compile)
        optimiser.step()

    return step


PARTS: dict[str, Part] = {
    "steps": steps,
    "recorded": steps_of_fit,
    "threads": two_threads,
    "compiled": compiled,
    "onnx": onnx,
    "memory": memory,
    "shares": shares,
    "growth": growth,
    "replicas": replicas,
}


def _report(network: str, mode: str, batch: int, row: Mapping[str, Mapping[str, float]]) -> None:
    ratios = (
        f"{who} {r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for who, r in row.items() if who != PLAIN
    )
    print(
        f"{network}, {mode}, batch {batch}: plain {row[PLAIN]['seconds'] * 1e3:.3g} ms;", *ratios, flush=True
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each comparison")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    cells.commit()  # cached now, because the tree may change meanwhile
    for name in options.parts:
        with threads(1):
            began = time.perf_counter()
            found = PARTS[name](options.networks, options.seconds)
            took = time.perf_counter() - began
            configuration = {"networks": options.networks, "seconds": options.seconds}
            cells.write(options.out / f"{name}.json", configuration, found=found, took=took)


if __name__ == "__main__":
    main()
