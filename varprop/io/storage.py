"""Files that are either whole or not there, and arrays in files that vanish with them."""

from __future__ import annotations

import glob
import math
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO

import numpy as np
from numpy.typing import DTypeLike


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Write a file beside `path` and move it there once it is complete; an error leaves nothing behind."""
    path = Path(path)
    new = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # With the process in its name, so that two writers spoil nothing for each other.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")
    # Whatever has this name is no file of a living writer, and if it is a link, it is not written through.
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        if not path.exists():
            with suppress(OSError):  # what somebody else has put there since stays
                for folder in new:
                    folder.rmdir()


def discard_partials(path: str | Path) -> None:
    """Delete what writers of `path` left behind that were killed; for a path that nobody else is writing."""
    path = Path(path)
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)


def discard_remains(folder: Path) -> None:
    """Delete what processes of this machine that no longer exist have left half-written in a folder."""
    for partial in folder.glob(f".*.{glob.escape(platform.node())}.*.partial"):
        process = partial.name.split(".")[-2]
        if process.isdecimal() and not _exists(int(process)):
            partial.unlink(missing_ok=True)


def _exists(process: int) -> bool:
    if os.name != "posix":
        return True  # where a signal would end the process, it cannot be asked
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def scratch(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of zeros in a file of the temporary folder, for what may be larger than the memory.

    The file has no name, so that nothing is left of it when the array or the process ends.
    """
    size, folder = math.prod(shape) * np.dtype(dtype).itemsize, gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB left, and {size / 1e9:.1f} GB are needed for the rows of the "
            "table; let the variable TMPDIR name a folder with more."
        )
    with TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)
