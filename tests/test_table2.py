"""Table 2, small: the images, the networks, the schedule, a run that is killed, and what a cell holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from experiments import curves, data, epochs, figures, image_predictions, table2
from experiments.images import Augmentation, Batches, ImageSet, shifted
from experiments.lenets import lenet
from experiments.schedule import Schedule, one_cycle

needs_data = pytest.mark.skipif(not os.environ.get("VARPROP_DATA"), reason="VARPROP_DATA is not set")


def made_up(n: int = 120, channels: int = 1, size: int = 28) -> data.Images:
    """Images whose class is where they are bright."""
    torch.manual_seed(0)
    x, y = torch.randint(0, 60, (2 * n, channels, size, size), dtype=torch.uint8), torch.arange(2 * n) % 4
    for k in range(4):
        x[y == k, :, 7 * k : 7 * k + 7] += 150
    return x[:n], y[:n], x[n:], y[n:]


@pytest.fixture
def images() -> ImageSet:
    return ImageSet.of(made_up())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small task in place of MNIST, and no folder of data where the real one could be found."""

    def strangers() -> dict[str, Tensor]:
        return {"noise": torch.randint(0, 255, (50, 1, 28, 28), dtype=torch.uint8)}

    monkeypatch.setenv("VARPROP_DATA", str(tmp_path))
    monkeypatch.setattr(table2, "HELD_OUT", 40)
    monkeypatch.setattr(table2, "DRAWN", 4)
    task = table2.Task(made_up, strangers, epochs=2, batch=32, passes=3, audited=20)
    monkeypatch.setattr(table2, "TASKS", {"MNIST": task})


# -------------------- images


@needs_data
def test_cifar100_has_its_hundred_classes() -> None:
    x, y, x_test, y_test = data.cifar100()
    assert (x.shape, x.dtype, x_test.shape) == ((50000, 3, 32, 32), torch.uint8, (10000, 3, 32, 32))
    assert torch.bincount(y).tolist() == [500] * 100
    assert torch.bincount(y_test).tolist() == [100] * 100
    centre = ImageSet.of((x, y, x_test, y_test)).centre.flatten() / 255
    assert centre.tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=1e-4)  # as published


def test_missing_images_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="VARPROP_DATA") as error:
        data.cifar100()
    assert "\n" not in str(error.value)


def test_standardised_images_have_mean_zero_and_variance_one_in_each_channel() -> None:
    images = ImageSet.of(made_up(channels=3, size=32))
    x = images.standardised(images.x)
    assert images.x.dtype == torch.uint8
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-5)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([1] * 3, abs=1e-3)


def test_held_out_images_are_the_last_ones_for_training(images: ImageSet) -> None:
    part = images.held_out(20)
    assert torch.equal(torch.cat([part.x, part.x_test]), images.x)
    assert torch.equal(torch.cat([part.y, part.y_test]), images.y)


def test_a_shift_moves_whole_images_and_repeats_their_border() -> None:
    x = torch.arange(36.0).view(1, 1, 6, 6).expand(200, 2, 6, 6)
    seen = set()
    padded = nn.functional.pad(x[:1], (2, 2, 2, 2), mode="replicate")
    windows = {(i, j): padded[0, :, i : i + 6, j : j + 6] for i in range(5) for j in range(5)}
    for moved in shifted(x, 2):
        seen.update(at for at, window in windows.items() if torch.equal(window, moved))
        assert any(torch.equal(window, moved) for window in windows.values())
    assert len(seen) == 25


def test_half_of_the_images_are_mirrored() -> None:
    x = torch.arange(4).view(1, 1, 1, 4).expand(1000, 1, 1, 4)
    first = Augmentation(flip=True)(x)[:, 0, 0, 0]
    assert set(first.tolist()) == {0, 3}
    assert 400 < (first == 3).sum() < 600
    assert torch.equal(Augmentation()(x), x)


def test_a_batch_is_standardised_as_it_is_drawn(images: ImageSet) -> None:
    x, y = Batches(images, Augmentation())[[3, 5]]
    assert torch.equal(x, images.standardised(images.x[[3, 5]]))
    assert torch.equal(y, images.y[[3, 5]])


# -------------------- networks


@pytest.mark.parametrize("pooled", [False, True])
def test_the_networks_have_the_width_of_the_paper(pooled: bool) -> None:
    shapes = {1: [(20, 1, 5, 5), (50, 20, 5, 5), (500, 800), (10, 500)]}
    shapes[3] = [(192, 3, 5, 5), (192, 192, 5, 5), (1000, 4800), (10, 1000)]
    for channels, size in ((1, 28), (3, 32)):
        net = lenet(channels, 10, pooled)
        assert [tuple(p.shape) for p in net.parameters() if p.dim() > 1] == shapes[channels]
        assert net(torch.zeros(2, channels, size, size)).shape == (2, 10)
        assert net[0].weight.std().item() == pytest.approx((2 / (25 * channels)) ** 0.5, rel=0.2)


def test_rows_start_from_the_same_means(images: ImageSet) -> None:
    plain, ours = (table2.ROWS[row].objective(images, seed=3).net for row in ("plain", "ours"))
    assert torch.equal(plain[0].weight, ours[0].weight)
    assert torch.equal(plain[-1].weight, ours[-1].weight)


# -------------------- schedule


def test_the_rate_goes_up_and_down_once() -> None:
    rates = [one_cycle(k / 100) for k in range(101)]
    peak = rates.index(max(rates))
    assert (rates[0], rates[peak], rates[-1]) == pytest.approx((0.05, 1, 0), abs=1e-9)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_adam_follows_the_cycle() -> None:
    net = vp.variational(nn.Linear(2, 1))
    adam = Schedule(epochs=2, rate=0.1, cycle=True, logvar=0.5).optimiser(net, steps=5)
    seen = []
    for _ in range(10):
        before = net.weight_logvar.clone()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        adam.step()
        seen.append(
            (before - net.weight_logvar).max().item()
        )  # with a constant gradient, Adam moves by the rate
    assert seen == pytest.approx([0.05 * one_cycle(k / 10) for k in range(10)], rel=1e-3)
    assert adam.param_groups[0]["lr"] == pytest.approx(2 * adam.param_groups[1]["lr"])


def test_a_killed_run_goes_on_bit_for_bit(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = table2.Task(made_up, dict, batch=32, flip=True)
    recipe = replace(table2.ROWS["varout"], augmented=2)
    schedule = Schedule(epochs=3, rate=0.003, cycle=True)

    def train(name: str) -> vp.ELBO:
        return table2.train(recipe, task, images, schedule, 1, tmp_path / name, False)[0]

    whole = train("whole")
    drawn = Batches.__getitem__
    calls = []

    def killed(self: Batches, rows: list[int]) -> tuple[Tensor, Tensor]:
        calls.append(rows)
        if len(calls) == 7:  # in the second epoch
            raise KeyboardInterrupt
        return drawn(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "__getitem__", killed)
        with pytest.raises(KeyboardInterrupt):
            train("killed")
    resumed = train("killed")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


# -------------------- predictions


def certain(logits: Tensor) -> vp.predictive.ClassPredictive:
    return vp.likelihoods.Categorical().predictive(logits)


def test_the_temperature_undoes_what_made_a_network_too_sure() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4))
    x = torch.randn(5000, 5)
    y = torch.distributions.Categorical(logits=net(x)).sample()
    right = net(x).detach()
    with torch.no_grad():
        net[0].weight *= 4
        net[0].bias *= 4
    assert image_predictions.scale(net, x, y) == pytest.approx(4, rel=0.1)
    torch.testing.assert_close(net(x), right, rtol=0.1, atol=0.1)


def test_drawn_networks_of_a_sure_posterior_are_the_plain_network(images: ImageSet) -> None:
    elbo = table2.ROWS["dvi"].objective(images, seed=0)
    with torch.no_grad():
        for _, q in vp.posteriors(elbo.net):
            q.logvar.fill_(-30.0)
    p = image_predictions.drawn([elbo], images.x_test, images, draws=3)
    plain = elbo.net(images.standardised(images.x_test)).softmax(1)
    torch.testing.assert_close(p.probs, plain, rtol=1e-3, atol=1e-4)
    assert p.mutual_information.max() < 1e-4


def test_drawn_networks_differ_and_average_to_the_prediction() -> None:
    torch.manual_seed(0)
    net = vp.variational(nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), logvar=-2.0)
    elbo = vp.ELBO(net, vp.DVI, vp.likelihoods.Categorical(), vp.priors.Normal(), n_data=10)
    x = torch.randint(0, 255, (20, 1, 3, 3), dtype=torch.uint8)
    images = ImageSet.of((x, torch.arange(20) % 3, x, torch.arange(20) % 3))
    own = image_predictions.predict([elbo], x, images, passes=1)
    by_drawing = image_predictions.drawn([elbo], x, images, draws=4000)
    torch.testing.assert_close(by_drawing.probs, own.probs, rtol=0, atol=0.03)
    torch.testing.assert_close(by_drawing.mutual_information, own.mutual_information, rtol=0, atol=0.03)


def test_reliability_adds_up_to_the_calibration_error() -> None:
    torch.manual_seed(0)
    p = certain(2 * torch.randn(500, 4))
    y = torch.distributions.Categorical(p.probs).sample()  # too sure in some bins, not sure enough in others
    bins = curves.reliability(p, y)
    assert sum(share for share, _, _ in bins) == pytest.approx(1)
    error = sum(share * abs(accuracy - confidence) for share, confidence, accuracy in bins)
    assert error == pytest.approx(curves.scores(p, y)["ece"], abs=1e-6)


def test_rejection_leaves_what_is_certain() -> None:
    sure = certain(torch.tensor([[9.0, 0.0]]).repeat(90, 1))
    unsure = certain(torch.tensor([[0.1, 0.0]]).repeat(10, 1))
    p = vp.predictive.concatenate([unsure, sure])
    y = torch.cat([torch.ones(10), torch.zeros(90)]).long()
    left = curves.rejection(p, y)
    assert left[0] == pytest.approx(0.9)
    assert left[1] == pytest.approx(90 / 95)
    assert left[2:] == [1.0] * 18
    assert sum(curves.entropies(p)) == pytest.approx(1)
    assert curves.aurocs(sure, unsure)["entropy"] == 1.0


# -------------------- a cell


@pytest.mark.usefixtures("small")
def test_cells_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table2.ROWS, "ours", replace(table2.ROWS["ours"], members=2))
    command = [
        "--quiet",
        "--methods",
        "vbp",
        "varout",
        "plain-scaled",
        "ours",
        "--datasets",
        "MNIST",
        "--out",
        str(tmp_path),
    ]
    table2.main([*command, "--runs", "2"])
    path = tmp_path / "short" / "vbp" / "MNIST-1.json"
    cell = json.loads(path.read_text())
    assert set(cell["own"]) == {"error", "log_likelihood", "ece", "brier"}
    assert (cell["audit"]["images"], len(cell["curves"][0])) == (20, 2)
    assert set(cell["auroc"]["noise"]) == {"entropy", "mutual_information"}
    folders = tmp_path / "short" / "ours", tmp_path / "short" / "plain-scaled"
    ours, scaled = (json.loads((folder / "MNIST-0.json").read_text()) for folder in folders)
    assert (len(ours["curves"]), ours["configuration"]["augmented"]) == (2, 1)
    assert "audit" not in scaled
    assert scaled["temperature"] > 0
    printed = capsys.readouterr().out
    both = [json.loads(path.with_name(f"MNIST-{run}.json").read_text()) for run in (0, 1)]
    error = 50 * sum(run["own"]["error"] for run in both)
    assert f"| MNIST | vbp | 2 | 2 | {error:.2f} ± " in printed
    assert " | 0.85 | " in printed
    figures.main(["--cells", str(tmp_path / "short"), "--out", str(tmp_path / "figures")])
    drawn = sorted(path.stem for path in (tmp_path / "figures").glob("*.png"))
    assert drawn == ["table2-entropies", "table2-rejection", "table2-reliability"]
    before = path.stat().st_mtime_ns
    table2.main([*command, "--runs", "2"])
    assert path.stat().st_mtime_ns == before


@pytest.mark.usefixtures("small")
def test_the_cost_of_an_epoch_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epochs.main(["--rounds", "1", "--rows", "64", "--out", str(tmp_path / "epochs.json")])
    rows = json.loads((tmp_path / "epochs.json").read_text())["rows"]
    assert list(rows) == ["plain", "vbp", "dvi", "varout"]
    assert rows["plain"]["ratio"] == 1
    assert "| plain | " in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_validation_never_sees_the_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compute(recipe: object, task: object, images: ImageSet, *_: object) -> dict[str, object]:
        seen.append(images)
        return {
            "own": {"error": 0.0, "log_likelihood": 0.0, "ece": 0.0, "brier": 0.0},
            "seconds_per_epoch": 0.0,
            "auroc": {},
        }

    monkeypatch.setattr(table2, "compute", compute)
    table2.main(
        ["--datasets", "MNIST", "--methods", "vbp", "--validate", "--runs", "1", "--out", str(tmp_path)]
    )
    x, y, *_ = made_up()
    assert torch.equal(torch.cat([seen[0].x, seen[0].x_test]), x)
    assert torch.equal(torch.cat([seen[0].y, seen[0].y_test]), y)
