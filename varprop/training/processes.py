"""Training in several processes, which lightning-fabric starts; the death of one is one clear error."""

from __future__ import annotations

import atexit
import builtins
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

import pandas as pd
import torch
from torch.distributed import DistError
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ..objectives import ELBO
from .batches import Data

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.strategy import Strategy

    from .plan import Plan

Train: TypeAlias = "Callable[[Fabric, ELBO, Data, Plan], pd.DataFrame]"
"""Trains an objective in place and returns the history."""
Result = TypeVar("Result")
Remedy: TypeAlias = Callable[[], str]


def engine(
    fabric: Fabric | None,
    devices: int | str | list[int] | None = None,
    num_nodes: int | None = None,
    strategy: str | Strategy | None = None,
    accelerator: str | None = None,
    precision: str | int | None = None,
) -> Fabric:
    """The Fabric that was given, or one made of words for it; by default one device, a GPU if there is one.

    Several devices of one machine get processes that live as long as `fit` (Fabric's "ddp_spawn"), unless
    torchrun or a scheduler has started them.
    """
    words = {
        "devices": devices,
        "num_nodes": num_nodes,
        "strategy": strategy,
        "accelerator": accelerator,
        "precision": precision,
    }
    said = {name: word for name, word in words.items() if word is not None}
    if fabric is not None:
        if said:
            raise ValueError(
                f"fit: the fabric says where to train, and so does {next(iter(said))}; give one of them."
            )
        return _checked(fabric)
    from lightning_fabric import Fabric  # takes seconds to import

    several = devices not in (None, 1, "1") or num_nodes not in (None, 1)
    if strategy is None and several and num_nodes in (None, 1) and not _started_elsewhere():
        said["strategy"] = "ddp_spawn"
    try:
        made = Fabric(**{"devices": 1, **said})  # type: ignore[arg-type]
    except (ValueError, TypeError, RuntimeError, ModuleNotFoundError) as error:
        # Fabric does not know a word, or cannot follow it on this machine.
        raise ValueError(f"fit: {_first_sentence(error)}") from error
    return _checked(made)


def one_device() -> Fabric:
    return engine(None)


def launch(fabric: Fabric, train: Train, elbo: ELBO, data: Data, plan: Plan) -> pd.DataFrame:
    """Train in the processes of a Fabric that has not started them yet."""
    remedy = partial(_how_to_go_on, plan.checkpoint)
    if not _starts_functions(fabric):
        return start(fabric, partial(_in_this_process, train, elbo, data, plan), remedy)
    for name, part in {"optimizer": plan.optimizer, "schedule": plan.schedule, "objective": elbo}.items():
        _check_travels(name, part)
    with TemporaryDirectory(prefix="varprop-") as folder:
        job = _Job(train, deepcopy(elbo), data, plan, Path(folder) / "result.pt")
        start(fabric, job, remedy)
        content = torch.load(job.result, weights_only=True)
    name, _ = next(elbo.named_parameters())
    elbo.to(content["elbo"][name].dtype).load_state_dict(content["elbo"])
    elbo.eval()
    elbo.seen = elbo.n_data
    return pd.DataFrame(content["history"])


def start(fabric: Fabric, job: Callable[[Fabric], Result], remedy: Remedy) -> Result:
    """Let every process of a Fabric do a job. An error of one ends all, and is raised here.

    :param remedy: says what to do after the death of one.
    """
    ForkingPickler.register(torch.Generator, _reduced)
    with _clear_errors(fabric, remedy), _own_port():
        result: Result = fabric.launch(job)
        return result


def _in_this_process(train: Train, elbo: ELBO, data: Data, plan: Plan, fabric: Fabric) -> pd.DataFrame:
    if _is_one_of_several():
        atexit.unregister(_leave)
        atexit.register(_leave)
    return train(fabric, elbo, data, plan)


def _is_one_of_several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _leave() -> None:
    """End the connection to the other processes: its threads may abort a script that ends before they do."""
    if _is_one_of_several():
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class _Job:
    """What each of the processes does."""

    train: Train
    elbo: ELBO
    data: Data
    plan: Plan
    result: Path
    """Where the first process writes what it learned: a pipe, which is read at the end, holds too little."""

    def __call__(self, fabric: Fabric) -> None:
        elbo = deepcopy(self.elbo)  # whose tensors came in memory that all processes share
        history = self.train(fabric, elbo, self.data, self.plan)
        if fabric.is_global_zero:
            torch.save({"history": history.to_dict("records"), "elbo": elbo.state_dict()}, self.result)


def _reduced(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    """A generator as bytes: torch sends its state as a tensor that is gone before a process can read it."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _checked(fabric: Fabric) -> Fabric:
    """Refuse engines that cut parameters into pieces: a method reads the weights of every layer itself."""
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.parallel import ParallelStrategy

    strategy = fabric.strategy
    if isinstance(strategy, ParallelStrategy) and not isinstance(strategy, DDPStrategy):
        raise ValueError(
            f"fit: {type(strategy).__name__} does not keep every parameter whole in every process, which the "
            'rules of varprop need; use strategy="ddp".'
        )
    return fabric


def _started_elsewhere() -> bool:
    """Whether torchrun or a scheduler has started this process, as one of several."""
    from lightning_fabric.plugins.environments.lsf import LSFEnvironment
    from lightning_fabric.plugins.environments.mpi import MPIEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    known = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    return any(environment.detect() for environment in known)


def _starts_functions(fabric: Fabric) -> bool:
    """Whether the processes run a function, rather than the script from its beginning."""
    return getattr(fabric.strategy, "_start_method", "popen") != "popen"


def _check_travels(name: str, part: object) -> None:
    try:
        pickle.dumps(part)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fit: the {name} cannot be sent to another process ({error}); define its functions and classes "
            "at the top of a module, or start the script with torchrun."
        ) from error


@contextmanager
def _own_port() -> Iterator[None]:
    """Forget the port that Fabric chose for a run, which another program may use before the next."""
    before = os.environ.get("MASTER_PORT")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MASTER_PORT", None)


@contextmanager
def _clear_errors(fabric: Fabric, remedy: Remedy) -> Iterator[None]:
    """One sentence for a process that died, and the error of one that failed."""
    try:
        yield
    except ProcessExitedException as error:
        raise _died(f"process {error.error_index} of {fabric.world_size} died", error, remedy) from None
    except ProcessRaisedException as error:
        _raise_again(error, remedy)
    except (DistError, RuntimeError) as error:
        if fabric.world_size > 1 and _is_lost(str(error)):
            raise _died(f"another of the {fabric.world_size} processes died", error, remedy) from error
        raise


def _raise_again(error: ProcessRaisedException, remedy: Remedy) -> NoReturn:
    """An error of a process, which arrives as the text of its traceback."""
    kind, _, message = str(error).strip().splitlines()[-1].partition(": ")
    found = getattr(builtins, kind, None)
    if _is_lost(str(error)):
        raise _died("another process died", error, remedy) from error
    if (
        isinstance(found, type)
        and issubclass(found, Exception)
        and message.startswith(("fit: ", "replicas.fit: "))
    ):
        raise found(message) from None
    raise error


def _is_lost(text: str) -> bool:
    return any(words in text for words in ("by peer", "Broken pipe", "Connection refused", "remote process"))


def _died(what: str, error: Exception, remedy: Remedy) -> ChildProcessError:
    signal = getattr(error, "signal_name", None)
    reason = f" of {signal}" if signal else ""
    return ChildProcessError(f"fit: {what}{reason}; {remedy()}.")


def _how_to_go_on(checkpoint: str | Path | None) -> str:
    if checkpoint is not None and Path(checkpoint).exists():
        return f"the last whole epoch is in {checkpoint}, give resume=True to go on from it"
    return "nothing was kept, give `checkpoint` to be able to go on from the last whole epoch"


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".") + "."
