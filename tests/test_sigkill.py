"""Killed processes: training ends at the weights of an undisturbed run, and a model folder stays whole."""

import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401  preloaded by the fork server with this module, so that a restart costs no import
import pandas as pd
import pytest
import safetensors.torch
import torch
from torch import nn

import varprop as vp
from benchmarks import kills as saves
from varprop.io import files  # noqa: F401  preloaded too

KILLS, EPOCHS = 12, 25


def train(checkpoint: Path, result: Path, started: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = x[:, :1].abs() + 0.1 * torch.randn(400, 1)
    net = vp.variational(
        nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1))
    )
    elbo = vp.ELBO(net, vp.LOCAL_REPARAM, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=400)
    started.send(None)
    options: dict[str, Any] = {"batch_size": 64, "schedule": "cosine", "validation": 0.1, "kl_warmup": 5}
    history = vp.fit(elbo, (x, y), epochs=EPOCHS, checkpoint=checkpoint, resume=True, **options)
    history.to_json(result.with_suffix(".json"), double_precision=15)
    safetensors.torch.save_file(elbo.state_dict(), result)


class Child:
    """A training process, returned once it trains."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.checkpoint = folder / "run.pt"
        ready, started = context.Pipe(duplex=False)
        self.process = context.Process(
            target=train, args=(self.checkpoint, folder / "weights", started), daemon=True
        )
        self.process.start()
        assert ready.poll(60), "the child did not start"

    def writing(self) -> bool:
        return any(self.checkpoint.parent.glob(".run.pt.*.partial"))

    def wait_for_a_write(self) -> None:
        while self.process.is_alive() and not self.writing():
            time.sleep(1e-4)

    def finished(self, seconds: float | None) -> bool:
        self.process.join(seconds)
        return self.process.exitcode == 0


def results(folder: Path) -> tuple[dict[str, torch.Tensor], pd.DataFrame]:
    history = pd.read_json(folder / "weights.json", precise_float=True)
    return safetensors.torch.load_file(folder / "weights"), history[
        ["epoch", "loss", "data_fit", "kl", "validation"]
    ]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a signal of POSIX systems")
def test_twelve_kills_change_not_a_bit(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    child = Child(alone)
    began = time.monotonic()
    assert child.finished(None)
    weights, history = results(alone)
    epoch = (time.monotonic() - began) / EPOCHS

    delays = random.Random(0)
    kills = in_writes = runs = 0
    while kills < KILLS:
        # A run that ends before enough kills have met it is compared, and another is begun.
        runs += 1
        folder = tmp_path / f"killed {runs}"
        folder.mkdir()
        while True:
            child = Child(folder)
            if kills < KILLS:
                if kills % 2:
                    time.sleep(delays.uniform(0, 1.5) * epoch)
                    child.wait_for_a_write()
                    time.sleep(delays.uniform(0, 0.003))
                else:
                    time.sleep(delays.uniform(0, 4) * epoch)
            if child.finished(None if kills == KILLS else 0):
                break
            child.process.kill()
            child.process.join()
            kills += child.process.exitcode == -9
            in_writes += child.writing()
        same_weights, same_history = results(folder)
        assert same_weights.keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in same_weights.items())
        assert same_history.equals(history)
    assert in_writes, "no kill met a write"
    print(f"{kills} kills, {in_writes} of them during a write, in {runs} runs")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a signal of POSIX systems")
def test_ten_kills_of_a_saving_process_leave_a_whole_model(tmp_path: Path) -> None:
    """`benchmarks.kills` kills a thousand."""
    met = saves.kill(tmp_path / "model", 10)
    assert sum(met.values()) == 10
    assert met.keys() != {"between two models"}, "no kill met a write"
