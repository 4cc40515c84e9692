"""The benchmarks from end to end, with as little to measure as possible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import pages, run
from benchmarks.contestants import METHODS, PLAIN, training
from benchmarks.networks import CASES
from benchmarks.peers.worker import Worker
from benchmarks.turns import compared, take_turns


@pytest.fixture(autouse=True)
def little_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BATCHES", (1, 4))
    monkeypatch.setattr(run, "METHODS", {name: METHODS[name] for name in ("plain", "vbp", "dvi")})
    monkeypatch.setattr(run, "CORRELATED", "vbp")
    monkeypatch.setattr(run, "REPLICAS", 2)
    at_once = run.at_once
    monkeypatch.setattr(run, "at_once", lambda case, compile: at_once(case, False))


def test_a_run_and_its_page(tmp_path: Path) -> None:
    parts = ["steps", "recorded", "threads", "memory", "replicas", "shares"]
    arguments = [
        "--parts",
        *parts,
        "--networks",
        "perceptron",
        "--seconds",
        "0",
        "--out",
        str(tmp_path / "run"),
    ]
    run.main(arguments)
    steps = json.loads((tmp_path / "run" / "steps.json").read_text())
    row = steps["found"]["perceptron"]["training"]["4"]
    assert row["plain"]["ratio"] == 1
    assert row["vbp"]["low"] <= row["vbp"]["ratio"] <= row["vbp"]["high"]
    assert steps["machine"]["threads"] == 1
    pages.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.md"), "--figures", str(tmp_path)])
    page = (tmp_path / "page.md").read_text()
    assert f"{row['dvi']['ratio']:.2f} [" in page
    assert "## A step of vp.fit" in page
    assert "## Peak memory of a training step" in page
    assert "## Where the time of a training step goes" in page


def test_ratios_are_taken_within_rounds_and_the_clock_bounds_them() -> None:
    ticks = iter(range(1000))
    times = take_turns(
        {"a": lambda: None, "b": lambda: None}, 0.0, lambda: float(next(ticks)), rounds=(3, 50)
    )
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    busy = compared({"plain": [1.0, 10.0, 1.0], "vbp": [2.0, 20.0, 2.0]}, "plain")["vbp"]
    assert busy == {"seconds": 2.0, "ratio": 2.0, "low": 2.0, "high": 2.0}


def test_the_peak_of_memory_counts_what_exists_at_once() -> None:
    def make() -> run.Run:
        def step() -> None:
            kept = torch.zeros(1000)
            for _ in range(3):
                kept + torch.zeros(1000)

        return step

    assert 3 * 4000 <= run.peak(make) < 4 * 4000


def test_the_plain_contestant_of_a_peer_learns(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 3)).astype(np.float32)
    arrays = {"x": x, "y": x[:, :1], "x_test": x, "y_test": x[:, :1]}
    np.savez(tmp_path / "data.npz", **arrays)
    worker = Worker("plain")
    short, long = (worker.quality(str(tmp_path / "data.npz"), n, 32, 0)["scores"][0] for n in (1, 30))
    assert long["log_likelihood"] > short["log_likelihood"] + 0.3
    assert worker.seconds("perceptron", "training") > 0


def test_our_own_contestant_of_a_peer_predicts_numbers_and_classes(tmp_path: Path) -> None:
    x = torch.randn(40, 3).numpy()
    for name, y in {"numbers": x[:, :1], "classes": (x[:, 0] > 0).astype(np.int64)}.items():
        np.savez(tmp_path / name, x=x, y=y, x_test=x, y_test=y)
        (score,) = Worker("varprop DVI").quality(str(tmp_path / f"{name}.npz"), 1, 32, 0)["scores"]
        assert -5 < score["log_likelihood"] < 0


def test_every_contestant_trains_the_same_network() -> None:
    step = training(CASES["perceptron"], 4, PLAIN)
    step()
    first, second = CASES["perceptron"].net(), CASES["perceptron"].net()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_page_of_speed_is_made_of_the_committed_results() -> None:
    written = (pages.HERE / "README.md").read_text()
    assert written == pages.page(pages.RESULTS), "python -m benchmarks.pages"
