"""The data sets of the paper, read from the folder that VARPROP_DATA names."""

from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor

SPLITS = dict.fromkeys(("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine-red", "yacht"), 20) | {"protein": 5}
"""The nine regression sets with their published numbers of splits."""

BUNDLED: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "diabetes": load_diabetes,
    "breast cancer": load_breast_cancer,
    "digits": load_digits,
    "iris": load_iris,
    "wine": load_wine,
}
"""Sets that scikit-learn carries."""

OPENML = {
    "boston": (531, (506, 13), "MEDV", ()),
    "concrete": (44959, (1030, 8), "strength", ()),
    "energy": (44960, (768, 8), "heating_load", ("cooling_load",)),
    "kin8nm": (44980, (8192, 8), "y", ()),
    "naval": (44969, (11934, 16), "gt_compressor_decay_state_coefficient", ("gt_turbine_decay_state_coefficient",)),
    "protein": (44963, (45730, 9), "RMSD", ()),
    "wine-red": (44972, (1599, 11), "quality", ()),
}
"""OpenML's number of a set, its rows and features, its target, and other targets that are no features."""


@dataclass(frozen=True)
class Splits:
    """The training and test parts of several splits, features and targets standardised by the training part.

    The split is the first dimension: x (splits, n, features), y (splits, n, 1).
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    y_scale: Tensor
    """Standard deviation of each split's training targets: the unit of standardised errors."""
    numbers: tuple[int, ...]

    def inner(self, share: float = 0.2) -> Splits:
        """Splits of the training parts alone, to choose recipes by: the last `share` of their rows become the test part."""
        n = round(self.x.shape[1] * (1 - share))
        return Splits(self.name, self.x[:, :n], self.y[:, :n], self.x[:, n:], self.y[:, n:], self.y_scale, self.numbers)


def regression(name: str, numbers: tuple[int, ...] | None = None) -> Splits:
    """The given splits, by default all, of a UCI set."""
    x, y, train, test = uci(name)
    numbers = tuple(range(len(train))) if numbers is None else numbers
    return _standardised(name, x, y, [(train[k], test[k]) for k in numbers], numbers)


def gaps(name: str) -> Splits:
    """For each feature of a UCI set, the rows of its middle third as the test part: a gap in the training data (Foong et al. 2019)."""
    x, y, *_ = uci(name)
    orders = x.argsort(0, kind="stable").T
    first, last = len(y) // 3, 2 * len(y) // 3
    return _standardised(name, x, y, [(np.delete(order, slice(first, last)), order[first:last]) for order in orders], range(len(orders)))


def _standardised(name: str, x: np.ndarray, y: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray]], numbers: Iterable[int]) -> Splits:
    parts = []
    for train, test in rows:
        x_mean, x_std = x[train].mean(0), x[train].std(0)
        y_mean, y_std = y[train].mean(), y[train].std()
        features, target = (x - x_mean) / np.where(x_std > 0, x_std, 1), ((y - y_mean) / y_std)[:, None]
        parts.append((features[train], target[train], features[test], target[test], np.asarray(y_std)))
    z, t, z_test, t_test, scale = (torch.tensor(np.stack(part), dtype=torch.float32) for part in zip(*parts, strict=True))
    return Splits(name, z, t, z_test, t_test, scale, tuple(numbers))


def uci(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features, target, and the rows of each split's training and test part (Hernández-Lobato and Adams 2015)."""
    if name not in SPLITS:
        raise SystemExit(f"There is no data set {name!r}; there are {', '.join(SPLITS)}.")
    path = folder() / "uci" / f"{name}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as d:
            return d["X"], d["y"], d["train_idx"], d["test_idx"]
    x, y = _openml(name)
    return x, y, *published_splits(len(y), SPLITS[name])


def published_splits(n: int, splits: int) -> tuple[np.ndarray, np.ndarray]:
    """The published splits: permutations from RandomState(1), the first 90 % of each for training."""
    random = np.random.RandomState(1)
    rows = np.stack([random.choice(range(n), n, replace=False) for _ in range(splits)])
    return rows[:, : round(0.9 * n)], rows[:, round(0.9 * n) :]


def _openml(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name not in OPENML:
        raise SystemExit(f"{name} is not on OpenML: set VARPROP_DATA to a folder that holds uci/{name}.npz.")
    number, shape, target, others = OPENML[name]
    print(
        f"VARPROP_DATA holds no uci/{name}.npz: fetching {name} from OpenML (set {number}); its order of rows may differ from the paper's."
    )
    from sklearn.datasets import fetch_openml

    try:
        table = fetch_openml(data_id=number, as_frame=True, parser="auto").frame.astype(float)
        x, y = table.drop(columns=[target, *others]).to_numpy(), table[target].to_numpy()
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(
            f"{name} could not be had from OpenML ({error}): set VARPROP_DATA to a folder that holds uci/{name}.npz."
        ) from None
    if x.shape != shape:
        raise SystemExit(f"OpenML's {name} has shape {x.shape}, not {shape}: set VARPROP_DATA to a folder that holds uci/{name}.npz.")
    return x, y


def folder() -> Path:
    return Path(os.environ.get("VARPROP_DATA", ""))


def _present(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(f"{path.name} was not found: set VARPROP_DATA to a folder that holds {Path(*path.parts[-3:])}.")
    return path


# ---------------------------------------------------------------------------------------------------------------- images

Images = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training images and labels, test images and labels; images are bytes, (n, channels, height, width)."""


def mnist(kind: str = "MNIST") -> Images:
    """The 28 × 28 images of MNIST or, with kind "FashionMNIST", of Fashion-MNIST."""
    raw = folder() / kind / "raw"
    parts = [_idx(raw / f"{part}-{what}-ubyte.gz") for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    return tuple(t.unsqueeze(1) if t.dim() == 3 else t.long() for t in parts)  # type: ignore[return-value]


def fashion_mnist() -> Images:
    return mnist("FashionMNIST")


def strangers() -> dict[str, Tensor]:
    """Test images of the size of MNIST's that show no digits."""
    letters = _idx(folder() / "notMNIST_test" / "t10k-images-idx3-ubyte.gz").unsqueeze(1)
    with np.load(_present(folder() / "KMNIST_test" / "kmnist-test-imgs.npz"), allow_pickle=False) as d:
        characters = torch.tensor(d["arr_0"]).unsqueeze(1)
    return {"FashionMNIST": fashion_mnist()[2], "KMNIST": characters, "notMNIST": letters}


def _idx(path: Path) -> Tensor:
    """An array in the format of MNIST: its rank in byte 3, its shape as big-endian integers, its bytes."""
    with gzip.open(_present(path), "rb") as file:
        raw = file.read()
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])).view(shape)


def cifar10() -> Images:
    return _cifar("cifar10", "labels")


def cifar100() -> Images:
    """With the hundred fine labels."""
    return _cifar("cifar100", "fine_labels")


def _cifar(kind: str, labels: str) -> Images:
    train = [_sprites(folder() / kind / f"train_{i}.npz", labels) for i in range(1, 6)]
    x, y = (torch.cat(part) for part in zip(*train, strict=True))
    return x, y, *_sprites(folder() / kind / "test.npz", labels)


def _sprites(path: Path, labels: str) -> tuple[Tensor, Tensor]:
    """Images stored as lossless sprites of ten by ten."""
    from PIL import Image

    with np.load(_present(path), allow_pickle=False) as d:
        webp, offsets, y = d["webp"], d["offsets"], d[labels]
    sprites = np.stack([np.asarray(Image.open(io.BytesIO(webp[a:b])).convert("RGB")) for a, b in pairwise(offsets)])
    images = torch.tensor(sprites).view(-1, 10, 32, 10, 32, 3).permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, 32, 32)
    return images, torch.tensor(y).long()
