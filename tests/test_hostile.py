"""Files from a stranger: model folders, tables and data sets that are damaged or forged.

Whatever is in them, the answer is a result or the documented error: `ModelFileError`, `TableError`, or, for
the data sets of the experiments, `SystemExit` with one sentence. `python -m experiments.many_cases hostile`
tries 100,000 of each.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from torch import nn

import varprop as vp
from experiments import data
from varprop.io import files
from varprop.shell import check_table
from varprop.table import model as tabular
from varprop.table import reading
from varprop.table.encoding import Encoder
from varprop.table.messages import TableError, TableWarning
from varprop.table.target import TargetColumn, with_target
from varprop.table.task import Task

from .many import TRIED, examples

VARIANTS = 10
"""Files that are made of one example, most of them by damage."""

# ----------------------------------------------------------------------------------------------------- damage


@contextmanager
def one_sentence(kind: type[BaseException]) -> Iterator[None]:
    """Nothing may be raised but the documented error, and that says something in one line."""
    message = "refused"
    try:
        yield
    except kind as error:
        message = str(error)
    assert len(message.splitlines()) == 1, message


def damaged(content: bytes, random: Random) -> bytes:
    """The bytes of a file with some of them changed, cut out, repeated or put in, or without its end."""
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(content) + 1)
        end = start + random.choice([0, 1, 1, 2, 8, 40])
        kind = random.choice(["change", "change", "cut", "repeat", "end"])
        middle = b""
        if kind == "change":
            middle = random.choice([random.randbytes(random.randint(0, 8)), b"\xff" * 8, bytes(8), b"9" * 9])
        elif kind == "repeat":
            middle = content[start:end] * random.choice([2, 3, 100])
        content = content[:start] + middle + (b"" if kind == "end" else content[end:])
    return content


WORDS = ["", "..", "../../etc/passwd", "/dev/zero", "__class__", "os.system", "<U1000000000", "(9999999,)f8"]
NUMBERS = [0, -1, 1, 2, 2**31, 2**63, 2**64, 10**12, 10**18, 10**400, 1e308, 1e-320, -0.0]
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
JSON = st.recursive(
    STRANGE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=6) | st.sampled_from(WORDS), inner, max_size=4),
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside a description."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def forged(text: str, paths: list[tuple[Any, ...]], values: list[Any], random: Random) -> dict[str, Any]:
    """A description in which some values were replaced, removed, moved or wrapped."""
    description: dict[str, Any] = json.loads(text)
    for path, other in zip(random.sample(paths, 3), random.sample(paths, 3), strict=True):
        *parents, last = path
        with suppress(LookupError, TypeError):  # where an earlier change has taken the place away
            place = at(description, parents)
            kind = random.choice(["none", "replace", "replace", "remove", "wrap", "deep", "copy", "more"])
            if kind == "remove":
                del place[last]
            elif kind == "wrap":
                place[last] = random.choice([[place[last]], {random.choice(WORDS): place[last]}])
            elif kind == "deep":
                place[last] = nested(random.choice([10, 400, 900]))
            elif kind == "copy":
                place[last] = copy.deepcopy(at(description, other))
            elif kind == "more":
                at(description, path)[random.choice(WORDS)] = random.choice(values)
            elif kind == "replace":
                place[last] = random.choice(values)
    names_as_text: dict[str, Any] = json.loads(json.dumps(description))
    return names_as_text


def at(description: Any, path: Iterable[Any]) -> Any:
    for key in path:
        description = description[key]
    return description


def tensors_file(header: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


@st.composite
def forged_weights(draw: st.DrawFn) -> bytes:
    """A file of tensors whose header claims what it likes: of any size, beyond the end, one over another."""
    size = st.sampled_from([0, 1, 4, 8, 2**31, 2**60, 2**63, -1])
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BOOL", "I64", "BF16", "X", ""]),
            "shape": st.lists(size, max_size=3) | JSON,
            "data_offsets": st.lists(size, min_size=2, max_size=2) | JSON,
        }
    )
    header = draw(
        st.dictionaries(st.sampled_from(["net.0.weight", "", "__metadata__"]), entry | JSON, max_size=3)
    )
    return tensors_file(
        header, draw(st.binary(max_size=16)), draw(st.none() | st.sampled_from([0, 7, 2**32, 2**60]))
    )


# ----------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An objective, an estimator and the model of a table, saved."""
    folder = tmp_path_factory.mktemp("models")
    net = nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    elbo = vp.ELBO(vp.variational(net), vp.DVI, vp.likelihoods.Normal(), vp.priors.FanIn(), n_data=9)
    vp.save(elbo, folder / "objective", preprocessing={"names": ["a"]})
    x = np.linspace(-1, 1, 24).reshape(12, 2)
    options: dict[str, Any] = {"hidden_layer_sizes": (2,), "epochs": 2, "folds": 2, "random_state": 0}
    single = {**options, "folds": 1}
    vp.save(vp.BayesianMLPClassifier(**single).fit(x, np.arange(12) % 2), folder / "estimator")
    small_table(options).save(folder / "table")
    return sorted(folder.iterdir())


def small_table(options: dict[str, Any]) -> tabular.TableModel:
    table = pd.DataFrame({"a": ["1", "2,000", "3", "?"] * 3, "b": ["x", "y", "", "z"] * 3})
    table["d"] = pd.date_range("2024-02-28", periods=12).strftime("%Y-%m-%d")
    table["y"] = [str(i / 7) for i in range(12)]
    return tabular.train(table, TargetColumn.fit(table, ["y"]), **options)


def write_folder(folder: Path, description: bytes, weights: bytes, checksum: str) -> None:
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.json").write_bytes(description)
    files._weights(folder, checksum).write_bytes(weights)


def checksum_of(description: dict[str, Any], weights: bytes) -> str:
    try:
        return files._checksum(description, weights)
    except ValueError:
        return "0" * 64  # no checksum exists for numbers that JSON cannot hold


def loads_or_refuses(folder: Path) -> None:
    TRIED["models"] += 1
    with one_sentence(vp.ModelFileError):
        vp.load(folder)


@given(
    place=st.sampled_from([1, 1, 1, 0, 0, 2]),
    values=st.lists(JSON, min_size=6, max_size=6),
    weights=forged_weights(),
    seed=st.integers(0, 2**32),
)
@examples(12)
def test_a_forged_model_is_loaded_or_refused(
    models: list[Path], place: int, values: list[Any], weights: bytes, seed: int
) -> None:
    """The checksum is right: whoever forges a model can compute it."""
    random, folder = Random(seed), models[0].parent.parent / "forged"
    whole = json.loads((models[place] / "model.json").read_text())
    own_weights = files._weights(models[place], whole.pop("sha256")).read_bytes()
    whole_text, paths = json.dumps(whole), list(places(whole))
    for i in range(VARIANTS):
        description, content = whole, own_weights
        if i == 0:
            content = weights
        elif i == 1:
            content = damaged(own_weights, random)
        else:
            description = forged(whole_text, paths, [*values, *NUMBERS, *WORDS], random)
        checksum = checksum_of(description, content)
        text = json.dumps({"sha256": checksum, **description}).encode()
        write_folder(folder, damaged(text, random) if i == 2 else text, content, checksum)
        loads_or_refuses(folder)


# ----------------------------------------------------------------------------------------------------- tables

CELLS = st.one_of(
    st.text(max_size=6),
    st.integers().map(str),
    st.floats().map(str),
    st.dates().map(str),
    st.sampled_from(
        ["", " ", "NA", "?", "1", "2", "1,5", "1.5", "36,953", "1e999", "-inf", "nan", "49.8%", "$5"]
    ),
    st.sampled_from(
        ["true", "False", "0x10", "1_000", "١٢", "9" * 400, "1e-320", "1e308", "-1e308", "'", '"']
    ),
    st.sampled_from(
        ["=1+1", "<script>alert(1)</script>", "\0", "\ud7ff", "x" * 300, "2024-02-30", "9999-12-31"]
    ),
)
NAMES = st.sampled_from(["a", "b", "d", "y", "id", "", " a", "Unnamed: 0", "a.1", "level_0"]) | st.text(
    max_size=5
)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1", "utf-32", "utf-7"]
SUFFIXES = [
    ".csv",
    ".tsv",
    ".txt",
    "",
    ".csv.gz",
    ".csv.bz2",
    ".csv.xz",
    ".zip",
    ".csv.zst",
    ".tar",
    ".parquet",
]
PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@st.composite
def text_files(draw: st.DrawFn) -> tuple[bytes, str]:
    """A table as text, more or less: its bytes and the suffix of its file."""
    separator = draw(st.sampled_from([",", ";", "\t", "|", ", "]))
    end = draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
    header = draw(st.lists(NAMES, min_size=1, max_size=5))
    width = len(header)
    kinds = draw(
        st.lists(st.sampled_from([CELLS, st.integers(0, 3).map(str)]), min_size=width, max_size=width)
    )
    rows = draw(st.lists(st.tuples(*kinds), max_size=9))
    lines = [header, *map(list, rows)]
    if draw(st.booleans()):
        lines = [[f'"{cell}"' if draw(st.booleans()) else cell for cell in line] for line in lines]
    text = end.join(separator.join(line) for line in lines) + end * draw(st.booleans())
    content = text.encode(draw(st.sampled_from(ENCODINGS)), "replace")
    suffix = draw(st.sampled_from([".csv"] * 8 + SUFFIXES))
    pack = PACKED.get(Path(suffix).suffix)
    return (pack(content) if pack is not None and draw(st.booleans()) else content), suffix


ARROW: list[st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]] = [
    st.just((kind, values))
    for kind, values in [
        (pa.string(), CELLS),
        (pa.float64(), st.floats()),
        (pa.float32(), st.floats(width=32)),
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.uint64(), st.integers(0, 2**64 - 1)),
        (pa.bool_(), st.booleans()),
        (pa.date32(), st.dates()),
        (pa.timestamp("us"), st.integers(-(2**62), 2**62)),
        (pa.timestamp("ns", "Europe/Berlin"), st.integers(-(2**62), 2**62)),
        (pa.duration("us"), st.integers(-(2**62), 2**62)),
        (pa.time64("us"), st.integers(0, 86399_999_999)),
        (pa.decimal128(20, 3), st.decimals(-(10**15), 10**15, places=3)),
        (pa.binary(), st.binary(max_size=6)),
        (pa.list_(pa.int64()), st.lists(st.integers(0, 9), max_size=3)),
        (pa.struct([("a", pa.int64())]), st.fixed_dictionaries({"a": st.integers(0, 9)})),
        (pa.null(), st.none()),
    ]
]


@st.composite
def parquet_files(draw: st.DrawFn) -> tuple[bytes, str]:
    names = draw(st.lists(NAMES, min_size=1, max_size=4))
    rows = draw(st.integers(0, 8))
    arrays = []
    for _ in names:
        kind, values = draw(st.one_of(ARROW))
        values = st.none() | values if draw(st.booleans()) else values
        array = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
        arrays.append(array.dictionary_encode() if kind == pa.string() and draw(st.booleans()) else array)
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_arrays(arrays, names), out, version="2.6")
    return out.getvalue(), draw(st.sampled_from([".parquet", ".parquet", ".pq", ".csv"]))


def uses_or_refuses(use: Callable[[], object]) -> None:
    TRIED["tables"] += 1
    with warnings.catch_warnings(), one_sentence(TableError):
        warnings.simplefilter("ignore", TableWarning)
        use()


def learn(path: Path, task: Task) -> None:
    """What `varprop fit` does with a table, up to the training."""
    check_table(path, (), unusual=False)
    table = pd.concat(reading.chunks(path))
    target = [str(table.columns[-1])]
    complete = with_target(table, target, task)
    column = TargetColumn.fit(complete, target, task)
    tabular._check_sizes(complete.index.to_numpy(), column, column.values(complete))
    x = Encoder.fit(complete.drop(columns=target)).transform(complete)
    assert np.isfinite(x).all()


def predict(path: Path, model: tabular.TableModel) -> None:
    """What `varprop predict` does with a table."""
    table = pd.concat(model.stream(path))
    assert np.isfinite(table.to_numpy()).all()


@pytest.fixture(scope="module")
def model(models: list[Path]) -> tabular.TableModel:
    return tabular.TableModel.load(models[-1])


@given(file=text_files() | text_files() | parquet_files(), seed=st.integers(0, 2**32))
@examples(15)
def test_a_strange_table_is_used_or_refused(
    models: list[Path], model: tabular.TableModel, file: tuple[bytes, str], seed: int
) -> None:
    random, (content, suffix) = Random(seed), file
    path = models[0].parent.parent / f"table{suffix}"
    for i in range(VARIANTS):
        path.write_bytes(content if i < 2 else damaged(content, random))
        task = random.choice(list(Task))
        use = partial(learn, path, task) if i % 2 else partial(predict, path, model)
        uses_or_refuses(use)
    path.unlink()


# -------------------------------------------------------------------------------------------------- data sets


def npy_file(header: str, content: bytes) -> bytes:
    text = header.encode("latin-1", "replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


@st.composite
def npz_files(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """An archive with the right names, more or less, of arrays of any type that claim any shape."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            rows = draw(st.sampled_from([0, 1, 3, 3, 3]))
            columns = draw(st.sampled_from([(), (2,), (2,), (1, 1)]))
            dtype = draw(
                st.sampled_from(["<f8", "<f8", "<i8", "|u1", "<f4", "<U3", "|O", "<c16", "|b1", "<M8[s]"])
            )
            size = int(np.prod((rows, *columns))) * np.dtype(dtype).itemsize
            shape = draw(
                st.sampled_from([(rows, *columns)] * 4 + [(2**60,), (-1,), (2**40, 2**40), "x", (rows,) * 70])
            )
            header = f"{{'descr': '{dtype}', 'fortran_order': {draw(st.booleans())}, 'shape': {shape}, }}"
            body = (
                draw(st.sampled_from([bytes(size), b"\x01" * size]))
                if size % 7
                else draw(st.binary(max_size=64))
            )
            name = draw(st.sampled_from([name] * 9 + ["../" + name, name + " "]))
            archive.writestr(f"{name}.npy", npy_file(header, body))
    return out.getvalue()


@st.composite
def idx_files(draw: st.DrawFn) -> bytes:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 28, 2**31, 2**32 - 1]), max_size=4))
    head = bytes([0, 0, 8, draw(st.sampled_from([len(shape)] * 5 + [0, 3, 255]))])
    content = head + b"".join(struct.pack(">I", n) for n in shape) + draw(st.binary(max_size=64))
    return gzip.compress(content, compresslevel=1, mtime=0)


def sprite_file() -> bytes:
    """A small file as those of CIFAR are, with one sprite."""
    from PIL import Image

    image = io.BytesIO()
    Image.new("RGB", (320, 320), (9, 9, 9)).save(image, "WEBP", lossless=True)
    webp = np.frombuffer(image.getvalue(), np.uint8)
    out = io.BytesIO()
    np.savez(out, webp=webp, offsets=np.array([0, len(webp)]), labels=np.zeros(100, np.uint8))
    return out.getvalue()


SPRITES = sprite_file()
READERS: dict[str, tuple[str, Callable[[Path], object], st.SearchStrategy[bytes]]] = {
    "uci": (
        "uci/boston.npz",
        lambda path: data.uci("boston"),
        npz_files(("X", "y", "train_idx", "test_idx")),
    ),
    "idx": ("images-idx3-ubyte.gz", lambda path: data._idx(path), idx_files()),
    "sprites": (
        "train_1.npz",
        lambda path: data._sprites(path, "labels"),
        npz_files(("webp", "offsets", "labels")) | st.just(SPRITES),
    ),
}


@given(reader=st.sampled_from(sorted(READERS)), draw=st.data(), seed=st.integers(0, 2**32))
@examples(15)
def test_a_strange_data_set_is_read_or_refused(
    folder: Path, reader: str, draw: st.DataObject, seed: int
) -> None:
    name, read, contents = READERS[reader]
    random, content, path = Random(seed), draw.draw(contents), folder / name
    for i in range(VARIANTS):
        path.write_bytes(damaged(content, random) if i else content)
        TRIED["data sets"] += 1
        with one_sentence(SystemExit):
            read(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the data sets."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "uci").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VARPROP_DATA", str(folder))
        yield folder


# --------------------------------------------------------------------------------------------- single attacks


@pytest.fixture
def victim(models: list[Path], tmp_path: Path) -> Path:
    """A copy of the saved objective."""
    return Path(shutil.copytree(models[1], tmp_path / "model"))


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(vp.ModelFileError, match=reason):
        vp.load(folder)


def weights_of(folder: Path) -> Path:
    return next(folder.glob("weights-*"))


def rewritten(folder: Path, weights: bytes | None = None, **change: Any) -> Path:
    """The folder with other contents and the right checksum."""
    description = {**json.loads((folder / "model.json").read_text()), **change}
    del description["sha256"]
    weights = weights_of(folder).read_bytes() if weights is None else weights
    checksum = files._checksum(description, weights)
    write_folder(folder, json.dumps({"sha256": checksum, **description}).encode(), weights, checksum)
    return folder


def test_a_header_that_claims_any_size_is_refused(victim: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**58], "data_offsets": [0, 2**60]}
    for content in (
        tensors_file({}, length=2**60),
        tensors_file({"net.1.1.weight": entry}),
        tensors_file({"net.1.1.weight": {**entry, "shape": [2**40, 2**40]}}),
    ):
        refused(rewritten(victim, content), "no safetensors")


def test_a_description_that_claims_any_size_takes_no_memory(models: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models[0], tmp_path / "members"))
    refused(rewritten(folder, members=10**9), "says that it has 1000000000 members, and has weights of 1")
    text = {"array": ["a"], "dtype": "<U2000000000"}
    folder = Path(shutil.copytree(models[0], tmp_path / "text"))
    estimator = json.loads((folder / "model.json").read_text())["estimator"]
    estimator["learned"]["names_"] = text
    names = vp.load(rewritten(folder, estimator=estimator)).names_
    assert names.nbytes < 100


def test_numbers_that_are_none_and_repeated_names_are_refused(victim: Path) -> None:
    text = (victim / "model.json").read_text()
    for forged_text in (
        text.replace('"n_data": 9', '"n_data": NaN'),
        text.replace('"n_data": 9', '"n_data": 1e999'),
        text.replace('"n_data": 9', '"n_data": 9, "n_data": 9'),
        text.replace('"n_data": 9', f'"n_data": {"[" * 5000}{"]" * 5000}'),
    ):
        assert forged_text != text
        (victim / "model.json").write_text(forged_text)
        refused(victim, "damaged or no JSON|nested too deeply")


def test_links_to_files_are_followed_and_pipes_and_devices_refused(victim: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in list(victim.iterdir()):
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    vp.load(victim)
    for name in ("model.json", weights_of(victim).name):
        (victim / name).unlink()
        os.mkfifo(victim / name)
        refused(victim, "it is no regular file")
        (victim / name).unlink()
        (victim / name).symlink_to("/dev/zero")
        refused(victim, "it is no regular file")
        (victim / name).unlink()
        (victim / name).symlink_to(elsewhere / name)


def test_a_save_does_not_write_through_a_link(victim: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (victim / f".model.json.{os.getpid()}.partial").symlink_to(other)
    (victim / "model.json").unlink()
    (victim / "model.json").symlink_to(other)
    net = vp.variational(nn.Linear(2, 1))
    vp.save(vp.ELBO(net, vp.DVI, vp.likelihoods.Normal(), vp.priors.Normal(), n_data=3), victim)
    assert other.read_text() == "mine"
    vp.load(victim)


def test_an_archive_that_unpacks_to_more_than_its_bound_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LARGEST", 10**6)
    with zipfile.ZipFile(folder / "uci" / "boston.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("X", "y", "train_idx", "test_idx"):
            archive.writestr(
                f"{name}.npy", npy_file("{'descr': '<f8', 'fortran_order': False, }", bytes(10**6))
            )
    with pytest.raises(SystemExit, match="it unpacks to 4,000"):
        data.uci("boston")
    (folder / "bomb.gz").write_bytes(gzip.compress(bytes(2 * 10**6)))
    with pytest.raises(SystemExit, match="it unpacks to more than 1,000,000 bytes"):
        data._idx(folder / "bomb.gz")
