"""Table 3, small: one pass, every row from end to end, and settings that never see the test images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import varprop as vp
from experiments import table3, table3_figure
from experiments.images import ImageSet

from .test_table2 import made_up


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table3, "TASKS", {"MNIST": table3.Task(made_up, (784, 12, 4), 3)})
    monkeypatch.setattr(table3_figure, "TASKS", table3.TASKS)
    monkeypatch.setattr(table3, "GLANCES", (40, 100))


@pytest.mark.usefixtures("small")
def test_cells_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--datasets", "MNIST", "--runs", "2", "--out", str(tmp_path)]
    table3.main(command)
    paths = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")}
    assert paths == {f"{row}/MNIST-{run}.json" for row in table3.NAMES for run in (0, 1)}
    cell = json.loads((tmp_path / "vrelu" / "MNIST-1.json").read_text())
    assert {"own", "seconds", "processor_seconds", "curve", "moved", "machine", "commit"} <= set(cell)
    assert cell["configuration"]["window"] == table3.ROWS["MNIST"]["vrelu"].window
    printed = capsys.readouterr().out
    both = [json.loads((tmp_path / "vbp" / f"MNIST-{run}.json").read_text()) for run in (0, 1)]
    accuracy = 100 - 50 * sum(run["own"]["error"] for run in both)
    assert f"| MNIST | vbp | 2 | {accuracy:.2f} ± " in printed
    assert " | 96.6 ± 0.2 | " in printed
    table3_figure.main(["--cells", str(tmp_path), "--out", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    table3.main(command)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}


@pytest.mark.usefixtures("small")
def test_validation_never_sees_the_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compute(recipe: object, task: object, images: ImageSet, seed: int) -> dict[str, object]:
        seen.append((recipe, images))
        scores = {"error": 0.25, "log_likelihood": -1.0, "ece": 0.0, "brier": 0.0}
        return {"own": scores, "seconds": 0.0, "processor_seconds": 0.0, "curve": []}

    monkeypatch.setattr(table3, "compute", compute)
    command = ["--datasets", "MNIST", "--methods", "vbp", "--runs", "1", "--out", str(tmp_path)]
    table3.main([*command, "--validate", "--set", "rate=0.5", "batch=7"])
    x, y, *_ = made_up()
    ((recipe, images),) = seen
    assert torch.equal(torch.cat([images.x, images.x_test]), x)
    assert torch.equal(torch.cat([images.y, images.y_test]), y)
    assert (recipe.rate, recipe.batch) == (0.5, 7)
    assert "rate 0.5" in table3.table(tmp_path)
    with pytest.raises(SystemExit):
        table3.main([*command, "--set", "rate=0.5"])
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        table3.main([*command, "--validate", "--set", "speed=0.5"])


def test_a_stream_shows_every_image_once() -> None:
    images = ImageSet.of(made_up())
    batches = list(table3.stream(images, 50, seed=3))
    assert [len(x) for x, _ in batches] == [50, 50, 20]
    x = torch.cat([x for x, _ in batches])
    known = images.standardised(images.x).flatten(1)
    assert torch.equal(x.sort(0).values, known.sort(0).values)
    assert not torch.equal(x, known)
    again = torch.cat([x for x, _ in table3.stream(images, 7, seed=3)])
    assert torch.equal(x, again)


def test_the_rows_start_from_the_same_means_and_only_the_frozen_features_stay() -> None:
    learners = {}
    images = ImageSet.of(made_up())
    for row in ("vbp", "vrelu", "frozen"):
        torch.manual_seed(0)
        net = table3.perceptron((784, 12, 4))
        learners[row] = table3.ROWS["MNIST"][row].learner(net, 120, 1, 0)
    weights = [learners["vbp"].elbo.net[0].weight.clone(), learners["frozen"].features[0].weight.clone()]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], learners["vrelu"].first[0][:-1].T)
    for x, y in table3.stream(images, 40, 0):
        for learner in learners.values():
            learner.learn(x, y)
    assert learners["vrelu"].facts()["moved"][0] > 0.001
    assert learners["frozen"].facts()["moved"] == []
    assert torch.equal(learners["frozen"].features[0].weight, weights[1])
    assert not torch.equal(learners["vbp"].elbo.net[0].weight, weights[0])
    assert isinstance(learners["vbp"].predict(x), vp.predictive.ClassPredictive)
