"""Training in several processes: the result of one, whatever their number, and a clear end when one dies."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch._dynamo  # the first step of an optimiser imports it: the fork server does so once for all
from lightning_fabric import Fabric
from lightning_fabric.strategies import DataParallelStrategy, DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import varprop as vp
from varprop.training import groups, shares

N = 53
torch.manual_seed(7)
X = torch.randn(N, 3, dtype=torch.float64)
Y = X[:, :1].abs() + 0.1 * torch.randn(N, 1, dtype=torch.float64)
WEIGHT = torch.rand(N, dtype=torch.float64) + 0.5
TIMELESS = ["epoch", "loss", "data_fit", "kl"]
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 10, "lr": 0.05}


def objective(method: vp.Method = vp.VBP, seed: int = 0) -> vp.ELBO:
    torch.manual_seed(seed)
    net = vp.variational(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)), logvar=-5.0).double()
    return vp.ELBO(net, method, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=N).double()


def served() -> DDPStrategy:
    """Processes of a fork server that has imported everything; importing takes longer than training."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    return DDPStrategy(start_method="forkserver")


def several(elbo: vp.ELBO, data: Any, processes: int, **options: Any) -> pd.DataFrame:
    return vp.fit(elbo, data, devices=processes, accelerator="cpu", strategy=served(), **options)


def distance(a: vp.ELBO, b: vp.ELBO) -> float:
    return max(float((value - b.state_dict()[name]).abs().max()) for name, value in a.state_dict().items())


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Rows in a random order, one after another."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for i in torch.randperm(N).tolist():
            yield X[i], Y[i]


def rows(shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=shuffle, **options)


# -------------------------------------------------------------------------------------------- the same result

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # The last of the batches has 3 rows, fewer than 4 processes.
    "tensors": ((X, Y), {"noise": "exact", "schedule": "cosine", "kl_warmup": 2, "clip": 0.5}),
    "weights": ((X, Y, WEIGHT), {}),
    "early stopping": ((X, Y), {"validation": 0.2, "patience": 1, "lr": 1.0, "epochs": 8}),
    "dataset": (TensorDataset(X, Y), {"validation": 0.2}),
    "loader": (rows(generator=torch.Generator()), {"validation": rows()}),
    "stream": (DataLoader(Stream(), batch_size=10), {"noise": "exact"}),
}


@pytest.mark.parametrize("name", CASES)
def test_four_processes_give_the_result_of_one(name: str) -> None:
    data, options = CASES[name]
    options = {**OPTIONS, **options}
    alone, together = objective(), objective()
    expected = vp.fit(alone, data, **options)
    found = several(together, data, 4, **options)
    assert distance(alone, objective()) > 0.01
    assert distance(alone, together) < 1e-6
    columns = [*TIMELESS, "validation"] if "validation" in options else TIMELESS
    pd.testing.assert_frame_equal(found[columns], expected[columns], rtol=1e-6, check_dtype=False)
    assert together.seen == N
    assert not together.training


def test_a_sampler_that_pads_does_not_change_the_weight_of_a_row() -> None:
    """Torch's sampler repeats a row, so that 2 processes have 27 of 53 each."""
    data = TensorDataset(X, Y)
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    assert len(sampler) == 27
    alone, together = objective(), objective()
    vp.fit(alone, rows(shuffle=False), **OPTIONS)
    several(together, DataLoader(data, batch_size=5, sampler=sampler), 2, **OPTIONS)
    assert distance(alone, together) < 1e-6


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "data", [(X, Y), rows(), DataLoader(Stream(), 10)], ids=["tensors", "rows", "stream"]
)
def test_the_shares_of_all_processes_are_the_batches(data: Any, processes: int) -> None:
    of_each = []
    for rank in range(processes):
        torch.manual_seed(3)
        of_each.append(list(shares.batches(data, 10, place(rank, processes), shuffle=True)))
    for k, size in enumerate([10, 10, 10, 10, 10, 3]):
        parts = [share[k] for share in of_each]
        assert sum(part.rows for part in parts) == size
        assert sum(part.weight for part in parts) == pytest.approx(processes)
        assert all(len(part.batch[0]) == max(part.rows, 1) for part in parts)
    seen = torch.cat([share.batch[0][: share.rows] for part in of_each for share in part])
    assert torch.equal(seen.sort(0).values, X.sort(0).values)


def place(rank: int, processes: int) -> Any:
    """A Fabric that says it is one of several, which have no need to talk."""
    alone = Fabric(accelerator="cpu", devices=1)
    return SimpleNamespace(
        global_rank=rank,
        world_size=processes,
        strategy=alone.strategy,
        to_device=alone.to_device,
        setup_dataloaders=alone.setup_dataloaders,
        broadcast=lambda value: value,
    )


def test_every_process_draws_its_own_noise() -> None:
    """With the same noise in both halves of a batch, the result would be that of other noise."""
    drawn = []
    for rank in range(3):
        torch.manual_seed(3)
        next(iter(shares.batches((X, Y), 10, place(rank, 3), shuffle=True)))
        drawn.append(torch.randn(5))
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    torch.manual_seed(3)
    torch.randperm(N)
    assert torch.equal(drawn[0], torch.randn(5)), "the first process draws as one alone"
    assert len(several(objective(vp.LOCAL_REPARAM), (X, Y), 2, **OPTIONS)) == 3


SCRIPT = """
import os, sys
import torch
import varprop as vp
from tests.test_processes import OPTIONS, X, Y, objective

if __name__ == "__main__":
    elbo = objective()
    vp.fit(elbo, (X, Y), devices=2, accelerator="cpu", **OPTIONS)
    if os.environ.get("RANK", "0") == "0":
        torch.save(elbo.state_dict(), sys.argv[1])
"""


def test_torchrun_gives_the_result_of_one_process(tmp_path: Path) -> None:
    script, result = tmp_path / "script.py", tmp_path / "result.pt"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, *launcher, str(script), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    alone, together = objective(), objective(seed=1)
    vp.fit(alone, (X, Y), **OPTIONS)
    together.load_state_dict(torch.load(result, weights_only=True))
    assert distance(alone, together) < 1e-6


def test_spawned_processes_give_the_result_of_one() -> None:
    alone, together = objective(), objective()
    vp.fit(alone, (X, Y), **OPTIONS)
    vp.fit(together, (X, Y), devices=2, accelerator="cpu", **OPTIONS)
    assert distance(alone, together) < 1e-6
    assert "MASTER_PORT" not in os.environ


# ---------------------------------------------------------------------------------------- a process that dies


class Deadly(Dataset[tuple[Tensor, ...]]):
    """Kills the second process in its second epoch, once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.read = folder, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        self.read += 1
        if os.environ.get("LOCAL_RANK") == "1" and self.read > 40 and not (self.folder / "dead").exists():
            (self.folder / "dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return X[i], Y[i]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a signal of POSIX systems")
def test_a_killed_process_ends_the_run_and_another_number_goes_on(tmp_path: Path) -> None:
    path, data = tmp_path / "run.pt", Deadly(tmp_path)
    elbo, alone = objective(), objective()
    before = {name: value.clone() for name, value in elbo.state_dict().items()}
    with pytest.raises(ChildProcessError, match=r"died.*; the last whole epoch is in .*run.pt, give resume"):
        several(elbo, data, 2, checkpoint=path, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in elbo.state_dict().items())
    assert torch.load(path, weights_only=True)["progress"]["epoch"] == 1
    expected = vp.fit(alone, data, **OPTIONS)
    found = several(elbo, data, 3, checkpoint=path, resume=True, **OPTIONS)
    assert distance(alone, elbo) < 1e-6
    assert found.loss.tolist() == pytest.approx(expected.loss.tolist())


def test_without_a_checkpoint_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"died.*; nothing was kept, give `checkpoint`"):
        several(objective(), Deadly(tmp_path), 2, **OPTIONS)


# --------------------------------------------------------------------------------------------------- refusals


def test_an_error_in_the_processes_is_that_of_one() -> None:
    x = X.clone()
    x[3, 1] = math.nan
    with pytest.raises(FloatingPointError, match=r"^fit: the loss is not finite in epoch 0"):
        several(objective(), (x, Y), 2, **OPTIONS)
    with pytest.raises(ValueError, match="n_data=53, the data has 52 rows"):
        several(objective(), (X[:-1], Y[:-1]), 2, **OPTIONS)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"the optimizer cannot be sent to another process .* torchrun"):
        several(objective(), (X, Y), 2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2, "accelerator": "cpu", "optimizer": "lbfgs"}, "needs all rows in one process"),
        ({"devices": 2, "fabric": Fabric(accelerator="cpu", devices=1)}, "and so does devices"),
        ({"strategy": "magic"}, "fit: .*strategy"),
        ({"accelerator": "magic"}, "fit: .*accelerator"),
        ({"precision": "magic"}, "Precision 'magic' is invalid"),
        ({"devices": 2, "strategy": DataParallelStrategy()}, "DataParallelStrategy does not keep"),
    ],
)
def test_words_that_cannot_be_followed_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        vp.fit(objective(), (X, Y), **options)
    assert "\n" not in str(error.value)


def test_precision_reaches_predictions_too() -> None:
    data, elbo = (X.float(), Y.float()), objective().float()
    single = vp.fit(objective().float(), data, validation=0.2, epochs=1)
    double = vp.fit(elbo, data, validation=0.2, precision="64-true", epochs=1)
    assert next(elbo.parameters()).dtype is torch.float64
    assert single.validation[0] == pytest.approx(double.validation[0], rel=1e-4)


# --------------------------------------------------------------------------------------- members and tables


def test_members_end_in_two_processes_where_they_end_in_one() -> None:
    """Three members: two in the first process, one in the second."""
    three = [objective(seed=seed) for seed in range(3)]
    data = [t.expand(3, *t.shape) for t in (X, Y, WEIGHT)]
    options: dict[str, Any] = {"epochs": 2, "batch_size": 10, "seeds": [5, 6, 7], "validation": data}
    alone, together = deepcopy(three), deepcopy(three)
    expected = groups.fit(alone, *data, **options)
    found = groups.fit(together, *data, devices=2, **options)
    assert max(distance(a, b) for a, b in zip(alone, together, strict=True)) < 1e-6
    assert min(distance(a, b) for a, b in zip(alone, three, strict=True)) > 1e-3
    columns = ["epoch", "replica", "loss", "validation"]
    pd.testing.assert_frame_equal(found[columns], expected[columns], rtol=1e-6)
    assert all(member.seen == N for member in together)
