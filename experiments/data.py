"""The data sets of the paper, read from the folder VARPROP_DATA."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor

SPLITS = dict.fromkeys(
    ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine-red", "yacht"), 20
) | {"protein": 5}
"""The nine regression sets and their published numbers of splits."""

LARGEST = 2**30
"""Bytes that a file may unpack to; the largest data set has a fifth of them."""

BUNDLED: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "diabetes": load_diabetes,
    "breast cancer": load_breast_cancer,
    "digits": load_digits,
    "iris": load_iris,
    "wine": load_wine,
}
"""Data sets that come with scikit-learn."""

OPENML = {
    "boston": (531, (506, 13), "MEDV", ()),
    "concrete": (44959, (1030, 8), "strength", ()),
    "energy": (44960, (768, 8), "heating_load", ("cooling_load",)),
    "kin8nm": (44980, (8192, 8), "y", ()),
    "naval": (
        44969,
        (11934, 16),
        "gt_compressor_decay_state_coefficient",
        ("gt_turbine_decay_state_coefficient",),
    ),
    "protein": (44963, (45730, 9), "RMSD", ()),
    "wine-red": (44972, (1599, 11), "quality", ()),
}
"""The number of a set on OpenML, its shape, its target, and columns that are other targets."""


@dataclass(frozen=True)
class Splits:
    """The training and test parts of several splits, standardised by the training part.

    The split is the first dimension: x is (splits, n, features) and y is (splits, n, 1).
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    y_scale: Tensor
    """The standard deviation of each split's training targets, the unit of standardised errors."""
    numbers: tuple[int, ...]

    def inner(self, share: float = 0.2) -> Splits:
        """Splits of the training parts, for choosing recipes; the last `share` of the rows is tested on."""
        n = round(self.x.shape[1] * (1 - share))
        return replace(self, x=self.x[:, :n], y=self.y[:, :n], x_test=self.x[:, n:], y_test=self.y[:, n:])


def regression(name: str, numbers: tuple[int, ...] | None = None) -> Splits:
    """The splits of a UCI set with these numbers; all of them by default."""
    x, y, train, test = uci(name)
    numbers = tuple(range(len(train))) if numbers is None else numbers
    return _standardised(name, x, y, [(train[k], test[k]) for k in numbers], numbers)


def gaps(name: str) -> Splits:
    """The splits of `gap_rows`."""
    x, y, *_ = uci(name)
    rows = gap_rows(x)
    return _standardised(name, x, y, rows, range(len(rows)))


def gap_rows(x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test rows for each feature, with its middle third as the test part (Foong et al. 2019).

    The training data then have a gap, where the uncertainty should be larger.
    """
    first, last = len(x) // 3, 2 * len(x) // 3
    orders = x.argsort(0, kind="stable").T
    return [(np.delete(order, slice(first, last)), order[first:last]) for order in orders]


def _standardised(
    name: str, x: np.ndarray, y: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray]], numbers: Iterable[int]
) -> Splits:
    parts = []
    for train, test in rows:
        x_mean, x_std = x[train].mean(0), x[train].std(0)
        y_mean, y_std = y[train].mean(), y[train].std()
        features, target = (x - x_mean) / np.where(x_std > 0, x_std, 1), ((y - y_mean) / y_std)[:, None]
        parts.append((features[train], target[train], features[test], target[test], np.asarray(y_std)))
    z, t, z_test, t_test, scale = (
        torch.tensor(np.stack(part), dtype=torch.float32) for part in zip(*parts, strict=True)
    )
    return Splits(name, z, t, z_test, t_test, scale, tuple(numbers))


def uci(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features, target, and the row indices of each split's training and test part.

    The splits are those of Hernández-Lobato and Adams (2015).
    """
    if name not in SPLITS:
        raise SystemExit(f"There is no data set {name!r}; there are {', '.join(SPLITS)}.")
    path = folder() / "uci" / f"{name}.npz"
    if path.exists():
        with _refusing(path):
            x, y, train, test = _arrays(path, "X", "y", "train_idx", "test_idx")
            if not (x.ndim == 2 and y.shape == (len(x),) and x.dtype.kind in "iuf" and y.dtype.kind in "iuf"):
                raise ValueError(f"its X is {x.dtype} {x.shape} and its y {y.dtype} {y.shape}")
            for rows in (train, test):
                if rows.ndim != 2 or len(rows) != len(train) or not np.isin(rows, np.arange(len(x))).all():
                    raise ValueError("its splits are no numbers of its rows")
            return x, y, train, test
    x, y = _openml(name)
    return x, y, *published_splits(len(y), SPLITS[name])


def published_splits(n: int, splits: int) -> tuple[np.ndarray, np.ndarray]:
    """The published splits: permutations by RandomState(1), with the first 90 % for training."""
    random = np.random.RandomState(1)
    rows = np.stack([random.choice(range(n), n, replace=False) for _ in range(splits)])
    return rows[:, : round(0.9 * n)], rows[:, round(0.9 * n) :]


def _openml(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name not in OPENML:
        raise SystemExit(f"{name} is not on OpenML: {_instead(name)}")
    number, shape, target, others = OPENML[name]
    print(
        f"VARPROP_DATA has no uci/{name}.npz: downloading {name} from OpenML (set {number}); "
        "the order of its rows may differ from the paper's."
    )
    from sklearn.datasets import fetch_openml

    try:
        table = fetch_openml(data_id=number, as_frame=True, parser="auto").frame.astype(float)
        x, y = table.drop(columns=[target, *others]).to_numpy(), table[target].to_numpy()
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"{name} could not be downloaded from OpenML ({error}): {_instead(name)}") from None
    if x.shape != shape:
        raise SystemExit(f"{name} from OpenML has shape {x.shape}, not {shape}: {_instead(name)}")
    return x, y


def _instead(name: str) -> str:
    return f"set VARPROP_DATA to a folder that contains uci/{name}.npz."


def folder() -> Path:
    return Path(os.environ.get("VARPROP_DATA", ""))


def _present(path: Path) -> Path:
    if not path.exists():
        wanted = Path(*path.parts[-3:])
        raise SystemExit(f"{path.name} was not found: set VARPROP_DATA to a folder that contains {wanted}.")
    return path


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """End with one sentence where a file is damaged or forged."""
    try:
        yield
    except Exception as error:  # numpy, zipfile, gzip and Pillow raise many kinds of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        raise SystemExit(f"{path.name} is damaged, or no data set ({reason}): fetch it again.") from error


def _arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of an .npz file. None takes more memory than its header is followed by, and that has a bound."""
    with zipfile.ZipFile(path) as archive:
        entries = [archive.getinfo(f"{name}.npy") for name in names]
        if (size := sum(entry.file_size for entry in entries)) > LARGEST:
            raise ValueError(f"it unpacks to {size:,} bytes")
        return [_array(archive.read(entry)) for entry in entries]


def _array(content: bytes) -> np.ndarray:
    file = io.BytesIO(content)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
    shape, fortran, dtype = read_header(file)
    # numpy's own reader would reserve whatever memory the shape claims.
    values = np.frombuffer(content, dtype, offset=file.tell()).copy()
    return values.reshape(shape, order="F" if fortran else "C")


# -------------------- images

Images = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training images and labels, test images and labels; images are (n, channels, height, width), uint8."""


def mnist(kind: str = "MNIST") -> Images:
    """The 28 × 28 images of MNIST or, for kind "FashionMNIST", of Fashion-MNIST."""
    raw = folder() / kind / "raw"
    parts = [
        _idx(raw / f"{part}-{what}-ubyte.gz")
        for part in ("train", "t10k")
        for what in ("images-idx3", "labels-idx1")
    ]
    return tuple(t.unsqueeze(1) if t.dim() == 3 else t.long() for t in parts)  # type: ignore[return-value]


def fashion_mnist() -> Images:
    return mnist("FashionMNIST")


def strangers() -> dict[str, Tensor]:
    """Out-of-distribution test images: they have the size of MNIST's, but show no digits."""
    letters = _idx(folder() / "notMNIST_test" / "t10k-images-idx3-ubyte.gz").unsqueeze(1)
    path = _present(folder() / "KMNIST_test" / "kmnist-test-imgs.npz")
    with _refusing(path):
        (characters,) = _arrays(path, "arr_0")
        images = torch.tensor(characters).unsqueeze(1)
    return {"FashionMNIST": fashion_mnist()[2], "KMNIST": images, "notMNIST": letters}


def _idx(path: Path) -> Tensor:
    """An array in the IDX format: its rank in byte 3, its shape as big-endian integers, then its bytes."""
    with _refusing(_present(path)):
        with gzip.open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise ValueError(f"it unpacks to more than {LARGEST:,} bytes")
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
    """Images stored as lossless sprites of ten by ten images."""
    from PIL import Image

    def sprite(content: np.ndarray) -> np.ndarray:
        image = Image.open(io.BytesIO(content.tobytes()), formats=("WEBP",))
        if image.size != (320, 320):
            raise ValueError(f"it has a sprite of {image.size[0]} by {image.size[1]} pixels")
        return np.asarray(image.convert("RGB"))

    with _refusing(_present(path)):
        webp, offsets, y = _arrays(path, "webp", "offsets", labels)
        if len(offsets) * 320 * 320 * 3 > LARGEST:
            raise ValueError(f"it has {len(offsets):,} sprites")
        sprites = np.stack([sprite(webp[a:b]) for a, b in pairwise(offsets)])
        tiles = torch.tensor(sprites).view(-1, 10, 32, 10, 32, 3)
        return tiles.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, 32, 32), torch.tensor(y).long()
