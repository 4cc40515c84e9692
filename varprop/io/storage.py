"""Files that are either whole or not there."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Write a file beside `path` and move it there once it is complete; on an error `path` is unchanged."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # With the process in its name, so that two writers spoil nothing for each other.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
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


def discard_partials(path: str | Path) -> None:
    """Delete what writers of `path` left behind that were killed; for a path that nobody else is writing."""
    path = Path(path)
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)
