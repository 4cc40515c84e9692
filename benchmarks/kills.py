"""Is a model lost if its process is killed while it saves? `python -m benchmarks.kills`.

A process saves one model after another to the same folder and is killed with SIGKILL at a random moment. The
folder must then load, hold one of the models as a whole, and none older than the last that was completely
saved. Results are in benchmarks/results/kills.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from ctypes import c_int64
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import varprop as vp
from experiments import cells

RESULT = Path(__file__).parent / "results" / "kills.json"


def model(k: int) -> vp.ELBO:
    """Model number k, which is known by each of its weights and by its description."""
    net = vp.variational(nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 1)))
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=k)
    with torch.no_grad():
        for parameter in elbo.parameters():
            parameter.fill_(k)
    return elbo


def save_for_ever(folder: Path, first: int, saved: Any) -> None:
    """Save models first, first + 1, …; `saved` is the last that was saved completely."""
    k = first
    while True:
        vp.save(model(k), folder)
        saved.value = k
        k += 1


def number(folder: Path) -> int:
    """Which model a folder holds; an error if it is none, or not a whole one."""
    elbo = vp.load(folder).requires_grad_(False)
    values = {float(value) for parameter in elbo.parameters() for value in (parameter.min(), parameter.max())}
    if values != {elbo.n_data}:
        raise AssertionError(f"the weights are those of models {sorted(values)}, n_data says {elbo.n_data}")
    return int(elbo.n_data)


def left_behind(folder: Path) -> str:
    """What the killed process was doing, by the files that it left."""
    partials = [path.name for path in folder.glob(".*.partial")]
    if any("weights" in name for name in partials):
        return "while it wrote the weights"
    if partials:
        return "while it wrote the description"
    if len(list(folder.glob("weights-*.safetensors"))) > 1:
        return "between two files"
    return "between two models"


def kill(folder: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Kill so many saving processes, and return how often which moment was met."""
    context = multiprocessing.get_context("forkserver")
    # The names of varprop are imported when they are used, which the server should do once for all processes.
    context.set_forkserver_preload(["varprop.io.files"])
    delays, met = random.Random(seed), Counter[str]()
    vp.save(model(1), folder)
    last = 1
    for i in range(kills):
        saved = context.Value(c_int64, 0, lock=False)
        child = context.Process(target=save_for_ever, args=(folder, last + 1, saved), daemon=True)
        child.start()
        while not saved.value and child.is_alive():
            time.sleep(1e-4)
        time.sleep(delays.uniform(0, 0.03))
        child.kill()
        child.join()
        if child.exitcode != -9:
            raise AssertionError(f"the saving process ended by itself, with exit code {child.exitcode}")
        met[left_behind(folder)] += 1
        complete, last = int(saved.value), number(folder)
        if last < complete:
            raise AssertionError(f"model {complete} was saved, but after kill {i + 1} the folder has {last}")
    vp.save(model(last + 1), folder)
    rest = sorted(path.name for path in folder.iterdir())
    if len(rest) != 2:
        raise AssertionError(f"the next save leaves {rest}")
    return dict(met)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        met = kill(Path(folder) / "model", options.kills)
    seconds = time.monotonic() - began
    cells.write(options.out, {"kills": options.kills}, met=met, loadable=options.kills, seconds=seconds)
    print(f"{options.kills} kills in {seconds:.0f} s, a whole model after each: {met}")


if __name__ == "__main__":
    main()
