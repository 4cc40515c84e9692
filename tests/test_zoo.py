"""The zoo: its networks can be built, and each call is recorded with its error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from experiments import zoo, zoo_networks, zoo_peers
from experiments.zoo_networks import ZOO, Built, Entry
from varprop.methods.base import chosen

OWN = [name for name, entry in ZOO.items() if entry.package == "torch"]


def test_sixty_networks_that_others_wrote() -> None:
    assert len(set(ZOO) - set(OWN)) >= 60


@pytest.mark.parametrize("name", ZOO)
def test_a_network_is_built(name: str) -> None:
    if ZOO[name].package != "torch":
        pytest.importorskip(ZOO[name].package, reason="see experiments/zoo.txt", exc_type=ImportError)
    built = zoo.prepared(ZOO[name].build)
    with torch.no_grad():
        f = chosen(built.net(*built.args, **built.kwargs), built.output)
    assert f.isfinite().all()
    assert f.std() > 0


def test_a_cell_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--networks", "perceptron", "--draws", "100", "--out", str(tmp_path)]
    zoo.main(arguments)
    cell = json.loads((tmp_path / "perceptron.json").read_text())
    assert not any(cell["calls"].values())
    assert set(cell["calls"]) == set(zoo.CALLS)
    assert 0.7 < cell["ratios"]["0.01"]["correlated"]["median"] < 1.4
    assert "| perceptron | 928 | yes | yes |" in capsys.readouterr().out
    written = (tmp_path / "perceptron.json").stat().st_mtime_ns
    zoo.main([*arguments, "--again"])
    assert (tmp_path / "perceptron.json").stat().st_mtime_ns == written  # nothing failed


class Odd(nn.Module):
    """A layer and a function without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(self.layer(x))


def test_a_failure_is_recorded_with_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "odd", Entry("torch", lambda: Built(Odd(), (torch.randn(2, 3),))))
    zoo.run("odd", 2, tmp_path, again=False)
    cell = json.loads((tmp_path / "odd.json").read_text())
    assert cell["calls"]["variational"] is None
    assert "no rule for" in cell["calls"]["DVI"]
    assert "| odd | DVI | NoRuleError:" in zoo.failures(tmp_path)


def test_variances_are_relative_to_the_weights() -> None:
    net = vp.variational(nn.Linear(50, 50))
    zoo.scale(net, 0.1)
    ((_, q),) = vp.posteriors(net)
    torch.testing.assert_close(q.std, (0.1 * q.mean.square().mean().sqrt()).expand_as(q.std))


def test_running_statistics_are_those_of_noise_and_nothing_stays_zero() -> None:
    def build() -> Built:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        nn.init.zeros_(net[2].weight)
        return Built(net, (5 * torch.randn(2, 4),))

    net = zoo.prepared(build).net
    assert not net.training
    assert net[1].momentum == 0.1
    assert net[1].num_batches_tracked == 5
    assert net[2].weight.any()


def test_few_positions_of_a_map() -> None:
    f = vp.Gaussian(torch.arange(128.0).view(1, 2, 8, 8), torch.ones(1, 2, 8, 8))
    assert zoo_networks.few_pixels(f).shape == (1, 2, 4, 4)
    assert torch.equal(zoo_networks.few_pixels(f.mean), f.mean[..., ::2, ::2])


def test_other_packages_are_judged_by_the_same_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(built: Built, net: nn.Module) -> zoo_peers.Predict:
        return lambda: vp.correlated(net, *built.args)

    def missing(built: Built, net: nn.Module) -> zoo_peers.Predict:
        raise ImportError("No module named 'missing'")

    monkeypatch.setattr(zoo_peers, "PEERS", {"right": right, "missing": missing})
    zoo_peers.main(["--networks", "perceptron", "--draws", "200", "--out", str(tmp_path)])
    peers = json.loads((tmp_path / "perceptron.json").read_text())["peers"]
    assert peers["right"]["ratios"]["0.01"]["median"] == pytest.approx(1, abs=0.2)
    assert peers["missing"]["error"] == "ImportError: No module named 'missing'"
    assert "| right | 1 of 1 |" in capsys.readouterr().out
    assert "| missing | 0 of 1 |" in zoo_peers.table(tmp_path)
