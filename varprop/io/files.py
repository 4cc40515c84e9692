"""Model files: a folder with the weights as safetensors and the rest as JSON. Loading runs no code."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
from torch import Tensor, nn

from ..likelihoods import Likelihood
from ..methods import Method
from ..model import Fitted
from ..objectives import ELBO
from ..priors import Prior
from .description import ModelFileError, make_estimator, make_table
from .objective import Description, Given, describe_objective, make_objective
from .storage import discard_remains, replacing

FORMAT = 4
"""What this version writes. It reads 1, where a table's numbers were scaled twice, 2, without folds, and 3,
without earlier posteriors."""
DESCRIPTION = "model.json"


def save(
    model: ELBO | Fitted, folder: str | Path, *, preprocessing: Mapping[str, object] | None = None
) -> None:
    """Write a trained objective or a fitted estimator to a folder: `model.json` and the weights it names.

    A network of nested `nn.Sequential` with layers of `torch.nn` is described in the file. Of any other
    network, and of a method, likelihood or prior that is not the library's, only the weights are kept, and
    `load` has to be given the part. The description is replaced last and in one step, so that a failed save
    leaves the old model.

    :param preprocessing: what was done to the data, as anything that JSON can hold; `preprocessing(folder)`
        reads it.
    """
    if not isinstance(model, ELBO | Fitted):
        raise ModelFileError(
            f"save: {type(model).__name__} is neither an ELBO nor one of varprop's estimators."
        )
    description: Description = {"preprocessing": dict(preprocessing or {}), "estimator": None}
    members: Sequence[ELBO] = [model] if isinstance(model, ELBO) else model.model_.members
    if isinstance(model, Fitted):
        description |= model.description()
    description |= {"objective": describe_objective(members[0]), "members": len(members)}
    weights = members[0] if description["estimator"] is None else nn.ModuleList(members)
    write(folder, description, weights.state_dict())


def load(
    folder: str | Path,
    net: nn.Module | None = None,
    *,
    method: Method | None = None,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Any:
    """Read what `save` or `varprop fit` wrote, onto the CPU: an objective, an estimator, or a table's model.

    :param net: the network, if the file cannot describe it, with random weights like the saved one; it takes
        the values of the file.
    :param method: the method, if the file cannot describe it; so are `likelihood` and `prior`.

    >>> import tempfile
    >>> net = vp.variational(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    >>> elbo = vp.ELBO(net, vp.VBP, vp.likelihoods.Normal(), vp.priors.Normal(10.0), n_data=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vp.save(elbo, folder)
    ...     again = vp.load(folder)
    >>> bool((again.predict(torch.ones(1, 2)).var == elbo.predict(torch.ones(1, 2)).var).all())
    True
    """
    description, weights = read(folder)
    given = Given(net, method, likelihood, prior)
    try:
        objective, estimator = description["objective"], description["estimator"]
        for name, part in vars(given).items():
            if part is None and objective[name] is None:
                _refuse(folder, f"does not describe its {name}; pass it, as in load(folder, {name}=...)")
        if estimator is None:
            elbo = make_objective(objective, given)
            elbo.load_state_dict(weights, assign=True)
            return elbo.eval()
        # The number of members is that of the weights: a file could claim any other.
        n = len({name.split(".")[0] for name in weights})
        if n != description["members"]:
            _refuse(
                folder, f"says that it has {description['members']!r:.20} members, and has weights of {n}"
            )
        members = [make_objective(objective, given) for _ in range(n)]
        nn.ModuleList(members).eval().load_state_dict(weights, assign=True)
        return make_table(description["preprocessing"], make_estimator(estimator, members))
    except ModelFileError:
        raise
    except Exception as error:  # a constructor may raise anything on arguments that no save has written
        _refuse(folder, f"does not fit its weights or the parts given ({_first_line(error)})", error)


def preprocessing(folder: str | Path) -> Description:
    """The preprocessing that was saved with a model."""
    return read(folder)[0]["preprocessing"]


# -------------------------------------------------------------------------------------------------- the files


def write(folder: str | Path, description: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Write a description and its weights so that a reader finds either the old pair or the new one."""
    from .. import __version__

    folder = Path(folder)
    content = safetensors.torch.save(
        {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    )
    try:
        # The checksum is of what a reader will see: tuples as lists, keys as strings.
        full = json.loads(
            json.dumps({"format": FORMAT, "varprop": __version__, **description}, allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"save: the description cannot be written as JSON: {_first_line(error)}; give plain values."
        ) from error
    if folder.exists() and not folder.is_dir():
        raise ModelFileError(f"save: {folder} is a file; give a folder.")
    checksum = _checksum(full, content)
    with replacing(_weights(folder, checksum)) as file:
        file.write(content)
    # From this rename on, the folder holds the new model; before it, the old one.
    with replacing(folder / DESCRIPTION) as file:
        file.write(json.dumps({"sha256": checksum, **full}, indent=2).encode())
    for other in folder.glob("weights-*.safetensors"):
        if other != _weights(folder, checksum):
            other.unlink(missing_ok=True)
    discard_remains(folder)


def read(folder: str | Path) -> tuple[Description, dict[str, Tensor]]:
    """The description and the weights of a folder, checked to be what was written."""
    folder = Path(folder)
    try:
        text = _content(folder / DESCRIPTION).decode("utf-8")
        description = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        _refuse(folder, f"has no readable {DESCRIPTION} ({error.strerror})", error)
    except (ValueError, RecursionError) as error:
        _refuse(folder, f"has a {DESCRIPTION} that is damaged or no JSON", error)
    version = description.get("format") if isinstance(description, dict) else None
    if not isinstance(version, int) or not re.fullmatch("[0-9a-f]{64}", str(description.get("sha256"))):
        _refuse(folder, f"has a {DESCRIPTION} that varprop did not write")
    if version > FORMAT:
        writer = str(description.get("varprop"))[:20]
        _refuse(
            folder,
            f"was written by varprop {writer} in format {version}, this version reads up to {FORMAT}; "
            f"upgrade varprop",
        )
    checksum = description.pop("sha256")
    try:
        content = _content(_weights(folder, checksum))
    except OSError as error:
        _refuse(folder, f"lacks its weights, {_weights(folder, checksum).name} ({error.strerror})", error)
    try:
        unchanged = _checksum(description, content) == checksum
    except RecursionError as error:
        _refuse(folder, f"has a {DESCRIPTION} that is nested too deeply", error)
    if not unchanged:
        _refuse(folder, "was changed or cut short after it was written: its checksum is wrong")
    try:
        return description, safetensors.torch.load(content)
    except Exception as error:
        _refuse(folder, f"has weights that are no safetensors ({_first_line(error)})", error)


def _content(path: Path) -> bytes:
    """The bytes of a file. A link to one is followed, but a pipe or a device would never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.read_bytes()


def _unique(pairs: list[tuple[str, object]]) -> Description:
    """An object of JSON; one that says two things under one name may mean either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _finite(text: str) -> float:
    """A number of JSON, which knows no infinity and no NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


def _weights(folder: Path, checksum: str) -> Path:
    return folder / f"weights-{checksum[:16]}.safetensors"


def _checksum(description: Mapping[str, object], weights: bytes) -> str:
    text = json.dumps(description, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode() + b"\0" + weights).hexdigest()


def _refuse(folder: str | Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ModelFileError(f"load: {folder} {reason}.") from cause


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")[:200]
